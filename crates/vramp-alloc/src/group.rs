//! Groups: an allocator and the pools created from it share streams and one limit.
//!
//! A stream is open, ending, or ended. It is *ending* while its last event is recorded and the
//! pools learn of it, so that no other thread ends it too. The driver's stream is destroyed last; if
//! that fails it is retried by the next call that ends the stream, and when the last pool closes.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, MutexGuard, PoisonError, Weak};

use vramp_core::{Bytes, StreamId};
use vramp_driver::{Driver, DriverError, Stream};

use crate::shared::Shared;
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
    by_id: Vec<GroupStream>,
    ends: StreamEnds,
}

impl GroupStreams {
    fn work_of(&self, id: StreamId) -> StreamWork {
        let known = &self.by_id[id.index()];
        match (known.state, self.ends.get(id)) {
            (StreamState::Ended, Some(end)) => StreamWork::Ended(Arc::clone(end)),
            (StreamState::Ended, None) => StreamWork::Over,
            (StreamState::Open | StreamState::Ending, _) => StreamWork::Open(known.raw),
        }
    }
}

/// Allocators that share streams and a limit.
#[derive(Default)]
pub(crate) struct Group {
    streams: ForkMutex<GroupStreams>,
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
    /// Held while a stream is ending. Taken before any pool's lock.
    ending: ForkMutex<()>,
}

fn lock<T: Default>(mutex: &ForkMutex<T>) -> MutexGuard<'_, T> {
    // Each is changed in one step, so a panic elsewhere leaves it consistent.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Group {
    pub(crate) fn new(limit: Option<Bytes>) -> Group {
        let group = Group::default();
        group.set_limit(limit);
        group
    }

    pub(crate) fn add_stream(&self, raw: Stream, owned: bool) -> StreamId {
        let mut streams = lock(&self.streams);
        let state = StreamState::Open;
        streams.by_id.push(GroupStream { raw, to_destroy: owned, state });
        self.count.store(streams.by_id.len(), Ordering::Release);
        StreamId::new(streams.by_id.len() as u32 - 1)
    }

    /// Returns the number of streams, destroyed ones included.
    #[inline]
    pub(crate) fn stream_count(&self) -> usize {
        self.count.load(Ordering::Acquire)
    }

    /// Returns where the work of each stream from index `from` on can be observed.
    pub(crate) fn streams_from(&self, from: usize) -> Vec<StreamWork> {
        let streams = lock(&self.streams);
        let ids = (from as u32..streams.by_id.len() as u32).map(StreamId::new);
        ids.map(|id| streams.work_of(id)).collect()
    }

    /// Returns the driver's stream if requests may be made for it.
    pub(crate) fn open_stream(&self, id: StreamId) -> Option<Stream> {
        let streams = lock(&self.streams);
        streams.by_id.get(id.index()).filter(|known| known.is_open()).map(|known| known.raw)
    }

    /// Calls `ask` for each stream that has not ended, also for those that are ending, whose work no
    /// event stands for yet. The stream does not end while it is asked, so its handle is not dead; the
    /// group's lock is held. Ends with the first error.
    pub(crate) fn ask_unended<E>(
        &self,
        mut ask: impl FnMut(StreamId, Stream) -> Result<(), E>,
    ) -> Result<(), E> {
        for index in 0..self.stream_count() {
            let streams = lock(&self.streams);
            let known = streams.by_id.get(index);
            if let Some(known) = known.filter(|known| known.state != StreamState::Ended) {
                ask(StreamId::new(index as u32), known.raw)?;
            }
        }
        Ok(())
    }

    /// Returns where the work of a stream can be observed. `None` for an unknown stream.
    pub(crate) fn work_of(&self, id: StreamId) -> Option<StreamWork> {
        let streams = lock(&self.streams);
        (id.index() < streams.by_id.len()).then(|| streams.work_of(id))
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
        let known = streams.by_id.get_mut(id.index()).filter(|known| known.is_open())?;
        known.state = StreamState::Ending;
        Some((guard, known.raw))
    }

    /// Makes a stream that was ending open again.
    pub(crate) fn cancel_end(&self, id: StreamId) {
        lock(&self.streams).by_id[id.index()].state = StreamState::Open;
    }

    /// Ends a stream. Returns true if earlier ends should be swept.
    pub(crate) fn finish_end(&self, id: StreamId, end: &Arc<StreamEnd>) -> bool {
        let mut streams = lock(&self.streams);
        streams.by_id[id.index()].state = StreamState::Ended;
        streams.ends.push(id, Arc::clone(end));
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
            let Some(known) = streams.by_id.get_mut(id.index()).filter(wanted) else {
                return Ok(false);
            };
            // No other thread destroys it too.
            known.to_destroy = false;
            *known
        };
        let destroyed = driver.destroy_stream(known.raw);
        if destroyed.is_err() {
            lock(&self.streams).by_id[id.index()].to_destroy = true;
        }
        destroyed.map(|()| true)
    }

    pub(crate) fn join(&self, member: &Arc<Shared>) {
        let mut members = lock(&self.members);
        members.insert(member.number, Arc::downgrade(member));
        self.member_count.store(members.len(), Ordering::Release);
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
        for known in streams.by_id.iter().filter(|known| known.to_destroy) {
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
}
