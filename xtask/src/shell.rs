//! Running other programs, with the command in the error.

use std::process::{Command, Stdio};
use std::sync::OnceLock;

use anyhow::{Context, Result, anyhow, ensure};

/// Whether every build lints what it compiles.
static LINTS: OnceLock<()> = OnceLock::new();

/// From now on cargo compiles the crates of the workspace with clippy's driver, which is rustc with more
/// lints. So one build serves the lints and everything that runs.
pub fn lint_builds() {
    LINTS.get_or_init(|| ());
}

fn surround(command: &mut Command) {
    if LINTS.get().is_some() {
        command.env("RUSTC_WORKSPACE_WRAPPER", "clippy-driver");
    }
}

/// Runs `command` with its output on the terminal; a non-zero exit is an error.
pub fn run(command: &mut Command) -> Result<()> {
    surround(command);
    let status = command.status().with_context(|| format!("cannot start {command:?}"))?;
    ensure!(status.success(), "{command:?} ended with {status}");
    Ok(())
}

/// Runs `command` and returns what it prints; a non-zero exit is an error.
pub fn output(command: &mut Command) -> Result<String> {
    let (printed, ended) = captured(command)?;
    ended.map(|()| printed)
}

/// Runs `command` and returns what it prints and, if its exit is not zero, an error.
pub fn captured(command: &mut Command) -> Result<(String, Result<()>)> {
    surround(command);
    let output = command
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("cannot start {command:?}"))?;
    let printed = String::from_utf8(output.stdout);
    let printed = printed.with_context(|| format!("{command:?} printed no UTF-8"))?;
    let ended = match output.status.success() {
        true => Ok(()),
        false => Err(anyhow!("{command:?} ended with {}", output.status)),
    };
    Ok((printed, ended))
}
