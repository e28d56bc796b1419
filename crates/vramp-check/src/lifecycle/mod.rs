//! Random programs of objects that begin and end: streams, blocks, pools, arenas, captures, graphs,
//! leases, ranges, caches, callbacks. `docs/background/life-cycles.md` is the table that they are drawn from.
//!
//! 1. A seed gives a program: operations, drawn from what exists (`draw.rs`).
//! 2. `world.rs` performs each one on a subject (`subject.rs`: an interface of the allocator), as a
//!    user who keeps the documented rules, and checks what was promised: no unordered access, no
//!    lost device, no lost byte, each refusal with its error, and in the end nothing left.
//! 3. A program that finds something is made short (`shrink.rs`) and returned as text, which
//!    [`replay`] performs again.
//!
//! A program has some hundred operations on a device of its own, so that any of them can be found
//! and shortened; a run has many programs. What a program keeps grows with its length, what a run
//! keeps does not grow.
//!
//! Deliberately absent: clocks, but for the bound on a program's time, past which it hangs, and for
//! the end of a run, past which no program begins.

mod c_subject;
mod draw;
mod op;
mod shrink;
mod stories;
mod subject;
mod tap;
mod threads;
mod world;

use std::fmt;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

pub use vramp::peers::Preset;
use vramp::{Bytes, Driver};

pub use c_subject::{CSubject, Calls};
pub use op::{NotAnOp, Op};
pub use subject::{
    ArenaChoice, CacheChoice, Outcome, Planned, PoolEnd, Reaction, Refused, RustSubject, Subject,
    Way, Why, in_way,
};
pub use world::{Counts, Finding};

use draw::{Drawer, Mix, Random};
use tap::Ground;
use threads::{Found, Program};
use world::World;

/// Makes the subject of a program.
pub type MakeSubject = Arc<dyn Fn(Arc<dyn Driver>, Preset) -> Box<dyn Subject> + Send + Sync>;

/// What to run.
#[derive(Clone)]
pub struct Options {
    /// Preset of the allocators.
    pub preset: Preset,
    /// Operations of all programs together.
    pub steps: u64,
    /// Operations of one program.
    pub program: u64,
    /// Programs that run at once, on threads of their own and on one group of pools.
    pub threads: u64,
    /// Seed of the first program; each further one has the next.
    pub seed: u64,
    /// A card to run on. `None`: a simulated card for each program.
    pub card: Option<Arc<dyn Driver>>,
    /// Classes of findings, see [`class_of`], that are counted and not returned.
    pub known: Vec<String>,
    /// Longest time that one program may take: a longer one hangs. `None`: any time.
    pub bound: Option<Duration>,
    /// No program begins after this. `None`: only the steps end a run.
    pub until: Option<Instant>,
}

impl Options {
    /// Returns options for the simulator.
    pub fn new(preset: Preset, steps: u64, seed: u64) -> Options {
        Options {
            preset,
            steps,
            program: 400,
            threads: 1,
            seed,
            card: None,
            known: Vec::new(),
            bound: None,
            until: None,
        }
    }

    /// What a program of this seed runs on. Every second one stores bytes. The others are faster and show
    /// unordered accesses too.
    fn ground(&self, seed: u64) -> Ground {
        Ground::new(self.card.as_ref(), Bytes::new(draw::CARD), seed.is_multiple_of(2))
    }
}

/// What a run did.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    /// Programs.
    pub programs: u64,
    /// Operations.
    pub steps: u64,
    /// Programs that ended with a known finding.
    pub known: u64,
    /// Counts over all programs.
    pub counts: Counts,
}

/// A program that broke a promise.
#[derive(Clone, Debug)]
pub struct Failure {
    /// Preset that it ran on.
    pub preset: Preset,
    /// Seed of the program.
    pub seed: u64,
    /// What was broken.
    pub finding: Finding,
    /// The shortest program found that breaks it.
    pub program: Vec<Op>,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "# preset {}, seed {}: {}", self.preset.name(), self.seed, self.finding)?;
        self.program.iter().try_for_each(|op| writeln!(f, "{op}"))
    }
}

impl std::error::Error for Failure {}

