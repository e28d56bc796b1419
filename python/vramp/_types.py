"""Results of calls. Amounts are in bytes."""

from __future__ import annotations

from dataclasses import dataclass


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
    device_free: int
    """Free memory of the device."""
    device_total: int
    """Memory of the device."""


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
