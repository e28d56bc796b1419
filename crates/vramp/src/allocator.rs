//! The allocator that people use: one set of verbs before several managers.
//!
//! One malloc, from top to bottom:
//!
//! 1. the thread's cache: a block of the same length freed a moment ago (`cache.rs`);
//! 2. the stream's heap, for requests up to its limit (`vramp_core::StreamHeap`, its own lock);
//! 3. the allocator's lock, and the manager behind it (`virtual_pool.rs`, `ordered.rs`).
//!
//! A free goes the same way. Locks are taken in the order allocator, heap.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};

use vramp_core::{
    BlockId, Bytes, Census, Counters, DeviceAddr, Freed, Inconsistency, Mark, PoolConfig, StreamId,
};
use vramp_driver::{Driver, DriverError, Stream};

use crate::allocation::{Allocation, Owner};
use crate::cache::{Cache, Kept, Tag};
use crate::config::{Config, Preset};
use crate::error::{AllocError, CreateError, FreeError, Report, UseError};
use crate::local::{self, Local};
use crate::ordered::{OrderedOutcome, OrderedPool};
use crate::tally::{Base, Tally};
use crate::virtual_pool::{HeapsServe, Refusal, VirtualPool};

/// What happened so far, over all the managers behind an allocator.
///
/// With several threads `live_peak` may miss a moment between two of their misses; all else is
/// exact.
pub type Stats = Counters;

/// Memory of one device. Safe to share between threads, and made for it: a thread that works on a
/// stream of its own shares no lock with others as long as it hits.
///
/// Streams belong to the allocator: [`Allocator::create_stream`] makes one, and work on memory must
/// be queued on the stream it is allocated for, freed on, or noted with [`Allocator::record_use`].
/// Dropping the allocator waits for its streams and gives everything back; [`Allocator::close`]
/// does the same and tells what failed.
pub struct Allocator {
    shared: Arc<Shared>,
}

/// The part of an allocator that threads keep a hold of.
pub(crate) struct Shared {
    /// Names the allocator for its threads and allocations.
    pub number: u64,
    driver: Arc<dyn Driver>,
    /// Which requests are the heaps'; `None` where the manager has no use for them.
    heaps_serve: Option<HeapsServe>,
    /// How often a thread found the lock taken.
    met: AtomicU64,
    inner: Mutex<Inner>,
}

/// What a thread found without the allocator's lock. The allocation is made of it in its final
/// place: copying one costs as much as all the rest of a hit.
struct Hit {
    addr: DeviceAddr,
    owner: Owner,
    len: Bytes,
    recycled: bool,
}

/// So often threads may meet at the lock before heaps serve larger requests.
const MEETINGS: u64 = 256;

struct Inner {
    /// The virtual pool, for the presets that have one.
    pool: Option<VirtualPool>,
    /// The driver's pool: the whole manager, or VPMM's for requests under a page.
    ordered: Option<OrderedPool>,
    /// Requests under this go to the driver's pool.
    bypass_below: Bytes,
    streams: Vec<Stream>,
    base: Base,
    /// Of every thread that allocated here and lives.
    tallies: Vec<Arc<Tally>>,
    closed: bool,
}

/// Only tells allocators apart.
static NUMBERS: AtomicU64 = AtomicU64::new(1);

