"""CuPy on vramp.

    import vramp.cupy
    vramp.cupy.install()                 # all arrays from here on

    with vramp.cupy.using(pool):         # or only those of this thread in this block
        x = cupy.zeros(1 << 20)

Memory comes from `vramp.pool(device)` of the device that is current at the allocation, for the stream
that is current then. It is freed on that stream with the last reference to the array. If an array is
used on another stream too, order that stream after the allocation, and call `record_use(array, stream)`
before the array is dropped; CuPy's own pool has no such call and needs the streams synchronized.

Out of memory, CuPy's own pool is emptied and garbage is collected before the second try. Then
`cupy.cuda.memory.OutOfMemoryError` is raised, with vramp's report as its cause.

What it cannot do:

- Arrays from before `install` stay in CuPy's pool, and so does pinned host memory.
- CuPy's memory hooks are not called, and `cupy.get_default_memory_pool()` counts none of the memory:
  `vramp.pool(device).stats()` does. `set_limit` of CuPy's pool has no effect: set `Pool.limit`.
- A stream made outside CuPy and wrapped in `cupy.cuda.ExternalStream` is not owned by CuPy: call
  `forget_stream(stream)` before you destroy it. Streams of `cupy.cuda.Stream` need no call.
- Allocating while a stream captures a graph raises vramp.CaptureError, unless an arena is attached to
  the capture through C (vramp_capture_attach).
- A pool of `using` that is closed takes its arrays' memory with it.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from . import _adaptors
from ._adaptors import Check, device_pool, handle_of, load, streams_of
from ._errors import InUseError, OutOfMemoryError, UnknownPointerError
from ._native import Allocation, Pool

__all__ = ["doctor", "forget_stream", "install", "record_use", "uninstall", "using"]

_lock = threading.Lock()
_installed: "Allocator | None" = None
# What CuPy was given, and what it had before. A bound method is called faster than an object.
_malloc: Any = None
_previous: Any = None


class Allocator:
    """Has an allocator of CuPy: `malloc` of a number of bytes returns a cupy.cuda.MemoryPointer.

    `fallback` allocates on devices that `pools` does not name. Without one, the shared pool of the
    device is opened at its first allocation.
    """

    __slots__ = (
        "_cupy",
        "_device",
        "_fallback",
        "_mallocs",
        "_memory",
        "_owning",
        "_pointer",
        "_pools",
        "_stream",
    )

    def __init__(
        self,
        cupy: Any,
        pools: dict[int, Pool] | None = None,
        fallback: Callable[[int], Any] | None = None,
    ) -> None:
        self._cupy = cupy
        self._device: Callable[[], int] = cupy.cuda.device.get_device_id
        self._stream: Callable[[int], Any] = cupy.cuda.get_current_stream
        self._memory: Any = cupy.cuda.UnownedMemory
        self._pointer: Any = cupy.cuda.MemoryPointer
        self._owning: type = cupy.cuda.Stream
        self._pools: dict[int, Pool] = dict(pools or {})
        self._mallocs = {device: pool.malloc for device, pool in self._pools.items()}
        self._fallback = fallback

    def malloc(self, nbytes: int) -> Any:
        """Allocates on the current device, for its current stream."""
        device = self._device()
        try:
            malloc = self._mallocs[device]
        except KeyError:
            if self._fallback is not None:
                return self._fallback(nbytes)
            malloc = self._open(device).malloc
        if nbytes == 0:
            return self._pointer(self._memory(0, 0, None, device), 0)
        stream = self._stream(device)
        raw = stream.ptr
        if raw == 0:
            try:
                block = malloc(nbytes, 0)
            except OutOfMemoryError:
                block = self._retry(device, nbytes, 0)
            return self._pointer(self._memory(block.ptr, nbytes, block, device), 0)
        if type(stream) is self._owning:
            streams_of(self._pools[device]).add(raw, stream)
        try:
            block = malloc(nbytes, raw)
        except OutOfMemoryError:
            block = self._retry(device, nbytes, raw)
        # The stream is in use for as long as the block is.
        owner = (block, stream)
        return self._pointer(self._memory(block.ptr, nbytes, owner, device), 0)

    def _open(self, device: int) -> Pool:
        pool = device_pool(device)
        self._pools[device] = pool
        self._mallocs[device] = pool.malloc
        return pool

    def _retry(self, device: int, nbytes: int, raw: int) -> Allocation:
        """Tries once more, after the remedies of CuPy's own pool."""
        self._cupy.get_default_memory_pool().free_all_blocks()
        gc.collect()
        pool = self._pools[device]
        try:
            return pool.malloc(nbytes, raw)
        except OutOfMemoryError as again:
            stats = pool.stats()
            raise self._cupy.cuda.memory.OutOfMemoryError(
                nbytes, stats.live, again.limit or 0
            ) from again

    def forget(self, raw: int) -> None:
        """Makes every pool forget a stream that CuPy does not own."""
        for pool in list(self._pools.values()):
            _adaptors.forget_stream(pool, raw)


