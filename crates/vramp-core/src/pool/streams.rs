//! Progress of each stream: epochs recorded, reached and waited for.

use crate::ids::{Epoch, Mark, StreamId};
use crate::pool::index::FreeIndex;

/// One stream's progress and free memory.
#[derive(Clone, Debug)]
pub(crate) struct Stream {
    /// Epoch of what is freed now.
    pub current: Epoch,
    /// Last epoch known to be over.
    pub reached: Epoch,
    /// For each other stream, the epoch this one already waits for.
    pub waits_for: Vec<Epoch>,
    /// Free regions that it owns.
    pub free: FreeIndex,
    /// No work will be queued any more: the last event covers all of it.
    pub ended: bool,
    /// No event may be recorded at present: the stream captures a graph.
    pub held: bool,
}

impl Stream {
    pub(crate) fn new(free: FreeIndex) -> Stream {
        Stream {
            current: Epoch::START.next(),
            reached: Epoch::START,
            waits_for: Vec::new(),
            free,
            ended: false,
            held: false,
        }
    }

    /// The last epoch for which an event was recorded.
    pub(crate) fn recorded(&self) -> Epoch {
        Epoch(self.current.0 - 1)
    }
}

/// All streams.
#[derive(Clone, Debug, Default)]
pub(crate) struct Streams(Vec<Stream>);

impl Streams {
    pub(crate) fn add(&mut self, stream: Stream) -> StreamId {
        self.0.push(stream);
        StreamId::new(u32::try_from(self.0.len() - 1).expect("fewer than four billion streams"))
    }

    pub(crate) fn get(&self, id: StreamId) -> &Stream {
        &self.0[id.index()]
    }

    pub(crate) fn get_mut(&mut self, id: StreamId) -> &mut Stream {
        &mut self.0[id.index()]
    }

    pub(crate) fn contains(&self, id: StreamId) -> bool {
        id.index() < self.0.len()
    }

    pub(crate) fn ids(&self) -> impl Iterator<Item = StreamId> + use<> {
        (0..self.0.len() as u32).map(StreamId::new)
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// The mark of the work queued on `stream` so far.
    pub(crate) fn now(&self, stream: StreamId) -> Mark {
        let known = self.get(stream);
        let epoch = if known.ended { known.recorded() } else { known.current };
        Mark { stream, epoch }
    }

    /// True if no stream can be made to wait for the mark: the event cannot be recorded at present.
    pub(crate) fn is_out_of_reach(&self, mark: Mark) -> bool {
        self.get(mark.stream).held && self.is_unrecorded(mark)
    }

    /// True if no recorded event covers the mark: the next one of its stream will.
    pub(crate) fn is_unrecorded(&self, mark: Mark) -> bool {
        mark.epoch == self.get(mark.stream).current
    }

    /// True if the work before `mark` is known to be over.
    pub(crate) fn is_over(&self, mark: Mark) -> bool {
        mark.epoch <= self.get(mark.stream).reached
    }

    /// True if later work on `stream` runs after the work before `mark`.
    pub(crate) fn is_ordered(&self, stream: StreamId, mark: Mark) -> bool {
        mark.stream == stream
            || self.is_over(mark)
            || self.get(stream).waits_for.get(mark.stream.index()).is_some_and(|&e| mark.epoch <= e)
    }

    pub(crate) fn waits(&mut self, stream: StreamId, on: Mark) {
        let waits_for = &mut self.get_mut(stream).waits_for;
        if waits_for.len() <= on.stream.index() {
            waits_for.resize(on.stream.index() + 1, Epoch::START);
        }
        let known = &mut waits_for[on.stream.index()];
        *known = (*known).max(on.epoch);
    }

    /// Closes the epoch: an event now covers everything freed in it.
    pub(crate) fn record(&mut self, mark: Mark) {
        let stream = self.get_mut(mark.stream);
        assert_eq!(mark.epoch, stream.current, "{} records its present epoch", mark.stream);
        stream.current = stream.current.next();
    }

    /// True if an event was recorded that is not known to be reached.
    pub(crate) fn any_pending(&self) -> bool {
        self.0.iter().any(|stream| stream.reached < stream.recorded())
    }
}
