//! The virtual pool on a device: gets decisions from the core and performs them.

use std::sync::{Arc, PoisonError};

use vramp_core::{
    ArenaAllocError, Attempt, Block, BlockId, Bytes, Census, Freed, Inconsistency, Leftovers, Mark,
    Plan, Policy, Pool, PoolAddr, PoolConfig, Request, Shortage, Slab, Step, StreamHeap, StreamId,
};
use vramp_driver::{Driver, DriverError, ErrorKind};
use vramp_host::HostShortage;

use crate::allocation::Owner;
use crate::arenas::Arenas;
use crate::cache::{Cache, CachedBlock, Tag};
use crate::config::Progress;
use crate::exec::{Executor, is_capacity_error};
use crate::stream_end::StreamEnd;
use crate::sync::{AtomicBool, Mutex, MutexGuard, Ordering};

/// The heap of one stream with a lock of its own, on cache lines of its own.
#[repr(align(128))]
pub(crate) struct HeapCell {
    heap: Mutex<StreamHeap>,
    /// True once the stream ended: no request is served here, and no thread caches its blocks.
    ended: AtomicBool,
}

impl HeapCell {
    fn new(stream: StreamId) -> HeapCell {
        HeapCell { heap: Mutex::new(StreamHeap::new(stream)), ended: AtomicBool::new(false) }
    }

    /// Takes the heap's lock. It comes after the pool's lock where both are held.
    pub(crate) fn lock(&self) -> MutexGuard<'_, StreamHeap> {
        // Heaps are changed in steps that do not panic; the audit checks them.
        self.heap.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns true once the stream ended.
    #[inline]
    pub(crate) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Relaxed)
    }

    fn end(&self) {
        self.ended.store(true, Ordering::Relaxed);
    }
}

/// Largest request that the stream's heap serves.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeapsServe {
    /// While threads do not contend for the allocator's lock: the pool places the rest more
    /// tightly.
    pub alone: Bytes,
    /// While they do: a heap serves requests without that lock.
    pub contended: Bytes,
}

impl HeapsServe {
    #[inline]
    pub(crate) fn limit(self, contended: bool) -> Bytes {
        if contended { self.contended } else { self.alone }
    }
}

/// A pool, its heaps, and its device.
pub(crate) struct VirtualPool {
    pub pool: Pool,
    pub exec: Executor,
    /// Heaps by stream.
    pub heaps: Vec<Arc<HeapCell>>,
    /// Caches of live threads that allocated here.
    pub caches: Vec<Arc<Cache>>,
    pub arenas: Arenas,
    /// Sizes of requests that heaps serve; `None` in VPMM.
    pub heaps_serve: Option<HeapsServe>,
    progress: Progress,
    /// VPMM closes a stream's epoch at every free.
    records_each_free: bool,
}

/// Plans of a request that may fail because a stream began to capture meanwhile.
const RACES_MAX: u32 = 8;

/// A block that was placed.
pub(crate) struct Placed {
    pub block: Block,
    pub owner: Owner,
    /// True if no plan was needed.
    pub hit: bool,
}

/// Why a request failed.
pub(crate) enum Refusal {
    /// No memory, and the driver call that failed, if one did. Boxed: the case is rare.
    Short(Box<Shortage>, Option<DriverError>),
    Driver(DriverError),
    /// The arena of the capture refused.
    Arena(ArenaAllocError),
    /// The host has no memory for the records.
    Host(HostShortage),
}

impl VirtualPool {
    pub(crate) fn new(
        driver: Arc<dyn Driver>,
        config: PoolConfig,
        progress: Progress,
    ) -> Result<VirtualPool, vramp_core::ConfigError> {
        let heaps_serve = match config.policy {
            Policy::Mixed(mixed) => {
                Some(HeapsServe { alone: mixed.heap_limit, contended: mixed.contended_heap_limit })
            }
            Policy::Vpmm => None,
        };
        let exec = Executor::new(driver, config.page);
        Ok(VirtualPool {
            pool: Pool::new(config)?,
            exec,
            heaps: Vec::new(),
            caches: Vec::new(),
            arenas: Arenas::default(),
            heaps_serve,
            progress,
            records_each_free: heaps_serve.is_none(),
        })
    }

