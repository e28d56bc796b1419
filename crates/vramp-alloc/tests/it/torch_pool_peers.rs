//! Counterparts of PyTorch's tests of memory pools, by the promise that each of them makes.
//! `docs/background/peer-tests.md` says which is whose.

use std::sync::Arc;

use crate::common::{Rig, pages};
use vramp_alloc::{AllocError, Allocator, Bytes, Driver, FreeError};
use vramp_driver::Call;
use vramp_driver::meter::Metered;
use vramp_driver::sim::Simulator;
use vramp_peers::Preset;

/// What an allocator holds of the card.
fn reserved(allocator: &Allocator) -> Bytes {
    allocator.stats().expect("no call fails").reserved
}

const POOLED: [Preset; 4] = [Preset::Vramp, Preset::Vpmm, Preset::Torch, Preset::TorchExpandable];

#[test]
fn emptying_one_pools_cache_leaves_the_others() {
    for preset in POOLED {
        let rig = Rig::new(preset);
        let side = rig.allocator.create_pool("side").expect("a pool can be made");
        for allocator in [&rig.allocator, &side] {
            let block = allocator.malloc(pages(20), rig.stream).expect("there is memory");
            allocator.free(block, rig.stream).expect("it is its own");
        }
        rig.sim.advance(1);
        let held = reserved(&side);
        assert!(held >= pages(20), "{}", preset.name());
        rig.allocator.empty_cache().expect("nothing fails");
        assert_eq!((reserved(&rig.allocator), reserved(&side)), (Bytes::ZERO, held));
        side.empty_cache().expect("nothing fails");
        assert_eq!(reserved(&side), Bytes::ZERO, "{}", preset.name());
    }
}

#[test]
fn emptying_the_cache_keeps_what_a_live_block_of_the_pool_needs() {
    for preset in POOLED {
        let rig = Rig::new(preset);
        let side = rig.allocator.create_pool("side").expect("a pool can be made");
        let [kept, gone] = [(); 2].map(|()| side.malloc(pages(30), rig.stream).expect("room"));
        side.free(gone, rig.stream).expect("it is its own");
        rig.sim.advance(1);
        side.empty_cache().expect("nothing fails");
        assert_eq!(reserved(&side), pages(30), "{}", preset.name());
        side.free(kept, rig.stream).expect("it is its own");
    }
}

#[test]
fn a_pool_is_emptied_while_another_thread_allocates_from_it() {
    for preset in POOLED {
        let rig = Rig::new(preset);
        let side = rig.allocator.create_pool("side").expect("a pool can be made");
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    let stream = side.create_stream().expect("a stream can be made");
                    for n in 1..200 {
                        let size = Bytes::kib(n * 41);
                        let block = side.malloc(size, stream).expect("there is memory");
                        side.free(block, stream).expect("it is its own");
                    }
                });
            }
            for _ in 0..50 {
                side.empty_cache().expect("nothing fails");
            }
        });
        side.audit().expect("the pool is whole");
        rig.sim.advance(1);
        side.empty_cache().expect("nothing fails");
        assert_eq!(reserved(&side), Bytes::ZERO, "{}", preset.name());
    }
}

#[test]
fn a_pool_may_stand_on_a_device_of_the_users_own() {
    let sim = Arc::new(Simulator::builder().build());
    let own = Arc::new(Metered::new(Arc::clone(&sim) as Arc<dyn Driver>));
    let driver: Arc<dyn Driver> = Arc::clone(&own) as Arc<dyn Driver>;
    let allocator = Allocator::new(driver, Preset::Torch.config()).expect("it can be made");
    let side = allocator.create_pool("side").expect("a pool can be made");
    let stream = side.create_stream().expect("a stream can be made");
    let block = side.malloc(pages(20), stream).expect("there is memory");
    assert_eq!(own.snapshot().of(Call::AllocMemory).calls, 1);
    side.free(block, stream).expect("it is its own");
    side.close().expect("nothing is in the way");
    assert_eq!(own.snapshot().of(Call::FreeMemory).calls, 1);
}

#[test]
fn a_block_that_outlives_its_pool_is_refused_and_breaks_nothing() {
    for preset in Preset::ALL {
        let rig = Rig::new(preset);
        let side = rig.allocator.create_pool("side").expect("a pool can be made");
        let orphan = side.malloc(pages(4), rig.stream).expect("there is memory");
        side.close().expect("nothing is in the way");
        assert!(rig.allocator.record_use(&orphan, rig.stream).is_err());
        let error = rig.allocator.free(orphan, rig.stream).expect_err("its pool is gone");
        assert!(matches!(error, FreeError::Foreign(_)), "{}: {error}", preset.name());
        let block = rig.malloc(4);
        rig.free(block);
        rig.close();
    }
}

/// A main allocator that takes what a side pool has idle before a request fails.
fn with_side_pool(preset: Preset) -> (Arc<Simulator>, Allocator, Arc<Allocator>) {
    let sim = Arc::new(Simulator::builder().memory(Bytes::mib(128)).build());
    let driver: Arc<dyn Driver> = Arc::clone(&sim) as Arc<dyn Driver>;
    let main = Allocator::new(driver, preset.config()).expect("it can be made");
    let side = Arc::new(main.create_pool("side").expect("a pool can be made"));
    let lender = Arc::downgrade(&side);
    main.on_shortage(move |_| {
        let Some(side) = lender.upgrade() else { return false };
        let before = reserved(&side);
        side.empty_cache().is_ok() && reserved(&side) < before
    });
    (sim, main, side)
}

