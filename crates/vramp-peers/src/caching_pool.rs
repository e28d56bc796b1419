//! PyTorch's caching allocator on a device: gets decisions from the model and performs them.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use vramp_alloc::backend::{
    Access, Backend, BackendBlock, BackendStretch, Completions, Events, Refused, StreamTable,
    captures,
};
use vramp_alloc::config::{MakeBackend, Progress, Serving};
use vramp_alloc::error::{CreateError, Largest, QuarantinedMemory};
use vramp_alloc::stats::MemoryStats;
use vramp_alloc::{Config, StreamEnd};
use vramp_core::{
    AddrRange, BlockId, Bytes, Counters, DeviceAddr, Inconsistency, Mark, Request, StreamId,
};
use vramp_driver::{Driver, DriverError, DriverResult, Handle, Stream};

use crate::core::{
    SegmentId, TorchAttempt, TorchBlock, TorchConfig, TorchOp, TorchPool, TorchSegment, TorchStep,
};

/// What a caching pool is made of.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    /// Name in errors.
    pub name: &'static str,
    pub torch: TorchConfig,
    /// True if each segment is one handle, which can be exported and accessed by peers; else segments
    /// that are not expandable are plain allocations.
    pub one_handle: bool,
}

impl Settings {
    /// Returns what makes PyTorch's allocator with these settings.
    pub(crate) fn backend(self) -> MakeBackend {
        MakeBackend::new(move |driver, config| {
            Ok(Serving::All(Box::new(CachingPool::open(driver, self.clone(), config)?)))
        })
    }
}

impl Completions for TorchPool {
    fn pending(&self) -> Vec<Mark> {
        self.pending()
    }

    fn reached(&mut self, mark: Mark) {
        self.reached(mark);
    }
}

/// A caching pool and its device.
pub(crate) struct CachingPool {
    pub pool: TorchPool,
    /// The driver's streams that have not ended.
    streams: StreamTable<Stream>,
    driver: Arc<dyn Driver>,
    /// What memory is created and mapped as.
    access: Access,
    settings: Settings,
    events: Events,
    progress: Progress,
    /// Memory of each segment, by id.
    segments: Vec<Option<Memory>>,
    /// Handles whose release failed: unused, and released again by `trim` and `close`.
    stuck: Vec<(Handle, Bytes)>,
    /// Segments that a failed call left behind: unused, and returned by `trim` and `close`.
    spoiled: Vec<Memory>,
    /// The last call that left something behind.
    left_by: Option<DriverError>,
    /// Memory on the card: the pool's, and handles left by a failed call.
    held: Bytes,
    held_peak: Bytes,
}

/// Handles mapped into a range, with their lengths, by offset.
type Handles = BTreeMap<Bytes, (Handle, Bytes)>;

