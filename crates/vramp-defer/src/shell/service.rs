//! What spills buffers when memory runs short: handlers of the allocator and its group, the card's space and other
//! cards, the cleaner's thread, and the one that watches for waiting leases.
//!
//! The service ends with the last of the manager's clones, buffers and groups, so a buffer never
//! outlives what makes room for it.

use std::any::Any;
use std::sync::{Arc, Weak};

use crate::planner::{allocation_deficit, other_pool_deficit};
use vramp_alloc::Driver;
use vramp_alloc::observe::Registration;
use vramp_core::{Bytes, Shortage};
use vramp_tiers::reclaim::ReclaimerRegistration;
use vramp_tiers::reserve::ReservationId;
use vramp_tiers::spill::{SpillRequest, SpillerRegistration};
use vramp_tiers::{MemorySpace, Priority};

use super::cleaner::Cleaner;
use super::guests::Guest;
use super::peer_copy::PeerPart;
use super::spill_config::CleanerConfig;
use super::state::Shared;

/// The handlers of one manager; dropping this ends them. It is dropped without the manager's lock,
/// because it waits for handlers in progress.
pub(super) struct Service {
    pub shared: Arc<Shared>,
    registration: Registration,
    /// For requests of the group's other pools, and resumes.
    of_group: Registration,
    guests: Vec<Guest>,
    _spiller: Option<SpillerRegistration>,
    _reclaimer: Option<ReclaimerRegistration>,
    _cleaner: Option<Cleaner>,
    /// Dropped last.
    _kept: Option<Arc<dyn Any + Send + Sync>>,
}

impl Service {
    pub fn start(
        shared: &Arc<Shared>,
        budget: Option<&MemorySpace>,
        peers: &[PeerPart],
        cleaner: Option<CleanerConfig>,
        kept: Option<Arc<dyn Any + Send + Sync>>,
    ) -> Service {
        let guests = peers.iter().map(|peer| Guest::new(shared, peer)).collect();
        let weak = Arc::downgrade(shared);
        let registration = shared.allocator.on_shortage(move |shortage| answer(&weak, shortage));
        let weak = Arc::downgrade(shared);
        let of_group = shared
            .allocator
            .on_shortage_in_group(move |pool, shortage| answer_other(&weak, pool, shortage));
        let spiller = budget.map(|space| {
            let weak = Arc::downgrade(shared);
            space.register_spiller(Priority::default(), move |request: &SpillRequest<'_>| {
                let Some(shared) = Weak::upgrade(&weak) else { return Bytes::ZERO };
                shared.spill_for_space(request.bytes(), &|| request.left())
            })
        });
        let reclaimer = budget.map(|space| {
            let weak = Arc::downgrade(shared);
            space.register_reclaimer(move |reservation: ReservationId, bytes: Bytes| {
                weak.upgrade().map_or(Bytes::ZERO, |shared| shared.reclaim(reservation, bytes))
            })
        });
        let cleaner = cleaner.map(|how| Cleaner::start(shared, how));
        let shared = Arc::clone(shared);
        Service {
            shared,
            registration,
            of_group,
            guests,
            _spiller: spiller,
            _reclaimer: reclaimer,
            _cleaner: cleaner,
            _kept: kept,
        }
    }
}

/// Spills what a request of another pool of the group lacks, or a resume of a region, and returns that
/// memory to the card, of which the other pool creates its own. A driver call before each piece, and what
/// the trim of the pieces costs. It takes no lock that the request or the resume holds.
fn answer_other(shared: &Weak<Shared>, pool: u64, shortage: &Shortage) -> bool {
    let Some(shared) = shared.upgrade() else { return false };
    let allocator = &shared.allocator;
    // Its own requests are answered before, and find the memory in the pool.
    if allocator.number() == pool {
        return false;
    }
    let page = shared.driver.info().limits.page;
    let lacks = || other_pool_deficit(shortage, page, allocator.room());
    let left = || {
        let missing = lacks();
        if missing.is_zero() {
            return missing;
        }
        // A chunk is idle as a whole, so fewer bytes may return. What fails shows in the next line.
        let _ = allocator.trim(allocator.reserved().saturating_sub(missing));
        lacks()
    };
    !shared.spill(lacks().max(page), &left).freed.is_zero()
}

/// Spills what an allocation lacks.
fn answer(shared: &Weak<Shared>, shortage: &Shortage) -> bool {
    let Some(shared) = shared.upgrade() else { return false };
    let page = shared.driver.info().limits.page;
    let deficit = allocation_deficit(shortage, page);
    // While the next piece is copied, freed memory is remapped to where the block will lie.
    let left = || {
        // Only ahead of need: if it fails, the allocation itself reports it.
        let _ = shared.allocator.assemble(shortage);
        deficit
    };
    !shared.spill(deficit, &left).freed.is_zero()
}

impl Drop for Service {
    fn drop(&mut self) {
        self.shared.watcher.end();
        self.guests.clear();
        self.shared.allocator.unregister(self.registration);
        self.shared.allocator.unregister(self.of_group);
    }
}
