//! The trait that every device implements, and the types of its arguments.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use vramp_core::{AddrRange, Bytes, DeviceAddr};

use crate::{
    CaptureInfo, CaptureMode, DeviceInfo, DriverResult, Event, ExportedHandle, Graph, GraphExec,
    GraphNode, Handle, HostBuffer, HostMemory, MemoryInfo, MemoryProperties, PoolUsage, Stream,
    StreamThread,
};

/// A copy between device addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceCopy {
    /// First byte read.
    pub from: DeviceAddr,
    /// First byte written.
    pub to: DeviceAddr,
    /// Number of bytes.
    pub len: Bytes,
}

/// A part of a pinned host buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostSlice {
    /// Buffer that the part lies in.
    pub buffer: HostBuffer,
    /// Distance of the part's first byte from the buffer's.
    pub offset: Bytes,
    /// Number of bytes.
    pub len: Bytes,
}

/// A GPU, real or simulated. The [crate's page](crate) lists the rules that it keeps.
///
/// Any thread may call any method. The costs named are medians on one H200 with driver 580
/// (`vramp-driver/costs/h200.toml`). A failed call changes nothing, except as [`DriverError`] says.
///
/// [`DriverError`]: crate::DriverError
pub trait Driver: Send + Sync {
    /// Returns identity, limits and capabilities. No driver call.
    fn info(&self) -> &DeviceInfo;

    /// Returns the host time of this device in nanoseconds: a monotonic clock on a card, the sum of
    /// modelled costs on the simulator. Use differences. No driver call.
    fn now_ns(&self) -> u64;

    // --- addresses ---

    /// Reserves `len` addresses that no other allocation uses, without physical memory. 4 us.
    ///
    /// `len` and `alignment` are multiples of the page; `alignment` is a power of two.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::ErrorKind::OutOfMemory) if no such range is left. A smaller
    /// one may be.
    fn reserve(&self, len: Bytes, alignment: Bytes) -> DriverResult<DeviceAddr>;

    /// Reserves exactly these addresses, as [`Driver::reserve`] does, or returns false if they are not all
    /// free. One driver call, two if they are not.
    ///
    /// # Errors
    /// As for [`Driver::reserve`].
    fn reserve_at(&self, range: AddrRange) -> DriverResult<bool>;

    /// Frees a range exactly as it was reserved. Nothing may be mapped in it.
    fn free_addresses(&self, range: AddrRange) -> DriverResult<()>;

    // --- physical memory ---

    /// Allocates `len` bytes of physical memory, a multiple of the page. 7 to 64 us.
    ///
    /// # Errors
    /// [`ErrorKind::NotSupported`](crate::ErrorKind::NotSupported) for properties that
    /// [`Capabilities`](crate::Capabilities) do not name. A card that names fabric handles may refuse
    /// to create them, as `CUDA_ERROR_NOT_PERMITTED`.
    fn create(&self, len: Bytes, properties: MemoryProperties) -> DriverResult<Handle>;

    /// Releases a handle. Its memory lives until the last mapping is unmapped. 9 us to 1 ms, by size.
    fn release(&self, handle: Handle) -> DriverResult<()>;

    /// Maps the whole of `handle` at `at`, which must be reserved and unmapped. 0.5 us.
    fn map(&self, at: DeviceAddr, handle: Handle) -> DriverResult<()>;

    /// Unmaps every mapping in `range`, which must consist of whole mappings without gaps.
    /// 13 us and more, by the number of mappings.
    ///
    /// The host must have observed the completion of all work that accesses the range.
    fn unmap(&self, range: AddrRange) -> DriverResult<()>;

    /// Makes `range` readable and writable for the device and for the cards with the ordinals `peers`,
    /// in one call. Access granted before stays. The range must consist of whole mappings without
    /// gaps. 20 us and more, by the number of mappings; a peer doubles it, and the later unmap.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidUse`](crate::ErrorKind::InvalidUse) for a peer that is not in
    /// [`DeviceInfo::peers`](crate::DeviceInfo::peers).
    fn set_access(&self, range: AddrRange, peers: &[u32]) -> DriverResult<()>;