def install(device: int | None = None) -> None:
    """Makes vramp the allocator of CuPy, on all devices or on one, for all threads.

    On other devices the allocator from before is used. Calling it again changes nothing. Raises
    ImportError, DeviceError, UnsupportedError if the device is simulated, or ValueError inside of
    `cupy.cuda.using_allocator`.
    """
    global _installed, _malloc, _previous
    cupy = load("cupy", "cupy-cuda13x")
    first = cupy.cuda.device.get_device_id() if device is None else device
    pools = {first: device_pool(first)}
    with _lock:
        if _malloc is not None and cupy.cuda.get_allocator() is _malloc:
            return
        previous = cupy.cuda.get_allocator()
        allocator = Allocator(cupy, pools, None if device is None else previous)
        malloc = allocator.malloc
        cupy.cuda.set_allocator(malloc)
        _installed, _malloc, _previous = allocator, malloc, previous


def uninstall() -> None:
    """Restores the allocator from before `install`. Live arrays stay valid.

    Calling it again changes nothing. Raises InUseError if another allocator was set since, because
    restoring would drop that one.
    """
    global _installed, _malloc, _previous
    cupy = load("cupy", "cupy-cuda13x")
    with _lock:
        if _installed is None:
            return
        if cupy.cuda.get_allocator() is not _malloc:
            raise InUseError(
                "another allocator was set after vramp.cupy.install(): set the one that you want "
                "with cupy.cuda.set_allocator"
            )
        cupy.cuda.set_allocator(_previous)
        _installed = _malloc = _previous = None


@contextmanager
def using(pool: Pool) -> Iterator[Pool]:
    """Allocates arrays of this thread from `pool` inside the block.

    The pool serves the device that is current when the block is entered; on others the shared pool is
    used. Arrays may outlive the block, but not a close of the pool.
    """
    cupy = load("cupy", "cupy-cuda13x")
    allocator = Allocator(cupy, {cupy.cuda.device.get_device_id(): pool})
    with cupy.cuda.using_allocator(allocator.malloc):
        yield pool


def record_use(array: Any, stream: Any = None) -> None:
    """Records that work queued on a stream so far uses an array or a view of one. No driver call.

    `stream` is a CuPy stream, any object with __cuda_stream__, or an address; None is the current
    stream. Raises UnknownPointerError if the memory is not vramp's.
    """
    cupy = load("cupy", "cupy-cuda13x")
    memory = array.data.mem
    owner = getattr(memory, "_owner", None)
    block = owner[0] if type(owner) is tuple else owner
    if not isinstance(block, Allocation):
        raise UnknownPointerError(
            "the array's memory is not vramp's: it was allocated before vramp.cupy.install(), or by "
            "another allocator"
        )
    if stream is None:
        stream = cupy.cuda.get_current_stream(memory.device_id)
    if type(stream) is cupy.cuda.Stream and stream.ptr:
        streams_of(block.pool).add(stream.ptr, stream)
    block.record_use(_address(stream))


def _address(stream: Any) -> int:
    return int(stream.ptr) if hasattr(stream, "ptr") else handle_of(stream)


def forget_stream(stream: Any) -> None:
    """Makes the pools that CuPy uses forget a stream that is not CuPy's own. Never waits.

    Call it before the stream is destroyed. Memory of it is reused after its work.
    """
    if _installed is not None:
        _installed.forget(_address(stream))


def doctor() -> list[Check]:
    """Returns what was checked: a name, whether it works (None: it is no failure), and a text."""
    cupy, line = _adaptors.check_library("cupy", "cupy-cuda13x")
    checks = [line]
    if cupy is None:
        return checks
    try:
        device = cupy.cuda.device.get_device_id()
    except Exception as error:  # without a driver CuPy raises an error of its own
        return [*checks, ("cupy device", None, f"{type(error).__name__}: {error}")]
    checks.append(("cupy device", True, f"{cupy.cuda.runtime.getDeviceCount()} devices"))
    checks.append(_adaptors.check_pool(device))
    current = cupy.cuda.get_allocator()
    if isinstance(getattr(current, "__self__", None), Allocator):
        checks.append(("cupy allocator", True, "vramp"))
    else:
        text = f"{current!r}: vramp.cupy.install() changes it"
        checks.append(("cupy allocator", None, text))
    return checks
