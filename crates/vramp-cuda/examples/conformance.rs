//! Runs the conformance suite of `vramp-driver` on a card.
//!
//! `cargo run --release --example conformance [ordinal]` prints one line for each case and exits
//! with 1 if one fails. The cases of two devices run with the card's first peer, if it has one. A case that loses the device runs in a child process, because a process
//! cannot use a lost card again.

use std::error::Error;
use std::process::{Command, ExitCode};

use vramp_cuda::CudaDriver;
use vramp_driver::Driver;
use vramp_driver::conformance::{self, Case, Verdict};

/// Flag that a child process is started with, before the name of its case.
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

/// Runs every case: the destructive ones first, each in a child process, while this process has no
/// context.
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
    match device.info().peers.first() {
        Some(&peer) => {
            let peer = CudaDriver::open(peer)?;
            println!("two devices, {} and {}:", device.info().id, peer.info().id);
            for case in conformance::peer_cases() {
                match shown(case.name, case.run(&device, &peer)) {
                    Verdict::Passed => passed += 1,
                    Verdict::Failed(_) => broken += 1,
                    Verdict::NotApplicable => {}
                }
            }
        }
        None => println!(
            "two devices: {} cases not run, because {} has no peer",
            conformance::peer_cases().len(),
            device.info().id
        ),
    }
    println!("{} ({}): {passed} passed, {broken} broken", device.info().id, device.info().name);
    Ok(if broken == 0 && passed > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Runs one destructive case in a child process.
fn check_one(name: &str, ordinal: u32) -> Result<ExitCode, Box<dyn Error>> {
    let cases = conformance::destructive_cases();
    let case =
        cases.iter().find(|case| case.name == name).ok_or("no destructive case of this name")?;
    let device = CudaDriver::open(ordinal)?;
    let broken = matches!(print(case, &device), Verdict::Failed(_));
    Ok(if broken { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn print(case: &Case, device: &CudaDriver) -> Verdict {
    shown(case.name, case.run(device))
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
