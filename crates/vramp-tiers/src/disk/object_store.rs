//! A store of the program's own in place of files: what it implements, and its errors.

use std::fmt;

use vramp_host::DISK_BLOCK;

use super::{Checksum, DiskConfigError};
use vramp_core::Bytes;

/// A store of the program's own behind a space of the tier Disk: another process, a file format, a
/// network.
///
/// An object is what one write stores; the movers write one for each of their steps
/// ([`MoverConfig::step`](crate::movers::MoverConfig)). Keys count from zero in each
/// [`DiskStore`](super::DiskStore) and are never used again. Each key is put once, perhaps read many
/// times, and deleted once.
///
/// `put` and `get` are called on threads of the [`DiskStore`](super::DiskStore), `delete` on the thread
/// that drops the bytes. No lock is held meanwhile, so they may block, but must not use the manager that
/// waits for them. Calls for different keys overlap. A panic is caught, counted with the other callbacks
/// of the space's [`ReservationManager`](crate::ReservationManager), and counts as
/// [`StoreError::failed`].
///
/// ```
/// use std::collections::BTreeMap;
/// use std::sync::{Arc, Mutex};
/// use vramp_tiers::disk::{DiskStore, ObjectStore, ObjectStoreConfig, StoreError};
/// # use vramp_tiers::{Bytes, ReservationManager, SpaceConfig, SpaceId};
///
/// #[derive(Default)]
/// struct InMemory(Mutex<BTreeMap<u64, Vec<u8>>>);
///
/// impl ObjectStore for InMemory {
///     fn put(&self, key: u64, bytes: &[u8]) -> Result<(), StoreError> {
///         self.0.lock().unwrap().insert(key, bytes.to_vec());
///         Ok(())
///     }
///     fn get(&self, key: u64, into: &mut [u8]) -> Result<(), StoreError> {
///         let objects = self.0.lock().unwrap();
///         let bytes = objects.get(&key).ok_or_else(|| StoreError::failed("no such object"))?;
///         into.copy_from_slice(bytes);
///         Ok(())
///     }
///     fn delete(&self, key: u64) -> Result<(), StoreError> {
///         self.0.lock().unwrap().remove(&key);
///         Ok(())
///     }
/// }
///
/// # let disk = SpaceId::disk(0);
/// # let manager = ReservationManager::new([(disk, SpaceConfig::disk(Bytes::gib(8)))])?;
/// # let space = manager.space(disk).expect("it was configured");
/// let store = Arc::new(InMemory::default());
/// let store = DiskStore::with_objects(store, ObjectStoreConfig::default(), &space)?;
/// # assert_eq!(store.stats().engine, "objects");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait ObjectStore: Send + Sync {
    /// Stores `bytes` under a key that was not used before.
    ///
    /// # Errors
    /// It is full or failed. The contents stay where they were, and `delete` is called for the key.
    fn put(&self, key: u64, bytes: &[u8]) -> Result<(), StoreError>;

    /// Fills `into`, which is as long as the object.
    ///
    /// # Errors
    /// It failed. The object is kept, and may be read again.
    fn get(&self, key: u64, into: &mut [u8]) -> Result<(), StoreError>;

    /// Removes an object, also one whose `put` failed. It is not called in a forked child.
    ///
    /// # Errors
    /// It failed: counted ([`DiskStats::failed_deletes`](super::DiskStats)), and not repeated.
    fn delete(&self, key: u64) -> Result<(), StoreError>;
}

/// The class of a [`StoreError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StoreErrorKind {
    /// It has no room.
    Full,
    /// Anything else.
    Failed,
}

/// Why an [`ObjectStore`] failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreError {
    /// The class.
    pub kind: StoreErrorKind,
    /// The cause, as the store words it.
    pub message: String,
}

impl StoreError {
    /// Returns an error of a store without room.
    pub fn full(message: impl Into<String>) -> StoreError {
        StoreError { kind: StoreErrorKind::Full, message: message.into() }
    }

    /// Returns an error of any other kind.
    pub fn failed(message: impl Into<String>) -> StoreError {
        StoreError { kind: StoreErrorKind::Failed, message: message.into() }
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            StoreErrorKind::Full => write!(f, "it is full: {}", self.message),
            StoreErrorKind::Failed => f.write_str(&self.message),
        }
    }
}

impl std::error::Error for StoreError {}

/// Options of a [`DiskStore`](super::DiskStore) on an [`ObjectStore`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ObjectStoreConfig {
    /// Most calls of `put` and `get` at a time, each on a thread of its own, from 1 to 64. The default
    /// is 4.
    pub threads: usize,
    /// Whether reads are verified against checksums.
    pub checksum: Checksum,
}

impl Default for ObjectStoreConfig {
    fn default() -> ObjectStoreConfig {
        ObjectStoreConfig { threads: 4, checksum: Checksum::Crc32 }
    }
}

impl ObjectStoreConfig {
    pub(super) fn check(&self, granule: Bytes) -> Result<(), DiskConfigError> {
        if !(1..=64).contains(&self.threads) {
            return Err(DiskConfigError::Threads(self.threads));
        }
        match DISK_BLOCK.is_multiple_of(granule) {
            true => Ok(()),
            false => Err(DiskConfigError::Granule(granule)),
        }
    }
}
