//! Errors of an arena. A refused request changes nothing.

use super::blocks::ArenaBlockId;
use super::order::UnknownNode;
use crate::{ArenaId, Bytes};

/// A capture was begun twice, or ended without one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ArenaCaptureError {
    /// A capture runs already.
    #[error("{0} serves a capture already: end it or abort it first, or take another arena")]
    Running(ArenaId),
    /// No capture runs.
    #[error("{0} serves no capture: begin one first")]
    NotRunning(ArenaId),
}

/// Why no block was allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ArenaAllocError {
    /// No capture runs: blocks are for captures only.
    #[error(
        "{0} serves no capture: allocate between begin and end, and elsewhere from the allocator"
    )]
    NotCapturing(ArenaId),
    /// The point names a node that was not added.
    #[error(transparent)]
    UnknownNode(#[from] UnknownNode),
    /// No free range that may be used at this point is long enough.
    #[error(transparent)]
    Full(#[from] ArenaFull),
}

/// Out of arena memory, in numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{arena} cannot hold {requested} more: of its {capacity} it used {high_water}, {live} are live, \
     and the longest range free at this point of the capture is {largest_free}. \
     Make the arena larger, or free blocks earlier in the capture"
)]
pub struct ArenaFull {
    /// The arena.
    pub arena: ArenaId,
    /// Requested bytes.
    pub requested: Bytes,
    /// Length of the arena.
    pub capacity: Bytes,
    /// Peak of its used bytes.
    pub high_water: Bytes,
    /// Allocated bytes as requested.
    pub live: Bytes,
    /// Longest range that this request may use.
    pub largest_free: Bytes,
}

/// Why a block was not freed in a capture, or its use not noted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ArenaFreeError {
    /// No capture runs: points exist in captures only.
    #[error("{0} serves no capture: free the block outside, and note uses with the arena's leases")]
    NotCapturing(ArenaId),
    /// The point names a node that was not added.
    #[error(transparent)]
    UnknownNode(#[from] UnknownNode),
    /// The id names no live block.
    #[error(transparent)]
    UnknownBlock(#[from] UnknownArenaBlock),
}

/// The id names no live block of this arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{id:?} names no block of {arena}: it was freed already, or belongs to another arena")]
pub struct UnknownArenaBlock {
    /// The arena.
    pub arena: ArenaId,
    /// The unknown id.
    pub id: ArenaBlockId,
}

/// Why an arena was not reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ArenaResetError {
    /// A capture runs.
    #[error("{0} serves a capture: end it or abort it first")]
    Capturing(ArenaId),
    /// Blocks are live.
    #[error("{blocks} blocks of {arena} are live, {live} in all: free them first")]
    Live {
        /// The arena.
        arena: ArenaId,
        /// Number of live blocks.
        blocks: usize,
        /// Their bytes as requested.
        live: Bytes,
    },
}
