"""The native module. Programs import these names from `vramp`."""

import os
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NoReturn, Protocol, SupportsIndex, TypeAlias, final

from ._types import AccessChange, DeviceInfo, Sharing, Stats
from .ipc import Ticket

__all__ = [
    "Allocation",
    "Array",
    "Exported",
    "Imported",
    "Measure",
    "Pin",
    "Pool",
    "Registration",
    "Stream",
    "advise",
    "explain",
    "library_version",
    "missing_card",
    "open",
    "open_all",
    "opened",
    "pool",
    "record_history",
    "replay",
    "snapshot",
    "unused_stats",
]

class _HasCudaStream(Protocol):
    def __cuda_stream__(self) -> tuple[int, int]: ...

_Stream: TypeAlias = int | Stream | _HasCudaStream | None

@final
class Pool:
    """A pool of device memory. Threads may share it."""

    def malloc(self, size: SupportsIndex, stream: _Stream = None) -> Allocation:
        """Allocates at least `size` bytes for work on a stream, aligned to 512 bytes.

        A cache hit makes no driver call and keeps the interpreter's lock; all else releases it.
        Raises OutOfMemoryError after every remedy failed, ClosedError or DriverError.
        """

    def allocate(self, size: SupportsIndex, stream: _Stream = None) -> int:
        """Allocates as `malloc` does and returns the address, for libraries that keep raw addresses.

        It lives until `deallocate`, of this pool or through the C interface.
        """

    def deallocate(self, ptr: SupportsIndex, stream: _Stream = None) -> None:
        """Frees the memory at an address. Never waits for work.

        Work on it must be queued on `stream`, be ordered before the work queued there so far, or be
        recorded with `record_use`. Raises UnknownPointerError and changes nothing if no live memory
        of the pool begins there.
        """

    def record_use(self, ptr: SupportsIndex, stream: _Stream = None) -> None:
        """Records that work queued on a stream so far uses the memory at an address. No driver call."""

    def create_stream(self) -> Stream:
        """Creates a stream on the device. One driver call."""

    def forget_stream(self, stream: _Stream) -> None:
        """Forgets a stream of another library. Call it before the stream is destroyed. Never waits."""

    def on_shortage(self, handler: Callable[[int], bool]) -> Registration:
        """Registers a function that is called with the requested bytes before a request fails.

        It runs on the thread of the request, and several threads may run it at the same time. It may
        free and allocate; a request inside it calls no handlers. It returns True if it freed memory:
        then the request is tried again, up to 64 times. All handlers are called, in the order of
        registration. An exception is passed to sys.unraisablehook and counts as False. No handler is
        called in a forked child. The pool keeps the handler until one of the two is closed.
        """

    def stats(self) -> Stats:
        """Returns the counts so far. One driver call, for the device's free memory."""

    def memory_stats(self) -> dict[str, int]:
        """Returns the statistics of `torch.cuda.memory_stats`, by its names. O(n) in the free regions."""

    def reset_peaks(self) -> None:
        """Sets all peaks to the current values. Those of `measure` are not changed."""

    def measure(self) -> Measure:
        """Returns a context manager that measures peaks and counts of its block.

        Blocks may nest, and run in several threads. An allocation costs the same with and without.
        """

    @property
    def limit(self) -> int | None:
        """Most bytes that the pool may reserve. None is the memory of the device.

        Set it to bytes, to a text such as "80GiB" or "90%" of the device, or to None. Idle memory
        above it is released at once; memory in use stays.
        """

    @limit.setter
    def limit(self, limit: int | str | None) -> None: ...
    def trim(self, keep: SupportsIndex | None = None) -> None:
        """Releases idle memory until at most `keep` bytes are reserved, or no more is idle."""

    def audit(self) -> None:
        """Checks every invariant of the pool, for tests. O(n log n). Raises InternalError."""

    def record_history(self, events: SupportsIndex) -> None:
        """Starts to record the last `events` mallocs and frees, 40 bytes each. 0 stops recording."""

    def snapshot(self, path: str | os.PathLike[str]) -> None:
        """Writes blocks, segments and the recorded events to a file.

        If the name ends with .json it is a timeline for Perfetto, else a snapshot for PyTorch's viewer
        (pytorch.org/memory_viz), `vramp.replay` and `vramp.explain`. Raises FileError.
        """

    def export(self, memory: Allocation | int, stream: _Stream = None) -> Exported:
        """Exports the allocation, or the live block that begins at an address, to other processes.

        Tickets wait for the work on `stream`, by default the allocation's. See `vramp.ipc.export`.
        """

    def open_ticket(self, ticket: bytes, stream: _Stream = None) -> Imported:
        """Opens the memory of a ticket for work of this pool's device. See `vramp.ipc.open`."""

    def grant_access(self, device: SupportsIndex) -> AccessChange:
        """Grants another device access to all memory of the pool and of its comm pools, now and later.

        About 45 us for each physical handle, and later driver calls that map memory take longer. Raises
        RangeError if the device is no peer, UnsupportedError if the option `peers` excludes it.
        """

    def revoke_access(self, device: SupportsIndex) -> AccessChange:
        """Takes back the access of a device, whose work on the memory must be complete."""

    def pin(self, memory: Allocation | int, size: SupportsIndex | None = None) -> Pin:
        """Keeps memory at its addresses while something outside has registered it. No driver call.

        `memory` is an allocation, or an address with `size`. The memory may be freed and allocated again
        meanwhile. Raises UnknownPointerError if it is not memory of the pool.
        """

    def comm_pool(self, name: str = "comm") -> Pool:
        """Makes a pool for memory that communication libraries register, such as NCCL and UCX.

        It has this pool's device, limit, streams and access of other devices. Its segments are one
        physical handle each and stay until they are trimmed.
        """

    @property
    def sharing(self) -> Sharing:
        """How the memory can be shared, and how much is."""

    def __reduce__(self) -> NoReturn: ...
    @property
    def device(self) -> str:
        """Name of the device, such as cuda:0 or sim:h200."""

    @property
    def device_info(self) -> DeviceInfo:
        """What the device is and can."""

    @property
    def is_simulated(self) -> bool:
        """True if the device is simulated: its memory is the host's."""

    @property
    def handle(self) -> int:
        """The id of `vramp_allocator_t`, for the C interface in the same process."""

    @property
    def is_closed(self) -> bool:
        """True once it was closed."""

    def close(self) -> None:
        """Waits for the work on its streams and returns all memory to the device.

        Raises InUseError while arrays or DLPack tensors use its memory, and for a shared pool.
        Later calls raise ClosedError.
        """

    def __enter__(self) -> Pool: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...

