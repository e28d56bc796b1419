//! Copies on other cards: made, restored, and freed.
//!
//! 1. A piece that leaves is copied on one of two streams, in turn, to memory that a [`PeerStore`](vramp_tiers::PeerStore) took
//!    of the other card. No driver call beside those of the copy if a chunk is free.
//! 2. If the other card has no memory, or its driver fails, the piece goes to the host at once.
//! 3. A lease restores it on two other streams. The copy stays valid until the piece is written.
//! 4. A stale copy is freed once all that may read it is complete.
//!
//! `relieve_peer.rs` moves copies on when the other card needs its memory.

use crate::planner::{CopyOut, PeerId, Restore, SpillTier, UseToken};
use vramp_alloc::Driver;
use vramp_driver::DeviceCopy;

use super::events::LeaseStream;
use super::peer_stores::STORE;
use super::report::MoveKind;
use super::spill_error::SpillError;
use super::state::{Shared, State};
use vramp_tiers::peer::PeerAllocation;

impl Shared {
    /// Starts the copy of a piece to another card, after the work that writes it. `None` if the card
    /// has no memory, or a call failed: the piece goes to the host or the disk then.
    ///
    /// # Errors
    /// There is no room below either.
    pub(super) fn start_copy_to_peer(
        &self,
        out: &mut CopyOut,
        peer: PeerId,
    ) -> Result<Option<(PeerAllocation, UseToken)>, SpillError> {
        let store = self.peers.store(peer).expect(STORE);
        let copied = store.allocate(out.at.len).map_err(SpillError::from);
        let copied = copied.and_then(|copy| {
            let token = self.copy_to_peer(out, &copy)?;
            Ok((copy, token))
        });
        let error = match copied {
            Ok(copied) => return Ok(Some(copied)),
            Err(error) => error,
        };
        if !error.failure().is_capacity() {
            self.suspend_peer(peer);
        }
        let room = self.room_below();
        let mut state = self.lock();
        state.stats.peer_refused += 1;
        let Some(instead) = state.core.redirect(out.id, room) else { return Err(error) };
        if !error.failure().is_capacity() {
            state.note_failed(out.piece, MoveKind::Spilled(out.to), &error);
        }
        out.to = Some(instead);
        Ok(None)
    }

    fn copy_to_peer(&self, out: &CopyOut, copy: &PeerAllocation) -> Result<UseToken, SpillError> {
        let stream = self.peers.out();
        let mut guard = self.lock();
        let state = &mut *guard;
        for &token in &out.copy_after {
            if let Some(event) = state.events.of(token)? {
                self.driver.wait(stream.raw, event.event())?;
            }
        }
        let (from, to) = (state.addresses(out.at).start, copy.range().start);
        self.driver.copy(stream.raw, DeviceCopy { from, to, len: out.at.len })?;
        let token = state.events.note(stream.id);
        state.note_copy_queued(out, token);
        Ok(token)
    }

    /// Sends nothing to a card for a while: copies to it fail.
    pub(super) fn suspend_peer(&self, peer: PeerId) {
        self.peers.store(peer).expect(STORE).give_way();
    }

    /// Restores a piece from another card. Work queued on `streams` later runs after it.
    ///
    /// # Errors
    /// A driver call failed: nothing was copied, or not all streams wait for it.
    pub(super) fn restore_from_peer(
        &self,
        fill: &Restore,
        streams: &[LeaseStream],
    ) -> Result<(), SpillError> {
        let stream = self.peers.back();
        let mut guard = self.lock();
        let state = &mut *guard;
        let copy = state.copies.get(&fill.piece).and_then(|below| below.peer.as_ref());
        let from = copy.expect("the planner counts the copy").range().start;
        let (to, len) = (state.addresses(fill.at).start, fill.at.len);
        // After the work of the memory's earlier owners.
        let ready_after = state.events.note(self.stream.id);
        if let Some(event) = state.events.of(ready_after)? {
            self.driver.wait(stream.raw, event.event())?;
        }
        self.driver.copy(stream.raw, DeviceCopy { from, to, len })?;
        let token = state.events.note(stream.id);
        let done = state.core.restore_queued(fill.id, token);
        done.expect("a restore that was begun is not settled");
        state.emit_retrieved(fill);
        let event = state.events.of(token);
        state.stats.from_peer_bytes += len.count();
        drop(guard);
        if let Some(event) = event? {
            let event = event.event();
            streams.iter().try_for_each(|stream| self.driver.wait(stream.raw, event))?;
        }
        Ok(())
    }
}

impl State {
    /// Frees a stale copy on another card once the work is complete that may still use it.
    pub fn retire_peer_copy(&mut self, copy: PeerAllocation, after: Vec<UseToken>) {
        self.retired_peers.push((copy, after));
        self.recycle_peer_copies();
    }

    /// Frees stale copies on other cards that no work uses.
    pub fn recycle_peer_copies(&mut self) {
        for (copy, after) in std::mem::take(&mut self.retired_peers) {
            match after.iter().all(|&token| self.events.is_over(token)) {
                // Freeing it may release a chunk and credit a charge: after unlocking.
                true => self.to_drop.push(Box::new(copy)),
                false => self.retired_peers.push((copy, after)),
            }
        }
    }
}

/// Returns the card of a tier.
pub(super) fn peer_of(tier: Option<SpillTier>) -> Option<PeerId> {
    match tier {
        Some(SpillTier::Peer(peer)) => Some(peer),
        _ => None,
    }
}