    /// Adds a stream; `None` for one that ended.
    pub(crate) fn add_stream(&mut self, stream: Option<vramp_driver::Stream>) -> StreamId {
        let id = self.pool.add_stream();
        self.exec.streams.push(stream);
        self.heaps.push(Arc::new(HeapCell::new(id)));
        id
    }

    /// Allocates at least `size` bytes. No driver call on a hit.
    pub(crate) fn malloc(
        &mut self,
        size: Bytes,
        stream: StreamId,
        contended: bool,
    ) -> Result<Placed, Refusal> {
        let request = Request { size, stream };
        match self.heaps_serve {
            Some(serve) if size <= serve.limit(contended) => {
                self.malloc_in_heap(request, contended)
            }
            _ => {
                let mut attempt = Attempt::new(request).prefer_growth(contended);
                let Served::Block(block) = self.serve(&mut attempt)? else {
                    unreachable!("the attempt is for a block");
                };
                let owner = Owner::Pool { id: block.id, at: block.at };
                Ok(Placed { block, owner, hit: !attempt.planned() })
            }
        }
    }

    fn malloc_in_heap(
        &mut self,
        Request { size, stream }: Request,
        contended: bool,
    ) -> Result<Placed, Refusal> {
        let heap = Arc::clone(&self.heaps[stream.index()]);
        // A block of zero bytes has an address too.
        let size = size.max(Bytes::new(1));
        let mut hit = true;
        loop {
            let wanted = {
                let mut heap = heap.lock();
                heap.promote(&self.pool);
                if let Some(block) = heap.take(size) {
                    let owner = Owner::Heap { id: block.id, at: block.at };
                    return Ok(Placed { block, owner, hit });
                }
                if !heap.make_room() {
                    return Err(Refusal::Host(HostShortage));
                }
                heap.wanted(size, self.pool.config().page)
            };
            let least = size.checked_round_up(self.pool.config().page);
            let request = Request { size: least.unwrap_or(size), stream };
            let mut attempt = Attempt::slab(request, wanted).prefer_growth(contended);
            let served = match self.serve(&mut attempt) {
                // A slab that holds just the block is enough.
                Err(Refusal::Short(..)) => {
                    attempt = Attempt::slab(Request { size, stream }, size);
                    self.serve(&mut attempt)?
                }
                served => served?,
            };
            let Served::Slab(slab) = served else { unreachable!("the attempt is for a slab") };
            hit &= !attempt.planned();
            heap.lock().add(slab);
        }
    }

    /// Climbs the attempt's ladder until it succeeds or no rung is left.
    pub(crate) fn serve(&mut self, attempt: &mut Attempt) -> Result<Served, Refusal> {
        let (mut full, mut raced) = (None, 0);
        loop {
            match self.pool.place(attempt) {
                Step::Placed(block) => return Ok(Served::Block(block)),
                Step::Slab(slab) => return Ok(Served::Slab(slab)),
                Step::Backed => return Ok(Served::Backed),
                Step::Lend => {
                    self.lend_idle().map_err(Refusal::Driver)?;
                }
                Step::Poll => self.poll().map_err(Refusal::Driver)?,
                Step::Record(marks) => self.record_and_poll(&marks).map_err(Refusal::Driver)?,
                Step::Gather => {
                    // A capture may have ended meanwhile.
                    if self.pool.holds_any() {
                        self.note_captures().map_err(Refusal::Driver)?;
                    }
                    self.gather();
                }
                Step::Perform(plan)
                    if self.invalidates_capture(&plan).map_err(Refusal::Driver)? =>
                {
                    self.pool.abandon(plan, Leftovers::default());
                    attempt.again();
                }
                Step::Perform(plan) => {
                    let optional = plan.is_optional();
                    if let Err(error) = self.exec.perform(&mut self.pool, plan) {
                        if is_capacity_error(&error) && attempt.out_of_memory() {
                            full = Some(error);
                        } else if is_capacity_error(&error) {
                            return Err(Refusal::Short(
                                Box::new(self.pool.shortage(attempt)),
                                Some(error),
                            ));
                        } else if optional && error.kind != ErrorKind::DeviceLost {
                            // It was only of use.
                        } else if error.kind == ErrorKind::Capturing && raced < RACES_MAX {
                            // A capture began after the streams were asked.
                            raced += 1;
                            self.note_captures().map_err(Refusal::Driver)?;
                            attempt.again();
                        } else {
                            return Err(Refusal::Driver(error));
                        }
                    }
                }
                Step::Short(shortage) => return Err(Refusal::Short(Box::new(shortage), full)),
            }
        }
    }

