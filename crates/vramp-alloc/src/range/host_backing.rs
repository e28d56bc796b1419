//! Stable ranges backed by host memory: a kernel reads it over the bus.
//!
//! 1. [`Allocator::host_backing`] creates host memory that the device can map.
//! 2. [`StableRange::lend`] lends the part that it is to back.
//! 3. [`StableRange::map_host_part`] maps it there; lent memory at the same addresses returns to
//!    the card.
//! 4. [`StableRange::unmap_host_part`] unmaps it, and [`StableRange::back_part`] backs the part
//!    with memory of the card again.
//!
//! A range without memory of the card can be backed by host memory too: copies reach host memory
//! through it that is mapped elsewhere later.
//!
//! Deliberately absent: copies, and the order of readers.

use std::sync::Arc;

use vramp_core::{AddrRange, Bytes, NotVacant};
use vramp_driver::{Driver, DriverError, Handle, MemoryLocation, MemoryProperties};
use vramp_host::fork::is_forked;

use crate::allocator::Allocator;
use crate::error::Unusable;
use crate::range::StableRange;
use crate::virtual_pool::VirtualPool;

/// Host memory that a device can map at its own addresses. Once dropped, and mapped nowhere, it is
/// released.
pub struct HostBacking {
    driver: Arc<dyn Driver>,
    handle: Handle,
    len: Bytes,
}

/// Error of mapping host memory behind a range.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HostBackingError {
    /// The device cannot map host memory, or the allocator has no stable ranges.
    #[error(
        "host memory at device addresses needs the preset vramp on a device that maps memory of NUMA \
         nodes: copy it to the card instead"
    )]
    NotSupported,
    /// The length is not a multiple of the page.
    #[error("{len} is not a multiple of the page of {page}: round up")]
    Length {
        /// Length that was given.
        len: Bytes,
        /// Page size of the device.
        page: Bytes,
    },
    /// The part does not lie in the range, or does not begin at a page.
    #[error("{len} from {from} on are not whole pages within a range of {whole}")]
    Part {
        /// Offset of the part.
        from: Bytes,
        /// Length of the part.
        len: Bytes,
        /// Length of the range.
        whole: Bytes,
    },
    /// Memory at the part is in use, so it cannot be replaced.
    #[error(transparent)]
    NotVacant(#[from] NotVacant),
    /// No host memory was mapped at exactly this part.
    #[error("no host memory is mapped at {len} from {from} on: give the part as it was mapped")]
    NotMapped {
        /// Offset of the part.
        from: Bytes,
        /// Length of the part.
        len: Bytes,
    },
    /// A driver call failed.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// No call can succeed any more.
    #[error(transparent)]
    Unusable(#[from] Unusable),
}

/// # Host memory at device addresses
impl Allocator {
    /// Creates `len` bytes of host memory on NUMA node `node`. One driver call.
    ///
    /// # Errors
    /// [`HostBackingError::NotSupported`] if the device cannot map it, [`HostBackingError::Length`]
    /// unless `len` is a multiple of the page, or a driver call failed.
    pub fn host_backing(&self, len: Bytes, node: u32) -> Result<HostBacking, HostBackingError> {
        Unusable::check_fork()?;
        let driver = self.driver();
        let info = driver.info();
        if !(info.capabilities.host_numa && info.capabilities.virtual_memory) {
            return Err(HostBackingError::NotSupported);
        }
        let page = info.limits.page;
        if len.is_zero() || len != len.round_down(page) {
            return Err(HostBackingError::Length { len, page });
        }
        let handle = driver.create(len, MemoryProperties::at(MemoryLocation::HostNuma(node)))?;
        Ok(HostBacking { driver: Arc::clone(driver), handle, len })
    }
}

impl HostBacking {
    /// Returns the length.
    pub fn len(&self) -> Bytes {
        self.len
    }

    /// Returns false: the length is never zero.
    pub fn is_empty(&self) -> bool {
        self.len.is_zero()
    }
}

impl Drop for HostBacking {
    fn drop(&mut self) {
        if is_forked() {
            return;
        }
        // A drop cannot report a failure. The memory ends with the device.
        let _ = self.driver.release(self.handle);
    }
}

impl std::fmt::Debug for HostBacking {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} of the host", self.len)
    }
}

