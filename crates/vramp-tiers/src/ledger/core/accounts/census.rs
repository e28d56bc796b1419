//! What the account say, summed.

use super::Ledger;
use super::space_account::SpaceAccount;
use super::{Pressure, Tag, UnknownSpace};
use crate::ledger::core::{Levels, SpaceId};
use vramp_core::Bytes;

/// How often what happened in a space.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpaceCounters {
    /// Reservations made, parts split off not counted.
    pub reserves: u64,
    /// Requests that had no room.
    pub refusals: u64,
    /// Reservations released.
    pub releases: u64,
    /// Allocations that exceeded their reservation, whatever was decided.
    pub overruns: u64,
}

/// What is charged to a space under one tag.
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

/// One space, summed. All amounts are multiples of its granule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpaceCensus {
    /// Which space.
    pub space: SpaceId,
    /// Its levels.
    pub levels: Levels,
    /// Everything charged: `reserved + over + orphaned + unreserved`.
    pub total: Bytes,
    /// The sizes of active reservations.
    pub reserved: Bytes,
    /// What active reservations use above their sizes.
    pub over: Bytes,
    /// What is still allocated from released reservations.
    pub orphaned: Bytes,
    /// Allocated without a reservation.
    pub unreserved: Bytes,
    /// How many reservations are active.
    pub reservations: usize,
    /// The largest total since the peaks were reset.
    pub peak: Bytes,
    /// How full it is.
    pub pressure: Pressure,
    /// How often what happened.
    pub counters: SpaceCounters,
}

/// One tag in one space, summed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TagCensus {
    /// What the tag adds to the space's total.
    pub charged: Bytes,
    /// What is allocated under it.
    pub used: Bytes,
    /// The largest `charged` since the peaks were reset.
    pub peak_charged: Bytes,
    /// The largest `used` since the peaks were reset.
    pub peak_used: Bytes,
}

impl Ledger {
    /// One space, summed. O(1).
    pub fn census(&self, space: SpaceId) -> Result<SpaceCensus, UnknownSpace> {
        let account: &SpaceAccount = self.space(space)?;
        Ok(SpaceCensus {
            space,
            levels: account.levels,
            total: account.total(),
            reserved: account.reserved,
            over: account.over,
            orphaned: account.orphaned,
            unreserved: account.unreserved,
            reservations: account.active,
            peak: account.peak,
            pressure: self.pressure(space)?,
            counters: account.counters,
        })
    }

    /// One tag in one space, summed. O(1). Zeros for a tag that is not of this ledger.
    ///
    /// # Errors
    /// There is no such space.
    pub fn tag_census(&self, space: SpaceId, tag: Tag) -> Result<TagCensus, UnknownSpace> {
        let account = self.space(space)?;
        let tag = account.tags.get(tag.index()).copied().unwrap_or_default();
        let TagUse { charged, used, peak_charged, peak_used, .. } = tag;
        Ok(TagCensus { charged, used, peak_charged, peak_used })
    }

    /// Makes the present totals the peaks of a space and of its tags.
    ///
    /// # Errors
    /// There is no such space.
    pub fn reset_peaks(&mut self, space: SpaceId) -> Result<(), UnknownSpace> {
        let account = self.spaces.iter_mut().find(|account| account.id == space);
        let account = account.ok_or(UnknownSpace { space })?;
        account.peak = account.total();
        for tag in &mut account.tags {
            (tag.peak_charged, tag.peak_used) = (tag.charged, tag.used);
        }
        Ok(())
    }
}
