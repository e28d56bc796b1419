"""Numba's CUDA target (numba-cuda) on vramp, as an External Memory Management plugin.

    NUMBA_CUDA_MEMORY_MANAGER=vramp.numba python program.py

or, before the first use of CUDA in the program:

    import vramp.numba
    vramp.numba.install()

Device arrays come from `vramp.pool(device)` of their context's device. Numba does not say which streams
use an array, and its own manager frees with cuMemFree, which waits for all of them. So a freed array is
kept until the context has been synchronized, once for a batch: after as many frees as
NUMBA_CUDA_MAX_PENDING_DEALLOCS_COUNT says (10), or 1 GiB, or NUMBA_CUDA_MAX_PENDING_DEALLOCS_RATIO of
the card, or when an allocation finds no memory, of Numba or another library that uses the pool. A program that is correct with Numba's manager is
correct with this one, on any stream.

What it cannot do:

- An array cannot be sent to another process: `get_ipc_handle` raises vramp.UnsupportedError, because
  memory that is mapped from several handles has no CUDA IPC handle.
- Pinned, mapped and managed memory is Numba's own.
- `cuda.close()` and a reset of the device destroy the context, and with it every pool of the process on
  this device: no library can use vramp on it afterwards.
- `install` has no effect on contexts that exist, and raises then.
- Freeing while a stream captures a graph waits until the capture has ended, if the driver refuses to
  synchronize meanwhile.
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from . import _adaptors
from ._adaptors import Check, device_pool, forget_stream, load
from ._errors import InUseError, OutOfMemoryError, UnsupportedError, VrampError
from ._native import Pool

__all__ = ["doctor", "install"]

_DISTRIBUTION = "numba-cuda[cu13]"
_MOST_WAITING_BYTES = 1 << 30

_lock = threading.Lock()
_manager: Any = None

if TYPE_CHECKING:
    _numba_memory_manager: Any
    """The plugin's class, which Numba looks up by this name."""


def __getattr__(name: str) -> Any:
    if name == "_numba_memory_manager":
        return manager()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _address(stream: Any) -> int:
    """Returns the address of a stream of Numba, of the versions with and without the protocol."""
    if hasattr(stream, "__cuda_stream__"):
        return _adaptors.handle_of(stream)
    handle = stream.handle
    return int(getattr(handle, "value", handle) or 0)


class _Frees:
    """Freed arrays whose last use may still run, by context.

    1. A finalizer, on any thread and also inside of the garbage collector, moves a block from `live`
       to `waiting`. No lock is taken: both containers have atomic operations.
    2. `flush` takes the blocks that wait, synchronizes the context, and frees them in the pool. If the
       context cannot be synchronized, they wait on.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self.live: dict[int, tuple[int, int]] = {}
        self.waiting: deque[tuple[int, int]] = deque()
        self.waiting_bytes = 0
        self.most = most
        self.most_bytes = most_bytes
        self._keys = count()

    def add(self, address: int, size: int) -> int:
        key = next(self._keys)
        self.live[key] = (address, size)
        return key

    def end(self, key: int) -> bool:
        """Moves a block to those that wait. Returns True if it is time to flush."""
        block = self.live.pop(key, None)
        if block is None:
            return False  # the context was reset in the meantime
        self.waiting.append(block)
        self.waiting_bytes += block[1]
        return len(self.waiting) > self.most or self.waiting_bytes > self.most_bytes

    def flush(self, context: Any, pool: Pool, raw: int) -> int:
        """Returns how many blocks were freed. Raises what the context or the pool raises."""
        batch: list[tuple[int, int]] = []
        for _ in range(len(self.waiting)):
            try:
                batch.append(self.waiting.popleft())
            except IndexError:  # another thread flushes too
                break
        if not batch:
            return 0
        self.waiting_bytes = 0
        try:
            # The finalizer's thread may have another context, or none.
            context.push()
            try:
                context.synchronize()
            finally:
                context.pop()
        except BaseException:
            self.waiting.extendleft(reversed(batch))
            self.waiting_bytes += sum(size for _, size in batch)
            raise
        failed: VrampError | None = None
        for address, _ in batch:
            try:
                pool.deallocate(address, raw)
            except VrampError as error:
                failed = error
        if failed is not None:
            raise failed
        return len(batch)


def _flush_in_shortages(manager: Any, pool: Pool) -> None:
    """Lets a manager free the arrays that wait when any library finds no memory in the pool."""
    of_manager = weakref.ref(manager)

    def flush(requested: int) -> bool:
        found = of_manager()
        if found is None:
            return False
        try:
            return bool(found.flush())
        except found.driver_error:
            return False  # they wait on, as in a capture

    # The pool is the process's, and the manager lives as long as its context.
    weakref.finalize(manager, pool.on_shortage(flush).close).atexit = False


def manager() -> Any:
    """Returns the plugin's class. Raises ImportError if numba-cuda is not installed."""
    global _manager
    with _lock:
        if _manager is None:
            cuda = load("numba.cuda", _DISTRIBUTION)
            driver = load("numba.cuda.cudadrv.driver", _DISTRIBUTION)
            _manager = _build(cuda, driver)
        return _manager


