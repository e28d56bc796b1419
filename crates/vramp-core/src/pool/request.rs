//! A request on its way up the ladder, and what the shell does for it.
//!
//! An [`Attempt`] climbs the rungs of [`Rung`] in their order, cheapest first. Blocks, slabs and
//! arenas use the same order; a rung that has nothing to do for a request passes it on.

use crate::Bytes;
use crate::ids::{ArenaId, ChunkId, Mark, StreamId};
use crate::pool::block::{Block, Slab};
use crate::pool::ops::{Plan, Range};

/// A request for memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Requested bytes.
    pub size: Bytes,
    /// Stream whose work uses the memory first.
    pub stream: StreamId,
}

/// What a request is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Want {
    /// A block of the requested size.
    Block,
    /// A slab of at least the requested size.
    Slab { preferred: Bytes },
    /// Memory behind an arena's addresses, `from` bytes behind their start.
    Arena { arena: ArenaId, from: Bytes },
}

impl Want {
    /// How much of a free region of `available` bytes is carved for a request of `len` bytes.
    pub(crate) fn carved(self, len: Bytes, available: Bytes) -> Bytes {
        match self {
            Want::Slab { preferred } => available.min(preferred.max(len)),
            Want::Block | Want::Arena { .. } => len,
        }
    }
}

/// The rungs of the ladder, cheapest first. One order for all requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Rung {
    /// VPMM: ask which events were reached, if there are retired mappings.
    Retired,
    /// VPMM: unmap retired mappings whose work is over.
    Unmap,
    /// Where memory was short lately: the same as [`Rung::LearnAgain`], before memory is chosen.
    Watch,
    /// A free region of the stream, or idle memory, that fits. Arenas: what they lent and is still at home.
    Own,
    /// Growth within the slack, if the caller prefers that. Arenas: done if nothing is missing.
    Early,
    /// Record events where memory was freed after the last one, and query those that are pending.
    Learn,
    /// Memory that became idle.
    Idle,
    /// Thread caches and heaps give back what they do not need.
    Gather,
    /// Arenas: record the events that would let their own chunks return.
    Return,
    /// The same as [`Rung::Learn`], for what was gathered.
    LearnAgain,
    /// A free region that fits by now, also if it has to be joined with idle memory.
    Merged,
    /// Build: fill a hole with free chunks moved there, and with new ones.
    Build,
}

impl Rung {
    /// The rung where every request begins.
    pub(crate) const FIRST: Rung = Rung::Retired;

    /// The rung above this one; the last one has none above it.
    pub(crate) fn next(self) -> Rung {
        match self {
            Rung::Retired => Rung::Unmap,
            Rung::Unmap => Rung::Watch,
            Rung::Watch => Rung::Own,
            Rung::Own => Rung::Early,
            Rung::Early => Rung::Learn,
            Rung::Learn => Rung::Idle,
            Rung::Idle => Rung::Gather,
            Rung::Gather => Rung::Return,
            Rung::Return => Rung::LearnAgain,
            Rung::LearnAgain => Rung::Merged,
            Rung::Merged | Rung::Build => Rung::Build,
        }
    }
}

/// How far the pool may grow for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Growth {
    /// Up to the slack above the high-water mark before memory is remapped.
    WithSlack,
    /// Only by what remapping cannot give.
    Needed,
    /// Not at all: the device had no more memory.
    Never,
}

/// Memory that a request may use before it grows beyond the slack: each is tried once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Relief {
    Untried,
    /// Idle arenas were asked to lend.
    ArenasLent,
    /// The stream was ordered behind other streams whose memory is free.
    StreamsOrdered,
}

/// How far a huge chunk was cut into small ones for a request, see `plan/recut.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Recut {
    Untried,
    /// It was found out whether its work is over.
    Asked,
    /// This range is released; its addresses are to be filled with chunks of that length, or as the request needs.
    Released(Range, Option<Bytes>),
    /// It was tried.
    Done,
}

/// A request on its way up the ladder.
#[derive(Clone, Debug)]
pub struct Attempt {
    pub(crate) request: Request,
    pub(crate) want: Want,
    pub(crate) rung: Rung,
    pub(crate) growth: Growth,
    pub(crate) relief: Relief,
    /// Threads that contend for the pool: with some, it grows before other streams' memory is looked
    /// at.
    pub(crate) contenders: usize,
    /// The chunk that was last released so that others can be made of its memory.
    pub(crate) recut: Option<ChunkId>,
    /// How far a huge chunk was cut into small ones for the request.
    pub(crate) huge_chunk: Recut,
    /// It was noted that the stream's own memory did not serve the request.
    pub(crate) missed: bool,
    /// Other streams took what the stream had freed, again and again: grow for it.
    pub(crate) robbed: bool,
    /// The last plan exceeds the slack.
    pub(crate) over_slack: bool,
    planned: bool,
    /// Idle arenas are not asked to lend.
    pub(crate) spares_arenas: bool,
}

