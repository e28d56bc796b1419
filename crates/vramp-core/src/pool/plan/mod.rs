//! Driver operations as values, and the plans made of them.
//!
//! The core never calls a driver. It returns a [`Plan`]; the shell performs the operations in
//! order and then settles the plan, which cannot fail. If an operation fails, the shell undoes the
//! ones before it, last first, each by its [`Op::inverse`], and the pool is as it was. What cannot
//! be undone is reported back and quarantined.

mod assemble;
mod backing;
mod build;
mod hosted;
mod place;
mod sites;
mod vpmm;

use crate::Bytes;
use crate::ids::{ArenaId, ChunkId, Mark, PoolAddr, SpanId, StreamId};
use crate::pool::index::RegionKey;

pub use backing::ArenaMemory;
pub(crate) use backing::Backing;
pub use hosted::NotVacant;
pub use place::{Attempt, Request, Shortage, Step};

/// A range of the pool's addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// The first byte.
    pub at: PoolAddr,
    /// How many bytes.
    pub len: Bytes,
}

/// One driver call as a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Reserve addresses. May get less than asked on a device with few addresses: the shell tells
    /// the core how much it got.
    Reserve {
        /// The name the addresses get.
        span: SpanId,
        /// How many at least.
        least: Bytes,
        /// How many at best.
        wanted: Bytes,
    },
    /// Create physical memory.
    Create {
        /// The name it gets.
        chunk: ChunkId,
        /// How much.
        len: Bytes,
    },
    /// Map a whole chunk at an address.
    Map {
        /// Which chunk.
        chunk: ChunkId,
        /// Where.
        at: PoolAddr,
        /// The chunk's size.
        len: Bytes,
    },
    /// Let the device touch a mapped range.
    SetAccess(Range),
    /// Record an event that closes the stream's present epoch.
    Record(Mark),
    /// Make a stream wait for another one's epoch.
    Wait {
        /// Who waits.
        stream: StreamId,
        /// For what.
        on: Mark,
    },
    /// Unmap a range of whole mappings.
    Unmap(Range),
    /// Release a chunk that is mapped nowhere any more.
    Release {
        /// Which chunk.
        chunk: ChunkId,
    },
}

impl Op {
    /// The operation that takes this one back, or `None` if nothing has to be taken back: an
    /// access right goes with its mapping, a record or a wait only orders more than needed.
    ///
    /// Unmap and release cannot be taken back; plans that hold them hold nothing else.
    pub fn inverse(self) -> Option<Op> {
        match self {
            Op::Create { chunk, .. } => Some(Op::Release { chunk }),
            Op::Map { at, len, .. } => Some(Op::Unmap(Range { at, len })),
            Op::Reserve { .. }
            | Op::SetAccess(_)
            | Op::Record(_)
            | Op::Wait { .. }
            | Op::Unmap(_)
            | Op::Release { .. } => None,
        }
    }
}

/// Operations to perform, and what becomes of the pool once they are done.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "a plan does nothing until it is performed and settled"]
pub struct Plan {
    /// What to do, in order.
    pub ops: Vec<Op>,
    pub(crate) change: Change,
}

/// What settling a plan changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// A new span of this size.
    Reserve { span: SpanId, len: u64 },
    /// Addresses `at..` filled by `fills` in order, for `stream`.
    Fill { at: PoolAddr, fills: Vec<Fill>, stream: StreamId, waits: Vec<Mark>, records: Vec<Mark> },
    /// An arena's addresses `at..` filled by `fills` in order, for work on `stream`.
    Back {
        arena: ArenaId,
        at: PoolAddr,
        fills: Vec<Fill>,
        stream: StreamId,
        waits: Vec<Mark>,
        records: Vec<Mark>,
    },
    /// Retired mappings gone.
    Unmap { ranges: Vec<Range> },
    /// A free chunk given back to the card; its mappings are unmapped first, the home last.
    Trim { chunk: ChunkId, ranges: Vec<Range> },
    /// `stream` now waits for these marks, and takes over `need` bytes of the memory they guard.
    Order { stream: StreamId, waits: Vec<Mark>, records: Vec<Mark>, need: u64 },
}

/// What one piece of a filled range is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fill {
    /// A free chunk mapped here a second time; its old address is retired.
    Move { chunk: ChunkId, len: u64, from: RegionKey },
    /// A free chunk whose retired mapping is already here: no driver call.
    Reactivate { chunk: ChunkId, len: u64, from: RegionKey },
    /// A new chunk.
    New { chunk: ChunkId, len: u64 },
}

impl Fill {
    pub(crate) fn len(self) -> u64 {
        match self {
            Fill::Move { len, .. } | Fill::Reactivate { len, .. } | Fill::New { len, .. } => len,
        }
    }

    /// The free region that the chunk comes from.
    pub(crate) fn from(self) -> Option<RegionKey> {
        match self {
            Fill::Move { from, .. } | Fill::Reactivate { from, .. } => Some(from),
            Fill::New { .. } => None,
        }
    }

    pub(crate) fn chunk(self) -> ChunkId {
        match self {
            Fill::Move { chunk, .. } | Fill::Reactivate { chunk, .. } | Fill::New { chunk, .. } => {
                chunk
            }
        }
    }
}

impl Plan {
    /// Tells a reserving plan how many addresses there were in fact.
    ///
    /// # Panics
    /// If the plan reserves nothing.
    pub fn got_addresses(&mut self, got: Bytes) {
        match &mut self.change {
            Change::Reserve { len, .. } => *len = got.count(),
            other => panic!("a plan of {other:?} reserves no addresses"),
        }
    }

    /// Streams on which it records an event, or which it makes wait for one.
    pub fn orders(&self) -> impl Iterator<Item = StreamId> {
        self.ops.iter().filter_map(|op| match *op {
            Op::Record(mark) => Some(mark.stream),
            Op::Wait { stream, .. } => Some(stream),
            _ => None,
        })
    }

    /// True if it brings chunks to where they are free; others reserve, clear or order first.
    pub fn fills(&self) -> bool {
        matches!(self.change, Change::Fill { .. })
    }

    /// True if the plan only tidies up: the pool can do without it for now.
    pub fn is_optional(&self) -> bool {
        matches!(self.change, Change::Unmap { .. } | Change::Trim { .. })
    }
}

/// How a plan ended that could not be performed whole.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Leftovers {
    /// Ranges whose mapping could not be undone: they stay mapped, unusable, counted.
    pub mapped: Vec<Range>,
    /// Chunks whose creation could not be undone.
    pub chunks: Vec<(ChunkId, Bytes)>,
    /// How many operations, from the plan's start on, were performed and not undone. Only plans of
    /// unmap and release can end part way; for all others this is zero.
    pub performed: usize,
    /// Events that were recorded all the same.
    pub recorded: Vec<Mark>,
}
