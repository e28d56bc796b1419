//! A long random program of captures, forks, joins, replays and memory under pressure, on a
//! simulated card with the happens-before checker on.
//!
//! `cargo run --release -p vramp-alloc --example graph_soak -- [--steps N] [--seed N] [--stored]`

#[path = "../tests/it/common/graph_program.rs"]
mod graph_program;
#[path = "../tests/it/common/random.rs"]
mod random;

use std::sync::Arc;
use std::time::Instant;

use clap::Parser;
use graph_program::{Program, Summary};
use vramp_alloc::device::sim::{Contents, Simulator};

/// Checks captured graphs.
#[derive(Parser)]
struct Args {
    /// Number of steps; a captured step counts as one.
    #[arg(long, default_value_t = 100_000)]
    steps: u64,
    /// Steps of one program: after so many it frees everything, and the next one begins.
    #[arg(long, default_value_t = 10_000)]
    program: u64,
    /// Seed of the random programs.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Store bytes, and check the results of replays.
    #[arg(long)]
    stored: bool,
    /// Plan a layout after each capture.
    #[arg(long)]
    replan: bool,
}

fn main() -> Result<(), String> {
    let args = Args::parse();
    let contents = if args.stored { Contents::Stored } else { Contents::Discarded };
    let start = Instant::now();
    let mut sum = Summary::default();
    for seed in args.seed.. {
        if sum.steps >= args.steps {
            break;
        }
        let sim = Arc::new(Simulator::builder().contents(contents).checked().build());
        let mut program = Program::new(Arc::clone(&sim), sim, seed, args.stored);
        program.replan = args.replan;
        let ran = program.run(args.program.min(args.steps - sum.steps));
        let done = ran.and_then(|()| program.finish());
        let done = done.map_err(|finding| format!("seed {seed}: {finding}"))?;
        sum.steps += done.steps;
        sum.captures += done.captures;
        sum.replays += done.replays;
        sum.refused += done.refused;
        sum.mallocs += done.mallocs;
        sum.looks += done.looks;
    }
    println!("nothing found in {:.1} s: {sum:?}", start.elapsed().as_secs_f64());
    Ok(())
}
