//! A write that workers may compress before it goes to the disk.

use std::convert::Infallible;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use vramp_core::Bytes;
use vramp_host::{Direction, HostMemory, HostMemoryError, PageKind};

use super::codec::Codec;
use super::decide::{Decision, Prospect, Room, Speeds, decide};
use super::frames::{Frames, whole_blocks};
use super::sample::sample;
use super::stock::Lent;
use super::{Compressor, elapsed_ns};
use crate::disk::DiskTierError;
use crate::disk::flight::Flight;
use crate::disk::shelf::{Holding, Shelf, StoredBytes};
use crate::disk::spans::{Spans, cut};
use crate::ledger::shell::charge::Charge;

/// A write under way, from its samples to its last byte on the disk. Workers drive it; whoever began
/// it only waits.
pub(in crate::disk) struct Compressing {
    shelf: Arc<Shelf>,
    compressor: Arc<Compressor>,
    spans: Spans,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    cancelled: bool,
    stage: Stage,
}

enum Stage {
    /// Workers sample or compress it.
    Preparing(Preparing),
    /// A worker makes a flight of it.
    Between,
    Flying(Flying),
    /// Nothing is held but the charge: whoever is told of its end may do anything, so that is for
    /// whoever waits.
    Failed(DiskTierError, Vec<Charge>),
    /// It was waited for.
    Over,
}

struct Preparing {
    /// For all of it, as it is in memory.
    charge: Charge,
    frames: Frames,
    memory: Option<Lent<Arc<HostMemory>>>,
    /// Frames that workers have not looked at.
    left: usize,
}

struct Flying {
    flight: Arc<Flight>,
    /// What is charged beyond what is written.
    surplus: Charge,
    /// Where any frame is compressed.
    frames: Option<Frames>,
    _memory: Option<Lent<Arc<HostMemory>>>,
}

