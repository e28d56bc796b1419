//! What a measurement holds of the device. Dropping it returns everything, also after a failed call.

use std::sync::Arc;

use vramp::device::{
    CaptureMode, Driver, DriverResult, Event, ExportedHandle, Graph, GraphExec, Handle, HandleType,
    HostBuffer, MemoryLocation, MemoryProperties, Stream,
};
use vramp::{Bytes, DeviceAddr};
use vramp_core::AddrRange;
use vramp_host::HostMemory;

/// Objects of one device, each kind in the order of creation. Each is destroyed newest first, and
/// stays here if that fails.
pub(super) struct Scratch<'a> {
    pub driver: &'a dyn Driver,
    reserved: Vec<AddrRange>,
    handles: Vec<Handle>,
    /// Handles mapped so far; those after it are not.
    mapped: Vec<AddrRange>,
    allocated: Vec<DeviceAddr>,
    streams: Vec<Stream>,
    events: Vec<Event>,
    captures: Vec<Stream>,
    graphs: Vec<Graph>,
    execs: Vec<GraphExec>,
    buffers: Vec<HostBuffer>,
    pooled: Vec<(Stream, DeviceAddr)>,
    /// The pool keeps memory, and has to be trimmed.
    keeps_pool: bool,
}

/// Destroys the newest object of a kind.
fn destroy<T: Copy>(
    objects: &mut Vec<T>,
    call: impl FnOnce(T) -> DriverResult<()>,
) -> DriverResult<()> {
    if let Some(&newest) = objects.last() {
        call(newest)?;
        objects.pop();
    }
    Ok(())
}

/// Destroys all objects of a kind; gives up on those that cannot be destroyed.
fn destroy_all<T: Copy>(objects: &mut Vec<T>, call: impl Fn(T) -> DriverResult<()>) {
    while let Some(newest) = objects.pop() {
        // A second try, for a call that was interrupted.
        let _ = call(newest).or_else(|_| call(newest));
    }
}

