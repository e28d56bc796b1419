//! Restoring: memory first, then contents, in stream order.

use std::sync::Arc;

use crate::planner::{GrantedLease, RangeId, Restore, SpillTier};
use vramp_alloc::range::StableRange;
use vramp_alloc::{AllocError, Driver, DriverError};
use vramp_core::Bytes;
use vramp_driver::DeviceCopy;

use super::events::{LeaseStream, WorkEvent};
use super::pay::Payer;
use super::report::{FailedMove, MoveKind, MoveRecord};
use super::spill_error::SpillError;
use super::state::{Shared, State};
use vramp_tiers::movers::CopyDependency;

impl Shared {
    /// Pays for a lease's memory and restores its buffers. Work queued on `streams` later runs after it.
    ///
    /// Memory and contents come piece by piece, so that the eviction of one piece overlaps the
    /// copies of earlier ones.
    ///
    /// # Errors
    /// Restores that are not queued are given up. Contents stay whole: below the card, or restored.
    pub(super) fn restore_all(
        &self,
        granted: &GrantedLease,
        streams: &[LeaseStream],
        payer: &mut Payer,
    ) -> Result<(), SpillError> {
        let mut restores: Vec<Restore> = granted.restores.clone();
        let failures = self.lock().stats.failures;
        let brought = self.pay(granted.lease, streams, payer).and_then(|()| {
            granted
                .ranges
                .iter()
                .try_for_each(|&range| self.restore_range(range, &mut restores, streams))
        });
        let brought = brought.map_err(|error| match error {
            // A lost device frees nothing, which looks like a lack of memory.
            SpillError::NoMemory { error, .. } => match self.driver.memory_info() {
                Ok(_) => SpillError::NoMemory {
                    error,
                    failed: self.failed_since(failures),
                    stuck: false,
                },
                Err(error) => SpillError::Driver(error),
            },
            error => error,
        });
        let brought = brought.map_err(|error| error.after(self.disk_gate.failure()));
        if brought.is_err() {
            let mut state = self.lock();
            for restore in restores {
                // Restores that completed or failed are no longer in the list.
                let _ = state.core.abandon(restore.id);
                state.stats.given_up += 1;
            }
        }
        brought
    }

    /// Returns the last move that failed, if one failed since.
    pub(super) fn failed_since(&self, failures: u64) -> Option<Box<FailedMove>> {
        let state = self.lock();
        let last = state.history.failed().next_back().cloned();
        last.filter(|_| state.stats.failures > failures).map(Box::new)
    }

    fn restore_range(
        &self,
        range: RangeId,
        restores: &mut Vec<Restore>,
        streams: &[LeaseStream],
    ) -> Result<(), SpillError> {
        let (home, keep) = {
            let mut state = self.lock();
            if state.adopted_memory(range).is_some() {
                drop(state);
                return self.restore_adopted(range, restores, streams);
            }
            let home = &state.homes[&range];
            if home.fully_backed && restores.iter().all(|restore| restore.at.range != range) {
                let ready_after = home.ready_after;
                let event = state.event_of(ready_after)?;
                drop(state);
                return self.order_after(event, streams);
            }
            let keep = state.core.needed_memory(range).expect("a leased range is there");
            (Arc::clone(&home.range), keep)
        };
        let brought = self.restore_parts(range, &home, keep, restores, streams);
        // What was mapped by now is used after the work of its earlier owners.
        let event = {
            let mut guard = self.lock();
            let state = &mut *guard;
            let token = state.events.note(self.stream.id);
            let home = state.homes.get_mut(&range).expect("a leased range is there");
            home.ready_after = Some(token);
            // A lease needs all of a buffer's own range; in a group other tenants may be spilled.
            home.fully_backed = brought.is_ok() && !home.is_group;
            state.events.of(token)
        };
        brought.and(self.order_after(event?, streams))
    }