    /// Makes `range` readable for the device and not writable, also if it was before, in one call. The range
    /// must consist of whole mappings without gaps. Costs what [`Driver::set_access`] costs.
    ///
    /// Nothing refuses a write before it runs: it ends the context, as an access to memory that is not mapped
    /// does (Xid 31 in the kernel's log).
    fn set_read_only(&self, range: AddrRange) -> DriverResult<()>;

    /// Takes the access to `range` from the cards with the ordinals `peers`, in one call. The device
    /// keeps its own. The range must consist of whole mappings without gaps.
    ///
    /// The host must have observed the completion of all work of these cards that accesses the range.
    fn revoke_access(&self, range: AddrRange, peers: &[u32]) -> DriverResult<()>;

    // --- memory of several processes ---

    /// Exports a handle as its [`HandleType`](crate::HandleType) says. 185 us.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidUse`](crate::ErrorKind::InvalidUse) for memory that was created with
    /// [`HandleType::None`](crate::HandleType::None).
    fn export(&self, handle: Handle) -> DriverResult<ExportedHandle>;

    /// Makes a handle of memory that another process, or this one, exported. `len` is the length that
    /// it was created with; a map with another one is refused, as not supported. The descriptor stays the
    /// caller's. 33 us.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidUse`](crate::ErrorKind::InvalidUse) for a descriptor that is not of a
    /// device's memory.
    fn import(&self, exported: &ExportedHandle, len: Bytes) -> DriverResult<Handle>;

    /// Returns a dma-buf of `range`, for other drivers of the machine such as a network card's. It
    /// must be mapped, without gaps. The descriptor keeps the memory alive.
    ///
    /// Needs [`Capabilities::dma_buf`](crate::Capabilities::dma_buf).
    fn export_dma_buf(&self, range: AddrRange) -> DriverResult<OwnedFd>;

    // --- plain allocations ---

    /// Allocates `len` bytes that are accessible at once, as `cuMemAlloc` does. May wait for work in
    /// flight. 30 to 75 us, by size.
    ///
    /// `len` is any size above zero. The card allocates whole pages.
    fn alloc_memory(&self, len: Bytes) -> DriverResult<DeviceAddr>;

    /// Waits for all work on the device, then frees what [`Driver::alloc_memory`] returned. 26 to
    /// 286 us, by size, and the wait.
    fn free_memory(&self, at: DeviceAddr) -> DriverResult<()>;

    // --- memory of other code ---

    /// Adopts device memory that other code of the process allocated, such as a `cudaMalloc` or a part
    /// of another library's pool: fills and copies accept it, as they do this device's own, until
    /// [`Driver::forget_memory`]. It can be neither freed, mapped nor exported here. Memory of this
    /// device's own may be adopted too. No two adoptions overlap.
    ///
    /// `range` lies in one allocation, or in adjacent accessible mappings of one reservation: what a
    /// card copies in one call. The caller guarantees that it stays allocated until it is forgotten.
    /// A card does not notice a free: a copy is then an error, or reaches whatever is there later.
    ///
    /// None for this device's own memory; for other memory two driver calls, and one more for each
    /// further mapping. Not measured. O(log n) in reservations, allocations and adoptions.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidUse`](crate::ErrorKind::InvalidUse) for a range that is empty, not
    /// allocated as a whole, managed, the host's or another device's, that is this device's own in
    /// part, or that overlaps another adoption. [`ErrorKind::NotSupported`](crate::ErrorKind::NotSupported)
    /// if the driver cannot tell what other memory is.
    fn adopt_memory(&self, range: AddrRange) -> DriverResult<()>;

