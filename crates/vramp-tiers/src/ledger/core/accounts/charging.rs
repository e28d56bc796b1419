//! Charges for allocations, with and without a reservation, and credits for frees.

use smallvec::SmallVec;

use super::{
    Bound, ChargeError, Charged, Ledger, Overrun, OverrunAction, OverrunOutcome, ReservationId,
    ReservationRecord, StaleReservation, Tag, UnchargeError, UnreservedError,
};
use crate::ledger::core::SpaceId;
use vramp_core::Bytes;

impl Ledger {
    /// Charges an allocation of `bytes` if it fits in the reservation.
    ///
    /// # Errors
    /// There is no such reservation. An allocation that does not fit is not an error here.
    #[inline]
    pub fn charge(&mut self, id: ReservationId, bytes: Bytes) -> Result<Charged, StaleReservation> {
        let record = self.records.get_mut(id).ok_or(StaleReservation::Unknown { id })?;
        if record.released {
            return Err(StaleReservation::Released { id, used: record.used });
        }
        let space = &mut self.spaces[record.place as usize];
        let bytes = space.levels.round_up(bytes);
        if bytes > record.unused() {
            return Ok(Charged::Overrun(overrun(id, record, bytes)));
        }
        // The size of the reservation is charged already: only its use changes.
        record.used += bytes;
        record.peak = record.peak.max(record.used);
        let tag = &mut space.tags[record.tag.index()];
        tag.used += bytes;
        tag.peak_used = tag.peak_used.max(tag.used);
        Ok(Charged::Within)
    }

    /// Charges as much of `max` as fits in the reservation. Returns the charged bytes, in whole
    /// granules.
    ///
    /// # Errors
    /// There is no such reservation.
    pub fn charge_up_to(
        &mut self,
        id: ReservationId,
        max: Bytes,
    ) -> Result<Bytes, StaleReservation> {
        let record = *self.active(id)?;
        let bytes = self.levels_of(&record).round_up(max).min(record.unused());
        let charged = self.charge(id, bytes)?;
        debug_assert_eq!(charged, Charged::Within, "the unused part of {id} was taken");
        Ok(bytes)
    }

    /// Ends a reservation and charges its unused bytes to the space, outside any reservation. The
    /// total does not change. Returns the bytes; [`uncharge_unreserved`](Ledger::uncharge_unreserved)
    /// with [`Tag::NONE`] credits them. Bytes still allocated stay charged under this id.
    ///
    /// # Errors
    /// There is no such reservation.
    pub fn into_unreserved(&mut self, id: ReservationId) -> Result<Bytes, StaleReservation> {
        let record = *self.active(id)?;
        let bytes = record.unused();
        let space = &mut self.spaces[record.place as usize];
        space.active -= 1;
        space.counters.releases += 1;
        space.unreserved += bytes;
        let sums = &mut space.tags[Tag::NONE.index()];
        sums.unreserved += bytes;
        sums.charged += bytes;
        sums.used += bytes;
        let released =
            ReservationRecord { size: Bytes::ZERO, released: true, beyond_limit: false, ..record };
        // The peaks and levels see the sums only now that both sides are changed.
        self.replace(id, released);
        self.spaces[record.place as usize].tags[Tag::NONE.index()].settle();
        if released.used.is_zero() {
            self.records.remove(id);
        }
        Ok(bytes)
    }

