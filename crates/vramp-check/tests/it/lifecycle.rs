//! Short runs of the life-cycle program on every preset. Long ones: `cargo run --release -p
//! vramp-check -- lifecycle`.

use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

use vramp::Driver;
use vramp::peers::Preset;
use vramp_check::lifecycle::{self, MakeSubject, Op, Options, RustSubject, Subject, Summary};
use vramp_driver::sim::{Access, Contents, Hazard, Simulator};
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

#[test]
fn threads_that_share_pools_keep_their_promises() {
    for preset in Preset::ALL {
        for threads in [2, 8] {
            let options = Options { threads, ..Options::new(preset, 6_400, 1) };
            let summary = lifecycle::run(&options, &rust(), &|_| {});
            let summary = summary.unwrap_or_else(|failure| panic!("{failure}"));
            assert_eq!((summary.programs, summary.steps), (16, 6_400));
            assert!(count(&summary, "open") > 0, "each pool ends while others work: {summary}");
        }
    }
}

/// The program as a user runs it: its option is what is tested too.
#[test]
fn the_c_interface_keeps_its_promises_while_objects_end() {
    let mut program = Command::new(env!("CARGO_BIN_EXE_vramp-check"));
    program.args(["lifecycle", "--preset", "all", "--steps", "4000", "--interface", "c"]);
    let run = program.output().unwrap();
    let text = String::from_utf8_lossy(&run.stdout);
    assert!(run.status.success(), "{text}{}", String::from_utf8_lossy(&run.stderr));
    assert_eq!(text.matches("nothing found").count(), Preset::ALL.len(), "{text}");
    for word in ["adopt", "destroy", "end-pool", "launch", "end-lease", "drop-graph", "observe"] {
        assert!(text.contains(&format!("  {word} ")), "{word}: {text}");
    }
    for word in ["tagged", "range", "handle"] {
        assert!(!text.contains(&format!("  {word} ")), "{word} is not drawn: {text}");
    }
    // The last one counts.
    for further in [["--threads", "4"], ["--interface", "python"]] {
        let run = program.args(further).output().unwrap();
        assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    }
}

#[test]
fn a_run_of_nothing_is_refused() {
    let empty = std::env::temp_dir().join(format!("vramp-empty-{}", std::process::id()));
    std::fs::write(&empty, "# no operation\n").unwrap();
    let program = ["--program", empty.to_str().unwrap()];
    for [option, value] in
        [["--steps", "0"], ["--length", "0"], ["--threads", "0"], ["--seconds", "0"], program]
    {
        let mut run = Command::new(env!("CARGO_BIN_EXE_vramp-check"));
        let run = run.args(["lifecycle", "--preset", "vramp", option, value]).output().unwrap();
        let text = String::from_utf8_lossy(&run.stderr);
        assert!(!run.status.success() && text.contains(": give "), "{option} {value}: {text}");
    }
    std::fs::remove_file(empty).unwrap();
}

/// The end of its pool has ended the capture: there is nothing to invalidate, and the call that would have
/// done it is not made beside a stream that waits for a gate.
#[test]
fn a_capture_that_its_pools_end_ended_is_not_invalidated() {
    let program = "open pool=1\n\
        open pool=2\n\
        arena pool=2 arena=3 monotone=0 order=1 mode=0\n\
        create pool=1 stream=4\n\
        begin arena=3 stream=4 capture=5\n\
        end-pool pool=2 way=0\n\
        create pool=1 stream=6\n\
        malloc pool=1 stream=6 size=1687 block=7\n\
        work block=7 stream=6 kind=3 ns=16\n\
        invalidate capture=5";
    let program: Vec<Op> = program.lines().map(|line| line.trim().parse().unwrap()).collect();
    let options = Options::new(Preset::Vramp, 0, 7102);
    let counts = lifecycle::replay(&options, &rust(), &program).expect("nothing is broken");
    assert_eq!(counts.skipped, 1, "only the last operation does nothing: {counts:?}");
}

/// What a card does not have is not used: kernels that change no bytes, gates, and a clock to set.
#[test]
fn on_a_card_each_block_holds_what_was_written_last() {
    for preset in Preset::ALL {
        let sim = Simulator::builder().contents(Contents::Stored).checked().build();
        let sim = Arc::new(sim);
        let card = Some(Arc::clone(&sim) as Arc<dyn Driver>);
        let options = Options { card, ..Options::new(preset, 10_000, 1) };
        let summary = lifecycle::run(&options, &rust(), &|_| {});
        let summary = summary.unwrap_or_else(|failure| panic!("{failure}"));
        assert!(summary.counts.looks > 100, "{summary}");
        let hazards = sim.hazards();
        assert_eq!(hazards.len() as u64, sim.hazards_found(), "all are listed");
        // What is read is copied to one place of the host, whose bytes are never read.
        let is_copy = |access: &Access| access.writes && access.label == "copy-to-host";
        let copies = |hazard: &&Hazard| is_copy(&hazard.earlier) && is_copy(&hazard.later);
        assert_eq!(hazards.iter().find(|hazard| !copies(hazard)), None);
    }
}

#[test]
fn a_run_ends_in_time_and_goes_on_where_it_ended() {
    let whole = Options::new(Preset::Vramp, 8_000, 1);
    let over = Options { until: Some(Instant::now()), ..whole.clone() };
    let mut summary = lifecycle::run(&over, &rust(), &|_| {}).expect("no program ran");
    assert_eq!(summary.programs, 0);
    let half = Options { steps: 4_000, ..whole.clone() };
    for options in [&half, &whole] {
        lifecycle::go_on(options, &rust(), &mut summary, &|_| {}).expect("nothing is found");
    }
    let at_once = lifecycle::run(&whole, &rust(), &|_| {}).expect("nothing is found");
    assert_eq!(summary.to_string(), at_once.to_string());
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
    // Memory is used, or unmapped, under work that it should have waited for.
    let is_hazard = failure.finding.starts_with("hazard");
    assert!(is_hazard || failure.finding.contains("still accesses"), "{failure}");
    assert!(failure.program.len() < 60, "{failure}");

    // As text it is the same program, which finds the same.
    let lines: Vec<String> = failure.program.iter().map(ToString::to_string).collect();
    let read: Vec<Op> = lines.iter().map(|line| line.parse().unwrap()).collect();
    let options = Options { seed: failure.seed, ..options };
    let again = lifecycle::replay(&options, &make, &read).expect_err("it was found before");
    assert_eq!(lifecycle::class_of(&again), lifecycle::class_of(&failure.finding));
    lifecycle::replay(&options, &rust(), &read).expect("streams wait");
}
