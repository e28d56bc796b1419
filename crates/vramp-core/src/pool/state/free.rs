//! Free memory: merged with its neighbours, indexed by its owner, taken over by other streams.

use super::Pool;
use crate::Bytes;
use crate::ids::{Epoch, Mark, StreamId};
use crate::pool::index::RegionKey;
use crate::pool::regions::{Free, Kind, Parts};
use crate::pool::streams::IDLE;
use crate::waiting::{Age, Waiting};

impl Pool {
    /// Makes a used region free, or waiting if work of other streams may still touch it.
    pub(super) fn release_region(&mut self, key: RegionKey, stream: StreamId, uses: Vec<Mark>) {
        self.note_user(stream);
        uses.iter().for_each(|used| self.note_user(used.stream));
        self.regions.retire_id(key);
        self.used -= self.regions.get(key).len;
        let epoch = self.streams.now(stream).epoch;
        let mut marks = uses;
        marks.retain(|&mark| !self.streams.is_ordered(stream, mark));
        let len = self.regions.get(key).len;
        self.streams.note_freed(stream, if marks.is_empty() { len } else { Bytes::ZERO });
        if marks.is_empty() {
            self.make_free(key, stream, epoch);
        } else {
            let region = self.regions.get_mut(key);
            region.kind = Kind::Waiting { owner: stream, epoch };
            self.waiting_bytes += region.len;
            self.waiting.push(key, stream, marks);
        }
    }

    /// Frees the waiting regions whose marks are over, or whose owner is ordered behind them.
    pub(super) fn promote_waiting(&mut self) {
        let ready = self.waiting.take_ready(&self.streams);
        self.looked_at.add(ready.looked_at);
        for (_, Waiting { item, marks, .. }) in ready.entries {
            let (owner, freed_in) = self.waiting_of(item);
            self.waiting_bytes -= self.regions.get(item).len;
            let over = marks.iter().all(|&mark| self.streams.is_over(mark));
            // Where the owner's wait came after the free only the present epoch covers it.
            let epoch = if over { freed_in } else { self.streams.now(owner).epoch };
            self.make_free(item, owner, epoch);
        }
    }

    /// Makes free and waiting memory of other streams, which `stream` is ordered behind, its own.
    pub(super) fn take_over_ordered(
        &mut self,
        stream: StreamId,
        free: &[RegionKey],
        waiting: &[Age],
    ) {
        for &region in free {
            let region = self.take_over(region, stream);
            // A chunk may lie in both.
            if self.shares_idle() {
                self.unindex(region);
                let region = self.absorb_idle(region, stream);
                self.link_free(region);
            }
        }
        let present = self.streams.now(stream).epoch;
        for &age in waiting {
            let region = self.waiting.remove(age).item;
            self.waiting_bytes -= self.regions.get(region).len;
            self.make_free(region, stream, present);
        }
    }

    fn waiting_of(&self, key: RegionKey) -> (StreamId, Epoch) {
        match self.regions.get(key).kind {
            Kind::Waiting { owner, epoch } => (owner, epoch),
            ref other => panic!("region {key} is listed as waiting but is {other:?}"),
        }
    }

    /// Makes another stream's free region free memory of `stream`. Returns the region that it is part
    /// of then.
    pub(super) fn take_over(&mut self, piece: RegionKey, stream: StreamId) -> RegionKey {
        self.unindex(piece);
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

    /// Turns a region into free memory of `owner` and merges it with its neighbours.
    fn make_free(&mut self, key: RegionKey, owner: StreamId, epoch: Epoch) {
        let born = self.next_birth();
        let mark = Mark { stream: owner, epoch };
        let (owner, epoch) = match self.shares_idle() {
            true if self.streams.is_over(mark) => (IDLE, Epoch::START),
            true => {
                if self.streams.is_unrecorded(mark) {
                    self.unrecorded.insert(owner);
                }
                (owner, epoch)
            }
            false => (owner, epoch),
        };
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
        let Free { parts, born, .. } = self.free_of_mut(next);
        let (behind, born) = (std::mem::take(parts), *born);
        let reached = self.streams.get(self.view().free_of(key).owner).reached;
        self.regions.absorb_next(key);
        let free = self.free_of_mut(key);
        free.born = free.born.max(born);
        free.parts.append(behind, reached);
    }

    /// Cuts a free region that is not in an index at `offset`; both sides keep their parts.
    pub(super) fn split_free(&mut self, key: RegionKey, offset: Bytes) -> RegionKey {
        self.regions.split(key, offset)
    }

    pub(super) fn free_of_mut(&mut self, key: RegionKey) -> &mut Free {
        match &mut self.regions.get_mut(key).kind {
            Kind::Free(free) => free,
            other => panic!("region {key} is not free but {other:?}"),
        }
    }

    /// Adds a free region to its owner's index, or to that of the lent ones.
    pub(super) fn index(&mut self, key: RegionKey) {
        self.free_chunks.note_changed(key);
        let (at, len) = (self.regions.get(key).at, self.regions.get(key).len);
        match self.view().free_of(key) {
            &Free { owner, lent_by: None, .. } => {
                self.streams.free_mut(owner).insert(at, len, key);
            }
            _ => self.arenas.add_lent(at, len, key),
        }
        self.list_to_become_idle(key);
    }

    pub(super) fn unindex(&mut self, key: RegionKey) {
        self.free_chunks.note_changed(key);
        let (at, len) = (self.regions.get(key).at, self.regions.get(key).len);
        match self.view().free_of(key) {
            &Free { owner, lent_by: None, .. } => {
                self.streams.free_mut(owner).remove(at, len, key);
                self.streams.leave_if_done(owner);
            }
            _ => self.arenas.remove_lent(at, len),
        }
    }
}
