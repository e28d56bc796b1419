//! Who may use an arena: the work of one stream at a time.
//!
//! Graphs of one arena write the same memory. A replay takes a lease before it is launched and
//! ends it with a mark behind the launched work; the next stream's replay is refused, or made to
//! wait, until that mark is over.

use std::collections::BTreeMap;

use crate::{Epoch, Mark, StreamId};

/// What to do about work of other streams that is queued but not over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Overlap {
    /// The replay is an error.
    #[default]
    Refuse,
    /// The taker waits for it.
    Order,
}

/// Names one lease until it ends; never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LeaseId(u64);

/// A lease that was taken.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "a lease that never ends keeps all other streams out"]
pub struct LeaseTaken {
    /// Its name.
    pub lease: LeaseId,
    /// What the stream has to wait for before it touches the arena, in the order of the streams.
    /// Empty with [`Overlap::Refuse`].
    pub waits: Vec<Mark>,
}

/// Why a lease was not given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ArenaBusy {
    /// Somebody launches a replay at this moment.
    #[error(
        "{holder} holds a lease on the arena that has not ended: end it before {taker} replays"
    )]
    Held {
        /// Who has it.
        holder: StreamId,
        /// Who asked.
        taker: StreamId,
    },
    /// Queued work uses the arena.
    #[error(
        "work of {} on the arena is not over: let {taker} wait for it, or take leases in order",
        unfinished.stream
    )]
    Unfinished {
        /// The first such work.
        unfinished: Mark,
        /// Who asked.
        taker: StreamId,
    },
}

/// A lease that is not held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{lease:?} is not held: it ended already, or belongs to another arena")]
pub struct UnknownLease {
    /// What was given.
    pub lease: LeaseId,
}

/// Why a lease was not ended. It is still held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LeaseEndError {
    /// There is none.
    #[error(transparent)]
    Unknown(#[from] UnknownLease),
    /// A mark of another stream says nothing of the holder's work.
    #[error("the lease is held by {holder}: end it with a mark of that stream, not of {}", mark.stream)]
    OtherStream {
        /// Who has it.
        holder: StreamId,
        /// What was given.
        mark: Mark,
    },
}

/// The leases of one arena, and what of its use is not known to be over.
#[derive(Clone, Debug, Default)]
pub struct Leases {
    /// All of one stream.
    held: BTreeMap<LeaseId, StreamId>,
    /// For each stream the furthest work that uses the arena.
    used: BTreeMap<StreamId, Epoch>,
    next: u64,
}

impl Leases {
    /// Takes a lease for work on `stream`. Its own earlier work is ordered before: a stream may
    /// hold several. `is_ordered` tells whether the stream runs behind the work up to a mark anyway.
    /// Such work is not forgotten: the lease may be given back.
    ///
    /// # Errors
    /// Another stream holds a lease, or its work is not over and shall not be waited for. Nothing
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
        let lease = LeaseId(self.next);
        self.next += 1;
        self.held.insert(lease, stream);
        Ok(LeaseTaken { lease, waits })
    }

    /// Ends a lease: the holder's work up to the mark used the arena.
    ///
    /// # Errors
    /// There is no such lease, or the mark is of another stream. Nothing changes.
    pub fn end(&mut self, lease: LeaseId, mark: Mark) -> Result<(), LeaseEndError> {
        let holder = *self.held.get(&lease).ok_or(UnknownLease { lease })?;
        if mark.stream != holder {
            return Err(LeaseEndError::OtherStream { holder, mark });
        }
        self.held.remove(&lease);
        self.note_use(mark);
        Ok(())
    }

    /// Gives a lease back under which nothing was launched.
    ///
    /// # Errors
    /// There is no such lease.
    pub fn cancel(&mut self, lease: LeaseId) -> Result<(), UnknownLease> {
        self.held.remove(&lease).map(drop).ok_or(UnknownLease { lease })
    }

    /// Notes that work outside of replays uses the arena's memory, up to the mark: a result that is
    /// read after a replay, on any stream.
    pub fn note_use(&mut self, mark: Mark) {
        let used = self.used.entry(mark.stream).or_insert(Epoch::START);
        *used = (*used).max(mark.epoch);
    }

    /// Forgets work that is known to be complete.
    pub fn forget(&mut self, is_over: impl Fn(Mark) -> bool) {
        self.used.retain(|&stream, &mut epoch| !is_over(Mark { stream, epoch }));
    }

    /// Who holds leases, if anybody does.
    pub fn holder(&self) -> Option<StreamId> {
        self.held.values().next().copied()
    }

    /// The work that used the arena and was not [forgotten](Leases::forget), by stream.
    pub fn unfinished(&self) -> impl Iterator<Item = Mark> {
        self.used.iter().map(|(&stream, &epoch)| Mark { stream, epoch })
    }

    /// True if nobody holds a lease and all work is over: the arena's memory may be lent.
    pub fn is_idle(&self, is_over: impl Fn(Mark) -> bool) -> bool {
        self.held.is_empty() && self.unfinished().all(is_over)
    }
}
