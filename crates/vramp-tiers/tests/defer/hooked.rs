//! A device that tells of accesses that are set, while they are, and of the end of a wait.

use std::sync::{Arc, Mutex, PoisonError};

use vramp::Driver;
use vramp_core::{AddrRange, DeviceAddr};
use vramp_driver::sim::Simulator;
use vramp_driver::{
    CaptureInfo, CaptureMode, Copy, DeviceInfo, Event, Graph, GraphExec, GraphNode, Handle,
    HostBuffer, HostMemory, HostSlice, MemoryInfo, Place, PoolUsage, Result, Stream,
};
use vramp_tiers::Bytes;

type Hook = Box<dyn Fn(AddrRange) + Send>;

/// A simulator with hooks.
pub struct Hooked {
    sim: Arc<Simulator>,
    hook: Mutex<Option<Hook>>,
    waited: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl Hooked {
    pub fn on(sim: Arc<Simulator>) -> Hooked {
        Hooked { sim, hook: Mutex::default(), waited: Mutex::default() }
    }

    /// Called in each set-access from now on; `None` for no more.
    pub fn set(&self, hook: Option<Hook>) {
        *self.hook.lock().unwrap_or_else(PoisonError::into_inner) = hook;
    }

    /// Called once, when the next wait for an event is over and before whoever waited goes on.
    pub fn after_wait(&self, hook: impl FnOnce() + Send + 'static) {
        *self.waited.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(hook));
    }
}

macro_rules! forwarded {
    ($($method:ident($($argument:ident: $type:ty),*) -> $result:ty;)*) => {
        $(fn $method(&self $(, $argument: $type)*) -> $result {
            self.sim.$method($($argument),*)
        })*
    };
}

impl Driver for Hooked {
    fn set_access(&self, range: AddrRange) -> Result<()> {
        if let Some(hook) = &*self.hook.lock().unwrap_or_else(PoisonError::into_inner) {
            hook(range);
        }
        self.sim.set_access(range)
    }

    fn synchronize_event(&self, event: Event) -> Result<()> {
        let waited = self.sim.synchronize_event(event);
        let hook = self.waited.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(hook) = hook {
            hook();
        }
        waited
    }

    forwarded! {
        register_host(memory: &Arc<HostMemory>) -> Result<HostBuffer>;
        capture_info(stream: Stream) -> Result<Option<CaptureInfo>>;
        record(event: Event, stream: Stream) -> Result<()>;
        query(event: Event) -> Result<bool>;
        wait(stream: Stream, event: Event) -> Result<()>;
        synchronize_stream(stream: Stream) -> Result<()>;
        info() -> &DeviceInfo;
        now_ns() -> u64;
        reserve(len: Bytes, alignment: Bytes) -> Result<DeviceAddr>;
        free_addresses(range: AddrRange) -> Result<()>;
        create(len: Bytes, place: Place) -> Result<Handle>;
        release(handle: Handle) -> Result<()>;
        map(at: DeviceAddr, handle: Handle) -> Result<()>;
        unmap(range: AddrRange) -> Result<()>;
        alloc_memory(len: Bytes) -> Result<DeviceAddr>;
        free_memory(at: DeviceAddr) -> Result<()>;
        create_stream() -> Result<Stream>;
        destroy_stream(stream: Stream) -> Result<()>;
        is_capturing(stream: Stream) -> Result<bool>;
        create_event() -> Result<Event>;
        destroy_event(event: Event) -> Result<()>;
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
        free_host(buffer: HostBuffer) -> Result<()>;
        write_host(buffer: HostBuffer, offset: Bytes, bytes: &[u8]) -> Result<()>;
        read_host(buffer: HostBuffer, offset: Bytes, bytes: &mut [u8]) -> Result<()>;
        memory_info() -> Result<MemoryInfo>;
        begin_capture(stream: Stream, mode: CaptureMode) -> Result<()>;
        end_capture(stream: Stream) -> Result<Graph>;
        node_dependencies(node: GraphNode) -> Result<Vec<GraphNode>>;
        graph_nodes(graph: Graph) -> Result<usize>;
        instantiate(graph: Graph) -> Result<GraphExec>;
        launch_graph(exec: GraphExec, stream: Stream) -> Result<()>;
        destroy_graph(graph: Graph) -> Result<()>;
        destroy_graph_exec(exec: GraphExec) -> Result<()>;
    }
}
