"""Arenas for caches on the simulator: which pages have memory, what wrong calls say, and what keeps an arena open."""

from __future__ import annotations

import gc
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator

import numpy
import pytest
from conftest import GIB, MIB

import vramp
import vramp.kv

PAGE = 2 * MIB


@pytest.fixture
def arena(pool: vramp.Pool) -> Iterator[vramp.kv.Arena]:
    """4 tensors of 16 pages, in handles of one page."""
    with vramp.kv.arena(pool, tensors=4, size=16 * PAGE, superpage=PAGE) as made:
        yield made


def reserved(pool: vramp.Pool) -> int:
    return pool.stats().reserved


def test_addresses_cost_nothing_and_pages_come_and_go(pool: vramp.Pool, arena: vramp.kv.Arena) -> None:
    before = reserved(pool)
    assert (arena.tensors, arena.pages, arena.page, arena.layout) == (4, 16, PAGE, "separate")
    assert arena.size == 4 * 16 * PAGE and arena.limit is None and arena.pool is pool
    assert arena.stats() == vramp.kv.KvStats(16, 0, 0, 0, 4 * PAGE, None)

    arena.commit([0, 1, range(8, 10)])
    assert arena.stats().committed == 4 and reserved(pool) == before + 16 * PAGE
    arena.park([1, 9])
    assert (arena.stats().committed, arena.stats().parked) == (2, 2)
    assert reserved(pool) == before + 16 * PAGE
    arena.commit(9)
    assert arena.release() == 4 * PAGE and reserved(pool) == before + 12 * PAGE
    assert (arena.stats().committed, arena.stats().parked) == (3, 0)


def test_parked_pages_are_committed_without_a_driver_call(pool: vramp.Pool, arena: vramp.kv.Arena) -> None:
    stream = pool.create_stream()
    arena.commit(range(4), stream)
    numpy.asarray(arena.array(2))[: 4 * PAGE] = 7
    chunks = pool.stats()
    arena.park(range(4), stream)
    assert arena.take(4, stream) == [range(0, 4)]
    after = pool.stats()
    assert (after.chunks_created, after.chunks_moved) == (chunks.chunks_created, chunks.chunks_moved)
    assert (numpy.asarray(arena.array(2))[: 4 * PAGE] == 7).all()


def test_parked_pages_serve_other_requests_when_memory_is_short() -> None:
    with vramp.open("sim:h200", limit="64MiB") as small:
        arena = vramp.kv.arena(small, tensors=4, size="64MiB", superpage="2MiB")
        arena.commit(range(8))
        assert arena.available() == 0
        with pytest.raises(vramp.OutOfMemoryError):
            small.malloc(32 * MIB)
        arena.park(range(4))
        assert arena.available() == 4
        with small.malloc(32 * MIB):
            assert (arena.stats().committed, arena.stats().parked) == (4, 0)
            with pytest.raises(vramp.OutOfMemoryError):
                arena.commit(range(4))
            assert arena.stats().committed == 4, "all or nothing"
        arena.commit(range(4))
        small.audit()


