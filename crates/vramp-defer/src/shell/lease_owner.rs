//! Who holds a lease: a value of the program, which is not bound to a thread.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::planner::HolderKey;

/// Owner of leases: a task, a session, or what else keeps leases while it waits for more.
///
/// A request may overtake older ones that wait for a lease of its own owner: else both would wait for
/// each other. A task passes its owner with each request
/// ([`LeaseBuilder::owner`](super::LeaseBuilder::owner)), on whatever thread it runs. Copies are the same
/// owner. An owner without leases and requests takes no memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LeaseOwner {
    pub(super) key: HolderKey,
}

static NEXT: AtomicU64 = AtomicU64::new(1);

thread_local!(static HERE: Cell<LeaseOwner> = Cell::new(LeaseOwner::new()));

impl LeaseOwner {
    /// Returns a new owner, different from all others of the process.
    #[expect(clippy::new_without_default, reason = "each one is different: not a default value")]
    pub fn new() -> LeaseOwner {
        LeaseOwner { key: HolderKey(NEXT.fetch_add(1, Ordering::Relaxed)) }
    }

    /// Returns the owner of the leases that the calling thread takes without naming one.
    pub fn of_this_thread() -> LeaseOwner {
        // While the thread's variables are destroyed, each request is its own owner.
        HERE.try_with(Cell::get).unwrap_or_else(|_| LeaseOwner::new())
    }

    /// Runs `work` on this thread with this owner for the leases that it takes without naming one, such
    /// as those of [`DeferrableBuffer::read`](super::DeferrableBuffer::read): for tasks that share
    /// threads.
    pub fn scope<R>(self, work: impl FnOnce() -> R) -> R {
        struct Restore(LeaseOwner);
        impl Drop for Restore {
            fn drop(&mut self) {
                let _ = HERE.try_with(|here| here.set(self.0));
            }
        }
        let _restore = HERE.try_with(|here| Restore(here.replace(self)));
        work()
    }
}

#[cfg(test)]
mod tests {
    use super::LeaseOwner;

    #[test]
    fn a_scope_sets_the_owner_until_its_end_also_after_a_panic() {
        let outside = LeaseOwner::of_this_thread();
        let task = LeaseOwner::new();
        assert_eq!(task.scope(LeaseOwner::of_this_thread), task);
        let panicked = std::panic::catch_unwind(|| task.scope(|| panic!("in the scope")));
        assert!(panicked.is_err());
        assert_eq!(LeaseOwner::of_this_thread(), outside);
    }
}
