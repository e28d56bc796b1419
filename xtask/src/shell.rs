//! Running other programs, with the command in the error.

use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

/// Runs `command` with its output on the terminal; a non-zero exit is an error.
pub fn run(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("cannot start {command:?}"))?;
    ensure!(status.success(), "{command:?} ended with {status}");
    Ok(())
}

/// Runs `command` and returns what it prints; a non-zero exit is an error.
pub fn output(command: &mut Command) -> Result<String> {
    let output = command
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("cannot start {command:?}"))?;
    ensure!(output.status.success(), "{command:?} ended with {}", output.status);
    String::from_utf8(output.stdout).with_context(|| format!("{command:?} printed no UTF-8"))
}