def _build(cuda: Any, driver: Any) -> Any:
    config = getattr(driver, "config", None)
    most = int(getattr(config, "CUDA_DEALLOCS_COUNT", 10))
    ratio = float(getattr(config, "CUDA_DEALLOCS_RATIO", 0.2))
    binding = getattr(driver, "binding", None)
    out_of_memory = 2
    if binding is not None:
        out_of_memory = binding.CUresult.CUDA_ERROR_OUT_OF_MEMORY

    class VrampMemoryManager(cuda.HostOnlyCUDAMemoryManager):  # type: ignore[misc]
        """Device memory of a context from vramp's pool of its device. One for each context."""

        driver_error = driver.CudaDriverError

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._pool: Pool | None = None
            self._stream: Any = None
            self._raw = 0
            self._deferrals = 0
            self._frees = _Frees(most, _MOST_WAITING_BYTES)

        @property
        def interface_version(self) -> int:
            return 1

        @property
        def pool(self) -> Pool:
            """The pool of the context's device."""
            if self._pool is None:
                self._pool = device_pool(int(self.context.device.id))
                total = self._pool.stats().device_total
                self._frees.most_bytes = min(_MOST_WAITING_BYTES, int(total * ratio))
                _flush_in_shortages(self, self._pool)
            return self._pool

        def initialize(self) -> None:
            """Opens the pool. Called whenever the context becomes current."""
            if self._pool is None:
                # Without a capacity, freed host memory would not be batched.
                self.deallocations.memory_capacity = self.pool.stats().device_total

        def memalloc(self, size: int) -> Any:
            """Allocates device memory that any stream may use."""
            pool = self.pool
            if self._stream is None:
                # No work runs on it. vramp lets it wait for the last use of reused memory.
                self._stream = self.context.create_stream()
                self._raw = _address(self._stream)
            try:
                address = pool.allocate(size, self._raw)
            except OutOfMemoryError:
                address = self._retry(size)
            try:
                # Numba may use the memory on any stream, so the last use must be over now.
                self._stream.synchronize()
                key = self._frees.add(address, int(size))
                return cuda.MemoryPointer(
                    weakref.proxy(self.context),
                    ctypes.c_void_p(address),
                    size,
                    finalizer=partial(self._end, key),
                )
            except BaseException:
                pool.deallocate(address, self._raw)
                raise

        def _retry(self, size: int) -> int:
            gc.collect()
            self.flush()
            try:
                return self.pool.allocate(size, self._raw)
            except OutOfMemoryError as error:
                raise driver.CudaAPIError(out_of_memory, str(error)) from error

        def _end(self, key: int) -> None:
            if self._frees.end(key) and self._deferrals == 0:
                try:
                    self.flush()
                except driver.CudaDriverError:
                    pass  # they wait on, as in a capture; the next allocation without memory raises

        def flush(self) -> int:
            """Frees the arrays that wait. Waits for all work of the context. Returns how many."""
            if self._pool is None:
                return 0
            return self._frees.flush(self.context, self._pool, self._raw)

        def get_memory_info(self) -> Any:
            """Returns free and total bytes. Free memory of the pool counts as free."""
            stats = self.pool.stats()
            free = stats.device_free + max(0, stats.reserved - stats.live)
            total = stats.device_total
            limit = self.pool.limit
            if limit is not None:
                total = min(total, limit)
                free = min(free, max(0, limit - stats.live))
            return cuda.MemoryInfo(free=free, total=total)

        def get_ipc_handle(self, memory: Any) -> Any:
            """Raises UnsupportedError."""
            raise UnsupportedError(
                "memory of vramp has no CUDA IPC handle: copy it to an array that Numba's own "
                "manager allocated, in a process without NUMBA_CUDA_MEMORY_MANAGER=vramp.numba"
            )

        def reset(self) -> None:
            """Frees all memory of the context. Arrays that still exist become invalid."""
            super().reset()
            if self._pool is None:
                return
            for key in list(self._frees.live):
                self._frees.end(key)
            self.flush()
            forget_stream(self._pool, self._raw)
            self._stream, self._raw = None, 0

        @contextmanager
        def defer_cleanup(self) -> Iterator[None]:
            """Frees nothing inside the block, unless an allocation finds no memory."""
            with super().defer_cleanup():
                self._deferrals += 1
                try:
                    yield
                finally:
                    self._deferrals -= 1

    return VrampMemoryManager


