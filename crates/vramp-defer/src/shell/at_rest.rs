//! Leases without a deadline for which memory can never become free.
//!
//! A lease that lacks memory waits until some is free. If all buffers are idle and no tier has room for
//! more of them, no thread will free any. A lease with a deadline then waits until it: a thread may
//! drop or discard a buffer meanwhile. One without a deadline is refused:
//!
//! 1. An attempt failed, and the manager is [at rest](Shared::at_rest). The request is stalled, and
//!    tried once more: memory may have become free since the attempt looked for it.
//! 2. The second attempt failed, the manager is at rest, and nothing changed in between: the request
//!    is refused with [`SpillError::NothingCanLeave`](super::spill_error::SpillError::NothingCanLeave).
//! 3. While a request waits in the queue of the card's space, the watching thread looks for rest, and
//!    ends that wait for the two attempts.
//!
//! What allocations of the allocator hold on a card counts as there to stay, as it does in the capacity
//! of leases. What others hold in the spaces of the host, the disk and the card's budget counts as
//! memory that comes back.
//!
//! Growth: a look is O(leases) while a lease or a move is left, else O(buffers + copies). There is one
//! for each attempt without a deadline that failed, and one for each look of the watching thread while
//! such a request waits for the budget.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use vramp_core::Bytes;
use vramp_tiers::reserve::CancelToken;

use super::hand_over::{EndlessWait, SeenRoom};
use super::state::{Shared, SpilledCopies, State};
use crate::planner::HolderKey;

impl Shared {
    /// Returns the number of changes so far if no memory can become free without a call of the program
    /// that drops or discards a buffer: all is idle, but for leases of `holders`.
    pub fn at_rest(&self, holders: &[HolderKey]) -> Option<u64> {
        if self.allocator.any_captures().unwrap_or(true) {
            return None;
        }
        let mut state = self.lock();
        // Work that cannot be queried counts as in flight.
        let _ = state.poll();
        let is_at_rest = state.is_idle(holders) && !self.others_hold_memory(&state);
        is_at_rest.then_some(state.changes)
    }

    /// Returns true if others hold memory in the spaces of host, disk or budget.
    fn others_hold_memory(&self, state: &State) -> bool {
        let returnable = state.account.returnable();
        if self.budget.as_ref().is_some_and(|space| space.total() > returnable) {
            return true;
        }
        let copies = || state.copies.values();
        let disk: Bytes = copies().map(SpilledCopies::charged_disk).sum();
        if self.disk.as_ref().is_some_and(|store| store.space().total() > disk) {
            return true;
        }
        let readable = state.readable.as_ref();
        let host = copies().map(SpilledCopies::charged_host).sum::<Bytes>()
            + readable.map(|readable| readable.charged()).unwrap_or_default();
        self.mover.pool().space().total() > host
    }

    /// Wakes requests in the queue of the card's space: to spill again if host or disk have more room
    /// than before, and to be refused if the manager is at rest.
    pub(super) fn watch_budget_waiters(&self) {
        if !self.has_starving_waiters() && self.lock().endless_waits.is_empty() {
            return;
        }
        let room = self.room_below();
        let now = SeenRoom { host: room.host, disk: room.disk };
        let seen = std::mem::replace(&mut self.lock().seen_room, now);
        if now.host > seen.host || now.disk > seen.disk {
            self.notify_spillable();
        }
        let captures = self.allocator.any_captures().unwrap_or(true);
        let mut state = self.lock();
        state.endless_waits.retain(|wait| wait.strong_count() > 0);
        let waits = state.endless_waits.iter().filter_map(Weak::upgrade);
        let waits = waits.filter(|wait| !captures && state.is_idle(&wait.holders));
        let mut stuck: Vec<CancelToken> = waits.map(|wait| wait.token.clone()).collect();
        if !stuck.is_empty() && self.others_hold_memory(&state) {
            stuck.clear();
        }
        drop(state);
        stuck.iter().for_each(CancelToken::cancel);
    }

    /// Returns true if a request waits in the queue of the card's space for memory that could not leave.
    pub(super) fn has_starving_waiters(&self) -> bool {
        self.starves.load(Ordering::Relaxed)
            && self.budget.as_ref().is_some_and(|space| space.has_waiters())
    }
}

impl State {
    fn is_idle(&self, holders: &[HolderKey]) -> bool {
        self.staged_transfers == 0
            && self.deferred_ends.is_empty()
            && self.pending_release.is_empty()
            && self.mapping_now.is_empty()
            && self.retired_peers.is_empty()
            && self.core.are_all_idle(holders)
    }

    /// Adds a request that waits in the queue of the card's space, until it is dropped.
    pub fn add_endless_wait(&mut self, wait: &Arc<EndlessWait>) {
        self.endless_waits.push(Arc::downgrade(wait));
    }

    /// Records that memory or room may have become free, and retries the oldest stalled waiter.
    pub fn note_freed(&mut self) {
        self.changes += 1;
        self.core.retry_stalled();
    }
}
