//! Copies on the host that a kernel reads at the address their contents had on the card.
//!
//! 1. A piece of a readable buffer leaves by a copy of the device's own into host memory that the
//!    device maps: through its *door*, addresses that are always the copy's.
//! 2. Once the piece's memory is lent, the copy is mapped at the piece's own address as well.
//! 3. Before memory comes back there, all who read have to be done, and it is unmapped. The contents
//!    come through the door, and the copy stays good until somebody writes.
//! 4. A copy that counts no more serves the next piece, once nobody reads it.
//!
//! `map_copies.rs` maps copies, `acquire.rs` leases what is mapped, `push_copy.rs` moves copies to the disk.
//!
//! Where any of it fails, the contents are whole and only not readable in place: in blocks of the
//! host, or behind the door.

use std::sync::Arc;

use crate::planner::{BufferId, CopyOut, PieceId, PieceState, RangeId, Restore, UseToken};
use vramp_alloc::range::{HostBacking, HostBackingError, StableRange};
use vramp_alloc::{Driver, DriverError, StreamId};
use vramp_core::Bytes;
use vramp_driver::{DeviceCopy, Stream};

use super::spill_error::SpillError;
use super::state::{Shared, State};
use vramp_tiers::reserve::Charge;

/// So many copies that nobody needs are kept for the next pieces.
const STOCK: usize = 4;

/// A copy that the device can map.
pub(super) struct MappedCopy {
    pub memory: Arc<HostBacking>,
    pub copy_mapping: StableRange,
    /// Where it is mapped beside its door, or being mapped.
    pub mapped_at: Option<(RangeId, Bytes)>,
    _charge: Charge,
}

/// What readable buffers share.
pub(super) struct InPlacePool {
    /// Their copies run here.
    pub stream: (StreamId, Stream),
    node: u32,
    pub stock: Vec<MappedCopy>,
    /// Copies that count no more, and what may still read them.
    retired: Vec<(MappedCopy, Vec<UseToken>)>,
}

impl Shared {
    /// Lets a buffer be read at its address while it is spilled.
    pub(super) fn make_readable(&self, buffer: BufferId) -> Result<(), SpillError> {
        let info = self.driver.info();
        if !info.capabilities.host_numa {
            return Err(SpillError::NotReadable("this device maps no memory of the host"));
        }
        let mut guard = self.lock();
        let state = &mut *guard;
        let range = state.core.slice(buffer)?.range;
        if state.homes[&range].is_group {
            return Err(SpillError::NotReadable("it shares memory with others of its group"));
        }
        if state.readable.is_none() {
            let id = self.allocator.create_stream()?;
            let raw = self.allocator.stream(id).expect("it was made just now");
            state.readable = Some(InPlacePool {
                stream: (id, raw),
                node: info.host_numa.unwrap_or(0),
                stock: Vec::new(),
                retired: Vec::new(),
            });
        }
        state.core.set_readable(buffer)?;
        let pieces = state.core.states(buffer)?.len() as u32;
        (0..pieces).for_each(|index| state.forget_unmapped_host_copy(PieceId { buffer, index }));
        Ok(())
    }

    /// Host memory for a copy of a piece, if the buffer is readable and there is some.
    pub(super) fn mapped_copy_for(&self, piece: PieceId, len: Bytes) -> Option<MappedCopy> {
        let len = len.checked_round_up(self.driver.info().limits.page)?;
        let node = {
            let mut guard = self.lock();
            if !guard.core.is_readable(piece.buffer) {
                return None;
            }
            guard.recycle_copies();
            let readable = guard.readable.as_mut()?;
            let fits = readable.stock.iter().position(|mapped| mapped.memory.len() == len);
            if let Some(place) = fits {
                return Some(readable.stock.swap_remove(place));
            }
            readable.node
        };
        let charge = self.mover.pool().space().charge(len).ok()?;
        let memory = Arc::new(self.allocator.host_backing(len, node).ok()?);
        let copy_mapping = self.allocator.stable_range(len, len).ok()?;
        copy_mapping.map_host_part(Bytes::ZERO, &memory).ok()?;
        Some(MappedCopy { memory, copy_mapping, mapped_at: None, _charge: charge })
    }

    /// Copies a piece out through the door. The caller waits for the token.
    ///
    /// # Errors
    /// A driver call failed; nothing is under way.
    pub(super) fn copy_to_mapped(
        &self,
        out: &CopyOut,
        mapped: &MappedCopy,
    ) -> Result<Option<UseToken>, DriverError> {
        let mut guard = self.lock();
        let state = &mut *guard;
        let from = state.addresses(out.at).start;
        let (to, len) = (mapped.copy_mapping.range().start, out.at.len);
        let stream = state.readable.as_ref().expect("there is a copy").stream.1;
        for event in out.copy_after.iter().filter_map(|&token| state.events.of(token)) {
            self.driver.wait(stream, event)?;
        }
        self.driver.copy(stream, DeviceCopy { from, to, len })?;
        let token = state.events.note_or_wait(stream);
        state.note_copy_queued(out, token);
        Ok(token)
    }