    /// Remaps free chunks towards a block whose last parts are not free yet ([`Pool::assemble`]).
    pub(crate) fn assemble(&mut self, request: Request) -> Result<(), DriverError> {
        while let Some(plan) = self.pool.assemble(request) {
            if self.invalidates_capture(&plan)? {
                self.pool.abandon(plan, Leftovers::default());
                return Ok(());
            }
            let fills = plan.fills();
            self.exec.perform(&mut self.pool, plan)?;
            if fills {
                break;
            }
        }
        Ok(())
    }

    /// Ends a stream: its memory serves every stream once `end` is reached, or now if its work is
    /// over. No driver call.
    pub(crate) fn end_stream(&mut self, stream: StreamId, end: Option<&Arc<StreamEnd>>) {
        debug_assert!(!self.heaps[stream.index()].has_ended(), "{stream} ends once");
        // From here on no thread caches a block of the stream.
        self.heaps[stream.index()].end();
        self.gather();
        let mark = self.pool.now(stream);
        self.pool.recorded(mark);
        self.pool.end_stream(stream);
        self.exec.streams[stream.index()] = None;
        self.exec.events.add_end(&mut self.pool, mark, end);
    }

    /// Frees a block that the pool placed. No driver call, except VPMM's event. The block is free
    /// even if recording that event fails: the next one covers it.
    pub(crate) fn free(&mut self, id: BlockId, stream: StreamId) -> Result<(), DriverError> {
        self.pool.free(id, stream).expect("the allocator looked the block up");
        if self.records_each_free && self.pool.is_open(stream) {
            let mark = self.pool.now(stream);
            self.record(mark)?;
        }
        Ok(())
    }

    /// Frees a block that the heap of `home` placed. No driver call.
    pub(crate) fn free_in_heap(&mut self, id: BlockId, home: StreamId, stream: StreamId) {
        let freed = self.heaps[home.index()].lock().free(id, stream, &self.pool);
        if let Freed::Surplus(slab) = freed.expect("the allocator looked the block up") {
            self.pool.take_back(slab, home);
        }
    }

    /// Frees the blocks in a thread's cache.
    pub(crate) fn drain(&mut self, cache: &Cache) {
        cache.drain(|tag, block| self.free_cached(tag, block));
    }

    /// Frees the block in a thread's cache that is not small.
    pub(crate) fn drain_last(&mut self, cache: &Cache) {
        cache.drain_last(|tag, block| self.free_cached(tag, block));
    }

    fn free_cached(&mut self, tag: Tag, block: CachedBlock) {
        let stream = StreamId::new(tag.stream() as u32);
        let id = BlockId::from_number(block.id);
        if tag.is_of_pool() {
            self.pool.free(id, stream).expect("a cached block is live in the pool");
        } else {
            self.free_in_heap(id, stream, stream);
        }
    }

    /// Returns to the pool what thread caches and heaps have free.
    pub(crate) fn gather(&mut self) {
        for cache in self.caches.clone() {
            self.drain(&cache);
        }
        let mut awaited = Vec::new();
        for heap in &self.heaps {
            let mut heap = heap.lock();
            heap.shed(&mut self.pool);
            awaited.extend(heap.awaited());
        }
        self.pool.set_heap_marks(awaited);
    }

    /// Returns true if a plan would record an event on a stream that captures a graph, or make it
    /// wait. No driver call for a plan that does neither.
    fn invalidates_capture(&mut self, plan: &Plan) -> Result<bool, DriverError> {
        if plan.orders().next().is_none() {
            return Ok(false);
        }
        self.note_captures()?;
        Ok(plan.orders().any(|stream| self.pool.is_held(stream)))
    }

    /// Queries every stream whether it captures a graph. No event may be recorded on those that do,
    /// and while there is one no event may be queried. One driver call for each open stream.
    pub(crate) fn note_captures(&mut self) -> Result<bool, DriverError> {
        let mut any = false;
        for number in 0..self.exec.streams.len() {
            let id = StreamId::new(number as u32);
            if let Some(stream) = self.exec.streams[number] {
                let capturing = self.exec.driver.is_capturing(stream)?;
                self.pool.hold(id, capturing);
                any |= capturing;
            }
        }
        Ok(any)
    }

