//! Configuration of the spaces of each tier.

use std::path::PathBuf;
use std::time::Duration;

use crate::ledger::core::{Level, SpaceConfig, SpaceId};
use serde::{Deserialize, Serialize};
use vramp_core::Bytes;
use vramp_host::NumaNode;

use super::error::ConfigError;
use super::text;
use crate::host::HostPoolConfig;
use crate::peer::PeerStoreConfig;

/// Page size of the kernel.
const PAGE: Bytes = Bytes::kib(4);

/// Levels of a space. A level that is `None` has the default of the tier, as in
/// [`SpaceConfig::gpu`].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SpaceLevels {
    /// Upper bound of reservations.
    pub limit: Option<Level>,
    /// From this total up, data should be spilled.
    pub trigger: Option<Level>,
    /// From this total down, spilling should stop.
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

/// Configuration of a GPU space.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GpuSpaceConfig {
    /// Index of the GPU, as CUDA numbers the visible ones.
    pub index: u32,
    /// Capacity of the space.
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
    /// Returns a GPU space with these levels.
    pub fn new(index: u32, capacity: Bytes, levels: SpaceLevels) -> GpuSpaceConfig {
        let SpaceLevels { limit, trigger, stop } = levels;
        GpuSpaceConfig { index, capacity, limit, trigger, stop }
    }

    /// Returns the id of the space.
    pub fn id(&self) -> SpaceId {
        SpaceId::gpu(self.index)
    }

    /// Returns the configuration of the budget.
    pub fn space(&self) -> SpaceConfig {
        let &GpuSpaceConfig { capacity, limit, trigger, stop, .. } = self;
        SpaceLevels { limit, trigger, stop }.onto(SpaceConfig::gpu(capacity))
    }
}

/// Blocks and pools of pinned host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostBlocks {
    /// Size of a block, the unit of allocation.
    pub block: Bytes,
    /// Number of blocks that are pinned at once, as a pool.
    pub blocks_per_pool: u32,
    /// Number of pools that are pinned at the start.
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

const fn default_idle_ms() -> u64 {
    10_000
}

/// Configuration of a host space.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostSpaceConfig {
    /// Index of the space, such as the number of a NUMA node or of a GPU.
    pub index: u32,
    /// NUMA node of the memory. Without one the kernel chooses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<u32>,
    /// Capacity of the space.
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
    /// Least bytes that stay pinned however long they are free. By default what the initial pools have; the capacity
    /// keeps all.
    #[serde(default, with = "text::set_bytes", skip_serializing_if = "Option::is_none")]
    pub keep: Option<Bytes>,
    /// Milliseconds for which memory above that is free before it is unpinned.
    #[serde(default = "default_idle_ms")]
    pub idle_ms: u64,
}

impl HostSpaceConfig {
    /// Returns a host space with these levels and the default blocks.
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
            keep: None,
            idle_ms: default_idle_ms(),
        }
    }

    /// Returns the configuration with other blocks.
    pub fn with_blocks(self, blocks: HostBlocks) -> HostSpaceConfig {
        let HostBlocks { block, blocks_per_pool, initial_pools } = blocks;
        HostSpaceConfig { block, blocks_per_pool, initial_pools, ..self }
    }

    /// Returns the configuration with at most a sixteenth of the capacity pinned at once, so that most of what is
    /// freed can be unpinned, but eight blocks. Nothing is pinned at the start of a space that is shorter than
    /// [`HostBlocks::default`]'s pool.
    pub fn pinned_in_parts(self) -> HostSpaceConfig {
        let blocks = self.capacity.count() / self.block.count();
        let part = (blocks / 16).max(8).min(blocks).clamp(1, u64::from(self.blocks_per_pool));
        let is_short = self.capacity < self.block * u64::from(self.blocks_per_pool);
        HostSpaceConfig {
            blocks_per_pool: part as u32,
            initial_pools: if is_short { 0 } else { self.initial_pools },
            ..self
        }
    }

    /// Returns the configuration of the pool that holds its memory.
    pub fn pool(&self) -> HostPoolConfig {
        let &HostSpaceConfig { block, blocks_per_pool, initial_pools, keep, .. } = self;
        let usual = HostPoolConfig::default();
        HostPoolConfig {
            block,
            blocks_per_pool,
            initial_pools,
            // Pinned ahead: a quarter of what is pinned at once.
            spare_blocks: usual.spare_blocks.min(blocks_per_pool / 4),
            node: self.node.map(NumaNode),
            idle: Some(Duration::from_millis(self.idle_ms)),
            keep,
            ..usual
        }
    }

    /// Returns the id of the space.
    pub fn id(&self) -> SpaceId {
        SpaceId::host(self.index)
    }

    /// Returns the configuration of the budget, with blocks as granules.
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

const fn default_reserve() -> Bytes {
    Bytes::gib(1)
}

/// Free memory of a card that holds contents of the others.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PeerConfig {
    /// Index of the card, as CUDA numbers the visible ones. It may be the one of a GPU space, which is charged then.
    pub index: u32,
    /// Most bytes that each other card takes of it.
    #[serde(with = "text::bytes")]
    pub limit: Bytes,
    /// Bytes of it that stay free.
    #[serde(default = "default_reserve", with = "text::bytes")]
    pub reserve: Bytes,
    /// Bytes taken of it at the start and kept.
    #[serde(default, with = "text::bytes")]
    pub ahead: Bytes,
}

impl PeerConfig {
    /// Returns a configuration that leaves 1 GiB of the card free and takes nothing ahead.
    pub fn new(index: u32, limit: Bytes) -> PeerConfig {
        PeerConfig { index, limit, reserve: default_reserve(), ahead: Bytes::ZERO }
    }

    /// Returns the configuration of a store on the card.
    pub fn store(&self) -> PeerStoreConfig {
        let &PeerConfig { limit, reserve, ahead, .. } = self;
        PeerStoreConfig { limit, reserve, ahead, ..PeerStoreConfig::default() }
    }
}

/// Configuration of a disk space.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskSpaceConfig {
    /// Index of the space, chosen by the user.
    pub index: u32,
    /// Directory of its files.
    pub directory: PathBuf,
    /// Capacity of the space.
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
    /// Returns a disk space with these levels.
    pub fn new(
        index: u32,
        directory: PathBuf,
        capacity: Bytes,
        levels: SpaceLevels,
    ) -> DiskSpaceConfig {
        let SpaceLevels { limit, trigger, stop } = levels;
        DiskSpaceConfig { index, directory, capacity, limit, trigger, stop }
    }

    /// Returns the id of the space.
    pub fn id(&self) -> SpaceId {
        SpaceId::disk(self.index)
    }

    /// Returns the configuration of the budget.
    pub fn space(&self) -> SpaceConfig {
        let &DiskSpaceConfig { capacity, limit, trigger, stop, .. } = self;
        SpaceLevels { limit, trigger, stop }.onto(SpaceConfig::disk(capacity))
    }
}
