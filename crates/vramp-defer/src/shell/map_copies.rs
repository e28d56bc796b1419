//! Mapping host copies at their pieces' own addresses, with the lock released.
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

use std::sync::Arc;

use crate::planner::{BufferId, PieceId, PieceState, RangeId};
use vramp_alloc::range::{HostBacking, StableRange};
use vramp_core::Bytes;

use super::state::{Shared, State};

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
