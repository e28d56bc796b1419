//! The allocator: streams, threads, limits and statistics around the virtual pool, or a backend in its
//! place.
//!
//! One malloc, from top to bottom:
//!
//! 1. the thread's cache: a block of the same length that the thread freed last (`cache.rs`);
//! 2. the stream's heap, for small requests (`vramp_core::StreamHeap`, its own lock);
//! 3. the allocator's lock (`shared.rs`), and the manager behind it (`manager.rs`);
//! 4. if there is no memory: trimming other pools, handlers, waiting, and then the report
//!    (`shortage.rs`, `observe.rs`, `error/report.rs`).
//!
//! A free goes the same way. Locks are taken in the order group, allocator, heap.
//!
//! This file creates and closes an allocator. The verbs have a file each:
//!
//! - `malloc.rs` and `free.rs`: the path above, without the lock and with it;
//! - `shortage.rs`: handlers, waiting and the report when memory runs out;
//! - `streams.rs`: creating, adopting and destroying streams;
//! - `limits.rs`: the limit, memory reserved before the first request, and returning memory to the card;
//! - `scopes.rs`: peaks of parts of a program, and named groups of allocations;
//! - `diagnostics.rs`: statistics and diagnostics. `../stats.rs` has the statistics by PyTorch's
//!   names, `../history.rs` recorded events and snapshots.

mod close;
mod diagnostics;
mod free;
mod limits;
mod malloc;
mod scopes;
mod shortage;
mod streams;

pub use close::CloseError;

use std::sync::Arc;

use vramp_core::{Bytes, Mixed, Policy};
use vramp_driver::Driver;
use vramp_host::fork::is_forked;

use crate::config::{Config, FIRST_SPAN_BESIDE};
use crate::error::{CreateError, Unusable};
use crate::group::Group;
use crate::manager::Manager;
use crate::shared::{CloseFailure, Shared};
use crate::sharing::{Sharing, SharingConfig};

pub use diagnostics::Stats;
pub use scopes::TagId;
pub(crate) use shortage::Relief;

/// An allocator of one device's memory.
///
/// Threads share it. A thread that works on a stream of its own takes no shared lock on a cache
/// hit.
///
/// Streams belong to the allocator: [`Allocator::create_stream`] makes one. Work on memory must be
/// queued on the stream that it is allocated for or freed on, or be recorded with
/// [`Allocator::record_use`]. Dropping the allocator waits for its streams and returns all memory;
/// [`Allocator::close`] does the same and reports failures. Where the work cannot be waited for,
/// because a stream captures, dropping leaves the memory as it is until the device is dropped.
///
/// CUDA does not survive a fork. In a child that was forked after an allocator was created, calls
/// return an error such as [`Unusable::Forked`], counts are zero, and closing and dropping do
/// nothing.
pub struct Allocator {
    shared: Arc<Shared>,
    config: Config,
}

/// # Opening and closing
impl Allocator {
    /// Creates an allocator on a device. Reserves no memory unless the configuration has a prefill.
    ///
    /// # Errors
    /// The configuration is impossible, on this device or at all; or a driver call failed.
    pub fn new(driver: Arc<dyn Driver>, config: Config) -> Result<Allocator, CreateError> {
        let group = Arc::new(Group::new(config.limit));
        Allocator::in_group("main".to_owned(), driver, config, group)
    }

    /// Creates another pool on the same device, isolated from this one: memory moves between them
    /// only through the card. Dropping or closing it releases all of its memory.
    ///
    /// It has the configuration of this one without the prefill, and the same streams: an id means
    /// the same stream in both. The limit holds for the sum of both. It takes addresses as it grows.
    ///
    /// # Errors
    /// As of [`Allocator::new`].
    pub fn create_pool(&self, name: &str) -> Result<Allocator, CreateError> {
        self.create_pool_with(name, |_| ())
    }

    /// Creates another pool as [`Allocator::create_pool`] does, after `change` was called with the
    /// parameters of this one's default policy.
    ///
    /// # Errors
    /// As of [`Allocator::new`].
    pub fn create_pool_with(
        &self,
        name: &str,
        change: impl FnOnce(&mut Mixed),
    ) -> Result<Allocator, CreateError> {
        let first_span = self.config.first_span.or(Some(FIRST_SPAN_BESIDE));
        let (prefill, prefill_pages) = (Bytes::ZERO, None);
        let mut config = Config { prefill, prefill_pages, first_span, ..self.config.clone() };
        if let Policy::Mixed(mixed) = &mut config.policy {
            change(mixed);
        }
        self.create_pool_of(name, config)
    }

