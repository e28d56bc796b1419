//! The contract of a device: what vramp asks of a GPU, and nothing more.
//!
//! [`Driver`] has one method for each driver call. A device hands out opaque ids; raw handles and
//! pointers stay inside the implementation, so every method is safe to call with any argument: a
//! stale or foreign id is an error of kind [`ErrorKind::InvalidUse`], never undefined behaviour.
//!
//! Who checks what: an implementation reports what its caller cannot foresee (no memory, a lost
//! device) and refuses what would break the rules below. It decides nothing: no retry, no rounding,
//! no caching.
//!
//! Rules of virtual memory that every implementation keeps (measured on an H200; see
//! `docs/cuda-facts.md`):
//!
//! 1. Sizes and addresses of physical memory are whole multiples of [`Limits::page`].
//! 2. A physical handle is mapped only whole, and a mapping is unmapped only whole; one unmap may
//!    cover many adjacent mappings of one reservation.
//! 3. A handle may be mapped at several addresses at once.
//! 4. A fresh mapping cannot be touched until access is set, also where an older mapping at the
//!    same address could be; set-access takes whole mappings of one reservation without gaps.
//! 5. A handle released while mapped lives until its last mapping goes.
//! 6. None of create, map, set-access, unmap, release waits for work in flight. Unmapping memory
//!    that queued work still touches is a fault that loses the device.
//!
//! Rules of captures:
//!
//! 1. Work queued on a capturing stream becomes nodes of a graph, each behind the stream's *tips*,
//!    and runs only when the graph is launched.
//! 2. [`Driver::record`] on a capturing stream makes the event stand for the stream's tips; another
//!    stream that waits for it is drawn into the capture, or joined back if it is part of it.
//! 3. A capture does not depend on work outside of it: waiting for an event recorded outside is
//!    refused and spoils it, and so is asking about or synchronising what is captured.
//! 4. Create, map, set-access, unmap, release, and recording on streams outside are legal in every
//!    mode and on every thread. Query and alloc-memory are refused, and spoil the capture, as its
//!    [`CaptureMode`] says.
//!
//! [`conformance`] checks these rules on any device, [`sim`] is a device without a card, and
//! [`Metered`] counts what calls cost.
//!
//! Deliberately absent: policy, retries, logging, environment variables.
#![forbid(unsafe_code)]

pub mod conformance;
mod error;
mod forward;
mod graph;
mod meter;
pub mod sim;

pub use error::{Call, DriverError, ErrorKind};
pub use forward::{Wrapped, Wrapper};
pub use graph::{CaptureInfo, CaptureMode};
pub use meter::{CallStats, MeterSnapshot, Metered};

use std::sync::Arc;

use vramp_core::{AddrRange, Bytes, DeviceAddr};
pub use vramp_host::HostMemory;

/// What a driver call returns.
pub type DriverResult<T> = Result<T, DriverError>;

macro_rules! opaque_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(u64);

        impl $name {
            /// The id with this number. Only a device that handed the number out accepts it.
            pub const fn from_number(number: u64) -> $name {
                $name(number)
            }

            /// The plain number, for prints and C.
            pub const fn number(self) -> u64 {
                self.0
            }
        }
    };
}

opaque_id! {
    /// Physical memory that [`Driver::create`] made.
    Handle
}
opaque_id! {
    /// A stream: work on it runs in the order it was queued.
    Stream
}
opaque_id! {
    /// A point in a stream's work that others can ask about or wait for. Never carries timing.
    Event
}
opaque_id! {
    /// Pinned host memory, the driver's or one's own, that copies run at full speed from and to.
    HostBuffer
}
opaque_id! {
    /// What a stream captured: work with an order, not yet ready to launch.
    Graph
}
opaque_id! {
    /// A graph made ready to launch.
    GraphExec
}
opaque_id! {
    /// One piece of captured work. Known while its capture or its graph lives.
    GraphNode
}

/// Where physical memory lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MemoryLocation {
    /// On the card.
    Device,
    /// In host memory of this NUMA node, readable by kernels through the same kind of address.
    /// Needs [`Capabilities::host_numa`].
    HostNuma(u32),
}

