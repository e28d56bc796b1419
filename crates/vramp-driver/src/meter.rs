//! Counts and times of driver calls, for any device.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use vramp_core::{AddrRange, Bytes, DeviceAddr};

use crate::{
    Call, CaptureInfo, CaptureMode, DeviceCopy, DeviceInfo, Driver, DriverResult, Event,
    ExportedHandle, Graph, GraphExec, GraphNode, Handle, HostBuffer, HostMemory, HostSlice,
    MemoryInfo, MemoryProperties, PoolUsage, Stream, StreamThread,
};

/// A device that counts and times the calls made to it.
///
/// Times are differences of [`Driver::now_ns`]: measured on a card, modelled on the simulator. On the
/// simulator all threads share one clock, so a call may include the cost of concurrent calls.
/// Adds two reads of the clock and four atomic operations to each call.
///
/// ```
/// use vramp_driver::{Call, Driver, meter::Metered, sim::Simulator};
/// let device = Metered::new(Simulator::card("h200")?);
/// device.create_event()?;
/// let counts = device.snapshot();
/// assert_eq!((counts.of(Call::CreateEvent).calls, counts.of(Call::CreateEvent).total_ns), (1, 130));
/// assert_eq!(counts.total().calls, 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Metered<D> {
    device: D,
    counters: [Counter; Call::ALL.len()],
}

#[derive(Debug, Default)]
struct Counter {
    calls: AtomicU64,
    failures: AtomicU64,
    total_ns: AtomicU64,
    max_ns: AtomicU64,
}

/// Counts and times of one kind of call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CallStats {
    /// Calls, including failed ones.
    pub calls: u64,
    /// Calls that failed.
    pub failures: u64,
    /// Host time of all calls, in nanoseconds.
    pub total_ns: u64,
    /// Host time of the longest call, in nanoseconds.
    pub max_ns: u64,
}

/// Counts and times of every kind of call at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MeterSnapshot {
    stats: [CallStats; Call::ALL.len()],
}

impl MeterSnapshot {
    /// Returns the counts of one kind.
    pub fn of(&self, call: Call) -> CallStats {
        self.stats[call as usize]
    }

    /// Returns each kind that was called, in the order of [`Call::ALL`].
    pub fn iter(&self) -> impl Iterator<Item = (Call, CallStats)> + '_ {
        Call::ALL.into_iter().zip(self.stats).filter(|(_, stats)| stats.calls > 0)
    }

    /// Returns the sum over all kinds; `max_ns` is the maximum.
    pub fn total(&self) -> CallStats {
        self.iter().fold(CallStats::default(), |sum, (_, stats)| CallStats {
            calls: sum.calls + stats.calls,
            failures: sum.failures + stats.failures,
            total_ns: sum.total_ns + stats.total_ns,
            max_ns: sum.max_ns.max(stats.max_ns),
        })
    }
}

impl<D: Driver> Metered<D> {
    /// Wraps `device` with all counts at zero.
    pub fn new(device: D) -> Metered<D> {
        Metered { device, counters: std::array::from_fn(|_| Counter::default()) }
    }

    /// Returns the wrapped device. Calls made on it directly are not counted.
    pub fn device(&self) -> &D {
        &self.device
    }

    /// Returns the counts so far. A concurrent call may be counted in part.
    pub fn snapshot(&self) -> MeterSnapshot {
        let read = |counter: &Counter| CallStats {
            calls: counter.calls.load(Relaxed),
            failures: counter.failures.load(Relaxed),
            total_ns: counter.total_ns.load(Relaxed),
            max_ns: counter.max_ns.load(Relaxed),
        };
        MeterSnapshot { stats: self.counters.each_ref().map(read) }
    }

    /// Resets all counts to zero.
    pub fn reset(&self) {
        for counter in &self.counters {
            for part in [&counter.calls, &counter.failures, &counter.total_ns, &counter.max_ns] {
                part.store(0, Relaxed);
            }
        }
    }

