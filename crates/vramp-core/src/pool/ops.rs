//! Driver operations as values, and the plans made of them.
//!
//! The core never calls a driver. It returns a [`Plan`]; the shell performs the operations in
//! order and then settles the plan, which cannot fail. If an operation fails, the shell undoes the
//! ones before it, last first, each by its [`Op::inverse`], and the pool is as it was. What cannot
//! be undone is passed to [`Pool::abandon`](crate::Pool::abandon) and quarantined.

use crate::Bytes;
use crate::ids::{ArenaId, ChunkId, Mark, PoolAddr, SpanId, StreamId};
use crate::pool::index::RegionKey;
use crate::waiting::Age;

/// A range of the pool's addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// Address of the first byte.
    pub at: PoolAddr,
    /// Length in bytes.
    pub len: Bytes,
}

impl Range {
    pub(crate) fn new(at: PoolAddr, len: Bytes) -> Range {
        Range { at, len }
    }

    pub(crate) fn end(self) -> PoolAddr {
        self.at + self.len
    }

    pub(crate) fn touches(self, at: PoolAddr, len: Bytes) -> bool {
        at < self.end() && self.at < at + len
    }

    /// Appends a range, joining it with the last one where they touch.
    pub(crate) fn append(self, ranges: &mut Vec<Range>) {
        match ranges.last_mut() {
            Some(last) if last.end() == self.at => last.len += self.len,
            _ => ranges.push(self),
        }
    }
}

/// One driver call as a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Reserve addresses. A device with few addresses may grant fewer than `wanted`: see
    /// [`Plan::got_addresses`].
    Reserve {
        /// Id of the new span.
        span: SpanId,
        /// Bytes needed.
        least: Bytes,
        /// Bytes preferred.
        wanted: Bytes,
    },
    /// Create physical memory.
    Create {
        /// Id of the new chunk.
        chunk: ChunkId,
        /// Length in bytes.
        len: Bytes,
    },
    /// Map a whole chunk at an address.
    Map {
        /// Chunk to map.
        chunk: ChunkId,
        /// Address of the mapping.
        at: PoolAddr,
        /// Length of the chunk.
        len: Bytes,
    },
    /// Allow the device to access a mapped range.
    SetAccess(Range),
    /// Record an event that closes the stream's present epoch.
    Record(Mark),
    /// Make a stream wait for another one's epoch.
    Wait {
        /// Stream that waits.
        stream: StreamId,
        /// Work that it waits for.
        on: Mark,
    },
    /// Unmap a range of whole mappings.
    Unmap(Range),
    /// Release a chunk that is mapped nowhere any more.
    Release {
        /// Chunk to release.
        chunk: ChunkId,
    },
}

impl Op {
    /// Returns the operation that undoes this one, or `None` if nothing has to be undone: an access
    /// right goes with its mapping, and a record or a wait only orders more than needed.
    ///
    /// Unmap and release cannot be undone; plans with one of them have no other operations.
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

/// Operations to perform, and the change of the pool once they are done.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "a plan does nothing until it is performed and settled"]
pub struct Plan {
    /// Operations in order.
    pub ops: Vec<Op>,
    pub(crate) change: Change,
}

/// The change of the pool that settling a plan makes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// A new span of this length.
    Reserve { span: SpanId, len: Bytes },
    /// Addresses `at..` filled by `fills` in order, for `stream`.
    Fill { at: PoolAddr, fills: Vec<Fill>, order: Order },
    /// An arena's addresses `at..` filled by `fills` in order, for work on `stream`.
    Back { arena: ArenaId, at: PoolAddr, fills: Vec<Fill>, order: Order },
    /// Retired mappings removed.
    Unmap { ranges: Vec<Range> },
    /// Free chunks released.
    Trim { trims: Vec<Trim> },
    /// A quarantined chunk released.
    Release { chunk: ChunkId },
    /// The stream takes over free and waiting regions of other streams.
    Order { order: Order, free: Vec<RegionKey>, waiting: Vec<Age> },
}

/// A free chunk to release: its mappings are unmapped first, the home last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Trim {
    pub chunk: ChunkId,
    /// The free region around its home. Of several chunks in one region the last one goes first: the
    /// front of a region keeps the region's key.
    pub region: RegionKey,
    pub home: Range,
    pub aliases: Vec<Range>,
}

