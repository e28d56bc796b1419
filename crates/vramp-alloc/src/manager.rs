//! What serves an allocator's requests: the virtual pool, or a backend in its place.

use std::fmt;
use std::sync::Arc;

use vramp_core::{
    AddrRange, ArenaBlockId, Attempt, BlockId, Bytes, Census, ConfigError, Counters, Inconsistency,
    Mark, Policy, PoolConfig, Request, StreamId, StreamTable,
};
use vramp_driver::{Driver, DriverError, PoolUsage, Stream};

use crate::allocation::{Allocation, Found, Owner};
use crate::backend::{Backend, BackendBlock, NoMemory};
use crate::config::{Config, FIRST_SPAN, Serving};
use crate::error::{CreateError, Largest, QuarantinedMemory};
use crate::sharing::Access;
use crate::stream_end::StreamEnd;
use crate::under_a_page::UnderAPage;
use crate::virtual_pool::{FreeMemory, HeapCell, Refusal, VirtualPool};

/// What places blocks.
#[expect(clippy::large_enum_variant, reason = "an allocator has one, and never moves it")]
pub(crate) enum Manager {
    /// The virtual pool, and beside it a backend for requests under a page if there is one.
    Virtual { pool: VirtualPool, under_a_page: Option<UnderAPage> },
    /// A backend in place of the pool.
    Backend(Box<dyn Backend>),
}

impl Manager {
    pub(crate) fn new(driver: &Arc<dyn Driver>, config: &Config) -> Result<Manager, CreateError> {
        let serving = config.backend.as_ref().map(|backend| backend.make(driver, config));
        let small = match serving.transpose()? {
            Some(Serving::All(backend)) => return Ok(Manager::Backend(backend)),
            Some(Serving::UnderAPage(backend)) => Some(UnderAPage::new(backend, config.limit)),
            Some(Serving::Nothing) | None => None,
        };
        Ok(Manager::Virtual { pool: virtual_pool(driver, config)?, under_a_page: small })
    }

    /// Returns a manager without memory, for a closed allocator. No driver call.
    pub(crate) fn without_memory() -> Manager {
        Manager::Backend(Box::new(NoMemory))
    }

