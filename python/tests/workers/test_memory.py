"""A worker whose data is larger than its card and its host, with Dask's default settings: its monitor compares the
process's memory with the limit, evicts, and pauses the worker at 80 %. `bench/dask-memory.py` has more cases."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from distributed import Client
from sim_array import SimArray, full

import vramp.dask

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from length import LONG

MIB = 1 << 20
SIZE = 16 * MIB
COUNT = 60 if LONG else 20


def made(number: int) -> SimArray:
    return full(SIZE // 8, number)


def total(value: SimArray) -> float:
    return float(value.view.sum())


def test_a_worker_with_dasks_defaults_goes_on_when_all_is_full() -> None:
    with vramp.dask.LocalCluster(
        "sim:h200", pool_limit="48MiB", memory_limit="360MiB", dashboard_address=None
    ) as cluster, Client(cluster) as client:
        values = [client.submit(made, number, key=f"made-{number}") for number in range(COUNT)]
        sums = [client.submit(total, value) for value in values]
        deadline = time.monotonic() + 60
        while any(future.status == "pending" for future in sums):
            assert time.monotonic() < deadline, client.run(lambda dask_worker: dask_worker.data.report())
            time.sleep(0.02)
        assert client.gather(sums) == [number * SIZE // 8 for number in range(COUNT)]
