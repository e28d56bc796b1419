//! The spaces of a configuration, tier by tier.

use std::path::PathBuf;

use crate::ledger::core::{Level, SpaceConfig, SpaceId};
use serde::{Deserialize, Serialize};
use vramp_core::Bytes;
use vramp_host::NumaNode;

use super::error::ConfigError;
use super::text;
use crate::host::HostPoolConfig;

/// What the kernel and disks count in.
const PAGE: Bytes = Bytes::kib(4);

/// At which fill of a space what happens. What is not said is as the tier has it
/// ([`SpaceConfig::gpu`] and its like).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SpaceLevels {
    /// Up to where reservations are given.
    pub limit: Option<Level>,
    /// At this fill or above, data should leave for a lower tier.
    pub trigger: Option<Level>,
    /// At this fill or below, enough has left.
    pub stop: Option<Level>,
}

impl SpaceLevels {
    fn onto(self, space: SpaceConfig) -> SpaceConfig {
        SpaceConfig {
            limit: self.limit.unwrap_or(space.limit),
            trigger: self.trigger.unwrap_or(space.trigger),
            stop: self.stop.unwrap_or(space.stop),
            ..space
        }
    }
}

/// A card.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GpuSpaceConfig {
    /// The card's number, as CUDA counts those that are visible.
    pub index: u32,
    /// What may be used of its memory.
    #[serde(with = "text::bytes")]
    pub capacity: Bytes,
    /// See [`SpaceLevels::limit`].
    #[serde(default, with = "text::level", skip_serializing_if = "Option::is_none")]
    pub limit: Option<Level>,
    /// See [`SpaceLevels::trigger`].
    #[serde(default, with = "text::level", skip_serializing_if = "Option::is_none")]
    pub trigger: Option<Level>,
    /// See [`SpaceLevels::stop`].
    #[serde(default, with = "text::level", skip_serializing_if = "Option::is_none")]
    pub stop: Option<Level>,
}

impl GpuSpaceConfig {
    /// A card with these levels.
    pub fn new(index: u32, capacity: Bytes, levels: SpaceLevels) -> GpuSpaceConfig {
        let SpaceLevels { limit, trigger, stop } = levels;
        GpuSpaceConfig { index, capacity, limit, trigger, stop }
    }

    /// The space's name.
    pub fn id(&self) -> SpaceId {
        SpaceId::gpu(self.index)
    }

    /// The space's budget.
    pub fn space(&self) -> SpaceConfig {
        let &GpuSpaceConfig { capacity, limit, trigger, stop, .. } = self;
        SpaceLevels { limit, trigger, stop }.onto(SpaceConfig::gpu(capacity))
    }
}

/// How pinned memory is taken from the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostBlocks {
    /// The unit that is handed out.
    pub block: Bytes,
    /// How many of them are pinned at once.
    pub blocks_per_pool: u32,
    /// How many pools are pinned at the start.
    pub initial_pools: u32,
}

impl Default for HostBlocks {
    /// Blocks of 1 MiB, 128 a pool, one pool at the start.
    fn default() -> HostBlocks {
        HostBlocks {
            block: default_block(),
            blocks_per_pool: default_blocks_per_pool(),
            initial_pools: default_initial_pools(),
        }
    }
}

const fn default_block() -> Bytes {
    Bytes::mib(1)
}

const fn default_blocks_per_pool() -> u32 {
    128
}

const fn default_initial_pools() -> u32 {
    1
}

/// Pinned memory of the host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostSpaceConfig {
    /// The space's number: that of a NUMA node or of a card, as the user likes.
    pub index: u32,
    /// The NUMA node to take memory from. Without one the kernel chooses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<u32>,
    /// What may be used of its memory.
    #[serde(with = "text::bytes")]
    pub capacity: Bytes,
    /// See [`SpaceLevels::limit`].
    #[serde(default, with = "text::level", skip_serializing_if = "Option::is_none")]
    pub limit: Option<Level>,
    /// See [`SpaceLevels::trigger`].
    #[serde(default, with = "text::level", skip_serializing_if = "Option::is_none")]
    pub trigger: Option<Level>,
    /// See [`SpaceLevels::stop`].
    #[serde(default, with = "text::level", skip_serializing_if = "Option::is_none")]
    pub stop: Option<Level>,
    /// See [`HostBlocks::block`].
    #[serde(default = "default_block", with = "text::bytes")]
    pub block: Bytes,
    /// See [`HostBlocks::blocks_per_pool`].
    #[serde(default = "default_blocks_per_pool")]
    pub blocks_per_pool: u32,
    /// See [`HostBlocks::initial_pools`].
    #[serde(default = "default_initial_pools")]
    pub initial_pools: u32,
}

