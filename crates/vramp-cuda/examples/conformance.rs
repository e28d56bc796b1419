//! Checks that a card keeps the rules of the device contract.
//!
//! `cargo run --release --example conformance [ordinal]` prints one line for each rule and ends
//! with 1 if one is broken. A check that loses the device runs in a child of this program, because
//! a process cannot use a lost card again.

use std::error::Error;
use std::process::{Command, ExitCode};

use vramp_cuda::CudaDriver;
use vramp_driver::Driver;
use vramp_driver::conformance::{self, Case, Verdict};

/// What a child is started with, before the name of its case.
const CHILD: &str = "--one";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    run(&args).unwrap_or_else(|error| {
        eprintln!("error: {error}");
        ExitCode::FAILURE
    })
}

fn run(args: &[String]) -> Result<ExitCode, Box<dyn Error>> {
    match args {
        [] => check(0),
        [ordinal] => check(ordinal.parse()?),
        [flag, name, ordinal] if flag == CHILD => check_one(name, ordinal.parse()?),
        _ => Err("usage: conformance [ordinal]".into()),
    }
}

/// Every case: the destructive ones first, each in a process of its own, while no context of ours
/// stands beside them.
fn check(ordinal: u32) -> Result<ExitCode, Box<dyn Error>> {
    vramp_cuda::devices()?;
    let mut broken = 0;
    for case in conformance::destructive_cases() {
        let status = Command::new(std::env::current_exe()?)
            .args([CHILD, case.name, &ordinal.to_string()])
            .status()?;
        broken += u32::from(!status.success());
    }
    let device = CudaDriver::open(ordinal)?;
    let mut passed = 0;
    for case in conformance::cases() {
        match print(&case, &device) {
            Verdict::Passed => passed += 1,
            Verdict::Failed(_) => broken += 1,
            Verdict::NotApplicable => {}
        }
    }
    println!("{} ({}): {passed} passed, {broken} broken", device.info().id, device.info().name);
    Ok(if broken == 0 && passed > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// One destructive case, in the child.
fn check_one(name: &str, ordinal: u32) -> Result<ExitCode, Box<dyn Error>> {
    let cases = conformance::destructive_cases();
    let case =
        cases.iter().find(|case| case.name == name).ok_or("no destructive case of this name")?;
    let device = CudaDriver::open(ordinal)?;
    let broken = matches!(print(case, &device), Verdict::Failed(_));
    Ok(if broken { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn print(case: &Case, device: &CudaDriver) -> Verdict {
    let verdict = case.run(device);
    match &verdict {
        Verdict::Passed => println!("passed          {}", case.name),
        Verdict::NotApplicable => println!("not applicable  {}", case.name),
        Verdict::Failed(seen) => println!("BROKEN          {}: {seen}", case.name),
    }
    verdict
}
