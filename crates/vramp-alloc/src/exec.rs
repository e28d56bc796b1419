//! Performs plans: the only place where the pool's ids are mapped to the driver's handles.
//!
//! A plan is performed in order. If an operation fails, those before it are undone, last first, and
//! the plan is abandoned with the list of what could not be undone. The device and the pool are
//! then as before.

use std::sync::Arc;

use vramp_core::{
    AddrRange, Bytes, ChunkId, DeviceAddr, Leftovers, Mark, Op, Plan, Pool, PoolAddr, Range,
    SpanId, StreamId, StreamTable,
};
use vramp_driver::{Call, Driver, DriverError, DriverResult, ErrorKind, Handle, Stream};

use crate::asleep::Asleep;
use crate::completion::{Events, captures};
use crate::sharing::{Access, Descriptors};

/// A device, and its handles by the pool's ids.
pub(crate) struct Executor {
    pub driver: Arc<dyn Driver>,
    /// The driver's streams that have not ended.
    pub streams: StreamTable<Stream>,
    pub events: Events,
    /// What memory is created and mapped as.
    pub access: Access,
    page: Bytes,
    spans: Vec<AddrRange>,
    chunks: Vec<Option<Handle>>,
    /// Descriptors of chunks' handles. Those of a handle are closed before it is released.
    pub descriptors: Arc<Descriptors>,
    /// The last call that left something unusable.
    pub quarantined_by: Option<DriverError>,
    /// Which chunks are not on the card, while the pool sleeps. Their plans wait until it wakes.
    pub asleep: Option<Asleep>,
}

impl Executor {
    pub(crate) fn new(driver: Arc<dyn Driver>, access: Access, page: Bytes) -> Executor {
        Executor {
            driver,
            streams: StreamTable::default(),
            events: Events::default(),
            access,
            page,
            spans: Vec::new(),
            chunks: Vec::new(),
            descriptors: Arc::default(),
            quarantined_by: None,
            asleep: None,
        }
    }

    /// Performs a plan and settles it, or undoes and abandons it.
    pub(crate) fn perform(&mut self, pool: &mut Pool, mut plan: Plan) -> DriverResult<()> {
        for index in 0..plan.ops.len() {
            if let Err(error) = self.step(plan.ops[index], &mut plan) {
                let leftovers = self.undo(&plan, index);
                if plan.is_optional() {
                    self.quarantined_by = Some(error.clone());
                }
                pool.abandon(plan, leftovers);
                return Err(error);
            }
        }
        pool.settle(plan);
        Ok(())
    }

    fn step(&mut self, op: Op, plan: &mut Plan) -> DriverResult<()> {
        match op {
            Op::Reserve { least, wanted, .. } => {
                let range = self.reserve(least, wanted)?;
                self.spans.push(range);
                plan.got_addresses(range.len);
                Ok(())
            }
            Op::Create { chunk, len } => {
                let handle = self.create(len)?;
                self.store_handle(chunk, handle);
                Ok(())
            }
            Op::Map { chunk, at, .. } => self.driver.map(self.addr(at), self.handle(chunk)),
            Op::SetAccess(range) => self.driver.set_access(self.range(range), &self.access.peers),
            Op::Unmap(range) => self.driver.unmap(self.range(range)),
            Op::Release { chunk } => {
                self.release_handle(chunk)?;
                self.chunks[chunk.index()] = None;
                Ok(())
            }
            Op::Record(mark) => match self.record(mark)? {
                true => Ok(()),
                false => Err(captures(mark.stream)),
            },
            Op::Wait { stream, on } => {
                let waiter = self.stream(stream);
                match self.events.covering(on) {
                    Some(event) => self.driver.wait(waiter, event),
                    // The work is known to be over.
                    None => Ok(()),
                }
            }
        }
    }

