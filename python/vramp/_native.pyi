"""The native module. Programs import these names from `vramp`."""

import os
from collections.abc import Callable, Coroutine, Iterable, Mapping, MutableMapping, Sequence
from types import TracebackType
from typing import Any, Literal, NoReturn, Protocol, SupportsIndex, TypeAlias, final

from typing_extensions import Self, disjoint_base

from ._types import (
    Access,
    AccessChange,
    BudgetRoom,
    BudgetStatus,
    DeviceInfo,
    KeptEntry,
    KvStats,
    RegionStatus,
    Sharing,
    Stats,
    Store,
    TierStats,
    TurnProcess,
    TurnStatus,
)
from .ipc import Ticket

__all__ = [
    "Allocation",
    "Array",
    "Budget",
    "Buffer",
    "BufferPin",
    "Events",
    "Exported",
    "Imported",
    "Kept",
    "KvArena",
    "Lease",
    "LeaseOwner",
    "LeaseSet",
    "Measure",
    "Pin",
    "Pool",
    "Registration",
    "Reservation",
    "Stream",
    "Tiers",
    "Turn",
    "TurnRequest",
    "Turns",
    "View",
    "advise",
    "budget_groups",
    "budget_status",
    "command",
    "explain",
    "keeper_entries",
    "keeper_evict",
    "keeper_pid",
    "keeper_remove",
    "keeper_stop",
    "library_version",
    "missing_card",
    "open",
    "open_all",
    "opened",
    "pool",
    "program",
    "record_history",
    "replay",
    "report_unraisable",
    "take_leases",
    "snapshot",
    "unused_stats",
    "opened_devices",
    "region_at",
    "region_backup",
    "region_begin",
    "region_default_disk",
    "region_disk",
    "region_end",
    "region_remove",
    "regions_around_sleep",
    "regions_clean",
    "regions_known",
    "regions_on_pressure",
    "regions_pause",
    "regions_prefetch",
    "regions_resume",
    "regions_status",
    "regions_unregister",
    "size_argument",
]

class _HasCudaStream(Protocol):
    def __cuda_stream__(self) -> tuple[int, int]: ...

_Stream: TypeAlias = int | Stream | _HasCudaStream | None
_Pages: TypeAlias = int | range | Iterable[int | range]

