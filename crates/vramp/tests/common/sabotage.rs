//! A device with one broken promise: what the pool's rules rest on fails from below.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};

use vramp::{Bytes, DeviceAddr, Driver};
use vramp_core::AddrRange;
use vramp_driver::sim::Simulator;
use vramp_driver::{
    Call, CaptureInfo, CaptureMode, Copy, DeviceInfo, Event, Graph, GraphExec, GraphNode, Handle,
    HostBuffer, HostMemory, HostSlice, MemoryInfo, Place, PoolUsage, Result, Stream,
};

/// A simulator that leaves out calls of one kind, and says that they went well.
pub struct Saboteur {
    sim: Arc<Simulator>,
    left_out: Mutex<Option<Call>>,
    /// The tips that each capture told, by its number.
    told: Mutex<BTreeMap<u64, BTreeSet<GraphNode>>>,
}

impl Saboteur {
    pub fn on(sim: Arc<Simulator>) -> Saboteur {
        Saboteur { sim, left_out: Mutex::new(None), told: Mutex::default() }
    }

    /// From now on calls of this kind do nothing; a query answers yes, and a question where a stream
    /// is in its capture tells of joins that were never made.
    pub fn leave_out(&self, call: Call) {
        *self.left_out.lock().unwrap_or_else(PoisonError::into_inner) = Some(call);
    }

    /// From now on every call is made.
    pub fn behave(&self) {
        *self.left_out.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    fn leaves_out(&self, call: Call) -> bool {
        *self.left_out.lock().unwrap_or_else(PoisonError::into_inner) == Some(call)
    }
}

macro_rules! forwarded {
    ($($method:ident($($argument:ident: $type:ty),*) -> $result:ty;)*) => {
        $(fn $method(&self $(, $argument: $type)*) -> $result {
            self.sim.$method($($argument),*)
        })*
    };
}

macro_rules! left_out {
    ($($call:ident => $method:ident($($argument:ident: $type:ty),*) -> $result:ty, $lie:expr;)*) => {
        $(fn $method(&self $(, $argument: $type)*) -> Result<$result> {
            if self.leaves_out(Call::$call) {
                return Ok($lie);
            }
            self.sim.$method($($argument),*)
        })*
    };
}

impl Driver for Saboteur {
    fn register_host(&self, memory: &Arc<HostMemory>) -> Result<HostBuffer> {
        self.sim.register_host(memory)
    }

    fn capture_info(&self, stream: Stream) -> Result<Option<CaptureInfo>> {
        let mut info = self.sim.capture_info(stream)?;
        if let Some(CaptureInfo { capture, tips }) = &mut info {
            let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
            let all = told.entry(*capture).or_default();
            all.extend(tips.iter().copied());
            if self.leaves_out(Call::CaptureInfo) {
                *tips = all.iter().copied().collect();
            }
        }
        Ok(info)
    }

    left_out! {
        Record => record(event: Event, stream: Stream) -> (), ();
        Query => query(event: Event) -> bool, true;
        Wait => wait(stream: Stream, event: Event) -> (), ();
        SynchronizeEvent => synchronize_event(event: Event) -> (), ();
        SynchronizeStream => synchronize_stream(stream: Stream) -> (), ();
    }

    forwarded! {
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
