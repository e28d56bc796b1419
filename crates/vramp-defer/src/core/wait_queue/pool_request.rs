//! Requests of the pool in the queue of leases: memory for which buffers leave.
//!
//! 1. A request that found no memory enters the queue ([`Deferrables::enqueue_pool_request`]) before victims
//!    are chosen for it.
//! 2. A younger request for a lease waits behind it if it would take what leaves: if it names a victim, which
//!    would stay then, or a buffer that lacks memory. Others are granted as always, and so are all older ones.
//! 3. It leaves the queue ([`Deferrables::dequeue`]) when it has its memory or gives up.
//!
//! It waits for nothing here, so it never waits for a lease. It keeps room as a waiter that lacks some: who
//! holds a lease with room on the card passes it as it passes those, and so do the leases of its own holder.
//!
//! Growth: O(log waiters) to enter and leave, and O(pieces) for each older one that a request for a lease
//! looks at.

use std::collections::BTreeSet;

use smallvec::{SmallVec, smallvec};

use super::super::buffer_state::{Piece, PieceMove};
use super::super::lease::SplitRequest;
use super::super::overtake::Overtaking;
use super::{Blocked, Place, RoomSet, Waiter};
use crate::planner::{Deferrables, HolderKey, Ticket};
use vramp_core::Bytes;

impl Deferrables {
    /// Adds a request of the pool to the queue, at its end. `holder` has the leases that the thread of the
    /// request takes meanwhile. O(log waiters).
    pub fn enqueue_pool_request(&mut self, holder: HolderKey) -> Ticket {
        let ticket = self.ticket();
        let waiter = Waiter {
            buffers: SmallVec::new(),
            in_place_allowed: SmallVec::new(),
            streams: SmallVec::new(),
            is_of_pool: true,
            most: Bytes::ZERO,
            holders: smallvec![holder],
            blocked: Blocked::Unchecked,
            takes: RoomSet::new(),
            followers: BTreeSet::new(),
        };
        let queue = &mut self.wait_queue;
        queue.insert(ticket, waiter);
        queue.marked.remove(&ticket);
        queue.record(ticket, Blocked::Room { keeps: true }, RoomSet::new());
        ticket
    }

    /// Returns the youngest older request of the pool from which a lease would take memory.
    pub(super) fn older_of_pool(
        &self,
        wanted: &SplitRequest,
        place: &Place<'_>,
        overtaking: &Overtaking<'_>,
    ) -> Option<Ticket> {
        let older = self.wait_queue.of_pool.range(..place.ticket);
        if older.clone().next().is_none() || overtaking.hold_room() || !self.takes_memory(wanted) {
            return None;
        }
        let is_own = |older: &Ticket| {
            self.wait_queue.step();
            let holders = &self.wait_queue.waiters[older].holders;
            holders.iter().any(|holder| place.holders.contains(holder))
        };
        older.rev().copied().find(|older| !is_own(older))
    }

    /// Returns true if a lease would keep a victim, or need memory that it does not have.
    fn takes_memory(&self, wanted: &SplitRequest) -> bool {
        let taken = self.taken_by(wanted);
        let named = wanted.come.iter().map(|&(id, _)| &self.buffers[id]);
        let takes =
            |piece: &Piece| !piece.backed || piece.motion.is_some_and(PieceMove::is_leaving);
        let mut named = named.filter(|buffer| taken.contains(&buffer.range));
        named.any(|buffer| buffer.pieces.iter().any(takes))
    }
}
