//! Leases on an arena: the work of one stream uses it at a time.
//!
//! Graphs of one arena write the same memory. A replay takes a lease before it is launched and
//! ends it with a mark behind the launched work; the next stream's replay is refused, or made to
//! wait, until that mark is over.

use std::collections::BTreeMap;

use crate::{Epoch, Mark, StreamId};

/// What happens while queued work of other streams on the arena is not over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Overlap {
    /// The replay fails.
    #[default]
    Refuse,
    /// The replay waits for that work.
    Order,
}

/// Id of a lease on an arena. Never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ArenaLeaseId(u64);

/// A lease that was taken.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "a lease that never ends keeps all other streams out"]
pub struct LeaseTaken {
    /// Id of the lease.
    pub lease: ArenaLeaseId,
    /// Marks to wait for before the stream touches the arena, in the order of the streams. Empty
    /// with [`Overlap::Refuse`].
    pub waits: Vec<Mark>,
}

/// Why a lease was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ArenaBusy {
    /// Another stream holds a lease.
    #[error(
        "{holder} holds a lease on the arena that has not ended: end it before {taker} replays"
    )]
    Held {
        /// Stream that holds a lease.
        holder: StreamId,
        /// Stream that asked for one.
        taker: StreamId,
    },
    /// Queued work of another stream uses the arena.
    #[error(
        "work of {} on the arena is not over: let {taker} wait for it, or take leases in order",
        unfinished.stream
    )]
    Unfinished {
        /// The first such work, by stream.
        unfinished: Mark,
        /// Stream that asked for a lease.
        taker: StreamId,
    },
}

/// The id names no held lease of this arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{lease:?} is not held: it ended already, or belongs to another arena")]
pub struct UnknownArenaLease {
    /// The unknown id.
    pub lease: ArenaLeaseId,
}

/// Why a lease was not ended. It is still held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LeaseEndError {
    /// The lease is not held.
    #[error(transparent)]
    Unknown(#[from] UnknownArenaLease),
    /// The mark is of another stream than the lease.
    #[error("the lease is held by {holder}: end it with a mark of that stream, not of {}", mark.stream)]
    OtherStream {
        /// Stream that holds the lease.
        holder: StreamId,
        /// The mark that was passed.
        mark: Mark,
    },
}

/// The leases of one arena, and its uses that are not known to be over.
#[derive(Clone, Debug, Default)]
pub struct Leases {
    /// Held leases; all are of one stream.
    held: BTreeMap<ArenaLeaseId, StreamId>,
    /// For each stream, the latest epoch whose work uses the arena.
    used: BTreeMap<StreamId, Epoch>,
    next: u64,
}

impl Leases {
    /// Takes a lease for work on `stream`. The stream's own earlier work is ordered before, so it may
    /// hold several. `is_ordered` returns whether the stream is ordered behind a mark already: such
    /// a mark needs no wait, but stays listed, because the lease may be cancelled.
    ///
    /// # Errors
    /// Another stream holds a lease, or its work is not over and `overlap` refuses that. Nothing
    /// changes.
    pub fn take(
        &mut self,
        stream: StreamId,
        overlap: Overlap,
        is_ordered: impl Fn(Mark) -> bool,
    ) -> Result<LeaseTaken, ArenaBusy> {
        if let Some(&holder) = self.held.values().find(|&&holder| holder != stream) {
            return Err(ArenaBusy::Held { holder, taker: stream });
        }
        let in_the_way = |mark: &Mark| mark.stream != stream && !is_ordered(*mark);
        let waits: Vec<Mark> = self.unfinished().filter(in_the_way).collect();
        if let (Overlap::Refuse, Some(&unfinished)) = (overlap, waits.first()) {
            return Err(ArenaBusy::Unfinished { unfinished, taker: stream });
        }
        let lease = ArenaLeaseId(self.next);
        self.next += 1;
        self.held.insert(lease, stream);
        Ok(LeaseTaken { lease, waits })
    }

    /// Ends a lease: the holder's work up to the mark used the arena.
    ///
    /// # Errors
    /// There is no such lease, or the mark is of another stream. Nothing changes.
    pub fn end(&mut self, lease: ArenaLeaseId, mark: Mark) -> Result<(), LeaseEndError> {
        let holder = *self.held.get(&lease).ok_or(UnknownArenaLease { lease })?;
        if mark.stream != holder {
            return Err(LeaseEndError::OtherStream { holder, mark });
        }
        self.held.remove(&lease);
        self.note_use(mark);
        Ok(())
    }

    /// Cancels a lease under which nothing was launched.
    ///
    /// # Errors
    /// There is no such lease.
    pub fn cancel(&mut self, lease: ArenaLeaseId) -> Result<(), UnknownArenaLease> {
        self.held.remove(&lease).map(drop).ok_or(UnknownArenaLease { lease })
    }

    /// Notes that work outside of replays uses the arena's memory, up to the mark: for example a
    /// result that is read after a replay, on any stream.
    pub fn note_use(&mut self, mark: Mark) {
        let used = self.used.entry(mark.stream).or_insert(Epoch::START);
        *used = (*used).max(mark.epoch);
    }

    /// Removes uses that are over.
    pub fn forget(&mut self, is_over: impl Fn(Mark) -> bool) {
        self.used.retain(|&stream, &mut epoch| !is_over(Mark { stream, epoch }));
    }

    /// The stream that holds leases, if there is one.
    pub fn holder(&self) -> Option<StreamId> {
        self.held.values().next().copied()
    }

    /// The uses that were not [removed](Leases::forget) yet, by stream.
    pub fn unfinished(&self) -> impl Iterator<Item = Mark> {
        self.used.iter().map(|(&stream, &epoch)| Mark { stream, epoch })
    }

    /// True if no lease is held and all uses are over: the arena's memory may be lent.
    pub fn is_idle(&self, is_over: impl Fn(Mark) -> bool) -> bool {
        self.held.is_empty() && self.unfinished().all(is_over)
    }
}
