//! The allocator that people use: one lock, four managers, one set of verbs.

use std::sync::{Arc, Mutex, MutexGuard};

use vramp_core::{
    Bytes, Census, Counters, Inconsistency, Mark, PoolConfig, StreamId, TorchConfig, TorchPool,
    TorchSegment,
};
use vramp_driver::{Driver, DriverError, Stream};

use crate::allocation::{Allocation, Owner};
use crate::caching::CachingPool;
use crate::config::{Config, Preset};
use crate::error::{AllocError, CreateError, FreeError, Report, UseError};
use crate::ordered::{OrderedOutcome, OrderedPool};
use crate::virtual_pool::{Refusal, VirtualPool};

/// What happened so far, over all the managers behind an allocator.
pub type Stats = Counters;

/// Memory of one device. Safe to share between threads; one lock is held for each call.
///
/// Streams belong to the allocator: [`Allocator::create_stream`] makes one, and work on memory must
/// be queued on the stream it is allocated for, freed on, or noted with [`Allocator::record_use`].
/// Dropping the allocator waits for its streams and gives everything back; [`Allocator::close`]
/// does the same and tells what failed.
pub struct Allocator {
    driver: Arc<dyn Driver>,
    inner: Mutex<Inner>,
}

struct Inner {
    /// The virtual pool, for the presets that have one.
    pool: Option<VirtualPool>,
    /// The driver's pool: the whole manager, or VPMM's for requests under a page.
    ordered: Option<OrderedPool>,
    /// PyTorch's caching allocator, for its presets.
    caching: Option<CachingPool>,
    /// Requests under this go to the driver's pool.
    bypass_below: Bytes,
    streams: Vec<Stream>,
    closed: bool,
}

impl Allocator {
    /// An allocator on a device. Takes no memory yet, unless the configuration says so.
    pub fn new(driver: Arc<dyn Driver>, config: Config) -> Result<Allocator, CreateError> {
        let info = driver.info();
        let granularity = info.limits.page;
        let capabilities = info.capabilities;
        let page = config.page.unwrap_or(granularity);
        let mut inner = Inner {
            pool: None,
            ordered: None,
            caching: None,
            bypass_below: Bytes::ZERO,
            streams: Vec::new(),
            closed: false,
        };
        if config.preset.is_torch() {
            inner.caching = Some(caching(&driver, &config)?);
        } else if config.preset != Preset::StreamOrdered {
            if !capabilities.virtual_memory {
                return Err(CreateError::NotSupported {
                    preset: config.preset.name(),
                    needed: "virtual memory management",
                    instead: Preset::StreamOrdered.name(),
                });
            }
            if page.is_zero() || !page.is_multiple_of(granularity) {
                return Err(CreateError::Granularity { page, granularity });
            }
            let span = config.span.min(info.limits.address_space.unwrap_or(config.span));
            let span =
                if config.preset == Preset::Vpmm { config.span } else { span.round_down(page) };
            let pool = PoolConfig { page, span, limit: config.limit, policy: config.policy() };
            inner.pool =
                Some(VirtualPool::new(Arc::clone(&driver), pool, config.progress.clone())?);
        }
        if config.preset == Preset::StreamOrdered && !capabilities.stream_ordered_pool {
            return Err(CreateError::NotSupported {
                preset: config.preset.name(),
                needed: "the driver's stream-ordered pool",
                instead: Preset::Vramp.name(),
            });
        }
        let takes_drivers = matches!(config.preset, Preset::Vpmm | Preset::StreamOrdered);
        if takes_drivers && capabilities.stream_ordered_pool {
            inner.ordered = Some(OrderedPool::new(Arc::clone(&driver), config.limit)?);
        }
        if config.preset == Preset::Vpmm && inner.ordered.is_some() {
            inner.bypass_below = page;
        }
        let prefill = config.prefill_bytes(page);
        let allocator = Allocator { driver, inner: Mutex::new(inner) };
        allocator.prefill_at_start(prefill)?;
        Ok(allocator)
    }

    fn prefill_at_start(&self, prefill: Option<Bytes>) -> Result<(), CreateError> {
        let refused = |prefill, reason: &str| {
            Err(CreateError::Prefill { prefill, reason: reason.to_owned() })
        };
        let Some(prefill) = prefill else {
            return refused(Bytes::new(u64::MAX), "the number of pages does not fit any memory");
        };
        if prefill.is_zero() {
            return Ok(());
        }
        let stream = self.create_stream()?;
        match self.prefill(prefill, stream) {
            Ok(()) => Ok(()),
            Err(error) => refused(prefill, &error.to_string()),
        }
    }

