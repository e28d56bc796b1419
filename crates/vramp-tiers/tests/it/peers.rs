//! Stores on another card's free memory, on simulated machines.

use std::sync::Arc;
use std::time::Duration;

use vramp_alloc::Driver;
use vramp_driver::Call;
use vramp_driver::sim::{FaultPlan, Simulator};
use vramp_tiers::peer::{PeerStore, PeerStoreConfig, PeerStoreError};
use vramp_tiers::{Bytes, MemorySpace, ReservationManager, SpaceConfig, SpaceId};

const MIB: fn(u64) -> Bytes = Bytes::mib;

struct Rig {
    sims: Vec<Arc<Simulator>>,
    drivers: Vec<Arc<dyn Driver>>,
    space: MemorySpace,
    _spaces: ReservationManager,
}

fn rig(capacity: Bytes) -> Rig {
    let builder = Simulator::builder().memory(Bytes::gib(1));
    let sims: Vec<Arc<Simulator>> = builder.build_machine(3).into_iter().map(Arc::new).collect();
    let drivers = sims.iter().map(|sim| sim.clone() as Arc<dyn Driver>).collect();
    let gpu = SpaceId::gpu(1);
    let spaces = ReservationManager::new([(gpu, SpaceConfig::gpu(capacity))]).unwrap();
    Rig { sims, drivers, space: spaces.space(gpu).unwrap(), _spaces: spaces }
}

fn config() -> PeerStoreConfig {
    PeerStoreConfig { limit: MIB(256), reserve: MIB(64), ..PeerStoreConfig::default() }
}

impl Rig {
    fn store(&self, config: PeerStoreConfig) -> PeerStore {
        PeerStore::new(&self.drivers[0], 1, &self.space, config).unwrap()
    }

    fn free(&self) -> Bytes {
        self.drivers[1].memory_info().unwrap().free
    }
}

#[test]
fn chunks_are_taken_of_the_other_card_and_returned() {
    let rig = rig(Bytes::gib(1));
    let (free, own) = (rig.free(), rig.drivers[0].memory_info().unwrap().free);
    let store = rig.store(config());
    assert_eq!((store.ordinal(), store.room()), (1, MIB(256)));
    let copies: Vec<_> = (0..4).map(|_| store.allocate(MIB(16)).unwrap()).collect();
    assert_eq!((store.taken(), rig.space.total(), rig.free()), (MIB(64), MIB(64), free - MIB(64)));
    assert_eq!(rig.drivers[0].memory_info().unwrap().free, own, "nothing is taken of this card");
    assert_eq!(store.room(), MIB(192));
    store.audit().unwrap();
    drop(copies);
    assert_eq!((store.taken(), rig.space.total(), rig.free()), (Bytes::ZERO, Bytes::ZERO, free));
    store.audit().unwrap();
    drop(store);
    assert_eq!(rig.sims[0].live().handles, 0);
}

#[test]
fn chunks_made_ahead_cost_no_driver_call_and_are_kept() {
    let rig = rig(Bytes::gib(1));
    let store = rig.store(PeerStoreConfig { ahead: MIB(128), ..config() });
    assert_eq!((store.stats().created, store.taken()), (4, MIB(128)));
    let begun = rig.sims[0].now_ns();
    let copies: Vec<_> = (0..4).map(|_| store.allocate(MIB(32)).unwrap()).collect();
    assert_eq!(rig.sims[0].now_ns(), begun);
    drop(copies);
    assert_eq!((store.stats().released, store.taken()), (0, MIB(128)));
    assert_eq!(store.give_way(), MIB(128), "the other card needs it");
    assert!(matches!(store.allocate(MIB(1)), Err(PeerStoreError::GaveWay { peer: 1 })));
    assert_eq!(store.room(), Bytes::ZERO);
    rig.sims[0].advance(1_000_000_000);
    store.prepare();
    assert_eq!(store.taken(), MIB(128));
    store.audit().unwrap();
}

#[test]
fn the_limit_the_space_and_the_reserve_bound_what_is_taken() {
    let rig = rig(Bytes::gib(1));
    let limited = rig.store(PeerStoreConfig { limit: MIB(64), ..config() });
    let kept: Vec<_> = (0..2).map(|_| limited.allocate(MIB(32)).unwrap()).collect();
    let refused = limited.allocate(MIB(1)).unwrap_err();
    assert!(matches!(refused, PeerStoreError::Limit { .. }) && refused.is_full());
    assert_eq!(limited.set_limit(MIB(32)), MIB(32), "its owner has to free them");
    drop(kept);
    assert_eq!((limited.excess(), limited.taken()), (Bytes::ZERO, Bytes::ZERO));

    let reserve = rig.free() - MIB(40);
    let reserved = rig.store(PeerStoreConfig { reserve, ..config() });
    assert_eq!(reserved.room(), MIB(32));
    let kept = reserved.allocate(MIB(32)).unwrap();
    let refused = reserved.allocate(MIB(1)).unwrap_err();
    assert!(matches!(refused, PeerStoreError::NoMemory { .. }) && refused.is_full());
    drop(kept);

    let small = self::rig(MIB(40));
    let store = small.store(config());
    assert_eq!(store.room(), MIB(32));
    let kept = store.allocate(MIB(32)).unwrap();
    let refused = store.allocate(MIB(1)).unwrap_err();
    assert!(matches!(refused, PeerStoreError::Space(_)) && refused.is_full());
    assert_eq!(small.space.total(), MIB(32));
    drop(kept);
}

