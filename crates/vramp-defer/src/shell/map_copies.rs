//! Mapping copies at their pieces' own addresses, with the lock free.
//!
//! 1. [`State::lend`] notes a range of which memory was lent.
//! 2. Whoever has the lock lets it go: what can be mapped is marked first ([`State::begin_maps`]).
//! 3. The calls are made behind the lock ([`Shared::mount`]), and what came of them is noted.
//!
//! Between the marks nobody else maps or unmaps there: leases wait as for a move on its way
//! ([`State::is_mapping`]), so does a push of a copy to the disk, and a copy that counts no more
//! meanwhile is unmapped behind it.

use std::sync::Arc;

use crate::planner::{BufferId, PieceId, PieceState, RangeId};
use vramp_alloc::range::{HostBacking, StableRange};
use vramp_core::Bytes;

use super::state::{Shared, State};

/// Copies of one range that are being mapped.
pub(super) struct PendingMaps {
    range: RangeId,
    home: Arc<StableRange>,
    /// Where, and what.
    parts: Vec<(Bytes, Arc<HostBacking>)>,
}

impl Shared {
    /// Maps what was marked. What cannot be mapped is not readable in place.
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
            state.recycle_copies();
            drop(state);
            // The range may have been kept by this alone.
            drop(home);
            self.notify();
        }
    }
}

impl State {
    /// Marks what can be mapped now. Whoever calls has it mapped as soon as the lock is free.
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

    /// True if there is something to map.
    pub fn has_pending_maps(&self) -> bool {
        self.to_map.iter().any(|range| !self.mapping_now.contains(range))
    }

    fn begin_map(&mut self, range: RangeId) -> Option<PendingMaps> {
        let buffer = self.core.tenants(range).next()?;
        // Whoever leases it brings memory there; if that fails, the range is lent again.
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
        Some(PendingMaps { range, home, parts })
    }

    /// True while copies of a buffer are being mapped at its addresses.
    pub fn is_mapping(&self, buffer: BufferId) -> bool {
        !self.mapping_now.is_empty()
            && self.core.slice(buffer).is_ok_and(|at| self.mapping_now.contains(&at.range))
    }
}
