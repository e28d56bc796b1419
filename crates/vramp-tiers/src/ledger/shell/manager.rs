//! All spaces of a program behind one lock, and the first things to ask of them.

use std::sync::Arc;
use std::time::Duration;

use crate::ledger::core::{
    Bound, Ledger, LedgerError, Links, QueueConfig, SpaceConfig, SpaceId, Strategy, Tag, Tier,
};
use vramp_core::{Bytes, Inconsistency};

use crate::ledger::shell::retry::RetryPolicy;
use crate::ledger::shell::shared::{self, Shared};
use crate::ledger::shell::space::MemorySpace;
use crate::ledger::shell::wait::RequestBuilder;

/// When a manager looks for waiters that can never be served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeadlockCheck {
    /// When somebody begins to wait.
    OnWait {
        /// Not at once, if it takes more steps than this: a check takes up to
        /// `waiters * (waiters + reservations)`, a few nanoseconds each.
        steps: usize,
        /// Then after this time, if the request still waits; at most a twentieth of the time goes
        /// to such checks.
        later: Duration,
    },
    /// Only in [`ReservationManager::break_deadlocks`].
    OnDemand,
}

impl Default for DeadlockCheck {
    /// At once up to 64 Ki steps, else after 100 ms.
    fn default() -> DeadlockCheck {
        DeadlockCheck::OnWait { steps: 1 << 16, later: Duration::from_millis(100) }
    }
}

/// How a manager decides who is next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ManagerConfig {
    /// How fair the queue is.
    pub queue: QueueConfig,
    /// When deadlocks are looked for.
    pub deadlock: DeadlockCheck,
    /// How often and how fast one who waits asks spillers again.
    pub spill: RetryPolicy,
}

/// Gives reservations in all spaces of a program. Clones are the same manager; when the last one
/// goes it is shut down. Reservations may outlive it.
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
    /// A manager of these spaces, with nothing reserved.
    ///
    /// # Errors
    /// No space, one twice, or levels that make no sense.
    pub fn new(
        spaces: impl IntoIterator<Item = (SpaceId, SpaceConfig)>,
    ) -> Result<ReservationManager, LedgerError> {
        ReservationManager::with_config(spaces, ManagerConfig::default())
    }

    /// The same, with another order or other checks.
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

    /// Asks for `bytes` in a space of the strategy's choice. Nothing happens before one of the
    /// builder's last words: `now`, `wait` or `up_to`.
    #[inline]
    pub fn request(&self, strategy: Strategy, bytes: Bytes) -> RequestBuilder<'_> {
        RequestBuilder::new(&self.handle.shared, strategy, bytes)
    }

    /// A space. `None` if the manager has no such one.
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

    /// The spaces of one tier, by index.
    pub fn spaces_in(&self, tier: Tier) -> impl Iterator<Item = MemorySpace> {
        self.spaces().filter(move |space| space.id().tier == tier)
    }

    /// What can be reserved now, in all spaces or in those of one tier.
    pub fn available(&self, tier: Option<Tier>) -> Bytes {
        self.sum(tier, |ledger, space| ledger.available(space, Bound::Limit).unwrap_or_default())
    }

    /// What is reserved, in all spaces or in those of one tier.
    pub fn total_reserved(&self, tier: Option<Tier>) -> Bytes {
        self.sum(tier, |ledger, space| {
            ledger.census(space).map(|census| census.reserved).unwrap_or_default()
        })
    }

    /// How many reservations there are, in all spaces or in those of one tier.
    pub fn active_reservations(&self, tier: Option<Tier>) -> usize {
        let state = self.handle.shared.look();
        let counts = self.of_tier(tier).filter_map(|space| state.ledger.census(space).ok());
        counts.map(|census| census.reservations).sum()
    }

    fn sum(&self, tier: Option<Tier>, amount: impl Fn(&Ledger, SpaceId) -> Bytes) -> Bytes {
        let state = self.handle.shared.look();
        self.of_tier(tier).map(|space| amount(&state.ledger, space)).sum()
    }

    fn of_tier(&self, tier: Option<Tier>) -> impl Iterator<Item = SpaceId> {
        let spaces = self.handle.shared.spaces.iter().copied();
        spaces.filter(move |space| tier.is_none_or(|tier| space.tier == tier))
    }

    /// The rates between spaces that strategies know of; none at first.
    pub fn links(&self) -> Links {
        self.handle.shared.links().clone()
    }

    /// Tells the rates between spaces, as measured: from the next request on, strategies take the
    /// fastest of their equals first, as seen from the space that they start from or from
    /// [`nearest_to`](RequestBuilder::nearest_to).
    pub fn set_links(&self, links: Links) {
        self.handle.shared.set_links(links);
    }

    /// How many requests wait.
    pub fn waiting(&self) -> usize {
        self.handle.shared.look().queue.len()
    }

    /// The tag of this name, for requests; the same one for the same name.
    pub fn add_tag(&self, name: &str) -> Tag {
        self.handle.shared.act(|state| state.ledger.add_tag(name))
    }

    /// Looks for waiters that can never be served and ends one wait for each deadlock, with
    /// [`ReserveError::Deadlock`](crate::ReserveError::Deadlock), or lets one pass where only the
    /// order is in the way. Returns how many deadlocks there were.
    pub fn break_deadlocks(&self) -> usize {
        self.handle.shared.act(shared::break_deadlocks)
    }

    /// Ends every wait with [`ReserveError::ShutDown`](crate::ReserveError::ShutDown) and lets
    /// nobody wait from now on. What fits at once is still given.
    pub fn shutdown(&self) {
        self.handle.shared.shutdown();
    }

    /// How many callbacks and policies have panicked. Each was taken for one that says no.
    pub fn panics(&self) -> u64 {
        self.handle.shared.panics()
    }

    /// Checks every sum and that all who wait can be woken. O(reservations times spaces).
    ///
    /// # Errors
    /// One that does not hold: a bug in this crate, never a user's mistake.
    pub fn audit(&self) -> Result<(), Inconsistency> {
        self.handle.shared.audit()
    }
}

impl std::fmt::Debug for ReservationManager {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.spaces()).finish()
    }
}