    /// Returns the name in errors and options: the policy's or the backend's.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Manager::Virtual { pool, .. } => name_of(&pool.pool.config().policy),
            Manager::Backend(backend) => backend.name(),
        }
    }

    pub(crate) fn virtual_pool(&self) -> Option<&VirtualPool> {
        match self {
            Manager::Virtual { pool, .. } => Some(pool),
            Manager::Backend(_) => None,
        }
    }

    pub(crate) fn virtual_pool_mut(&mut self) -> Option<&mut VirtualPool> {
        match self {
            Manager::Virtual { pool, .. } => Some(pool),
            Manager::Backend(_) => None,
        }
    }

    /// Returns the backend, in place of the pool or beside it.
    pub(crate) fn backend(&self) -> Option<&dyn Backend> {
        match self {
            Manager::Virtual { under_a_page, .. } => {
                under_a_page.as_ref().map(|small| &*small.backend)
            }
            Manager::Backend(backend) => Some(&**backend),
        }
    }

    pub(crate) fn backend_mut(&mut self) -> Option<&mut dyn Backend> {
        match self {
            Manager::Virtual { under_a_page, .. } => {
                under_a_page.as_mut().map(|small| &mut *small.backend)
            }
            Manager::Backend(backend) => Some(&mut **backend),
        }
    }

    /// Returns the backend of a block that it placed.
    fn backend_of(&mut self, owner: Owner) -> (&mut dyn Backend, u64) {
        let id = owner.backend_id();
        self.backend_mut().zip(id).unwrap_or_else(|| panic!("{owner:?} is not of this manager"))
    }

    /// Returns what memory is created and mapped as; `None` for the driver's pool.
    pub(crate) fn access_mut(&mut self) -> Option<&mut Access> {
        match self {
            Manager::Virtual { pool, .. } => Some(&mut pool.exec.access),
            Manager::Backend(backend) => backend.access_mut(),
        }
    }

    /// Returns what threads copy: the heaps by stream, and the reservations by span, which only grow.
    #[inline]
    pub(crate) fn heaps_and_spans(&self) -> (&StreamTable<Arc<HeapCell>>, &[AddrRange]) {
        static NO_HEAPS: StreamTable<Arc<HeapCell>> = StreamTable::new();
        self.virtual_pool().map_or((&NO_HEAPS, &[]), |pool| (&pool.heaps, pool.exec.spans()))
    }

    /// Adds a stream; `None` for one that ended. Ids below it that were not added are those of streams
    /// that ended, whose work is over.
    pub(crate) fn add_stream(&mut self, id: StreamId, stream: Option<Stream>) {
        match self {
            Manager::Virtual { pool, .. } => pool.add_stream(id, stream),
            Manager::Backend(backend) => backend.add_stream(id, stream),
        }
    }

    /// Makes all ids below this number known: those that were not added are of streams that ended, whose
    /// work is over.
    pub(crate) fn skip_streams(&mut self, ids: usize) {
        match self {
            Manager::Virtual { pool, .. } => pool.skip_streams(ids),
            Manager::Backend(backend) => backend.skip_streams(ids),
        }
    }

    /// Ends a stream: its memory is free for all streams once its work is over, which it is if
    /// there is no event. No driver call.
    pub(crate) fn end_stream(&mut self, id: StreamId, end: Option<&Arc<StreamEnd>>) {
        if let Some(backend) = self.backend_mut() {
            backend.end_stream(id, end);
        }
        if let Some(pool) = self.virtual_pool_mut() {
            pool.end_stream(id, end);
        }
    }

    #[inline]
    pub(crate) fn malloc(
        &mut self,
        size: Bytes,
        stream: StreamId,
        raw: Stream,
        contended: bool,
    ) -> Result<Found, Refusal> {
        match self {
            Manager::Virtual { pool, under_a_page: None } => pool.find(size, stream, contended),
            Manager::Virtual { pool, under_a_page: Some(small) } => {
                small.malloc(pool, size, stream, raw, contended)
            }
            Manager::Backend(backend) => Ok(backend.malloc(size, stream, raw)?.into()),
        }
    }

    pub(crate) fn record_use(&mut self, allocation: &Allocation, stream: StreamId) {
        match (self, allocation.owner) {
            (Manager::Virtual { pool, .. }, Owner::Pool { id, .. }) => {
                pool.pool.record_use(id, stream).expect("the block was looked up");
            }
            (Manager::Virtual { pool, .. }, Owner::Heap { id, .. }) => {
                let mark = pool.pool.now(stream);
                let mut heap =
                    pool.heaps.get(allocation.stream).expect("the heap of a live block").lock();
                heap.note_use(id, mark).expect("the block was looked up");
            }
            (Manager::Virtual { pool, .. }, Owner::Arena { arena, number }) => {
                let block = ArenaBlockId::new(arena, number);
                pool.note_use_in_arena(block, stream);
            }
            (manager, owner) => {
                let (backend, id) = manager.backend_of(owner);
                backend.record_use(id, stream);
            }
        }
    }

    /// Frees an allocation. It is the manager's again even if a driver call failed.
    pub(crate) fn free(
        &mut self,
        allocation: &Allocation,
        stream: StreamId,
        streams: &StreamTable<Stream>,
    ) -> Result<(), DriverError> {
        match (self, allocation.owner) {
            (Manager::Virtual { pool, .. }, Owner::Pool { id, .. }) => {
                if allocation.from_cache && stream != allocation.stream {
                    let used = pool.pool.record_use(id, allocation.stream);
                    used.expect("the block was looked up");
                }
                pool.free(id, stream)
            }
            (Manager::Virtual { pool, .. }, Owner::Heap { id, .. }) => {
                pool.free_in_heap(id, allocation.stream, stream);
                Ok(())
            }
            (Manager::Virtual { pool, .. }, Owner::Arena { arena, number }) => {
                let block = ArenaBlockId::new(arena, number);
                pool.free_in_arena(block, stream)
            }
            (manager, owner) => {
                let (backend, id) = manager.backend_of(owner);
                backend.free(id, stream, streams)
            }
        }
    }

    /// Returns true if the allocation is live in this manager.
    pub(crate) fn owns(&self, allocation: &Allocation) -> bool {
        match (self, allocation.owner) {
            (Manager::Virtual { pool, .. }, Owner::Pool { id, at }) => pool.is_live(id, at),
            (Manager::Virtual { .. }, Owner::Heap { .. }) => true,
            (Manager::Virtual { pool, .. }, Owner::Arena { arena, number }) => {
                pool.arenas.is_live(ArenaBlockId::new(arena, number))
            }
            (manager, owner) => {
                let of_backend = manager.backend().zip(owner.backend_id());
                of_backend.is_some_and(|(backend, id)| backend.holds(id, allocation.addr))
            }
        }
    }

    /// Returns what the largest block of a shortage is, for a request of this size.
    pub(crate) fn largest_is(&self, size: Bytes) -> Largest {
        match self {
            Manager::Virtual { pool, under_a_page: Some(_) } if size < pool.pool.config().page => {
                Largest::Unknown
            }
            Manager::Virtual { .. } => Largest::ByRemapping,
            Manager::Backend(backend) => backend.largest_is(),
        }
    }

    /// Reserves memory ahead of demand.
    pub(crate) fn prefill(
        &mut self,
        len: Bytes,
        stream: StreamId,
        raw: Stream,
    ) -> Result<(), Refusal> {
        let (pool, prefilled) = match self {
            Manager::Virtual { pool, under_a_page: Some(small) } => {
                let prefilled = small.prefill(pool, len, stream);
                (pool, prefilled)
            }
            Manager::Virtual { pool, under_a_page: None } => {
                let prefilled = pool.prefill(len, stream);
                (pool, prefilled)
            }
            Manager::Backend(backend) => return Ok(backend.prefill(len, stream, raw)?),
        };
        match prefilled {
            Ok(true) => Ok(()),
            Ok(false) => {
                let request = Request { size: len, stream };
                let shortage = pool.pool.shortage(&Attempt::new(request));
                Err(Refusal::Short(Box::new(shortage), None))
            }
            Err(error) => Err(Refusal::Driver(error)),
        }
    }

    /// Returns what failed calls left unusable. O(what is).
    pub(crate) fn quarantined(&self) -> QuarantinedMemory {
        match self {
            Manager::Virtual { pool, .. } => pool.quarantined(),
            Manager::Backend(backend) => backend.quarantined(),
        }
    }

    pub(crate) fn trim(&mut self, to: Bytes) -> Result<(), DriverError> {
        match self {
            Manager::Virtual { pool, under_a_page: Some(small) } => small.trim(pool, to),
            Manager::Virtual { pool, under_a_page: None } => pool.trim(to),
            Manager::Backend(backend) => backend.trim(to),
        }
    }

    /// Sets the limit, and how much of it other pools have reserved: `None` without others.
    pub(crate) fn set_limit(&mut self, limit: Option<Bytes>, others: Option<Bytes>) {
        let elsewhere = others.unwrap_or_default();
        match self {
            Manager::Virtual { pool, under_a_page } => {
                pool.pool.set_limit(limit, others);
                if let Some(small) = under_a_page {
                    small.set_limit(limit, elsewhere);
                }
            }
            Manager::Backend(backend) => {
                backend.set_limit(limit.map(|limit| limit.saturating_sub(elsewhere)));
            }
        }
    }

    /// Returns the usage of the driver's pool, if it is in use. One driver call then.
    pub(crate) fn driver_usage(&self) -> Result<Option<PoolUsage>, DriverError> {
        self.backend().map_or(Ok(None), |backend| backend.driver_usage())
    }

    /// Returns the counts of driver work, with that of the driver's pool. No driver call.
    pub(crate) fn counters_with(&self, usage: Option<PoolUsage>) -> Counters {
        let mut counters = self.known_counters();
        if let Some(usage) = usage {
            let pages = counters.reserved;
            counters.reserved += usage.reserved;
            counters.reserved_peak = match self {
                Manager::Virtual { under_a_page: Some(small), .. } => {
                    small.peak(pages, usage.reserved)
                }
                _ => usage.reserved_peak,
            };
        }
        counters
    }

    /// Returns the blocks that the driver's pool placed: the driver does not say whether they were
    /// hits.
    pub(crate) fn placed_by_driver(&self, usage: Option<PoolUsage>) -> u64 {
        let backend = self.backend().filter(|_| usage.is_some());
        backend.map_or(0, |backend| backend.counters().placed)
    }

    /// Returns freed memory of the virtual pool; empty for the others.
    pub(crate) fn free_memory(&self) -> FreeMemory {
        self.virtual_pool().map(VirtualPool::free_memory).unwrap_or_default()
    }

    /// Returns the physical memory reserved, without that of the driver's pool. No driver call.
    #[inline]
    pub(crate) fn reserved(&self) -> Bytes {
        self.known_counters().reserved
    }

    /// Returns the counts of driver work, without that of the driver's pool. No driver call.
    #[inline]
    pub(crate) fn known_counters(&self) -> Counters {
        match self {
            Manager::Virtual { pool, .. } => pool.counters(),
            Manager::Backend(backend) => backend.counters(),
        }
    }

    /// Resets the peak of physical memory, except that of the driver's pool.
    pub(crate) fn reset_peaks(&mut self) {
        match self {
            Manager::Virtual { pool, under_a_page } => {
                pool.pool.reset_peaks();
                if let Some(small) = under_a_page {
                    small.reset_peaks();
                }
            }
            Manager::Backend(backend) => backend.reset_peaks(),
        }
    }

    pub(crate) fn audit(&self) -> Result<(), Inconsistency> {
        match self {
            Manager::Virtual { pool, .. } => pool.audit(),
            Manager::Backend(backend) => backend.audit(),
        }
    }

    pub(crate) fn census(&self) -> Census {
        self.virtual_pool().map(VirtualPool::census).unwrap_or_default()
    }

    /// Returns the mark that covers the work queued on a stream that is known.
    pub(crate) fn mark(&self, stream: StreamId) -> Option<Mark> {
        match self {
            Manager::Virtual { pool, .. } => {
                pool.pool.has_stream(stream).then(|| pool.pool.now(stream))
            }
            Manager::Backend(backend) => backend.mark(stream),
        }
    }

    /// Returns true if the stream is part of a capture that the allocator began, or may be.
    pub(crate) fn may_be_own_capture(&self, stream: StreamId) -> bool {
        self.virtual_pool().is_some_and(|pool| pool.may_be_own_capture(stream))
    }

    /// Ends the captures that the allocator began, and discards their graphs.
    pub(crate) fn end_captures(&mut self) {
        if let Some(pool) = self.virtual_pool_mut() {
            pool.end_captures();
        }
    }

    /// Returns everything to the device. The caller waited for all work. Goes on after a failure
    /// and returns the first one.
    pub(crate) fn release_all(&mut self) -> Result<(), DriverError> {
        let first = self.backend_mut().map_or(Ok(()), |backend| backend.release_all());
        let pool = self.virtual_pool_mut();
        first.and(pool.map_or(Ok(()), |pool| pool.exec.release_all(&pool.pool)))
    }
}

