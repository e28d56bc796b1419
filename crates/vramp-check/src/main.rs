//! Programs that run for as long as wanted: `cargo run --release -p vramp-check -- --help`.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::{Parser, Subcommand, ValueEnum};
use vramp::Bytes;
use vramp::peers::Preset;
use vramp_bench::sharing;
use vramp_check::conformance::{self, Verdict};
use vramp_check::lifecycle::{
    self, CSubject, Calls, MakeSubject, Op, Options, RustSubject, Subject, Summary,
};
use vramp_check::soaks::{at_least_one, kv, sleep, spill, torture};
use vramp_driver::Driver;
use vramp_driver::sim::{Contents, Simulator};

#[derive(Parser)]
#[command(name = "vramp-check", about = "Programs that look for broken promises")]
struct Args {
    #[command(subcommand)]
    program: Program,
}

#[derive(Subcommand)]
enum Program {
    /// Creates and ends every object of the allocator in random order, and checks what is promised.
    Lifecycle(Lifecycle),
    /// Shares memory between two processes, and between two cards where there are.
    Sharing(Sharing),
    /// Checks that a device keeps the rules of virtual memory, streams and captures.
    Conformance(Conformance),
    /// Works on memory that is nearly full, and compares its bytes.
    Torture(torture::Args),
    /// Commits and parks pages of an arena for caches, and compares their bytes.
    KvSoak(kv::Args),
    /// Leases, evicts and restores buffers, and compares their bytes.
    SpillSoak(spill::Args),
    /// Pauses and resumes regions, and compares their bytes.
    SleepSoak(sleep::Args),
}

#[derive(clap::Args)]
struct Conformance {
    /// A card such as `cuda:0`, or `sim` for a simulated machine of two.
    #[arg(default_value = "cuda:0")]
    device: String,
    /// The only case to run, one that loses the device.
    #[arg(long, hide = true)]
    only: Option<String>,
}

#[derive(clap::Args)]
struct Sharing {
    /// `sim:h200`, or a card such as `cuda:0`.
    #[arg(long, default_value = "sim:h200")]
    device: String,
    /// Cycles of export, open and close.
    #[arg(long, default_value_t = 1000)]
    cycles: u64,
    /// Rounds in which an importer, and as many in which an exporter is killed.
    #[arg(long, default_value_t = 20)]
    kills: u64,
    /// Devices of which the first two share memory by access: `cuda`, or `sim:h200x2`.
    #[arg(long)]
    peers: Option<String>,
    /// The other process.
    #[arg(long, hide = true)]
    role: Option<OtherRole>,
}

#[derive(Clone, Copy, ValueEnum)]
enum OtherRole {
    Importer,
    Exporter,
}

#[derive(clap::Args)]
struct Lifecycle {
    /// Operations for each preset: a million, or any number with `--seconds`.
    #[arg(long, value_parser = at_least_one)]
    steps: Option<u64>,
    /// Ends a preset's programs after this time.
    #[arg(long, value_parser = at_least_one)]
    seconds: Option<u64>,
    /// Operations of one program.
    #[arg(long, default_value_t = 400, value_parser = at_least_one)]
    length: u64,
    /// Programs that run at once, on threads of their own and on one group of pools.
    #[arg(long, default_value_t = 1, value_parser = at_least_one)]
    threads: u64,
    /// Seed of the first program.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// A preset, or `all`.
    #[arg(long, default_value = "all")]
    preset: String,
    /// Interface that the operations go through. Those that it does not have are not drawn.
    #[arg(long, value_enum, default_value = "rust", overrides_with = "interface")]
    interface: Interface,
    /// `sim:h200`, or a card such as `cuda:0`.
    #[arg(long, default_value = "sim:h200")]
    device: String,
    /// Longest time of one program in milliseconds; a longer one hangs.
    #[arg(long)]
    bound: Option<u64>,
    /// Goes on after a finding, and prints each class of findings once. Fails at the end if it
    /// printed any.
    #[arg(long)]
    survey: bool,
    /// Does not end with a finding of a class that this file has: the output of a survey.
    #[arg(long)]
    known: Option<PathBuf>,
    /// Performs the operations of this file, one a line, instead of random ones.
    #[arg(long)]
    program: Option<PathBuf>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Interface {
    Rust,
    C,
    /// C, with mallocs and frees as the Python module calls them.
    Python,
}

impl Interface {
    fn subjects(self) -> MakeSubject {
        match self {
            Interface::Rust => Arc::new(|device, preset| {
                Box::new(RustSubject::new(device, preset, None)) as Box<dyn Subject>
            }),
            Interface::C => Interface::through_c(Calls::C),
            Interface::Python => Interface::through_c(Calls::Python),
        }
    }

