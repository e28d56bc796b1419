//! Bytes that a store has.

use vramp_core::Bytes;

use super::objects::ObjectBytes;
use super::shared::FileBytes;

/// Bytes in a [`DiskStore`](super::DiskStore). Dropping this frees them, or calls
/// [`ObjectStore::delete`](super::ObjectStore::delete).
#[must_use = "the bytes are freed when this is dropped"]
pub struct StoredBytes(pub(super) Stored);

/// Where the bytes are.
pub(super) enum Stored {
    Files(FileBytes),
    Object(ObjectBytes),
}

impl StoredBytes {
    /// Returns the length of what was written.
    pub fn len(&self) -> Bytes {
        match &self.0 {
            Stored::Files(bytes) => bytes.len,
            Stored::Object(bytes) => bytes.len,
        }
    }

    /// Returns true for zero bytes.
    pub fn is_empty(&self) -> bool {
        self.len().is_zero()
    }

    /// Returns the charged bytes: whole blocks of 4 KiB, as many as are used on the disk.
    pub fn charged(&self) -> Bytes {
        match &self.0 {
            Stored::Files(bytes) => bytes.allocation.charge.bytes(),
            Stored::Object(bytes) => bytes.object.charge.bytes(),
        }
    }

    /// Returns the number of extents; one for an object.
    pub fn extents(&self) -> usize {
        match &self.0 {
            Stored::Files(bytes) => bytes.extents.len(),
            Stored::Object(_) => 1,
        }
    }
}

impl std::fmt::Debug for StoredBytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} in {} extents", self.len(), self.extents())
    }
}
