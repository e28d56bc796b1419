"""Results of calls. Amounts are in bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

Access = Literal["r", "w", "rw", "overwrite"]
"""What a lease allows: "r" is shared, and the others exclude all other leases of the buffer."""


class Store(Protocol):
    """A store of the program in place of a directory: see `Tiers`.

    Its methods are called on threads of vramp, several at a time. An exception makes the move fail, and the
    contents stay where they were. Each key is put once.
    """

    def put(self, key: int, data: bytes, /) -> object:
        """Stores the data. MemoryError, or an OSError for a full device, says that it is full."""

    def get(self, key: int, /) -> bytes:
        """Returns the data."""

    def delete(self, key: int, /) -> object:
        """Removes the data, also of a key whose `put` failed."""


@dataclass(frozen=True)
class Stats:
    """Counts of a pool. Amounts are in bytes."""

    live: int
    """Requested bytes of live allocations."""
    live_peak: int
    """Peak of `live` since the pool was opened or `Pool.reset_peaks` was called."""
    reserved: int
    """Physical memory of the pool."""
    reserved_peak: int
    """Peak of `reserved`, as of `live_peak`."""
    allocated: int
    """Number of allocations so far."""
    freed: int
    """Number of frees so far."""
    hits: int
    """Allocations without a driver call for memory."""
    misses: int
    """Allocations that needed driver calls."""
    chunks_created: int
    """Physical handles that the driver created."""
    chunks_moved: int
    """Physical handles that were mapped at another address."""
    chunks_reactivated: int
    """Physical handles moved to an address where they were still mapped."""
    chunks_released: int
    """Physical handles that were released to the device."""
    moved: int
    """Bytes of the handles moved or reactivated."""
    plans_undone: int
    """Sequences of driver calls that failed and were undone."""
    quarantined: int
    """Bytes, part of `reserved`, that a failed driver call left unusable until a trim releases them."""
    quarantined_addresses: int
    """Bytes of addresses that a failed driver call left unusable until a trim unmaps them."""
    device_free: int
    """Free memory of the device."""
    device_total: int
    """Memory of the device."""
    host_pinned: int
    """Pinned memory of the host: of the pool's regions, and of its open `Tiers`."""
    host_used: int
    """What copies take of `host_pinned`. The rest is idle, and goes back after some seconds or with `Pool.trim`."""


@dataclass(frozen=True)
class KvStats:
    """What an arena for caches has. Pages count once for all tensors."""

    pages: int
    """Pages of each tensor."""
    committed: int
    """Pages in use."""
    parked: int
    """Pages that are mapped and not in use."""
    moving: int
    """Pages that threads are giving memory to."""
    page_bytes: int
    """Bytes of one page in all tensors."""
    limit: int | None
    """Most bytes that the arena may have. None without a limit."""


@dataclass(frozen=True)
class DeviceInfo:
    """What a device is and can. Amounts are in bytes."""

    id: str
    """Name for `vramp.open`, such as cuda:0 or sim:h200."""
    name: str
    """Name of the card."""
    driver: str
    """Version of the driver, or where the simulator's costs come from."""
    is_simulated: bool
    """True for the simulator."""
    memory: int
    """Memory of the device."""
    page: int
    """Granularity of physical memory."""
    has_virtual_memory: bool
    """True if physical memory can be mapped at chosen addresses, which remapping needs."""
    has_stream_ordered_pool: bool
    """True if the driver has a pool of its own (cudaMallocAsync)."""
    uuid: str | None
    """UUID of the card, if the driver reports it."""
    ordinal: int
    """Number of the device, as other devices name it in `peers`."""
    peers: tuple[int, ...]
    """Numbers of the devices that can be granted access to its memory."""
    has_posix_fd: bool
    """True if memory can be exported to processes of the same machine."""
    has_fabric: bool
    """True if the card reports fabric handles. The machine may refuse them: see `Pool.sharing`."""
    has_rdma: bool
    """True if network cards can access its memory."""
    has_dma_buf: bool
    """True if memory can be exported to drivers of other devices."""


@dataclass(frozen=True)
class Sharing:
    """How the memory of a pool can be shared, and how much is. Amounts are in bytes."""

    handle_type: str
    """How memory is exported to other processes: "posix-fd", "fabric", or "none"."""
    rdma: bool
    """True if network cards can access the memory."""
    fallback: str | None
    """Why less is possible than the options said. None if all is as they said."""
    peers: tuple[int, ...]
    """Numbers of the devices that have access."""
    exported: int
    """Blocks that are exported, those of closed exports that importers have open included."""
    pinned: int
    """Physical handles that are pinned, exported ones included."""
    pinned_bytes: int
    """Bytes of the pinned handles."""


@dataclass(frozen=True)
class AccessChange:
    """What a change of another device's access cost."""

    calls: int
    """Driver calls. 0 if the access was so before."""
    bytes: int
    """Mapped memory whose access changed."""


@dataclass(frozen=True)
class RegionStatus:
    """State of a region at one moment. Amounts are in bytes."""

    tag: str
    """Its tag."""
    backup: Literal["host", "disk", "none"]
    """Where its contents go while it is paused."""
    readonly: bool
    """True if the program writes each block once."""
    graph_pins: bool
    """True if captured graphs keep what they find here on the card, in processes where graphs pin memory."""
    phase: Literal["awake", "pausing", "asleep", "resuming"]
    """What it does. One that sleeps in part is "asleep"."""
    on_card: int
    """Its memory on the card."""
    asleep: int
    """Its memory that is off the card."""
    on_host: int
    """Pinned memory that keeps its contents."""
    on_disk: int
    """Bytes on the disk that keep its contents."""
    copied: int
    """What the pause or resume in progress, or the last one, has copied."""
    to_copy: int
    """What that has to copy."""
    device: int | None
    """Number of the device. None for a pool of the program's own."""