impl Allocator {
    /// An allocator on a device. Takes no memory yet, unless the configuration says so.
    pub fn new(driver: Arc<dyn Driver>, config: Config) -> Result<Allocator, CreateError> {
        let info = driver.info();
        let granularity = info.limits.page;
        let capabilities = info.capabilities;
        let page = config.page.unwrap_or(granularity);
        let mut inner = Inner {
            pool: None,
            ordered: None,
            bypass_below: Bytes::ZERO,
            streams: Vec::new(),
            base: Base::default(),
            tallies: Vec::new(),
            closed: false,
        };
        if config.preset != Preset::StreamOrdered {
            if !capabilities.virtual_memory {
                return Err(CreateError::NotSupported {
                    preset: config.preset.name(),
                    needed: "virtual memory management",
                    instead: Preset::StreamOrdered.name(),
                });
            }
            if page.is_zero() || !page.is_multiple_of(granularity) {
                return Err(CreateError::Granularity { page, granularity });
            }
            let span = config.span.min(info.limits.address_space.unwrap_or(config.span));
            let span =
                if config.preset == Preset::Vpmm { config.span } else { span.round_down(page) };
            let pool = PoolConfig { page, span, limit: config.limit, policy: config.policy() };
            inner.pool =
                Some(VirtualPool::new(Arc::clone(&driver), pool, config.progress.clone())?);
        }
        if config.preset == Preset::StreamOrdered && !capabilities.stream_ordered_pool {
            return Err(CreateError::NotSupported {
                preset: config.preset.name(),
                needed: "the driver's stream-ordered pool",
                instead: Preset::Vramp.name(),
            });
        }
        if config.preset != Preset::Vramp && capabilities.stream_ordered_pool {
            inner.ordered = Some(OrderedPool::new(Arc::clone(&driver), config.limit)?);
        }
        if config.preset == Preset::Vpmm && inner.ordered.is_some() {
            inner.bypass_below = page;
        }
        let prefill = config.prefill_bytes(page);
        let shared = Shared {
            number: NUMBERS.fetch_add(1, Ordering::Relaxed),
            driver,
            heaps_serve: inner.pool.as_ref().and_then(|pool| pool.heaps_serve),
            met: AtomicU64::new(0),
            inner: Mutex::new(inner),
        };
        let allocator = Allocator { shared: Arc::new(shared) };
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

    // --- streams ---

    /// A new stream on the device. One driver call.
    pub fn create_stream(&self) -> Result<StreamId, DriverError> {
        let stream = self.shared.driver.create_stream()?;
        Ok(self.adopt_stream(stream))
    }

    /// Makes a stream of the device known that was made elsewhere. No driver call.
    ///
    /// It is destroyed with the allocator's own ones; a driver that took it in from outside only
    /// forgets it then.
    pub fn adopt_stream(&self, stream: Stream) -> StreamId {
        let mut inner = self.shared.lock_anyway();
        let id = match &mut inner.pool {
            Some(pool) => pool.add_stream(stream),
            None => StreamId::new(inner.streams.len() as u32),
        };
        inner.streams.push(stream);
        id
    }

    /// The driver's own name of a stream, to queue work on it. `None` if it is unknown here.
    pub fn stream(&self, id: StreamId) -> Option<Stream> {
        self.shared.lock_anyway().streams.get(id.index()).copied()
    }

    // --- memory ---

    /// At least `size` bytes for work on `stream`. A request for nothing gets a unique address too.
    ///
    /// Cost: no driver call for memory that the stream itself freed, a query for each open event
    /// where another stream's is looked for, one call in the driver's pool. A miss costs
    /// one create, map and set-access for each new chunk, a map and a set-access for each moved one.
    ///
    /// # Errors
    /// [`AllocError::OutOfMemory`] tells what is free and what to do; any other driver error leaves
    /// the allocator as it was.
    #[inline]
    pub fn malloc(&self, size: Bytes, stream: StreamId) -> Result<Allocation, AllocError> {
        if let Some(serve) = self.shared.heaps_serve
            && let Some(hit) =
                local::with(self.shared.number, |local| self.hit(local, size, stream, serve))
            && let Some(Hit { addr, owner, len, recycled }) = hit
        {
            return Ok(Allocation {
                addr,
                len,
                requested: size,
                stream,
                owner,
                allocator: self.shared.number,
                recycled,
                noted: AtomicBool::new(false),
            });
        }
        self.malloc_shared(size, stream)
    }

    /// What the thread has at hand, or the stream's heap.
    #[inline]
    fn hit(&self, local: &Local, size: Bytes, stream: StreamId, serve: HeapsServe) -> Option<Hit> {
        let grains = size.count().div_ceil(512).max(1);
        let hit = match local.cache.take(Tag::new(stream.index(), grains)?) {
            Some((tag, Kept { addr, at, id })) => {
                let (id, at) = (BlockId::from_number(id), vramp_core::Spot::from_number(at));
                let owner = match tag.is_of_pool() {
                    true => Owner::Pool { id, at },
                    false => Owner::Heap { id, at },
                };
                let (addr, len) = (DeviceAddr::new(addr), Bytes::new(grains * 512));
                Hit { addr, owner, len, recycled: true }
            }
            None if size <= serve.limit(self.shared.is_contended()) => {
                let block = local.heaps.get(stream.index())?.lock().take(size)?;
                let owner = Owner::Heap { id: block.id, at: block.at };
                // The heap's slab came through this or another thread; here its span may be new.
                let addr = local.addr(block.at).unwrap_or_else(|| self.addr(block.at));
                local.cache.made(grains, addr.number());
                Hit { addr, owner, len: block.len, recycled: false }
            }
            None => return None,
        };
        local.tally.placed(size, true);
        Some(hit)
    }

    fn addr(&self, at: vramp_core::Spot) -> DeviceAddr {
        let inner = self.shared.lock_anyway();
        inner.pool.as_ref().expect("a heap has a pool").exec.addr(at)
    }

    /// The way through the allocator's lock.
    #[cold]
    fn malloc_shared(&self, size: Bytes, stream: StreamId) -> Result<Allocation, AllocError> {
        let mut inner = self.shared.lock()?;
        let raw = inner.stream(stream).ok_or(AllocError::UnknownStream(stream))?;
        self.refresh(&mut inner);
        if let Some(pool) = &mut inner.pool
            && pool.heaps_serve.is_some()
        {
            // What this thread has at hand in other sizes is free memory to the pool.
            local::with(self.shared.number, |local| pool.drain(&local.cache));
        }
        let bypass = size < inner.bypass_below;
        let contended = self.shared.is_contended();
        let Inner { pool, ordered, .. } = &mut *inner;
        let placed = match (pool, ordered) {
            (Some(pool), _) if !bypass => pool.malloc(size, stream, contended).map(|placed| {
                let addr = pool.exec.addr(placed.block.at);
                (addr, placed.block.len, placed.owner, placed.hit)
            }),
            (_, Some(ordered)) => match ordered.malloc(size, stream, raw)? {
                OrderedOutcome::Placed { addr, len, slot } => {
                    Ok((addr, len, Owner::Driver { slot }, false))
                }
                OrderedOutcome::Full(shortage, error) => Err(Refusal::Short(shortage, error)),
            },
            _ => unreachable!("an allocator has a manager"),
        };
        match placed {
            Ok((addr, len, owner, hit)) => {
                inner.count(self.shared.number, |tally| tally.placed(size, hit));
                // A heap's new slab may lie in a span that this thread has not heard of.
                self.refresh(&mut inner);
                let grains = len.count() / 512;
                local::with(self.shared.number, |local| local.cache.made(grains, addr.number()));
                Ok(Allocation {
                    addr,
                    len,
                    requested: size,
                    stream,
                    owner,
                    allocator: self.shared.number,
                    recycled: false,
                    noted: AtomicBool::new(false),
                })
            }
            Err(Refusal::Driver(error)) => Err(AllocError::Driver(error)),
            Err(Refusal::Short(shortage, failed_call)) => {
                drop(inner);
                let card = self.shared.driver.memory_info().ok();
                Err(AllocError::OutOfMemory(Box::new(Report { shortage, card, failed_call })))
            }
        }
    }

    /// Brings this thread's copies up to date and folds its counts in.
    fn refresh(&self, inner: &mut Inner) {
        let Inner { pool, tallies, base, .. } = inner;
        let (heaps, spans, caches) = match pool {
            Some(pool) => (&pool.heaps[..], pool.exec.spans(), Some(&mut pool.caches)),
            None => (&[][..], &[][..], None),
        };
        let starts = spans.iter().map(|span| span.start);
        local::refresh(&self.shared, heaps, starts, |cache, tally| {
            caches.into_iter().for_each(|caches| caches.push(Arc::clone(cache)));
            tallies.push(Arc::clone(tally));
        });
        local::with(self.shared.number, |local| base.fold(&local.tally));
    }

    /// Notes that work queued on `stream` so far uses the allocation. No driver call.
    pub fn record_use(&self, allocation: &Allocation, stream: StreamId) -> Result<(), UseError> {
        let mut inner = self.shared.lock()?;
        inner.stream(stream).ok_or(UseError::UnknownStream(stream))?;
        if !self.owns(&inner, allocation) {
            return Err(UseError::Foreign(allocation.addr));
        }
        allocation.noted.store(true, Ordering::Relaxed);
        let Inner { pool, ordered, .. } = &mut *inner;
        match allocation.owner {
            Owner::Pool { id, .. } => {
                let pool = pool.as_mut().expect("a pool's block has a pool");
                pool.pool.record_use(id, stream).expect("the block was looked up");
            }
            Owner::Heap { id, .. } => {
                let pool = pool.as_mut().expect("a heap has a pool");
                let mark = pool.pool.now(stream);
                let mut heap = pool.heaps[allocation.stream.index()].lock();
                heap.note_use(id, mark).expect("the block was looked up");
            }
            Owner::Driver { slot } => {
                let ordered = ordered.as_mut().expect("a driver's block has a driver's pool");
                ordered.record_use(slot, stream);
            }
        }
        Ok(())
    }

    /// Takes the memory back. All work on it must be queued on `stream`, ordered before its present
    /// end, or noted with [`Allocator::record_use`]; `stream` may be another one than the
    /// allocation's.
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
            && !allocation.is_noted()
            && local::with(self.shared.number, |local| self.keep(local, &allocation))
                .is_some_and(|kept| kept)
        {
            return Ok(());
        }
        self.free_shared(allocation, stream)
    }

