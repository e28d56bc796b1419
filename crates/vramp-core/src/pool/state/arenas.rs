//! Arenas: made, backed, lent, hosted and removed.

use super::Pool;
use crate::Bytes;
use crate::ids::{ArenaId, Epoch, Mark, PoolAddr, StreamId};
use crate::pool::arenas::{AddedArena, ArenaMemory, ArenaRange};
use crate::pool::chunks::Mapped;
use crate::pool::config::Policy;
use crate::pool::index::{Hole, RegionKey};
use crate::pool::ops::{Plan, Range};
use crate::pool::plan::hosted::NotVacant;
use crate::pool::regions::{Free, Kind, Parts, Region};

impl Pool {
    /// Sets `capacity` addresses aside for an arena, rounded up to whole pages. No memory yet, and
    /// no driver call unless addresses have to be reserved.
    ///
    /// # Panics
    /// With the policy `Vpmm`, which has no arenas; and if the capacity is zero or larger than a
    /// span can be.
    pub fn add_arena(&mut self, capacity: Bytes) -> AddedArena {
        assert!(matches!(self.config.policy, Policy::Mixed(_)), "VPMM has no arenas");
        let len = self.view().rounded(capacity, self.config.page);
        assert!(len <= PoolAddr::SPAN_LIMIT, "an arena of {capacity} fits no span");
        let Some(hole) = self.holes.smallest_of(len) else {
            return AddedArena::ReserveFirst(self.view().reserve_plan(len));
        };
        // At the end, away from where the pool grows.
        self.holes.remove(hole);
        let rest = hole.len - len;
        let first = if rest.is_zero() {
            hole.region
        } else {
            let back = self.regions.split(hole.region, rest);
            self.holes.insert(Hole { len: rest, ..hole });
            back
        };
        let arena = self.arenas.upcoming();
        let region = self.regions.get_mut(first);
        region.kind = Kind::Gap { arena };
        let range = ArenaRange {
            at: region.at,
            len,
            first,
            inherited: Vec::new(),
            chunk: None,
            refuses_pins: false,
        };
        AddedArena::Added(self.arenas.add(range))
    }

    /// Takes the addresses of an arena from `keep` bytes on, as far as nothing was mapped there: other
    /// arenas and blocks can use them. Returns the arena's length from now on. No driver call.
    /// O(regions of the arena).
    ///
    /// # Panics
    /// If there is no such arena, or `keep` is zero.
    pub fn shorten_arena(&mut self, arena: ArenaId, keep: Bytes) -> Bytes {
        assert!(!keep.is_zero(), "{arena} keeps some addresses");
        self.merge_arena(arena);
        let range = self.arenas.get(arena).range();
        let keep = self.view().rounded(keep.min(range.len), self.config.page);
        let last = self.view().regions_of(arena).last().expect("an arena has a region");
        let region = self.regions.get(last);
        let cut = region.at.max(range.at + keep);
        if !matches!(region.kind, Kind::Gap { .. }) || cut >= range.end() {
            return range.len;
        }
        let rest = match cut == region.at {
            true => last,
            false => self.regions.split(last, cut - region.at),
        };
        let len = cut - range.at;
        self.arenas.get_mut(arena).len = len;
        self.add_hole(rest);
        len
    }

    /// Cuts an arena at `offset`, before anything was mapped in it: its addresses from there on are those of
    /// the arena that is returned, with the same length of new chunks. No driver call. O(log n).
    ///
    /// # Panics
    /// Unless `offset` is whole pages within the arena; or if something was mapped.
    pub fn split_arena(&mut self, arena: ArenaId, offset: Bytes) -> ArenaId {
        let ArenaRange { at, len, first, chunk, .. } = *self.arenas.get(arena);
        let inside = !offset.is_zero() && offset < len && offset.is_multiple_of(self.config.page);
        assert!(inside, "{arena} of {len} cannot be cut at {offset}");
        let gap = self.regions.get(first);
        assert!(
            matches!(gap.kind, Kind::Gap { .. }) && gap.len == len,
            "{arena} was backed before it was cut"
        );
        let back = self.regions.split(first, offset);
        let upcoming = self.arenas.upcoming();
        self.regions.get_mut(back).kind = Kind::Gap { arena: upcoming };
        self.arenas.get_mut(arena).len = offset;
        self.arenas.add(ArenaRange {
            at: at + offset,
            len: len - offset,
            first: back,
            inherited: Vec::new(),
            chunk,
            refuses_pins: false,
        })
    }

    /// Returns the length of the longest range of addresses that nothing uses.
    pub fn longest_hole(&self) -> Bytes {
        self.holes.largest().map_or(Bytes::ZERO, |hole| hole.len)
    }

