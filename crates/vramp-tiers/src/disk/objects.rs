//! Objects in the program's own store, and its calls.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vramp_core::Bytes;
use vramp_host::fork::is_forked;
use vramp_host::{IoUnavailable, OsCode, ThreadPool};

use super::compress::object_pool::{ObjectPool, Pooled};
use super::config::Checksum;
use super::error::DiskTierError;
use super::object_store::{ObjectStore, ObjectStoreConfig, StoreError};
use super::spans::SpanList;
use super::stats::{Counters, DiskStats};
use crate::extents::ExtentCensus;
use crate::ledger::shell::charge::Charge;
use crate::ledger::shell::space::MemorySpace;

/// The program's store, and what is stored in it.
pub(super) struct Objects {
    store: Arc<dyn ObjectStore>,
    config: ObjectStoreConfig,
    pub space: MemorySpace,
    pub workers: ThreadPool,
    /// Buffers of earlier calls.
    buffers: Arc<ObjectPool<Vec<u8>>>,
    state: Mutex<State>,
}

#[derive(Default)]
pub(super) struct State {
    next_key: u64,
    /// Charged bytes of all objects.
    pub used: Bytes,
    pub failed_deletes: u64,
    pub counters: Counters,
}

/// One object. Dropping it deletes it, then credits its charge.
pub(super) struct StoredObject {
    objects: Arc<Objects>,
    pub key: u64,
    /// True once `put` was called.
    pub is_put: AtomicBool,
    pub charge: Charge,
}

/// An object whose bytes were written, and their checksum.
pub(super) struct ObjectBytes {
    pub object: Arc<StoredObject>,
    pub sum: Option<u32>,
    pub len: Bytes,
}

impl Objects {
    pub fn new(
        store: Arc<dyn ObjectStore>,
        config: ObjectStoreConfig,
        space: MemorySpace,
    ) -> Result<Objects, DiskTierError> {
        let no_threads =
            |error: std::io::Error| IoUnavailable { engine: "threads", code: OsCode::of(&error) };
        let workers = ThreadPool::new("vramp-objects", config.threads).map_err(no_threads)?;
        let buffers = Arc::new(ObjectPool::with_capacity(config.threads));
        Ok(Objects { store, config, space, workers, buffers, state: Mutex::default() })
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Drops the buffers that no call uses.
    pub fn trim(&self) {
        self.buffers.clear();
    }

    pub fn stats(&self) -> DiskStats {
        let State { used, failed_deletes, ref counters, .. } = *self.state();
        let extents = ExtentCensus { capacity: used, used, ..ExtentCensus::default() };
        DiskStats { failed_deletes, ..counters.stats("objects", false, extents) }
    }

    pub fn audit(&self) -> Result<(), String> {
        // Charges are taken before their objects are made and credited after these are dropped.
        let (used, total) = (self.state().used, self.space.total());
        match used <= total {
            true => Ok(()),
            false => Err(format!("{used} are stored and {total} charged to {}", self.space.id())),
        }
    }

    /// Returns a new object, which nothing is written to yet, and its key.
    pub fn add(self: &Arc<Objects>, charge: Charge) -> Arc<StoredObject> {
        let key = {
            let mut state = self.state();
            state.used += charge.bytes();
            state.next_key += 1;
            state.next_key - 1
        };
        Arc::new(StoredObject { objects: Arc::clone(self), key, is_put: false.into(), charge })
    }

    /// Returns true if an object is one of these.
    pub fn has(self: &Arc<Objects>, stored: &ObjectBytes) -> bool {
        Arc::ptr_eq(&stored.object.objects, self)
    }

    /// Copies the bytes of `spans` to an object. Calls `begin` before the program's store. Returns their
    /// checksum.
    pub fn put(
        &self,
        key: u64,
        spans: &SpanList,
        begin: impl FnOnce(),
    ) -> Result<Option<u32>, DiskTierError> {
        let mut buffer = self.buffer("put", key, spans.len())?;
        spans.read(Bytes::ZERO, &mut buffer);
        begin();
        self.call("put", key, |store| store.put(key, &buffer))?;
        Ok(self.sum(&buffer))
    }

    /// Copies an object to `spans`, unless its checksum is not the expected one. Returns that.
    pub fn get(
        &self,
        key: u64,
        spans: &SpanList,
        expected: Option<u32>,
    ) -> Result<Option<u32>, DiskTierError> {
        let mut buffer = self.buffer("get", key, spans.len())?;
        self.call("get", key, |store| store.get(key, &mut buffer))?;
        let sum = self.sum(&buffer);
        if let (Some(expected), Some(found)) = (expected, sum)
            && expected != found
        {
            let len = spans.len();
            return Err(DiskTierError::CorruptObject { key, len, expected, found });
        }
        spans.write(Bytes::ZERO, &buffer);
        Ok(sum)
    }

    fn sum(&self, bytes: &[u8]) -> Option<u32> {
        (self.config.checksum == Checksum::Crc32).then(|| crc32fast::hash(bytes))
    }

    fn buffer(
        &self,
        operation: &'static str,
        key: u64,
        len: Bytes,
    ) -> Result<Pooled<Vec<u8>>, DiskTierError> {
        let len = len.count() as usize;
        let make = || {
            let mut made = Vec::new();
            let no_memory = |_| StoreError::failed(format!("no memory to copy {len} bytes"));
            made.try_reserve_exact(len).map_err(no_memory)?;
            made.resize(len, 0);
            Ok(made)
        };
        let buffer = self.buffers.take(|kept| kept.len() == len, make);
        buffer.map_err(|error| DiskTierError::Object { operation, key, error })
    }

    /// Calls the program's store. No lock is held.
    fn call(
        &self,
        operation: &'static str,
        key: u64,
        call: impl FnOnce(&dyn ObjectStore) -> Result<(), StoreError>,
    ) -> Result<(), DiskTierError> {
        let called = self.space.shared.panics.catch(|| call(&*self.store));
        let called = called.unwrap_or_else(|| Err(StoreError::failed("it panicked")));
        called.map_err(|error| DiskTierError::Object { operation, key, error })
    }
}

impl Drop for StoredObject {
    fn drop(&mut self) {
        if is_forked() {
            return;
        }
        let was_put = *self.is_put.get_mut();
        let deleted = match was_put {
            true => self.objects.call("delete", self.key, |store| store.delete(self.key)),
            false => Ok(()),
        };
        let mut state = self.objects.state();
        state.used -= self.charge.bytes();
        state.failed_deletes += u64::from(deleted.is_err());
    }
}
