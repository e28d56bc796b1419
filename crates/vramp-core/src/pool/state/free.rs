//! Free memory: merged with its neighbours, indexed by its owner, taken over by other streams.

use super::Pool;
use crate::Bytes;
use crate::ids::{Epoch, Mark, StreamId};
use crate::pool::index::RegionKey;
use crate::pool::regions::{Free, Kind, Parts};
use crate::pool::view::FreeSlice;

/// How much memory a stream takes over.
#[derive(Clone, Copy, Debug)]
pub(super) enum Amount {
    All,
    /// Until there are this many bytes.
    AtLeast(Bytes),
}

impl Pool {
    /// Makes a used region free, or waiting if work of other streams may still touch it.
    pub(super) fn release_region(&mut self, key: RegionKey, stream: StreamId, uses: Vec<Mark>) {
        self.regions.retire_id(key);
        self.used -= self.regions.get(key).len;
        let epoch = self.streams.now(stream).epoch;
        let mut marks = uses;
        marks.retain(|&mark| !self.streams.is_ordered(stream, mark));
        if marks.is_empty() {
            self.make_free(key, stream, epoch);
        } else {
            self.regions.get_mut(key).kind = Kind::Waiting { owner: stream, epoch };
            self.waiting.push(key, marks);
        }
    }

    /// Frees the waiting regions whose marks are over, or whose owner is ordered behind them.
    pub(super) fn promote_waiting(&mut self) {
        let mut waiting = std::mem::take(&mut self.waiting);
        waiting.remove_if(|entry| {
            let (owner, epoch) = self.waiting_of(entry.item);
            if entry.marks.iter().all(|&mark| self.streams.is_over(mark)) {
                self.make_free(entry.item, owner, epoch);
                true
            } else if entry.marks.iter().all(|&mark| self.streams.is_ordered(owner, mark)) {
                // The owner's wait came after the free: only the present epoch covers it.
                self.make_free(entry.item, owner, self.streams.now(owner).epoch);
                true
            } else {
                false
            }
        });
        self.waiting = waiting;
    }

    /// Makes memory that `stream` is ordered behind its own: `need` bytes.
    pub(super) fn take_over_ordered(&mut self, stream: StreamId, need: Bytes) {
        let found = self.adopt(stream, Amount::AtLeast(need), |pool, mark| {
            pool.streams.is_ordered(stream, mark)
        });
        let mut missing = need.saturating_sub(found);
        let present = self.streams.now(stream).epoch;
        let mut waiting = std::mem::take(&mut self.waiting);
        waiting.remove_if(|entry| {
            let (owner, epoch) = self.waiting_of(entry.item);
            let own = Mark { stream: owner, epoch };
            let ordered = |&mark: &Mark| self.streams.is_ordered(stream, mark);
            let taken = !missing.is_zero() && ordered(&own) && entry.marks.iter().all(ordered);
            if taken {
                missing = missing.saturating_sub(self.regions.get(entry.item).len);
                self.make_free(entry.item, stream, present);
            }
            taken
        });
        self.waiting = waiting;
    }

    fn waiting_of(&self, key: RegionKey) -> (StreamId, Epoch) {
        match self.regions.get(key).kind {
            Kind::Waiting { owner, epoch } => (owner, epoch),
            ref other => panic!("region {key} is listed as waiting but is {other:?}"),
        }
    }

    /// Takes over all memory of other streams whose work is over.
    pub(super) fn adopt_idle(&mut self, stream: StreamId) {
        self.adopt(stream, Amount::All, |pool, mark| pool.streams.is_over(mark));
    }

    /// Takes over other streams' memory whose marks are `ready`, oldest first. Memory that is only
    /// ordered behind a wait gets the new owner's present epoch. Returns how much was taken over.
    fn adopt(
        &mut self,
        stream: StreamId,
        amount: Amount,
        ready: impl Fn(&Pool, Mark) -> bool,
    ) -> Bytes {
        let mut found = Bytes::ZERO;
        if self.streams.len() == 1 {
            return found;
        }
        for key in self.view().foreign(stream) {
            // From the back, so that offsets in front stay as they are.
            let slices = self.view().ready_slices(key, |mark| ready(self, mark));
            for slice in slices.into_iter().rev() {
                if let Amount::AtLeast(need) = amount
                    && found >= need
                {
                    return found;
                }
                self.take_over(slice, stream);
                found += slice.len;
            }
        }
        found
    }

