//! A thread's local state of an allocator: its cache and tally, and copies of lists that rarely
//! change, so that a hit takes no shared lock.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::{Arc, Weak};

use vramp_core::{AddrRange, DeviceAddr, PoolAddr, StreamId, StreamTable};

use crate::cache::Cache;
use crate::live_bytes::LiveBytes;
use crate::shared::Shared;
use crate::tally::Tally;
use crate::virtual_pool::HeapCell;

/// Local state of one thread for one allocator.
pub(crate) struct Local {
    shared: Weak<Shared>,
    pub cache: Arc<Cache>,
    pub tally: Arc<Tally>,
    /// Heaps by stream. May lack the newest, and may have some of streams that ended.
    heaps: StreamTable<Arc<HeapCell>>,
    /// Start addresses of spans. May be shorter, too.
    pub spans: Vec<DeviceAddr>,
}

/// Heaps of streams that left which a thread may keep, beside one for each that stays.
const STALE_MAX: usize = 64;

impl Local {
    /// Returns true if its lists have all heaps and spans, and not too many of streams that left.
    #[inline]
    pub(crate) fn is_current(
        &self,
        heaps: &StreamTable<Arc<HeapCell>>,
        spans: &[AddrRange],
    ) -> bool {
        self.heaps.ids() == heaps.ids()
            && self.spans.len() == spans.len()
            && !self.has_many_stale(heaps)
    }

    fn has_many_stale(&self, heaps: &StreamTable<Arc<HeapCell>>) -> bool {
        self.heaps.len() > 2 * heaps.len() + STALE_MAX
    }

    /// Adds heaps that were created since, and removes those of streams that left once there are more
    /// of these than of others: O(1) for each stream on average.
    fn copy_heaps(&mut self, heaps: &StreamTable<Arc<HeapCell>>) {
        if self.has_many_stale(heaps) {
            self.heaps = heaps.clone();
            return;
        }
        for (id, heap) in heaps.iter_from(self.heaps.ids()) {
            self.heaps.insert(id, Arc::clone(heap));
        }
        self.heaps.skip_to(heaps.ids());
    }

    /// Returns the heap of a stream that has not ended, if it is in the local list.
    #[inline]
    pub(crate) fn heap(&self, stream: StreamId) -> Option<&HeapCell> {
        self.heaps.get(stream).map(|heap| &**heap).filter(|heap| !heap.has_ended())
    }

    /// Returns the device address of a place, if its span is in the local list.
    #[inline]
    pub(crate) fn addr(&self, at: PoolAddr) -> Option<DeviceAddr> {
        Some(*self.spans.get(at.span().index())? + at.offset())
    }
}

impl Drop for Local {
    /// Returns the cached blocks of an ending thread to the pool and folds its counts in.
    fn drop(&mut self) {
        if let Some(shared) = self.shared.upgrade() {
            shared.retire(&self.cache, &self.tally);
        }
    }
}

/// Local states of a thread, each with its allocator's number, in their order.
type Locals = Vec<(u64, Rc<Local>)>;

thread_local! {
    static LOCALS: RefCell<Locals> = const { RefCell::new(Vec::new()) };
}

#[inline]
fn find(locals: &Locals, allocator: u64) -> Option<&Rc<Local>> {
    let found = locals.binary_search_by_key(&allocator, |(number, _)| *number).ok()?;
    Some(&locals[found].1)
}

/// Calls `work` with the thread's local state of an allocator. `None` if it has none yet, or the
/// thread is ending.
#[inline]
pub(crate) fn with<R>(allocator: u64, work: impl FnOnce(&Local) -> R) -> Option<R> {
    let found = LOCALS.try_with(|locals| {
        let locals = locals.try_borrow().ok()?;
        find(&locals, allocator).map(|local| work(local))
    });
    found.ok().flatten()
}

/// Returns the thread's local state of an allocator, for a request with the lock. `None` if it has
/// none yet, or the thread is ending.
#[inline]
pub(crate) fn of(allocator: u64) -> Option<Rc<Local>> {
    let found = LOCALS.try_with(|locals| find(&*locals.try_borrow().ok()?, allocator).cloned());
    found.ok().flatten()
}

/// Updates the thread's local state, or creates it. `None` if the thread is ending.
pub(crate) fn update(
    shared: &Arc<Shared>,
    heaps: &StreamTable<Arc<HeapCell>>,
    spans: &[AddrRange],
    live: &Arc<LiveBytes>,
    enlist: impl FnOnce(&Arc<Cache>, &Arc<Tally>),
) -> Option<()> {
    let starts = |known: usize| spans[known..].iter().map(|span| span.start);
    let updated = LOCALS.try_with(|locals| {
        let mut locals = locals.try_borrow_mut().ok()?;
        let known = locals.binary_search_by_key(&shared.number, |(number, _)| *number);
        if let Ok(known) = known {
            // No request of this thread uses it now. If one did, the lists would stay shorter.
            let local = Rc::get_mut(&mut locals[known].1)?;
            local.copy_heaps(heaps);
            local.spans.extend(starts(local.spans.len()));
            return Some(());
        }
        // Drops the state of allocators that were dropped.
        locals.retain(|(_, local)| local.shared.strong_count() > 0);
        let (cache, tally) = (Arc::new(Cache::new()), Arc::new(Tally::new(live)));
        enlist(&cache, &tally);
        let local = Local {
            shared: Arc::downgrade(shared),
            cache,
            tally,
            heaps: heaps.clone(),
            spans: starts(0).collect(),
        };
        let place = locals.partition_point(|(number, _)| *number < shared.number);
        locals.insert(place, (shared.number, Rc::new(local)));
        Some(())
    });
    updated.ok().flatten()
}
