//! Machines of several cards, whose managers keep contents on each other's free memory.

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

const HOST: Copies = Copies { peer: None, host: true, disk: false };

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
                let config = Config { limit: self.limit, ..Config::preset(Preset::Vramp) };
                Arc::new(Allocator::new(Arc::clone(driver), config).unwrap())
            })
            .collect();
        let card = |index: usize| {
            let (driver, allocator) = (&drivers[index], &allocators[index]);
            let others = driver.info().peers.iter().filter(|other| (self.holds)(**other));
            let stores: BTreeMap<u32, PeerStore> = others
                .map(|&other| {
                    let space = spaces.space(SpaceId::gpu(other)).unwrap();
                    let (peer, config) = (&drivers[other as usize], self.store.clone());
                    (other, PeerStore::new(driver, peer, &space, config).unwrap())
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
    fn spilled(&self, len: Bytes, byte: u8) -> DeferrableBuffer {
        let buffer = self.filled(len, byte);
        self.wait();
        assert_eq!(self.manager.spill(len).freed, len);
        buffer
    }
}

/// Returns true if all of a buffer is spilled with exactly these copies.
fn lies(buffer: &DeferrableBuffer, copies: Copies) -> bool {
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

#[test]
fn contents_go_to_the_other_card_and_are_restored_from_there() {
    let machine = Machines::default().build();
    let card = &machine.cards[0];
    let buffers: Vec<_> = (1..=4).map(|byte| card.filled(MIB(24), byte)).collect();
    assert!(lies(&buffers[0], on_card(1)), "{:?}", buffers[0].states());
    assert_eq!(card.stats().to_host_bytes, 0);
    let census = card.manager.census();
    assert_eq!(census.spilled, census.spilled_peer);
    assert!(machine.total(SpaceId::gpu(1)) >= census.spilled, "it is charged to the other card");
    for (buffer, byte) in buffers.iter().zip(1..) {
        card.expect(buffer, byte);
    }
    assert!(card.stats().from_peer_bytes >= MIB(72).count());
    // A restored buffer keeps its copy: it leaves again without one.
    let before = card.stats().to_peer_bytes;
    card.expect(&buffers[0], 1);
    assert_eq!(card.manager.spill(MIB(64)).freed, MIB(64));
    assert_eq!(card.stats().to_peer_bytes, before);
    card.fill(&buffers[0], 9);
    card.expect(&buffers[0], 9);
    machine.check();
    drop(buffers);
    machine.expect_nothing();
}

#[test]
fn nothing_is_taken_of_other_cards_unless_a_limit_says_so() {
    let store = PeerStoreConfig { limit: Bytes::ZERO, ..Machines::default().store };
    assert_eq!(PeerStoreConfig::default().limit, Bytes::ZERO);
    let machine = Machines { store, ..Machines::default() }.build();
    let card = &machine.cards[0];
    let buffer = card.spilled(MIB(24), 1);
    assert!(lies(&buffer, HOST));
    assert_eq!(card.stores[&1].stats().created, 0);
    card.expect(&buffer, 1);
    machine.check();
}

#[test]
fn what_exceeds_the_limit_goes_to_the_host() {
    let store = PeerStoreConfig { limit: MIB(16), ..Machines::default().store };
    let machine = Machines { store, ..Machines::default() }.build();
    let card = &machine.cards[0];
    let buffer = card.spilled(MIB(48), 1);
    let census = card.manager.census();
    assert_eq!((census.spilled_peer, census.spilled_host), (MIB(16), MIB(32)));
    card.expect(&buffer, 1);
    drop(buffer);
    machine.expect_nothing();
}

/// Small buffers share chunks of the other card.
#[test]
fn groups_of_small_buffers_are_packed_into_chunks() {
    let machine = Machines::default().build();
    let card = &machine.cards[0];
    let group = card.manager.group();
    let buffers: Vec<_> = (1..=100)
        .map(|byte| {
            let buffer = group.buffer(Bytes::kib(64)).unwrap();
            card.fill(&buffer, byte);
            buffer
        })
        .collect();
    card.wait();
    assert_eq!(card.manager.spill(MIB(8)).freed, MIB(8));
    let stats = card.stores[&1].stats();
    assert_eq!((stats.used, stats.taken), (Bytes::kib(6400), MIB(8)));
    for (buffer, byte) in buffers.iter().zip(1..) {
        card.expect(buffer, byte);
    }
    drop((buffers, group));
    machine.expect_nothing();
}

/// On the simulated H200: 390 GB/s between cards. The chunks are made meanwhile.
#[test]
fn spills_and_restores_reach_nine_tenths_of_the_link() {
    for ahead in [Bytes::ZERO, Bytes::gib(1)] {
        let sims = Simulator::builder().build_machine(2);
        let sims: Vec<Arc<Simulator>> = sims.into_iter().map(Arc::new).collect();
        let drivers: Vec<Arc<dyn Driver>> = sims.iter().map(|sim| sim.clone() as _).collect();
        let (gpu, host) = (SpaceId::gpu(1), SpaceId::host(0));
        let spaces = ReservationManager::new([
            (gpu, SpaceConfig::gpu(Bytes::gib(64))),
            (host, SpaceConfig::host(MIB(256))),
        ])
        .unwrap();
        let config = HostPoolConfig { spare_blocks: 0, ..HostPoolConfig::default() };
        let pool =
            HostPool::new(&spaces.space(host).unwrap(), config, [Arc::clone(&drivers[0])]).unwrap();
        let allocator = Allocator::new(Arc::clone(&drivers[0]), Config::preset(Preset::Vramp));
        let allocator = Arc::new(allocator.unwrap());
        let config = PeerStoreConfig { limit: Bytes::gib(8), ahead, ..PeerStoreConfig::default() };
        let space = spaces.space(gpu).unwrap();
        let store = PeerStore::new(&drivers[0], &drivers[1], &space, config).unwrap();
        let parts = SpillParts {
            allocator: Arc::clone(&allocator),
            mover: Mover::new(Arc::clone(&drivers[0]), &pool, MoverConfig::default()).unwrap(),
            disk: None,
            budget: None,
            peers: vec![PeerPart { store: store.clone(), allocator: None }],
        };
        let manager = SpillManager::new(parts, SpillConfig::default()).unwrap();
        let stream = allocator.create_stream().unwrap();
        let queue = allocator.stream(stream).unwrap();
        let len = Bytes::gib(1);
        let buffer = manager.buffer(len).unwrap();
        let lease = buffer.lease(Access::Exclusive, stream).unwrap();
        let from = lease.address(0).start;
        sims[0].fill(queue, lease.address(0), 1).unwrap();
        drop(lease);
        sims[0].synchronize_stream(queue).unwrap();
        // A plain copy of the same length over the same link.
        let chunks: Vec<_> = (0..32).map(|_| store.allocate(MIB(32)).unwrap()).collect();
        let begun = sims[0].now_ns();
        for (chunk, at) in chunks.iter().zip(0..) {
            let (from, to) = (from + MIB(32) * at, chunk.range().start);
            sims[0].copy(queue, vramp_driver::DeviceCopy { from, to, len: MIB(32) }).unwrap();
        }
        sims[0].synchronize_stream(queue).unwrap();
        let plain = (sims[0].now_ns() - begun) as f64;
        drop(chunks);
        let begun = sims[0].now_ns();
        assert_eq!(manager.spill(len).freed, len);
        let spill = (sims[0].now_ns() - begun) as f64;
        assert_eq!(manager.stats().to_peer_bytes, len.count());
        let begun = sims[0].now_ns();
        drop(buffer.lease(Access::Shared, stream).unwrap());
        sims[0].synchronize_stream(queue).unwrap();
        let restore = (sims[0].now_ns() - begun) as f64;
        assert_eq!(manager.stats().from_peer_bytes, len.count());
        println!("ahead {ahead}: spill {}, restore {} of plain", plain / spill, plain / restore);
        assert!(plain / spill >= 0.9, "{} of a plain copy's rate", plain / spill);
        assert!(plain / restore >= 0.9, "{} of a plain copy's rate", plain / restore);
    }
}

/// A card of 256 MiB whose free memory the other one uses up.
fn crowded() -> Machines {
    let store = PeerStoreConfig { limit: MIB(1024), ..Machines::default().store };
    Machines { memory: MIB(1024), limit: None, store, ..Machines::default() }
}

#[test]
fn copies_move_on_when_the_card_needs_its_memory_for_itself() {
    let machine = crowded().build();
    let [card, other] = [&machine.cards[0], &machine.cards[1]];
    let buffers: Vec<_> = (1..=6).map(|byte| card.spilled(MIB(32), byte)).collect();
    assert!(buffers.iter().all(|buffer| lies(buffer, on_card(1))));
    let free = other.sim.memory_info().unwrap().free;
    let len = (free + MIB(48)).round_down(MIB(2));
    let block = other.allocator.malloc(len, other.stream).unwrap();
    assert!(lies(&buffers[0], HOST) && lies(&buffers[5], on_card(1)), "the oldest first");
    let stats = card.stats();
    assert_eq!(stats.to_host_bytes, 0);
    assert!((MIB(48)..=MIB(80)).contains(&Bytes::new(stats.moved_on_bytes)), "{stats:?}");
    // New contents go to the host at once, until the backoff is over.
    let late = card.spilled(MIB(16), 7);
    assert!(lies(&late, HOST));
    other.allocator.free(block, other.stream).unwrap();
    other.wait();
    other.allocator.empty_cache().unwrap();
    card.sim.advance(2_000_000_000);
    let later = card.spilled(MIB(16), 8);
    assert!(lies(&later, on_card(1)));
    for (buffer, byte) in buffers.iter().chain([&late, &later]).zip(1..) {
        card.expect(buffer, byte);
    }
    machine.check();
    drop((buffers, late, later));
    machine.expect_nothing();
}

#[test]
fn a_card_without_room_on_the_host_keeps_the_copies_and_the_request_fails() {
    let machine = Machines { host: MIB(16), ..crowded() }.build();
    let [card, other] = [&machine.cards[0], &machine.cards[1]];
    let buffers: Vec<_> = (1..=4).map(|byte| card.spilled(MIB(32), byte)).collect();
    let free = other.sim.memory_info().unwrap().free;
    let len = (free + MIB(64)).round_down(MIB(2));
    assert!(other.allocator.malloc(len, other.stream).is_err());
    for (buffer, byte) in buffers.iter().zip(1..) {
        card.expect(buffer, byte);
    }
    machine.check();
}

#[test]
fn a_reservation_of_the_other_cards_space_makes_copies_move_on() {
    let machine = Machines { budget: true, ..Machines::default() }.build();
    let card = &machine.cards[0];
    let buffers: Vec<_> = (1..=4).map(|byte| card.spilled(MIB(32), byte)).collect();
    let space = machine.spaces.space(SpaceId::gpu(1)).unwrap();
    assert_eq!(space.total(), MIB(128));
    let wanted = space.limit() - MIB(64);
    let reservation = space.request(wanted).deadline(LONG).wait().unwrap();
    assert!(space.total() <= space.limit());
    assert!(lies(&buffers[0], HOST) && lies(&buffers[1], HOST) && lies(&buffers[3], on_card(1)));
    drop(reservation);
    for (buffer, byte) in buffers.iter().zip(1..) {
        card.expect(buffer, byte);
    }
    drop(buffers);
    machine.expect_nothing();
}

#[test]
fn a_lowered_limit_moves_what_exceeds_it() {
    let machine = Machines::default().build();
    let card = &machine.cards[0];
    let buffers: Vec<_> = (1..=3).map(|byte| card.spilled(MIB(32), byte)).collect();
    assert_eq!(card.manager.set_peer_limit(1, MIB(32)), Bytes::ZERO);
    assert_eq!(card.stores[&1].taken(), MIB(32));
    assert!(lies(&buffers[0], HOST) && lies(&buffers[2], on_card(1)));
    assert_eq!(card.manager.relieve_peer(1, MIB(8)), MIB(8));
    assert_eq!(card.manager.relieve_peer(5, MIB(8)), Bytes::ZERO, "there is no such card");
    for (buffer, byte) in buffers.iter().zip(1..) {
        card.expect(buffer, byte);
    }
    machine.check();
}

#[test]
fn a_card_that_refuses_memory_or_fails_costs_no_more_than_the_host() {
    for (call, code) in [
        (vramp_driver::Call::Create, 2),
        (vramp_driver::Call::Create, 304),
        (vramp_driver::Call::Map, 304),
        (vramp_driver::Call::SetAccess, 304),
        (vramp_driver::Call::Copy, 304),
    ] {
        let machine = Machines::default().build();
        let card = &machine.cards[0];
        let buffer = card.filled(MIB(48), 1);
        card.wait();
        card.sim.set_faults(FaultPlan::from_nth_of(call, 1).with_code(code));
        assert_eq!(card.manager.spill(MIB(48)).freed, MIB(48), "{call} {code}");
        card.sim.set_faults(FaultPlan::none());
        assert!(lies(&buffer, HOST), "{call} {code}: {:?}", buffer.states());
        assert!(card.stats().peer_refused > 0);
        assert_eq!(card.stats().failures > 0, code != 2, "{call} {code}");
        card.expect(&buffer, 1);
        drop(buffer);
        machine.expect_nothing();
    }
}

#[test]
fn a_lost_card_gets_no_more_contents() {
    let machine = Machines::default().build();
    let [card, other] = [&machine.cards[0], &machine.cards[1]];
    other.sim.set_faults(FaultPlan::from_nth_of(vramp_driver::Call::MemoryInfo, 1).with_code(700));
    let buffer = card.spilled(MIB(48), 1);
    assert!(lies(&buffer, HOST));
    card.expect(&buffer, 1);
    card.manager.audit().unwrap();
}

#[test]
fn a_restore_that_fails_keeps_the_copy() {
    let machine = Machines::default().build();
    let card = &machine.cards[0];
    let buffer = card.spilled(MIB(48), 1);
    for n in 1..=3 {
        let faults = FaultPlan::nth_of(vramp_driver::Call::Copy, n).with_code(304);
        card.sim.set_faults(faults);
        assert!(buffer.lease(Access::Shared, card.stream).is_err());
        card.sim.set_faults(FaultPlan::none());
        machine.check();
        card.wait();
        card.manager.spill(MIB(64));
    }
    card.expect(&buffer, 1);
    drop(buffer);
    machine.expect_nothing();
}

#[test]
fn a_failing_call_leaves_each_buffer_whole_on_some_card_or_the_host() {
    use vramp_driver::Call;
    const CALLS: [Call; 13] = [
        Call::Create,
        Call::Map,
        Call::SetAccess,
        Call::Reserve,
        Call::Unmap,
        Call::Release,
        Call::Copy,
        Call::CopyToHost,
        Call::CopyToDevice,
        Call::Record,
        Call::Wait,
        Call::CreateEvent,
        Call::MemoryInfo,
    ];
    for call in CALLS {
        for n in 1..=8 {
            let machine = Machines::default().build();
            let card = &machine.cards[0];
            let buffers: Vec<_> = (1..=4).map(|byte| card.filled(MIB(24), byte)).collect();
            card.wait();
            println!("{call} {n}");
            card.sim.set_faults(FaultPlan::nth_of(call, n).with_code(304));
            // Addresses that the allocator could not unmap are lost, here only those of the store may be.
            if call != Call::Unmap {
                for buffer in &buffers {
                    // It may fail.
                    let _ = buffer.lease(Access::Shared, card.stream);
                }
            }
            card.manager.relieve_peer(1, MIB(24));
            card.manager.set_peer_limit(1, MIB(16));
            if call == Call::Unmap {
                card.sim.set_faults(FaultPlan::none());
            }
            let block = card.allocator.malloc(MIB(20), card.stream);
            card.sim.set_faults(FaultPlan::none());
            if let Ok(block) = block {
                card.allocator.free(block, card.stream).unwrap();
            }
            machine.check();
            for (buffer, byte) in buffers.iter().zip(1..) {
                card.expect(buffer, byte);
            }
            drop(buffers);
            card.wait();
            let census = card.manager.census();
            assert_eq!((census.buffers, census.occupied), (0, Bytes::ZERO), "{call} {n}");
            assert_eq!(card.stores[&1].stats().used, Bytes::ZERO, "{call} {n}");
            machine.check();
        }
    }
}

#[test]
fn memory_of_other_cards_under_copies_whose_end_is_unknown_is_not_reused() {
    use vramp_driver::Call;
    let waits = FaultPlan::from_nth_of(Call::SynchronizeStream, 1)
        .and(FaultPlan::from_nth_of(Call::SynchronizeEvent, 1));
    for call in [Call::Record, Call::Wait, Call::Copy, Call::CopyToHost] {
        for n in 1..=4 {
            for moves_on in [false, true] {
                let machine = Machines::default().build();
                let card = &machine.cards[0];
                let buffer = card.filled(MIB(32), 1);
                card.wait();
                if moves_on {
                    assert_eq!(card.manager.spill(MIB(32)).freed, MIB(32));
                }
                card.sim.set_faults(FaultPlan::nth_of(call, n).and(waits.clone()).with_code(304));
                match moves_on {
                    true => drop(card.manager.relieve_peer(1, MIB(32))),
                    false => drop(card.manager.spill(MIB(32))),
                }
                card.sim.set_faults(FaultPlan::none());
                let block = card.allocator.malloc(MIB(64), card.stream).unwrap();
                let range = AddrRange::new(block.addr(), block.len());
                card.sim.fill(card.queue, range, 7).unwrap();
                card.allocator.free(block, card.stream).unwrap();
                card.expect(&buffer, 1);
                drop(buffer);
                machine.check();
            }
        }
    }
}

#[test]
fn what_is_to_be_read_in_place_goes_to_the_host() {
    let machine = Machines::default().build();
    let card = &machine.cards[0];
    let buffer = card.filled(MIB(16), 3);
    buffer.readable_while_spilled().unwrap();
    card.wait();
    assert_eq!(card.manager.spill(MIB(16)).freed, MIB(16));
    let lease = buffer.read_in_place(card.stream).unwrap();
    assert!(lease.is_in_place(0));
    drop(lease);
    card.expect(&buffer, 3);
    machine.check();
}

/// The order in which the two cards' parts end.
#[test]
fn cards_are_closed_in_any_order() {
    for order in
        [[0, 1, 2, 3], [1, 0, 2, 3], [2, 3, 1, 0], [3, 2, 0, 1], [1, 3, 0, 2], [0, 2, 1, 3], [3, 0, 2, 1], [2, 1, 3, 0]]
    {
        let holds = |_| true;
        let Machine { cards, spaces, pool } = Machines { holds, ..Machines::default() }.build();
        let sims: Vec<_> = cards.iter().map(|card| Arc::clone(&card.sim)).collect();
        let buffers: Vec<_> = cards.iter().map(|card| card.spilled(MIB(24), 1)).collect();
        let mut parts: Vec<Option<Box<dyn FnOnce()>>> = Vec::new();
        let (mut managers, mut allocators) = (Vec::new(), Vec::new());
        for (card, buffer) in cards.into_iter().zip(buffers) {
            let Card { allocator, manager, stores, .. } = card;
            managers
                .push(Some(Box::new(move || drop((buffer, manager, stores))) as Box<dyn FnOnce()>));
            allocators.push(Some(Box::new(move || {
                // The other parts hold it too. Closing it ends it for them.
                match Arc::try_unwrap(allocator) {
                    Ok(allocator) => allocator.close().unwrap(),
                    Err(shared) => drop(shared),
                }
            }) as Box<dyn FnOnce()>));
        }
        parts.append(&mut managers);
        parts.append(&mut allocators);
        for index in order {
            parts[index].take().expect("each once")();
        }
        drop(parts);
        drop((pool, spaces));
        for sim in sims {
            let live = sim.live();
            assert_eq!((live.handles, live.streams, live.events), (0, 0, 0), "{order:?}");
            assert!(sim.device_loss().is_none() && sim.hazards().is_empty());
        }
    }
}

/// Each card has more than it holds, and spills to all others, whose memory is scarce too.
fn spill_to_each_other(cards: usize) {
    let store =
        PeerStoreConfig { limit: MIB(64), backoff: Duration::ZERO, ..Machines::default().store };
    let config = SpillConfig { patience: LONG, ..Plan::default().config };
    let (holds, host) = (|_| true, MIB(1024));
    let machine = Machines {
        cards,
        memory: MIB(640),
        limit: None,
        host,
        holds,
        store,
        budget: false,
        config: SpillConfig { capacity: Some(MIB(64)), ..config },
    }
    .build();
    std::thread::scope(|scope| {
        for (index, card) in machine.cards.iter().enumerate() {
            for thread in 0..2 {
                scope.spawn(move || {
                    let mut random = fastrand::Rng::with_seed((index * 2 + thread) as u64);
                    let stream = card.allocator.create_stream().unwrap();
                    let queue = card.allocator.stream(stream).unwrap();
                    let buffers: Vec<_> =
                        (0..4).map(|_| card.manager.buffer(MIB(16)).unwrap()).collect();
                    let mut bytes = [None; 4];
                    for round in 0..24_u8 {
                        let at = random.usize(..4);
                        match random.u32(..6) {
                            0 | 1 => {
                                let lease = buffers[at].lease(Access::Exclusive, stream).unwrap();
                                card.sim.fill(queue, lease.address(0), round).unwrap();
                                bytes[at] = Some(round);
                            }
                            2 | 3 => {
                                let lease = buffers[at].lease(Access::Shared, stream).unwrap();
                                card.sim.synchronize_stream(queue).unwrap();
                                let one = AddrRange::new(lease.address(0).start, Bytes::new(1));
                                if let Some(byte) = bytes[at] {
                                    assert_eq!(card.sim.peek(one).unwrap(), [byte]);
                                }
                            }
                            4 => drop(card.manager.spill(MIB(32))),
                            // Takes what the others hold there.
                            _ => {
                                let free = card.sim.memory_info().unwrap().free;
                                let len = (free + MIB(16)).round_down(MIB(2));
                                if let Ok(block) = card.allocator.malloc(len, stream) {
                                    card.allocator.free(block, stream).unwrap();
                                    card.allocator.empty_cache().unwrap();
                                }
                            }
                        }
                    }
                    for (buffer, byte) in buffers.iter().zip(bytes) {
                        let Some(byte) = byte else { continue };
                        let lease = buffer.lease(Access::Shared, stream).unwrap();
                        card.sim.synchronize_stream(queue).unwrap();
                        let one = AddrRange::new(lease.address(0).start, Bytes::new(1));
                        assert_eq!(card.sim.peek(one).unwrap(), [byte]);
                    }
                });
            }
        }
    });
    let stats: Vec<SpillStats> = machine.cards.iter().map(Card::stats).collect();
    assert!(stats.iter().any(|stats| stats.to_peer_bytes > 0), "{stats:?}");
    assert!(stats.iter().any(|stats| stats.moved_on_bytes > 0), "{stats:?}");
    machine.expect_nothing();
}

#[test]
fn two_cards_that_spill_to_each_other_under_pressure_make_progress() {
    spill_to_each_other(2);
}

#[test]
fn four_cards_that_spill_to_each_other_under_pressure_make_progress() {
    spill_to_each_other(4);
}
