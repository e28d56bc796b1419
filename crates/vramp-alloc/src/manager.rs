//! The memory managers of an allocator, with one interface.

use std::fmt;
use std::sync::Arc;

use vramp_core::{
    AddrRange, ArenaBlockId, Attempt, Bytes, Census, ConfigError, Counters, Inconsistency,
    PoolConfig, Request, StreamId, StreamTable,
};
use vramp_driver::{Driver, DriverError, PoolUsage, Stream};
use vramp_model::{TorchConfig, TorchPool};

use crate::allocation::{Allocation, Found, Owner};
use crate::config::{Config, FIRST_SPAN, Preset};
use crate::error::{CreateError, Largest, QuarantinedMemory};
use crate::sharing::Access;
use crate::stream_end::StreamEnd;
use crate::stream_ordered::OrderedPool;
use crate::torch_pool::CachingPool;
use crate::under_a_page::UnderAPage;
use crate::virtual_pool::{FreeMemory, HeapCell, Refusal, VirtualPool};

/// The manager that places blocks.
#[expect(clippy::large_enum_variant, reason = "an allocator has one, and never moves it")]
pub(crate) enum Manager {
    /// The virtual pool. In VPMM the driver's pool serves requests under a page.
    Virtual { pool: VirtualPool, under_a_page: Option<UnderAPage> },
    /// The driver's stream-ordered pool.
    Ordered(OrderedPool),
    /// PyTorch's caching allocator.
    Caching(CachingPool),
}

impl Manager {
    pub(crate) fn new(driver: &Arc<dyn Driver>, config: &Config) -> Result<Manager, CreateError> {
        let capabilities = driver.info().capabilities;
        let lacks = |needed, instead: Preset| {
            let (preset, instead) = (config.preset.name(), instead.name());
            Err(CreateError::NotSupported { preset, needed, instead })
        };
        let ordered = || OrderedPool::new(Arc::clone(driver), config.limit);
        match config.preset {
            Preset::Vramp | Preset::Vpmm if !capabilities.virtual_memory => {
                lacks("virtual memory management", Preset::StreamOrdered)
            }
            Preset::StreamOrdered if !capabilities.stream_ordered_pool => {
                lacks("the driver's stream-ordered pool", Preset::Vramp)
            }
            Preset::Vramp => {
                Ok(Manager::Virtual { pool: virtual_pool(driver, config)?, under_a_page: None })
            }
            // No block is a page long: the document's way to disable the pool.
            Preset::Vpmm if config.page > Some(driver.info().limits.memory) => {
                if !capabilities.stream_ordered_pool {
                    return lacks("the driver's stream-ordered pool", Preset::Vramp);
                }
                Ok(Manager::Ordered(ordered()?))
            }
            Preset::Vpmm => {
                let pool = virtual_pool(driver, config)?;
                let ordered = capabilities.stream_ordered_pool.then(ordered).transpose()?;
                let under_a_page = ordered.map(|ordered| UnderAPage::new(ordered, config.limit));
                Ok(Manager::Virtual { pool, under_a_page })
            }
            Preset::StreamOrdered => Ok(Manager::Ordered(ordered()?)),
            Preset::Torch | Preset::TorchExpandable => {
                Ok(Manager::Caching(caching_pool(driver, config)?))
            }
        }
    }

    /// Returns a manager without memory, for a closed allocator. No driver call.
    pub(crate) fn without_memory(driver: &Arc<dyn Driver>) -> Manager {
        Manager::Ordered(OrderedPool::unused(Arc::clone(driver), None))
    }

    pub(crate) fn virtual_pool(&self) -> Option<&VirtualPool> {
        match self {
            Manager::Virtual { pool, .. } => Some(pool),
            Manager::Ordered(_) | Manager::Caching(_) => None,
        }
    }

    /// Returns what memory is created and mapped as; `None` for the driver's pool.
    pub(crate) fn access_mut(&mut self) -> Option<&mut Access> {
        match self {
            Manager::Virtual { pool, .. } => Some(&mut pool.exec.access),
            Manager::Caching(caching) => Some(&mut caching.access),
            Manager::Ordered(_) => None,
        }
    }

