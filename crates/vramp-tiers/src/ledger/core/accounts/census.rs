//! Statistics of spaces and tags.

use super::record::Share;
use super::space_account::{SpaceAccount, TagUse};
use super::{Ledger, Pressure, SpaceCounters, Tag, UnknownSpace};
use crate::ledger::core::{Levels, SpaceId};
use vramp_core::{Bytes, Inconsistency};

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

type Check = Result<(), String>;

impl Ledger {
    /// Checks every invariant. O(reservations times spaces): for tests, and after an error.
    ///
    /// # Errors
    /// The first invariant that does not hold: a bug in the ledger, never a caller's mistake.
    pub fn audit(&self) -> Result<(), Inconsistency> {
        let checks = self.spaces.iter().map(|space| {
            self.sums_agree(space)
                .and_then(|()| self.tags_agree(space))
                .and_then(|()| bounds_hold(space))
                .and_then(|()| self.limit_holds(space))
                .map_err(|what| Inconsistency { what: format!("{}: {what}", space.id) })
        });
        checks.collect::<Result<(), _>>()?;
        self.records_are_possible().map_err(|what| Inconsistency { what })
    }

    fn sums_agree(&self, space: &SpaceAccount) -> Check {
        let mut sum = Share::default();
        let mut active = 0;
        for (_, record) in self.records.iter().filter(|(_, record)| record.space == space.id) {
            let share = record.share();
            sum.reserved += share.reserved;
            sum.overrun += share.overrun;
            sum.orphaned += share.orphaned;
            active += usize::from(!record.released);
        }
        agree("reserved", space.reserved, sum.reserved)?;
        agree("overrun", space.overrun, sum.overrun)?;
        agree("orphaned", space.orphaned, sum.orphaned)?;
        if space.active != active {
            return Err(format!("the counter says {} reservations, {active} exist", space.active));
        }
        Ok(())
    }

    fn tags_agree(&self, space: &SpaceAccount) -> Check {
        let mut unreserved = Bytes::ZERO;
        for (number, tag) in space.tags.iter().enumerate() {
            let name = &self.tags[number];
            let of_tag = |record: &super::ReservationRecord| {
                record.space == space.id && record.tag.index() == number
            };
            let shares = self.records.values().filter(|r| of_tag(r)).map(|r| r.share());
            let (mut charged, mut used) = (tag.unreserved, tag.unreserved);
            for share in shares {
                charged += share.charged();
                used += share.used;
            }
            agree(&format!("charged under '{name}'"), tag.charged, charged)?;
            agree(&format!("used under '{name}'"), tag.used, used)?;
            if tag.peak_charged < charged || tag.peak_used < used {
                return Err(format!("a peak under '{name}' is below the present charge"));
            }
            unreserved += tag.unreserved;
        }
        agree("unreserved", space.unreserved, unreserved)
    }

    fn limit_holds(&self, space: &SpaceAccount) -> Check {
        let excused = self.records.values().any(|r| r.space == space.id && r.beyond_limit);
        if space.reserved > space.levels.limit && !excused {
            return Err(format!("{} are reserved above the limit", space.reserved));
        }
        Ok(())
    }

    fn records_are_possible(&self) -> Check {
        for (id, record) in &self.records {
            if self.spaces.get(record.place as usize).map(|space| space.id) != Some(record.space) {
                return Err(format!("{id} is in no space"));
            }
            if record.released && (record.used.is_zero() || !record.size.is_zero()) {
                return Err(format!("{id} was released and still reserves {}", record.size));
            }
        }
        Ok(())
    }
}

fn bounds_hold(space: &SpaceAccount) -> Check {
    let total = space.total();
    let levels = &space.levels;
    if total > levels.capacity {
        return Err(format!("{total} are charged, above the capacity of {}", levels.capacity));
    }
    if space.peak < total {
        return Err(format!("the peak {} is below the total {total}", space.peak));
    }
    let high = space.hysteresis.is_high();
    if high && total <= levels.stop || !high && total >= levels.trigger {
        return Err(format!("a crossing at {total} was not counted"));
    }
    Ok(())
}

fn agree(what: &str, counted: Bytes, summed: Bytes) -> Check {
    if counted == summed {
        return Ok(());
    }
    Err(format!("{what}: the counter says {counted}, the sum is {summed}"))
}
