//! Spilling: moving data out of a space while a request waits for its memory.
//!
//! 1. A program that holds data which may leave a space registers a [`Spiller`] there
//!    ([`MemorySpace::register_spiller`](crate::MemorySpace::register_spiller)).
//! 2. A request that has to wait claims the missing bytes in each of its candidates in turn, and
//!    calls the spillers there in its own thread, with no lock held. Bytes that other waiters have
//!    claimed are no part of its claim, so no deficit is spilled twice.
//! 3. Bytes that a spiller frees serve waiters at once. After each call the claim is what is still
//!    missing; at zero the waiter stops.
//! 4. If bytes are still missing, it tries again after pauses, as [`RetryPolicy`] says. Then it
//!    only waits. [`SpillerRegistration::notify_spillable`] starts the attempts anew.
//!
//! A spiller may reserve memory where its data goes, which may call spillers there in turn. In the
//! space that it empties it cannot wait: each thread records the spaces that it is spilling, and a
//! wait for these alone is an error. So spilling nests no deeper than there are spaces.

mod attempts;
mod handler;
mod spiller;

use std::cell::RefCell;
use std::sync::{Arc, Weak};

use crate::ledger::core::SpaceId;
use smallvec::SmallVec;
use vramp_core::Bytes;

pub use crate::ledger::core::Priority;
pub use crate::ledger::shell::manager_config::RetryPolicy;

use crate::ledger::shell::shared::{Shared, State};
use crate::sync::thread_local;
pub(crate) use attempts::SpillAttempts;
pub use handler::SpillAndRetry;
pub(crate) use spiller::Registered;
pub use spiller::{SpillRequest, Spiller};

/// When spillers are called for a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Spilling {
    /// Never: the request takes free memory only.
    Never,
    /// When the request has to wait.
    #[default]
    BeforeWaiting,
    /// Also for a request that does not wait: [`now`](crate::RequestBuilder::now) then calls each
    /// spiller once.
    AlsoNow,
}

type Spillers = SmallVec<[Arc<Registered>; 4]>;

/// Keeps a spiller registered until it is dropped. A call in progress ends by itself.
#[must_use = "the spiller is not called any more once this is dropped"]
pub struct SpillerRegistration {
    shared: Weak<Shared>,
    registered: Arc<Registered>,
}

impl SpillerRegistration {
    /// Says that more can be spilled than at the last call: waiters of the space try again.
    /// O(waiters).
    pub fn notify_spillable(&self) {
        if let Some(shared) = self.shared.upgrade() {
            shared.notify_spillable(self.registered.space);
        }
    }
}

impl Drop for SpillerRegistration {
    fn drop(&mut self) {
        if let Some(shared) = self.shared.upgrade() {
            let is_it = |other: &Arc<Registered>| Arc::ptr_eq(other, &self.registered);
            shared.update(|state| state.spillers.retain(|other| !is_it(other)));
        }
    }
}

impl std::fmt::Debug for SpillerRegistration {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Registered { space, priority, .. } = *self.registered;
        write!(f, "spiller of {space} with priority {}", priority.0)
    }
}

thread_local! {
    /// Spaces that this thread is spilling, each with the address of its manager.
    static SPILLING: RefCell<Vec<(usize, SpaceId)>> = RefCell::default();
}

fn is_spilling(shared: &Shared, space: SpaceId) -> bool {
    let entry = (std::ptr::from_ref(shared).addr(), space);
    SPILLING.with(|spaces| spaces.borrow().contains(&entry))
}

/// True if this thread is spilling every one of these spaces: then no spiller is called for it.
pub(crate) fn is_spilling_all(shared: &Shared, spaces: &[SpaceId]) -> bool {
    spaces.iter().all(|&space| is_spilling(shared, space))
}

/// Calls a spiller. Meanwhile this thread does not spill the same space again.
fn call(shared: &Shared, registered: &Registered, request: &SpillRequest<'_>) -> Bytes {
    SPILLING.with(|spaces| {
        spaces.borrow_mut().push((std::ptr::from_ref(shared).addr(), request.space));
    });
    let freed = shared.panics.catch(|| registered.spiller.spill(request));
    SPILLING.with(|spaces| spaces.borrow_mut().pop());
    freed.unwrap_or_default()
}

impl State {
    /// Returns the spillers of a space, the highest priority first.
    fn spillers_of(&self, space: SpaceId) -> Spillers {
        self.spillers.iter().filter(|known| known.space == space).map(Arc::clone).collect()
    }
}

impl Shared {
    pub fn register_spiller(
        self: &Arc<Shared>,
        space: SpaceId,
        priority: Priority,
        spiller: Box<dyn Spiller>,
    ) -> SpillerRegistration {
        let registered = Arc::new(Registered { space, priority, spiller });
        self.update(|state| {
            let place = state.spillers.partition_point(|known| known.priority >= priority);
            state.spillers.insert(place, Arc::clone(&registered));
        });
        self.notify_spillable(space);
        SpillerRegistration { shared: Arc::downgrade(self), registered }
    }

    /// Wakes the waiters of a space to try spilling again.
    fn notify_spillable(&self, space: SpaceId) {
        let slots = self.update(|state| state.slots_waiting_for(space));
        slots.iter().for_each(|slot| slot.notify());
    }

    /// Spills on demand. Returns the freed bytes.
    pub fn spill(&self, space: SpaceId, bytes: Bytes) -> Bytes {
        let mut spilled = Bytes::ZERO;
        if is_spilling(self, space) {
            return spilled;
        }
        for registered in self.update(|state| state.spillers_of(space)) {
            let left = bytes.saturating_sub(spilled);
            if left.is_zero() {
                break;
            }
            let request = SpillRequest { space, bytes: left, attempt: 1, left: None };
            let freed = call(self, &registered, &request);
            spilled = spilled.checked_add(freed).unwrap_or(Bytes::new(u64::MAX));
        }
        spilled
    }
}