    /// Returns PyTorch's caching allocator, if the manager is that.
    pub(crate) fn caching(&self) -> Option<&CachingPool> {
        match self {
            Manager::Caching(caching) => Some(caching),
            Manager::Virtual { .. } | Manager::Ordered(_) => None,
        }
    }

    pub(crate) fn caching_mut(&mut self) -> Option<&mut CachingPool> {
        match self {
            Manager::Caching(caching) => Some(caching),
            Manager::Virtual { .. } | Manager::Ordered(_) => None,
        }
    }

    pub(crate) fn virtual_pool_mut(&mut self) -> Option<&mut VirtualPool> {
        match self {
            Manager::Virtual { pool, .. } => Some(pool),
            Manager::Ordered(_) | Manager::Caching(_) => None,
        }
    }

    /// Returns what threads copy: the heaps by stream, and the reservations by span, which only grow.
    #[inline]
    pub(crate) fn heaps_and_spans(&self) -> (&StreamTable<Arc<HeapCell>>, &[AddrRange]) {
        static NO_HEAPS: StreamTable<Arc<HeapCell>> = StreamTable::new();
        self.virtual_pool().map_or((&NO_HEAPS, &[]), |pool| (&pool.heaps, pool.exec.spans()))
    }

    fn ordered(&self) -> Option<&OrderedPool> {
        match self {
            Manager::Virtual { under_a_page, .. } => {
                under_a_page.as_ref().map(|small| &small.ordered)
            }
            Manager::Ordered(ordered) => Some(ordered),
            Manager::Caching(_) => None,
        }
    }

    /// Adds a stream; `None` for one that ended. Ids below it that were not added are those of streams
    /// that ended, whose work is over.
    pub(crate) fn add_stream(&mut self, id: StreamId, stream: Option<Stream>) {
        match self {
            Manager::Virtual { pool, .. } => pool.add_stream(id, stream),
            Manager::Caching(caching) => caching.add_stream(id, stream),
            Manager::Ordered(_) => {}
        }
    }

    /// Makes all ids below this number known: those that were not added are of streams that ended, whose
    /// work is over.
    pub(crate) fn skip_streams(&mut self, ids: usize) {
        match self {
            Manager::Virtual { pool, .. } => pool.skip_streams(ids),
            Manager::Caching(caching) => caching.pool.skip_streams(ids),
            Manager::Ordered(_) => {}
        }
    }

    /// Ends a stream: its memory is free for all streams once its work is over, which it is if
    /// there is no event. No driver call.
    pub(crate) fn end_stream(&mut self, id: StreamId, end: Option<&Arc<StreamEnd>>) {
        match self {
            Manager::Virtual { pool, under_a_page } => {
                if let Some(small) = under_a_page {
                    small.ordered.end_stream(id, end);
                }
                pool.end_stream(id, end);
            }
            Manager::Ordered(ordered) => ordered.end_stream(id, end),
            Manager::Caching(caching) => caching.end_stream(id, end),
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
            Manager::Virtual { pool, under_a_page: Some(small) } => {
                small.malloc(pool, size, stream, raw, contended)
            }
            Manager::Virtual { pool, under_a_page: None } => pool.find(size, stream, contended),
            Manager::Ordered(ordered) => ordered.find(size, stream, raw),
            Manager::Caching(caching) => caching.malloc(size, stream),
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
            (
                Manager::Virtual { under_a_page: Some(UnderAPage { ordered, .. }), .. }
                | Manager::Ordered(ordered),
                Owner::Driver { slot },
            ) => ordered.record_use(slot, stream),
            (Manager::Caching(caching), Owner::Caching { id, .. }) => {
                caching.pool.record_use(id, stream).expect("the block was looked up");
            }
            (_, owner) => unreachable!("{owner:?} is not of this manager"),
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
            (
                Manager::Virtual { under_a_page: Some(UnderAPage { ordered, .. }), .. }
                | Manager::Ordered(ordered),
                Owner::Driver { slot },
            ) => ordered.free(slot, stream, streams),
            (Manager::Caching(caching), Owner::Caching { id, .. }) => caching.free(id, stream),
            (_, owner) => unreachable!("{owner:?} is not of this manager"),
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
            (
                Manager::Virtual { under_a_page: Some(UnderAPage { ordered, .. }), .. }
                | Manager::Ordered(ordered),
                Owner::Driver { slot },
            ) => ordered.holds(slot, allocation.addr),
            (Manager::Caching(caching), Owner::Caching { id, at }) => {
                caching.holds(id, at, allocation.addr)
            }
            _ => false,
        }
    }

