//! The virtual pool on a device: asks the core, performs what it says.

use std::sync::{Arc, PoisonError};

use vramp_core::{
    ArenaAllocError, Attempt, Block, BlockId, Bytes, Census, Freed, Inconsistency, Leftovers, Mark,
    Plan, Policy, Pool, PoolAddr, PoolConfig, Request, Shortage, Slab, Step, StreamHeap, StreamId,
};
use vramp_driver::{Driver, DriverError, ErrorKind};

use crate::allocation::Owner;
use crate::arenas::Arenas;
use crate::cache::{Cache, Kept, Tag};
use crate::config::Progress;
use crate::exec::{Executor, is_full};
use crate::sync::{Mutex, MutexGuard};

/// One stream's heap behind a lock of its own, far from its neighbours' in memory.
#[repr(align(128))]
pub(crate) struct HeapCell(Mutex<StreamHeap>);

impl HeapCell {
    /// Comes after the pool's lock where both are held.
    pub(crate) fn lock(&self) -> MutexGuard<'_, StreamHeap> {
        // Heaps are changed in steps that do not panic; the audit tells otherwise.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Up to which size requests are served from their stream's heap.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeapsServe {
    /// While threads do not meet at the allocator's lock: the pool places the rest more tightly.
    pub alone: Bytes,
    /// Once they do: what a heap serves, it serves without that lock.
    pub contended: Bytes,
}

impl HeapsServe {
    #[inline]
    pub(crate) fn limit(self, contended: bool) -> Bytes {
        if contended { self.contended } else { self.alone }
    }
}

/// A pool, its heaps, and the device it lives on.
pub(crate) struct VirtualPool {
    pub pool: Pool,
    pub exec: Executor,
    /// By stream.
    pub heaps: Vec<Arc<HeapCell>>,
    /// Of every thread that allocated here and lives.
    pub caches: Vec<Arc<Cache>>,
    pub arenas: Arenas,
    /// Which requests are the heaps'. None in VPMM.
    pub heaps_serve: Option<HeapsServe>,
    progress: Progress,
    /// VPMM closes a stream's epoch at every free.
    records_each_free: bool,
}

/// Where a request was placed.
pub(crate) struct Placed {
    pub block: Block,
    pub owner: Owner,
    /// No plan was needed.
    pub hit: bool,
}

/// Why no block came out.
pub(crate) enum Refusal {
    /// Boxed, for it is the rare way out.
    Short(Box<Shortage>, Option<DriverError>),
    Driver(DriverError),
    /// A capture's arena says no.
    Arena(ArenaAllocError),
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

    /// Makes another stream known.
    pub(crate) fn add_stream(&mut self, stream: vramp_driver::Stream) -> StreamId {
        let id = self.pool.add_stream();
        self.exec.streams.push(stream);
        self.heaps.push(Arc::new(HeapCell(Mutex::new(StreamHeap::new(id)))));
        id
    }

    /// A block of at least `size` bytes. No driver call on a hit.
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
                let mut attempt = Attempt::new(request).roomy(contended);
                let Served::Block(block) = self.serve(&mut attempt)? else {
                    unreachable!("a block was asked for");
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
        let mut hit = true;
        loop {
            let wanted = {
                let mut heap = heap.lock();
                heap.promote(&self.pool);
                if let Some(block) = heap.take(size) {
                    let owner = Owner::Heap { id: block.id, at: block.at };
                    return Ok(Placed { block, owner, hit });
                }
                heap.wanted(size, self.pool.config().page)
            };
            let least = size.max(Bytes::new(1)).checked_round_up(self.pool.config().page);
            let request = Request { size: least.unwrap_or(size), stream };
            let mut attempt = Attempt::slab(request, wanted).roomy(contended);
            let served = match self.serve(&mut attempt) {
                // Any place that holds the block will do.
                Err(Refusal::Short(..)) => {
                    attempt = Attempt::slab(Request { size, stream }, size);
                    self.serve(&mut attempt)?
                }
                served => served?,
            };
            let Served::Slab(slab) = served else { unreachable!("a slab was asked for") };
            hit &= !attempt.planned();
            heap.lock().add(slab);
        }
    }

