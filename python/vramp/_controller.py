"""The controller of deferrable buffers: clients that follow their states, locks and launches.

1. The tiers record each change of a buffer's state in a queue, without the interpreter.
2. One thread of the controller, the dispatcher, takes the changes out and calls the clients, in order.
   No lock of vramp is held meanwhile, so clients may lease, evict and allocate.
3. The dispatcher knows what the clients were told of each registered buffer, and tells them what differs.
   So nothing is lost if the queue was full: then it compares all states.

The dispatcher does not refer to the controller, so a controller that is not closed ends with its last
reference.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from . import _native
from ._errors import ForkedError, InUseError, UnknownPointerError
from ._native import Buffer, LeaseSet, Tiers, View
from ._types import Access

_Result = TypeVar("_Result")
_Policy = Callable[[Buffer], int]


@dataclass(frozen=True)
class FreedBuffer:
    """A buffer whose contents were freed. It equals the buffer, and has the same hash."""

    id: int
    """Number of the buffer."""
    nbytes: int
    """Bytes that it had."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (FreedBuffer, Buffer)) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)


class Client(Protocol):
    """What follows the states of registered buffers, such as a worker of Dask.

    The dispatcher calls its methods, one at a time. A class may leave out those that it does not need. An
    exception is passed to sys.unraisablehook, and the next change is delivered. The buffer of a change may
    have been dropped by the program when its change is delivered: then it is a FreedBuffer.
    """

    def deferred(self, buffer: Buffer | FreedBuffer, /) -> None:
        """Contents left the card: the buffer has to be retrieved before it is used."""

    def retrieved(self, buffer: Buffer | FreedBuffer, /) -> None:
        """All contents are on the card again."""

    def locked(self, buffer: Buffer | FreedBuffer, /) -> None:
        """A lease holds the buffer: it does not leave the card."""

    def unlocked(self, buffer: Buffer | FreedBuffer, /) -> None:
        """No lease holds the buffer. Work that was queued under one may run still."""

    def freed(self, buffer: FreedBuffer, /) -> None:
        """The contents were freed. Nothing is delivered of the buffer afterwards."""


@dataclass(frozen=True)
class Arg:
    """An argument of a launch: a buffer with the access that the function needs, and the form of its view."""

    buffer: Buffer
    """The buffer."""
    access: Access = "rw"
    """As of `Buffer.lease`."""
    shape: Any = None
    """Shape of the view."""
    dtype: Any = None
    """Element type of the view."""


@dataclass
class _Record:
    """What clients know of a registered buffer."""

    buffer: weakref.ref[Buffer]
    gone: FreedBuffer
    is_deferred: bool
    is_locked: bool

    def subject(self) -> Buffer | FreedBuffer:
        return self.buffer() or self.gone


class _Dispatcher:
    """Delivers changes. Shared by the controller and its thread, which does not refer to the controller."""

    def __init__(self, events: _native.Events, policy: _Policy | None) -> None:
        self.events = events
        self.policy = policy
        self.records: dict[int, _Record] = {}
        self.clients: tuple[object, ...] = ()
        self.progress = threading.Condition()
        self.asked = 0
        self.answered = 0
        self.is_over = False

    def run(self) -> None:
        """Body of the thread."""
        try:
            while True:
                asked = self.asked
                changes = self.events.take(None if asked == self.answered else 0.0)
                if changes is None:
                    return
                if self.events.take_lost():
                    self._compare()
                for word, number, deferred, leases in changes:
                    self._deliver(word, number, deferred, leases)
                if not changes:
                    # All that was recorded before these requests was delivered.
                    self._answer(asked)
        except ForkedError:
            return
        finally:
            with self.progress:
                self.is_over = True
                self.progress.notify_all()

    def _answer(self, asked: int) -> None:
        with self.progress:
            self.answered = asked
            self.progress.notify_all()

    def flush(self, timeout: float | None) -> bool:
        """Waits until what was recorded so far was delivered."""
        with self.progress:
            self.asked += 1
            asked = self.asked
        self.events.wake()
        with self.progress:
            return self.progress.wait_for(
                lambda: self.answered >= asked or self.is_over, timeout
            )

    def _deliver(self, word: str, number: int, deferred: int, leases: int) -> None:
        record = self.records.get(number)
        if record is None:
            return
        if word == "freed":
            del self.records[number]
            self._tell("freed", record.gone)
            return
        # In the order in which they happen: contents come back under a lease, and leave without one.
        if leases > 0 and not record.is_locked:
            record.is_locked = True
            self._tell("locked", record.subject())
        if deferred == 0 and record.is_deferred:
            record.is_deferred = False
            self._tell("retrieved", record.subject())
        if leases == 0 and record.is_locked:
            record.is_locked = False
            self._tell("unlocked", record.subject())
            self.apply_policy(record.buffer())
        if deferred > 0 and not record.is_deferred:
            record.is_deferred = True
            self._tell("deferred", record.subject())

    def _compare(self) -> None:
        """Delivers what differs from the states that clients know."""
        states = {number: (deferred, leases) for number, deferred, leases in self.events.states()}
        for number in list(self.records):
            state = states.get(number)
            if state is None:
                self._deliver("freed", number, 0, 0)
            else:
                self._deliver("changed", number, *state)

    def _tell(self, event: str, subject: Buffer | FreedBuffer) -> None:
        for client in self.clients:
            method = getattr(client, event, None)
            if method is None:
                continue
            try:
                method(subject)
            except BaseException as error:
                _native.report_unraisable(error, method)

    def apply_policy(self, buffer: Buffer | None) -> None:
        """Sets the priority of a buffer that the policy returns."""
        if self.policy is None or buffer is None:
            return
        try:
            buffer.priority = self.policy(buffer)
        except BaseException as error:
            _native.report_unraisable(error, self.policy)