/// A segment on the device.
enum Memory {
    Allocated(DeviceAddr),
    /// A range of addresses with handles mapped into it.
    Range {
        range: AddrRange,
        handles: Handles,
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
    /// Creates PyTorch's allocator on a device. No driver call but those of [`Access::resolve`].
    fn open(
        driver: &Arc<dyn Driver>,
        settings: Settings,
        config: &Config,
    ) -> Result<CachingPool, CreateError> {
        let (info, torch) = (driver.info(), settings.torch.clone());
        if torch.expandable_segments && !info.capabilities.virtual_memory {
            return Err(CreateError::NotSupported {
                preset: settings.name,
                needed: "virtual memory management",
                instead: "torch",
            });
        }
        let (page, granularity) = (Bytes::mib(2), info.limits.page);
        if torch.expandable_segments && !page.is_multiple_of(granularity) {
            return Err(CreateError::Granularity { page, granularity });
        }
        let pool = TorchPool::new(torch, info.limits.memory, config.limit);
        Ok(CachingPool {
            pool,
            streams: StreamTable::default(),
            driver: Arc::clone(driver),
            access: Access::resolve(&**driver, &config.sharing)?,
            settings,
            events: Events::default(),
            progress: config.progress.clone(),
            segments: Vec::new(),
            stuck: Vec::new(),
            spoiled: Vec::new(),
            left_by: None,
            held: Bytes::ZERO,
            held_peak: Bytes::ZERO,
        })
    }

    fn found(&self, block: TorchBlock, hit: bool) -> BackendBlock {
        let (addr, id, at) = (self.addr(&block), block.id.number(), Some(block.at));
        BackendBlock { addr, len: block.len, id, at, hit }
    }

    /// Restores recorded segments: see [`TorchPool::restore`]. Empty if they are impossible.
    pub(crate) fn restore(
        &mut self,
        segments: &[TorchSegment],
    ) -> DriverResult<Vec<(StreamId, Bytes, Option<BackendBlock>)>> {
        let Some(plans) = self.pool.restore(segments) else { return Ok(Vec::new()) };
        for plan in plans {
            self.perform(plan.op())?;
            self.pool.settle(plan);
        }
        let blocks = self.pool.hold_restored(segments);
        let held = segments.iter().flat_map(|segment| {
            segment.held.iter().map(|&(_, requested)| (segment.stream, requested))
        });
        let found = |block: Option<TorchBlock>| block.map(|block| self.found(block, false));
        let restored = held.zip(blocks);
        Ok(restored.map(|((stream, requested), it)| (stream, requested, found(it))).collect())
    }

    // --- events ---

    /// Records an event for each mark that has none, except on streams that capture.
    fn record_events(&mut self) -> DriverResult<()> {
        for mark in self.pool.unrecorded() {
            let stream = self.streams.get(mark.stream).copied();
            let stream = stream.expect("an ended stream has no work without an event");
            if self.events.record(&*self.driver, mark, stream)? {
                self.pool.recorded(mark);
            }
        }
        Ok(())
    }

    fn poll(&mut self) -> DriverResult<()> {
        self.events.poll(&*self.driver, &mut self.pool, &self.progress)
    }

    fn wait(&mut self) -> DriverResult<()> {
        self.record_events()?;
        // Work before the capture of a stream has no event to wait for.
        if let Some(mark) = self.pool.unrecorded().first() {
            return Err(captures(mark.stream));
        }
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
        self.segments[segment.index()].as_ref().unwrap_or_else(|| panic!("{segment} has no memory"))
    }

    /// Performs one operation, all of it or nothing.
    fn perform(&mut self, op: TorchOp) -> DriverResult<()> {
        match op {
            TorchOp::Allocate { segment, len } if self.settings.one_handle => {
                let start = self.driver.reserve(len, self.driver.info().limits.page)?;
                let range = AddrRange::new(start, len);
                self.add(segment, Memory::Range { range, handles: Handles::new() });
                if let Err(error) = self.map(segment, Bytes::ZERO, len, len) {
                    let undone = self.unmap_each(segment, Bytes::ZERO, len);
                    let undone = undone.and_then(|()| self.driver.free_addresses(range));
                    let memory = self.segments[segment.index()].take();
                    if let Err(undone) = undone {
                        self.left_by = Some(undone);
                        self.spoiled.extend(memory);
                    }
                    return Err(error);
                }
            }
            TorchOp::Free { segment, len } if self.settings.one_handle => {
                // As `cudaFree` does: work may still access the segment.
                self.synchronize_streams()?;
                self.unmap_each(segment, Bytes::ZERO, len)?;
                self.driver.free_addresses(AddrRange::new(self.memory(segment).start(), len))?;
                self.segments[segment.index()] = None;
            }
            TorchOp::Allocate { segment, len } => {
                let start = self.driver.alloc_memory(len)?;
                self.took(len);
                self.add(segment, Memory::Allocated(start));
            }
            TorchOp::Free { segment, len } => {
                self.driver.free_memory(self.memory(segment).start())?;
                self.held -= len;
                self.segments[segment.index()] = None;
            }
            TorchOp::Reserve { segment, len } => {
                let start = self.driver.reserve(len, self.driver.info().limits.page)?;
                let range = AddrRange::new(start, len);
                self.add(segment, Memory::Range { range, handles: Handles::new() });
            }
            TorchOp::FreeAddresses { segment, len } => {
                // Nothing is mapped except what could not be unmapped after a failure.
                self.unmap_each(segment, Bytes::ZERO, len)?;
                let range = AddrRange::new(self.memory(segment).start(), len);
                self.driver.free_addresses(range)?;
                self.segments[segment.index()] = None;
            }
            TorchOp::Map { segment, offset, len, handle } => {
                let done = self.map(segment, offset, len, handle);
                if done.is_err() {
                    // What cannot be unmapped stays, is counted, and serves the next map.
                    let _ = self.unmap_each(segment, offset, len);
                }
                done?;
            }
            TorchOp::Unmap { segment, stream, offset, len, .. } => {
                // Work of the stream itself may still touch what it freed.
                match self.streams.get(stream) {
                    Some(&stream) => self.driver.synchronize_stream(stream)?,
                    None => {
                        let last = self.pool.now(stream);
                        self.events.wait_for(&*self.driver, &mut self.pool, last)?;
                    }
                }
                let range = AddrRange::new(self.memory(segment).start() + offset, len);
                self.driver.unmap(range)?;
                for (handle, len) in self.take_handles(segment, offset, len) {
                    self.release(handle, len);
                }
            }
        }
        Ok(())
    }

    /// Waits on the host for the work of all streams, destroyed ones included.
    fn synchronize_streams(&self) -> DriverResult<()> {
        self.streams.iter().try_for_each(|(_, &stream)| self.driver.synchronize_stream(stream))?;
        self.events.wait_for_ends()
    }

    fn add(&mut self, segment: SegmentId, memory: Memory) {
        if self.segments.len() <= segment.index() {
            self.segments.resize_with(segment.index() + 1, || None);
        }
        self.segments[segment.index()] = Some(memory);
    }

    fn range(&mut self, segment: SegmentId) -> (DeviceAddr, &mut Handles) {
        match &mut self.segments[segment.index()] {
            Some(Memory::Range { range, handles }) => (range.start, handles),
            _ => panic!("{segment} is no range"),
        }
    }

    fn map(
        &mut self,
        segment: SegmentId,
        offset: Bytes,
        len: Bytes,
        handle: Bytes,
    ) -> DriverResult<()> {
        let mut at = offset;
        while at < offset + len {
            let (start, handles) = self.range(segment);
            if !handles.contains_key(&at) {
                let new = self.driver.create(handle, self.access.properties)?;
                self.took(handle);
                if let Err(error) = self.driver.map(start + at, new) {
                    self.release(new, handle);
                    return Err(error);
                }
                self.range(segment).1.insert(at, (new, handle));
            }
            at += handle;
        }
        let start = self.range(segment).0;
        self.driver.set_access(AddrRange::new(start + offset, len), &self.access.peers)
    }

    /// Unmaps and releases the handles in a part of a range, one after the other. Goes on after a
    /// failure and returns the first one.
    fn unmap_each(&mut self, segment: SegmentId, offset: Bytes, len: Bytes) -> DriverResult<()> {
        let mut first = Ok(());
        let start = self.range(segment).0;
        for (at, (handle, len)) in self.take_handles_by_offset(segment, offset, len) {
            match self.driver.unmap(AddrRange::new(start + at, len)) {
                Ok(()) => self.release(handle, len),
                Err(error) => {
                    self.range(segment).1.insert(at, (handle, len));
                    first = first.and(Err(error));
                }
            }
        }
        first
    }

    fn take_handles(
        &mut self,
        segment: SegmentId,
        offset: Bytes,
        len: Bytes,
    ) -> impl Iterator<Item = (Handle, Bytes)> + use<> {
        self.take_handles_by_offset(segment, offset, len).into_values()
    }

    fn take_handles_by_offset(&mut self, segment: SegmentId, offset: Bytes, len: Bytes) -> Handles {
        let (_, handles) = self.range(segment);
        let mut taken = handles.split_off(&offset);
        handles.append(&mut taken.split_off(&(offset + len)));
        taken
    }

    fn took(&mut self, len: Bytes) {
        self.held += len;
        self.held_peak = self.held_peak.max(self.held);
    }

    /// Releases a handle that is mapped nowhere, or keeps it for later.
    fn release(&mut self, handle: Handle, len: Bytes) {
        match self.driver.release(handle) {
            Ok(()) => self.held -= len,
            Err(error) => {
                self.left_by = Some(error);
                self.stuck.push((handle, len));
            }
        }
    }

    /// Returns to the device what failed calls left behind. Returns true if there was something and less is
    /// left. A driver call for each handle and range; none if nothing is left.
    fn retry_left(&mut self) -> bool {
        let before = self.quarantined();
        for memory in std::mem::take(&mut self.spoiled) {
            self.return_spoiled(memory);
        }
        for (handle, len) in std::mem::take(&mut self.stuck) {
            self.release(handle, len);
        }
        let after = self.quarantined();
        (after.memory, after.addresses) != (before.memory, before.addresses)
    }

    /// Returns a segment that a failed call left behind, or what can be returned of it.
    fn return_spoiled(&mut self, memory: Memory) {
        let Memory::Range { range, mut handles } = memory else {
            self.spoiled.push(memory);
            return;
        };
        let driver = Arc::clone(&self.driver);
        let mut failed = None;
        for (offset, (handle, len)) in std::mem::take(&mut handles) {
            match driver.unmap(AddrRange::new(range.start + offset, len)) {
                Ok(()) => self.release(handle, len),
                Err(error) => {
                    handles.insert(offset, (handle, len));
                    failed = Some(error);
                }
            }
        }
        if handles.is_empty() {
            failed = driver.free_addresses(range).err();
        }
        if failed.is_some() {
            self.left_by = failed;
            self.spoiled.push(Memory::Range { range, handles });
        }
    }
}

impl Backend for CachingPool {
    fn name(&self) -> &'static str {
        self.settings.name
    }

