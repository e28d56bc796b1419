//! Where memory runs out: whom to ask, what other pools give, and the report of who holds it.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use vramp_core::{Bytes, Request, Shortage, StreamId};
use vramp_driver::DriverError;

use super::Allocator;
use crate::error::{AllocError, OutOfMemoryReport, SiblingPool};
use crate::observe::{Event, Registration};
use crate::shared::Shared;

/// So often a request is tried again because a handler gave something.
const ROUNDS_MOST: u32 = 64;

/// What was done for one request so far.
pub(crate) struct Relief {
    rounds: u32,
    patience: Duration,
    deadline: Option<Instant>,
}

impl Relief {
    pub(crate) fn new(patience: Duration) -> Relief {
        Relief { rounds: 0, patience, deadline: None }
    }
}

impl Allocator {
    /// Tells `observer` of every event from now on. It is called without a lock, by the thread that
    /// caused the event, and may use the allocator; what it does with it is told to it, too.
    pub fn observe(&self, observer: impl Fn(&Event<'_>) + Send + Sync + 'static) -> Registration {
        self.shared.observers.add_observer(Arc::new(observer))
    }

    /// Asks `handler` for memory before a request fails. It is called without a lock and may free
    /// allocations; it returns true if it gave something, and then the request is tried again.
    pub fn on_shortage(
        &self,
        handler: impl Fn(&Shortage) -> bool + Send + Sync + 'static,
    ) -> Registration {
        self.shared.observers.add_handler(Arc::new(handler))
    }

    /// For handlers that free memory piece by piece: moves what is free by now towards the block that
    /// the shortage is about, so that once the last piece is free only that one is left to move. The
    /// memory stays free, for this request and any other.
    ///
    /// Costs a map for each chunk moved and a set-access; nothing for blocks that are small, for other
    /// presets, and where memory is wanted behind addresses that are there.
    ///
    /// # Errors
    /// A driver call failed. The pool is as before that call.
    pub fn assemble(&self, shortage: &Shortage) -> Result<(), AllocError> {
        let Some(stream) = shortage.block_for else { return Ok(()) };
        let (_turn, mut guard) = self.shared.lock_for_memory()?;
        let inner = &mut *guard;
        let contended = self.shared.is_contended();
        if inner.open_stream(stream, &self.shared.group).is_none() {
            return Ok(());
        }
        let Some(pool) = inner.manager.virtual_pool_mut() else { return Ok(()) };
        let size = shortage.requested;
        if pool.heaps_serve.is_none_or(|serve| size <= serve.limit(contended)) {
            return Ok(());
        }
        let assembled = pool.assemble(Request { size, stream });
        self.shared.refresh(inner);
        Ok(assembled?)
    }

    /// Takes an observer or handler back. False if it was taken back before.
    pub fn unregister(&self, registration: Registration) -> bool {
        self.shared.observers.remove(registration)
    }
}

impl Shared {
    /// What is done about a shortage before the request fails: other pools give, then handlers,
    /// then time. True if the request is to be tried again.
    pub(crate) fn relieve(
        &self,
        relief: &mut Relief,
        shortage: &Shortage,
    ) -> Result<bool, AllocError> {
        relief.rounds += 1;
        if relief.rounds == 1 && self.trim_others()? {
            return Ok(true);
        }
        if relief.rounds <= ROUNDS_MOST && self.observers.run_handlers(shortage) {
            self.lock()?.retries += 1;
            return Ok(true);
        }
        let now = Instant::now();
        let deadline = *relief.deadline.get_or_insert(now + relief.patience);
        let left = deadline.saturating_duration_since(now);
        if left > Duration::ZERO {
            let mut inner = self.lock()?;
            inner.retries += 1;
            self.wait_for_memory(inner, left);
            return Ok(true);
        }
        self.has_waiters.store(false, Ordering::Relaxed);
        Ok(false)
    }

    /// Gives idle memory of the group's other pools back to the card. True if there was some.
    fn trim_others(&self) -> Result<bool, AllocError> {
        let mut given = false;
        for member in self.group.members() {
            if member.number == self.number {
                continue;
            }
            let mut inner = member.lock()?;
            let before = inner.manager.reserved();
            let trimmed = inner.manager.trim(Bytes::ZERO);
            given |= inner.manager.reserved() < before;
            member.reserved.store(inner.manager.reserved().count(), Ordering::Relaxed);
            trimmed?;
        }
        Ok(given)
    }

    /// Who holds what, for the error of a request that found no memory.
    pub(crate) fn report(
        &self,
        shortage: Shortage,
        failed_call: Option<DriverError>,
        stream: StreamId,
    ) -> OutOfMemoryReport {
        let (remaps, streams, mut tags) = {
            let mut inner = self.lock_anyway();
            inner.ooms += 1;
            (inner.manager.remaps(shortage.requested), inner.stream_usage(), inner.tags.clone())
        };
        tags.retain(|tag| tag.live > Bytes::ZERO);
        tags.sort_by_key(|tag| std::cmp::Reverse(tag.live));
        let members = self.group.members();
        let siblings = members.iter().filter(|member| member.number != self.number);
        let siblings = siblings.map(|member| SiblingPool {
            name: member.name.clone(),
            reserved: Bytes::new(member.reserved.load(Ordering::Relaxed)),
        });
        OutOfMemoryReport {
            shortage,
            stream,
            pool: self.name.clone(),
            remaps,
            streams,
            tags,
            siblings: siblings.collect(),
            card: self.driver.memory_info().ok(),
            failed_call,
        }
    }
}
