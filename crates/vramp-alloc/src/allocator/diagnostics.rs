//! Statistics and diagnostics: counts, census, audit, and access to the managers' states.

use vramp_core::{Bytes, Census, Counters, Inconsistency, Mark, StreamId};
use vramp_driver::{Call, DriverError};
use vramp_model::TorchPool;

use super::Allocator;
use crate::error::Unusable;

/// Counts over all managers of an allocator.
///
/// With several threads `live_peak` may be off by what they allocate between two misses, 1 % in a
/// PyTorch job. All other counts are exact.
pub type Stats = Counters;

impl Allocator {
    /// Returns the counts so far. One driver call where the driver's pool is in use.
    pub fn stats(&self) -> Result<Stats, DriverError> {
        Unusable::check_fork_before(Call::PoolUsage)?;
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
            callback_panics: self.shared.observers.panics(),
            ..inner.manager.counters()?
        })
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

    /// Calls `look` with the state of the virtual pool: for diagnostics and tests. `None` for the
    /// driver's pool. `look` runs with the allocator's lock held.
    pub fn inspect<R>(&self, look: impl FnOnce(&vramp_core::Pool) -> R) -> Option<R> {
        let mut inner = self.shared.lock_anyway();
        inner.add_streams(&self.shared.group);
        inner.manager.virtual_pool().map(|pool| look(&pool.pool))
    }

    /// Calls `look` with the state of PyTorch's allocator: its statistics, and the operations of
    /// the last request. `None` for other presets. `look` runs with the allocator's lock held.
    pub fn inspect_torch<R>(&self, look: impl FnOnce(&TorchPool) -> R) -> Option<R> {
        let mut inner = self.shared.lock_anyway();
        inner.add_streams(&self.shared.group);
        inner.manager.caching().map(|caching| look(&caching.pool))
    }

    /// Returns the mark that work queued on `stream` so far is covered by: memory freed on the
    /// stream now is in use up to it. `None` for the driver's pool and for unknown streams.
    pub fn mark(&self, stream: StreamId) -> Option<Mark> {
        let of_torch = || self.inspect_torch(|pool| pool.now(stream));
        let of_pool = self.inspect(|pool| pool.has_stream(stream).then(|| pool.now(stream)));
        of_pool.unwrap_or_else(of_torch)
    }
}
