//! Wholly free chunks by owner and length: what builds may move, and what a trim may release.
//!
//! A chunk is wholly free where one free region covers it. Placing and freeing a block only marks the
//! regions that it touched as stale; their chunks are listed anew by the next request that needs the
//! lists ([`FreeChunks::refresh`]). A pinned chunk is not listed: no plan moves or releases it. So a hit pays a flag, and a miss pays for what changed since the
//! last one: O(log n) for each chunk in the regions that changed, and nothing for regions that are
//! shorter than the smallest chunk.

use std::collections::{BTreeMap, BTreeSet};

use crate::Bytes;
use crate::ids::{ChunkId, PoolAddr, StreamId};
use crate::pool::chunks::{Chunks, Mapped};
use crate::pool::index::RegionKey;
use crate::pool::regions::{Kind, Regions};

/// A wholly free chunk. Within an owner and a length they are in the order in which builds use them:
/// those in small regions first, so that large regions stay whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct FreeChunk {
    pub region_len: Bytes,
    pub home: PoolAddr,
    pub chunk: ChunkId,
    pub region: RegionKey,
}

/// What is listed of one region.
#[derive(Clone, Debug)]
struct Listed {
    owner: StreamId,
    chunks: Vec<(Bytes, FreeChunk)>,
    /// Pinned chunks there, which are left out.
    pinned: Vec<ChunkId>,
    /// Number of them of each length.
    counts: BTreeMap<Bytes, u64>,
}

impl Listed {
    fn new(owner: StreamId) -> Listed {
        Listed { owner, chunks: Vec::new(), pinned: Vec::new(), counts: BTreeMap::new() }
    }
}

/// The lists.
#[derive(Clone, Debug, Default)]
pub(crate) struct FreeChunks {
    by_len: BTreeMap<(StreamId, Bytes), BTreeSet<FreeChunk>>,
    /// By region; `None` where nothing is listed.
    listed: Vec<Option<Box<Listed>>>,
    /// The region in which a chunk is listed, by chunk.
    region_of: Vec<Option<RegionKey>>,
    /// The region from whose list a pinned chunk was left out.
    left_out_of: BTreeMap<ChunkId, RegionKey>,
    is_stale: Vec<bool>,
    stale: Vec<RegionKey>,
}

impl FreeChunks {
    /// Notes that a region changed. O(1).
    #[inline]
    pub(crate) fn note_changed(&mut self, key: RegionKey) {
        let index = key as usize;
        if self.is_stale.len() <= index {
            self.is_stale.resize(index + 1, false);
        }
        if !self.is_stale[index] {
            self.is_stale[index] = true;
            self.stale.push(key);
        }
    }

    /// Notes that the first pin of a chunk was added, or its last one removed. O(log n).
    pub(crate) fn note_pins_changed(&mut self, chunk: ChunkId) {
        let left_out_of = self.left_out_of.get(&chunk).copied();
        let region = self.region_of.get(chunk.index()).copied().flatten().or(left_out_of);
        if let Some(region) = region {
            self.note_changed(region);
        }
    }

    /// True if the lists show every change.
    pub(crate) fn is_fresh(&self) -> bool {
        self.stale.is_empty()
    }

    /// Lists the chunks of the regions that changed. Returns how many regions and chunks it looked at.
    pub(crate) fn refresh(&mut self, regions: &Regions, chunks: &Chunks) -> usize {
        let stale = std::mem::take(&mut self.stale);
        let mut looked_at = stale.len();
        // All are taken out first: a chunk may have gone from one of them to another.
        for &key in &stale {
            self.is_stale[key as usize] = false;
            looked_at += self.take_out(key);
        }
        for &key in &stale {
            looked_at += self.list(key, regions, chunks);
        }
        self.stale = stale;
        self.stale.clear();
        looked_at
    }

    fn take_out(&mut self, key: RegionKey) -> usize {
        let Some(listed) = self.listed.get_mut(key as usize).and_then(Option::take) else {
            return 0;
        };
        for (len, entry) in &listed.chunks {
            let place = (listed.owner, *len);
            let group = self.by_len.get_mut(&place).expect("a listed chunk has a group");
            assert!(group.remove(entry), "{entry:?} is listed");
            if group.is_empty() {
                self.by_len.remove(&place);
            }
            self.region_of[entry.chunk.index()] = None;
        }
        for chunk in &listed.pinned {
            self.left_out_of.remove(chunk);
        }
        listed.chunks.len() + listed.pinned.len()
    }