@final
class Allocation:
    """A block of device memory. It is freed by `free`, at the end of a `with` block, or with the last
    reference."""

    @property
    def ptr(self) -> int:
        """Address of the first byte. Raises UnknownPointerError once it was freed."""

    @property
    def size(self) -> int:
        """Requested bytes."""

    @property
    def usable_size(self) -> int:
        """Usable bytes: those requested, rounded up."""

    @property
    def stream(self) -> int | Stream:
        """The stream that it was allocated for. 0 is the default stream."""

    @property
    def pool(self) -> Pool:
        """The pool that it came from."""

    @property
    def is_freed(self) -> bool:
        """True once it was freed."""

    def free(self, stream: _Stream = None) -> None:
        """Frees the memory. Work on it must be queued on `stream`, by default its own, be ordered before
        the work queued there so far, or be recorded with `record_use`. Never waits.

        Raises InUseError while arrays or DLPack tensors use it, UnknownPointerError if it was freed.
        """

    def record_use(self, stream: _Stream = None) -> None:
        """Records that work queued on a stream so far uses the memory. No driver call."""

    def array(
        self,
        shape: SupportsIndex | Sequence[SupportsIndex] | None = None,
        dtype: Any = None,
        *,
        offset: SupportsIndex | None = None,
    ) -> Array:
        """Returns a dense array in the memory. By default all of its bytes.

        `dtype` is a name such as "float32", a type such as float, or a dtype of NumPy, CuPy or PyTorch.
        `offset` is in bytes. The memory is not initialized. Raises RangeError if it does not fit.
        """

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any: ...
    def __reduce__(self) -> NoReturn: ...
    def __enter__(self) -> Allocation: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...

