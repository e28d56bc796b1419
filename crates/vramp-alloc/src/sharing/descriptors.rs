//! Descriptors of physical handles: made once, and kept for the next importer.
//!
//! 1. An export enters the handles that it lies in ([`Descriptors::enter`]).
//! 2. The first request for a handle's descriptor makes it, 185 us; later ones duplicate it.
//! 3. When the last export of a handle has ended, its descriptor stays for the next export there.
//! 4. Before a handle is released it is forgotten ([`Descriptors::forget`]): its descriptor is closed, because it
//!    would keep the memory on the card, and so would what importers have closed and keep mapped. They unmap it
//!    then ([`Watchers::notify`]); a request that finds the card full waits for that.
//!
//! At most [`READY_MAX`] descriptors are kept in a process. If there are as many, one of a handle without an
//! export makes room, the longest unused first; else the descriptor is made for one request.
//!
//! Growth: an entry for each handle that was exported and not released, O(log n) for each call. A release
//! reads one number while nothing was exported.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use vramp_driver::{DriverResult, ExportedHandle, Handle};
use vramp_host::PrivateFd;
use vramp_ipc::Watchers;

/// Most descriptors that a process keeps for importers.
pub const READY_MAX: usize = 256;

/// Number of descriptors that the process keeps.
static KEPT: AtomicUsize = AtomicUsize::new(0);

/// How long a request waits for importers to unmap what was released. A live one takes about a millisecond.
const PATIENCE: Duration = Duration::from_millis(100);

/// Key of the next handle. No other of the process has it.
static NEXT_KEY: AtomicU64 = AtomicU64::new(1);

/// Descriptors of the handles of one pool.
#[derive(Default)]
pub(crate) struct Descriptors {
    /// Number of entries: a copy for releases.
    entries: AtomicUsize,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    by_handle: BTreeMap<Handle, Entry>,
    /// Handles without an export whose descriptor is kept, by the order in which their exports ended.
    idle: BTreeMap<u64, Handle>,
    last_end: u64,
    /// Importers of the servers that published exports of the pool.
    watchers: Vec<Arc<Watchers>>,
}

struct Entry {
    /// By which importers know the handle.
    key: u64,
    /// An importer has its descriptor, or had it.
    is_sent: bool,
    /// Exports that lie in the handle.
    exports: usize,
    descriptor: Option<Arc<PrivateFd>>,
    /// Key in `idle`.
    idle: Option<u64>,
}

impl Descriptors {
    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds an export of these handles. Returns the keys by which importers know them.
    pub(super) fn enter(&self, handles: &[Handle]) -> Vec<u64> {
        let mut table = self.lock();
        let Table { by_handle, idle, .. } = &mut *table;
        let enter = |&handle| {
            let entry = by_handle.entry(handle).or_insert_with(Entry::new);
            entry.exports += 1;
            if let Some(ended) = entry.idle.take() {
                idle.remove(&ended);
            }
            entry.key
        };
        let keys = handles.iter().map(enter).collect();
        self.entries.store(by_handle.len(), Ordering::Release);
        keys
    }

    /// Notifies importers of a server too when an exported handle is released.
    pub(super) fn add_watchers(&self, watchers: &Arc<Watchers>) {
        let known = &mut self.lock().watchers;
        if !known.iter().any(|known| Arc::ptr_eq(known, watchers)) {
            known.push(Arc::clone(watchers));
        }
    }

    /// Notes that an importer gets the descriptor of a handle.
    pub(super) fn note_sent(&self, handle: Handle) {
        if let Some(entry) = self.lock().by_handle.get_mut(&handle) {
            entry.is_sent = true;
        }
    }

    /// Waits until importers have unmapped what was released, if some have not. Returns true if it waited.
    #[cold]
    pub(crate) fn wait_for_importers(&self) -> bool {
        let watchers = self.lock().watchers.clone();
        watchers.iter().filter(|watchers| watchers.wait(PATIENCE)).count() > 0
    }

