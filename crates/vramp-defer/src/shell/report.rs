//! What moved, where, how fast, and why.

use std::collections::VecDeque;
use std::fmt;

use crate::planner::{BufferId, EvictionCost, LeaseRefused, PieceId, Shortfall, SpillTier};
use vramp_core::Bytes;

/// What was done since the manager was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpillStats {
    /// Times that memory was asked for.
    pub spills: u64,
    /// Memory that was freed for that.
    pub freed_bytes: u64,
    /// Contents copied to the host.
    pub to_host_bytes: u64,
    /// Nanoseconds that took, copies side by side counted each.
    pub to_host_ns: u64,
    /// Contents copied to the disk, from the card or the host.
    pub to_disk_bytes: u64,
    /// Nanoseconds that took.
    pub to_disk_ns: u64,
    /// Contents queued from the host to the card.
    pub from_host_bytes: u64,
    /// Contents read back from the disk.
    pub from_disk_bytes: u64,
    /// Nanoseconds that took.
    pub from_disk_ns: u64,
    /// How often leases read a spilled buffer where it is.
    pub reads_in_place: u64,
    /// Buffers that came back because they were read so often.
    pub promotions: u64,
    /// Leases that had to wait for others, and how long in all.
    pub waits: u64,
    /// Nanoseconds.
    pub waited_ns: u64,
    /// Moves that failed with an error, as [`SpillManager::failures`](super::SpillManager::failures)
    /// tells of the last ones. What they were about stayed where it was.
    pub failures: u64,
    /// Moves that were given up with nothing broken: there was no room for them, or nobody needed them
    /// any more.
    pub given_up: u64,
}

/// A move that failed with an error. What it was about stayed where it was.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailedMove {
    /// Which piece.
    pub piece: PieceId,
    /// What was to be done.
    pub what: MoveKind,
    /// When it failed, by the device's clock.
    pub at_ns: u64,
    /// What the card, the host or the disk said.
    pub error: String,
}

impl fmt::Display for FailedMove {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let FailedMove { piece, what, error, .. } = self;
        match what {
            MoveKind::Spilled(Some(to)) | MoveKind::Cleaned(to) => {
                write!(f, "{piece} did not go to the {to}: {error}")
            }
            MoveKind::Spilled(None) => write!(f, "{piece} did not leave: {error}"),
            MoveKind::Restored(from) => {
                write!(f, "{piece} did not come back from the {from}: {error}")
            }
            MoveKind::Pushed => write!(f, "{piece} did not go from host to disk: {error}"),
        }
    }
}

/// One move that was made.
#[derive(Clone, Debug)]
pub struct MoveRecord {
    /// Which piece.
    pub piece: PieceId,
    /// How much.
    pub bytes: Bytes,
    /// What was done.
    pub what: MoveKind,
    /// When it began, by the device's clock.
    pub began_ns: u64,
    /// How long it took.
    pub took_ns: u64,
    /// Why this one was chosen, where it was a choice.
    pub cost: Option<EvictionCost>,
}

/// What was done with a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MoveKind {
    /// It left the card; copied there, or nowhere because a copy was there.
    Spilled(Option<SpillTier>),
    /// It was copied ahead of need, and stays.
    Cleaned(SpillTier),
    /// It came back.
    Restored(SpillTier),
    /// It went from the host to the disk.
    Pushed,
}

impl fmt::Display for MoveRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let MoveRecord { piece, bytes, what, took_ns, .. } = self;
        match what {
            MoveKind::Spilled(Some(to)) => write!(f, "{piece}: {bytes} spilled to {to}")?,
            MoveKind::Spilled(None) => write!(f, "{piece}: {bytes} left, a copy was there")?,
            MoveKind::Cleaned(to) => write!(f, "{piece}: {bytes} copied ahead to {to}")?,
            MoveKind::Restored(from) => write!(f, "{piece}: {bytes} came back from {from}")?,
            MoveKind::Pushed => write!(f, "{piece}: {bytes} went from host to disk")?,
        }
        write!(f, " in {} us", took_ns / 1000)?;
        match &self.cost {
            Some(cost) => write!(f, "; {cost}"),
            None => Ok(()),
        }
    }
}

/// A request for a lease that had to wait.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WaitRecord {
    /// What it was for.
    pub buffers: Vec<BufferId>,
    /// When it began to wait, by the device's clock.
    pub began_ns: u64,
    /// How long, by the host's clock: nanoseconds.
    pub waited_ns: u64,
    /// What it waited for, when it was refused last.
    pub refused: LeaseRefused,
    /// True if it was given in the end.
    pub served: bool,
}

impl fmt::Display for WaitRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let WaitRecord { buffers, waited_ns, refused, served, .. } = self;
        let end = if *served { "then it came" } else { "in vain" };
        write!(f, "a lease on {} buffers", buffers.len())?;
        if let Some(first) = buffers.first() {
            write!(f, ", {first} first,")?;
        }
        write!(f, " waited {} us, {end}: {refused}", waited_ns / 1000)
    }
}

/// The last moves, failures and waits.
pub(super) struct History {
    most: usize,
    moves: VecDeque<MoveRecord>,
    failed: VecDeque<FailedMove>,
    waits: VecDeque<WaitRecord>,
}

/// So many of the last failures are remembered.
const FAILURES: usize = 16;

impl History {
    pub fn keeping(most: usize) -> History {
        let (moves, failed, waits) = (VecDeque::new(), VecDeque::new(), VecDeque::new());
        History { most, moves, failed, waits }
    }

    pub fn push(&mut self, record: MoveRecord) {
        push_last(&mut self.moves, self.most, record);
    }

    pub fn push_failed(&mut self, failed: FailedMove) {
        push_last(&mut self.failed, FAILURES, failed);
    }

    pub fn push_wait(&mut self, wait: WaitRecord) {
        push_last(&mut self.waits, self.most, wait);
    }

    /// The last waits, the oldest first.
    pub fn waits(&self) -> Vec<WaitRecord> {
        self.waits.iter().cloned().collect()
    }

    /// The last failures, the oldest first.
    pub fn failed(&self) -> impl DoubleEndedIterator<Item = &FailedMove> {
        self.failed.iter()
    }

    pub fn all(&self) -> Vec<MoveRecord> {
        self.moves.iter().cloned().collect()
    }
}

/// Keeps the last `most`.
fn push_last<T>(kept: &mut VecDeque<T>, most: usize, last: T) {
    if kept.len() >= most {
        kept.pop_front();
    }
    if most > 0 {
        kept.push_back(last);
    }
}

/// What came of asking for memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Spilled {
    /// What others can have now.
    pub freed: Bytes,
    /// What keeps the rest on the card, if it was too little.
    pub short: Option<Shortfall>,
    /// The first move that failed with an error, if it was too little.
    pub failed: Option<FailedMove>,
}
