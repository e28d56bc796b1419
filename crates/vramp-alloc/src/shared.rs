//! The part of an allocator that its threads keep a hold of, and the lock around the manager.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

use vramp_core::{Bytes, DeviceAddr, Inconsistency, PoolAddr, StreamId};
use vramp_driver::{Driver, DriverError, Stream};

use crate::cache::Cache;
use crate::core::Contention;
use crate::error::{StreamUsage, TagUsage};
use crate::group::Group;
use crate::local;
use crate::manager::Manager;
use crate::observe::Observers;
use crate::stats::SeenPeaks;
use crate::tally::{Base, Tally};
use crate::virtual_pool::HeapsServe;

/// What all of an allocator's threads share.
pub(crate) struct Shared {
    /// Names the allocator for its threads and allocations.
    pub number: u64,
    /// What people call it.
    pub name: String,
    pub driver: Arc<dyn Driver>,
    /// Which requests are the heaps'; `None` where the manager has no use for them.
    pub heaps_serve: Option<HeapsServe>,
    pub group: Arc<Group>,
    pub observers: Observers,
    /// Physical memory held, as of the last call that held the lock.
    pub reserved: AtomicU64,
    /// Somebody waits for memory to come back: frees go through the lock.
    pub has_waiters: AtomicBool,
    /// How many captures into arenas are under way: requests go through the lock, which knows whose
    /// they are.
    pub captures: AtomicU32,
    /// True while threads contend for the lock: a copy for requests that do not take it.
    contended: AtomicBool,
    memory_freed: Condvar,
    inner: Mutex<Inner>,
}

/// What the lock protects.
pub(crate) struct Inner {
    pub manager: Manager,
    contention: Contention,
    /// By id. May be behind the group's list.
    pub streams: Vec<Stream>,
    /// By id.
    pub ended: Vec<bool>,
    pub base: Base,
    /// Of every thread that allocated here and lives.
    pub tallies: Vec<Arc<Tally>>,
    pub tags: Vec<TagUsage>,
    pub seen_peaks: SeenPeaks,
    /// Requests that failed for want of memory.
    pub ooms: u64,
    /// Requests that were tried again after a handler or a wait.
    pub retries: u64,
    pub closed: bool,
}

/// The right to grow, where several pools share a limit.
pub(crate) type Turn<'a> = Option<MutexGuard<'a, ()>>;

/// Only tells allocators apart.
static NUMBERS: AtomicU64 = AtomicU64::new(1);

impl Shared {
    pub(crate) fn new(
        name: String,
        driver: Arc<dyn Driver>,
        manager: Manager,
        group: Arc<Group>,
    ) -> Arc<Shared> {
        let shared = Arc::new(Shared {
            number: NUMBERS.fetch_add(1, Ordering::Relaxed),
            name,
            driver,
            heaps_serve: manager.virtual_pool().and_then(|pool| pool.heaps_serve),
            group,
            observers: Observers::default(),
            reserved: AtomicU64::new(0),
            has_waiters: AtomicBool::new(false),
            captures: AtomicU32::new(0),
            contended: AtomicBool::new(false),
            memory_freed: Condvar::new(),
            inner: Mutex::new(Inner {
                manager,
                contention: Contention::default(),
                streams: Vec::new(),
                ended: Vec::new(),
                base: Base::default(),
                tallies: Vec::new(),
                tags: Vec::new(),
                seen_peaks: SeenPeaks::default(),
                ooms: 0,
                retries: 0,
                closed: false,
            }),
        });
        shared.group.join(&shared);
        shared
    }

