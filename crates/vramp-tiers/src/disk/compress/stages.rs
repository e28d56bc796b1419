//! The stages before a write goes to the disk and after a read has left it.

use std::convert::Infallible;
use std::sync::{Arc, MutexGuard};
use std::time::Instant;

use vramp_core::Bytes;
use vramp_host::{HostMemory, HostMemoryError, PageKind};

use super::codec::{Codec, DecodeError};
use super::frames::{Frame, Frames, whole_blocks};
use super::object_pool::Pooled;
use super::{Compressor, elapsed_ns};
use crate::disk::DiskTierError;
use crate::disk::core::compression::{
    Decision, Facts, Rates, Sample, SpaceLeft, decide, sample_ranges,
};
use crate::disk::job::{Job, State};
use crate::disk::shared::DiskAllocation;
use crate::disk::spans::SpanList;

impl Job {
    pub fn compressor(&self) -> &Arc<Compressor> {
        self.shared().compressor.as_ref().expect("only a store that compresses has such stages")
    }

    /// Queues the sampling of a write, whose charge covers all its bytes.
    pub fn begin_compressing(self: &Arc<Job>) {
        let job = Arc::clone(self);
        self.shared().workers.run([move || job.sample()]);
    }

    /// Samples the write. Then queues its frames for compression, or starts to write it as it is.
    fn sample(self: Arc<Job>) {
        let decision = self.decided();
        self.compressor().count_decision(decision);
        let memory = match decision {
            Decision::Compress => self.compressor().memory(self.len()).ok(),
            _ => None,
        };
        let Some(memory) = memory else { return self.start_write() };
        let frames = Arc::new(Frames::of(self.len()));
        let (count, compressed) = (frames.count(), Arc::clone(&memory));
        let mut state = self.lock();
        state.in_flight = count;
        (state.held.frames, state.held.memory) = (Some(frames), Some(memory));
        drop(state);
        self.shared().workers.run((0..count).map(|index| {
            let (job, memory) = (Arc::clone(&self), Arc::clone(&compressed));
            move || job.compress(index, &memory)
        }));
    }

    fn decided(&self) -> Decision {
        let compressor = self.compressor();
        let mut codec = compressor.codec();
        let begun = Instant::now();
        let sample = sample(&self.spans, &mut codec);
        compressor.count_compressing(sample.bytes, elapsed_ns(begun));
        let rates = Rates {
            compressor: compressor.rate(self.shared().workers.count()),
            disk: compressor.disk.rate(),
        };
        let space = &self.shared().space;
        let space = SpaceLeft { available: space.available(), capacity: space.capacity() };
        decide(compressor.config, &Facts { sample, rates, space })
    }

    /// Compresses one frame. The last frame to finish starts the transfer to the disk.
    fn compress(self: Arc<Job>, index: usize, memory: &HostMemory) {
        let compressed = self.compressed(index, memory);
        let mut state = self.lock();
        if let (Some(compressed), Some(frames)) = (compressed, &mut state.held.frames) {
            Arc::make_mut(frames).set(index, compressed);
        }
        state.in_flight -= 1;
        if state.in_flight == 0 {
            drop(state);
            self.start_write();
        }
    }

    /// Returns the compressed length of a frame, or `None` if it stays uncompressed.
    fn compressed(&self, index: usize, memory: &HostMemory) -> Option<Bytes> {
        let frame = {
            let state = self.lock();
            if state.cancelled {
                return None;
            }
            state.held.frames.as_ref()?.at(index)
        };
        let compressor = self.compressor();
        let mut codec = compressor.codec();
        let len = frame.len.count() as usize;
        let begun = Instant::now();
        self.spans.read(frame.start, &mut codec.plain[..len]);
        let compressed = codec.compress(len);
        compressor.count_compressing(frame.len, elapsed_ns(begun));
        let compressed = compressed?;
        let whole = whole_blocks(compressed);
        if !compressor.config.saves_enough(frame.len, whole) {
            return None;
        }
        // Bytes of an earlier frame must not reach the disk.
        codec.compressed[compressed.count() as usize..whole.count() as usize].fill(0);
        let bytes = &codec.compressed[..whole.count() as usize];
        memory.write(frame.start, bytes).expect("it is no longer than before");
        Some(compressed)
    }

