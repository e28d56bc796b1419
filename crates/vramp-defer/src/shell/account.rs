//! What the memory of buffers on the card is charged to.
//!
//! 1. A granted lease needs memory that is not paid yet: [`Account::begin`] counts it as pending.
//! 2. [`Account::pay`] replaces pending bytes by charges, or [`Account::cancel`] ends the need.
//! 3. Memory that leaves the card ends charges of as many bytes ([`Account::settle`]).
//!
//! At any time `paid + pending + unpaid >= occupied`, so memory that leaves the card comes back to its payer,
//! and never pays for a younger lease. The bytes of all payers are alike: a charge is not for one
//! buffer. Growth: O(payers), which are the space and the reservations that paid for leases.

use std::collections::BTreeMap;

use smallvec::SmallVec;

use crate::planner::BufferLeaseId;
use vramp_core::{Bytes, Inconsistency};
use vramp_tiers::reserve::{Charge, Payer, ReservationId};

/// Charges that ended. They are to be dropped after unlocking: that wakes waiters.
pub(super) type EndedCharges = SmallVec<[Charge; 2]>;

/// The charges of one manager in the space of its card.
pub(super) struct Account {
    /// Unit of the space's amounts. Without a space nothing is charged or pending.
    granule: Option<Bytes>,
    /// One for each payer, none of them empty.
    charges: Vec<Charge>,
    /// What granted leases need and have not paid.
    pending: BTreeMap<BufferLeaseId, Bytes>,
    /// What a lease that ended without paying leaves to the next one: memory that a shared lease of
    /// the same buffers uses.
    unpaid: Bytes,
    /// Bytes that allocations of a reservation lack, which settling credits first.
    reclaims: Vec<(ReservationId, Bytes)>,
}

impl Account {
    pub fn new(granule: Option<Bytes>) -> Account {
        Account {
            granule,
            charges: Vec::new(),
            pending: BTreeMap::new(),
            unpaid: Bytes::ZERO,
            reclaims: Vec::new(),
        }
    }

    /// Counts what a new lease needs: all that is occupied and not paid.
    pub fn begin(&mut self, lease: BufferLeaseId, occupied: Bytes) {
        if self.granule.is_none() {
            return;
        }
        let unpaid = std::mem::take(&mut self.unpaid);
        let need = self.whole(occupied).saturating_sub(self.covered()).max(unpaid);
        if !need.is_zero() {
            self.pending.insert(lease, need);
        }
    }

    /// Returns what a lease needs and has not paid.
    pub fn need(&self, lease: BufferLeaseId) -> Bytes {
        self.pending.get(&lease).copied().unwrap_or_default()
    }

    /// Pays what a lease needs.
    pub fn pay(&mut self, lease: BufferLeaseId, charges: impl IntoIterator<Item = Charge>) {
        let need = self.pending.remove(&lease).unwrap_or_default();
        let before = self.paid();
        charges.into_iter().for_each(|charge| self.add(charge));
        debug_assert!(self.paid() - before >= need, "{lease} paid less than {need}");
    }

    /// Ends what a lease needs. To be called in the step in which the planner ends the lease, with
    /// what is occupied without it.
    pub fn cancel(&mut self, lease: BufferLeaseId, occupied: Bytes) {
        if self.pending.remove(&lease).is_some() {
            let rest = self.whole(occupied).saturating_sub(self.covered());
            self.unpaid += rest;
        }
    }

    /// Checks that all memory on the card is paid for, or about to be.
    ///
    /// # Errors
    /// It is not, or a payer has an empty charge.
    pub fn audit(&self, occupied: Bytes) -> Result<(), Inconsistency> {
        if self.granule.is_none() {
            return Ok(());
        }
        let (paid, covered) = (self.paid(), self.covered());
        if covered < self.whole(occupied) {
            let what = format!("{occupied} are on the card, {covered} are paid or about to be");
            return Err(Inconsistency { what });
        }
        if self.pending.is_empty() && paid > self.whole(occupied) {
            let what = format!("{occupied} are on the card, {paid} are paid");
            return Err(Inconsistency { what });
        }
        match self.charges.iter().find(|charge| charge.bytes().is_zero()) {
            Some(empty) => Err(Inconsistency { what: format!("an empty charge: {empty:?}") }),
            None => Ok(()),
        }
    }

