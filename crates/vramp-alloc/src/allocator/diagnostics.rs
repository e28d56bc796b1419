//! What an allocator tells of itself: counts, census, audit, and its managers' states.

use vramp_core::{Bytes, Census, Counters, Inconsistency, Mark, StreamId};
use vramp_driver::DriverError;
use vramp_model::TorchPool;

use super::Allocator;

/// What happened so far, over all the managers behind an allocator.
///
/// With several threads `live_peak` may be off by what they hold between two misses, a percent in a
/// PyTorch job; all else is
/// exact.
pub type Stats = Counters;

impl Allocator {
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

    /// Lets `look` see the state of PyTorch's allocator: its statistics, what the last request did
    /// on the device. `None` for other presets.
    pub fn inspect_torch<R>(&self, look: impl FnOnce(&TorchPool) -> R) -> Option<R> {
        let mut inner = self.shared.lock_anyway();
        self.learn_streams(&mut inner);
        inner.manager.caching().map(|caching| look(&caching.pool))
    }

    /// The mark up to which memory that is freed on `stream` now is in use. `None` for the driver's
    /// pool and for unknown streams.
    pub fn mark(&self, stream: StreamId) -> Option<Mark> {
        let of_torch = || self.inspect_torch(|pool| pool.now(stream));
        let of_pool = self.inspect(|pool| pool.has_stream(stream).then(|| pool.now(stream)));
        of_pool.unwrap_or_else(of_torch)
    }
}