impl StableRange {
    /// Maps host memory behind the part that begins at `from` and is as long as `memory`. Lent
    /// memory there returns to the card, in whole handles. Two driver calls, and three or more for
    /// each such handle.
    ///
    /// The memory stays mapped until [`unmap_host_part`](StableRange::unmap_host_part), also after
    /// `memory` was dropped.
    ///
    /// # Errors
    /// The part is not lent, or work that used its memory before is not known to be over, or a
    /// driver call failed. Nothing is mapped then; lent memory may have returned to the card.
    pub fn map_host_part(&self, from: Bytes, memory: &HostBacking) -> Result<(), HostBackingError> {
        let len = memory.len;
        let mut guard = self.shared.lock()?;
        let inner = &mut *guard;
        let pool = inner.manager.virtual_pool_mut().expect("only a virtual pool has ranges");
        self.check_part(from, len, pool.pool.config().page)?;
        let mapped = pool.vacate(self.id, from, len).and_then(|()| {
            let at = AddrRange::new(self.range().start + from, len);
            pool.host(self.id, from, at, memory.handle)
        });
        self.shared.refresh(inner);
        drop(guard);
        self.shared.notify_waiters();
        mapped
    }

    /// Unmaps the host memory of a part, exactly as it was mapped. One driver call.
    ///
    /// The caller must have *seen* all work on the part complete.
    ///
    /// # Errors
    /// No host memory was mapped at exactly this part, or a driver call failed. It is as before.
    pub fn unmap_host_part(&self, from: Bytes, len: Bytes) -> Result<(), HostBackingError> {
        let mut guard = self.shared.lock()?;
        let pool = guard.manager.virtual_pool_mut().expect("only a virtual pool has ranges");
        if !pool.pool.hosted(self.id).contains(&(from, len)) {
            return Err(HostBackingError::NotMapped { from, len });
        }
        let at = AddrRange::new(self.range().start + from, len);
        pool.exec.driver.unmap(at)?;
        pool.pool.clear_hosted(self.id, from);
        Ok(())
    }

    /// Returns the parts backed by host memory: offsets and lengths, sorted. O(its parts).
    pub fn host_parts(&self) -> Vec<(Bytes, Bytes)> {
        let inner = self.shared.lock_anyway();
        if inner.closed {
            return Vec::new();
        }
        inner.manager.virtual_pool().map(|pool| pool.pool.hosted(self.id)).unwrap_or_default()
    }

    fn check_part(&self, from: Bytes, len: Bytes, page: Bytes) -> Result<(), HostBackingError> {
        let whole = self.range().len;
        let inside = from.checked_add(len).is_some_and(|end| end <= whole);
        let pages = from == from.round_down(page) && len == len.round_down(page);
        match inside && pages {
            true => Ok(()),
            false => Err(HostBackingError::Part { from, len, whole }),
        }
    }
}

impl VirtualPool {
    /// Unmaps lent memory within a part of a range, and old mappings there.
    fn vacate(
        &mut self,
        id: vramp_core::ArenaId,
        from: Bytes,
        len: Bytes,
    ) -> Result<(), HostBackingError> {
        let (mut queried, mut retried) = (false, false);
        loop {
            match self.pool.vacate(id, from, len) {
                Ok(None) => return Ok(()),
                Ok(Some(plan)) => self.exec.perform(&mut self.pool, plan)?,
                // The work may be over and not queried yet.
                Err(NotVacant::InUse) if !queried => {
                    queried = true;
                    self.note_ended_captures()?;
                    self.find_idle()?;
                }
                Err(NotVacant::Quarantined) if !retried => {
                    retried = true;
                    self.retry_quarantined()?;
                }
                Err(refused) => return Err(refused.into()),
            }
        }
    }

    fn host(
        &mut self,
        id: vramp_core::ArenaId,
        from: Bytes,
        at: AddrRange,
        handle: Handle,
    ) -> Result<(), HostBackingError> {
        self.exec.driver.map(at.start, handle)?;
        self.pool.set_hosted(id, from, at.len);
        let Err(error) = self.exec.driver.set_access(at, &self.exec.access.peers) else {
            return Ok(());
        };
        match self.exec.driver.unmap(at) {
            Ok(()) => self.pool.clear_hosted(id, from),
            Err(failed) => {
                self.exec.quarantined_by = Some(failed);
                self.pool.spoil_hosted(id, from, false);
            }
        }
        Err(error.into())
    }

    /// Unmaps the host memory of a range that is removed. If work on it is not known to be over it
    /// stays until the allocator closes, and so do its addresses.
    pub(crate) fn end_hosting(&mut self, id: vramp_core::ArenaId, range: AddrRange, over: bool) {
        for (from, len) in self.pool.hosted(id) {
            let at = AddrRange::new(range.start + from, len);
            match over.then(|| self.exec.driver.unmap(at)) {
                Some(Ok(())) => self.pool.clear_hosted(id, from),
                Some(Err(failed)) => {
                    self.exec.quarantined_by = Some(failed);
                    self.pool.spoil_hosted(id, from, false);
                }
                None => self.pool.spoil_hosted(id, from, true),
            }
        }
    }
}
