//! Host copies that the device maps, so that kernels can read them in place.
//!
//! 1. A victim of a readable buffer is copied by the device into host memory through the *copy
//!    mapping*: addresses of the copy's own.
//! 2. Once the piece's memory is lent, the copy is mapped at the piece's address as well.
//! 3. Before the piece is restored, all readers must be done, and that mapping is removed. The
//!    contents are read through the copy mapping; the copy stays valid until the piece is written.
//! 4. A stale copy's memory serves another piece once its readers are done.
//!
//! `acquire.rs` leases what is mapped, `relieve.rs` moves copies to
//! the disk.
//!
//! If any of it fails the contents are whole, but cannot be read in place: they are in blocks of
//! the host, or behind the copy mapping alone.
//!
//! Mapping at the pieces' own addresses happens with the lock released:
//!
//! 1. [`State::lend`] records a range of which memory was lent.
//! 2. A thread that unlocks first marks what can be mapped ([`State::begin_maps`]).
//! 3. It makes the calls after unlocking ([`Shared::map_copies`]), and records their results.
//!
//! Until then no other thread maps or unmaps there. Leases wait as for a move in flight
//! ([`Deferrables::set_mapping`]), and so does a push to the disk. A copy that becomes stale meanwhile is
//! unmapped afterwards.
//!
//! [`Deferrables::set_mapping`]: crate::planner::Deferrables::set_mapping

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::planner::{BufferId, Deferrables, PieceId, PieceState, RangeId, UseToken};
use vramp_alloc::Driver;
use vramp_alloc::range::{HostBacking, HostBackingError, StableRange};
use vramp_core::Bytes;

use super::copies::{InPlacePool, MappedCopy, SpilledCopies};
use super::events::LeaseStream;
use super::spill_error::SpillError;
use super::state::{Shared, State};

/// Number of spare copies kept for later pieces.
const STOCK: usize = 4;

