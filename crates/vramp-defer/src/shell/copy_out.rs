//! One piece on its way out: copied, awaited, and its memory lent to the pool.

use std::sync::Arc;

use crate::planner::{CopyOut, EvictionCost, PieceId, SettleError, Settled, SpillTier, UseToken};
use vramp_alloc::DriverError;
use vramp_core::{AddrRange, Bytes};

use super::events::WorkEvent;
use super::mapped_memory::MappedCopy;
use super::peer_copy::peer_of;
use super::report::{MoveKind, MoveRecord};
use super::spill_error::SpillError;
use super::state::{Shared, State};
use vramp_tiers::host::HostAllocation;
use vramp_tiers::movers::{CopyDependency, DiskBudget, DiskCopy, MoveError};
use vramp_tiers::peer::PeerAllocation;

/// A piece whose copy was started.
pub(super) struct CopyInFlight {
    pub out: CopyOut,
    pub cost: Option<EvictionCost>,
    pub began_ns: u64,
    pub copy: StartedCopy,
}

/// A copy that was queued, where one is needed.
pub(super) enum StartedCopy {
    /// There is a copy already, or there are no contents.
    None,
    ToHost(HostAllocation, UseToken),
    /// To memory that the device maps.
    ToMapped(MappedCopy, UseToken),
    ToPeer(PeerAllocation, UseToken),
    /// It starts when it is awaited: staging blocks serve one transfer after the other.
    ToDisk,
}

/// A complete copy.
enum FinishedCopy {
    None,
    ToHost(HostAllocation),
    ToMapped(MappedCopy),
    ToPeer(PeerAllocation),
    ToDisk(DiskCopy),
}

impl Shared {
    /// Starts the copy of a piece. A piece that has a copy leaves without another one if that, to
    /// be read in place, cannot be made.
    pub(super) fn start_copy_or_skip(&self, out: &mut CopyOut) -> Result<StartedCopy, SpillError> {
        self.lock().refuse_pins(out)?;
        if let Some(peer) = peer_of(out.to)
            && let Some((copy, token)) = self.start_copy_to_peer(out, peer)?
        {
            return Ok(StartedCopy::ToPeer(copy, token));
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
                    let token = self.copy_to_mapped(out, &mapped)?;
                    return Ok(StartedCopy::ToMapped(mapped, token));
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
                Ok(StartedCopy::ToHost(host, token))
            }
        }
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

    fn copy_to_disk(&self, out: &CopyOut) -> Result<DiskCopy, SpillError> {
        let store = self.disk.as_ref().expect("without a disk there is no room on it");
        self.with_staging(|| {
            let (range, after) = self.source(out)?;
            let mut staged = self.mover.to_disk(range, store, DiskBudget::Space)?;
            for on in after {
                staged = staged.after(on)?;
            }
            self.keep_unsettled(out.piece.buffer, staged.finish())
        })
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
        let copied = match copy {
            StartedCopy::None => FinishedCopy::None,
            StartedCopy::ToHost(host, token) => {
                // On an error the copy may be in flight. Its blocks are reused only after it.
                self.wait_for(&[token])?;
                FinishedCopy::ToHost(host)
            }
            StartedCopy::ToMapped(mapped, token) => match self.wait_for(&[token]) {
                Ok(()) => FinishedCopy::ToMapped(mapped),
                Err(error) => {
                    // The copy may be in flight.
                    self.lock().retire(out.piece.buffer, mapped, &[token]);
                    return Err(error.into());
                }
            },
            StartedCopy::ToPeer(copy, token) => match self.wait_for(&[token]) {
                Ok(()) => FinishedCopy::ToPeer(copy),
                Err(error) => {
                    // The copy may be in flight.
                    self.lock().retire_peer_copy(copy, vec![token]);
                    peer_of(out.to).into_iter().for_each(|peer| self.suspend_peer(peer));
                    return Err(error.into());
                }
            },
            StartedCopy::ToDisk => {
                began_ns = self.driver.now_ns();
                FinishedCopy::ToDisk(self.copy_to_disk(out)?)
            }
        };
        let took_ns = self.driver.now_ns().saturating_sub(began_ns);
        let mut uses = out.lend_after.clone();
        let mut copied = Some(copied);
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
            let copied = copied.take().expect("a move settles once");
            let freed = state.note_out(out, settled, copied);
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
    fn note_out(&mut self, out: &CopyOut, settled: Settled, copied: FinishedCopy) -> Bytes {
        let is_valid = !matches!(settled, Settled::Stays { .. });
        match copied {
            copied if is_valid => self.keep_copy(out.piece, copied),
            FinishedCopy::ToMapped(stale) => self.retire(out.piece.buffer, stale, &[]),
            // Dropping its charge runs callbacks of the host's budget: after unlocking.
            stale => self.to_drop.push(Box::new(stale)),
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

    fn keep_copy(&mut self, piece: PieceId, copied: FinishedCopy) {
        if let FinishedCopy::None = copied {
            return;
        }
        let copies = self.copies.entry(piece).or_default();
        match copied {
            FinishedCopy::None => {}
            FinishedCopy::ToHost(host) => copies.host = Some(host),
            FinishedCopy::ToMapped(mapped) => copies.mapped = Some(mapped),
            FinishedCopy::ToPeer(copy) => copies.peer = Some(copy),
            FinishedCopy::ToDisk(stored) => copies.disk = Some(Arc::new(stored)),
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
