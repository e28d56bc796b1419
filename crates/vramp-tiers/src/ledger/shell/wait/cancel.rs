//! Cancellation of waits from another thread.

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
    waits: Vec<(Weak<Shared>, WaiterId)>,
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
        for (shared, waiter) in waits {
            if let Some(shared) = shared.upgrade() {
                shared.cancel(waiter);
            }
        }
    }

    /// True after [`cancel`](CancelToken::cancel).
    pub fn is_cancelled(&self) -> bool {
        lock(&self.inner).cancelled
    }

    /// Adds a waiter to cancel. False if the token is cancelled already.
    pub(crate) fn watch(&self, shared: &Arc<Shared>, waiter: WaiterId) -> bool {
        let mut inner = lock(&self.inner);
        if !inner.cancelled {
            inner.waits.push((Arc::downgrade(shared), waiter));
        }
        !inner.cancelled
    }

    /// Removes a waiter whose wait is over.
    pub(crate) fn forget(&self, shared: &Arc<Shared>, waiter: WaiterId) {
        let mut inner = lock(&self.inner);
        let is_it = |known: &Weak<Shared>| std::ptr::eq(known.as_ptr(), Arc::as_ptr(shared));
        inner.waits.retain(|(known, id)| !(is_it(known) && *id == waiter));
    }
}

impl std::fmt::Debug for CancelToken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CancelToken").field("cancelled", &self.is_cancelled()).finish()
    }
}
