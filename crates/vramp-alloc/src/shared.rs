//! The state that an allocator's threads share, and the lock around its manager.

use std::collections::BTreeSet;
use std::ops::{Deref, DerefMut};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, TryLockError};
use std::time::Duration;

use vramp_core::{Bytes, DeviceAddr, PoolAddr, StreamId, StreamTable};
use vramp_driver::{Driver, DriverError, Stream};
use vramp_host::HostShortage;
use vramp_host::fork::is_forked;

use crate::cache::Cache;
use crate::core::Contention;
use crate::error::{StreamUsage, TagUsage, Unusable};
use crate::group::Group;
use crate::local::{self, Local};
use crate::manager::Manager;
use crate::observe::Observers;
use crate::scopes::Scopes;
use crate::seen_peaks::SeenPeaks;
use crate::sharing::{Exports, Imports};
use crate::stream_end::{StreamEnd, StreamWork};
use crate::tally::{Base, Tally};
use crate::virtual_pool::HeapsServe;

/// State that all threads of an allocator share.
pub(crate) struct Shared {
    /// Number of the allocator, unique in the process: its threads and allocations refer to it.
    pub number: u64,
    /// Name of the allocator.
    pub name: String,
    pub driver: Arc<dyn Driver>,
    /// Sizes of requests that heaps serve; `None` where the manager has no heaps.
    pub heaps_serve: Option<HeapsServe>,
    pub group: Arc<Group>,
    pub observers: Observers,
    /// Physical memory reserved, as of the last call that held the lock.
    pub reserved: AtomicU64,
    /// Peak of `reserved` since an open scope was looked at.
    reserved_peak: AtomicU64,
    /// Requests that wait for memory. While there are any, frees take the lock.
    waiters: AtomicUsize,
    /// Captures into arenas under way, and one more while the pool sleeps. While there are any,
    /// requests and frees take the lock, where the capture or the sleep is looked up.
    pub captures: AtomicU32,
    /// True while threads contend for the lock: a copy for requests that do not take it.
    contended: AtomicBool,
    memory_freed: Condvar,
    /// Read while a handle is exported without the lock. A close, which holds the lock, waits for it.
    pub exporting: RwLock<()>,
    /// Memory of other processes. Its lock is taken after `inner`'s, and never before it.
    pub imports: Imports,
    inner: Mutex<Inner>,
    /// A closed and empty state, which takes the place of `inner` in a forked child: a thread of
    /// the parent may have held that one's lock.
    after_fork: Mutex<Inner>,
}

/// State that the lock protects.
pub(crate) struct Inner {
    pub manager: Manager,
    contention: Contention,
    /// The driver's streams that have not ended. May not know the group's newest ones.
    pub streams: StreamTable<Stream>,
    /// Streams whose last event is being recorded.
    ending: BTreeSet<StreamId>,
    pub base: Base,
    pub scopes: Scopes,
    /// Blocks that other processes may have open.
    pub exports: Exports,
    /// Tallies of live threads that allocated here.
    pub tallies: Vec<Arc<Tally>>,
    pub tags: Vec<TagUsage>,
    pub seen_peaks: SeenPeaks,
    /// Requests that failed for want of memory.
    pub ooms: u64,
    /// Requests that were retried after a handler or a wait.
    pub retries: u64,
    /// Requests until the host's memory is probed again.
    until_probe: u32,
    /// True while the pool sleeps: requests are refused, frees are not.
    pub asleep: bool,
    pub closed: bool,
}

/// The lock, with the exclusive right to reserve memory where several pools share a limit. Dropping
/// it gives up both, so that user code runs with neither.
pub(crate) struct MemoryGuard<'a> {
    shared: &'a Shared,
    inner: MutexGuard<'a, Inner>,
    _growth: Option<MutexGuard<'a, ()>>,
}

impl Drop for MemoryGuard<'_> {
    fn drop(&mut self) {
        self.shared.note_reserved(&self.inner);
    }
}

