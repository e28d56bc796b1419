"""A worker's event loop runs while values are restored and sent.

A gate in the worker's process holds a restore. Only the worker's loop opens it, at the call of a client: a loop
that waits for the restore never does.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import numpy as np
import pytest
from clusters import MIB, cluster, random_block, to_host
from distributed import Client, wait
from sim_array import SimArray, on_card

from vramp.dask._files import Files
from vramp.dask._values import Contents

COUNT = 2 * MIB // 8

_open = threading.Event()
"""Of the worker's process."""
_held: list[str] = []
"""The threads that the gate held, in the worker's process."""


def close_gate(owner: type, name: str) -> None:
    """Makes a method wait for the gate. The method ends the wait with an exception after half a minute."""
    _open.clear()
    _held.clear()
    method = getattr(owner, name)

    @wraps(method)
    def wait_at_gate(*args: Any) -> Any:
        _held.append(threading.current_thread().name)
        if not _open.wait(30):
            raise RuntimeError("the gate stayed closed")
        return method(*args)

    wait_at_gate._before = method  # type: ignore[attr-defined]
    setattr(owner, name, wait_at_gate)


def open_gate(owner: type, name: str) -> None:
    _open.set()
    method = getattr(owner, name)
    setattr(owner, name, getattr(method, "_before", method))


def held() -> int:
    return len(_held)


async def heartbeat(dask_worker: Any) -> None:
    await dask_worker.heartbeat()


async def evict_all(dask_worker: Any) -> None:
    """Evicts all values from the card. The loop may still have to drop the results of tasks."""
    while dask_worker.data.device:
        dask_worker.data.make_room(1 << 40)
        await asyncio.sleep(0)


async def host_to_disk(dask_worker: Any) -> None:
    while dask_worker.data.host:
        dask_worker.data.evict()
        await asyncio.sleep(0)


async def evict_to_disk(dask_worker: Any) -> None:
    await evict_all(dask_worker)
    await host_to_disk(dask_worker)


@pytest.fixture(scope="module")
def shared() -> Iterator[Client]:
    with cluster(threads_per_worker=2) as client:
        yield client


@pytest.fixture
def client(shared: Client) -> Iterator[Client]:
    yield shared
    shared.cancel(list(shared.futures.values()))


def workers(client: Client) -> tuple[str, str]:
    first, second = client.scheduler_info(n_workers=-1)["workers"]
    return first, second


def beats_while_held(client: Client, worker: str, start: Callable[[], Any], owner: type, name: str) -> Any:
    """Starts what reaches the gate, has ten heartbeats meanwhile, opens the gate. Returns what was started."""
    client.run(close_gate, owner, name, workers=[worker])
    try:
        started = start()
        for _ in range(2000):
            if client.run(held, workers=[worker])[worker]:
                break
        else:
            raise AssertionError("nothing reached the gate")
        for _ in range(10):
            client.run(heartbeat, workers=[worker])
        assert client.run(held, workers=[worker])[worker] == 1
    finally:
        client.run(open_gate, owner, name, workers=[worker])
    return started


def expected(seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).random(COUNT)


def added(first: SimArray, second: SimArray) -> SimArray:
    return on_card(first.view + second.view)


@pytest.mark.parametrize("evict", [evict_all, evict_to_disk])
def test_the_loop_runs_while_inputs_are_restored(client: Client, evict: Callable[[Any], Any]) -> None:
    worker, _ = workers(client)
    made = [client.submit(random_block, seed, (COUNT,), workers=[worker], pure=False) for seed in (1, 2)]
    wait(made)
    client.run(evict, workers=[worker])

    def start() -> Any:
        total = client.submit(added, *made, workers=[worker], pure=False)
        return client.submit(to_host, total, workers=[worker], pure=False)

    result = beats_while_held(client, worker, start, Contents, "restore")
    np.testing.assert_array_equal(result.result(30), expected(1) + expected(2))


def test_a_task_with_its_inputs_at_hand_does_not_wait_for_a_restore(client: Client) -> None:
    worker, _ = workers(client)
    away = client.submit(random_block, 1, (COUNT,), workers=[worker], pure=False)
    wait(away)
    client.run(evict_all, workers=[worker])
    there = client.submit(random_block, 2, (COUNT,), workers=[worker], pure=False)
    wait(there)
    client.run(close_gate, Contents, "restore", workers=[worker])
    try:
        slow = client.submit(to_host, away, workers=[worker], pure=False)
        fast = client.submit(added, there, there, workers=[worker], pure=False)
        wait(fast, timeout=20)
        assert not slow.done()
    finally:
        client.run(open_gate, Contents, "restore", workers=[worker])
    np.testing.assert_array_equal(slow.result(30), expected(1))


@pytest.mark.parametrize("evict", [evict_all, evict_to_disk, held])
def test_the_loop_runs_while_values_are_sent(client: Client, evict: Callable[..., Any]) -> None:
    worker, other = workers(client)
    made = client.submit(random_block, 3, (COUNT,), workers=[worker], pure=False)
    wait(made)
    client.run(evict, workers=[worker])

    def start() -> Any:
        return client.submit(to_host, made, workers=[other], pure=False)

    result = beats_while_held(client, worker, start, Contents, "to_frames")
    np.testing.assert_array_equal(result.result(30), expected(3))


def test_the_loop_runs_while_a_file_is_read(client: Client) -> None:
    worker, other = workers(client)
    made = client.submit(expected, 4, workers=[worker], pure=False)
    wait(made)
    for reader in (worker, other):
        client.run(host_to_disk, workers=[worker])

        def start(reader: str = reader) -> Any:
            return client.submit(np.copy, made, workers=[reader], pure=False)

        result = beats_while_held(client, worker, start, Files, "read")
        np.testing.assert_array_equal(result.result(30), expected(4))
        client.cancel(result)


def fail(*_args: Any) -> None:
    raise OSError("the disk is gone")


def break_files() -> None:
    Files._whole = Files.read  # type: ignore[attr-defined]
    Files.read = fail  # type: ignore[method-assign,assignment]


def repair_files() -> None:
    Files.read = Files._whole  # type: ignore[attr-defined,method-assign]


def test_a_failed_read_fails_the_task_that_needs_it(client: Client) -> None:
    worker, _ = workers(client)
    made = client.submit(expected, 5, workers=[worker], pure=False)
    wait(made)
    client.run(host_to_disk, workers=[worker])
    client.run(break_files, workers=[worker])
    try:
        failed = client.submit(np.copy, made, workers=[worker], pure=False)
        with pytest.raises(OSError, match="the disk is gone"):
            failed.result(30)
    finally:
        client.run(repair_files, workers=[worker])
    again = client.submit(np.copy, made, workers=[worker], pure=False)
    np.testing.assert_array_equal(again.result(30), expected(5))
