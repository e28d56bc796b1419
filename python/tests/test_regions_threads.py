"""Regions that several threads are in, and regions that sleep because others need memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator

import pytest
from conftest import MIB

import vramp


@pytest.fixture
def pool() -> Iterator[vramp.Pool]:
    """A pool of 256 MiB."""
    with vramp.open("sim:h200", limit="256MiB") as opened:
        yield opened
        opened.audit()


def phases(pool: vramp.Pool) -> dict[str, str]:
    return {status.tag: status.phase for status in vramp.status(pool)}


def on_card(pool: vramp.Pool, tag: str) -> int:
    return next(status.on_card for status in vramp.status(pool) if status.tag == tag)


def on_a_thread(work: Callable[[], object]) -> BaseException | None:
    """Runs `work` on a thread of its own. Returns what it raised."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised[0] if raised else None


def test_threads_share_the_object_of_a_region(pool: vramp.Pool) -> None:
    scope = vramp.region("shared", device=pool)
    blocks = []

    def inside() -> None:
        with scope:
            blocks.append(pool.malloc(8 * MIB))
        blocks.append(pool.malloc(8 * MIB))

    with scope:
        assert on_a_thread(inside) is None
        blocks.append(pool.malloc(8 * MIB))
    assert on_card(pool, "shared") == 16 * MIB
    assert pool.stats().reserved == 24 * MIB


def test_a_region_is_left_on_the_thread_that_began_it(pool: vramp.Pool) -> None:
    scope = vramp.region("generated", device=pool)

    def generator() -> Generator[None, None, None]:
        with scope:
            yield

    running = generator()
    next(running)
    error = on_a_thread(running.close)
    assert isinstance(error, vramp.RegionError) and error.tag == "generated"
    assert "on the thread that began it" in str(error)
    # The thread that began it is still there, and ends it by the object.
    pool.malloc(8 * MIB).free()
    assert on_card(pool, "generated") == 8 * MIB
    scope.__exit__(None, None, None)
    scope = vramp.disable_region(pool)
    scope.__enter__()
    error = on_a_thread(lambda: scope.__exit__(None, None, None))
    assert isinstance(error, vramp.RegionError) and error.tag is None
    scope.__exit__(None, None, None)
    with pytest.raises(vramp.RegionError):
        scope.__exit__(None, None, None)


def test_a_region_under_pressure_sleeps_for_others_and_not_for_itself(pool: vramp.Pool) -> None:
    with vramp.region("kv", device=pool):
        kept = pool.malloc(150 * MIB)
    with vramp.region("train", device=pool):
        first = pool.malloc(50 * MIB)
    with vramp.on_pressure(["train", "kv"], device=pool):
        with vramp.region("train", device=pool):
            second = pool.malloc(100 * MIB)
        assert phases(pool) == {"kv": "asleep", "train": "awake"}
        vramp.resume("kv", device=pool)
        assert phases(pool) == {"kv": "awake", "train": "asleep"}
        vramp.resume("train", device=pool)
        assert phases(pool) == {"kv": "asleep", "train": "awake"}
        second.free()
        vramp.resume(device=pool)
    with vramp.region("train", device=pool), pytest.raises(vramp.OutOfMemoryError):
        pool.malloc(100 * MIB)
    assert phases(pool) == {"kv": "awake", "train": "awake"}
    kept.free()
    first.free()
