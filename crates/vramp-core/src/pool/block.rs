//! What the pool hands out: blocks, and slabs for the heaps.
//!
//! What a pin returns: the pinned chunks, or why there are none.

use crate::Bytes;
use crate::ids::{BlockId, ChunkId, PoolAddr};
use crate::pool::index::RegionKey;

/// An allocated block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Id of the block until it is freed.
    pub id: BlockId,
    /// Address of the block.
    pub at: PoolAddr,
    /// Usable bytes: the requested size, rounded up.
    pub len: Bytes,
}

/// The id names no block: the block was freed already, or the id is of another pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{id:?} names no block of this pool: it was freed already, or belongs to another pool")]
pub struct UnknownBlock {
    /// The unknown id.
    pub id: BlockId,
}

/// A range of the pool's memory for a heap to cut up.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a slab that is dropped is lost to the pool"]
pub struct Slab {
    pub(crate) region: RegionKey,
    pub(crate) at: PoolAddr,
    pub(crate) len: Bytes,
}

/// A chunk at its address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkAt {
    /// Id of the chunk.
    pub chunk: ChunkId,
    /// Address of its first byte.
    pub at: PoolAddr,
    /// Length in bytes.
    pub len: Bytes,
}

/// A range that cannot be pinned: not all of it is memory of the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not all of the range is memory of the pool: pin what was allocated and not freed")]
pub struct NotPoolMemory;
