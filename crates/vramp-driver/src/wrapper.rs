//! Devices that forward to another device: pointers, and wrappers that override some calls.
//!
//! A reference, [`Box`] or [`Arc`] to a device is a device, so that one card can be shared and its
//! kind chosen at run time.

use std::ops::Deref;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use vramp_core::{AddrRange, Bytes, DeviceAddr};

use crate::{
    CaptureInfo, CaptureMode, DeviceCopy, DeviceInfo, Driver, DriverResult, Event, ExportedHandle,
    Graph, GraphExec, GraphNode, Handle, HostBuffer, HostMemory, HostSlice, MemoryInfo,
    MemoryProperties, PoolUsage, Stream, StreamThread,
};

macro_rules! forward {
    ($($method:ident($($argument:ident: $type:ty),*) -> $result:ty;)*) => {
        forward!(@for &D, $($method($($argument: $type),*) -> $result;)*);
        forward!(@for Box<D>, $($method($($argument: $type),*) -> $result;)*);
        forward!(@for Arc<D>, $($method($($argument: $type),*) -> $result;)*);
        forward!(@wrapper $($method($($argument: $type),*) -> $result;)*);
    };
    (@for $pointer:ty, $($method:ident($($argument:ident: $type:ty),*) -> $result:ty;)*) => {
        impl<D: Driver + ?Sized> Driver for $pointer {
            $(fn $method(&self $(, $argument: $type)*) -> $result {
                (**self).$method($($argument),*)
            })*
        }
    };
    (@wrapper $($method:ident($($argument:ident: $type:ty),*) -> $result:ty;)*) => {
        /// A device that forwards each call to another one, except those that it overrides.
        /// [`Wrapped`] makes it a [`Driver`].
        ///
        /// ```
        /// use vramp_core::AddrRange;
        /// use vramp_driver::wrapper::{Wrapped, Wrapper};
        /// use vramp_driver::{Driver, DriverResult, sim::Simulator};
        ///
        /// /// Prints each range that is unmapped.
        /// struct Printing(Simulator);
        ///
        /// impl Wrapper for Printing {
        ///     type Device = Simulator;
        ///
        ///     fn device(&self) -> &Simulator {
        ///         &self.0
        ///     }
        ///
        ///     fn unmap(&self, range: AddrRange) -> DriverResult<()> {
        ///         println!("{range}");
        ///         self.0.unmap(range)
        ///     }
        /// }
        ///
        /// let device = Wrapped(Printing(Simulator::card("h200")?));
        /// device.create_event()?;
        /// # Ok::<(), Box<dyn std::error::Error>>(())
        /// ```
        pub trait Wrapper: Send + Sync {
            /// Type of the device that calls are forwarded to.
            type Device: Driver;

            /// Returns the device that calls are forwarded to.
            fn device(&self) -> &Self::Device;

            $(
                #[doc = concat!("Forwards to [`Driver::", stringify!($method), "`] unless overridden.")]
                fn $method(&self $(, $argument: $type)*) -> $result {
                    self.device().$method($($argument),*)
                }
            )*
        }

        impl<W: Wrapper> Driver for Wrapped<W> {
            $(fn $method(&self $(, $argument: $type)*) -> $result {
                self.0.$method($($argument),*)
            })*
        }
    };
}

/// A [`Wrapper`] as a [`Driver`].
#[derive(Clone, Debug)]
pub struct Wrapped<W>(pub W);

impl<W> Deref for Wrapped<W> {
    type Target = W;

    fn deref(&self) -> &W {
        &self.0
    }
}