    /// Forgets memory exactly as it was passed to [`Driver::adopt_memory`]. Returns false if it is not
    /// adopted. No driver call; works on a lost device. The work queued on the memory must be complete.
    fn forget_memory(&self, range: AddrRange) -> bool;

    // --- streams and events ---

    /// Creates a stream that does not synchronise with the default stream.
    fn create_stream(&self) -> DriverResult<Stream>;

    /// Returns the calling thread's per-thread default stream, which CUDA names `cudaStreamPerThread`.
    /// Destroying it only ends the id, which the thread does before it ends.
    ///
    /// CUDA has no name for the stream of another thread. A call of another thread with the id therefore
    /// acts on the legacy default stream: the driver orders that behind all work queued on any thread's
    /// default stream so far, and before all that is queued there later. So it is ordered as on the stream
    /// itself, and orders the streams of all threads besides: see [`Driver::stream_thread`].
    ///
    /// Counted as [`Call::CreateStream`](crate::Call::CreateStream).
    fn thread_stream(&self) -> DriverResult<Stream>;

    /// Returns which thread's default stream `stream` is. No driver call. A stream that is unknown means
    /// the same in every thread.
    fn stream_thread(&self, stream: Stream) -> StreamThread;

    /// Destroys a stream. Work queued on it still runs.
    ///
    /// # Errors
    /// [`ErrorKind::Capturing`](crate::ErrorKind::Capturing) if the stream captures. The capture goes on.
    fn destroy_stream(&self, stream: Stream) -> DriverResult<()>;

    /// Blocks the host until all work queued on `stream` is complete. Legal while other streams
    /// capture, in every mode and from every thread.
    ///
    /// # Errors
    /// [`ErrorKind::Capturing`](crate::ErrorKind::Capturing) if the stream captures. The capture goes on.
    fn synchronize_stream(&self, stream: Stream) -> DriverResult<()>;

    /// Creates an event without timing. 0.13 us.
    fn create_event(&self) -> DriverResult<Event>;

    /// Destroys an event. 0.12 us.
    fn destroy_event(&self, event: Event) -> DriverResult<()>;

    /// Records `event` on `stream`, after all work queued there so far. 0.19 us.
    fn record(&self, event: Event, stream: Stream) -> DriverResult<()>;

    /// Records `event` as [`Driver::record`] does, unless the stream captures: then it returns false,
    /// and the event stands for nothing until it is recorded again. For callers that do not know what
    /// other threads capture. Asking first would be too early: they may begin in between.
    ///
    /// A capture that this device begins is always noticed. One that other code begins and ends while
    /// the call runs is not; a query of the event is refused then, with an error of kind
    /// [`ErrorKind::Capturing`](crate::ErrorKind::Capturing).
    fn record_outside(&self, event: Event, stream: Stream) -> DriverResult<bool>;

    /// Returns true if the work before the event's last record is complete, or if the event was
    /// never recorded. Legal while streams capture, in every mode and from every thread, unless the
    /// record is part of a capture. 0.21 us.
    ///
    /// # Errors
    /// [`ErrorKind::DeviceLost`](crate::ErrorKind::DeviceLost) if that work failed. A lost device
    /// never looks like work in flight.
    fn query(&self, event: Event) -> DriverResult<bool>;

    /// Makes later work on `stream` wait for the event's last record. Does not block the host.
    /// 0.15 us.
    fn wait(&self, stream: Stream, event: Event) -> DriverResult<()>;

    /// Blocks the host until the work before the event's last record is complete. Legal while streams
    /// capture, in every mode and from every thread, unless the record is part of a capture.
    fn synchronize_event(&self, event: Event) -> DriverResult<()>;

    /// Blocks the host until all work queued on the card by this process is complete, also on streams that
    /// this device does not know. Counted as [`Call::SynchronizeStream`](crate::Call::SynchronizeStream).
    ///
    /// # Errors
    /// [`ErrorKind::Capturing`](crate::ErrorKind::Capturing) if any stream captures. The capture is
    /// invalidated, so callers ask the streams that they know before.
    fn synchronize_device(&self) -> DriverResult<()>;

