//! The allocator that people use: one set of verbs before several managers.
//!
//! One malloc, from top to bottom:
//!
//! 1. the thread's cache: a block of the same length freed a moment ago (`cache.rs`);
//! 2. the stream's heap, for small requests (`vramp_core::StreamHeap`, its own lock);
//! 3. the allocator's lock (`shared.rs`), and the manager behind it (`manager.rs`);
//! 4. where that is short: handlers, waiting, and at last the report (`watch.rs`, `error.rs`).
//!
//! A free goes the same way. Locks are taken in the order group, allocator, heap.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use vramp_core::{
    BlockId, Bytes, Census, Counters, DeviceAddr, Freed, Inconsistency, Mark, Shortage, Spot,
    StreamId, TorchPool, TorchSegment,
};
use vramp_driver::{Driver, DriverError, Stream};

use crate::allocation::{Allocation, Owner};
use crate::cache::{Kept, Tag};
use crate::config::Config;
use crate::error::{
    AllocError, CreateError, FreeError, PoolHolding, Report, StreamError, Tagged, UseError,
};
use crate::group::Group;
use crate::local::{self, Local};
use crate::manager::{Found, Manager};
use crate::shared::{Inner, Shared};
use crate::virtual_pool::{HeapsServe, Refusal};
use crate::watch::{Event, Registration};

/// What happened so far, over all the managers behind an allocator.
///
/// With several threads `live_peak` may miss a moment between two of their misses; all else is
/// exact.
pub type Stats = Counters;

/// What an allocation is for, as [`Allocator::tag`] numbered it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TagId(u16);

/// So often a request is tried again because a handler gave something.
const ROUNDS_MOST: u32 = 64;

/// Memory of one device. Safe to share between threads, and made for it: a thread that works on a
/// stream of its own shares no lock with others as long as it hits.
///
/// Streams belong to the allocator: [`Allocator::create_stream`] makes one, and work on memory must
/// be queued on the stream it is allocated for, freed on, or noted with [`Allocator::record_use`].
/// Dropping the allocator waits for its streams and gives everything back; [`Allocator::close`]
/// does the same and tells what failed.
pub struct Allocator {
    shared: Arc<Shared>,
    config: Config,
}

impl Allocator {
    /// An allocator on a device. Takes no memory yet, unless the configuration says so.
    pub fn new(driver: Arc<dyn Driver>, config: Config) -> Result<Allocator, CreateError> {
        let group = Arc::new(Group::new(config.limit));
        Allocator::in_group("main".to_owned(), driver, config, group)
    }

    /// A pool of its own on the same device, isolated from this one: memory never goes from one to
    /// the other but through the card. Dropping it, or closing it, releases all it holds as one.
    ///
    /// It has the configuration of this one, shares its streams (an id means the same stream in
    /// both), and what both hold together counts against the limit.
    pub fn create_pool(&self, name: &str) -> Result<Allocator, CreateError> {
        let config = Config { prefill: Bytes::ZERO, prefill_pages: None, ..self.config.clone() };
        let group = Arc::clone(&self.shared.group);
        Allocator::in_group(name.to_owned(), Arc::clone(&self.shared.driver), config, group)
    }

    fn in_group(
        name: String,
        driver: Arc<dyn Driver>,
        config: Config,
        group: Arc<Group>,
    ) -> Result<Allocator, CreateError> {
        if let Some(threshold) = config.garbage_collection_threshold
            && !(threshold > 0.0 && threshold < 1.0)
        {
            return Err(CreateError::Threshold { threshold });
        }
        let manager = Manager::new(&driver, &config)?;
        let page = config.page.unwrap_or(driver.info().limits.page);
        let prefill = config.prefill_bytes(page);
        let shared = Shared::new(name, driver, manager, group);
        let allocator = Allocator { shared, config };
        allocator.prefill_at_start(prefill)?;
        Ok(allocator)
    }

    fn prefill_at_start(&self, prefill: Option<Bytes>) -> Result<(), CreateError> {
        let refused = |prefill, reason: &str| {
            Err(CreateError::Prefill { prefill, reason: reason.to_owned() })
        };
        let Some(prefill) = prefill else {
            return refused(Bytes::new(u64::MAX), "the number of pages does not fit any memory");
        };
        if prefill.is_zero() {
            return Ok(());
        }
        let stream = self.create_stream()?;
        match self.prefill(prefill, stream) {
            Ok(()) => Ok(()),
            Err(error) => refused(prefill, &error.to_string()),
        }
    }