impl Deref for MemoryGuard<'_> {
    type Target = Inner;

    fn deref(&self) -> &Inner {
        &self.inner
    }
}

impl DerefMut for MemoryGuard<'_> {
    fn deref_mut(&mut self) -> &mut Inner {
        &mut self.inner
    }
}

/// Returns the number of an allocator or group, which no other has.
pub(crate) fn next_number() -> u64 {
    static NUMBERS: AtomicU64 = AtomicU64::new(1);
    NUMBERS.fetch_add(1, Ordering::Relaxed)
}

impl Shared {
    pub(crate) fn new(
        name: String,
        driver: Arc<dyn Driver>,
        manager: Manager,
        group: Arc<Group>,
    ) -> Arc<Shared> {
        let number = next_number();
        let nothing = Manager::without_memory();
        let shared = Arc::new(Shared {
            number,
            name,
            driver,
            heaps_serve: manager.virtual_pool().and_then(|pool| pool.heaps_serve),
            group,
            observers: Observers::new(number),
            reserved: AtomicU64::new(0),
            reserved_peak: AtomicU64::new(0),
            waiters: AtomicUsize::new(0),
            captures: AtomicU32::new(0),
            contended: AtomicBool::new(false),
            memory_freed: Condvar::new(),
            exporting: RwLock::new(()),
            imports: Imports::default(),
            inner: Mutex::new(Inner::new(manager)),
            after_fork: Mutex::new(Inner { closed: true, ..Inner::new(nothing) }),
        });
        shared.group.join(&shared);
        shared
    }

