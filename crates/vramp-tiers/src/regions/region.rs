//! One region: its pool, its options, and whether it sleeps.

use std::ops::Range;
use std::sync::TryLockError;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use vramp_alloc::Allocator;
use vramp_alloc::sharing::PinnedRange;
use vramp_alloc::sleep::Sleep;
use vramp_core::Bytes;

use super::copies::{Contents, Copy, ends};
use crate::movers::{MoveError, Mover};
use crate::sync::{Mutex, MutexGuard, lock};

/// Where contents go while a region sleeps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Backup {
    /// To pinned memory of the host.
    #[default]
    Host,
    /// To the disk that [`Regions::set_disk`](super::Regions::set_disk) named, through a few pinned blocks.
    Disk,
    /// Nowhere: after a resume they are undefined.
    None,
}

/// Options of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RegionOptions {
    /// Where contents go while the region sleeps.
    pub backup: Backup,
    /// The program writes a block once, before the first pause behind its allocation. A copy then stays
    /// valid until something is allocated or freed in the region, and later pauses copy nothing.
    pub read_only: bool,
    /// A captured graph keeps what is live here when its capture begins, where graphs keep memory for
    /// communication libraries. Without it the program says that no collective of a graph uses the region,
    /// which then sleeps also while graphs exist.
    pub graph_pins: bool,
}

impl Default for RegionOptions {
    fn default() -> RegionOptions {
        RegionOptions { backup: Backup::Host, read_only: false, graph_pins: true }
    }
}

/// What a region does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// It serves requests.
    Awake,
    /// It is being paused, or copied ahead.
    Pausing,
    /// Some or all of its memory is off the card.
    Asleep,
    /// It is being resumed.
    Resuming,
}

/// State of a region at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionStatus {
    /// Its tag.
    pub tag: String,
    /// Its options.
    pub options: RegionOptions,
    /// What it does.
    pub phase: Phase,
    /// Bytes of memory of the card.
    pub on_card: Bytes,
    /// Bytes that are its own but not on the card.
    pub asleep: Bytes,
    /// Bytes of pinned memory that keep its contents.
    pub on_host: Bytes,
    /// Bytes charged to the disk for its contents.
    pub on_disk: Bytes,
    /// Bytes that the move in progress, or the last one, has copied.
    pub copied: Bytes,
    /// Bytes that it has to copy.
    pub to_copy: Bytes,
}

impl State {
    /// Awake, without a copy.
    pub(super) const AWAKE: State = State::Awake { copy: None, lost: None };
}

pub(super) enum State {
    Awake {
        /// A copy that may be valid.
        copy: Option<Copy>,
        /// Memory that a copy ahead may still read, because it failed.
        lost: Option<ReadLate>,
    },
    Asleep(Asleep),
}

/// Memory of a region that is awake and that copies may still read. It stays mapped until then.
pub(super) struct ReadLate {
    /// What made the copies.
    pub mover: Mover,
    /// What they read.
    pub _pins: Vec<PinnedRange>,
}

impl Drop for ReadLate {
    fn drop(&mut self) {
        // Dropping cannot report errors. Most often the copies are over already.
        let _ = self.mover.settle();
    }
}

/// A region that sleeps, in part or as a whole. Its memory is unmapped, and it wakes, only after
/// [`Asleep::settle`].
pub(super) struct Asleep {
    pub sleep: Sleep,
    pub contents: Contents,
    /// Bytes of contents below each chunk's end.
    pub ends: Vec<Bytes>,
    /// Number of chunks, from the first one, that were given up. The others are as they were.
    pub gone: usize,
    /// For each chunk, whether its contents are only in the copy. Memory may back it all the same, after
    /// a failed resume.
    pub lost: Vec<bool>,
    /// Where contents go. [`Backup::None`] from the first pause that discards them.
    pub backup: Backup,
    /// What keeps the contents of lost chunks. `None` without a backup.
    pub copy: Option<Copy>,
    /// What made the last copies. After a failure some may be in flight.
    copied_by: Option<Mover>,
}

impl Asleep {
    pub fn new(sleep: Sleep, backup: Backup, copy: Option<Copy>) -> Asleep {
        let contents = Contents::new(sleep.contents());
        let ends = ends(&contents, sleep.chunks());
        let lost = vec![false; ends.len()];
        Asleep { sleep, contents, ends, gone: 0, lost, backup, copy, copied_by: None }
    }

    /// Waits for copies of failed moves that may still read or write its memory. No driver call if there are
    /// none.
    pub fn settle(&self) -> Result<(), MoveError> {
        self.copied_by.as_ref().map_or(Ok(()), Mover::settle)
    }

    /// Notes what makes the next copies. Those before are over.
    pub fn begin_copies(&mut self, mover: &Mover) {
        self.copied_by = Some(mover.clone());
    }

    /// Returns the bytes of chunks whose contents are not on the card.
    pub fn lost_bytes(&self) -> Bytes {
        let chunks = self.sleep.chunks().iter().zip(&self.lost);
        chunks.filter(|(_, lost)| **lost).map(|(chunk, _)| chunk.len).sum()
    }

    /// Returns the first run of lost chunks from `from` on.
    pub fn next_lost(&self, from: usize) -> Option<Range<usize>> {
        let start = from + self.lost.get(from..)?.iter().position(|&lost| lost)?;
        let len = self.lost[start..].iter().take_while(|&&lost| lost).count();
        Some(start..start + len)
    }

    /// Returns the bytes of contents in the first `chunks` chunks.
    pub fn contents_of(&self, chunks: usize) -> Bytes {
        chunks.checked_sub(1).map_or(Bytes::ZERO, |last| self.ends[last])
    }
}