    fn order_after(
        &self,
        event: Option<WorkEvent>,
        streams: &[LeaseStream],
    ) -> Result<(), SpillError> {
        let Some(event) = event else { return Ok(()) };
        let event = event.event();
        Ok(streams.iter().try_for_each(|stream| self.driver.wait(stream.raw, event))?)
    }

    fn restore_parts(
        &self,
        range: RangeId,
        home: &StableRange,
        keep: Vec<(Bytes, Bytes)>,
        restores: &mut Vec<Restore>,
        streams: &[LeaseStream],
    ) -> Result<(), SpillError> {
        let piece = self.config.piece;
        for (start, len) in keep {
            let end = start + len;
            let mut at = start;
            while at < end {
                let next = (at.round_down(piece) + piece).min(end);
                self.unmap_part(range, at, next - at)?;
                self.back(home, at, next - at)?;
                self.fill_all(restores, streams, |restore| {
                    restore.at.range == range && at <= restore.at.offset && restore.at.offset < next
                })?;
                at = next;
            }
        }
        Ok(())
    }

    /// Restores what left of a buffer to its adopted memory, which is there.
    fn restore_adopted(
        &self,
        range: RangeId,
        restores: &mut Vec<Restore>,
        streams: &[LeaseStream],
    ) -> Result<(), SpillError> {
        self.fill_all(restores, streams, |restore| restore.at.range == range)
    }