    /// Allocates extents and starts the transfer to the disk.
    fn start_write(self: &Arc<Job>) {
        let (list, cancelled) = {
            let mut state = self.lock();
            let held = &mut state.held;
            held.frames.take_if(|frames| !frames.any_compressed());
            let list = match (&held.frames, &held.memory) {
                (Some(frames), Some(memory)) => Some(frames.list(&self.spans, memory)),
                _ => None,
            };
            (list, state.cancelled)
        };
        let (shared, len) = (self.shared(), list.as_ref().unwrap_or(&self.spans).len());
        let allocated = match cancelled {
            true => Err(Job::cancelled(Bytes::ZERO, self.len())),
            false => shared.allocate_extents(len, whole_blocks(len)),
        };
        let mut state = self.lock();
        let id = match allocated {
            Ok(id) => id,
            Err(error) => {
                state.fail(error);
                return self.end(state);
            }
        };
        let all = state.held.charge.as_mut().expect("a write that is compressed has a charge");
        let charge = all.split(whole_blocks(len));
        drop(state);
        let allocation = Arc::new(DiskAllocation { shared: Arc::clone(shared), id, charge });
        let places = shared.places(&allocation, len);
        let summed = list.is_some() || shared.verifies();
        self.begin_transfer(allocation, &places, list, Vec::new(), summed);
    }

    /// Verifies the checksums of what was read, and hands the compressed frames to workers.
    pub fn decompress(self: &Arc<Job>, mut state: MutexGuard<'_, State>) {
        let (finished, frames) = (std::mem::take(&mut state.finished), state.held.frames.clone());
        let memory = state.held.memory.as_ref().map(|memory| Arc::clone(memory));
        let has_failed = state.failed.is_some();
        drop(state);
        let verified = if has_failed { Ok(()) } else { self.verify(&finished) };
        let mut state = self.lock();
        if let Err(error) = verified {
            state.fail(error);
        }
        let (None, Some(frames), Some(memory)) = (&state.failed, frames, memory) else {
            return self.end(state);
        };
        let compressed: Vec<Frame> =
            frames.iter().filter(|frame| frame.compressed.is_some()).collect();
        state.in_flight = compressed.len();
        drop(state);
        self.shared().workers.run(compressed.into_iter().map(|frame| {
            let (job, memory) = (Arc::clone(self), Arc::clone(&memory));
            move || job.decompress_frame(frame, &memory)
        }));
    }

    fn decompress_frame(&self, frame: Frame, memory: &HostMemory) {
        let cancelled = self.lock().cancelled;
        let ended = match cancelled {
            true => Err(Job::cancelled(Bytes::ZERO, self.len())),
            false => self.decompressed(frame, memory),
        };
        let mut state = self.lock();
        if let Err(error) = ended {
            state.fail(error);
        }
        state.in_flight -= 1;
        if state.in_flight == 0 {
            self.end(state);
        }
    }

    fn decompressed(&self, frame: Frame, memory: &HostMemory) -> Result<(), DiskTierError> {
        let Frame { start, len, compressed } = frame;
        let compressed = compressed.expect("only such frames are decompressed");
        let from = compressed.count() as usize;
        let compressor = self.compressor();
        let mut codec = compressor.codec();
        let begun = Instant::now();
        memory.read(start, &mut codec.compressed[..from]).expect("it was read to there");
        codec
            .decompress(from, len.count() as usize)
            .map_err(|DecodeError(why)| DiskTierError::Undecodable { len, compressed, why })?;
        self.spans.write(start, &codec.plain[..len.count() as usize]);
        compressor.count_decompressing(len, elapsed_ns(begun));
        Ok(())
    }
}

/// Compresses the sampled ranges of `spans`, each on its own.
fn sample(spans: &SpanList, codec: &mut Codec) -> Sample {
    let (starts, each) = sample_ranges(spans.len());
    let mut sample = Sample { bytes: Bytes::ZERO, compressed: Bytes::ZERO };
    let len = each.count() as usize;
    for start in starts {
        spans.read(start, &mut codec.plain[..len]);
        sample.bytes += each;
        sample.compressed += codec.compress(len).unwrap_or(each);
    }
    sample
}

impl Compressor {
    fn codec(&self) -> Pooled<Codec> {
        let Ok(codec) = self.codecs.take(|_| true, || Ok::<_, Infallible>(Codec::new()));
        codec
    }

    /// Takes a buffer of at least `len` bytes.
    pub fn memory(&self, len: Bytes) -> Result<Pooled<Arc<HostMemory>>, HostMemoryError> {
        let fits = |memory: &Arc<HostMemory>| memory.len() >= len;
        self.memory.take(fits, || HostMemory::new(len, None, PageKind::Small))
    }
}
