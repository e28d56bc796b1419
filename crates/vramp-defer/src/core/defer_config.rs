//! How long pieces are, how much the card holds, and how fast data moves.

use super::SpillTier;
use vramp_core::Bytes;

/// What buffers and their pieces are measured by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeferConfig {
    /// The length of a piece: a whole number of pages, 32 MiB at most. A spill stops within one.
    pub piece: Bytes,
    /// The granule of the card's memory.
    pub page: Bytes,
    /// What leased buffers may have on the card at a time.
    pub capacity: Bytes,
    /// How long a buffer that was retrieved stays behind the others as a victim.
    pub cooldown_ns: u64,
    /// After so long without a use, a buffer is as likely to be needed soon as not.
    pub recency_ns: u64,
    /// Contents unused for so long may be copied out ahead of need.
    pub clean_after_ns: u64,
    /// A buffer that was read in place so often should be on the card.
    pub promote_after: u32,
}

impl DeferConfig {
    /// Pieces of 32 MiB in pages of 2 MiB; a cooldown of 20 ms, 100 ms for the other two
    /// times, and three reads in place.
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

/// A configuration that makes no sense.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeferConfigError {
    /// Nothing can be cut into pages of no length.
    #[error("a page has no length: use the device's granularity, 2 MiB on most cards")]
    Page,
    /// Pieces are mapped whole.
    #[error(
        "a piece of {piece} will not do: use a whole number of pages of {page}, {most} at most"
    )]
    Piece {
        /// What was given.
        piece: Bytes,
        /// The granule.
        page: Bytes,
        /// The longest piece.
        most: Bytes,
    },
}

/// Measured bytes per second. What is unknown counts as 25 GB/s for the host and 2.5 GB/s for the
/// disk: what matters is that a disk is slower.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rates {
    /// From the card to the host.
    pub to_host: Option<u64>,
    /// From the host to the card.
    pub from_host: Option<u64>,
    /// From the card to the disk.
    pub to_disk: Option<u64>,
    /// From the disk to the card.
    pub from_disk: Option<u64>,
}

impl Rates {
    pub(super) fn out_ns(&self, to: SpillTier, bytes: Bytes) -> u64 {
        let rate = match to {
            SpillTier::Host => self.to_host,
            SpillTier::Disk => self.to_disk,
        };
        move_ns(rate, to, bytes)
    }

    pub(super) fn in_ns(&self, from: SpillTier, bytes: Bytes) -> u64 {
        let rate = match from {
            SpillTier::Host => self.from_host,
            SpillTier::Disk => self.from_disk,
        };
        move_ns(rate, from, bytes)
    }
}

/// Nanoseconds to move `bytes`, either way.
fn move_ns(rate: Option<u64>, lower: SpillTier, bytes: Bytes) -> u64 {
    let stand_in = match lower {
        SpillTier::Host => 25_000_000_000,
        SpillTier::Disk => 2_500_000_000,
    };
    let rate = rate.filter(|&rate| rate > 0).unwrap_or(stand_in);
    let ns = u128::from(bytes.count()) * 1_000_000_000 / u128::from(rate);
    u64::try_from(ns).unwrap_or(u64::MAX)
}

/// What is free below the card. What moves under way will take of it is counted by the core.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpillRoom {
    /// In pinned memory.
    pub host: Bytes,
    /// In files.
    pub disk: Bytes,
}

impl SpillRoom {
    pub(super) fn of(&mut self, lower: SpillTier) -> &mut Bytes {
        match lower {
            SpillTier::Host => &mut self.host,
            SpillTier::Disk => &mut self.disk,
        }
    }

    /// What is left beside what was promised.
    pub(super) fn beside(self, promised: SpillRoom) -> SpillRoom {
        SpillRoom {
            host: self.host.saturating_sub(promised.host),
            disk: self.disk.saturating_sub(promised.disk),
        }
    }

    /// Takes room for contents that leave the card: the host if it has any, else the disk.
    pub(super) fn take(&mut self, bytes: Bytes) -> Option<SpillTier> {
        if bytes <= self.host {
            self.host -= bytes;
            Some(SpillTier::Host)
        } else if bytes <= self.disk {
            self.disk -= bytes;
            Some(SpillTier::Disk)
        } else {
            None
        }
    }
}