/// Events and waits of a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Order {
    /// Stream for which the plan is.
    pub stream: StreamId,
    /// Marks that the stream waits for.
    pub waits: Vec<Mark>,
    /// Marks for which events are recorded.
    pub records: Vec<Mark>,
}

/// One piece of a filled range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fill {
    /// A free chunk mapped here a second time; its old address is retired.
    Move { chunk: ChunkId, len: Bytes, from: RegionKey },
    /// A free chunk whose retired mapping is already here: no driver call.
    Reactivate { chunk: ChunkId, len: Bytes, from: RegionKey },
    /// A new chunk.
    New { chunk: ChunkId, len: Bytes },
}

impl Fill {
    pub(crate) fn len(self) -> Bytes {
        match self {
            Fill::Move { len, .. } | Fill::Reactivate { len, .. } | Fill::New { len, .. } => len,
        }
    }

    /// The free region from which the chunk is taken.
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
    /// A plan that unmaps these ranges.
    pub(crate) fn unmap(ranges: Vec<Range>) -> Plan {
        let ops = ranges.iter().map(|&range| Op::Unmap(range)).collect();
        Plan { ops, change: Change::Unmap { ranges } }
    }

    /// A plan that releases a quarantined chunk.
    pub(crate) fn release(chunk: ChunkId) -> Plan {
        Plan { ops: vec![Op::Release { chunk }], change: Change::Release { chunk } }
    }

    /// A plan that releases these chunks.
    pub(crate) fn trim(trims: Vec<Trim>) -> Plan {
        let ops = trims.iter().flat_map(|trim| {
            let places = trim.aliases.iter().chain([&trim.home]);
            places.map(|&range| Op::Unmap(range)).chain([Op::Release { chunk: trim.chunk }])
        });
        Plan { ops: ops.collect(), change: Change::Trim { trims } }
    }

    /// Sets how many addresses a reserving plan got.
    ///
    /// # Panics
    /// If the plan reserves nothing.
    pub fn got_addresses(&mut self, got: Bytes) {
        match &mut self.change {
            Change::Reserve { len, .. } => *len = got,
            other => panic!("a plan of {other:?} reserves no addresses"),
        }
    }

    /// Streams on which the plan records an event, or which it makes wait for one.
    pub fn orders(&self) -> impl Iterator<Item = StreamId> {
        self.ops.iter().filter_map(|op| match *op {
            Op::Record(mark) => Some(mark.stream),
            Op::Wait { stream, .. } => Some(stream),
            _ => None,
        })
    }

    /// The stream that the plan is for, if the plan records an event or makes that stream wait.
    pub fn orders_for(&self) -> Option<StreamId> {
        let order = match &self.change {
            Change::Fill { order, .. }
            | Change::Back { order, .. }
            | Change::Order { order, .. } => order,
            Change::Reserve { .. }
            | Change::Unmap { .. }
            | Change::Trim { .. }
            | Change::Release { .. } => return None,
        };
        (!order.waits.is_empty() || !order.records.is_empty()).then_some(order.stream)
    }

    /// True if the plan moves chunks, or orders a stream behind another one.
    pub(crate) fn moves(&self) -> bool {
        match &self.change {
            Change::Fill { fills, .. } | Change::Back { fills, .. } => {
                fills.iter().any(|fill| fill.from().is_some())
            }
            Change::Order { .. } => true,
            Change::Reserve { .. }
            | Change::Unmap { .. }
            | Change::Trim { .. }
            | Change::Release { .. } => false,
        }
    }

    /// True if the plan fills free memory; others reserve, unmap or order first.
    pub fn fills(&self) -> bool {
        matches!(self.change, Change::Fill { .. })
    }

    /// True if the plan only unmaps or releases: a request can go on without it.
    pub fn is_optional(&self) -> bool {
        matches!(self.change, Change::Unmap { .. } | Change::Trim { .. } | Change::Release { .. })
    }
}

/// State of the device after a plan that failed and was undone as far as possible.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Leftovers {
    /// Ranges whose mapping could not be undone: they stay mapped, and are quarantined.
    pub mapped: Vec<Range>,
    /// Chunks whose creation could not be undone.
    pub chunks: Vec<(ChunkId, Bytes)>,
    /// Number of operations, from the start of the plan, that were performed and not undone. Only
    /// plans of unmap and release can end part way; for all others this is zero.
    pub performed: usize,
    /// Marks for which events were recorded.
    pub recorded: Vec<Mark>,
}
