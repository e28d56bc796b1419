"""Arrays of three times a worker's limit under Dask: a sort, a matrix product and a transposition.

    python bench/dask-device.py                             # on a card, with CuPy
    python bench/dask-device.py --library sim --limit 64MiB # on the simulator

Prints a line of JSON for each workload and mapping: seconds, bytes copied out of the card, and what an ideal
mapping would copy for the same accesses. `vramp` is vramp.dask.TieredMapping with `device_memory_limit`;
`vramp-pool` has no limit but the pool's, which temporaries share; `dask-cuda` is its DeviceHostFile with
`device_memory_limit`. Every result is checked, after its time was taken. Exit code 1: a result is wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python" / "tests" / "workers"))

import dask
import dask.array as da
import numpy as np
from dask.utils import parse_bytes
from distributed import Client, LocalCluster, wait
from distributed.sizeof import safe_sizeof

import ideal

ITEM = 4
MODULUS = 9973


# What runs in a worker. `xp` is the library of the card.


def library(name: str) -> Any:
    if name == "sim":
        import sim_array

        return sim_array
    import cupy

    return cupy


def numbers(name: str, seed: int, length: int) -> Any:
    """Returns random numbers on the card."""
    if name == "sim":
        return library(name).on_card(np.random.default_rng(seed).random(length, np.float32))
    return library(name).random.default_rng(seed).random(length, dtype=np.float32)


def pattern(name: str, row: int, column: int, shape: tuple[int, int]) -> Any:
    """Returns a chunk whose elements are known by their place, and exact in float32."""
    if name == "sim":
        return library(name).on_card(on_host(row, column, shape))
    cupy = library(name)
    rows = (cupy.arange(row, row + shape[0], dtype=np.int64) * 31 % MODULUS)[:, None]
    columns = (cupy.arange(column, column + shape[1], dtype=np.int64) * 17 % MODULUS)[None, :]
    return ((rows + columns) % 64).astype(np.float32)


def on_host(row: int, column: int, shape: tuple[int, int]) -> Any:
    rows = (np.arange(row, row + shape[0]) * 31 % MODULUS)[:, None]
    columns = (np.arange(column, column + shape[1]) * 17 % MODULUS)[None, :]
    return ((rows + columns) % 64).astype(np.float32)


def split(name: str, first: Any, second: Any, bound: float) -> Any:
    if name == "sim":
        values = np.concatenate([first.view, second.view])
        return [library(name).on_card(part) for part in (values[values < bound], values[values >= bound])]
    cupy = library(name)
    parts = []
    for is_low in (True, False):
        chosen = [each[(each < bound) if is_low else (each >= bound)] for each in (first, second)]
        parts.append(cupy.concatenate(chosen))
    return parts


def take(parts: Any, number: int) -> Any:
    return parts[number]


def in_order(name: str, block: Any) -> Any:
    return library(name).on_card(np.sort(block.view)) if name == "sim" else library(name).sort(block)


def described(name: str, block: Any) -> tuple[float, float, bool, int, float]:
    """Returns the least and the largest element, whether they are in order, how many, and their sum."""
    xp, block = (np, block.view) if name == "sim" else (library(name), block)
    ordered = bool((block[1:] >= block[:-1]).all())
    return float(block[0]), float(block[-1]), ordered, block.size, float(xp.sum(block, dtype=np.float64))


def total(name: str, block: Any) -> float:
    xp, block = (np, block.view) if name == "sim" else (library(name), block)
    return float(xp.sum(block, dtype=np.float64))


def is_pattern(name: str, block: Any, row: int, column: int) -> bool:
    """Returns whether a block is the transposed pattern at a place."""
    if name == "sim":
        return bool((block.view == on_host(column, row, block.shape[::-1]).T).all())
    return bool((block == pattern(name, column, row, block.shape[::-1]).T).all())


def times(name: str, block: Any, vector: Any) -> Any:
    """Returns the product of a block and a vector, in float64 on the host."""
    if name == "sim":
        return block.view.astype(np.float64) @ vector
    cupy = library(name)
    rows = max(1, (256 << 20) // (8 * block.shape[1]))
    parts = [block[at : at + rows].astype(np.float64) @ cupy.asarray(vector) for at in range(0, block.shape[0], rows)]
    return cupy.asnumpy(cupy.concatenate(parts))


def finish(name: str) -> None:
    if name == "cupy":
        library(name).cuda.Device().synchronize()


# Mappings that record their accesses.


def recorded(kind: type) -> type:
    """Returns a mapping's class with `trace`: the accesses to values on the card."""
    from vramp.dask._values import is_device_value

    class Recorded(kind):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.trace: list[Any] = []
            self.sizes: dict[Any, int] = {}
            super().__init__(*args, **kwargs)

        def __setitem__(self, key: Any, value: Any) -> None:
            if is_device_value(value):
                self.sizes[key] = safe_sizeof(value)
                self.trace.append(("set", key, self.sizes[key]))
            super().__setitem__(key, value)

        def __getitem__(self, key: Any) -> Any:
            if key in self.sizes:
                self.trace.append(("get", key, self.sizes[key]))
            return super().__getitem__(key)

        def __delitem__(self, key: Any) -> None:
            if key in self.sizes:
                self.trace.append(("del", key, self.sizes.pop(key)))
            super().__delitem__(key)

    return Recorded