    /// Restores some of the pieces, and takes them out of the list.
    fn fill_all(
        &self,
        restores: &mut Vec<Restore>,
        streams: &[LeaseStream],
        which: impl Fn(&Restore) -> bool,
    ) -> Result<(), SpillError> {
        while let Some(place) = restores.iter().position(&which) {
            let restore = restores.swap_remove(place);
            if let Err(error) = self.fill(&restore, streams) {
                let error = error.of_restore(restore.piece.buffer);
                let what = MoveKind::Restored(restore.from);
                self.fail(restore.id, restore.piece, what, &error);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Maps memory. Free handles may not fit, and can be cut anew only when the work on them is
    /// complete. The manager's own stream runs after that work.
    fn back(&self, home: &StableRange, at: Bytes, len: Bytes) -> Result<(), SpillError> {
        let back = || home.back_part(at, len, self.stream.id);
        let mut backed = back();
        if backed.as_ref().is_err_and(AllocError::is_out_of_memory) {
            let token = self.lock().events.note(self.stream.id);
            self.wait_for(&[token])?;
            backed = back();
        }
        backed.map_err(no_memory)
    }

    /// Restores a piece from addresses of the card: of another card, or of host memory that it maps. Returns
    /// false if the copy has none. Work queued on `streams` later runs after it. The copy stays valid until
    /// the piece is written.
    ///
    /// # Errors
    /// A driver call failed: nothing was copied, or not all streams wait for it.
    fn fill_on_card(&self, restore: &Restore, streams: &[LeaseStream]) -> Result<bool, SpillError> {
        let mut guard = self.lock();
        let state = &mut *guard;
        let below = state.copies.get(&restore.piece);
        let (stream, from) = match restore.from {
            SpillTier::Peer(_) => {
                let copy = below.and_then(|below| below.peer.as_ref());
                (self.peers.back(), copy.expect("the planner counts the copy").range().start)
            }
            _ => {
                let mapped = below.and_then(|below| below.mapped.as_ref());
                let Some(mapped) = mapped else { return Ok(false) };
                let stream = state.readable.as_ref().expect("there is a copy").stream;
                (stream, mapped.copy_mapping.range().start)
            }
        };
        let (to, len) = (state.addresses(restore.at).start, restore.at.len);
        // After the work of the memory's earlier owners.
        let ready_after = state.events.note(self.stream.id);
        if let Some(event) = state.events.of(ready_after)? {
            self.driver.wait(stream.raw, event.event())?;
        }
        self.driver.copy(stream.raw, DeviceCopy { from, to, len })?;
        let event = state.note_restore_queued(restore, stream);
        drop(guard);
        self.order_after(event?, streams)?;
        Ok(true)
    }

    /// Restores one piece.
    fn fill(&self, restore: &Restore, streams: &[LeaseStream]) -> Result<(), SpillError> {
        let began_ns = self.driver.now_ns();
        let len = restore.at.len;
        match restore.from {
            SpillTier::Peer(_) | SpillTier::Host if self.fill_on_card(restore, streams)? => {}
            SpillTier::Peer(_) | SpillTier::Host => {
                let (range, host) = {
                    let mut state = self.lock();
                    let below = state.copies.get_mut(&restore.piece);
                    let host = below.and_then(|below| below.host.take());
                    (state.addresses(restore.at), host.expect("the planner counts the copy"))
                };
                let moving = self
                    .mover
                    .to_device(range, host)
                    .after(CopyDependency::Stream(self.stream.raw));
                let on = streams.first().copied().unwrap_or(self.stream);
                let moved = moving.start().and_then(|transfer| transfer.finish_on(on.raw));
                let (host, failed) = match moved {
                    Ok(host) => (host, None),
                    Err(failed) => (failed.host, Some(failed.error)),
                };
                let mut guard = self.lock();
                let state = &mut *guard;
                state.copies.entry(restore.piece).or_default().host = Some(host);
                if let Some(error) = failed {
                    drop(guard);
                    return self.keep_unsettled(restore.piece.buffer, Err(error));
                }
                let event = state.note_restore_queued(restore, on);
                state.forget_unmapped_host_copy(restore.piece);
                drop(guard);
                self.order_after(event?, streams.get(1..).unwrap_or_default())?;
            }
            SpillTier::Disk => {
                let (range, stored) = {
                    let state = self.lock();
                    let below = state.copies.get(&restore.piece);
                    let stored = below.and_then(|below| below.disk.clone());
                    (state.addresses(restore.at), stored.expect("the planner counts the copy"))
                };
                self.with_staging(|| {
                    let staged = self.mover.from_disk(&stored, range)?;
                    let mut staged =
                        staged.after_at_target(CopyDependency::Stream(self.stream.raw))?;
                    self.keep_unsettled(restore.piece.buffer, staged.wait())
                })?;
                let took_ns = self.driver.now_ns().saturating_sub(began_ns);
                let mut state = self.lock();
                let settled = state.core.settle(restore.id);
                settled.expect("a restore that was begun is not settled");
                state.emit_retrieved(restore);
                state.stats.from_disk_bytes += len.count();
                state.stats.from_disk_ns += took_ns;
                state.rates.record_in(SpillTier::Disk, len, took_ns);
            }
        }
        let took_ns = self.driver.now_ns().saturating_sub(began_ns);
        let (piece, what) = (restore.piece, MoveKind::Restored(restore.from));
        let record = MoveRecord { piece, bytes: len, what, began_ns, took_ns, cost: None };
        self.lock().history.push(record);
        Ok(())
    }
}

impl State {
    /// Records that a restore is queued on a stream. Returns its event.
    fn note_restore_queued(
        &mut self,
        restore: &Restore,
        on: LeaseStream,
    ) -> Result<Option<WorkEvent>, DriverError> {
        let token = self.events.note(on.id);
        let done = self.core.restore_queued(restore.id, token);
        done.expect("a restore that was begun is not settled");
        self.emit_retrieved(restore);
        let sum = match restore.from {
            SpillTier::Peer(_) => &mut self.stats.from_peer_bytes,
            _ => &mut self.stats.from_host_bytes,
        };
        *sum += restore.at.len.count();
        self.events.of(token)
    }
}

fn no_memory(error: AllocError) -> SpillError {
    match error {
        AllocError::Driver(error) => SpillError::Driver(error),
        error => SpillError::NoMemory { error: Box::new(error), failed: None, stuck: false },
    }
}
