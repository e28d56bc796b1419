//! What the pool hands out: blocks, and slabs for the heaps.

use crate::Bytes;
use crate::ids::{BlockId, PoolAddr};
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
