//! Regions that sleep by themselves when the card's memory runs short.

use std::sync::{Arc, Weak};

use vramp_alloc::Allocator;
use vramp_alloc::observe::{Registration, Shortage};
use vramp_core::Bytes;

use super::error::RegionError;
use super::region::{Region, State};
use super::set::{PauseOptions, Regions, Shared};
use crate::sync::{Mutex, lock};

impl Regions {
    /// Lets these regions sleep, in this order and only as far as needed, when a request finds no memory:
    /// one of `allocator`, of a region of its card or of any other pool of its group, or a resume of such a
    /// region. [`Allocator::unregister`] ends that. None sleeps for a request that would fail with all of them
    /// asleep.
    ///
    /// A region that slept has to be resumed before it is used. Regions that are being moved, or whose
    /// move or [callback](super::callbacks) fails, are left out, and so is the region whose own request or resume it is. A registration
    /// sees to one shortage at a time: of two regions that are short together one makes the other sleep, and
    /// not both each other.
    ///
    /// A shortage costs one driver call and O(tags), and the pauses.
    ///
    /// # Errors
    /// [`RegionError::Unknown`].
    pub fn on_pressure(
        &self,
        allocator: &Allocator,
        tags: &[&str],
    ) -> Result<Registration, RegionError> {
        let regions: Result<Vec<Arc<Region>>, RegionError> =
            tags.iter().map(|tag| self.shared.find(tag)).collect();
        let pressure = Pressure {
            shared: Arc::downgrade(&self.shared),
            regions: regions?.iter().map(Arc::downgrade).collect(),
            turn: Mutex::default(),
        };
        Ok(allocator.on_shortage_in_group(move |pool, shortage| pressure.relieve(pool, shortage)))
    }
}

/// Regions that sleep under pressure, in that order.
struct Pressure {
    shared: Weak<Shared>,
    regions: Vec<Weak<Region>>,
    /// Held while regions are paused. The holder waits for no move, so no thread that moves a region waits
    /// for itself here.
    turn: Mutex<()>,
}

impl Pressure {
    /// Does what it can about a shortage of the pool with a number. Returns true if the request is to be
    /// retried.
    fn relieve(&self, pool: u64, shortage: &Shortage) -> bool {
        let Some(shared) = self.shared.upgrade() else { return false };
        let known = self.regions.iter().filter_map(Weak::upgrade);
        let regions: Vec<_> = known.filter(|region| shared.has(region)).collect();
        let _turn = lock(&self.turn);
        let is_own = |region: &&Arc<Region>| region.allocator().number() == pool;
        if regions.iter().find(is_own).is_some_and(|own| was_paused(own)) {
            // Another thread's request took the memory. The retry says that the region sleeps.
            return true;
        }
        let others: Vec<_> = regions.iter().filter(|region| !is_own(region)).collect();
        let Some(any) = others.first() else { return false };
        let room = any.allocator().room();
        could_serve(&others, shortage, room) && make_room(&others, &shared, deficit(shortage, room))
    }
}

/// Returns true for a region that sleeps and is not being resumed.
fn was_paused(region: &Region) -> bool {
    region.try_state().is_some_and(|state| matches!(*state, State::Asleep(_)))
}

/// Returns true if the request would be served with all of these regions asleep, while pools can create `room`
/// more. Otherwise they would sleep for nothing.
fn could_serve(regions: &[&Arc<Region>], shortage: &Shortage, room: Bytes) -> bool {
    let asleep: Bytes = regions.iter().map(|region| region.allocator().reserved()).sum();
    shortage.requested <= room + shortage.free + shortage.waiting + asleep
}

/// Returns what a request lacks: what neither the free memory of its pool nor new memory serves.
fn deficit(shortage: &Shortage, room: Bytes) -> Bytes {
    // It failed, so it lacks something: at least one handle.
    shortage.requested.saturating_sub(shortage.largest + room).max(Bytes::new(1))
}

/// Gives up `needed` bytes, as far as there are. Returns true if there were some.
fn make_room(regions: &[&Arc<Region>], shared: &Shared, needed: Bytes) -> bool {
    let (below, mut missing) = (shared.below(), needed);
    for region in regions {
        let before = region.allocator().reserved();
        if missing.is_zero() {
            break;
        }
        if before.is_zero() {
            continue;
        }
        // The move of one that is being resumed may be what finds no memory.
        if region.try_state().is_none() {
            continue;
        }
        let Some(leaving) = shared.callbacks.before_at_once(region) else { continue };
        let keep = before.saturating_sub(missing);
        let options = PauseOptions { keep, ..PauseOptions::default() };
        let paused = region.pause_at_once(&below, options);
        let _ = leaving.end(paused.unwrap_or(Ok(())));
        missing = missing.saturating_sub(before.saturating_sub(region.allocator().reserved()));
    }
    missing < needed
}
