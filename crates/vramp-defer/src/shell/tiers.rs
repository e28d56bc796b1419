//! All tiers of a card from one configuration: device, allocator, spaces, pinned memory, disk, mover
//! and the manager of deferrable buffers.
//!
//! 1. [`Tiers::from_toml`] and [`Tiers::open`] open the first configured GPU, [`Tiers::open_all`] every
//!    one. [`Tiers::on`] takes an allocator that exists. [`TiersOptions`] has the same with settings
//!    beside the configuration.
//! 2. Host pools and disk stores are opened once and shared by the cards.
//! 3. A [`Tiers`] is a handle: clones, buffers and groups keep all parts open, and the last of them
//!    closes them.
//!
//! Deliberately absent: reading files and environment variables.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;

use vramp_alloc::device::{OpenError, open_ordinals_mapped};
use vramp_alloc::{Allocator, Config, CreateError, Driver, DriverError, StreamId};
use vramp_core::{AddrRange, Bytes};
use vramp_driver::Stream;
use vramp_tiers::config::{
    ConfigError, GpuSpaceConfig, HostSpaceConfig, PeerConfig, SpaceLevels, TiersConfig,
};
use vramp_tiers::disk::{DiskConfig, DiskTierError, ObjectStore, ObjectStoreConfig};
use vramp_tiers::host::HostPoolError;
use vramp_tiers::movers::{MoveError, MoverConfig};
use vramp_tiers::peer::{PeerStore, PeerStoreError};
use vramp_tiers::reserve::LedgerError;
use vramp_tiers::space::Level;
use vramp_tiers::{
    DiskStore, HostPool, MemorySpace, Mover, ReservationManager, SpaceConfig, SpaceId, Tier,
};

use super::buffer_handle::DeferrableBuffer;
use super::homes::AdoptFailed;
use super::lease_set::LeaseSet;
use super::manager::{SpillManager, SpillParts};
use super::peer_stores::PeerPart;
use super::spill_config::SpillConfig;
use super::spill_error::SpillError;
use crate::planner::Access;

/// The tiers of one card: its memory, pinned host memory and a disk, and the deferrable buffers that
/// move between them. Clones are the same tiers.
///
/// The device, the spaces and all other parts stay open while a clone, a buffer or a group exists.
#[derive(Clone)]
pub struct Tiers {
    manager: SpillManager,
    parts: Arc<Parts>,
}

struct Parts {
    allocator: Arc<Allocator>,
    reservations: ReservationManager,
    /// Spaces of cards that only hold contents of others.
    _peers: Option<ReservationManager>,
    gpu: MemorySpace,
    mover: Mover,
    disk: Option<Arc<DiskStore>>,
    stream: StreamId,
    queue: Stream,
}

impl Drop for Parts {
    fn drop(&mut self) {
        // A drop reports no error. The allocator destroys what stays.
        let _ = self.allocator.destroy_stream(self.stream);
    }
}

/// Levels of a GPU that no configuration names: its capacity is a limit already, and reservations and
/// leases may use all of it.
const ALL: SpaceLevels =
    SpaceLevels { limit: Some(Level::Fraction(1.0)), trigger: None, stop: None };

/// Settings beside a [`TiersConfig`], and the ways to open it with them.
///
/// ```
/// use vramp_defer::{SpillConfig, TiersOptions};
/// use vramp_tiers::Bytes;
/// use vramp_tiers::config::TiersConfig;
///
/// let config = TiersConfig::from_toml(
///     r#"
///     device = "sim:h200"
///     [[gpu]]
///     index = 0
///     capacity = "1GiB"
///     [[host]]
///     index = 0
///     capacity = "4GiB"
///     "#,
/// )?;
/// let spill = SpillConfig { piece: Bytes::mib(8), ..SpillConfig::default() };
/// let tiers = TiersOptions { spill, ..TiersOptions::default() }.open(&config)?;
/// assert_eq!(tiers.gpu_space().capacity(), Bytes::gib(1));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct TiersOptions {
    /// Allocators of the opened cards. Their limit is the capacity of the GPU, or this one if it is
    /// lower.
    pub allocator: Config,
    /// Copies between the tiers.
    pub mover: MoverConfig,
    /// Files on the disks.
    pub disk: DiskConfig,
    /// A store of the program's own in place of a directory. The configuration must have no disk then.
    pub objects: Option<ObjectTier>,
    /// When and how buffers are spilled.
    pub spill: SpillConfig,
    /// Allocators of other cards of the same machine. One whose card is a `[[peer]]` of the configuration has
    /// contents there move on when it runs short of the card's memory.
    pub others: Vec<Arc<Allocator>>,
}