    fn add_stream(&mut self, id: StreamId, stream: Option<Stream>) {
        if let Some(stream) = stream {
            self.streams.insert(id, stream);
        }
        self.pool.add_stream_as(id);
    }

    fn skip_streams(&mut self, ids: usize) {
        self.pool.skip_streams(ids);
    }

    fn end_stream(&mut self, id: StreamId, end: Option<&Arc<StreamEnd>>) {
        let mark = self.pool.now(id);
        self.pool.recorded(mark);
        self.pool.end_stream(id);
        self.streams.remove(id);
        self.events.add_end(&mut self.pool, mark, end);
    }

    /// No driver call on a hit except queries of open events.
    fn malloc(
        &mut self,
        size: Bytes,
        stream: StreamId,
        _raw: Stream,
    ) -> Result<BackendBlock, Refused> {
        let mut attempt = TorchAttempt::new(Request { size, stream });
        let (mut full, mut performed, mut retried) = (None, false, false);
        loop {
            match self.pool.place(&mut attempt) {
                TorchStep::Placed(block) => return Ok(self.found(block, !performed)),
                TorchStep::Poll => self.poll()?,
                TorchStep::Wait => self.wait()?,
                TorchStep::Perform(plan) => {
                    performed = true;
                    match self.perform(plan.op()) {
                        Ok(()) => self.pool.settle(plan),
                        Err(error) if error.is_out_of_memory() => {
                            attempt.full(&self.pool);
                            full = Some(error);
                        }
                        Err(error) => return Err(error.into()),
                    }
                }
                TorchStep::Short(shortage) => {
                    if std::mem::replace(&mut retried, true) || !self.retry_left() {
                        return Err(Refused::Short(Box::new(shortage), full));
                    }
                    attempt = TorchAttempt::new(Request { size, stream });
                }
            }
        }
    }

