//! Groups: an allocator and the pools created from it share streams and one limit.
//!
//! A stream is open, ending, or ended. It is *ending* while its last event is recorded and the
//! pools learn of it, so that no other thread ends it too. The driver's stream is destroyed last; if
//! that fails it is retried by the next call that ends the stream, and when the last pool closes.
//! Once it is destroyed the group keeps nothing of the stream but its end, until that is over.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, MutexGuard, PoisonError, Weak};

use vramp_core::{Bytes, StreamId, StreamTable};
use vramp_driver::{Driver, DriverError, Stream, StreamThread};

use crate::completion::captures;
use crate::observe::Observers;
use crate::shared::{Shared, next_number};
use crate::stream_end::{StreamEnd, StreamEnds, StreamWork};
use crate::sync::ForkMutex;

/// A stream of a group.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GroupStream {
    pub raw: Stream,
    /// True if the group created the driver's stream and has not destroyed it.
    to_destroy: bool,
    state: StreamState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StreamState {
    Open,
    /// A thread is ending it.
    Ending,
    Ended,
}

impl GroupStream {
    /// Returns true if requests may be made for it.
    pub(crate) fn is_open(self) -> bool {
        self.state == StreamState::Open
    }
}

/// The streams of a group.
#[derive(Debug, Default)]
struct GroupStreams {
    /// Those whose driver's stream is not destroyed, or not the group's to destroy and open.
    by_id: StreamTable<GroupStream>,
    ends: StreamEnds,
}

impl GroupStreams {
    fn work_of(&self, id: StreamId) -> StreamWork {
        let open = self.by_id.get(id).filter(|known| known.state != StreamState::Ended);
        match (open, self.ends.get(id)) {
            (Some(known), _) => StreamWork::Open(known.raw),
            (None, Some(end)) => StreamWork::Ended(Arc::clone(end)),
            (None, None) => StreamWork::Over,
        }
    }

    /// Removes an ended stream of which nothing is left to do.
    fn leave_if_done(&mut self, id: StreamId) {
        let done = |known: &GroupStream| known.state == StreamState::Ended && !known.to_destroy;
        if self.by_id.get(id).is_some_and(done) {
            self.by_id.remove(id);
        }
    }
}

/// Allocators that share streams and a limit.
pub(crate) struct Group {
    /// Called when any member is short of memory.
    pub handlers: Observers,
    streams: ForkMutex<GroupStreams>,
    /// Default streams of threads that ended, which could not be ended yet.
    left: ForkMutex<Vec<StreamId>>,
    /// Number of streams, destroyed ones included.
    count: AtomicUsize,
    /// By number.
    members: ForkMutex<BTreeMap<u64, Weak<Shared>>>,
    member_count: AtomicUsize,
    /// Bytes that all members have reserved.
    reserved: AtomicU64,
    /// One more than the limit in bytes; zero for none.
    limit: AtomicU64,
    /// Held while one of several members may reserve memory under a limit.
    growing: ForkMutex<()>,
    /// Cards that were granted access to the members' memory, in ascending order. Held while access
    /// changes and while a member is added. Taken before any pool's lock.
    peers: ForkMutex<Vec<u32>>,
    /// Held while a stream is ending. Taken before any pool's lock.
    ending: ForkMutex<()>,
    /// True once the group has a budget.
    has_budget: AtomicBool,
    /// Why the budget did not grant what the last request lacked.
    refusal: ForkMutex<Option<String>>,
}