def test_the_limit_holds_and_says_what_to_do(pool: vramp.Pool, arena: vramp.kv.Arena) -> None:
    arena.limit = "32MiB"
    assert arena.limit == 32 * MIB
    arena.commit(range(4))
    with pytest.raises(vramp.OutOfMemoryError, match="park pages, or raise the limit"):
        arena.commit(5)
    arena.park(range(2))
    arena.commit(5)
    assert arena.stats().committed + arena.stats().parked <= 4
    arena.limit = None
    arena.commit([6, 7])


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda arena: arena.commit(0), vramp.RangeError, "page 0 is committed already: park it first"),
        (lambda arena: arena.commit([5, 5]), vramp.RangeError, "page 5 is given twice"),
        (lambda arena: arena.commit([range(4, 7), 6]), vramp.RangeError, "page 6 is given twice"),
        (lambda arena: arena.commit(16), vramp.RangeError, "there are 16 pages"),
        (lambda arena: arena.commit(-1), vramp.RangeError, "-1 is no page"),
        (lambda arena: arena.commit(range(3, 2**40)), vramp.RangeError, "is no page"),
        (lambda arena: arena.park(3), vramp.RangeError, "page 3 is not committed"),
        (lambda arena: arena.park([0, 0]), vramp.RangeError, "page 0 is given twice"),
        (lambda arena: arena.commit("12"), TypeError, "pages are an int, a range"),
        (lambda arena: arena.commit(1.5), TypeError, "pages are an int, a range"),
        (lambda arena: arena.take(17), vramp.RangeError, "15 pages are left"),
        (lambda arena: arena.take(-1), vramp.RangeError, "count is -1"),
        (lambda arena: arena.array(4), vramp.RangeError, "there are 4 tensors"),
        (lambda arena: arena.view(offset=1 << 40), vramp.RangeError, "beyond the"),
        (lambda arena: arena.view(size=1 << 40), vramp.RangeError, "beyond the"),
        (lambda arena: setattr(arena, "limit", "much"), vramp.RangeError, "limit"),
    ],
)
def test_wrong_calls_change_nothing(
    arena: vramp.kv.Arena, call: Callable[[vramp.kv.Arena], object], kind: type[Exception], text: str
) -> None:
    arena.commit(0)
    with pytest.raises(kind, match=text):
        call(arena)
    assert arena.stats().committed == 1 and arena.stats().parked == 0


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"tensors": 0}, vramp.RangeError, "nothing to reserve"),
        ({"tensors": -1}, vramp.RangeError, "tensors is -1"),
        ({"size": 0}, vramp.RangeError, "nothing to reserve"),
        ({"page": 3 * MIB}, vramp.RangeError, "multiple of the device's page"),
        ({"size": "64EiB"}, vramp.RangeError, "size"),
        ({"size": 1 << 50}, vramp.RangeError, "make it shorter"),
        ({"layout": "side by side"}, vramp.OptionError, "separate"),
    ],
)
def test_arenas_that_cannot_be(
    pool: vramp.Pool, arguments: dict[str, object], kind: type[Exception], text: str
) -> None:
    wanted: dict[str, object] = {"tensors": 2, "size": "8MiB", **arguments}
    with pytest.raises(kind, match=text):
        vramp.kv.arena(pool, **wanted)  # type: ignore[arg-type]


def test_other_presets_say_so() -> None:
    with vramp.open("sim:h200", preset="torch") as other, pytest.raises(vramp.UnsupportedError):
        vramp.kv.arena(other, tensors=1, size="8MiB")


def test_a_closed_arena_says_so(pool: vramp.Pool) -> None:
    arena = vramp.kv.arena(pool, tensors=2, size=4 * PAGE)
    arena.commit(0)
    arena.close()
    arena.close()
    assert arena.is_closed and "closed" in repr(arena)
    for call in (lambda: arena.commit(1), lambda: arena.park(0), arena.release, arena.stats, arena.view):
        with pytest.raises(vramp.ClosedError, match="make another one"):
            call()
    pool.trim()
    assert reserved(pool) == 0


def test_a_closed_pool_says_so() -> None:
    with vramp.open("sim:h200") as own:
        arena = vramp.kv.arena(own, tensors=2, size=4 * PAGE)
        arena.commit(0)
    with pytest.raises(vramp.ClosedError, match="the pool is closed"):
        arena.commit(1)
    arena.close()


def test_arrays_keep_the_arena_open(pool: vramp.Pool) -> None:
    arena = vramp.kv.arena(pool, tensors=2, size=4 * PAGE)
    arena.commit(range(4))
    array = arena.array(1, (PAGE, 4), "uint8")
    assert array.ptr == arena.ptr + 4 * PAGE and array.nbytes == 4 * PAGE
    shared = numpy.from_dlpack(array)
    shared[:] = 3
    del array
    with pytest.raises(vramp.InUseError, match="del tensor"):
        arena.close()
    with pytest.raises(vramp.InUseError):
        pool.close()
    assert (numpy.asarray(arena.array(1, dtype="float32")).view("uint8") == 3).all()
    del shared
    gc.collect()
    arena.close()


