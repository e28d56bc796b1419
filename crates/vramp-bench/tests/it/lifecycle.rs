//! Short runs of the life-cycle program on every preset. Long ones: `cargo run --release -p
//! vramp-bench -- lifecycle`.

use std::sync::Arc;

use vramp::{Driver, Preset};
use vramp_bench::lifecycle::{self, MakeSubject, Op, Options, RustSubject, Subject, Summary};
use vramp_driver::wrapper::{Wrapped, Wrapper};
use vramp_driver::{DriverResult, Event, Stream};

fn rust() -> MakeSubject {
    Arc::new(|device, preset| Box::new(RustSubject::new(device, preset, None)) as Box<dyn Subject>)
}

fn run(preset: Preset, steps: u64) -> Summary {
    let options = Options::new(preset, steps, 1);
    lifecycle::run(&options, &rust(), &|_| {}).unwrap_or_else(|failure| panic!("{failure}"))
}

/// Returns how often an operation was performed.
fn count(summary: &Summary, word: &str) -> u64 {
    summary.counts.done[Op::WORDS.iter().position(|known| *known == word).unwrap()]
}

#[test]
fn vramp_keeps_its_promises_while_objects_end() {
    let summary = run(Preset::Vramp, 30_000);
    for word in ["destroy", "end-pool", "launch", "end-lease", "drop-graph", "drop-range", "fault"]
    {
        assert!(count(&summary, word) > 0, "{word}: {summary}");
    }
}

#[test]
fn vpmm_keeps_its_promises_while_objects_end() {
    run(Preset::Vpmm, 15_000);
}

#[test]
fn the_drivers_pool_keeps_its_promises_while_objects_end() {
    run(Preset::StreamOrdered, 15_000);
}

#[test]
fn pytorchs_allocator_keeps_its_promises_while_objects_end() {
    run(Preset::Torch, 15_000);
    run(Preset::TorchExpandable, 15_000);
}

/// A device whose streams wait for nothing.
struct NoWaits(Arc<dyn Driver>);

impl Wrapper for NoWaits {
    type Device = Arc<dyn Driver>;

    fn device(&self) -> &Arc<dyn Driver> {
        &self.0
    }

    fn wait(&self, _: Stream, _: Event) -> DriverResult<()> {
        Ok(())
    }
}

#[test]
fn an_order_that_is_missing_is_found_and_made_short() {
    let make: MakeSubject = Arc::new(|device, preset| {
        let device = Arc::new(Wrapped(NoWaits(device)));
        Box::new(RustSubject::new(device, preset, None)) as Box<dyn Subject>
    });
    let options = Options::new(Preset::Vramp, 60_000, 1);
    let failure = lifecycle::run(&options, &make, &|_| {}).expect_err("streams do not wait");
    assert!(failure.finding.starts_with("hazard"), "{failure}");
    assert!(failure.program.len() < 60, "{failure}");

    // As text it is the same program, which finds the same.
    let lines: Vec<String> = failure.program.iter().map(ToString::to_string).collect();
    let read: Vec<Op> = lines.iter().map(|line| line.parse().unwrap()).collect();
    let options = Options { seed: failure.seed, ..options };
    let again = lifecycle::replay(&options, &make, &read).expect_err("it was found before");
    assert_eq!(lifecycle::class_of(&again), lifecycle::class_of(&failure.finding));
    lifecycle::replay(&options, &rust(), &read).expect("streams wait");
}
