//! A read-only view of a pool's tables: all that planners, sums and checks see of it.

use std::collections::BTreeMap;

use crate::Bytes;
use crate::ids::{ArenaId, ChunkId, Mark, PoolAddr, StreamId};
use crate::pool::arenas::{ArenaMemory, ArenaRanges};
use crate::pool::chunks::{Chunks, Mapped};
use crate::pool::config::PoolConfig;
use crate::pool::counters::Counters;
use crate::pool::index::{Holes, RegionKey};
use crate::pool::ops::Range;
use crate::pool::regions::{Free, Kind, Region, Regions};
use crate::pool::streams::Streams;
use crate::waiting::WaitList;

/// The tables of a pool.
#[derive(Clone, Copy)]
pub(crate) struct View<'a> {
    pub config: &'a PoolConfig,
    pub regions: &'a Regions,
    pub chunks: &'a Chunks,
    pub streams: &'a Streams,
    pub holes: &'a Holes,
    pub arenas: &'a ArenaRanges,
    /// Every retired mapping by address.
    pub retired: &'a BTreeMap<PoolAddr, RegionKey>,
    /// Freed regions that wait for other streams than their owner.
    pub waiting: &'a WaitList<RegionKey>,
    /// Marks that freed blocks in heaps wait for.
    pub heap_marks: &'a [Mark],
    /// Bytes in blocks, slabs and arenas.
    pub used: Bytes,
    pub used_peak: Bytes,
    /// Physical memory outside of the pool that counts against the same limit.
    pub elsewhere: Bytes,
    pub counters: &'a Counters,
}

impl<'a> View<'a> {
    /// Physical memory that counts against the limit.
    pub(crate) fn charged(self) -> Bytes {
        self.chunks.bytes().saturating_add(self.elsewhere)
    }

    /// Physical memory that may still be created below the limit.
    pub(crate) fn below_limit(self) -> Bytes {
        self.config.limit.unwrap_or(Bytes::MAX).saturating_sub(self.charged())
    }

    /// A request in whole units, or more than any span holds if it does not fit 64 bits.
    pub(crate) fn rounded(self, requested: Bytes, unit: Bytes) -> Bytes {
        let rounded = requested.max(Bytes::new(1)).checked_round_up(unit);
        rounded.unwrap_or(Bytes::MAX.round_down(unit))
    }

    // --- free regions ---