@final
class Pool:
    """A pool of device memory. Threads may share it."""

    def malloc(self, size: _Size, stream: _Stream = None) -> Allocation:
        """Allocates at least `size` bytes for work on a stream, aligned to 512 bytes.

        A cache hit makes no driver call and keeps the interpreter's lock; all else releases it.
        Raises OutOfMemoryError after every remedy failed, ClosedError or DriverError.
        """

    def allocate(self, size: _Size, stream: _Stream = None) -> int:
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
    def trim(self, keep: _Size | None = None) -> None:
        """Releases idle memory until at most `keep` bytes are reserved, or no more is idle, and unpins all idle memory
        of the host."""

    def audit(self) -> None:
        """Checks every invariant of the pool, for tests. O(n log n). Raises InternalError."""

    def record_history(self, events: SupportsIndex) -> None:
        """Starts to record the last `events` mallocs and frees, 40 bytes each. 0 stops recording."""

    def snapshot(self, path: str | os.PathLike[str]) -> None:
        """Writes blocks, segments and the recorded events to a file.

        If the name ends with .json it is a timeline for Perfetto, else a snapshot for PyTorch's viewer
        (pytorch.org/memory_viz), `vramp.replay` and `vramp.explain`. Raises FileError.
        """

    def export(
        self, memory: Allocation | int, stream: _Stream = None, *, size: SupportsIndex | None = None
    ) -> Exported:
        """Exports the allocation, or the live block that begins at an address, to other processes.

        Tickets wait for the work on `stream`, by default the allocation's. See `vramp.ipc.export`. With `size` it is
        so many bytes from an address on, whatever lies there, such as committed pages of a `vramp.kv.Arena`: they stay
        at their addresses until the export is closed and no importer has it open, also while they are parked.
        """

    def kept_draft(
        self,
        directory: str | os.PathLike[str],
        reply_timeout: float,
        name: str,
        size: int | str,
        *,
        part: int | str | None = None,
        priority: int = 0,
        kept_for: float | None = None,
        timeout: float = 30.0,
    ) -> Kept:
        """Begins memory of a name. See `vramp.keep.Keeper.draft`."""

    def kept_open(
        self,
        directory: str | os.PathLike[str],
        reply_timeout: float,
        name: str,
        *,
        readonly: bool = True,
        lock: Literal["none", "read", "write"] = "read",
        same_addresses: bool = True,
        timeout: float = 30.0,
    ) -> Kept:
        """Opens memory of a name. See `vramp.keep.Keeper.open`."""

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
class Kept:
    """Memory of a name that a keeper holds: `vramp.keep.Keeper.draft` and `open` return it.

    It is mapped here until `close`, the end of a `with` block, or the last reference, which also give its lock back. The
    keeper goes on keeping it.
    """

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def pool(self) -> Pool:
        """The pool that opened it."""

    @property
    def ptr(self) -> int:
        """Address of the first byte in this process. It stays the same from the draft on."""

    @property
    def size(self) -> int:
        """Bytes in use."""

    @property
    def readonly(self) -> bool:
        """True if work may only read it: a write ends the CUDA context."""

    @property
    def is_draft(self) -> bool:
        """True before the commit."""

    @property
    def is_closed(self) -> bool:
        """True once it was closed."""

    @property
    def current(self) -> tuple[int, bytes] | None:
        """Epoch and digest that the name had when the draft began; None for a new name."""

    def place(self, size: int | str) -> int:
        """Creates memory in a draft, and returns its distance from `ptr`, a multiple of 512. Contents are undefined.

        Raises RangeError if the draft is full, and OutOfMemoryError.
        """

    def commit_draft(
        self, layout: bytes | None = None, digest: bytes | None = None, readonly: bool = True
    ) -> int:
        """Makes a draft the memory of its name, as a whole, and returns the epoch.

        Waits for recorded work (`record_stream`, and that of DLPack consumers that have ended): synchronize other streams
        before. `layout` says what lies where and `digest`, 32 bytes, which contents these are. The lock is "read" then,
        and "write" with `readonly=False`: nobody reads before `commit` or `release_unchanged`. After an error the memory is this process's own, until it is closed.
        """

    def abandon(self) -> None:
        """Gives the name of a draft up for others. Arrays keep the memory, which is this process's own."""

    @property
    def layout(self) -> bytes:
        """The publisher's description."""

    @property
    def digest(self) -> bytes:
        """The publisher's digest of the contents."""

    @property
    def epoch(self) -> int:
        """Number of the last commit in this memory. No message."""

    @property
    def is_torn(self) -> bool:
        """True if a process ended while it wrote the memory. No message."""

    @property
    def is_superseded(self) -> bool:
        """True if the name has other memory by now, or none. This one stays as it is. No message."""

    @property
    def is_adrift(self) -> bool:
        """True while no keeper knows of this process. What is mapped stays valid. No message."""

    @property
    def writer_waits(self) -> bool:
        """True if another process waits to write. No message."""

    def read(self, timeout: float = 30.0) -> int:
        """Takes the lock for reading and returns the epoch."""

    def write(self, timeout: float = 30.0) -> int:
        """Takes the lock for writing and returns the epoch before. A lock for reading is given back first."""

    def unlock(self, timeout: float = 30.0) -> None:
        """Gives a lock for reading back."""

    def yield_to_writer(self, timeout: float = 30.0) -> int:
        """Lets a waiting writer write, takes the lock for reading again, and returns the epoch. No message and no wait if
        no process waits: for the moment between two steps."""

    def commit(self, *, lock: Literal["none", "read", "write"] = "none") -> int:
        """Makes what was written the next epoch and returns its number. `lock` is kept."""

    def release_unchanged(self) -> None:
        """Gives the lock for writing back, if nothing was written."""

    def wait_newer(self, than: int, timeout: float = 30.0) -> int | None:
        """Waits until the name has a later epoch than `than`, in this memory or in newer one, and returns its number; None
        at the timeout."""

    def record_stream(self, stream: _Stream = None) -> None:
        """Records that work queued on a stream, so far and from now on, uses the memory: what gives the lock or the memory
        back waits for it."""

    def array(
        self,
        shape: SupportsIndex | Sequence[SupportsIndex] | None = None,
        dtype: Any = None,
        *,
        offset: int | str | None = None,
    ) -> Array:
        """Returns an array in the memory, by default of all its bytes."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any: ...
    def close(self) -> None:
        """Waits for recorded work, unmaps the memory, and gives the lock back. If another thread waits in a call of this
        object, that happens when that call ends."""

    def __reduce__(self) -> NoReturn: ...
    def __enter__(self) -> Kept: ...
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
        """Waits for recorded work, and closes the memory at the exporter.

        It may stay mapped for ten seconds, for the next open.

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

