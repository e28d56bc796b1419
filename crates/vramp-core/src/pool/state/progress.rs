//! Progress of streams: events recorded and reached, waits, captures, ends.

use super::Pool;
use crate::Bytes;
use crate::ids::{Mark, StreamId};

impl Pool {
    /// Adds a stream, with the next id.
    pub fn add_stream(&mut self) -> StreamId {
        let id = self.streams.next_id();
        self.add_stream_as(id);
        id
    }

    /// Adds the stream that has this id in another pool. Ids below it that this pool does not know are
    /// those of streams that ended, whose work is over.
    ///
    /// # Panics
    /// If the pool knows the id.
    pub fn add_stream_as(&mut self, id: StreamId) {
        self.change_streams(|streams| streams.add(id));
    }

    /// Makes all ids below this number known: those that were not added are of streams that ended, whose
    /// work is over.
    pub fn skip_streams(&mut self, ids: usize) {
        self.change_streams(|streams| streams.skip_to(ids));
    }

    /// The streams of which the pool keeps something: those that have not ended, and those that did
    /// whose work may run, or whose freed memory serves no stream yet. O(those).
    pub fn streams(&self) -> impl Iterator<Item = StreamId> {
        self.streams.iter().map(|(stream, _)| stream)
    }

    /// Ends a stream for which an event was just recorded: no work will be queued on it again, and
    /// that event covers all that was. Blocks may still be freed on it.
    ///
    /// Once the event is [reached](Pool::reached) and the memory that was freed on it serves others,
    /// the pool keeps nothing of the stream.
    pub fn end_stream(&mut self, stream: StreamId) {
        self.change_streams(|streams| streams.end(stream));
        self.streams.leave_if_done(stream);
    }

    /// Sets whether a stream is held: it captures a graph, so no event is recorded on it, and it is
    /// made to wait for nothing. Only the stream itself can reuse what it frees meanwhile.
    ///
    /// The shell need not ask each stream: it learns of a capture where recording an event is
    /// refused, and asks the stream that a plan makes wait ([`Plan::orders_for`]). A held stream is
    /// asked again before its memory is looked for.
    ///
    /// [`Plan::orders_for`]: crate::Plan::orders_for
    pub fn hold(&mut self, stream: StreamId, held: bool) {
        self.streams.hold(stream, held);
    }

    /// True if the stream is held.
    pub fn is_held(&self, stream: StreamId) -> bool {
        self.streams.get(stream).held
    }

    /// Returns the streams that are held. O(those).
    pub fn held_streams(&self) -> Vec<StreamId> {
        self.streams.held().collect()
    }

    /// True if the pool has, or had, this stream.
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
        self.streams.pending()
    }

    /// Notes that the work before `mark` is over.
    ///
    /// # Panics
    /// If no event was recorded for that epoch: no query can have found it reached.
    pub fn reached(&mut self, mark: Mark) {
        let stream = self.streams.get(mark.stream);
        assert!(
            mark.epoch <= stream.recorded(),
            "{} cannot have reached {:?}: recorded up to {:?}",
            mark.stream,
            mark.epoch,
            stream.recorded()
        );
        if self.streams.reach(mark) {
            self.waiting.note_reached(mark.stream);
            self.heap_waits.note_reached(mark.stream);
            self.release_idle(mark.stream);
            self.streams.leave_if_done(mark.stream);
        }
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
        self.note_recorded(mark);
    }

    /// Closes the stream's epoch.
    pub(super) fn note_recorded(&mut self, mark: Mark) {
        self.streams.record(mark);
        self.unrecorded.remove(&mark.stream);
    }

    /// Notes that `stream` now waits for `on`: later work on it runs after that.
    pub fn waits(&mut self, stream: StreamId, on: Mark) {
        self.streams.waits(stream, on);
        self.waiting.note_wait(stream, on.stream);
        self.heap_waits.note_wait(stream, on.stream);
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

    /// Returns the marks that freed blocks wait for and no event covers yet, where one can be recorded.
    /// O(log n) for each stream that blocks wait for.
    pub fn unrecorded_waits(&self) -> Vec<Mark> {
        self.view().unrecorded_waits().collect()
    }

    /// Lists a freed piece of the heap of `heap` that waits for `marks`.
    pub(crate) fn wait_in_heap(&mut self, heap: StreamId, piece: u32, marks: Vec<Mark>) {
        marks.iter().for_each(|mark| self.note_user(mark.stream));
        self.streams.note_freed(heap, Bytes::ZERO);
        self.heap_waits.push(heap, piece, marks);
    }

    /// Returns the pieces of the heap of `heap` that wait no more, oldest first, and forgets them. No
    /// heap memory where there is none.
    pub(crate) fn take_ready_in_heap(&mut self, heap: StreamId) -> Vec<u32> {
        self.looked_at.add(self.heap_waits.advance(&self.streams));
        self.heap_waits.take_ready(heap)
    }

    /// Returns the streams in whose heaps freed blocks wait no more: [`StreamHeap::shed`] takes them
    /// in.
    ///
    /// [`StreamHeap::shed`]: crate::StreamHeap::shed
    pub fn heaps_with_ready(&mut self) -> Vec<StreamId> {
        self.looked_at.add(self.heap_waits.advance(&self.streams));
        self.heap_waits.heaps_with_ready().collect()
    }

    /// Number of pieces of the heap of `heap` that are listed. O(n).
    pub fn waiting_in_heap(&self, heap: StreamId) -> usize {
        self.heap_waits.count_of(heap)
    }
}