    /// Takes the lock for a call that changes the pool. A panic that left the pool consistent is
    /// ignored.
    ///
    /// # Errors
    /// The pool is inconsistent or closed, or the process was forked.
    pub(crate) fn lock(&self) -> Result<MutexGuard<'_, Inner>, Unusable> {
        let inner = self.lock_asleep()?;
        self.check_awake(&inner)?;
        Ok(inner)
    }

    /// Takes the lock as [`Shared::lock`] does, also while the pool sleeps.
    pub(crate) fn lock_asleep(&self) -> Result<MutexGuard<'_, Inner>, Unusable> {
        let mut inner = self.lock_for_request()?;
        self.return_delayed(&mut inner);
        Ok(inner)
    }

    fn check_awake(&self, inner: &Inner) -> Result<(), Unusable> {
        match inner.asleep {
            true => Err(Unusable::Asleep { pool: self.name.clone() }),
            false => Ok(()),
        }
    }

    /// Takes the lock as [`Shared::lock`] does, for a malloc or free, which empties the slots of the
    /// thread's cache itself.
    pub(crate) fn lock_for_request(&self) -> Result<MutexGuard<'_, Inner>, Unusable> {
        Unusable::check_fork()?;
        let (locked, waited) = match self.inner.try_lock() {
            Err(TryLockError::WouldBlock) => (self.inner.lock(), true),
            Err(TryLockError::Poisoned(poisoned)) => (Err(poisoned), false),
            Ok(inner) => (Ok(inner), false),
        };
        let mut inner = match locked {
            Ok(inner) => inner,
            Err(poisoned) => {
                let inner = poisoned.into_inner();
                inner.manager.audit()?;
                self.inner.clear_poison();
                inner
            }
        };
        let contended = inner.contention.record(waited);
        if contended != self.is_contended() {
            self.contended.store(contended, Ordering::Relaxed);
        }
        if inner.closed {
            return Err(Unusable::Closed);
        }
        inner.add_streams(&self.group);
        Ok(inner)
    }

    /// Takes the lock as [`Shared::lock`] does, for a call that concerns all pools of a group. `None`
    /// if this one was closed meanwhile.
    pub(crate) fn lock_open(&self) -> Result<Option<MutexGuard<'_, Inner>>, Unusable> {
        match self.lock_asleep() {
            Err(Unusable::Closed) => Ok(None),
            locked => locked.map(Some),
        }
    }

    /// Takes the lock for a call that may reserve memory. Memory of the group's other pools counts
    /// against the limit, and they reserve none while the guard is held.
    pub(crate) fn lock_for_memory(&self) -> Result<MemoryGuard<'_>, Unusable> {
        let mut guard = self.lock_for_malloc()?;
        self.return_delayed(&mut guard);
        Ok(guard)
    }

    /// Takes the lock as [`Shared::lock_for_memory`] does, for a malloc, which empties the slots of
    /// the thread's cache itself.
    #[inline(always)]
    pub(crate) fn lock_for_malloc(&self) -> Result<MemoryGuard<'_>, Unusable> {
        Unusable::check_fork()?;
        let limit = self.group.limit();
        let growth = limit.and_then(|_| self.group.share());
        let mut inner = self.lock_for_request()?;
        self.check_awake(&inner)?;
        if limit.is_some() {
            // Its own share changes only while its lock is held.
            let own = Bytes::new(self.reserved.load(Ordering::Relaxed));
            let others = growth.as_ref().map(|_| self.group.reserved().saturating_sub(own));
            inner.manager.set_limit(limit, others);
        }
        Ok(MemoryGuard { shared: self, inner, _growth: growth })
    }

    /// Returns the bytes that the group's pools can create now: what is free on the card, and at most what is
    /// left of the limit. Zero if the driver does not say. One driver call, no lock.
    pub(crate) fn room(&self) -> Bytes {
        let free = self.driver.memory_info().map_or(Bytes::ZERO, |memory| memory.free);
        let left = |limit: Bytes| limit.saturating_sub(self.group.reserved());
        self.group.limit().map_or(free, |limit| free.min(left(limit)))
    }

    /// Notes how much memory the pool has reserved, for the limit that it shares with others.
    pub(crate) fn note_reserved(&self, inner: &Inner) {
        let now = if inner.closed { Bytes::ZERO } else { inner.manager.reserved() };
        let before = Bytes::new(self.reserved.load(Ordering::Relaxed));
        if before != now {
            self.reserved.store(now.count(), Ordering::Relaxed);
            self.reserved_peak.fetch_max(now.count(), Ordering::Relaxed);
            self.group.change_reserved(before, now);
        }
    }

    /// Returns the peak of reserved memory since the last call, and begins anew from `now`. The caller
    /// holds the lock.
    pub(crate) fn restart_reserved_peak(&self, now: Bytes) -> Bytes {
        Bytes::new(self.reserved_peak.swap(now.count(), Ordering::Relaxed))
    }

    /// Takes the lock for a call that reads or closes. A panic elsewhere is ignored. In a forked
    /// child the state is that of a closed allocator without memory.
    pub(crate) fn lock_anyway(&self) -> MutexGuard<'_, Inner> {
        let inner = if is_forked() { &self.after_fork } else { &self.inner };
        match inner.lock() {
            Ok(mut inner) => {
                if !inner.closed {
                    self.return_delayed(&mut inner);
                }
                inner
            }
            Err(poisoned) => poisoned.into_inner(),
        }
    }

    /// Frees the block whose free the calling thread delayed.
    fn return_delayed(&self, inner: &mut Inner) {
        if let Some(pool) = inner.manager.virtual_pool_mut() {
            local::with(self.number, |local| pool.drain_delayed(&local.cache));
        }
    }

    /// Returns true while threads contend for the lock.
    #[inline]
    pub(crate) fn is_contended(&self) -> bool {
        self.contended.load(Ordering::Relaxed)
    }

    /// Returns the device address of a place in the virtual pool.
    pub(crate) fn addr(&self, at: PoolAddr) -> DeviceAddr {
        let inner = self.lock_anyway();
        inner.manager.virtual_pool().expect("a heap has a pool").exec.addr(at)
    }

    /// Folds the calling thread's counts in and returns its local state, if it has one.
    #[inline]
    pub(crate) fn fold_local(&self, inner: &mut Inner) -> Option<Rc<Local>> {
        let local = local::of(self.number);
        if let Some(local) = &local {
            inner.fold(&local.tally);
        }
        local
    }

    /// Updates the calling thread's local state if heaps or spans were added, or if it has none yet.
    #[inline]
    pub(crate) fn update_local(self: &Arc<Shared>, inner: &mut Inner, local: Option<Rc<Local>>) {
        let (heaps, spans) = inner.manager.heaps_and_spans();
        if !local.is_some_and(|local| local.is_current(heaps, spans)) {
            self.copy_lists(inner);
        }
    }

    /// Folds the calling thread's counts in and updates its local state.
    pub(crate) fn refresh(self: &Arc<Shared>, inner: &mut Inner) {
        let local = self.fold_local(inner);
        self.update_local(inner, local);
    }

    #[cold]
    fn copy_lists(self: &Arc<Shared>, inner: &mut Inner) {
        let Inner { manager, tallies, base, .. } = inner;
        let (heaps, spans) = manager.heaps_and_spans();
        let mut added = None;
        local::update(self, heaps, spans, &base.live, |cache, tally| {
            tallies.push(Arc::clone(tally));
            added = Some(Arc::clone(cache));
        });
        let Some(cache) = added else { return };
        if let Some(pool) = manager.virtual_pool_mut() {
            pool.caches.push(cache);
        }
        inner.update_batches();
    }

    /// Removes the local state of a thread that ended.
    pub(crate) fn retire(&self, cache: &Arc<Cache>, tally: &Arc<Tally>) {
        let mut inner = self.lock_anyway();
        inner.fold(tally);
        inner.tallies.retain(|other| !Arc::ptr_eq(other, tally));
        inner.update_batches();
        if let Some(pool) = inner.manager.virtual_pool_mut() {
            pool.drain(cache);
            pool.caches.retain(|other| !Arc::ptr_eq(other, cache));
        }
    }

    /// Returns true while a request waits for memory.
    #[inline]
    pub(crate) fn has_waiters(&self) -> bool {
        self.waiters.load(Ordering::Relaxed) > 0
    }

    /// Counts a request that waits for memory, until the result is dropped.
    pub(crate) fn add_waiter(&self) -> Waiter<'_> {
        self.waiters.fetch_add(1, Ordering::Relaxed);
        Waiter { shared: self }
    }

    /// Waits until memory is freed, at most `max`. The lock is released meanwhile.
    pub(crate) fn wait_for_memory(&self, inner: MutexGuard<'_, Inner>, max: Duration) {
        // Short waits: memory in another thread's cache or in another pool wakes no waiter.
        let max = max.min(Duration::from_millis(5));
        drop(self.memory_freed.wait_timeout(inner, max));
    }

    /// Wakes the requests that wait for memory.
    pub(crate) fn notify_waiters(&self) {
        if self.has_waiters() {
            self.memory_freed.notify_all();
        }
    }
}