    /// Brings a piece back through the door. What is queued on `streams` later comes behind it.
    /// False if its copy is no such.
    ///
    /// # Errors
    /// A driver call failed: nothing came, or not all streams come behind it.
    pub(super) fn restore_from_mapped(
        &self,
        fill: &Restore,
        streams: &[Stream],
    ) -> Result<bool, SpillError> {
        let mut guard = self.lock();
        let state = &mut *guard;
        let mapped = state.copies.get(&fill.piece).and_then(|below| below.mapped.as_ref());
        let Some(mapped) = mapped else { return Ok(false) };
        let (from, len) = (mapped.copy_mapping.range().start, fill.at.len);
        let to = state.addresses(fill.at).start;
        let stream = state.readable.as_ref().expect("there is a copy").stream.1;
        // Behind the work that had the memory before.
        if let Some(token) = state.events.note_or_wait(self.stream.1)
            && let Some(event) = state.events.of(token)
        {
            self.driver.wait(stream, event)?;
        }
        self.driver.copy(stream, DeviceCopy { from, to, len })?;
        let token = state.events.note_or_wait(stream);
        let event = token.and_then(|token| state.events.of(token));
        let done = match token {
            Some(token) => state.core.restore_queued(fill.id, token),
            None => state.core.settle(fill.id),
        };
        done.expect("the fill was given out and not settled");
        state.stats.from_host_bytes += len.count();
        drop(guard);
        if let Some(event) = event {
            streams.iter().try_for_each(|&stream| self.driver.wait(stream, event))?;
        }
        Ok(true)
    }

    /// Unmaps what is read in place within a part of a range, once all who read it are done.
    ///
    /// # Errors
    /// A driver call failed.
    pub(super) fn unmap_part(
        &self,
        range: RangeId,
        from: Bytes,
        len: Bytes,
    ) -> Result<(), SpillError> {
        let (home, uses) = {
            let state = self.lock();
            let home = Arc::clone(&state.homes[&range].range);
            let buffer = state.core.tenants(range).next();
            let holds = buffer.and_then(|buffer| state.core.holds(buffer).ok());
            (home, holds.map(|holds| holds.uses).unwrap_or_default())
        };
        let parts = || {
            let parts = home.host_parts().into_iter();
            parts.filter(|&(at, _)| from <= at && at < from + len).collect::<Vec<_>>()
        };
        if parts().is_empty() {
            return Ok(());
        }
        self.wait_for(&uses)?;
        let mut state = self.lock();
        // Copies that count no more may have been unmapped by whoever saw first that they are unread.
        let parts = parts();
        for (at, len) in parts {
            home.unmap_host_part(at, len).map_err(|error| match error {
                HostBackingError::Driver(error) => SpillError::Driver(error),
                error => SpillError::HostBacking(error),
            })?;
            state.forget_mapping(range, at);
        }
        Ok(())
    }
}

impl State {
    /// Drops the copy of a readable buffer's piece on the card if it lies in blocks, which cannot be
    /// mapped: when the piece leaves, it is copied to where it can be read.
    pub fn forget_unmapped_host_copy(&mut self, piece: PieceId) {
        let in_blocks = self.copies.get(&piece).is_some_and(|below| below.host.is_some());
        if in_blocks
            && self.core.is_readable(piece.buffer)
            && let Some(gone) = self.core.forget_host_copy(piece)
        {
            self.drop_copies(&[gone]);
        }
    }

    /// True if each spilled piece can be read at its address.
    pub fn is_mapped(&self, buffer: BufferId) -> bool {
        let states = self.core.states(buffer).unwrap_or_default();
        (0..).zip(states).all(|(index, state)| {
            let below = self.copies.get(&PieceId { buffer, index });
            let mapped = below.and_then(|below| below.mapped.as_ref());
            !matches!(state, PieceState::Spilled { .. })
                || mapped.is_some_and(|mapped| mapped.mapped_at.is_some())
        })
    }

    /// Nothing is mapped there any more.
    pub fn forget_mapping(&mut self, range: RangeId, at: Bytes) {
        let current = self.copies.values_mut().filter_map(|below| below.mapped.as_mut());
        let retired = self.readable.iter_mut().flat_map(|readable| &mut readable.retired);
        for mapped in current.chain(retired.map(|(mapped, _)| mapped)) {
            if mapped.mapped_at == Some((range, at)) {
                mapped.mapped_at = None;
            }
        }
    }

    /// A copy counts no more. It serves again once the work is over that may still read it.
    pub fn retire(&mut self, buffer: BufferId, mapped: MappedCopy, after: &[UseToken]) {
        let holds = self.core.holds(buffer).map(|holds| holds.uses).unwrap_or_default();
        let readers = after.iter().copied().chain(holds).collect();
        self.readable.as_mut().expect("there is a copy").retired.push((mapped, readers));
        self.recycle_copies();
    }

    /// What nobody reads any more serves again, or goes back to the host.
    pub fn recycle_copies(&mut self) {
        let Some(readable) = self.readable.as_mut() else { return };
        let retired = std::mem::take(&mut readable.retired);
        for (mut mapped, readers) in retired {
            let mapping_now = |&(range, _): &(RangeId, Bytes)| self.mapping_now.contains(&range);
            let over = !mapped.mapped_at.as_ref().is_some_and(mapping_now)
                && readers.iter().all(|&token| self.events.is_over(token));
            // One call under the lock: nobody else may unmap it, or serve it to the next piece.
            if over
                && let Some((range, at)) = mapped.mapped_at.take()
                && let Some(home) = self.homes.get(&range)
            {
                // Where it fails, the next lease tries again.
                let _ = home.range.unmap_host_part(at, mapped.memory.len());
            }
            let readable = self.readable.as_mut().expect("it was there above");
            if !over {
                readable.retired.push((mapped, readers));
            } else if readable.stock.len() < STOCK {
                readable.stock.push(mapped);
            } else {
                self.to_drop.push(Box::new(mapped));
            }
        }
    }
}
