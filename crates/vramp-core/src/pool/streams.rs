//! Progress of each stream: epochs recorded, reached and waited for.
//!
//! Life of a stream:
//!
//! 1. [`add`](Streams::add): requests are made for it, events recorded and reached.
//! 2. [`end`](Streams::end): its last event was recorded. Blocks may still be freed on it.
//! 3. It leaves once that event is reached and it owns no free memory
//!    ([`leave_if_done`](Streams::leave_if_done)). What is still marked with it, or freed on it later,
//!    waits for nothing: [`get`](Streams::get) returns a stream of which all work is over.
//!
//! Growth: see [`StreamTable`]. A poll costs the streams with open events, whatever number of streams
//! there is.

use std::collections::{BTreeMap, BTreeSet};

use crate::Bytes;
use crate::ids::{Epoch, Mark, StreamId};
use crate::pool::index::{Fit, FreeIndex, RegionKey};
use crate::stream_table::StreamTable;
use crate::waiting::Progress;

/// Fewest waits of a stream before those that are over are removed.
const PRUNE_MIN: usize = 16;

/// Requests in a row that found their stream's memory taken by others, from which on the pool grows for
/// the stream.
const ROBBED_MIN: u32 = 2;

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
    /// The generation of frees in which that was.
    freed_in: u64,
    /// How many of its last requests in a row found that other streams had taken what it freed.
    pub robbed: u32,
    /// Memory was requested for it or freed on it, or its work used a block that was freed.
    is_user: bool,
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
            freed_in: 0,
            robbed: 0,
            is_user: false,
            ended: false,
            held: false,
        }
    }

    /// A stream that left: it ended, and all of its work is over.
    fn left(fit: Fit) -> Stream {
        let over = Epoch(u64::MAX - 1);
        Stream {
            current: over.next(),
            reached: over,
            ended: true,
            ..Stream::new(FreeIndex::new(fit))
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
    /// Those that have not left. Boxed: a table has room for several streams at a time.
    table: StreamTable<Box<Stream>>,
    idle: Stream,
    /// In the place of each stream that left.
    left: Box<Stream>,
    /// Those with recorded events that are not known to be reached.
    pending: BTreeSet<StreamId>,
    /// Those that are held.
    held: BTreeSet<StreamId>,
    /// True once a stream has ended.
    any_ended: bool,
    /// Number of streams that ever used the pool.
    users: u64,
    /// True once one of them has ended.
    any_user_ended: bool,
    /// What streams freed last.
    frees: RecentFrees,
}

/// The lengths of the blocks that streams freed last, of those that freed one lately: a stream of long ago
/// does not ask for its block again. Frees are counted in generations, of which the last two are recent.
#[derive(Clone, Copy, Debug, Default)]
struct RecentFrees {
    generation: u64,
    /// Frees in this generation.
    count: u32,
    /// The sum of those in this generation, and in the one before.
    bytes: [Bytes; 2],
}

/// Number of frees in a generation.
const GENERATION: u32 = 1024;

impl RecentFrees {
    /// Takes out what a stream freed before.
    fn forget(&mut self, stream: &Stream) {
        if let Some(bytes) = self.bytes.get_mut((self.generation - stream.freed_in) as usize) {
            *bytes -= stream.last_freed;
        }
    }

    fn note(&mut self, stream: &mut Stream, len: Bytes) {
        self.forget(stream);
        if self.count == GENERATION {
            let [newest, _] = self.bytes;
            *self = RecentFrees {
                generation: self.generation + 1,
                count: 0,
                bytes: [Bytes::ZERO, newest],
            };
        }
        self.count += 1;
        self.bytes[0] += len;
        stream.last_freed = len;
        stream.freed_in = self.generation;
    }
}

impl Streams {
    pub(crate) fn new(fit: Fit) -> Streams {
        Streams {
            table: StreamTable::default(),
            idle: Stream::new(FreeIndex::new(fit)),
            left: Box::new(Stream::left(fit)),
            pending: BTreeSet::new(),
            held: BTreeSet::new(),
            any_ended: false,
            users: 0,
            any_user_ended: false,
            frees: RecentFrees::default(),
        }
    }

    /// The id of the stream that is added next.
    pub(crate) fn next_id(&self) -> StreamId {
        self.table.next_id()
    }

    /// Adds a stream. Ids below it that were not given out are those of streams that left.
    ///
    /// # Panics
    /// If the id was given out before.
    pub(crate) fn add(&mut self, id: StreamId) {
        assert!(!self.table.knows(id), "{id} was given to a stream before");
        self.any_ended |= id != self.table.next_id();
        let stream = Stream::new(FreeIndex::new(self.idle.free.fit()));
        self.table.insert(id, Box::new(stream));
    }

    /// Gives out ids up to this number of them, to streams that left.
    pub(crate) fn skip_to(&mut self, ids: usize) {
        self.any_ended |= ids > self.table.ids();
        self.table.skip_to(ids);
    }

    /// The stream; in the place of one that left, a stream of which all work is over.
    #[inline]
    pub(crate) fn get(&self, id: StreamId) -> &Stream {
        match self.table.get(id) {
            Some(stream) => stream,
            None if id == IDLE => &self.idle,
            None => {
                assert!(self.table.knows(id), "{id} is no stream of the pool");
                &self.left
            }
        }
    }

    /// The stream to change it; `None` if it left.
    #[inline]
    pub(crate) fn get_mut(&mut self, id: StreamId) -> Option<&mut Stream> {
        match id {
            IDLE => Some(&mut self.idle),
            _ => self.table.get_mut(id).map(|stream| &mut **stream),
        }
    }

    /// The free memory of a stream to change it. One that left is back until it has none.
    #[inline]
    pub(crate) fn free_mut(&mut self, id: StreamId) -> &mut FreeIndex {
        if id == IDLE {
            return &mut self.idle.free;
        }
        if self.table.get(id).is_none() {
            self.table.insert(id, self.left.clone());
        }
        &mut self.table.get_mut(id).expect("it is there").free
    }

    /// Removes a stream that ended, if all of its work is over and it owns no free memory.
    #[inline]
    pub(crate) fn leave_if_done(&mut self, id: StreamId) {
        let Some(stream) = self.table.get(id) else { return };
        if stream.ended && stream.reached == stream.recorded() && stream.free.is_empty() {
            self.frees.forget(stream);
            self.table.remove(id);
        }
    }

    /// Notes whether a request found that other streams had taken what its stream freed. Returns true
    /// if that goes on.
    pub(crate) fn note_robbed(&mut self, id: StreamId, is_robbed: bool) -> bool {
        let state = self.get_mut(id).expect("a stream with a request has not left");
        state.robbed = if is_robbed { state.robbed.saturating_add(1) } else { 0 };
        state.robbed >= ROBBED_MIN
    }

    /// Notes the length of the block that was freed last on a stream: zero for one that waits for work of other
    /// streams, which nothing took.
    #[inline]
    pub(crate) fn note_freed(&mut self, id: StreamId, len: Bytes) {
        if let Some(state) = self.table.get_mut(id) {
            self.frees.note(state, len);
        }
    }

    /// The sum of what each stream freed last, of those that did lately. O(1).
    pub(crate) fn last_freed(&self) -> Bytes {
        self.frees.bytes.iter().copied().sum()
    }

    /// The same, counted anew. O(streams).
    pub(crate) fn last_freed_by_stream(&self) -> Bytes {
        let recent = |stream: &&Stream| self.frees.generation - stream.freed_in < 2;
        self.iter().map(|(_, stream)| stream).filter(recent).map(|stream| stream.last_freed).sum()
    }

    /// Free memory that no work touches any more, of no stream.
    pub(crate) fn idle(&self) -> &FreeIndex {
        &self.idle.free
    }

    /// The free memory of each owner, and that of no stream. O(streams that have not left).
    pub(crate) fn free_indexes(&self) -> impl Iterator<Item = &FreeIndex> {
        self.table.iter().map(|(_, stream)| &stream.free).chain([&self.idle.free])
    }

    pub(crate) fn contains(&self, id: StreamId) -> bool {
        self.table.knows(id)
    }

    /// The streams that have not left. O(those).
    pub(crate) fn iter(&self) -> impl Iterator<Item = (StreamId, &Stream)> {
        self.table.iter().map(|(id, stream)| (id, &**stream))
    }

    /// Number of streams that have not left.
    pub(crate) fn len(&self) -> usize {
        self.table.len()
    }

    /// True if there was ever a second stream, or the only one ended.
    pub(crate) fn are_several(&self) -> bool {
        self.table.ids() > 1 || self.any_ended
    }

    /// Notes that a stream uses the pool.
    #[inline]
    pub(crate) fn note_user(&mut self, id: StreamId) {
        match self.get_mut(id) {
            Some(stream) if stream.is_user => {}
            Some(stream) => {
                stream.is_user = true;
                self.users += 1;
            }
            None => self.any_user_ended = true,
        }
    }

    /// True if several streams ever used the pool, or one of them ended: what one has free may be of use
    /// to others.
    #[inline]
    pub(crate) fn are_several_users(&self) -> bool {
        self.users > 1 || self.any_user_ended
    }

    /// The mark of the work queued on `stream` so far.
    pub(crate) fn now(&self, stream: StreamId) -> Mark {
        let known = self.get(stream);
        let epoch = if known.ended { known.recorded() } else { known.current };
        Mark { stream, epoch }
    }

    /// Sets whether no event can be recorded on a stream at present.
    pub(crate) fn hold(&mut self, id: StreamId, held: bool) {
        let Some(stream) = self.get_mut(id) else { return };
        stream.held = held;
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
        let waiter = self.get_mut(stream).expect("a stream that waits has not left");
        let known = waiter.waits_for.entry(on.stream).or_insert(Epoch::START);
        *known = (*known).max(on.epoch);
        if waiter.waits_for.len() >= waiter.prune_at {
            // Work that is over needs no wait.
            let mut waits_for = std::mem::take(&mut waiter.waits_for);
            waits_for.retain(|&stream, &mut epoch| !self.is_over(Mark { stream, epoch }));
            let waiter = self.get_mut(stream).expect("it is there");
            waiter.prune_at = PRUNE_MIN.max(2 * waits_for.len());
            waiter.waits_for = waits_for;
        }
    }

    /// Ends a stream: no later work of it can wait for anything.
    pub(crate) fn end(&mut self, id: StreamId) {
        self.hold(id, false);
        self.any_ended = true;
        let Some(ended) = self.get_mut(id) else { return };
        ended.ended = true;
        ended.waits_for = BTreeMap::new();
        self.any_user_ended |= ended.is_user;
    }

    /// Notes that the work up to an epoch is over. Returns true if that was not known.
    pub(crate) fn reach(&mut self, Mark { stream: id, epoch }: Mark) -> bool {
        let Some(stream) = self.get_mut(id).filter(|stream| stream.reached < epoch) else {
            return false;
        };
        stream.reached = epoch;
        if epoch == stream.recorded() {
            self.pending.remove(&id);
        }
        true
    }

    /// Closes the epoch: an event now covers everything freed in it.
    pub(crate) fn record(&mut self, mark: Mark) {
        let stream = self.get_mut(mark.stream).expect("a stream that records has not left");
        assert_eq!(mark.epoch, stream.current, "{} records its present epoch", mark.stream);
        stream.current = stream.current.next();
        self.pending.insert(mark.stream);
    }

    /// True if an event was recorded that is not known to be reached.
    pub(crate) fn any_pending(&self) -> bool {
        !self.pending.is_empty()
    }

    /// The last marks recorded where they are not known to be reached.
    pub(crate) fn pending(&self) -> impl Iterator<Item = Mark> {
        let recorded = |&id| Mark { stream: id, epoch: self.get(id).recorded() };
        self.pending.iter().map(recorded)
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
