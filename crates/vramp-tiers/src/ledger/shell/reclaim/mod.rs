//! Reclaiming: memory that a reservation paid for and that an allocation of its owner needs back.
//!
//! A cache, such as idle deferrable buffers, may stay charged to the reservation that paid for its
//! use. When an allocation exceeds that reservation, the space's [`Reclaimer`]s are called before its
//! [`LimitRule`](crate::reserve::LimitRule) decides, and the allocation is charged again.

mod reclaimer;

use std::sync::{Arc, Weak};

use crate::ledger::core::{ReservationId, SpaceId};
use vramp_core::Bytes;

use crate::ledger::shell::shared::Shared;
pub use reclaimer::Reclaimer;
pub(crate) use reclaimer::RegisteredReclaimer;

/// Keeps a reclaimer registered until it is dropped. A call in progress ends by itself.
#[must_use = "the reclaimer is not called any more once this is dropped"]
pub struct ReclaimerRegistration {
    shared: Weak<Shared>,
    registered: Arc<RegisteredReclaimer>,
}

impl Drop for ReclaimerRegistration {
    fn drop(&mut self) {
        if let Some(shared) = self.shared.upgrade() {
            let is_it = |other: &Arc<RegisteredReclaimer>| Arc::ptr_eq(other, &self.registered);
            shared.update(|state| state.reclaimers.retain(|other| !is_it(other)));
        }
    }
}

impl std::fmt::Debug for ReclaimerRegistration {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "reclaimer of {}", self.registered.space)
    }
}

impl Shared {
    pub fn register_reclaimer(
        self: &Arc<Shared>,
        space: SpaceId,
        reclaimer: Box<dyn Reclaimer>,
    ) -> ReclaimerRegistration {
        let registered = Arc::new(RegisteredReclaimer { space, reclaimer });
        self.update(|state| state.reclaimers.push(Arc::clone(&registered)));
        ReclaimerRegistration { shared: Arc::downgrade(self), registered }
    }

    /// Has `bytes` of a reservation's memory credited. Returns the bytes credited.
    pub fn reclaim(&self, space: SpaceId, reservation: ReservationId, bytes: Bytes) -> Bytes {
        let of_space: Vec<Arc<RegisteredReclaimer>> = {
            let state = self.read();
            let known = state.reclaimers.iter().filter(|known| known.space == space);
            known.map(Arc::clone).collect()
        };
        let mut credited = Bytes::ZERO;
        for registered in of_space {
            let left = bytes.saturating_sub(credited);
            if left.is_zero() {
                break;
            }
            let call = || registered.reclaimer.reclaim(reservation, left);
            let now = self.panics.catch(call).unwrap_or_default();
            credited = credited.checked_add(now).unwrap_or(Bytes::new(u64::MAX));
        }
        credited
    }
}
