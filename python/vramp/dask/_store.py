"""Contents in vramp's deferrable buffers, and arrays over leased ones."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, cast

from .. import Buffer, Client, Controller, FreedBuffer, InUseError, Pool, Tiers, pool
from ._values import Frame

PINNED_MIN = 8 << 20
"""Least bytes of pinned memory. It is moved in blocks of 1 MiB, and to the disk in steps of a tenth of it."""

_stores: weakref.WeakSet[TierStore] = weakref.WeakSet()


class LeasedArray:
    """An array of a buffer, on the card and unchanged for as long as the array lives: its bytes, or what `shaped` made
    of it. Never writes.

    It has `__cuda_array_interface__`, and on the simulator `__array_interface__` in its place. What is made of
    those keeps the array, and with it the lease. Kernels on it run on the default stream, or are ordered
    after it.
    """

    __slots__ = ("__weakref__", "_base", "_lease", "_view", "buffer", "nbytes")

    def __init__(self, buffer: Buffer, timeout: float | None = None) -> None:
        self.buffer = buffer
        """The buffer that is leased."""
        self.nbytes = buffer.nbytes
        self._base: LeasedArray | None = None
        """The array whose lease this one shares, if it has none of its own."""
        self._lease = buffer.lease("r", timeout=timeout)
        self._view = self._lease.acquire()

    def shaped(self, shape: Sequence[int], dtype: str) -> LeasedArray:
        """Returns the first bytes as a dense array, under the same lease."""
        other = LeasedArray.__new__(LeasedArray)
        other.buffer, other._base = self.buffer, self
        other._view = self._view.array(tuple(shape), dtype)
        other.nbytes = other._view.nbytes
        return other

    @property
    def shape(self) -> tuple[int, ...]:
        return self._view.shape

    @property
    def dtype(self) -> str:
        """Name of the element type."""
        return self._view.dtype

    @property
    def ptr(self) -> int:
        """Address of the first element."""
        return self._view.ptr

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        described: dict[str, Any] = dict(self._view.__cuda_array_interface__)
        # Libraries refuse memory that is read-only, also where they only read. The stream is the default
        # one: to name it makes CuPy wait for it on the host.
        described["data"] = (described["data"][0], False)
        described["stream"] = None
        return described

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return dict(self._view.__array_interface__)

    def __len__(self) -> int:
        return self.shape[0]

    def __del__(self) -> None:
        lease = getattr(self, "_lease", None)
        if lease is not None:
            lease.release()


class _Kept:
    """Contents in a buffer."""

    __slots__ = ("_buffer", "nbytes", "number")

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer
        self.nbytes = buffer.nbytes
        self.number = buffer.id

    @property
    def is_leased(self) -> bool:
        return self._buffer.is_locked

    @property
    def is_resident(self) -> bool:
        return self._buffer.is_resident

    def lease(self, timeout: float) -> LeasedArray:
        return LeasedArray(self._buffer, timeout)

    def spill(self) -> int:
        with suppress(InUseError):  # a lease of another thread, which began meanwhile
            return self._buffer.spill()
        return 0

    def push(self) -> int:
        with suppress(InUseError):
            return self._buffer.spill_to("disk")
        return 0

    def read(self) -> bytes:
        return self._buffer.read()


class _Empty:
    """A frame of no bytes."""

    nbytes = 0
    number = -1
    is_leased = False
    is_resident = True

    def lease(self, timeout: float) -> Any:
        return pool().malloc(1).array(0)

    def spill(self) -> int:
        return 0

    def push(self) -> int:
        return 0

    def read(self) -> bytes:
        return b""


class _Client:
    """Follows the buffers of a store."""

    def __init__(self, deferred: Callable[[int], None]) -> None:
        self._deferred = deferred

    def deferred(self, buffer: Buffer | FreedBuffer) -> None:
        self._deferred(buffer.id)


class TierStore:
    """Keeps contents in deferrable buffers of a pool.

    `deferred` is called with the number of each frame whose buffer left the card, also for an allocation of
    another library: by one thread, after it happened.
    """

    def __init__(self, tiers: Tiers, deferred: Callable[[int], None] | None = None) -> None:
        self.tiers = tiers
        """The buffers' tiers."""
        self._controller = Controller(tiers)
        if deferred is not None:
            self._controller.add_client(cast(Client, _Client(deferred)))
        self._evicted = 0
        _stores.add(self)

    @classmethod
    def open(cls, directory: str, host: int | None, deferred: Callable[[int], None]) -> TierStore:
        """Opens tiers on the shared pool of device 0, with `host` bytes of pinned memory, at least `PINNED_MIN`, and
        files in a directory."""
        os.makedirs(directory, exist_ok=True)
        host = None if host is None else max(host, PINNED_MIN)
        return cls(Tiers(pool(), host=host, disk=directory), deferred)

    @property
    def pool(self) -> Pool:
        """The pool that the buffers share the card with."""
        return self.tiers.pool

    def shortfall(self, nbytes: int) -> int:
        """Returns the bytes of values to free for a request. 0 if buffers left for it since the last call.

        It is at least a sixteenth of the request: the free memory may lie in parts that it cannot use, and a
        pool asks again 64 times.
        """
        stats, tiers = self.pool.stats(), self.tiers.stats()
        limit = self.pool.limit
        capacity = stats.device_total if limit is None else min(limit, stats.device_total)
        missing = nbytes - max(0, capacity - stats.live - tiers.resident)
        left, self._evicted = tiers.evicted - self._evicted, tiers.evicted
        if missing <= 0 and left > 0:
            return 0
        return max(missing, nbytes // 16, 1)

    def keep(self, frames: Sequence[Any]) -> list[Frame]:
        """Moves frames of the card to the host, and contents of the host to the card, in buffers of their own.

        All or none: after an exception no memory is taken, and the frames are as before.
        """
        kept: list[Frame] = []
        for frame in frames:
            if _nbytes(frame) == 0:
                kept.append(_Empty())
            elif isinstance(frame, LeasedArray):
                kept.append(_Kept(frame.buffer))
            else:
                # The buffer refers to the frame, and its contents leave from where they are.
                made = _Kept(self._controller.register(frame))
                if not isinstance(frame, bytes):
                    made.spill()
                kept.append(made)
        return kept


def _nbytes(frame: Any) -> int:
    return int(frame.nbytes) if hasattr(frame, "nbytes") else len(frame)


_lock = threading.Lock()
_own: TierStore | None = None


def store_of_process() -> TierStore:
    """Returns the store of a worker's mapping in this process, or one of the shared pool where it has none,
    as in a client."""
    global _own
    for store in list(_stores):
        return store
    with _lock:
        if _own is None:
            _own = TierStore(Tiers(pool()))
        return _own


def tiers_of_process() -> Tiers:
    """Returns the tiers of `store_of_process`."""
    return store_of_process().tiers
