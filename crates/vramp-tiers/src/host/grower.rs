//! The thread that pins memory ahead of need.

use std::sync::{Arc, PoisonError, Weak};
use std::thread::JoinHandle;

use super::pool::{Growth, Shared};
use crate::sync::{Condvar, Mutex, lock};

#[derive(Default)]
struct Request {
    grow: bool,
    end: bool,
}

type Signal = Arc<(Mutex<Request>, Condvar)>;

/// The background thread of a pool. It starts with the first request and ends with the pool.
pub(super) struct Grower {
    signal: Signal,
    pool: Weak<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Grower {
    pub fn new(pool: &Arc<Shared>) -> Grower {
        Grower { signal: Arc::default(), pool: Arc::downgrade(pool), thread: Mutex::new(None) }
    }

    /// Has the thread pin more if few blocks are free. Never blocks on pinning.
    pub fn wake_if_low(&self, shared: &Shared) {
        if shared.config.spare_blocks == 0 || !shared.is_low() {
            return;
        }
        let mut thread = lock(&self.thread);
        if thread.is_none() {
            let (signal, pool) = (Arc::clone(&self.signal), Weak::clone(&self.pool));
            let builder = std::thread::Builder::new().name("vramp-host-pool".to_owned());
            // Without a thread the pool grows on demand, in the thread that allocates.
            *thread = builder.spawn(move || work(&signal, &pool)).ok();
        }
        drop(thread);
        let (request, changed) = &*self.signal;
        lock(request).grow = true;
        changed.notify_one();
    }
}

fn work(signal: &Signal, pool: &Weak<Shared>) {
    let (request, changed) = &**signal;
    loop {
        let mut requested = lock(request);
        while !requested.grow && !requested.end {
            requested = changed.wait(requested).unwrap_or_else(PoisonError::into_inner);
        }
        if requested.end {
            return;
        }
        requested.grow = false;
        drop(requested);
        let Some(shared) = pool.upgrade() else { return };
        while shared.is_low() {
            // A later allocation meets the same error and returns it.
            if shared.grow(Growth::Ahead).is_err() || lock(request).end {
                break;
            }
        }
    }
}

impl Drop for Grower {
    fn drop(&mut self) {
        let (request, changed) = &*self.signal;
        lock(request).end = true;
        changed.notify_one();
        let thread = lock(&self.thread).take();
        if let Some(thread) = thread {
            // The thread itself may drop the last handle of the pool.
            if thread.thread().id() != std::thread::current().id() {
                let _ = thread.join();
            }
        }
    }
}