    /// Returns the bytes that come back to the space when memory leaves the card.
    pub fn returnable(&self) -> Bytes {
        let returns = self.charges.iter().filter(|charge| !charge.stays_reserved());
        returns.map(Charge::bytes).sum()
    }

    /// Returns the bytes that a reservation pays.
    pub fn paid_by(&self, reservation: ReservationId) -> Bytes {
        let payer = Payer::Reservation(reservation);
        let charge = self.charges.iter().find(|charge| charge.payer() == payer);
        charge.map(Charge::bytes).unwrap_or_default()
    }

    /// From now on memory that leaves the card is credited to `reservation` first, up to `bytes`.
    pub fn begin_reclaim(&mut self, reservation: ReservationId, bytes: Bytes) {
        self.reclaims.push((reservation, bytes));
    }

    /// Ends what [`begin_reclaim`](Account::begin_reclaim) began. Returns the bytes not credited.
    pub fn end_reclaim(&mut self, reservation: ReservationId) -> Bytes {
        let place = self.reclaims.iter().position(|(id, _)| *id == reservation);
        place.map_or(Bytes::ZERO, |place| self.reclaims.swap_remove(place).1)
    }

    /// Moves up to `charge.bytes()` that a reservation pays to another charge.
    pub fn replace(&mut self, reservation: ReservationId, charge: Charge) -> EndedCharges {
        let mut ended = EndedCharges::new();
        let bytes = charge.bytes().min(self.paid_by(reservation));
        self.take_from(Payer::Reservation(reservation), bytes, &mut ended);
        self.add(charge);
        ended
    }

    /// Ends charges beyond what is occupied: those that reservations lack first, then those that
    /// come back to the space, then those that stay reserved.
    pub fn settle(&mut self, occupied: Bytes) -> EndedCharges {
        let mut ended = EndedCharges::new();
        let mut over = self.covered().saturating_sub(self.whole(occupied));
        let settled = over.min(self.unpaid);
        self.unpaid -= settled;
        over = (over - settled).min(self.paid());
        if over.is_zero() {
            return ended;
        }
        for place in 0..self.reclaims.len() {
            let (id, lacks) = self.reclaims[place];
            let taken = self.take_from(Payer::Reservation(id), lacks.min(over), &mut ended);
            self.reclaims[place].1 -= taken;
            over -= taken;
        }
        let mut payers: SmallVec<[(bool, Payer); 4]> =
            self.charges.iter().map(|charge| (charge.stays_reserved(), charge.payer())).collect();
        payers.sort_by_key(|&(stays, _)| stays);
        for (_, payer) in payers {
            over -= self.take_from(payer, over, &mut ended);
        }
        ended
    }

    /// Returns the number of charges, of leases that have not paid, and of reclaims.
    pub fn entries(&self) -> usize {
        self.charges.len() + self.pending.len() + self.reclaims.len()
    }

    /// Returns the sum of all charges.
    pub fn paid(&self) -> Bytes {
        self.charges.iter().map(Charge::bytes).sum()
    }

    fn covered(&self) -> Bytes {
        self.paid() + self.unpaid + self.pending.values().copied().sum()
    }

    fn whole(&self, bytes: Bytes) -> Bytes {
        self.granule.and_then(|granule| bytes.checked_round_up(granule)).unwrap_or(bytes)
    }

    fn add(&mut self, charge: Charge) {
        let known = self.charges.iter_mut().find(|known| known.payer() == charge.payer());
        match known {
            Some(known) => known.merge(charge).expect("all charges are of one space"),
            None if charge.bytes().is_zero() => {}
            None => self.charges.push(charge),
        }
    }

    /// Takes up to `bytes` from the charge of one payer. Returns the bytes taken.
    fn take_from(&mut self, payer: Payer, bytes: Bytes, ended: &mut EndedCharges) -> Bytes {
        let place = self.charges.iter().position(|charge| charge.payer() == payer);
        let Some(place) = place.filter(|_| !bytes.is_zero()) else { return Bytes::ZERO };
        let taken = bytes.min(self.charges[place].bytes());
        match taken == self.charges[place].bytes() {
            true => ended.push(self.charges.swap_remove(place)),
            false => ended.push(self.charges[place].split(taken)),
        }
        taken
    }
}
