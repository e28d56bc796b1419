//! What spills buffers when memory runs short: handlers of the allocator and its group, the card's space and other
//! cards, the cleaner's thread, and the one that watches for waiting leases.
//!
//! The service ends with the last of the manager's clones, buffers and groups, so a buffer never
//! outlives what makes room for it.

use std::any::Any;
use std::sync::{Arc, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use super::peer_stores::PeerPart;
use super::pool_request::PoolRequest;
use super::relieve::Guest;
use super::spill_config::CleanerConfig;
use super::state::Shared;
use crate::sync::{Condvar, Mutex, lock};
use vramp_alloc::observe::{Registration, Reliever};
use vramp_core::Bytes;
use vramp_tiers::reclaim::ReclaimerRegistration;
use vramp_tiers::reserve::ReservationId;
use vramp_tiers::spill::{SpillRequest, SpillerRegistration};
use vramp_tiers::{MemorySpace, Priority};

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
        let registration = shared.allocator.relieve_shortages(move |request| {
            Box::new(PoolRequest::begin(&weak, request)) as Box<dyn Reliever>
        });
        let weak = Arc::downgrade(shared);
        let own = shared.allocator.number();
        let of_group = shared.allocator.relieve_shortages_in_group(move |request| {
            // Its own requests are answered before, and find the memory in the pool.
            let is_other = request.pool != own;
            is_other.then(|| Box::new(PoolRequest::begin(&weak, request)) as Box<dyn Reliever>)
        });
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

impl Drop for Service {
    fn drop(&mut self) {
        self.shared.watcher.end();
        self.guests.clear();
        self.shared.allocator.unregister(self.registration);
        self.shared.allocator.unregister(self.of_group);
    }
}

/// Shortest period: a thread that never sleeps would keep the lock from others.
const SHORTEST: Duration = Duration::from_micros(100);

type Bell = Arc<(Mutex<bool>, Condvar)>;

/// The cleaner's thread; dropping this ends it.
pub(super) struct Cleaner {
    bell: Bell,
    thread: Option<JoinHandle<()>>,
}

impl Cleaner {
    pub fn start(shared: &Arc<Shared>, how: CleanerConfig) -> Cleaner {
        let bell = Bell::default();
        let (ring, weak) = (Arc::clone(&bell), Arc::downgrade(shared));
        let builder = std::thread::Builder::new().name("vramp-cleaner".to_owned());
        // Without a thread nothing is copied ahead of need. All else works.
        let thread = builder.spawn(move || work(&ring, &weak, how)).ok();
        Cleaner { bell, thread }
    }
}

fn work((ended, rung): &(Mutex<bool>, Condvar), shared: &Weak<Shared>, how: CleanerConfig) {
    loop {
        let mut over = lock(ended);
        if !*over {
            // A spurious wake-up does no harm.
            let waited = rung.wait_timeout(over, how.every.max(SHORTEST));
            over = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        if *over {
            return;
        }
        drop(over);
        let Some(shared) = shared.upgrade() else { return };
        let capacity = shared.capacity();
        let is_above = shared.lock().core.is_above(capacity, how.above);
        if is_above {
            shared.clean(how.budget);
        }
    }
}

impl Drop for Cleaner {
    fn drop(&mut self) {
        *lock(&self.bell.0) = true;
        self.bell.1.notify_one();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
