//! Simulated machines of several cards, whose managers keep contents on each other's free memory.

use std::collections::BTreeMap;

use vramp_defer::planner::{Copies, PeerId, PieceState};
use vramp_defer::{PeerPart, SpillStats};
use vramp_tiers::PeerStore;
use vramp_tiers::peer::PeerStoreConfig;

use super::*;

/// Parts of a machine.
pub struct Machine {
    pub cards: Vec<Card>,
    pub spaces: ReservationManager,
    pub pool: HostPool,
}

pub struct Card {
    pub sim: Arc<Simulator>,
    pub allocator: Arc<Allocator>,
    pub manager: SpillManager,
    /// By the ordinal of the other card.
    pub stores: BTreeMap<u32, PeerStore>,
    pub stream: StreamId,
    pub queue: Stream,
}

/// What a machine is made of.
pub struct Machines {
    pub cards: usize,
    /// Memory of a card.
    pub memory: Bytes,
    /// Limit of each allocator.
    pub limit: Option<Bytes>,
    pub host: Bytes,
    /// Cards that may hold copies of others.
    pub holds: fn(u32) -> bool,
    pub store: PeerStoreConfig,
    /// Charge the cards' spaces for buffers.
    pub budget: bool,
    pub config: SpillConfig,
}

impl Default for Machines {
    /// Returns two cards with a limit of 64 MiB for their allocators; the second holds up to 512 MiB of
    /// the first.
    fn default() -> Machines {
        Machines {
            cards: 2,
            memory: Bytes::gib(1),
            limit: Some(MIB(64)),
            host: MIB(512),
            holds: |ordinal| ordinal == 1,
            store: PeerStoreConfig {
                limit: MIB(512),
                reserve: Bytes::ZERO,
                chunk: PIECE,
                ..PeerStoreConfig::default()
            },
            budget: false,
            config: Plan::default().config,
        }
    }
}

pub fn peer(ordinal: u32) -> PeerId {
    PeerId::new(ordinal).unwrap()
}

pub fn on_card(ordinal: u32) -> Copies {
    Copies { peer: Some(peer(ordinal)), ..Copies::NONE }
}

pub const HOST: Copies = Copies { peer: None, host: true, disk: false };

impl Machines {
    pub fn build(self) -> Machine {
        let sims = simulator().memory(self.memory).build_machine(self.cards);
        let sims: Vec<Arc<Simulator>> = sims.into_iter().map(Arc::new).collect();
        let drivers: Vec<Arc<dyn Driver>> = sims.iter().map(|sim| sim.clone() as _).collect();
        let host = SpaceId::host(0);
        let gpus = (0..self.cards).map(|index| SpaceId::gpu(index as u32));
        let spaces = gpus.map(|gpu| (gpu, SpaceConfig::gpu(self.memory)));
        let spaces =
            ReservationManager::new(spaces.chain([(host, SpaceConfig::host(self.host))])).unwrap();
        let config =
            HostPoolConfig { blocks_per_pool: 16, spare_blocks: 0, ..HostPoolConfig::default() };
        let initial_pools = (self.host.count() / MIB(16).count()).min(4) as u32;
        let config = HostPoolConfig { initial_pools, ..config };
        let pool = HostPool::new(&spaces.space(host).unwrap(), config, drivers.clone()).unwrap();
        let allocators: Vec<Arc<Allocator>> = drivers
            .iter()
            .map(|driver| {
                let config = Config { limit: self.limit, ..Config::default() };
                Arc::new(Allocator::new(Arc::clone(driver), config).unwrap())
            })
            .collect();
        let card = |index: usize| {
            let (driver, allocator) = (&drivers[index], &allocators[index]);
            let others = driver.info().peers.iter().filter(|other| (self.holds)(**other));
            let stores: BTreeMap<u32, PeerStore> = others
                .map(|&other| {
                    let space = spaces.space(SpaceId::gpu(other)).unwrap();
                    let config = self.store.clone();
                    (other, PeerStore::new(driver, other, &space, config).unwrap())
                })
                .collect();
            let peers = stores.iter().map(|(&other, store)| PeerPart {
                store: store.clone(),
                allocator: Some(Arc::clone(&allocators[other as usize])),
            });
            let config = MoverConfig { step: MIB(4), ..MoverConfig::default() };
            let parts = SpillParts {
                allocator: Arc::clone(allocator),
                mover: Mover::new(Arc::clone(driver), &pool, config).unwrap(),
                disk: None,
                budget: self.budget.then(|| spaces.space(SpaceId::gpu(index as u32)).unwrap()),
                peers: peers.collect(),
            };
            let manager = SpillManager::new(parts, self.config.clone()).unwrap();
            let stream = allocator.create_stream().unwrap();
            let queue = allocator.stream(stream).unwrap();
            let (sim, allocator) = (sims[index].clone(), Arc::clone(allocator));
            Card { sim, allocator, manager, stores, stream, queue }
        };
        let cards = (0..self.cards).map(card).collect();
        Machine { cards, spaces, pool }
    }
}

