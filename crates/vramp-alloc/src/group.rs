//! What an allocator and the pools made from it have in common: streams, and one limit.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use vramp_core::{Bytes, StreamId};
use vramp_driver::{Driver, DriverError, Stream};

use crate::shared::Shared;

/// A stream that allocators of a group know.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Known {
    pub raw: Stream,
    /// Made here, so destroyed here.
    owned: bool,
    pub ended: bool,
}

/// Allocators that share streams and a limit.
#[derive(Default)]
pub(crate) struct Group {
    streams: Mutex<Vec<Known>>,
    members: Mutex<Vec<Weak<Shared>>>,
    limit: Mutex<Option<Bytes>>,
    /// Held while one of several members may grow under a limit.
    growing: Mutex<()>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Each is changed in one step, so a panic elsewhere leaves it whole.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Group {
    pub(crate) fn new(limit: Option<Bytes>) -> Group {
        Group { limit: Mutex::new(limit), ..Group::default() }
    }

    pub(crate) fn add_stream(&self, raw: Stream, owned: bool) -> StreamId {
        let mut streams = lock(&self.streams);
        streams.push(Known { raw, owned, ended: false });
        StreamId::new(streams.len() as u32 - 1)
    }

    /// Streams from the `from`-th on.
    pub(crate) fn streams_from(&self, from: usize) -> Vec<Known> {
        lock(&self.streams).get(from..).map(<[Known]>::to_vec).unwrap_or_default()
    }

    pub(crate) fn stream(&self, id: StreamId) -> Option<Known> {
        lock(&self.streams).get(id.index()).copied()
    }

    /// Marks a stream as ended and destroys it if it was made here.
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

    /// A member is closed. The last one destroys the streams.
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

    /// The right to grow and what the others hold. `None` where nobody else counts.
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
