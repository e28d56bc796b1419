//! Statistics, and records of moves, failures and waits.

use std::collections::VecDeque;
use std::fmt;

use crate::planner::{BufferId, EvictionCost, LeaseRefused, PieceId, Shortfall, SpillTier};
use vramp_core::Bytes;

/// Statistics since the manager was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpillStats {
    /// Spill requests.
    pub spills: u64,
    /// Bytes that they freed.
    pub freed_bytes: u64,
    /// Bytes copied to other cards.
    pub to_peer_bytes: u64,
    /// Nanoseconds of those copies; concurrent copies count each.
    pub to_peer_ns: u64,
    /// Bytes queued for a copy from other cards to this one.
    pub from_peer_bytes: u64,
    /// Bytes that moved on from other cards to the host or the disk.
    pub moved_on_bytes: u64,
    /// Copies that another card had no memory for, or failed: they went to the host or the disk.
    pub peer_refused: u64,
    /// Bytes copied to the host.
    pub to_host_bytes: u64,
    /// Nanoseconds of those copies; concurrent copies count each.
    pub to_host_ns: u64,
    /// Bytes copied to the disk, from the card or the host.
    pub to_disk_bytes: u64,
    /// Nanoseconds of those copies.
    pub to_disk_ns: u64,
    /// Bytes queued for a copy from the host to the card.
    pub from_host_bytes: u64,
    /// Bytes read back from the disk.
    pub from_disk_bytes: u64,
    /// Nanoseconds of those reads.
    pub from_disk_ns: u64,
    /// Spilled buffers that a lease read in place.
    pub reads_in_place: u64,
    /// Buffers restored because they were read in place often.
    pub promotions: u64,
    /// Lease requests that waited.
    pub waits: u64,
    /// Waiters that were woken: one for each that was served, can never be, or is a future whose
    /// deadline passed.
    pub woken: u64,
    /// Looks at memory that becomes free outside the manager, while a waiter lacks some.
    pub looks: u64,
    /// Nanoseconds that they waited.
    pub waited_ns: u64,
    /// Moves that failed with an error; [`SpillManager::failures`](super::SpillManager::failures)
    /// returns the last ones. Their contents stayed where they were.
    pub failures: u64,
    /// Times that the disk got no new copies for a while because it had failed.
    pub disk_backoffs: u64,
    /// Moves that were given up without an error: there was no room for them, or they were not
    /// needed any more.
    pub given_up: u64,
}

/// A move that failed with an error. The contents stayed where they were.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailedMove {
    /// The piece.
    pub piece: PieceId,
    /// The kind of move.
    pub what: MoveKind,
    /// Time of the failure, by the device's clock.
    pub at_ns: u64,
    /// The error's text.
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
                write!(f, "{piece} was not restored from the {from}: {error}")
            }
            MoveKind::Pushed => write!(f, "{piece} was not pushed from host to disk: {error}"),
            MoveKind::MovedOn(to) => {
                write!(f, "{piece} was not moved from another card to {to}: {error}")
            }
        }
    }
}

/// A move that was made.
#[derive(Clone, Debug)]
pub struct MoveRecord {
    /// The piece.
    pub piece: PieceId,
    /// Length of the contents.
    pub bytes: Bytes,
    /// The kind of move.
    pub what: MoveKind,
    /// Start, by the device's clock.
    pub began_ns: u64,
    /// Duration in nanoseconds.
    pub took_ns: u64,
    /// Cost by which the victim was chosen. `None` for other moves.
    pub cost: Option<EvictionCost>,
}

/// Kinds of moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MoveKind {
    /// Left the card, copied to a tier. `None` if it had a copy already.
    Spilled(Option<SpillTier>),
    /// Copied ahead of need to a tier; the piece stayed.
    Cleaned(SpillTier),
    /// Restored from a tier.
    Restored(SpillTier),
    /// Moved from the host to the disk.
    Pushed,
    /// Moved from another card to a tier.
    MovedOn(SpillTier),
}

impl fmt::Display for MoveRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let MoveRecord { piece, bytes, what, took_ns, .. } = self;
        match what {
            MoveKind::Spilled(Some(to)) => write!(f, "{piece}: {bytes} spilled to {to}")?,
            MoveKind::Spilled(None) => {
                write!(f, "{piece}: {bytes} evicted without a copy, it had one")?
            }
            MoveKind::Cleaned(to) => write!(f, "{piece}: {bytes} copied ahead of need to {to}")?,
            MoveKind::Restored(from) => write!(f, "{piece}: {bytes} restored from {from}")?,
            MoveKind::Pushed => write!(f, "{piece}: {bytes} pushed from host to disk")?,
            MoveKind::MovedOn(to) => write!(f, "{piece}: {bytes} moved from a card to {to}")?,
        }
        write!(f, " in {} us", took_ns / 1000)?;
        match &self.cost {
            Some(cost) => write!(f, "; {cost}"),
            None => Ok(()),
        }
    }
}

/// A lease request that waited.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WaitRecord {
    /// The buffers of the request.
    pub buffers: Vec<BufferId>,
    /// Start of the wait, by the device's clock.
    pub began_ns: u64,
    /// Duration of the wait in nanoseconds, by the host's clock.
    pub waited_ns: u64,
    /// The last refusal.
    pub refused: LeaseRefused,
    /// True if the lease was granted in the end.
    pub served: bool,
}

impl fmt::Display for WaitRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let WaitRecord { buffers, waited_ns, refused, served, .. } = self;
        let end = if *served { "then it was granted" } else { "then it was refused" };
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

/// Number of failures kept.
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

    /// Returns the last waits, the oldest first.
    pub fn waits(&self) -> Vec<WaitRecord> {
        self.waits.iter().cloned().collect()
    }

    /// Returns the last failures, the oldest first.
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

/// Result of a spill.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Spilled {
    /// Bytes freed.
    pub freed: Bytes,
    /// What keeps the rest on the card, if too little was freed.
    pub short: Option<Shortfall>,
    /// The first move that failed with an error, if too little was freed.
    pub failed: Option<FailedMove>,
}
