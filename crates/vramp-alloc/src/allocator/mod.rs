//! The allocator that people use: one set of verbs before several managers.
//!
//! One malloc, from top to bottom:
//!
//! 1. the thread's cache: a block of the same length freed a moment ago (`cache.rs`);
//! 2. the stream's heap, for small requests (`vramp_core::StreamHeap`, its own lock);
//! 3. the allocator's lock (`shared.rs`), and the manager behind it (`manager.rs`);
//! 4. where that is short: other pools, handlers, waiting, and at last the report (`shortage.rs`,
//!    `watch.rs`, `error.rs`).
//!
//! A free goes the same way. Locks are taken in the order group, allocator, heap.
//!
//! Here are the beginning and the end of an allocator; the rest has a file for each idea:
//!
//! - `malloc.rs` and `free.rs`: the two ways above, past the lock and through it;
//! - `shortage.rs`: who is asked when memory runs out, and the report;
//! - `streams.rs`: what work is queued on;
//! - `ahead.rs`: memory that is there before the first request;
//! - `limits.rs`: how much an allocator may hold, and what it gives back;
//! - `tags.rs`: what memory is for;
//! - `look.rs`: what an allocator tells of itself. The same under PyTorch's names is in
//!   `../stats.rs`, its recorded history in `../history.rs`.

mod diagnostics;
mod free;
mod limits;
mod malloc;
mod prefill;
mod shortage;
mod streams;
mod tags;

use std::sync::Arc;

use vramp_core::Bytes;
use vramp_driver::{Driver, DriverError};

use crate::config::Config;
use crate::error::CreateError;
use crate::group::Group;
use crate::manager::Manager;
use crate::shared::Shared;

pub use diagnostics::Stats;
pub(crate) use shortage::Relief;
pub use tags::TagId;

/// Memory of one device. Safe to share between threads, and made for it: a thread that works on a
/// stream of its own shares no lock with others as long as it hits.
///
/// Streams belong to the allocator: [`Allocator::create_stream`] makes one, and work on memory must
/// be queued on the stream it is allocated for, freed on, or noted with [`Allocator::record_use`].
/// Dropping the allocator waits for its streams and gives everything back; [`Allocator::close`]
/// does the same and tells what failed.
pub struct Allocator {
    shared: Arc<Shared>,
    config: Config,
}

impl Allocator {
    /// An allocator on a device. Takes no memory yet, unless the configuration says so.
    pub fn new(driver: Arc<dyn Driver>, config: Config) -> Result<Allocator, CreateError> {
        let group = Arc::new(Group::new(config.limit));
        Allocator::in_group("main".to_owned(), driver, config, group)
    }

    /// A pool of its own on the same device, isolated from this one: memory never goes from one to
    /// the other but through the card. Dropping it, or closing it, releases all it holds as one.
    ///
    /// It has the configuration of this one, shares its streams (an id means the same stream in
    /// both), and what both hold together counts against the limit.
    pub fn create_pool(&self, name: &str) -> Result<Allocator, CreateError> {
        let config = Config { prefill: Bytes::ZERO, prefill_pages: None, ..self.config.clone() };
        let group = Arc::clone(&self.shared.group);
        Allocator::in_group(name.to_owned(), Arc::clone(&self.shared.driver), config, group)
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
        let manager = Manager::new(&driver, &config)?;
        let page = config.page.unwrap_or(driver.info().limits.page);
        let prefill = config.prefill_bytes(page);
        let shared = Shared::new(name, driver, manager, group);
        let allocator = Allocator { shared, config };
        allocator.prefill_at_start(prefill)?;
        Ok(allocator)
    }

    /// The device.
    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.shared.driver
    }

    /// What people call it: `main`, or the name given to [`Allocator::create_pool`].
    pub fn name(&self) -> &str {
        &self.shared.name
    }

    /// How long a request waits for memory.
    pub(crate) fn patience(&self) -> std::time::Duration {
        self.config.patience
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Waits for the allocator's streams and gives everything back to the device. The streams go
    /// with the last pool that shares them.
    ///
    /// # Errors
    /// The first call that failed; the others were made all the same.
    pub fn close(self) -> Result<(), DriverError> {
        self.shared.lock_anyway().close(&self.shared)
    }
}

impl std::fmt::Debug for Allocator {
    /// The virtual pool's census and every region in address order.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.shared.lock_anyway().manager.virtual_pool() {
            Some(pool) => std::fmt::Debug::fmt(&pool.pool, f),
            None => f.write_str("the driver's own pool"),
        }
    }
}

impl Drop for Allocator {
    fn drop(&mut self) {
        // Nobody is left to tell; `close` is for those who want to know.
        let _ = self.shared.lock_anyway().close(&self.shared);
    }
}
