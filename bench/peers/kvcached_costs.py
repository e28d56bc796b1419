"""Times kvcached's operations and vramp's arena for caches in turn, in one process on one card.

    git clone https://github.com/ovg-project/kvcached
    python bench/peers/kvcached_costs.py kvcached [RESULTS.jsonl]      # torch for CUDA, g++, and vramp

kvcached's C++ is built into a temporary folder. Both have keys and values of 32 layers, 2 GiB each, in pages of 2 MiB,
by layer and contiguous (interleaved). A step is a page of all of them; times are medians of the host's clock.
"""

from __future__ import annotations

import json
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

LAYERS, EACH, PAGE = 32, 2 << 30, 2 << 20
ROUNDS = 20


def build(checkout: pathlib.Path, folder: str) -> Any:
    """Builds kvcached's operations."""
    from torch.utils import cpp_extension

    return cpp_extension.load(
        name="vmm_ops",
        sources=[str(path) for path in sorted((checkout / "csrc").glob("*.cpp"))],
        extra_include_paths=[str(checkout / "csrc/inc")],
        extra_cflags=["-O2", "-std=c++17", "-DKVCACHED_USE_CUDA"],
        extra_ldflags=["-lcuda"],
        with_cuda=True,
        build_directory=folder,
    )


def timed(step: Callable[[int], object]) -> float:
    """Returns the median time of a step in microseconds."""
    import torch

    times = []
    for number in range(ROUNDS):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        step(number)
        times.append((time.perf_counter() - begun) * 1e6)
    return statistics.median(times)


def kvcached(ops: Any, contiguous: bool) -> dict[str, float]:
    """Times kvcached's operations."""
    import torch

    ops.init_kvcached("cuda:0", PAGE, contiguous)
    begun = time.perf_counter()
    tensors = ops.create_kv_tensors(2 * EACH, 2, "cuda:0", LAYERS, 2)
    torch.cuda.synchronize()
    start = (time.perf_counter() - begun) * 1e6
    step = PAGE * LAYERS * 2 if contiguous else PAGE
    cold = timed(lambda n: ops.map_to_kv_tensors([2 * n * step]))
    release = timed(lambda n: ops.unmap_from_kv_tensors([2 * n * step]))
    again = timed(lambda n: ops.map_to_kv_tensors([2 * n * step]))
    del tensors
    ops.shutdown_kvcached()
    return {"start": start, "commit": cold, "release": release, "commit again": again}


def vramp(layout: str) -> dict[str, float]:
    """Times vramp's arena."""
    import vramp
    import vramp.kv

    pool = vramp.open("cuda:0")
    pool.malloc(PAGE).free()
    begun = time.perf_counter()
    arena = vramp.kv.arena(pool, tensors=2 * LAYERS, size=EACH, page=PAGE, layout=layout)
    start = (time.perf_counter() - begun) * 1e6
    cold = timed(lambda n: arena.commit([2 * n]))
    park = timed(lambda n: arena.park([2 * n]))
    again = timed(lambda n: arena.commit([2 * n]))

    def release(number: int) -> None:
        arena.park([2 * number])
        arena.release()

    back = timed(release)
    arena.close()
    pool.close()
    return {"start": start, "commit": cold, "park": park, "commit again": again, "release": back}


def main() -> None:
    """Prints a table, and writes the rows to a file if one is given."""
    import torch

    checkout = pathlib.Path(sys.argv[1]).resolve()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        ops = build(checkout, folder)
        for layout, contiguous in (("separate", False), ("interleaved", True)):
            for name, times in (("kvcached", kvcached(ops, contiguous)), ("vramp", vramp(layout))):
                rows.append({"peer": name, "layout": layout, "tensors": 2 * LAYERS, "us": times})
                print(f"{name:10}{layout:13}" + "".join(f"{what} {us:.1f} us   " for what, us in times.items()))
    if len(sys.argv) > 2:
        device = torch.cuda.get_device_name()
        lines = (json.dumps({**row, "device": device, "torch": torch.__version__}) for row in rows)
        pathlib.Path(sys.argv[2]).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
