//! A pointer to a device is a device, so that one card can be shared and its kind chosen at run
//! time.

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
    };
    (@for $pointer:ty, $($method:ident($($argument:ident: $type:ty),*) -> $result:ty;)*) => {
        impl<D: Driver + ?Sized> Driver for $pointer {
            $(fn $method(&self $(, $argument: $type)*) -> $result {
                (**self).$method($($argument),*)
            })*
        }
    };
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
