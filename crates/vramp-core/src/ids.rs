//! Ids that the core assigns. Raw handles, addresses and streams stay with the shell, so a plan made
//! for a device can be performed on the simulator, step for step.

use std::fmt;
use std::ops::{Add, Sub};

use crate::Bytes;

macro_rules! numbered {
    ($(#[$doc:meta])* $name:ident, $letter:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(u32);

        impl $name {
            /// Returns the id with this number.
            pub const fn new(number: u32) -> $name {
                $name(number)
            }

            /// The plain number: ids are dense, so it serves as an index.
            pub const fn index(self) -> usize {
                self.0 as usize
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($letter, "{}"), self.0)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(self, f)
            }
        }
    };
}

numbered! {
    /// A reserved range of addresses.
    SpanId, "span"
}
numbered! {
    /// A chunk of physical memory: one physical handle.
    ChunkId, "chunk"
}
numbered! {
    /// A range of fixed addresses whose memory may come and go.
    ArenaId, "arena"
}
numbered! {
    /// A stream of the pool.
    StreamId, "stream"
}

/// Progress of a stream, counted in events: all that is freed while a stream's epoch is `e` is covered
/// by the event that closes `e`.
///
/// Epoch 0 is before any work: memory marked with it waits for nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Epoch(pub(crate) u64);

impl Epoch {
    /// The epoch before any work.
    pub const START: Epoch = Epoch(0);

    /// The plain number.
    pub const fn number(self) -> u64 {
        self.0
    }

    /// The epoch before this one; `START` for the start itself.
    pub const fn previous(self) -> Epoch {
        Epoch(self.0.saturating_sub(1))
    }

    /// The epoch after this one.
    pub const fn next(self) -> Epoch {
        Epoch(self.0 + 1)
    }
}

/// The work of a stream up to the end of an epoch: what a wait waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Mark {
    /// The stream.
    pub stream: StreamId,
    /// The epoch that ends the work.
    pub epoch: Epoch,
}

/// An address in the pool's own address space: a span and an offset from its start.
///
/// One number with the span in the high bits, so that addresses sort by span and then by offset, and
/// no two spans touch: a range never straddles two reservations.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PoolAddr(u64);

impl PoolAddr {
    const OFFSET_BITS: u32 = 44;

    /// The largest span that can be addressed. The addresses above it stay unused as a fence.
    pub const SPAN_LIMIT: Bytes = Bytes::tib(15);

    /// Returns the address `offset` bytes after the start of `span`.
    #[inline]
    pub fn new(span: SpanId, offset: Bytes) -> PoolAddr {
        assert!(offset <= PoolAddr::SPAN_LIMIT, "{span} has no offset {offset}");
        PoolAddr((span.index() as u64) << PoolAddr::OFFSET_BITS | offset.count())
    }

    /// The span.
    pub const fn span(self) -> SpanId {
        SpanId((self.0 >> PoolAddr::OFFSET_BITS) as u32)
    }

    /// The distance from the span's start.
    pub const fn offset(self) -> Bytes {
        Bytes::new(self.0 & ((1 << PoolAddr::OFFSET_BITS) - 1))
    }

    /// The address as one number, for digests and prints.
    pub const fn number(self) -> u64 {
        self.0
    }

    /// Returns the address with this number.
    pub const fn from_number(number: u64) -> PoolAddr {
        PoolAddr(number)
    }

    /// The address `distance` bytes above.
    #[inline]
    pub fn plus(self, distance: u64) -> PoolAddr {
        PoolAddr(self.0 + distance)
    }

    /// The address `distance` bytes below.
    #[inline]
    pub fn minus(self, distance: u64) -> PoolAddr {
        PoolAddr(self.0 - distance)
    }

    /// The distance from `earlier` up to here.
    #[inline]
    pub fn since(self, earlier: PoolAddr) -> u64 {
        debug_assert!(earlier <= self, "{earlier:?} lies behind {self:?}");
        self.0 - earlier.0
    }
}

impl Add<Bytes> for PoolAddr {
    type Output = PoolAddr;
    #[inline]
    fn add(self, distance: Bytes) -> PoolAddr {
        self.plus(distance.count())
    }
}

impl Sub<Bytes> for PoolAddr {
    type Output = PoolAddr;
    #[inline]
    fn sub(self, distance: Bytes) -> PoolAddr {
        self.minus(distance.count())
    }
}

impl Sub for PoolAddr {
    type Output = Bytes;
    #[inline]
    fn sub(self, earlier: PoolAddr) -> Bytes {
        Bytes::new(self.since(earlier))
    }
}

impl fmt::Debug for PoolAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}+{:#x}", self.span(), self.offset().count())
    }
}

/// Id of a block until it is freed. Looking up a stale id is an error; it never names another block.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

impl BlockId {
    /// Returns the id of the `generation`-th block in this slot of an allocator's table.
    pub const fn new(slot: u32, generation: u32) -> BlockId {
        BlockId { index: slot, generation }
    }

    /// The slot in the allocator's table.
    pub const fn slot(self) -> u32 {
        self.index
    }

    /// The number of blocks that had the slot before.
    pub const fn generation(self) -> u32 {
        self.generation
    }

    /// The id as one number, for C and Python.
    pub const fn number(self) -> u64 {
        (self.generation as u64) << 32 | self.index as u64
    }

    /// Returns the id with this number. Any number is safe: one that names no block is not found.
    pub const fn from_number(number: u64) -> BlockId {
        BlockId { index: number as u32, generation: (number >> 32) as u32 }
    }
}

impl fmt::Debug for BlockId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "block{}.{}", self.index, self.generation)
    }
}