    /// Keeps a block at hand, or gives it to its heap.
    #[inline]
    fn keep(&self, local: &Local, allocation: &Allocation) -> bool {
        let grains = allocation.len.count() / 512;
        let (id, at, large) = match allocation.owner {
            Owner::Pool { id, at } => (id, at, true),
            Owner::Heap { id, at } => (id, at, false),
            Owner::Driver { .. } => return false,
        };
        let Some(tag) = Tag::new(allocation.stream.index(), grains) else { return false };
        let tag = if large { tag.of_pool() } else { tag };
        let kept = Kept { addr: allocation.addr.number(), at: at.number(), id: id.number() };
        if !local.cache.put(tag, kept) {
            let Owner::Heap { id, .. } = allocation.owner else { return false };
            let Some(heap) = local.heaps.get(allocation.stream.index()) else { return false };
            let freed = heap.lock().free_in_order(id).expect("an allocation is freed once");
            if let Freed::Surplus(slab) = freed {
                let mut inner = self.shared.lock_anyway();
                let pool = inner.pool.as_mut().expect("a heap has a pool");
                pool.pool.take_back(slab, allocation.stream);
            }
        }
        local.tally.freed(allocation.requested);
        true
    }

    #[cold]
    fn free_shared(&self, allocation: Allocation, stream: StreamId) -> Result<(), FreeError> {
        let mut inner = self.shared.lock()?;
        let Some(raw) = inner.stream(stream) else {
            return Err(FreeError::UnknownStream { stream, allocation });
        };
        if !self.owns(&inner, &allocation) {
            return Err(FreeError::Foreign(allocation));
        }
        self.refresh(&mut inner);
        let Inner { pool, ordered, streams, .. } = &mut *inner;
        let freed = match allocation.owner {
            Owner::Pool { id, .. } => {
                let pool = pool.as_mut().expect("a pool's block has a pool");
                local::with(self.shared.number, |local| pool.drain_last(&local.cache));
                if allocation.recycled && stream != allocation.stream {
                    let used = pool.pool.record_use(id, allocation.stream);
                    used.expect("the block was looked up");
                }
                pool.free(id, stream)
            }
            Owner::Heap { id, .. } => {
                let pool = pool.as_mut().expect("a heap has a pool");
                pool.free_in_heap(id, allocation.stream, stream);
                Ok(())
            }
            Owner::Driver { slot } => {
                let ordered = ordered.as_mut().expect("a driver's block has a driver's pool");
                ordered.free(slot, raw, streams)
            }
        };
        // A driver's block that could not be freed is still held there.
        let held = matches!(allocation.owner, Owner::Driver { slot }
            if inner.ordered.as_ref().is_some_and(|ordered| ordered.holds(slot, allocation.addr)));
        if !held {
            inner.count(self.shared.number, |tally| tally.freed(allocation.requested));
        }
        Ok(freed?)
    }