forward! {
    info() -> &DeviceInfo;
    now_ns() -> u64;
    reserve(len: Bytes, alignment: Bytes) -> DriverResult<DeviceAddr>;
    reserve_at(range: AddrRange) -> DriverResult<bool>;
    free_addresses(range: AddrRange) -> DriverResult<()>;
    create(len: Bytes, properties: MemoryProperties) -> DriverResult<Handle>;
    release(handle: Handle) -> DriverResult<()>;
    map(at: DeviceAddr, handle: Handle) -> DriverResult<()>;
    unmap(range: AddrRange) -> DriverResult<()>;
    set_access(range: AddrRange, peers: &[u32]) -> DriverResult<()>;
    set_read_only(range: AddrRange) -> DriverResult<()>;
    revoke_access(range: AddrRange, peers: &[u32]) -> DriverResult<()>;
    export(handle: Handle) -> DriverResult<ExportedHandle>;
    import(exported: &ExportedHandle, len: Bytes) -> DriverResult<Handle>;
    export_dma_buf(range: AddrRange) -> DriverResult<OwnedFd>;
    alloc_memory(len: Bytes) -> DriverResult<DeviceAddr>;
    free_memory(at: DeviceAddr) -> DriverResult<()>;
    adopt_memory(range: AddrRange) -> DriverResult<()>;
    forget_memory(range: AddrRange) -> bool;
    create_stream() -> DriverResult<Stream>;
    thread_stream() -> DriverResult<Stream>;
    stream_thread(stream: Stream) -> StreamThread;
    destroy_stream(stream: Stream) -> DriverResult<()>;
    synchronize_stream(stream: Stream) -> DriverResult<()>;
    is_capturing(stream: Stream) -> DriverResult<bool>;
    create_event() -> DriverResult<Event>;
    destroy_event(event: Event) -> DriverResult<()>;
    record(event: Event, stream: Stream) -> DriverResult<()>;
    record_outside(event: Event, stream: Stream) -> DriverResult<bool>;
    query(event: Event) -> DriverResult<bool>;
    wait(stream: Stream, event: Event) -> DriverResult<()>;
    synchronize_event(event: Event) -> DriverResult<()>;
    synchronize_device() -> DriverResult<()>;
    fill(stream: Stream, range: AddrRange, byte: u8) -> DriverResult<()>;
    copy(stream: Stream, copy: DeviceCopy) -> DriverResult<()>;
    copy_peer(stream: Stream, copy: DeviceCopy, other: &dyn Driver) -> DriverResult<()>;
    copy_to_device(stream: Stream, from: HostSlice, to: DeviceAddr) -> DriverResult<()>;
    copy_to_host(stream: Stream, from: DeviceAddr, to: HostSlice) -> DriverResult<()>;
    malloc_async(stream: Stream, len: Bytes) -> DriverResult<DeviceAddr>;
    free_async(stream: Stream, at: DeviceAddr) -> DriverResult<()>;
    pool_usage() -> DriverResult<PoolUsage>;
    set_pool_threshold(keep: Bytes) -> DriverResult<()>;
    trim_pool(keep: Bytes) -> DriverResult<()>;
    alloc_host(len: Bytes) -> DriverResult<HostBuffer>;
    register_host(memory: &Arc<HostMemory>) -> DriverResult<HostBuffer>;
    free_host(buffer: HostBuffer) -> DriverResult<()>;
    write_host(buffer: HostBuffer, offset: Bytes, bytes: &[u8]) -> DriverResult<()>;
    read_host(buffer: HostBuffer, offset: Bytes, bytes: &mut [u8]) -> DriverResult<()>;
    owns(range: AddrRange) -> bool;
    memory_info() -> DriverResult<MemoryInfo>;
    peer_memory_info(peer: u32) -> DriverResult<MemoryInfo>;
    begin_capture(stream: Stream, mode: CaptureMode) -> DriverResult<()>;
    end_capture(stream: Stream) -> DriverResult<Graph>;
    capture_info(stream: Stream) -> DriverResult<Option<CaptureInfo>>;
    node_dependencies(node: GraphNode) -> DriverResult<Vec<GraphNode>>;
    graph_nodes(graph: Graph) -> DriverResult<usize>;
    instantiate(graph: Graph) -> DriverResult<GraphExec>;
    launch_graph(exec: GraphExec, stream: Stream) -> DriverResult<()>;
    destroy_graph(graph: Graph) -> DriverResult<()>;
    destroy_graph_exec(exec: GraphExec) -> DriverResult<()>;
}