    /// Sets the length of an arena's new chunks, rounded down to whole pages, so that parts of that
    /// length can be lent.
    pub fn set_arena_chunk(&mut self, arena: ArenaId, len: Bytes) {
        let page = self.config.page;
        self.arenas.get_mut(arena).chunk = Some(len.max(page).round_down(page));
    }

    /// Returns an arena's addresses.
    ///
    /// # Panics
    /// If there is no such arena.
    pub fn arena_range(&self, arena: ArenaId) -> Range {
        self.arenas.get(arena).range()
    }

    /// Returns how much memory an arena has. O(its regions).
    pub fn arena_memory(&self, arena: ArenaId) -> ArenaMemory {
        self.view().arena_memory(arena)
    }

    /// Returns the work that may still touch memory of an arena, at most one mark for each stream:
    /// the arena's graphs run behind it.
    pub fn arena_inherited(&self, arena: ArenaId) -> Vec<Mark> {
        self.view().arena_inherited(arena)
    }

    /// True if the first `upto` bytes of an arena are made of more than twice as many chunks as
    /// they would be if they were made at once, or if over a 64th more is mapped.
    pub fn is_ill_cut(&self, arena: ArenaId, upto: Bytes) -> bool {
        self.view().is_ill_cut(arena, upto)
    }

    /// Lends every chunk of an arena that is not pinned and that none of the `live` ranges touches: offsets from the
    /// arena's start, sorted, not overlapping. All work on that memory must be *over*, not only
    /// ordered. Returns how much is lent now that was not. No driver call.
    pub fn lend(&mut self, arena: ArenaId, live: &[(Bytes, Bytes)]) -> Bytes {
        let start = self.arenas.get(arena).at;
        let touched = |mapped: &Mapped| {
            let (from, to) = (mapped.home - start, mapped.end() - start);
            let next = live.partition_point(|&(offset, len)| offset + len <= from);
            live.get(next).is_some_and(|&(offset, _)| offset < to)
        };
        let mut lent = Bytes::ZERO;
        for key in self.view().regions_of(arena).collect::<Vec<_>>() {
            let region = self.regions.get(key);
            let Kind::Arena { stream, .. } = region.kind else { continue };
            let mut runs: Vec<Range> = Vec::new();
            for mapped in self.view().movable_in(key).filter(|mapped| !touched(mapped)) {
                Range::new(mapped.home, mapped.len).append(&mut runs);
            }
            let at = region.at;
            // From the back: the front of a region keeps its key.
            for run in runs.into_iter().rev() {
                if run.end() < self.regions.get(key).end() {
                    self.regions.split(key, run.end() - at);
                }
                let piece = if at < run.at { self.regions.split(key, run.at - at) } else { key };
                let born = self.next_birth();
                let parts = Parts::one(run.len, Epoch::START);
                self.regions.get_mut(piece).kind =
                    Kind::Free(Free { owner: stream, parts, born, lent_by: Some(arena) });
                self.index(piece);
                lent += run.len;
            }
        }
        self.used -= lent;
        lent
    }

    /// Returns the parts of an arena with memory that only it may use: offsets and lengths, sorted. O(its
    /// regions).
    pub fn backed_parts(&self, arena: ArenaId) -> Vec<(Bytes, Bytes)> {
        let start = self.arenas.get(arena).at;
        let own = |region: &Region| matches!(region.kind, Kind::Arena { .. });
        let own = self.view().arena_regions(arena).filter(move |(_, region)| own(region));
        own.map(|(_, region)| (region.at - start, region.len)).collect()
    }

    /// Takes back what an arena lent within a part of it, where it is still at home.
    pub(super) fn end_lending(&mut self, arena: ArenaId, part: Range, stream: StreamId) {
        for key in self.view().regions_of(arena).collect::<Vec<_>>() {
            let region = self.regions.get(key);
            let lent = matches!(region.kind, Kind::Free(_));
            if !part.touches(region.at, region.len) || !lent {
                continue;
            }
            let mut homes = self.view().chunks_in(key).filter(|m| part.touches(m.home, m.len));
            let Some(first) = homes.next() else { continue };
            let (from, to) = (first.home, homes.last().unwrap_or(first).end());
            let (at, end) = (region.at, region.end());
            self.unindex(key);
            if to < end {
                let behind = self.split_lent(key, to - at);
                self.index(behind);
            }
            let key = match at < from {
                true => {
                    let part = self.split_lent(key, from - at);
                    self.index(key);
                    part
                }
                false => key,
            };
            let region = self.regions.get_mut(key);
            region.kind = Kind::Arena { arena, stream };
            self.used += region.len;
        }
        self.used_peak = self.used_peak.max(self.used);
        self.merge_arena(arena);
    }

