//! Builds a configuration for a machine.

use std::path::PathBuf;

use crate::ledger::core::Level;
use vramp_core::Bytes;
use vramp_host::NumaNode;
use vramp_host::topology::{NodeInfo, Topology};

use super::TiersConfig;
use super::error::ConfigError;
use super::spaces::{DiskSpaceConfig, GpuSpaceConfig, HostBlocks, HostSpaceConfig, SpaceLevels};

/// A visible GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuInfo {
    /// Index, as CUDA numbers the visible GPUs.
    pub index: u32,
    /// Size of its memory.
    pub memory: Bytes,
    /// Nearest NUMA node, if known.
    pub node: Option<NumaNode>,
}

/// GPUs to use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum GpuSelection {
    /// All visible GPUs.
    #[default]
    All,
    /// The first GPUs, by number.
    First(usize),
    /// The GPUs with these indices, in this order.
    Listed(Vec<u32>),
}

/// Division of host memory into spaces.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HostLayout {
    /// One space for each NUMA node near a chosen GPU, with the number of the node. If the node of
    /// a GPU is unknown, one space for each node.
    #[default]
    PerNode,
    /// One space for each chosen GPU, with the index of the GPU and memory of its nearest node.
    PerGpu,
}

/// Capacity of the host spaces.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum HostCapacity {
    /// Capacity of each space. A fraction is one of the node's memory, shared equally by the spaces
    /// of the node.
    PerSpace(Level),
    /// Capacity of all spaces together, shared equally. A fraction is one of all nodes' memory.
    Total(Level),
}

/// Builds a [`TiersConfig`] for a machine.
///
/// By default it uses all memory of all GPUs, half of the memory of the NUMA nodes near them, and
/// no disk. Capacities from fractions are rounded down to whole MiB, on the host to whole blocks.
///
/// ```
/// use vramp_tiers::config::topology::Topology;
/// use vramp_tiers::config::{GpuInfo, HostCapacity, TiersBuilder};
/// use vramp_tiers::space::Level;
/// use vramp_tiers::Bytes;
/// let machine = Topology::discover()?;
/// let card = GpuInfo { index: 0, memory: Bytes::gib(80), node: None };
/// let config = TiersBuilder::new(&machine, &[card])
///     .gpu_usage(Level::Fraction(0.5))
///     .host_capacity(HostCapacity::Total(Level::Bytes(Bytes::mib(256))))
///     .disk("/var/tmp/spill", Bytes::gib(100))
///     .build()?;
/// assert_eq!(config.gpus[0].capacity, Bytes::gib(40));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct TiersBuilder<'a> {
    topology: &'a Topology,
    cards: &'a [GpuInfo],
    choice: GpuSelection,
    usage: Level,
    gpu_levels: SpaceLevels,
    host_layout: HostLayout,
    host_capacity: HostCapacity,
    host_levels: SpaceLevels,
    blocks: HostBlocks,
    disks: Vec<(PathBuf, Bytes)>,
    disk_levels: SpaceLevels,
}

