//! A read of compressed bytes: the disk first, then workers that decompress.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use vramp_core::Bytes;
use vramp_host::{Direction, HostMemory};

use super::codec::DecodeError;
use super::frames::{Frame, Frames};
use super::object_pool::Pooled;
use super::{Compressor, elapsed_ns};
use crate::disk::DiskTierError;
use crate::disk::raw::RawTransfer;
use crate::disk::shared::FileBytes;
use crate::disk::spans::{FileRange, SpanList, cut};

/// A read in flight. The caller's thread hands the bytes to the workers when it polls or waits.
pub(in crate::disk) struct CompressedRead {
    raw: Arc<RawTransfer>,
    frames: Arc<Frames>,
    work: Arc<Work>,
    /// Memory of the compressed bytes, until no worker reads it.
    memory: Pooled<Arc<HostMemory>>,
}

/// State shared with the workers.
struct Work {
    compressor: Arc<Compressor>,
    target: SpanList,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// The disk part has ended, and its checksums are verified or about to be.
    disk_done: bool,
    /// Frames that are not decompressed yet.
    left: usize,
    cancelled: bool,
    failed: Option<DiskTierError>,
}

impl CompressedRead {
    /// Begins to read `stored` into `target`.
    ///
    /// # Errors
    /// There is no memory for the compressed bytes.
    pub fn begin(
        stored: &FileBytes,
        frames: &Arc<Frames>,
        target: SpanList,
        compressor: &Arc<Compressor>,
    ) -> Result<CompressedRead, DiskTierError> {
        let memory = compressor.memory(stored.len)?;
        let list = frames.list(&target, &memory);
        let places: Vec<FileRange> =
            stored.extents.iter().map(|extent| extent.place.clone()).collect();
        let allocation = Arc::clone(&stored.allocation);
        let pieces = cut(&list, &places, allocation.shared.config.piece);
        let expected = stored.extents.clone();
        let raw = RawTransfer::begin(allocation, Direction::Read, list, expected, pieces, true);
        let (state, changed) = (Mutex::default(), Condvar::new());
        let compressor = Arc::clone(compressor);
        let work = Arc::new(Work { compressor, target, state, changed });
        Ok(CompressedRead { raw, frames: Arc::clone(frames), work, memory })
    }

    pub fn len(&self) -> Bytes {
        self.work.target.len()
    }

    pub fn moved(&self) -> Bytes {
        self.raw.moved()
    }

    /// Returns true once all frames are decompressed. Once the disk is done, hands frames to
    /// workers.
    pub fn has_ended(&self) -> bool {
        self.raw.has_ended() && {
            self.decompress_all();
            self.work.lock().left == 0
        }
    }

    pub fn cancel(&self) {
        self.work.lock().cancelled = true;
        self.raw.cancel();
    }

    /// Waits until all frames are decompressed.
    pub fn wait(&self) -> Result<(), DiskTierError> {
        self.settle();
        let failed = self.work.lock().failed.take();
        self.raw.count(failed.as_ref());
        failed.map_or(Ok(()), Err)
    }

    /// Waits until neither the disk nor a worker uses the memory.
    pub fn settle(&self) {
        self.raw.join();
        self.decompress_all();
        let mut state = self.work.lock();
        while state.left > 0 {
            state = self.work.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Verifies the checksums and hands the compressed frames to workers. Does nothing if called
    /// again.
    fn decompress_all(&self) {
        let mut state = self.work.lock();
        if state.disk_done {
            return;
        }
        state.disk_done = true;
        // Keeps another thread from seeing the end before the checksums are verified.
        state.left = 1;
        drop(state);
        let verified = self.raw.verified();
        let mut state = self.work.lock();
        if let Err(error) = verified {
            (state.failed, state.left) = (Some(error), 0);
            self.work.changed.notify_all();
            return;
        }
        let compressed: Vec<Frame> =
            self.frames.iter().filter(|frame| frame.compressed.is_some()).collect();
        state.left = compressed.len();
        drop(state);
        self.raw.shared().workers.run(compressed.into_iter().map(|frame| {
            let (work, memory) = (Arc::clone(&self.work), Arc::clone(&self.memory));
            move || work.decompress(frame, &memory)
        }));
    }
}

impl Work {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn decompress(&self, frame: Frame, memory: &HostMemory) {
        let ended = match self.lock().cancelled {
            true => {
                let (moved, len) = (Bytes::ZERO, self.target.len());
                Err(DiskTierError::Cancelled { moved, len })
            }
            false => self.decompressed(frame, memory),
        };
        let mut state = self.lock();
        if let Err(error) = ended {
            state.failed = state.failed.take().or(Some(error));
        }
        state.left -= 1;
        if state.left == 0 {
            self.changed.notify_all();
        }
    }

    fn decompressed(&self, frame: Frame, memory: &HostMemory) -> Result<(), DiskTierError> {
        let Frame { start, len, compressed } = frame;
        let compressed = compressed.expect("only such frames are decompressed");
        let from = compressed.count() as usize;
        let mut codec = self.compressor.codec();
        let begun = Instant::now();
        memory.read(start, &mut codec.compressed[..from]).expect("it was read to there");
        codec
            .decompress(from, len.count() as usize)
            .map_err(|DecodeError(why)| DiskTierError::Undecodable { len, compressed, why })?;
        self.target.write(start, &codec.plain[..len.count() as usize]);
        self.compressor.count_decompressing(len, elapsed_ns(begun));
        Ok(())
    }
}