    fn list(&mut self, key: RegionKey, regions: &Regions, chunks: &Chunks) -> usize {
        let Some((owner, at, len)) = listable(key, regions) else { return 0 };
        if chunks.smallest().is_none_or(|smallest| len < smallest) {
            return 0;
        }
        let mut listed = Listed::new(owner);
        for Mapped { chunk, home, len: chunk_len } in chunks.within(at, len) {
            if chunks.is_pinned(chunk) {
                self.left_out_of.insert(chunk, key);
                listed.pinned.push(chunk);
                continue;
            }
            let entry = FreeChunk { region_len: len, home, chunk, region: key };
            self.by_len.entry((owner, chunk_len)).or_default().insert(entry);
            if self.region_of.len() <= chunk.index() {
                self.region_of.resize(chunk.index() + 1, None);
            }
            self.region_of[chunk.index()] = Some(key);
            *listed.counts.entry(chunk_len).or_default() += 1;
            listed.chunks.push((chunk_len, entry));
        }
        let found = listed.chunks.len() + listed.pinned.len();
        if found > 0 {
            if self.listed.len() <= key as usize {
                self.listed.resize_with(key as usize + 1, || None);
            }
            self.listed[key as usize] = Some(Box::new(listed));
        }
        found + 1
    }

    /// The lengths of an owner's wholly free chunks, each with their number.
    pub(crate) fn counts(&self, owner: StreamId) -> impl Iterator<Item = (Bytes, u64)> {
        let all = (owner, Bytes::ZERO)..=(owner, Bytes::MAX);
        self.by_len.range(all).map(|(&(_, len), group)| (len, group.len() as u64))
    }

    /// An owner's wholly free chunks of one length, in the order of use.
    pub(crate) fn of_len(&self, owner: StreamId, len: Bytes) -> impl Iterator<Item = FreeChunk> {
        self.by_len.get(&(owner, len)).into_iter().flatten().copied()
    }

    /// Number of chunks of each length in a region.
    pub(crate) fn counts_in(&self, key: RegionKey) -> impl Iterator<Item = (Bytes, u64)> {
        let listed = self.listed.get(key as usize).and_then(Option::as_ref);
        listed
            .into_iter()
            .flat_map(|listed| listed.counts.iter().map(|(&len, &count)| (len, count)))
    }

    /// The region in which a chunk is listed, and the region's owner.
    pub(crate) fn find(&self, chunk: ChunkId) -> Option<(RegionKey, StreamId)> {
        let key = self.region_of.get(chunk.index()).copied().flatten()?;
        let listed = self.listed[key as usize].as_ref().expect("a listed chunk has a region");
        Some((key, listed.owner))
    }

    /// Every listed chunk with its length: the longest first, then in the order of use.
    pub(crate) fn longest_first(&self) -> impl Iterator<Item = (Bytes, FreeChunk)> {
        let mut groups: Vec<(&(StreamId, Bytes), &BTreeSet<FreeChunk>)> =
            self.by_len.iter().collect();
        groups.sort_by_key(|&(&(owner, len), _)| (std::cmp::Reverse(len), owner));
        groups.into_iter().flat_map(|(&(_, len), group)| group.iter().map(move |&e| (len, e)))
    }

    /// Every listed chunk, for the audit: its region, its owner and itself.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (StreamId, Bytes, FreeChunk)> {
        self.by_len
            .iter()
            .flat_map(|(&(owner, len), group)| group.iter().map(move |&entry| (owner, len, entry)))
    }
}

/// The owner and extent of a free region whose chunks are listed: not of what arenas lend.
fn listable(key: RegionKey, regions: &Regions) -> Option<(StreamId, PoolAddr, Bytes)> {
    let region = regions.get_if_present(key)?;
    match &region.kind {
        Kind::Free(free) if free.lent_by.is_none() => Some((free.owner, region.at, region.len)),
        _ => None,
    }
}
