"""Leases of coroutines.

A request that waits has no thread. One thread of the process waits for all of them, and does not hold the
interpreter meanwhile. Buffers are restored by a few native threads. So neither the event loop nor an
executor, which the work under another lease may need, waits with a request.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import weakref
from typing import Protocol, TypeVar

from . import _native

_Held = TypeVar("_Held", covariant=True)

_numbers = itertools.count()
# Futures of the requests that wait. The coroutines keep them.
_waiting: weakref.WeakValueDictionary[int, asyncio.Future[None]] = weakref.WeakValueDictionary()
_start = threading.Lock()
_thread: threading.Thread | None = None


class _Lease(Protocol[_Held]):
    def _begin(self, number: int, /) -> bool: ...
    def _finish(self) -> _Held: ...
    def _cancel(self) -> None: ...
    def release(self) -> None: ...


async def enter(lease: _Lease[_Held]) -> _Held:
    """Acquires a lease. A task that is cancelled meanwhile leaves the queue at once."""
    number = next(_numbers)
    entered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    _waiting[number] = entered
    is_done = lease._begin(number)
    try:
        if not is_done:
            _start_thread()
            await entered
        return lease._finish()
    except BaseException:
        lease._cancel()
        raise


async def leave(lease: _Lease[object]) -> None:
    """Ends a lease. It never waits."""
    lease.release()


def _start_thread() -> None:
    global _thread
    if _thread is None:
        with _start:
            if _thread is None:
                _thread = threading.Thread(target=_wake, name="vramp leases", daemon=True)
                _thread.start()


def _wake() -> None:
    """Body of the thread."""
    while True:
        for number in _native.take_leases():
            entered = _waiting.get(number)
            if entered is None:
                continue  # it was cancelled
            try:
                entered.get_loop().call_soon_threadsafe(_settle, entered)
            except RuntimeError:
                pass  # the loop was closed
            del entered


def _settle(entered: asyncio.Future[None]) -> None:
    if not entered.done():
        entered.set_result(None)