    fn timed<T>(&self, call: Call, body: impl FnOnce(&D) -> DriverResult<T>) -> DriverResult<T> {
        let begun_ns = self.device.now_ns();
        let result = body(&self.device);
        let took_ns = self.device.now_ns().saturating_sub(begun_ns);
        let counter = &self.counters[call as usize];
        counter.calls.fetch_add(1, Relaxed);
        counter.failures.fetch_add(u64::from(result.is_err()), Relaxed);
        counter.total_ns.fetch_add(took_ns, Relaxed);
        counter.max_ns.fetch_max(took_ns, Relaxed);
        result
    }
}

impl<D: Driver> Driver for Metered<D> {
    fn info(&self) -> &DeviceInfo {
        self.device.info()
    }
    fn owns(&self, range: AddrRange) -> bool {
        self.device.owns(range)
    }
    fn forget_memory(&self, range: AddrRange) -> bool {
        self.device.forget_memory(range)
    }
    fn now_ns(&self) -> u64 {
        self.device.now_ns()
    }
    fn reserve(&self, len: Bytes, alignment: Bytes) -> DriverResult<DeviceAddr> {
        self.timed(Call::Reserve, |device| device.reserve(len, alignment))
    }
    fn reserve_at(&self, range: AddrRange) -> DriverResult<bool> {
        self.timed(Call::Reserve, |device| device.reserve_at(range))
    }

    fn free_addresses(&self, range: AddrRange) -> DriverResult<()> {
        self.timed(Call::FreeAddresses, |device| device.free_addresses(range))
    }
    fn create(&self, len: Bytes, properties: MemoryProperties) -> DriverResult<Handle> {
        self.timed(Call::Create, |device| device.create(len, properties))
    }
    fn release(&self, handle: Handle) -> DriverResult<()> {
        self.timed(Call::Release, |device| device.release(handle))
    }
    fn map(&self, at: DeviceAddr, handle: Handle) -> DriverResult<()> {
        self.timed(Call::Map, |device| device.map(at, handle))
    }
    fn unmap(&self, range: AddrRange) -> DriverResult<()> {
        self.timed(Call::Unmap, |device| device.unmap(range))
    }
    fn set_access(&self, range: AddrRange, peers: &[u32]) -> DriverResult<()> {
        self.timed(Call::SetAccess, |device| device.set_access(range, peers))
    }
    fn adopt_memory(&self, range: AddrRange) -> DriverResult<()> {
        self.timed(Call::AdoptMemory, |device| device.adopt_memory(range))
    }
    fn set_read_only(&self, range: AddrRange) -> DriverResult<()> {
        self.timed(Call::SetAccess, |device| device.set_read_only(range))
    }