/// A request that waits for memory, counted until it is dropped.
pub(crate) struct Waiter<'a> {
    shared: &'a Shared,
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        self.shared.waiters.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Requests that share one probe of the host's memory: it is larger than what so many need.
const REQUESTS_PER_PROBE: u32 = 16;

impl Inner {
    fn new(manager: Manager) -> Inner {
        Inner {
            manager,
            contention: Contention::default(),
            streams: StreamTable::default(),
            ending: BTreeSet::new(),
            base: Base::default(),
            scopes: Scopes::default(),
            exports: Exports::default(),
            tallies: Vec::new(),
            tags: Vec::new(),
            seen_peaks: SeenPeaks::default(),
            ooms: 0,
            retries: 0,
            until_probe: 0,
            asleep: false,
            closed: false,
        }
    }

    /// Refuses a request for whose records the host has no memory. At most one probe for each 16
    /// requests, except while the host is short.
    pub(crate) fn check_host(&mut self) -> Result<(), HostShortage> {
        if self.until_probe == 0 || vramp_host::is_host_short() {
            self.until_probe = 0;
            vramp_host::check_host()?;
            self.until_probe = REQUESTS_PER_PROBE;
        }
        self.until_probe -= 1;
        let room = self.manager.virtual_pool_mut().is_none_or(|pool| pool.pool.make_room());
        if room { Ok(()) } else { Err(HostShortage) }
    }

