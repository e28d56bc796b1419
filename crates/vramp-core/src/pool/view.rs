//! A read-only view of a pool's tables: all that planners, sums and checks see of it.

use std::collections::{BTreeMap, BTreeSet};

use crate::Bytes;
use crate::ids::{ArenaId, ChunkId, Mark, PoolAddr, StreamId};
use crate::pool::arenas::{ArenaMemory, ArenaRanges};
use crate::pool::chunks::{Chunks, Mapped};
use crate::pool::config::{Policy, PoolConfig};
use crate::pool::counters::{Counters, LookedAt};
use crate::pool::free_chunks::FreeChunks;
use crate::pool::heap_waits::HeapWaits;
use crate::pool::index::{FIRST_FIT_FROM, Holes, RegionKey};
use crate::pool::ops::Range;
use crate::pool::regions::{Free, Kind, Region, Regions};
use crate::pool::streams::{IDLE, Streams};
use crate::waiting::WaitQueue;

/// Requests of at least this length are placed by address where several streams share the pool.
const SHARED_FIRST_FIT_FROM: Bytes = Bytes::mib(32);

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
    /// Every quarantined mapping by address.
    pub quarantined: &'a BTreeMap<PoolAddr, RegionKey>,
    /// Freed regions that wait for other streams than their owner.
    pub waiting: &'a WaitQueue<RegionKey>,
    /// Bytes of these regions.
    pub waiting_bytes: Bytes,
    /// Freed pieces of heaps that wait for other streams.
    pub heap_waits: &'a HeapWaits,
    /// Bytes in blocks, slabs and arenas.
    pub used: Bytes,
    pub used_peak: Bytes,
    /// Large requests get few long chunks: other processes map what the pool serves.
    pub few_chunks: bool,
    /// Physical memory outside of the pool that counts against the same limit.
    pub elsewhere: Option<Bytes>,
    /// Wholly free chunks.
    pub free_chunks: &'a FreeChunks,
    /// Streams that freed memory which no event covers yet.
    pub unrecorded: &'a BTreeSet<StreamId>,
    /// Requests for which the streams' events are queried before memory is chosen.
    pub watched: u32,
    pub counters: &'a Counters,
    /// What planners look at is counted here.
    pub looked_at: &'a LookedAt,
}

impl<'a> View<'a> {
    /// Physical memory that counts against the limit.
    pub(crate) fn charged(self) -> Bytes {
        self.chunks.bytes().saturating_add(self.elsewhere.unwrap_or_default())
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

    /// The free region that serves a request of `len` bytes: of the stream's own and the idle ones the best
    /// fit, for requests that are placed by address an own one first.
    pub(crate) fn fit(self, stream: StreamId, len: Bytes) -> Option<RegionKey> {
        let from = if self.shares_idle() { SHARED_FIRST_FIT_FROM } else { FIRST_FIT_FROM };
        let own = self.streams.get(stream).free.find(len, from);
        if own.is_some() && len >= from {
            return own;
        }
        let found = own.into_iter().chain(self.streams.idle().find(len, from));
        found.min_by_key(|&key| self.regions.get(key).len)
    }

    /// True if free memory becomes idle memory of no stream: several streams use the pool, or did. Streams
    /// that it only knows do not count.
    pub(crate) fn shares_idle(self) -> bool {
        match &self.config.policy {
            Policy::Mixed(_) => self.streams.are_several_users(),
            Policy::Vpmm => false,
        }
    }

    /// True for free memory that the stream may use at once: its own, and idle memory.
    pub(crate) fn is_usable(self, key: RegionKey, stream: StreamId) -> bool {
        self.is_free_of(key, stream) || self.is_free_of(key, IDLE)
    }

    /// The other streams' free regions, oldest first.
    pub(crate) fn foreign(self, stream: StreamId) -> Vec<RegionKey> {
        let others = self.streams.iter().filter(|&(other, _)| other != stream);
        let mut regions: Vec<RegionKey> =
            others.flat_map(|(_, other)| other.free.iter().map(|(_, _, key)| key)).collect();
        self.looked_at.add(self.streams.len() + regions.len());
        regions.sort_by_key(|&key| self.free_of(key).born);
        regions
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

    /// The same without pinned chunks.
    pub(crate) fn movable_in(self, key: RegionKey) -> impl Iterator<Item = Mapped> + 'a {
        let region = self.regions.get(key);
        self.chunks.movable_within(region.at, region.len)
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
