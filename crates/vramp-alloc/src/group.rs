//! Groups: an allocator and the pools created from it share streams and one limit.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use vramp_core::{Bytes, StreamId};
use vramp_driver::{Driver, DriverError, Stream};

use crate::shared::Shared;

/// A stream of a group.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GroupStream {
    pub raw: Stream,
    /// True if the group created the stream, and so destroys it.
    owned: bool,
    pub ended: bool,
}

/// Allocators that share streams and a limit.
#[derive(Default)]
pub(crate) struct Group {
    streams: Mutex<Vec<GroupStream>>,
    members: Mutex<Vec<Weak<Shared>>>,
    limit: Mutex<Option<Bytes>>,
    /// Held while one of several members may reserve memory under a limit.
    growing: Mutex<()>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Each is changed in one step, so a panic elsewhere leaves it consistent.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Group {
    pub(crate) fn new(limit: Option<Bytes>) -> Group {
        Group { limit: Mutex::new(limit), ..Group::default() }
    }

    pub(crate) fn add_stream(&self, raw: Stream, owned: bool) -> StreamId {
        let mut streams = lock(&self.streams);
        streams.push(GroupStream { raw, owned, ended: false });
        StreamId::new(streams.len() as u32 - 1)
    }

    /// Returns the streams from index `from` on.
    pub(crate) fn streams_from(&self, from: usize) -> Vec<GroupStream> {
        lock(&self.streams).get(from..).map(<[GroupStream]>::to_vec).unwrap_or_default()
    }

    pub(crate) fn stream(&self, id: StreamId) -> Option<GroupStream> {
        lock(&self.streams).get(id.index()).copied()
    }

    /// Marks a stream as ended and destroys it if the group created it.
    pub(crate) fn end_stream(&self, id: StreamId, driver: &dyn Driver) -> Result<(), DriverError> {
        let known = {
            let mut streams = lock(&self.streams);
            let known = &mut streams[id.index()];
            known.ended = true;
            *known
        };
        if known.owned { driver.destroy_stream(known.raw) } else { Ok(()) }
    }

    pub(crate) fn join(&self, member: &Arc<Shared>) {
        lock(&self.members).push(Arc::downgrade(member));
    }

    pub(crate) fn members(&self) -> Vec<Arc<Shared>> {
        lock(&self.members).iter().filter_map(Weak::upgrade).collect()
    }

    /// Removes a closed member. The last one destroys the streams.
    pub(crate) fn leave(&self, number: u64, driver: &dyn Driver) -> Result<(), DriverError> {
        let mut members = lock(&self.members);
        members.retain(|member| member.upgrade().is_some_and(|known| known.number != number));
        if !members.is_empty() {
            return Ok(());
        }
        let mut first = Ok(());
        for known in lock(&self.streams).drain(..) {
            if known.owned && !known.ended {
                let destroyed = driver.destroy_stream(known.raw);
                first = first.and(destroyed);
            }
        }
        first
    }

    pub(crate) fn limit(&self) -> Option<Bytes> {
        *lock(&self.limit)
    }

    pub(crate) fn set_limit(&self, limit: Option<Bytes>) {
        *lock(&self.limit) = limit;
    }

    /// Returns the right to reserve memory, and what the other members have reserved. `None`
    /// without a limit or other members.
    pub(crate) fn share(&self, number: u64) -> Option<(MutexGuard<'_, ()>, Bytes)> {
        self.limit()?;
        if lock(&self.members).len() < 2 {
            return None;
        }
        let guard = lock(&self.growing);
        let others = self.members();
        let others = others.iter().filter(|member| member.number != number);
        let held = others.map(|member| member.reserved.load(Ordering::Relaxed)).sum();
        Some((guard, Bytes::new(held)))
    }
}