    /// Returns what the largest block of a shortage is, for a request of this size.
    pub(crate) fn largest_is(&self, size: Bytes) -> Largest {
        match self {
            Manager::Virtual { pool, under_a_page: Some(_) } if size < pool.pool.config().page => {
                Largest::Unknown
            }
            Manager::Virtual { .. } => Largest::ByRemapping,
            // With expandable segments PyTorch's allocator unmaps unused ends, but moves nothing.
            Manager::Caching(_) => Largest::FreeBlock,
            Manager::Ordered(_) => Largest::Unknown,
        }
    }

    /// Reserves memory ahead of demand.
    pub(crate) fn prefill(&mut self, len: Bytes, stream: StreamId) -> Result<(), Refusal> {
        match self {
            Manager::Virtual { pool, under_a_page } => {
                let prefilled = match under_a_page {
                    Some(small) => small.prefill(pool, len, stream),
                    None => pool.prefill(len, stream),
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
            Manager::Ordered(_) => Ok(()),
            Manager::Caching(caching) => caching.prefill(len, stream),
        }
    }

    /// Returns what failed calls left unusable. O(what is).
    pub(crate) fn quarantined(&self) -> QuarantinedMemory {
        match self {
            Manager::Virtual { pool, .. } => pool.quarantined(),
            Manager::Caching(caching) => caching.quarantined(),
            Manager::Ordered(_) => QuarantinedMemory::default(),
        }
    }

    pub(crate) fn trim(&mut self, to: Bytes) -> Result<(), DriverError> {
        match self {
            Manager::Virtual { pool, under_a_page: Some(small) } => small.trim(pool, to),
            Manager::Virtual { pool, under_a_page: None } => pool.trim(to),
            Manager::Ordered(ordered) => ordered.trim(to),
            Manager::Caching(caching) => caching.trim(to),
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
            Manager::Ordered(ordered) => {
                ordered.set_limit(limit.map(|limit| limit.saturating_sub(elsewhere)));
            }
            Manager::Caching(caching) => {
                caching.pool.set_limit(limit.map(|limit| limit.saturating_sub(elsewhere)));
            }
        }
    }

    /// Returns the counts of driver work. One driver call where the driver's pool is in use.
    pub(crate) fn counters(&self) -> Result<Counters, DriverError> {
        Ok(self.counters_with(self.driver_usage()?))
    }

    /// Returns the usage of the driver's pool, if it is in use. One driver call then.
    pub(crate) fn driver_usage(&self) -> Result<Option<PoolUsage>, DriverError> {
        self.ordered().map(OrderedPool::usage).transpose()
    }

    /// Returns the counts of driver work, with that of the driver's pool. No driver call.
    pub(crate) fn counters_with(&self, usage: Option<PoolUsage>) -> Counters {
        let mut counters = self.known_counters().unwrap_or_default();
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

    /// Returns freed memory of the virtual pool; empty for the others.
    pub(crate) fn free_memory(&self) -> FreeMemory {
        self.virtual_pool().map(VirtualPool::free_memory).unwrap_or_default()
    }

    /// Returns the physical memory reserved, without that of the driver's pool. No driver call.
    pub(crate) fn reserved(&self) -> Bytes {
        self.known_counters().map_or(Bytes::ZERO, |counters| counters.reserved)
    }

    /// Returns the blocks that the driver's pool placed: the driver does not say whether they were
    /// hits.
    pub(crate) fn placed_by_driver(&self) -> u64 {
        self.ordered().map_or(0, OrderedPool::placed)
    }

    /// Returns the counts of driver work, without that of the driver's pool. No driver call.
    pub(crate) fn known_counters(&self) -> Option<Counters> {
        match self {
            Manager::Virtual { pool, .. } => Some(pool.counters()),
            Manager::Caching(caching) => Some(caching.counters()),
            Manager::Ordered(_) => None,
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
            Manager::Caching(caching) => caching.reset_peaks(),
            Manager::Ordered(_) => {}
        }
    }

    pub(crate) fn audit(&self) -> Result<(), Inconsistency> {
        match self {
            Manager::Virtual { pool, .. } => pool.audit(),
            Manager::Caching(caching) => caching.pool.audit(),
            Manager::Ordered(_) => Ok(()),
        }
    }

    pub(crate) fn census(&self) -> Census {
        self.virtual_pool().map(VirtualPool::census).unwrap_or_default()
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
        match self {
            Manager::Virtual { pool, under_a_page } => {
                let first =
                    under_a_page.as_mut().map_or(Ok(()), |small| small.ordered.release_all());
                first.and(pool.exec.release_all(&pool.pool))
            }
            Manager::Ordered(ordered) => ordered.release_all(),
            Manager::Caching(caching) => caching.release_all(),
        }
    }
}

impl fmt::Debug for Manager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Manager::Virtual { pool, under_a_page: None } => pool.pool.fmt(f),
            Manager::Virtual { pool, under_a_page: Some(small) } => {
                pool.pool.fmt(f)?;
                small.ordered.fmt(f)
            }
            Manager::Ordered(ordered) => ordered.fmt(f),
            Manager::Caching(caching) => caching.pool.fmt(f),
        }
    }
}