    fn record_use(&mut self, block: u64, stream: StreamId) {
        let used = self.pool.record_use(BlockId::from_number(block), stream);
        used.expect("the allocator looked the block up");
    }

    /// An event for each other stream that used the block, else no driver call. If recording fails, a
    /// later event covers it.
    fn free(
        &mut self,
        block: u64,
        stream: StreamId,
        _streams: &StreamTable<Stream>,
    ) -> DriverResult<()> {
        let marks = self.pool.free(BlockId::from_number(block), stream);
        let marks = marks.expect("the allocator looked the block up");
        if marks.is_empty() { Ok(()) } else { self.record_events() }
    }

    fn holds(&self, block: u64, addr: DeviceAddr) -> bool {
        let found = self.pool.block(BlockId::from_number(block));
        found.is_ok_and(|block| self.addr(&block) == addr)
    }

    /// Waits for freed blocks that other streams use, as PyTorch's `empty_cache` does, and for all work on
    /// the device.
    fn trim(&mut self, to: Bytes) -> DriverResult<()> {
        self.wait()?;
        self.retry_left();
        let mut release = self.pool.release(to);
        while let Some(plan) = self.pool.next_release(&mut release) {
            self.perform(plan.op())?;
            self.pool.settle(plan);
        }
        Ok(())
    }

    fn set_limit(&mut self, limit: Option<Bytes>) {
        self.pool.set_limit(limit);
    }

    /// The counts, with all memory that is reserved on the card.
    fn counters(&self) -> Counters {
        let QuarantinedMemory { memory, addresses, .. } = self.quarantined();
        Counters {
            reserved: self.held,
            reserved_peak: self.held_peak,
            quarantined: memory,
            quarantined_addresses: addresses,
            ..self.pool.counters()
        }
    }

