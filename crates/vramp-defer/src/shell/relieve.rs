//! Reclaiming memory of the host and of other cards: copies there are dropped, or move down to a slower tier.
//!
//! 1. A copy in blocks of the host is written to the disk from there.
//! 2. The host has no pointer to a copy that the device maps, or to one on another card: the device copies it
//!    into blocks, from which it is written. A mapped copy is unmapped once all is on the disk and no work
//!    reads it at its address.
//! 3. A failure leaves the copy valid where it is.
//!
//! It happens in the thread that needs the memory: for another card in that card's allocator, in a
//! reservation of its space, or where the limit is lowered. That thread holds no lock of the other card, and
//! waits for copies of this card alone. A [`Guest`] makes that card call.

use std::sync::{Arc, Weak};

use crate::planner::{
    HostDemand, PeerDemand, PeerId, Push, RangeId, SpillRoom, SpillTier, allocation_deficit,
};
use vramp_alloc::observe::Registration;
use vramp_alloc::range::HostBackingError;
use vramp_alloc::{Allocator, Driver};
use vramp_core::{AddrRange, Bytes};

use super::buffer_events::BufferChange;
use super::copies::PieceCopy;
use super::peer_stores::PeerPart;
use super::report::{MoveKind, MoveRecord};
use super::spill_error::SpillError;
use super::state::{Shared, State};
use vramp_tiers::Priority;
use vramp_tiers::host::{HostAllocation, HostPoolError};
use vramp_tiers::movers::{DiskCopy, MoveError};
use vramp_tiers::spill::{SpillRequest, SpillerRegistration};

impl Shared {
    /// Allocates blocks of the host for a user's copy. Copies that are not needed are dropped for
    /// them.
    pub(super) fn blocks(&self, len: Bytes) -> Result<HostAllocation, SpillError> {
        let pool = self.mover.pool();
        let mut blocks = pool.allocate(len);
        if matches!(blocks, Err(HostPoolError::Full(_))) && !self.relieve_host(len).is_zero() {
            blocks = pool.allocate(len);
        }
        Ok(blocks.map_err(MoveError::from)?)
    }

    /// Reclaims host memory. Returns the bytes freed.
    pub(super) fn relieve_host(&self, deficit: Bytes) -> Bytes {
        let (shed, made, pushes) = {
            let mut state = self.lock();
            let disk_room = self.room_below().disk;
            let shed = state.release_spare_copies();
            let deficit = deficit.saturating_sub(shed);
            let choice = state.core.reclaim_host(&HostDemand { deficit, disk_room });
            state.drop_copies(&choice.stale);
            state.release_spare_copies();
            let moving: Bytes = choice.pushes.iter().map(|push| push.len).sum();
            let made = deficit.saturating_sub(choice.missing).saturating_sub(moving);
            (shed, made, choice.pushes)
        };
        shed + made + self.push_to_disk(&pushes)
    }