    pub(crate) fn free_of(self, key: RegionKey) -> &'a Free {
        match &self.regions.get(key).kind {
            Kind::Free(free) => free,
            other => panic!("region {key} is not free but {other:?}"),
        }
    }

    /// True for free memory of the stream that is not lent by an arena.
    pub(crate) fn is_free_of(self, key: RegionKey, owner: StreamId) -> bool {
        let own = |free: &Free| free.owner == owner && free.lent_by.is_none();
        matches!(&self.regions.get(key).kind, Kind::Free(free) if own(free))
    }

    /// The free region of the stream that serves a request of `len` bytes.
    pub(crate) fn fit(self, stream: StreamId, len: Bytes) -> Option<RegionKey> {
        self.streams.get(stream).free.find(len)
    }

    /// The other streams' free regions, oldest first.
    pub(crate) fn foreign(self, stream: StreamId) -> Vec<RegionKey> {
        let mut regions: Vec<RegionKey> = self
            .streams
            .ids()
            .filter(|&other| other != stream)
            .flat_map(|other| self.streams.get(other).free.iter().map(|(_, _, key)| key))
            .collect();
        regions.sort_by_key(|&key| self.free_of(key).born);
        regions
    }

    /// Slices of a free region whose every part is ready, in address order.
    pub(crate) fn ready_slices(
        self,
        key: RegionKey,
        ready: impl Fn(Mark) -> bool,
    ) -> Vec<FreeSlice> {
        let mut slices: Vec<FreeSlice> = Vec::new();
        let mut offset = Bytes::ZERO;
        let free = self.free_of(key);
        for (part, mark) in free.parts.iter().zip(free.marks()) {
            if ready(mark) {
                match slices.last_mut() {
                    Some(last) if last.offset + last.len == offset => last.len += part.len,
                    _ => slices.push(FreeSlice { region: key, offset, len: part.len }),
                }
            }
            offset += part.len;
        }
        slices
    }

    /// The work that may still touch a free chunk at its home in region `from`.
    pub(crate) fn source_mark(self, chunk: ChunkId, from: RegionKey) -> Mark {
        let chunk = self.chunks.get(chunk);
        let home = chunk.home.expect("a source has a home");
        let free = self.free_of(from);
        Mark {
            stream: free.owner,
            epoch: free.epoch_of(home - self.regions.get(from).at, chunk.len),
        }
    }

    /// Chunks whose home lies wholly within a region, in address order.
    pub(crate) fn chunks_in(self, key: RegionKey) -> impl Iterator<Item = Mapped> + 'a {
        let region = self.regions.get(key);
        self.chunks.within(region.at, region.len)
    }

    // --- arenas ---

    /// An arena's regions in address order.
    pub(crate) fn regions_of(self, arena: ArenaId) -> impl Iterator<Item = RegionKey> + 'a {
        let (first, end) = (self.arenas.get(arena).first, self.arenas.get(arena).end());
        std::iter::successors(Some(first), move |&key| self.regions.next(key))
            .take_while(move |&key| self.regions.get(key).at < end)
    }

    /// The same with the regions themselves.
    pub(crate) fn arena_regions(
        self,
        arena: ArenaId,
    ) -> impl Iterator<Item = (RegionKey, &'a Region)> {
        self.regions_of(arena).map(move |key| (key, self.regions.get(key)))
    }

    /// The free regions that an arena lends.
    pub(crate) fn lent_of(self, arena: ArenaId) -> impl Iterator<Item = RegionKey> + 'a {
        let lent = |region: &Region| matches!(region.kind, Kind::Free(_));
        self.arena_regions(arena).filter(move |(_, region)| lent(region)).map(|(key, _)| key)
    }

    /// The lent region that holds `at`.
    pub(crate) fn lent_at(self, at: PoolAddr) -> Option<RegionKey> {
        self.arenas.lent_up_to(at).filter(|&key| self.regions.get(key).holds(at))
    }

    /// The gap of an arena that holds `at`.
    pub(crate) fn gap_at(self, at: PoolAddr) -> Option<RegionKey> {
        let gap = |region: &Region| region.holds(at) && matches!(region.kind, Kind::Gap { .. });
        let arena = self.arenas.at(at)?;
        self.arena_regions(arena).find(|(_, region)| gap(region)).map(|(key, _)| key)
    }

    /// Memory of an arena. O(its regions).
    pub(crate) fn arena_memory(self, arena: ArenaId) -> ArenaMemory {
        let mut memory = ArenaMemory::default();
        for (_, region) in self.arena_regions(arena) {
            match region.kind {
                Kind::Arena { .. } => memory.backed += region.len,
                Kind::Free(_) => memory.lent += region.len,
                _ => {}
            }
        }
        memory
    }

    /// Work that may still touch memory of an arena, at most one mark for each stream.
    pub(crate) fn arena_inherited(self, arena: ArenaId) -> Vec<Mark> {
        let marks = self.arenas.get(arena).inherited.iter();
        marks.copied().filter(|&mark| !self.streams.is_over(mark)).collect()
    }

    /// The addresses of a part of an arena.
    ///
    /// # Panics
    /// If they are not whole pages within the arena.
    pub(crate) fn arena_part(self, arena: ArenaId, from: Bytes, len: Bytes) -> Range {
        let Range { at, len: whole } = self.arenas.get(arena).range();
        let page = self.config.page;
        let inside = from.checked_add(len).is_some_and(|end| end <= whole);
        let pages = from.is_multiple_of(page) && len.is_multiple_of(page);
        assert!(inside && pages && !len.is_zero(), "{len} from {from} are no pages of {arena}");
        Range::new(at + from, len)
    }
}

/// A part of a free region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FreeSlice {
    pub region: RegionKey,
    pub offset: Bytes,
    pub len: Bytes,
}
