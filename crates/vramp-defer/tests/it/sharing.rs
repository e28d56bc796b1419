//! Several threads, managers and cards, and the order in which they end.

use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};

use vramp_alloc::Driver;

use super::*;

#[test]
fn threads_that_lease_one_spilled_buffer_bring_it_back_once() {
    let rig = rig();
    let buffer = rig.filled(MIB(48), 7);
    for round in 1..=5 {
        assert_eq!(rig.manager.spill(MIB(48)).freed, MIB(48));
        let begin = Barrier::new(4);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let stream = rig.allocator.create_stream().unwrap();
                    begin.wait();
                    drop(buffer.lease(Access::Shared, stream).unwrap());
                });
            }
        });
        assert_eq!(rig.manager.stats().from_host_bytes, round * MIB(48).count());
        rig.expect(&buffer, 7);
        rig.check();
    }
}

#[test]
fn threads_that_spill_at_once_copy_nothing_twice() {
    let rig = rig();
    let mut copied = 0;
    for round in 0..5 {
        let buffers: Vec<_> = (1..=4).map(|byte| rig.filled(MIB(16), round + byte)).collect();
        rig.sim.synchronize_stream(rig.queue).unwrap();
        let begin = Barrier::new(4);
        let freed: u64 = std::thread::scope(|scope| {
            let spill = || {
                begin.wait();
                rig.manager.spill(MIB(64)).freed.count()
            };
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(spill)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        copied += MIB(64).count();
        assert_eq!((freed, rig.manager.stats().to_host_bytes), (MIB(64).count(), copied));
        for (buffer, byte) in buffers.iter().zip(1..) {
            rig.expect(buffer, round + byte);
        }
        rig.check();
    }
}

/// Another manager of the same card.
fn second(rig: &Rig) -> SpillManager {
    let driver = Arc::clone(rig.allocator.driver());
    let mover = Mover::new(driver, &rig.pool, MoverConfig { step: MIB(4), ..Default::default() });
    let parts = SpillParts {
        allocator: Arc::clone(&rig.allocator),
        mover: mover.unwrap(),
        disk: None,
        budget: None,
        peers: Vec::new(),
    };
    SpillManager::new(parts, SpillConfig { piece: PIECE, ..SpillConfig::default() }).unwrap()
}

#[test]
fn two_managers_of_one_card_make_room_for_either_and_one_that_is_gone_is_not_asked() {
    let rig = rig();
    let first = rig.filled(MIB(32), 1);
    let other = second(&rig);
    let buffer = other.buffer(MIB(32)).unwrap();
    rig.fill(&buffer, 2);
    assert!(first.is_resident() && buffer.is_resident());
    let block = rig.allocator.malloc(MIB(64), rig.stream).unwrap();
    assert!(!first.is_resident() && !buffer.is_resident(), "each gave what it had, once");
    rig.allocator.free(block, rig.stream).unwrap();
    rig.expect(&first, 1);
    rig.expect(&buffer, 2);
    other.audit().unwrap();
    drop(buffer);
    drop(other);
    let block = rig.allocator.malloc(MIB(64), rig.stream).unwrap();
    rig.allocator.free(block, rig.stream).unwrap();
    rig.expect(&first, 1);
    rig.check();
}

#[test]
fn handles_leases_managers_and_allocators_may_go_in_any_order() {
    for order in [[0, 1, 2, 3], [3, 2, 1, 0], [1, 0, 3, 2], [2, 3, 0, 1], [3, 1, 2, 0]] {
        let rig = rig();
        let buffer = rig.filled(MIB(32), 1);
        let spilled = rig.filled(MIB(32), 2);
        let lease = buffer.lease(Access::Exclusive, rig.stream).unwrap();
        let block = rig.allocator.malloc(MIB(32), rig.stream).unwrap();
        rig.allocator.free(block, rig.stream).unwrap();
        assert!(!spilled.is_resident());
        let Rig { sim, allocator, pool, manager, spaces, store, own, .. } = rig;
        let host = spaces.space(SpaceId::host(0)).unwrap();
        let weak = Arc::downgrade(&allocator);
        let mut parts: [Option<Box<dyn Send>>; 4] = [
            Some(Box::new((buffer, spilled))),
            Some(Box::new(lease)),
            Some(Box::new(manager)),
            Some(Box::new((allocator, pool, store, own))),
        ];
        for part in order {
            drop(parts[part].take());
        }
        assert!(weak.upgrade().is_none(), "in the order {order:?} something keeps the card");
        assert_eq!(host.total(), Bytes::ZERO);
        assert!(sim.hazards().is_empty() && sim.device_loss().is_none());
    }
}

#[test]
fn two_cards_share_a_host_and_a_disk() {
    let sims = [0, 1].map(|_| Arc::new(simulator().build()));
    let drivers = sims.each_ref().map(|sim| -> Arc<dyn Driver> { sim.clone() });
    let spaces = ReservationManager::new([
        (SpaceId::host(0), SpaceConfig::host(MIB(80))),
        (SpaceId::disk(0), SpaceConfig::disk(MIB(512))),
    ])
    .unwrap();
    let [host, disk] = [SpaceId::host(0), SpaceId::disk(0)].map(|id| spaces.space(id).unwrap());
    let config =
        HostPoolConfig { blocks_per_pool: 16, spare_blocks: 0, ..HostPoolConfig::default() };
    let pool = HostPool::new(&host, config, drivers.clone()).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let config = DiskConfig { file_size: MIB(32), ..DiskConfig::default() };
    let store = Arc::new(DiskStore::open(directory.path(), config, &disk).unwrap());
    let cards = drivers.map(|driver| {
        let config = Config { limit: Some(MIB(48)), ..Config::default() };
        let allocator = Arc::new(Allocator::new(Arc::clone(&driver), config).unwrap());
        let mover = MoverConfig { step: MIB(4), ..MoverConfig::default() };
        let parts = SpillParts {
            allocator: Arc::clone(&allocator),
            mover: Mover::new(driver, &pool, mover).unwrap(),
            disk: Some(Arc::clone(&store)),
            budget: None,
            peers: Vec::new(),
        };
        let config = SpillConfig { piece: PIECE, ..SpillConfig::default() };
        (allocator, SpillManager::new(parts, config).unwrap())
    });
    std::thread::scope(|scope| {
        for ((allocator, manager), sim) in cards.iter().zip(&sims) {
            scope.spawn(move || {
                let stream = allocator.create_stream().unwrap();
                let queue = allocator.stream(stream).unwrap();
                let buffers: Vec<_> = (0..5).map(|_| manager.buffer(MIB(24)).unwrap()).collect();
                for round in 0..4 {
                    for (buffer, byte) in buffers.iter().zip(10_u8..) {
                        let lease = buffer.lease(Access::Exclusive, stream).unwrap();
                        let range = lease.address(0);
                        if round > 0 {
                            sim.synchronize_stream(queue).unwrap();
                            let last = range.start + (MIB(24) - Bytes::new(1));
                            let last = AddrRange::new(last, Bytes::new(1));
                            assert_eq!(sim.peek(last).unwrap(), [byte + 10 * (round - 1)]);
                        }
                        sim.fill(queue, range, byte + 10 * round).unwrap();
                    }
                }
                assert!(manager.stats().from_disk_bytes > 0, "{:?}", manager.stats());
                drop(buffers);
                sim.synchronize_stream(queue).unwrap();
                manager.census();
                manager.audit().unwrap();
                assert!(sim.hazards().is_empty() && sim.device_loss().is_none());
            });
        }
    });
    for (_, manager) in &cards {
        manager.relieve_host(MIB(512));
        assert_eq!(manager.census().buffers, 0);
    }
    assert_eq!((host.total(), disk.total()), (Bytes::ZERO, Bytes::ZERO));
    store.audit().unwrap();
    pool.audit().unwrap();
}

#[test]
fn whom_the_allocator_asks_or_tells_may_ask_the_manager() {
    let rig = Arc::new(rig());
    let asked_and_told = [(); 2].map(|()| Arc::new(AtomicU64::new(0)));
    let ask = |told: std::sync::Weak<Rig>, count: &Arc<AtomicU64>| {
        let count = Arc::clone(count);
        move || {
            count.fetch_add(1, Ordering::Relaxed);
            if let Some(rig) = told.upgrade() {
                rig.manager.census();
                rig.manager.spill(MIB(1));
                rig.manager.relieve_host(MIB(1));
            }
        }
    };
    let asked = ask(Arc::downgrade(&rig), &asked_and_told[0]);
    let told = ask(Arc::downgrade(&rig), &asked_and_told[1]);
    rig.allocator.on_shortage(move |_| {
        asked();
        false
    });
    rig.allocator.observe(move |_| told());
    let (done, over) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let buffers: Vec<_> = (1..=4).map(|byte| rig.filled(MIB(24), byte)).collect();
        let block = rig.allocator.malloc(MIB(48), rig.stream).unwrap();
        rig.allocator.free(block, rig.stream).unwrap();
        for (buffer, byte) in buffers.iter().zip(1..) {
            rig.expect(buffer, byte);
        }
        rig.check();
        done.send(()).unwrap();
    });
    over.recv_timeout(std::time::Duration::from_secs(60)).expect("a callback met a lock");
    let calls = asked_and_told.map(|count| count.load(Ordering::Relaxed));
    assert!(calls.iter().all(|&count| count > 0), "neither was called for nothing: {calls:?}");
}

#[test]
fn a_manager_may_end_while_others_spill_through_it() {
    for _ in 0..10 {
        let rig = rig();
        let other = second(&rig);
        let buffer = other.buffer(MIB(48)).unwrap();
        rig.fill(&buffer, 4);
        let begin = Barrier::new(2);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                begin.wait();
                // Between the end of the manager and of its buffer no thread makes room.
                if let Ok(block) = rig.allocator.malloc(MIB(40), rig.stream) {
                    rig.allocator.free(block, rig.stream).unwrap();
                }
            });
            begin.wait();
            drop((other, buffer));
        });
        let block = rig.allocator.malloc(MIB(64), rig.stream).unwrap();
        rig.allocator.free(block, rig.stream).unwrap();
        assert_eq!(rig.spaces.space(SpaceId::host(0)).unwrap().total(), Bytes::ZERO);
        rig.check();
    }
}
