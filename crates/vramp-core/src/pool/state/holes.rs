//! Addresses with nothing mapped, and mappings that are unmapped.

use super::Pool;
use crate::Bytes;
use crate::ids::{ArenaId, PoolAddr};
use crate::pool::index::{Hole, RegionKey};
use crate::pool::ops::{Range, Trim};
use crate::pool::regions::Kind;

impl Pool {
    /// Turns a region into a hole and merges it with its neighbours.
    pub(super) fn add_hole(&mut self, key: RegionKey) {
        let mut key = key;
        self.regions.get_mut(key).kind = Kind::Hole;
        let is_hole = |pool: &Pool, key: &RegionKey| pool.regions.get(*key).kind == Kind::Hole;
        if let Some(next) = self.regions.next(key).filter(|next| is_hole(self, next)) {
            self.unindex_hole(next);
            self.regions.absorb_next(key);
        }
        if let Some(prev) = self.regions.prev(key).filter(|prev| is_hole(self, prev)) {
            self.unindex_hole(prev);
            self.regions.absorb_next(prev);
            key = prev;
        }
        self.index_hole(key);
    }

    pub(super) fn index_hole(&mut self, key: RegionKey) {
        let region = self.regions.get(key);
        self.holes.insert(Hole { len: region.len, at: region.at, region: key });
    }

    pub(super) fn unindex_hole(&mut self, key: RegionKey) {
        let region = self.regions.get(key);
        self.holes.remove(Hole { len: region.len, at: region.at, region: key });
    }

    /// Turns a region into a gap of its arena.
    pub(super) fn add_gap(&mut self, key: RegionKey, arena: ArenaId) {
        self.regions.get_mut(key).kind = Kind::Gap { arena };
        self.merge_arena(arena);
    }

    /// Joins an arena's gaps, and its own memory, where they touch. The first region stays first.
    pub(super) fn merge_arena(&mut self, arena: ArenaId) {
        let end = self.arenas.get(arena).end();
        let mut key = self.arenas.get(arena).first;
        while let Some(next) = self.regions.next(key) {
            if self.regions.get(next).at >= end {
                break;
            }
            let alike = match (&self.regions.get(key).kind, &self.regions.get(next).kind) {
                (Kind::Gap { .. }, Kind::Gap { .. }) => true,
                (Kind::Arena { stream: a, .. }, Kind::Arena { stream: b, .. }) => a == b,
                _ => false,
            };
            if alike {
                self.regions.absorb_next(key);
            } else {
                key = next;
            }
        }
    }

    /// The hole, gap or retired mapping that holds `at`.
    pub(super) fn unmapped_region_at(&self, at: PoolAddr) -> RegionKey {
        if let Some(&key) = self.retired.get(&at) {
            return key;
        }
        if let Some(key) = self.view().gap_at(at) {
            return key;
        }
        self.holes.at(at).unwrap_or_else(|| panic!("no hole holds {at:?}")).region
    }

    /// Takes the first `len` bytes of a hole, a gap or a retired mapping out of their index.
    pub(super) fn take_place(&mut self, key: RegionKey, len: Bytes) {
        let (at, region_len) = (self.regions.get(key).at, self.regions.get(key).len);
        match self.regions.get(key).kind {
            Kind::Hole => {
                self.unindex_hole(key);
                if region_len > len {
                    let rest = self.regions.split(key, len);
                    self.index_hole(rest);
                }
            }
            Kind::Gap { .. } => {
                if region_len > len {
                    self.regions.split(key, len);
                }
            }
            Kind::Retired { .. } => {
                assert_eq!(region_len, len, "a mapping at {at:?} is reactivated whole");
                self.retired.remove(&at);
            }
            ref other => panic!("region {key} at {at:?} cannot be filled: {other:?}"),
        }
    }

    /// Turns an unmapped range of one or more retired or quarantined mappings into holes or gaps.
    pub(super) fn note_unmapped(&mut self, range: Range) {
        let (mut at, end) = (range.at, range.end());
        while at < end {
            let key = self.retired.remove(&at).or_else(|| self.quarantined.remove(&at));
            let key = key.unwrap_or_else(|| panic!("no retired mapping begins at {at:?}"));
            let chunk = match self.regions.get(key).kind {
                Kind::Retired { chunk, .. } => Some(chunk),
                Kind::Quarantined { chunk, .. } => chunk,
                ref other => panic!("region {key} is indexed as retired and is {other:?}"),
            };
            if let Some(chunk) = chunk {
                self.chunks.drop_alias(chunk, at);
            }
            at = self.regions.get(key).end();
            self.empty(key);
        }
    }

    /// Turns the home of a chunk to release into a hole or a gap.
    pub(super) fn note_home_unmapped(&mut self, trim: &Trim) {
        let Range { at, len } = trim.home;
        let (key, region) = (trim.region, self.regions.get(trim.region));
        assert!(region.at <= at && at + len <= region.end(), "{} lies in {key}", trim.chunk);
        let offset = at - region.at;
        self.unindex(key);
        let mut piece = key;
        if !offset.is_zero() {
            piece = self.split_free(key, offset);
            self.index(key);
        }
        if self.regions.get(piece).len > len {
            let rest = self.split_free(piece, len);
            self.index(rest);
        }
        self.empty(piece);
    }

    /// Turns a region in which nothing is mapped any more into a hole, or into an arena's gap.
    fn empty(&mut self, key: RegionKey) {
        let arena = match &self.regions.get(key).kind {
            Kind::Retired { arena, .. } | Kind::Quarantined { arena, .. } => *arena,
            Kind::Free(free) => free.lent_by,
            _ => None,
        };
        match arena {
            Some(arena) => self.add_gap(key, arena),
            None => self.add_hole(key),
        }
    }
}
