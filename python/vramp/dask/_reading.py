"""Reads of a worker's data, off its event loop.

A worker reads its data on the loop: the inputs of a task that starts, and the values that another process asks
for. A restore would stop the loop, and with it heartbeats and transfers, until there is room on the card and the
disk was read. So:

1. `read_in_threads` replaces the worker's coroutines that read.
2. The new ones read in a thread what is not at hand, into a `Reading`, and then run the old ones.
3. Those take the values out of the `Reading`. An exception of the thread is raised there.

One task restores its inputs at a time: two that wait for room would each hold memory that the other needs. A task
whose inputs are at hand waits for none. Sends are read one at a time too, and do not wait for tasks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, Literal, Protocol

from distributed.core import Status

Transport = Literal["host", "card"]


class Data(Protocol):
    """A mapping whose reads may take long."""

    def __getitem__(self, key: Any) -> Any: ...

    def __contains__(self, key: object) -> bool: ...

    def is_at_hand(self, key: Any) -> bool:
        """Returns whether the current `Reading` gets a key without a copy or a wait."""


class _Failed:
    """A read that raised an exception."""

    __slots__ = ("error",)

    def __init__(self, error: Exception) -> None:
        self.error = error


class Reading:
    """What a task, or a message to another process, reads."""

    __slots__ = ("_ready", "transport")

    def __init__(self, transport: Transport | None = None) -> None:
        self.transport = transport
        """What the values are sent over, or None if they stay in this process."""
        self._ready: dict[Any, Any] = {}

    def read(self, data: Data, keys: Iterable[Any]) -> None:
        """Reads keys, and keeps the values and exceptions. Runs in a thread, inside `current`."""
        for key in keys:
            if key not in data:
                continue
            try:
                value = data[key]
                if isinstance(value, Prepared):
                    value.prepare()
            except Exception as error:
                value = _Failed(error)
            self._ready[key] = value

    def has(self, key: Any) -> bool:
        """Returns whether a key was read."""
        return key in self._ready

    def take(self, key: Any) -> Any:
        """Returns the value of a key, and keeps it no longer. Raises the exception of its read."""
        value = self._ready.pop(key)
        if isinstance(value, _Failed):
            raise value.error
        return value


class Prepared:
    """A value that can do its work before it is serialized."""

    __slots__ = ()

    def prepare(self) -> None:
        """Makes what is serialized."""
        raise NotImplementedError


_NONE = Reading()
_current: ContextVar[Reading] = ContextVar("vramp_reading", default=_NONE)


def current() -> Reading:
    """Returns the reading of this coroutine or thread."""
    return _current.get()


def read_in_threads(worker: Any, data: Data) -> None:
    """Makes a worker read data in threads. Call it once for a worker."""
    worker.handlers["get_data"] = _sends(worker, data, worker.handlers["get_data"])
    worker.execute = _executes(worker, data, worker.execute)


def _executes(worker: Any, data: Data, method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    restoring = asyncio.Lock()

    @wraps(method)
    async def execute(key: Any, *args: Any, **kwargs: Any) -> Any:
        task = worker.state.tasks.get(key)
        inputs = [] if task is None else [each.key for each in task.dependencies]
        reading = Reading()
        with using(_current, reading):
            if not all(map(data.is_at_hand, inputs)):
                async with restoring:
                    await asyncio.to_thread(reading.read, data, inputs)
            return await method(key, *args, **kwargs)

    return execute


def _sends(worker: Any, data: Data, handler: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    reading_one = asyncio.Lock()

    @wraps(handler)
    async def get_data(comm: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
        reading = Reading(_transport_of(comm.peer_address))
        with using(_current, reading):
            if not all(map(data.is_at_hand, keys)):
                async with reading_one:
                    if not _is_busy(worker):
                        await asyncio.to_thread(reading.read, data, keys)
            return await handler(comm, keys, *args, **kwargs)

    return get_data


def _is_busy(worker: Any) -> bool:
    """Returns whether the handler refuses each request now, without a read."""
    if worker.status is Status.paused:
        limit = 1
    else:
        limit = 2 * worker.transfer_outgoing_count_limit  # twice as many for peers of this host
    return bool(limit and worker.transfer_outgoing_count >= limit)


def _transport_of(address: str) -> Transport | None:
    protocol = address.partition("://")[0]
    if protocol == "inproc":  # objects are passed as they are
        return None
    return "card" if protocol.startswith("ucx") else "host"


@contextmanager
def using(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    """Sets a variable of the context inside."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
