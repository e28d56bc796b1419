//! The rig of a case: a device that records what is allocated, to free it at the end. Why a case failed.

use std::cell::RefCell;
use std::sync::Arc;

use vramp_core::{AddrRange, Bytes, DeviceAddr};
use vramp_driver::{
    CaptureMode, Driver, DriverError, DriverResult, ErrorKind, Event, ExportedHandle, Graph,
    GraphExec, Handle, HostBuffer, HostMemory, HostSlice, MemoryLocation, MemoryProperties, Stream,
};

pub(super) struct Rig<'a> {
    pub device: &'a dyn Driver,
    pub page: Bytes,
    taken: RefCell<Taken>,
}

/// Objects that are not freed yet.
#[derive(Default)]
struct Taken {
    reservations: Vec<AddrRange>,
    mappings: Vec<AddrRange>,
    handles: Vec<Handle>,
    streams: Vec<Stream>,
    events: Vec<Event>,
    buffers: Vec<HostBuffer>,
    allocations: Vec<(Stream, DeviceAddr)>,
    plain: Vec<DeviceAddr>,
    captures: Vec<Stream>,
    graphs: Vec<Graph>,
    execs: Vec<GraphExec>,
}

impl<'a> Rig<'a> {
    pub fn new(device: &'a dyn Driver) -> Rig<'a> {
        Rig { device, page: device.info().limits.page, taken: RefCell::default() }
    }

    pub fn pages(&self, count: u64) -> Bytes {
        self.page * count
    }

    /// Returns `len` rounded up to whole pages.
    pub fn whole_pages(&self, len: Bytes) -> Bytes {
        len.checked_round_up(self.page).unwrap_or(self.page)
    }

    // --- memory ---

    pub fn reserve(&self, len: Bytes) -> DriverResult<AddrRange> {
        self.reserve_aligned(len, self.page)
    }

    pub fn reserve_aligned(&self, len: Bytes, alignment: Bytes) -> DriverResult<AddrRange> {
        let range = AddrRange::new(self.device.reserve(len, alignment)?, len);
        self.taken.borrow_mut().reservations.push(range);
        Ok(range)
    }

    pub fn reserve_at(&self, range: AddrRange) -> DriverResult<bool> {
        let reserved = self.device.reserve_at(range)?;
        if reserved {
            self.taken.borrow_mut().reservations.push(range);
        }
        Ok(reserved)
    }

    pub fn free_addresses(&self, range: AddrRange) -> DriverResult<()> {
        self.device.free_addresses(range)?;
        self.taken.borrow_mut().reservations.retain(|taken| *taken != range);
        Ok(())
    }

    pub fn create(&self, len: Bytes) -> DriverResult<Handle> {
        self.create_at(len, MemoryLocation::Device)
    }

    pub fn create_at(&self, len: Bytes, place: MemoryLocation) -> DriverResult<Handle> {
        self.create_with(len, MemoryProperties::at(place))
    }

    pub fn create_with(&self, len: Bytes, properties: MemoryProperties) -> DriverResult<Handle> {
        let handle = self.device.create(len, properties)?;
        self.taken.borrow_mut().handles.push(handle);
        Ok(handle)
    }

    pub fn import(&self, exported: &ExportedHandle, len: Bytes) -> DriverResult<Handle> {
        let handle = self.device.import(exported, len)?;
        self.taken.borrow_mut().handles.push(handle);
        Ok(handle)
    }

    pub fn release(&self, handle: Handle) -> DriverResult<()> {
        self.device.release(handle)?;
        self.taken.borrow_mut().handles.retain(|taken| *taken != handle);
        Ok(())
    }

    /// Maps `handle`, which must be as long as `range`.
    pub fn map(&self, range: AddrRange, handle: Handle) -> DriverResult<()> {
        self.device.map(range.start, handle)?;
        self.taken.borrow_mut().mappings.push(range);
        Ok(())
    }

    pub fn unmap(&self, range: AddrRange) -> DriverResult<()> {
        self.device.unmap(range)?;
        let inside = |taken: &AddrRange| {
            taken.start >= range.start && taken.checked_end() <= range.checked_end()
        };
        self.taken.borrow_mut().mappings.retain(|taken| !inside(taken));
        Ok(())
    }

    /// Builds accessible memory with one handle for each length.
    pub fn memory(&self, handles: &[Bytes]) -> DriverResult<AddrRange> {
        let range = self.reserve(handles.iter().copied().sum())?;
        let mut at = range.start;
        for len in handles {
            self.map(AddrRange::new(at, *len), self.create(*len)?)?;
            at = at + *len;
        }
        self.device.set_access(range, &[])?;
        Ok(range)
    }

    /// Adds an accessible mapping of `handle`.
    pub fn mapped_again(&self, handle: Handle, len: Bytes) -> DriverResult<AddrRange> {
        let range = self.reserve(len)?;
        self.map(range, handle)?;
        self.device.set_access(range, &[])?;
        Ok(range)
    }

    // --- streams, events, host memory, pool ---

    pub fn stream(&self) -> DriverResult<Stream> {
        let stream = self.device.create_stream()?;
        self.taken.borrow_mut().streams.push(stream);
        Ok(stream)
    }

    pub fn thread_stream(&self) -> DriverResult<Stream> {
        let stream = self.device.thread_stream()?;
        self.taken.borrow_mut().streams.push(stream);
        Ok(stream)
    }

    pub fn destroy_stream(&self, stream: Stream) -> DriverResult<()> {
        self.device.destroy_stream(stream)?;
        self.taken.borrow_mut().streams.retain(|taken| *taken != stream);
        Ok(())
    }

    pub fn event(&self) -> DriverResult<Event> {
        let event = self.device.create_event()?;
        self.taken.borrow_mut().events.push(event);
        Ok(event)
    }

    pub fn destroy_event(&self, event: Event) -> DriverResult<()> {
        self.device.destroy_event(event)?;
        self.taken.borrow_mut().events.retain(|taken| *taken != event);
        Ok(())
    }

    pub fn host(&self, len: Bytes) -> DriverResult<HostBuffer> {
        let buffer = self.device.alloc_host(len)?;
        self.taken.borrow_mut().buffers.push(buffer);
        Ok(buffer)
    }

    pub fn register(&self, memory: &Arc<HostMemory>) -> DriverResult<HostBuffer> {
        let buffer = self.device.register_host(memory)?;
        self.taken.borrow_mut().buffers.push(buffer);
        Ok(buffer)
    }

    pub fn free_host(&self, buffer: HostBuffer) -> DriverResult<()> {
        self.device.free_host(buffer)?;
        self.taken.borrow_mut().buffers.retain(|taken| *taken != buffer);
        Ok(())
    }

    pub fn alloc(&self, len: Bytes) -> DriverResult<AddrRange> {
        let at = self.device.alloc_memory(len)?;
        self.taken.borrow_mut().plain.push(at);
        Ok(AddrRange::new(at, len))
    }

    pub fn free_alloc(&self, at: DeviceAddr) -> DriverResult<()> {
        self.device.free_memory(at)?;
        self.taken.borrow_mut().plain.retain(|taken| *taken != at);
        Ok(())
    }

    pub fn malloc_async(&self, stream: Stream, len: Bytes) -> DriverResult<AddrRange> {
        let at = self.device.malloc_async(stream, len)?;
        self.taken.borrow_mut().allocations.push((stream, at));
        Ok(AddrRange::new(at, len))
    }

    pub fn free_async(&self, stream: Stream, at: DeviceAddr) -> DriverResult<()> {
        self.device.free_async(stream, at)?;
        self.taken.borrow_mut().allocations.retain(|(_, taken)| *taken != at);
        Ok(())
    }

    // --- captures ---

    pub fn begin_capture(&self, stream: Stream, mode: CaptureMode) -> DriverResult<()> {
        self.device.begin_capture(stream, mode)?;
        self.taken.borrow_mut().captures.push(stream);
        Ok(())
    }

    pub fn end_capture(&self, stream: Stream) -> DriverResult<Graph> {
        let graph = self.device.end_capture(stream)?;
        let mut taken = self.taken.borrow_mut();
        taken.captures.retain(|taken| *taken != stream);
        taken.graphs.push(graph);
        Ok(graph)
    }

    pub fn instantiate(&self, graph: Graph) -> DriverResult<GraphExec> {
        let exec = self.device.instantiate(graph)?;
        self.taken.borrow_mut().execs.push(exec);
        Ok(exec)
    }

    pub fn destroy_graph(&self, graph: Graph) -> DriverResult<()> {
        self.device.destroy_graph(graph)?;
        self.taken.borrow_mut().graphs.retain(|taken| *taken != graph);
        Ok(())
    }

    pub fn destroy_graph_exec(&self, exec: GraphExec) -> DriverResult<()> {
        self.device.destroy_graph_exec(exec)?;
        self.taken.borrow_mut().execs.retain(|taken| *taken != exec);
        Ok(())
    }

    // --- contents ---

    /// Reads the bytes of `range` in order of `stream`, through pinned host memory.
    pub fn read(&self, stream: Stream, range: AddrRange) -> DriverResult<Vec<u8>> {
        let buffer = self.host(range.len)?;
        let to = HostSlice { buffer, offset: Bytes::ZERO, len: range.len };
        self.device.copy_to_host(stream, range.start, to)?;
        self.device.synchronize_stream(stream)?;
        let mut bytes = vec![0; range.len.count() as usize];
        self.device.read_host(buffer, Bytes::ZERO, &mut bytes)?;
        self.free_host(buffer)?;
        Ok(bytes)
    }

    /// Writes `bytes` to the device in order of `stream` and synchronises.
    pub fn write(&self, stream: Stream, to: DeviceAddr, bytes: &[u8]) -> DriverResult<()> {
        let len = Bytes::new(bytes.len() as u64);
        let buffer = self.host(len)?;
        self.device.write_host(buffer, Bytes::ZERO, bytes)?;
        let from = HostSlice { buffer, offset: Bytes::ZERO, len };
        self.device.copy_to_device(stream, from, to)?;
        self.device.synchronize_stream(stream)?;
        self.free_host(buffer)
    }

    /// Fails unless every byte of `range` is `byte`, read in order of `stream`.
    pub fn expect_filled(&self, stream: Stream, range: AddrRange, byte: u8) -> Checked {
        self.expect_bytes(stream, range, &vec![byte; range.len.count() as usize])
    }

    /// Fails unless `range` contains `expected`, read in order of `stream`.
    pub fn expect_bytes(&self, stream: Stream, range: AddrRange, expected: &[u8]) -> Checked {
        let bytes = self.read(stream, range)?;
        if bytes == expected {
            return Ok(());
        }
        match bytes.iter().zip(expected).position(|(seen, wanted)| seen != wanted) {
            None => Ok(()),
            Some(at) => Err(Failure(format!(
                "byte {at} of {range} is {:#04x} instead of {:#04x}",
                bytes[at], expected[at]
            ))),
        }
    }

    // --- clean-up ---

    /// Waits for all work. Errors of a lost device are not failures of the case.
    pub fn synchronize(&self) -> Checked {
        for stream in &self.taken.borrow().streams {
            let waited = self.device.synchronize_stream(*stream);
            waited.or_else(|error| if error.is_device_lost() { Ok(()) } else { Err(error) })?;
        }
        Ok(())
    }

    /// Frees everything, in an order that the rules allow. Continues after a failure and reports the
    /// first. Errors of a lost device are not failures of the case.
    pub fn clean_up(self) -> Checked {
        let mut taken = self.taken.into_inner();
        let device = self.device;
        for stream in taken.captures {
            // Most of these captures were invalidated and have ended.
            if let Ok(graph) = device.end_capture(stream) {
                taken.graphs.push(graph);
            }
        }
        let mut results: Vec<Result<(), DriverError>> = Vec::new();
        for (stream, at) in taken.allocations {
            results.push(device.free_async(stream, at));
        }
        results.extend(taken.streams.iter().map(|stream| device.synchronize_stream(*stream)));
        results.extend(taken.execs.iter().map(|exec| device.destroy_graph_exec(*exec)));
        results.extend(taken.graphs.iter().map(|graph| device.destroy_graph(*graph)));
        results.extend(taken.plain.iter().map(|at| device.free_memory(*at)));
        results.extend(taken.mappings.iter().map(|range| device.unmap(*range)));
        results.extend(taken.handles.iter().map(|handle| device.release(*handle)));
        results.extend(taken.reservations.iter().map(|range| device.free_addresses(*range)));
        results.extend(taken.buffers.iter().map(|buffer| device.free_host(*buffer)));
        results.extend(taken.events.iter().map(|event| device.destroy_event(*event)));
        results.extend(taken.streams.iter().map(|stream| device.destroy_stream(*stream)));
        let mut failures = results.into_iter().filter_map(Result::err);
        match failures.find(|error| !error.is_device_lost()) {
            None => Ok(()),
            Some(error) => Err(Failure(format!("clean-up: {error}"))),
        }
    }
}

/// Fails unless `result` is an error of this kind.
pub(super) fn refused<T>(what: &str, kind: ErrorKind, result: DriverResult<T>) -> Checked {
    match result {
        Err(error) if error.kind == kind => Ok(()),
        Err(error) => Err(Failure(format!("{what}: expected {kind:?}, got: {error}"))),
        Ok(_) => Err(Failure(format!("{what}: expected {kind:?}, but it succeeded"))),
    }
}

/// Returns bytes that differ from their neighbours and from other patterns at the same offset.
pub(super) fn pattern(seed: u8, len: Bytes) -> Vec<u8> {
    let byte = |i: u64| (i ^ (i >> 8) ^ (i >> 16)) as u8;
    (0..len.count()).map(|i| byte(i).wrapping_mul(31).wrapping_add(seed)).collect()
}

/// Description of a broken rule.
#[derive(Debug)]
pub(super) struct Failure(pub String);

pub(super) type Checked<T = ()> = Result<T, Failure>;

impl From<vramp_driver::DriverError> for Failure {
    fn from(error: vramp_driver::DriverError) -> Failure {
        Failure(error.to_string())
    }
}