def tiered(worker_local_directory: str, **limits: Any) -> Any:
    from vramp.dask import TieredMapping

    return recorded(TieredMapping)(worker_local_directory, **limits)


def device_host_file(worker_local_directory: str, **limits: Any) -> Any:
    from dask_cuda import device_host_file as module

    plain = module.device_to_host
    counts = {"bytes": 0}

    def counted(value: Any) -> Any:
        counts["bytes"] += safe_sizeof(value)
        return plain(value)

    module.device_to_host = counted
    made = recorded(module.DeviceHostFile)(worker_local_directory, **limits)
    made.copied = counts
    return made


def copied_out(dask_worker: Any) -> int:
    data = dask_worker.data
    copied = getattr(data, "copied", None)
    return int(copied["bytes"] if copied else data.cumulative_metrics["host-write", "bytes"])


def tiers_of(dask_worker: Any) -> Any:
    """Returns the bytes that the buffers moved; None for another mapping."""
    tiers = getattr(getattr(dask_worker.data, "_store", None), "tiers", None)
    stats = tiers and tiers.stats()
    return stats and {name: getattr(stats, name) for name in ("to_host", "from_host", "to_disk", "from_disk", "failures", "waits", "waited_ns")}


def trace_of(dask_worker: Any) -> Any:
    return dask_worker.data.trace


# The workloads: each returns what to wait for first, and a function that makes the result.


def sort(client: Client, name: str, size: int) -> Any:
    """Pairs of chunks exchange their lower and upper values, by one bit of their numbers after the other."""
    bits = 6
    count = 1 << bits
    length = size // ITEM // count
    blocks = [client.submit(numbers, name, at, length, key=f"block-{at}") for at in range(count)]

    def check(done: Any) -> bool:
        ranges = client.gather([client.submit(described, name, block) for block in done])
        sums = sum(client.gather([client.submit(total, name, client.submit(numbers, name, at, length)) for at in range(count)]))
        bounds = [bound for low, high, *_rest in ranges for bound in (low, high)]
        return (
            all(each[2] for each in ranges)
            and bounds == sorted(bounds)
            and sum(each[3] for each in ranges) == count * length
            and math.isclose(sum(each[4] for each in ranges), sums, rel_tol=1e-9)
        )

    def result(blocks: Any) -> Any:
        for bit in reversed(range(bits)):
            step = 1 << bit
            for low in (at for at in range(count) if not at & step):
                bound = ((low >> (bit + 1) << (bit + 1)) + step) / count
                parts = client.submit(split, name, blocks[low], blocks[low + step], bound, key=f"split-{bit}-{low}")
                for side in (0, 1):
                    at = low + side * step
                    blocks[at] = client.submit(take, parts, side, key=f"take-{bit}-{at}")
                del parts
        return [client.submit(in_order, name, block, key=f"sorted-{at}") for at, block in enumerate(blocks)]

    return blocks, result, check


def grid(name: str, rows: int, columns: int, shape: tuple[int, int]) -> Any:
    """Returns an array of `rows` by `columns` chunks."""
    layer = {
        (f"grid-{rows}-{columns}", row, column): (pattern, name, row * shape[0], column * shape[1], shape)
        for row in range(rows)
        for column in range(columns)
    }
    meta = pattern(name, 0, 0, (0, 0))
    chunks = ((shape[0],) * rows, (shape[1],) * columns)
    return da.Array(layer, f"grid-{rows}-{columns}", chunks, meta=meta)