    /// False for what another allocator handed out.
    fn owns(&self, inner: &Inner, allocation: &Allocation) -> bool {
        allocation.allocator == self.shared.number
            && match (allocation.owner, &inner.pool, &inner.ordered) {
                (Owner::Pool { id, at }, Some(pool), _) => pool.knows(id, at),
                (Owner::Heap { .. }, Some(_), _) => true,
                (Owner::Driver { slot }, _, Some(ordered)) => ordered.holds(slot, allocation.addr),
                _ => false,
            }
    }

    /// Adds `len` bytes ahead of demand, free for `stream`.
    pub fn prefill(&self, len: Bytes, stream: StreamId) -> Result<(), AllocError> {
        let mut inner = self.shared.lock()?;
        inner.stream(stream).ok_or(AllocError::UnknownStream(stream))?;
        let Some(pool) = &mut inner.pool else { return Ok(()) };
        if pool.prefill(len, stream)? {
            return Ok(());
        }
        let request = vramp_core::Request { size: len, stream };
        let shortage = vramp_core::Attempt::new(request).shortage(&pool.pool);
        let card = self.shared.driver.memory_info().ok();
        Err(AllocError::OutOfMemory(Box::new(Report { shortage, card, failed_call: None })))
    }

    /// Gives idle memory back to the card until the allocator holds no more than `to`, or nothing
    /// more is idle. Never waits.
    pub fn trim(&self, to: Bytes) -> Result<(), AllocError> {
        let mut inner = self.shared.lock()?;
        if let Some(pool) = &mut inner.pool {
            pool.trim(to)?;
        }
        if let Some(ordered) = &mut inner.ordered {
            ordered.trim(to)?;
        }
        Ok(())
    }