@dataclass
class _Lock:
    lease: LeaseSet
    stream: object
    left: set[Buffer] = field(default_factory=set)


class Controller:
    """Follows and controls the deferrable buffers of tiers, in the words of RMMEP-1.

    `policy` returns the priority of a buffer: those of lower priority leave the card first. The dispatcher
    calls it when a buffer is registered and each time it is unlocked.

    Threads may share a controller. A `with` block closes it at its end.
    """

    def __init__(self, tiers: Tiers, *, policy: _Policy | None = None) -> None:
        self._tiers = tiers
        self._dispatcher = _Dispatcher(tiers._events(), policy)
        self._locks: list[_Lock] = []
        self._guard = threading.Lock()
        self._end = weakref.finalize(self, self._dispatcher.events.close)
        # The queue of an interpreter that ends is not closed: its thread sleeps until the process ends.
        self._end.atexit = False
        self._thread = threading.Thread(
            target=self._dispatcher.run, name="vramp dispatcher", daemon=True
        )
        self._thread.start()

    @property
    def tiers(self) -> Tiers:
        """The tiers of the buffers."""
        return self._tiers

    # --- registration ---

    def register(self, memory: object) -> Buffer:
        """Returns a buffer whose changes are delivered from now on.

        That is the buffer itself, or a new one with a copy of the contents of another object: see
        `Tiers.adopt`. A second registration does nothing.
        """
        buffer = memory if isinstance(memory, Buffer) else self._tiers.adopt(memory)
        if buffer.tiers is not self._tiers:
            raise UnknownPointerError(f"{buffer!r} belongs to other tiers: use their controller")
        record = _Record(
            weakref.ref(buffer),
            FreedBuffer(buffer.id, buffer.nbytes),
            buffer.is_deferred,
            buffer.is_locked,
        )
        if self._dispatcher.records.setdefault(buffer.id, record) is record:
            self._dispatcher.apply_policy(buffer)
        return buffer

    def unregister(self, buffer: Buffer) -> None:
        """Ends the delivery of changes of a buffer."""
        self._dispatcher.records.pop(buffer.id, None)

    def add_client(self, client: Client) -> None:
        """Delivers changes to a client from now on."""
        with self._guard:
            self._dispatcher.clients += (client,)

    def remove_client(self, client: Client) -> None:
        """Ends the delivery to a client. A call in progress goes on. Raises ValueError if it was not added."""
        with self._guard:
            clients = list(self._dispatcher.clients)
            clients.remove(client)
            self._dispatcher.clients = tuple(clients)

    def flush(self, timeout: float | None = None) -> bool:
        """Waits until all changes so far were delivered. Returns False after `timeout` seconds.

        Raises InUseError in a client, which the dispatcher waits for itself.
        """
        if threading.current_thread() is self._thread:
            raise InUseError("a client cannot wait for the delivery that calls it")
        return self._dispatcher.flush(timeout)

    # --- moves ---

    def retrieve(self, *buffers: Buffer) -> None:
        """Restores buffers, all at once, and waits until they are there."""
        self._tiers.retrieve(*buffers)

    def evict(self, nbytes: int | str) -> int:
        """Evicts buffers, as `Tiers.evict` does."""
        return self._tiers.evict(nbytes)

    def apply_policy(self) -> None:
        """Evaluates the policy for all registered buffers, on this thread."""
        for record in list(self._dispatcher.records.values()):
            self._dispatcher.apply_policy(record.buffer())

    # --- locks ---

    def lock(
        self,
        *buffers: Buffer | Arg,
        stream: Any = None,
        access: Access = "rw",
        timeout: float | None = None,
    ) -> tuple[View, ...]:
        """Retrieves and leases buffers for work on a stream, all or none. Returns their views.

        They stay locked until `unlock`, or `sync_and_unlock` of the stream.
        """
        arguments = [_argument(buffer, access) for buffer in buffers]
        lease, views = self._enter(arguments, stream, timeout)
        lock = _Lock(lease, _key(stream), {argument.buffer for argument in arguments})
        with self._guard:
            self._locks.append(lock)
        return views

    def unlock(self, *buffers: Buffer) -> None:
        """Ends locks at what was queued on their streams so far.

        Buffers that were locked together are unlocked once all of them were passed. Raises InUseError and
        unlocks nothing if one is not locked.
        """
        ended = []
        with self._guard:
            for buffer in buffers:
                if not any(buffer in lock.left for lock in self._locks):
                    raise InUseError(f"{buffer!r} is not locked by this controller")
            for buffer in buffers:
                lock = next((lock for lock in self._locks if buffer in lock.left), None)
                if lock is None:
                    continue  # it was passed twice
                lock.left.discard(buffer)
                if not lock.left:
                    self._locks.remove(lock)
                    ended.append(lock)
        for lock in ended:
            lock.lease.release()

    def sync_and_unlock(self, stream: Any = None) -> None:
        """Waits for the work queued on a stream, and ends the locks for it."""
        self._tiers.synchronize(stream)
        key = _key(stream)
        with self._guard:
            ended = [lock for lock in self._locks if lock.stream == key]
            self._locks = [lock for lock in self._locks if lock.stream != key]
        for lock in ended:
            lock.lease.release()

    def lock_and_launch(
        self,
        function: Callable[..., _Result],
        *args: Any,
        stream: Any = None,
        access: Access = "rw",
        timeout: float | None = None,
        **kwargs: Any,
    ) -> _Result:
        """Calls a function with views in the place of buffers, and waits for the stream.

        Buffers are found among the arguments, also as `Arg` with an access of their own, and leased all or
        none. They are unlocked when the work on the stream is done, also after an exception.
        """
        result = self.lock_and_launch_async(
            function, *args, stream=stream, access=access, timeout=timeout, **kwargs
        )
        self._tiers.synchronize(stream)
        return result

    def lock_and_launch_async(
        self,
        function: Callable[..., _Result],
        *args: Any,
        stream: Any = None,
        access: Access = "rw",
        timeout: float | None = None,
        **kwargs: Any,
    ) -> _Result:
        """Calls a function with views in the place of buffers. Does not wait for the work that it queues.

        The buffers stay on the card until the work on the stream is done. The views end with the call.
        """
        named = dict(enumerate(args)) | kwargs
        wanted = {
            name: _argument(value, access)
            for name, value in named.items()
            if isinstance(value, (Buffer, Arg))
        }
        if not wanted:
            return function(*args, **kwargs)
        lease, views = self._enter(list(wanted.values()), stream, timeout)
        try:
            replaced: Mapping[int | str, Any] = named | dict(zip(wanted, views, strict=True))
            positional = [replaced[index] for index in range(len(args))]
            return function(*positional, **{name: replaced[name] for name in kwargs})
        finally:
            lease.release()

    def _enter(
        self, arguments: list[Arg], stream: Any, timeout: float | None
    ) -> tuple[LeaseSet, tuple[View, ...]]:
        wanted: list[Any] = [(argument.buffer, argument.access) for argument in arguments]
        lease = self._tiers.lease(wanted, stream, timeout=timeout)
        views = lease.acquire()
        try:
            formed = tuple(
                view if argument.shape is argument.dtype is None else view.array(argument.shape, argument.dtype)
                for view, argument in zip(views, arguments, strict=True)
            )
        except BaseException:
            lease.release()
            raise
        return lease, formed

    # --- the end ---

    def close(self) -> None:
        """Ends all locks, delivers what was recorded, and ends the dispatcher."""
        with self._guard:
            locks, self._locks = self._locks, []
        for lock in locks:
            lock.lease.release()
        self._end()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    @property
    def is_closed(self) -> bool:
        """True once it was closed, or its tiers were."""
        return not self._end.alive or self._dispatcher.is_over

    def __enter__(self) -> Controller:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        end = ", closed" if self.is_closed else ""
        return f"<vramp.Controller of {len(self._dispatcher.records)} buffers{end}>"


def _argument(value: Buffer | Arg, access: Access) -> Arg:
    return value if isinstance(value, Arg) else Arg(value, access)


def _key(stream: Any) -> object:
    """Returns what names a stream: the same for the ways to pass it."""
    if stream is None or stream == 1:
        return 0
    if isinstance(stream, (int, _native.Stream)):
        return stream
    protocol = stream.__cuda_stream__
    return int((protocol() if callable(protocol) else protocol)[1])