    /// Reserves `wanted` addresses. Halves the length on failure, down to `least`.
    fn reserve(&self, least: Bytes, wanted: Bytes) -> DriverResult<AddrRange> {
        let page = self.page;
        let least = least.checked_round_up(page).unwrap_or(least);
        let mut len = wanted;
        loop {
            match self.driver.reserve(len, page) {
                Ok(start) => return Ok(AddrRange::new(start, len)),
                Err(error) if error.is_out_of_memory() && len > least => {
                    len = Bytes::new(len.count() / 2).round_down(page).max(least);
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Records an event for `mark`. Returns false if the stream captures: nothing was recorded then.
    pub(crate) fn record(&mut self, mark: Mark) -> DriverResult<bool> {
        let stream = self.stream(mark.stream);
        self.events.record(&*self.driver, mark, stream)
    }

    fn undo(&mut self, plan: &Plan, failed: usize) -> Leftovers {
        let mut leftovers = Leftovers::default();
        if plan.is_optional() {
            leftovers.performed = failed;
            return leftovers;
        }
        let mut stuck: Vec<ChunkId> = Vec::new();
        for &op in plan.ops[..failed].iter().rev() {
            if let Op::Record(mark) = op {
                leftovers.recorded.push(mark);
            }
            match (op, op.inverse()) {
                (Op::Map { chunk, at, len }, Some(_)) => {
                    let range = Range { at, len };
                    if let Err(error) = self.driver.unmap(self.range(range)) {
                        self.quarantined_by = Some(error);
                        leftovers.mapped.push(range);
                        stuck.push(chunk);
                    }
                }
                (Op::Create { chunk, len }, Some(_)) => {
                    // A handle released while mapped would stay allocated and uncounted.
                    let released = match stuck.contains(&chunk) {
                        true => false,
                        false => match self.driver.release(self.handle(chunk)) {
                            Ok(()) => true,
                            Err(error) => {
                                self.quarantined_by = Some(error);
                                false
                            }
                        },
                    };
                    match released {
                        true => self.chunks[chunk.index()] = None,
                        false => leftovers.chunks.push((chunk, len)),
                    }
                }
                _ => {}
            }
        }
        leftovers
    }

    pub(crate) fn addr(&self, at: PoolAddr) -> DeviceAddr {
        self.spans[at.span().index()].start + at.offset()
    }

    /// Returns every reservation, by span id.
    pub(crate) fn spans(&self) -> &[AddrRange] {
        &self.spans
    }

    pub(crate) fn range(&self, range: Range) -> AddrRange {
        AddrRange::new(self.addr(range.at), range.len)
    }

    /// Returns the pool's addresses of a range. `None` if it does not lie in one span. O(spans).
    pub(crate) fn find(&self, range: AddrRange) -> Option<Range> {
        let end = range.checked_end()?;
        let within = |span: &AddrRange| {
            span.start <= range.start && span.checked_end().is_some_and(|last| end <= last)
        };
        let index = self.spans.iter().position(within)?;
        let span = SpanId::new(u32::try_from(index).ok()?);
        let at = PoolAddr::new(span, range.start.checked_offset_from(self.spans[index].start)?);
        Some(Range { at, len: range.len })
    }

    /// Returns true if some of a range lies in the pool's addresses. O(spans).
    pub(crate) fn has_some_of(&self, range: AddrRange) -> bool {
        let is_before = |one: &AddrRange, other: &AddrRange| {
            one.checked_end().is_some_and(|end| end <= other.start)
        };
        self.spans.iter().any(|span| !is_before(span, &range) && !is_before(&range, span))
    }

    pub(crate) fn store_handle(&mut self, chunk: ChunkId, handle: Handle) {
        if self.chunks.len() <= chunk.index() {
            self.chunks.resize(chunk.index() + 1, None);
        }
        self.chunks[chunk.index()] = Some(handle);
    }

    /// Creates memory. If the card is full, importers may still have mapped what was released here lately: then it
    /// waits for them, a tenth of a second at most, and tries again.
    pub(crate) fn create(&self, len: Bytes) -> DriverResult<Handle> {
        match self.driver.create(len, self.access.properties) {
            Err(error) if error.is_out_of_memory() && self.descriptors.wait_for_importers() => {
                self.driver.create(len, self.access.properties)
            }
            created => created,
        }
    }

    /// Releases the handle of a chunk, with its descriptor.
    pub(crate) fn release_handle(&self, chunk: ChunkId) -> DriverResult<()> {
        let handle = self.handle(chunk);
        self.descriptors.forget(handle);
        self.driver.release(handle)
    }

    pub(crate) fn forget_handle(&mut self, chunk: ChunkId) {
        self.chunks[chunk.index()] = None;
    }

    /// Returns the pool's ranges that are mapped on the device: all of `ranges` unless the pool sleeps.
    pub(crate) fn mapped(&self, ranges: Vec<Range>) -> Vec<Range> {
        match &self.asleep {
            Some(asleep) => asleep.mapped(ranges),
            None => ranges,
        }
    }

    pub(crate) fn handle(&self, chunk: ChunkId) -> Handle {
        self.chunks[chunk.index()].unwrap_or_else(|| panic!("{chunk} has no handle"))
    }

    /// Returns the driver's stream; `None` if it ended.
    pub(crate) fn open_stream(&self, stream: StreamId) -> Option<Stream> {
        self.streams.get(stream).copied()
    }

    /// Returns the driver's stream.
    ///
    /// # Panics
    /// If it ended.
    pub(crate) fn stream(&self, stream: StreamId) -> Stream {
        self.open_stream(stream).unwrap_or_else(|| panic!("{stream} ended and is still used"))
    }

    /// Returns everything to the device: mappings, chunks, addresses, events. The caller waited for
    /// all work. Goes on after a failure and returns the first one.
    pub(crate) fn release_all(&mut self, pool: &Pool) -> DriverResult<()> {
        let mut first: DriverResult<()> = Ok(());
        let mut note = |result: DriverResult<()>| {
            if first.is_ok() {
                first = result;
            }
        };
        for range in self.mapped(pool.mapped_ranges()) {
            note(self.driver.unmap(self.range(range)));
        }
        for handle in self.chunks.drain(..).flatten() {
            self.descriptors.forget(handle);
            note(self.driver.release(handle));
        }
        for span in self.spans.drain(..) {
            note(self.driver.free_addresses(span));
        }
        note(self.events.close(&*self.driver));
        first
    }
}

/// Returns true for the error of a device that has no memory or no addresses left.
pub(crate) fn is_capacity_error(error: &DriverError) -> bool {
    error.kind == ErrorKind::OutOfMemory && matches!(error.call, Call::Create | Call::Reserve)
}