def test_interleaved_tensors_lie_page_by_page(pool: vramp.Pool) -> None:
    with vramp.kv.arena(pool, tensors=3, size=4 * PAGE, layout="interleaved") as arena:
        created = pool.stats().chunks_created
        arena.commit([1])
        assert pool.stats().chunks_created == created + 1, "a page of all tensors is one handle"
        whole = numpy.asarray(arena.array()).reshape(4, 3, PAGE)
        whole[1] = 5
        assert (whole[1] == 5).all()
        with pytest.raises(vramp.UnsupportedError, match=r"arena\.tensor"):
            arena.array(0)
        del whole
        gc.collect()


def test_pages_are_made_ahead_on_a_thread(pool: vramp.Pool) -> None:
    with vramp.kv.arena(pool, tensors=4, size=64 * PAGE, superpage=PAGE, ahead="64MiB") as arena:
        arena.commit(range(4))
        until = time.monotonic() + 10
        while arena.stats().parked == 0:
            assert time.monotonic() < until
            time.sleep(0.001)
        (taken,) = arena.take(1)
        assert taken.start >= 4 and arena.stats().committed == 5


def test_pages_that_are_pinned_or_exported_stay(pool: vramp.Pool) -> None:
    with vramp.kv.arena(pool, tensors=2, size=4 * PAGE, layout="interleaved") as arena:
        arena.commit(range(4))
        numpy.asarray(arena.view(offset=2 * PAGE, size=2 * PAGE))[:] = 6
        with pool.pin(arena.ptr, 2 * PAGE), pool.export(arena.ptr + 2 * PAGE, size=2 * PAGE) as exported:
            arena.park(range(4))
            assert arena.release() == 4 * PAGE and arena.stats().parked == 2
            with pool.open_ticket(bytes(exported.ticket())) as imported:
                assert (numpy.asarray(imported.array()) == 6).all()
        # The importer's close arrives a moment later.
        released = 0
        while arena.stats().parked > 0:
            released += arena.release()
            time.sleep(0.001)
        assert released == 4 * PAGE
        with pytest.raises(vramp.UnknownPointerError):
            pool.pin(arena.ptr, PAGE)
        with pytest.raises(vramp.VrampError, match="not memory"):
            pool.export(arena.ptr, size=PAGE)


def test_threads_share_an_arena(pool: vramp.Pool) -> None:
    failures: list[BaseException] = []
    with vramp.kv.arena(pool, tensors=8, size=64 * PAGE, superpage=PAGE) as arena:

        def work(first: int) -> None:
            try:
                stream = pool.create_stream()
                for turn in range(50):
                    mine = [first + (turn * 3 + step) % 16 for step in range(5)]
                    arena.commit(mine, stream)
                    arena.park(mine, stream if turn % 2 else None)
                    if turn % 7 == 0:
                        arena.release(keep=16 * MIB)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(16 * number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == [] and arena.stats().committed == 0
        pool.audit()


def test_a_forked_child_gets_an_error(arena: vramp.kv.Arena) -> None:
    arena.commit(0)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            arena.commit(1)
            os.write(write, b"no error")
        except vramp.ForkedError:
            os.write(write, b"forked")
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as answer:
        assert answer.read() == b"forked"
    os.waitpid(child, 0)


def test_an_arena_ends_with_its_last_reference(pool: vramp.Pool) -> None:
    arena = vramp.kv.arena(pool, tensors=2, size=4 * PAGE)
    arena.commit(range(4))
    assert reserved(pool) == 8 * PAGE
    del arena
    gc.collect()
    pool.trim()
    assert reserved(pool) == 0
    with pytest.raises(TypeError, match="pickled"):
        pickle.dumps(vramp.kv.arena(pool, tensors=1, size=GIB))