impl Summary {
    fn add(&mut self, counts: &Counts) {
        let sum = &mut self.counts;
        sum.done.resize(Op::WORDS.len(), 0);
        sum.done.iter_mut().zip(&counts.done).for_each(|(sum, count)| *sum += count);
        sum.skipped += counts.skipped;
        sum.out_of_memory += counts.out_of_memory;
        sum.refused += counts.refused;
        sum.faults += counts.faults;
        sum.looks += counts.looks;
        sum.panics += counts.panics;
        sum.ended_in_use += counts.ended_in_use;
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Counts { done, skipped, out_of_memory, refused, faults, looks, panics, ended_in_use } =
            &self.counts;
        writeln!(
            f,
            "{} programs, {} operations, {skipped} did nothing",
            self.programs, self.steps
        )?;
        for (word, count) in Op::WORDS.iter().zip(done).filter(|(_, count)| **count > 0) {
            writeln!(f, "  {word:12} {count:>10}")?;
        }
        writeln!(
            f,
            "  {out_of_memory} out of memory, {refused} refused as documented, {faults} injected \
             failures, {panics} panics, {looks} blocks compared, {ended_in_use} pools ended in use"
        )
    }
}

/// Performs random programs until `options.steps` are done or it is `options.until`. Calls
/// `progress` after each program with the steps so far.
///
/// # Errors
/// The first program that broke a promise, made short.
pub fn run(
    options: &Options,
    make: &MakeSubject,
    progress: &dyn Fn(u64),
) -> Result<Summary, Box<Failure>> {
    let mut summary = Summary::default();
    go_on(options, make, &mut summary, progress)?;
    Ok(summary)
}

/// Performs the programs of [`run`] that `summary` does not count yet, and counts them there. So a
/// run can go on after a failure, once its class is known; the failed program is performed again.
///
/// # Errors
/// As of [`run`].
pub fn go_on(
    options: &Options,
    make: &MakeSubject,
    summary: &mut Summary,
    progress: &dyn Fn(u64),
) -> Result<(), Box<Failure>> {
    let in_time = || options.until.is_none_or(|until| Instant::now() < until);
    while summary.steps < options.steps && in_time() {
        let seed = options.seed + summary.programs;
        let ran = match options.threads {
            0 | 1 => {
                let steps = options.program.min(options.steps - summary.steps);
                alone(options, make, seed, steps, progress).map(|counts| (vec![counts], steps))
            }
            threads => at_once(options, make, seed, threads)
                .map(|counts| (counts, options.program * threads)),
        };
        match ran {
            Ok((counts, steps)) => {
                counts.iter().for_each(|counts| summary.add(counts));
                summary.steps += steps;
            }
            Err(failure) if options.known.contains(&class_of(&failure.finding)) => {
                summary.known += 1;
                summary.steps += options.program;
            }
            Err(failure) => return Err(failure),
        }
        summary.programs += options.threads.max(1);
        progress(summary.steps);
    }
    Ok(())
}

/// Performs a random program. One that finds something is made short.
fn alone(
    options: &Options,
    make: &MakeSubject,
    seed: u64,
    steps: u64,
    progress: &dyn Fn(u64),
) -> Result<Counts, Box<Failure>> {
    let program = Program::default();
    let ran = random_program(options, make, seed, steps, &program);
    let finding = match ran {
        Ok(counts) => return Ok(counts),
        Err(finding) => finding,
    };
    let program = program.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let class = class_of(&finding);
    let preset = options.preset;
    if options.known.contains(&class) {
        return Err(Box::new(Failure { preset, seed, finding, program }));
    }
    let fails = |ops: &[Op]| {
        progress(0);
        let found = perform(options, make, seed, ops).err();
        found.is_some_and(|found| class_of(&found) == class)
    };
    // A hang takes the whole bound each time.
    let runs = match options.card.is_some() {
        true => 0,
        false if finding == HANGS => 300,
        false => 4000,
    };
    let program = shrink::shrink(program, runs, fails);
    let again = perform(options, make, seed, &program).err();
    let finding = match again {
        Some(again) if options.card.is_none() => again,
        _ => finding,
    };
    Err(Box::new(Failure { preset, seed, finding, program }))
}

/// Performs random programs on several threads.
fn at_once(
    options: &Options,
    make: &MakeSubject,
    seed: u64,
    threads: u64,
) -> Result<Vec<Counts>, Box<Failure>> {
    let programs: Vec<Program> = (0..threads).map(|_| Program::default()).collect();
    let performed = programs.clone();
    let ran = bounded(options, make, move |options, make| {
        threads::perform(options, make, seed, &performed)
    });
    ran.map_err(|Found { thread, finding }| {
        let program = programs[thread].lock().unwrap_or_else(PoisonError::into_inner).clone();
        let (preset, seed) = (options.preset, seed + thread as u64);
        Box::new(Failure { preset, seed, finding, program })
    })
}

