//! Freed pieces of all heaps that wait for work of other streams.
//!
//! They are listed in one queue of the pool, because only the pool learns of progress. A piece that
//! is ready is handed to its heap when that looks for memory next.

use std::collections::BTreeMap;

use crate::ids::{Mark, StreamId};
use crate::waiting::{Age, Progress, Ready, WaitQueue};

/// The waiting pieces of all heaps.
#[derive(Clone, Debug, Default)]
pub(crate) struct HeapWaits {
    /// Each piece belongs to the heap of its owner.
    queue: WaitQueue<u32>,
    /// Pieces that wait no more, by heap.
    ready: BTreeMap<StreamId, Vec<(Age, u32)>>,
}

impl HeapWaits {
    pub(crate) fn push(&mut self, heap: StreamId, piece: u32, marks: Vec<Mark>) {
        self.queue.push(piece, heap, marks);
    }

    pub(crate) fn note_reached(&mut self, stream: StreamId) {
        self.queue.note_reached(stream);
    }

    pub(crate) fn note_wait(&mut self, stream: StreamId, on: StreamId) {
        self.queue.note_wait(stream, on);
    }

    /// Finds the pieces that became ready. Returns how many were looked at.
    pub(crate) fn advance(&mut self, progress: &impl Progress) -> usize {
        let Ready { entries, looked_at } = self.queue.take_ready(progress);
        for (age, entry) in entries {
            self.ready.entry(entry.owner).or_default().push((age, entry.item));
        }
        looked_at
    }

    /// The heaps that have ready pieces.
    pub(crate) fn heaps_with_ready(&self) -> impl Iterator<Item = StreamId> {
        self.ready.keys().copied()
    }

    /// Removes the ready pieces of a heap, oldest first.
    pub(crate) fn take_ready(&mut self, heap: StreamId) -> Vec<u32> {
        let mut ready = self.ready.remove(&heap).unwrap_or_default();
        ready.sort_unstable();
        ready.into_iter().map(|(_, piece)| piece).collect()
    }

    /// See [`WaitQueue::latest_marks`].
    pub(crate) fn latest_marks(&self) -> impl Iterator<Item = Mark> {
        self.queue.latest_marks()
    }

    /// Number of pieces of a heap, waiting and ready. O(n).
    pub(crate) fn count_of(&self, heap: StreamId) -> usize {
        let waiting = self.queue.iter().filter(|entry| entry.owner == heap).count();
        waiting + self.ready.get(&heap).map_or(0, Vec::len)
    }

    /// Checks the queue.
    ///
    /// # Errors
    /// The first invariant that does not hold.
    pub(crate) fn audit(&self, progress: &impl Progress) -> Result<(), String> {
        self.queue.audit(progress)
    }
}