    // --- work ---

    /// Queues a fill of `range` with `byte` on `stream`.
    ///
    /// Fills and copies refuse a range that this device does not own ([`Driver::owns`]) with
    /// [`ErrorKind::InvalidUse`](crate::ErrorKind::InvalidUse).
    fn fill(&self, stream: Stream, range: AddrRange, byte: u8) -> DriverResult<()>;

    /// Queues a copy between device addresses on `stream`. The ranges may not overlap. A card refuses
    /// addresses that another device reserved, also where this one has access: see
    /// [`Driver::copy_peer`]. Memory on a peer that this device created is its own.
    fn copy(&self, stream: Stream, copy: DeviceCopy) -> DriverResult<()>;

    /// Queues a copy between memory of this device and memory of `other` on `stream`, in either
    /// direction. It works without access to the other's memory, slowly: 37 GB/s between two H200s,
    /// and 390 where each may access both sides.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidUse`](crate::ErrorKind::InvalidUse) unless each side lies in memory of
    /// one of the two devices.
    fn copy_peer(&self, stream: Stream, copy: DeviceCopy, other: &dyn Driver) -> DriverResult<()>;

    /// Queues a copy from pinned host memory to the device on `stream`.
    fn copy_to_device(&self, stream: Stream, from: HostSlice, to: DeviceAddr) -> DriverResult<()>;

    /// Queues a copy from the device to pinned host memory on `stream`.
    fn copy_to_host(&self, stream: Stream, from: DeviceAddr, to: HostSlice) -> DriverResult<()>;

    // --- captures and graphs ---

    /// Begins a capture: later work on `stream` becomes nodes of a graph and does not run. See
    /// [`CaptureMode`] for what it forbids, and the [crate's page](crate) for the rules.
    /// Cost not measured.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidUse`](crate::ErrorKind::InvalidUse) or
    /// [`ErrorKind::Capturing`](crate::ErrorKind::Capturing) if the stream is capturing already.
    fn begin_capture(&self, stream: Stream, mode: CaptureMode) -> DriverResult<()>;

    /// Ends the capture that began on `stream`. Every stream that joined it leaves it, also if it is
    /// invalidated.
    ///
    /// Unless the mode is [`CaptureMode::Relaxed`], only the thread that began the capture ends it.
    ///
    /// # Errors
    /// [`ErrorKind::Capturing`](crate::ErrorKind::Capturing) if a refused call invalidated the
    /// capture, if a forked stream was not joined, or if the capture began on another thread: the
    /// capture is over. If it began on another stream it is invalidated.
    /// [`ErrorKind::InvalidUse`](crate::ErrorKind::InvalidUse) if the stream is not capturing.
    fn end_capture(&self, stream: Stream) -> DriverResult<Graph>;

    /// Returns true while `stream` is capturing, also if its capture is invalidated. 0.5 us.
    fn is_capturing(&self, stream: Stream) -> DriverResult<bool>;

    /// Returns the capture that `stream` is part of and the dependencies of its next work. `None`
    /// outside a capture. Legal in every mode.
    ///
    /// Other threads may use streams of the capture at the same time. On a card the driver does not
    /// allow that, so while a capture that [`Driver::begin_capture`] began is under way, calls on
    /// streams of this device wait for each other. Streams of a capture that other code began may be
    /// used by one thread at a time, as the contract of adopting a stream says.
    ///
    /// Costs as [`Driver::is_capturing`], plus one driver call for each node not seen before.
    ///
    /// # Errors
    /// [`ErrorKind::Capturing`](crate::ErrorKind::Capturing) if the capture is invalidated.
    fn capture_info(&self, stream: Stream) -> DriverResult<Option<CaptureInfo>>;

