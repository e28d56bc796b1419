//! Running other programs, with the command in the error.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
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

/// A command that runs beside others, with its output in a file. Dropping it ends it.
pub struct Background {
    child: Child,
    output: PathBuf,
    name: String,
}

impl Background {
    pub fn start(command: &mut Command, output: &Path) -> Result<Background> {
        surround(command);
        let file =
            File::create(output).with_context(|| format!("cannot write {}", output.display()))?;
        command.stdin(Stdio::null()).stderr(file.try_clone()?).stdout(file);
        let name = format!("{command:?}");
        let child = command.spawn().with_context(|| format!("cannot start {name}"))?;
        Ok(Background { child, output: output.to_owned(), name })
    }

    /// Waits for its end and prints its output; a non-zero exit is an error.
    pub fn wait(mut self) -> Result<()> {
        let status = self.child.wait()?;
        io::copy(&mut File::open(&self.output)?, &mut io::stdout())?;
        ensure!(status.success(), "{} ended with {status}", self.name);
        Ok(())
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        // Fails if it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_background_command_that_fails_is_an_error_with_its_name() {
        let output = std::env::temp_dir().join(format!("vramp-background-{}", std::process::id()));
        let run = |script: &str| {
            Background::start(Command::new("sh").args(["-c", script]), &output)?.wait()
        };
        run("echo fine").unwrap();
        let error = run("echo bad >&2; exit 3").unwrap_err().to_string();
        assert!(error.contains("exit 3") && error.contains("exit status: 3"), "{error}");
        assert_eq!(std::fs::read_to_string(&output).unwrap(), "bad\n");
        std::fs::remove_file(&output).unwrap();
    }
}