    // --- looking in ---

    /// What happened so far. A driver call where the driver's pool is part of it.
    pub fn stats(&self) -> Result<Stats, DriverError> {
        let inner = self.shared.lock_anyway();
        let pool = inner.pool.as_ref().map(|pool| pool.pool.counters()).unwrap_or_default();
        let ordered = inner.ordered.as_ref().map(OrderedPool::usage).transpose()?;
        let ordered = ordered.unwrap_or_default();
        let base = inner.base.with(inner.tallies.iter().map(|tally| &**tally));
        let served = if inner.pool.is_some() { base.placed - inner.bypassed() } else { 0 };
        Ok(Stats {
            live: Bytes::new(base.live.max(0) as u64),
            live_peak: Bytes::new(base.peak.max(0) as u64),
            reserved: pool.reserved + ordered.reserved,
            reserved_peak: pool.reserved_peak + ordered.reserved_peak,
            hits: base.hits,
            misses: served - base.hits,
            placed: base.placed,
            freed: base.freed,
            ..pool
        })
    }

    /// Bytes that users asked for and hold. No driver call.
    pub fn live(&self) -> Bytes {
        let inner = self.shared.lock_anyway();
        let base = inner.base.with(inner.tallies.iter().map(|tally| &**tally));
        Bytes::new(base.live.max(0) as u64)
    }

    /// Where every byte of the virtual pool is; empty for the driver's pool. O(n).
    pub fn census(&self) -> Census {
        self.shared.lock_anyway().pool.as_ref().map(VirtualPool::census).unwrap_or_default()
    }

    /// Checks every invariant of the virtual pool and its heaps. O(n log n).
    pub fn audit(&self) -> Result<(), Inconsistency> {
        self.shared.lock_anyway().pool.as_ref().map_or(Ok(()), VirtualPool::audit)
    }

