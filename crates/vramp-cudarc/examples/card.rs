//! Checks on a card that slices of vramp do what cudarc's own do: `cargo run --release --example card`.
//!
//! It needs libcuda alone. Prints a line for each check, and fails if one does.

#![allow(clippy::unwrap_used, reason = "a check fails by panicking")]

#[path = "../tests/it/checks.rs"]
mod checks;
#[path = "../tests/it/graphs.rs"]
mod graphs;

use std::panic::catch_unwind;
use std::process::ExitCode;

fn main() -> ExitCode {
    // SAFETY: it loads the library, which other calls do too.
    if !unsafe { cudarc::driver::sys::is_culib_present() } {
        eprintln!("There is no libcuda here: run this on a machine with a card.");
        return ExitCode::FAILURE;
    }
    let only = std::env::args().nth(1).unwrap_or_default();
    let all = checks::CHECKS.iter().chain(graphs::CHECKS);
    let mut failed = 0;
    for (name, check) in all.filter(|(name, _)| name.contains(&only)) {
        match catch_unwind(check) {
            Ok(()) => println!("ok      {name}"),
            Err(_) => {
                println!("FAILED  {name}");
                failed += 1;
            }
        }
    }
    println!("{failed} failed");
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
