//! Parts of an arena that have memory which is not the pool's: a host's, mapped for the device.
//!
//! 1. The arena lends the part, [`Pool::lend`], or never had memory there.
//! 2. [`Pool::vacate`] gives the plans after which nothing is mapped there.
//! 3. The shell maps memory of its own there and says so, [`Pool::set_hosted`]. The pool places
//!    nothing there, and backs nothing there.
//! 4. The shell unmaps it, [`Pool::clear_hosted`]: a gap, which can be backed again.
//!
//! Deliberately absent: the memory itself, who reads it, and when that is over.

use crate::Bytes;
use crate::ids::{ArenaId, Mark, PoolAddr};
use crate::pool::index::RegionKey;
use crate::pool::plan::{Change, Op, Plan, Range};
use crate::pool::regions::Kind;
use crate::pool::state::Pool;

/// Why a part of an arena cannot get memory that is not the pool's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotVacant {
    /// The arena has memory there.
    #[error("there is memory of its own: lend that first")]
    Backed,
    /// Memory that was there is still used, there or where it was before.
    #[error("work that used the memory there is under way: try again when it is over")]
    InUse,
    /// It has such memory.
    #[error("there is other memory already: take that away first")]
    Hosted,
    /// Nobody knows what is mapped there.
    #[error("a failed driver call left part of it unusable: use other addresses")]
    Quarantined,
}

impl Pool {
    /// The next plan towards a part of an arena where nothing is mapped: lent memory goes back to
    /// the card, and old mappings go. `None` once nothing is mapped. O(regions of the arena).
    ///
    /// # Errors
    /// What is there may not go. Nothing changes.
    pub fn vacate(
        &self,
        arena: ArenaId,
        from: Bytes,
        len: Bytes,
    ) -> Result<Option<Plan>, NotVacant> {
        let (start, end) = self.ends_of(arena, from, len);
        for key in self.regions_of(arena) {
            let region = self.regions.get(key);
            if region.end() <= start || end <= region.at {
                continue;
            }
            match &region.kind {
                Kind::Gap { .. } => {}
                Kind::Retired { mark, .. } => {
                    let range = Range { at: region.at, len: Bytes::new(region.len) };
                    return self.unmap_if_over(range, *mark);
                }
                Kind::Free(_) => return self.release_first(key, start, end),
                Kind::Arena { .. } => return Err(NotVacant::Backed),
                Kind::Hosted { .. } => return Err(NotVacant::Hosted),
                Kind::Quarantined => return Err(NotVacant::Quarantined),
                other => panic!("region {key} of {arena} is {other:?}"),
            }
        }
        Ok(None)
    }

    fn unmap_if_over(&self, range: Range, mark: Mark) -> Result<Option<Plan>, NotVacant> {
        if !self.streams.is_over(mark) {
            return Err(NotVacant::InUse);
        }
        let change = Change::Unmap { ranges: vec![range] };
        Ok(Some(Plan { ops: vec![Op::Unmap(range)], change }))
    }

    /// The first chunk of a lent region that touches the addresses goes back to the card, whole.
    fn release_first(
        &self,
        key: RegionKey,
        start: PoolAddr,
        end: PoolAddr,
    ) -> Result<Option<Plan>, NotVacant> {
        let region = self.regions.get(key);
        let touching = |&(_, home, len): &(_, PoolAddr, u64)| start < home.plus(len) && home < end;
        let found = self.chunks.within(region.at, region.len).find(touching);
        let (id, _, len) = found.expect("lent memory is whole chunks");
        match self.is_idle(id, key) {
            true => Ok(Some(self.release_plan(id, len))),
            false => Err(NotVacant::InUse),
        }
    }

    /// Notes that memory which is not the pool's was mapped in a part of an arena.
    ///
    /// # Panics
    /// If anything of the pool's is mapped there, see [`vacate`](Pool::vacate).
    pub fn set_hosted(&mut self, arena: ArenaId, from: Bytes, len: Bytes) {
        let (start, end) = self.ends_of(arena, from, len);
        self.merge_alike(arena);
        let gap = self.gap_at(start).filter(|&key| end <= self.regions.get(key).end());
        let mut key = gap.unwrap_or_else(|| panic!("{len} at {start:?} of {arena} are no gap"));
        let offset = start.since(self.regions.get(key).at);
        if offset > 0 {
            key = self.regions.split(key, offset);
        }
        if end < self.regions.get(key).end() {
            self.regions.split(key, end.since(start));
        }
        self.regions.get_mut(key).kind = Kind::Hosted { arena };
    }

    /// Notes that it was unmapped: the part that was set to begin at `from` is a gap.
    ///
    /// # Panics
    /// If no such part begins there.
    pub fn clear_hosted(&mut self, arena: ArenaId, from: Bytes) {
        let key = self.hosted_at(arena, from);
        self.add_gap(key, arena);
    }

    /// Notes that it could not be unmapped: the part is never used again.
    ///
    /// # Panics
    /// If no such part begins at `from`.
    pub fn spoil_hosted(&mut self, arena: ArenaId, from: Bytes) {
        let key = self.hosted_at(arena, from);
        self.regions.get_mut(key).kind = Kind::Quarantined;
    }

    /// The parts of an arena with memory that is not the pool's: offsets and lengths, sorted.
    /// O(regions of the arena).
    pub fn hosted(&self, arena: ArenaId) -> Vec<(Bytes, Bytes)> {
        let start = self.arena_range(arena).at;
        let regions = self.regions_of(arena).map(|key| self.regions.get(key));
        let hosted = regions.filter(|region| matches!(region.kind, Kind::Hosted { .. }));
        let part = |region: &crate::pool::regions::Region| {
            (Bytes::new(region.at.since(start)), Bytes::new(region.len))
        };
        hosted.map(part).collect()
    }

    fn hosted_at(&self, arena: ArenaId, from: Bytes) -> RegionKey {
        let at = self.arena_range(arena).at.plus(from.count());
        let found = self.regions_of(arena).find(|&key| {
            let region = self.regions.get(key);
            region.at == at && matches!(region.kind, Kind::Hosted { .. })
        });
        found.unwrap_or_else(|| panic!("nothing is hosted at {at:?} of {arena}"))
    }

    fn ends_of(&self, arena: ArenaId, from: Bytes, len: Bytes) -> (PoolAddr, PoolAddr) {
        let Range { at, len: whole } = self.arena_range(arena);
        let page = self.config.page.count();
        let inside = from.checked_add(len).is_some_and(|end| end <= whole);
        let pages = from.count().is_multiple_of(page) && len.count().is_multiple_of(page);
        assert!(inside && pages && !len.is_zero(), "{len} from {from} are no pages of {arena}");
        (at.plus(from.count()), at.plus(from.count() + len.count()))
    }
}
