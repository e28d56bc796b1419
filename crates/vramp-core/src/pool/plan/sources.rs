//! The free chunks that a build may move.
//!
//! Those of the stream, and idle ones, are in the pool's lists
//! ([`FreeChunks`](crate::pool::free_chunks::FreeChunks)). What arenas lend is listed as far as a build
//! can use it: with 10,000 arenas a build looks at as many lent chunks as with 100, unless those do not
//! suffice.
//!
//! Growth: a build looks at the number of chunks of each length, and at the chunks that it moves.

use std::collections::BTreeMap;

use crate::Bytes;
use crate::ids::{ChunkId, StreamId};
use crate::pool::chunks::Mapped;
use crate::pool::free_chunks::FreeChunk;
use crate::pool::index::RegionKey;
use crate::pool::streams::IDLE;
use crate::pool::view::View;

/// Number of lent chunks that a build chooses from, at least.
const LENT_ENOUGH: usize = 256;

/// A wholly free chunk that may be moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::pool) struct Source {
    pub chunk: ChunkId,
    pub len: Bytes,
    pub region: RegionKey,
}

/// A number of chunks of one length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::pool) struct ChunkCount {
    pub len: Bytes,
    pub count: u64,
}

impl ChunkCount {
    /// Bytes of all these chunks.
    pub(in crate::pool) fn total(counts: &[ChunkCount]) -> Bytes {
        counts.iter().map(|chunks| chunks.len * chunks.count).sum()
    }

    /// Takes chunks of one length out of counts that are sorted by length.
    pub(in crate::pool) fn take(counts: &mut [ChunkCount], len: Bytes, count: u64) {
        let slot = counts.partition_point(|chunks| chunks.len < len);
        counts[slot].count -= count;
    }
}

/// Sources of one length, in the order in which they are used.
pub(in crate::pool) type SourcesOfLen<'a> = Box<dyn Iterator<Item = Source> + 'a>;

/// The sources of one build.
pub(in crate::pool) struct Sources<'a> {
    view: View<'a>,
    stream: StreamId,
    /// What arenas lend, by length and by chunk.
    lent: BTreeMap<Bytes, Vec<Source>>,
    lent_chunks: BTreeMap<ChunkId, Source>,
    /// Number of sources of each length, by length.
    pub counts: Vec<ChunkCount>,
    /// True if there are no others.
    pub complete: bool,
}

impl<'a> Sources<'a> {
    fn new(view: View<'a>, stream: StreamId, lent: Vec<Source>, complete: bool) -> Sources<'a> {
        let mut counts: BTreeMap<Bytes, u64> = BTreeMap::new();
        let listed = [stream, IDLE].into_iter().flat_map(|owner| view.free_chunks.counts(owner));
        listed.for_each(|(len, count)| *counts.entry(len).or_default() += count);
        let mut lent_by_len: BTreeMap<Bytes, Vec<Source>> = BTreeMap::new();
        let mut lent_chunks = BTreeMap::new();
        for source in lent {
            *counts.entry(source.len).or_default() += 1;
            lent_by_len.entry(source.len).or_default().push(source);
            lent_chunks.insert(source.chunk, source);
        }
        let counts = counts.into_iter().map(|(len, count)| ChunkCount { len, count }).collect();
        Sources { view, stream, lent: lent_by_len, lent_chunks, counts, complete }
    }

    /// Sources of one length: the stream's own, then idle ones, then lent ones; in small regions first.
    pub(in crate::pool) fn of_len(&self, len: Bytes) -> SourcesOfLen<'_> {
        let listed = [self.stream, IDLE].into_iter();
        let listed = listed.flat_map(move |owner| self.view.free_chunks.of_len(owner, len));
        let listed =
            listed.map(move |FreeChunk { chunk, region, .. }| Source { chunk, len, region });
        Box::new(listed.chain(self.lent.get(&len).into_iter().flatten().copied()))
    }

    /// The source that is this chunk.
    pub(in crate::pool) fn find(&self, chunk: ChunkId) -> Option<Source> {
        let len = || self.view.chunks.get(chunk).len;
        match self.view.free_chunks.find(chunk) {
            Some((region, owner)) if owner == self.stream || owner == IDLE => {
                Some(Source { chunk, len: len(), region })
            }
            _ => self.lent_chunks.get(&chunk).copied(),
        }
    }