/// What a device is. Constant for the life of the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// The card's name, such as `NVIDIA H200`.
    pub name: String,
    /// The short name used in options and results: `sim:h200`, `cuda:0`.
    pub id: String,
    /// The driver's version as it names itself, or what the simulator models.
    pub driver: String,
    /// True where no card is behind this device.
    pub simulated: bool,
    /// The card's address on the PCI bus, `0000:3b:00.0`. `None` for simulated cards, which are
    /// plugged in nowhere, and where the driver does not tell.
    pub pci: Option<String>,
    /// The card's unique name, `GPU-8932f937-...`. `None` as above.
    pub uuid: Option<String>,
    /// The NUMA node of the host that the card is near to. `None` as above.
    pub host_numa: Option<u32>,
    /// What can be asked for.
    pub limits: Limits,
    /// What works at all.
    pub capabilities: Capabilities,
}

/// How much a device can give.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Memory on the card.
    pub memory: Bytes,
    /// The granule of physical memory: handles and mappings are whole multiples of it.
    pub page: Bytes,
    /// The granule the driver recommends. Equal to `page` on every card measured so far.
    pub recommended_page: Bytes,
    /// Addresses that one process can reserve in all, where known.
    pub address_space: Option<Bytes>,
}

/// What a device can do. A missing one makes the calls that need it fail with
/// [`ErrorKind::NotSupported`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Reserve, create, map, unmap, set access.
    pub virtual_memory: bool,
    /// The device's own stream-ordered pool.
    pub stream_ordered_pool: bool,
    /// Physical memory on a host NUMA node, mapped for the device.
    pub host_numa: bool,
    /// Pinned host memory.
    pub pinned_host: bool,
    /// Page tables may be edited while kernels run beside the edited range. False before compute
    /// capability 8.0, where that has faulted (kvcached issue 465).
    pub remap_beside_kernels: bool,
    /// Streams capture graphs.
    pub graphs: bool,
}

/// Memory on the card as the driver counts it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Not given to anyone.
    pub free: Bytes,
    /// On the card.
    pub total: Bytes,
}

/// What the device's own stream-ordered pool holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolUsage {
    /// Physical memory the pool holds.
    pub reserved: Bytes,
    /// The most it ever held.
    pub reserved_peak: Bytes,
    /// Memory handed out to users.
    pub used: Bytes,
}

/// `len` bytes from one address to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceCopy {
    /// The first byte read.
    pub from: DeviceAddr,
    /// The first byte written.
    pub to: DeviceAddr,
    /// How many bytes.
    pub len: Bytes,
}

/// A part of pinned host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostSlice {
    /// Whose part.
    pub buffer: HostBuffer,
    /// The distance of its first byte from the buffer's.
    pub offset: Bytes,
    /// How many bytes.
    pub len: Bytes,
}

/// A GPU, real or simulated. See the crate's page for the rules.
///
/// Calls may come from any thread. The costs named are medians on one H200 with driver 580
/// (`vramp-driver/costs/h200.toml`).
pub trait Driver: Send + Sync {
    /// What the device is and can do. No driver call.
    fn info(&self) -> &DeviceInfo;

    /// Host time in nanoseconds as this device's caller lives it: a monotonic clock on a card,
    /// the sum of modelled costs on the simulator. Differences tell what calls took. No driver call.
    fn now_ns(&self) -> u64;

    // --- addresses ---

    /// Reserves `len` addresses that nothing else will use. No physical memory. 4 us.
    ///
    /// `len` and `alignment` are multiples of the page; `alignment` is a power of two.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`] if no such range is left: ask for less.
    fn reserve(&self, len: Bytes, alignment: Bytes) -> DriverResult<DeviceAddr>;

    /// Gives back a range exactly as [`Driver::reserve`] returned it. Nothing may be mapped in it.
    fn free_addresses(&self, range: AddrRange) -> DriverResult<()>;

    // --- physical memory ---

    /// Creates `len` bytes of physical memory, a multiple of the page. 7 to 64 us.
    fn create(&self, len: Bytes, place: MemoryLocation) -> DriverResult<Handle>;

    /// Releases physical memory; it lives on until its last mapping goes. 9 us to 1 ms, by size.
    fn release(&self, handle: Handle) -> DriverResult<()>;

