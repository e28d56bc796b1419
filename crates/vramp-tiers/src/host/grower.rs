//! The thread that pins memory before it is needed.

use std::sync::{Arc, PoisonError, Weak};
use std::thread::JoinHandle;

use super::pool::{Growth, Shared};
use crate::sync::{Condvar, Mutex, lock};

#[derive(Default)]
struct Wish {
    grow: bool,
    end: bool,
}

type Bell = Arc<(Mutex<Wish>, Condvar)>;

/// Begins with the first wish, ends with the pool.
pub(super) struct Grower {
    bell: Bell,
    pool: Weak<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Grower {
    pub fn new(pool: &Arc<Shared>) -> Grower {
        Grower { bell: Arc::default(), pool: Arc::downgrade(pool), thread: Mutex::new(None) }
    }

    /// Lets more be pinned if few blocks are left. Nobody waits for it.
    pub fn wake_if_low(&self, shared: &Shared) {
        if shared.config.spare_blocks == 0 || !shared.is_low() {
            return;
        }
        let mut thread = lock(&self.thread);
        if thread.is_none() {
            let (bell, pool) = (Arc::clone(&self.bell), Weak::clone(&self.pool));
            let builder = std::thread::Builder::new().name("vramp-host-pool".to_owned());
            // Without a thread the pool grows when blocks are needed, and those who need them wait.
            *thread = builder.spawn(move || work(&bell, &pool)).ok();
        }
        drop(thread);
        let (wish, rung) = &*self.bell;
        lock(wish).grow = true;
        rung.notify_one();
    }
}

fn work(bell: &Bell, pool: &Weak<Shared>) {
    let (wish, rung) = &**bell;
    loop {
        let mut wished = lock(wish);
        while !wished.grow && !wished.end {
            wished = rung.wait(wished).unwrap_or_else(PoisonError::into_inner);
        }
        if wished.end {
            return;
        }
        wished.grow = false;
        drop(wished);
        let Some(shared) = pool.upgrade() else { return };
        while shared.is_low() {
            // Whoever needs blocks meets the same error, and hears of it.
            if shared.grow(Growth::Ahead).is_err() || lock(wish).end {
                break;
            }
        }
    }
}

impl Drop for Grower {
    fn drop(&mut self) {
        let (wish, rung) = &*self.bell;
        lock(wish).end = true;
        rung.notify_one();
        let thread = lock(&self.thread).take();
        if let Some(thread) = thread {
            // It may be the thread itself that drops the last handle.
            if thread.thread().id() != std::thread::current().id() {
                let _ = thread.join();
            }
        }
    }
}
