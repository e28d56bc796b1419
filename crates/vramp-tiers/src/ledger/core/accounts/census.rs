//! Statistics of spaces and tags.

use super::space_account::TagUse;
use super::{Ledger, Pressure, SpaceCounters, Tag, UnknownSpace};
use crate::ledger::core::{Levels, SpaceId};
use vramp_core::Bytes;

/// Statistics of one space. All amounts are multiples of its granule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpaceCensus {
    /// Id of the space.
    pub space: SpaceId,
    /// Levels of the space.
    pub levels: Levels,
    /// All charges: `reserved + overrun + orphaned + unreserved`.
    pub total: Bytes,
    /// Sum of the sizes of active reservations.
    pub reserved: Bytes,
    /// Bytes that active reservations use beyond their sizes.
    pub overrun: Bytes,
    /// Bytes still allocated from released reservations.
    pub orphaned: Bytes,
    /// Bytes allocated without a reservation.
    pub unreserved: Bytes,
    /// Number of active reservations.
    pub reservations: usize,
    /// High-water mark of `total` since the peaks were reset.
    pub peak: Bytes,
    /// Total against the levels.
    pub pressure: Pressure,
    /// Event counters.
    pub counters: SpaceCounters,
}

/// Statistics of one tag in one space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TagCensus {
    /// Bytes that the tag adds to the space's total.
    pub charged: Bytes,
    /// Bytes allocated under the tag.
    pub used: Bytes,
    /// High-water mark of `charged` since the peaks were reset.
    pub peak_charged: Bytes,
    /// High-water mark of `used` since the peaks were reset.
    pub peak_used: Bytes,
}

impl Ledger {
    /// Returns the statistics of a space. O(1).
    pub fn census(&self, space: SpaceId) -> Result<SpaceCensus, UnknownSpace> {
        let account = self.space(space)?;
        Ok(SpaceCensus {
            space,
            levels: account.levels,
            total: account.total(),
            reserved: account.reserved,
            overrun: account.overrun,
            orphaned: account.orphaned,
            unreserved: account.unreserved,
            reservations: account.active,
            peak: account.peak,
            pressure: self.pressure(space)?,
            counters: account.counters,
        })
    }

    /// Returns the statistics of one tag in one space; zeros for another ledger's tag. O(1).
    ///
    /// # Errors
    /// There is no such space.
    pub fn tag_census(&self, space: SpaceId, tag: Tag) -> Result<TagCensus, UnknownSpace> {
        let account = self.space(space)?;
        let tag = account.tags.get(tag.index()).copied().unwrap_or_default();
        let TagUse { charged, used, peak_charged, peak_used, .. } = tag;
        Ok(TagCensus { charged, used, peak_charged, peak_used })
    }

    /// Resets the peaks of a space and of its tags to the present totals.
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