    /// Cuts lent memory in two, between two chunks.
    fn split_lent(&mut self, key: RegionKey, offset: Bytes) -> RegionKey {
        let back = self.regions.split(key, offset);
        for piece in [key, back] {
            let len = self.regions.get(piece).len;
            self.free_of_mut(piece).parts = Parts::one(len, Epoch::START);
        }
        back
    }

    /// Ends an arena: its addresses can be used for blocks, and so can its memory once the work of
    /// `marks` is over. No driver call.
    pub fn remove_arena(&mut self, arena: ArenaId, marks: &[Mark]) {
        let keys: Vec<RegionKey> = self.view().regions_of(arena).collect();
        let mut uses = marks.to_vec();
        uses.extend(self.arena_inherited(arena));
        self.arenas.remove(arena);
        for key in keys {
            if matches!(self.regions.get(key).kind, Kind::Free(_)) {
                self.unindex(key);
            }
            match &mut self.regions.get_mut(key).kind {
                Kind::Gap { .. } => self.add_hole(key),
                Kind::Retired { arena, .. } => *arena = None,
                Kind::Free(free) => {
                    free.lent_by = None;
                    self.link_free(key);
                }
                Kind::Arena { stream, .. } => {
                    let stream = *stream;
                    self.release_region(key, stream, uses.clone());
                }
                // No caller is left that would unmap it.
                Kind::Hosted { .. } => {
                    let kind = Kind::Quarantined { chunk: None, arena: None, in_use: true };
                    self.quarantine_as(key, kind);
                }
                Kind::Quarantined { arena, .. } => *arena = None,
                other => panic!("region {key} of {arena} is {other:?}"),
            }
        }
    }

    /// Returns a plan that releases one chunk that an arena lends, or `None`.
    pub fn release_lent(&self, arena: ArenaId) -> Option<Plan> {
        self.view().release_lent(arena)
    }

    /// Returns the next plan towards a part of an arena where nothing is mapped: lent memory is
    /// released, and old mappings are unmapped. `None` once nothing is mapped. O(regions of the
    /// arena).
    ///
    /// # Errors
    /// Memory there may not be unmapped. Nothing changes.
    pub fn vacate(
        &self,
        arena: ArenaId,
        from: Bytes,
        len: Bytes,
    ) -> Result<Option<Plan>, NotVacant> {
        self.view().vacate(arena, self.view().arena_part(arena, from, len))
    }

    /// Notes that memory which is not the pool's was mapped in a part of an arena.
    ///
    /// # Panics
    /// If memory of the pool is mapped there, see [`vacate`](Pool::vacate).
    pub fn set_hosted(&mut self, arena: ArenaId, from: Bytes, len: Bytes) {
        let Range { at: start, len } = self.view().arena_part(arena, from, len);
        let end = start + len;
        self.merge_arena(arena);
        let gap = self.view().gap_at(start).filter(|&key| end <= self.regions.get(key).end());
        let mut key = gap.unwrap_or_else(|| panic!("{len} at {start:?} of {arena} are no gap"));
        let at = self.regions.get(key).at;
        if at < start {
            key = self.regions.split(key, start - at);
        }
        if end < self.regions.get(key).end() {
            self.regions.split(key, len);
        }
        self.regions.get_mut(key).kind = Kind::Hosted { arena };
    }

    /// Notes that it was unmapped: the part that was set to begin at `from` is a gap.
    ///
    /// # Panics
    /// If no such part begins there.
    pub fn clear_hosted(&mut self, arena: ArenaId, from: Bytes) {
        let key = self.view().hosted_at(arena, from);
        self.add_gap(key, arena);
    }

    /// Notes that it could not be unmapped: the part is not used before it is. If work may still access
    /// it (`in_use`), no unmap is tried again.
    ///
    /// # Panics
    /// If no such part begins at `from`.
    pub fn spoil_hosted(&mut self, arena: ArenaId, from: Bytes, in_use: bool) {
        let key = self.view().hosted_at(arena, from);
        let kind = Kind::Quarantined { chunk: None, arena: Some(arena), in_use };
        self.quarantine_as(key, kind);
    }

    /// Returns the parts of an arena with memory that is not the pool's: offsets and lengths,
    /// sorted. O(regions of the arena).
    pub fn hosted(&self, arena: ArenaId) -> Vec<(Bytes, Bytes)> {
        self.view().hosted(arena)
    }
}
