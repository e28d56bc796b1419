//! PyTorch's caching allocator on a device: asks the core, performs what it says.

use std::collections::BTreeMap;
use std::sync::Arc;

use vramp_core::{
    AddrRange, BlockId, Bytes, DeviceAddr, Request, SegmentId, Spot, StreamId, TorchAttempt,
    TorchBlock, TorchOp, TorchPool, TorchStep,
};
use vramp_driver::{Driver, Handle, Place, Result, Stream};

use crate::allocation::{Allocation, Owner};
use crate::config::Progress;
use crate::events::Events;
use crate::virtual_pool::Refusal;

/// A caching pool and the device it lives on.
pub(crate) struct CachingPool {
    pub pool: TorchPool,
    pub streams: Vec<Stream>,
    driver: Arc<dyn Driver>,
    events: Events,
    progress: Progress,
    /// By the pool's number of each.
    segments: Vec<Option<Memory>>,
    /// Handles whose release failed: nobody uses them any more, `close` tries again.
    stuck: Vec<Handle>,
}

/// What a segment is on the device.
enum Memory {
    Allocated(DeviceAddr),
    /// A range of addresses with handles mapped into it: by their offsets, with their lengths.
    Range {
        range: AddrRange,
        handles: BTreeMap<Bytes, (Handle, Bytes)>,
    },
}

impl Memory {
    fn start(&self) -> DeviceAddr {
        match self {
            Memory::Allocated(start) => *start,
            Memory::Range { range, .. } => range.start,
        }
    }
}

impl CachingPool {
    pub(crate) fn new(
        driver: Arc<dyn Driver>,
        pool: TorchPool,
        progress: Progress,
    ) -> CachingPool {
        CachingPool {
            pool,
            streams: Vec::new(),
            driver,
            events: Events::default(),
            progress,
            segments: Vec::new(),
            stuck: Vec::new(),
        }
    }

    pub(crate) fn add_stream(&mut self, stream: Stream) -> StreamId {
        self.streams.push(stream);
        self.pool.add_stream()
    }

    /// A block of at least `size` bytes. No driver call on a hit but to ask about open events.
    pub(crate) fn malloc(&mut self, size: Bytes, stream: StreamId) -> Result<Allocation, Refusal> {
        let mut attempt = TorchAttempt::new(Request { size, stream });
        let mut full = None;
        loop {
            match self.pool.place(&mut attempt) {
                TorchStep::Placed(block) => return Ok(self.allocation(block)),
                TorchStep::Poll => self.poll().map_err(Refusal::Driver)?,
                TorchStep::Wait => self.wait().map_err(Refusal::Driver)?,
                TorchStep::Perform(plan) => match self.perform(plan.op()) {
                    Ok(()) => self.pool.settle(plan),
                    Err(error) if error.is_out_of_memory() => {
                        attempt.full(&self.pool);
                        full = Some(error);
                    }
                    Err(error) => return Err(Refusal::Driver(error)),
                },
                TorchStep::Short(shortage) => return Err(Refusal::Short(shortage, full)),
            }
        }
    }

    fn allocation(&self, block: TorchBlock) -> Allocation {
        let owner = Owner::Caching { id: block.id, at: block.at };
        Allocation { addr: self.addr(&block), len: block.len, owner }
    }

    pub(crate) fn holds(&self, id: BlockId, at: Spot, addr: DeviceAddr) -> bool {
        let found = self.pool.block(id);
        found.is_ok_and(|block| block.at == at && self.addr(&block) == addr)
    }

    /// Takes a block back. No driver call, but an event for each other stream that used it. The
    /// block is the pool's even if recording fails: a later event covers it.
    pub(crate) fn free(&mut self, id: BlockId, stream: StreamId) -> Result<()> {
        let marks = self.pool.free(id, stream).expect("the allocator looked the block up");
        if marks.is_empty() { Ok(()) } else { self.record_events() }
    }

    /// Gives unused segments back until the pool holds no more than `to`. Waits for freed blocks
    /// that other streams use, as PyTorch's `empty_cache` does, and for all work on the device.
    pub(crate) fn trim(&mut self, to: Bytes) -> Result<()> {
        self.wait()?;
        let mut release = self.pool.release(to);
        while let Some(plan) = self.pool.next_release(&mut release) {
            self.perform(plan.op())?;
            self.pool.settle(plan);
        }
        Ok(())
    }

    /// Takes at least `len` bytes ahead of demand.
    pub(crate) fn prefill(&mut self, len: Bytes, stream: StreamId) -> Result<(), Refusal> {
        let Owner::Caching { id, .. } = self.malloc(len, stream)?.owner else {
            unreachable!("the block was made here")
        };
        self.free(id, stream).map_err(Refusal::Driver)
    }

    // --- events ---

    fn record_events(&mut self) -> Result<()> {
        for mark in self.pool.unrecorded() {
            let stream = self.streams[mark.stream.index()];
            self.events.record(&*self.driver, mark, stream)?;
            self.pool.recorded(mark);
        }
        Ok(())
    }

    fn poll(&mut self) -> Result<()> {
        self.events.poll(&*self.driver, &mut self.pool, &self.progress)
    }

    fn wait(&mut self) -> Result<()> {
        self.record_events()?;
        for mark in self.pool.waited_for() {
            self.events.wait_for(&*self.driver, &mut self.pool, mark)?;
        }
        Ok(())
    }

