//! The program `vramp`, whose code is the library of this crate.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    vramp_cli::main()
}
