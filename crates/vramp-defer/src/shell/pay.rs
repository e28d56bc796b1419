//! Paying for the memory of a lease, in the same queue and account as reservations.
//!
//! 1. A granted lease pays for memory that is to be mapped: first with a reservation that pays for
//!    it, then from the space, within its limit and in the order of its queue. What is missing is
//!    spilled meanwhile. The lease is held, so its own buffers stay.
//! 2. If that fails the lease is cancelled. Its request reserves the missing bytes in the space's queue like any
//!    other ([`QueuedRequest`](super::queued_request::QueuedRequest)) and holds nothing: neither buffers, nor a charge, nor
//!    a place in front of other leases. So what an older request waits for can leave.
//! 3. The queue serves it, and the request asks for its lease anew, at the place among the leases that
//!    it had before. If a lease is in the way the bytes go back. If it lacks bytes again, because some of its
//!    buffers left, it reserves all of them at the place in the space's queue that it had before.
//!
//! A request that lacks budget keeps no other from its buffers. It cannot: others may hold the missing bytes as
//! reservations, and which thread has to lease before it ends one of those is not known.
//!
//! What a request in the space's queue sleeps for, and which thread has to wake it:
//!
//! | the missing bytes are | event | thread |
//! |---|---|---|
//! | idle buffers | a spill ([`Shared::spill_for_space`]) | the waiter itself, before it sleeps; it tries again after pauses, a bounded number of times |
//! | claimed by the spill of another waiter | [`Account::settle`](super::account::Account::settle) returns them; what it could not free, the next attempt claims | that waiter, then this one |
//! | reserved, or charged to allocations | they are released | their owner; the queue serves all that fit |
//! | under leases or pins | [`Shared::notify_spillable`]: the waiter spills again | the one that ends the last of these |
//! | idle, with no room on host and disk | [`Shared::notify_spillable`] | the one that drops or discards a buffer; the watching thread once host or disk have more room |
//!
//! A request of a task stands in the same queue. Its waker is called where a thread would be woken, and
//! the watching thread calls it after pauses and at the deadline.
//!
//! Without a deadline a lease in the last state is refused if no other owner can make room
//! (see below). [`SpillManager::cancel_waits`](super::manager::SpillManager::cancel_waits) ends every
//! wait.
//!
//! A waiter of the space whose bytes cannot be spilled, because leases keep them, would starve while
//! threads lease the same resident buffers again and again. So while there is one, a request of an
//! owner without leases reserves no bytes there, but waits for a turn to [keep](vramp_tiers::RequestBuilder::keeping) those that its
//! buffers need: it overtakes the waiter only where as many are free, and as far as reservations do.
//!
//! A request there says how many bytes other leases of its owner keep meanwhile. So a waiter of the space that needs those
//! does not keep the owner from a lease that it may have to have before it ends the others.
//!
//! Leases without a deadline for which memory can never become free.
//!
//! A lease that lacks memory waits until some is free. If all buffers are idle and no tier has room for
//! more of them, no thread will free any. A lease with a deadline then waits until it: a thread may
//! drop or discard a buffer meanwhile. One without a deadline is refused:
//!
//! 1. An attempt failed, and the manager is [at rest](Shared::at_rest). The request waits, and is
//!    tried once more: memory may have become free since the attempt looked for it.
//! 2. The second attempt failed, the manager is at rest, and nothing changed in between: the request
//!    is refused with [`SpillError::NothingCanLeave`].
//! 3. While a request waits in the queue of the card's space, the watching thread looks for rest, and
//!    ends that wait for the two attempts.
//!
//! What allocations of the allocator hold on a card counts as there to stay, as it does in the capacity
//! of leases. What others hold in the spaces of the host, the disk and the card's budget counts as
//! memory that comes back.
//!
//! Growth, from 10 to 100,000 requests that lack budget: one enters and ends here in O(log requests), and leaves
//! nothing. A look of the watching thread is O(log leases) for each one without a
//! deadline, and O(copies) once if one of them is stuck; one for each attempt without a deadline that failed. In a
//! full space a release serves those that fit now, and a lease that ends wakes as many waiters as its bytes are
//! for. A holder that is slow or never ends keeps its bytes: requests with a deadline end then, the others wait.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use smallvec::SmallVec;

use super::copies::SpilledCopies;
use super::events::LeaseStream;
use super::hand_over::{Outcome, SeenRoom};
use super::spill_error::SpillError;
use super::state::{Shared, State};
use crate::planner::{Access, BufferId, BufferLeaseId, HolderKey, Ticket};
use vramp_core::Bytes;
use vramp_tiers::reserve::{Charge, ReservationId, ReserveError, WaiterId};
use vramp_tiers::spill::Spilling;
use vramp_tiers::{MemorySpace, Reservation};