impl Attempt {
    /// An attempt to place a block.
    pub fn new(request: Request) -> Attempt {
        Attempt {
            request,
            want: Want::Block,
            rung: Rung::FIRST,
            growth: Growth::WithSlack,
            relief: Relief::Untried,
            contenders: 0,
            recut: None,
            huge_chunk: Recut::Untried,
            missed: false,
            robbed: false,
            over_slack: false,
            planned: false,
            spares_arenas: false,
        }
    }

    /// An attempt to place a slab for the heap of the request's stream: at least the requested
    /// size, at best `preferred`.
    pub fn slab(request: Request, preferred: Bytes) -> Attempt {
        Attempt {
            want: Want::Slab { preferred: preferred.max(request.size) },
            ..Attempt::new(request)
        }
    }

    /// An attempt to back the first `upto` bytes of an arena, for work on `stream`.
    pub fn back(arena: ArenaId, upto: Bytes, stream: StreamId) -> Attempt {
        Attempt::back_part(arena, Bytes::ZERO, upto, stream)
    }

    /// An attempt to back `len` bytes of an arena from `from` on, in whole pages.
    pub fn back_part(arena: ArenaId, from: Bytes, len: Bytes, stream: StreamId) -> Attempt {
        let request = Request { size: len, stream };
        Attempt { want: Want::Arena { arena, from }, ..Attempt::new(request) }
    }

    /// Takes no memory that arenas could lend: the pool grows instead, or the attempt is short. For memory
    /// that is made ready ahead of need.
    pub fn without_lending(self) -> Attempt {
        Attempt { spares_arenas: true, ..self }
    }

    /// Sets how many threads contend for the pool, if any do. It grows then, as far as limit and device
    /// allow and by some memory for each thread, before it uses other streams' memory: they would take it
    /// from each other at every miss.
    pub fn contended_by(self, contenders: usize) -> Attempt {
        Attempt { contenders, ..self }
    }

    /// True once a plan was needed: the block is not a hit.
    pub fn planned(&self) -> bool {
        self.planned
    }

    /// Starts again at the first rung, after a plan that was not performed because the pool's
    /// facts changed.
    pub fn again(&mut self) {
        self.rung = Rung::FIRST;
        self.relief = Relief::Untried;
    }

    /// Starts again at the first rung, with growth, after memory or addresses became usable again.
    pub fn after_release(&mut self) {
        self.again();
        self.may_grow_again();
    }

    /// Starts again at the first rung, after a plan that failed because the device is full. Returns
    /// true if another way is left: first without slack, then without growth.
    pub fn out_of_memory(&mut self) -> bool {
        self.rung = Rung::FIRST;
        let (growth, left) = match self.growth {
            Growth::WithSlack => (Growth::Needed, true),
            Growth::Needed => (Growth::Never, true),
            Growth::Never => (Growth::Never, false),
        };
        self.growth = growth;
        left
    }

    pub(crate) fn note_plan(&mut self) {
        self.planned = true;
    }

    /// Allows growth again: memory of the device was released.
    pub(crate) fn may_grow_again(&mut self) {
        if self.growth == Growth::Never {
            self.growth = Growth::Needed;
        }
    }
}

/// What the shell does next.
#[derive(Debug)]
#[must_use = "the attempt goes on only when the shell does what the step says"]
pub enum Step {
    /// The block. The attempt is over.
    Placed(Block),
    /// The slab of [`Attempt::slab`]. The attempt is over.
    Slab(Slab),
    /// The memory of [`Attempt::back`] is mapped. The attempt is over.
    Backed,
    /// Give back what thread caches and heaps do not need
    /// ([`StreamHeap::shed`](crate::StreamHeap::shed)), then call again.
    Gather,
    /// Let idle arenas lend their memory ([`Pool::lend`](crate::Pool::lend)), this much at least if there
    /// is, then call again.
    Lend(Bytes),
    /// Query the [`Pool::pending`](crate::Pool::pending) events, report them by
    /// [`Pool::reached`](crate::Pool::reached), then call again.
    Poll,
    /// Record events for these marks ([`Pool::recorded`](crate::Pool::recorded)), query all events
    /// as for [`Poll`](Step::Poll), then call again. For a stream that captures, call
    /// [`Pool::hold`](crate::Pool::hold) instead of recording.
    Record(Vec<Mark>),
    /// Perform the plan, settle or abandon it, then call again.
    Perform(Plan),
    /// No way is left. The attempt is over.
    Short(Shortage),
}

/// Why a request cannot be served, in numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shortage {
    /// Requested bytes.
    pub requested: Bytes,
    /// Physical memory of the pool.
    pub reserved: Bytes,
    /// Allocated memory, rounding included.
    pub used: Bytes,
    /// Free memory of the pool, usable for this request or not.
    pub free: Bytes,
    /// The largest block that remapping all free chunks could make.
    pub largest: Bytes,
    /// Freed memory that waits for work of other streams.
    pub waiting: Bytes,
    /// The pool's limit, if the request would exceed it.
    pub limit: Option<Bytes>,
    /// Stream of the block, or `None` for memory behind addresses that exist already.
    pub block_for: Option<StreamId>,
}
