//! Cancelling the waits for leases: before a program ends what they wait for.
//!
//! 1. [`SpillManager::cancel_waits`] ends each wait in the queue of leases and in the queue of the space.
//! 2. A request that would have to wait fails at once until [`SpillManager::allow_waits`]. One that can be
//!    granted is.
//!
//! O(n log n) in the number of waiters, which are all woken once.

use std::sync::Weak;

use vramp_tiers::CancelToken;

use super::manager::SpillManager;
use super::state::Shared;
use crate::sync::lock;

impl SpillManager {
    /// Ends all waits for leases with [`SpillError::Cancelled`](super::SpillError::Cancelled), and those
    /// that begin until [`allow_waits`](SpillManager::allow_waits). A lease that is being restored is not
    /// ended. Nothing is lost: the contents stay where they are.
    pub fn cancel_waits(&self) {
        let mut guard = self.shared.lock();
        let state = &mut *guard;
        state.waiting.cancel(&mut state.core);
        drop(guard);
        self.shared.budget_waits().cancel();
        let endless = std::mem::take(&mut self.shared.lock().endless_waits);
        endless.iter().filter_map(Weak::upgrade).for_each(|wait| wait.token.cancel());
    }

    /// Lets requests wait again.
    pub fn allow_waits(&self) {
        *lock(&self.shared.budget_waits) = CancelToken::new();
        self.shared.lock().waiting.is_cancelled = false;
    }
}

impl Shared {
    /// Returns the token of the waits in the space's queue.
    pub(super) fn budget_waits(&self) -> CancelToken {
        lock(&self.budget_waits).clone()
    }
}
