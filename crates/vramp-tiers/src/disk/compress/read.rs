//! A read of which workers decompress what the disk returned.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use vramp_core::Bytes;
use vramp_host::{Direction, HostMemory};

use super::codec::Garbled;
use super::frames::{Frame, Frames};
use super::stock::Lent;
use super::{Compressor, elapsed_ns};
use crate::disk::DiskTierError;
use crate::disk::flight::Flight;
use crate::disk::shelf::StoredBytes;
use crate::disk::spans::{Place, Spans, cut};

/// A read under way. It goes on from the disk to the workers when somebody asks or waits.
pub(in crate::disk) struct Decompressing {
    flight: Arc<Flight>,
    frames: Arc<Frames>,
    work: Arc<Work>,
    /// Kept until no worker reads it.
    memory: Lent<Arc<HostMemory>>,
}

/// What workers have in hand.
struct Work {
    compressor: Arc<Compressor>,
    target: Spans,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// The disk has returned all, or has failed.
    landed: bool,
    /// Frames that are not decompressed.
    left: usize,
    cancelled: bool,
    failed: Option<DiskTierError>,
}

impl Decompressing {
    /// Begins to read `stored`, of which `frames` are compressed, into `target`.
    ///
    /// # Errors
    /// There is no memory for the compressed bytes.
    pub fn begin(
        stored: &StoredBytes,
        frames: &Arc<Frames>,
        target: Spans,
        compressor: &Arc<Compressor>,
    ) -> Result<Decompressing, DiskTierError> {
        let memory = compressor.memory(stored.len())?;
        let row = frames.row(&target, &memory);
        let places: Vec<Place> = stored.extents.iter().map(|extent| extent.place.clone()).collect();
        let holding = Arc::clone(&stored.holding);
        let pieces = cut(&row, &places, holding.shelf.config.piece);
        let expected = stored.extents.clone();
        let flight = Flight::begin(holding, Direction::Read, row, expected, pieces, true);
        let (state, changed) = (Mutex::default(), Condvar::new());
        let compressor = Arc::clone(compressor);
        let work = Arc::new(Work { compressor, target, state, changed });
        Ok(Decompressing { flight, frames: Arc::clone(frames), work, memory })
    }

    pub fn len(&self) -> Bytes {
        self.work.target.len()
    }

    pub fn moved(&self) -> Bytes {
        self.flight.moved()
    }

    /// True once all is decompressed. What has landed is given to the workers.
    pub fn is_over(&self) -> bool {
        self.flight.is_over() && {
            self.land();
            self.work.lock().left == 0
        }
    }

    pub fn cancel(&self) {
        self.work.lock().cancelled = true;
        self.flight.cancel();
    }

    /// Waits until all is decompressed.
    pub fn wait(&self) -> Result<(), DiskTierError> {
        self.settle();
        let failed = self.work.lock().failed.take();
        self.flight.count(failed.as_ref());
        failed.map_or(Ok(()), Err)
    }

    /// Waits until neither the disk nor a worker has anything to do with it.
    pub fn settle(&self) {
        self.flight.join();
        self.land();
        let mut state = self.work.lock();
        while state.left > 0 {
            state = self.work.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Compares the sums of what the disk returned, and has it decompressed. Once.
    fn land(&self) {
        let mut state = self.work.lock();
        if state.landed {
            return;
        }
        state.landed = true;
        // Not over before the sums are compared, whoever else asks.
        state.left = 1;
        drop(state);
        let verified = self.flight.verified();
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
        self.flight.shelf().workers.run(compressed.into_iter().map(|frame| {
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
            .map_err(|Garbled(why)| DiskTierError::Garbled { len, compressed, why })?;
        self.target.write(start, &codec.plain[..len.count() as usize]);
        self.compressor.count_decompressing(len, elapsed_ns(begun));
        Ok(())
    }
}
