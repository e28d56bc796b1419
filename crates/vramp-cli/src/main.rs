//! The program `vramp`. Everything it does is in the library of this crate.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    vramp_cli::main()
}
