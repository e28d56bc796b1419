//! Random programs of captures and replays: the happens-before checker and a look at the bytes find
//! nothing, and find each planted bug.
//!
//! For a million steps and more: `cargo run --release -p vramp-alloc --example graph_soak -- --steps
//! 1000000`.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::common::graph_program::{Program, Summary};
use crate::common::skipping_driver::SkippingDriver;
use vramp_driver::Call;
use vramp_driver::sim::{Contents, Simulator};

fn card(contents: Contents) -> Arc<Simulator> {
    Arc::new(Simulator::builder().contents(contents).checked().build())
}

fn run(contents: Contents, seed: u64, steps: u64) -> Summary {
    println!("seed {seed}");
    let sim = card(contents);
    let stores = contents == Contents::Stored;
    let mut program = Program::new(Arc::clone(&sim), sim, seed, stores);
    let ran = program.run(steps).and_then(|()| program.finish());
    ran.unwrap_or_else(|finding| panic!("seed {seed}: {finding}"))
}

#[test]
fn random_captures_and_replays_are_ordered() {
    let mut sum = Summary::default();
    for seed in vramp_testing::seeds(8) {
        let summary = run(Contents::Discarded, seed, 1000);
        sum.captures += summary.captures;
        sum.replays += summary.replays;
    }
    assert!(sum.captures > 80 && sum.replays > 200, "{sum:?}");
}

#[test]
fn random_replays_leave_what_was_captured() {
    let looks: u64 =
        vramp_testing::seeds(3).map(|seed| run(Contents::Stored, 1000 + seed, 600).looks).sum();
    assert!(looks > 15, "{looks}");
}

/// How many of some programs find something once a bug is planted.
fn found(plant: impl Fn(&SkippingDriver, &mut Program)) -> usize {
    let finds = |seed: &u64| {
        let sim = card(Contents::Discarded);
        let driver = Arc::new(SkippingDriver::on(Arc::clone(&sim)));
        let mut program = Program::new(Arc::clone(&sim), Arc::clone(&driver) as _, *seed, false);
        plant(&driver, &mut program);
        // A device that is lost ends the program where it stands.
        let ran = catch_unwind(AssertUnwindSafe(|| program.run(3000)));
        driver.skip_nothing();
        let found = !sim.hazards().is_empty() || sim.device_loss().is_some();
        assert!(found || matches!(ran, Ok(Ok(()))), "{ran:?}");
        found
    };
    (0..10).filter(finds).count()
}

#[test]
fn without_a_planted_bug_nothing_is_found() {
    assert_eq!(found(|_, _| {}), 0);
}

#[test]
fn a_replay_whose_wait_is_swallowed_is_found() {
    assert!(found(|driver, _| driver.skip(Call::Wait)) >= 5);
}

#[test]
fn an_order_whose_event_is_not_recorded_is_found() {
    assert!(found(|driver, _| driver.skip(Call::Record)) >= 5);
}

#[test]
fn memory_that_is_lent_while_work_runs_is_found() {
    assert!(found(|driver, _| driver.skip(Call::Query)) >= 5);
}

#[test]
fn a_join_that_was_reported_and_never_made_is_found() {
    assert!(found(|driver, _| driver.skip(Call::CaptureInfo)) >= 5);
}

#[test]
fn a_result_that_is_read_on_another_stream_without_a_note_is_found() {
    assert!(found(|_, program| program.careless = true) >= 5);
}