impl HostSpaceConfig {
    /// Memory of one node, or of any, with these levels, in pools as they usually are.
    pub fn new(
        index: u32,
        node: Option<u32>,
        capacity: Bytes,
        levels: SpaceLevels,
    ) -> HostSpaceConfig {
        let SpaceLevels { limit, trigger, stop } = levels;
        let HostBlocks { block, blocks_per_pool, initial_pools } = HostBlocks::default();
        HostSpaceConfig {
            index,
            node,
            capacity,
            limit,
            trigger,
            stop,
            block,
            blocks_per_pool,
            initial_pools,
        }
    }

    /// The same in other blocks.
    pub fn with_blocks(self, blocks: HostBlocks) -> HostSpaceConfig {
        let HostBlocks { block, blocks_per_pool, initial_pools } = blocks;
        HostSpaceConfig { block, blocks_per_pool, initial_pools, ..self }
    }

    /// For the pool that holds its memory.
    pub fn pool(&self) -> HostPoolConfig {
        let &HostSpaceConfig { block, blocks_per_pool, initial_pools, .. } = self;
        let node = self.node.map(NumaNode);
        HostPoolConfig { block, blocks_per_pool, initial_pools, node, ..HostPoolConfig::default() }
    }

    /// The space's name.
    pub fn id(&self) -> SpaceId {
        SpaceId::host(self.index)
    }

    /// The space's budget, in blocks.
    pub fn space(&self) -> SpaceConfig {
        let &HostSpaceConfig { capacity, limit, trigger, stop, block, .. } = self;
        let space = SpaceConfig { granule: block, ..SpaceConfig::host(capacity) };
        SpaceLevels { limit, trigger, stop }.onto(space)
    }

    pub(super) fn check(&self) -> Result<(), ConfigError> {
        let (space, block, capacity) = (self.id(), self.block, self.capacity);
        if block.is_zero() || !block.is_multiple_of(PAGE) {
            return Err(ConfigError::PartialPageBlock { space, block });
        }
        if self.blocks_per_pool == 0 {
            return Err(ConfigError::ZeroBlocksPerPool { space });
        }
        let blocks = u64::from(self.blocks_per_pool) * u64::from(self.initial_pools);
        let pools = Bytes::new(block.count().saturating_mul(blocks));
        if pools > capacity {
            return Err(ConfigError::InitialPoolsTooLarge { space, pools, capacity });
        }
        Ok(())
    }
}

/// A directory on a disk.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskSpaceConfig {
    /// The space's number, as the user likes.
    pub index: u32,
    /// Where its files are.
    pub directory: PathBuf,
    /// What they may take.
    #[serde(with = "text::bytes")]
    pub capacity: Bytes,
    /// See [`SpaceLevels::limit`].
    #[serde(default, with = "text::level", skip_serializing_if = "Option::is_none")]
    pub limit: Option<Level>,
    /// See [`SpaceLevels::trigger`].
    #[serde(default, with = "text::level", skip_serializing_if = "Option::is_none")]
    pub trigger: Option<Level>,
    /// See [`SpaceLevels::stop`].
    #[serde(default, with = "text::level", skip_serializing_if = "Option::is_none")]
    pub stop: Option<Level>,
}

impl DiskSpaceConfig {
    /// A directory with these levels.
    pub fn new(
        index: u32,
        directory: PathBuf,
        capacity: Bytes,
        levels: SpaceLevels,
    ) -> DiskSpaceConfig {
        let SpaceLevels { limit, trigger, stop } = levels;
        DiskSpaceConfig { index, directory, capacity, limit, trigger, stop }
    }

    /// The space's name.
    pub fn id(&self) -> SpaceId {
        SpaceId::disk(self.index)
    }

    /// The space's budget.
    pub fn space(&self) -> SpaceConfig {
        let &DiskSpaceConfig { capacity, limit, trigger, stop, .. } = self;
        SpaceLevels { limit, trigger, stop }.onto(SpaceConfig::disk(capacity))
    }
}
