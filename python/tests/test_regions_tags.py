"""Regions by the number of their tags: what a call with named tags looks at, and how a tag is removed."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from conftest import MIB

import vramp
from vramp import _native


@pytest.fixture
def pool() -> Iterator[vramp.Pool]:
    """A pool of 1 GiB."""
    with vramp.open("sim:h200", limit="1GiB") as opened:
        yield opened
        opened.audit()


def make(pool: vramp.Pool, *tags: str) -> None:
    for tag in tags:
        with vramp.region(tag, device=pool):
            pass


def tags(pool: vramp.Pool) -> list[str]:
    return [state.tag for state in vramp.status(pool)]


@pytest.mark.parametrize("others", [0, 300])
def test_a_call_with_named_tags_reads_no_other_states(
    pool: vramp.Pool, others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(pool, "a", "b", *(f"other{at}" for at in range(others)))
    described = 0

    def counted(*arguments: Any) -> Any:
        nonlocal described
        found = regions_status(*arguments)
        described += len(found)
        return found

    regions_status = _native.regions_status
    monkeypatch.setattr(_native, "regions_status", counted)
    vramp.pause(["b", "a", "b"], device=pool)
    vramp.resume("a", device=pool)
    vramp.clean("a", device=pool)
    vramp.on_pressure(["a"], device=pool).close()
    assert described == 0
    move = vramp.resume(["a", "b"], wait=False, device=pool)
    assert move is not None
    move.wait()
    assert move.progress == (0, 0) and described == 2


def test_an_unknown_tag_is_named_with_those_that_there_are(pool: vramp.Pool) -> None:
    make(pool, "b", "a")
    for call in (vramp.pause, vramp.resume, vramp.on_pressure, vramp.clean, vramp.remove_region):
        with pytest.raises(vramp.RegionError, match=r"no region 'c': there are \['a', 'b'\]") as error:
            call("c", device=pool)
        assert error.value.tag == "c"
    vramp.pause([], device=pool)


@pytest.mark.parametrize("wrong", [b"kv", 7, [b"kv"], ["kv", None], [["kv"]], 1.5])
def test_a_tag_that_is_no_text_is_a_type_error_that_says_so(pool: vramp.Pool, wrong: Any) -> None:
    make(pool, "kv")
    for call in (vramp.pause, vramp.resume, vramp.on_pressure, vramp.clean, vramp.remove_region, vramp.region):
        with pytest.raises(TypeError, match="a tag is a str"):
            call(wrong, device=pool)
    with pytest.raises(TypeError, match="disable_region"):
        vramp.region(None, device=pool)  # type: ignore[arg-type]
    assert tags(pool) == ["kv"]


def test_a_wait_without_end_is_taken(pool: vramp.Pool) -> None:
    make(pool, "a")
    for timeout in (float("inf"), 1e300, None, 60):
        move = vramp.pause("a", wait=False, device=pool)
        assert move is not None
        move.wait(timeout)


def test_a_thousand_tags_made_and_removed_leave_nothing(pool: vramp.Pool) -> None:
    outside = pool.malloc(100)
    before = pool.stats()
    for at in range(1000):
        tag = f"job{at}"
        with vramp.region(tag, device=pool):
            block = pool.malloc(1000 if at % 50 else 3 * MIB)
        if at % 100 == 0:
            vramp.pause(tag, device=pool)
            vramp.resume(tag, device=pool)
        block.free()
        vramp.remove_region(tag, device=pool)
        assert tags(pool) == []
    after = pool.stats()
    assert (after.live, after.reserved, after.chunks_created) == (before.live, before.reserved, before.chunks_created)
    outside.free()


def test_a_region_with_memory_stays_and_says_how_much(pool: vramp.Pool) -> None:
    with vramp.region("a", device=pool):
        block = pool.malloc(3 * MIB)
    ctypes.memset(block.ptr, 5, block.size)

    def is_refused(text: str) -> None:
        with pytest.raises(vramp.RegionError, match=text) as error:
            vramp.remove_region("a", device=pool)
        assert error.value.tag == "a"

    is_refused("3.00 MiB allocated")
    vramp.pause("a", device=pool)
    is_refused("3.00 MiB allocated, 0 B on the card and 4.00 MiB asleep")
    vramp.resume("a", device=pool)
    assert ctypes.string_at(block.ptr, block.size) == bytes([5]) * block.size
    pin, exported = pool.pin(block), pool.export(block)
    address = block.ptr
    block.free()
    is_refused("3.00 MiB allocated, 4.00 MiB on the card")
    exported.close()
    is_refused(" 0 B allocated, 4.00 MiB on the card")
    pin.unpin()
    with vramp.region("a", device=pool):
        block = pool.malloc(3 * MIB)
    assert block.ptr == address
    vramp.pause("a", device=pool)
    block.free()
    is_refused("4.00 MiB asleep: resume it")
    vramp.resume("a", device=pool)
    vramp.remove_region("a", device=pool)
    assert tags(pool) == []
    with pytest.raises(vramp.RegionError, match="no region 'a'"):
        vramp.remove_region("a", device=pool)


def test_a_scope_makes_a_removed_region_anew(pool: vramp.Pool) -> None:
    registration = vramp.on_pressure(None, device=pool)
    scope = vramp.region("a", backup="none", device=pool)
    with scope:
        pool.malloc(MIB).free()
        vramp.remove_region("a", device=pool)
        assert tags(pool) == []
        block = pool.malloc(MIB)
        assert [(state.tag, state.backup) for state in vramp.status(pool)] == [("a", "none")]
        with pytest.raises(vramp.RegionError, match="1.00 MiB allocated"):
            vramp.remove_region("a", device=pool)
    # Its options may be others now.
    block.free()
    vramp.remove_region("a", device=pool)
    with vramp.region("a", device=pool):
        assert vramp.status(pool)[0].backup == "host"
    registration.close()


def test_removals_beside_threads_that_allocate_lose_no_block(pool: vramp.Pool) -> None:
    removed = 0
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        nonlocal removed
        try:
            for at in range(5000):
                if removed >= 100:
                    return
                with vramp.region("a", device=pool):
                    blocks = [pool.malloc(512 * (1 + (seed + at + nth) % 9)) for nth in range(3)]
                for nth, block in enumerate(blocks):
                    ctypes.memset(block.ptr, seed + nth, 512)
                for nth, block in enumerate(blocks):
                    assert ctypes.string_at(block.ptr, 512) == bytes([seed + nth]) * 512
                    block.free()
                with suppress(vramp.RegionError):
                    vramp.remove_region("a", device=pool)
                    removed += 1
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(10 * seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [] and removed >= 100
    if tags(pool):
        vramp.remove_region("a", device=pool)
    assert pool.stats().live == 0 and tags(pool) == []


def test_a_sleeping_block_that_is_exported_or_pinned_is_a_region_error(pool: vramp.Pool) -> None:
    with vramp.region("a", device=pool):
        block = pool.malloc(3 * MIB)
    vramp.pause("a", device=pool)
    for call in (
        lambda: pool.export(block),
        lambda: pool.export(block.ptr),
        lambda: pool.pin(block),
        lambda: pool.pin(block.ptr, block.size),
    ):
        with pytest.raises(vramp.RegionError, match='the region "a" sleeps: resume it') as error:
            call()
        assert error.value.tag == "a"
    vramp.resume("a", device=pool)
    pool.pin(block).unpin()
    pool.export(block).close()
    with pytest.raises(vramp.UnknownPointerError):
        pool.pin(1 << 40, 512)


def test_a_closed_pool_is_named_without_functions_of_c() -> None:
    pool = vramp.open("sim:h200")
    pool.close()
    for call in (pool.stats, lambda: pool.malloc(1), lambda: vramp.pause("a", device=pool)):
        with pytest.raises(vramp.ClosedError, match="the pool is closed: open another one"):
            call()