    /// Moves host copies to the disk. Returns the bytes freed.
    pub(super) fn push_to_disk(&self, pushes: &[Push]) -> Bytes {
        let mut made = Bytes::ZERO;
        for push in pushes {
            if self.disk_gate.is_closed() {
                self.give_up(push.id);
                continue;
            }
            made += self.push(push);
            self.retry_stalled();
        }
        made
    }

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
            made += self.push(&push);
            self.retry_stalled();
        }
        made
    }

    /// Moves a copy down. Returns the bytes that this freed where it was.
    pub(super) fn push(&self, push: &Push) -> Bytes {
        let what = match push.from {
            SpillTier::Peer(_) => MoveKind::MovedOn(push.to),
            _ => MoveKind::Pushed,
        };
        let Some(mapped) = self.addresses_of_copy(push) else {
            self.give_up(push.id);
            return Bytes::ZERO;
        };
        let began_ns = self.driver.now_ns();
        let moved = self.copy_down(push, mapped).and_then(|copied| {
            let took_ns = self.driver.now_ns().saturating_sub(began_ns);
            if push.from == SpillTier::Host && mapped.is_some() {
                self.unmap_pushed(push)?;
            }
            Ok((copied, took_ns))
        });
        match moved {
            Ok((copied, took_ns)) => {
                self.lock().note_moved_down(push, copied, what, began_ns, took_ns)
            }
            Err(error) => {
                self.fail(push.id, push.piece, what, &error);
                Bytes::ZERO
            }
        }
    }

    /// Returns the addresses of a copy that the device reaches; within that `None` if it lies in blocks of
    /// the host. `None` if the device cannot copy it now.
    fn addresses_of_copy(&self, push: &Push) -> Option<Option<AddrRange>> {
        if let SpillTier::Peer(_) = push.from {
            let state = self.lock();
            let copy = state.copies.get(&push.piece).and_then(|below| below.peer.as_ref());
            return Some(Some(copy.expect("what moves on stays until it has").range()));
        }
        // A mapping in progress was marked before the push was chosen. None begins after it.
        let state = self.wait_until(|state| !state.is_mapping(push.piece.buffer));
        let mapped = state.copies.get(&push.piece).and_then(|below| below.mapped.as_ref());
        let start = mapped.map(|mapped| mapped.copy_mapping.range().start);
        drop(state);
        let Some(start) = start else { return Some(None) };
        // Querying events would invalidate a capture.
        let captures = self.allocator.any_captures().unwrap_or(true);
        (!captures).then(|| Some(AddrRange::new(start, push.len)))
    }

    /// Copies a copy, whose contents are complete since the piece left, to its next tier, and waits for it.
    fn copy_down(&self, push: &Push, from: Option<AddrRange>) -> Result<PieceCopy, SpillError> {
        let buffer = push.piece.buffer;
        match from {
            Some(range) if push.to == SpillTier::Disk => {
                self.copy_to_disk(buffer, || Ok((range, Vec::new())))
            }
            Some(range) => self.copy_to_blocks(buffer, range, None).map(PieceCopy::Host),
            None => {
                let store = self.disk.as_ref().expect("without a disk there is no room on it");
                let host =
                    self.lock().copies.get_mut(&push.piece).and_then(|below| below.host.take());
                let host = host.expect("the planner counts the copy");
                let written = DiskCopy::write(store, &host, push.len, self.mover.config().step);
                self.lock().copies.entry(push.piece).or_default().host = Some(host);
                Ok(PieceCopy::Disk(Arc::new(written?)))
            }
        }
    }

    /// Unmaps the copy once all its readers are done. No other can begin: a buffer that is pushed
    /// is not leased.
    fn unmap_pushed(&self, push: &Push) -> Result<(), SpillError> {
        let uses = self.lock().core.holds(push.piece.buffer)?.uses;
        self.wait_for(&uses)?;
        let mut state = self.lock();
        state.poll()?;
        let Some((range, at, len)) = state.mapping_of(push) else { return Ok(()) };
        let home = Arc::clone(&state.homes[&range].range);
        drop(state);
        home.unmap_host_part(at, len).map_err(|error| match error {
            HostBackingError::Driver(error) => SpillError::Driver(error),
            error => SpillError::HostBacking(error),
        })?;
        self.lock().forget_mapping(range, at);
        Ok(())
    }
}

impl State {
    /// Returns where the copy is mapped beside the copy mapping.
    fn mapping_of(&self, push: &Push) -> Option<(RangeId, Bytes, Bytes)> {
        let mapped = self.copies.get(&push.piece)?.mapped.as_ref()?;
        let (range, at) = mapped.mapped_at?;
        Some((range, at, mapped.memory.len()))
    }

