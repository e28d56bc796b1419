//! A write that workers may compress before it goes to the disk.

use std::convert::Infallible;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use vramp_core::Bytes;
use vramp_host::{Direction, HostMemory, HostMemoryError, PageKind};

use super::codec::Codec;
use super::frames::{Frames, whole_blocks};
use super::object_pool::Pooled;
use super::sample::sample;
use super::{Compressor, elapsed_ns};
use crate::disk::DiskTierError;
use crate::disk::core::compression::{Decision, Facts, Rates, SpaceLeft, decide};
use crate::disk::raw::RawTransfer;
use crate::disk::shared::{DiskAllocation, FileBytes, Shared};
use crate::disk::spans::{SpanList, cut};
use crate::ledger::shell::charge::Charge;

/// A write in flight, from its sample to its last byte on the disk. Workers drive it; the caller
/// only waits.
pub(in crate::disk) struct CompressedWrite {
    shared: Arc<Shared>,
    compressor: Arc<Compressor>,
    spans: SpanList,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    cancelled: bool,
    stage: Stage,
}

enum Stage {
    /// Workers sample or compress the bytes.
    Compressing(Compressing),
    /// A worker starts the transfer to the disk.
    Starting,
    Writing(Writing),
    /// Only the charge is left. The waiting thread drops it, because the credit may run callbacks
    /// of any length.
    Failed(DiskTierError, Vec<Charge>),
    /// The result was taken.
    Done,
}

struct Compressing {
    /// Covers all bytes before compression.
    charge: Charge,
    frames: Frames,
    memory: Option<Pooled<Arc<HostMemory>>>,
    /// Frames that workers have not compressed yet.
    left: usize,
}

struct Writing {
    raw: Arc<RawTransfer>,
    /// Charged bytes beyond those that are written.
    surplus: Charge,
    /// `Some` if at least one frame is compressed.
    frames: Option<Frames>,
    _memory: Option<Pooled<Arc<HostMemory>>>,
}