impl<'a> Scratch<'a> {
    pub fn new(driver: &'a dyn Driver) -> Scratch<'a> {
        Scratch {
            driver,
            reserved: Vec::new(),
            handles: Vec::new(),
            mapped: Vec::new(),
            allocated: Vec::new(),
            streams: Vec::new(),
            events: Vec::new(),
            captures: Vec::new(),
            graphs: Vec::new(),
            execs: Vec::new(),
            buffers: Vec::new(),
            pooled: Vec::new(),
            keeps_pool: false,
        }
    }

    pub fn reserve(&mut self, len: Bytes) -> DriverResult<AddrRange> {
        let start = self.driver.reserve(len, self.driver.info().limits.page)?;
        self.reserved.push(AddrRange::new(start, len));
        Ok(AddrRange::new(start, len))
    }

    pub fn free_addresses(&mut self) -> DriverResult<()> {
        destroy(&mut self.reserved, |range| self.driver.free_addresses(range))
    }

    pub fn create(&mut self, len: Bytes, location: MemoryLocation) -> DriverResult<()> {
        self.handles.push(self.driver.create(len, MemoryProperties::at(location))?);
        Ok(())
    }

    /// Creates a page that can be exported.
    pub fn create_exportable(&mut self) -> DriverResult<Handle> {
        let page = self.driver.info().limits.page;
        let properties =
            MemoryProperties { handle_type: HandleType::PosixFd, ..MemoryProperties::DEVICE };
        self.handles.push(self.driver.create(page, properties)?);
        Ok(self.handles[self.handles.len() - 1])
    }

    /// Imports a page.
    pub fn import(&mut self, exported: &ExportedHandle) -> DriverResult<()> {
        let page = self.driver.info().limits.page;
        self.handles.push(self.driver.import(exported, page)?);
        Ok(())
    }

    pub fn release(&mut self) -> DriverResult<()> {
        destroy(&mut self.handles, |handle| self.driver.release(handle))
    }

    /// Maps the oldest handle that is not mapped.
    pub fn map(&mut self, at: DeviceAddr, len: Bytes) -> DriverResult<()> {
        self.driver.map(at, self.handles[self.mapped.len()])?;
        self.mapped.push(AddrRange::new(at, len));
        Ok(())
    }

    /// Unmaps all that is mapped, which is `range`.
    pub fn unmap(&mut self, range: AddrRange) -> DriverResult<()> {
        self.driver.unmap(range)?;
        self.mapped.clear();
        Ok(())
    }

    pub fn alloc(&mut self, len: Bytes) -> DriverResult<()> {
        self.allocated.push(self.driver.alloc_memory(len)?);
        Ok(())
    }

    /// Returns the newest allocation.
    pub fn last(&self) -> DeviceAddr {
        self.allocated.last().copied().expect("the caller allocated one")
    }

    pub fn free(&mut self) -> DriverResult<()> {
        destroy(&mut self.allocated, |at| self.driver.free_memory(at))
    }

    pub fn stream(&mut self) -> DriverResult<Stream> {
        let stream = self.driver.create_stream()?;
        self.streams.push(stream);
        Ok(stream)
    }

    pub fn destroy_stream(&mut self) -> DriverResult<()> {
        destroy(&mut self.streams, |stream| self.driver.destroy_stream(stream))
    }

    pub fn event(&mut self) -> DriverResult<Event> {
        let event = self.driver.create_event()?;
        self.events.push(event);
        Ok(event)
    }

    pub fn destroy_event(&mut self) -> DriverResult<()> {
        destroy(&mut self.events, |event| self.driver.destroy_event(event))
    }

    pub fn begin_capture(&mut self, stream: Stream, mode: CaptureMode) -> DriverResult<()> {
        self.driver.begin_capture(stream, mode)?;
        self.captures.push(stream);
        Ok(())
    }

    pub fn end_capture(&mut self, stream: Stream) -> DriverResult<Graph> {
        let graph = self.driver.end_capture(stream)?;
        self.captures.pop();
        self.graphs.push(graph);
        Ok(graph)
    }

    pub fn instantiate(&mut self, graph: Graph) -> DriverResult<GraphExec> {
        let exec = self.driver.instantiate(graph)?;
        self.execs.push(exec);
        Ok(exec)
    }

    pub fn destroy_exec(&mut self) -> DriverResult<()> {
        destroy(&mut self.execs, |exec| self.driver.destroy_graph_exec(exec))
    }

    pub fn destroy_graph(&mut self) -> DriverResult<()> {
        destroy(&mut self.graphs, |graph| self.driver.destroy_graph(graph))
    }

    pub fn pin(&mut self, len: Bytes) -> DriverResult<HostBuffer> {
        let buffer = self.driver.alloc_host(len)?;
        self.buffers.push(buffer);
        Ok(buffer)
    }

    pub fn register(&mut self, memory: &Arc<HostMemory>) -> DriverResult<()> {
        self.buffers.push(self.driver.register_host(memory)?);
        Ok(())
    }

    pub fn unpin(&mut self) -> DriverResult<()> {
        destroy(&mut self.buffers, |buffer| self.driver.free_host(buffer))
    }

    /// Sets how much the device's own pool keeps, until this is dropped.
    pub fn keep_pool(&mut self, keep: Bytes) -> DriverResult<()> {
        self.keeps_pool = true;
        self.driver.set_pool_threshold(keep)
    }

    pub fn malloc_async(&mut self, stream: Stream, len: Bytes) -> DriverResult<()> {
        self.pooled.push((stream, self.driver.malloc_async(stream, len)?));
        Ok(())
    }

    pub fn free_async(&mut self) -> DriverResult<()> {
        destroy(&mut self.pooled, |(stream, at)| self.driver.free_async(stream, at))
    }
}

impl Drop for Scratch<'_> {
    fn drop(&mut self) {
        let driver = self.driver;
        destroy_all(&mut self.captures, |stream| {
            driver.end_capture(stream).and_then(|graph| driver.destroy_graph(graph))
        });
        destroy_all(&mut self.pooled, |(stream, at)| driver.free_async(stream, at));
        // Work in flight may use what follows.
        for &stream in &self.streams {
            let _ = driver.synchronize_stream(stream);
        }
        if self.keeps_pool {
            let _ = driver.set_pool_threshold(Bytes::ZERO);
            let _ = driver.trim_pool(Bytes::ZERO).or_else(|_| driver.trim_pool(Bytes::ZERO));
        }
        destroy_all(&mut self.execs, |exec| driver.destroy_graph_exec(exec));
        destroy_all(&mut self.graphs, |graph| driver.destroy_graph(graph));
        destroy_all(&mut self.mapped, |range| driver.unmap(range));
        destroy_all(&mut self.handles, |handle| driver.release(handle));
        destroy_all(&mut self.reserved, |range| driver.free_addresses(range));
        destroy_all(&mut self.allocated, |at| driver.free_memory(at));
        destroy_all(&mut self.buffers, |buffer| driver.free_host(buffer));
        destroy_all(&mut self.events, |event| driver.destroy_event(event));
        destroy_all(&mut self.streams, |stream| driver.destroy_stream(stream));
    }
}
