//! Soaks on simulated cards that store bytes and check the order of all accesses.

use std::sync::Arc;
use std::time::Duration;

use vramp::peers::Preset;
use vramp::{Allocator, Bytes, Driver};
use vramp_check::soaks::torture::Torture;
use vramp_check::soaks::{kv, sleep, spill};
use vramp_driver::sim::{Contents, Simulator};

/// Threads and streams on a card of 192 MiB, nearly full.
fn tortured(preset: Preset, threads: u64, seed: u64) {
    let card = Simulator::builder().memory(Bytes::mib(192)).contents(Contents::Stored).checked();
    let sim = Arc::new(card.build());
    let driver: Arc<dyn Driver> = Arc::clone(&sim) as Arc<dyn Driver>;
    let allocator = Allocator::new(driver, preset.config()).expect("it can be made");
    let torture = Torture {
        threads,
        streams_per_thread: 2,
        budget: Bytes::mib(160),
        largest: Bytes::mib(32),
        steps: 1500 / threads,
        time: Duration::from_secs(60),
        seed,
    };
    let summary = torture.run(&allocator).expect("no byte is lost");
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

#[test]
fn pages_of_a_cache_keep_their_bytes_while_threads_commit_them_and_driver_calls_fail() {
    for seed in 1..=3 {
        let args =
            kv::Args { device: "sim".to_owned(), operations: 3000, threads: 4, failing: 20, seed };
        kv::run(&args).unwrap();
    }
}

#[test]
fn buffers_keep_their_bytes_while_they_are_evicted_and_restored() {
    let args = spill::Args {
        device: "sim".to_owned(),
        seconds: 1,
        limit: None,
        threads: 2,
        dir: None,
        compress: true,
        seed: 1,
    };
    spill::run(&args).unwrap();
}

#[test]
fn regions_keep_their_bytes_while_they_sleep() {
    let device = "sim".to_owned();
    sleep::run(&sleep::Args { device, moves: 40, region: None, threads: 2, seed: 1 }).unwrap();
}
