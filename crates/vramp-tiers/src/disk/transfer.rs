//! Handles of writes and reads in flight.

use std::sync::Arc;

use vramp_core::Bytes;
use vramp_host::Direction;

use super::compress::{CompressedRead, CompressedWrite};
use super::error::DiskTierError;
use super::objects::ObjectTransfer;
use super::raw::RawTransfer;
use super::stored::{Stored, StoredBytes};

/// A write or read in flight. The memory must not change until a write has ended, and has no
/// defined contents until a read has ended.
///
/// Dropping this cancels the pieces that have not begun, and waits for the others.
#[must_use = "dropping this cancels the transfer"]
pub struct DiskTransfer<T> {
    running: Box<dyn TransferOf<T> + Send + Sync>,
}

/// A transfer of any kind.
pub(super) trait RunningTransfer {
    fn direction(&self) -> Direction;
    /// Returns the bytes of memory to transfer.
    fn len(&self) -> Bytes;
    /// Returns the bytes transferred to or from the disk so far.
    fn moved(&self) -> Bytes;
    fn has_ended(&self) -> bool;
    fn cancel(&self);
    /// Waits until the transfer has ended, then frees what it holds.
    fn release(&self);
}

/// A transfer that yields a `T`.
pub(super) trait TransferOf<T>: RunningTransfer {
    /// Waits for the result. Called once.
    fn wait(&self) -> Result<T, DiskTierError>;
}

impl<T> DiskTransfer<T> {
    pub(super) fn new(running: impl TransferOf<T> + Send + Sync + 'static) -> DiskTransfer<T> {
        DiskTransfer { running: Box::new(running) }
    }

    /// Returns the bytes to transfer.
    pub fn len(&self) -> Bytes {
        self.running.len()
    }

    /// Returns true for zero bytes.
    pub fn is_empty(&self) -> bool {
        self.len().is_zero()
    }

    /// Returns true once [`wait`](DiskTransfer::wait) would not block.
    pub fn is_done(&self) -> bool {
        self.running.has_ended()
    }

    /// Stops further pieces from beginning. [`wait`](DiskTransfer::wait) succeeds if all had begun.
    pub fn cancel(&self) {
        self.running.cancel();
    }
}

impl DiskTransfer<StoredBytes> {
    /// Waits until all bytes are written.
    ///
    /// # Errors
    /// The disk failed or is full, or the write was cancelled. Extents and charge are returned.
    pub fn wait(self) -> Result<StoredBytes, DiskTierError> {
        self.running.wait()
    }
}

impl DiskTransfer<()> {
    /// Waits until all bytes are read, and verifies their checksums.
    ///
    /// # Errors
    /// The disk failed, a checksum differs, or the read was cancelled. The memory may be partly
    /// overwritten. The stored bytes are unchanged.
    pub fn wait(self) -> Result<(), DiskTierError> {
        self.running.wait()
    }
}

impl<T> Drop for DiskTransfer<T> {
    fn drop(&mut self) {
        self.running.cancel();
        self.running.release();
    }
}

impl<T> std::fmt::Debug for DiskTransfer<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (direction, moved) = (self.running.direction(), self.running.moved());
        write!(f, "{direction:?} of {}: {moved} transferred", self.len())
    }
}

impl RunningTransfer for Arc<RawTransfer> {
    fn direction(&self) -> Direction {
        RawTransfer::direction(self)
    }

    fn len(&self) -> Bytes {
        RawTransfer::len(self)
    }

    fn moved(&self) -> Bytes {
        RawTransfer::moved(self)
    }

    fn has_ended(&self) -> bool {
        RawTransfer::has_ended(self)
    }

    fn cancel(&self) {
        RawTransfer::cancel(self);
    }

    fn release(&self) {
        RawTransfer::release(self);
    }
}

impl TransferOf<StoredBytes> for Arc<RawTransfer> {
    fn wait(&self) -> Result<StoredBytes, DiskTierError> {
        self.stored().map(|bytes| StoredBytes(Stored::Files(bytes)))
    }
}

impl TransferOf<()> for Arc<RawTransfer> {
    fn wait(&self) -> Result<(), DiskTierError> {
        let verified = self.verified();
        self.count(verified.as_ref().err());
        verified
    }
}

impl RunningTransfer for Arc<CompressedWrite> {
    fn direction(&self) -> Direction {
        Direction::Write
    }

    fn len(&self) -> Bytes {
        CompressedWrite::len(self)
    }

    fn moved(&self) -> Bytes {
        CompressedWrite::moved(self)
    }

    fn has_ended(&self) -> bool {
        CompressedWrite::has_ended(self)
    }

    fn cancel(&self) {
        CompressedWrite::cancel(self);
    }

    fn release(&self) {
        CompressedWrite::release(self);
    }
}

impl TransferOf<StoredBytes> for Arc<CompressedWrite> {
    fn wait(&self) -> Result<StoredBytes, DiskTierError> {
        CompressedWrite::wait(self).map(|bytes| StoredBytes(Stored::Files(bytes)))
    }
}

impl RunningTransfer for CompressedRead {
    fn direction(&self) -> Direction {
        Direction::Read
    }

    fn len(&self) -> Bytes {
        CompressedRead::len(self)
    }

    fn moved(&self) -> Bytes {
        CompressedRead::moved(self)
    }

    fn has_ended(&self) -> bool {
        CompressedRead::has_ended(self)
    }

    fn cancel(&self) {
        CompressedRead::cancel(self);
    }

    fn release(&self) {
        self.settle();
    }
}

impl TransferOf<()> for CompressedRead {
    fn wait(&self) -> Result<(), DiskTierError> {
        CompressedRead::wait(self)
    }
}

impl RunningTransfer for Arc<ObjectTransfer> {
    fn direction(&self) -> Direction {
        ObjectTransfer::direction(self)
    }

    fn len(&self) -> Bytes {
        ObjectTransfer::len(self)
    }

    fn moved(&self) -> Bytes {
        ObjectTransfer::moved(self)
    }

    fn has_ended(&self) -> bool {
        ObjectTransfer::has_ended(self)
    }

    fn cancel(&self) {
        ObjectTransfer::cancel(self);
    }

    fn release(&self) {
        ObjectTransfer::release(self);
    }
}

impl TransferOf<StoredBytes> for Arc<ObjectTransfer> {
    fn wait(&self) -> Result<StoredBytes, DiskTierError> {
        self.stored().map(|bytes| StoredBytes(Stored::Object(bytes)))
    }
}

impl TransferOf<()> for Arc<ObjectTransfer> {
    fn wait(&self) -> Result<(), DiskTierError> {
        self.verified()
    }
}