impl<'a> TiersBuilder<'a> {
    /// Returns a builder for this machine with these GPUs.
    pub fn new(topology: &'a Topology, cards: &'a [GpuInfo]) -> TiersBuilder<'a> {
        TiersBuilder {
            topology,
            cards,
            choice: GpuSelection::All,
            usage: Level::Fraction(1.0),
            gpu_levels: SpaceLevels::default(),
            host_layout: HostLayout::PerNode,
            host_capacity: HostCapacity::PerSpace(Level::Fraction(0.5)),
            host_levels: SpaceLevels::default(),
            blocks: HostBlocks::default(),
            disks: Vec::new(),
            disk_levels: SpaceLevels::default(),
        }
    }

    /// Sets the GPUs to use.
    pub fn gpus(mut self, choice: GpuSelection) -> TiersBuilder<'a> {
        self.choice = choice;
        self
    }

    /// Sets the capacity of each GPU: an amount, or a fraction of its memory.
    pub fn gpu_usage(mut self, usage: Level) -> TiersBuilder<'a> {
        self.usage = usage;
        self
    }

    /// Sets the levels of every GPU. Fractions are of the capacity, not of all the memory.
    pub fn gpu_levels(mut self, levels: SpaceLevels) -> TiersBuilder<'a> {
        self.gpu_levels = levels;
        self
    }

    /// Sets the division of host memory into spaces.
    pub fn host_layout(mut self, per: HostLayout) -> TiersBuilder<'a> {
        self.host_layout = per;
        self
    }

    /// Sets the capacity of the host spaces.
    pub fn host_capacity(mut self, capacity: HostCapacity) -> TiersBuilder<'a> {
        self.host_capacity = capacity;
        self
    }

    /// Sets the levels of every host space.
    pub fn host_levels(mut self, levels: SpaceLevels) -> TiersBuilder<'a> {
        self.host_levels = levels;
        self
    }

    /// Sets the blocks of the host pools.
    pub fn host_blocks(mut self, blocks: HostBlocks) -> TiersBuilder<'a> {
        self.blocks = blocks;
        self
    }

    /// Adds a directory, and the capacity of its files. The first one is disk 0.
    pub fn disk(mut self, directory: impl Into<PathBuf>, capacity: Bytes) -> TiersBuilder<'a> {
        self.disks.push((directory.into(), capacity));
        self
    }

    /// Sets the levels of every directory.
    pub fn disk_levels(mut self, levels: SpaceLevels) -> TiersBuilder<'a> {
        self.disk_levels = levels;
        self
    }

    /// Builds and checks the configuration.
    ///
    /// # Errors
    /// A chosen GPU does not exist, a GPU or a node has less memory than requested, or
    /// [`TiersConfig::check`] fails.
    pub fn build(&self) -> Result<TiersConfig, ConfigError> {
        let cards = self.chosen()?;
        let gpus = cards.iter().map(|card| self.gpu(card)).collect::<Result<Vec<_>, _>>()?;
        let hosts = self.hosts(&cards)?;
        let disks = self.disks.iter().zip(0..).map(|((directory, capacity), index)| {
            DiskSpaceConfig::new(index, directory.clone(), *capacity, self.disk_levels)
        });
        let (disks, rest) = (disks.collect(), TiersConfig::default());
        let config = TiersConfig { gpus, hosts, disks, ..rest };
        config.check()?;
        Ok(config)
    }

    fn chosen(&self) -> Result<Vec<GpuInfo>, ConfigError> {
        let there = self.cards.len();
        match &self.choice {
            GpuSelection::All => Ok(self.cards.to_vec()),
            &GpuSelection::First(asked) if asked > there => {
                Err(ConfigError::TooManyGpus { asked, there })
            }
            &GpuSelection::First(asked) => Ok(self.cards[..asked].to_vec()),
            GpuSelection::Listed(indices) => {
                let mut chosen: Vec<GpuInfo> = Vec::new();
                for &index in indices {
                    let Some(card) = self.cards.iter().find(|card| card.index == index) else {
                        let there = self.cards.iter().map(|card| card.index).collect();
                        return Err(ConfigError::UnknownGpu { index, there });
                    };
                    if chosen.contains(card) {
                        return Err(ConfigError::DuplicateGpu { index });
                    }
                    chosen.push(*card);
                }
                Ok(chosen)
            }
        }
    }

    fn gpu(&self, card: &GpuInfo) -> Result<GpuSpaceConfig, ConfigError> {
        let &GpuInfo { index, memory, .. } = card;
        let of = || format!("GPU {index}");
        let capacity = amount(self.usage, memory, Bytes::mib(1), of)?;
        if capacity > memory {
            return Err(ConfigError::GpuTooSmall { index, asked: capacity, memory });
        }
        Ok(GpuSpaceConfig::new(index, capacity, self.gpu_levels))
    }

    fn hosts(&self, cards: &[GpuInfo]) -> Result<Vec<HostSpaceConfig>, ConfigError> {
        let places = self.host_places(cards);
        let mut hosts = Vec::new();
        for &(index, node) in &places {
            let capacity = self.host_share(node, &places)?;
            let number = node.map(|node| node.0);
            let host = HostSpaceConfig::new(index, number, capacity, self.host_levels);
            hosts.push(host.with_blocks(self.blocks));
        }
        for node in self.topology.host_nodes() {
            let mut here = hosts.iter().filter(|host| host.node == Some(node.node.0));
            let asked = here.try_fold(Bytes::ZERO, |sum, host| sum.checked_add(host.capacity));
            let asked = asked.ok_or(ConfigError::CapacityOverflow)?;
            if let Some(memory) = node.memory
                && asked > memory
            {
                return Err(ConfigError::NodeTooSmall { node: node.node, asked, memory });
            }
        }
        Ok(hosts)
    }

    /// Index and node of each host space.
    fn host_places(&self, cards: &[GpuInfo]) -> Vec<(u32, Option<NumaNode>)> {
        let mut all = self.topology.host_nodes().map(|node| node.node);
        let first = all.next();
        let only = first.filter(|_| all.next().is_none());
        let near = |card: &GpuInfo| card.node.filter(|&node| self.is_host(node)).or(only);
        match self.host_layout {
            HostLayout::PerGpu => cards.iter().map(|card| (card.index, near(card))).collect(),
            HostLayout::PerNode => {
                let known: Option<Vec<NumaNode>> = cards.iter().map(near).collect();
                let mut nodes = match known {
                    Some(nodes) if !nodes.is_empty() => nodes,
                    _ => self.topology.host_nodes().map(|node| node.node).collect(),
                };
                nodes.sort_unstable();
                nodes.dedup();
                match nodes.is_empty() {
                    true => vec![(0, None)],
                    false => nodes.into_iter().map(|node| (node.0, Some(node))).collect(),
                }
            }
        }
    }

    /// True for a node with host memory.
    fn is_host(&self, node: NumaNode) -> bool {
        self.topology.node(node).is_some_and(|info| !info.is_device_memory())
    }

    /// Capacity of one space at this node.
    fn host_share(
        &self,
        node: Option<NumaNode>,
        places: &[(u32, Option<NumaNode>)],
    ) -> Result<Bytes, ConfigError> {
        let block = match self.blocks.block {
            Bytes::ZERO => Bytes::mib(1),
            block => block,
        };
        let (level, base, of, shares) = match self.host_capacity {
            HostCapacity::PerSpace(Level::Bytes(bytes)) => return Ok(bytes),
            HostCapacity::PerSpace(level) => {
                let here = places.iter().filter(|(_, other)| *other == node).count();
                let info = node.and_then(|node| self.topology.node(node));
                let memory = info.and_then(|info| info.memory);
                (level, memory.ok_or(ConfigError::UnknownNodeMemory { node })?, node, here)
            }
            HostCapacity::Total(level @ Level::Bytes(_)) => {
                (level, Bytes::ZERO, None, places.len())
            }
            HostCapacity::Total(level) => (level, self.all_host_memory()?, None, places.len()),
        };
        let of = || of.map_or_else(|| "the host".to_owned(), |node| node.to_string());
        let all = amount(level, base, block, of)?;
        Ok(Bytes::new(all.count() / shares as u64).round_down(block))
    }

    fn all_host_memory(&self) -> Result<Bytes, ConfigError> {
        let add = |sum: Bytes, node: &NodeInfo| {
            let unknown = ConfigError::UnknownNodeMemory { node: Some(node.node) };
            sum.checked_add(node.memory.ok_or(unknown)?).ok_or(ConfigError::CapacityOverflow)
        };
        match self.topology.host_nodes().next() {
            None => Err(ConfigError::UnknownNodeMemory { node: None }),
            Some(_) => self.topology.host_nodes().try_fold(Bytes::ZERO, add),
        }
    }
}

/// Resolves a level of `base`. A fraction is rounded down to `unit`.
fn amount(
    asked: Level,
    base: Bytes,
    unit: Bytes,
    of: impl FnOnce() -> String,
) -> Result<Bytes, ConfigError> {
    match asked {
        Level::Bytes(bytes) => Ok(bytes),
        Level::Fraction(part) if part > 0.0 && part <= 1.0 => {
            // The conversion to floating point rounds large numbers.
            let bytes = Bytes::new((base.count() as f64 * part) as u64);
            Ok(bytes.min(base).round_down(unit))
        }
        Level::Fraction(part) => Err(ConfigError::InvalidFraction { part, of: of() }),
    }
}