@disjoint_base
class KvArena:
    """Tensors of a cache at fixed addresses, without torch: `vramp.kv.Arena` has more."""

    def __new__(
        cls,
        pool: Pool,
        *,
        tensors: SupportsIndex,
        size: _Size,
        page: _Size,
        superpage: _Size,
        layout: str,
        limit: _Size | None,
        ahead: _Size,
    ) -> Self: ...
    @property
    def pool(self) -> Pool:
        """The pool of its memory."""

    @property
    def tensors(self) -> int:
        """Number of tensors."""

    @property
    def pages(self) -> int:
        """Pages of each tensor: they are numbered from 0."""

    @property
    def page(self) -> int:
        """Bytes of a page of one tensor."""

    @property
    def layout(self) -> Literal["separate", "interleaved"]:
        """How the tensors lie."""

    @property
    def ptr(self) -> int:
        """Address of the first tensor. The others follow without a gap."""

    @property
    def size(self) -> int:
        """Bytes of all tensors."""

    @property
    def limit(self) -> int | None:
        """Most bytes that the arena may have, parked pages included. None is the pool's limit alone.

        Set it to bytes, to a text such as "80GiB", or to None. What is parked above it serves other requests; what is
        committed stays.
        """

    @limit.setter
    def limit(self, limit: _Size | None) -> None: ...
    def commit(self, pages: _Pages, stream: _Stream = None) -> None:
        """Gives pages memory in all tensors, or none of them. The contents are undefined.

        `pages` is a number, a range, or numbers and ranges. The memory is for work on `stream`; without one for work on
        any stream, and then the call waits for work that still uses it. Pages that were parked cost no driver call.
        Raises RangeError for a page that is committed, given twice, or beyond the last, and OutOfMemoryError if card,
        pool or limit have no room.
        """

    def take(self, count: SupportsIndex, stream: _Stream = None) -> list[range]:
        """Commits `count` pages of the arena's choice, parked ones first, and returns them. Otherwise as `commit`."""

    def park(self, pages: _Pages, stream: _Stream = None) -> None:
        """Gives up pages, once the work that is queued by now on `stream` is over, or on all streams without one.

        They stay mapped, until another request of the process is short of memory. No driver call. Raises RangeError for
        a page that is not committed.
        """

    def release(self, keep: _Size | None = None) -> int:
        """Returns parked pages to the card, the oldest first, until at most `keep` bytes are parked. Returns the bytes.

        Waits for no work: pages whose work is not over stay, and so do those in one handle with committed ones, and
        pinned ones.
        """

    def park_first(self, count: SupportsIndex) -> list[range]:
        """Returns committed pages, those first that are best given up: of handles with few committed pages."""

    def available(self) -> int:
        """Returns how many pages commits could have now: parked ones, and what pool, limits and card have left.

        One driver call.
        """

    def stats(self) -> KvStats:
        """Returns how many pages are in which state. No driver call."""

    def record_use(self, stream: _Stream = None) -> None:
        """Records that work queued on a stream so far uses the memory. Streams of commits and parks are recorded."""

    def view(
        self,
        shape: int | Sequence[int] | None = None,
        dtype: object = None,
        *,
        offset: SupportsIndex | None = None,
        size: SupportsIndex | None = None,
    ) -> Array:
        """Returns an array in `size` bytes from `offset` on. By default it has bytes, as many as there are."""

    def close(self) -> None:
        """Ends the arena. Its memory serves other requests once the work on it is over; that is not waited for.

        Raises InUseError while arrays or tensors use it.
        """

    @property
    def is_closed(self) -> bool:
        """True once it was closed."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...
    def __reduce__(self) -> NoReturn: ...

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

_Size: TypeAlias = SupportsIndex | str
_Shape: TypeAlias = SupportsIndex | Iterable[SupportsIndex] | None

@final
class Tiers:
    """Deferrable buffers of a pool, and the host memory and the disk where their contents go.

    While they are open, a request for which the pool has too little memory evicts buffers. Threads may
    share them. A `with` block closes them at its end.
    """

    def __new__(
        cls,
        pool: Pool,
        config: str | os.PathLike[str] | Mapping[str, object] | None = None,
        *,
        host: _Size | None = None,
        disk: str | os.PathLike[str] | None = None,
        disk_limit: _Size | None = None,
        device: _Size | None = None,
        patience: float | None = None,
        piece: _Size | None = None,
        store: Store | MutableMapping[int, bytes] | None = None,
        peers: Mapping[int, _Size] | None = None,
        promote_after: int | None = None,
    ) -> Tiers:
        """Opens tiers.

        `host` is the most pinned memory of the host, by default a quarter of the machine's. `disk` is a
        directory and `disk_limit` the most bytes there, by default what is free. `device` is the most
        memory of the card for buffers, by default the limit of the pool. Instead of these, `config` has
        the tables [[gpu]], [[host]], [[disk]] and [[peer]]: TOML, the path of a TOML file, or a mapping.

        `store` takes the place of the directory, with `disk_limit` as the most bytes in it: an object with
        the methods of `vramp.Store`, or a mapping.

        `peers` has numbers of other cards and the most bytes of free memory that contents take of each. Contents
        go there before the host. They move on when a pool of that card, or the driver, needs the memory.

        `patience` is how many seconds a lease waits by default. `piece` is the unit of moves, 4 to 32 MiB.
        `promote_after` is the number of reads in place after which the next one restores a buffer, by default 3.

        Raises OptionError, FileError, or TierFullError if the host's memory cannot be pinned.
        """

    @property
    def pool(self) -> Pool: ...
    @property
    def is_closed(self) -> bool: ...
    def buffer(self, nbytes: _Size, *, priority: int = 0, readable: bool = False) -> Buffer:
        """Returns an empty buffer. It has an address, and no memory before the first lease.

        Buffers of lower priority leave the card first. On the card it takes whole pages of 2 MiB. A readable one
        may be read in place: its copies lie in host memory that is mapped at its address. Raises
        UnsupportedError if the device cannot do that.
        """

    def adopt(self, memory: object, *, stream: _Stream = None) -> Buffer:
        """Makes a buffer of memory that an object has.

        That of an Allocation, an Array or an object with `__cuda_array_interface__` becomes the buffer
        without a copy. The object is kept until the contents leave the card, and dropped then, by the
        thread that evicts them: so drop other references to it, and use its memory only under leases of
        the buffer. A view of it has the object's address until then, and the buffer's own afterwards. The
        work queued on `stream` so far writes the memory; by default on the object's own stream.

        The contents of any other object with the buffer protocol, such as bytes or a NumPy array, are
        copied into a new buffer.
        """

    def lease(
        self,
        wanted: Iterable[tuple[Buffer, Access]],
        stream: _Stream = None,
        *,
        timeout: float | None = None,
        in_place: bool = False,
    ) -> LeaseSet:
        """Returns a request for a lease on several buffers, all or none. Two such sets never deadlock.

        With `in_place` readable buffers that are only read may stay on the host: `LeaseSet.in_place`.
        """

    def evict(self, nbytes: _Size) -> int:
        """Evicts buffers until so much more memory of the card is free, or none may leave.

        Returns the bytes that were freed. Waits for the copies.
        """

    def reserve(
        self,
        nbytes: _Size,
        tier: Literal["device", "host", "disk"] = "device",
        *,
        timeout: float | None = 0.0,
        priority: int = 0,
        owner: SupportsIndex | None = None,
    ) -> Reservation:
        """Reserves memory of a tier. Evicts buffers if that is needed.

        Waits at most `timeout` seconds, with None for ever. `owner` is a number of a task: a wait that
        is part of a deadlock of owners ends. Raises TierFullError or LeaseTimeoutError.
        """

    def retrieve(self, *buffers: Buffer) -> None:
        """Restores buffers, all at once, and waits until they are there."""

    def synchronize(self, stream: _Stream = None) -> None:
        """Waits for the work queued on a stream so far."""

    def stats(self) -> TierStats: ...
    def _events(self) -> Events: ...
    def audit(self) -> None:
        """Checks every invariant of the buffers. Raises InternalError if one does not hold."""

    def close(self) -> None:
        """Closes the tiers, and ends their buffers and reservations, which raise ClosedError then.

        Raises InUseError and changes nothing while leases, DLPack tensors or pins use buffers. The close
        of the pool does the same.
        """

    def __enter__(self) -> Tiers: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...
    def __reduce__(self) -> NoReturn: ...

@final
class Buffer:
    """A buffer whose contents may leave the card while no lease holds it. Its address stays.

    It keeps its tiers. The last reference frees the contents, on the card, the host and the disk.
    """

    priority: int
    """Buffers of lower priority leave the card first."""

    @property
    def id(self) -> int:
        """Number of the buffer, unique in the process. Its hash and its equality follow it."""

    @property
    def nbytes(self) -> int: ...
    @property
    def ptr(self) -> int:
        """Address of the first byte. There is memory only under a lease or a pin."""

    @property
    def tiers(self) -> Tiers: ...
    @property
    def is_resident(self) -> bool:
        """True if all contents are on the card. Without a lease that may change at once."""

    @property
    def is_deferred(self) -> bool:
        """True if contents are below the card only. The next lease restores them."""

    @property
    def is_locked(self) -> bool:
        """True if a lease holds it."""

    @property
    def is_adopted(self) -> bool:
        """True while the contents are in memory that `Tiers.adopt` took over."""

    @property
    def last_stream(self) -> int | None:
        """Number of the stream of the last lease, which may be destroyed. None before the first one."""

    def spill(self) -> int:
        """Evicts it now, and returns the bytes of the card that became free. Waits for the copies.

        Raises InUseError while a lease, a pin or a move holds it, or TierFullError.
        """

    def spill_to(self, tier: Literal["host", "disk"]) -> int:
        """Evicts it as `spill` does, and moves its contents down to a tier. What is below stays there."""

    def lease(
        self,
        access: Access = "rw",
        stream: _Stream = None,
        *,
        timeout: float | None = None,
        shape: _Shape = None,
        dtype: object = None,
        in_place: bool = False,
    ) -> Lease:
        """Returns a request for a lease, for work on a stream.

        "r" is shared with other readers, "w" and "rw" exclude all others. "overwrite" does too, and
        contents are not restored: all of them are undefined until they are written. `shape` and `dtype`
        are those of the view, by default bytes. The request waits at most `timeout` seconds, by default
        the patience of the tiers. With `in_place` a readable buffer that is only read may stay on the host:
        `Lease.is_in_place`.
        """

    def prefetch(self) -> None:
        """Restores it ahead of need. Does not wait for the copies."""

    def retrieve(self) -> None:
        """Restores it, and waits until it is there."""

    def will_need(self) -> None:
        """Hints that it is needed soon: others leave first."""

    def wont_need(self) -> None:
        """Hints that it is not needed soon: it leaves before others."""

    def discard(self) -> None:
        """Discards the contents: they are neither copied out nor restored. Raises InUseError."""

    def pin(self) -> BufferPin:
        """Restores it, and keeps it on the card until the pin ends: for memory that is registered."""

    def read(self, offset: SupportsIndex | None = None, nbytes: SupportsIndex | None = None) -> bytes:
        """Returns contents, by default all from `offset` on. Waits for work that writes them."""

    def write(
        self, data: bytes | bytearray | memoryview, offset: SupportsIndex | None = None
    ) -> None:
        """Writes contents, and waits until they are there."""

    def array(self, *_arguments: object, **_named: object) -> NoReturn:
        """Raises TypeError: a buffer has memory while it is leased. `Lease.array` makes an array of it."""

    def __array__(self, *arguments: object, **named: object) -> NoReturn: ...
    def __reduce__(self) -> NoReturn: ...
    def __len__(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class LeaseOwner:
    def __new__(cls) -> LeaseOwner: ...

@final
class Lease:
    """A request for a lease on a buffer and, once it is entered, the lease. It is entered once.

    It ends by `release`, at the end of a `with` block, or with the last reference to it and its views. At its
    end the work that was queued on its stream may still run: the buffer stays until it is done.
    """

    @property
    def buffer(self) -> Buffer: ...
    @property
    def is_held(self) -> bool:
        """True while it holds the buffer: also after its end, while DLPack tensors of its view live."""

    @property
    def is_in_place(self) -> bool:
        """True while the buffer is read in place under it, over the bus where it is spilled."""

    def acquire(self) -> View:
        """Waits for the lease and returns an array of the buffer.

        The interpreter's lock is released meanwhile. Raises LeaseTimeoutError, TierFullError if the set
        never fits, OutOfMemoryError, or InUseError if it was entered before.
        """

    def release(self) -> None:
        """Ends the lease at what is queued on its stream. Never waits. Does nothing the second time."""

    def _begin(self, number: int) -> bool: ...
    def _finish(self) -> View: ...
    def _cancel(self) -> None: ...
    def __enter__(self) -> View: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...
    def __aenter__(self) -> Coroutine[Any, Any, View]: ...
    def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> Coroutine[Any, Any, None]: ...

@final
class LeaseSet:
    """As `Lease`, for several buffers. Its views are in the order of the request."""

    @property
    def buffers(self) -> tuple[Buffer, ...]: ...
    @property
    def is_held(self) -> bool: ...
    @property
    def in_place(self) -> tuple[bool, ...]:
        """Whether each buffer is read in place under it."""

    def acquire(self) -> tuple[View, ...]: ...
    def release(self) -> None: ...
    def _begin(self, number: int) -> bool: ...
    def _finish(self) -> tuple[View, ...]: ...
    def _cancel(self) -> None: ...
    def __enter__(self) -> tuple[View, ...]: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...
    def __aenter__(self) -> Coroutine[Any, Any, tuple[View, ...]]: ...
    def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> Coroutine[Any, Any, None]: ...

@final
class View:
    """An array of a leased buffer. After the lease's end every protocol raises LeaseEndedError.

    What a library makes of it through DLPack keeps the lease. What it makes through the array interfaces
    does not, and must not be used after the lease's end.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str:
        """Name of the element type."""

    @property
    def nbytes(self) -> int: ...
    @property
    def buffer(self) -> Buffer: ...
    @property
    def is_read_only(self) -> bool:
        """True if the lease is for reading. DLPack before version 1.0 does not say so to its consumer."""

    @property
    def is_ended(self) -> bool: ...
    @property
    def ptr(self) -> int:
        """Address of the first element."""

    def array(
        self, shape: _Shape = None, dtype: object = None, *, offset: SupportsIndex | None = None
    ) -> View:
        """Returns another array of the buffer, under the same lease."""

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
        """Returns a DLPack capsule, which keeps the lease until its consumer is done."""

    def __dlpack_device__(self) -> tuple[int, int]: ...
    def __reduce__(self) -> NoReturn: ...
    def __len__(self) -> int: ...

