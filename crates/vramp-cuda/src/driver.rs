//! The calls of the trait.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use vramp_core::{AddrRange, Bytes, DeviceAddr};
use vramp_driver::{
    CaptureInfo, CaptureMode, DeviceCopy, DeviceInfo, Driver, DriverResult, Event, ExportedHandle,
    Graph, GraphExec, GraphNode, Handle, HostBuffer, HostMemory, HostSlice, MemoryInfo,
    MemoryProperties, PoolUsage, Stream, StreamThread,
};

use crate::device::CudaDriver;
use crate::{adopted, copy, graph, host, memory, pool, stream};

impl Driver for CudaDriver {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn now_ns(&self) -> u64 {
        u64::try_from(self.opened.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    fn reserve(&self, len: Bytes, alignment: Bytes) -> DriverResult<DeviceAddr> {
        memory::reserve(self, len, alignment)
    }

    fn reserve_at(&self, range: AddrRange) -> DriverResult<bool> {
        memory::reserve_at(self, range)
    }

    fn free_addresses(&self, range: AddrRange) -> DriverResult<()> {
        memory::free_addresses(self, range)
    }

    fn create(&self, len: Bytes, properties: MemoryProperties) -> DriverResult<Handle> {
        memory::create(self, len, properties)
    }

    fn release(&self, handle: Handle) -> DriverResult<()> {
        memory::release(self, handle)
    }

    fn map(&self, at: DeviceAddr, handle: Handle) -> DriverResult<()> {
        memory::map(self, at, handle)
    }

    fn unmap(&self, range: AddrRange) -> DriverResult<()> {
        memory::unmap(self, range)
    }

    fn set_access(&self, range: AddrRange, peers: &[u32]) -> DriverResult<()> {
        memory::set_access(self, range, peers)
    }

    fn set_read_only(&self, range: AddrRange) -> DriverResult<()> {
        memory::set_read_only(self, range)
    }

    fn revoke_access(&self, range: AddrRange, peers: &[u32]) -> DriverResult<()> {
        memory::revoke_access(self, range, peers)
    }

    fn export(&self, handle: Handle) -> DriverResult<ExportedHandle> {
        memory::export(self, handle)
    }

    fn import(&self, exported: &ExportedHandle, len: Bytes) -> DriverResult<Handle> {
        memory::import(self, exported, len)
    }

    fn export_dma_buf(&self, range: AddrRange) -> DriverResult<OwnedFd> {
        memory::export_dma_buf(self, range)
    }

    fn alloc_memory(&self, len: Bytes) -> DriverResult<DeviceAddr> {
        memory::alloc(self, len)
    }

    fn free_memory(&self, at: DeviceAddr) -> DriverResult<()> {
        memory::free(self, at)
    }

    fn adopt_memory(&self, range: AddrRange) -> DriverResult<()> {
        adopted::adopt(self, range)
    }

    fn forget_memory(&self, range: AddrRange) -> bool {
        adopted::forget(self, range)
    }

    fn create_stream(&self) -> DriverResult<Stream> {
        stream::create_stream(self)
    }

    fn thread_stream(&self) -> DriverResult<Stream> {
        stream::thread_stream(self)
    }

    fn stream_thread(&self, stream: Stream) -> StreamThread {
        stream::stream_thread(self, stream)
    }

    fn destroy_stream(&self, stream: Stream) -> DriverResult<()> {
        stream::destroy_stream(self, stream)
    }

    fn synchronize_stream(&self, stream: Stream) -> DriverResult<()> {
        stream::synchronize_stream(self, stream)
    }

    fn is_capturing(&self, stream: Stream) -> DriverResult<bool> {
        stream::stream_is_capturing(self, stream)
    }

    fn create_event(&self) -> DriverResult<Event> {
        stream::create_event(self)
    }

    fn destroy_event(&self, event: Event) -> DriverResult<()> {
        stream::destroy_event(self, event)
    }

    fn record(&self, event: Event, stream: Stream) -> DriverResult<()> {
        stream::record(self, event, stream)
    }

    fn record_outside(&self, event: Event, stream: Stream) -> DriverResult<bool> {
        stream::record_outside(self, event, stream)
    }

    fn query(&self, event: Event) -> DriverResult<bool> {
        stream::query(self, event)
    }

    fn wait(&self, stream: Stream, event: Event) -> DriverResult<()> {
        stream::wait(self, stream, event)
    }

    fn synchronize_event(&self, event: Event) -> DriverResult<()> {
        stream::synchronize_event(self, event)
    }

    fn synchronize_device(&self) -> DriverResult<()> {
        stream::synchronize_device(self)
    }

    fn fill(&self, stream: Stream, range: AddrRange, byte: u8) -> DriverResult<()> {
        copy::fill(self, stream, range, byte)
    }

    fn copy(&self, stream: Stream, copy: DeviceCopy) -> DriverResult<()> {
        copy::copy(self, stream, copy)
    }

    fn copy_peer(&self, stream: Stream, copy: DeviceCopy, other: &dyn Driver) -> DriverResult<()> {
        copy::copy_peer(self, stream, copy, other)
    }

    fn copy_to_device(&self, stream: Stream, from: HostSlice, to: DeviceAddr) -> DriverResult<()> {
        copy::copy_to_device(self, stream, from, to)
    }

    fn copy_to_host(&self, stream: Stream, from: DeviceAddr, to: HostSlice) -> DriverResult<()> {
        copy::copy_to_host(self, stream, from, to)
    }

    fn begin_capture(&self, stream: Stream, mode: CaptureMode) -> DriverResult<()> {
        graph::begin_capture(self, stream, mode)
    }

    fn end_capture(&self, stream: Stream) -> DriverResult<Graph> {
        graph::end_capture(self, stream)
    }

    fn capture_info(&self, stream: Stream) -> DriverResult<Option<CaptureInfo>> {
        graph::capture_info(self, stream)
    }

    fn node_dependencies(&self, node: GraphNode) -> DriverResult<Vec<GraphNode>> {
        graph::node_dependencies(self, node)
    }

    fn graph_nodes(&self, graph: Graph) -> DriverResult<usize> {
        graph::graph_nodes(self, graph)
    }

    fn instantiate(&self, graph: Graph) -> DriverResult<GraphExec> {
        graph::instantiate(self, graph)
    }

    fn launch_graph(&self, exec: GraphExec, stream: Stream) -> DriverResult<()> {
        graph::launch_graph(self, exec, stream)
    }

    fn destroy_graph(&self, graph: Graph) -> DriverResult<()> {
        graph::destroy_graph(self, graph)
    }

    fn destroy_graph_exec(&self, exec: GraphExec) -> DriverResult<()> {
        graph::destroy_graph_exec(self, exec)
    }

    fn malloc_async(&self, stream: Stream, len: Bytes) -> DriverResult<DeviceAddr> {
        pool::malloc_async(self, stream, len)
    }

    fn free_async(&self, stream: Stream, at: DeviceAddr) -> DriverResult<()> {
        pool::free_async(self, stream, at)
    }

    fn pool_usage(&self) -> DriverResult<PoolUsage> {
        pool::usage(self)
    }

    fn set_pool_threshold(&self, keep: Bytes) -> DriverResult<()> {
        pool::set_threshold(self, keep)
    }

    fn trim_pool(&self, keep: Bytes) -> DriverResult<()> {
        pool::trim(self, keep)
    }

    fn alloc_host(&self, len: Bytes) -> DriverResult<HostBuffer> {
        host::alloc(self, len)
    }

    fn register_host(&self, memory: &Arc<HostMemory>) -> DriverResult<HostBuffer> {
        host::register(self, memory)
    }

    fn free_host(&self, buffer: HostBuffer) -> DriverResult<()> {
        host::free(self, buffer)
    }

    fn write_host(&self, buffer: HostBuffer, offset: Bytes, bytes: &[u8]) -> DriverResult<()> {
        host::write(self, buffer, offset, bytes)
    }

    fn read_host(&self, buffer: HostBuffer, offset: Bytes, bytes: &mut [u8]) -> DriverResult<()> {
        host::read(self, buffer, offset, bytes)
    }

    fn owns(&self, range: AddrRange) -> bool {
        self.addresses().check_owned(range).is_ok()
    }

    fn memory_info(&self) -> DriverResult<MemoryInfo> {
        memory::memory_info(self)
    }

    fn peer_memory_info(&self, peer: u32) -> DriverResult<MemoryInfo> {
        memory::peer_memory_info(self, peer)
    }
}
