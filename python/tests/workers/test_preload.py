"""Workers of real clusters that a preload sets up."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clusters import LIMIT, MIB, random_block, to_host
from distributed import Client, LocalCluster, Nanny, wait

import vramp
import vramp.dask
from vramp.dask import TieredMapping
from vramp.dask._preload import keep_in_tiers

ARGUMENTS = ["--pool-limit", "32MiB", "--device-memory-limit", "16MiB"]
COUNT = 2 * MIB // 8


def described(dask_worker: Any) -> tuple[str, int | None, int, bool]:
    limits = list(dask_worker.data._moves.limits.values())
    one = dask_worker.data is dask_worker.state.data is dask_worker.memory_manager.data
    return type(dask_worker.data).__name__, vramp.pool().limit, limits[0], one


def check(client: Client) -> None:
    """Computes with three times the limit."""
    client.wait_for_workers(1, timeout=60)
    assert list(client.run(described).values()) == [("TieredMapping", LIMIT, LIMIT // 2, True)]
    made = [client.submit(random_block, seed, (COUNT,)) for seed in range(3 * LIMIT // (2 * MIB))]
    wait(made)
    for seed, block in enumerate(made):
        result = client.submit(to_host, block).result(60)
        np.testing.assert_array_equal(result, np.random.default_rng(seed).random(COUNT))
    (spilled,) = client.run(lambda dask_worker: dask_worker.data.spilled_total.memory).values()
    assert spilled >= 2 * LIMIT


def paths() -> str:
    """Returns where a worker finds the package and this module."""
    return os.pathsep.join([str(Path(vramp.__file__).parents[1]), str(Path(__file__).parent)])


def test_the_command_line_starts_a_worker_with_a_preload(tmp_path: Path) -> None:
    environment = {**os.environ, "VRAMP_DEVICE": "sim:h200", "PYTHONPATH": paths()}
    with LocalCluster(n_workers=0, dashboard_address=None) as cluster, Client(cluster) as client:
        command = [sys.executable, "-m", "dask", "worker", cluster.scheduler_address, "--nworkers", "1"]
        command += ["--nthreads", "1", "--no-dashboard", "--local-directory", str(tmp_path)]
        with subprocess.Popen([*command, "--preload", "vramp.dask", *ARGUMENTS], env=environment) as process:
            try:
                check(client)
            finally:
                process.terminate()
                process.wait(60)


def test_a_nanny_starts_a_worker_with_a_preload() -> None:
    with LocalCluster(n_workers=0, dashboard_address=None) as cluster, Client(cluster) as client:

        async def start() -> Nanny:
            variables = {"VRAMP_DEVICE": "sim:h200", "PYTHONPATH": paths()}
            address = cluster.scheduler_address
            return await Nanny(address, nthreads=1, env=variables, preload=["vramp.dask"], preload_argv=ARGUMENTS)

        nanny = cluster.sync(start)
        try:
            check(client)
            first = client.run(os.getpid)
            # A worker that the nanny starts again is set up again.
            client.restart(timeout=60)
            assert client.run(os.getpid) != first
            assert list(client.run(described).values()) == [("TieredMapping", LIMIT, LIMIT // 2, True)]
        finally:
            cluster.sync(nanny.close)


class FakeManager:
    memory_limit = 1 << 30
    max_spill = False

    def __init__(self, data: Any) -> None:
        self.data = data


class FakeWorker:
    """What the preload uses of a worker."""

    def __init__(self, data: Any, directory: Path) -> None:
        self.memory_manager = FakeManager(data)
        self.state = FakeManager(data)
        self.local_directory = directory

    @property
    def data(self) -> Any:
        return self.state.data


def test_data_that_was_given_is_kept_and_keys_are_never_lost(tmp_path: Path) -> None:
    given = TieredMapping(tmp_path)
    worker = FakeWorker(given, tmp_path)
    keep_in_tiers(worker, None)
    assert worker.data is given
    with pytest.raises(RuntimeError, match="1 keys"):
        keep_in_tiers(FakeWorker({"a": 1}, tmp_path), None)
    empty = FakeWorker({}, tmp_path)
    keep_in_tiers(empty, "5MiB")
    assert isinstance(empty.data, TieredMapping) and empty.memory_manager.data is empty.data