    /// Makes part of another stream's free region free memory of `stream`. Returns the region that
    /// it is part of then.
    pub(super) fn take_over(&mut self, slice: FreeSlice, stream: StreamId) -> RegionKey {
        let piece = self.isolate(slice);
        let old_owner = std::mem::replace(&mut self.free_of_mut(piece).owner, stream);
        let present = self.streams.now(stream).epoch;
        let reached = self.streams.get(stream).reached;
        let mut parts = Parts::default();
        for &part in self.view().free_of(piece).parts.iter() {
            let over = self.streams.is_over(Mark { stream: old_owner, epoch: part.epoch });
            let epoch = if over { Epoch::START } else { present };
            parts.push(crate::pool::regions::Part { epoch, ..part }, reached);
        }
        self.free_of_mut(piece).parts = parts;
        self.link_free(piece)
    }

    /// Cuts a slice out of an indexed free region. The piece is in no index; what is left on
    /// either side is.
    fn isolate(&mut self, FreeSlice { region, offset, len }: FreeSlice) -> RegionKey {
        self.unindex(region);
        let mut piece = region;
        if !offset.is_zero() {
            piece = self.split_free(region, offset);
            self.index(region);
        }
        if self.regions.get(piece).len > len {
            let rest = self.split_free(piece, len);
            self.index(rest);
        }
        piece
    }

    /// Turns a region into free memory of `owner` and merges it with its neighbours.
    fn make_free(&mut self, key: RegionKey, owner: StreamId, epoch: Epoch) {
        let born = self.next_birth();
        let region = self.regions.get_mut(key);
        let parts = Parts::one(region.len, epoch);
        region.kind = Kind::Free(Free { owner, parts, born, lent_by: None });
        self.link_free(key);
    }

    /// Merges a free region that is not in an index with its free neighbours of the same owner,
    /// and indexes the result.
    pub(super) fn link_free(&mut self, key: RegionKey) -> RegionKey {
        let owner = self.view().free_of(key).owner;
        let mut front = key;
        let mergeable = |pool: &Pool, key: &RegionKey| pool.view().is_free_of(*key, owner);
        if let Some(next) = self.regions.next(front).filter(|next| mergeable(self, next)) {
            self.unindex(next);
            self.merge_next(front);
        }
        if let Some(prev) = self.regions.prev(front).filter(|prev| mergeable(self, prev)) {
            self.unindex(prev);
            self.merge_next(prev);
            front = prev;
        }
        self.index(front);
        front
    }

    /// Joins a free region with the free one behind it. Neither is in an index.
    pub(super) fn merge_next(&mut self, key: RegionKey) {
        let next = self.regions.next(key).expect("a merge has a right side");
        let Free { parts: behind, born, .. } = self.view().free_of(next).clone();
        let reached = self.streams.get(self.view().free_of(key).owner).reached;
        self.regions.absorb_next(key);
        let free = self.free_of_mut(key);
        free.born = free.born.max(born);
        for &part in behind.iter() {
            free.parts.push(part, reached);
        }
    }

    /// Cuts a free region that is not in an index at `offset`; both sides keep their parts.
    pub(super) fn split_free(&mut self, key: RegionKey, offset: Bytes) -> RegionKey {
        let back = self.regions.split(key, offset);
        let rest = self.free_of_mut(key).parts.split_off(offset);
        self.free_of_mut(back).parts = rest;
        back
    }

    pub(super) fn free_of_mut(&mut self, key: RegionKey) -> &mut Free {
        match &mut self.regions.get_mut(key).kind {
            Kind::Free(free) => free,
            other => panic!("region {key} is not free but {other:?}"),
        }
    }

    /// Adds a free region to its owner's index, or to that of the lent ones.
    pub(super) fn index(&mut self, key: RegionKey) {
        let (at, len) = (self.regions.get(key).at, self.regions.get(key).len);
        match self.view().free_of(key) {
            &Free { owner, lent_by: None, .. } => {
                self.streams.get_mut(owner).free.insert(at, len, key);
            }
            _ => self.arenas.add_lent(at, key),
        }
    }

    pub(super) fn unindex(&mut self, key: RegionKey) {
        let (at, len) = (self.regions.get(key).at, self.regions.get(key).len);
        match self.view().free_of(key) {
            &Free { owner, lent_by: None, .. } => {
                self.streams.get_mut(owner).free.remove(at, len, key);
            }
            _ => self.arenas.remove_lent(at),
        }
    }
}
