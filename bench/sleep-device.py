"""Times of a pause and a resume on a card: vramp's regions, torch_memory_saver, plain pinned copies.

    python bench/sleep-device.py                       # 16 GiB in segments of 2, 32, 256 MiB and 1 GiB
    python bench/sleep-device.py --total 2GiB --segments 32MiB --systems vramp

Needs a card and NumPy; torch_memory_saver needs PyTorch. Each system runs in a process of its own, which first
copies 16 GiB between the card and 1 GiB of pinned memory: the rates of the others are parts of that one, in the
same direction. Prints a line of JSON for each measurement, and exits with 1 if a byte was wrong.

`first` is a pause for which nothing was pinned before, `ahead` one for which the pinned memory was there,
`again` the next ones, `readonly` those of a region that is only read, and `none` those without a backup. A resume
follows its pause at once, but for `readonly-rested`: the card clears released memory beside the first copies.
`retained` is torch_memory_saver with its `retain_cpu_backup`.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

MIB = 1 << 20
GIB = 1 << 30
STEP = 2 * MIB
"""Each stretch of this length has a value of its own."""
PAGE_WORDS = 1024


class Card:
    """The driver's functions that a test of contents needs, in the primary context of the first card."""

    def __init__(self) -> None:
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.call("cuCtxSetCurrent", context)
        host = ctypes.c_void_p()
        self.call("cuMemHostAlloc", ctypes.byref(host), ctypes.c_size_t(GIB), 0)
        assert host.value is not None
        self.host = host.value
        self.words = np.frombuffer((ctypes.c_char * GIB).from_address(self.host), np.uint32)
        self.words[:] = 0

    def call(self, name: str, *arguments: Any) -> None:
        code = getattr(self.driver, name)(*arguments)
        if code:
            raise RuntimeError(f"{name} failed with CUDA error {code}")

    def synchronize(self) -> None:
        self.call("cuCtxSynchronize")

    def free_bytes(self) -> int:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def fill(self, address: int, size: int, seed: int) -> None:
        for at in range(0, size, STEP):
            value = ctypes.c_uint((seed * 131071 + (address + at) // STEP) & 0xFFFFFFFF)
            words = min(STEP, size - at) // 4
            self.call("cuMemsetD32_v2", ctypes.c_uint64(address + at), value, ctypes.c_size_t(words))

    def is_filled(self, address: int, size: int, seed: int) -> bool:
        for start in range(0, size, GIB):
            part = min(GIB, size - start)
            self.call("cuMemcpyDtoH_v2", ctypes.c_void_p(self.host), ctypes.c_uint64(address + start), ctypes.c_size_t(part))
            for at in range(0, part, STEP):
                value = (seed * 131071 + (address + start + at) // STEP) & 0xFFFFFFFF
                words = self.words[at // 4 : min(at + STEP, part) // 4]
                # All words of the first stretch, and one of each page of the others.
                if not (words[:: PAGE_WORDS if at else 1] == value).all():
                    return False
        return True

    def plain_rates(self) -> dict[str, float]:
        """Bytes a second of plain copies of 16 GiB from the card and to it."""
        memory = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(GIB))
        host, length = ctypes.c_void_p(self.host), ctypes.c_size_t(GIB)

        def out() -> None:
            self.call("cuMemcpyDtoHAsync_v2", host, memory, length, None)

        def back() -> None:
            self.call("cuMemcpyHtoDAsync_v2", memory, host, length, None)

        def rate(copy: Callable[[], None]) -> float:
            copy()
            self.synchronize()
            began = time.perf_counter()
            for _ in range(16):
                copy()
            self.synchronize()
            return 16 * GIB / (time.perf_counter() - began)

        rates = {"pause": rate(out), "resume": rate(back)}
        self.call("cuMemFree_v2", memory)
        return rates


class Run:
    """The measurements of one process."""

    def __init__(self, system: str, total: int, segment: int) -> None:
        self.card = Card()
        self.system, self.total, self.segment = system, total, segment
        self.rates = self.card.plain_rates()
        self.right = True

    def tell(self, case: str, move: str, seconds: float, **more: Any) -> None:
        rate = self.total / seconds
        line = {
            "system": self.system,
            "segment": self.segment,
            "case": case,
            "move": move,
            "ms": round(seconds * 1e3, 2),
            "gib_s": round(rate / GIB, 2),
            "of_plain": round(rate / self.rates[move], 3),
            "plain_gib_s": round(self.rates[move] / GIB, 2),
        }
        print(json.dumps(line | more), flush=True)

    def timed(self, call: Callable[[], Any]) -> float:
        self.card.synchronize()
        began = time.perf_counter()
        call()
        self.card.synchronize()
        return time.perf_counter() - began

    def fill(self, addresses: list[int], seed: int) -> None:
        for address in addresses:
            self.card.fill(address, self.segment, seed)

    def round(self, case: str, pause: Callable[[], Any], resume: Callable[[], Any], rest: float = 0) -> None:
        before = self.card.free_bytes()
        took = self.timed(pause)
        self.tell(case, "pause", took, card_got_gib=round((self.card.free_bytes() - before) / GIB, 3))
        time.sleep(rest)
        self.tell(case, "resume", self.timed(resume))

    def check(self, addresses: list[int], seed: int) -> None:
        if not all(self.card.is_filled(address, self.segment, seed) for address in addresses):
            self.right = False
            print(f"{self.system}: contents differ after a resume", file=sys.stderr)


def vramp(run: Run, ahead: bool) -> None:
    import vramp

    count = run.total // run.segment
    with vramp.open("cuda:0") as pool, contextlib.ExitStack() as stack:
        stream = pool.create_stream()

        def pause() -> None:
            vramp.pause(device=pool)

        def resume() -> None:
            vramp.resume(device=pool)

        @contextlib.contextmanager
        def blocks(tag: str, **options: Any) -> Iterator[list[int]]:
            with vramp.region(tag, device=pool, **options):
                made = [pool.malloc(run.segment, stream) for _ in range(count)]
            yield [block.ptr for block in made]
            for block in made:
                block.free()
            pool.trim()

        if ahead:
            group = 128 * MIB
            groups = -(-run.total // group) + 1
            host = {"index": 0, "capacity": groups * group, "initial_pools": groups}
            stack.enter_context(vramp.Tiers(pool, {"host": [host]}))
            with blocks("ahead") as addresses:
                run.fill(addresses, 1)
                run.round("ahead", pause, resume)
                run.check(addresses, 1)
            return
        with blocks("none", backup="none"):
            for _ in range(3):
                run.round("none", pause, resume)
        with blocks("host") as addresses:
            run.fill(addresses, 2)
            run.round("first", pause, resume)
            run.check(addresses, 2)
            run.fill(addresses, 3)
            for _ in range(2):
                run.round("again", pause, resume)
            run.check(addresses, 3)
        with blocks("weights", readonly=True) as addresses:
            run.fill(addresses, 4)
            run.round("readonly", pause, resume)
            run.round("readonly", pause, resume)
            run.round("readonly-rested", pause, resume, rest=0.3)
            run.check(addresses, 4)


def torch_memory_saver(run: Run) -> None:
    import torch
    from torch_memory_saver.binary_wrapper import BinaryWrapper
    from torch_memory_saver.utils import get_binary_path_from_package

    torch.cuda.init()
    library = BinaryWrapper(str(get_binary_path_from_package("torch_memory_saver_hook_mode_torch"))).cdll
    # The functions that it gives to torch.cuda.memory.CUDAPluggableAllocator: a segment is a call.
    library.tms_torch_malloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    library.tms_torch_malloc.restype = ctypes.c_void_p
    library.tms_torch_free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]

    def pause() -> None:
        library.tms_pause(None)

    def resume() -> None:
        library.tms_resume(None)

    @contextlib.contextmanager
    def blocks(tag: str, backup: bool) -> Iterator[list[int]]:
        library.tms_set_current_tag(tag.encode())
        library.tms_set_enable_cpu_backup(backup)
        library.tms_set_interesting_region(True)
        addresses = [library.tms_torch_malloc(run.segment, 0, None) for _ in range(run.total // run.segment)]
        library.tms_set_interesting_region(False)
        yield addresses
        # A free outside of a region ends the process.
        library.tms_set_interesting_region(True)
        for address in addresses:
            library.tms_torch_free(address, run.segment, 0, None)

    with blocks("none", False):
        for _ in range(3):
            run.round("none", pause, resume)
    with blocks("host", True) as addresses:
        run.fill(addresses, 2)
        run.round("first", pause, resume)
        run.check(addresses, 2)
        library.tms_set_retain_cpu_backup(True)
        run.fill(addresses, 3)
        run.round("again", pause, resume)
        run.round("retained", pause, resume)
        run.check(addresses, 3)


UNITS = {"KiB": 1 << 10, "MiB": MIB, "GiB": GIB}


def size(text: str) -> int:
    for unit, factor in UNITS.items():
        if text.endswith(unit):
            return int(text.removesuffix(unit)) * factor
    return int(text)


SYSTEMS = {
    "vramp": lambda run: vramp(run, ahead=False),
    "vramp-ahead": lambda run: vramp(run, ahead=True),
    "torch_memory_saver": torch_memory_saver,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--total", type=size, default=16 * GIB, help="bytes in the region")
    parser.add_argument("--segments", default="2MiB,32MiB,256MiB,1GiB", help="lengths of its blocks")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="of " + ", ".join(SYSTEMS))
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    systems = options.systems.split(",")
    if unknown := set(systems) - set(SYSTEMS):
        parser.error(f"there is no system {sorted(unknown)}: there are {list(SYSTEMS)}")
    if options.child:
        run = Run(systems[0], options.total, size(options.segments))
        SYSTEMS[systems[0]](run)
        return 0 if run.right else 1
    failed = 0
    for segment in options.segments.split(","):
        for system in systems:
            command = [sys.executable, __file__, "--child", "--total", str(options.total)]
            command += ["--segments", segment, "--systems", system]
            failed |= subprocess.run(command, env=os.environ).returncode != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
