//! Handles of writes and reads in flight and of stored bytes, and the results of jobs.

use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use vramp_core::Bytes;
use vramp_host::Direction;

use super::error::DiskTierError;
use super::job::{FinishedPiece, Held, Job};
use super::objects::{ObjectBytes, Objects};
use super::pieces::joined;
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

/// A write or read in flight. The memory must not change until a write has ended, and has no
/// defined contents until a read has ended.
///
/// Dropping this cancels the pieces that have not begun, and waits for the others.
#[must_use = "dropping this cancels the transfer"]
pub struct DiskTransfer<T> {
    job: Arc<Job>,
    result: PhantomData<fn() -> T>,
}

impl<T> DiskTransfer<T> {
    pub(super) fn new(job: Arc<Job>) -> DiskTransfer<T> {
        DiskTransfer { job, result: PhantomData }
    }

    /// Returns the bytes to transfer.
    pub fn len(&self) -> Bytes {
        self.job.len()
    }

    /// Returns true for zero bytes.
    pub fn is_empty(&self) -> bool {
        self.len().is_zero()
    }

    /// Returns true once [`wait`](DiskTransfer::wait) would not block.
    pub fn is_done(&self) -> bool {
        self.job.has_ended()
    }

    /// Stops further pieces from beginning. [`wait`](DiskTransfer::wait) succeeds if all had begun.
    pub fn cancel(&self) {
        self.job.cancel();
    }
}

impl DiskTransfer<StoredBytes> {
    /// Waits until all bytes are written.
    ///
    /// # Errors
    /// The disk failed or is full, or the write was cancelled. Extents and charge are returned.
    pub fn wait(self) -> Result<StoredBytes, DiskTierError> {
        self.job.stored()
    }
}

impl DiskTransfer<()> {
    /// Waits until all bytes are read, and verifies their checksums.
    ///
    /// # Errors
    /// The disk failed, a checksum differs, or the read was cancelled. The memory may be partly
    /// overwritten. The stored bytes are unchanged.
    pub fn wait(self) -> Result<(), DiskTierError> {
        self.job.verified()
    }
}

impl<T> Drop for DiskTransfer<T> {
    fn drop(&mut self) {
        self.job.cancel();
        drop(self.job.take());
    }
}

impl<T> std::fmt::Debug for DiskTransfer<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (direction, moved) = (self.job.direction, self.job.lock().moved);
        write!(f, "{direction:?} of {}: {moved} transferred", self.len())
    }
}

/// What a job had when it ended.
struct Ended {
    held: Held,
    finished: Vec<Option<FinishedPiece>>,
    sum: Option<u32>,
    result: Result<(), DiskTierError>,
}

impl Job {
    /// Waits until the job has ended, and takes what it holds.
    fn take(&self) -> Ended {
        let mut state = self.joined();
        let (held, finished) =
            (std::mem::take(&mut state.held), std::mem::take(&mut state.finished));
        let result = state.failed.take().map_or(Ok(()), Err);
        Ended { held, finished, sum: state.sum, result }
    }

    /// Waits until all bytes are written. Called once.
    fn stored(&self) -> Result<StoredBytes, DiskTierError> {
        let Ended { held, finished, sum, result } = self.take();
        self.count(&result);
        result?;
        let (len, frames) = (self.len(), held.frames);
        if let Some(object) = held.object {
            return Ok(StoredBytes(Stored::Object(ObjectBytes { object, sum, len })));
        }
        if frames.is_some() {
            self.compressor().count_written(len, self.list().len());
        }
        let (allocation, extents) = (held.allocation.expect(ONCE), joined(&finished));
        Ok(StoredBytes(Stored::Files(FileBytes { allocation, extents, frames, len })))
    }

    /// Waits until all bytes are read and verified. Called once.
    fn verified(&self) -> Result<(), DiskTierError> {
        let Ended { held, finished, result, .. } = self.take();
        // What was decompressed was verified before.
        let result = match held.allocation.is_some() && held.frames.is_none() {
            true => result.and_then(|()| self.verify(&finished)),
            false => result,
        };
        self.count(&result);
        result
    }

    /// Adds the outcome of a transfer of files to the counters of the store.
    fn count(&self, result: &Result<(), DiskTierError>) {
        let Some(shared) = &self.files else { return };
        let (failed, total_ns) = (result.as_ref().err(), self.lock().total_ns);
        let counters = &mut shared.state().counters;
        match self.io.get() {
            Some(_) => counters.count(self.direction, self.list().len(), total_ns, failed),
            // Extents were refused, which was counted, or it was cancelled.
            None => counters.writes.failed += 1,
        }
    }

    /// Starts a call of the program's store for the object that the job holds. A read is verified against
    /// the checksum `expected`.
    pub fn begin_call(self: &Arc<Job>, objects: &Arc<Objects>, key: u64, expected: Option<u32>) {
        let (job, calls) = (Arc::clone(self), Arc::clone(objects));
        objects.workers.run([move || job.call(&calls, key, expected)]);
    }

    /// Runs on a thread of the pool.
    fn call(&self, objects: &Objects, key: u64, expected: Option<u32>) {
        let cancelled = self.lock().cancelled;
        let done = match (cancelled, self.direction) {
            (true, _) => Err(Job::cancelled(Bytes::ZERO, self.len())),
            (false, Direction::Write) => objects.put(key, &self.spans, || {
                if let Some(object) = &self.lock().held.object {
                    object.is_put.store(true, Ordering::Relaxed);
                }
            }),
            (false, Direction::Read) => objects.get(key, &self.spans, expected),
        };
        let total_ns = self.begun.elapsed().as_nanos().try_into().unwrap_or(u64::MAX);
        let counters = &mut objects.state().counters;
        counters.count(self.direction, self.len(), total_ns, done.as_ref().err());
        let mut state = self.lock();
        match done {
            Ok(sum) => (state.moved, state.sum) = (self.len(), sum),
            Err(error) => state.fail(error),
        }
        self.end(state);
    }
}

const ONCE: &str = "a transfer is waited for once";
