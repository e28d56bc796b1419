//! The virtual pool on a device: gets decisions from the core and performs them.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, PoisonError};

use vramp_core::{
    ArenaAllocError, Attempt, Block, BlockId, Bytes, Census, Counters, Freed, Inconsistency,
    Leftovers, Mark, PartCount, Plan, Policy, Pool, PoolAddr, PoolConfig, Quarantined, Request,
    Shortage, Slab, Step, StreamHeap, StreamId, StreamTable,
};
use vramp_driver::{Driver, DriverError, ErrorKind, StreamThread};
use vramp_host::HostShortage;

use crate::allocation::{Found, Owner};
use crate::arenas::Arenas;
use crate::asleep::Asleep;
use crate::backend::Refused;
use crate::cache::{Cache, CachedBlock, Tag};
use crate::completion::Awaited;
use crate::config::Progress;
use crate::error::QuarantinedMemory;
use crate::exec::{Executor, is_capacity_error};
use crate::kv::Tables;
use crate::sharing::Access;
use crate::stream_end::StreamEnd;
use crate::sync::{AtomicBool, Mutex, MutexGuard, Ordering};

/// The heap of one stream with a lock of its own, on cache lines of its own.
#[repr(align(128))]
pub(crate) struct HeapCell {
    heap: Mutex<Listed>,
    /// True once the stream ended: no request is served here, and no thread caches its blocks.
    ended: AtomicBool,
    surplus: Arc<Surplus>,
}

/// A heap, and whether it is in the list of those that may have something to give back.
struct Listed {
    heap: StreamHeap,
    is_listed: bool,
}

/// The heaps that may have something to give back. With thousands of idle streams a miss looks at
/// none of their heaps.
#[derive(Default)]
struct Surplus(Mutex<Vec<StreamId>>);

impl Surplus {
    fn lock(&self) -> MutexGuard<'_, Vec<StreamId>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl HeapCell {
    fn new(stream: StreamId, surplus: Arc<Surplus>) -> HeapCell {
        let listed = Listed { heap: StreamHeap::new(stream), is_listed: false };
        HeapCell { heap: Mutex::new(listed), ended: AtomicBool::new(false), surplus }
    }

    /// Takes the heap's lock. It comes after the pool's lock where both are held.
    #[inline]
    pub(crate) fn lock(&self) -> HeapGuard<'_> {
        // Heaps are changed in steps that do not panic; the audit checks them.
        let listed = self.heap.lock().unwrap_or_else(PoisonError::into_inner);
        HeapGuard { listed, surplus: &self.surplus }
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

/// The lock of a heap. Dropping it lists a heap that came to have something to give back.
pub(crate) struct HeapGuard<'a> {
    listed: MutexGuard<'a, Listed>,
    surplus: &'a Surplus,
}

impl HeapGuard<'_> {
    /// Gives the pool what the heap does not need, and takes the heap off the list.
    fn shed(&mut self, pool: &mut Pool) {
        self.listed.is_listed = false;
        self.listed.heap.shed(pool);
    }

    #[cold]
    fn list(&mut self) {
        self.listed.is_listed = true;
        self.surplus.lock().push(self.listed.heap.stream());
    }
}

impl Deref for HeapGuard<'_> {
    type Target = StreamHeap;

    #[inline]
    fn deref(&self) -> &StreamHeap {
        &self.listed.heap
    }
}

impl DerefMut for HeapGuard<'_> {
    #[inline]
    fn deref_mut(&mut self) -> &mut StreamHeap {
        &mut self.listed.heap
    }
}

impl Drop for HeapGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        if !self.listed.is_listed && self.listed.heap.may_shed() {
            self.list();
        }
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
    /// Heaps by stream: of those that have not ended, and of those whose blocks live on.
    pub heaps: StreamTable<Arc<HeapCell>>,
    surplus: Arc<Surplus>,
    /// Caches of live threads that allocated here.
    pub caches: Vec<Arc<Cache>>,
    pub arenas: Arenas,
    /// Arenas for caches.
    pub tables: Tables,
    /// Sizes of requests that heaps serve; `None` in VPMM.
    pub heaps_serve: Option<HeapsServe>,
    progress: Progress,
    /// Threads' default streams, each with true if memory was freed there since its last event.
    of_threads: BTreeMap<StreamId, bool>,
    /// VPMM closes a stream's epoch at every free.
    records_each_free: bool,
}