    // --- the device ---

    fn addr(&self, block: &TorchBlock) -> DeviceAddr {
        self.memory(block.segment).start() + block.offset
    }

    fn memory(&self, segment: SegmentId) -> &Memory {
        self.segments[segment.index()].as_ref().unwrap_or_else(|| panic!("{segment} is not there"))
    }

    /// Does one thing, all of it or nothing.
    fn perform(&mut self, op: TorchOp) -> Result<()> {
        match op {
            TorchOp::Allocate { segment, len } => {
                let start = self.driver.alloc_memory(len)?;
                self.add(segment, Memory::Allocated(start));
            }
            TorchOp::Free { segment, .. } => {
                self.driver.free_memory(self.memory(segment).start())?;
                self.segments[segment.index()] = None;
            }
            TorchOp::Reserve { segment, len } => {
                let start = self.driver.reserve(len, self.driver.info().limits.page)?;
                let range = AddrRange::new(start, len);
                self.add(segment, Memory::Range { range, handles: BTreeMap::new() });
            }
            TorchOp::FreeAddresses { segment, len } => {
                let range = AddrRange::new(self.memory(segment).start(), len);
                self.driver.free_addresses(range)?;
                self.segments[segment.index()] = None;
            }
            TorchOp::Map { segment, offset, len, handle } => {
                let done = self.map(segment, offset, len, handle);
                if done.is_err() {
                    self.take_back(segment, offset, len, handle);
                }
                done?;
            }
            TorchOp::Unmap { segment, stream, offset, len, .. } => {
                // Work of the stream itself may still touch what it freed.
                self.driver.synchronize_stream(self.streams[stream.index()])?;
                let range = AddrRange::new(self.memory(segment).start() + offset, len);
                self.driver.unmap(range)?;
                self.release(segment, offset, len);
            }
        }
        Ok(())
    }

    fn add(&mut self, segment: SegmentId, memory: Memory) {
        if self.segments.len() <= segment.index() {
            self.segments.resize_with(segment.index() + 1, || None);
        }
        self.segments[segment.index()] = Some(memory);
    }

    fn range(&mut self, segment: SegmentId) -> (DeviceAddr, &mut BTreeMap<Bytes, (Handle, Bytes)>) {
        match &mut self.segments[segment.index()] {
            Some(Memory::Range { range, handles }) => (range.start, handles),
            _ => panic!("{segment} is no range"),
        }
    }

    fn map(&mut self, segment: SegmentId, offset: Bytes, len: Bytes, handle: Bytes) -> Result<()> {
        let driver = Arc::clone(&self.driver);
        let (start, handles) = self.range(segment);
        let mut at = offset;
        while at < offset + len {
            // One that could not be unmapped after a failure serves again.
            if !handles.contains_key(&at) {
                let new = driver.create(handle, Place::Device)?;
                if let Err(error) = driver.map(start + at, new) {
                    let released = driver.release(new);
                    self.stuck.extend(released.is_err().then_some(new));
                    return Err(error);
                }
                handles.insert(at, (new, handle));
            }
            at += handle;
        }
        driver.set_access(AddrRange::new(start + offset, len))
    }

    /// Undoes a part of a map.
    fn take_back(&mut self, segment: SegmentId, offset: Bytes, len: Bytes, handle: Bytes) {
        let driver = Arc::clone(&self.driver);
        let (start, handles) = self.range(segment);
        let mapped: Vec<Bytes> = handles.range(offset..offset + len).map(|(&at, _)| at).collect();
        for at in mapped {
            if driver.unmap(AddrRange::new(start + at, handle)).is_ok() {
                self.release(segment, at, handle);
            }
        }
    }

    /// Releases the handles that were mapped in a part of a range.
    fn release(&mut self, segment: SegmentId, offset: Bytes, len: Bytes) {
        let driver = Arc::clone(&self.driver);
        let (_, handles) = self.range(segment);
        let mut released = handles.split_off(&offset);
        handles.append(&mut released.split_off(&(offset + len)));
        let released = released.into_values().map(|(handle, _)| handle);
        self.stuck.extend(released.filter(|&handle| driver.release(handle).is_err()));
    }

    /// Gives everything back, streams included. Goes on after a failure and returns the first one.
    pub(crate) fn close(&mut self) -> Result<()> {
        let driver = Arc::clone(&self.driver);
        let mut first: Result<()> = Ok(());
        let mut note = |result: Result<()>| {
            if first.is_ok() {
                first = result;
            }
        };
        for &stream in &self.streams {
            note(driver.synchronize_stream(stream));
        }
        for memory in self.segments.drain(..).flatten() {
            match memory {
                Memory::Allocated(start) => note(driver.free_memory(start)),
                Memory::Range { range, handles } => {
                    for (offset, (handle, len)) in handles {
                        note(driver.unmap(AddrRange::new(range.start + offset, len)));
                        note(driver.release(handle));
                    }
                    note(driver.free_addresses(range));
                }
            }
        }
        for handle in self.stuck.drain(..) {
            note(driver.release(handle));
        }
        note(self.events.close(&*driver));
        for stream in self.streams.drain(..) {
            note(driver.destroy_stream(stream));
        }
        first
    }
}