    fn through_c(calls: Calls) -> MakeSubject {
        Arc::new(move |device, preset| {
            Box::new(CSubject::new(device, preset, calls)) as Box<dyn Subject>
        })
    }
}

/// Longest time that one program may take, thousands of times what it takes.
const HANG: Duration = Duration::from_secs(20);

fn main() -> ExitCode {
    let done = match Args::parse().program {
        Program::Lifecycle(args) => run(&args),
        Program::Sharing(args) => share(&args),
        Program::Conformance(args) => conform(&args),
        Program::Torture(args) => torture::run(&args).map_err(anyhow::Error::from_boxed),
        Program::KvSoak(args) => kv::run(&args).map_err(anyhow::Error::from_boxed),
        Program::SpillSoak(args) => spill::run(&args).map_err(anyhow::Error::from_boxed),
        Program::SleepSoak(args) => sleep::run(&args).map_err(anyhow::Error::from_boxed),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs every case: those that lose the device first, each in a child process, because a process cannot
/// use a lost card again. The cases of two devices run with the device's first peer, if it has one.
fn conform(Conformance { device: name, only }: &Conformance) -> Result<()> {
    if let Some(only) = only {
        let cases = conformance::destructive_cases();
        let case = cases.iter().find(|case| case.name == only);
        let case = case.context("no case of this name loses the device")?;
        let (device, _) = machine(name)?;
        return match shown(case.name, case.run(&*device)) {
            Verdict::Failed(_) => bail!("{name} breaks a rule"),
            _ => Ok(()),
        };
    }
    // A name of no device is one error, and not one of each child.
    drop(machine(name)?);
    let mut broken = 0;
    for case in conformance::destructive_cases() {
        let mut child = Command::new(std::env::current_exe()?);
        let status = child.args(["conformance", name, "--only", case.name]).status()?;
        broken += usize::from(!status.success());
    }
    let (device, peer) = machine(name)?;
    let (device, info) = (&*device, device.info());
    let cases = conformance::cases();
    let mut verdicts: Vec<Verdict> =
        cases.iter().map(|case| shown(case.name, case.run(device))).collect();
    let of_two = conformance::peer_cases();
    match peer {
        Some(peer) => {
            println!("two devices, {} and {}:", info.id, peer.info().id);
            let run = of_two.iter().map(|case| shown(case.name, case.run(device, &*peer)));
            verdicts.extend(run);
        }
        None => {
            println!(
                "two devices: {} cases not run, because {} has no peer",
                of_two.len(),
                info.id
            );
        }
    }
    let passed = verdicts.iter().filter(|verdict| **verdict == Verdict::Passed).count();
    broken += verdicts.iter().filter(|verdict| matches!(verdict, Verdict::Failed(_))).count();
    println!("{} ({}): {passed} passed, {broken} broken", info.id, info.name);
    if broken > 0 || passed == 0 {
        bail!("{name} breaks {broken} rules and keeps {passed}");
    }
    Ok(())
}

type Device = Arc<dyn Driver>;

/// Opens a device and its first peer. Simulated ones store bytes, which the cases compare.
fn machine(name: &str) -> Result<(Device, Option<Device>)> {
    if name == "sim" {
        let built = Simulator::builder().contents(Contents::Stored).build_machine(2);
        let mut devices = built.into_iter().map(|device| Arc::new(device) as Device);
        return Ok((devices.next().context("there are two")?, devices.next()));
    }
    let device = vramp::open(name)?;
    let peer = device.info().peers.first();
    let peer = peer.map(|peer| vramp::open(&format!("cuda:{peer}"))).transpose()?;
    Ok((device, peer))
}

/// Prints a verdict and returns it.
fn shown(name: &str, verdict: Verdict) -> Verdict {
    match &verdict {
        Verdict::Passed => println!("passed          {name}"),
        Verdict::NotApplicable => println!("not applicable  {name}"),
        Verdict::Failed(seen) => println!("BROKEN          {name}: {seen}"),
    }
    verdict
}

fn share(args: &Sharing) -> Result<()> {
    if let Some(role) = args.role {
        let role = match role {
            OtherRole::Importer => sharing::Role::Importer,
            OtherRole::Exporter => sharing::Role::Exporter,
        };
        return sharing::serve(&args.device, role);
    }
    let program = std::env::current_exe()?;
    let device = &args.device;
    println!("device {}", sharing::open(device)?.info().name);
    let sharing::CyclesReport { cycles, median, left } =
        sharing::cycles(&program, device, args.cycles)?;
    println!("{cycles} cycles: {:.0} us each, nothing left: {:?}", micros(median), left[1]);
    for size in [Bytes::mib(1), Bytes::gib(1)] {
        let median = sharing::opening(&program, device, size, 20)?;
        println!("opening {size} in another process: {:.0} us", micros(median));
    }
    let killed = sharing::kills(&program, device, args.kills)?;
    let [before, after] = killed.used_on_card;
    println!(
        "killed {} importers and {} exporters: {before} in use on the card before, {after} after",
        killed.importers, killed.exporters
    );
    let Some(devices) = &args.peers else {
        println!("two cards: not measured, name them with --peers");
        return Ok(());
    };
    let found = sharing::peers(devices, Bytes::gib(20), Bytes::mib(256))?;
    println!(
        "access for a second card to {} in {} calls: {:.1} ms, revoked in {:.1} ms",
        found.granted.bytes,
        found.granted.calls,
        micros(found.grant) / 1000.0,
        micros(found.revoke) / 1000.0
    );
    println!(
        "copies of 256 MiB in GB/s: plain memory {:.1}; without access {:.1}; with access {:.1}",
        found.plain, found.before, found.peer
    );
    Ok(())
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

fn run(args: &Lifecycle) -> Result<()> {
    // Panics are findings; a planned one is none.
    std::panic::set_hook(Box::new(|_| {}));
    let presets = match args.preset.as_str() {
        "all" => Preset::ALL.to_vec(),
        name => vec![name.parse()?],
    };
    let card = match args.device.starts_with("sim") {
        true => None,
        false => Some(vramp::open(&args.device)?),
    };
    let make = args.interface.subjects();
    let known = match &args.known {
        Some(file) => known(&std::fs::read_to_string(file)?),
        None => Vec::new(),
    };
    let any_number = args.seconds.map_or(1_000_000, |_| u64::MAX);
    let mut found = 0;
    for preset in presets {
        let options = Options {
            program: args.length,
            threads: args.threads,
            card: card.clone(),
            known: known.clone(),
            bound: Some(args.bound.map_or(HANG, Duration::from_millis)),
            until: args.seconds.map(|seconds| Instant::now() + Duration::from_secs(seconds)),
            ..Options::new(preset, args.steps.unwrap_or(any_number), args.seed)
        };
        if let Some(file) = &args.program {
            replay(&options, &make, file)?;
            continue;
        }
        if args.survey {
            found += survey(options, &make);
            continue;
        }
        let begun = Instant::now();
        let summary = lifecycle::run(&options, &make, &|_| {})?;
        let seconds = begun.elapsed().as_secs_f64();
        let rate = summary.steps as f64 / seconds;
        println!("{}: nothing found in {seconds:.1} s, {rate:.0} operations/s", preset.name());
        print!("{summary}");
    }
    if found > 0 {
        bail!("the survey found {found} classes of broken promises");
    }
    Ok(())
}

/// Returns the classes of findings in the output of a survey.
fn known(survey: &str) -> Vec<String> {
    let findings = survey.lines().filter(|line| line.starts_with("# preset"));
    let findings = findings.filter_map(|line| line.split_once(": "));
    findings.map(|(_, finding)| lifecycle::class_of(finding)).collect()
}

/// Prints each class of findings once, with the shortest program found, and returns how many there
/// are.
fn survey(mut options: Options, make: &MakeSubject) -> usize {
    let mut summary = Summary::default();
    let mut classes = 0;
    while let Err(found) = lifecycle::go_on(&options, make, &mut summary, &|_| {}) {
        println!("{found}");
        options.known.push(lifecycle::class_of(&found.finding));
        classes += 1;
    }
    print!("{}: {} known\n{summary}", options.preset.name(), summary.known);
    classes
}

fn replay(options: &Options, make: &MakeSubject, file: &std::path::Path) -> Result<()> {
    let text = std::fs::read_to_string(file).with_context(|| file.display().to_string())?;
    let lines = text.lines().filter(|line| !line.starts_with('#') && !line.trim().is_empty());
    let program = lines.map(str::parse).collect::<Result<Vec<Op>, _>>()?;
    if program.is_empty() {
        bail!("{} has no operation: give a program as it was printed", file.display());
    }
    if let Err(finding) = lifecycle::replay(options, make, &program) {
        bail!("{}: {finding}", options.preset.name());
    }
    println!("{}: nothing found", options.preset.name());
    Ok(())
}
