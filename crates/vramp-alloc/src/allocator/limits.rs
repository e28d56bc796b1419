//! The memory limit, memory reserved before the first request (by a prefill, or as a backend placed it), and
//! returning free memory to the card.

use std::any::Any;

use vramp_core::{Bytes, StreamId};
use vramp_driver::DriverResult;
use vramp_ipc::budget::Usage;

use super::Allocator;
use crate::allocation::Allocation;
use crate::backend::{Backend, BackendBlock};
use crate::error::{AllocError, CreateError, Unusable};
use crate::group::Group;
use crate::observe::Event;
use crate::shared::Inner;
use crate::virtual_pool::Refusal;

/// # Limits, and returning memory to the card
impl Allocator {
    /// Returns the most physical memory that this allocator and its pools may reserve together.
    pub fn limit(&self) -> Option<Bytes> {
        self.shared.group.limit()
    }

    /// Returns the bytes that this allocator and its pools can create now: what is free on the card, and at
    /// most what is left of the limit. Zero if the driver does not say. One driver call, no lock.
    pub fn room(&self) -> Bytes {
        self.shared.room()
    }

    /// Changes the limit. Idle memory above it is returned to the card at once. Memory in use
    /// stays, and nothing more is reserved until the allocator is below the limit.
    ///
    /// # Errors
    /// A driver call failed. The limit holds all the same.
    pub fn set_limit(&self, limit: Option<Bytes>) -> Result<(), AllocError> {
        self.set_growth_limit(limit)?;
        match limit {
            Some(limit) => self.trim(limit),
            None => Ok(()),
        }
    }

    /// Changes the limit and releases nothing: idle memory above it goes on to serve requests, as in
    /// PyTorch's allocator.
    ///
    /// # Errors
    /// As of [`Allocator::set_limit`].
    pub fn set_growth_limit(&self, limit: Option<Bytes>) -> Result<(), AllocError> {
        Unusable::check_fork()?;
        self.shared.group.set_growth_limit(limit)
    }

    /// Sets the limit to a fraction of the card's memory, as PyTorch's
    /// `set_per_process_memory_fraction` does.
    ///
    /// # Errors
    /// [`AllocError::Fraction`] unless it is from 0 to 1.
    pub fn set_memory_fraction(&self, fraction: f64) -> Result<(), AllocError> {
        if !(0.0..=1.0).contains(&fraction) {
            return Err(AllocError::Fraction(fraction));
        }
        let memory = self.shared.driver.info().limits.memory.count();
        self.set_growth_limit(Some(Bytes::new((memory as f64 * fraction) as u64)))
    }

    /// Returns idle memory to the card until no more than `to` is reserved, or nothing more is
    /// idle. Never waits for work.
    ///
    /// # Errors
    /// A driver call failed. What was returned before it stays returned.
    pub fn trim(&self, to: Bytes) -> Result<(), AllocError> {
        let mut inner = self.shared.lock_asleep()?;
        self.shared.imports.trim(&*self.shared.driver);
        self.shared.refresh(&mut inner);
        let before = inner.manager.reserved();
        let trimmed = inner.manager.trim(to);
        let after = inner.manager.reserved();
        self.shared.note_reserved(&inner);
        drop(inner);
        if after < before && self.shared.observers.is_observed() {
            self.shared.observers.notify(&Event::Shrunk { bytes: before - after });
        }
        Ok(trimmed?)
    }

    /// Returns all idle memory to the card, as `torch.cuda.empty_cache` does. Unlike PyTorch's
    /// allocator it also returns memory that shares a segment with a live block.
    ///
    /// # Errors
    /// As of [`Allocator::trim`].
    pub fn empty_cache(&self) -> Result<(), AllocError> {
        self.trim(Bytes::ZERO)
    }

    /// Waits on the host for queued work that uses freed memory of this pool, so that a trim can
    /// release that memory. Returns true if some work was found to be over. No lock is held during the
    /// wait. Work of streams that capture graphs is not waited for.
    ///
    /// # Errors
    /// A driver call failed.
    pub fn wait_for_freed_memory(&self) -> Result<bool, AllocError> {
        Unusable::check_fork()?;
        self.shared.wait_until_idle()
    }

    /// Returns idle memory above the garbage collection threshold.
    pub(super) fn collect_garbage(&self, inner: &mut Inner) {
        let Some(threshold) = self.config.garbage_collection_threshold else { return };
        let whole = self.shared.group.limit().unwrap_or(self.shared.driver.info().limits.memory);
        let keep = Bytes::new((whole.count() as f64 * threshold) as u64);
        if inner.manager.reserved() > keep {
            // The request itself was served. The next trim finds what a failed one left.
            let _ = inner.manager.trim(keep);
        }
    }
}

