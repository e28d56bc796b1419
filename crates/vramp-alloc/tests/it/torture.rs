//! The torture program on a simulated card that stores bytes and checks the order of all accesses.

use crate::common::torture;
use std::sync::Arc;
use std::time::Duration;

use crate::common::torture::Torture;
use vramp_alloc::{Allocator, Bytes, Config, Driver, Preset};
use vramp_driver::sim::{Contents, Simulator};

/// Threads and streams on a card of 192 MiB, nearly full.
fn tortured(preset: Preset, threads: u64, seed: u64) {
    let card = Simulator::builder().memory(Bytes::mib(192)).contents(Contents::Stored).checked();
    let sim = Arc::new(card.build());
    let driver: Arc<dyn Driver> = Arc::clone(&sim) as Arc<dyn Driver>;
    let allocator = Allocator::new(driver, Config::preset(preset)).expect("it can be made");
    let torture = Torture {
        threads,
        streams_per_thread: 2,
        budget: Bytes::mib(160),
        largest: Bytes::mib(32),
        steps: 1500 / threads,
        time: Duration::from_secs(60),
        seed,
    };
    let summary = torture::run(&allocator, &torture).expect("no byte is lost");
    println!("{}: {summary:?}", preset.name());
    assert!(summary.looks > 100 && summary.handed_over > 10, "{summary:?}");
    assert_eq!(sim.hazards(), []);
    assert_eq!(sim.device_loss(), None);
    allocator.audit().expect("the pool is whole");
    let live = allocator.stats().expect("statistics are there").live;
    assert_eq!(live, Bytes::ZERO, "everything was freed");
    allocator.trim(Bytes::ZERO).expect("nothing fails");
    assert_eq!(allocator.stats().expect("statistics are there").reserved, Bytes::ZERO);
    allocator.close().expect("nothing is in the way");
    assert_eq!(sim.live(), vramp_driver::sim::LiveObjects::default());
}

#[test]
fn data_survives_on_one_thread() {
    for (seed, preset) in Preset::ALL.into_iter().enumerate() {
        tortured(preset, 1, seed as u64);
    }
}

#[test]
fn data_survives_on_four_threads() {
    for (seed, preset) in Preset::ALL.into_iter().enumerate() {
        tortured(preset, 4, seed as u64);
    }
}