impl CompressedWrite {
    /// Queues the sampling of `spans`. `charge` covers all their bytes.
    pub fn begin(
        shared: &Arc<Shared>,
        compressor: &Arc<Compressor>,
        spans: SpanList,
        charge: Charge,
    ) -> Arc<CompressedWrite> {
        let frames = Frames::of(spans.len());
        let stage = Stage::Compressing(Compressing { charge, frames, memory: None, left: 0 });
        let state = Mutex::new(State { cancelled: false, stage });
        let (shared, compressor) = (Arc::clone(shared), Arc::clone(compressor));
        let changed = Condvar::new();
        let own = Arc::new(CompressedWrite { shared, compressor, spans, state, changed });
        let next = Arc::clone(&own);
        own.shared.workers.run([move || next.start()]);
        own
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn len(&self) -> Bytes {
        self.spans.len()
    }

    /// Returns the bytes that have reached the disk.
    pub fn moved(&self) -> Bytes {
        match &self.lock().stage {
            Stage::Writing(writing) => writing.raw.moved(),
            _ => Bytes::ZERO,
        }
    }

    pub fn has_ended(&self) -> bool {
        match &self.lock().stage {
            Stage::Compressing(_) | Stage::Starting => false,
            Stage::Writing(writing) => writing.raw.has_ended(),
            Stage::Failed(..) | Stage::Done => true,
        }
    }

    pub fn cancel(&self) {
        let mut state = self.lock();
        state.cancelled = true;
        if let Stage::Writing(writing) = &state.stage {
            writing.raw.cancel();
        }
    }

    /// Waits until all bytes are written, or the write has failed or was cancelled.
    pub fn wait(&self) -> Result<FileBytes, DiskTierError> {
        match self.settle() {
            Stage::Writing(Writing { raw, surplus, frames, _memory }) => {
                let (stored, on_disk) = (raw.stored(), raw.len());
                drop(surplus);
                let stored = stored?;
                if frames.is_some() {
                    self.compressor.count_written(self.len(), whole_blocks(on_disk));
                }
                Ok(FileBytes { len: self.len(), frames: frames.map(Arc::new), ..stored })
            }
            Stage::Failed(error, charges) => {
                drop(charges);
                self.shared.state().counters.writes.failed += 1;
                Err(error)
            }
            _ => unreachable!("a transfer is waited for once"),
        }
    }

    /// Waits until the write has ended, then frees what it holds.
    pub fn release(&self) {
        if let Stage::Writing(writing) = self.settle() {
            writing.raw.release();
        }
    }

    /// Waits until no worker and no I/O uses the write, and takes its last stage.
    fn settle(&self) -> Stage {
        let mut state = self.lock();
        while matches!(state.stage, Stage::Compressing(_) | Stage::Starting) {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let stage = std::mem::replace(&mut state.stage, Stage::Done);
        drop(state);
        if let Stage::Writing(writing) = &stage {
            writing.raw.join();
        }
        stage
    }

    /// Samples the write. Then queues its frames for compression, or starts to write it as it is.
    fn start(self: Arc<CompressedWrite>) {
        let decision = self.decided();
        self.compressor.count_decision(decision);
        let memory = match decision {
            Decision::Compress => self.compressor.memory(self.len()).ok(),
            _ => None,
        };
        let Some(memory) = memory else { return self.start_write() };
        let shared_memory = Arc::clone(&memory);
        let frames = {
            let mut state = self.lock();
            let Stage::Compressing(compressing) = &mut state.stage else { return };
            compressing.memory = Some(memory);
            compressing.left = compressing.frames.count();
            compressing.left
        };
        self.shared.workers.run((0..frames).map(|index| {
            let (own, memory) = (Arc::clone(&self), Arc::clone(&shared_memory));
            move || own.compress(index, &memory)
        }));
    }

    fn decided(&self) -> Decision {
        let mut codec = self.compressor.codec();
        let begun = Instant::now();
        let sample = sample(&self.spans, &mut codec);
        self.compressor.count_compressing(sample.bytes, elapsed_ns(begun));
        let rates = Rates {
            compressor: self.compressor.rate(self.shared.workers.count()),
            disk: self.compressor.disk.rate(),
        };
        let space = &self.shared.space;
        let space = SpaceLeft { available: space.available(), capacity: space.capacity() };
        decide(self.compressor.config, &Facts { sample, rates, space })
    }

    /// Compresses one frame. The last frame to finish starts the transfer to the disk.
    fn compress(self: Arc<CompressedWrite>, index: usize, memory: &HostMemory) {
        let compressed = self.compressed(index, memory);
        let mut state = self.lock();
        let Stage::Compressing(compressing) = &mut state.stage else { return };
        if let Some(compressed) = compressed {
            compressing.frames.set(index, compressed);
        }
        compressing.left -= 1;
        let last = compressing.left == 0;
        drop(state);
        if last {
            self.start_write();
        }
    }

    /// Returns the compressed length of a frame, or `None` if it stays uncompressed.
    fn compressed(&self, index: usize, memory: &HostMemory) -> Option<Bytes> {
        let frame = {
            let state = self.lock();
            match &state.stage {
                Stage::Compressing(compressing) if !state.cancelled => compressing.frames.at(index),
                _ => return None,
            }
        };
        let mut codec = self.compressor.codec();
        let len = frame.len.count() as usize;
        let begun = Instant::now();
        self.spans.read(frame.start, &mut codec.plain[..len]);
        let compressed = codec.compress(len);
        self.compressor.count_compressing(frame.len, elapsed_ns(begun));
        let compressed = compressed?;
        let whole = whole_blocks(compressed);
        if !self.compressor.config.saves_enough(frame.len, whole) {
            return None;
        }
        // Bytes of an earlier frame must not reach the disk.
        codec.compressed[compressed.count() as usize..whole.count() as usize].fill(0);
        let bytes = &codec.compressed[..whole.count() as usize];
        memory.write(frame.start, bytes).expect("it is no longer than before");
        Some(compressed)
    }

    /// Allocates extents and starts the transfer to the disk.
    fn start_write(&self) {
        let (compressing, cancelled) = {
            let mut state = self.lock();
            match std::mem::replace(&mut state.stage, Stage::Starting) {
                Stage::Compressing(compressing) => (compressing, state.cancelled),
                other => {
                    state.stage = other;
                    return;
                }
            }
        };
        let stage = match cancelled {
            true => {
                let error = DiskTierError::Cancelled { moved: Bytes::ZERO, len: self.len() };
                Stage::Failed(error, vec![compressing.charge])
            }
            false => self.begin_raw(compressing),
        };
        let mut state = self.lock();
        if let Stage::Writing(writing) = &stage
            && state.cancelled
        {
            writing.raw.cancel();
        }
        state.stage = stage;
        drop(state);
        self.changed.notify_all();
    }

    fn begin_raw(&self, compressing: Compressing) -> Stage {
        let Compressing { mut charge, frames, memory, .. } = compressing;
        let frames = frames.any_compressed().then_some(frames);
        let list = match (&frames, &memory) {
            (Some(frames), Some(memory)) => frames.list(&self.spans, memory),
            _ => self.spans.clone(),
        };
        let len = list.len();
        let pays = charge.split(whole_blocks(len));
        let id = match self.shared.allocate_extents(len, pays.bytes()) {
            Ok(id) => id,
            Err(error) => return Stage::Failed(error, vec![pays, charge]),
        };
        let allocation =
            Arc::new(DiskAllocation { shared: Arc::clone(&self.shared), id, charge: pays });
        let places = self.shared.places(&allocation, len);
        let pieces = cut(&list, &places, self.shared.config.piece);
        let summed = frames.is_some() || self.shared.verifies();
        let raw =
            RawTransfer::begin(allocation, Direction::Write, list, Vec::new(), pieces, summed);
        Stage::Writing(Writing { raw, surplus: charge, frames, _memory: memory })
    }
}

impl Compressor {
    pub(super) fn codec(&self) -> Pooled<Codec> {
        let Ok(codec) = self.codecs.take(|_| true, || Ok::<_, Infallible>(Codec::new()));
        codec
    }

    /// Takes a buffer of at least `len` bytes.
    pub(super) fn memory(&self, len: Bytes) -> Result<Pooled<Arc<HostMemory>>, HostMemoryError> {
        let fits = |memory: &Arc<HostMemory>| memory.len() >= len;
        self.memory.take(fits, || HostMemory::new(len, None, PageKind::Small))
    }
}