@final
class Events:
    """A queue of the changes of buffers' states, for vramp.Controller. Changes wait there without the
    interpreter."""

    def take(self, timeout: float | None = None) -> list[tuple[str, int, int, int]] | None:
        """Waits for changes, and returns those there are: "created", "changed" or "freed", the number of the
        buffer, its deferred bytes, and the number of its leases. None once there will be no more."""

    def take_lost(self) -> int: ...
    def states(self) -> list[tuple[int, int, int]]: ...
    def wake(self) -> None: ...
    def close(self) -> None: ...

@final
class BufferPin:
    """Keeps a buffer on the card until `unpin`, the end of a `with` block, or the last reference."""

    @property
    def buffer(self) -> Buffer: ...
    @property
    def ptr(self) -> int: ...
    @property
    def is_unpinned(self) -> bool: ...
    def unpin(self) -> None: ...
    def __enter__(self) -> BufferPin: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...

@final
class Reservation:
    """Memory of a tier that is kept free, until `release`, the end of a `with` block, or the last
    reference."""

    @property
    def nbytes(self) -> int:
        """Reserved bytes: those asked for, rounded up."""

    @property
    def tier(self) -> str: ...
    @property
    def tiers(self) -> Tiers: ...
    @property
    def is_released(self) -> bool: ...
    def release(self) -> None: ...
    def __enter__(self) -> Reservation: ...
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
def take_leases() -> list[int]: ...
def report_unraisable(error: BaseException, origin: object) -> None: ...
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
def program(arguments: Sequence[str]) -> int:
    """Runs the program `vramp` with arguments, the first of which is its name. Returns the exit code."""