impl Card {
    pub fn filled(&self, len: Bytes, byte: u8) -> DeferrableBuffer {
        let buffer = self.manager.buffer(len).unwrap();
        self.fill(&buffer, byte);
        buffer
    }

    pub fn fill(&self, buffer: &DeferrableBuffer, byte: u8) {
        let lease = buffer.lease(Access::Exclusive, self.stream).unwrap();
        self.sim.fill(self.queue, lease.address(0), byte).unwrap();
    }

    pub fn wait(&self) {
        self.sim.synchronize_stream(self.queue).unwrap();
    }

    /// Checks the bytes at the ends of each page, under a lease.
    pub fn expect(&self, buffer: &DeferrableBuffer, byte: u8) {
        let lease = buffer.lease(Access::Shared, self.stream).unwrap();
        self.wait();
        let range = lease.address(0);
        for page in (0..range.len.count()).step_by(2 << 20) {
            let last = (page + (2 << 20)).min(range.len.count()) - 1;
            for at in [page, last] {
                let one = AddrRange::new(range.start + Bytes::new(at), Bytes::new(1));
                assert_eq!(self.sim.peek(one).unwrap(), [byte], "byte {at} of {buffer:?}");
            }
        }
    }

    pub fn stats(&self) -> SpillStats {
        self.manager.stats()
    }

    /// Returns a buffer filled with `byte` that was spilled.
    pub fn spilled(&self, len: Bytes, byte: u8) -> DeferrableBuffer {
        let buffer = self.filled(len, byte);
        self.wait();
        assert_eq!(self.manager.spill(len).freed, len);
        buffer
    }
}

/// Returns true if all of a buffer is spilled with exactly these copies.
pub fn lies(buffer: &DeferrableBuffer, copies: Copies) -> bool {
    buffer.states().iter().all(|state| *state == PieceState::Spilled { copies })
}

impl Machine {
    pub fn total(&self, id: SpaceId) -> Bytes {
        self.spaces.space(id).unwrap().total()
    }

    pub fn check(&self) {
        for card in &self.cards {
            card.manager.audit().unwrap();
            card.allocator.audit().unwrap();
            assert!(card.sim.hazards().is_empty(), "{:?}", card.sim.hazards());
            assert!(card.sim.device_loss().is_none(), "{:?}", card.sim.device_loss());
        }
        self.pool.audit().unwrap();
    }

    /// Checks that nothing is left of any buffer, here and on other cards.
    pub fn expect_nothing(&self) {
        for card in &self.cards {
            card.wait();
            let census = card.manager.census();
            assert_eq!((census.buffers, census.occupied, census.moves), (0, Bytes::ZERO, 0));
            for store in card.stores.values() {
                assert_eq!(store.stats().used, Bytes::ZERO, "{store:?}");
                assert_eq!(store.taken(), Bytes::ZERO, "{store:?}");
            }
        }
        (0..self.cards.len() as u32)
            .for_each(|index| assert_eq!(self.total(SpaceId::gpu(index)), Bytes::ZERO));
        self.check();
    }
}
