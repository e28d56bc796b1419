//! What a pin returns: the pinned chunks, or why there are none.

use crate::Bytes;
use crate::ids::{ChunkId, PoolAddr};

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