    /// Records that a copy was moved down, and frees it where it was. Returns the bytes that this frees
    /// there.
    fn note_moved_down(
        &mut self,
        push: &Push,
        copied: PieceCopy,
        what: MoveKind,
        began_ns: u64,
        took_ns: u64,
    ) -> Bytes {
        let &Push { piece, len: bytes, from, to, .. } = push;
        let below = self.copies.entry(piece).or_default();
        let mapped = below.mapped.as_ref().filter(|_| from == SpillTier::Host);
        let freed = mapped.map_or(bytes, |mapped| mapped.memory.len());
        // Work that reads it is complete: the piece left the card since.
        let old = below.take(from).map(|old| Box::new(old) as Box<dyn Send>);
        self.to_drop.extend(old);
        below.put(copied);
        let settled = self.core.settle(push.id);
        debug_assert!(settled.is_ok(), "{piece} was moved down: {settled:?}");
        match from {
            SpillTier::Peer(_) => self.stats.moved_on_bytes += bytes.count(),
            _ => self.note_rate(Some(SpillTier::Disk), bytes, took_ns),
        }
        self.history.push(MoveRecord { piece, bytes, what, began_ns, took_ns, cost: None });
        self.emit(piece.buffer, BufferChange::Moved { from, to, bytes });
        freed
    }

    /// Drops host copies that are not needed, if the host has less room than `leaving` bytes take.
    pub(super) fn drop_excess_host_copies(&mut self, room: &SpillRoom, leaving: Bytes) {
        let deficit = self.core.host_deficit(leaving, room);
        if !deficit.is_zero() {
            let deficit = deficit.saturating_sub(self.release_spare_copies());
            let demand = HostDemand { deficit, disk_room: Bytes::ZERO };
            let choice = self.core.reclaim_host(&demand);
            self.drop_copies(&choice.stale);
        }
    }

    /// Frees the memory kept for later copies. Returns its length.
    pub fn release_spare_copies(&mut self) -> Bytes {
        let Some(readable) = self.readable.as_mut() else { return Bytes::ZERO };
        let stock = std::mem::take(&mut readable.stock);
        let freed = stock.iter().map(|mapped| mapped.memory.len()).sum();
        self.to_drop.extend(stock.into_iter().map(|mapped| Box::new(mapped) as Box<dyn Send>));
        freed
    }
}

/// The calls of one card that make copies there move on, until this is dropped.
pub(super) struct Guest {
    _spiller: SpillerRegistration,
    /// Weak: the other card's allocator may be closed first.
    handler: Option<(Weak<Allocator>, Registration)>,
}

impl Guest {
    pub fn new(shared: &Arc<Shared>, peer: &PeerPart) -> Guest {
        let id = PeerId::new(peer.store.ordinal()).expect("the store was checked");
        let weak = Arc::downgrade(shared);
        let spiller = move |request: &SpillRequest<'_>| {
            let Some(shared) = Weak::upgrade(&weak) else { return Bytes::ZERO };
            shared.give_way(id, request.bytes())
        };
        // Before that card's own data.
        let spiller = peer.store.space().register_spiller(Priority(1), spiller);
        let handler = peer.allocator.as_ref().map(|allocator| {
            let (weak, driver) = (Arc::downgrade(shared), Arc::clone(allocator.driver()));
            let handler = allocator.on_shortage_first(move |shortage| {
                // Below its own limit the card's allocator lacks memory of the card.
                let (None, Some(shared)) = (shortage.limit, weak.upgrade()) else { return false };
                let page = driver.info().limits.page;
                let free = driver.memory_info().map_or(Bytes::ZERO, |info| info.free);
                let lacks = allocation_deficit(shortage, page).saturating_sub(free).max(page);
                !shared.give_way(id, lacks).is_zero()
            });
            (Arc::downgrade(allocator), handler)
        });
        Guest { _spiller: spiller, handler }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        if let Some((allocator, handler)) = self.handler.take()
            && let Some(allocator) = allocator.upgrade()
        {
            allocator.unregister(handler);
        }
    }
}