    /// Lets `look` see the core's state: for prints, layouts and tests. `None` for the driver's
    /// pool.
    pub fn inspect<R>(&self, look: impl FnOnce(&vramp_core::Pool) -> R) -> Option<R> {
        self.shared.lock_anyway().pool.as_ref().map(|pool| look(&pool.pool))
    }

    /// The mark up to which memory that is freed on `stream` now is in use. `None` for the driver's
    /// pool and for unknown streams.
    pub fn mark(&self, stream: StreamId) -> Option<Mark> {
        self.inspect(|pool| pool.has_stream(stream).then(|| pool.now(stream))).flatten()
    }

    // --- the end ---

    /// Waits for the allocator's streams and gives everything back to the device.
    ///
    /// # Errors
    /// The first call that failed; the others were made all the same.
    pub fn close(self) -> Result<(), DriverError> {
        self.shared.lock_anyway().close()
    }
}

impl Shared {
    /// The lock, for calls that change the pool. A panic that left it consistent is forgiven.
    fn lock(&self) -> Result<MutexGuard<'_, Inner>, Inconsistency> {
        match self.inner.try_lock() {
            Ok(inner) => return Ok(inner),
            Err(TryLockError::WouldBlock) => {
                if !self.is_contended() {
                    self.met.fetch_add(1, Ordering::Relaxed);
                }
            }
            Err(TryLockError::Poisoned(_)) => {}
        }
        match self.inner.lock() {
            Ok(inner) => Ok(inner),
            Err(poisoned) => {
                let inner = poisoned.into_inner();
                if let Some(pool) = &inner.pool {
                    pool.audit()?;
                }
                self.inner.clear_poison();
                Ok(inner)
            }
        }
    }

    /// True once threads met at the lock often.
    #[inline]
    fn is_contended(&self) -> bool {
        self.met.load(Ordering::Relaxed) >= MEETINGS
    }

    fn lock_anyway(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// A thread has ended.
    pub(crate) fn retire(&self, cache: &Arc<Cache>, tally: &Arc<Tally>) {
        let mut inner = self.lock_anyway();
        inner.base.fold(tally);
        inner.tallies.retain(|known| !Arc::ptr_eq(known, tally));
        if let Some(pool) = &mut inner.pool {
            pool.drain(cache);
            pool.caches.retain(|known| !Arc::ptr_eq(known, cache));
        }
    }
}

impl Inner {
    fn stream(&self, id: StreamId) -> Option<Stream> {
        self.streams.get(id.index()).copied()
    }

    /// Counts what the calling thread did. Where it is ending, the allocator counts itself.
    fn count(&mut self, number: u64, note: impl Fn(&Tally)) {
        if local::with(number, |local| note(&local.tally)).is_none() {
            let own = Tally::default();
            note(&own);
            self.base.fold(&own);
        }
    }

    /// Blocks that went to the driver's pool past the virtual one.
    fn bypassed(&self) -> u64 {
        self.ordered.as_ref().map_or(0, OrderedPool::placed)
    }

    fn close(&mut self) -> Result<(), DriverError> {
        if std::mem::replace(&mut self.closed, true) {
            return Ok(());
        }
        let streams = std::mem::take(&mut self.streams);
        let ordered = self.ordered.as_mut().map_or(Ok(()), |ordered| ordered.close(&streams));
        let pool = match &mut self.pool {
            Some(VirtualPool { pool, exec, .. }) => exec.close(pool),
            None => {
                let mut first = Ok(());
                for stream in streams {
                    let driver = self.ordered.as_ref().map(OrderedPool::driver);
                    first =
                        first.and(driver.map_or(Ok(()), |driver| driver.destroy_stream(stream)));
                }
                first
            }
        };
        ordered.and(pool)
    }
}

impl std::fmt::Debug for Allocator {
    /// The virtual pool's census and every region in address order.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.shared.lock_anyway().pool {
            Some(pool) => std::fmt::Debug::fmt(&pool.pool, f),
            None => f.write_str("the driver's own pool"),
        }
    }
}

impl Drop for Allocator {
    fn drop(&mut self) {
        // Nobody is left to tell; `close` is for those who want to know.
        let _ = self.shared.lock_anyway().close();
    }
}