    /// Charges an allocation that exceeds its reservation, as `action` says. Exact: the bytes by
    /// which a reservation grows are charged once.
    ///
    /// # Errors
    /// The action is to fail or grows too little, or the space has no room. Nothing changes.
    pub fn charge_overrun(
        &mut self,
        id: ReservationId,
        bytes: Bytes,
        action: OverrunAction,
    ) -> Result<OverrunOutcome, ChargeError> {
        let record = *self.active(id)?;
        let levels = *self.levels_of(&record);
        let bytes = levels.round_up(bytes);
        if bytes <= record.unused() {
            self.replace(id, ReservationRecord { used: record.used + bytes, ..record });
            return Ok(OverrunOutcome::Within);
        }
        let overrun = overrun(id, &record, bytes);
        self.spaces[record.place as usize].counters.overruns += 1;
        match action {
            OverrunAction::Fail => Err(ChargeError::OverReservation { overrun }),
            OverrunAction::Ignore => {
                let by = bytes - record.unused();
                if !self.spaces[record.place as usize].fits(by, Bound::Capacity) {
                    return Err(self.refuse(&record, by, Bound::Capacity).into());
                }
                self.replace(id, ReservationRecord { used: record.used + bytes, ..record });
                Ok(OverrunOutcome::Ignored { by })
            }
            OverrunAction::Grow { preferred, min, beyond_limit } => {
                let bound = if beyond_limit { Bound::Capacity } else { Bound::Limit };
                let sizes = [preferred, min].map(|by| levels.round_up(by)).into_iter();
                let enough: SmallVec<[Bytes; 2]> = sizes.filter(|&by| by >= overrun.by).collect();
                if enough.is_empty() {
                    return Err(ChargeError::OverReservation { overrun });
                }
                let grown = |&by: &Bytes| Some((by, self.grown(record, by, bytes, bound)?));
                let choice = enough.iter().find_map(grown);
                let Some((by, grown)) = choice else {
                    return Err(self.refuse(&record, overrun.by, bound).into());
                };
                self.replace(id, grown);
                Ok(OverrunOutcome::Grown { by })
            }
        }
    }

    /// Credits a free to the reservation that was charged, released or not. Returns the bytes that
    /// came back to the space; the others stay reserved.
    ///
    /// # Errors
    /// Fewer bytes are charged to it.
    #[inline]
    pub fn uncharge(&mut self, id: ReservationId, bytes: Bytes) -> Result<Bytes, UnchargeError> {
        let record = self.records.get_mut(id).ok_or(StaleReservation::Unknown { id })?;
        let space = &mut self.spaces[record.place as usize];
        let freed = space.levels.round_up(bytes);
        if freed > record.used {
            return Err(UnchargeError::TooMuch { id, freed, used: record.used });
        }
        if record.used <= record.size {
            // All use is within the size, so the bytes stay reserved.
            record.used -= freed;
            space.tags[record.tag.index()].used -= freed;
            return Ok(Bytes::ZERO);
        }
        let record = *record;
        let after = ReservationRecord { used: record.used - freed, ..record };
        self.replace(id, after);
        if after.released && after.used.is_zero() {
            self.records.remove(id);
        }
        Ok(record.charged() - after.charged())
    }

    /// Charges an allocation without a reservation, up to the capacity.
    ///
    /// # Errors
    /// The space has no room.
    pub fn charge_unreserved(
        &mut self,
        space: SpaceId,
        bytes: Bytes,
        tag: Tag,
    ) -> Result<(), UnreservedError> {
        let place = self.place(space)?;
        self.tag_name(tag)?;
        let space = &mut self.spaces[place];
        let bytes = space.levels.round_up(bytes);
        if !space.fits(bytes, Bound::Capacity) {
            space.counters.refusals += 1;
            return Err(self.refusal(place, bytes, Bound::Capacity).into());
        }
        space.unreserved += bytes;
        let sums = &mut space.tags[tag.index()];
        sums.unreserved += bytes;
        sums.charged += bytes;
        sums.used += bytes;
        space.settle(tag);
        Ok(())
    }

    /// Undoes [`charge_unreserved`](Ledger::charge_unreserved). Returns the bytes that came back to
    /// the space, in whole granules.
    ///
    /// # Errors
    /// Fewer bytes are charged under this tag.
    pub fn uncharge_unreserved(
        &mut self,
        space: SpaceId,
        bytes: Bytes,
        tag: Tag,
    ) -> Result<Bytes, UnreservedError> {
        let place = self.place(space)?;
        self.tag_name(tag)?;
        let account = &mut self.spaces[place];
        let freed = account.levels.round_up(bytes);
        let sums = &mut account.tags[tag.index()];
        if freed > sums.unreserved {
            return Err(UnreservedError::TooMuch { space, freed, used: sums.unreserved });
        }
        sums.unreserved -= freed;
        sums.charged -= freed;
        sums.used -= freed;
        account.unreserved -= freed;
        account.settle(tag);
        Ok(freed)
    }
}

fn overrun(id: ReservationId, record: &ReservationRecord, bytes: Bytes) -> Overrun {
    let &ReservationRecord { space, size, used, .. } = record;
    let needed = used.checked_add(bytes).unwrap_or(Bytes::new(u64::MAX));
    Overrun { reservation: id, space, bytes, by: needed - size, size, used }
}
