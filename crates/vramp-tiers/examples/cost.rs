//! What budgets cost: `cargo run --release -p vramp-tiers --example cost`. On the simulator, whose
//! driver takes no part in a hit.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use vramp::{Allocator, Config, Preset};
use vramp_tiers::{
    Bytes, Policies, ReservationManager, Scope, SpaceConfig, SpaceId, Strategy, Tier, Tracked,
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
    Ok(())
}