    /// Maps the whole of `handle` at `at`, which must be reserved and unmapped. 0.5 us.
    fn map(&self, at: DeviceAddr, handle: Handle) -> DriverResult<()>;

    /// Unmaps every mapping in `range`, which must cover whole mappings without gaps.
    /// 13 us and more, by the number of mappings.
    ///
    /// Nothing in flight may still touch the range: the caller must have *seen* its work complete.
    fn unmap(&self, range: AddrRange) -> DriverResult<()>;

    /// Lets the device read and write `range`, which must cover whole mappings without gaps. 20 us
    /// and more, by the number of mappings.
    fn set_access(&self, range: AddrRange) -> DriverResult<()>;

    // --- plain allocations ---

    /// Allocates `len` bytes that can be touched at once. May wait for work in flight. 30 to 75 us,
    /// by size.
    ///
    /// The card gives whole pages; `len` may be any size above zero.
    fn alloc_memory(&self, len: Bytes) -> DriverResult<DeviceAddr>;

    /// Frees what [`Driver::alloc_memory`] returned, after waiting for all work on the device. 26 to
    /// 286 us, by size, and the wait.
    fn free_memory(&self, at: DeviceAddr) -> DriverResult<()>;

    // --- streams and events ---

    /// Creates a stream that does not wait for the default stream.
    fn create_stream(&self) -> DriverResult<Stream>;

    /// Destroys a stream. Work queued on it still runs.
    fn destroy_stream(&self, stream: Stream) -> DriverResult<()>;

    /// Waits on the host until everything queued on `stream` is done.
    fn synchronize_stream(&self, stream: Stream) -> DriverResult<()>;

    /// Creates an event without timing. 0.13 us.
    fn create_event(&self) -> DriverResult<Event>;

    /// Destroys an event. 0.12 us.
    fn destroy_event(&self, event: Event) -> DriverResult<()>;

    /// Sets `event` to the point behind everything queued on `stream` so far. 0.19 us.
    fn record(&self, event: Event, stream: Stream) -> DriverResult<()>;

    /// True if the work before the event's last record is done, or it was never recorded. 0.21 us.
    ///
    /// # Errors
    /// [`ErrorKind::DeviceLost`] if that work failed: a lost device is never "not yet done".
    fn query(&self, event: Event) -> DriverResult<bool>;

    /// Makes later work on `stream` wait for the event's last record. The host does not wait.
    /// 0.15 us.
    fn wait(&self, stream: Stream, event: Event) -> DriverResult<()>;

    /// Waits on the host for the event's last record.
    fn synchronize_event(&self, event: Event) -> DriverResult<()>;

    // --- work ---

    /// Queues a fill of `range` with `byte` on `stream`.
    fn fill(&self, stream: Stream, range: AddrRange, byte: u8) -> DriverResult<()>;

    /// Queues a copy between device addresses on `stream`. The ranges may not overlap.
    fn copy(&self, stream: Stream, copy: DeviceCopy) -> DriverResult<()>;

    /// Queues a copy from pinned host memory to the device on `stream`.
    fn copy_to_device(&self, stream: Stream, from: HostSlice, to: DeviceAddr) -> DriverResult<()>;

    /// Queues a copy from the device to pinned host memory on `stream`.
    fn copy_to_host(&self, stream: Stream, from: DeviceAddr, to: HostSlice) -> DriverResult<()>;

    // --- captures and graphs ---

    /// From now on, work queued on `stream` becomes a graph instead of running; see
    /// [`CaptureMode`] for what else it changes, and the [crate's page](crate) for the rules.
    /// No figure is known for its cost.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidUse`] or [`ErrorKind::Capturing`] if the stream captures already.
    fn begin_capture(&self, stream: Stream, mode: CaptureMode) -> DriverResult<()>;

    /// Ends the capture that began on `stream`. Every stream that it drew in is out of it, whether
    /// this succeeds or says that the capture was spoilt.
    ///
    /// Unless the mode is [`CaptureMode::Relaxed`], only the thread that began the capture ends it.
    ///
    /// # Errors
    /// [`ErrorKind::Capturing`] if a refused call spoilt the capture, if a stream that was drawn in
    /// was not joined to `stream`, or if the capture did not begin on this stream and thread; the
    /// last one ends nothing. [`ErrorKind::InvalidUse`] if the stream does not capture.
    fn end_capture(&self, stream: Stream) -> DriverResult<Graph>;