def product(client: Client, name: str, size: int) -> Any:
    """Two arrays of 8 by 2 and 2 by 8 chunks, and their product of 8 by 8."""
    side = int(math.sqrt(size // 96 // ITEM)) // 64 * 64
    arrays = client.persist([grid(name, 8, 2, (side, side)), grid(name, 2, 8, (side, side))])
    a, b = arrays

    def check(made: Any) -> bool:
        vector = np.random.default_rng(5).random(8 * side)
        inner = [
            sum(on_host(k * side, j * side, (side, side)).astype(np.float64) @ vector[j * side : (j + 1) * side] for j in range(8))
            for k in range(2)
        ]
        for i in range(8):
            expected = sum(on_host(i * side, k * side, (side, side)).astype(np.float64) @ inner[k] for k in range(2))
            row = [
                client.submit(times, name, client_future(client, made, (i, j)), vector[j * side : (j + 1) * side])
                for j in range(8)
            ]
            if not np.allclose(sum(client.gather(row)), expected, rtol=1e-4):
                return False
        return True

    return [a, b], lambda given: client.persist(given[0] @ given[1]), check


def client_future(client: Client, made: Any, at: tuple[int, int]) -> Any:
    from distributed import Future

    return Future((made.name, *at), client=client)


def transposition(client: Client, name: str, size: int) -> Any:
    """12 by 8 wide chunks become the transposed ones of another shape."""
    side = int(math.sqrt(size // 96 // ITEM)) // 64 * 64
    flat = client.persist(grid(name, 12, 8, (side // 2, side * 2)))

    def check(made: Any) -> bool:
        rows, columns = made.chunks
        checks = [
            client.submit(is_pattern, name, client_future(client, made, (i, j)), sum(rows[:i]), sum(columns[:j]))
            for i in range(len(rows))
            for j in range(len(columns))
        ]
        return all(client.gather(checks))

    return [flat], lambda given: client.persist(given[0].rechunk((side * 2, side // 2)).T), check


WORKLOADS = {"sort": sort, "product": product, "transposition": transposition}
MAPPINGS = ("vramp", "vramp-pool", "dask-cuda")


def run(options: argparse.Namespace, mapping: str, workload: str) -> dict[str, Any]:
    """Runs one workload in a cluster of its own."""
    limit = parse_bytes(options.limit)
    common = {"dashboard_address": None, "n_workers": 1, "threads_per_worker": options.threads, "memory_limit": 0}
    common["local_directory"] = options.directory
    limits = {"memory_limit": parse_bytes(options.host)}
    if mapping != "vramp-pool":
        limits["device_memory_limit"] = limit
    if mapping == "dask-cuda":
        cluster: Any = LocalCluster(data=(device_host_file, limits), processes=True, **common)
    else:
        import vramp.dask

        devices = "sim" if options.library == "sim" else "0"
        common |= {"pool_limit": limit if mapping == "vramp-pool" else None, "allocators": ["cupy"]}
        cluster = vramp.dask.LocalCluster(devices, data=(tiered, limits), **common)
    with cluster, Client(cluster) as client:
        blocks, work, check = WORKLOADS[workload](client, options.library, options.factor * limit)
        began = time.perf_counter()
        wait(blocks)
        client.run(finish, options.library)
        made_s = time.perf_counter() - began
        began = time.perf_counter()
        done = work(blocks)
        del blocks
        wait(done)
        client.run(finish, options.library)
        took_s = time.perf_counter() - began
        (copied,) = client.run(copied_out).values()
        (trace,) = client.run(trace_of).values()
        (tiers,) = client.run(tiers_of).values()
        right = check(done)
        lru, belady = ideal.by_lru(trace, limit), ideal.by_belady(trace, limit)
        return {
            "workload": workload,
            "mapping": mapping,
            "library": options.library,
            "limit": limit,
            "bytes": options.factor * limit,
            "right": right,
            "made_s": round(made_s, 3),
            "took_s": round(took_s, 3),
            "copied_out": copied,
            "buffers": tiers,
            "ideal_lru": lru,
            "ideal_belady": belady,
            "of_ideal_lru": round(copied / lru, 3) if lru else None,
        }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", choices=("cupy", "sim"), default="cupy")
    parser.add_argument("--limit", default="12GiB", help="of the worker, for values on the card (default 12GiB)")
    parser.add_argument("--factor", type=int, default=3, help="the data is so many times the limit (default 3)")
    parser.add_argument("--host", default="64GiB", help="most bytes of contents on the host (default 64GiB)")
    parser.add_argument("--threads", type=int, default=1, help="of the worker (default 1)")
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="of the worker's files")
    parser.add_argument("--mappings", default=",".join(MAPPINGS))
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--one", nargs=2, metavar=("MAPPING", "WORKLOAD"), help="run one, in this process")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    if options.one:
        try:
            result = run(options, *options.one)
        except Exception as error:
            result = {"workload": options.one[1], "mapping": options.one[0], "right": False, "error": repr(error)[:2000]}
        print(json.dumps(result), flush=True)
        return 0 if result["right"] else 1
    failed = 0
    for workload in options.workloads.split(","):
        for mapping in options.mappings.split(","):
            # A process of its own: no memory of the run before stays on the card.
            command = [sys.executable, *sys.argv, "--one", mapping, workload]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=1200, env=dict(os.environ))
            print(done.stdout.strip().splitlines()[-1] if done.stdout else json.dumps({"failed": command}), flush=True)
            failed |= done.returncode
    return failed


if __name__ == "__main__":
    dask.config.set({"distributed.scheduler.active-memory-manager.start": False})
    sys.exit(main())
