//! Why a configuration makes no sense.

use std::path::PathBuf;

use crate::ledger::core::{SpaceConfigError, SpaceId};
use vramp_core::Bytes;
use vramp_host::NumaNode;

/// Why a configuration cannot be read, drawn up or used.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// It is no TOML, or has keys or values that do not belong there.
    #[error("the configuration cannot be read: {message}")]
    Toml {
        /// The place and what is wrong there.
        message: String,
    },
    /// It has no space.
    #[error("the configuration has no space: give it a [[gpu]], a [[host]] or a [[disk]]")]
    NoSpaces,
    /// One space is there twice.
    #[error("{space} is there twice: give each [[{}]] an index of its own", space.tier)]
    DuplicateSpace {
        /// Which.
        space: SpaceId,
    },
    /// The levels of a space make no sense.
    #[error("[[{}]] with index {}: {error}", space.tier, space.index)]
    InvalidLevels {
        /// Which.
        space: SpaceId,
        /// What is wrong with them.
        error: SpaceConfigError,
    },
    /// Blocks are not whole pages.
    #[error(
        "[[host]] with index {}: blocks of {block} are no whole pages: use a multiple of 4 KiB",
        space.index
    )]
    PartialPageBlock {
        /// Whose.
        space: SpaceId,
        /// How large.
        block: Bytes,
    },
    /// Pools have no block.
    #[error("[[host]] with index {}: blocks_per_pool is 0: use 1 or more", space.index)]
    ZeroBlocksPerPool {
        /// Whose.
        space: SpaceId,
    },
    /// The pools at the start are more than the space may hold.
    #[error(
        "[[host]] with index {}: initial_pools take {pools}, more than the capacity of \
         {capacity}: use fewer pools or smaller ones",
        space.index
    )]
    InitialPoolsTooLarge {
        /// Whose.
        space: SpaceId,
        /// What they take.
        pools: Bytes,
        /// What the space holds.
        capacity: Bytes,
    },
    /// A disk has no directory.
    #[error("[[disk]] with index {}: directory is empty: name one", space.index)]
    EmptyDirectory {
        /// Whose.
        space: SpaceId,
    },
    /// Two disks share a directory.
    #[error(
        "'{}' is the directory of both {} and {}: give each its own",
        directory.display(),
        spaces[0],
        spaces[1]
    )]
    DuplicateDirectory {
        /// Which.
        directory: PathBuf,
        /// Whose.
        spaces: [SpaceId; 2],
    },
    /// The sum of all capacities fits in no number.
    #[error("all spaces together hold more than 2^64 bytes: use smaller capacities")]
    CapacityOverflow,
    /// More cards were asked for than there are.
    #[error("{asked} cards were asked for and there are {there}: ask for at most as many")]
    TooManyGpus {
        /// How many were asked for.
        asked: usize,
        /// How many there are.
        there: usize,
    },
    /// A card that does not exist was asked for.
    #[error("there is no card {index}: the cards are {there:?}")]
    UnknownGpu {
        /// Its number.
        index: u32,
        /// The numbers that exist.
        there: Vec<u32>,
    },
    /// A card was asked for twice.
    #[error("card {index} was asked for twice: name each once")]
    DuplicateGpu {
        /// Its number.
        index: u32,
    },
    /// A part that is no part.
    #[error("{part} is no part of the memory of {of}: use more than 0 and at most 1")]
    InvalidFraction {
        /// What was given.
        part: f64,
        /// Of what.
        of: String,
    },
    /// A card was to give more than it has.
    #[error("card {index} has {memory} and was to give {asked}: ask for at most as much")]
    GpuTooSmall {
        /// Its number.
        index: u32,
        /// What was asked.
        asked: Bytes,
        /// What it has.
        memory: Bytes,
    },
    /// A NUMA node was to give more than it has.
    #[error("{node} has {memory} and was to give {asked}: ask for less host memory")]
    NodeTooSmall {
        /// Which.
        node: NumaNode,
        /// What was asked of it, by all spaces there.
        asked: Bytes,
        /// What it has.
        memory: Bytes,
    },
    /// A part of a node's memory was asked for, and nobody knows how much that is.
    #[error("nobody knows how much memory {0} has: ask for host memory in bytes", node_text(.node))]
    UnknownNodeMemory {
        /// Which. `None` for the node of a card that is at no known one.
        node: Option<NumaNode>,
    },
}

fn node_text(node: &Option<NumaNode>) -> String {
    match node {
        Some(node) => node.to_string(),
        None => "the host".to_owned(),
    }
}
