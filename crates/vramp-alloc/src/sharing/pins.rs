//! Ranges that keep their memory because something outside holds it physically.
//!
//! A network card or a communication library that registered a range accesses its physical memory, not
//! its addresses. While the range is pinned its memory stays at these addresses: blocks in it are
//! allocated and freed as ever, but it is not moved, lent by an arena, cut anew or released by a trim.
//!
//! Growth: O(log n) for each handle of the range; a pinned range costs other requests nothing.

use std::sync::Arc;

use vramp_core::{AddrRange, Bytes, ChunkAt, DeviceAddr, NotPoolMemory};
use vramp_host::fork::is_forked;

use crate::error::Unusable;
use crate::shared::Shared;
use crate::{Allocation, Allocator};

/// A range whose memory stays at its addresses until this is dropped.
///
/// Closing the allocator ends all pins: end registrations before.
#[must_use = "the range is pinned until this is dropped"]
pub struct PinnedRange {
    shared: Arc<Shared>,
    range: AddrRange,
    chunks: Vec<ChunkAt>,
}

/// Error of [`Allocator::pin_range`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PinError {
    /// Not all of the range is memory of this allocator.
    #[error("{range} is not memory of this allocator: pin the range of a live allocation")]
    NotOwned {
        /// Range that was given.
        range: AddrRange,
    },
    /// The memory is that of a stable range whose contents are being moved, or are elsewhere.
    #[error("{range} is being spilled, or was: lease the buffer, and pin it under the lease")]
    Spilled {
        /// Range that was given.
        range: AddrRange,
    },
    /// The memory manager moves no memory, and its memory cannot be pinned.
    #[error(
        "memory of the preset '{preset}' is pinned as long as it is allocated: free the block after \
         the registration has ended"
    )]
    NotSupported {
        /// Name of the preset.
        preset: &'static str,
    },
    /// No call can succeed any more.
    #[error(transparent)]
    Unusable(#[from] Unusable),
}

/// Returns the range of addresses of an allocation.
pub fn range_of(allocation: &Allocation) -> AddrRange {
    AddrRange::new(allocation.addr(), allocation.len())
}

/// # Pinning memory at its addresses
impl Allocator {
    /// Pins the memory of a range. Pins are counted, so ranges may overlap. No driver call.
    ///
    /// The memory is pinned in whole handles, of [`PinnedRange::bytes`] together.
    ///
    /// # Errors
    /// Not all of the range is memory of this allocator, it is a stable range that refuses pins
    /// ([`StableRange::refuse_pins`](crate::range::StableRange::refuse_pins)), or the preset is PyTorch's or the driver's.
    pub fn pin_range(&self, range: AddrRange) -> Result<PinnedRange, PinError> {
        let mut inner = self.shared().lock()?;
        let preset = inner.manager.name();
        let pool = inner.manager.virtual_pool_mut().ok_or(PinError::NotSupported { preset })?;
        let place = pool.exec.find(range).ok_or(PinError::NotOwned { range })?;
        if pool.pool.refuses_pins(place) {
            return Err(PinError::Spilled { range });
        }
        let pinned = pool.pool.pin(place);
        let chunks = pinned.map_err(|NotPoolMemory| PinError::NotOwned { range })?;
        drop(inner);
        Ok(PinnedRange { shared: Arc::clone(self.shared()), range, chunks })
    }

    /// Returns the number and the bytes of pinned handles, exported ones included.
    pub fn pinned(&self) -> (u64, Bytes) {
        let inner = self.shared().lock_anyway();
        if inner.closed {
            return (0, Bytes::ZERO);
        }
        inner.manager.virtual_pool().map_or((0, Bytes::ZERO), |pool| pool.pool.pinned())
    }

    /// Returns the addresses of the pinned handles, sorted within each reservation. O(pinned handles).
    pub fn pinned_handles(&self) -> Vec<DeviceAddr> {
        let inner = self.shared().lock_anyway();
        if inner.closed {
            return Vec::new();
        }
        let Some(pool) = inner.manager.virtual_pool() else { return Vec::new() };
        pool.pool.pinned_handles().map(|at| pool.exec.addr(at)).collect()
    }
}

impl PinnedRange {
    /// Returns the range that was given.
    pub fn range(&self) -> AddrRange {
        self.range
    }

    /// Returns the bytes of the handles that the range lies in.
    pub fn bytes(&self) -> Bytes {
        self.chunks.iter().map(|chunk| chunk.len).sum()
    }

    /// Ends the pin, as dropping it does.
    pub fn unpin(self) {}
}

impl Drop for PinnedRange {
    fn drop(&mut self) {
        if is_forked() {
            // Dropping the device would make calls, and take locks that no thread releases.
            std::mem::forget(Arc::clone(&self.shared));
            return;
        }
        let mut inner = self.shared.lock_anyway();
        if inner.closed {
            return;
        }
        if let Some(pool) = inner.manager.virtual_pool_mut() {
            pool.pool.unpin(&self.chunks);
        }
        drop(inner);
        self.shared.notify_waiters();
    }
}

impl std::fmt::Debug for PinnedRange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} pinned in {} handles", self.range, self.chunks.len())
    }
}