#[test]
fn invalid_stores_and_lengths_are_refused() {
    let rig = rig(Bytes::gib(1));
    let new =
        |peer: u32, config| PeerStore::new(&rig.drivers[0], peer, &rig.space, config).map(drop);
    assert!(matches!(new(0, config()), Err(PeerStoreError::NotAPeer { peer: 0, .. })));
    let uneven = PeerStoreConfig { chunk: MIB(3), ..config() };
    assert!(matches!(new(1, uneven), Err(PeerStoreError::Config(_))));
    let store = rig.store(config());
    for len in [Bytes::ZERO, MIB(33)] {
        assert!(matches!(store.allocate(len), Err(PeerStoreError::Length { .. })));
    }
    let none = rig.store(PeerStoreConfig::default());
    assert_eq!(none.room(), Bytes::ZERO);
    assert!(matches!(none.allocate(MIB(1)), Err(PeerStoreError::Limit { .. })));
}

#[test]
fn a_failing_call_takes_nothing_and_charges_nothing() {
    for call in [Call::Reserve, Call::Create, Call::Map, Call::SetAccess] {
        let rig = rig(Bytes::gib(1));
        let (store, free) = (rig.store(config()), rig.free());
        rig.sims[0].set_faults(FaultPlan::nth_of(call, 1).with_code(304));
        let refused = store.allocate(MIB(8)).unwrap_err();
        assert!(matches!(&refused, PeerStoreError::Device { .. }) && !refused.is_full(), "{call}");
        assert_eq!((rig.free(), rig.space.total()), (free, Bytes::ZERO), "{call}");
        store.audit().unwrap();
        drop(store.allocate(MIB(8)).unwrap());
        assert_eq!(rig.sims[0].live().handles, 0, "{call}");
    }
}

#[test]
fn a_chunk_that_cannot_be_unmapped_is_used_again_and_one_that_cannot_be_released_stays_charged() {
    let rig = rig(Bytes::gib(1));
    let store = rig.store(config());
    let copy = store.allocate(MIB(8)).unwrap();
    rig.sims[0].set_faults(FaultPlan::nth_of(Call::Unmap, 1).with_code(304));
    drop(copy);
    assert_eq!((store.taken(), rig.space.total()), (MIB(32), MIB(32)));
    store.audit().unwrap();
    let copy = store.allocate(MIB(8)).unwrap();
    assert_eq!(store.stats().created, 1);
    rig.sims[0].set_faults(FaultPlan::nth_of(Call::Release, 1).with_code(304));
    drop(copy);
    let stats = store.stats();
    assert_eq!((stats.taken, stats.lost, rig.space.total()), (Bytes::ZERO, MIB(32), MIB(32)));
    store.audit().unwrap();
}

/// Chunks and calls grow with the bytes, not with the number of allocations.
#[test]
fn many_small_allocations_share_few_chunks() {
    for count in [10_u64, 1000, 10_000] {
        let rig = rig(Bytes::gib(1));
        let store = rig.store(PeerStoreConfig { limit: MIB(768), ..config() });
        let copies: Vec<_> = (0..count).map(|_| store.allocate(Bytes::kib(64)).unwrap()).collect();
        let chunks = (Bytes::kib(64) * count).count().div_ceil(MIB(32).count());
        let stats = store.stats();
        assert_eq!((stats.created, stats.used), (chunks, Bytes::kib(64) * count));
        assert_eq!(rig.sims[0].calls_of(Call::Create), chunks);
        // Every second one is freed, and allocated again in the same place.
        let kept: Vec<_> = copies.into_iter().step_by(2).collect();
        let again: Vec<_> =
            (0..count / 2).map(|_| store.allocate(Bytes::kib(64)).unwrap()).collect();
        assert_eq!(store.stats().created, chunks);
        drop((kept, again));
        assert_eq!(store.stats().released, chunks);
        store.audit().unwrap();
    }
}

#[test]
fn threads_that_allocate_and_give_way_lose_no_memory() {
    let rig = rig(Bytes::gib(1));
    let store = rig.store(PeerStoreConfig { backoff: Duration::ZERO, ahead: MIB(64), ..config() });
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let store = store.clone();
            scope.spawn(move || {
                let mut random = fastrand::Rng::with_seed(thread);
                let mut copies = Vec::new();
                for _ in 0..300 {
                    match random.u32(..8) {
                        0 => drop(store.give_way()),
                        1..=4 => copies.extend(store.allocate(Bytes::kib(random.u64(1..20_000)))),
                        _ if !copies.is_empty() => {
                            drop(copies.swap_remove(random.usize(..copies.len())));
                        }
                        _ => {}
                    }
                    assert!(store.taken() <= MIB(256));
                }
            });
        }
    });
    store.audit().unwrap();
    store.set_limit(Bytes::ZERO);
    assert_eq!((store.taken(), rig.space.total()), (Bytes::ZERO, Bytes::ZERO));
    store.audit().unwrap();
}