    /// Creates another pool as [`Allocator::create_pool`] does, with this configuration except for the
    /// limit.
    ///
    /// # Errors
    /// As of [`Allocator::new`].
    pub fn create_pool_of(&self, name: &str, config: Config) -> Result<Allocator, CreateError> {
        let group = Arc::clone(&self.shared.group);
        Allocator::in_group(name.to_owned(), Arc::clone(self.driver()), config, group)
    }

    fn in_group(
        name: String,
        driver: Arc<dyn Driver>,
        config: Config,
        group: Arc<Group>,
    ) -> Result<Allocator, CreateError> {
        if let Some(threshold) = config.garbage_collection_threshold
            && !(threshold > 0.0 && threshold < 1.0)
        {
            return Err(CreateError::Threshold { threshold });
        }
        Unusable::check_fork()?;
        vramp_host::fork::watch();
        // A card that is granted access meanwhile gets it to this pool, too.
        let mut peers = group.peers();
        let mut manager = Manager::new(&driver, &config)?;
        if let Some(access) = manager.access_mut() {
            match group.is_empty() {
                true => peers.clone_from(&access.peers),
                // The configured ones may have lost access since.
                false => access.peers.clone_from(&peers),
            }
        }
        let page = config.page.unwrap_or(driver.info().limits.page);
        let prefill = config.prefill_bytes(page);
        let shared = Shared::new(name, driver, manager, Arc::clone(&group));
        drop(peers);
        let allocator = Allocator { shared, config };
        allocator.prefill_at_start(prefill)?;
        Ok(allocator)
    }

    /// Returns how the memory can be shared: as configured, or as far as the device can. No driver
    /// call.
    pub fn sharing(&self) -> Sharing {
        let mut inner = self.shared.lock_anyway();
        inner.manager.access_mut().map(|access| access.state()).unwrap_or_default()
    }

    pub(crate) fn sharing_config(&self) -> &SharingConfig {
        &self.config.sharing
    }

    /// Returns the configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Returns true if heaps serve small requests: in the virtual pool with its default policy.
    pub fn has_heaps(&self) -> bool {
        self.shared.heaps_serve.is_some()
    }

    /// Returns the device.
    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.shared.driver
    }

    /// Returns the number of the allocator, which no other one of the process has or had.
    #[inline]
    pub fn number(&self) -> u64 {
        self.shared.number
    }

    /// Returns the allocator's name: `main`, or the one given to [`Allocator::create_pool`].
    pub fn name(&self) -> &str {
        &self.shared.name
    }

    /// Returns how long a request waits for memory.
    pub(crate) fn patience(&self) -> std::time::Duration {
        self.config.patience
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Waits for all work on the allocator's streams, also on destroyed ones, and returns
    /// everything to the device. Captures that this allocator began are ended and lost. The last
    /// pool that shares the streams destroys them.
    ///
    /// Where guards share the allocator in an [`Arc`], dropping the last one does the same without a report;
    /// [`Arc::into_inner`] returns the allocator once no guard has it.
    ///
    /// # Errors
    /// If a stream captures, or the wait fails, nothing is returned to the device and the error has
    /// the allocator, to close it later. [`CloseError::Driver`] if a call failed after that.
    pub fn close(self) -> Result<(), CloseError> {
        // First without the lock: the work may wait for threads that need it. The close itself then
        // waits for what was queued meanwhile.
        let _ = self.shared.synchronize();
        let closed = self.shared.lock_anyway().close(&self.shared);
        if !matches!(closed, Err(CloseFailure::Capturing(_) | CloseFailure::NotSynchronized(_))) {
            self.shared.imports.close(&*self.shared.driver);
        }
        closed.map_err(|failure| match failure {
            CloseFailure::Capturing(stream) => {
                CloseError::Capturing { stream, allocator: Box::new(self) }
            }
            CloseFailure::NotSynchronized(error) => {
                CloseError::NotSynchronized { error, allocator: Box::new(self) }
            }
            CloseFailure::Closed(error) => CloseError::Driver(error),
        })
    }
}

impl std::fmt::Debug for Allocator {
    /// Writes the sums of the memory manager and every region or block of it in address order.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.shared.lock_anyway().manager.fmt(f)
    }
}

impl Drop for Allocator {
    fn drop(&mut self) {
        if is_forked() {
            // Dropping the device would make calls, and take locks that no thread releases.
            std::mem::forget(Arc::clone(&self.shared));
            return;
        }
        let _ = self.shared.synchronize();
        let mut inner = self.shared.lock_anyway();
        // A drop cannot report a failure; `close` does. Memory that may be in use stays mapped, but
        // nothing else is served from it.
        if inner.close(&self.shared).is_err() && !inner.closed {
            inner.manager.end_captures();
        }
        inner.closed = true;
        self.shared.note_reserved(&inner);
        drop(inner);
        self.shared.imports.close(&*self.shared.driver);
        self.shared.group.remove(self.shared.number);
        self.shared.observers.clear();
    }
}