/// Returns a finding without its numbers: findings of one class most often have one cause.
pub fn class_of(finding: &str) -> String {
    let mut class = String::new();
    for word in finding.split_whitespace() {
        let number = word.contains(|letter: char| letter.is_ascii_digit());
        class.push_str(if number { "#" } else { word });
        class.push(' ');
    }
    class
}

/// Performs a program, for example one that [`run`] returned.
///
/// # Errors
/// The promise that it broke.
pub fn replay(options: &Options, make: &MakeSubject, program: &[Op]) -> Result<Counts, Finding> {
    perform(options, make, options.seed, program)
}

fn world(options: &Options, make: &MakeSubject, seed: u64) -> Result<World, Finding> {
    let ground = options.ground(seed);
    World::new(make(ground.tapped(), options.preset), ground, options.preset)
}

fn random(options: &Options, seed: u64) -> Random {
    Random::Seeded(fastrand::Rng::with_seed(seed ^ (options.preset as u64) << 56))
}

/// Runs a program on a thread of its own, if its time is bounded.
fn bounded<T: Send + 'static, E: From<Finding> + Send + 'static>(
    options: &Options,
    make: &MakeSubject,
    program: impl FnOnce(&Options, &MakeSubject) -> Result<T, E> + Send + 'static,
) -> Result<T, E> {
    let Some(bound) = options.bound else { return program(options, make) };
    let (done, result) = channel();
    let (options, make) = (options.clone(), Arc::clone(make));
    let running = thread::spawn(move || {
        // The receiver is gone if it was too late.
        let _ = done.send(program(&options, &make));
    });
    match result.recv_timeout(bound) {
        Ok(counts) => counts,
        // The thread is left behind, with a device of its own.
        Err(RecvTimeoutError::Timeout) => Err(HANGS.to_owned().into()),
        Err(RecvTimeoutError::Disconnected) => match running.join() {
            Ok(()) => Err("the program's thread ended".to_owned().into()),
            Err(panic) => std::panic::resume_unwind(panic),
        },
    }
}

const HANGS: &str = "the last operation hangs, or the end after it";

fn random_program(
    options: &Options,
    make: &MakeSubject,
    seed: u64,
    steps: u64,
    program: &Program,
) -> Result<Counts, Finding> {
    let program = Arc::clone(program);
    let random = random(options, seed);
    bounded(options, make, move |options, make| {
        draw_program(options, make, seed, steps, random, &program)
    })
}

/// Performs the program that bytes decide, of at most `options.program` operations. A fuzzer makes the bytes
/// so that they reach other code than those before; the first one chooses whether contents are stored.
///
/// # Errors
/// The promise that it broke, with the program as it was performed.
pub fn from_bytes(
    options: &Options,
    make: &MakeSubject,
    bytes: &[u8],
) -> Result<Counts, Box<Failure>> {
    let program = Program::default();
    let (seed, bytes) = bytes.split_first().map_or((0, bytes), |(first, rest)| (*first, rest));
    let random = Random::Bytes(Vec::from(bytes).into_iter());
    draw_program(options, make, seed.into(), options.program, random, &program).map_err(|finding| {
        let program = program.lock().unwrap_or_else(PoisonError::into_inner).clone();
        Box::new(Failure { preset: options.preset, seed: seed.into(), finding, program })
    })
}

fn draw_program(
    options: &Options,
    make: &MakeSubject,
    seed: u64,
    steps: u64,
    mut random: Random,
    program: &Mutex<Vec<Op>>,
) -> Result<Counts, Finding> {
    let mut world = world(options, make, seed)?;
    let mix = Mix::draw(&mut random, options.preset == Preset::Vramp);
    let mut drawer = Drawer::new(random, mix);
    for _ in 0..steps {
        if drawer.random.is_over() {
            break;
        }
        let op = drawer.draw(&world);
        program.lock().unwrap_or_else(PoisonError::into_inner).push(op);
        world.step(&op)?;
    }
    world.finish()?;
    Ok(world.counts)
}

fn perform(
    options: &Options,
    make: &MakeSubject,
    seed: u64,
    program: &[Op],
) -> Result<Counts, Finding> {
    let program = program.to_vec();
    bounded(options, make, move |options, make| {
        let mut world = world(options, make, seed)?;
        for op in &program {
            world.step(op)?;
        }
        world.finish()?;
        Ok(world.counts)
    })
}
