"""Streams that a library destroys: vramp forgets each of them first."""

from __future__ import annotations

import threading

import pytest
from array_support import FakeStream, destroyed, pool

import vramp
from vramp import _adaptors
from vramp._adaptors import StreamTable, forget_stream, streams_of


def test_a_stream_that_only_the_table_refers_to_is_ended(
    pool: vramp.Pool, destroyed: list[int]
) -> None:
    table = StreamTable(pool)
    stream = FakeStream(0x1000)
    table.add(0x1000, stream)
    assert table.sweep() == 0 and len(table) == 1, "the test refers to it"
    del stream
    assert destroyed == []
    assert table.sweep() == 1 and len(table) == 0
    assert destroyed == [0x1000]


def test_a_stream_is_forgotten_before_it_is_destroyed(
    pool: vramp.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    class Watched(FakeStream):
        def __del__(self) -> None:
            order.append("destroyed")

    monkeypatch.setattr(_adaptors, "forget_stream", lambda pool, raw: order.append("forgotten"))
    table = StreamTable(pool)
    table.add(0x1000, Watched(0x1000))
    table.sweep()
    assert order == ["forgotten", "destroyed"]


def test_a_stream_that_was_closed_lives_by_its_anchor_until_it_is_forgotten(
    pool: vramp.Pool, destroyed: list[int]
) -> None:
    """As cuda.core: the program's object is closed, and what it stands for is destroyed with the last share."""

    class Closable:
        is_closed = False

    table = StreamTable(pool)
    stream = Closable()
    table.add(0x1000, stream, FakeStream(0x1000))
    assert table.is_anchored(0x1000) and table.sweep() == 0, "the program has it open"
    with pool.malloc(4096, 0x1000):
        stream.is_closed = True
        assert destroyed == []
    assert table.sweep() == 1 and destroyed == [0x1000] and not table.is_anchored(0x1000)
    pool.audit()


def test_a_stream_that_was_kept_without_an_anchor_gets_one(pool: vramp.Pool, destroyed: list[int]) -> None:
    """A program passes one stream to a pool and to a library's resource on it."""
    table = StreamTable(pool)
    stream = FakeStream(0x2000)
    table.add(0x2000, stream)
    table.add(0x2000, stream, FakeStream(0x1000))
    assert table.is_anchored(0x2000) and table.sweep() == 0
    del stream
    assert table.sweep() == 1 and sorted(destroyed) == [0x1000, 0x2000]


def test_ten_thousand_streams_leave_few_in_the_table(
    pool: vramp.Pool, destroyed: list[int]
) -> None:
    table = StreamTable(pool)
    for index in range(10_000):
        raw = 0x1000 + 16 * index
        stream = FakeStream(raw)
        table.add(raw, stream)
        with pool.malloc(4096, raw):
            pass
        del stream
        assert len(table) <= 9
    assert len(destroyed) >= 9_990
    pool.audit()


def test_a_stream_that_cannot_be_forgotten_is_kept_and_tried_again(
    pool: vramp.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(pool: vramp.Pool, raw: int) -> None:
        raise vramp.CaptureError("the stream captures")

    table = StreamTable(pool)
    table.add(0x1000, FakeStream(0x1000))
    with monkeypatch.context() as patch:
        patch.setattr(_adaptors, "forget_stream", refuse)
        assert table.sweep() == 0 and len(table) == 1
    assert table.sweep() == 1


def test_streams_of_a_closed_pool_are_ended(destroyed: list[int]) -> None:
    closed = vramp.open("sim:h200")
    table = streams_of(closed)
    table.add(0x1000, FakeStream(0x1000))
    closed.close()
    assert table.sweep() == 1
    assert destroyed == [0x1000]


def test_a_table_ends_with_its_pool(destroyed: list[int]) -> None:
    dropped = vramp.open("sim:h200")
    streams_of(dropped).add(0x1000, FakeStream(0x1000))
    count = len(_adaptors._tables)
    del dropped
    assert len(_adaptors._tables) == count - 1
    assert destroyed == [0x1000]


def test_memory_of_a_forgotten_stream_can_be_freed_and_reused(pool: vramp.Pool) -> None:
    block = pool.malloc(8 << 20, 0x1000)
    forget_stream(pool, 0x1000)
    block.free(0)
    with pool.malloc(8 << 20):
        assert pool.stats().live == 8 << 20


def test_the_default_streams_are_never_forgotten(pool: vramp.Pool) -> None:
    for raw in (0, 1, 2):
        forget_stream(pool, raw)
    with pool.malloc(4096, 0):
        pass


def test_threads_add_and_sweep_at_the_same_time(pool: vramp.Pool) -> None:
    table = StreamTable(pool)
    failures: list[BaseException] = []

    def work(first: int) -> None:
        try:
            for index in range(300):
                raw = 0x100000 * first + 16 * index
                table.add(raw, FakeStream(raw))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    table.sweep()
    assert len(table) == 0
