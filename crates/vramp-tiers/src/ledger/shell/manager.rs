//! The reservation manager: all spaces of a program.

use std::sync::Arc;

use crate::ledger::core::{
    Bound, Ledger, LedgerError, Links, SpaceConfig, SpaceId, Strategy, Tag, Tier,
};
use vramp_core::{Bytes, Inconsistency};

use crate::ledger::shell::manager_config::ManagerConfig;
use crate::ledger::shell::shared::{self, Shared};
use crate::ledger::shell::space::MemorySpace;
use crate::ledger::shell::wait::RequestBuilder;

/// Makes reservations in all spaces of a program. Clones are handles of one manager. Dropping the
/// last one shuts it down. Reservations may outlive it.
#[derive(Clone)]
pub struct ReservationManager {
    handle: Arc<Handle>,
}

/// Shuts the manager down when the last clone goes.
struct Handle {
    shared: Arc<Shared>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.shared.shutdown();
    }
}

impl ReservationManager {
    /// Returns a manager of these spaces.
    ///
    /// # Errors
    /// There is no space, a space occurs twice, or its levels are invalid.
    pub fn new(
        spaces: impl IntoIterator<Item = (SpaceId, SpaceConfig)>,
    ) -> Result<ReservationManager, LedgerError> {
        ReservationManager::with_config(spaces, ManagerConfig::default())
    }

    /// Returns a manager of these spaces with a configuration.
    ///
    /// # Errors
    /// As [`new`](ReservationManager::new).
    pub fn with_config(
        spaces: impl IntoIterator<Item = (SpaceId, SpaceConfig)>,
        config: ManagerConfig,
    ) -> Result<ReservationManager, LedgerError> {
        let ledger = Ledger::new(spaces)?;
        let shared = Shared::new(ledger, config);
        Ok(ReservationManager { handle: Arc::new(Handle { shared: Arc::new(shared) }) })
    }

    /// Begins a request for `bytes` in a space of the strategy's choice. Finish it with `now`,
    /// `wait` or `up_to`.
    #[inline]
    pub fn request(&self, strategy: Strategy, bytes: Bytes) -> RequestBuilder<'_> {
        RequestBuilder::new(&self.handle.shared, strategy, bytes)
    }

    /// Returns a space; `None` if the manager does not have it.
    pub fn space(&self, id: SpaceId) -> Option<MemorySpace> {
        let shared = &self.handle.shared;
        let known = shared.spaces.contains(&id);
        known.then(|| MemorySpace { shared: Arc::clone(shared), id })
    }

    /// All spaces, the fastest tier first.
    pub fn spaces(&self) -> impl Iterator<Item = MemorySpace> {
        let space = |&id| MemorySpace { shared: Arc::clone(&self.handle.shared), id };
        self.handle.shared.spaces.iter().map(space)
    }

    /// Returns the bytes that can be reserved now, in all spaces or in one tier.
    pub fn available(&self, tier: Option<Tier>) -> Bytes {
        self.available_to(tier, Bound::Limit)
    }

    /// Returns the bytes that are free now below a bound, in all spaces or in one tier.
    pub fn available_to(&self, tier: Option<Tier>, bound: Bound) -> Bytes {
        self.sum(tier, |ledger, space| ledger.available(space, bound).unwrap_or_default())
    }

    /// Returns the reserved bytes, in all spaces or in one tier.
    pub fn total_reserved(&self, tier: Option<Tier>) -> Bytes {
        self.sum(tier, |ledger, space| {
            ledger.census(space).map(|census| census.reserved).unwrap_or_default()
        })
    }

    /// Returns the number of reservations, in all spaces or in one tier.
    pub fn active_reservations(&self, tier: Option<Tier>) -> usize {
        let state = self.handle.shared.read();
        let counts = self.of_tier(tier).filter_map(|space| state.ledger.census(space).ok());
        counts.map(|census| census.reservations).sum()
    }

    fn sum(&self, tier: Option<Tier>, amount: impl Fn(&Ledger, SpaceId) -> Bytes) -> Bytes {
        let state = self.handle.shared.read();
        self.of_tier(tier).map(|space| amount(&state.ledger, space)).sum()
    }

    fn of_tier(&self, tier: Option<Tier>) -> impl Iterator<Item = SpaceId> {
        let spaces = self.handle.shared.spaces.iter().copied();
        spaces.filter(move |space| tier.is_none_or(|tier| space.tier == tier))
    }

    /// Returns the transfer rates between spaces by which strategies choose; none at first.
    pub fn links(&self) -> Links {
        self.handle.shared.links().clone()
    }

    /// Sets the transfer rates between spaces. From the next request on, strategies order equal
    /// spaces by the rate of the link from their start, or from
    /// [`nearest_to`](RequestBuilder::nearest_to).
    pub fn set_links(&self, links: Links) {
        self.handle.shared.set_links(links);
    }

    /// Returns the number of waiting requests.
    pub fn waiting(&self) -> usize {
        self.handle.shared.read().queue.len()
    }

    /// Returns the tag of this name, for requests. Equal names have equal tags.
    pub fn add_tag(&self, name: &str) -> Tag {
        self.handle.shared.update(|state| state.ledger.add_tag(name))
    }

    /// Ends one wait of each deadlock with
    /// [`ReserveError::Deadlock`](crate::ReserveError::Deadlock), or serves a waiter out of order
    /// where only the order blocks it. Returns the number of deadlocks.
    pub fn break_deadlocks(&self) -> usize {
        self.handle.shared.update(shared::break_deadlocks)
    }

    /// Ends every wait with [`ReserveError::ShutDown`](crate::ReserveError::ShutDown). From now on
    /// a request is served at once or fails.
    pub fn shutdown(&self) {
        self.handle.shared.shutdown();
    }

    /// Returns the number of panics in callbacks, spillers and policies. Each was taken for a
    /// refusal.
    pub fn panics(&self) -> u64 {
        self.handle.shared.panics.count()
    }

    /// Checks every sum of the ledger, and that each waiter can be woken. O(reservations times
    /// spaces).
    ///
    /// # Errors
    /// The first invariant that does not hold: a bug in this crate, never a caller's mistake.
    pub fn audit(&self) -> Result<(), Inconsistency> {
        self.handle.shared.audit()
    }
}

impl std::fmt::Debug for ReservationManager {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.spaces()).finish()
    }
}
