//! What may be wrong with a request to an arena. A refused request changes nothing.

use super::blocks::ArenaBlockId;
use super::order::UnknownNode;
use crate::{ArenaId, Bytes};

/// A capture begun twice, or ended without one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ArenaCaptureError {
    /// Only one capture at a time.
    #[error("{0} serves a capture already: end it or abort it first, or take another arena")]
    Running(ArenaId),
    /// There is nothing to end.
    #[error("{0} serves no capture: begin one first")]
    NotRunning(ArenaId),
}

/// Why no block was handed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ArenaAllocError {
    /// Blocks are for captures only.
    #[error(
        "{0} serves no capture: allocate between begin and end, and elsewhere from the allocator"
    )]
    NotCapturing(ArenaId),
    /// The point names a node that was not told.
    #[error(transparent)]
    UnknownNode(#[from] UnknownNode),
    /// No stretch that may be used is long enough.
    #[error(transparent)]
    Full(#[from] ArenaFull),
}

/// Out of arena memory, in numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{arena} cannot hold {requested} more: of its {capacity} it used {high_water}, {live} are live, \
     and the longest stretch free at this point of the capture is {largest_free}. \
     Make the arena larger, or free blocks earlier in the capture"
)]
pub struct ArenaFull {
    /// Which arena.
    pub arena: ArenaId,
    /// What was asked for.
    pub requested: Bytes,
    /// How long the arena is.
    pub capacity: Bytes,
    /// Up to where it was ever used.
    pub high_water: Bytes,
    /// What users asked for and hold.
    pub live: Bytes,
    /// The longest stretch that this request could have had.
    pub largest_free: Bytes,
}

/// Why a block was not freed in a capture, or its use not noted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ArenaFreeError {
    /// Points exist in captures only.
    #[error("{0} serves no capture: free the block outside, and note uses with the arena's leases")]
    NotCapturing(ArenaId),
    /// The point names a node that was not told.
    #[error(transparent)]
    UnknownNode(#[from] UnknownNode),
    /// The block is not there.
    #[error(transparent)]
    UnknownBlock(#[from] UnknownArenaBlock),
}

/// An id that names no live block of this arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{id:?} names no block of {arena}: it was freed already, or belongs to another arena")]
pub struct UnknownArenaBlock {
    /// Who was asked.
    pub arena: ArenaId,
    /// What was given.
    pub id: ArenaBlockId,
}

/// Why an arena was not reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ArenaResetError {
    /// A capture uses it.
    #[error("{0} serves a capture: end it or abort it first")]
    Capturing(ArenaId),
    /// Somebody holds memory of it.
    #[error("{blocks} blocks of {arena} are live, {live} in all: free them first")]
    Live {
        /// Which arena.
        arena: ArenaId,
        /// How many blocks.
        blocks: usize,
        /// What users asked for and hold.
        live: Bytes,
    },
}