/// Plans of a request that may fail because a stream captures, where no stream of the plan is found
/// capturing afterwards.
const RACES_MAX: u32 = 8;

/// Events that a request queries in vain at most. Each other query ends an event, which the free of a
/// block made necessary: so requests make two queries on average at most, whatever number of events is open.
const IN_VAIN_MAX: usize = 1;

/// Events that a thread records on its default stream before it queries which were reached.
const OWN_EVENTS_MAX: usize = 32;

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

impl From<Refused> for Refusal {
    fn from(refused: Refused) -> Refusal {
        match refused {
            Refused::Short(shortage, failed_call) => Refusal::Short(shortage, failed_call),
            Refused::Driver(error) => Refusal::Driver(error),
        }
    }
}

/// Freed blocks that wait for work of other streams.
#[derive(Default)]
pub(crate) struct WaitingMemory {
    /// Those of heaps.
    pub small: PartCount,
    /// Those of the pool.
    pub large: PartCount,
    /// Bytes of the heaps' slabs.
    pub slabs: Bytes,
    /// Number of heaps, slabs and blocks that were looked at.
    pub looked_at: u64,
}

impl VirtualPool {
    pub(crate) fn new(
        driver: Arc<dyn Driver>,
        access: Access,
        config: PoolConfig,
        progress: Progress,
    ) -> Result<VirtualPool, vramp_core::ConfigError> {
        let heaps_serve = match config.policy {
            Policy::Mixed(mixed) => {
                Some(HeapsServe { alone: mixed.heap_limit, contended: mixed.contended_heap_limit })
            }
            Policy::Vpmm => None,
        };
        let exec = Executor::new(driver, access, config.page);
        Ok(VirtualPool {
            pool: Pool::new(config)?,
            exec,
            heaps: StreamTable::default(),
            surplus: Arc::default(),
            caches: Vec::new(),
            arenas: Arenas::default(),
            tables: Tables::default(),
            heaps_serve,
            progress,
            of_threads: BTreeMap::new(),
            records_each_free: heaps_serve.is_none(),
        })
    }

    /// Adds a stream; `None` for one that ended. Ids below it that were not added are those of streams
    /// that ended, whose work is over.
    pub(crate) fn add_stream(&mut self, id: StreamId, stream: Option<vramp_driver::Stream>) {
        self.pool.add_stream_as(id);
        if let Some(stream) = stream {
            self.exec.streams.insert(id, stream);
            if self.exec.driver.stream_thread(stream) != StreamThread::Any {
                self.of_threads.insert(id, false);
            }
        }
        self.heaps.insert(id, Arc::new(HeapCell::new(id, Arc::clone(&self.surplus))));
    }

    /// Makes all ids below this number known, as of streams that ended.
    pub(crate) fn skip_streams(&mut self, ids: usize) {
        self.pool.skip_streams(ids);
        self.heaps.skip_to(ids);
    }

    fn heap(&self, stream: StreamId) -> &Arc<HeapCell> {
        self.heaps.get(stream).unwrap_or_else(|| panic!("{stream} has no heap any more"))
    }

    /// Drops the heap of a stream that ended, once it holds no block.
    fn drop_heap_if_done(&mut self, stream: StreamId) {
        let is_done = |heap: &Arc<HeapCell>| heap.has_ended() && heap.lock().slab_count() == 0;
        if self.heaps.get(stream).is_some_and(is_done) {
            self.heaps.remove(stream);
        }
    }

    /// Threads that contend for the pool, if any do.
    fn contenders(&self, contended: bool) -> usize {
        if contended { self.caches.len() } else { 0 }
    }