    /// Returns the driver's stream if requests may be made for it.
    pub(crate) fn open_stream(&self, id: StreamId) -> Option<Stream> {
        let known = self.streams.get(id).copied();
        known.filter(|_| !self.ending.contains(&id))
    }

    /// Refuses requests for a stream: its last event is about to be recorded, and has to cover all
    /// that the pool queues on it.
    pub(crate) fn begin_end(&mut self, id: StreamId) {
        self.ending.insert(id);
    }

    /// Accepts requests again for a stream whose end could not be recorded.
    pub(crate) fn cancel_end(&mut self, id: StreamId) {
        self.ending.remove(&id);
    }

    /// Returns true if the stream is one of the group's, destroyed or not.
    pub(crate) fn knows_stream(&self, id: StreamId) -> bool {
        self.streams.knows(id)
    }

    /// Adds streams that were created since the last call, by any pool of the group: also one that
    /// this pool never serves may capture, or have work that a close waits for. One load if there
    /// are none.
    #[inline]
    pub(crate) fn add_streams(&mut self, group: &Group) {
        if self.streams.ids() < group.stream_count() {
            self.add_new_streams(group);
        }
    }

    #[cold]
    fn add_new_streams(&mut self, group: &Group) {
        let (count, new) = group.streams_from(self.streams.ids());
        for (id, work) in new {
            match work {
                StreamWork::Open(raw) => {
                    self.manager.add_stream(id, Some(raw));
                    self.streams.insert(id, raw);
                    if group.open_stream(id).is_none() {
                        self.ending.insert(id);
                    }
                }
                // What is freed on it later waits for its end.
                StreamWork::Ended(end) => {
                    self.manager.add_stream(id, None);
                    self.manager.end_stream(id, Some(&end));
                }
                StreamWork::Over => {}
            }
        }
        self.streams.skip_to(count);
        self.manager.skip_streams(count);
    }

    /// Ends a stream in this pool. No driver call.
    pub(crate) fn end_stream(&mut self, id: StreamId, end: &Arc<StreamEnd>) {
        self.ending.remove(&id);
        if self.streams.remove(id).is_some() {
            self.manager.end_stream(id, Some(end));
        }
    }

    /// Folds a thread's counts in.
    #[inline]
    pub(crate) fn fold(&mut self, tally: &Tally) {
        self.base.fold(tally);
    }

    /// Updates how much each thread may leave unpublished, after a thread was added or removed.
    fn update_batches(&self) {
        self.base.live.update_batches(self.tallies.iter().map(|tally| &tally.bytes));
    }

    /// Counts a block that was placed. The calling thread's counts were folded in before.
    #[inline]
    pub(crate) fn count_placed(&mut self, len: Bytes, requested: Bytes, hit: bool) {
        self.base.placed(len, requested, hit);
    }

    /// Returns all counts, including those that threads have not folded in yet.
    pub(crate) fn counts(&self) -> Base {
        self.base.clone().with(self.tallies.iter().map(|tally| &**tally))
    }

    /// Returns the memory of each stream, largest first.
    pub(crate) fn stream_usage(&self) -> Vec<StreamUsage> {
        let shares = self.manager.virtual_pool().map(|pool| pool.pool.shares()).unwrap_or_default();
        let total = |usage: &StreamUsage| usage.used + usage.free + usage.waiting;
        let mut usages: Vec<StreamUsage> = shares
            .into_iter()
            .map(|share| StreamUsage {
                stream: share.stream,
                used: share.used,
                free: share.free,
                waiting: share.waiting,
            })
            .filter(|usage| !total(usage).is_zero())
            .collect();
        usages.sort_by_key(|usage| std::cmp::Reverse(total(usage)));
        usages
    }

