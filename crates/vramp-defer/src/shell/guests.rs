//! What makes copies on another card move on when that card needs its memory.

use std::sync::{Arc, Weak};

use crate::planner::{PeerId, allocation_deficit};
use vramp_alloc::observe::Registration;
use vramp_alloc::{Allocator, Driver};
use vramp_core::Bytes;
use vramp_tiers::Priority;
use vramp_tiers::spill::{SpillRequest, SpillerRegistration};

use super::peer_stores::PeerPart;
use super::state::Shared;

/// The calls of one card that make copies there move on, until this is dropped.
pub(super) struct Guest {
    _spiller: SpillerRegistration,
    /// Weak: the other card's allocator may be closed first.
    handler: Option<(Weak<Allocator>, Registration)>,
}

impl Guest {
    pub fn new(shared: &Arc<Shared>, peer: &PeerPart) -> Guest {
        let id = PeerId::new(peer.store.ordinal()).expect("the store was checked");
        let weak = Arc::downgrade(shared);
        let spiller = move |request: &SpillRequest<'_>| {
            let Some(shared) = Weak::upgrade(&weak) else { return Bytes::ZERO };
            shared.give_way(id, request.bytes())
        };
        // Before that card's own data.
        let spiller = peer.store.space().register_spiller(Priority(1), spiller);
        let handler = peer.allocator.as_ref().map(|allocator| {
            let (weak, driver) = (Arc::downgrade(shared), Arc::clone(allocator.driver()));
            let handler = allocator.on_shortage_first(move |shortage| {
                // Below its own limit the card's allocator lacks memory of the card.
                let (None, Some(shared)) = (shortage.limit, weak.upgrade()) else { return false };
                let page = driver.info().limits.page;
                let free = driver.memory_info().map_or(Bytes::ZERO, |info| info.free);
                let lacks = allocation_deficit(shortage, page).saturating_sub(free).max(page);
                !shared.give_way(id, lacks).is_zero()
            });
            (Arc::downgrade(allocator), handler)
        });
        Guest { _spiller: spiller, handler }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        if let Some((allocator, handler)) = self.handler.take()
            && let Some(allocator) = allocator.upgrade()
        {
            allocator.unregister(handler);
        }
    }
}
