//! The sums of one space, and what follows from them.

use super::census::{SpaceCounters, TagUse};
use super::pressure::Hysteresis;
use super::record::Share;
use super::{Bound, Tag};
use crate::ledger::core::{Levels, SpaceId};
use vramp_core::Bytes;

/// The sums of one space.
#[derive(Clone, Debug)]
pub(super) struct SpaceAccount {
    pub id: SpaceId,
    pub levels: Levels,
    /// The sizes of its active reservations.
    pub reserved: Bytes,
    /// What active reservations use above their sizes.
    pub over: Bytes,
    /// What is still allocated from released reservations.
    pub orphaned: Bytes,
    /// Allocated without a reservation.
    pub unreserved: Bytes,
    pub active: usize,
    pub peak: Bytes,
    pub hysteresis: Hysteresis,
    pub counters: SpaceCounters,
    /// By the number of the tag.
    pub tags: Vec<TagUse>,
}

impl SpaceAccount {
    pub(super) fn total(&self) -> Bytes {
        self.reserved + self.over + self.orphaned + self.unreserved
    }

    pub(super) fn bound(&self, bound: Bound) -> Bytes {
        match bound {
            Bound::Limit => self.levels.limit,
            Bound::Capacity => self.levels.capacity,
        }
    }

    pub(super) fn available(&self, bound: Bound) -> Bytes {
        self.bound(bound).saturating_sub(self.total())
    }

    pub(super) fn fits(&self, bytes: Bytes, bound: Bound) -> bool {
        bytes <= self.available(bound)
    }

    /// Replaces one reservation's part of the sums. [`SpaceAccount::settle`] has to follow.
    pub(super) fn put(&mut self, tag: Tag, before: Share, after: Share) {
        self.reserved = self.reserved + after.reserved - before.reserved;
        self.over = self.over + after.over - before.over;
        self.orphaned = self.orphaned + after.orphaned - before.orphaned;
        let tag = &mut self.tags[tag.index()];
        tag.charged = tag.charged + after.charged() - before.charged();
        tag.used = tag.used + after.used - before.used;
    }

    /// Brings what follows from the sums up to date: peaks, and crossings of levels.
    pub(super) fn settle(&mut self, tag: Tag) {
        let total = self.total();
        self.peak = self.peak.max(total);
        self.hysteresis.update(total, &self.levels);
        self.tags[tag.index()].settle();
    }
}