    /// Queries the streams that captured a graph when they were queried last whether they still do. One
    /// driver call for each of them.
    pub(crate) fn note_ended_captures(&mut self) -> Result<(), DriverError> {
        let mut held = self.pool.held_streams();
        held.retain(|&stream| self.pool.is_open(stream));
        for stream in held {
            let capturing = self.exec.driver.is_capturing(self.exec.stream(stream))?;
            self.pool.hold(stream, capturing);
        }
        Ok(())
    }

    /// Queries which work is over; does nothing while a stream captures a graph.
    pub(crate) fn poll(&mut self) -> Result<(), DriverError> {
        if self.pool.pending().next().is_none() || self.note_captures()? {
            return Ok(());
        }
        let driver = Arc::clone(&self.exec.driver);
        self.exec.events.poll(&*driver, &mut self.pool, &self.progress)
    }

    /// Records an event for `mark`, unless its stream captures: a later one covers its work.
    pub(crate) fn record(&mut self, mark: Mark) -> Result<(), DriverError> {
        match self.exec.record(mark)? {
            true => self.pool.recorded(mark),
            false => self.pool.hold(mark.stream, true),
        }
        Ok(())
    }

    /// Records events for `marks`, then queries which work is over; does nothing while a stream
    /// captures a graph.
    fn record_and_poll(&mut self, marks: &[Mark]) -> Result<(), DriverError> {
        if self.note_captures()? {
            return Ok(());
        }
        for &mark in marks {
            self.record(mark)?;
        }
        self.poll()
    }

    /// Reserves memory ahead of demand. `Ok(false)` if the limit forbids it.
    pub(crate) fn prefill(&mut self, len: Bytes, stream: StreamId) -> Result<bool, DriverError> {
        // Reserving addresses may have to come first.
        for _ in 0..2 {
            let Some(plan) = self.pool.prefill(len, stream) else { return Ok(false) };
            let before = self.pool.counters().reserved;
            self.exec.perform(&mut self.pool, plan)?;
            if self.pool.counters().reserved > before {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Returns idle memory to the card until no more than `to` is reserved, or nothing more is
    /// idle. Three driver calls and more for each chunk.
    pub(crate) fn trim(&mut self, to: Bytes) -> Result<(), DriverError> {
        self.note_captures()?;
        self.lend_idle()?;
        self.find_idle()?;
        while let Some(plan) = self.pool.trim(to) {
            self.exec.perform(&mut self.pool, plan)?;
        }
        Ok(())
    }

    /// Queries for all free memory whether its work is over: an event for each stream that none
    /// covers yet, and a query for each.
    pub(crate) fn find_idle(&mut self) -> Result<(), DriverError> {
        // Again if a poll freed memory that waited: it has a younger epoch, or is in a heap.
        loop {
            let completed = self.exec.events.completed();
            self.gather();
            let marks = self.pool.unrecorded();
            for &mark in &marks {
                self.record(mark)?;
            }
            self.poll()?;
            if marks.is_empty() && self.exec.events.completed() == completed {
                return Ok(());
            }
        }
    }

    /// Returns true if `id` is a live block that begins at `at`.
    pub(crate) fn is_live(&self, id: BlockId, at: PoolAddr) -> bool {
        self.pool.block(id).is_ok_and(|block| block.at == at)
    }

    pub(crate) fn census(&self) -> Census {
        let mut census = self.pool.census();
        for heap in &self.heaps {
            heap.lock().count_into(&mut census);
        }
        let cached: u64 = self.caches.iter().map(|cache| cache.bytes()).sum();
        census.at_hand = Bytes::new(cached).min(census.used);
        census.used -= census.at_hand;
        census
    }

    pub(crate) fn audit(&self) -> Result<(), Inconsistency> {
        self.pool.audit()?;
        let mut slabs = 0;
        for heap in &self.heaps {
            let heap = heap.lock();
            heap.audit(&self.pool)?;
            slabs += heap.slab_count();
        }
        for (_, state) in self.arenas.iter() {
            state.arena.audit()?;
        }
        if slabs != self.pool.slab_count() {
            let known = self.pool.slab_count();
            let what = format!("the pool gave {known} slabs, heaps have {slabs}");
            return Err(Inconsistency { what });
        }
        Ok(())
    }
}

/// Outcome of an attempt that succeeded.
pub(crate) enum Served {
    Block(Block),
    Slab(Slab),
    /// The arena is backed.
    Backed,
}
