//! Devices before other devices.
//!
//! A pointer to a device is a device, so that one card can be shared and its kind chosen at run
//! time. A [`Wrapper`] is one that does some calls in its own way.

use std::ops::Deref;
use std::sync::Arc;

use vramp_core::{AddrRange, Bytes, DeviceAddr};

use crate::{
    CaptureInfo, CaptureMode, Copy, DeviceInfo, Driver, Event, Graph, GraphExec, GraphNode, Handle,
    HostBuffer, HostMemory, HostSlice, MemoryInfo, Place, PoolUsage, Result, Stream,
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
        /// A device before another one: each call is made there, but for those that it does in its
        /// own way. [`Wrapped`] makes it a [`Driver`].
        ///
        /// ```
        /// use vramp_core::AddrRange;
        /// use vramp_driver::{Driver, Result, Wrapped, Wrapper, sim::Simulator};
        ///
        /// /// Shows what is unmapped.
        /// struct Showing(Simulator);
        ///
        /// impl Wrapper for Showing {
        ///     type Device = Simulator;
        ///
        ///     fn device(&self) -> &Simulator {
        ///         &self.0
        ///     }
        ///
        ///     fn unmap(&self, range: AddrRange) -> Result<()> {
        ///         println!("{range}");
        ///         self.0.unmap(range)
        ///     }
        /// }
        ///
        /// let device = Wrapped(Showing(Simulator::preset("h200")?));
        /// device.create_event()?;
        /// # Ok::<(), Box<dyn std::error::Error>>(())
        /// ```
        pub trait Wrapper: Send + Sync {
            /// What is behind it.
            type Device: Driver;

            /// Where calls are made.
            fn device(&self) -> &Self::Device;

            $(
                #[doc = concat!("As [`Driver::", stringify!($method), "`] of the device behind.")]
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

/// A [`Wrapper`] as a device.
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
    reserve(len: Bytes, alignment: Bytes) -> Result<DeviceAddr>;
    free_addresses(range: AddrRange) -> Result<()>;
    create(len: Bytes, place: Place) -> Result<Handle>;
    release(handle: Handle) -> Result<()>;
    map(at: DeviceAddr, handle: Handle) -> Result<()>;
    unmap(range: AddrRange) -> Result<()>;
    set_access(range: AddrRange) -> Result<()>;
    alloc_memory(len: Bytes) -> Result<DeviceAddr>;
    free_memory(at: DeviceAddr) -> Result<()>;
    create_stream() -> Result<Stream>;
    destroy_stream(stream: Stream) -> Result<()>;
    synchronize_stream(stream: Stream) -> Result<()>;
    is_capturing(stream: Stream) -> Result<bool>;
    create_event() -> Result<Event>;
    destroy_event(event: Event) -> Result<()>;
    record(event: Event, stream: Stream) -> Result<()>;
    query(event: Event) -> Result<bool>;
    wait(stream: Stream, event: Event) -> Result<()>;
    synchronize_event(event: Event) -> Result<()>;
    fill(stream: Stream, range: AddrRange, byte: u8) -> Result<()>;
    copy(stream: Stream, copy: Copy) -> Result<()>;
    copy_to_device(stream: Stream, from: HostSlice, to: DeviceAddr) -> Result<()>;
    copy_to_host(stream: Stream, from: DeviceAddr, to: HostSlice) -> Result<()>;
    malloc_async(stream: Stream, len: Bytes) -> Result<DeviceAddr>;
    free_async(stream: Stream, at: DeviceAddr) -> Result<()>;
    pool_usage() -> Result<PoolUsage>;
    set_pool_threshold(keep: Bytes) -> Result<()>;
    trim_pool(keep: Bytes) -> Result<()>;
    alloc_host(len: Bytes) -> Result<HostBuffer>;
    register_host(memory: &Arc<HostMemory>) -> Result<HostBuffer>;
    free_host(buffer: HostBuffer) -> Result<()>;
    write_host(buffer: HostBuffer, offset: Bytes, bytes: &[u8]) -> Result<()>;
    read_host(buffer: HostBuffer, offset: Bytes, bytes: &mut [u8]) -> Result<()>;
    memory_info() -> Result<MemoryInfo>;
    begin_capture(stream: Stream, mode: CaptureMode) -> Result<()>;
    end_capture(stream: Stream) -> Result<Graph>;
    capture_info(stream: Stream) -> Result<Option<CaptureInfo>>;
    node_dependencies(node: GraphNode) -> Result<Vec<GraphNode>>;
    graph_nodes(graph: Graph) -> Result<usize>;
    instantiate(graph: Graph) -> Result<GraphExec>;
    launch_graph(exec: GraphExec, stream: Stream) -> Result<()>;
    destroy_graph(graph: Graph) -> Result<()>;
    destroy_graph_exec(exec: GraphExec) -> Result<()>;
}