    /// True while work queued on `stream` becomes a graph, also if its capture is spoilt. 0.5 us.
    fn is_capturing(&self, stream: Stream) -> DriverResult<bool>;

    /// Which capture `stream` is part of, and behind which nodes its next work will come. `None` if
    /// it is part of none. Legal in every mode.
    ///
    /// On a card one thread at a time may work with the streams of one capture.
    ///
    /// Costs as [`Driver::is_capturing`], and one driver call more for each node that no call named
    /// before.
    ///
    /// # Errors
    /// [`ErrorKind::Capturing`] if the capture is spoilt.
    fn capture_info(&self, stream: Stream) -> DriverResult<Option<CaptureInfo>>;

    /// The nodes that `node` comes directly behind, no node twice. Legal while its capture is under
    /// way. No driver call.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidUse`] once the capture ended without a graph, or the graph was destroyed.
    fn node_dependencies(&self, node: GraphNode) -> DriverResult<Vec<GraphNode>>;

    /// How many nodes `graph` has.
    fn graph_nodes(&self, graph: Graph) -> DriverResult<usize>;

    /// Makes `graph` ready to launch. The graph itself is not needed any more. Cost by the number
    /// of nodes; no figure is known.
    fn instantiate(&self, graph: Graph) -> DriverResult<GraphExec>;

    /// Queues the work of `exec` on `stream`, behind all that was queued there before and behind
    /// earlier launches of `exec`. Memory is what is mapped at its addresses when it runs; pinned
    /// memory that it copies from or to must still be there. No figure is known for its cost.
    ///
    /// Launches of different graphs on different streams have no order.
    fn launch_graph(&self, exec: GraphExec, stream: Stream) -> DriverResult<()>;

    /// Destroys a graph. What was instantiated from it lives on.
    fn destroy_graph(&self, graph: Graph) -> DriverResult<()>;

    /// Destroys an instantiated graph. A launch in flight still completes.
    fn destroy_graph_exec(&self, exec: GraphExec) -> DriverResult<()>;

    // --- the device's own stream-ordered pool ---

    /// Allocates in stream order from the device's own pool. 0.4 us on a hit.
    fn malloc_async(&self, stream: Stream, len: Bytes) -> DriverResult<DeviceAddr>;

    /// Frees in stream order what [`Driver::malloc_async`] returned. 0.5 us.
    fn free_async(&self, stream: Stream, at: DeviceAddr) -> DriverResult<()>;

    /// What that pool holds now and held at most.
    fn pool_usage(&self) -> DriverResult<PoolUsage>;

    /// How much that pool keeps when a stream is synchronised. The driver starts with zero.
    fn set_pool_threshold(&self, keep: Bytes) -> DriverResult<()>;

    /// Gives that pool's unused memory back until it holds no more than `keep`.
    fn trim_pool(&self, keep: Bytes) -> DriverResult<()>;

    // --- host memory ---

    /// Allocates pinned host memory. 0.4 ms per MiB: never on a hot path.
    fn alloc_host(&self, len: Bytes) -> DriverResult<HostBuffer>;

    /// Pins `memory`, so that copies run at full speed from and to it, and keeps it alive until
    /// [`Driver::free_host`]. Several devices may pin the same memory. 13 us per MiB with
    /// large pages that were touched before: never on a hot path.
    fn register_host(&self, memory: &Arc<HostMemory>) -> DriverResult<HostBuffer>;

    /// Frees or unpins pinned host memory. Copies in flight from or to it must be done.
    fn free_host(&self, buffer: HostBuffer) -> DriverResult<()>;

    /// Writes `bytes` into pinned host memory from the host, at `offset`.
    fn write_host(&self, buffer: HostBuffer, offset: Bytes, bytes: &[u8]) -> DriverResult<()>;

    /// Reads pinned host memory from the host into `bytes`, from `offset` on.
    fn read_host(&self, buffer: HostBuffer, offset: Bytes, bytes: &mut [u8]) -> DriverResult<()>;

    // --- counts ---

    /// Free and total memory of the card.
    fn memory_info(&self) -> DriverResult<MemoryInfo>;
}
