//! A request of the pool that found no memory: what it lacks is spilled, and no lease takes it meanwhile.
//!
//! 1. The request enters the queue of leases, where it has a turn as they do: a lease that came before goes
//!    first, and one that comes later and would take what leaves waits for the end of the request
//!    (`core/wait_queue/pool_request.rs`).
//! 2. What it lacks is spilled, and the pool looks for the memory again.
//! 3. If that found too little, because an older lease took some or the free memory has the wrong place, it
//!    goes on with step 2. It ends when the request has its memory, or nothing more leaves.
//!
//! The memory of a lease is not requested so: the planner grants leases for no more than the card has, so what
//! one takes from another can be spilled again.
//!
//! Growth, for n requests and m leases at once: a request is tried again at most once for each lease that was
//! granted before it, each request that took what it had freed, and each spill that it waited for, and 64
//! times in all. A lease waits for the requests that came before it and for no other, so neither side
//! starves. While a request copies to a slow host or disk, those leases wait as long as the copy takes and up
//! to their deadlines; leases on buffers that are on the card and stay there do not wait.
//!
//! What waits for what, so that nothing waits in a circle:
//!
//! - A request waits for copies, and for spills of other threads that left nothing for it. A thread that waits
//!   so spills nothing itself. It waits for no lease and for no user code: handlers run, and a pool waits for frees, when no request is in the queue.
//! - The holder of a lease passes requests for its next leases, as it passes waiters that lack room. So a
//!   request made under a lease, or beside a thread that has to lease before it ends another lease, holds up
//!   neither. As with other waiters, an owner that takes each lease before it ends the last one may take the
//!   memory each time.
//! - The thread of the request passes it. A request inside a handler does not come here.

use std::sync::Weak;
use std::thread::ThreadId;

use crate::planner::{Ticket, allocation_deficit, other_pool_deficit};
use vramp_alloc::Driver;
use vramp_alloc::observe::{Reliever, ShortRequest};
use vramp_core::{Bytes, Shortage};

use super::lease_owner::LeaseOwner;
use super::state::Shared;

/// A request of the manager's pool, or of another one of its group.
pub(super) struct PoolRequest {
    shared: Weak<Shared>,
    pool: u64,
    /// Its place in the queue; `None` for the memory of a lease.
    ticket: Option<Ticket>,
}

impl PoolRequest {
    /// Enters the queue.
    pub fn begin(shared: &Weak<Shared>, request: &ShortRequest<'_>) -> PoolRequest {
        let ticket = shared.upgrade().filter(|_| !request.backs_range).map(|shared| {
            let holder = LeaseOwner::of_this_thread().key;
            shared.lock().core.enqueue_pool_request(holder)
        });
        PoolRequest { shared: Weak::clone(shared), pool: request.pool, ticket }
    }
}

impl Reliever for PoolRequest {
    fn free(&mut self, shortage: &Shortage) -> bool {
        let Some(shared) = self.shared.upgrade() else { return false };
        let freed = match shared.allocator.number() == self.pool {
            true => shared.spill_for_own(shortage),
            false => shared.spill_for_other(shortage),
        };
        !freed.is_zero() || self.ticket.is_some() && shared.wait_for_other_spill()
    }
}

impl Drop for PoolRequest {
    fn drop(&mut self) {
        if let (Some(ticket), Some(shared)) = (self.ticket, self.shared.upgrade()) {
            shared.lock().core.dequeue(ticket);
        }
    }
}

impl Shared {
    /// Spills what an allocation lacks.
    fn spill_for_own(&self, shortage: &Shortage) -> Bytes {
        let page = self.driver.info().limits.page;
        let deficit = allocation_deficit(shortage, page);
        // While the next piece is copied, freed memory is remapped to where the block will lie.
        let left = || {
            // Only ahead of need: if it fails, the allocation itself reports it.
            let _ = self.allocator.assemble(shortage);
            deficit
        };
        self.spill(deficit, &left).freed
    }

    /// Spills what a request of another pool of the group lacks, or a resume of a region, and returns that
    /// memory to the card, of which the other pool creates its own. A driver call before each piece, and what
    /// the trim of the pieces costs. It takes no lock that the request or the resume holds.
    fn spill_for_other(&self, shortage: &Shortage) -> Bytes {
        let allocator = &self.allocator;
        let page = self.driver.info().limits.page;
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
        self.spill(lacks().max(page), &left).freed
    }

    /// Waits until a spill of another thread has ended: the pieces that it gave up, or that it freed and its
    /// request left, are there then. Returns false if there is none, or the calling thread is in one itself.
    fn wait_for_other_spill(&self) -> bool {
        let this = std::thread::current().id();
        let seen = {
            let state = self.lock();
            if state.spilling.is_empty() || state.spilling.contains(&this) {
                return false;
            }
            state.ended_spills
        };
        drop(self.wait_until(|state| state.ended_spills != seen));
        true
    }
}

/// A spill in progress, until it is dropped.
pub(super) struct SpillInProgress<'a>(&'a Shared, ThreadId);

impl<'a> SpillInProgress<'a> {
    pub fn begin(shared: &'a Shared) -> SpillInProgress<'a> {
        let this = std::thread::current().id();
        shared.lock().spilling.push(this);
        SpillInProgress(shared, this)
    }
}

impl Drop for SpillInProgress<'_> {
    fn drop(&mut self) {
        let SpillInProgress(shared, this) = *self;
        let mut state = shared.lock();
        if let Some(place) = state.spilling.iter().position(|&other| other == this) {
            state.spilling.swap_remove(place);
        }
        state.ended_spills += 1;
        drop(state);
        shared.notify();
    }
}
