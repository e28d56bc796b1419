//! The stores on other cards, and the streams of copies there and back.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::planner::{PeerId, PeerTable};
use vramp_alloc::{Allocator, Driver};
use vramp_core::Bytes;
use vramp_tiers::peer::PeerStore;

use super::events::LeaseStream;
use super::spill_error::SpillError;

/// Another card, whose free memory holds copies.
#[derive(Clone)]
pub struct PeerPart {
    /// Store on that card, through the device of this manager.
    pub store: PeerStore,
    /// Allocator of that card. When the card runs short of memory for it, copies there move on.
    pub allocator: Option<Arc<Allocator>>,
}

/// Streams of copies in one direction.
struct Lanes {
    streams: [LeaseStream; 2],
    next: AtomicUsize,
}

impl Lanes {
    fn new(allocator: &Allocator) -> Result<Lanes, SpillError> {
        let first = LeaseStream::create(allocator)?;
        let second = LeaseStream::create(allocator).inspect_err(|_| {
            // The first error is returned.
            let _ = allocator.destroy_stream(first.id);
        })?;
        Ok(Lanes { streams: [first, second], next: AtomicUsize::new(0) })
    }

    /// Returns the stream whose turn it is.
    fn next(&self) -> LeaseStream {
        self.streams[self.next.fetch_add(1, Ordering::Relaxed) % 2]
    }
}

/// The stores on other cards, and the streams of copies there and back.
pub(super) struct Peers {
    stores: BTreeMap<PeerId, PeerStore>,
    /// Out and back; `None` without stores.
    lanes: Option<[Lanes; 2]>,
}

impl Peers {
    pub fn new(
        allocator: &Allocator,
        driver: &Arc<dyn Driver>,
        stores: Vec<PeerStore>,
    ) -> Result<Peers, SpillError> {
        let mut by_id = BTreeMap::new();
        for store in stores {
            if !Arc::ptr_eq(store.driver(), driver) {
                return Err(SpillError::Settings("a store on a peer is of another device"));
            }
            let id = PeerId::new(store.ordinal()).ok_or(SpillError::Settings(
                "only cards with the ordinals 0 to 15 can hold copies of others",
            ))?;
            if by_id.insert(id, store).is_some() {
                return Err(SpillError::Settings("there are two stores on one peer"));
            }
        }
        let lanes = match by_id.is_empty() {
            true => None,
            false => {
                let out = Lanes::new(allocator)?;
                let back = Lanes::new(allocator).inspect_err(|_| {
                    for own in out.streams {
                        // The first error is returned.
                        let _ = allocator.destroy_stream(own.id);
                    }
                })?;
                Some([out, back])
            }
        };
        Ok(Peers { stores: by_id, lanes })
    }

    /// Returns the store on a card.
    pub fn store(&self, peer: PeerId) -> Option<&PeerStore> {
        self.stores.get(&peer)
    }

    /// Returns all stores, by ordinal.
    pub fn stores(&self) -> impl Iterator<Item = (PeerId, &PeerStore)> {
        self.stores.iter().map(|(&peer, store)| (peer, store))
    }

    /// Returns the room on each card.
    pub fn room(&self) -> PeerTable<Bytes> {
        let mut room = PeerTable::default();
        self.stores().for_each(|(peer, store)| room[peer] = store.room());
        room
    }

    pub fn streams(&self) -> impl Iterator<Item = LeaseStream> {
        self.lanes.iter().flatten().flat_map(|lanes| lanes.streams)
    }

    pub fn out(&self) -> LeaseStream {
        self.lanes.as_ref().expect(STORE)[0].next()
    }

    pub fn back(&self) -> LeaseStream {
        self.lanes.as_ref().expect(STORE)[1].next()
    }
}

pub(super) const STORE: &str = "only cards with a store have room";
