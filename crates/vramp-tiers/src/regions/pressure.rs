//! Regions that sleep by themselves when the card's memory runs short.

use std::sync::{Arc, Weak};

use vramp_alloc::Allocator;
use vramp_alloc::observe::{Registration, Shortage};
use vramp_core::Bytes;

use super::error::RegionError;
use super::region::Region;
use super::set::{PauseOptions, Regions, Shared};

impl Regions {
    /// Lets these regions sleep, in this order and only as far as needed, when a request of `allocator`
    /// finds no memory. [`Allocator::unregister`] ends that.
    ///
    /// A region that slept has to be resumed before it is used. Regions that are being moved, or whose
    /// move fails, are left out.
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
        let regions: Vec<Weak<Region>> = regions?.iter().map(Arc::downgrade).collect();
        let shared = Arc::downgrade(&self.shared);
        Ok(allocator.on_shortage(move |shortage| {
            shared
                .upgrade()
                .is_some_and(|shared| make_room(&shared, &regions, deficit(&shared, shortage)))
        }))
    }
}

/// Returns what a request lacks: what neither the free memory of its pool nor that of the card serves.
/// One driver call.
fn deficit(shared: &Shared, shortage: &Shortage) -> Bytes {
    let on_card =
        shared.below().mover.driver().memory_info().map_or(Bytes::ZERO, |memory| memory.free);
    let free = match shortage.limit {
        // How much of the limit is left is not known here.
        Some(_) => shortage.largest,
        None => shortage.largest + on_card,
    };
    // It failed, so it lacks something: at least one handle.
    shortage.requested.saturating_sub(free).max(Bytes::new(1))
}

/// Gives up `needed` bytes, as far as there are. Returns true if there were some.
fn make_room(shared: &Shared, regions: &[Weak<Region>], needed: Bytes) -> bool {
    let (mut missing, below) = (needed, shared.below());
    for region in regions.iter().filter_map(Weak::upgrade) {
        let before = region.allocator().reserved();
        if missing.is_zero() {
            break;
        }
        if before.is_zero() {
            continue;
        }
        // The move of one that is being resumed may be what finds no memory.
        let keep = before.saturating_sub(missing);
        let options = PauseOptions { keep, ..PauseOptions::default() };
        let _ = region.pause_at_once(&below, options);
        missing = missing.saturating_sub(before.saturating_sub(region.allocator().reserved()));
    }
    missing < needed
}
