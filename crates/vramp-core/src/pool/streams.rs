//! Progress of each stream: epochs recorded, reached and waited for.

use std::collections::{BTreeMap, BTreeSet};

use crate::Bytes;
use crate::ids::{Epoch, Mark, StreamId};
use crate::pool::index::{Fit, FreeIndex, RegionKey};
use crate::waiting::Progress;

/// Fewest waits of a stream before those that are over are removed.
const PRUNE_MIN: usize = 16;

/// One stream's progress and free memory.
#[derive(Clone, Debug)]
pub(crate) struct Stream {
    /// Epoch of what is freed now.
    pub current: Epoch,
    /// Last epoch known to be over.
    pub reached: Epoch,
    /// For other streams, the epoch this one already waits for.
    waits_for: BTreeMap<StreamId, Epoch>,
    /// Number of these at which those that are over are removed.
    prune_at: usize,
    /// Free regions that it owns.
    pub free: FreeIndex,
    /// Free regions by the first epoch after which a part of them is idle. A region that changed
    /// meanwhile is listed again where it is.
    pub idle_after: BTreeMap<Epoch, Vec<RegionKey>>,
    /// Length of the block that was freed on it last.
    pub last_freed: Bytes,
    /// How many of its last requests in a row found that other streams had taken what it freed.
    pub robbed: u32,
    /// No work will be queued any more: the last event covers all of it.
    pub ended: bool,
    /// No event can be recorded at present: the stream captured a graph when the shell last recorded
    /// one there, or asked.
    pub held: bool,
}

impl Stream {
    pub(crate) fn new(free: FreeIndex) -> Stream {
        Stream {
            current: Epoch::START.next(),
            reached: Epoch::START,
            waits_for: BTreeMap::new(),
            prune_at: PRUNE_MIN,
            free,
            idle_after: BTreeMap::new(),
            last_freed: Bytes::ZERO,
            robbed: 0,
            ended: false,
            held: false,
        }
    }

    /// The last epoch for which an event was recorded.
    pub(crate) fn recorded(&self) -> Epoch {
        Epoch(self.current.0 - 1)
    }
}

/// The owner of free memory that no work touches any more. It is in the place of a stream of which
/// all work is over, and no request is made for it.
pub(crate) const IDLE: StreamId = StreamId::new(u32::MAX);

/// All streams.
#[derive(Clone, Debug)]
pub(crate) struct Streams {
    all: Vec<Stream>,
    idle: Stream,
    /// Those that are held.
    held: BTreeSet<StreamId>,
}

impl Streams {
    pub(crate) fn new(fit: Fit) -> Streams {
        let idle = Stream::new(FreeIndex::new(fit));
        Streams { all: Vec::new(), idle, held: BTreeSet::new() }
    }

    /// Adds a stream.
    pub(crate) fn add(&mut self) -> StreamId {
        self.all.push(Stream::new(FreeIndex::new(self.idle.free.fit())));
        StreamId::new(u32::try_from(self.all.len() - 1).expect("fewer than four billion streams"))
    }

    pub(crate) fn get(&self, id: StreamId) -> &Stream {
        if id == IDLE { &self.idle } else { &self.all[id.index()] }
    }

    pub(crate) fn get_mut(&mut self, id: StreamId) -> &mut Stream {
        if id == IDLE { &mut self.idle } else { &mut self.all[id.index()] }
    }

    /// Free memory that no work touches any more, of no stream.
    pub(crate) fn idle(&self) -> &FreeIndex {
        &self.idle.free
    }

    pub(crate) fn contains(&self, id: StreamId) -> bool {
        id.index() < self.all.len()
    }

    pub(crate) fn ids(&self) -> impl Iterator<Item = StreamId> + use<> {
        (0..self.all.len() as u32).map(StreamId::new)
    }

    pub(crate) fn len(&self) -> usize {
        self.all.len()
    }

    /// The mark of the work queued on `stream` so far.
    pub(crate) fn now(&self, stream: StreamId) -> Mark {
        let known = self.get(stream);
        let epoch = if known.ended { known.recorded() } else { known.current };
        Mark { stream, epoch }
    }

    /// Sets whether no event can be recorded on a stream at present.
    pub(crate) fn hold(&mut self, id: StreamId, held: bool) {
        self.get_mut(id).held = held;
        match held {
            true => self.held.insert(id),
            false => self.held.remove(&id),
        };
    }

    /// The streams that are held.
    pub(crate) fn held(&self) -> impl Iterator<Item = StreamId> {
        self.held.iter().copied()
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
        // Memory of no stream has the first epoch.
        mark.epoch <= self.get(mark.stream).reached
    }

    /// True if later work on `stream` runs after the work before `mark`.
    pub(crate) fn is_ordered(&self, stream: StreamId, mark: Mark) -> bool {
        mark.stream == stream
            || self.is_over(mark)
            || self
                .get(stream)
                .waits_for
                .get(&mark.stream)
                .is_some_and(|&epoch| mark.epoch <= epoch)
    }

    /// Notes that `stream` waits for `on`. O(log n) on average.
    pub(crate) fn waits(&mut self, stream: StreamId, on: Mark) {
        let waiter = self.get_mut(stream);
        let known = waiter.waits_for.entry(on.stream).or_insert(Epoch::START);
        *known = (*known).max(on.epoch);
        if waiter.waits_for.len() >= waiter.prune_at {
            // Work that is over needs no wait.
            let mut waits_for = std::mem::take(&mut waiter.waits_for);
            waits_for.retain(|&stream, &mut epoch| !self.is_over(Mark { stream, epoch }));
            let waiter = self.get_mut(stream);
            waiter.prune_at = PRUNE_MIN.max(2 * waits_for.len());
            waiter.waits_for = waits_for;
        }
    }

    /// Ends a stream: no later work of it can wait for anything.
    pub(crate) fn end(&mut self, id: StreamId) {
        self.hold(id, false);
        let ended = self.get_mut(id);
        ended.ended = true;
        ended.waits_for = BTreeMap::new();
    }

    /// Closes the epoch: an event now covers everything freed in it.
    pub(crate) fn record(&mut self, mark: Mark) {
        let stream = self.get_mut(mark.stream);
        assert_eq!(mark.epoch, stream.current, "{} records its present epoch", mark.stream);
        stream.current = stream.current.next();
    }

    /// True if an event was recorded that is not known to be reached.
    pub(crate) fn any_pending(&self) -> bool {
        self.all.iter().any(|stream| stream.reached < stream.recorded())
    }
}

impl Progress for Streams {
    fn is_over(&self, mark: Mark) -> bool {
        self.is_over(mark)
    }

    fn is_ordered(&self, stream: StreamId, mark: Mark) -> bool {
        self.is_ordered(stream, mark)
    }
}
