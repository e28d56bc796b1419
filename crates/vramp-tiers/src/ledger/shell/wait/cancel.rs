//! Cancellation of waits from another thread.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use crate::ledger::core::WaiterId;

use crate::ledger::shell::shared::Shared;
use crate::sync::{Mutex, lock};

/// Cancels the waits that were given a clone of it, present and future ones. A token stays
/// cancelled.
#[derive(Clone, Default)]
pub struct CancelToken {
    inner: Arc<Mutex<Inner>>,
}

#[derive(Default)]
struct Inner {
    cancelled: bool,
    /// By the address of the manager, and the waiter.
    waits: BTreeMap<(usize, WaiterId), Weak<Shared>>,
}

impl CancelToken {
    /// Returns a token that is not cancelled.
    pub fn new() -> CancelToken {
        CancelToken::default()
    }

    /// Ends every wait that has this token with
    /// [`ReserveError::Cancelled`](crate::ReserveError::Cancelled). A request that is served at the
    /// same moment stays served.
    pub fn cancel(&self) {
        let waits = {
            let mut inner = lock(&self.inner);
            inner.cancelled = true;
            std::mem::take(&mut inner.waits)
        };
        for ((_, waiter), shared) in waits {
            if let Some(shared) = shared.upgrade() {
                shared.cancel(waiter);
            }
        }
    }

    /// True after [`cancel`](CancelToken::cancel).
    pub fn is_cancelled(&self) -> bool {
        lock(&self.inner).cancelled
    }

    /// Adds a waiter to cancel. Returns false if the token is cancelled already. O(log waiters).
    pub(crate) fn watch(&self, shared: &Arc<Shared>, waiter: WaiterId) -> bool {
        let mut inner = lock(&self.inner);
        if !inner.cancelled {
            inner.waits.insert(key(shared, waiter), Arc::downgrade(shared));
        }
        !inner.cancelled
    }

    /// Removes a waiter whose wait is over. O(log waiters).
    pub(crate) fn forget(&self, shared: &Arc<Shared>, waiter: WaiterId) {
        lock(&self.inner).waits.remove(&key(shared, waiter));
    }
}

/// A manager keeps its address while one of its waiters is here.
fn key(shared: &Arc<Shared>, waiter: WaiterId) -> (usize, WaiterId) {
    (Arc::as_ptr(shared).addr(), waiter)
}

impl std::fmt::Debug for CancelToken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CancelToken").field("cancelled", &self.is_cancelled()).finish()
    }
}
