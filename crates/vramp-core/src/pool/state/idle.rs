//! Idle memory: free memory whose work is over becomes the memory of no stream.
//!
//! 1. A block is freed on a stream. Its memory is the stream's: only that stream may use it without
//!    looking at events.
//! 2. The region is listed under the first epoch after which a part of it is idle.
//! 3. When the stream reaches that epoch ([`Pool::reached`]), the parts that are over become regions of
//!    [`IDLE`]. They merge with idle neighbours, whichever stream freed those.
//!    What is listed later than that waits for the next request that finds no memory.
//! 4. A request finds its stream's own memory and idle memory.
//!
//! A pool with one stream lists nothing: all free memory is that stream's, and layouts repeat where its
//! requests do. Streams that the pool only knows do not count: a process has some for captures, copies and
//! communication that never ask it for memory. VPMM keeps owners, as its document does.
//!
//! Growth: one entry for each slot of the region table and each epoch, added in O(log epochs) by the
//! free and looked at once.

use super::Pool;
use crate::Bytes;
use crate::ids::{Epoch, Mark, StreamId};
use crate::pool::index::RegionKey;
use crate::pool::regions::Parts;
use crate::pool::streams::{IDLE, Stream, Streams};

impl Pool {
    /// True if free memory becomes idle memory of no stream: several streams share the pool.
    pub fn shares_idle(&self) -> bool {
        self.view().shares_idle()
    }

    /// Notes that a stream uses the pool: memory is requested for it or freed on it, or its work used a
    /// block that is freed. O(1); O(free regions) for the second such stream.
    #[inline]
    pub(super) fn note_user(&mut self, stream: StreamId) {
        self.change_streams(|streams| streams.note_user(stream));
    }

    /// Changes the streams. If several share the pool from then on, lists all free memory: O(n).
    #[inline]
    pub(super) fn change_streams(&mut self, change: impl FnOnce(&mut Streams)) {
        let shared = self.shares_idle();
        change(&mut self.streams);
        if !shared && self.shares_idle() {
            self.begin_sharing();
        }
    }

    fn begin_sharing(&mut self) {
        let free = |known: &Stream| known.free.iter().map(|(_, _, key)| key).collect::<Vec<_>>();
        let free: Vec<RegionKey> =
            self.streams.iter().flat_map(|(_, stream)| free(stream)).collect();
        for key in free {
            let free = self.view().free_of(key);
            let owner = free.owner;
            if free.marks().any(|mark| self.streams.is_unrecorded(mark)) {
                self.unrecorded.insert(owner);
            }
            self.list_to_become_idle(key);
        }
    }

    /// Lists a free region under the first epoch after which a part of it is idle.
    pub(super) fn list_to_become_idle(&mut self, key: RegionKey) {
        if !self.shares_idle() {
            return;
        }
        let free = self.view().free_of(key);
        if free.owner == IDLE || free.lent_by.is_some() {
            return;
        }
        let first = free.parts.iter().map(|part| part.epoch).min();
        let mark = Mark { stream: free.owner, epoch: first.expect("a region has a part") };
        let region = self.regions.get_mut(key);
        if region.listed == Some(mark) {
            return;
        }
        region.listed = Some(mark);
        if self.streams.is_over(mark) {
            self.overdue.insert(mark.stream);
        }
        let owner = self.streams.get_mut(mark.stream).expect("a stream with free memory stays");
        owner.idle_after.entry(mark.epoch).or_default().push(key);
    }

    /// Makes idle what was listed after its epoch had been reached.
    pub(super) fn release_overdue(&mut self) {
        while let Some(stream) = self.overdue.pop_first() {
            self.release_idle(stream);
        }
    }

    /// Makes idle what the stream freed in the epochs that it reached.
    pub(super) fn release_idle(&mut self, stream: StreamId) {
        let Some(state) = self.streams.get_mut(stream) else { return };
        let rest = state.idle_after.split_off(&state.reached.next());
        for (epoch, keys) in std::mem::replace(&mut state.idle_after, rest) {
            for key in keys {
                self.looked_at.add(1);
                // The slot may have been listed again, under another epoch or for another stream.
                let region = self.regions.get_mut(key);
                if region.listed != Some(Mark { stream, epoch }) {
                    continue;
                }
                region.listed = None;
                if self.view().is_free_of(key, stream) {
                    self.make_idle(key);
                }
            }
        }
    }

    /// Makes the parts of a free region idle whose work is over.
    fn make_idle(&mut self, key: RegionKey) {
        let owner = self.view().free_of(key).owner;
        let reached = self.streams.get(owner).reached;
        self.unindex(key);
        // From the back, so that the front keeps its key.
        let mut runs: Vec<(Bytes, bool)> = Vec::new();
        for part in self.view().free_of(key).parts.iter() {
            let over = part.epoch <= reached;
            match runs.last_mut() {
                Some((len, was)) if *was == over => *len += part.len,
                _ => runs.push((part.len, over)),
            }
        }
        let mut start = self.regions.get(key).len;
        while let Some((len, over)) = runs.pop() {
            start -= len;
            let piece = if start.is_zero() { key } else { self.split_free(key, start) };
            match over {
                true => self.link_idle(piece),
                false => self.index(piece),
            }
        }
    }

    /// Makes a free region that is in no index idle memory.
    fn link_idle(&mut self, key: RegionKey) {
        let len = self.regions.get(key).len;
        let free = self.free_of_mut(key);
        free.owner = IDLE;
        free.parts = Parts::one(len, Epoch::START);
        self.link_free(key);
    }

    /// Indexes what is left of a free region that a block was carved from: as idle memory where that is
    /// known, so that other streams find it.
    pub(super) fn link_rest(&mut self, rest: RegionKey) {
        let free = self.view().free_of(rest);
        let over = free.marks().all(|mark| self.streams.is_over(mark));
        match free.owner != IDLE && over && self.shares_idle() {
            true => self.link_idle(rest),
            false => self.index(rest),
        }
    }

    /// Makes idle memory beside a free region of the stream part of it. The region is in no index
    /// afterwards; returns it.
    pub(super) fn absorb_idle(&mut self, key: RegionKey, stream: StreamId) -> RegionKey {
        let idle = |pool: &Pool, key: &RegionKey| pool.view().is_free_of(*key, IDLE);
        let mut front = key;
        if let Some(next) = self.regions.next(front).filter(|next| idle(self, next)) {
            self.unindex(next);
            self.free_of_mut(next).owner = stream;
            self.merge_next(front);
        }
        if let Some(prev) = self.regions.prev(front).filter(|prev| idle(self, prev)) {
            self.unindex(prev);
            self.free_of_mut(prev).owner = stream;
            self.merge_next(prev);
            front = prev;
        }
        front
    }
}
