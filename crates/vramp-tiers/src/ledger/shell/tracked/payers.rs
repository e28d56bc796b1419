//! Who pays for the allocations of each tracked allocator, beside the ledger and under its lock, so that a
//! charge takes one lock.

use std::collections::HashMap;
use std::thread::{self, ThreadId};

use slotmap::{SlotMap, new_key_type};
use vramp_alloc::StreamId;

use super::scope::Scope;
use crate::ledger::core::ReservationId;

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
