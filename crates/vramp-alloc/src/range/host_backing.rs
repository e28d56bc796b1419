//! Stable addresses with host memory behind them: a kernel that reads them goes over the bus.
//!
//! 1. [`Allocator::host_backing`] makes host memory that the device can map.
//! 2. [`StableRange::lend`] gives the part away that is to be backed by it.
//! 3. [`StableRange::map_host_part`] maps it there; what of the pool's is there goes back to the card.
//! 4. [`StableRange::unmap_host_part`] unmaps it, and [`StableRange::back_part`] brings memory of the
//!    card again.
//!
//! A range without memory of the card can have it too: that is how copies reach host memory that
//! is to be mapped elsewhere later.
//!
//! Deliberately absent: copies, and who reads when.

use std::sync::Arc;

use vramp_core::{AddrRange, Bytes, Inconsistency, NotVacant};
use vramp_driver::{Driver, DriverError, Handle, MemoryLocation};

use crate::allocator::Allocator;
use crate::range::StableRange;
use crate::virtual_pool::VirtualPool;

/// Host memory that a device can map at its own addresses. Dropped, it goes back to the host once
/// it is mapped nowhere any more.
pub struct HostBacking {
    driver: Arc<dyn Driver>,
    handle: Handle,
    len: Bytes,
}

/// Why addresses have no host memory behind them.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HostBackingError {
    /// The device cannot, or the allocator has no stable addresses.
    #[error(
        "host memory at a device's addresses needs the preset vramp on a device that maps memory of NUMA nodes: copy it to the card instead"
    )]
    NotSupported,
    /// Memory is mapped in whole pages.
    #[error("{len} are no whole pages of {page}: round up")]
    Length {
        /// What was asked.
        len: Bytes,
        /// What the device maps.
        page: Bytes,
    },
    /// The part does not lie in the range, or does not begin at a page.
    #[error("{len} from {from} on are no whole pages within a range of {whole}: ask for less")]
    Part {
        /// Where it begins.
        from: Bytes,
        /// How long it is.
        len: Bytes,
        /// How long the range is.
        whole: Bytes,
    },
    /// What is there may not go.
    #[error(transparent)]
    NotVacant(#[from] NotVacant),
    /// No host memory was mapped at exactly this part.
    #[error("{len} from {from} on are not what was mapped: name the part as it was mapped")]
    NotHosted {
        /// Where it begins.
        from: Bytes,
        /// How long it is.
        len: Bytes,
    },
    /// A driver call failed.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// A panic in an earlier call left the pool inconsistent.
    #[error("an earlier panic left the pool unusable: {0}")]
    Broken(#[from] Inconsistency),
}

impl Allocator {
    /// Makes `len` bytes of memory on NUMA node `node` of the host. One driver call.
    ///
    /// # Errors
    /// [`HostBackingError::NotSupported`] where the device lacks it, [`HostBackingError::Length`] for what is
    /// no whole number of pages, and what the driver says.
    pub fn host_backing(&self, len: Bytes, node: u32) -> Result<HostBacking, HostBackingError> {
        let driver = self.driver();
        let info = driver.info();
        if !(info.capabilities.host_numa && info.capabilities.virtual_memory) {
            return Err(HostBackingError::NotSupported);
        }
        let page = info.limits.page;
        if len.is_zero() || len != len.round_down(page) {
            return Err(HostBackingError::Length { len, page });
        }
        let handle = driver.create(len, MemoryLocation::HostNuma(node))?;
        Ok(HostBacking { driver: Arc::clone(driver), handle, len })
    }
}

impl HostBacking {
    /// How long it is.
    pub fn len(&self) -> Bytes {
        self.len
    }

    /// Never: there is none without a length.
    pub fn is_empty(&self) -> bool {
        self.len.is_zero()
    }
}

impl Drop for HostBacking {
    fn drop(&mut self) {
        // Nobody is left to tell; it ends with the device.
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
    /// memory that is there goes back to the card, in whole handles. Two driver calls, and three or
    /// more for each handle that goes.
    ///
    /// Memory stays mapped until [`unmap_host_part`](StableRange::unmap_host_part), also behind the end of
    /// `memory`.
    ///
    /// # Errors
    /// The part is not lent, or work that used its memory before is not known to be over; or a
    /// driver call failed. Nothing is mapped then; lent memory may have gone.
    pub fn map_host_part(&self, from: Bytes, memory: &HostBacking) -> Result<(), HostBackingError> {
        let len = memory.len;
        let mut guard = self.shared.lock()?;
        let inner = &mut *guard;
        let pool = inner.manager.virtual_pool_mut().expect("it made the range");
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

    /// Unmaps host memory behind a part, exactly as it was mapped. One driver call.
    ///
    /// The caller must have *seen* all work on the part complete.
    ///
    /// # Errors
    /// The part was not mapped so, or a driver call failed. It is as before.
    pub fn unmap_host_part(&self, from: Bytes, len: Bytes) -> Result<(), HostBackingError> {
        let mut guard = self.shared.lock()?;
        let pool = guard.manager.virtual_pool_mut().expect("it made the range");
        if !pool.pool.hosted(self.id).contains(&(from, len)) {
            return Err(HostBackingError::NotHosted { from, len });
        }
        let at = AddrRange::new(self.range().start + from, len);
        pool.exec.driver.unmap(at)?;
        pool.pool.clear_hosted(self.id, from);
        Ok(())
    }

    /// The parts with host memory behind them: offsets and lengths, sorted. O(its parts).
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
    /// Unmaps what is lent within a part of a range, and old mappings there.
    fn vacate(
        &mut self,
        id: vramp_core::ArenaId,
        from: Bytes,
        len: Bytes,
    ) -> Result<(), HostBackingError> {
        let mut learned = false;
        loop {
            match self.pool.vacate(id, from, len) {
                Ok(None) => return Ok(()),
                Ok(Some(plan)) => self.exec.perform(&mut self.pool, plan)?,
                // It may be over, and nobody has asked yet.
                Err(NotVacant::InUse) if !learned => {
                    learned = true;
                    self.note_captures()?;
                    self.find_idle()?;
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
        let Err(error) = self.exec.driver.set_access(at) else { return Ok(()) };
        match self.exec.driver.unmap(at) {
            Ok(()) => self.pool.clear_hosted(id, from),
            Err(_) => self.pool.spoil_hosted(id, from),
        }
        Err(error.into())
    }

    /// Unmaps host memory of a range that goes. Where work on it is not known to be over it stays
    /// until the end, and so do its addresses.
    pub(crate) fn end_hosting(&mut self, id: vramp_core::ArenaId, range: AddrRange, over: bool) {
        for (from, len) in self.pool.hosted(id) {
            let at = AddrRange::new(range.start + from, len);
            match over && self.exec.driver.unmap(at).is_ok() {
                true => self.pool.clear_hosted(id, from),
                false => self.pool.spoil_hosted(id, from),
            }
        }
    }
}