/// What pays for one request: a reservation, and bytes from the space's queue.
#[derive(Default)]
pub(super) struct Payer {
    /// Reservation given by the caller. Otherwise those attached to the thread or the stream pay.
    pub reservation: Option<Arc<Reservation>>,
    /// Bytes from the space's queue.
    pub reserved: Option<Charge>,
    /// Bytes that the last attempt lacked, the reserved ones included.
    pub lacks: Bytes,
    /// Place in the space's queue, from the first wait there on.
    pub place: Option<WaiterId>,
}

impl Shared {
    /// Pays for the memory that a granted lease needs.
    ///
    /// # Errors
    /// There is no room within the limit, or older requests go first.
    pub(super) fn pay(
        &self,
        lease: BufferLeaseId,
        streams: &[LeaseStream],
        payer: &mut Payer,
    ) -> Result<(), SpillError> {
        // What is not needed goes back, after the lock is free.
        let mut reserved = payer.reserved.take();
        let Some(space) = &self.budget else { return Ok(()) };
        let need = self.lock().account.need(lease);
        if need.is_zero() {
            return Ok(());
        }
        let mut charges: SmallVec<[Charge; 3]> = SmallVec::new();
        let mut left = need;
        if let Some(charge) = self.charge_reservation(space, streams, payer, left) {
            left -= charge.bytes();
            charges.push(charge);
        }
        payer.lacks = left;
        if let Some(reserved) = &mut reserved {
            let now = left.min(reserved.bytes());
            left -= now;
            charges.push(reserved.split(now));
        }
        if !left.is_zero() {
            // Not while holding the lock: callbacks of the space may call the manager.
            charges.push(self.charge_now(space, left)?);
        }
        let mut state = self.lock();
        state.account.pay(lease, charges);
        state.settle_charges();
        Ok(())
    }

    fn charge_reservation(
        &self,
        space: &MemorySpace,
        streams: &[LeaseStream],
        payer: &Payer,
        max: Bytes,
    ) -> Option<Charge> {
        match &payer.reservation {
            Some(reservation) => reservation.charge_up_to(max),
            None => {
                let streams: SmallVec<[_; 2]> = streams.iter().map(|stream| stream.id).collect();
                space.charge_attached(&self.allocator, &streams, max)
            }
        }
    }

    /// Charges the space at once, within its limit and in the order of its queue. Spills what is
    /// missing.
    fn charge_now(&self, space: &MemorySpace, bytes: Bytes) -> Result<Charge, SpillError> {
        let request = || space.request(bytes).spilling(Spilling::AlsoNow).now();
        let reserved = request().or_else(|error| {
            // A spiller of this space is not called from within one: its own buffers are spilled here.
            let lacks = match &error {
                ReserveError::NotNow(refusal) => bytes.saturating_sub(refusal.available()),
                _ => Bytes::ZERO,
            };
            match lacks.is_zero() || self.spill(lacks, &|| lacks).freed.is_zero() {
                true => Err(error),
                false => request(),
            }
        });
        reserved.map(Reservation::into_charge).map_err(no_budget)
    }

    /// Returns the memory of buffers if a request for them has to go behind the waiters of the space: one of
    /// these lacks memory that leases keep, and none of the holders has a lease. O(1) if there is no such waiter.
    pub(super) fn keeps_from_starving(
        &self,
        buffers: &[(BufferId, Access)],
        holders: &[HolderKey],
    ) -> Option<Bytes> {
        let space = self.budget.as_ref().filter(|_| self.starves.load(Ordering::Relaxed))?;
        if !space.has_waiters() {
            self.starves.store(false, Ordering::SeqCst);
            // A waiter may have come, and set it, between the two steps above.
            self.starves.fetch_or(space.has_waiters(), Ordering::SeqCst);
            return None;
        }
        let state = self.lock();
        let holds = holders.iter().any(|&holder| state.core.holds_lease(holder));
        (!holds).then(|| state.core.needed_by(buffers))
    }

    /// Spills for a request in the space's queue. Returns the bytes that came back to the space.
    pub(super) fn spill_for_space(&self, bytes: Bytes, left: &dyn Fn() -> Bytes) -> Bytes {
        // What reservations paid stays theirs: evicting it returns nothing to the space.
        let returnable = self.lock().account.returnable();
        let bytes_there = bytes.min(returnable);
        let freed = self.spill(bytes_there, &|| left().min(returnable)).freed;
        // What leases keep, or what has no room below the card.
        let still_there = || self.lock().account.returnable();
        if freed < bytes && still_there() >= bytes - freed {
            self.starves.store(true, Ordering::SeqCst);
            self.ring_watcher();
        }
        freed
    }