    /// Waits for all work of the group's streams, then returns everything to the device. If that
    /// wait is impossible nothing is returned, and the pool stays open.
    pub(crate) fn close(&mut self, shared: &Shared) -> Result<(), CloseFailure> {
        if self.closed {
            return Ok(());
        }
        // Its own captures end here, but not if another one refuses the close. `synchronize` asks
        // again, for one that only may be its own.
        let others = shared.capturing_streams().map_err(CloseFailure::NotSynchronized)?;
        let mut others =
            others.into_iter().filter(|&stream| !self.manager.may_be_own_capture(stream));
        if let Some(stream) = others.next() {
            return Err(CloseFailure::Capturing(stream));
        }
        self.manager.end_captures();
        shared.synchronize()?;
        // The owner of a sleep copies on streams that the group does not know.
        if self.asleep {
            match shared.driver.synchronize_device() {
                Err(error) if !error.is_device_lost() => {
                    return Err(CloseFailure::NotSynchronized(error));
                }
                _ => {}
            }
        }
        self.closed = true;
        let exporting = shared.exporting.write().unwrap_or_else(PoisonError::into_inner);
        let released = self.manager.release_all();
        drop(exporting);
        shared.note_reserved(self);
        let left = shared.group.leave(shared.number, &*shared.driver);
        released.and(left).map_err(CloseFailure::Closed)
    }
}

/// Why a pool was not closed, or not as a whole.
pub(crate) enum CloseFailure {
    /// A stream captures: waiting would invalidate the capture.
    Capturing(StreamId),
    /// Work cannot be waited for, so it may still use the memory.
    NotSynchronized(DriverError),
    /// It was closed, but a driver call failed.
    Closed(DriverError),
}

impl Shared {
    /// Returns the open streams that capture graphs. One driver call for each open stream. On a
    /// lost device there are none.
    pub(crate) fn capturing_streams(&self) -> Result<Vec<StreamId>, DriverError> {
        let mut capturing = Vec::new();
        let asked: Result<(), DriverError> = self.group.ask_unended(|id, stream| {
            if self.driver.is_capturing(stream)? {
                capturing.push(id);
            }
            Ok(())
        });
        match asked {
            Err(error) if error.is_device_lost() => Ok(Vec::new()),
            asked => asked.map(|()| capturing),
        }
    }

    /// Waits on the host for all work queued on the group's streams, destroyed ones included. On a
    /// lost device none runs any more.
    ///
    /// It takes no lock of the pool, so that threads go on whose calls the work may wait for; and
    /// waits for events and not for streams, which other threads may destroy meanwhile.
    pub(crate) fn synchronize(&self) -> Result<(), CloseFailure> {
        let waited = self.wait_for_all();
        match waited {
            Err(CloseFailure::NotSynchronized(error)) if error.is_device_lost() => Ok(()),
            waited => waited,
        }
    }

    fn wait_for_all(&self) -> Result<(), CloseFailure> {
        let mut ends = Vec::new();
        self.group.ask_unended(|id, stream| {
            match StreamEnd::record(&self.driver, stream) {
                Ok(Some(end)) => ends.push(end),
                Ok(None) => return Err(CloseFailure::Capturing(id)),
                // Without an event the stream itself is waited for, and cannot end meanwhile.
                Err(_) => {
                    let waited = self.driver.synchronize_stream(stream);
                    waited.map_err(CloseFailure::NotSynchronized)?;
                }
            }
            Ok(())
        })?;
        // A stream that ended before it was asked has its end among these.
        ends.extend(self.group.ends());
        for end in ends {
            end.synchronize().map_err(CloseFailure::NotSynchronized)?;
        }
        Ok(())
    }
}