impl Shared {
    /// Lets a buffer be read in place while it is spilled.
    pub(super) fn make_readable(&self, buffer: BufferId) -> Result<(), SpillError> {
        let info = self.driver.info();
        if !info.capabilities.host_numa {
            return Err(SpillError::NotReadable("this device cannot map host memory"));
        }
        let mut guard = self.lock();
        let state = &mut *guard;
        let range = state.core.slice(buffer)?.range;
        if state.homes[&range].is_group {
            return Err(SpillError::NotReadable("it shares memory with its group"));
        }
        if state.adopted_memory(range).is_some() {
            return Err(SpillError::NotReadable("its memory was adopted and has not left yet"));
        }
        if state.readable.is_none() {
            let stream = LeaseStream::create(&self.allocator)?;
            state.readable = Some(InPlacePool {
                stream,
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

    /// Returns host memory for a copy of a piece, if the buffer is readable and memory is to be
    /// had.
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

    /// Unmaps the copies within a part of a range, once all readers are done.
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
        // Another thread may have unmapped stale copies since.
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
    /// Drops the host copy of a readable buffer's piece on the card if it lies in blocks, which
    /// cannot be mapped. When the piece leaves, it is copied to memory that can.
    pub fn forget_unmapped_host_copy(&mut self, piece: PieceId) {
        let in_blocks = self.copies.get(&piece).is_some_and(|below| below.host.is_some());
        if in_blocks
            && self.core.is_readable(piece.buffer)
            && let Some(gone) = self.core.forget_host_copy(piece)
        {
            self.drop_copies(&[gone]);
        }
    }

    /// Returns true if each spilled piece can be read at its address.
    pub fn is_mapped(&self, buffer: BufferId) -> bool {
        is_mapped(&self.core, &self.copies, buffer)
    }

    /// Records that no copy is mapped there.
    pub fn forget_mapping(&mut self, range: RangeId, at: Bytes) {
        let index = at.whole(self.core.config().piece);
        let buffer = self.core.tenants(range).next();
        let piece = buffer.zip(u32::try_from(index).ok());
        let below =
            piece.and_then(|(buffer, index)| self.copies.get_mut(&PieceId { buffer, index }));
        let current = below.and_then(|below| below.mapped.as_mut()).into_iter();
        let retired = self.readable.iter_mut().flat_map(|readable| &mut readable.retired);
        for mapped in current.chain(retired.map(|(mapped, _)| mapped)) {
            if mapped.mapped_at == Some((range, at)) {
                mapped.mapped_at = None;
            }
        }
    }

    /// Retires a stale copy. Its memory is reused once the work is complete that may still read it.
    pub fn retire(&mut self, buffer: BufferId, mapped: MappedCopy, after: &[UseToken]) {
        let holds = self.core.holds(buffer).map(|holds| holds.uses).unwrap_or_default();
        let readers = after.iter().copied().chain(holds).collect();
        self.readable.as_mut().expect("there is a copy").retired.push((mapped, readers));
        self.recycle_copies();
    }

    /// Reuses or frees the memory of retired copies without readers.
    pub fn recycle_copies(&mut self) {
        let Some(readable) = self.readable.as_mut() else { return };
        let retired = std::mem::take(&mut readable.retired);
        for (mut mapped, readers) in retired {
            let mapping_now = |&(range, _): &(RangeId, Bytes)| self.mapping_now.contains(&range);
            let over = !mapped.mapped_at.as_ref().is_some_and(mapping_now)
                && readers.iter().all(|&token| self.events.is_over(token));
            // One call while holding the lock: no other thread may unmap it, or reuse it for
            // another piece.
            if over
                && let Some((range, at)) = mapped.mapped_at.take()
                && let Some(home) = self.homes.get(&range)
            {
                // If it fails, the next lease retries.
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

/// Returns true if all that is spilled of a buffer is mapped.
pub(super) fn is_mapped(
    core: &Deferrables,
    copies: &BTreeMap<PieceId, SpilledCopies>,
    buffer: BufferId,
) -> bool {
    let states = core.states(buffer).unwrap_or_default();
    (0..).zip(states).all(|(index, state)| {
        let below = copies.get(&PieceId { buffer, index });
        let mapped = below.and_then(|below| below.mapped.as_ref());
        !matches!(state, PieceState::Spilled { .. })
            || mapped.is_some_and(|mapped| mapped.mapped_at.is_some())
    })
}

/// Copies of one range that are being mapped.
pub(super) struct PendingMaps {
    range: RangeId,
    home: Arc<StableRange>,
    /// Offsets in the range, and the memory to map there.
    parts: Vec<(Bytes, Arc<HostBacking>)>,
}

impl Shared {
    /// Maps what was marked. A copy that cannot be mapped cannot be read in place.
    pub(super) fn map_copies(&self, maps: Vec<PendingMaps>) {
        for PendingMaps { range, home, parts } in maps {
            let failed: Vec<Bytes> = parts
                .iter()
                .filter(|(at, memory)| home.map_host_part(*at, memory).is_err())
                .map(|&(at, _)| at)
                .collect();
            let mut state = self.lock();
            failed.into_iter().for_each(|at| state.forget_mapping(range, at));
            state.mapping_now.remove(&range);
            state.core.set_mapping(range, false);
            state.recycle_copies();
            drop(state);
            // This may be the last reference to the range.
            drop(home);
            self.notify();
        }
    }
}

impl State {
    /// Marks what can be mapped now. The caller maps it directly after unlocking.
    pub fn begin_maps(&mut self) -> Vec<PendingMaps> {
        if self.to_map.is_empty() {
            return Vec::new();
        }
        let (busy, ranges) = std::mem::take(&mut self.to_map)
            .into_iter()
            .partition(|range| self.mapping_now.contains(range));
        self.to_map = busy;
        ranges.into_iter().filter_map(|range| self.begin_map(range)).collect()
    }

    /// Returns true if there is something to map.
    pub fn has_pending_maps(&self) -> bool {
        self.to_map.iter().any(|range| !self.mapping_now.contains(range))
    }

    fn begin_map(&mut self, range: RangeId) -> Option<PendingMaps> {
        let buffer = self.core.tenants(range).next()?;
        // A leased buffer is being restored. If that fails, the range is lent again.
        let is_leased = self.core.holds(buffer).is_ok_and(|holds| !holds.leases.is_empty());
        if is_leased || !self.core.is_readable(buffer) {
            return None;
        }
        let home = Arc::clone(&self.homes.get(&range)?.range);
        let states = self.core.states(buffer).unwrap_or_default();
        let piece = self.core.config().piece;
        let mut parts = Vec::new();
        for (index, state) in (0..).zip(states) {
            let PieceState::Spilled { copies } = state else { continue };
            let below = self.copies.get_mut(&PieceId { buffer, index });
            let Some(mapped) = below.and_then(|below| below.mapped.as_mut()) else { continue };
            if copies.host && mapped.mapped_at.is_none() {
                let at = piece * u64::from(index);
                mapped.mapped_at = Some((range, at));
                parts.push((at, Arc::clone(&mapped.memory)));
            }
        }
        if parts.is_empty() {
            return None;
        }
        self.mapping_now.insert(range);
        self.core.set_mapping(range, true);
        Some(PendingMaps { range, home, parts })
    }

    /// Returns true while copies of a buffer are being mapped at its addresses.
    pub fn is_mapping(&self, buffer: BufferId) -> bool {
        !self.mapping_now.is_empty()
            && self.core.slice(buffer).is_ok_and(|at| self.mapping_now.contains(&at.range))
    }
}
