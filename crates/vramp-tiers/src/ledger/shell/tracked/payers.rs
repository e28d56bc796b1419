//! Who pays for the allocations of each tracked allocator, beside the ledger and under its lock, so that a
//! charge takes one lock.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock, PoisonError, RwLock, Weak};
use std::thread::ThreadId;
use std::{fmt, thread};

use slotmap::{SlotMap, new_key_type};
use smallvec::SmallVec;

use crate::ledger::core::{ReservationId, SpaceId};
use crate::ledger::shell::streams::StreamPool;
use vramp_alloc::{Allocator, StreamId};

new_key_type! {
    /// A tracked allocator among those of its manager.
    pub(crate) struct PayersKey;
}

/// The reservations that are attached at one tracked allocator.
#[derive(Default)]
struct PayersOf {
    /// Indexed by stream.
    streams: Vec<Option<ReservationId>>,
    threads: HashMap<ThreadId, ReservationId>,
}

impl PayersOf {
    #[inline]
    fn find(&self, stream: StreamId) -> Option<ReservationId> {
        self.of_this_thread().or_else(|| self.of_stream(stream))
    }

    #[inline]
    fn of_this_thread(&self) -> Option<ReservationId> {
        // The id of the thread costs as much as the rest of a charge.
        if self.threads.is_empty() {
            return None;
        }
        self.threads.get(&thread::current().id()).copied()
    }

    #[inline]
    fn of_stream(&self, stream: StreamId) -> Option<ReservationId> {
        *self.streams.get(stream.index())?
    }
}

/// The attached reservations of all tracked allocators of one manager.
#[derive(Default)]
pub(crate) struct Payers {
    of: SlotMap<PayersKey, PayersOf>,
}

impl Payers {
    pub fn add(&mut self) -> PayersKey {
        self.of.insert(PayersOf::default())
    }

    pub fn remove(&mut self, key: PayersKey) {
        self.of.remove(key);
    }

    /// Sets who pays for a scope.
    pub fn set(&mut self, key: PayersKey, scope: Scope, payer: Option<ReservationId>) {
        let Some(of) = self.of.get_mut(key) else { return };
        match (scope, payer) {
            (Scope::Thread(thread), Some(payer)) => drop(of.threads.insert(thread, payer)),
            (Scope::Thread(thread), None) => drop(of.threads.remove(&thread)),
            (Scope::Stream(stream), payer) => {
                let slots = of.streams.len().max(stream.index() + 1);
                of.streams.resize(slots, None);
                of.streams[stream.index()] = payer;
            }
        }
    }
    /// Returns the reservation that pays for an allocation of this thread on a stream.
    #[inline]
    pub fn find(&self, key: PayersKey, stream: StreamId) -> Option<ReservationId> {
        self.of.get(key).and_then(|of| of.find(stream))
    }

    /// Returns the reservations attached to this thread and to the streams, in this order.
    pub fn attached(
        &self,
        key: PayersKey,
        streams: &[StreamId],
    ) -> impl Iterator<Item = ReservationId> {
        let of = self.of.get(key);
        let of_thread = of.and_then(PayersOf::of_this_thread);
        let of_stream = move |&stream| of.and_then(|of| of.of_stream(stream));
        of_thread.into_iter().chain(streams.iter().filter_map(of_stream))
    }
}

/// Allocations that are charged to an attached reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scope {
    /// Allocations on a stream, by any thread.
    Stream(StreamId),
    /// Allocations by a thread, on any stream. Precedes the stream's reservation.
    Thread(ThreadId),
}

impl Scope {
    /// Returns the scope of the calling thread.
    pub fn this_thread() -> Scope {
        Scope::Thread(thread::current().id())
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Scope::Stream(stream) => stream.fmt(f),
            Scope::Thread(thread) => write!(f, "{thread:?}"),
        }
    }
}

/// Returns the stream pool of a tracked allocator, made without streams at its first use.
pub(super) fn pool_of(allocator: &Arc<Allocator>, pool: &OnceLock<StreamPool>) -> StreamPool {
    pool.get_or_init(|| StreamPool::empty(Arc::clone(allocator))).clone()
}

/// All tracked allocators of one manager, the oldest first.
#[derive(Default)]
pub(crate) struct Attachments {
    allocators: RwLock<Vec<AttachedTo>>,
}

struct AttachedTo {
    space: SpaceId,
    allocator: Weak<Allocator>,
    payers: PayersKey,
    /// Goes with the tracked allocator.
    pool: Weak<OnceLock<StreamPool>>,
}

impl Attachments {
    /// Adds a new tracked allocator. O(tracked allocators).
    pub(super) fn add(
        &self,
        space: SpaceId,
        allocator: &Arc<Allocator>,
        payers: PayersKey,
        pool: &Arc<OnceLock<StreamPool>>,
    ) {
        let (allocator, pool) = (Arc::downgrade(allocator), Arc::downgrade(pool));
        let mut allocators = self.allocators.write().unwrap_or_else(PoisonError::into_inner);
        allocators.retain(|known| known.pool.strong_count() > 0);
        allocators.push(AttachedTo { space, allocator, payers, pool });
    }

    /// Returns the stream pool of the first tracked allocator of a space.
    pub(crate) fn streams(&self, space: SpaceId) -> Option<StreamPool> {
        let first = {
            let allocators = self.allocators.read().unwrap_or_else(PoisonError::into_inner);
            let mut of_space = allocators.iter().filter(|known| known.space == space);
            of_space.find_map(|known| Some((known.allocator.upgrade()?, known.pool.upgrade()?)))
        };
        first.map(|(allocator, pool)| pool_of(&allocator, &pool))
    }

    /// Returns who pays at the tracked allocators of `allocator` in a space. O(tracked allocators).
    pub(crate) fn payers(
        &self,
        space: SpaceId,
        allocator: &Arc<Allocator>,
    ) -> SmallVec<[PayersKey; 2]> {
        let is_its = |known: &&AttachedTo| {
            known.space == space && std::ptr::eq(known.allocator.as_ptr(), Arc::as_ptr(allocator))
        };
        let allocators = self.allocators.read().unwrap_or_else(PoisonError::into_inner);
        allocators.iter().filter(is_its).map(|known| known.payers).collect()
    }
}
