//! Checks on a card that slices of vramp do what cudarc's own do: `cargo run --release --example card`.
//!
//! It needs libcuda alone. Prints a line for each check, and fails if one does. Runs only the checks whose names contain
//! the first argument, if there is one.

#![allow(clippy::unwrap_used, reason = "a check fails by panicking")]

#[path = "../tests/it/checks.rs"]
mod checks;
#[path = "../tests/it/graphs.rs"]
mod graphs;
#[path = "../tests/it/on_a_card.rs"]
mod on_a_card;
#[path = "../tests/it/random.rs"]
mod random;

use std::panic::catch_unwind;
use std::process::{Command, ExitCode};

/// Asks for the check that loses the device, in a process of its own.
const LOST: &str = "--lost-device";

fn main() -> ExitCode {
    // SAFETY: it loads the library, which other calls do too.
    if !unsafe { cudarc::driver::sys::is_culib_present() } {
        eprintln!("There is no libcuda here: run this on a machine with a card.");
        return ExitCode::FAILURE;
    }
    let only = std::env::args().nth(1).unwrap_or_default();
    if only == LOST {
        checks::lost_device();
        return ExitCode::SUCCESS;
    }
    let last: [(&str, fn()); 2] = [
        ("random programs on several streams keep their contents", || {
            (0..20).for_each(random::program);
        }),
        ("a lost device is an error, and drops go on", lose_the_device),
    ];
    let all = checks::CHECKS.iter().chain(graphs::CHECKS).chain(on_a_card::CHECKS).chain(&last);
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

fn lose_the_device() {
    let program = std::env::current_exe().unwrap();
    assert!(Command::new(program).arg(LOST).status().unwrap().success());
}
