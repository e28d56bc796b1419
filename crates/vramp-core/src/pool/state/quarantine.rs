//! Quarantine: what a failed driver call left behind, until another call succeeds.
//!
//! 1. An unmap or a release fails, of a plan or of its undo ([`Pool::abandon`]). The mapping, or the
//!    chunk without a home, is quarantined: it is counted and not used.
//! 2. [`Pool::unmap_quarantined`] and then [`Pool::release_quarantined`] return plans that try again. The
//!    shell performs them in each trim, and before a request fails.
//! 3. Settling such a plan ends the quarantine: the addresses are a hole or a gap, the chunk is gone.
//!    Where the call fails again nothing changes.
//!
//! Deliberately absent: a number of attempts. A call that fails for ever is made again in each trim and in
//! each request that would fail, and by nothing else.

use super::Pool;
use crate::Bytes;
use crate::ids::{ArenaId, ChunkId, PoolAddr};
use crate::pool::census::Quarantined;
use crate::pool::index::RegionKey;
use crate::pool::ops::{Plan, Range};
use crate::pool::regions::Kind;

impl Pool {
    /// Returns what failed driver calls left unusable. O(what is).
    pub fn quarantined(&self) -> Quarantined {
        let addresses = self.quarantined.values().map(|&key| self.regions.get(key).len).sum();
        Quarantined { memory: self.chunks.homeless_bytes(), addresses }
    }

    /// Returns plans that unmap quarantined mappings, one for each.
    pub fn unmap_quarantined(&self) -> Vec<Plan> {
        let regions = self.quarantined.values().map(|&key| self.regions.get(key));
        let unused =
            regions.filter(|region| !matches!(region.kind, Kind::Quarantined { in_use: true, .. }));
        unused.map(|region| Plan::unmap(vec![Range::new(region.at, region.len)])).collect()
    }

    /// Returns plans that release quarantined chunks which are mapped nowhere any more, one for each.
    pub fn release_quarantined(&self) -> Vec<Plan> {
        let unmapped = self.chunks.homeless().filter(|&id| self.chunks.get(id).aliases.is_empty());
        unmapped.map(Plan::release).collect()
    }

    /// Settles the release of a quarantined chunk.
    pub(super) fn settle_release(&mut self, chunk: ChunkId) {
        self.counters.released += self.chunks.get(chunk).len;
        self.counters.chunks_released += 1;
        self.chunks.remove(chunk);
    }

    /// Quarantines retired mappings that could not be unmapped. Those in quarantine stay there.
    pub(super) fn quarantine_retired(&mut self, range: Range) {
        let mut at = range.at;
        while at < range.end() {
            let key = match self.retired.remove(&at) {
                Some(key) => key,
                None => {
                    *self.quarantined.get(&at).expect("what is unmapped is retired or quarantined")
                }
            };
            if let Kind::Retired { chunk, arena, .. } = self.regions.get(key).kind {
                self.quarantine_region(key, Some(chunk), arena);
            }
            at = self.regions.get(key).end();
        }
    }

    /// Quarantines a mapping of a chunk that could not be undone: a part of a hole or a gap, or a mapping
    /// that was retired.
    pub(super) fn quarantine_new(&mut self, chunk: ChunkId, at: PoolAddr, len: Bytes) {
        let key = self.unmapped_region_at(at);
        let (start, kind) = (self.regions.get(key).at, self.regions.get(key).kind.clone());
        let arena = match kind {
            Kind::Gap { arena } => Some(arena),
            Kind::Hole => None,
            other => panic!("region {key} at {at:?} is {other:?}, and {chunk} was mapped there"),
        };
        if arena.is_none() {
            self.unindex_hole(key);
        }
        let mut piece = key;
        if start < at {
            piece = self.regions.split(key, at - start);
            if arena.is_none() {
                self.index_hole(key);
            }
        }
        if self.regions.get(piece).len > len {
            let rest = self.regions.split(piece, len);
            if arena.is_none() {
                self.index_hole(rest);
            }
        }
        self.quarantine_region(piece, Some(chunk), arena);
        self.chunks.add_alias(chunk, at);
    }

    fn quarantine_region(
        &mut self,
        key: RegionKey,
        chunk: Option<ChunkId>,
        arena: Option<ArenaId>,
    ) {
        self.quarantine_as(key, Kind::Quarantined { chunk, arena, in_use: false });
    }

    pub(super) fn quarantine_as(&mut self, key: RegionKey, kind: Kind) {
        let region = self.regions.get_mut(key);
        region.kind = kind;
        self.quarantined.insert(region.at, key);
    }
}
