//! Contents on the free memory of other cards: where they go, how fast, and what fails.

use vramp_defer::PeerPart;
use vramp_tiers::PeerStore;
use vramp_tiers::peer::PeerStoreConfig;

use super::machine::{HOST, Machines, lies, on_card};
use super::*;

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
        let allocator = Allocator::new(Arc::clone(&drivers[0]), Config::default());
        let allocator = Arc::new(allocator.unwrap());
        let config = PeerStoreConfig { limit: Bytes::gib(8), ahead, ..PeerStoreConfig::default() };
        let space = spaces.space(gpu).unwrap();
        let store = PeerStore::new(&drivers[0], 1, &space, config).unwrap();
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
    assert!(other.sim.memory_info().unwrap_err().is_device_lost());
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
        for n in vramp_testing::sampled(8, 3) {
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
        for n in vramp_testing::sampled(4, 3) {
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