    fn revoke_access(&self, range: AddrRange, peers: &[u32]) -> DriverResult<()> {
        self.timed(Call::RevokeAccess, |device| device.revoke_access(range, peers))
    }
    fn export(&self, handle: Handle) -> DriverResult<ExportedHandle> {
        self.timed(Call::Export, |device| device.export(handle))
    }
    fn import(&self, exported: &ExportedHandle, len: Bytes) -> DriverResult<Handle> {
        self.timed(Call::Import, |device| device.import(exported, len))
    }
    fn export_dma_buf(&self, range: AddrRange) -> DriverResult<OwnedFd> {
        self.timed(Call::ExportDmaBuf, |device| device.export_dma_buf(range))
    }
    fn alloc_memory(&self, len: Bytes) -> DriverResult<DeviceAddr> {
        self.timed(Call::AllocMemory, |device| device.alloc_memory(len))
    }
    fn free_memory(&self, at: DeviceAddr) -> DriverResult<()> {
        self.timed(Call::FreeMemory, |device| device.free_memory(at))
    }
    fn create_stream(&self) -> DriverResult<Stream> {
        self.timed(Call::CreateStream, |device| device.create_stream())
    }
    fn thread_stream(&self) -> DriverResult<Stream> {
        self.timed(Call::CreateStream, |device| device.thread_stream())
    }
    fn stream_thread(&self, stream: Stream) -> StreamThread {
        self.device.stream_thread(stream)
    }
    fn destroy_stream(&self, stream: Stream) -> DriverResult<()> {
        self.timed(Call::DestroyStream, |device| device.destroy_stream(stream))
    }
    fn synchronize_stream(&self, stream: Stream) -> DriverResult<()> {
        self.timed(Call::SynchronizeStream, |device| device.synchronize_stream(stream))
    }
    fn is_capturing(&self, stream: Stream) -> DriverResult<bool> {
        self.timed(Call::IsCapturing, |device| device.is_capturing(stream))
    }
    fn create_event(&self) -> DriverResult<Event> {
        self.timed(Call::CreateEvent, |device| device.create_event())
    }
    fn destroy_event(&self, event: Event) -> DriverResult<()> {
        self.timed(Call::DestroyEvent, |device| device.destroy_event(event))
    }
    fn record(&self, event: Event, stream: Stream) -> DriverResult<()> {
        self.timed(Call::Record, |device| device.record(event, stream))
    }
    fn record_outside(&self, event: Event, stream: Stream) -> DriverResult<bool> {
        self.timed(Call::Record, |device| device.record_outside(event, stream))
    }
    fn query(&self, event: Event) -> DriverResult<bool> {
        self.timed(Call::Query, |device| device.query(event))
    }
    fn wait(&self, stream: Stream, event: Event) -> DriverResult<()> {
        self.timed(Call::Wait, |device| device.wait(stream, event))
    }
    fn synchronize_event(&self, event: Event) -> DriverResult<()> {
        self.timed(Call::SynchronizeEvent, |device| device.synchronize_event(event))
    }
    fn synchronize_device(&self) -> DriverResult<()> {
        self.timed(Call::SynchronizeStream, |device| device.synchronize_device())
    }
    fn fill(&self, stream: Stream, range: AddrRange, byte: u8) -> DriverResult<()> {
        self.timed(Call::Fill, |device| device.fill(stream, range, byte))
    }
    fn copy(&self, stream: Stream, copy: DeviceCopy) -> DriverResult<()> {
        self.timed(Call::Copy, |device| device.copy(stream, copy))
    }
    fn copy_peer(&self, stream: Stream, copy: DeviceCopy, other: &dyn Driver) -> DriverResult<()> {
        self.timed(Call::CopyPeer, |device| device.copy_peer(stream, copy, other))
    }
    fn copy_to_device(&self, stream: Stream, from: HostSlice, to: DeviceAddr) -> DriverResult<()> {
        self.timed(Call::CopyToDevice, |device| device.copy_to_device(stream, from, to))
    }
    fn copy_to_host(&self, stream: Stream, from: DeviceAddr, to: HostSlice) -> DriverResult<()> {
        self.timed(Call::CopyToHost, |device| device.copy_to_host(stream, from, to))
    }
    fn malloc_async(&self, stream: Stream, len: Bytes) -> DriverResult<DeviceAddr> {
        self.timed(Call::MallocAsync, |device| device.malloc_async(stream, len))
    }
    fn free_async(&self, stream: Stream, at: DeviceAddr) -> DriverResult<()> {
        self.timed(Call::FreeAsync, |device| device.free_async(stream, at))
    }
    fn pool_usage(&self) -> DriverResult<PoolUsage> {
        self.timed(Call::PoolUsage, |device| device.pool_usage())
    }
    fn set_pool_threshold(&self, keep: Bytes) -> DriverResult<()> {
        self.timed(Call::SetPoolThreshold, |device| device.set_pool_threshold(keep))
    }
    fn trim_pool(&self, keep: Bytes) -> DriverResult<()> {
        self.timed(Call::TrimPool, |device| device.trim_pool(keep))
    }
    fn alloc_host(&self, len: Bytes) -> DriverResult<HostBuffer> {
        self.timed(Call::AllocHost, |device| device.alloc_host(len))
    }
    fn register_host(&self, memory: &Arc<HostMemory>) -> DriverResult<HostBuffer> {
        self.timed(Call::RegisterHost, |device| device.register_host(memory))
    }
    fn free_host(&self, buffer: HostBuffer) -> DriverResult<()> {
        self.timed(Call::FreeHost, |device| device.free_host(buffer))
    }
    fn write_host(&self, buffer: HostBuffer, offset: Bytes, bytes: &[u8]) -> DriverResult<()> {
        self.timed(Call::AccessHost, |device| device.write_host(buffer, offset, bytes))
    }
    fn read_host(&self, buffer: HostBuffer, offset: Bytes, bytes: &mut [u8]) -> DriverResult<()> {
        self.timed(Call::AccessHost, |device| device.read_host(buffer, offset, bytes))
    }
    fn memory_info(&self) -> DriverResult<MemoryInfo> {
        self.timed(Call::MemoryInfo, |device| device.memory_info())
    }
    fn peer_memory_info(&self, peer: u32) -> DriverResult<MemoryInfo> {
        self.timed(Call::MemoryInfo, |device| device.peer_memory_info(peer))
    }
    fn begin_capture(&self, stream: Stream, mode: CaptureMode) -> DriverResult<()> {
        self.timed(Call::BeginCapture, |device| device.begin_capture(stream, mode))
    }
    fn end_capture(&self, stream: Stream) -> DriverResult<Graph> {
        self.timed(Call::EndCapture, |device| device.end_capture(stream))
    }
    fn capture_info(&self, stream: Stream) -> DriverResult<Option<CaptureInfo>> {
        self.timed(Call::CaptureInfo, |device| device.capture_info(stream))
    }
    fn node_dependencies(&self, node: GraphNode) -> DriverResult<Vec<GraphNode>> {
        self.timed(Call::NodeDependencies, |device| device.node_dependencies(node))
    }
    fn graph_nodes(&self, graph: Graph) -> DriverResult<usize> {
        self.timed(Call::GraphNodes, |device| device.graph_nodes(graph))
    }
    fn instantiate(&self, graph: Graph) -> DriverResult<GraphExec> {
        self.timed(Call::Instantiate, |device| device.instantiate(graph))
    }
    fn launch_graph(&self, exec: GraphExec, stream: Stream) -> DriverResult<()> {
        self.timed(Call::LaunchGraph, |device| device.launch_graph(exec, stream))
    }
    fn destroy_graph(&self, graph: Graph) -> DriverResult<()> {
        self.timed(Call::DestroyGraph, |device| device.destroy_graph(graph))
    }
    fn destroy_graph_exec(&self, exec: GraphExec) -> DriverResult<()> {
        self.timed(Call::DestroyGraphExec, |device| device.destroy_graph_exec(exec))
    }
}

#[cfg(all(test, feature = "sim"))]
mod tests {
    use super::*;
    use crate::sim::{FaultPlan, Simulator};

    #[test]
    fn calls_failures_and_times_are_counted_and_reset() {
        let device = Metered::new(Simulator::builder().build());
        let page = device.info().limits.page;
        for _ in 0..3 {
            device.reserve(page, page).unwrap();
        }
        device.device().set_faults(FaultPlan::nth(1));
        device.reserve(page, page).unwrap_err();
        let expected = CallStats { calls: 4, failures: 1, total_ns: 12_000, max_ns: 4_000 };
        assert_eq!(device.snapshot().of(Call::Reserve), expected);
        assert_eq!(device.snapshot().total(), expected);
        assert_eq!(device.snapshot().iter().count(), 1);
        device.reset();
        assert_eq!(device.snapshot().total(), CallStats::default());
    }
}