def install() -> None:
    """Makes vramp Numba's memory manager. Call it before the first use of CUDA by Numba.

    Raises ImportError, or InUseError if Numba has a context already, which keeps its manager.
    """
    cuda = load("numba.cuda", _DISTRIBUTION)
    driver = load("numba.cuda.cudadrv.driver", _DISTRIBUTION)
    plugin = manager()
    if getattr(driver, "_memory_manager", None) is plugin:
        return
    devices: dict[int, Any] = dict(getattr(driver.driver, "devices", {}))
    if any(getattr(device, "primary_context", None) for device in devices.values()):
        raise InUseError(
            "Numba has a CUDA context, which keeps its memory manager: call vramp.numba.install() "
            "before the first array or kernel, or set NUMBA_CUDA_MEMORY_MANAGER=vramp.numba"
        )
    cuda.set_memory_manager(plugin)


def doctor() -> list[Check]:
    """Returns what was checked: a name, whether it works (None: it is no failure), and a text."""
    cuda, line = _adaptors.check_library("numba.cuda", _DISTRIBUTION)
    checks = [line]
    if cuda is None:
        return checks
    version = getattr(load("numba_cuda", _DISTRIBUTION), "__version__", "of unknown version")
    checks[0] = ("numba.cuda", True, f"numba-cuda {version}")
    try:
        available = cuda.is_available()
    except Exception as error:  # without a driver Numba raises an error of its own
        return [*checks, ("numba device", None, f"{type(error).__name__}: {error}")]
    if not available:
        return [*checks, ("numba device", None, "Numba finds no CUDA device")]
    checks.append(("numba device", True, f"{len(cuda.gpus)} devices"))
    checks.append(_adaptors.check_pool(0))
    driver = load("numba.cuda.cudadrv.driver", _DISTRIBUTION)
    current = getattr(driver, "_memory_manager", None)
    chosen = os.environ.get("NUMBA_CUDA_MEMORY_MANAGER")
    if current is not None and current is _manager:
        checks.append(("numba memory manager", True, "vramp"))
    elif current is None and chosen == "vramp.numba":
        checks.append(("numba memory manager", True, "vramp, at the first use of CUDA"))
    else:
        name = getattr(current, "__name__", chosen or "Numba's own")
        text = f"{name}: set NUMBA_CUDA_MEMORY_MANAGER=vramp.numba"
        checks.append(("numba memory manager", None, text))
    return checks