def command(arguments: Sequence[str]) -> str:
    """Runs a command of the program, and returns what it writes to standard output. Raises FileError, TraceError,
    OptionError or VrampError.
    """


@final
class Budget:
    """The budget of this process in a group. `vramp.budget.join` makes it.

    It ends with `leave`, the end of a `with` block, its last reference, or the process. One with a pool ends with the
    pool. A forked child has none: every method raises ForkedError.
    """

    def __new__(
        cls,
        directory: str | os.PathLike[str],
        card: str,
        group: str,
        program: str,
        capacity: SupportsIndex | str,
        guaranteed: SupportsIndex | str,
        limit: SupportsIndex | str | None,
        priority: int,
        timeout: float | None,
    ) -> Budget: ...
    def attach(
        self,
        pool: Pool,
        *,
        ahead: SupportsIndex | str | None = None,
        patience: float | None = 5.0,
    ) -> None:
        """Ties a pool, and all pools that regions and memory pools make of it, to the budget.

        From then on the pool's limit is what is claimed. A request that passes it claims what it lacks, with `ahead`
        more where that is free (64 MiB), and waits `patience` seconds for others to give back. Others get idle memory
        of the pool, and then what `on_reclaim` handlers free. Raises BudgetError if what is reserved cannot be claimed,
        and InUseError if the pool has a budget.
        """

    def claim(self, nbytes: SupportsIndex | str, timeout: float | None = None) -> None:
        """Claims bytes for memory that is taken past the pool, in whole pages of 2 MiB.

        Waits at most `timeout` seconds, None without end, while the others are requested to give back; 0 does not wait.
        Raises BudgetTimeoutError, or BudgetError if it can never be had. Then nothing is claimed.
        """

    def give_back(self, nbytes: SupportsIndex | str) -> int:
        """Gives claimed bytes back, whose memory was returned to the card before. Returns how many."""

    def give_back_idle(self) -> int:
        """Returns idle memory of the pool to the card, and gives back what is claimed and not reserved beyond the
        guarantee. Returns the bytes."""

    def publish(
        self, *, live: int = 0, cached: int = 0, parked: int = 0, asleep: int = 0
    ) -> None:
        """Publishes what memory past the pool is used for. The others request what is cached or parked first."""

    def room(self) -> BudgetRoom:
        """Returns what this process can have: now, once others give back what is idle, and at most."""

    def status(self) -> BudgetStatus:
        """Returns the members of the group."""

    def set_limit(self, limit: SupportsIndex | str | None) -> None:
        """Changes the most that can be claimed. What is claimed above it stays."""

    def on_request(self, handler: Callable[[int, bool], int]) -> None:
        """Registers a function that gives memory back, for a budget without a pool.

        It takes the bytes that another process lacks, and whether it may release what it has to make again. It returns
        how many bytes it returned to the card. It runs on a thread of vramp. An exception is reported, and means 0.
        """

    def on_reclaim(self, handler: Callable[[int], object]) -> None:
        """Registers a function that frees memory of the pool when another process lacks so many bytes and nothing is
        idle. It runs on a thread of vramp."""

    def on_sleep(self, handler: Callable[[Literal["pause", "resume"]], bool | None]) -> None:
        """Registers a function that pauses and resumes this process for `vramp ctl`, such as
        `vramp.budget.sleep_regions`. An exception, or False, means that it failed."""

    def leave(self) -> None:
        """Gives everything back and leaves the group. Raises InUseError if the budget has a pool."""

    @property
    def claimed(self) -> int: ...
    @property
    def guaranteed(self) -> int: ...
    @property
    def limit(self) -> int | None: ...
    @property
    def capacity(self) -> int: ...
    @property
    def group(self) -> str: ...
    @property
    def card(self) -> str: ...
    def __enter__(self) -> Budget: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...
    def __reduce__(self) -> NoReturn: ...

