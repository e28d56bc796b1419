//! Free memory whose work is over: taken over by another stream, or released to the device.

use std::collections::BTreeSet;

use crate::Bytes;
use crate::ids::{ArenaId, ChunkId, Mark, StreamId};
use crate::pool::chunks::Mapped;
use crate::pool::index::RegionKey;
use crate::pool::ops::{Change, Op, Plan, Range};
use crate::pool::regions::Kind;
use crate::pool::view::{FreeSlice, View};

impl View<'_> {
    /// The smallest idle slice of another stream's region that holds `len` bytes.
    pub(in crate::pool) fn smallest_idle(self, stream: StreamId, len: Bytes) -> Option<FreeSlice> {
        if self.streams.len() == 1 {
            return None;
        }
        let mut best: Option<FreeSlice> = None;
        for key in self.foreign(stream) {
            for slice in self.ready_slices(key, |mark| self.streams.is_over(mark)) {
                if slice.len >= len && best.is_none_or(|best| slice.len < best.len) {
                    best = Some(slice);
                }
            }
        }
        best.map(|slice| FreeSlice { len, ..slice })
    }

    /// The chunk to release where the pool holds `excess` bytes too many: the largest idle one that
    /// is not larger than that.
    pub(in crate::pool) fn largest_idle_chunk(self, excess: Bytes) -> Option<ChunkId> {
        let chunks = self.idle_chunks().into_iter().filter(|&(len, _)| len <= excess);
        chunks.max().map(|(_, chunk)| chunk)
    }

    pub(in crate::pool) fn smallest_idle_chunk(self) -> Option<ChunkId> {
        self.idle_chunks().into_iter().min().map(|(_, chunk)| chunk)
    }

    /// A plan that releases one chunk that an arena lends, or `None`.
    pub(in crate::pool) fn release_lent(self, arena: ArenaId) -> Option<Plan> {
        let (_, chunk) = self.idle_chunks_in(self.lent_of(arena)).into_iter().next()?;
        Some(self.release_plan(chunk))
    }

    /// A plan that unmaps an idle chunk everywhere and releases it.
    pub(in crate::pool) fn release_plan(self, id: ChunkId) -> Plan {
        let chunk = self.chunks.get(id);
        let home = chunk.home.expect("a free chunk has a home");
        let places = chunk.aliases.iter().chain([&home]);
        let ranges: Vec<Range> = places.map(|&at| Range::new(at, chunk.len)).collect();
        let unmaps = ranges.iter().map(|&range| Op::Unmap(range));
        let ops = unmaps.chain([Op::Release { chunk: id }]).collect();
        Plan { ops, change: Change::Trim { chunk: id, ranges } }
    }

    /// Chunks that are wholly free and whose mappings no work uses any more, with their lengths.
    fn idle_chunks(self) -> Vec<(Bytes, ChunkId)> {
        let owned = self.streams.ids().flat_map(|id| self.streams.get(id).free.iter());
        self.idle_chunks_in(owned.map(|(_, _, key)| key).chain(self.arenas.lent()))
    }

    fn idle_chunks_in(self, regions: impl Iterator<Item = RegionKey>) -> Vec<(Bytes, ChunkId)> {
        let mut idle = Vec::new();
        for key in regions {
            for Mapped { chunk, len, .. } in self.chunks_in(key) {
                if self.is_idle(chunk, key) {
                    idle.push((len, chunk));
                }
            }
        }
        idle
    }

    /// True if no work uses a chunk of a free region any more, at its home or at old addresses.
    pub(in crate::pool) fn is_idle(self, chunk: ChunkId, region: RegionKey) -> bool {
        let over = self.streams.is_over(self.source_mark(chunk, region));
        let mut aliases = self.chunks.get(chunk).aliases.iter();
        over && aliases.all(|alias| {
            self.retired.get(alias).is_some_and(|&key| match self.regions.get(key).kind {
                Kind::Retired { mark, .. } => self.streams.is_over(mark),
                _ => false,
            })
        })
    }

    /// The marks for which an event has to be recorded before all free memory and every old mapping
    /// can be known to be idle.
    pub(in crate::pool) fn unrecorded(self) -> Vec<Mark> {
        let mut wanted: BTreeSet<Mark> = self.heap_marks.iter().copied().collect();
        wanted.extend(self.waiting.marks());
        for (_, region) in self.regions.iter() {
            match &region.kind {
                Kind::Free(free) => wanted.extend(free.marks()),
                Kind::Waiting { owner, epoch } => {
                    wanted.insert(Mark { stream: *owner, epoch: *epoch });
                }
                Kind::Retired { mark, .. } => {
                    wanted.insert(*mark);
                }
                Kind::Hole
                | Kind::Used(_)
                | Kind::Arena { .. }
                | Kind::Gap { .. }
                | Kind::Hosted { .. }
                | Kind::Quarantined => {}
            }
        }
        wanted.retain(|&mark| self.can_be_recorded(mark));
        wanted.into_iter().collect()
    }

    /// True if no event covers the mark, and one can be recorded.
    pub(in crate::pool) fn can_be_recorded(self, mark: Mark) -> bool {
        self.streams.is_unrecorded(mark) && !self.streams.is_out_of_reach(mark)
    }
}
