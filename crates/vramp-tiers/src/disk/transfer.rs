//! One write or read under way, for whoever began it.

use std::sync::Arc;

use vramp_core::Bytes;
use vramp_host::Direction;

use super::compress::{Compressing, Decompressing};
use super::error::DiskTierError;
use super::flight::Flight;
use super::shelf::StoredBytes;

/// A write or a read that has begun. Wait for it; dropping it cancels what has not begun and
/// waits for what has. The memory must not change until a write is done, and is not to be read
/// until a read is.
#[must_use = "a transfer is cancelled when this is dropped"]
pub struct DiskTransfer<T> {
    course: Box<dyn CourseTo<T> + Send + Sync>,
}

/// What is under way.
pub(super) trait Course {
    fn direction(&self) -> Direction;
    /// How many bytes of memory it is about.
    fn len(&self) -> Bytes;
    /// How many bytes went to or came from the disk.
    fn moved(&self) -> Bytes;
    fn is_over(&self) -> bool;
    fn cancel(&self);
    /// Waits until it is over, and lets go of what it held.
    fn let_go(&self);
}

/// The same, and what it comes to.
pub(super) trait CourseTo<T>: Course {
    /// Asked once.
    fn wait(&self) -> Result<T, DiskTierError>;
}

impl<T> DiskTransfer<T> {
    pub(super) fn new(course: impl CourseTo<T> + Send + Sync + 'static) -> DiskTransfer<T> {
        DiskTransfer { course: Box::new(course) }
    }

    /// How many bytes it moves.
    pub fn len(&self) -> Bytes {
        self.course.len()
    }

    /// True for a transfer of no bytes.
    pub fn is_empty(&self) -> bool {
        self.len().is_zero()
    }

    /// True once waiting takes no time.
    pub fn is_done(&self) -> bool {
        self.course.is_over()
    }

    /// Lets no further piece begin. What it ends with is told by waiting: success, if all had
    /// begun.
    pub fn cancel(&self) {
        self.course.cancel();
    }
}

impl DiskTransfer<StoredBytes> {
    /// Waits until all is written.
    ///
    /// # Errors
    /// The disk failed or is full, or it was cancelled. ExtentAllocator and charge are given back.
    pub fn wait(self) -> Result<StoredBytes, DiskTierError> {
        self.course.wait()
    }
}

impl DiskTransfer<()> {
    /// Waits until all is read, and compares it with what was written.
    ///
    /// # Errors
    /// The disk failed, what was read is not what was written, or it was cancelled. Some of the
    /// memory may be overwritten; what is stored stays.
    pub fn wait(self) -> Result<(), DiskTierError> {
        self.course.wait()
    }
}

impl<T> Drop for DiskTransfer<T> {
    fn drop(&mut self) {
        self.course.cancel();
        self.course.let_go();
    }
}

impl<T> std::fmt::Debug for DiskTransfer<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (direction, moved) = (self.course.direction(), self.course.moved());
        write!(f, "{direction:?} of {}: {moved} moved", self.len())
    }
}

impl Course for Arc<Flight> {
    fn direction(&self) -> Direction {
        Flight::direction(self)
    }

    fn len(&self) -> Bytes {
        Flight::len(self)
    }

    fn moved(&self) -> Bytes {
        Flight::moved(self)
    }

    fn is_over(&self) -> bool {
        Flight::is_over(self)
    }

    fn cancel(&self) {
        Flight::cancel(self);
    }

    fn let_go(&self) {
        Flight::let_go(self);
    }
}

impl CourseTo<StoredBytes> for Arc<Flight> {
    fn wait(&self) -> Result<StoredBytes, DiskTierError> {
        self.stored()
    }
}

impl CourseTo<()> for Arc<Flight> {
    fn wait(&self) -> Result<(), DiskTierError> {
        let verified = self.verified();
        self.count(verified.as_ref().err());
        verified
    }
}

impl Course for Arc<Compressing> {
    fn direction(&self) -> Direction {
        Direction::Write
    }

    fn len(&self) -> Bytes {
        Compressing::len(self)
    }

    fn moved(&self) -> Bytes {
        Compressing::moved(self)
    }

    fn is_over(&self) -> bool {
        Compressing::is_over(self)
    }

    fn cancel(&self) {
        Compressing::cancel(self);
    }

    fn let_go(&self) {
        Compressing::let_go(self);
    }
}

impl CourseTo<StoredBytes> for Arc<Compressing> {
    fn wait(&self) -> Result<StoredBytes, DiskTierError> {
        Compressing::wait(self)
    }
}

impl Course for Decompressing {
    fn direction(&self) -> Direction {
        Direction::Read
    }

    fn len(&self) -> Bytes {
        Decompressing::len(self)
    }

    fn moved(&self) -> Bytes {
        Decompressing::moved(self)
    }

    fn is_over(&self) -> bool {
        Decompressing::is_over(self)
    }

    fn cancel(&self) {
        Decompressing::cancel(self);
    }

    fn let_go(&self) {
        self.settle();
    }
}

impl CourseTo<()> for Decompressing {
    fn wait(&self) -> Result<(), DiskTierError> {
        Decompressing::wait(self)
    }
}
