//! Reclaiming memory of other cards: copies there are dropped, or move on to the host or the disk.
//!
//! It happens in the thread that needs the memory: in the other card's allocator, in a reservation of its
//! space, or where the limit is lowered. That thread holds no lock of the other card, and waits for copies
//! of this card alone.

use crate::planner::{PeerDemand, PeerId, Push, SpillTier};
use vramp_core::Bytes;

use super::buffer_events::BufferChange;
use super::report::{MoveKind, MoveRecord};
use super::spill_error::SpillError;
use super::state::{Shared, State};
use vramp_tiers::host::HostAllocation;
use vramp_tiers::movers::{DiskBudget, DiskCopy, MoveError};

/// A copy that has moved on.
enum MovedCopy {
    Host(HostAllocation),
    Disk(DiskCopy),
}

impl Shared {
    /// Returns memory to another card until `needed` bytes are released there, or no copy can move. The
    /// card gets no copies until the store's backoff is over.
    pub(super) fn give_way(&self, peer: PeerId, needed: Bytes) -> Bytes {
        let Some(store) = self.peers.store(peer) else { return Bytes::ZERO };
        let before = store.taken();
        store.give_way();
        let released = || before.saturating_sub(store.taken());
        // Copies share chunks, so several may have to move before one is released.
        while released() < needed && !self.relieve_peer(peer, needed - released()).is_zero() {}
        released()
    }

    /// Removes copies of `deficit` bytes from another card. Returns the bytes removed.
    pub(super) fn relieve_peer(&self, peer: PeerId, deficit: Bytes) -> Bytes {
        // Copies cannot be waited for while a stream captures.
        if deficit.is_zero() || self.allocator.any_captures().unwrap_or(true) {
            return Bytes::ZERO;
        }
        let room = self.room_below();
        if room.host < deficit {
            self.relieve_host(deficit - room.host);
        }
        let (choice, mut made) = {
            let mut state = self.lock();
            // Work that cannot be queried counts as in flight.
            let _ = state.poll();
            let room = self.room_below();
            let choice = state.core.reclaim_peer(&PeerDemand { peer, deficit, room });
            let moving: Bytes = choice.pushes.iter().map(|push| push.len).sum();
            state.drop_copies(&choice.stale);
            let dropped = deficit.saturating_sub(choice.missing).saturating_sub(moving);
            (choice, dropped)
        };
        for push in choice.pushes {
            made += self.move_on(&push);
            self.retry_stalled();
        }
        made
    }

    /// Moves a copy on. Returns the bytes that this removed from its card.
    pub(super) fn move_on(&self, push: &Push) -> Bytes {
        let began_ns = self.driver.now_ns();
        match self.copy_on(push) {
            Ok(moved) => {
                let took_ns = self.driver.now_ns().saturating_sub(began_ns);
                self.lock().note_moved_on(push, moved, began_ns, took_ns);
                push.len
            }
            Err(error) => {
                self.fail(push.id, push.piece, MoveKind::MovedOn(push.to), &error);
                Bytes::ZERO
            }
        }
    }

    /// Copies what lies on another card to the host or the disk, and waits for it.
    fn copy_on(&self, push: &Push) -> Result<MovedCopy, SpillError> {
        let range = {
            let state = self.lock();
            let copy = state.copies.get(&push.piece).and_then(|below| below.peer.as_ref());
            copy.expect("what moves on stays until it has").range()
        };
        if push.to == SpillTier::Disk {
            let store = self.disk.as_ref().expect("without a disk there is no room on it");
            let stored = self.with_staging(|| {
                let staged = self.mover.to_disk(range, store, DiskBudget::Space)?;
                self.keep_unsettled(push.piece.buffer, staged.finish())
            });
            return stored.map(MovedCopy::Disk);
        }
        let host = self.blocks(push.len)?;
        let moved = self.mover.to_host(range, host).start().map_err(MoveError::from);
        let moved = moved.and_then(|mut transfer| {
            transfer.wait()?;
            Ok(transfer.into_host())
        });
        self.keep_unsettled(push.piece.buffer, moved).map(MovedCopy::Host)
    }
}

impl State {
    /// Records that a copy lies on the host or the disk, and frees its memory on the other card.
    fn note_moved_on(&mut self, push: &Push, moved: MovedCopy, began_ns: u64, took_ns: u64) {
        let below = self.copies.entry(push.piece).or_default();
        let old = below.peer.take();
        match moved {
            MovedCopy::Host(host) => below.host = Some(host),
            MovedCopy::Disk(stored) => below.disk = Some(stored.into()),
        }
        // Work that reads it is complete: the piece left the card since.
        self.to_drop.extend(old.map(|old| Box::new(old) as Box<dyn Send>));
        let settled = self.core.settle(push.id);
        debug_assert!(settled.is_ok(), "{} moved on: {settled:?}", push.piece);
        self.stats.moved_on_bytes += push.len.count();
        let (piece, bytes, what) = (push.piece, push.len, MoveKind::MovedOn(push.to));
        self.history.push(MoveRecord { piece, bytes, what, began_ns, took_ns, cost: None });
        let Push { from, to, .. } = *push;
        self.emit(piece.buffer, BufferChange::Moved { from, to, bytes });
    }
}
