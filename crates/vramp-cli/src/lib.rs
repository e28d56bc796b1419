//! The program `vramp`: replays recorded workloads on any allocator, on a card or a simulated one.
//!
//! - `replay` prints the replays of [`vramp_analysis`].
//! - `report` writes the page of [`vramp_analysis::report`].
//! - [`graph`] computes the memory of a captured graph of a workload.
//! - `bench` (with the feature of this name) prints the measurements of `vramp-bench`.
//! - [`args`] holds the command line; [`main`] runs it.
//!
//! Deliberately absent: allocation policy (`vramp-core`), trace formats (`vramp-trace`).
#![forbid(unsafe_code)]

mod advise;
mod allocators;
mod amount;
mod analysis;
pub mod args;
#[cfg(feature = "bench")]
pub mod bench;
mod budgets;
#[cfg(feature = "bench")]
mod calibrate;
mod convert;
pub mod device;
mod diff;
mod exec;
mod exit;
mod explain;
pub mod graph;
mod info;
mod json;
mod keep;
mod manual;
mod output;
mod progress;
mod reading;
mod replay;
mod report;
mod text;
mod tiers;

use std::ffi::OsString;
use std::io::{self, Write};

use clap::Parser;

pub use exit::InvalidArguments;

/// Runs a command line, whose first argument is the name of the program, and prints an error to standard
/// error.
///
/// Returns the exit code: 0 done, 1 failed, 2 invalid arguments, 3 out of memory with `--fail-on-oom`; of
/// `vramp exec` that of the program. It does not return if that program was ended by a signal.
pub fn main(arguments: impl IntoIterator<Item = OsString>) -> u8 {
    let arguments: Vec<OsString> = arguments.into_iter().collect();
    let args = match args::Args::try_parse_from(&arguments) {
        Ok(args) => args,
        // Also for `--help`, which goes to standard output and is no failure.
        Err(other) => {
            let _ = other.print();
            if arguments.get(1).is_some_and(|name| name == "doctor" || name == "run") {
                let hint =
                    "doctor and run are of the Python package; `vramp info` shows the device";
                let _ = writeln!(io::stderr(), "{hint}");
            }
            return if other.use_stderr() { exit::INVALID } else { exit::DONE };
        }
    };
    args.color.apply();
    let mut out = io::stdout().lock();
    match run(&args, &mut out).and_then(|()| Ok(out.flush()?)) {
        Ok(()) => exit::DONE,
        // The reader of the output, such as `head`, needs no more of it.
        Err(error) if is_broken_pipe(&error) => exit::DONE,
        Err(error) if error.is::<exit::Ended>() => exit::code(&error),
        Err(error) => {
            // If standard error is closed too, the exit code is all that is left.
            let _ = writeln!(io::stderr(), "vramp: {}", message(&error));
            exit::code(&error)
        }
    }
}

/// Runs a command line, whose first argument is the name of the program, for a caller that wants the result and
/// the error.
///
/// # Errors
/// As of [`run`], and [`InvalidArguments`].
pub fn command(
    arguments: impl IntoIterator<Item = OsString>,
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    let args = args::Args::try_parse_from(arguments);
    run(&args.map_err(|error| InvalidArguments(error.to_string()))?, out)
}

/// Runs the command line and writes its result to `out`.
///
/// # Errors
/// One sentence for a person, with a hint what to do.
pub fn run(args: &args::Args, out: &mut dyn Write) -> anyhow::Result<()> {
    args.command.check()?;
    match &args.command {
        args::Command::Replay(args) => replay::run(args, out),
        args::Command::Explain(args) => explain::run(args, out),
        args::Command::Advise(args) => advise::run(args, out),
        args::Command::Diff(args) => diff::run(args, out),
        args::Command::Completions(args) => manual::completions(args, out),
        args::Command::Man(args) => manual::write(args, out),
        args::Command::Report(args) => report::run(args, out),
        args::Command::Info(args) => info::run(args, out),
        args::Command::Tiers(args) => tiers::run(args, out),
        args::Command::Top(args) => budgets::top::run(args, out),
        args::Command::Ctl(args) => budgets::ctl::run(args, out),
        args::Command::Keep(args) => keep::run(args, out),
        args::Command::Exec(args) => exec::run(args, out),
        args::Command::Convert(args) => convert::run(args, out),
        args::Command::Graph(args) => graph::run(args, out),
        #[cfg(feature = "bench")]
        args::Command::Calibrate(args) => calibrate::run(args, out),
        #[cfg(feature = "bench")]
        args::Command::Bench(args) => bench::run(args, out),
    }
}

/// Returns an error as one line that a terminal can show: names of files and texts of a recording may
/// have control characters.
fn message(error: &anyhow::Error) -> String {
    // Commands name the files that they read and write. What is left comes from standard output.
    let is_output = error.chain().next().is_some_and(|outermost| {
        outermost.is::<io::Error>()
            || outermost.downcast_ref::<serde_json::Error>().is_some_and(serde_json::Error::is_io)
    });
    let message = match is_output {
        true => format!("cannot write standard output: {error:#}"),
        false => format!("{error:#}"),
    };
    text::printable(&message)
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