    /// Allocates, and returns the memory as a manager does.
    #[inline]
    pub(crate) fn find(
        &mut self,
        size: Bytes,
        stream: StreamId,
        contended: bool,
    ) -> Result<Found, Refusal> {
        let placed = self.malloc(size, stream, contended)?;
        let addr = self.exec.addr(placed.block.at);
        Ok(Found { addr, len: placed.block.len, owner: placed.owner, hit: placed.hit })
    }

    /// Allocates at least `size` bytes. No driver call on a hit.
    #[inline]
    pub(crate) fn malloc(
        &mut self,
        size: Bytes,
        stream: StreamId,
        contended: bool,
    ) -> Result<Placed, Refusal> {
        self.record_own_frees(stream);
        let request = Request { size, stream };
        match self.heaps_serve {
            Some(serve) if size <= serve.limit(contended) => {
                self.malloc_in_heap(request, contended)
            }
            _ => self.malloc_in_pool(request, contended),
        }
    }

    #[inline]
    fn malloc_in_pool(&mut self, request: Request, contended: bool) -> Result<Placed, Refusal> {
        let mut attempt = Attempt::new(request).contended_by(self.contenders(contended));
        let block = match self.pool.place(&mut attempt) {
            Step::Placed(block) => block,
            step => self.serve_block(&mut attempt, step)?,
        };
        let owner = Owner::Pool { id: block.id, at: block.at };
        Ok(Placed { block, owner, hit: !attempt.planned() })
    }

    #[inline(never)]
    fn serve_block(&mut self, attempt: &mut Attempt, first: Step) -> Result<Block, Refusal> {
        match self.serve_from(attempt, first)? {
            Served::Block(block) => Ok(block),
            Served::Slab(_) | Served::Backed => unreachable!("the attempt is for a block"),
        }
    }

