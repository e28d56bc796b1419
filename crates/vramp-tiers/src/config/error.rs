//! Errors of a configuration.

use std::path::PathBuf;

use crate::ledger::core::{SpaceConfigError, SpaceId};
use vramp_core::Bytes;
use vramp_host::NumaNode;

/// Why a configuration cannot be read, built or used.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The text is not TOML, or has unknown keys or invalid values.
    #[error("the configuration cannot be read: {message}")]
    Toml {
        /// Location and reason.
        message: String,
    },
    /// The configuration has no space.
    #[error("the configuration has no space: add a [[gpu]], a [[host]] or a [[disk]]")]
    NoSpaces,
    /// Two spaces have the same id.
    #[error("{space} occurs twice: give each [[{}]] its own index", space.tier)]
    DuplicateSpace {
        /// Id of the space.
        space: SpaceId,
    },
    /// A card is named twice.
    #[error("[[peer]] with index {index} occurs twice: name each card once")]
    DuplicatePeer {
        /// Index of the card.
        index: u32,
    },
    /// The levels of a space are invalid.
    #[error("[[{}]] with index {}: {error}", space.tier, space.index)]
    InvalidLevels {
        /// Id of the space.
        space: SpaceId,
        /// Reason.
        error: SpaceConfigError,
    },
    /// The block size is not a multiple of the page size.
    #[error(
        "[[host]] with index {}: a block of {block} is not a multiple of the page size, 4 KiB",
        space.index
    )]
    PartialPageBlock {
        /// Id of the space.
        space: SpaceId,
        /// Configured block size.
        block: Bytes,
    },
    /// A pool would have no block.
    #[error("[[host]] with index {}: blocks_per_pool is 0: use 1 or more", space.index)]
    ZeroBlocksPerPool {
        /// Id of the space.
        space: SpaceId,
    },
    /// The initial pools exceed the capacity of the space.
    #[error(
        "[[host]] with index {}: initial_pools need {pools}, more than the capacity of \
         {capacity}: use fewer or smaller pools",
        space.index
    )]
    InitialPoolsTooLarge {
        /// Id of the space.
        space: SpaceId,
        /// Size of the initial pools.
        pools: Bytes,
        /// Capacity of the space.
        capacity: Bytes,
    },
    /// The directory of a disk is empty.
    #[error("[[disk]] with index {}: directory is empty: name one", space.index)]
    EmptyDirectory {
        /// Id of the space.
        space: SpaceId,
    },
    /// Two disks have the same directory.
    #[error(
        "'{}' is the directory of both {} and {}: give each its own",
        directory.display(),
        spaces[0],
        spaces[1]
    )]
    DuplicateDirectory {
        /// The directory.
        directory: PathBuf,
        /// Ids of the two spaces.
        spaces: [SpaceId; 2],
    },
    /// The sum of all capacities overflows.
    #[error("the sum of all capacities exceeds 2^64 bytes: use smaller capacities")]
    CapacityOverflow,
    /// More GPUs were requested than exist.
    #[error("{asked} GPUs were requested, {there} exist: request fewer")]
    TooManyGpus {
        /// Requested number.
        asked: usize,
        /// Number of GPUs.
        there: usize,
    },
    /// A requested GPU does not exist.
    #[error("there is no GPU {index}: the GPUs are {there:?}")]
    UnknownGpu {
        /// Index of the GPU.
        index: u32,
        /// Indices of the GPUs.
        there: Vec<u32>,
    },
    /// A GPU was requested twice.
    #[error("GPU {index} was requested twice: list each GPU once")]
    DuplicateGpu {
        /// Index of the GPU.
        index: u32,
    },
    /// A fraction is not between 0 and 1.
    #[error("{part} is no fraction of the memory of {of}: use more than 0 and at most 1")]
    InvalidFraction {
        /// The given fraction.
        part: f64,
        /// Memory that it is a fraction of.
        of: String,
    },
    /// More memory was requested than a GPU has.
    #[error("{asked} of GPU {index} were requested, it has {memory}: request less")]
    GpuTooSmall {
        /// Index of the GPU.
        index: u32,
        /// Requested bytes.
        asked: Bytes,
        /// Size of its memory.
        memory: Bytes,
    },
    /// More memory was requested than a NUMA node has.
    #[error("{asked} of {node} were requested, it has {memory}: request less host memory")]
    NodeTooSmall {
        /// The node.
        node: NumaNode,
        /// Requested bytes of all spaces at the node.
        asked: Bytes,
        /// Size of its memory.
        memory: Bytes,
    },
    /// A fraction of a node's memory was requested, and its size is unknown.
    #[error(
        "the size of the memory of {0} is unknown: request host memory in bytes",
        node_text(.node)
    )]
    UnknownNodeMemory {
        /// The node. `None` for the node of a GPU whose node is unknown.
        node: Option<NumaNode>,
    },
}

fn node_text(node: &Option<NumaNode>) -> String {
    match node {
        Some(node) => node.to_string(),
        None => "the host".to_owned(),
    }
}