/// A store of the program's own as the tier Disk of all opened cards.
#[derive(Clone)]
pub struct ObjectTier {
    /// The store.
    pub store: Arc<dyn ObjectStore>,
    /// Most bytes that are stored in it: the capacity of the space `disk 0`.
    pub capacity: Bytes,
    /// Its threads and checksums.
    pub config: ObjectStoreConfig,
}

impl ObjectTier {
    /// Returns a tier with the default options.
    pub fn new(store: Arc<dyn ObjectStore>, capacity: Bytes) -> ObjectTier {
        ObjectTier { store, capacity, config: ObjectStoreConfig::default() }
    }
}

impl std::fmt::Debug for ObjectTier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "objects up to {}", self.capacity)
    }
}

/// Why tiers could not be opened. What was opened by then is closed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TiersError {
    /// The configuration is invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// There is no GPU to open.
    #[error("the configuration has no GPU: add a [[gpu]] with index and capacity")]
    NoGpu,
    /// The allocator's device is not among the configured GPUs.
    #[error(
        "the configuration has no GPU {ordinal}, the device of the allocator: add a [[gpu]] with \
         index = {ordinal}, or none at all to use the allocator's limit"
    )]
    OtherGpu {
        /// Ordinal of the device.
        ordinal: u32,
    },
    /// There is no host memory for copies.
    #[error("the configuration has no host memory: add a [[host]] with index and capacity")]
    NoHost,
    /// There are a disk and a store of the program.
    #[error(
        "the configuration has a disk and the options a store of the program: use one, without the \
         [[disk]] or without TiersOptions::objects"
    )]
    TwoDisks,
    /// A device could not be opened.
    #[error(transparent)]
    Device(#[from] OpenError),
    /// The allocator could not be created.
    #[error(transparent)]
    Allocator(#[from] CreateError),
    /// The spaces are refused.
    #[error(transparent)]
    Spaces(#[from] LedgerError),
    /// The host memory could not be pinned.
    #[error(transparent)]
    Host(#[from] HostPoolError),
    /// A disk's directory could not be opened.
    #[error(transparent)]
    Disk(#[from] DiskTierError),
    /// The mover was refused.
    #[error(transparent)]
    Mover(#[from] MoveError),
    /// A card's free memory cannot hold contents of another one.
    #[error("[[peer]] with index {index}: {error}")]
    Peer {
        /// Index of the card.
        index: u32,
        /// Reason.
        error: PeerStoreError,
    },
    /// The manager was refused.
    #[error(transparent)]
    Manager(#[from] SpillError),
    /// A driver call failed.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

impl Tiers {
    /// Opens the first GPU of a configuration in TOML, as [`open`](Tiers::open) does.
    ///
    /// # Errors
    /// As [`open`](Tiers::open), or the text is invalid.
    pub fn from_toml(text: &str) -> Result<Tiers, TiersError> {
        Tiers::open(&TiersConfig::from_toml(text)?)
    }

    /// Opens the first GPU of a configuration, with the host memory nearest to it and the first disk.
    /// A simulated card stores what is written to it.
    ///
    /// # Errors
    /// The configuration is invalid or names no GPU or no host memory, or a part cannot be opened.
    pub fn open(config: &TiersConfig) -> Result<Tiers, TiersError> {
        TiersOptions::default().open(config)
    }

    /// Opens every GPU of a configuration, in its order. The cards share reservations, host memory and
    /// disks; of several disks each card uses one, in turn.
    ///
    /// # Errors
    /// As [`open`](Tiers::open).
    pub fn open_all(config: &TiersConfig) -> Result<Vec<Tiers>, TiersError> {
        TiersOptions::default().open_all(config)
    }

    /// Returns tiers below an allocator that exists. Its GPU is the configured one with the ordinal of
    /// its device; without GPUs it is the allocator's limit, or else the card's memory, all of which
    /// buffers and reservations may use.
    ///
    /// # Errors
    /// As [`open`](Tiers::open), or the GPUs of the configuration are others.
    pub fn on(allocator: Arc<Allocator>, config: &TiersConfig) -> Result<Tiers, TiersError> {
        TiersOptions::default().on(allocator, config)
    }

    /// Returns the manager of the deferrable buffers.
    pub fn manager(&self) -> &SpillManager {
        &self.manager
    }

    /// Returns the allocator of the card's memory.
    pub fn allocator(&self) -> &Arc<Allocator> {
        &self.parts.allocator
    }

    /// Returns the device.
    pub fn device(&self) -> &Arc<dyn Driver> {
        self.parts.allocator.driver()
    }

    /// Returns the manager of the reservations in all opened spaces.
    pub fn reservations(&self) -> &ReservationManager {
        &self.parts.reservations
    }

    /// Returns the space of a tier that this card uses; `None` for the disk if none is configured.
    pub fn space(&self, tier: Tier) -> Option<MemorySpace> {
        match tier {
            Tier::Gpu => Some(self.parts.gpu.clone()),
            Tier::Host => Some(self.host_pool().space().clone()),
            Tier::Disk => self.disk().map(|disk| disk.space().clone()),
        }
    }

    /// Returns the space of the card, which pays for its buffers.
    pub fn gpu_space(&self) -> &MemorySpace {
        &self.parts.gpu
    }

    /// Returns the pinned host memory.
    pub fn host_pool(&self) -> &HostPool {
        self.parts.mover.pool()
    }

    /// Returns the disk store; `None` if the configuration has no disk.
    pub fn disk(&self) -> Option<&Arc<DiskStore>> {
        self.parts.disk.as_ref()
    }

    /// Returns the mover between the tiers.
    pub fn mover(&self) -> &Mover {
        &self.parts.mover
    }

    /// Returns a stream of these tiers, for programs that need one only.
    pub fn stream(&self) -> StreamId {
        self.parts.stream
    }

    /// Returns the driver's stream behind [`stream`](Tiers::stream), to queue work on.
    pub fn queue(&self) -> Stream {
        self.parts.queue
    }

    /// Returns an empty buffer, as [`SpillManager::buffer`] does.
    ///
    /// # Errors
    /// As [`SpillManager::buffer`].
    pub fn buffer(&self, len: Bytes) -> Result<DeferrableBuffer, SpillError> {
        self.manager.buffer(len)
    }

    /// Makes a buffer of memory that is on the device already, as [`SpillManager::adopt`] does.
    ///
    /// # Errors
    /// As [`SpillManager::adopt`].
    pub fn adopt(
        &self,
        memory: AddrRange,
        owner: Box<dyn Send>,
        stream: StreamId,
    ) -> Result<DeferrableBuffer, Box<AdoptFailed>> {
        self.manager.adopt(memory, owner, stream)
    }

    /// Leases all of the buffers, as [`SpillManager::lease`] does.
    ///
    /// # Errors
    /// As [`SpillManager::lease`].
    pub fn lease(
        &self,
        buffers: &[(&DeferrableBuffer, Access)],
        stream: StreamId,
    ) -> Result<LeaseSet, SpillError> {
        self.manager.lease(buffers, stream)
    }
}

impl std::fmt::Debug for Tiers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} on {}", self.parts.gpu.id(), self.device().info().id)
    }
}

impl TiersOptions {
    /// As [`Tiers::open`].
    ///
    /// # Errors
    /// As [`Tiers::open`].
    pub fn open(&self, config: &TiersConfig) -> Result<Tiers, TiersError> {
        config.check()?;
        let first = config.gpus.first().ok_or(TiersError::NoGpu)?;
        let mut tiers = self.open_gpus(config, std::slice::from_ref(first))?;
        Ok(tiers.remove(0))
    }

    /// As [`Tiers::open_all`].
    ///
    /// # Errors
    /// As [`Tiers::open_all`].
    pub fn open_all(&self, config: &TiersConfig) -> Result<Vec<Tiers>, TiersError> {
        config.check()?;
        match config.gpus.is_empty() {
            true => Err(TiersError::NoGpu),
            false => self.open_gpus(config, &config.gpus),
        }
    }

    /// As [`Tiers::on`].
    ///
    /// # Errors
    /// As [`Tiers::on`].
    pub fn on(&self, allocator: Arc<Allocator>, config: &TiersConfig) -> Result<Tiers, TiersError> {
        let mut tiers = self.on_all([allocator], config)?;
        Ok(tiers.remove(0))
    }

    /// Returns tiers for each of the allocators, which share reservations, host memory and disks.
    ///
    /// # Errors
    /// As [`Tiers::on`].
    pub fn on_all(
        &self,
        allocators: impl IntoIterator<Item = Arc<Allocator>>,
        config: &TiersConfig,
    ) -> Result<Vec<Tiers>, TiersError> {
        let gpu = |allocator: Arc<Allocator>| {
            let info = allocator.driver().info();
            let (ordinal, memory) = (info.ordinal, info.limits.memory);
            let gpu = match config.gpus.iter().find(|gpu| gpu.index == ordinal) {
                Some(gpu) => gpu.clone(),
                None if config.gpus.is_empty() => {
                    let capacity = allocator.limit().unwrap_or(memory).min(memory);
                    GpuSpaceConfig::new(ordinal, capacity, ALL)
                }
                None => return Err(TiersError::OtherGpu { ordinal }),
            };
            Ok(Card { gpu, allocator })
        };
        let cards = allocators.into_iter().map(gpu).collect::<Result<Vec<_>, _>>()?;
        self.assemble(config, cards)
    }

    fn open_gpus(
        &self,
        config: &TiersConfig,
        gpus: &[GpuSpaceConfig],
    ) -> Result<Vec<Tiers>, TiersError> {
        let ordinals: Vec<u32> = gpus.iter().map(|gpu| gpu.index).collect();
        let machine = config.device.as_deref().unwrap_or("auto");
        let devices = open_ordinals_mapped(machine, &ordinals)?;
        let card = |(gpu, driver): (&GpuSpaceConfig, Arc<dyn Driver>)| {
            let memory = driver.info().limits.memory;
            let (index, asked) = (gpu.index, gpu.capacity);
            if asked > memory {
                return Err(ConfigError::GpuTooSmall { index, asked, memory }.into());
            }
            let limit = self.allocator.limit.map_or(asked, |limit| limit.min(asked));
            let settings = Config { limit: Some(limit), ..self.allocator.clone() };
            let allocator = Arc::new(Allocator::new(driver, settings)?);
            Ok(Card { gpu: gpu.clone(), allocator })
        };
        let cards = gpus.iter().zip(devices).map(card).collect::<Result<_, TiersError>>()?;
        self.assemble(config, cards)
    }

    /// Opens what the cards share, then the tiers of each.
    fn assemble(&self, config: &TiersConfig, cards: Vec<Card>) -> Result<Vec<Tiers>, TiersError> {
        let mut gpus: Vec<GpuSpaceConfig> = Vec::new();
        for card in &cards {
            if !gpus.contains(&card.gpu) {
                gpus.push(card.gpu.clone());
            }
        }
        let opened = TiersConfig { gpus, ..config.clone() };
        opened.check()?;
        if opened.hosts.is_empty() {
            return Err(TiersError::NoHost);
        }
        if self.objects.is_some() && !opened.disks.is_empty() {
            return Err(TiersError::TwoDisks);
        }
        let of_objects = self
            .objects
            .as_ref()
            .map(|objects| (SpaceId::disk(0), SpaceConfig::disk(objects.capacity)));
        let reservations = ReservationManager::new(opened.spaces().into_iter().chain(of_objects))?;
        let space = |id: SpaceId| reservations.space(id).expect("it is in the configuration");
        let mut devices: Vec<Arc<dyn Driver>> = Vec::new();
        for card in &cards {
            let device = card.allocator.driver();
            if !devices.iter().any(|other| Arc::ptr_eq(other, device)) {
                devices.push(Arc::clone(device));
            }
        }
        let objects = self.objects.as_ref().map(|objects| {
            let space = space(SpaceId::disk(0));
            DiskStore::with_objects(Arc::clone(&objects.store), objects.config, &space)
        });
        let objects = objects.transpose()?.map(Arc::new);
        let others = Others::new(&opened, &reservations, &cards, &self.others)?;
        let mut pools: BTreeMap<usize, HostPool> = BTreeMap::new();
        let mut disks: BTreeMap<usize, Arc<DiskStore>> = BTreeMap::new();
        let mut all = Vec::new();
        for (nth, card) in cards.into_iter().enumerate() {
            let Card { gpu, allocator } = card;
            let driver = allocator.driver();
            let pool = match pools.entry(nearest(&opened.hosts, &**driver)) {
                Entry::Occupied(pool) => pool.into_mut(),
                Entry::Vacant(none) => {
                    let host = &opened.hosts[*none.key()];
                    let space = space(host.id());
                    none.insert(HostPool::new(&space, host.pool(), devices.iter().cloned())?)
                }
            };
            let mover = Mover::new(Arc::clone(driver), pool, self.mover.clone())?;
            let disk = match nth.checked_rem(opened.disks.len()).map(|turn| disks.entry(turn)) {
                None => objects.clone(),
                Some(Entry::Occupied(disk)) => Some(Arc::clone(disk.get())),
                Some(Entry::Vacant(none)) => {
                    let disk = &opened.disks[*none.key()];
                    let store = DiskStore::open(&disk.directory, self.disk, &space(disk.id()))?;
                    Some(Arc::clone(none.insert(Arc::new(store))))
                }
            };
            let peers = others.peers_of(driver)?;
            let stream = allocator.create_stream()?;
            let queue = allocator.stream(stream).expect("it was made just now");
            let (gpu, reservations) = (space(gpu.id()), reservations.clone());
            let _peers = others.alone.clone();
            let parts = Parts { allocator, reservations, _peers, gpu, mover, disk, stream, queue };
            all.push(self.manage(Arc::new(parts), peers, opened.promote_after)?);
        }
        Ok(all)
    }

    fn manage(
        &self,
        parts: Arc<Parts>,
        peers: Vec<PeerPart>,
        promote_after: Option<u32>,
    ) -> Result<Tiers, TiersError> {
        let spill_parts = SpillParts {
            allocator: Arc::clone(&parts.allocator),
            mover: parts.mover.clone(),
            disk: parts.disk.clone(),
            budget: Some(parts.gpu.clone()),
            peers,
        };
        let kept = Arc::clone(&parts);
        let promote_after = promote_after.unwrap_or(self.spill.promote_after);
        let spill = SpillConfig { promote_after, ..self.spill.clone() };
        let manager = SpillManager::keeping(spill_parts, spill, Some(kept))?;
        Ok(Tiers { manager, parts })
    }
}

/// A card to open tiers for.
struct Card {
    gpu: GpuSpaceConfig,
    allocator: Arc<Allocator>,
}

/// Cards whose free memory holds contents of others.
struct Others<'a> {
    peers: &'a [PeerConfig],
    opened: &'a ReservationManager,
    /// Spaces of those that are not opened.
    alone: Option<ReservationManager>,
    allocators: Vec<Arc<Allocator>>,
}

impl<'a> Others<'a> {
    fn new(
        config: &'a TiersConfig,
        opened: &'a ReservationManager,
        cards: &[Card],
        others: &[Arc<Allocator>],
    ) -> Result<Others<'a>, TiersError> {
        let peers = &config.peers;
        let space = |peer: &PeerConfig| {
            let capacity = Bytes::new(peer.limit.count().saturating_mul(cards.len() as u64));
            let space = SpaceConfig { limit: Level::Fraction(1.0), ..SpaceConfig::gpu(capacity) };
            (SpaceId::gpu(peer.index), space)
        };
        let is_alone = |peer: &&PeerConfig| opened.space(SpaceId::gpu(peer.index)).is_none();
        let alone: Vec<_> = peers.iter().filter(is_alone).map(space).collect();
        let alone = (!alone.is_empty()).then(|| ReservationManager::new(alone)).transpose()?;
        let of_cards = cards.iter().map(|card| &card.allocator);
        let allocators = of_cards.chain(others).map(Arc::clone).collect();
        Ok(Others { peers, opened, alone, allocators })
    }

    /// Returns what the other cards hold of one.
    fn peers_of(&self, driver: &Arc<dyn Driver>) -> Result<Vec<PeerPart>, TiersError> {
        let own = driver.info().ordinal;
        let part = |peer: &PeerConfig| {
            let index = peer.index;
            let id = SpaceId::gpu(index);
            let space = self.opened.space(id).or_else(|| self.alone.as_ref()?.space(id));
            let space = space.expect("each card has a space");
            let store = PeerStore::new(driver, index, &space, peer.store());
            let store = store.map_err(|error| TiersError::Peer { index, error })?;
            let is_its = |known: &&Arc<Allocator>| known.driver().info().ordinal == index;
            Ok(PeerPart { store, allocator: self.allocators.iter().find(is_its).cloned() })
        };
        self.peers.iter().filter(|peer| peer.index != own).map(part).collect()
    }
}

/// Returns the index of the host space for a device: that of its NUMA node, or with its ordinal, or the
/// first.
fn nearest(hosts: &[HostSpaceConfig], device: &dyn Driver) -> usize {
    let info = device.info();
    let near = |host: &HostSpaceConfig| host.node.is_some() && host.node == info.host_numa;
    let by_node = hosts.iter().position(near);
    by_node.or_else(|| hosts.iter().position(|host| host.index == info.ordinal)).unwrap_or(0)
}