def keeper_pid(directory: str | os.PathLike[str], timeout: float) -> int | None:
    """Returns the process of the keeper of a directory; None if there is none."""

def keeper_entries(directory: str | os.PathLike[str], timeout: float) -> list[KeptEntry]:
    """Returns what a keeper has, by name."""

def keeper_remove(directory: str | os.PathLike[str], timeout: float, name: str) -> None:
    """Removes a name."""

def keeper_evict(directory: str | os.PathLike[str], timeout: float, device: str, nbytes: int | str) -> int:
    """Frees memory of a card that no process has open. Returns how many bytes."""

def keeper_stop(directory: str | os.PathLike[str], timeout: float) -> None:
    """Ends a keeper."""

def budget_groups(directory: str | os.PathLike[str]) -> list[tuple[str, str]]:
    """Returns card and name of each group in a directory."""

def budget_status(directory: str | os.PathLike[str], card: str, group: str) -> BudgetStatus:
    """Returns the members of a group."""

@final
class Turns:
    """The line of one card. `vramp.turns.open` makes it. Threads compete as processes do."""

    def __new__(cls, directory: str | os.PathLike[str], card: str, program: str) -> Turns: ...
    def acquire(self, timeout: float | None = None, *, bytes: int | None = None) -> Turn:
        """Waits for the turn, first come, first served, and returns it.

        `timeout` is in seconds; None waits for ever, and 0 requests nothing. `bytes` says how much memory is
        needed; None is the whole card. Ctrl-C ends the wait.

        Raises TurnTimeoutError, TurnRefusedError, FileError or ForkedError; then this process is not in the
        line any more.
        """

    def on_request(self, handler: Callable[[TurnRequest], bool | None]) -> None:
        """Registers a function that is called when other processes wait for a turn of this object.

        It runs on a thread of vramp, once for each process that joins the line or for several at once. It puts
        memory to sleep and returns True, which releases the turn; or False or None, and the program releases
        it later. It may wait for a safe point meanwhile. An exception is passed to sys.unraisablehook and
        counts as False. It replaces an earlier function.
        """

    def remove_handler(self) -> None:
        """Removes the function, after its call in progress on another thread."""

    def status(self) -> TurnStatus:
        """Returns who holds the turn and who waits."""

    @property
    def card(self) -> str:
        """The card."""

    @property
    def directory(self) -> os.PathLike[str]:
        """The directory of the card."""