    /// Returns the direct dependencies of `node`, each once. Legal during the capture. No driver
    /// call.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidUse`](crate::ErrorKind::InvalidUse) after the capture ended without a
    /// graph, or after the graph was destroyed.
    fn node_dependencies(&self, node: GraphNode) -> DriverResult<Vec<GraphNode>>;

    /// Returns the number of nodes of `graph`.
    fn graph_nodes(&self, graph: Graph) -> DriverResult<usize>;

    /// Instantiates `graph`, which may then be destroyed. Costs by the number of nodes; not measured.
    fn instantiate(&self, graph: Graph) -> DriverResult<GraphExec>;

    /// Queues the work of `exec` on `stream`, after all work queued there and after earlier launches
    /// of `exec`. Cost not measured.
    ///
    /// The work accesses what is mapped at its addresses when it runs. Pinned memory that it copies
    /// from or to must still exist; a card refuses to free it before the graph is destroyed. Launches of different graphs on different streams are unordered.
    fn launch_graph(&self, exec: GraphExec, stream: Stream) -> DriverResult<()>;

    /// Destroys a graph. What was instantiated from it stays.
    fn destroy_graph(&self, graph: Graph) -> DriverResult<()>;

    /// Destroys an instantiated graph. A launch in flight still completes.
    fn destroy_graph_exec(&self, exec: GraphExec) -> DriverResult<()>;

    // --- the device's own stream-ordered pool ---

    /// Allocates in stream order from the device's own pool. 0.4 us on a hit.
    fn malloc_async(&self, stream: Stream, len: Bytes) -> DriverResult<DeviceAddr>;

    /// Frees in stream order what [`Driver::malloc_async`] returned. 0.5 us.
    fn free_async(&self, stream: Stream, at: DeviceAddr) -> DriverResult<()>;

    /// Returns the statistics of that pool.
    fn pool_usage(&self) -> DriverResult<PoolUsage>;

    /// Sets the release threshold: the bytes that the pool keeps when a stream or event is
    /// synchronised. Zero at first.
    fn set_pool_threshold(&self, keep: Bytes) -> DriverResult<()>;

    /// Releases unused memory of that pool until at most `keep` bytes are reserved.
    fn trim_pool(&self, keep: Bytes) -> DriverResult<()>;

    // --- host memory ---

    /// Allocates pinned host memory. 0.4 ms per MiB: never on a hot path.
    fn alloc_host(&self, len: Bytes) -> DriverResult<HostBuffer>;

    /// Pins `memory` and keeps it alive until [`Driver::free_host`]. Several devices may pin the
    /// same memory. 13 us per MiB with large pages that were touched before: never on a hot path.
    fn register_host(&self, memory: &Arc<HostMemory>) -> DriverResult<HostBuffer>;

    /// Frees or unpins pinned host memory. Copies from or to it must be complete: the simulator
    /// refuses to free it before, a card waits for them. A card refuses while a capture, a graph or an
    /// instantiated graph copies from or to it. Memory of [`Driver::register_host`] may be unpinned
    /// while streams capture, in every mode and from every thread.
    fn free_host(&self, buffer: HostBuffer) -> DriverResult<()>;

    /// Writes `bytes` from the host into pinned host memory at `offset`.
    fn write_host(&self, buffer: HostBuffer, offset: Bytes, bytes: &[u8]) -> DriverResult<()>;

    /// Reads pinned host memory from `offset` on into `bytes`.
    fn read_host(&self, buffer: HostBuffer, offset: Bytes, bytes: &mut [u8]) -> DriverResult<()>;

    // --- statistics ---

    /// Returns true if all of `range` lies in a reservation, an allocation or adopted memory of this
    /// device. No driver call.
    fn owns(&self, range: AddrRange) -> bool;

    /// Returns free and total memory of the card.
    fn memory_info(&self) -> DriverResult<MemoryInfo>;

    /// Returns free and total memory of the peer with this ordinal.
    fn peer_memory_info(&self, peer: u32) -> DriverResult<MemoryInfo>;
}