fn lock<T: Default>(mutex: &ForkMutex<T>) -> MutexGuard<'_, T> {
    // Each is changed in one step, so a panic elsewhere leaves it consistent.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Group {
    pub(crate) fn new(limit: Option<Bytes>) -> Group {
        let group = Group {
            handlers: Observers::new(next_number()),
            streams: ForkMutex::default(),
            left: ForkMutex::default(),
            count: AtomicUsize::new(0),
            members: ForkMutex::default(),
            member_count: AtomicUsize::new(0),
            reserved: AtomicU64::new(0),
            limit: AtomicU64::new(0),
            growing: ForkMutex::default(),
            peers: ForkMutex::default(),
            ending: ForkMutex::default(),
            has_budget: AtomicBool::new(false),
            refusal: ForkMutex::default(),
        };
        group.set_limit(limit);
        group
    }

    /// Locks the cards that have access.
    pub(crate) fn peers(&self) -> MutexGuard<'_, Vec<u32>> {
        lock(&self.peers)
    }

    pub(crate) fn add_stream(&self, raw: Stream, owned: bool) -> StreamId {
        let mut streams = lock(&self.streams);
        let state = StreamState::Open;
        let id = streams.by_id.push(GroupStream { raw, to_destroy: owned, state });
        self.count.store(streams.by_id.ids(), Ordering::Release);
        id
    }

    /// Returns the number of streams, destroyed ones included.
    #[inline]
    pub(crate) fn stream_count(&self) -> usize {
        self.count.load(Ordering::Acquire)
    }

    /// Returns the number of streams, and where the work of each from index `from` on can be
    /// observed, by id. Those whose work is over may be left out.
    pub(crate) fn streams_from(&self, from: usize) -> (usize, Vec<(StreamId, StreamWork)>) {
        let streams = lock(&self.streams);
        let present = streams.by_id.iter_from(from).map(|(id, _)| id);
        let mut ids: Vec<StreamId> = present.chain(streams.ends.ids_from(from)).collect();
        ids.sort_unstable();
        ids.dedup();
        let works = ids.into_iter().map(|id| (id, streams.work_of(id))).collect();
        (streams.by_id.ids(), works)
    }

    /// Returns the driver's stream if requests may be made for it.
    pub(crate) fn open_stream(&self, id: StreamId) -> Option<Stream> {
        let streams = lock(&self.streams);
        streams.by_id.get(id).filter(|known| known.is_open()).map(|known| known.raw)
    }

    /// Calls `ask` for each stream that has not ended, also for those that are ending, whose work no
    /// event stands for yet. The stream does not end while it is asked, so its handle is not dead; the
    /// group's lock is held. Ends with the first error.
    pub(crate) fn ask_unended<E>(
        &self,
        mut ask: impl FnMut(StreamId, Stream) -> Result<(), E>,
    ) -> Result<(), E> {
        let ids: Vec<StreamId> = lock(&self.streams).by_id.iter().map(|(id, _)| id).collect();
        for id in ids {
            let streams = lock(&self.streams);
            let known = streams.by_id.get(id);
            if let Some(known) = known.filter(|known| known.state != StreamState::Ended) {
                ask(id, known.raw)?;
            }
        }
        Ok(())
    }

    /// Returns the open default streams of threads. O(streams).
    pub(crate) fn thread_streams(&self, driver: &dyn Driver) -> Vec<StreamId> {
        let streams = lock(&self.streams);
        let open = streams.by_id.iter().filter(|(_, known)| known.is_open());
        let of_threads =
            open.filter(|(_, known)| driver.stream_thread(known.raw) != StreamThread::Any);
        of_threads.map(|(id, _)| id).collect()
    }

    /// Notes the default stream of a thread that ended.
    pub(crate) fn leave_stream(&self, stream: StreamId) {
        lock(&self.left).push(stream);
    }

    /// Returns the noted streams, and forgets them.
    pub(crate) fn take_left_streams(&self) -> Vec<StreamId> {
        std::mem::take(&mut *lock(&self.left))
    }

    /// Returns where the work of a stream can be observed. `None` for an unknown stream.
    pub(crate) fn work_of(&self, id: StreamId) -> Option<StreamWork> {
        let streams = lock(&self.streams);
        streams.by_id.knows(id).then(|| streams.work_of(id))
    }

    /// Returns the end of what is queued on a stream so far. `None` if that is over. Two driver calls for
    /// an open stream, which does not end meanwhile.
    ///
    /// # Errors
    /// The stream captures, or a driver call failed.
    pub(crate) fn end_of_work(
        &self,
        id: StreamId,
        driver: &Arc<dyn Driver>,
    ) -> Result<Option<Arc<StreamEnd>>, DriverError> {
        let streams = lock(&self.streams);
        match streams.work_of(id) {
            StreamWork::Open(raw) => {
                StreamEnd::record(driver, raw)?.map(Some).ok_or_else(|| captures(id))
            }
            StreamWork::Ended(end) => Ok(Some(end)),
            StreamWork::Over => Ok(None),
        }
    }

    /// Returns the ends of destroyed streams whose work is not known to be over.
    pub(crate) fn ends(&self) -> Vec<Arc<StreamEnd>> {
        lock(&self.streams).ends.iter().cloned().collect()
    }

    /// Reserves the right to end an open stream, until the guard is dropped. `None` unless it is
    /// open. Ends of streams of a group come one after the other.
    pub(crate) fn begin_end(&self, id: StreamId) -> Option<(MutexGuard<'_, ()>, Stream)> {
        let guard = lock(&self.ending);
        let mut streams = lock(&self.streams);
        let known = streams.by_id.get_mut(id).filter(|known| known.is_open())?;
        known.state = StreamState::Ending;
        Some((guard, known.raw))
    }

    /// Makes a stream that was ending open again.
    pub(crate) fn cancel_end(&self, id: StreamId) {
        let mut streams = lock(&self.streams);
        if let Some(known) = streams.by_id.get_mut(id) {
            known.state = StreamState::Open;
        }
    }

    /// Ends a stream. Returns true if earlier ends should be swept.
    pub(crate) fn finish_end(&self, id: StreamId, end: &Arc<StreamEnd>) -> bool {
        let mut streams = lock(&self.streams);
        // A thread that ends may end its stream while the last pool closes.
        if let Some(known) = streams.by_id.get_mut(id) {
            known.state = StreamState::Ended;
        }
        streams.ends.push(id, Arc::clone(end));
        streams.leave_if_done(id);
        streams.ends.is_sweep_due()
    }

    /// Queries which ended streams' work is over and forgets those. A query for each.
    pub(crate) fn sweep_ends(&self) {
        // Not while holding the lock. A query that fails is repeated by the next sweep.
        for end in self.ends() {
            let _ = end.is_over();
        }
        lock(&self.streams).ends.sweep(StreamEnd::is_known_over);
    }

    /// Destroys the driver's stream of an ended one, if the group created it and that was not done
    /// before. Returns false if there is nothing to destroy.
    pub(crate) fn destroy_ended(
        &self,
        id: StreamId,
        driver: &dyn Driver,
    ) -> Result<bool, DriverError> {
        let known = {
            let mut streams = lock(&self.streams);
            let wanted =
                |known: &&mut GroupStream| known.state == StreamState::Ended && known.to_destroy;
            let Some(known) = streams.by_id.get_mut(id).filter(wanted) else {
                return Ok(false);
            };
            // No other thread destroys it too.
            known.to_destroy = false;
            *known
        };
        let destroyed = driver.destroy_stream(known.raw);
        let mut streams = lock(&self.streams);
        if let Some(known) = streams.by_id.get_mut(id) {
            known.to_destroy = destroyed.is_err();
        }
        streams.leave_if_done(id);
        destroyed.map(|()| true)
    }

    pub(crate) fn join(&self, member: &Arc<Shared>) {
        let mut members = lock(&self.members);
        members.insert(member.number, Arc::downgrade(member));
        self.member_count.store(members.len(), Ordering::Release);
    }

    /// Returns true if no member has joined, or all have left.
    pub(crate) fn is_empty(&self) -> bool {
        self.member_count.load(Ordering::Acquire) == 0
    }

    pub(crate) fn members(&self) -> Vec<Arc<Shared>> {
        lock(&self.members).values().filter_map(Weak::upgrade).collect()
    }

    /// Removes a member, if it was not removed before. Returns true if none is left. It noted before
    /// that it has nothing reserved any more.
    pub(crate) fn remove(&self, number: u64) -> bool {
        let mut members = lock(&self.members);
        members.remove(&number);
        self.member_count.store(members.len(), Ordering::Release);
        members.is_empty()
    }

    /// Removes a closed member. The last one destroys the streams.
    pub(crate) fn leave(&self, number: u64, driver: &dyn Driver) -> Result<(), DriverError> {
        if !self.remove(number) {
            return Ok(());
        }
        // Their driver calls are made without the lock.
        let streams = std::mem::take(&mut *lock(&self.streams));
        let mut first = Ok(());
        for (_, known) in streams.by_id.iter().filter(|(_, known)| known.to_destroy) {
            let destroyed = driver.destroy_stream(known.raw);
            first = first.and(destroyed);
        }
        first
    }

    #[inline]
    pub(crate) fn limit(&self) -> Option<Bytes> {
        let limit = self.limit.load(Ordering::Relaxed);
        limit.checked_sub(1).map(Bytes::new)
    }

    pub(crate) fn set_limit(&self, limit: Option<Bytes>) {
        let stored = limit.map_or(0, |limit| limit.count().wrapping_add(1));
        self.limit.store(stored, Ordering::Relaxed);
    }

    /// Notes that a member has `after` bytes reserved instead of `before`.
    pub(crate) fn change_reserved(&self, before: Bytes, after: Bytes) {
        // Wraps around where it shrinks.
        let change = after.count().wrapping_sub(before.count());
        self.reserved.fetch_add(change, Ordering::Relaxed);
    }

    /// Returns what all members have reserved together. With the [right](Group::share) to reserve
    /// memory it only shrinks.
    pub(crate) fn reserved(&self) -> Bytes {
        Bytes::new(self.reserved.load(Ordering::Relaxed))
    }

    /// Returns the right to reserve memory below a limit. `None` without other members.
    pub(crate) fn share(&self) -> Option<MutexGuard<'_, ()>> {
        (self.member_count.load(Ordering::Acquire) > 1).then(|| lock(&self.growing))
    }

    /// Takes the right to give the group a budget. Returns false if it has one.
    pub(crate) fn take_budget_right(&self) -> bool {
        !self.has_budget.swap(true, Ordering::AcqRel)
    }

    pub(crate) fn return_budget_right(&self) {
        self.has_budget.store(false, Ordering::Release);
    }

    pub(crate) fn set_refusal(&self, refusal: Option<String>) {
        *lock(&self.refusal) = refusal;
    }

    pub(crate) fn refusal(&self) -> Option<String> {
        lock(&self.refusal).clone()
    }
}
