//! One piece on its way out: copied, awaited, and its memory lent to the pool.
//!
//! 1. A piece whose copy is read in place, or lies on another card, is copied by the device to addresses: on
//!    the stream of such copies, or on one of two streams to cards, in turn. No driver call beside those of
//!    the copy if there is memory.
//! 2. If the other card has no memory, or its driver fails, the piece goes to the host at once.
//! 3. A copy to the host is queued by the mover, behind it the stream of pieces that leave. A copy to the disk
//!    is started when it is awaited.

use crate::planner::{CopyOut, EvictionCost, PeerId, SettleError, Settled, SpillTier, UseToken};
use vramp_alloc::{Driver, DriverError};
use vramp_core::{AddrRange, Bytes, DeviceAddr};
use vramp_driver::DeviceCopy;

use super::copies::PieceCopy;
use super::events::{LeaseStream, WorkEvent};
use super::peer_stores::STORE;
use super::report::{MoveKind, MoveRecord};
use super::spill_error::SpillError;
use super::state::{Shared, State};
use vramp_tiers::movers::{CopyDependency, MoveError};
use vramp_tiers::peer::PeerAllocation;

/// A piece whose copy was started.
pub(super) struct CopyInFlight {
    pub out: CopyOut,
    pub cost: Option<EvictionCost>,
    pub began_ns: u64,
    pub copy: StartedCopy,
}

/// A copy that was started, where one is needed.
pub(super) enum StartedCopy {
    /// There is a copy already, or there are no contents.
    None,
    /// It is complete when the work of the token is.
    Queued(PieceCopy, UseToken),
    /// It starts when it is awaited: staging blocks serve one transfer after the other.
    ToDisk,
}

impl Shared {
    /// Starts the copy of a piece. A piece that has a copy leaves without another one if that, to
    /// be read in place, cannot be made.
    pub(super) fn start_copy_or_skip(&self, out: &mut CopyOut) -> Result<StartedCopy, SpillError> {
        self.lock().refuse_pins(out)?;
        if let Some(peer) = peer_of(out.to)
            && let Some((copy, token)) = self.start_copy_to_peer(out, peer)?
        {
            return Ok(StartedCopy::Queued(PieceCopy::Peer(copy), token));
        }
        let error = match self.start_copy(out) {
            Ok(copy) => return Ok(copy),
            Err(error) => error,
        };
        let mut state = self.lock();
        if !state.core.leave_without_copy(out.id) {
            return Err(error);
        }
        if !error.failure().is_capacity() {
            state.note_failed(out.piece, MoveKind::Spilled(out.to), &error);
        }
        out.to = None;
        Ok(StartedCopy::None)
    }

    /// Starts the copy of a piece after the work that writes it. The next work that writes it waits
    /// for the copy.
    fn start_copy(&self, out: &CopyOut) -> Result<StartedCopy, SpillError> {
        match out.to {
            None => Ok(StartedCopy::None),
            Some(SpillTier::Disk) => Ok(StartedCopy::ToDisk),
            Some(SpillTier::Host | SpillTier::Peer(_)) => {
                if let Some(mapped) = self.mapped_copy_for(out.piece, out.at.len) {
                    let stream = self.lock().readable.as_ref().expect("there is a copy").stream;
                    let to = mapped.copy_mapping.range().start;
                    let token = self.copy_on_card(out, stream, to)?;
                    return Ok(StartedCopy::Queued(PieceCopy::Mapped(mapped), token));
                }
                let (range, after) = self.source(out)?;
                let host = self.mover.pool().allocate(out.at.len).map_err(MoveError::from)?;
                let moving = after
                    .into_iter()
                    .fold(self.mover.to_host(range, host), |moving, on| moving.after(on));
                let moved = moving.start().and_then(|moving| moving.finish_on(self.leaving.raw));
                let host = self.keep_unsettled(out.piece.buffer, moved)?;
                let mut guard = self.lock();
                let token = guard.events.note(self.leaving.id);
                guard.note_copy_queued(out, token);
                Ok(StartedCopy::Queued(PieceCopy::Host(host), token))
            }
        }
    }

