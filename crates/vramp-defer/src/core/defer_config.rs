//! Piece length, capacity and the time constants of the eviction policy; what is counted.

use vramp_core::Bytes;

/// Configuration of [`Deferrables`](super::Deferrables).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeferConfig {
    /// Length of a piece: a whole number of pages, at most 32 MiB. A spill overshoots by less than
    /// one piece.
    pub piece: Bytes,
    /// Allocation granularity of the card.
    pub page: Bytes,
    /// Most memory that leased buffers may occupy on the card at a time.
    pub capacity: Bytes,
    /// Time after a restore during which a buffer is evicted after others.
    pub cooldown_ns: u64,
    /// Idle time after which the next use is as likely to come soon as not.
    pub recency_ns: u64,
    /// Idle time after which contents may be copied out ahead of need.
    pub clean_after_ns: u64,
    /// Number of reads in place after which a buffer should be restored.
    pub promote_after: u32,
}

impl DeferConfig {
    /// Returns a configuration with pieces of 32 MiB, pages of 2 MiB, a cooldown of 20 ms, 100 ms
    /// for the other two times, and promotion after three reads in place.
    pub const fn new(capacity: Bytes) -> DeferConfig {
        DeferConfig {
            piece: Bytes::mib(32),
            page: Bytes::mib(2),
            capacity,
            cooldown_ns: 20_000_000,
            recency_ns: 100_000_000,
            clean_after_ns: 100_000_000,
            promote_after: 3,
        }
    }

    pub(super) fn check(&self) -> Result<(), DeferConfigError> {
        if self.page.is_zero() {
            return Err(DeferConfigError::Page);
        }
        let most = Bytes::mib(32).max(self.page);
        if self.piece.is_zero() || !self.piece.is_multiple_of(self.page) || self.piece > most {
            return Err(DeferConfigError::Piece { piece: self.piece, page: self.page, most });
        }
        Ok(())
    }

    pub(super) fn pages(&self, len: Bytes) -> Bytes {
        len.checked_round_up(self.page).expect("lengths are checked where buffers are made")
    }
}

/// Why a configuration was rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeferConfigError {
    /// The page length is zero.
    #[error("the page length is zero: use the device's granularity, 2 MiB on most cards")]
    Page,
    /// The piece length is not a whole number of pages, or too long.
    #[error(
        "piece length {piece} is invalid: use a whole number of pages of {page}, at most {most}"
    )]
    Piece {
        /// Configured piece length.
        piece: Bytes,
        /// Configured page length.
        page: Bytes,
        /// Longest piece allowed.
        most: Bytes,
    },
}

/// Counters since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeferCounters {
    /// Leases granted.
    pub leases: u64,
    /// Leases refused, except for an unknown buffer. A request in the queue counts once.
    pub leases_refused: u64,
    /// Victims chosen.
    pub victims: u64,
    /// Victim pieces that were leased before they left, and stayed.
    pub evictions_cancelled: u64,
    /// Bytes of contents that left the card.
    pub spilled_bytes: u64,
    /// Bytes of those that left without a copy being made.
    pub spilled_clean_bytes: u64,
    /// Bytes copied out, for spills and ahead of them. Stale copies do not count.
    pub copied_out_bytes: u64,
    /// Bytes of contents restored.
    pub restored_bytes: u64,
    /// Bytes of contents moved from another card to the host or the disk, or from host to disk.
    pub pushed_bytes: u64,
    /// Copies dropped because contents changed, or the host was full.
    pub copies_dropped: u64,
    /// Moves that failed or were given up.
    pub moves_abandoned: u64,
    /// Copies on other cards that [`Deferrables::reclaim_peer`](super::Deferrables::reclaim_peer) looked at.
    pub peer_copies_looked_at: u64,
    /// Waiters that requests and changes looked at.
    pub queue_steps: u64,
    /// Table entries that were looked at to choose victims and host copies, to complete work, and to
    /// end leases and buffers.
    pub looked_at: u64,
}