@final
class Turn:
    """The exclusive use of a card. The end of a `with` block releases it, and so does the last reference."""

    def release(self) -> None:
        """Releases the turn to the next process. It does nothing if it was released before.

        Raises FileError if the directory was removed meanwhile: another process may have held the turn too.
        """

    @property
    def is_held(self) -> bool:
        """True until it is released, by this object or by a handler."""

    def request(self) -> TurnRequest | None:
        """Returns the processes that wait for this turn, for programs that ask at safe points.

        Costs one system call if none came. Raises InUseError if a handler takes the requests.
        """

    def wait_for_request(self, timeout: float | None = None) -> TurnRequest | None:
        """Waits until a process waits for this turn. None after the timeout, and once it is released."""

    def __enter__(self) -> Turn: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
    def __reduce__(self) -> NoReturn: ...

@final
class TurnRequest:
    """Processes that wait for a turn of this process."""

    @property
    def waiting(self) -> list[TurnProcess]:
        """The processes, in the order in which they get the turn."""

    def refuse(self, reason: str) -> None:
        """Keeps the turn: the waits of these processes fail with TurnRefusedError and the reason."""

def region_begin(
    tag: str | None,
    backup: str,
    readonly: bool,
    graph_pins: bool,
    device: int | None,
    pool: Pool | None,
) -> int:
    """Starts a scope on this thread. Returns its number."""