    /// Starts the copy of a piece to another card, after the work that writes it. `None` if the card
    /// has no memory, or a call failed: the piece goes to the host or the disk then.
    ///
    /// # Errors
    /// There is no room below either.
    fn start_copy_to_peer(
        &self,
        out: &mut CopyOut,
        peer: PeerId,
    ) -> Result<Option<(PeerAllocation, UseToken)>, SpillError> {
        let store = self.peers.store(peer).expect(STORE);
        let copied = store.allocate(out.at.len).map_err(SpillError::from);
        let copied = copied.and_then(|copy| {
            let token = self.copy_on_card(out, self.peers.out(), copy.range().start)?;
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

    /// Copies a piece to addresses of the card, of another card or of host memory that it maps, after the
    /// work that writes the piece. The caller waits for the token.
    ///
    /// # Errors
    /// A driver call failed; nothing is in flight.
    fn copy_on_card(
        &self,
        out: &CopyOut,
        stream: LeaseStream,
        to: DeviceAddr,
    ) -> Result<UseToken, DriverError> {
        let mut guard = self.lock();
        let state = &mut *guard;
        for &token in &out.copy_after {
            if let Some(event) = state.events.of(token)? {
                self.driver.wait(stream.raw, event.event())?;
            }
        }
        let (from, len) = (state.addresses(out.at).start, out.at.len);
        self.driver.copy(stream.raw, DeviceCopy { from, to, len })?;
        let token = state.events.note(stream.id);
        state.note_copy_queued(out, token);
        Ok(token)
    }

    /// Sends nothing to a card for a while: copies to it fail.
    fn suspend_peer(&self, peer: PeerId) {
        self.peers.store(peer).expect(STORE).give_way();
    }

    /// Returns the addresses of contents that leave, and what their copy waits for.
    fn source(&self, out: &CopyOut) -> Result<(AddrRange, Vec<CopyDependency>), DriverError> {
        let mut state = self.lock();
        let mut after = Vec::new();
        for &token in &out.copy_after {
            after.extend(state.events.of(token)?.map(WorkEvent::into_dependency));
        }
        Ok((state.addresses(out.at), after))
    }

    /// Waits for the copy and for the work on the piece, and lends its memory. Returns the bytes
    /// that became free.
    pub(super) fn finish_copy_out(
        &self,
        out: &CopyOut,
        cost: Option<EvictionCost>,
        mut began_ns: u64,
        copy: StartedCopy,
    ) -> Result<Bytes, SpillError> {
        let mut copied = match copy {
            StartedCopy::None => None,
            StartedCopy::Queued(copied, token) => match self.wait_for(&[token]) {
                Ok(()) => Some(copied),
                Err(error) => {
                    // The copy may be in flight.
                    self.lock().retire_copy(out.piece.buffer, copied, &[token]);
                    peer_of(out.to).into_iter().for_each(|peer| self.suspend_peer(peer));
                    return Err(error.into());
                }
            },
            StartedCopy::ToDisk => {
                began_ns = self.driver.now_ns();
                Some(self.copy_to_disk(out.piece.buffer, || Ok(self.source(out)?))?)
            }
        };
        let took_ns = self.driver.now_ns().saturating_sub(began_ns);
        let mut uses = out.lend_after.clone();
        loop {
            self.wait_for(&uses)?;
            let mut guard = self.lock();
            let state = &mut *guard;
            state.poll()?;
            let settled = match state.core.settle(out.id) {
                Ok(settled) => settled,
                Err(SettleError::StillUsed { uses: more, .. }) => {
                    uses = more;
                    continue;
                }
                // The move ended when another thread removed the buffer.
                Err(_) => return Ok(Bytes::ZERO),
            };
            let freed = state.note_out(out, settled, copied.take());
            if matches!(settled, Settled::Spilled { .. }) {
                state.emit_deferred(out.piece, out.at.len);
            }
            state.note_rate(out.to, out.at.len, took_ns);
            let what = match settled {
                Settled::Spilled { .. } => Some(MoveKind::Spilled(out.to)),
                Settled::Cleaned { to, .. } => Some(MoveKind::Cleaned(to)),
                _ => None,
            };
            if let Some(what) = what {
                let (piece, bytes) = (out.piece, out.at.len);
                state.history.push(MoveRecord { piece, bytes, what, began_ns, took_ns, cost });
            }
            state.reap();
            drop(guard);
            return Ok(freed);
        }
    }
}

impl State {
    /// Records that all of a copy out is queued, and complete when `token` is.
    pub(super) fn note_copy_queued(&mut self, out: &CopyOut, token: UseToken) {
        let noted = self.core.copy_queued(out.id, token);
        debug_assert!(noted.is_ok(), "{} is not settled: {noted:?}", out.id);
    }

    /// Keeps the copy if it is valid, and lends the memory if the piece left.
    fn note_out(&mut self, out: &CopyOut, settled: Settled, copied: Option<PieceCopy>) -> Bytes {
        match (copied, settled) {
            (None, _) => {}
            (Some(stale), Settled::Stays { .. }) => self.retire_copy(out.piece.buffer, stale, &[]),
            (Some(copied), _) => self.copies.entry(out.piece).or_default().put(copied),
        }
        match settled {
            Settled::Spilled { range, frees, .. } if !frees.is_zero() => {
                let lent = self.lend(range);
                self.settle_charges();
                lent
            }
            _ => Bytes::ZERO,
        }
    }

    /// Counts a copy, and updates the rate by it.
    pub(super) fn note_rate(&mut self, to: Option<SpillTier>, bytes: Bytes, took_ns: u64) {
        let Some(to) = to else { return };
        if to == SpillTier::Disk {
            self.disk_gate.succeeded();
        }
        self.rates.record_out(to, bytes, took_ns);
        let (sum, time) = match to {
            SpillTier::Peer(_) => (&mut self.stats.to_peer_bytes, &mut self.stats.to_peer_ns),
            SpillTier::Host => (&mut self.stats.to_host_bytes, &mut self.stats.to_host_ns),
            SpillTier::Disk => (&mut self.stats.to_disk_bytes, &mut self.stats.to_disk_ns),
        };
        *sum += bytes.count();
        *time += took_ns;
    }
}

/// Returns the card of a tier.
fn peer_of(tier: Option<SpillTier>) -> Option<PeerId> {
    match tier {
        Some(SpillTier::Peer(peer)) => Some(peer),
        _ => None,
    }
}
