//! Statistics and diagnostics: counts, census, audit, and access to the managers' states.

use std::sync::atomic::Ordering;

use vramp_core::{Bytes, Census, Counters, Inconsistency, Mark, StreamId};
use vramp_driver::{Call, DriverError};
use vramp_model::{TorchOp, TorchPool};

use super::Allocator;
use crate::error::Unusable;

/// Counts over all managers of an allocator.
///
/// With several threads `live_peak` is exact within 1/128 of it. All other counts are exact.
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
            hits: counts.blocks_placed() - counts.misses(),
            misses: counts.misses() - by_driver,
            placed: counts.blocks_placed(),
            freed: counts.blocks_freed(),
            callback_panics: self.shared.observers.panics(),
            ..inner.manager.counters()?
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

    /// Returns a copy of the state of PyTorch's allocator. `None` for other presets. O(n).
    pub fn torch_state(&self) -> Option<TorchPool> {
        let mut inner = self.shared.lock_anyway();
        inner.add_streams(&self.shared.group);
        inner.manager.caching().map(|caching| caching.pool.clone())
    }

    /// Returns the operations that the last request made in PyTorch's allocator; none for other
    /// presets.
    pub fn torch_operations(&self) -> Vec<TorchOp> {
        let inner = self.shared.lock_anyway();
        inner.manager.caching().map(|caching| caching.pool.performed().to_vec()).unwrap_or_default()
    }

    /// Returns the mark that work queued on `stream` so far is covered by: memory freed on the
    /// stream now is in use up to it. `None` for the driver's pool and for unknown streams.
    pub fn mark(&self, stream: StreamId) -> Option<Mark> {
        let mut inner = self.shared.lock_anyway();
        inner.add_streams(&self.shared.group);
        let of_torch = || inner.manager.caching().map(|caching| caching.pool.now(stream));
        match inner.manager.virtual_pool() {
            Some(pool) => pool.pool.has_stream(stream).then(|| pool.pool.now(stream)),
            None => of_torch().filter(|_| inner.knows_stream(stream)),
        }
    }
}
