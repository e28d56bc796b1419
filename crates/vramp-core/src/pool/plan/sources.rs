//! The free chunks that a build may move.
//!
//! Those of the stream are listed all. What arenas lend is listed as far as a build can use it: with
//! 10,000 arenas a build looks at as many lent chunks as with 100, unless those do not suffice.

use std::collections::BTreeMap;

use crate::Bytes;
use crate::ids::{ChunkId, PoolAddr, StreamId};
use crate::pool::chunks::Mapped;
use crate::pool::index::RegionKey;
use crate::pool::view::View;

/// Number of lent chunks that a build chooses from, at least.
const LENT_ENOUGH: usize = 256;

/// Where a source lies, in the order in which sources of one length are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::pool) enum Lender {
    /// In a free region of the stream of this length: small regions first.
    Stream { region_len: Bytes },
    /// In memory that an arena lends: last.
    Arena,
}

/// A wholly free chunk that may be moved.
#[derive(Clone, Copy, Debug)]
pub(in crate::pool) struct Source {
    pub chunk: ChunkId,
    pub home: PoolAddr,
    pub len: Bytes,
    pub region: RegionKey,
    pub lender: Lender,
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

/// The sources of one build. Lists name them by their position in `all`.
pub(in crate::pool) struct Sources {
    pub all: Vec<Source>,
    /// Positions by length; within a length in the order of use.
    pub by_len: BTreeMap<Bytes, Vec<usize>>,
    pub by_chunk: BTreeMap<ChunkId, usize>,
    /// Number of sources of each length, by length.
    pub counts: Vec<ChunkCount>,
    /// The same for each region: slots of `counts`, and numbers.
    of_region: BTreeMap<RegionKey, Vec<(usize, u64)>>,
    /// True if there are no others.
    pub complete: bool,
}

impl Sources {
    fn new(all: Vec<Source>, complete: bool) -> Sources {
        let mut by_len: BTreeMap<Bytes, Vec<usize>> = BTreeMap::new();
        let mut by_chunk = BTreeMap::new();
        for (index, source) in all.iter().enumerate() {
            by_len.entry(source.len).or_default().push(index);
            by_chunk.insert(source.chunk, index);
        }
        let mut of_region: BTreeMap<RegionKey, Vec<(usize, u64)>> = BTreeMap::new();
        for (slot, group) in by_len.values_mut().enumerate() {
            group.sort_by_key(|&index| (all[index].lender, all[index].home));
            for &index in group.iter() {
                let slots = of_region.entry(all[index].region).or_default();
                match slots.last_mut() {
                    Some((last, count)) if *last == slot => *count += 1,
                    _ => slots.push((slot, 1)),
                }
            }
        }
        let count =
            |(&len, group): (&Bytes, &Vec<usize>)| ChunkCount { len, count: group.len() as u64 };
        let counts = by_len.iter().map(count).collect();
        Sources { all, by_len, by_chunk, counts, of_region, complete }
    }

    /// The stream's region with the most bytes in sources.
    pub(in crate::pool) fn richest_region(&self) -> Option<RegionKey> {
        let mut of_region: BTreeMap<RegionKey, Bytes> = BTreeMap::new();
        for source in self.all.iter().filter(|source| source.lender != Lender::Arena) {
            *of_region.entry(source.region).or_default() += source.len;
        }
        of_region.into_iter().max_by_key(|&(_, bytes)| bytes).map(|(key, _)| key)
    }

    /// The number of sources of each length that can be moved, without those in the regions
    /// `left_out` and those in the list `reactivated`.
    pub(in crate::pool) fn movable(
        &self,
        left_out: [Option<RegionKey>; 2],
        reactivated: &[usize],
    ) -> Vec<ChunkCount> {
        let mut counts = self.counts.clone();
        for region in left_out.into_iter().flatten() {
            for &(slot, count) in self.of_region.get(&region).into_iter().flatten() {
                counts[slot].count -= count;
            }
        }
        for &index in reactivated {
            ChunkCount::take(&mut counts, self.all[index].len, 1);
        }
        counts
    }
}

impl View<'_> {
    /// Bytes of all wholly free chunks that `stream` may move.
    pub(in crate::pool) fn movable_bytes(self, stream: StreamId) -> Bytes {
        self.sources(stream).all.iter().map(|source| source.len).sum()
    }

    /// The wholly free chunks that `stream` may move: its own, and those that arenas lend.
    pub(in crate::pool) fn sources(self, stream: StreamId) -> Sources {
        self.sources_for(Bytes::MAX, stream, &[])
    }

    /// The same with some of what arenas lend: at least twice `len` bytes and 256 chunks, and the chunks
    /// `returning`. O(those chunks), and O(log n) for each that returns.
    pub(in crate::pool) fn sources_for(
        self,
        len: Bytes,
        stream: StreamId,
        returning: &[ChunkId],
    ) -> Sources {
        let mut all = Vec::new();
        for (_, region_len, region) in self.streams.get(stream).free.iter() {
            let lender = Lender::Stream { region_len };
            for Mapped { chunk, home, len } in self.chunks_in(region) {
                all.push(Source { chunk, home, len, region, lender });
            }
        }
        let lender = Lender::Arena;
        let (mut listed, mut bytes) = (0, Bytes::ZERO);
        let enough = len.saturating_add(len);
        let lent = self.arenas.lent();
        let mut lent = lent.flat_map(|region| self.chunks_in(region).map(move |c| (region, c)));
        for (region, Mapped { chunk, home, len }) in lent.by_ref() {
            all.push(Source { chunk, home, len, region, lender });
            (listed, bytes) = (listed + 1, bytes + len);
            if listed >= LENT_ENOUGH && bytes >= enough {
                break;
            }
        }
        let Some((_, next)) = lent.next() else { return Sources::new(all, true) };
        // Those that lie before are listed.
        for &chunk in returning {
            let home = self.chunks.get(chunk).home.filter(|&home| home >= next.home);
            if let Some(home) = home
                && let Some(region) = self.lent_at(home)
            {
                all.push(Source { chunk, home, len: self.chunks.get(chunk).len, region, lender });
            }
        }
        Sources::new(all, false)
    }
}
