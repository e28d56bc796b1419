//! Who pays for the allocations of each tracked allocator, beside the ledger and under its lock, so that a
//! charge takes one lock.

use std::collections::HashMap;
use std::thread::{self, ThreadId};

use slotmap::{SlotMap, new_key_type};
use vramp_alloc::StreamId;
use vramp_core::Bytes;

use super::Scope;
use crate::ledger::core::{Charged, ReservationId, SpaceId, SpaceRefusal, Tag, UnreservedError};
use crate::ledger::shell::charge::Payer;
use crate::ledger::shell::shared::Shared;

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
        // The id of the thread costs as much as the rest of a charge.
        if !self.threads.is_empty()
            && let Some(&id) = self.threads.get(&thread::current().id())
        {
            return Some(id);
        }
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
}

/// Why a payer was not charged. Nothing changed.
pub(super) enum ChargeRefused {
    /// The space has no room.
    Space(Box<SpaceRefusal>),
    /// The allocation exceeds the reservation.
    Reservation(ReservationId),
}

impl Shared {
    /// Charges the reservation attached to this thread or to the stream, otherwise the space.
    #[inline]
    pub(super) fn charge_payer(
        &self,
        key: PayersKey,
        space: SpaceId,
        stream: StreamId,
        bytes: Bytes,
    ) -> Result<Payer, ChargeRefused> {
        self.update(|state| {
            if let Some(id) = state.payers.of.get(key).and_then(|of| of.find(stream)) {
                return match state.ledger.charge(id, bytes) {
                    Ok(Charged::Within) => Ok(Payer::Reservation(id)),
                    Ok(Charged::Overrun(_)) | Err(_) => Err(ChargeRefused::Reservation(id)),
                };
            }
            match state.ledger.charge_unreserved(space, bytes, Tag::NONE) {
                Ok(()) => Ok(Payer::Space),
                Err(UnreservedError::Refused(refused)) => Err(ChargeRefused::Space(refused)),
                Err(other) => panic!("the space and the tag are the manager's own: {other}"),
            }
        })
    }
}
