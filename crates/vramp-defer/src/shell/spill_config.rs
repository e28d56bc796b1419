//! Configuration of a manager and its cleaner.

use std::time::Duration;

use crate::planner::Rates;
use vramp_core::Bytes;

/// Configuration of a [`SpillManager`](super::SpillManager).
#[derive(Clone, Debug, PartialEq)]
pub struct SpillConfig {
    /// Length of a piece, the unit of moves: whole pages, from 4 to 32 MiB. A spill overshoots by
    /// at most one.
    pub piece: Bytes,
    /// Most memory that leased buffers may occupy. `None` for all that the allocator's limit, or
    /// the card, leaves beside live allocations.
    pub capacity: Option<Bytes>,
    /// Longest time that a lease waits for others to end.
    pub patience: Duration,
    /// Time after a restore during which a buffer is evicted after others.
    pub cooldown: Duration,
    /// Idle time after which the next use is as likely to come soon as not.
    pub recency: Duration,
    /// Idle time after which contents may be copied out ahead of need.
    pub clean_after: Duration,
    /// Number of reads in place after which the next one restores the buffer if it can.
    pub promote_after: u32,
    /// Number of pieces in flight at once.
    pub in_flight: usize,
    /// A thread that copies contents out ahead of need. `None` for no thread.
    pub cleaner: Option<CleanerConfig>,
    /// Known transfer rates. The manager's own copies update them.
    pub rates: Rates,
    /// Longest time without new copies to the disk after it failed. The time begins with 10 ms, and
    /// doubles with each failure in a row. Zero to try again at once.
    pub disk_backoff_max: Duration,
    /// Number of moves kept in the history.
    pub history: usize,
}

/// When the cleaner copies contents out ahead of need. They stay on the card, and leave later
/// without a copy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CleanerConfig {
    /// Part of the capacity, from 0 to 1, above which it copies.
    pub above: f64,
    /// Period.
    pub every: Duration,
    /// Most bytes copied in a period.
    pub budget: Bytes,
}

impl Default for SpillConfig {
    /// Returns pieces of 32 MiB, leases that wait up to ten seconds, and no cleaner.
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
            disk_backoff_max: Duration::from_secs(1),
            history: 256,
        }
    }
}

impl Default for CleanerConfig {
    /// Returns a cleaner above 70 % of the capacity, every 10 ms, 128 MiB at a time.
    fn default() -> CleanerConfig {
        CleanerConfig { above: 0.7, every: Duration::from_millis(10), budget: Bytes::mib(128) }
    }
}
