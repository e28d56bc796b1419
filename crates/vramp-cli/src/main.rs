//! The program `vramp`, whose code is the library of this crate.
#![forbid(unsafe_code)]

use std::process::ExitCode;

/// Keeps a command that is under way from aborting when the host has no memory left.
#[global_allocator]
static MEMORY: vramp_host::HostReserve = vramp_host::HostReserve;

fn main() -> ExitCode {
    ExitCode::from(vramp_cli::main(std::env::args_os()))
}