@final
class Array:
    """An array in an allocation or an import, for other libraries to use without a copy.

    On the simulator its memory is the host's, for NumPy and DLPack (CPU). On a card it is for CuPy,
    Numba and DLPack (CUDA). It keeps the allocation alive, and so does all that was made of it.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str:
        """Name of the element type."""

    @property
    def nbytes(self) -> int: ...
    @property
    def ptr(self) -> int:
        """Address of the first element."""

    @property
    def allocation(self) -> Allocation | Imported:
        """What the array is a part of."""

    @property
    def __array_interface__(self) -> dict[str, Any]: ...
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...
    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Returns a DLPack capsule. On a card the consumer's stream waits for the allocation's, and the
        use is recorded when the consumer is done. Raises BufferError if a copy would be needed."""

    def __dlpack_device__(self) -> tuple[int, int]: ...
    def __reduce__(self) -> NoReturn: ...
    def __len__(self) -> int: ...

@final
class Exported:
    """A block that other processes may open, until `close`, the end of a `with` block, or the last
    reference. What is open then stays open, and keeps the block."""

    def ticket(self, keep_until_opened: bool = True, *, synchronize: bool = True) -> Ticket:
        """Returns a ticket for another process. Waits for the work on the block's stream before, unless
        `synchronize` is False.

        With `keep_until_opened` it counts as a holder until it was opened once, or `revoke` ends that.
        Without, it can be opened as long as the export is open. Either can be opened several times.
        """

    def revoke(self, ticket: bytes) -> bool:
        """Ends the hold of a ticket that did not arrive. Returns False if it was opened."""

    @property
    def opens(self) -> int:
        """Number of opens that importers have not closed."""

    @property
    def is_held(self) -> bool:
        """True while an importer has it open, or a ticket that keeps it was not opened."""

    def wait_released(self, timeout: float | None = None) -> bool:
        """Waits until it is not held, for `timeout` seconds at most. Returns False at the end of that."""

    def close(self) -> None:
        """Closes the export: later opens fail. Never waits."""

    @property
    def is_closed(self) -> bool:
        """True once it was closed."""

    @property
    def ptr(self) -> int:
        """Address of the block in this process."""

    @property
    def pool(self) -> Pool: ...
    def __reduce__(self) -> NoReturn: ...
    def __enter__(self) -> Exported: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...

