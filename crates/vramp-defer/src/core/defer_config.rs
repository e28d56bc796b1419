//! Piece length, capacity and the time constants of the eviction policy.

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
