//! What budgets cost: `cargo run --release -p vramp-tiers --example cost`. On the simulator, whose
//! driver takes no part in a hit.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use vramp::{Allocator, Config, Preset};
use vramp_core::tiers::{Ledger, Queue, Request};
use vramp_tiers::{
    Bytes, DeadlockCheck, ManagerConfig, Owner, Policies, Priority, ReservationManager, Scope,
    SpaceConfig, SpaceId, Strategy, Tag, Tier, Tracked,
};

const ROUNDS: usize = 15;
const CALLS: u32 = 200_000;

/// The median over rounds of one call's time, in nanoseconds.
fn median_ns(mut call: impl FnMut()) -> f64 {
    (0..CALLS).for_each(|_| call());
    let mut rounds: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            let begin = Instant::now();
            (0..CALLS).for_each(|_| call());
            begin.elapsed().as_nanos() as f64 / f64::from(CALLS)
        })
        .collect();
    rounds.sort_by(f64::total_cmp);
    rounds[ROUNDS / 2]
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let gpu = SpaceId::gpu(0);
    let manager = ReservationManager::new([
        (gpu, SpaceConfig::gpu(Bytes::gib(8))),
        (SpaceId::gpu(1), SpaceConfig::gpu(Bytes::gib(8))),
        (SpaceId::host(0), SpaceConfig::host(Bytes::gib(64))),
    ])?;
    let space = manager.space(gpu).expect("it was configured");
    let reserve = |strategy: Strategy| {
        median_ns(|| {
            drop(black_box(manager.request(strategy.clone(), Bytes::mib(1)).now()));
        })
    };
    println!("reserve and release, one space     {:6.1} ns", reserve(Strategy::Specific(gpu)));
    println!(
        "reserve and release, a tier        {:6.1} ns",
        reserve(Strategy::AnyInTier(Tier::Gpu))
    );

    let device = vramp::open("sim:h200")?.driver;
    let allocator = Arc::new(Allocator::new(device, Config::preset(Preset::Vramp))?);
    let stream = allocator.create_stream()?;
    let size = Bytes::kib(64);
    let plain = median_ns(|| {
        let block = allocator.malloc(size, stream).expect("there is room");
        allocator.free(black_box(block), stream).expect("it was allocated here");
    });
    let tracked = Tracked::new(Arc::clone(&allocator), &space, Policies::default());
    let pair = || {
        let block = tracked.malloc(size, stream).expect("there is room");
        tracked.free(black_box(block), stream).expect("it was allocated here");
    };
    let unreserved = median_ns(pair);
    tracked.attach(Scope::Stream(stream), space.request(Bytes::gib(1)).now()?)?;
    let reserved = median_ns(pair);
    println!("malloc and free, untracked         {plain:6.1} ns");
    println!(
        "malloc and free, paid by the space {unreserved:6.1} ns  (+{:.1})",
        unreserved - plain
    );
    println!("malloc and free, by a reservation  {reserved:6.1} ns  (+{:.1})", reserved - plain);
    let counter = tracked.count();
    let counted = median_ns(pair);
    println!("malloc and free, counted as well   {counted:6.1} ns  (+{:.1})", counted - plain);
    drop(counter);
    drop(tracked);
    for waiters in [0, 1, 64, 1000] {
        beside(waiters)?;
    }
    for waiters in [1, 64, 1000] {
        serving(waiters)?;
    }
    Ok(())
}

/// What a release costs that can serve nobody, while so many wait.
fn beside(waiters: usize) -> Result<(), Box<dyn std::error::Error>> {
    let gpu = SpaceId::gpu(0);
    let config = ManagerConfig { deadlock: DeadlockCheck::OnDemand, ..ManagerConfig::default() };
    let spaces = [(gpu, SpaceConfig::gpu(Bytes::gib(8)))];
    let manager = ReservationManager::with_config(spaces, config)?;
    let space = manager.space(gpu).expect("it was configured");
    let rest = space.request(space.limit() - Bytes::mib(1)).now()?;
    let wait = || drop(space.request(Bytes::gib(6)).wait());
    std::thread::scope(|scope| {
        for _ in 0..waiters {
            let thread = std::thread::Builder::new().stack_size(64 << 10);
            let _asleep = thread.spawn_scoped(scope, wait).expect("a thread can be made");
        }
        while manager.waiting() < waiters {
            std::thread::yield_now();
        }
        let turn = median_ns(|| drop(black_box(space.charge(Bytes::kib(512)))));
        println!("charge and release, {waiters:4} wait       {turn:6.1} ns");
        manager.shutdown();
    });
    drop(rest);
    Ok(())
}

/// What the queue alone takes to release one, serve the next and let another one wait.
fn serving(waiters: u64) -> Result<(), Box<dyn std::error::Error>> {
    let gpu = SpaceId::gpu(0);
    let mut ledger = Ledger::new([(gpu, SpaceConfig::gpu(Bytes::gib(8)))])?;
    let mut queue = Queue::default();
    let tag = Tag::NONE;
    let ask = |owner| Request {
        candidates: [gpu].into_iter().collect(),
        bytes: Bytes::mib(1),
        priority: Priority::default(),
        owner: Owner(owner),
        tag,
        deadline: None,
    };
    ledger.reserve(gpu, ledger.levels(gpu)?.limit - Bytes::mib(1), Owner(0), tag)?;
    let mut held = ledger.reserve(gpu, Bytes::mib(1), Owner(0), tag)?;
    for owner in 0..waiters {
        let _waits = queue.submit(&mut ledger, ask(owner), 0)?;
    }
    let turn = median_ns(|| {
        let _bytes = ledger.release(held).expect("it is held");
        let grants = queue.on_change(&mut ledger, gpu);
        held = grants[0].reservation;
        let _waits = queue.submit(&mut ledger, ask(1), 0).expect("it may wait");
    });
    println!("serve the first of {waiters:4}            {turn:6.1} ns, in the core alone");
    Ok(())
}
