//! What is allocated: charges of reservations and outside of any, and the credits for their frees.

use smallvec::SmallVec;

use super::{
    Bound, ChargeError, Charged, Ledger, LimitPolicy, Overrun, OverrunAction, OverrunOutcome,
    ReservationId, ReservationRecord, StaleReservation, Tag, UnchargeError, UnreservedError,
};
use crate::ledger::core::SpaceId;
use vramp_core::Bytes;

impl Ledger {
    /// Accounts for an allocation of `bytes`, if it fits in the reservation.
    ///
    /// # Errors
    /// There is no such reservation. An allocation that does not fit is no error yet.
    pub fn charge(&mut self, id: ReservationId, bytes: Bytes) -> Result<Charged, StaleReservation> {
        self.active(id)?;
        let record = &mut self.records[id];
        let space = &mut self.spaces[record.place as usize];
        let bytes = space.levels.round_up(bytes);
        if bytes > record.unused() {
            return Ok(Charged::Overrun(over(id, record, bytes)));
        }
        // What a reservation holds is charged already: only its use changes.
        record.used += bytes;
        record.peak = record.peak.max(record.used);
        let tag = &mut space.tags[record.tag.index()];
        tag.used += bytes;
        tag.peak_used = tag.peak_used.max(tag.used);
        Ok(Charged::Within)
    }

    /// Charges by a stock policy: [`charge`](Ledger::charge), and what it says about the excess.
    ///
    /// # Errors
    /// As [`charge_overrun`](Ledger::charge_overrun).
    pub fn charge_by(
        &mut self,
        id: ReservationId,
        bytes: Bytes,
        policy: LimitPolicy,
    ) -> Result<OverrunOutcome, ChargeError> {
        match self.charge(id, bytes)? {
            Charged::Within => Ok(OverrunOutcome::Within),
            Charged::Overrun(over) => self.charge_overrun(id, bytes, policy.answer(&over)),
        }
    }

    /// Accounts for an allocation that exceeds its reservation, as decided. Exact: what a grown
    /// reservation holds is charged once, as part of it.
    ///
    /// # Errors
    /// The answer is to fail or grants too little, or the space has no room. Nothing changes.
    pub fn charge_overrun(
        &mut self,
        id: ReservationId,
        bytes: Bytes,
        answer: OverrunAction,
    ) -> Result<OverrunOutcome, ChargeError> {
        let record = *self.active(id)?;
        let levels = *self.levels_of(&record);
        let bytes = levels.round_up(bytes);
        if bytes <= record.unused() {
            self.replace(id, ReservationRecord { used: record.used + bytes, ..record });
            return Ok(OverrunOutcome::Within);
        }
        let over = over(id, &record, bytes);
        self.spaces[record.place as usize].counters.overruns += 1;
        match answer {
            OverrunAction::Fail => Err(ChargeError::OverReservation { over }),
            OverrunAction::Ignore => {
                let by = bytes - record.unused();
                if !self.spaces[record.place as usize].fits(by, Bound::Capacity) {
                    return Err(self.refuse(&record, by, Bound::Capacity).into());
                }
                self.replace(id, ReservationRecord { used: record.used + bytes, ..record });
                Ok(OverrunOutcome::Ignored { by })
            }
            OverrunAction::Grow { wanted, least, beyond_limit } => {
                let bound = if beyond_limit { Bound::Capacity } else { Bound::Limit };
                let sizes = [wanted, least].map(|by| levels.round_up(by)).into_iter();
                let enough: SmallVec<[Bytes; 2]> = sizes.filter(|&by| by >= over.by).collect();
                if enough.is_empty() {
                    return Err(ChargeError::OverReservation { over });
                }
                let grown = |&by: &Bytes| Some((by, self.grown(record, by, bytes, bound)?));
                let choice = enough.iter().find_map(grown);
                let Some((by, grown)) = choice else {
                    return Err(self.refuse(&record, over.by, bound).into());
                };
                self.replace(id, grown);
                Ok(OverrunOutcome::Grown { by })
            }
        }
    }

    /// Credits a free to the reservation that was charged for it, released or not, and returns
    /// what came back to the space: the rest stays reserved.
    ///
    /// # Errors
    /// Less is charged to it.
    pub fn uncharge(&mut self, id: ReservationId, bytes: Bytes) -> Result<Bytes, UnchargeError> {
        let record = self.records.get_mut(id).ok_or(StaleReservation::Unknown { id })?;
        let space = &mut self.spaces[record.place as usize];
        let freed = space.levels.round_up(bytes);
        if freed > record.used {
            return Err(UnchargeError::TooMuch { id, freed, used: record.used });
        }
        if record.used <= record.size {
            // All of it was inside the reservation, and stays reserved.
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

    /// Accounts for an allocation without a reservation, up to the capacity.
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
        let use_ = &mut space.tags[tag.index()];
        use_.unreserved += bytes;
        use_.charged += bytes;
        use_.used += bytes;
        space.settle(tag);
        Ok(())
    }

    /// Takes back [`charge_unreserved`](Ledger::charge_unreserved): all of `bytes` came back to
    /// the space. Returns them in whole granules.
    ///
    /// # Errors
    /// Less is charged under this tag.
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
        let use_ = &mut account.tags[tag.index()];
        if freed > use_.unreserved {
            return Err(UnreservedError::TooMuch { space, freed, used: use_.unreserved });
        }
        use_.unreserved -= freed;
        use_.charged -= freed;
        use_.used -= freed;
        account.unreserved -= freed;
        account.settle(tag);
        Ok(freed)
    }
}

fn over(id: ReservationId, record: &ReservationRecord, bytes: Bytes) -> Overrun {
    let &ReservationRecord { space, size, used, .. } = record;
    let needed = used.checked_add(bytes).unwrap_or(Bytes::new(u64::MAX));
    Overrun { reservation: id, space, bytes, by: needed - size, size, used }
}
