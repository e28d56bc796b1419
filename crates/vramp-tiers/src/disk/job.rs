//! One write or read, from its first byte to its result.
//!
//! A job has up to three stages:
//!
//! 1. Workers compress the bytes of a write, if the store compresses (`compress/stages.rs`).
//! 2. Pieces are written or read, a few at a time, while workers compute checksums (`pieces.rs`); or a
//!    thread calls the program's store (`transfer.rs`).
//! 3. Workers decompress what was read.
//!
//! The thread that ends the last part of a stage begins the next stage. The thread that waits takes the
//! result and drops what the job holds: crediting a charge may run callbacks of any length, so an engine
//! thread or a worker never does.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use crc32fast::Hasher;
use vramp_core::Bytes;
use vramp_host::{Direction, HostMemory};

use super::compress::Frames;
use super::compress::object_pool::Pooled;
use super::error::DiskTierError;
use super::objects::StoredObject;
use super::shared::{AllocationId, DiskAllocation, Shared, StoredExtent};
use super::spans::{FileRange, IoPiece, SpanList};
use crate::ledger::shell::charge::Charge;

/// A write or read.
pub(super) struct Job {
    /// The store of the files; `None` for an object.
    pub files: Option<Arc<Shared>>,
    pub direction: Direction,
    /// Memory of the caller.
    pub spans: SpanList,
    pub begun: Instant,
    /// Set when pieces begin.
    pub io: OnceLock<FileIo>,
    state: Mutex<State>,
    changed: Condvar,
}

/// What the disk writes or reads.
pub(super) struct FileIo {
    pub allocation: AllocationId,
    /// Memory with compressed bytes; `None` if the disk writes or reads the caller's memory.
    pub list: Option<SpanList>,
    /// Checksums that a read is verified against.
    pub expected: Vec<StoredExtent>,
    /// Whether checksums are computed.
    pub summed: bool,
}

#[derive(Default)]
pub(super) struct State {
    pub cancelled: bool,
    /// The first failure.
    pub failed: Option<DiskTierError>,
    /// Frames or pieces of the stage that have begun and not ended.
    pub in_flight: usize,
    /// Pieces that have not begun, in reverse order.
    pub pending: Vec<IoPiece>,
    pub finished: Vec<Option<FinishedPiece>>,
    /// Bytes transferred to or from the disk.
    pub moved: Bytes,
    pub total_ns: u64,
    /// Checksum of an object.
    pub sum: Option<u32>,
    pub held: Held,
    /// True once no thread uses the memory, and none will.
    ended: bool,
}

/// What a job holds until the waiting thread takes it.
#[derive(Default)]
pub(super) struct Held {
    /// Charged bytes beyond those of the allocation.
    pub charge: Option<Charge>,
    /// Extents that are written or read.
    pub allocation: Option<Arc<DiskAllocation>>,
    pub object: Option<Arc<StoredObject>>,
    /// Frames that are compressed, or may be.
    pub frames: Option<Arc<Frames>>,
    /// Memory of compressed bytes.
    pub memory: Option<Pooled<Arc<HostMemory>>>,
}

/// A piece that was transferred, with the checksum of its data.
pub(super) struct FinishedPiece {
    pub place: FileRange,
    pub sum: Option<Hasher>,
}

impl State {
    pub fn fail(&mut self, error: DiskTierError) {
        self.failed.get_or_insert(error);
    }
}

impl Job {
    pub fn new(
        files: Option<&Arc<Shared>>,
        direction: Direction,
        spans: SpanList,
        held: Held,
    ) -> Arc<Job> {
        let files = files.map(Arc::clone);
        let (begun, io, changed) = (Instant::now(), OnceLock::new(), Condvar::new());
        let state = Mutex::new(State { held, ..State::default() });
        Arc::new(Job { files, direction, spans, begun, io, state, changed })
    }

    pub fn shared(&self) -> &Arc<Shared> {
        self.files.as_ref().expect("an object has no pieces and no frames")
    }

    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the bytes of memory to transfer.
    pub fn len(&self) -> Bytes {
        self.spans.len()
    }

    /// Returns true once no thread uses the memory, and none will.
    pub fn has_ended(&self) -> bool {
        self.lock().ended
    }

    /// Stops further parts from beginning.
    pub fn cancel(&self) {
        self.lock().cancelled = true;
    }

    /// Returns the error of a job of `len` bytes that was cancelled after `moved`.
    pub fn cancelled(moved: Bytes, len: Bytes) -> DiskTierError {
        DiskTierError::Cancelled { moved, len }
    }

    /// Ends the last stage.
    pub fn end(&self, mut state: MutexGuard<'_, State>) {
        state.ended = true;
        drop(state);
        self.changed.notify_all();
    }

    /// Waits until the job has ended.
    pub fn joined(&self) -> MutexGuard<'_, State> {
        let ended = self.changed.wait_while(self.lock(), |state| !state.ended);
        ended.unwrap_or_else(PoisonError::into_inner)
    }
}
