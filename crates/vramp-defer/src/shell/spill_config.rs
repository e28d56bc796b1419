//! How buffers are cut and moved.

use std::time::Duration;

use crate::planner::Rates;
use vramp_core::Bytes;

/// How deferrable buffers of a card are kept.
#[derive(Clone, Debug, PartialEq)]
pub struct SpillConfig {
    /// What moves at once: whole pages, from 4 to 32 MiB. A spill frees at most one more than is
    /// missing.
    pub piece: Bytes,
    /// What buffers may have on the card. `None` for all that the allocator's limit or the card
    /// leaves beside other allocations.
    pub capacity: Option<Bytes>,
    /// How long a lease waits for others to end.
    pub patience: Duration,
    /// How long a buffer that was retrieved stays behind the others as a victim.
    pub cooldown: Duration,
    /// After so long without a use, a buffer is as likely to be needed soon as not.
    pub recency: Duration,
    /// Contents unused for so long may be copied out ahead of need.
    pub clean_after: Duration,
    /// A buffer that was read in place so often is brought back by the next read, if it can be.
    pub promote_after: u32,
    /// How many pieces are on their way at once.
    pub in_flight: usize,
    /// Copies out ahead of need, by a thread of the manager.
    pub cleaner: Option<CleanerConfig>,
    /// Measured rates, where known; own transfers correct them.
    pub rates: Rates,
    /// So many of the last moves are remembered with their reasons.
    pub history: usize,
}

/// When contents are copied out ahead of need: between the two levels, nothing leaves the card, but
/// what would leave next has a copy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CleanerConfig {
    /// Above this part of the capacity.
    pub above: f64,
    /// How often it looks.
    pub every: Duration,
    /// How much it copies each time at most.
    pub budget: Bytes,
}

impl Default for SpillConfig {
    /// Pieces of 32 MiB, leases that wait up to ten seconds, no cleaner.
    fn default() -> SpillConfig {
        SpillConfig {
            piece: Bytes::mib(32),
            capacity: None,
            patience: Duration::from_secs(10),
            cooldown: Duration::from_millis(20),
            recency: Duration::from_millis(100),
            clean_after: Duration::from_millis(100),
            promote_after: 3,
            in_flight: 4,
            cleaner: None,
            rates: Rates::default(),
            history: 256,
        }
    }
}

impl Default for CleanerConfig {
    /// Above 70 % of the capacity, every 10 ms, 128 MiB at a time.
    fn default() -> CleanerConfig {
        CleanerConfig { above: 0.7, every: Duration::from_millis(10), budget: Bytes::mib(128) }
    }
}
