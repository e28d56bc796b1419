//! The sums of one space.

use super::record::Share;
use super::{Bound, Tag};
use crate::ledger::core::{Levels, SpaceId};
use vramp_core::Bytes;

/// Event counters of a space.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpaceCounters {
    /// Reservations made; parts split off are not counted.
    pub reserves: u64,
    /// Requests refused for lack of room.
    pub refusals: u64,
    /// Reservations released.
    pub releases: u64,
    /// Allocations that exceeded their reservation, whatever the policy decided.
    pub overruns: u64,
}

/// Sums of one tag in one space.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct TagUse {
    pub charged: Bytes,
    pub used: Bytes,
    pub unreserved: Bytes,
    pub peak_charged: Bytes,
    pub peak_used: Bytes,
}

impl TagUse {
    pub(super) fn settle(&mut self) {
        self.peak_charged = self.peak_charged.max(self.charged);
        self.peak_used = self.peak_used.max(self.used);
    }
}

/// Sums of one space, with its peak and level crossings.
#[derive(Clone, Debug)]
pub(super) struct SpaceAccount {
    pub id: SpaceId,
    pub levels: Levels,
    /// Sum of the sizes of active reservations.
    pub reserved: Bytes,
    /// Bytes that active reservations use beyond their sizes.
    pub overrun: Bytes,
    /// Bytes still allocated from released reservations.
    pub orphaned: Bytes,
    /// Bytes allocated without a reservation.
    pub unreserved: Bytes,
    pub active: usize,
    pub peak: Bytes,
    pub hysteresis: Hysteresis,
    pub counters: SpaceCounters,
    /// Indexed by tag.
    pub tags: Vec<TagUse>,
}

impl SpaceAccount {
    pub(super) fn total(&self) -> Bytes {
        self.reserved + self.overrun + self.orphaned + self.unreserved
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

    /// Replaces one reservation's share of the sums. [`SpaceAccount::settle`] has to follow.
    pub(super) fn put(&mut self, tag: Tag, before: Share, after: Share) {
        self.reserved = self.reserved + after.reserved - before.reserved;
        self.overrun = self.overrun + after.overrun - before.overrun;
        self.orphaned = self.orphaned + after.orphaned - before.orphaned;
        let tag = &mut self.tags[tag.index()];
        tag.charged = tag.charged + after.charged() - before.charged();
        tag.used = tag.used + after.used - before.used;
    }

    /// Updates the peaks and the level crossings to the sums.
    pub(super) fn settle(&mut self, tag: Tag) {
        let total = self.total();
        self.peak = self.peak.max(total);
        self.hysteresis.update(total, &self.levels);
        self.tags[tag.index()].settle();
    }
}

/// A crossing of a level.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Crossing {
    /// The total rose to the trigger: spilling should begin.
    Trigger,
    /// The total fell to the stop: spilling should end.
    Stop,
}

/// Counter of crossings: an odd number means pressure.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Hysteresis {
    pub crossings: u64,
}

impl Hysteresis {
    pub(super) fn is_high(self) -> bool {
        self.crossings % 2 == 1
    }

    pub(super) fn update(&mut self, total: Bytes, levels: &Levels) {
        let crossed = if self.is_high() { total <= levels.stop } else { total >= levels.trigger };
        self.crossings += u64::from(crossed);
    }

    /// The crossing after the first `seen` ones.
    pub(super) fn after(self, seen: u64) -> Option<Crossing> {
        match seen {
            seen if seen >= self.crossings => None,
            seen if seen % 2 == 0 => Some(Crossing::Trigger),
            _ => Some(Crossing::Stop),
        }
    }
}
