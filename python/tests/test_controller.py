"""The controller: delivery of changes, locks and launches."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
from conftest import MIB, check, fill

import vramp


class Log(vramp.Client):
    """Records what is delivered."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, Any]] = []
        self.threads: set[str] = set()

    def _add(self, event: str, buffer: Any) -> None:
        self.entries.append((event, buffer.id))
        self.threads.add(threading.current_thread().name)

    def deferred(self, buffer: Any, /) -> None:
        self._add("deferred", buffer)

    def retrieved(self, buffer: Any, /) -> None:
        self._add("retrieved", buffer)

    def locked(self, buffer: Any, /) -> None:
        self._add("locked", buffer)

    def unlocked(self, buffer: Any, /) -> None:
        self._add("unlocked", buffer)

    def freed(self, buffer: Any, /) -> None:
        self._add("freed", buffer)

    def of(self, number: int) -> list[str]:
        return [event for event, buffer in self.entries if buffer == number]


@pytest.fixture
def controller(tiers: vramp.Tiers) -> Iterator[vramp.Controller]:
    with vramp.Controller(tiers) as opened:
        yield opened
    assert opened.is_closed


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Types of the exceptions that were passed to sys.unraisablehook."""
    seen: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: seen.append(args.exc_type))
    return seen


def test_the_life_of_a_buffer_is_delivered_in_order(
    tiers: vramp.Tiers, controller: vramp.Controller
) -> None:
    log = Log()
    controller.add_client(log)
    buffer = controller.register(tiers.buffer(16 * MIB))
    number = buffer.id
    fill(buffer, 1)
    assert controller.evict("1GiB") == 16 * MIB
    controller.retrieve(buffer)
    assert buffer.is_resident
    check(buffer, 1)
    del buffer
    assert controller.flush(20.0)
    assert log.of(number) == [
        "locked", "unlocked", "deferred",
        "locked", "retrieved", "unlocked",
        "locked", "unlocked", "freed",
    ]  # fmt: skip
    assert log.threads == {"vramp dispatcher"}


def test_a_buffer_of_many_pieces_is_deferred_once(
    tiers: vramp.Tiers, controller: vramp.Controller
) -> None:
    log = Log()
    controller.add_client(log)
    buffer = controller.register(tiers.buffer(64 * MIB))
    fill(buffer, 1)
    tiers.evict("40MiB")
    tiers.evict("1GiB")
    buffer.retrieve()
    controller.flush()
    assert log.of(buffer.id).count("deferred") == 1
    assert log.of(buffer.id).count("retrieved") == 1


def test_only_registered_buffers_are_delivered(
    tiers: vramp.Tiers, controller: vramp.Controller
) -> None:
    log = Log()
    controller.add_client(log)
    other, buffer = tiers.buffer(MIB), tiers.buffer(MIB)
    assert controller.register(buffer) is buffer
    assert controller.register(buffer) is buffer
    fill(other, 1)
    fill(buffer, 1)
    controller.flush()
    controller.unregister(buffer)
    fill(buffer, 2)
    controller.flush()
    assert log.entries == [("locked", buffer.id), ("unlocked", buffer.id)]
    controller.remove_client(log)
    with pytest.raises(ValueError):
        controller.remove_client(log)


def test_a_freed_buffer_equals_what_it_was(
    tiers: vramp.Tiers, controller: vramp.Controller
) -> None:
    freed: list[vramp.FreedBuffer] = []

    class Client:
        """Has one of the methods only."""

        def freed(self, buffer: vramp.FreedBuffer) -> None:
            freed.append(buffer)

    client: Any = Client()
    controller.add_client(client)
    buffer = controller.register(tiers.buffer(MIB))
    known = {buffer.id: buffer.nbytes, hash(buffer): "its hash"}
    record = vramp.FreedBuffer(buffer.id, MIB)
    assert buffer == record and record == buffer and hash(buffer) == hash(record)
    del buffer
    controller.flush()
    assert freed == [record] and known[freed[0].id] and known[hash(freed[0])]
    assert record != 7 and record != vramp.FreedBuffer(1, MIB)


def test_an_exception_of_a_client_is_reported_and_delivery_goes_on(
    tiers: vramp.Tiers, controller: vramp.Controller, reported: list[Any]
) -> None:
    class Broken(Log):
        def locked(self, buffer: Any, /) -> None:
            raise SystemExit("no")

    broken, log = Broken(), Log()
    controller.add_client(broken)
    controller.add_client(log)
    fill(controller.register(tiers.buffer(MIB)), 1)
    controller.flush()
    assert reported == [SystemExit]
    assert [event for event, _ in broken.entries] == ["unlocked", "freed"]
    assert [event for event, _ in log.entries] == ["locked", "unlocked", "freed"]


def test_a_client_may_use_the_buffers(tiers: vramp.Tiers, controller: vramp.Controller) -> None:
    read: list[bytes] = []

    class Reader:
        def deferred(self, buffer: vramp.Buffer) -> None:
            read.append(buffer.read(0, 4))
            tiers.buffer(MIB)
            tiers.pool.malloc(MIB)
            tiers.evict(0)
            with pytest.raises(vramp.InUseError, match="delivery that calls it"):
                controller.flush()

    client: Any = Reader()
    controller.add_client(client)
    buffer = controller.register(tiers.buffer(MIB))
    fill(buffer, 5)
    tiers.evict("2MiB")
    controller.flush()
    assert read == [b"\5" * 4]


def test_an_allocation_does_not_wait_for_a_client(
    tiers: vramp.Tiers, controller: vramp.Controller
) -> None:
    """Memory is evicted for a malloc while a client blocks and while another thread has the interpreter."""
    blocked, go_on = threading.Event(), threading.Event()

    class Slow:
        def deferred(self, buffer: vramp.Buffer) -> None:
            blocked.set()
            assert go_on.wait(20.0)

    client: Any = Slow()
    controller.add_client(client)
    buffers = [controller.register(tiers.buffer(16 * MIB)) for _ in range(4)]
    for buffer in buffers:
        fill(buffer, 1)
    tiers.evict(16 * MIB)
    assert blocked.wait(20.0)
    with tiers.pool.malloc(48 * MIB):
        assert not go_on.is_set()
    go_on.set()
    assert controller.flush(20.0)


def test_a_flush_ends_at_its_deadline(tiers: vramp.Tiers, controller: vramp.Controller) -> None:
    go_on = threading.Event()

    class Slow:
        def locked(self, buffer: vramp.Buffer) -> None:
            assert go_on.wait(20.0)

    client: Any = Slow()
    controller.add_client(client)
    fill(controller.register(tiers.buffer(MIB)), 1)
    assert not controller.flush(0.05)
    go_on.set()
    assert controller.flush(20.0)
    assert controller.flush(), "a second one, with nothing to deliver"


def test_a_full_queue_delivers_the_states_that_differ(
    tiers: vramp.Tiers, controller: vramp.Controller
) -> None:
    go_on, log = threading.Event(), Log()

    class Slow:
        def locked(self, buffer: vramp.Buffer) -> None:
            assert go_on.wait(60.0)

    client: Any = Slow()
    controller.add_client(log)
    controller.add_client(client)
    buffer, other = (controller.register(tiers.buffer(MIB)) for _ in range(2))
    gone = controller.register(tiers.buffer(MIB)).id
    fill(buffer, 1)
    spare = tiers.buffer(MIB)
    for _ in range(40_000):  # two changes each, in a queue of 65,536
        with spare.lease("r"):
            pass
    fill(buffer, 2)
    tiers.evict("1GiB")
    held = other.lease("r")
    held.acquire()
    go_on.set()
    assert controller.flush(60.0)
    assert log.of(buffer.id)[-1] == "deferred"
    assert log.of(other.id) == ["locked"]
    assert log.of(gone) == ["freed"]
    held.release()


def test_policies_choose_who_leaves_first(tiers: vramp.Tiers, reported: list[Any]) -> None:
    values: dict[int, int] = {}
    with vramp.Controller(tiers, policy=lambda buffer: values[buffer.id]) as controller:
        buffers = [tiers.buffer(16 * MIB) for _ in range(4)]
        for value, buffer in zip((3, 1, 2, 4), buffers, strict=True):
            values[buffer.id] = value
            controller.register(buffer)
        assert [buffer.priority for buffer in buffers] == [3, 1, 2, 4]
        for buffer in buffers:
            fill(buffer, 1)
        controller.flush()
        tiers.evict(32 * MIB)
        assert [buffer.is_deferred for buffer in buffers] == [False, True, True, False]
        values[buffers[0].id] = -1
        with buffers[0].lease("r"):
            pass
        controller.flush()
        assert buffers[0].priority == -1
        values.update({buffer.id: 9 for buffer in buffers})
        controller.apply_policy()
        assert {buffer.priority for buffer in buffers} == {9}
        assert not reported
        values.clear()
        with buffers[0].lease("r"):
            pass
        controller.flush()
        assert reported == [KeyError] and buffers[0].priority == 9


def test_lock_and_unlock(tiers: vramp.Tiers, controller: vramp.Controller) -> None:
    first, second, third = (tiers.buffer(16 * MIB) for _ in range(3))
    for buffer in (first, second, third):
        fill(buffer, 1)
    tiers.evict("1GiB")
    one, two = controller.lock(first, vramp.Arg(second, "r", (4 * MIB,), "int32"))
    assert two.dtype == "int32" and two.is_read_only and not one.is_read_only
    assert first.is_locked and first.is_resident and not third.is_locked
    tiers.evict("1GiB")
    assert first.is_resident and second.is_resident
    controller.unlock(first)
    assert not one.is_ended, "they were locked together"
    with pytest.raises(vramp.InUseError, match="not locked"):
        controller.unlock(second, third)
    controller.unlock(second, second)
    assert one.is_ended and two.is_ended and not first.is_locked
    with pytest.raises(vramp.InUseError):
        controller.unlock(first)


def test_sync_and_unlock_ends_the_locks_of_its_stream(
    tiers: vramp.Tiers, controller: vramp.Controller
) -> None:
    first, second = tiers.buffer(MIB), tiers.buffer(MIB)
    stream = tiers.pool.create_stream()
    controller.lock(first, stream=stream)
    (other,) = controller.lock(second)
    controller.sync_and_unlock(stream)
    assert not first.is_locked and second.is_locked and not other.is_ended
    for same in (0, 1, None):
        controller.sync_and_unlock(same)
        assert not second.is_locked
        controller.lock(second)
    controller.close()
    assert not second.is_locked, "a close ends all locks"


def test_launches_get_views(tiers: vramp.Tiers, controller: vramp.Controller) -> None:
    source, target = tiers.buffer(MIB), tiers.buffer(MIB)
    fill(source, 6)
    seen: list[vramp.View] = []

    def add(count: int, into: Any, *, of: Any, text: str) -> str:
        seen.extend((into, of))
        assert of.is_read_only and of.dtype == "uint8"
        numpy.asarray(into)[:] = numpy.asarray(of) + count
        return text

    for launch in (controller.lock_and_launch, controller.lock_and_launch_async):
        result = launch(add, 3, target, of=vramp.Arg(source, "r"), text="done")
        assert result == "done" and all(view.is_ended for view in seen)
        check(target, 9)
        fill(target, 0)
    assert controller.lock_and_launch(lambda *args: args, 1, 2) == (1, 2)
    assert controller.lock_and_launch(lambda a, b: a.ptr == b.ptr, source, source)


def test_an_exception_of_a_launch_unlocks(tiers: vramp.Tiers, controller: vramp.Controller) -> None:
    buffer = tiers.buffer(MIB)

    def fail(view: object) -> None:
        assert buffer.is_locked
        raise KeyError

    for launch in (controller.lock_and_launch, controller.lock_and_launch_async):
        with pytest.raises(KeyError):
            launch(fail, buffer)
        assert not buffer.is_locked
    with pytest.raises(vramp.RangeError):
        controller.lock_and_launch(fail, vramp.Arg(buffer, shape=(2 * MIB,)))
    assert not buffer.is_locked
    with pytest.raises(vramp.LeaseTimeoutError), buffer.lease("r"):
        controller.lock_and_launch(fail, buffer, timeout=0.0)


def test_buffers_of_other_tiers_are_refused(controller: vramp.Controller) -> None:
    with vramp.open("sim:h200", limit="64MiB") as pool:
        other = vramp.Tiers(pool, host="64MiB")
        with pytest.raises(vramp.UnknownPointerError, match="other tiers"):
            controller.register(other.buffer(MIB))
        with pytest.raises(vramp.VrampError):
            controller.lock(other.buffer(MIB))


def test_a_controller_that_is_dropped_ends_its_thread(tiers: vramp.Tiers) -> None:
    before = threading.active_count()
    controller = vramp.Controller(tiers)
    controller.register(tiers.buffer(MIB))
    alive = weakref.ref(controller)
    del controller
    gc.collect()
    assert alive() is None
    _eventually(lambda: threading.active_count() == before)


def test_the_close_of_the_tiers_delivers_the_end_of_buffers_and_ends_the_thread() -> None:
    log = Log()
    with vramp.open("sim:h200", limit="64MiB") as pool:
        tiers = vramp.Tiers(pool, host="64MiB")
        controller = vramp.Controller(tiers)
        controller.add_client(log)
        buffer = controller.register(tiers.buffer(MIB))
        fill(buffer, 1)
    _eventually(lambda: controller.is_closed)
    assert log.of(buffer.id) == ["locked", "unlocked", "freed"]
    assert controller.flush() and "closed" in repr(controller)
    controller.close()


def test_two_controllers_follow_the_same_buffers(tiers: vramp.Tiers) -> None:
    logs = [Log(), Log()]
    controllers = [vramp.Controller(tiers), vramp.Controller(tiers)]
    buffer = tiers.buffer(MIB)
    for controller, log in zip(controllers, logs, strict=True):
        controller.add_client(log)
        controller.register(buffer)
    fill(buffer, 1)
    for controller in controllers:
        controller.flush()
        controller.close()
    assert logs[0].entries == logs[1].entries != []


def _eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20.0
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)