    fn reset_peaks(&mut self) {
        self.pool.reset_peaks();
        self.held_peak = self.held;
    }

    fn prefill(&mut self, len: Bytes, stream: StreamId, raw: Stream) -> Result<(), Refused> {
        let block = self.malloc(len, stream, raw)?;
        Ok(self.free(block.id, stream, &StreamTable::default())?)
    }

    fn quarantined(&self) -> QuarantinedMemory {
        let mut left =
            QuarantinedMemory { failed_call: self.left_by.clone(), ..Default::default() };
        left.memory = self.stuck.iter().map(|&(_, len)| len).sum();
        for memory in &self.spoiled {
            if let Memory::Range { range, handles } = memory {
                left.memory += handles.values().map(|&(_, len)| len).sum();
                left.addresses += range.len;
            }
        }
        left
    }

    /// With expandable segments PyTorch's allocator unmaps unused ends, but moves nothing.
    fn largest_is(&self) -> Largest {
        Largest::FreeBlock
    }

    fn audit(&self) -> Result<(), Inconsistency> {
        self.pool.audit()
    }

    fn mark(&self, stream: StreamId) -> Option<Mark> {
        Some(self.pool.now(stream))
    }

    fn complete_stats(&self, stats: MemoryStats) -> MemoryStats {
        let torch = self.pool.stats();
        MemoryStats {
            active: torch.active,
            active_bytes: torch.active_bytes,
            reserved_bytes: torch.reserved_bytes,
            segment: torch.segment,
            inactive_split: torch.inactive_split,
            inactive_split_bytes: torch.inactive_split_bytes,
            oversize_allocations: torch.oversize_allocations,
            oversize_segments: torch.oversize_segments,
            num_alloc_retries: stats.num_alloc_retries + torch.num_alloc_retries,
            num_sync_all_streams: torch.num_sync_all_streams,
            num_device_alloc: torch.num_device_alloc,
            num_device_free: torch.num_device_free,
            max_split_size: self.pool.config().max_split_size,
            ..stats
        }
    }

    fn stretches(&self) -> Option<Vec<BackendStretch>> {
        let stretches = self.pool.stretches().into_iter().map(|stretch| BackendStretch {
            start: self.memory(stretch.segment).start() + stretch.offset,
            memory: stretch.memory,
            is_small: stretch.is_small,
            is_expandable: stretch.is_expandable,
        });
        Some(stretches.collect())
    }

    fn access_mut(&mut self) -> Option<&mut Access> {
        Some(&mut self.access)
    }

    /// `None` if segments are plain allocations.
    fn mapped_ranges(&self) -> Option<Vec<AddrRange>> {
        let mut ranges: Vec<AddrRange> = Vec::new();
        for memory in self.segments.iter().flatten() {
            let Memory::Range { range, handles } = memory else { return None };
            for (&offset, &(_, len)) in handles {
                let at = range.start + offset;
                match ranges.last_mut() {
                    Some(last) if offset > Bytes::ZERO && last.start + last.len == at => {
                        last.len += len
                    }
                    _ => ranges.push(AddrRange::new(at, len)),
                }
            }
        }
        Some(ranges)
    }

    /// `None` for plain allocations. O(log n) for each handle.
    fn handles_of(&self, block: u64) -> Option<(DeviceAddr, Vec<(Handle, Bytes)>)> {
        let block = self.pool.block(BlockId::from_number(block)).ok()?;
        let Memory::Range { range, handles } = self.memory(block.segment) else { return None };
        let (&first, _) = handles.range(..=block.offset).next_back()?;
        let held = handles.range(first..block.offset + block.len);
        Some((range.start + first, held.map(|(_, &handle)| handle).collect()))
    }

    fn release_all(&mut self) -> DriverResult<()> {
        let driver = Arc::clone(&self.driver);
        let mut first: DriverResult<()> = Ok(());
        let mut note = |result: DriverResult<()>| {
            if first.is_ok() {
                first = result;
            }
        };
        for memory in self.segments.drain(..).flatten().chain(self.spoiled.drain(..)) {
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
        for (handle, _) in self.stuck.drain(..) {
            note(driver.release(handle));
        }
        note(self.events.close(&*driver));
        first
    }
}

impl fmt::Debug for CachingPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.pool.fmt(f)
    }
}