    /// Takes the lock for a call that changes the pool. A panic that left the pool consistent is
    /// ignored.
    pub(crate) fn lock(&self) -> Result<MutexGuard<'_, Inner>, Inconsistency> {
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
        Ok(inner)
    }

    /// The lock, for calls that may take memory: what the others of the group hold counts, and they
    /// take none while the first part is held.
    pub(crate) fn lock_for_memory(
        &self,
    ) -> Result<(Turn<'_>, MutexGuard<'_, Inner>), Inconsistency> {
        let share = self.group.share(self.number);
        let mut inner = self.lock()?;
        if let Some(limit) = self.group.limit() {
            let elsewhere = share.as_ref().map_or(Bytes::ZERO, |&(_, elsewhere)| elsewhere);
            inner.manager.set_limit(Some(limit), elsewhere);
        }
        Ok((share.map(|(turn, _)| turn), inner))
    }

    /// The lock, for looking and for the end.
    pub(crate) fn lock_anyway(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns true while threads contend for the lock.
    #[inline]
    pub(crate) fn is_contended(&self) -> bool {
        self.contended.load(Ordering::Relaxed)
    }

    /// Where a place of the virtual pool is.
    pub(crate) fn addr(&self, at: PoolAddr) -> DeviceAddr {
        let inner = self.lock_anyway();
        inner.manager.virtual_pool().expect("a heap has a pool").exec.addr(at)
    }

    /// Brings the calling thread's copies up to date and folds its counts in.
    pub(crate) fn refresh(self: &Arc<Shared>, inner: &mut Inner) {
        let Inner { manager, tallies, base, .. } = inner;
        let (heaps, spans, caches) = match manager.virtual_pool_mut() {
            Some(pool) => (&pool.heaps[..], pool.exec.spans(), Some(&mut pool.caches)),
            None => (&[][..], &[][..], None),
        };
        let starts = spans.iter().map(|span| span.start);
        local::refresh(self, heaps, starts, |cache, tally| {
            caches.into_iter().for_each(|caches| caches.push(Arc::clone(cache)));
            tallies.push(Arc::clone(tally));
        });
        let all = tallies.iter().map(|tally| &**tally);
        local::with(self.number, |local| base.fold(&local.tally, all));
    }

    /// A thread has ended.
    pub(crate) fn retire(&self, cache: &Arc<Cache>, tally: &Arc<Tally>) {
        let mut inner = self.lock_anyway();
        let Inner { base, tallies, .. } = &mut *inner;
        base.fold(tally, tallies.iter().map(|tally| &**tally));
        inner.tallies.retain(|known| !Arc::ptr_eq(known, tally));
        if let Some(pool) = inner.manager.virtual_pool_mut() {
            pool.drain(cache);
            pool.caches.retain(|known| !Arc::ptr_eq(known, cache));
        }
    }

    /// Waits until memory comes back, at most so long. The lock is open meanwhile.
    pub(crate) fn wait_for_memory(&self, inner: MutexGuard<'_, Inner>, most: Duration) {
        self.has_waiters.store(true, Ordering::Relaxed);
        // Short waits: another thread's cache, or a pool beside this one, does not wake anybody.
        let most = most.min(Duration::from_millis(5));
        drop(self.memory_freed.wait_timeout(inner, most));
    }

    /// Memory came back: whoever waits for it tries again.
    pub(crate) fn notify_waiters(&self) {
        if self.has_waiters.load(Ordering::Relaxed) {
            self.memory_freed.notify_all();
        }
    }
}

impl Inner {
    /// The driver's stream, if requests may be made for it. Learns of streams made through others
    /// of the group.
    pub(crate) fn open_stream(&mut self, id: StreamId, group: &Group) -> Option<Stream> {
        self.any_stream(id, group).filter(|_| !self.ended[id.index()])
    }

    /// The driver's stream, ended or not.
    pub(crate) fn any_stream(&mut self, id: StreamId, group: &Group) -> Option<Stream> {
        if self.streams.len() <= id.index() {
            for known in group.streams_from(self.streams.len()) {
                self.manager.add_stream(known.raw);
                self.streams.push(known.raw);
                self.ended.push(known.ended);
                if known.ended
                    && let Some(pool) = self.manager.virtual_pool_mut()
                {
                    pool.pool.end_stream(StreamId::new(self.streams.len() as u32 - 1));
                }
            }
        }
        self.streams.get(id.index()).copied()
    }

    /// Counts what the calling thread did. Where it is ending, the allocator counts itself.
    pub(crate) fn count(&mut self, number: u64, note: impl Fn(&Tally)) {
        if local::with(number, |local| note(&local.tally)).is_none() {
            let own = Tally::default();
            note(&own);
            self.base.fold(&own, self.tallies.iter().map(|tally| &**tally));
        }
    }

    /// All counts, with what threads have not folded in yet.
    pub(crate) fn counts(&self) -> Base {
        self.base.with(self.tallies.iter().map(|tally| &**tally))
    }

    /// What each stream holds, the one with most first.
    pub(crate) fn stream_usage(&self) -> Vec<StreamUsage> {
        let shares = self.manager.virtual_pool().map(|pool| pool.pool.shares()).unwrap_or_default();
        let mut streams: Vec<StreamUsage> = shares
            .into_iter()
            .map(|share| StreamUsage {
                stream: share.stream,
                used: share.used,
                free: share.free,
                waiting: share.waiting,
            })
            .filter(|holder| holder.used + holder.free + holder.waiting > Bytes::ZERO)
            .collect();
        streams.sort_by_key(|holder| std::cmp::Reverse(holder.used + holder.waiting + holder.free));
        streams
    }

    pub(crate) fn close(&mut self, shared: &Shared) -> Result<(), DriverError> {
        if std::mem::replace(&mut self.closed, true) {
            return Ok(());
        }
        let open = self.streams.iter().zip(&self.ended).filter(|(_, ended)| !**ended);
        let open: Vec<Stream> = open.map(|(&stream, _)| stream).collect();
        let closed = self.manager.close(&open);
        closed.and(shared.group.leave(shared.number, &*shared.driver))
    }
}
