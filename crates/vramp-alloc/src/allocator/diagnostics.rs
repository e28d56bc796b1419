//! Statistics and diagnostics: counts, census, audit, and access to the managers' states.

use std::any::Any;
use std::sync::atomic::Ordering;

use vramp_core::{Bytes, Census, Counters, Inconsistency, Mark, StreamId};
use vramp_driver::{Call, DriverError};

use super::Allocator;
use crate::backend::Backend;
use crate::error::Unusable;

/// Counts over all managers of an allocator.
///
/// With several threads `live_peak` is exact within 1/128 of it. All other counts are exact.
pub type Stats = Counters;

/// # Statistics and diagnostics
impl Allocator {
    /// Returns the counts so far. One driver call where the driver's pool is in use.
    pub fn stats(&self) -> Result<Stats, DriverError> {
        Unusable::check_fork_before(Call::PoolUsage)?;
        let inner = self.shared.lock_anyway();
        let counts = inner.counts();
        let usage = inner.manager.driver_usage()?;
        Ok(Stats {
            live: counts.live(),
            live_peak: counts.live_peak(),
            hits: counts.blocks_placed() - counts.misses(),
            misses: counts.misses() - inner.manager.placed_by_driver(usage),
            placed: counts.blocks_placed(),
            freed: counts.blocks_freed(),
            callback_panics: self.shared.observers.panics(),
            ..inner.manager.counters_with(usage)
        })
    }

    /// Returns the physical memory reserved, as of the last call that changed it. No lock and no driver
    /// call; zero for the driver's pool.
    pub fn reserved(&self) -> Bytes {
        Bytes::new(self.shared.reserved.load(Ordering::Relaxed))
    }

    /// Returns the live bytes, as requested. No driver call.
    pub fn live(&self) -> Bytes {
        self.shared.lock_anyway().counts().live()
    }

    /// Returns the bytes of the virtual pool by state; empty for the driver's pool. O(n).
    pub fn census(&self) -> Census {
        self.shared.lock_anyway().manager.census()
    }

    /// Checks every invariant of the virtual pool and its heaps. O(n log n).
    pub fn audit(&self) -> Result<(), Inconsistency> {
        Unusable::check_fork().map_err(|error| Inconsistency { what: error.to_string() })?;
        self.shared.lock_anyway().manager.audit()
    }

    /// Returns a copy of the virtual pool's state, for diagnostics and tests. `None` for the driver's
    /// pool. O(n).
    pub fn pool_state(&self) -> Option<vramp_core::Pool> {
        let mut inner = self.shared.lock_anyway();
        inner.add_streams(&self.shared.group);
        inner.manager.virtual_pool().map(|pool| pool.pool.clone())
    }

    /// Calls `read` with the backend, if one of this kind serves the allocator. The lock is held meanwhile.
    pub fn read_backend<B: Backend, R>(&self, read: impl FnOnce(&B) -> R) -> Option<R> {
        let mut inner = self.shared.lock_anyway();
        inner.add_streams(&self.shared.group);
        let backend: &dyn Any = inner.manager.backend()?;
        backend.downcast_ref::<B>().map(read)
    }

    /// Returns the mark that work queued on `stream` so far is covered by: memory freed on the
    /// stream now is in use up to it. `None` for the driver's pool and for unknown streams.
    pub fn mark(&self, stream: StreamId) -> Option<Mark> {
        let mut inner = self.shared.lock_anyway();
        inner.add_streams(&self.shared.group);
        let known = inner.knows_stream(stream);
        inner.manager.mark(stream).filter(|_| known)
    }
}
