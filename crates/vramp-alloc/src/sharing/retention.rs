//! When memory of another process may stay mapped without a use.
//!
//! 1. The first open of an exporter's memory watches that exporter ([`vramp_ipc::Watcher`]).
//! 2. While the watch lasts, closed memory stays mapped, idle (`imports.rs`).
//! 3. The exporter ends the watch before it releases a handle of which an importer has a descriptor, and by ending
//!    itself. The watcher's thread unmaps what is idle then, and confirms it.
//! 4. After ten seconds the thread unmaps what is idle since, and ends watches of which nothing is mapped.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use vramp_ipc::{Ticket, Watcher, Watching};

use crate::Allocator;
use crate::shared::Shared;
use crate::sharing::imports::IDLE_FOR;

/// How long an exporter may take to answer the request for a watch.
const PATIENCE: Duration = Duration::from_secs(5);

/// What an exchange needs to let memory stay mapped. Its thread runs while an exporter is watched.
#[derive(Default)]
pub(super) struct Retention {
    /// `None` once no descriptor was left for it.
    watcher: OnceLock<Option<Arc<Watcher>>>,
    pools: Arc<Pools>,
    /// The last open found all its handles mapped.
    expects_mapped: AtomicBool,
}

/// Pools that opened memory.
#[derive(Default)]
struct Pools(Mutex<Vec<Weak<Shared>>>);

impl Retention {
    /// Watches the exporter of a ticket, unless it is watched. `None` if it cannot be: then what is closed is
    /// unmapped at once. A connect and a message each way the first time.
    pub(super) fn watch(&self, allocator: &Allocator, ticket: &Ticket) -> Option<u64> {
        let pools = Arc::clone(&self.pools);
        let watcher = self.watcher.get_or_init(|| Watcher::new(pools, PATIENCE).ok().map(Arc::new));
        let watcher = watcher.as_ref()?;
        let watch = watcher.watch(ticket).ok()?;
        self.pools.add(allocator.shared());
        let imports = &allocator.shared().imports;
        imports.begin_watch(watch, watcher);
        if !watcher.is_live(watch) {
            // It ended before the pool knew of it.
            imports.end_watch(&*allocator.shared().driver, watch);
            return None;
        }
        Some(watch)
    }

    /// Has what is idle unmapped in time.
    pub(super) fn note_close(&self) {
        if let Some(Some(watcher)) = self.watcher.get() {
            watcher.call_in(IDLE_FOR);
        }
    }

    pub(super) fn note_open(&self, was_mapped: bool) {
        self.expects_mapped.store(was_mapped, Ordering::Relaxed);
    }

    /// Returns true if the next open will probably need no descriptor.
    pub(super) fn expects_mapped(&self) -> bool {
        self.expects_mapped.load(Ordering::Relaxed)
    }
}

impl std::fmt::Debug for Retention {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Retention").finish_non_exhaustive()
    }
}

impl Pools {
    fn lock(&self) -> MutexGuard<'_, Vec<Weak<Shared>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, shared: &Arc<Shared>) {
        let mut pools = self.lock();
        if !pools.iter().any(|pool| pool.as_ptr() == Arc::as_ptr(shared)) {
            pools.retain(|pool| pool.strong_count() > 0);
            pools.push(Arc::downgrade(shared));
        }
    }

    /// Without the lock: an unmap may take long.
    fn all(&self) -> Vec<Arc<Shared>> {
        self.lock().iter().filter_map(Weak::upgrade).collect()
    }
}

impl Watching for Pools {
    fn ended(&self, watch: u64) {
        for pool in self.all() {
            pool.imports.end_watch(&*pool.driver, watch);
        }
    }

    fn due(&self) -> Option<Duration> {
        let next = |pool: Arc<Shared>| pool.imports.unmap_old(&*pool.driver, IDLE_FOR);
        self.all().into_iter().filter_map(next).min()
    }

    fn is_used(&self, watch: u64) -> bool {
        self.all().iter().any(|pool| pool.imports.has(watch))
    }
}