    /// The stream that may move them.
    pub(in crate::pool) fn stream(&self) -> StreamId {
        self.stream
    }

    /// Bytes of all sources.
    pub(in crate::pool) fn bytes(&self) -> Bytes {
        ChunkCount::total(&self.counts)
    }

    /// The stream's region, or the idle one, with the most bytes in sources. O(sources).
    pub(in crate::pool) fn richest_region(&self) -> Option<RegionKey> {
        let mut of_region: BTreeMap<RegionKey, Bytes> = BTreeMap::new();
        for &ChunkCount { len, .. } in &self.counts {
            for source in self.of_len(len) {
                if !self.lent_chunks.contains_key(&source.chunk) {
                    *of_region.entry(source.region).or_default() += len;
                }
            }
        }
        of_region.into_iter().max_by_key(|&(_, bytes)| bytes).map(|(key, _)| key)
    }

    /// The number of sources of each length that can be moved, without those in the regions
    /// `left_out` and those in the list `reactivated`.
    pub(in crate::pool) fn movable(
        &self,
        left_out: [Option<RegionKey>; 2],
        reactivated: &[Source],
    ) -> Vec<ChunkCount> {
        let mut counts = self.counts.clone();
        for region in left_out.into_iter().flatten() {
            for (len, count) in self.view.free_chunks.counts_in(region) {
                ChunkCount::take(&mut counts, len, count);
            }
        }
        for source in reactivated {
            ChunkCount::take(&mut counts, source.len, 1);
        }
        counts
    }
}

impl<'a> View<'a> {
    /// Bytes of all wholly free chunks that `stream` may move. O(lengths of chunks), and O(log n) for
    /// each pinned chunk.
    pub(in crate::pool) fn movable_bytes(self, stream: StreamId) -> Bytes {
        let listed = [stream, IDLE].into_iter().flat_map(|owner| self.free_chunks.counts(owner));
        let listed: Bytes = listed.map(|(len, count)| len * count).sum();
        listed + self.arenas.lent_bytes() - self.pinned_lent_bytes()
    }

    /// Bytes of pinned chunks in memory that arenas lend.
    fn pinned_lent_bytes(self) -> Bytes {
        if self.arenas.lent_bytes().is_zero() {
            return Bytes::ZERO;
        }
        let pinned = self.chunks.pinned_homes().inspect(|_| self.looked_at.add(1));
        let lent = pinned.filter(|&home| self.lent_at(home).is_some());
        lent.map(|home| self.chunks.len_at(home)).sum()
    }

    /// The wholly free chunks that `stream` may move: its own, idle ones, and those that arenas lend.
    pub(in crate::pool) fn sources(self, stream: StreamId) -> Sources<'a> {
        self.sources_for(Bytes::MAX, stream, &[])
    }

    /// The same with some of what arenas lend: at least twice `len` bytes and 256 chunks, and the chunks
    /// `returning`. O(those chunks), and O(log n) for each that returns.
    pub(in crate::pool) fn sources_for(
        self,
        len: Bytes,
        stream: StreamId,
        returning: &[ChunkId],
    ) -> Sources<'a> {
        let mut all = Vec::new();
        let mut bytes = Bytes::ZERO;
        let enough = len.saturating_add(len);
        let lent = self.arenas.lent();
        let mut lent = lent.flat_map(|region| self.movable_in(region).map(move |c| (region, c)));
        for (region, Mapped { chunk, len, .. }) in lent.by_ref() {
            all.push(Source { chunk, len, region });
            bytes += len;
            if all.len() >= LENT_ENOUGH && bytes >= enough {
                break;
            }
        }
        self.looked_at.add(all.len());
        let Some((_, next)) = lent.next() else { return Sources::new(self, stream, all, true) };
        // Those that lie before are listed.
        for &chunk in returning {
            let home = self.chunks.get(chunk).home.filter(|&home| home >= next.home);
            if let Some(home) = home
                && let Some(region) = self.lent_at(home)
            {
                all.push(Source { chunk, len: self.chunks.get(chunk).len, region });
            }
        }
        Sources::new(self, stream, all, false)
    }
}