/// Creates PyTorch's allocator on a device.
fn caching_pool(driver: &Arc<dyn Driver>, config: &Config) -> Result<CachingPool, CreateError> {
    let info = driver.info();
    let expandable_segments =
        config.torch.expandable_segments || config.preset == Preset::TorchExpandable;
    if expandable_segments && !info.capabilities.virtual_memory {
        return Err(CreateError::NotSupported {
            preset: config.preset.name(),
            needed: "virtual memory management",
            instead: Preset::Torch.name(),
        });
    }
    let (page, granularity) = (Bytes::mib(2), info.limits.page);
    if expandable_segments && !page.is_multiple_of(granularity) {
        return Err(CreateError::Granularity { page, granularity });
    }
    let torch = TorchConfig { expandable_segments, ..config.torch.clone() };
    let pool = TorchPool::new(torch, info.limits.memory, config.limit);
    let access = Access::resolve(&**driver, &config.sharing)?;
    Ok(CachingPool::new(Arc::clone(driver), access, pool, config))
}

fn virtual_pool(driver: &Arc<dyn Driver>, config: &Config) -> Result<VirtualPool, CreateError> {
    let limits = driver.info().limits;
    let page = config.page.unwrap_or(limits.page);
    if page.is_zero() || !page.is_multiple_of(limits.page) {
        return Err(CreateError::Granularity { page, granularity: limits.page });
    }
    let (span, usual) = match config.preset {
        Preset::Vpmm => (config.span, config.span),
        _ => {
            let span = config.span.min(limits.address_space.unwrap_or(config.span));
            (span.round_down(page), FIRST_SPAN)
        }
    };
    if span.is_zero() {
        return Err(ConfigError::Span { span: config.span, page }.into());
    }
    let first_span = config.first_span.unwrap_or(usual).round_down(page).max(page).min(span);
    let pool = PoolConfig { page, span, first_span, limit: config.limit, policy: config.policy() };
    let access = Access::resolve(&**driver, &config.sharing)?;
    Ok(VirtualPool::new(Arc::clone(driver), access, pool, config.progress.clone())?)
}
