//! The program `vramp`: replays recorded workloads on any allocator, on a card or without one.
//!
//! - [`replay`] is the engine: one workload, one allocator, one device, one [`replay::Outcome`].
//! - [`graph`] tells what memory a captured graph of a workload would need.
//! - [`args`] says what can be asked for on the command line, [`main`] answers it.
//!
//! The engine decides nothing about memory and keeps no clock: which work is over follows from the
//! trace alone, so a card and the simulator are asked the same and answer the same.
//!
//! Deliberately absent: allocation policy (`vramp`), the formats of traces (`vramp-trace`).
#![forbid(unsafe_code)]

pub mod args;
pub mod bench;
mod convert;
mod count;
pub mod device;
pub mod graph;
mod info;
pub mod replay;
mod replay_command;
mod table;
mod tiers;

use std::io::{self, Write};
use std::process::ExitCode;

use clap::Parser;

/// Parses the command line, does what it says, and reports failure on standard error.
///
/// Exit codes: 0 done, 1 failed, 2 not understood.
pub fn main() -> ExitCode {
    let args = args::Args::parse();
    let mut out = io::stdout().lock();
    match run(&args, &mut out).and_then(|()| Ok(out.flush()?)) {
        Ok(()) => ExitCode::SUCCESS,
        // Who reads our output has seen enough, as `head` does.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            // With standard error gone too there is nobody left to tell.
            let _ = writeln!(io::stderr(), "vramp: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Does what the command line says and writes the answer to `out`.
///
/// # Errors
/// One sentence with what to do, for a person.
pub fn run(args: &args::Args, out: &mut dyn Write) -> anyhow::Result<()> {
    match &args.command {
        args::Command::Replay(replay) => replay_command::run(replay, out),
        args::Command::Info(info) => info::run(info, out),
        args::Command::Tiers(tiers) => tiers::run(tiers, out),
        args::Command::Convert(convert) => convert::run(convert, out),
        args::Command::Graph(graph) => graph::run(graph, out),
        args::Command::Bench(bench) => bench::run(bench, out),
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let broken = |cause: &io::Error| cause.kind() == io::ErrorKind::BrokenPipe;
    error.chain().any(|cause| {
        cause.downcast_ref::<io::Error>().is_some_and(broken)
            || cause
                .downcast_ref::<serde_json::Error>()
                .is_some_and(|error| error.io_error_kind() == Some(io::ErrorKind::BrokenPipe))
    })
}