    /// Ends an export of these handles. Those that were released meanwhile are skipped.
    pub(super) fn leave(&self, handles: &[Handle]) {
        let mut table = self.lock();
        let Table { by_handle, idle, last_end, .. } = &mut *table;
        for handle in handles {
            let Some(entry) = by_handle.get_mut(handle) else { continue };
            entry.exports -= 1;
            if entry.exports == 0 && entry.descriptor.is_some() {
                *last_end += 1;
                idle.insert(*last_end, *handle);
                entry.idle = Some(*last_end);
            }
        }
    }

    /// Returns a descriptor of an exported handle, which is made by `make` unless it is kept.
    pub(super) fn get(
        &self,
        handle: Handle,
        make: impl FnOnce() -> DriverResult<ExportedHandle>,
    ) -> DriverResult<ExportedHandle> {
        let kept = self.lock().by_handle.get(&handle).and_then(|of| of.descriptor.clone());
        let duplicate = kept.as_ref().and_then(|kept| kept.get()?.try_clone_to_owned().ok());
        if let Some(duplicate) = duplicate {
            return Ok(ExportedHandle::PosixFd(duplicate));
        }
        let made = make()?;
        if let ExportedHandle::PosixFd(descriptor) = &made {
            self.keep(handle, descriptor);
        }
        Ok(made)
    }

    /// Returns true if the descriptor of a handle is kept, or more may be.
    pub(super) fn can_keep(&self, handle: Handle) -> bool {
        let table = self.lock();
        table.has(handle) || KEPT.load(Ordering::Relaxed) < READY_MAX || !table.idle.is_empty()
    }

    /// Keeps a duplicate if one more may be kept.
    fn keep(&self, handle: Handle, descriptor: &OwnedFd) {
        let mut table = self.lock();
        // Another thread may have made it at the same time.
        if table.has(handle) || !(take_one() || table.drop_idle()) {
            return;
        }
        let kept = PrivateFd::open(|| descriptor.try_clone()).ok();
        match (table.by_handle.get_mut(&handle), kept) {
            (Some(entry), Some(kept)) => entry.descriptor = Some(Arc::new(kept)),
            // No descriptor is left, or the allocator was closed meanwhile.
            _ => give_back(1),
        }
    }

    /// Closes the descriptor of a handle that is about to be released.
    #[inline]
    pub(crate) fn forget(&self, handle: Handle) {
        if self.entries.load(Ordering::Acquire) > 0 {
            self.forget_entry(handle);
        }
    }

    #[cold]
    fn forget_entry(&self, handle: Handle) {
        let mut table = self.lock();
        let Some(entry) = table.by_handle.remove(&handle) else { return };
        if let Some(ended) = entry.idle {
            table.idle.remove(&ended);
        }
        give_back(usize::from(entry.descriptor.is_some()));
        self.entries.store(table.by_handle.len(), Ordering::Release);
        let watchers = if entry.is_sent { table.watchers.clone() } else { Vec::new() };
        drop((table, entry.descriptor));
        for watchers in watchers {
            watchers.notify();
        }
    }
}

impl Entry {
    fn new() -> Entry {
        let key = NEXT_KEY.fetch_add(1, Ordering::Relaxed);
        Entry { key, is_sent: false, exports: 0, descriptor: None, idle: None }
    }
}

impl Table {
    fn has(&self, handle: Handle) -> bool {
        self.by_handle.get(&handle).is_some_and(|entry| entry.descriptor.is_some())
    }

    /// Closes the descriptor of the handle that is longest without an export. Returns false if there is none.
    fn drop_idle(&mut self) -> bool {
        let Some((_, handle)) = self.idle.pop_first() else { return false };
        let entry = self.by_handle.get_mut(&handle).expect("it has a descriptor");
        (entry.descriptor, entry.idle) = (None, None);
        true
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        let table = self.table.get_mut().unwrap_or_else(PoisonError::into_inner);
        give_back(table.by_handle.values().filter(|entry| entry.descriptor.is_some()).count());
    }
}

/// Counts one more kept descriptor of the process. Returns false if there are as many as may be.
fn take_one() -> bool {
    let more = |kept| (kept < READY_MAX).then_some(kept + 1);
    KEPT.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
}

fn give_back(count: usize) {
    KEPT.fetch_sub(count, Ordering::Relaxed);
}