/// Memory of a card with a tag, which sleeps and wakes as one.
pub struct Region {
    pub(super) tag: String,
    pub(super) options: RegionOptions,
    // Dropped before the pool, which it waits for copies of.
    state: Mutex<State>,
    pub(super) allocator: Allocator,
    phase: AtomicU8,
    asleep: AtomicU64,
    on_host: AtomicU64,
    on_disk: AtomicU64,
    copied: AtomicU64,
    to_copy: AtomicU64,
    /// Bytes freed while it sleeps, since its copy was looked at.
    freed: AtomicU64,
}

const PHASES: [Phase; 4] = [Phase::Awake, Phase::Pausing, Phase::Asleep, Phase::Resuming];

impl Region {
    pub(super) fn new(tag: &str, options: RegionOptions, allocator: Allocator) -> Region {
        Region {
            tag: tag.to_owned(),
            options,
            allocator,
            state: Mutex::new(State::AWAKE),
            phase: AtomicU8::new(0),
            asleep: AtomicU64::new(0),
            on_host: AtomicU64::new(0),
            on_disk: AtomicU64::new(0),
            copied: AtomicU64::new(0),
            to_copy: AtomicU64::new(0),
            freed: AtomicU64::new(0),
        }
    }

    /// Returns the tag.
    pub fn tag(&self) -> &str {
        &self.tag
    }

    /// Returns the options.
    pub fn options(&self) -> RegionOptions {
        self.options
    }

    /// Returns the pool of the region. It has the streams of the allocator that it was created for.
    pub fn allocator(&self) -> &Allocator {
        &self.allocator
    }

    /// Returns the state. Waits for no move. No driver call.
    pub fn status(&self) -> RegionStatus {
        let load = |value: &AtomicU64| Bytes::new(value.load(Ordering::Relaxed));
        RegionStatus {
            tag: self.tag.clone(),
            options: self.options,
            phase: PHASES[usize::from(self.phase.load(Ordering::Relaxed))],
            on_card: self.allocator.reserved(),
            asleep: load(&self.asleep),
            on_host: load(&self.on_host),
            on_disk: load(&self.on_disk),
            copied: load(&self.copied),
            to_copy: load(&self.to_copy),
        }
    }

    /// Returns true if some of its memory may be off the card, unless a pause is in progress.
    pub(super) fn sleeps(&self) -> bool {
        let phase = PHASES[usize::from(self.phase.load(Ordering::Relaxed))];
        matches!(phase, Phase::Asleep | Phase::Resuming)
    }

    /// Returns false if all of its memory is off the card.
    pub(super) fn has_memory_to_give(&self) -> bool {
        !self.sleeps() || !self.allocator.reserved().is_zero()
    }

    /// Takes the state, for one move at a time.
    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Takes the state unless a move is in progress.
    pub(super) fn try_state(&self) -> Option<MutexGuard<'_, State>> {
        match self.state.try_lock() {
            Ok(state) => Some(state),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    pub(super) fn set_phase(&self, phase: Phase) {
        let index = PHASES.iter().position(|&other| other == phase).expect("it lists all phases");
        self.phase.store(index as u8, Ordering::Relaxed);
    }

    pub(super) fn begin_copies(&self, bytes: Bytes) {
        self.copied.store(0, Ordering::Relaxed);
        self.to_copy.store(bytes.count(), Ordering::Relaxed);
    }

    pub(super) fn set_copied(&self, bytes: Bytes) {
        self.copied.store(bytes.count(), Ordering::Relaxed);
    }

    /// Returns the bytes of its copy, on the host or on a disk, while it sleeps. `None` without a copy.
    pub(super) fn copied_while_asleep(&self) -> Option<Bytes> {
        let load = |value: &AtomicU64| Bytes::new(value.load(Ordering::Relaxed));
        let is_asleep = PHASES[usize::from(self.phase.load(Ordering::Relaxed))] == Phase::Asleep;
        let copied = load(&self.on_host) + load(&self.on_disk);
        (is_asleep && !copied.is_zero()).then_some(copied)
    }

    /// Adds to the bytes freed while it sleeps. Returns their sum.
    pub(super) fn add_freed(&self, bytes: Bytes) -> Bytes {
        bytes + Bytes::new(self.freed.fetch_add(bytes.count(), Ordering::Relaxed))
    }

    pub(super) fn take_freed(&self) {
        self.freed.store(0, Ordering::Relaxed);
    }

    /// Notes where the memory is, once a move is over.
    pub(super) fn note(&self, state: &State) {
        let (phase, asleep, copy) = match state {
            State::Awake { copy, .. } => (Phase::Awake, Bytes::ZERO, copy),
            State::Asleep(asleep) => {
                let all: Bytes = asleep.sleep.chunks().iter().map(|chunk| chunk.len).sum();
                (Phase::Asleep, all.saturating_sub(asleep.sleep.backed()), &asleep.copy)
            }
        };
        let on_host = copy.as_ref().map_or(Bytes::ZERO, Copy::on_host);
        let on_disk = copy.as_ref().map_or(Bytes::ZERO, Copy::on_disk);
        self.asleep.store(asleep.count(), Ordering::Relaxed);
        self.on_host.store(on_host.count(), Ordering::Relaxed);
        self.on_disk.store(on_disk.count(), Ordering::Relaxed);
        self.set_phase(phase);
    }
}

impl std::fmt::Debug for Region {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let RegionStatus { tag, phase, on_card, asleep, .. } = self.status();
        write!(f, "region {tag:?}, {phase:?}: {on_card} on the card, {asleep} asleep")
    }
}