    /// Goes up the ladder until there is what the attempt asks for.
    pub(crate) fn serve(&mut self, attempt: &mut Attempt) -> Result<Served, Refusal> {
        let mut full: Option<DriverError> = None;
        loop {
            match self.pool.place(attempt) {
                Step::Placed(block) => return Ok(Served::Block(block)),
                Step::Slab(slab) => return Ok(Served::Slab(slab)),
                Step::Backed => return Ok(Served::Backed),
                Step::Lend => {
                    self.lend_idle().map_err(Refusal::Driver)?;
                }
                Step::Poll => self.poll().map_err(Refusal::Driver)?,
                Step::Ask(marks) => self.ask(&marks).map_err(Refusal::Driver)?,
                Step::Gather => {
                    // A capture may be over by now.
                    if self.pool.holds_any() {
                        self.note_captures().map_err(Refusal::Driver)?;
                    }
                    self.gather();
                }
                Step::Perform(plan) if self.spoils_capture(&plan).map_err(Refusal::Driver)? => {
                    self.pool.abandon(plan, Leftovers::default());
                    attempt.again();
                }
                Step::Perform(plan) => {
                    let optional = plan.is_optional();
                    if let Err(error) = self.exec.perform(&mut self.pool, plan) {
                        if is_full(&error) && attempt.out_of_memory() {
                            full = Some(error);
                        } else if is_full(&error) {
                            return Err(Refusal::Short(
                                Box::new(attempt.shortage(&self.pool)),
                                Some(error),
                            ));
                        } else if !(optional && error.kind != ErrorKind::DeviceLost) {
                            return Err(Refusal::Driver(error));
                        }
                    }
                }
                Step::Short(shortage) => return Err(Refusal::Short(Box::new(shortage), full)),
            }
        }
    }