@dataclass(frozen=True)
class TierStats:
    """Where the contents of deferrable buffers are, and counts so far. Amounts are in bytes."""

    buffers: int
    """Number of buffers. One whose work is in flight counts after its end."""
    leases: int
    """Number of leases that are held."""
    waiting: int
    """Number of lease requests that wait."""
    moves: int
    """Number of moves in progress."""
    total: int
    """Length of all buffers."""
    empty: int
    """Without contents."""
    resident: int
    """On the card."""
    deferred: int
    """Below the card only."""
    device_copies: int
    """Copies on other cards."""
    host: int
    """Copies on the host."""
    disk: int
    """Copies on the disk."""
    evictions: int
    """Number of requests that evicted buffers."""
    evicted: int
    """Memory of the card that they freed."""
    to_host: int
    """Copied to the host."""
    from_host: int
    """Copied back from the host."""
    to_disk: int
    """Written to the disk."""
    from_disk: int
    """Read back from the disk."""
    waits: int
    """Number of lease requests that waited."""
    waited_ns: int
    """Nanoseconds that they waited."""
    failures: int
    """Number of moves that failed. Their contents stayed where they were."""
    host_pinned: int
    """Pinned memory of the host."""
    host_used: int
    """What copies take of `host_pinned`. The rest is idle, and goes back after some seconds or with `Pool.trim`."""
    to_device: int
    """Copied to other cards."""
    from_device: int
    """Copied back from other cards."""
    reads_in_place: int
    """Number of buffers that were read in place."""
    promotions: int
    """Number of buffers that were restored because they were read in place often."""


@dataclass(frozen=True)
class TurnProcess:
    """A process that holds the turn of a card or waits for it."""

    program: str
    """Name that the program gave."""
    pid: int
    """Process id, in the PID namespace of that process."""
    is_pid_valid: bool
    """True if it is in the PID namespace of this process."""
    bytes: int | None
    """Bytes that it needs. None is the whole card."""
    requested: float
    """When it requested the turn, as `time.time()`."""


@dataclass(frozen=True)
class TurnStatus:
    """Who holds the turn of a card, and who waits for it."""

    holder: TurnProcess | None
    """None if the turn is free, or about to be taken by the first that waits."""
    since: float | None
    """When the holder acquired it, as `time.time()`."""
    waiting: tuple[TurnProcess, ...]
    """In the order in which they get the turn."""


@dataclass(frozen=True)
class BudgetRoom:
    """What a process can have of a card that it shares, in bytes."""

    available: int
    """What it can claim now."""
    obtainable: int
    """What it can claim once the others have given back what is idle."""
    most: int
    """What it can claim if the others give back all that they are not guaranteed."""


@dataclass(frozen=True)
class BudgetMember:
    """A process that shares a card by a budget. Amounts are in bytes."""

    program: str
    """Name that the program gave."""
    pid: int
    """Process id, in the PID namespace of that process."""
    is_pid_valid: bool
    """True if it is in the PID namespace of this process."""
    is_stopped: bool
    """True if it was stopped, by SIGSTOP or a debugger."""
    priority: int
    """The larger is served first, and gives back last."""
    claimed: int
    """What it may use."""
    guaranteed: int
    """What it can always claim."""
    limit: int | None
    """What it may claim at most. None is all of the group's."""
    live: int
    """In use, as it published."""
    cached: int
    """Free in its pools."""
    parked: int
    """Mapped, and without contents that are needed."""
    asleep: int
    """Contents of paused memory, which are not on the card."""
    waits_for: int | None
    """What it waits for. None if it does not wait."""
    waited: float | None
    """Seconds that it has waited."""


@dataclass(frozen=True)
class BudgetStatus:
    """The processes of a group that share a card. Amounts are in bytes."""

    capacity: int | None
    """What they share. None without members."""
    free: int
    """What no member has claimed or is guaranteed."""
    members: tuple[BudgetMember, ...]
    """In the order in which they took their places in the ledger."""


@dataclass(frozen=True)
class KeptHolder:
    """A process that has kept memory open."""

    pid: int
    """Process id."""
    lock: Literal["none", "read", "write"]
    """Its lock."""


@dataclass(frozen=True)
class KeptEntry:
    """Memory that a keeper holds under a name."""

    name: str
    """Its name."""
    device: str | None
    """UUID of the card, or the id of a simulated one. None while there is only a draft, as below."""
    bytes: int
    """Memory on the card."""
    epoch: int
    """Number of the last commit; 0 while there is only a draft."""
    state: Literal["whole", "writing", "torn", "draft"]
    """Whether the contents are those of the epoch."""
    holders: tuple[KeptHolder, ...]
    """Processes that have it open; 256 at most."""
    waiting: int
    """Number of those that wait for a lock or for the end of a draft."""
    draft_pid: int | None
    """Process that makes new memory of the name."""
    superseded: int
    """Older memory of the name that processes have open."""
    idle: float | None
    """Seconds since the last process closed it; None while one has it open."""
    priority: int
    """The lowest is dropped first."""