    /// The device.
    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.shared.driver
    }

    /// What people call it: `main`, or the name given to [`Allocator::create_pool`].
    pub fn name(&self) -> &str {
        &self.shared.name
    }

    // --- streams ---

    /// A new stream on the device. One driver call.
    pub fn create_stream(&self) -> Result<StreamId, DriverError> {
        let stream = self.shared.driver.create_stream()?;
        Ok(self.shared.group.add_stream(stream, true))
    }

    /// Makes a stream of the device known that was made elsewhere. No driver call. It is not
    /// destroyed here; tell [`Allocator::destroy_stream`] before its owner does so.
    pub fn adopt_stream(&self, stream: Stream) -> StreamId {
        self.shared.group.add_stream(stream, false)
    }

    /// Ends a stream: no request may be made for it any more. Its free memory goes to all others as
    /// its work completes, without waiting. Blocks made for it may be used and freed as before.
    /// An event record in each pool that shares the stream, and one call to destroy it.
    ///
    /// # Errors
    /// [`StreamError::Unknown`] for a stream that is not known here, or was ended before. Where
    /// recording an event fails the stream is as before.
    pub fn destroy_stream(&self, stream: StreamId) -> Result<(), StreamError> {
        let known = self.shared.group.stream(stream).filter(|known| !known.ended);
        known.ok_or(StreamError::Unknown(stream))?;
        for member in self.shared.group.members() {
            let mut inner = member.lock()?;
            let Some(raw) = inner.open_stream(stream, &member.group) else { continue };
            inner.manager.end_stream(stream, raw)?;
            inner.ended[stream.index()] = true;
        }
        Ok(self.shared.group.end_stream(stream, &*self.shared.driver)?)
    }

    /// The driver's own name of a stream, to queue work on it. `None` if it is unknown here or
    /// ended.
    pub fn stream(&self, id: StreamId) -> Option<Stream> {
        self.shared.group.stream(id).filter(|known| !known.ended).map(|known| known.raw)
    }

    // --- memory ---

    /// At least `size` bytes for work on `stream`. A request for nothing gets a unique address too.
    ///
    /// Cost: no driver call for memory that the stream itself freed, a query for each open event
    /// where another stream's is looked for, one call in the driver's pool. A miss costs
    /// one create, map and set-access for each new chunk, a map and a set-access for each moved one.
    ///
    /// # Errors
    /// [`AllocError::OutOfMemory`] tells who holds what and what to do; any other driver error
    /// leaves the allocator as it was.
    #[inline]
    pub fn malloc(&self, size: Bytes, stream: StreamId) -> Result<Allocation, AllocError> {
        if let Some(serve) = self.shared.heaps_serve
            && let Some(hit) =
                local::with(self.shared.number, |local| self.hit(local, size, stream, serve))
            && let Some((found, recycled)) = hit
        {
            let allocation = self.allocation(found, size, stream, recycled, None);
            if self.shared.watchers.is_watched() {
                self.shared.watchers.tell(&Event::Allocated(&allocation));
            }
            return Ok(allocation);
        }
        self.malloc_shared(size, stream, None)
    }

    /// The same, counted under a tag. Takes the allocator's lock, as the free does.
    pub fn malloc_tagged(
        &self,
        size: Bytes,
        stream: StreamId,
        tag: TagId,
    ) -> Result<Allocation, AllocError> {
        self.malloc_shared(size, stream, Some(tag))
    }

    /// What the thread has at hand, or the stream's heap; true for what was at hand. The allocation
    /// is made of it in its final place: copying one costs as much as all the rest of a hit.
    #[inline]
    fn hit(
        &self,
        local: &Local,
        size: Bytes,
        stream: StreamId,
        serve: HeapsServe,
    ) -> Option<(Found, bool)> {
        let grains = size.count().div_ceil(512).max(1);
        let (addr, owner, len, recycled) = match local.cache.take(Tag::new(stream.index(), grains)?)
        {
            Some((tag, Kept { addr, at, id })) => {
                let (id, at) = (BlockId::from_number(id), Spot::from_number(at));
                let owner = match tag.is_of_pool() {
                    true => Owner::Pool { id, at },
                    false => Owner::Heap { id, at },
                };
                (DeviceAddr::new(addr), owner, Bytes::new(grains * 512), true)
            }
            None if size <= serve.limit(self.shared.is_contended()) => {
                let heap = local.heaps.get(stream.index())?;
                let block = heap.lock().take(size)?;
                let owner = Owner::Heap { id: block.id, at: block.at };
                // The heap's slab came through this or another thread; here its span may be new.
                let addr = local.addr(block.at).unwrap_or_else(|| self.shared.addr(block.at));
                local.cache.made(grains, addr.number());
                (addr, owner, block.len, false)
            }
            None => return None,
        };
        local.tally.placed(len, size, true);
        Some((Found { addr, len, owner, hit: true }, recycled))
    }

    #[inline]
    fn allocation(
        &self,
        found: Found,
        requested: Bytes,
        stream: StreamId,
        recycled: bool,
        tag: Option<TagId>,
    ) -> Allocation {
        Allocation {
            addr: found.addr,
            len: found.len,
            requested,
            stream,
            owner: found.owner,
            allocator: self.shared.number,
            tag: tag.map_or(0, |TagId(tag)| tag),
            recycled,
            noted: AtomicBool::new(false),
        }
    }

    /// The way through the allocator's lock, with everything that may be done about a shortage.
    #[cold]
    fn malloc_shared(
        &self,
        size: Bytes,
        stream: StreamId,
        tag: Option<TagId>,
    ) -> Result<Allocation, AllocError> {
        let mut deadline = None;
        let mut rounds = 0;
        loop {
            let (shortage, failed_call) = match self.try_malloc(size, stream, tag)? {
                Tried::Placed(allocation) => {
                    self.shared.watchers.tell(&Event::Allocated(&allocation));
                    return Ok(allocation);
                }
                Tried::Short(shortage, failed_call) => (shortage, failed_call),
            };
            self.shared.watchers.tell(&Event::Short(&shortage));
            rounds += 1;
            if rounds == 1 && self.trim_others()? {
                continue;
            }
            if rounds <= ROUNDS_MOST && self.shared.watchers.ask(&shortage) {
                self.shared.lock()?.retries += 1;
                continue;
            }
            let now = Instant::now();
            let deadline = *deadline.get_or_insert(now + self.config.patience);
            let left = deadline.saturating_duration_since(now);
            if left > Duration::ZERO {
                let mut inner = self.shared.lock()?;
                inner.retries += 1;
                self.shared.wait_for_memory(inner, left);
                continue;
            }
            self.shared.starving.store(false, Ordering::Relaxed);
            let report = self.report(shortage, failed_call, stream);
            self.shared.watchers.tell(&Event::OutOfMemory(&report));
            return Err(AllocError::OutOfMemory(Box::new(report)));
        }
    }

    /// Gives idle memory of the group's other pools back to the card. True if there was some.
    fn trim_others(&self) -> Result<bool, AllocError> {
        let mut given = false;
        for member in self.shared.group.members() {
            if member.number == self.shared.number {
                continue;
            }
            let mut inner = member.lock()?;
            let before = inner.manager.reserved();
            let trimmed = inner.manager.trim(Bytes::ZERO);
            given |= inner.manager.reserved() < before;
            member.reserved.store(inner.manager.reserved().count(), Ordering::Relaxed);
            trimmed?;
        }
        Ok(given)
    }

    fn try_malloc(
        &self,
        size: Bytes,
        stream: StreamId,
        tag: Option<TagId>,
    ) -> Result<Tried, AllocError> {
        let share = self.shared.group.share(self.shared.number);
        let mut guard = self.shared.lock()?;
        let inner = &mut *guard;
        let raw = inner
            .open_stream(stream, &self.shared.group)
            .ok_or(AllocError::UnknownStream(stream))?;
        if let Some(TagId(tag)) = tag
            && inner.tags.len() < usize::from(tag)
        {
            return Err(AllocError::UnknownTag);
        }
        if let Some(pool) = inner.manager.virtual_pool_mut() {
            // What this thread has at hand in other sizes is free memory to the pool.
            local::with(self.shared.number, |local| pool.drain(&local.cache));
        }
        if let Some(limit) = self.shared.group.limit() {
            let elsewhere = share.as_ref().map_or(Bytes::ZERO, |&(_, elsewhere)| elsewhere);
            inner.manager.set_limit(Some(limit), elsewhere);
        }
        let watched = self.shared.watchers.is_watched();
        let before = watched.then(|| inner.manager.known_counters()).flatten();
        let found = inner.manager.malloc(size, stream, raw, self.shared.is_contended());
        let outcome = match found {
            Ok(found) => {
                let (hit, addr, len) = (found.hit, found.addr, found.len);
                inner.count(self.shared.number, |tally| tally.placed(len, size, hit));
                if let Some(TagId(tag)) = tag {
                    let tagged = &mut inner.tags[usize::from(tag) - 1];
                    tagged.live += size;
                    tagged.peak = tagged.peak.max(tagged.live);
                    tagged.blocks += 1;
                }
                // A heap's new slab may lie in a span that this thread has not heard of; a thread
                // that comes for the first time gets its part.
                self.shared.refresh(inner);
                let grains = len.count() / 512;
                local::with(self.shared.number, |local| local.cache.made(grains, addr.number()));
                if !hit {
                    self.collect_garbage(inner);
                }
                Tried::Placed(self.allocation(found, size, stream, false, tag))
            }
            Err(Refusal::Driver(error)) => return Err(AllocError::Driver(error)),
            Err(Refusal::Short(shortage, failed_call)) => Tried::Short(shortage, failed_call),
        };
        self.note_reserved(inner);
        let after = watched.then(|| inner.manager.known_counters()).flatten();
        drop(guard);
        if let (Some(before), Some(after)) = (before, after) {
            self.tell_changes(&before, &after);
        }
        Ok(outcome)
    }

    /// Gives idle memory back where the threshold is passed.
    fn collect_garbage(&self, inner: &mut Inner) {
        let Some(threshold) = self.config.garbage_collection_threshold else { return };
        let whole = self.shared.group.limit().unwrap_or(self.shared.driver.info().limits.memory);
        let keep = Bytes::new((whole.count() as f64 * threshold) as u64);
        if inner.manager.reserved() > keep {
            // The request itself was served: what a failed trim leaves, the next one finds.
            let _ = inner.manager.trim(keep);
        }
    }

    fn note_reserved(&self, inner: &Inner) {
        self.shared.reserved.store(inner.manager.reserved().count(), Ordering::Relaxed);
    }

    fn tell_changes(&self, before: &Counters, after: &Counters) {
        let chunks = after.chunks_moved + after.chunks_reactivated
            - before.chunks_moved
            - before.chunks_reactivated;
        if chunks > 0 {
            let bytes = after.moved - before.moved;
            self.shared.watchers.tell(&Event::Remapped { chunks, bytes });
        }
        if after.reserved > before.reserved {
            let bytes = after.reserved - before.reserved;
            self.shared.watchers.tell(&Event::Grown { bytes });
        }
        if after.reserved < before.reserved {
            let bytes = before.reserved - after.reserved;
            self.shared.watchers.tell(&Event::Shrunk { bytes });
        }
    }

    fn report(
        &self,
        shortage: Shortage,
        failed_call: Option<DriverError>,
        stream: StreamId,
    ) -> Report {
        let (holders, mut tags) = {
            let mut inner = self.shared.lock_anyway();
            inner.ooms += 1;
            (inner.holders(), inner.tags.clone())
        };
        tags.retain(|tag| tag.live > Bytes::ZERO);
        tags.sort_by_key(|tag| std::cmp::Reverse(tag.live));
        let members = self.shared.group.members();
        let others = members.iter().filter(|member| member.number != self.shared.number);
        let others = others.map(|member| PoolHolding {
            name: member.name.clone(),
            reserved: Bytes::new(member.reserved.load(Ordering::Relaxed)),
        });
        Report {
            shortage,
            stream,
            pool: self.shared.name.clone(),
            holders,
            tags,
            others: others.collect(),
            card: self.shared.driver.memory_info().ok(),
            failed_call,
        }
    }

    /// Notes that work queued on `stream` so far uses the allocation. No driver call.
    pub fn record_use(&self, allocation: &Allocation, stream: StreamId) -> Result<(), UseError> {
        let mut inner = self.shared.lock()?;
        inner.open_stream(stream, &self.shared.group).ok_or(UseError::UnknownStream(stream))?;
        if !self.owns(&inner, allocation) {
            return Err(UseError::Foreign(allocation.addr));
        }
        allocation.noted.store(true, Ordering::Relaxed);
        inner.manager.record_use(allocation, stream);
        Ok(())
    }

    /// Takes the memory back. All work on it must be queued on `stream`, ordered before its present
    /// end, or noted with [`Allocator::record_use`]; `stream` may be another one than the
    /// allocation's, and one that was ended.
    ///
    /// No driver call in the default preset. Never waits.
    ///
    /// # Errors
    /// [`FreeError::Foreign`] and [`FreeError::UnknownStream`] give the allocation back and leave
    /// everything as it was.
    #[inline]
    pub fn free(&self, allocation: Allocation, stream: StreamId) -> Result<(), FreeError> {
        if self.shared.heaps_serve.is_some()
            && stream == allocation.stream
            && allocation.allocator == self.shared.number
            && allocation.tag == 0
            && !allocation.is_noted()
            && !self.shared.starving.load(Ordering::Relaxed)
            && local::with(self.shared.number, |local| self.keep(local, &allocation))
                .is_some_and(|kept| kept)
        {
            if self.shared.watchers.is_watched() {
                self.tell_freed(&allocation, stream);
            }
            return Ok(());
        }
        self.free_shared(allocation, stream)
    }

    fn tell_freed(&self, allocation: &Allocation, stream: StreamId) {
        let Allocation { addr, len, requested, .. } = *allocation;
        self.shared.watchers.tell(&Event::Freed { addr, len, requested, stream });
    }

    /// Keeps a block at hand, or gives it to its heap.
    #[inline]
    fn keep(&self, local: &Local, allocation: &Allocation) -> bool {
        let grains = allocation.len.count() / 512;
        let (id, at, of_pool) = match allocation.owner {
            Owner::Pool { id, at } => (id, at, true),
            Owner::Heap { id, at } => (id, at, false),
            Owner::Driver { .. } | Owner::Caching { .. } => return false,
        };
        let Some(tag) = Tag::new(allocation.stream.index(), grains) else { return false };
        let tag = if of_pool { tag.of_pool() } else { tag };
        let kept = Kept { addr: allocation.addr.number(), at: at.number(), id: id.number() };
        if !local.cache.put(tag, kept) {
            if of_pool {
                return false;
            }
            let Some(heap) = local.heaps.get(allocation.stream.index()) else { return false };
            let freed = heap.lock().free_in_order(id).expect("an allocation is freed once");
            if let Freed::Surplus(slab) = freed {
                let mut inner = self.shared.lock_anyway();
                let pool = inner.manager.virtual_pool_mut().expect("a heap has a pool");
                pool.pool.take_back(slab, allocation.stream);
            }
        }
        local.tally.freed(allocation.len, allocation.requested);
        true
    }

    #[cold]
    fn free_shared(&self, allocation: Allocation, stream: StreamId) -> Result<(), FreeError> {
        let mut guard = self.shared.lock()?;
        let inner = &mut *guard;
        if inner.any_stream(stream, &self.shared.group).is_none() {
            return Err(FreeError::UnknownStream { stream, allocation });
        }
        if !self.owns(inner, &allocation) {
            return Err(FreeError::Foreign(allocation));
        }
        if let Some(pool) = inner.manager.virtual_pool_mut() {
            local::with(self.shared.number, |local| pool.drain_last(&local.cache));
        }
        let freed = inner.manager.free(&allocation, stream, &inner.streams);
        // A driver's block that could not be freed is still held there.
        let held =
            matches!(allocation.owner, Owner::Driver { .. }) && self.owns(inner, &allocation);
        if !held {
            let (len, requested) = (allocation.len, allocation.requested);
            inner.count(self.shared.number, |tally| tally.freed(len, requested));
            if let Some(tag) = usize::from(allocation.tag).checked_sub(1) {
                inner.tags[tag].live -= requested;
                inner.tags[tag].blocks -= 1;
            }
        }
        self.shared.refresh(inner);
        drop(guard);
        self.shared.memory_came_back();
        if self.shared.watchers.is_watched() {
            self.tell_freed(&allocation, stream);
        }
        Ok(freed?)
    }

    /// False for what another allocator handed out.
    fn owns(&self, inner: &Inner, allocation: &Allocation) -> bool {
        allocation.allocator == self.shared.number && inner.manager.owns(allocation)
    }

    /// Adds `len` bytes ahead of demand, free for `stream`.
    pub fn prefill(&self, len: Bytes, stream: StreamId) -> Result<(), AllocError> {
        let mut inner = self.shared.lock()?;
        inner.open_stream(stream, &self.shared.group).ok_or(AllocError::UnknownStream(stream))?;
        let prefilled = inner.manager.prefill(len, stream);
        self.note_reserved(&inner);
        drop(inner);
        match prefilled {
            Ok(()) => Ok(()),
            Err(Refusal::Driver(error)) => Err(AllocError::Driver(error)),
            Err(Refusal::Short(shortage, failed_call)) => {
                let report = self.report(shortage, failed_call, stream);
                Err(AllocError::OutOfMemory(Box::new(report)))
            }
        }
    }

    /// Gives idle memory back to the card until the allocator holds no more than `to`, or nothing
    /// more is idle. Never waits.
    pub fn trim(&self, to: Bytes) -> Result<(), AllocError> {
        let mut inner = self.shared.lock()?;
        self.shared.refresh(&mut inner);
        let before = inner.manager.reserved();
        let trimmed = inner.manager.trim(to);
        let after = inner.manager.reserved();
        self.note_reserved(&inner);
        drop(inner);
        if after < before && self.shared.watchers.is_watched() {
            self.shared.watchers.tell(&Event::Shrunk { bytes: before - after });
        }
        Ok(trimmed?)
    }

    /// Gives all idle memory back to the card, as `torch.cuda.empty_cache` does: what PyTorch's
    /// allocator cannot give, because a live block lies in the same segment, is given too.
    pub fn empty_cache(&self) -> Result<(), AllocError> {
        self.trim(Bytes::ZERO)
    }

    // --- limits ---

    /// The most physical memory that this allocator and its pools may hold together.
    pub fn limit(&self) -> Option<Bytes> {
        self.shared.group.limit()
    }

    /// Changes the limit. What is idle above it is given back at once; what is in use stays, and
    /// nothing more is taken until the allocator is below it.
    pub fn set_limit(&self, limit: Option<Bytes>) -> Result<(), AllocError> {
        self.shared.group.set_limit(limit);
        for member in self.shared.group.members() {
            let mut inner = member.lock()?;
            inner.manager.set_limit(limit, Bytes::ZERO);
        }
        match limit {
            Some(limit) => self.trim(limit),
            None => Ok(()),
        }
    }

    /// The limit as a share of the card's memory, as PyTorch's
    /// `set_per_process_memory_fraction` has it.
    ///
    /// # Errors
    /// [`AllocError::Fraction`] unless it is above 0 and at most 1.
    pub fn set_memory_fraction(&self, fraction: f64) -> Result<(), AllocError> {
        if !(fraction > 0.0 && fraction <= 1.0) {
            return Err(AllocError::Fraction(fraction));
        }
        let memory = self.shared.driver.info().limits.memory.count();
        self.set_limit(Some(Bytes::new((memory as f64 * fraction) as u64)))
    }

    // --- who watches, who helps ---

    /// Tells `observer` of every event from now on. It is called without a lock, by the thread that
    /// caused the event, and may use the allocator; what it does with it is told to it, too.
    pub fn observe(&self, observer: impl Fn(&Event<'_>) + Send + Sync + 'static) -> Registration {
        self.shared.watchers.observe(Arc::new(observer))
    }

    /// Asks `handler` for memory before a request fails. It is called without a lock and may free
    /// allocations; it returns true if it gave something, and then the request is tried again.
    pub fn on_shortage(
        &self,
        handler: impl Fn(&Shortage) -> bool + Send + Sync + 'static,
    ) -> Registration {
        self.shared.watchers.handle(Arc::new(handler))
    }

    /// Takes an observer or handler back. False if it was taken back before.
    pub fn forget(&self, registration: Registration) -> bool {
        self.shared.watchers.remove(registration)
    }

    // --- tags ---

    /// The tag of this name, made if it is new. At most 65,535 of them: the last one serves all
    /// further names.
    pub fn tag(&self, name: &str) -> TagId {
        let mut inner = self.shared.lock_anyway();
        let known = inner.tags.iter().position(|tag| tag.name == name);
        let index = known.unwrap_or_else(|| {
            if inner.tags.len() < usize::from(u16::MAX) {
                inner.tags.push(Tagged {
                    name: name.to_owned(),
                    live: Bytes::ZERO,
                    peak: Bytes::ZERO,
                    blocks: 0,
                });
            }
            inner.tags.len() - 1
        });
        TagId(index as u16 + 1)
    }

    // --- looking in ---

    /// What happened so far. A driver call where the driver's pool is part of it.
    pub fn stats(&self) -> Result<Stats, DriverError> {
        let inner = self.shared.lock_anyway();
        let counts = inner.counts();
        let by_driver = inner.manager.placed_by_driver();
        Ok(Stats {
            live: counts.live(),
            live_peak: counts.live_peak(),
            hits: counts.placed() - counts.misses(),
            misses: counts.misses() - by_driver,
            placed: counts.placed(),
            freed: counts.freed(),
            ..inner.manager.counters()?
        })
    }

    /// Bytes that users asked for and hold. No driver call.
    pub fn live(&self) -> Bytes {
        self.shared.lock_anyway().counts().live()
    }

    /// Where every byte of the virtual pool is; empty for the driver's pool. O(n).
    pub fn census(&self) -> Census {
        self.shared.lock_anyway().manager.census()
    }

    /// Checks every invariant of the virtual pool and its heaps. O(n log n).
    pub fn audit(&self) -> Result<(), Inconsistency> {
        self.shared.lock_anyway().manager.audit()
    }

    /// Lets `look` see the core's state: for prints, layouts and tests. `None` for the driver's
    /// pool.
    pub fn inspect<R>(&self, look: impl FnOnce(&vramp_core::Pool) -> R) -> Option<R> {
        let mut inner = self.shared.lock_anyway();
        self.learn_streams(&mut inner);
        inner.manager.virtual_pool().map(|pool| look(&pool.pool))
    }

    fn learn_streams(&self, inner: &mut Inner) {
        let unknown = StreamId::new(u32::MAX);
        let _ = inner.any_stream(unknown, &self.shared.group);
    }

    /// The mark up to which memory that is freed on `stream` now is in use. `None` for the driver's
    /// pool and for unknown streams.
    pub fn mark(&self, stream: StreamId) -> Option<Mark> {
        let of_torch = || self.inspect_torch(|pool| pool.now(stream));
        let of_pool = self.inspect(|pool| pool.has_stream(stream).then(|| pool.now(stream)));
        of_pool.unwrap_or_else(of_torch)
    }

    /// Lets PyTorch's allocator begin with recorded segments: before the first request, see
    /// [`TorchPool::restore`]. One allocation of the driver's for each. Returns the blocks that were
    /// in users' hands, in order; nothing for other presets and impossible segments.
    pub fn restore(
        &self,
        segments: &[TorchSegment],
    ) -> Result<Vec<Option<Allocation>>, AllocError> {
        let mut guard = self.shared.lock()?;
        let inner = &mut *guard;
        self.learn_streams(inner);
        self.shared.refresh(inner);
        let Some(caching) = inner.manager.caching_mut() else { return Ok(Vec::new()) };
        let found = caching.restore(segments)?;
        let blocks = segments.iter().flat_map(|segment| {
            segment.held.iter().map(|&(_, requested)| (segment.stream, requested))
        });
        let mut restored = Vec::new();
        for ((stream, requested), found) in blocks.zip(found) {
            restored.push(found.map(|found| {
                let len = found.len;
                inner.count(self.shared.number, |tally| tally.placed(len, requested, false));
                self.allocation(found, requested, stream, false, None)
            }));
        }
        Ok(restored)
    }

    /// Lets `look` see the state of PyTorch's allocator: its statistics, what the last request did
    /// on the device. `None` for other presets.
    pub fn inspect_torch<R>(&self, look: impl FnOnce(&TorchPool) -> R) -> Option<R> {
        let mut inner = self.shared.lock_anyway();
        self.learn_streams(&mut inner);
        inner.manager.caching().map(|caching| look(&caching.pool))
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    // --- the end ---

    /// Waits for the allocator's streams and gives everything back to the device. The streams go
    /// with the last pool that shares them.
    ///
    /// # Errors
    /// The first call that failed; the others were made all the same.
    pub fn close(self) -> Result<(), DriverError> {
        self.shared.lock_anyway().close(&self.shared)
    }
}

enum Tried {
    Placed(Allocation),
    Short(Shortage, Option<DriverError>),
}

impl std::fmt::Debug for Allocator {
    /// The virtual pool's census and every region in address order.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.shared.lock_anyway().manager.virtual_pool() {
            Some(pool) => std::fmt::Debug::fmt(&pool.pool, f),
            None => f.write_str("the driver's own pool"),
        }
    }
}

impl Drop for Allocator {
    fn drop(&mut self) {
        // Nobody is left to tell; `close` is for those who want to know.
        let _ = self.shared.lock_anyway().close(&self.shared);
    }
}
