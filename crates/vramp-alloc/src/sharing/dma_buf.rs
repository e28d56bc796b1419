//! A range as a dma-buf: a descriptor with which the driver of a network card or of storage registers it.
//!
//! The descriptor stands for physical memory and keeps it from being freed, also once it was unmapped
//! here. So the range is pinned as well, for as long as the [`DmaBuf`] lives: what another device writes
//! arrives at the addresses that the caller has.
//!
//! Growth: one descriptor for each export, whatever its length.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use vramp_core::{AddrRange, Bytes, DeviceAddr};
use vramp_driver::DriverError;

use crate::Allocator;
use crate::error::Unusable;
use crate::sharing::pins::{PinError, PinnedRange};

/// Unit of a dma-buf: the pages of the host's processor.
const PAGE: u64 = 4096;

/// A pinned range and a descriptor of its memory. Dropping it ends the pin and closes the descriptor.
#[derive(Debug)]
#[must_use = "the range is pinned until this is dropped"]
pub struct DmaBuf {
    pinned: PinnedRange,
    descriptor: OwnedFd,
    offset: Bytes,
}

/// Error of [`Allocator::export_dma_buf`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DmaBufError {
    /// The device exports no dma-buf.
    #[error(
        "the device '{device}' exports no dma-buf: a driver with open kernel modules does, and \
         nvidia-peermem registers pinned ranges without one"
    )]
    NotSupported {
        /// Name of the device.
        device: String,
    },
    /// The range is empty.
    #[error("an empty range has no memory: export one byte or more")]
    Empty,
    /// The range could not be pinned.
    #[error(transparent)]
    Pin(#[from] PinError),
    /// The driver call failed.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// No call can succeed any more.
    #[error(transparent)]
    Unusable(#[from] Unusable),
}

/// # dma-bufs
impl Allocator {
    /// Pins a range and exports the pages of 4 KiB that it lies in. One driver call.
    ///
    /// # Errors
    /// The device has no dma-buf, the range cannot be pinned, or the driver call failed. Nothing is
    /// pinned.
    pub fn export_dma_buf(&self, range: AddrRange) -> Result<DmaBuf, DmaBufError> {
        Unusable::check_fork()?;
        let info = self.driver().info();
        if !info.capabilities.dma_buf {
            return Err(DmaBufError::NotSupported { device: info.id.clone() });
        }
        if range.len.is_zero() {
            return Err(DmaBufError::Empty);
        }
        let pinned = self.pin_range(range)?;
        // The pinned handles are longer than such pages, so all of them are pinned.
        let offset = range.start.number() % PAGE;
        let start = DeviceAddr::new(range.start.number() - offset);
        let len = Bytes::new((offset + range.len.count()).next_multiple_of(PAGE));
        let descriptor = self.driver().export_dma_buf(AddrRange::new(start, len))?;
        Ok(DmaBuf { pinned, descriptor, offset: Bytes::new(offset) })
    }
}

impl DmaBuf {
    /// Returns where the range begins in the descriptor's memory: less than 4 KiB.
    pub fn offset(&self) -> Bytes {
        self.offset
    }

    /// Returns the descriptor, for `ibv_reg_dmabuf_mr` and its kind.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }

    /// Returns the range that was given.
    pub fn range(&self) -> AddrRange {
        self.pinned.range()
    }

    /// Separates the two: the pin has to outlive the registration, the descriptor only its beginning.
    pub fn into_parts(self) -> (PinnedRange, OwnedFd) {
        (self.pinned, self.descriptor)
    }
}