    #[inline(never)]
    fn malloc_in_heap(
        &mut self,
        Request { size, stream }: Request,
        contended: bool,
    ) -> Result<Placed, Refusal> {
        let heap = Arc::clone(self.heap(stream));
        // A block of zero bytes has an address too.
        let size = size.max(Bytes::new(1));
        let mut hit = true;
        loop {
            let wanted = {
                let mut heap = heap.lock();
                heap.promote(&mut self.pool);
                if let Some(block) = heap.take(size) {
                    let owner = Owner::Heap { id: block.id, at: block.at };
                    return Ok(Placed { block, owner, hit });
                }
                if !heap.make_room() {
                    return Err(Refusal::Host(HostShortage));
                }
                let grows = contended || !self.pool.shares_idle() || heap.is_to_grow_for(size);
                grows.then(|| heap.wanted(size, self.pool.config().page))
            };
            let Some(wanted) = wanted else {
                return match self.malloc_in_pool(Request { size, stream }, contended) {
                    Err(Refusal::Short(shortage, error)) => {
                        self.take_freed(&heap, size).ok_or(Refusal::Short(shortage, error))
                    }
                    placed => placed,
                };
            };
            let least = size.checked_round_up(self.pool.config().page);
            let request = Request { size: least.unwrap_or(size), stream };
            let contenders = self.contenders(contended);
            let mut attempt = Attempt::slab(request, wanted).contended_by(contenders);
            let served = match self.serve(&mut attempt) {
                Err(Refusal::Short(..)) => {
                    if let Some(placed) = self.take_freed(&heap, size) {
                        return Ok(placed);
                    }
                    // A slab that holds just the block is enough.
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

    /// Returns a block of the heap that waited, and that what was tried for a request may have freed.
    fn take_freed(&mut self, heap: &HeapCell, size: Bytes) -> Option<Placed> {
        let mut heap = heap.lock();
        heap.promote(&mut self.pool);
        let block = heap.take(size)?;
        let owner = Owner::Heap { id: block.id, at: block.at };
        Some(Placed { block, owner, hit: false })
    }

    /// Climbs the attempt's ladder until it succeeds or no rung is left.
    pub(crate) fn serve(&mut self, attempt: &mut Attempt) -> Result<Served, Refusal> {
        let first = self.pool.place(attempt);
        self.serve_from(attempt, first)
    }

    /// Goes on from the attempt's first step.
    fn serve_from(&mut self, attempt: &mut Attempt, first: Step) -> Result<Served, Refusal> {
        let (mut full, mut raced, mut asked, mut retried) = (None, 0, false, false);
        let mut in_vain = IN_VAIN_MAX;
        let mut step = first;
        loop {
            match step {
                Step::Placed(block) => return Ok(Served::Block(block)),
                Step::Slab(slab) => return Ok(Served::Slab(slab)),
                Step::Backed => return Ok(Served::Backed),
                Step::Lend(needed) => {
                    self.lend_idle(needed).map_err(Refusal::Driver)?;
                }
                Step::Poll => {
                    self.poll_some(&mut in_vain).map_err(Refusal::Driver)?;
                    if asked {
                        self.shed_ready();
                    }
                }
                Step::Record(mut marks) => {
                    marks.retain(|mark| !self.is_of_other_thread(mark.stream));
                    self.record_and_poll(&marks, &mut in_vain).map_err(Refusal::Driver)?;
                    // The heaps were gathered before.
                    if asked {
                        self.shed_ready();
                    }
                }
                Step::Gather => {
                    if !std::mem::replace(&mut asked, true) {
                        self.note_ended_captures().map_err(Refusal::Driver)?;
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
                    let ordered: Vec<StreamId> = plan.orders().collect();
                    if let Err(error) = self.exec.perform(&mut self.pool, plan) {
                        if is_capacity_error(&error) && attempt.out_of_memory() {
                            full = Some(error);
                        } else if is_capacity_error(&error) {
                            full = Some(error);
                            if !self.may_go_on(attempt, &mut retried)? {
                                let shortage = Box::new(self.pool.shortage(attempt));
                                return Err(Refusal::Short(shortage, full));
                            }
                        } else if optional && error.kind != ErrorKind::DeviceLost {
                            // It was only of use.
                        } else if error.kind == ErrorKind::Capturing && raced < RACES_MAX {
                            // The next plan leaves out the streams that are found capturing.
                            let held = self.note_captures(ordered).map_err(Refusal::Driver)?;
                            raced += u32::from(held == 0);
                            attempt.again();
                        } else {
                            return Err(Refusal::Driver(error));
                        }
                    }
                }
                Step::Short(shortage) => {
                    if !self.may_go_on(attempt, &mut retried)? {
                        return Err(Refusal::Short(Box::new(shortage), full));
                    }
                }
            }
            step = self.pool.place(attempt);
        }
    }

    /// Retries once what failed calls left unusable, before a request fails. Returns true if the request
    /// may find memory now.
    fn may_go_on(&mut self, attempt: &mut Attempt, retried: &mut bool) -> Result<bool, Refusal> {
        let retry = !std::mem::replace(retried, true);
        if !retry || !self.retry_quarantined().map_err(Refusal::Driver)? {
            return Ok(false);
        }
        attempt.after_release();
        Ok(true)
    }

    /// Unmaps and releases what failed calls left unusable. Returns true if some of it is usable again; the
    /// rest stays as it is. A driver call for each such mapping and chunk; none if there are none.
    ///
    /// # Errors
    /// The device is lost.
    pub(crate) fn retry_quarantined(&mut self) -> Result<bool, DriverError> {
        let mut any = false;
        for plans in [Pool::unmap_quarantined, Pool::release_quarantined] {
            for plan in plans(&self.pool) {
                match self.exec.perform(&mut self.pool, plan) {
                    Err(error) if error.is_device_lost() => return Err(error),
                    performed => any |= performed.is_ok(),
                }
            }
        }
        Ok(any)
    }

    /// Returns what failed calls left unusable, and the last of these calls. O(what is).
    pub(crate) fn quarantined(&self) -> QuarantinedMemory {
        let Quarantined { memory, addresses } = self.pool.quarantined();
        QuarantinedMemory { memory, addresses, failed_call: self.exec.quarantined_by.clone() }
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
        debug_assert!(!self.heap(stream).has_ended(), "{stream} ends once");
        // From here on no thread caches a block of the stream.
        self.heap(stream).end();
        self.drain_stream(stream);
        let mark = self.pool.now(stream);
        self.pool.recorded(mark);
        self.pool.end_stream(stream);
        self.exec.streams.remove(stream);
        self.of_threads.remove(&stream);
        self.shed_ended(stream);
        self.exec.events.add_end(&mut self.pool, mark, end);
    }

    /// Frees a block that the pool placed. No driver call, except VPMM's events. The block is free
    /// even if recording that event fails: the next one covers it.
    pub(crate) fn free(&mut self, id: BlockId, stream: StreamId) -> Result<(), DriverError> {
        self.pool.free(id, stream).expect("the allocator looked the block up");
        self.note_freed(stream);
        if self.records_each_free {
            // What a block that others used waits for has no event of its own.
            let mut marks = self.pool.unrecorded_waits();
            let own = self.pool.now(stream);
            if self.pool.is_open(stream) && !marks.contains(&own) {
                marks.push(own);
            }
            for mark in marks {
                self.record(mark)?;
            }
        } else {
            self.record_own_frees(stream);
        }
        Ok(())
    }

    #[inline]
    fn note_freed(&mut self, stream: StreamId) {
        if !self.of_threads.is_empty()
            && let Some(freed) = self.of_threads.get_mut(&stream)
        {
            *freed = true;
        }
    }

    /// Records an event on a thread's default stream if memory was freed there since the last one, for a
    /// call of that thread: no other can. Other streams may use the memory then. Nothing for the only
    /// stream.
    #[inline]
    pub(crate) fn record_own_frees(&mut self, stream: StreamId) {
        if !self.of_threads.is_empty() && self.exec.streams.len() > 1 {
            self.record_thread_frees(stream);
        }
    }

    #[cold]
    fn record_thread_frees(&mut self, stream: StreamId) {
        let freed = self.of_threads.get(&stream).is_some_and(|&freed| freed);
        if !freed || self.is_of_other_thread(stream) {
            return;
        }
        self.of_threads.insert(stream, false);
        let mark = self.pool.now(stream);
        if self.pool.is_open(stream) {
            // A later event covers what this one would have.
            let _ = self.poll_and_record(mark, OWN_EVENTS_MAX);
        }
    }

    /// Returns true for the default stream of another thread: a record of this one would order the streams
    /// of all threads.
    fn is_of_other_thread(&self, stream: StreamId) -> bool {
        self.of_threads.contains_key(&stream)
            && self
                .exec
                .open_stream(stream)
                .is_some_and(|raw| self.exec.driver.stream_thread(raw) == StreamThread::Other)
    }

    /// Frees a block that the heap of `home` placed. No driver call.
    pub(crate) fn free_in_heap(&mut self, id: BlockId, home: StreamId, stream: StreamId) {
        let heap = Arc::clone(self.heap(home));
        let freed = heap.lock().free(id, stream, &mut self.pool);
        self.note_freed(stream);
        if let Freed::Surplus(slab) = freed.expect("the allocator looked the block up") {
            self.pool.take_back(slab, home);
        }
        if heap.has_ended() {
            self.shed_ended(home);
        }
    }

    /// Returns to the pool what the heap of an ended stream has free, and drops the heap if that was
    /// all.
    fn shed_ended(&mut self, stream: StreamId) {
        if let Some(heap) = self.heaps.get(stream) {
            heap.lock().shed(&mut self.pool);
        }
        self.drop_heap_if_done(stream);
    }

    /// Frees the blocks of a stream in all threads' caches.
    fn drain_stream(&mut self, stream: StreamId) {
        for cache in self.caches.clone() {
            cache.drain_stream(stream.index(), |tag, block| self.free_cached(tag, block));
        }
    }

    /// Frees the blocks in the calling thread's own cache.
    #[inline]
    pub(crate) fn drain_own(&mut self, cache: &Cache) {
        cache.drain_own(|tag, block| self.free_cached(tag, block));
    }

    /// Frees the blocks in a thread's cache.
    pub(crate) fn drain(&mut self, cache: &Cache) {
        cache.drain(|tag, block| self.free_cached(tag, block));
    }

    /// Frees the blocks in a thread's cache that are not small.
    #[inline]
    pub(crate) fn drain_large(&mut self, cache: &Cache) {
        cache.drain_large(|tag, block| self.free_cached(tag, block));
    }

    /// Frees the block whose free a thread delayed.
    #[inline]
    pub(crate) fn drain_delayed(&mut self, cache: &Cache) {
        cache.drain_delayed(|tag, block| self.free_cached(tag, block));
    }

    fn free_cached(&mut self, tag: Tag, block: CachedBlock) {
        let stream = StreamId::new(tag.stream() as u32);
        let id = BlockId::from_number(block.id);
        if tag.is_of_pool() {
            self.pool.free(id, stream).expect("a cached block is live in the pool");
            self.note_freed(stream);
        } else {
            self.free_in_heap(id, stream, stream);
        }
    }

    /// Returns to the pool what thread caches and heaps have free. O(heaps that have some).
    pub(crate) fn gather(&mut self) {
        for cache in self.caches.clone() {
            self.drain(&cache);
        }
        let mut heaps = std::mem::take(&mut *self.surplus.lock());
        heaps.extend(self.pool.heaps_with_ready());
        heaps.sort_unstable();
        heaps.dedup();
        self.shed(heaps);
    }

    /// Returns to the pool what heaps have free in which freed blocks wait no more.
    fn shed_ready(&mut self) {
        let heaps = self.pool.heaps_with_ready();
        self.shed(heaps);
    }

    fn shed(&mut self, heaps: Vec<StreamId>) {
        for stream in heaps {
            let Some(heap) = self.heaps.get(stream) else { continue };
            heap.lock().shed(&mut self.pool);
            self.note_freed(stream);
            self.drop_heap_if_done(stream);
        }
    }

    /// Returns true if a plan would order the stream that it is for, and that stream captures a
    /// graph: it would become part of the graph, or end it. One driver call; none for a plan that orders
    /// nothing. A record on another stream that captures is refused when it is made.
    fn invalidates_capture(&mut self, plan: &Plan) -> Result<bool, DriverError> {
        let Some(stream) = plan.orders_for() else { return Ok(false) };
        self.note_captures([stream])?;
        Ok(self.pool.is_held(stream))
    }

    /// Queries streams whether they capture a graph, and returns how many were not known to. One
    /// driver call for each that is open.
    fn note_captures(
        &mut self,
        streams: impl IntoIterator<Item = StreamId>,
    ) -> Result<usize, DriverError> {
        let mut found = 0;
        for id in streams {
            if let Some(stream) = self.exec.open_stream(id) {
                let capturing = self.exec.driver.is_capturing(stream)?;
                found += usize::from(capturing && !self.pool.is_held(id));
                self.pool.hold(id, capturing);
            }
        }
        Ok(found)
    }

    /// Queries the streams that were found capturing whether they still do. One driver call for each
    /// of them.
    pub(crate) fn note_ended_captures(&mut self) -> Result<(), DriverError> {
        self.note_captures(self.pool.held_streams()).map(|_| ())
    }

    /// Queries which work is over, until `in_vain` queries found that it is not, and counts that down.
    fn poll_some(&mut self, in_vain: &mut usize) -> Result<(), DriverError> {
        let driver = Arc::clone(&self.exec.driver);
        let Executor { events, .. } = &mut self.exec;
        events.poll_some(&*driver, &mut self.pool, &self.progress, in_vain)
    }

    /// Queries which work is over. It leaves captures as they are.
    pub(crate) fn poll(&mut self) -> Result<(), DriverError> {
        let driver = Arc::clone(&self.exec.driver);
        self.exec.events.poll(&*driver, &mut self.pool, &self.progress)
    }

    /// Queries which work of some streams is over. Returns true if an event of them is open still.
    pub(crate) fn poll_of(&mut self, streams: &BTreeSet<StreamId>) -> Result<bool, DriverError> {
        let driver = Arc::clone(&self.exec.driver);
        let Executor { events, .. } = &mut self.exec;
        let mut any_open = false;
        for &stream in streams {
            any_open |= events.poll_of(&*driver, &mut self.pool, &self.progress, stream)?;
        }
        Ok(any_open)
    }

    /// Records an event for `mark`, unless its stream captures: a later one covers its work.
    pub(crate) fn record(&mut self, mark: Mark) -> Result<(), DriverError> {
        match self.exec.record(mark)? {
            true => self.pool.recorded(mark),
            false => self.pool.hold(mark.stream, true),
        }
        Ok(())
    }

    /// Records events for `marks`, except on streams that capture, then queries which work is over.
    fn record_and_poll(&mut self, marks: &[Mark], in_vain: &mut usize) -> Result<(), DriverError> {
        for &mark in marks {
            self.record(mark)?;
        }
        self.poll_some(in_vain)
    }

    /// Records an event for `mark`, after each `every` of them with a query which work of its stream is
    /// over.
    pub(crate) fn poll_and_record(&mut self, mark: Mark, every: usize) -> Result<(), DriverError> {
        let driver = Arc::clone(&self.exec.driver);
        let Executor { events, .. } = &mut self.exec;
        events.poll_after(&*driver, &mut self.pool, &self.progress, mark.stream, every)?;
        self.record(mark)
    }

    /// Unmaps retired mappings whose work is over. No driver call if there are none; else a query
    /// for each pending event and an unmap for each row of them.
    pub(crate) fn sweep_retired(&mut self) -> Result<(), DriverError> {
        match self.unmap_retired() {
            Err(error) if error.kind == ErrorKind::DeviceLost => Err(error),
            // The request does not depend on it.
            _ => Ok(()),
        }
    }

    /// Unmaps retired mappings whose work is over, and returns true if none are left.
    pub(crate) fn unmap_retired(&mut self) -> Result<bool, DriverError> {
        if self.pool.has_retired() {
            self.poll()?;
            if let Some(plan) = self.pool.unmap() {
                self.exec.perform(&mut self.pool, plan)?;
            }
        }
        Ok(!self.pool.has_retired())
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

    /// Returns the counts of driver work. What left the card in a sleep is not reserved.
    pub(crate) fn counters(&self) -> Counters {
        let counters = self.pool.counters();
        let asleep = self.exec.asleep.as_ref().map_or(Bytes::ZERO, Asleep::released);
        Counters { reserved: counters.reserved - asleep, ..counters }
    }

    /// Returns idle memory to the card until no more than `to` is reserved, or nothing more is
    /// idle, and whatever failed calls left unusable. Three driver calls and more for each chunk.
    pub(crate) fn trim(&mut self, to: Bytes) -> Result<(), DriverError> {
        if self.exec.asleep.is_some() {
            return Ok(());
        }
        self.retry_quarantined()?;
        self.note_ended_captures()?;
        self.lend_idle(Bytes::MAX)?;
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

    /// Returns the events of the work that uses freed memory, for waits on the host without the pool's
    /// lock. Two driver calls for each stream with such work.
    ///
    /// None where an external source tells what is over.
    pub(crate) fn begin_waits(&mut self) -> Result<Vec<Awaited>, DriverError> {
        if let Progress::External(_) = self.progress {
            return Ok(Vec::new());
        }
        self.record_parked()?;
        self.find_idle()?;
        let marks: Vec<Mark> = self.pool.pending().collect();
        Ok(marks.into_iter().filter_map(|mark| self.exec.events.begin_wait(mark)).collect())
    }

    /// Ends such waits, each with true if it found the work over.
    pub(crate) fn end_waits(&mut self, waits: Vec<(Awaited, bool)>) {
        let driver = Arc::clone(&self.exec.driver);
        for (awaited, is_over) in waits {
            self.exec.events.end_wait(&*driver, &mut self.pool, awaited, is_over);
        }
    }

    /// Returns true if `id` is a live block that begins at `at`.
    pub(crate) fn is_live(&self, id: BlockId, at: PoolAddr) -> bool {
        self.pool.block(id).is_ok_and(|block| block.at == at)
    }

    pub(crate) fn census(&self) -> Census {
        let mut census = self.pool.census();
        for (_, heap) in self.heaps.iter() {
            heap.lock().count_into(&mut census);
        }
        let cached: u64 = self.caches.iter().map(|cache| cache.bytes()).sum();
        census.at_hand = Bytes::new(cached).min(census.used);
        census.used -= census.at_hand;
        census
    }

    /// Returns freed memory by its use. O(n).
    pub(crate) fn free_memory(&self) -> FreeMemory {
        let pool = self.pool.free_parts();
        let mut free = FreeMemory {
            waiting: [PartCount::default(), pool.waiting],
            split: [PartCount::default(), pool.split],
            whole_slabs: Bytes::ZERO,
        };
        let add = |to: &mut PartCount, count: PartCount| {
            to.parts += count.parts;
            to.bytes += count.bytes;
        };
        for (_, heap) in self.heaps.iter() {
            let parts = heap.lock().free_parts();
            add(&mut free.waiting[0], parts.waiting);
            add(&mut free.split[0], parts.split);
            free.whole_slabs += parts.whole.bytes;
        }
        for cache in &self.caches {
            for (of, count) in free.split.iter_mut().zip(cache.held()) {
                add(of, count);
            }
        }
        let census = self.pool.census();
        let in_arenas = self.arenas.iter().map(|(_, state)| state.arena.census().used).sum();
        let free_in_arenas = census.arenas.saturating_sub(in_arenas);
        free.split[1].bytes += free_in_arenas + census.quarantined_memory;
        free
    }

    /// Returns freed blocks that wait for work of other streams. O(n) in these blocks and in the streams.
    pub(crate) fn waiting_memory(&self) -> WaitingMemory {
        let mut found = WaitingMemory::default();
        for (stream, heap) in self.heaps.iter() {
            let heap = heap.lock();
            found.looked_at += 1;
            found.slabs += heap.slab_bytes();
            if self.pool.waiting_in_heap(stream) > 0 {
                let waiting = heap.free_parts().waiting;
                found.small.parts += waiting.parts;
                found.small.bytes += waiting.bytes;
                found.looked_at += heap.slab_count() as u64;
            }
        }
        found.large = self.pool.waiting_parts();
        found.looked_at += found.large.parts;
        found
    }

    pub(crate) fn audit(&self) -> Result<(), Inconsistency> {
        self.pool.audit()?;
        let mut slabs = 0;
        for (_, heap) in self.heaps.iter() {
            let heap = heap.lock();
            heap.audit(&self.pool)?;
            if heap.may_shed() && !heap.listed.is_listed {
                let what = format!("the heap of {} is not listed for a gather", heap.stream());
                return Err(Inconsistency { what });
            }
            slabs += heap.slab_count();
        }
        for (_, state) in self.arenas.iter() {
            state.arena.audit()?;
        }
        self.audit_tables()?;
        if slabs != self.pool.slab_count() {
            let known = self.pool.slab_count();
            let what = format!("the pool gave {known} slabs, heaps have {slabs}");
            return Err(Inconsistency { what });
        }
        Ok(())
    }
}

/// Freed memory of a virtual pool: of heaps and small cached blocks, and of all else.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FreeMemory {
    /// Freed blocks that wait for work of other streams.
    pub waiting: [PartCount; 2],
    /// Free memory that a trim cannot release.
    pub split: [PartCount; 2],
    /// Free memory in slabs that hold no block.
    pub whole_slabs: Bytes,
}

/// Outcome of an attempt that succeeded.
pub(crate) enum Served {
    Block(Block),
    Slab(Slab),
    /// The arena is backed.
    Backed,
}
