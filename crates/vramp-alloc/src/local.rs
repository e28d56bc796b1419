//! A thread's local state of an allocator: its cache and tally, and copies of lists that rarely
//! change, so that a hit takes no shared lock.

use std::cell::RefCell;
use std::sync::{Arc, Weak};

use vramp_core::{DeviceAddr, PoolAddr};

use crate::cache::Cache;
use crate::shared::Shared;
use crate::tally::Tally;
use crate::virtual_pool::HeapCell;

/// Local state of one thread for one allocator.
pub(crate) struct Local {
    shared: Weak<Shared>,
    allocator: u64,
    pub cache: Arc<Cache>,
    pub tally: Arc<Tally>,
    /// Heaps by stream. May be shorter than the allocator's list.
    pub heaps: Vec<Arc<HeapCell>>,
    /// Start addresses of spans. May be shorter, too.
    pub spans: Vec<DeviceAddr>,
}

impl Local {
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

thread_local! {
    static LOCALS: RefCell<Vec<Local>> = const { RefCell::new(Vec::new()) };
}

/// Calls `work` with the thread's local state of an allocator. `None` if it has none yet, or the
/// thread is ending.
#[inline]
pub(crate) fn with<R>(allocator: u64, work: impl FnOnce(&Local) -> R) -> Option<R> {
    LOCALS
        .try_with(|locals| {
            let locals = locals.try_borrow().ok()?;
            let local = locals.iter().find(|local| local.allocator == allocator)?;
            Some(work(local))
        })
        .ok()
        .flatten()
}

/// Updates the thread's local state, or creates it. `None` if the thread is ending.
pub(crate) fn refresh(
    shared: &Arc<Shared>,
    heaps: &[Arc<HeapCell>],
    spans: impl Iterator<Item = DeviceAddr>,
    enlist: impl FnOnce(&Arc<Cache>, &Arc<Tally>),
) -> Option<()> {
    LOCALS
        .try_with(|locals| {
            let mut locals = locals.try_borrow_mut().ok()?;
            if let Some(local) = locals.iter_mut().find(|local| local.allocator == shared.number) {
                local.heaps.extend(heaps.iter().skip(local.heaps.len()).cloned());
                let known = local.spans.len();
                local.spans.extend(spans.skip(known));
                return Some(());
            }
            // Drops the state of allocators that were dropped.
            locals.retain(|local| local.shared.strong_count() > 0);
            let (cache, tally) = (Arc::new(Cache::new()), Arc::new(Tally::default()));
            enlist(&cache, &tally);
            locals.push(Local {
                shared: Arc::downgrade(shared),
                allocator: shared.number,
                cache,
                tally,
                heaps: heaps.to_vec(),
                spans: spans.collect(),
            });
            Some(())
        })
        .ok()
        .flatten()
}