impl Compressing {
    /// Has a worker look at the bytes of `spans`, which `charge` pays for as they are.
    pub fn begin(
        shelf: &Arc<Shelf>,
        compressor: &Arc<Compressor>,
        spans: Spans,
        charge: Charge,
    ) -> Arc<Compressing> {
        let frames = Frames::of(spans.len());
        let stage = Stage::Preparing(Preparing { charge, frames, memory: None, left: 0 });
        let state = Mutex::new(State { cancelled: false, stage });
        let (shelf, compressor) = (Arc::clone(shelf), Arc::clone(compressor));
        let changed = Condvar::new();
        let own = Arc::new(Compressing { shelf, compressor, spans, state, changed });
        let next = Arc::clone(&own);
        own.shelf.workers.run([move || next.look()]);
        own
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn len(&self) -> Bytes {
        self.spans.len()
    }

    /// How much has reached the disk.
    pub fn moved(&self) -> Bytes {
        match &self.lock().stage {
            Stage::Flying(flying) => flying.flight.moved(),
            _ => Bytes::ZERO,
        }
    }

    pub fn is_over(&self) -> bool {
        match &self.lock().stage {
            Stage::Preparing(_) | Stage::Between => false,
            Stage::Flying(flying) => flying.flight.is_over(),
            Stage::Failed(..) | Stage::Over => true,
        }
    }

    pub fn cancel(&self) {
        let mut state = self.lock();
        state.cancelled = true;
        if let Stage::Flying(flying) = &state.stage {
            flying.flight.cancel();
        }
    }

    /// Waits until all is written, or cancelled, or has failed.
    pub fn wait(&self) -> Result<StoredBytes, DiskTierError> {
        match self.settle() {
            Stage::Flying(Flying { flight, surplus, frames, _memory }) => {
                let (stored, on_disk) = (flight.stored(), flight.len());
                drop(surplus);
                let stored = stored?;
                if frames.is_some() {
                    self.compressor.count_written(self.len(), whole_blocks(on_disk));
                }
                Ok(StoredBytes { len: self.len(), frames: frames.map(Arc::new), ..stored })
            }
            Stage::Failed(error, charges) => {
                drop(charges);
                self.shelf.state().counters.writes.failed += 1;
                Err(error)
            }
            _ => unreachable!("a transfer is waited for once"),
        }
    }

    /// Waits until it is over, and lets go of what it held.
    pub fn let_go(&self) {
        if let Stage::Flying(flying) = self.settle() {
            flying.flight.let_go();
        }
    }

    /// Waits until workers and the disk have done with it, and takes what it came to.
    fn settle(&self) -> Stage {
        let mut state = self.lock();
        while matches!(state.stage, Stage::Preparing(_) | Stage::Between) {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let stage = std::mem::replace(&mut state.stage, Stage::Over);
        drop(state);
        if let Stage::Flying(flying) = &stage {
            flying.flight.join();
        }
        stage
    }

    /// Samples it, and goes on as that suggests.
    fn look(self: Arc<Compressing>) {
        let decision = self.decided();
        self.compressor.count_decision(decision);
        let memory = match decision {
            Decision::Compress => self.compressor.memory(self.len()).ok(),
            _ => None,
        };
        let Some(memory) = memory else { return self.fly() };
        let held = Arc::clone(&memory);
        let frames = {
            let mut state = self.lock();
            let Stage::Preparing(preparing) = &mut state.stage else { return };
            preparing.memory = Some(memory);
            preparing.left = preparing.frames.count();
            preparing.left
        };
        self.shelf.workers.run((0..frames).map(|index| {
            let (own, held) = (Arc::clone(&self), Arc::clone(&held));
            move || own.compress(index, &held)
        }));
    }

    fn decided(&self) -> Decision {
        let mut codec = self.compressor.codec();
        let begun = Instant::now();
        let sample = sample(&self.spans, &mut codec);
        self.compressor.count_compressing(sample.bytes, elapsed_ns(begun));
        let rates = Speeds {
            compressor: self.compressor.rate(self.shelf.workers.count()),
            disk: self.compressor.disk.rate(),
        };
        let space = &self.shelf.space;
        let room = Room { left: space.available(), capacity: space.capacity() };
        decide(self.compressor.config, &Prospect { sample, rates, room })
    }

    /// Compresses one frame. The last one to be done lets all go on.
    fn compress(self: Arc<Compressing>, index: usize, memory: &HostMemory) {
        let compressed = self.compressed(index, memory);
        let mut state = self.lock();
        let Stage::Preparing(preparing) = &mut state.stage else { return };
        if let Some(compressed) = compressed {
            preparing.frames.set(index, compressed);
        }
        preparing.left -= 1;
        let last = preparing.left == 0;
        drop(state);
        if last {
            self.fly();
        }
    }

    /// How long a frame is compressed; `None` if it stays as it is.
    fn compressed(&self, index: usize, memory: &HostMemory) -> Option<Bytes> {
        let frame = {
            let state = self.lock();
            match &state.stage {
                Stage::Preparing(preparing) if !state.cancelled => preparing.frames.at(index),
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
        // What others left there is nobody's to keep.
        codec.compressed[compressed.count() as usize..whole.count() as usize].fill(0);
        let bytes = &codec.compressed[..whole.count() as usize];
        memory.write(frame.start, bytes).expect("it is no longer than before");
        Some(compressed)
    }

    /// Takes extents, and begins to write.
    fn fly(&self) {
        let (preparing, cancelled) = {
            let mut state = self.lock();
            match std::mem::replace(&mut state.stage, Stage::Between) {
                Stage::Preparing(preparing) => (preparing, state.cancelled),
                other => {
                    state.stage = other;
                    return;
                }
            }
        };
        let stage = match cancelled {
            true => {
                let error = DiskTierError::Cancelled { moved: Bytes::ZERO, len: self.len() };
                Stage::Failed(error, vec![preparing.charge])
            }
            false => self.begin_flight(preparing),
        };
        let mut state = self.lock();
        if let Stage::Flying(flying) = &stage
            && state.cancelled
        {
            flying.flight.cancel();
        }
        state.stage = stage;
        drop(state);
        self.changed.notify_all();
    }

    fn begin_flight(&self, preparing: Preparing) -> Stage {
        let Preparing { mut charge, frames, memory, .. } = preparing;
        let frames = frames.any_compressed().then_some(frames);
        let row = match (&frames, &memory) {
            (Some(frames), Some(memory)) => frames.row(&self.spans, memory),
            _ => self.spans.clone(),
        };
        let len = row.len();
        let pays = charge.split(whole_blocks(len));
        let id = match self.shelf.take_extents(len, pays.bytes()) {
            Ok(id) => id,
            Err(error) => return Stage::Failed(error, vec![pays, charge]),
        };
        let holding = Arc::new(Holding { shelf: Arc::clone(&self.shelf), id, _charge: pays });
        let places = self.shelf.places(&holding, len);
        let pieces = cut(&row, &places, self.shelf.config.piece);
        let summed = frames.is_some() || self.shelf.verifies();
        let flight = Flight::begin(holding, Direction::Write, row, Vec::new(), pieces, summed);
        Stage::Flying(Flying { flight, surplus: charge, frames, _memory: memory })
    }
}

impl Compressor {
    pub(super) fn codec(&self) -> Lent<Codec> {
        let Ok(codec) = self.codecs.take(|_| true, || Ok::<_, Infallible>(Codec::new()));
        codec
    }

    /// Memory for `len` compressed bytes at least.
    pub(super) fn memory(&self, len: Bytes) -> Result<Lent<Arc<HostMemory>>, HostMemoryError> {
        let fits = |memory: &Arc<HostMemory>| memory.len() >= len;
        self.memory.take(fits, || HostMemory::new(len, None, PageKind::Small))
    }
}
