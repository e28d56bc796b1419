//! What a thread knows of an allocator: its cache and tally, and copies of what rarely changes, so
//! that a hit takes no lock that threads share.

use std::cell::RefCell;
use std::sync::{Arc, Weak};

use vramp_core::{DeviceAddr, PoolAddr};

use crate::cache::Cache;
use crate::shared::Shared;
use crate::tally::Tally;
use crate::virtual_pool::HeapCell;

/// One thread's part of one allocator.
pub(crate) struct Local {
    shared: Weak<Shared>,
    allocator: u64,
    pub cache: Arc<Cache>,
    pub tally: Arc<Tally>,
    /// By stream; may be behind the allocator's own list.
    pub heaps: Vec<Arc<HeapCell>>,
    /// Where spans begin; may be behind, too.
    pub spans: Vec<DeviceAddr>,
}

impl Local {
    /// The address of a place, if its span is known here.
    #[inline]
    pub(crate) fn addr(&self, at: PoolAddr) -> Option<DeviceAddr> {
        Some(*self.spans.get(at.span().index())? + at.offset())
    }
}

impl Drop for Local {
    /// A thread ends: what it had at hand goes back, its counts stay.
    fn drop(&mut self) {
        if let Some(shared) = self.shared.upgrade() {
            shared.retire(&self.cache, &self.tally);
        }
    }
}

thread_local! {
    static LOCALS: RefCell<Vec<Local>> = const { RefCell::new(Vec::new()) };
}

/// Lets `work` see the thread's part of an allocator; `None` where it has none yet, or the thread
/// is ending.
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

/// Brings the thread's part up to date, or makes it. `None` where the thread is ending.
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
            // Parts of allocators that are gone are of no use.
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
