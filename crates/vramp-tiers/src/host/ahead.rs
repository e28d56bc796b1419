//! The thread that pins memory ahead of need, and unpins what is idle for long.

use std::sync::{Arc, PoisonError, Weak};
use std::time::Instant;

use super::background::{Background, Requests, Signal, Wake};
use super::shared::{Growth, Shared};
use crate::sync::lock;

impl Shared {
    /// Wakes the thread, and starts it if there is none. Returns false if it cannot be started.
    pub(super) fn wake(self: &Arc<Shared>, wake: Wake) -> bool {
        let Background { signal, thread } = &self.background;
        let mut thread = lock(thread);
        if thread.is_none() {
            let (signal, pool) = (Arc::clone(signal), Arc::downgrade(self));
            let builder = std::thread::Builder::new().name("vramp-host-pool".to_owned());
            *thread = builder.spawn(move || work(&signal, &pool)).ok();
        }
        let runs = thread.is_some();
        drop(thread);
        let (requests, changed) = &**signal;
        let mut requests = lock(requests);
        requests.grow |= wake == Wake::Grow;
        requests.age |= wake == Wake::Age;
        changed.notify_one();
        runs
    }
}

fn work(signal: &Signal, pool: &Weak<Shared>) {
    let mut next_pass = None;
    loop {
        let requests = wait(signal, next_pass);
        if requests.end {
            return;
        }
        let Some(shared) = pool.upgrade() else { return };
        while requests.grow && shared.is_low() {
            // A later allocation meets the same error and returns it.
            if shared.grow(Growth::Ahead).is_err() || lock(&signal.0).end {
                break;
            }
        }
        let later = || shared.config.idle.and_then(|idle| Instant::now().checked_add(idle));
        if next_pass.is_some_and(|at| at <= Instant::now()) {
            next_pass = shared.age().then(later).flatten();
        } else if requests.age && next_pass.is_none() {
            next_pass = later();
        }
    }
}

/// Waits for a request, or until a time. Takes the requests.
fn wait(signal: &Signal, until: Option<Instant>) -> Requests {
    let (requests, changed) = &**signal;
    let mut state = lock(requests);
    while !(state.grow || state.age || state.end) {
        state = match until.map(|at| at.saturating_duration_since(Instant::now())) {
            None => changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            Some(left) if left.is_zero() => break,
            Some(left) => {
                changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0
            }
        };
    }
    let taken = *state;
    *state = Requests { end: taken.end, ..Requests::default() };
    taken
}
