//! Progress of streams: events recorded and reached, waits, captures, ends.

use super::Pool;
use crate::ids::{Mark, StreamId};
use crate::pool::config::Policy;
use crate::pool::index::FreeIndex;
use crate::pool::streams::Stream;

impl Pool {
    /// Adds a stream.
    pub fn add_stream(&mut self) -> StreamId {
        let free = match self.config.policy {
            Policy::Mixed(_) => FreeIndex::first_fit(),
            Policy::Vpmm => FreeIndex::best_fit(),
        };
        self.streams.add(Stream::new(free))
    }

    /// Ends a stream for which an event was just recorded: no work will be queued on it again, and
    /// that event covers all that was. Blocks may still be freed on it.
    pub fn end_stream(&mut self, stream: StreamId) {
        let ended = self.streams.get_mut(stream);
        ended.ended = true;
        // No later work of it can wait for anything.
        ended.waits_for = Vec::new();
    }

    /// Sets whether a stream is held: it captures a graph, so no event may be recorded on it. Only
    /// the stream itself can reuse what it frees meanwhile.
    pub fn hold(&mut self, stream: StreamId, held: bool) {
        self.streams.get_mut(stream).held = held;
    }

    /// True if some stream is held.
    pub fn holds_any(&self) -> bool {
        self.streams.ids().any(|id| self.streams.get(id).held)
    }

    /// Returns the streams that are held.
    pub fn held_streams(&self) -> Vec<StreamId> {
        self.streams.ids().filter(|&id| self.streams.get(id).held).collect()
    }

    /// True if the stream is held.
    pub fn is_held(&self, stream: StreamId) -> bool {
        self.streams.get(stream).held
    }

    /// True if the pool has this stream.
    pub fn has_stream(&self, stream: StreamId) -> bool {
        self.streams.contains(stream)
    }

    /// True if requests may be made for this stream: the pool has it, and it was not ended.
    pub fn is_open(&self, stream: StreamId) -> bool {
        self.has_stream(stream) && !self.streams.get(stream).ended
    }

    /// Streams with recorded events that are not known to be reached, each with the last epoch
    /// recorded: the events to query.
    pub fn pending(&self) -> impl Iterator<Item = Mark> {
        self.streams.ids().filter_map(|id| {
            let stream = self.streams.get(id);
            let recorded = stream.recorded();
            (stream.reached < recorded).then_some(Mark { stream: id, epoch: recorded })
        })
    }

    /// Notes that the work before `mark` is over.
    ///
    /// # Panics
    /// If no event was recorded for that epoch: no query can have found it reached.
    pub fn reached(&mut self, mark: Mark) {
        let stream = self.streams.get_mut(mark.stream);
        assert!(
            mark.epoch <= stream.recorded(),
            "{} cannot have reached {:?}: recorded up to {:?}",
            mark.stream,
            mark.epoch,
            stream.recorded()
        );
        stream.reached = stream.reached.max(mark.epoch);
    }

    /// True if the work before `mark` is known to be over.
    pub fn is_over(&self, mark: Mark) -> bool {
        self.streams.is_over(mark)
    }

    /// True if later work on `stream` is known to run after the work before `mark`.
    pub fn is_ordered(&self, stream: StreamId, mark: Mark) -> bool {
        self.streams.is_ordered(stream, mark)
    }

    /// The mark that an event recorded on `stream` now would have. After recording it, call
    /// [`Pool::recorded`].
    pub fn now(&self, stream: StreamId) -> Mark {
        self.streams.now(stream)
    }

    /// Notes that an event was recorded for the stream's present epoch.
    pub fn recorded(&mut self, mark: Mark) {
        self.streams.record(mark);
    }

    /// Notes that `stream` now waits for `on`: later work on it runs after that.
    pub fn waits(&mut self, stream: StreamId, on: Mark) {
        self.streams.waits(stream, on);
    }

    /// Returns the marks for which events have to be recorded so that all freed memory and every
    /// old mapping can be known to be idle.
    ///
    /// What can be free by now is freed first. Recording events and querying them may free more:
    /// call until the list is empty.
    pub fn unrecorded(&mut self) -> Vec<Mark> {
        self.promote_waiting();
        self.view().unrecorded()
    }

    /// Sets the marks that freed blocks in heaps wait for. Where memory is short, requests wait for
    /// them too.
    pub fn set_heap_marks(&mut self, marks: Vec<Mark>) {
        self.heap_marks = marks;
    }
}
