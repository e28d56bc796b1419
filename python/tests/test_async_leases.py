"""Leases of coroutines. No test waits in the event loop's thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import time
from collections.abc import Callable
from typing import Literal

import numpy
import pytest
from conftest import MIB, check, fill

import vramp


def test_a_coroutine_leases(tiers: vramp.Tiers) -> None:
    first, second = tiers.buffer(MIB), tiers.buffer(MIB)

    async def work() -> None:
        async with first.lease("rw") as view:
            numpy.asarray(view)[:] = 4
        assert view.is_ended
        async with tiers.lease([(first, "r"), (second, "overwrite")]) as (one, two):
            numpy.asarray(two)[:] = numpy.asarray(one)

    asyncio.run(work())
    check(second, 4)


def test_the_event_loop_runs_while_leases_wait(tiers: vramp.Tiers) -> None:
    buffer = tiers.buffer(MIB)
    order: list[int] = []

    async def writer(number: int) -> None:
        async with buffer.lease("rw", timeout=60.0):
            order.append(number)
            await asyncio.sleep(0.001)

    async def work() -> None:
        held = buffer.lease("rw")
        held.acquire()
        tasks = [asyncio.create_task(writer(number)) for number in range(40)]
        await _until(lambda: tiers.stats().waiting == 40)
        assert order == []
        held.release()
        await asyncio.gather(*tasks)

    asyncio.run(work())
    assert sorted(order) == list(range(40))


def test_leases_do_not_use_the_executor(tiers: vramp.Tiers) -> None:
    """The holder of a lease awaits work on the executor, while more leases wait than it has threads."""
    buffer = tiers.buffer(MIB)

    async def work() -> None:
        asyncio.get_running_loop().set_default_executor(_one_thread())

        async def hold() -> None:
            async with buffer.lease("rw", timeout=60.0):
                await asyncio.to_thread(time.sleep, 0.001)

        await asyncio.gather(*(hold() for _ in range(20)))

    asyncio.run(work())


def test_a_cancelled_request_leaves_no_lease(tiers: vramp.Tiers) -> None:
    buffer = tiers.buffer(MIB)

    async def work() -> None:
        held = buffer.lease("rw")
        held.acquire()
        lease = buffer.lease("rw", timeout=60.0)

        async def enter() -> None:
            async with lease:
                pytest.fail("it was cancelled")

        task = asyncio.create_task(enter())
        await _until(lambda: tiers.stats().waiting == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        held.release()
        await _until(lambda: tiers.stats().waiting == 0 and not buffer.is_locked)
        assert not lease.is_held

    asyncio.run(work())
    fill(buffer, 1)


def test_a_loop_that_ends_while_a_request_waits(tiers: vramp.Tiers) -> None:
    buffer = tiers.buffer(MIB)
    held = buffer.lease("rw")
    held.acquire()

    async def enter() -> None:
        async with buffer.lease("rw", timeout=60.0):
            pass

    async def work() -> None:
        asyncio.create_task(enter()).add_done_callback(lambda task: None)
        await _until(lambda: tiers.stats().waiting == 1)

    asyncio.run(work())
    held.release()
    deadline = time.monotonic() + 20
    while tiers.stats().waiting or buffer.is_locked:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_failures_are_raised_in_the_coroutine(tiers: vramp.Tiers) -> None:
    buffer = tiers.buffer(MIB)

    async def work() -> None:
        with buffer.lease("rw"), pytest.raises(vramp.LeaseTimeoutError):
            async with buffer.lease("rw", timeout=0.0):
                pass
        with pytest.raises(KeyError):
            async with buffer.lease("rw") as view:
                raise KeyError
        assert view.is_ended
        with pytest.raises(vramp.RangeError):
            async with buffer.lease("rw", shape=(2 * MIB,)):
                pass

    asyncio.run(work())
    assert not buffer.is_locked


def test_waiting_requests_take_no_thread(tiers: vramp.Tiers) -> None:
    buffer = tiers.buffer(MIB)
    order: list[int] = []

    async def writer(number: int) -> None:
        async with buffer.lease("rw", timeout=60.0):
            order.append(number)

    async def work() -> None:
        async with buffer.lease("rw"):
            first = asyncio.create_task(writer(0))
            await _until(lambda: tiers.stats().waiting == 1)
            threads = _thread_count()
            rest = [asyncio.create_task(writer(number)) for number in range(1, 1000)]
            await _until(lambda: tiers.stats().waiting == 1000)
            assert _thread_count() <= threads + 1  # another test's thread may begin or end
            assert order == []
        await asyncio.gather(first, *rest)

    asyncio.run(work())
    assert order == list(range(1000))


def test_a_cancelled_request_leaves_the_queue_at_once(tiers: vramp.Tiers) -> None:
    buffer = tiers.buffer(MIB)

    async def work() -> None:
        async with buffer.lease("rw"):
            lease = buffer.lease("rw", timeout=60.0)
            task = asyncio.create_task(_enter(lease))
            await _until(lambda: tiers.stats().waiting == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert tiers.stats().waiting == 0
        # It may be entered again.
        async with lease as view:
            numpy.asarray(view)[:] = 3

    asyncio.run(work())
    check(buffer, 3)


def test_tasks_own_their_leases(tiers: vramp.Tiers) -> None:
    """A task overtakes what waits for its own lease, and not what waits for one of another task."""
    buffer = tiers.buffer(MIB)
    order: list[str] = []

    async def work() -> None:
        holds, goes_on = asyncio.Event(), asyncio.Event()

        async def holder() -> None:
            async with buffer.lease("r"):
                holds.set()
                await goes_on.wait()
                async with buffer.lease("r", timeout=20.0):
                    order.append("same task")
                with buffer.lease("r", timeout=20.0):
                    order.append("same task, no coroutine")
                buffer.read(0, 1)

        async def use(name: str, access: Literal["r", "rw"]) -> None:
            async with buffer.lease(access, timeout=20.0):
                order.append(name)

        first = asyncio.create_task(holder())
        await holds.wait()
        writer = asyncio.create_task(use("writer", "rw"))
        await _until(lambda: tiers.stats().waiting == 1)
        reader = asyncio.create_task(use("other task", "r"))
        await _until(lambda: tiers.stats().waiting == 2)
        goes_on.set()
        await asyncio.gather(first, writer, reader)

    asyncio.run(work())
    assert order == ["same task", "same task, no coroutine", "writer", "other task"]


async def _enter(lease: vramp.Lease) -> None:
    async with lease:
        pytest.fail("it was cancelled")


def _thread_count() -> int:
    return len(os.listdir("/proc/self/task"))


async def _until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)


def _one_thread() -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(1)