    /// The device.
    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.driver
    }

    // --- streams ---

    /// A new stream on the device. One driver call.
    pub fn create_stream(&self) -> Result<StreamId, DriverError> {
        let stream = self.driver.create_stream()?;
        let mut inner = self.lock_anyway();
        let inner = &mut *inner;
        let id = match (&mut inner.pool, &mut inner.caching) {
            (Some(virtual_pool), _) => {
                virtual_pool.exec.streams.push(stream);
                virtual_pool.pool.add_stream()
            }
            (None, Some(caching)) => caching.add_stream(stream),
            (None, None) => StreamId::new(inner.streams.len() as u32),
        };
        inner.streams.push(stream);
        Ok(id)
    }

    /// The driver's own name of a stream, to queue work on it. `None` if it is unknown here.
    pub fn stream(&self, id: StreamId) -> Option<Stream> {
        self.lock_anyway().streams.get(id.index()).copied()
    }

    // --- memory ---

    /// At least `size` bytes for work on `stream`. A request for nothing gets a unique address too.
    ///
    /// Cost: no driver call for memory that the stream itself freed, a query for each open event
    /// where another stream's is looked for, one call in the driver's pool. A miss costs
    /// one create, map and set-access for each new chunk, a map and a set-access for each moved one.
    ///
    /// # Errors
    /// [`AllocError::OutOfMemory`] tells what is free and what to do; any other driver error leaves
    /// the allocator as it was.
    pub fn malloc(&self, size: Bytes, stream: StreamId) -> Result<Allocation, AllocError> {
        let mut inner = self.lock()?;
        let raw = inner.stream(stream).ok_or(AllocError::UnknownStream(stream))?;
        let bypass = size < inner.bypass_below;
        let Inner { pool, ordered, caching, .. } = &mut *inner;
        let refusal = match (pool, ordered, caching) {
            (_, _, Some(caching)) => match caching.malloc(size, stream) {
                Ok(allocation) => return Ok(allocation),
                Err(refusal) => refusal,
            },
            (Some(pool), ..) if !bypass => match pool.malloc(size, stream) {
                Ok(allocation) => return Ok(allocation),
                Err(refusal) => refusal,
            },
            (_, Some(ordered), _) => match ordered.malloc(size, stream, raw)? {
                OrderedOutcome::Placed(allocation) => return Ok(allocation),
                OrderedOutcome::Full(shortage, error) => Refusal::Short(shortage, error),
            },
            _ => unreachable!("an allocator has a manager"),
        };
        drop(inner);
        Err(self.refused(refusal))
    }

    fn refused(&self, refusal: Refusal) -> AllocError {
        match refusal {
            Refusal::Driver(error) => AllocError::Driver(error),
            Refusal::Short(shortage, failed_call) => {
                let card = self.driver.memory_info().ok();
                AllocError::OutOfMemory(Box::new(Report { shortage, card, failed_call }))
            }
        }
    }

    /// Notes that work queued on `stream` so far uses the allocation. No driver call.
    pub fn record_use(&self, allocation: &Allocation, stream: StreamId) -> Result<(), UseError> {
        let mut inner = self.lock()?;
        inner.stream(stream).ok_or(UseError::UnknownStream(stream))?;
        if !inner.owns(allocation) {
            return Err(UseError::Foreign(allocation.addr));
        }
        match allocation.owner {
            Owner::Pool { id, .. } => {
                let pool = inner.pool.as_mut().expect("a pool's block has a pool");
                pool.pool.record_use(id, stream).expect("the block was looked up");
            }
            Owner::Driver { slot } => {
                let ordered = inner.ordered.as_mut().expect("a driver's block has a driver's pool");
                ordered.record_use(slot, stream);
            }
            Owner::Caching { id, .. } => {
                let caching = inner.caching.as_mut().expect("a cached block has its pool");
                caching.pool.record_use(id, stream).expect("the block was looked up");
            }
        }
        Ok(())
    }

    /// Takes the memory back. All work on it must be queued on `stream`, ordered before its present
    /// end, or noted with [`Allocator::record_use`]; `stream` may be another one than the
    /// allocation's.
    ///
    /// No driver call in the default preset. Returns the mark up to which the memory is in use.
    ///
    /// # Errors
    /// [`FreeError::Foreign`] and [`FreeError::UnknownStream`] give the allocation back and leave
    /// everything as it was.
    pub fn free(
        &self,
        allocation: Allocation,
        stream: StreamId,
    ) -> Result<Option<Mark>, FreeError> {
        let mut inner = self.lock()?;
        let Some(raw) = inner.stream(stream) else {
            return Err(FreeError::UnknownStream { stream, allocation });
        };
        if !inner.owns(&allocation) {
            return Err(FreeError::Foreign(allocation));
        }
        let Inner { pool, ordered, caching, streams, .. } = &mut *inner;
        match allocation.owner {
            Owner::Pool { id, .. } => {
                let pool = pool.as_mut().expect("a pool's block has a pool");
                let mark = pool.pool.now(stream);
                pool.free(id, stream)?;
                Ok(Some(mark))
            }
            Owner::Driver { slot } => {
                let ordered = ordered.as_mut().expect("a driver's block has a driver's pool");
                ordered.free(slot, raw, streams)?;
                Ok(None)
            }
            Owner::Caching { id, .. } => {
                let caching = caching.as_mut().expect("a cached block has its pool");
                caching.free(id, stream)?;
                Ok(None)
            }
        }
    }

    /// Adds `len` bytes ahead of demand, free for `stream`.
    pub fn prefill(&self, len: Bytes, stream: StreamId) -> Result<(), AllocError> {
        let mut inner = self.lock()?;
        inner.stream(stream).ok_or(AllocError::UnknownStream(stream))?;
        if let Some(caching) = &mut inner.caching {
            return caching.prefill(len, stream).map_err(|refusal| self.refused(refusal));
        }
        let Some(pool) = &mut inner.pool else { return Ok(()) };
        if pool.prefill(len, stream)? {
            return Ok(());
        }
        let request = vramp_core::Request { size: len, stream };
        let shortage = vramp_core::Attempt::new(request).shortage(&pool.pool);
        let card = self.driver.memory_info().ok();
        Err(AllocError::OutOfMemory(Box::new(Report { shortage, card, failed_call: None })))
    }

    /// Gives idle memory back to the card until the allocator holds no more than `to`, or nothing
    /// more is idle. PyTorch's allocator waits for other streams' uses of freed blocks and for all
    /// work on the device, as its `empty_cache` does; the others never wait.
    pub fn trim(&self, to: Bytes) -> Result<(), AllocError> {
        let mut inner = self.lock()?;
        if let Some(pool) = &mut inner.pool {
            pool.trim(to)?;
        }
        if let Some(ordered) = &mut inner.ordered {
            ordered.trim(to)?;
        }
        if let Some(caching) = &mut inner.caching {
            caching.trim(to)?;
        }
        Ok(())
    }

    // --- looking in ---

    /// What happened so far. A driver call where the driver's pool is part of it.
    pub fn stats(&self) -> Result<Stats, DriverError> {
        let inner = self.lock_anyway();
        if let Some(caching) = &inner.caching {
            return Ok(caching.counters());
        }
        let pool = inner.pool.as_ref().map(|pool| pool.pool.counters());
        let ordered = inner.ordered.as_ref().map(OrderedPool::counters).transpose()?;
        Ok(match (pool, ordered) {
            (Some(pool), Some(ordered)) => added(pool, ordered),
            (Some(one), None) | (None, Some(one)) => one,
            (None, None) => Stats::default(),
        })
    }

    /// Where every byte of the virtual pool is; empty for presets without one. O(n).
    pub fn census(&self) -> Census {
        self.lock_anyway().pool.as_ref().map(|pool| pool.pool.census()).unwrap_or_default()
    }

    /// Checks every invariant of the virtual pool, or of PyTorch's allocator. O(n log n).
    pub fn audit(&self) -> Result<(), Inconsistency> {
        let inner = self.lock_anyway();
        inner.pool.as_ref().map_or(Ok(()), |pool| pool.pool.audit())?;
        inner.caching.as_ref().map_or(Ok(()), |caching| caching.pool.audit())
    }

    /// Lets `look` see the core's state: for prints, layouts and tests. `None` for the driver's
    /// pool.
    pub fn inspect<R>(&self, look: impl FnOnce(&vramp_core::Pool) -> R) -> Option<R> {
        self.lock_anyway().pool.as_ref().map(|pool| look(&pool.pool))
    }

    /// Lets PyTorch's allocator begin with recorded segments: before the first request, see
    /// [`TorchPool::restore`]. One allocation of the driver's for each. Returns the blocks that were
    /// in users' hands, in order; nothing for other presets and impossible segments.
    pub fn restore(
        &self,
        segments: &[TorchSegment],
    ) -> Result<Vec<Option<Allocation>>, AllocError> {
        let mut inner = self.lock()?;
        let Some(caching) = &mut inner.caching else { return Ok(Vec::new()) };
        Ok(caching.restore(segments)?)
    }

    /// Lets `look` see the state of PyTorch's allocator: its statistics, what the last request did
    /// on the device. `None` for other presets.
    pub fn inspect_torch<R>(&self, look: impl FnOnce(&TorchPool) -> R) -> Option<R> {
        self.lock_anyway().caching.as_ref().map(|caching| look(&caching.pool))
    }

    // --- the end ---

    /// Waits for the allocator's streams and gives everything back to the device.
    ///
    /// # Errors
    /// The first call that failed; the others were made all the same.
    pub fn close(self) -> Result<(), DriverError> {
        self.lock_anyway().close()
    }

    /// The lock, for calls that change the pool. A panic that left it consistent is forgiven.
    fn lock(&self) -> Result<MutexGuard<'_, Inner>, Inconsistency> {
        match self.inner.lock() {
            Ok(inner) => Ok(inner),
            Err(poisoned) => {
                let inner = poisoned.into_inner();
                if let Some(pool) = &inner.pool {
                    pool.pool.audit()?;
                }
                if let Some(caching) = &inner.caching {
                    caching.pool.audit()?;
                }
                self.inner.clear_poison();
                Ok(inner)
            }
        }
    }

    fn lock_anyway(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl Inner {
    fn stream(&self, id: StreamId) -> Option<Stream> {
        self.streams.get(id.index()).copied()
    }

    /// False for what another allocator handed out.
    fn owns(&self, allocation: &Allocation) -> bool {
        match (allocation.owner, &self.pool, &self.ordered) {
            (Owner::Pool { id, at }, Some(pool), _) => {
                pool.pool.block(id).is_ok_and(|block| block.at == at)
                    && pool.exec.addr(at) == allocation.addr
            }
            (Owner::Driver { slot }, _, Some(ordered)) => ordered.holds(slot, allocation.addr),
            (Owner::Caching { id, at }, ..) => {
                let caching = self.caching.as_ref();
                caching.is_some_and(|caching| caching.holds(id, at, allocation.addr))
            }
            _ => false,
        }
    }

    fn close(&mut self) -> Result<(), DriverError> {
        if std::mem::replace(&mut self.closed, true) {
            return Ok(());
        }
        let streams = std::mem::take(&mut self.streams);
        if let Some(caching) = &mut self.caching {
            return caching.close();
        }
        let ordered = self.ordered.as_mut().map_or(Ok(()), |ordered| ordered.close(&streams));
        let pool = match &mut self.pool {
            Some(VirtualPool { pool, exec, .. }) => exec.close(pool),
            None => {
                let mut first = Ok(());
                for stream in streams {
                    let driver = self.ordered.as_ref().map(OrderedPool::driver);
                    first =
                        first.and(driver.map_or(Ok(()), |driver| driver.destroy_stream(stream)));
                }
                first
            }
        };
        ordered.and(pool)
    }
}

impl std::fmt::Debug for Allocator {
    /// The virtual pool's census and every region in address order; the statistics of PyTorch's
    /// allocator.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let inner = self.lock_anyway();
        match (&inner.pool, &inner.caching) {
            (Some(pool), _) => std::fmt::Debug::fmt(&pool.pool, f),
            (None, Some(caching)) => std::fmt::Debug::fmt(caching.pool.stats(), f),
            (None, None) => f.write_str("the driver's own pool"),
        }
    }
}

impl Drop for Allocator {
    fn drop(&mut self) {
        // Nobody is left to tell; `close` is for those who want to know.
        let _ = self.lock_anyway().close();
    }
}

/// PyTorch's allocator on a device.
fn caching(driver: &Arc<dyn Driver>, config: &Config) -> Result<CachingPool, CreateError> {
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
    Ok(CachingPool::new(Arc::clone(driver), pool, config.progress.clone()))
}

fn added(pool: Stats, ordered: Stats) -> Stats {
    Stats {
        live: pool.live + ordered.live,
        live_peak: pool.live_peak + ordered.live_peak,
        reserved: pool.reserved + ordered.reserved,
        reserved_peak: pool.reserved_peak + ordered.reserved_peak,
        hits: pool.hits,
        misses: pool.misses,
        placed: pool.placed + ordered.placed,
        freed: pool.freed + ordered.freed,
        ..pool
    }
}
