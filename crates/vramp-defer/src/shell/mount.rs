//! Mapping copies at their pieces' own addresses, with the lock free.
//!
//! 1. [`State::lend`] notes a range of which memory was lent.
//! 2. Whoever has the lock lets it go: what can be mapped is marked first ([`State::begin_mounts`]).
//! 3. The calls are made behind the lock ([`Shared::mount`]), and what came of them is noted.
//!
//! Between the marks nobody else maps or unmaps there: leases wait as for a move on its way
//! ([`State::is_mounting`]), so does a push of a copy to the disk, and a copy that counts no more
//! meanwhile is unmapped behind it.

use std::sync::Arc;

use crate::core::{BufferId, PieceId, PieceState, RangeId};
use vramp_alloc::range::{HostBacking, StableRange};
use vramp_core::Bytes;

use super::state::{Shared, State};

/// Copies of one range that are being mapped.
pub(super) struct Mounts {
    range: RangeId,
    home: Arc<StableRange>,
    /// Where, and what.
    parts: Vec<(Bytes, Arc<HostBacking>)>,
}

impl Shared {
    /// Maps what was marked. What cannot be mapped is not readable in place.
    pub(super) fn mount(&self, mounts: Vec<Mounts>) {
        for Mounts { range, home, parts } in mounts {
            let failed: Vec<Bytes> = parts
                .iter()
                .filter(|(at, memory)| home.map_host_part(*at, memory).is_err())
                .map(|&(at, _)| at)
                .collect();
            let mut state = self.lock();
            failed.into_iter().for_each(|at| state.forget_mount(range, at));
            state.mounting.remove(&range);
            state.restock();
            drop(state);
            // The range may have been kept by this alone.
            drop(home);
            self.tell();
        }
    }
}

impl State {
    /// Marks what can be mapped now. Whoever calls has it mapped as soon as the lock is free.
    pub fn begin_mounts(&mut self) -> Vec<Mounts> {
        if self.unmounted.is_empty() {
            return Vec::new();
        }
        let (busy, ranges) = std::mem::take(&mut self.unmounted)
            .into_iter()
            .partition(|range| self.mounting.contains(range));
        self.unmounted = busy;
        ranges.into_iter().filter_map(|range| self.begin_mount(range)).collect()
    }

    /// True if there is something to map.
    pub fn has_mounts(&self) -> bool {
        self.unmounted.iter().any(|range| !self.mounting.contains(range))
    }

    fn begin_mount(&mut self, range: RangeId) -> Option<Mounts> {
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
            let Some(hosted) = below.and_then(|below| below.hosted.as_mut()) else { continue };
            if copies.host && hosted.mounted.is_none() {
                let at = piece * u64::from(index);
                hosted.mounted = Some((range, at));
                parts.push((at, Arc::clone(&hosted.memory)));
            }
        }
        if parts.is_empty() {
            return None;
        }
        self.mounting.insert(range);
        Some(Mounts { range, home, parts })
    }

    /// True while copies of a buffer are being mapped at its addresses.
    pub fn is_mounting(&self, buffer: BufferId) -> bool {
        !self.mounting.is_empty()
            && self.core.extent(buffer).is_ok_and(|at| self.mounting.contains(&at.range))
    }
}
