//! Free memory whose work is over: released to the device.

use std::collections::BTreeSet;

use crate::Bytes;
use crate::ids::{ArenaId, ChunkId, Mark, StreamId};
use crate::pool::chunks::Mapped;
use crate::pool::free_chunks::FreeChunk;
use crate::pool::index::RegionKey;
use crate::pool::ops::{Plan, Range, Trim};
use crate::pool::regions::Kind;
use crate::pool::view::View;

impl<'a> View<'a> {
    /// A plan that releases idle chunks until the pool holds `excess` bytes less: the longest first
    /// that are not longer than what is left, or else the shortest one. `None` if none is idle.
    /// O(log n) for each chunk that it releases or that work still uses.
    pub(in crate::pool) fn release_excess(self, excess: Bytes) -> Option<Plan> {
        let mut left = excess;
        let mut released: Vec<FreeChunk> = Vec::new();
        let mut shortest: Option<(Bytes, FreeChunk)> = None;
        for (len, entry) in self.free_chunks.longest_first() {
            self.looked_at.add(1);
            if left.is_zero() {
                break;
            }
            let fits = len <= left;
            // A chunk that is too long is of use only if none is shorter.
            if !fits && shortest.is_some_and(|(known, _)| known == len) {
                continue;
            }
            if !self.is_idle(entry.chunk, entry.region) {
                continue;
            }
            if fits {
                left -= len;
                released.push(entry);
            } else {
                shortest = Some((len, entry));
            }
        }
        // Lent memory is in lists of its own.
        let lent = self.arenas.lent().flat_map(|key| self.idle_chunks_in(key));
        for entry in lent {
            let len = self.chunks.get(entry.chunk).len;
            if len <= left {
                left -= len;
                released.push(entry);
            } else if !left.is_zero() && shortest.is_none_or(|(known, _)| len < known) {
                shortest = Some((len, entry));
            }
        }
        if released.is_empty() {
            released.extend(shortest.map(|(_, entry)| entry));
        }
        (!released.is_empty()).then(|| self.release_plan(released))
    }

    /// A plan that releases the shortest idle chunk, and which that is. `None` if none is idle.
    pub(in crate::pool) fn release_shortest(self) -> Option<(ChunkId, Plan)> {
        let lent = self.arenas.lent().flat_map(|key| self.idle_chunks_in(key));
        let lent = lent.map(|entry| (self.chunks.get(entry.chunk).len, entry));
        let listed = self.free_chunks.iter().map(|(_, len, entry)| (len, entry));
        let idle = listed.chain(lent).filter(|(_, e)| self.is_idle(e.chunk, e.region));
        let (_, entry) = idle.min_by_key(|&(len, entry)| (len, entry.chunk))?;
        Some((entry.chunk, self.release_plan(vec![entry])))
    }

    /// A plan that releases one chunk that an arena lends, or `None`.
    pub(in crate::pool) fn release_lent(self, arena: ArenaId) -> Option<Plan> {
        let entry = self.lent_of(arena).flat_map(|key| self.idle_chunks_in(key)).next()?;
        Some(self.release_plan(vec![entry]))
    }

    /// A plan that unmaps idle chunks everywhere and releases them.
    pub(in crate::pool) fn release_plan(self, mut chunks: Vec<FreeChunk>) -> Plan {
        chunks.sort_by_key(|entry| (entry.region, std::cmp::Reverse(entry.home)));
        let trim = |entry: FreeChunk| {
            let chunk = self.chunks.get(entry.chunk);
            let aliases = chunk.aliases.iter().map(|&at| Range::new(at, chunk.len)).collect();
            let FreeChunk { chunk: id, region, home, .. } = entry;
            Trim { chunk: id, region, home: Range::new(home, chunk.len), aliases }
        };
        Plan::trim(chunks.into_iter().map(trim).collect())
    }

    /// Chunks of a free region whose mappings no work uses any more.
    fn idle_chunks_in(self, region: RegionKey) -> impl Iterator<Item = FreeChunk> + 'a {
        let region_len = self.regions.get(region).len;
        self.movable_in(region)
            .filter(move |mapped| self.is_idle(mapped.chunk, region))
            .map(move |Mapped { chunk, home, .. }| FreeChunk { region_len, home, chunk, region })
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
    /// can be known to be idle. O(free regions of streams, waiting regions and old mappings): memory in
    /// use, and what arenas lend, is not looked at.
    pub(in crate::pool) fn unrecorded(self) -> Vec<Mark> {
        let mut wanted: BTreeSet<Mark> = self.heap_waits.latest_marks().collect();
        wanted.extend(self.waiting.latest_marks());
        wanted.extend(self.streams.iter().filter_map(|(id, _)| self.present_of_free(id)));
        let waiting = self.waiting.iter().map(|entry| entry.item);
        for key in waiting.chain(self.retired.values().copied()) {
            self.looked_at.add(1);
            wanted.extend(match self.regions.get(key).kind {
                Kind::Waiting { owner, epoch } => Some(Mark { stream: owner, epoch }),
                Kind::Retired { mark, .. } => Some(mark),
                _ => None,
            });
        }
        wanted.retain(|&mark| self.can_be_recorded(mark));
        wanted.into_iter().collect()
    }

    /// The mark of what a stream frees now, if free memory has it. Lent memory never does: all work on
    /// it was over when it was lent.
    fn present_of_free(self, stream: StreamId) -> Option<Mark> {
        let known = self.streams.get(stream);
        let present = Mark { stream, epoch: known.current };
        let mut free = known.free.iter().inspect(|_| self.looked_at.add(1));
        let has_it = free.any(|(_, _, key)| self.free_of(key).marks().any(|mark| mark == present));
        has_it.then_some(present)
    }

    /// True if no event covers the mark, and one can be recorded.
    pub(in crate::pool) fn can_be_recorded(self, mark: Mark) -> bool {
        self.streams.is_unrecorded(mark) && !self.streams.is_out_of_reach(mark)
    }
}