impl Group {
    /// Changes the limit. Once it returned, no pool grows beyond it.
    pub(crate) fn set_growth_limit(&self, limit: Option<Bytes>) -> Result<(), AllocError> {
        self.set_limit(limit);
        for member in self.members() {
            let Some(mut inner) = member.lock_open()? else { continue };
            inner.manager.set_limit(limit, None);
        }
        Ok(())
    }

    /// Returns idle memory of the pools to the card until so many bytes were, or nothing more is idle.
    pub(crate) fn trim_by(&self, bytes: Bytes) -> Result<(), AllocError> {
        let to = self.reserved().saturating_sub(bytes);
        for member in self.members() {
            let excess = self.reserved().saturating_sub(to);
            if excess.is_zero() {
                break;
            }
            let Some(mut inner) = member.lock_open()? else { continue };
            member.refresh(&mut inner);
            let before = inner.manager.reserved();
            let trimmed = inner.manager.trim(before.saturating_sub(excess));
            let after = inner.manager.reserved();
            member.note_reserved(&inner);
            drop(inner);
            if after < before && member.observers.is_observed() {
                member.observers.notify(&Event::Shrunk { bytes: before - after });
            }
            trimmed?;
        }
        Ok(())
    }

    /// Waits on the host for work that uses freed memory of the pools. What cannot be waited for stays.
    pub(crate) fn wait_until_idle(&self) {
        for member in self.members() {
            let _ = member.wait_until_idle();
        }
    }

    /// Returns what the memory of the pools is used for. Takes the lock of each.
    pub(crate) fn usage(&self) -> Usage {
        let mut usage = Usage::default();
        for member in self.members() {
            let inner = member.lock_anyway();
            if inner.closed {
                continue;
            }
            usage.live += inner.counts().live().count();
            if let Some(pool) = inner.manager.virtual_pool() {
                usage.cached += pool.pool.idle().count();
                let (committed, parked) = pool.tables.bytes();
                usage.live += committed.count();
                usage.parked += parked.count();
                let asleep = pool.exec.asleep.as_ref();
                usage.asleep += asleep.map_or(0, |asleep| asleep.released().count());
            }
        }
        usage
    }
}

/// # Memory reserved ahead
impl Allocator {
    pub(super) fn prefill_at_start(&self, prefill: Option<Bytes>) -> Result<(), CreateError> {
        let refused = |prefill, reason: &str| {
            Err(CreateError::Prefill { prefill, reason: reason.to_owned() })
        };
        let Some(prefill) = prefill else {
            return refused(Bytes::new(u64::MAX), "so many pages fit no memory");
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

    /// Reserves `len` bytes of physical memory ahead of demand, free for `stream`.
    ///
    /// # Errors
    /// As of [`Allocator::malloc`].
    pub fn prefill(&self, len: Bytes, stream: StreamId) -> Result<(), AllocError> {
        let mut inner = self.shared.lock_for_memory()?;
        let raw = inner.open_stream(stream).ok_or(AllocError::UnknownStream(stream))?;
        inner.check_host()?;
        let prefilled = inner.manager.prefill(len, stream, raw);
        drop(inner);
        match prefilled {
            Ok(()) => Ok(()),
            Err(Refusal::Driver(error)) => Err(AllocError::Driver(error)),
            Err(Refusal::Arena(refused)) => Err(AllocError::Arena(Box::new(refused))),
            Err(Refusal::Host(short)) => Err(AllocError::HostMemory(short)),
            Err(Refusal::Short(shortage, failed_call)) => {
                let report = self.shared.report(*shortage, failed_call, stream);
                Err(AllocError::OutOfMemory(Box::new(report)))
            }
        }
    }

    /// Returns blocks that a backend placed without a request, such as those of a recording, as
    /// allocations: of each that `placed` returns the stream, the bytes requested and the block. Empty
    /// where no backend of this kind serves the allocator.
    ///
    /// # Errors
    /// A driver call failed.
    pub fn adopt_blocks<B: Backend>(
        &self,
        placed: impl FnOnce(&mut B) -> DriverResult<Vec<(StreamId, Bytes, Option<BackendBlock>)>>,
    ) -> Result<Vec<Option<Allocation>>, AllocError> {
        let mut guard = self.shared.lock()?;
        let inner = &mut *guard;
        self.shared.refresh(inner);
        let backend: Option<&mut dyn Any> = inner.manager.backend_mut().map(|it| it as _);
        let Some(backend) = backend.and_then(|it| it.downcast_mut::<B>()) else {
            return Ok(Vec::new());
        };
        let mut adopted = Vec::new();
        for (stream, requested, block) in placed(backend)? {
            adopted.push(block.map(|block| {
                inner.count_placed(block.len, requested, false);
                self.allocation(block.into(), requested, stream, false, None)
            }));
        }
        Ok(adopted)
    }
}