#[test]
fn a_pool_lends_its_idle_memory_before_the_main_one_runs_out() {
    for preset in POOLED {
        let (sim, main, side) = with_side_pool(preset);
        let stream = main.create_stream().expect("a stream can be made");
        let kept = side.malloc(Bytes::mib(40), stream).expect("there is memory");
        let block = side.malloc(Bytes::mib(60), stream).expect("there is memory");
        assert!(main.malloc(Bytes::mib(80), stream).is_err(), "the side pool uses it");
        side.free(block, stream).expect("it is its own");
        sim.advance(1);
        let block = main.malloc(Bytes::mib(80), stream).expect("the side pool gives it");
        assert_eq!(reserved(&side), Bytes::mib(40), "{}", preset.name());
        main.free(block, stream).expect("it is its own");
        side.free(kept, stream).expect("it is its own");
    }
}

#[test]
fn a_pool_that_is_gone_is_not_asked_when_memory_runs_out() {
    for preset in POOLED {
        let (_, main, side) = with_side_pool(preset);
        let stream = main.create_stream().expect("a stream can be made");
        drop(side);
        let error = main.malloc(Bytes::mib(200), stream).expect_err("the card is smaller");
        let AllocError::OutOfMemory(report) = error else { panic!("{error}") };
        assert_eq!(report.siblings, [], "{}", preset.name());
        let block = main.malloc(Bytes::mib(100), stream).expect("there is memory");
        main.free(block, stream).expect("it is its own");
    }
}

#[test]
fn pools_made_by_many_threads_are_told_apart() {
    let rig = Rig::new(Preset::Vramp);
    let pools: Vec<Allocator> = std::thread::scope(|scope| {
        let make = |n| {
            let allocator = &rig.allocator;
            scope.spawn(move || allocator.create_pool(&format!("pool {n}")))
        };
        let threads: Vec<_> = (0..8).map(make).collect();
        let made = threads.into_iter().map(|thread| thread.join().expect("no panic"));
        made.map(|pool| pool.expect("a pool can be made")).collect()
    });
    let blocks = pools.iter().map(|pool| pool.malloc(pages(1), rig.stream).expect("room"));
    let blocks: Vec<_> = blocks.collect();
    for (n, block) in blocks.into_iter().enumerate() {
        assert_eq!(pools[n].name(), format!("pool {n}"));
        let error = pools[(n + 1) % 8].free(block, rig.stream).expect_err("it is another's");
        let FreeError::Foreign(block) = error else { panic!("{error}") };
        pools[n].free(block, rig.stream).expect("it is its own");
    }
}

#[test]
fn threads_use_pools_of_their_own_at_once() {
    for preset in POOLED {
        let rig = Rig::new(preset);
        std::thread::scope(|scope| {
            for n in 1..=4 {
                let allocator = &rig.allocator;
                scope.spawn(move || {
                    let pool = allocator.create_pool("mine").expect("a pool can be made");
                    let stream = pool.create_stream().expect("a stream can be made");
                    let blocks: Vec<_> = (0..20)
                        .map(|_| pool.malloc(pages(n), stream).expect("there is memory"))
                        .collect();
                    let stats = pool.memory_stats().expect("no call fails");
                    assert_eq!(stats.allocated_bytes.all.current, pages(n * 20).count());
                    pool.audit().expect("the pool is whole");
                    for block in blocks {
                        pool.free(block, stream).expect("it is its own");
                    }
                    pool.close().expect("nothing is in the way");
                });
            }
        });
        assert_eq!(reserved(&rig.allocator), Bytes::ZERO, "{}", preset.name());
        rig.close();
    }
}

#[test]
fn a_pool_of_a_pool_is_isolated_from_both() {
    for preset in POOLED {
        let rig = Rig::new(preset);
        let outer = rig.allocator.create_pool("outer").expect("a pool can be made");
        let inner = outer.create_pool("inner").expect("a pool can be made");
        let block = inner.malloc(pages(20), rig.stream).expect("there is memory");
        let addr = block.addr();
        assert_eq!((reserved(&rig.allocator), reserved(&outer)), (Bytes::ZERO, Bytes::ZERO));
        outer.close().expect("nothing is in the way");
        inner.free(block, rig.stream).expect("it is its own");
        let again = inner.malloc(pages(20), rig.stream).expect("it is cached");
        assert_eq!(again.addr(), addr, "{}", preset.name());
        inner.free(again, rig.stream).expect("it is its own");
        inner.close().expect("nothing is in the way");
        rig.close();
    }
}

#[test]
fn what_one_thread_takes_from_a_pool_another_may_free() {
    for preset in POOLED {
        let rig = Rig::new(preset);
        let side = rig.allocator.create_pool("side").expect("a pool can be made");
        let blocks = std::thread::scope(|scope| {
            let thread = scope.spawn(|| [3, 5].map(|n| side.malloc(pages(n), rig.stream)));
            thread.join().expect("no panic")
        });
        for block in blocks {
            let block = block.expect("there is memory");
            side.free(block, rig.stream).expect("it is its own");
        }
        assert_eq!((side.live(), reserved(&rig.allocator)), (Bytes::ZERO, Bytes::ZERO));
    }
}
