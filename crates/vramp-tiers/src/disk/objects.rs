//! Writes and reads of objects in the program's own store, on threads of the [`DiskStore`].
//!
//! [`DiskStore`]: super::DiskStore

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use vramp_core::Bytes;
use vramp_host::fork::is_forked;
use vramp_host::{Direction, IoUnavailable, OsCode, ThreadPool};

use super::compress::object_pool::{ObjectPool, Pooled};
use super::config::Checksum;
use super::error::DiskTierError;
use super::object_store::{ObjectStore, ObjectStoreConfig, StoreError};
use super::spans::SpanList;
use super::stats::{CompressionStats, Counters, DiskStats};
use crate::extents::ExtentCensus;
use crate::ledger::shell::charge::Charge;
use crate::ledger::shell::space::MemorySpace;

/// The program's store, and what is stored in it.
pub(super) struct Objects {
    store: Arc<dyn ObjectStore>,
    config: ObjectStoreConfig,
    pub space: MemorySpace,
    workers: ThreadPool,
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
    key: u64,
    /// True once `put` was called.
    is_put: AtomicBool,
    pub charge: Charge,
}

/// An object whose bytes were written, and their checksum.
pub(super) struct ObjectBytes {
    pub object: Arc<StoredObject>,
    sum: Option<u32>,
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
        let State { used, failed_deletes, counters, .. } = &*self.state();
        DiskStats {
            engine: "objects",
            direct: false,
            writes: counters.writes,
            reads: counters.reads,
            relocated_pieces: 0,
            media_errors: 0,
            full_errors: counters.full_errors,
            corrupt_extents: counters.corrupt_extents,
            failed_deletes: *failed_deletes,
            compression: CompressionStats::default(),
            extents: ExtentCensus { capacity: *used, used: *used, ..ExtentCensus::default() },
        }
    }

    pub fn audit(&self) -> Result<(), String> {
        // Charges are taken before their objects are made and credited after these are dropped.
        let (used, total) = (self.state().used, self.space.total());
        match used <= total {
            true => Ok(()),
            false => Err(format!("{used} are stored and {total} charged to {}", self.space.id())),
        }
    }

    /// Starts to write `spans` to a new object.
    pub fn begin_write(
        self: &Arc<Objects>,
        spans: SpanList,
        charge: Charge,
    ) -> Arc<ObjectTransfer> {
        let key = {
            let mut state = self.state();
            state.used += charge.bytes();
            state.next_key += 1;
            state.next_key - 1
        };
        let object = StoredObject { objects: Arc::clone(self), key, is_put: false.into(), charge };
        self.begin(Direction::Write, Arc::new(object), spans, None)
    }

    /// Starts to read an object into `spans`, which have its length.
    pub fn begin_read(
        self: &Arc<Objects>,
        stored: &ObjectBytes,
        spans: SpanList,
    ) -> Arc<ObjectTransfer> {
        self.begin(Direction::Read, Arc::clone(&stored.object), spans, stored.sum)
    }

    /// Returns true if an object is one of these.
    pub fn has(self: &Arc<Objects>, stored: &ObjectBytes) -> bool {
        Arc::ptr_eq(&stored.object.objects, self)
    }

    fn begin(
        self: &Arc<Objects>,
        direction: Direction,
        object: Arc<StoredObject>,
        spans: SpanList,
        expected: Option<u32>,
    ) -> Arc<ObjectTransfer> {
        let transfer = Arc::new(ObjectTransfer {
            objects: Arc::clone(self),
            direction,
            key: object.key,
            spans,
            expected,
            begun: Instant::now(),
            state: Mutex::new(TransferState {
                object: Some(object),
                cancelled: false,
                ended: None,
            }),
            changed: Condvar::new(),
        });
        let running = Arc::clone(&transfer);
        self.workers.run([move || running.run()]);
        transfer
    }

    fn buffer(&self, len: usize) -> Result<Pooled<Vec<u8>>, StoreError> {
        let make = || {
            let mut made = Vec::new();
            let no_memory = |_| StoreError::failed(format!("no memory to copy {len} bytes"));
            made.try_reserve_exact(len).map_err(no_memory)?;
            made.resize(len, 0);
            Ok(made)
        };
        self.buffers.take(|kept| kept.len() == len, make)
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

/// A write or read of one object.
pub(super) struct ObjectTransfer {
    objects: Arc<Objects>,
    direction: Direction,
    key: u64,
    spans: SpanList,
    /// Checksum that a read is verified against.
    expected: Option<u32>,
    begun: Instant,
    state: Mutex<TransferState>,
    changed: Condvar,
}

struct TransferState {
    /// The waiting thread takes it: a thread of the pool never drops an object.
    object: Option<Arc<StoredObject>>,
    cancelled: bool,
    /// The checksum of the bytes.
    ended: Option<Result<Option<u32>, DiskTierError>>,
}

impl ObjectTransfer {
    fn lock(&self) -> MutexGuard<'_, TransferState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn direction(&self) -> Direction {
        self.direction
    }

    pub fn len(&self) -> Bytes {
        self.spans.len()
    }

    /// Returns the bytes transferred so far: all or none.
    pub fn moved(&self) -> Bytes {
        match self.lock().ended {
            Some(Ok(_)) => self.len(),
            _ => Bytes::ZERO,
        }
    }

    pub fn has_ended(&self) -> bool {
        self.lock().ended.is_some()
    }

    pub fn cancel(&self) {
        self.lock().cancelled = true;
    }

    /// Waits until no thread uses the memory, then drops the share of the object.
    pub fn release(&self) {
        let object = self.joined().object.take();
        drop(object);
    }

    /// Waits until the object is written. Called once.
    pub fn stored(&self) -> Result<ObjectBytes, DiskTierError> {
        let (object, sum) = self.outcome()?;
        Ok(ObjectBytes { object, sum, len: self.len() })
    }

    /// Waits until the object is read and verified. Called once.
    pub fn verified(&self) -> Result<(), DiskTierError> {
        self.outcome().map(drop)
    }

    fn outcome(&self) -> Result<(Arc<StoredObject>, Option<u32>), DiskTierError> {
        let mut state = self.joined();
        let object = state.object.take().expect("a transfer is waited for once");
        let ended = state.ended.clone().expect("it was waited for");
        drop(state);
        ended.map(|sum| (object, sum))
    }

    fn joined(&self) -> MutexGuard<'_, TransferState> {
        let ready = self.changed.wait_while(self.lock(), |state| state.ended.is_none());
        ready.unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs on a thread of the pool.
    fn run(&self) {
        let cancelled = self.lock().cancelled;
        let done = match cancelled {
            true => Err(DiskTierError::Cancelled { moved: Bytes::ZERO, len: self.len() }),
            false => self.transfer(),
        };
        let total_ns = self.begun.elapsed().as_nanos().try_into().unwrap_or(u64::MAX);
        let counters = &mut self.objects.state().counters;
        counters.count(self.direction, self.len(), total_ns, done.as_ref().err());
        self.lock().ended = Some(done);
        self.changed.notify_all();
    }

    fn transfer(&self) -> Result<Option<u32>, DiskTierError> {
        let (objects, key) = (&self.objects, self.key);
        let buffer = objects.buffer(self.len().count() as usize);
        let operation = match self.direction {
            Direction::Write => "put",
            Direction::Read => "get",
        };
        let mut buffer = buffer.map_err(|error| DiskTierError::Object { operation, key, error })?;
        let sum = |bytes: &[u8]| {
            (objects.config.checksum == Checksum::Crc32).then(|| crc32fast::hash(bytes))
        };
        match self.direction {
            Direction::Write => {
                self.spans.read(Bytes::ZERO, &mut buffer);
                self.mark_put();
                objects.call(operation, key, |store| store.put(key, &buffer))?;
                Ok(sum(&buffer))
            }
            Direction::Read => {
                objects.call(operation, key, |store| store.get(key, &mut buffer))?;
                let found = sum(&buffer);
                if let (Some(expected), Some(found)) = (self.expected, found)
                    && expected != found
                {
                    let len = self.len();
                    return Err(DiskTierError::CorruptObject { key, len, expected, found });
                }
                self.spans.write(Bytes::ZERO, &buffer);
                Ok(found)
            }
        }
    }

    fn mark_put(&self) {
        if let Some(object) = &self.lock().object {
            object.is_put.store(true, Ordering::Relaxed);
        }
    }
}