def region_end(scope: int) -> None:
    """Ends a scope of this thread."""

def opened_devices() -> list[int]:
    """Returns the numbers of the devices whose shared pools are open."""

def size_argument(name: str, text: str) -> int:
    """Returns the bytes that a size such as `2GiB` stands for, in the argument `name`."""

def regions_pause(pool: Pool, tags: list[str], keep: int, discard: bool) -> None:
    """Puts regions of a pool to sleep, and with `discard` gives their contents up."""

def regions_prefetch(pool: Pool, tags: list[str]) -> None:
    """Reads contents of sleeping regions of a pool from the disk into pinned host memory."""

def region_backup(pool: Pool, address: int, size: int) -> bytearray:
    """Returns the bytes of a block in a sleeping region, from its copy."""

def region_default_disk(directory: str | os.PathLike[str]) -> None:
    """Names the directory of backups on the disk where the program names none. Opens nothing."""

def region_disk(directory: str | os.PathLike[str], limit: str | None) -> None:
    """Names the directory of backups on the disk, and the most bytes there."""

def regions_resume(pool: Pool, tags: list[str]) -> None:
    """Brings regions of a pool back."""

def regions_clean(pool: Pool, tags: list[str]) -> None:
    """Copies the contents of regions of a pool ahead of a pause."""

def regions_on_pressure(pool: Pool, tags: list[str]) -> int:
    """Lets regions of a pool sleep on a shortage. Returns the number of the registration."""

def regions_unregister(pool: Pool, number: int) -> bool:
    """Ends a registration of `regions_on_pressure` or `regions_around_sleep`."""

def regions_around_sleep(
    pool: Pool,
    name: str,
    before: Callable[[], object] | None,
    after: Callable[[], object] | None,
    tags: list[str] | None,
    collective: bool,
) -> int:
    """Registers functions around the sleep of regions of a pool. Returns the number of the registration."""

def region_at(pool: Pool, address: int, size: int) -> str | None:
    """Returns the tag of the region that has these addresses."""

def region_remove(pool: Pool, tag: str) -> None:
    """Removes a region of a pool."""

def regions_known(pool: Pool, tags: list[str]) -> list[str]:
    """Returns those of some tags that have a region in a pool."""

def regions_status(pool: Pool, device: int | None, tags: list[str] | None = None) -> list[RegionStatus]:
    """Returns the states of the regions of a pool, by tag, or of those with some tags."""