    /// Moves what is free towards a block that more is awaited for ([`Pool::assemble`]).
    pub(crate) fn assemble(&mut self, request: Request) -> Result<(), DriverError> {
        while let Some(plan) = self.pool.assemble(request) {
            if self.spoils_capture(&plan)? {
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

    /// Ends a stream: its memory is anybody's once the event recorded here is reached.
    pub(crate) fn end_stream(&mut self, stream: StreamId) -> Result<(), DriverError> {
        self.gather();
        let mark = self.pool.now(stream);
        self.exec.record(mark)?;
        self.pool.recorded(mark);
        self.pool.end_stream(stream);
        Ok(())
    }

    /// Takes a block back that the pool placed. No driver call, but for VPMM's event. The block is
    /// free even if recording that event fails: the next one covers it.
    pub(crate) fn free(&mut self, id: BlockId, stream: StreamId) -> Result<(), DriverError> {
        self.pool.free(id, stream).expect("the allocator looked the block up");
        if self.records_each_free && self.pool.is_open(stream) {
            let mark = self.pool.now(stream);
            self.exec.record(mark)?;
            self.pool.recorded(mark);
        }
        Ok(())
    }

    /// Takes a block back that the heap of `home` placed. No driver call.
    pub(crate) fn free_in_heap(&mut self, id: BlockId, home: StreamId, stream: StreamId) {
        let freed = self.heaps[home.index()].lock().free(id, stream, &self.pool);
        if let Freed::Surplus(slab) = freed.expect("the allocator looked the block up") {
            self.pool.take_back(slab, home);
        }
    }

    /// Frees what a thread had at hand.
    pub(crate) fn drain(&mut self, cache: &Cache) {
        cache.drain(|tag, kept| self.free_kept(tag, kept));
    }

    /// Frees what a thread has at hand that is not small.
    pub(crate) fn drain_last(&mut self, cache: &Cache) {
        cache.drain_last(|tag, kept| self.free_kept(tag, kept));
    }

    fn free_kept(&mut self, tag: Tag, kept: Kept) {
        let stream = StreamId::new(tag.stream() as u32);
        let id = BlockId::from_number(kept.id);
        if tag.is_of_pool() {
            self.pool.free(id, stream).expect("what is at hand is a block");
        } else {
            self.free_in_heap(id, stream, stream);
        }
    }

    /// Gives the pool all that threads and heaps do not need.
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
        self.pool.heaps_await(awaited);
    }

    /// True if a plan would record an event on a stream that captures a graph, or make it wait. No
    /// driver call for a plan that does neither.
    fn spoils_capture(&mut self, plan: &Plan) -> Result<bool, DriverError> {
        if plan.orders().next().is_none() {
            return Ok(false);
        }
        self.note_captures()?;
        Ok(plan.orders().any(|stream| self.pool.is_held(stream)))
    }

    /// Asks every stream whether it captures a graph: no event may be recorded on those, and while
    /// there is one nobody may be asked whether work is over. One driver call for each open stream.
    pub(crate) fn note_captures(&mut self) -> Result<bool, DriverError> {
        let mut any = false;
        for number in 0..self.exec.streams.len() {
            let id = StreamId::new(number as u32);
            if self.pool.is_open(id) {
                let capturing = self.exec.driver.is_capturing(self.exec.streams[number])?;
                self.pool.hold(id, capturing);
                any |= capturing;
            }
        }
        Ok(any)
    }

    /// Learns which work is over; nothing while a stream captures a graph.
    pub(crate) fn poll(&mut self) -> Result<(), DriverError> {
        if self.pool.pending().next().is_none() || self.note_captures()? {
            return Ok(());
        }
        let driver = Arc::clone(&self.exec.driver);
        self.exec.events.poll(&*driver, &mut self.pool, &self.progress)
    }

    /// Learns whether the work before some marks is over, too; nothing while a stream captures a
    /// graph.
    fn ask(&mut self, marks: &[Mark]) -> Result<(), DriverError> {
        if self.note_captures()? {
            return Ok(());
        }
        for &mark in marks {
            self.exec.record(mark)?;
            self.pool.recorded(mark);
        }
        self.poll()
    }

    /// Adds memory ahead of demand. `Ok(false)` if the limit forbids it.
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

    /// Gives free memory back to the card until the pool holds no more than `to`, or nothing more
    /// is idle. Three driver calls and more for each chunk.
    pub(crate) fn trim(&mut self, to: Bytes) -> Result<(), DriverError> {
        self.note_captures()?;
        self.lend_idle()?;
        self.find_idle()?;
        while let Some(plan) = self.pool.trim(to) {
            self.exec.perform(&mut self.pool, plan)?;
        }
        Ok(())
    }

    /// Learns of all free memory whether its work is over: an event for each stream that none covers
    /// yet, and a query for each.
    pub(crate) fn find_idle(&mut self) -> Result<(), DriverError> {
        // Once more where a poll set free what others waited for: it has a younger epoch.
        loop {
            self.gather();
            let marks = self.pool.unrecorded();
            for &mark in &marks {
                self.exec.record(mark)?;
                self.pool.recorded(mark);
            }
            self.poll()?;
            if marks.is_empty() {
                return Ok(());
            }
        }
    }

    /// True if `at` is where the block under `id` begins.
    pub(crate) fn knows(&self, id: BlockId, at: PoolAddr) -> bool {
        self.pool.block(id).is_ok_and(|block| block.at == at)
    }

    pub(crate) fn census(&self) -> Census {
        let mut census = self.pool.census();
        for heap in &self.heaps {
            heap.lock().count_into(&mut census);
        }
        let at_hand: u64 = self.caches.iter().map(|cache| cache.grains() * 512).sum();
        census.at_hand = Bytes::new(at_hand).min(census.used);
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

/// What an attempt came to.
pub(crate) enum Served {
    Block(Block),
    Slab(Slab),
    /// Memory is behind the arena.
    Backed,
}
