"""A mapping is used by the event loop, by the threads of tasks, and by the handler of a shortage, which runs
in a thread that allocates."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sim_array import full
from support import CountingStore

from vramp.dask import TieredMapping

CHUNK = 2 << 20


def chunk(value: float) -> Any:
    return full(CHUNK // 8, value)


@pytest.fixture
def store() -> CountingStore:
    return CountingStore()


@pytest.fixture
def data(tmp_path: Path, store: CountingStore) -> TieredMapping:
    return TieredMapping(tmp_path, store=store)


class Gate:
    """A hook that waits until it is opened, at its first call."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.open = threading.Event()

    def __call__(self) -> None:
        if not self.reached.is_set():
            self.reached.set()
            assert self.open.wait(30)


class Worker(threading.Thread):
    """A thread whose result or exception is taken with `end`."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self.work = work
        self.result: Any = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self.work()
        except BaseException as error:
            self.error = error

    def end(self) -> Any:
        self.join(30)
        assert not self.is_alive(), "the thread hangs"
        if self.error is not None:
            raise self.error
        return self.result


def test_a_value_that_is_read_while_it_leaves_stays(data: TieredMapping, store: CountingStore) -> None:
    gate = store.hooks["keep"] = Gate()
    data["a"] = chunk(1)
    evictor = Worker(lambda: data.make_room(1))
    assert gate.reached.wait(30)
    held = data["a"]
    gate.open.set()
    evictor.end()
    assert data["a"] is held and set(data.device) == {"a"}
    del held
    assert data.make_room(1) and set(data.host) == {"a"}
    assert store.calls["keep"] == 1, "the copy that was made is still right"


def test_a_key_deleted_while_it_leaves_is_gone(data: TieredMapping, store: CountingStore) -> None:
    gate = store.hooks["keep"] = Gate()
    data["a"] = chunk(1)
    evictor = Worker(lambda: data.make_room(1))
    assert gate.reached.wait(30)
    del data["a"]
    data["a"] = "another value"
    gate.open.set()
    evictor.end()
    assert data["a"] == "another value" and not data.device and data.spilled_total == (0, 0)


def test_two_readers_restore_once_or_share_the_buffer(data: TieredMapping, store: CountingStore) -> None:
    data["a"] = chunk(1)
    assert data.make_room(1)
    gate = store.hooks["lease"] = Gate()
    first = Worker(lambda: data["a"])
    assert gate.reached.wait(30)
    second = Worker(lambda: data["a"])
    gate.open.set()
    assert (first.end().view == 1).all() and (second.end().view == 1).all()
    assert store.copied == CHUNK


def test_a_shortage_inside_a_restore_evicts_others(data: TieredMapping, store: CountingStore) -> None:
    data["a"] = chunk(1)
    assert data.make_room(1)
    data["b"] = chunk(2)
    rooms: list[bool] = []
    store.hooks["lease"] = lambda: rooms.append(data.make_room(CHUNK))
    assert (data["a"].view == 1).all()
    assert rooms == [True] and set(data.host) == {"b"}


def test_a_shortage_inside_an_eviction_evicts_others_and_waits_for_none(
    data: TieredMapping, store: CountingStore
) -> None:
    for at in range(3):
        data[at] = chunk(at)
    rooms: list[bool] = []
    store.hooks["keep"] = lambda: rooms.append(data.make_room(1))
    assert data.make_room(1)
    assert rooms == [False, True, True] and set(data.host) == {0, 1, 2}


def test_a_shortage_waits_for_the_memory_that_another_thread_frees(
    data: TieredMapping, store: CountingStore
) -> None:
    data["a"] = chunk(1)
    gate = store.hooks["keep"] = Gate()
    first = Worker(lambda: data.make_room(1))
    assert gate.reached.wait(30)
    second = Worker(lambda: data.make_room(1))
    gate.open.set()
    assert first.end() and second.end()
    assert store.calls["keep"] == 1


def test_threads_read_write_and_run_short_together(tmp_path: Path, store: CountingStore) -> None:
    data = TieredMapping(tmp_path, device_memory_limit=6 * CHUNK, memory_limit=6 * CHUNK, store=store)
    keys = 24
    for at in range(keys):
        data[at] = chunk(at)
    stop = threading.Event()

    def work(seed: int) -> int:
        chance = random.Random(seed)
        own = 0
        for step in range(60):
            key = chance.randrange(keys)
            assert (data[key].view == key).all()
            if step % 10 == 0:
                data[f"{seed}-{step}"] = chunk(seed)
                own += 1
            if step % 20 == 4:
                assert (data.pop(f"{seed}-{step - 4}").view == seed).all()
                own -= 1
        return own

    def press() -> None:
        while not stop.is_set():
            data.make_room(CHUNK)
            data.evict()

    pressing = Worker(press)
    workers = [Worker(partial(work, seed)) for seed in range(6)]
    left = sum(worker.end() for worker in workers)
    stop.set()
    pressing.end()
    assert len(data) == keys + left
    for at in range(keys):
        assert (data[at].view == at).all()
    # Each was copied out at most once.
    assert store.copied <= (keys + 36) * CHUNK
    data.clear()
    assert data.spilled_total == (0, 0) and not data.fast and not data.device