impl fmt::Debug for Manager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(pool) = self.virtual_pool() {
            pool.pool.fmt(f)?;
        }
        self.backend().map_or(Ok(()), |backend| backend.fmt(f))
    }
}

impl From<BackendBlock> for Found {
    fn from(block: BackendBlock) -> Found {
        let BackendBlock { addr, len, id, at, hit } = block;
        let owner = match at {
            Some(at) => Owner::Backend { id: BlockId::from_number(id), at },
            None => Owner::Driver { id },
        };
        Found { addr, len, owner, hit }
    }
}

fn name_of(policy: &Policy) -> &'static str {
    match policy {
        Policy::Mixed(_) => "vramp",
        Policy::Vpmm => "vpmm",
    }
}

fn virtual_pool(driver: &Arc<dyn Driver>, config: &Config) -> Result<VirtualPool, CreateError> {
    if !driver.info().capabilities.virtual_memory {
        return Err(CreateError::NotSupported {
            preset: name_of(&config.policy),
            needed: "virtual memory management",
            instead: "stream-ordered",
        });
    }
    let limits = driver.info().limits;
    let page = config.page.unwrap_or(limits.page);
    if page.is_zero() || !page.is_multiple_of(limits.page) {
        return Err(CreateError::Granularity { page, granularity: limits.page });
    }
    let (span, usual) = match config.policy {
        Policy::Vpmm => (config.span, config.span),
        Policy::Mixed(_) => {
            let span = config.span.min(limits.address_space.unwrap_or(config.span));
            (span.round_down(page), FIRST_SPAN)
        }
    };
    if span.is_zero() {
        return Err(ConfigError::Span { span: config.span, page }.into());
    }
    let first_span = config.first_span.unwrap_or(usual).round_down(page).max(page).min(span);
    let pool = PoolConfig { page, span, first_span, limit: config.limit, policy: config.policy };
    let access = Access::resolve(&**driver, &config.sharing)?;
    Ok(VirtualPool::new(Arc::clone(driver), access, pool, config.progress.clone())?)
}