    /// Wakes waiters of the space that lack memory which could not leave: after leases
    /// or pins ended, or copies below the card made room. O(1) without such waiters.
    pub(super) fn notify_spillable(&self) {
        if let Some(space) = &self.budget
            && self.starves.load(Ordering::Relaxed)
        {
            let idle = self.lock().core.idle();
            space.notify_spillable(idle);
        }
    }

    /// Frees up to `bytes` of what a reservation pays, for an allocation that exceeds it: charges
    /// idle buffers to the space as far as there is room, and evicts the others. Returns the bytes
    /// credited to the reservation.
    pub(super) fn reclaim(&self, reservation: ReservationId, bytes: Bytes) -> Bytes {
        let Some(space) = &self.budget else { return Bytes::ZERO };
        let idle = {
            let state = self.lock();
            state.core.idle().min(state.account.paid_by(reservation))
        };
        let mut left = bytes.min(idle);
        if left.is_zero() {
            return Bytes::ZERO;
        }
        let wanted = left;
        if let Ok(part) = space.request(left).spilling(Spilling::Never).up_to(Bytes::ZERO) {
            let charge = part.into_charge();
            let mut state = self.lock();
            let ended = state.account.replace(reservation, charge);
            left -= ended.iter().map(Charge::bytes).sum();
            state.to_drop.push(Box::new(ended));
            state.settle_charges();
        }
        if !left.is_zero() {
            self.lock().account.begin_reclaim(reservation, left);
            self.spill(left, &|| left);
            let mut state = self.lock();
            left = state.account.end_reclaim(reservation);
        }
        wanted - left
    }
}

pub(super) fn no_budget(error: ReserveError) -> SpillError {
    SpillError::NoBudget { error: Box::new(error), failed: None, stuck: false }
}

impl Shared {
    /// Returns the number of changes so far if no memory can become free without a call of the program
    /// that drops or discards a buffer: all is idle, but for leases of `holders`.
    pub fn at_rest(&self, holders: &[HolderKey]) -> Option<u64> {
        if self.allocator.any_captures().unwrap_or(true) {
            return None;
        }
        let mut state = self.lock();
        // Work that cannot be queried counts as in flight.
        let _ = state.poll();
        let is_at_rest = state.is_idle(holders) && !self.others_hold_memory(&state);
        is_at_rest.then_some(state.changes)
    }

    /// Returns true if others hold memory in the spaces of host, disk or budget.
    fn others_hold_memory(&self, state: &State) -> bool {
        let returnable = state.account.returnable();
        if self.budget.as_ref().is_some_and(|space| space.total() > returnable) {
            return true;
        }
        let copies = || state.copies.values();
        let disk: Bytes = copies().map(SpilledCopies::charged_disk).sum();
        if self.disk.as_ref().is_some_and(|store| store.space().total() > disk) {
            return true;
        }
        let readable = state.readable.as_ref();
        let host = copies().map(SpilledCopies::charged_host).sum::<Bytes>()
            + readable.map(|readable| readable.charged()).unwrap_or_default();
        self.mover.pool().space().total() > host
    }

    /// Wakes requests in the queue of the card's space: to spill again if host or disk have more room
    /// than before, and to be refused if the manager is at rest.
    pub(super) fn watch_reserving(&self) {
        if !self.has_starving_waiters() && self.lock().waiting.endless.is_empty() {
            return;
        }
        let room = self.room_below();
        let now = SeenRoom { host: room.host, disk: room.disk };
        let seen = std::mem::replace(&mut self.lock().seen_room, now);
        if now.host > seen.host || now.disk > seen.disk {
            self.notify_spillable();
        }
        if self.allocator.any_captures().unwrap_or(true) {
            return;
        }
        let mut state = self.lock();
        let endless = state.waiting.endless.iter();
        let stuck =
            endless.filter(|(_, holders)| state.is_idle(holders)).map(|(&ticket, _)| ticket);
        let stuck: Vec<Ticket> = stuck.collect();
        if !stuck.is_empty() && !self.others_hold_memory(&state) {
            stuck.into_iter().for_each(|it| state.waiting.complete(it, Outcome::TriedAgain));
        }
    }

    /// Returns true if a request waits in the queue of the card's space for memory that could not leave.
    pub(super) fn has_starving_waiters(&self) -> bool {
        self.starves.load(Ordering::Relaxed)
            && self.budget.as_ref().is_some_and(|space| space.has_waiters())
    }
}

impl State {
    fn is_idle(&self, holders: &[HolderKey]) -> bool {
        self.staged_transfers == 0
            && self.deferred_ends.is_empty()
            && self.pending_release.is_empty()
            && self.mapping_now.is_empty()
            && self.retired_peers.is_empty()
            && self.core.are_all_idle(holders)
    }

    /// Records that memory or room may have become free, and retries the oldest stalled waiter.
    pub fn note_freed(&mut self) {
        self.changes += 1;
        self.core.retry_stalled();
    }
}