@final
class Imported:
    """Memory of another process, until `close`, the end of a `with` block, or the last reference.

    It stays readable after the exporting process has ended, and after its pool is closed.
    """

    @property
    def ptr(self) -> int:
        """Address of the first byte in this process. Raises ClosedError once it was closed."""

    @property
    def size(self) -> int:
        """Bytes of the exporter's block."""

    @property
    def pool(self) -> Pool:
        """The pool that opened it."""

    @property
    def is_closed(self) -> bool:
        """True once it was closed."""

    def record_stream(self, stream: _Stream = None) -> None:
        """Records that work queued on a stream, so far and from now on, uses the memory: `close` waits for
        it. No driver call."""

    def array(
        self,
        shape: SupportsIndex | Sequence[SupportsIndex] | None = None,
        dtype: Any = None,
        *,
        offset: SupportsIndex | None = None,
    ) -> Array:
        """Returns a dense array in the memory, as `Allocation.array` does. By default all of its bytes."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any: ...
    def close(self) -> None:
        """Waits for recorded work, unmaps the memory, and closes it at the exporter.

        Raises InUseError while arrays or DLPack tensors use it.
        """

    def __reduce__(self) -> NoReturn: ...
    def __enter__(self) -> Imported: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...

@final
class Pin:
    """Memory that stays at its addresses until `unpin`, the end of a `with` block, or the last reference."""

    @property
    def ptr(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def pinned_bytes(self) -> int:
        """Bytes of the physical handles that the memory lies in."""

    @property
    def pool(self) -> Pool: ...
    @property
    def is_unpinned(self) -> bool:
        """True once it has ended."""

    def unpin(self) -> None:
        """Ends the pin, after the registration has ended."""

    def __enter__(self) -> Pin: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...

@final
class Stream:
    """A stream that a pool created. It is destroyed with the last reference; queued work still runs."""

    @property
    def pool(self) -> Pool: ...
    def __cuda_stream__(self) -> tuple[int, int]:
        """Version and address of the stream. Raises UnsupportedError on the simulator."""

@final
class Measure:
    """Peaks and counts of a `with` block, while it runs and afterwards. Amounts are in bytes."""

    @property
    def live_peak(self) -> int:
        """Most requested bytes of live allocations, older ones included."""

    @property
    def reserved_peak(self) -> int:
        """Most physical memory of the pool."""

    @property
    def live_start(self) -> int:
        """Live bytes when the block began."""

    @property
    def live_end(self) -> int:
        """Live bytes when the block ended, or now."""

    @property
    def allocated(self) -> int:
        """Number of allocations, of all threads."""

    @property
    def freed(self) -> int:
        """Number of frees, of all threads."""

    @property
    def hits(self) -> int:
        """Allocations without a driver call for memory."""

    @property
    def misses(self) -> int:
        """Allocations that needed driver calls."""

    def __enter__(self) -> Measure: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...

@final
class Registration:
    """A shortage handler that is registered. Dropping it does not remove the handler."""

    @property
    def is_closed(self) -> bool:
        """True once it was closed."""

    def close(self) -> None:
        """Removes the handler. Waits for its calls in progress on other threads, except inside a
        handler. Does nothing if it or the pool was closed before."""

    def __enter__(self) -> Registration: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...

def pool(device: SupportsIndex = 0) -> Pool:
    """Returns the pool of a device that this process shares: with PyTorch, C and C++ through vramp.

    The first call opens it with the settings of VRAMP_CONF. On a machine without a GPU, and with
    VRAMP_DEVICE=sim, it is simulated. It cannot be closed. Raises DeviceError or OptionError.
    """

def opened(device: SupportsIndex) -> Pool | None:
    """Returns the shared pool of a device, or None if no memory of the device was used yet."""

def unused_stats() -> dict[str, int]:
    """Returns the statistics of a device that was not used: `Pool.memory_stats` with zeros."""

def record_history(events: SupportsIndex) -> None:
    """Starts to record the last `events` mallocs and frees, 40 bytes each, of every device whose pool this
    process shares, also of those that are opened later. 0 stops recording. Opens no device.
    """

def snapshot(path: str | os.PathLike[str]) -> None:
    """Writes blocks, segments and recorded events of every such device to one file, as `Pool.snapshot` does
    for one pool. Each device has its own number in it. Raises FileError.
    """

def open(device: str, options: str) -> Pool: ...
def open_all(device: str, options: str) -> list[Pool]: ...
def library_version() -> str: ...
def missing_card() -> str | None: ...
def replay(
    path: str,
    allocators: Sequence[str],
    limit: str | None,
    device: str | None,
    trace_device: Sequence[int] | None,
) -> str: ...
def explain(
    path: str,
    limit: str | None,
    at: SupportsIndex | None,
    top: SupportsIndex,
    fits: bool,
    trace_device: Sequence[int] | None,
) -> str: ...
def advise(path: str, limits: Sequence[str], trace_device: Sequence[int] | None) -> str: ...
