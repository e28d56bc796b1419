//! `cargo xtask loom`: the models of what threads share, in every order that they can run in.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::shell;

/// Preemptions in one run of a model: how often a thread may be interrupted where it would have gone
/// on. More are hardly ever needed to show a fault.
pub const SHORT: Option<u32> = Some(2);

/// More than that for `nightly`.
pub const LONG: Option<u32> = Some(3);

/// The crates that have models.
const MODELLED: [&str; 4] = ["vramp-ipc", "vramp-alloc", "vramp-tiers", "vramp-capi"];

/// Explores the models; at most so many preemptions in one run of a model, or all that there can be.
///
/// Only the crate that is modelled is built with `--cfg loom`, so everything below it is shared with
/// the other tests.
pub fn run(root: &Path, preemptions: Option<u32>) -> Result<()> {
    for name in MODELLED {
        let mut models = Command::new(build(root, name)?);
        models.arg("models::");
        match preemptions {
            Some(count) => models.env("LOOM_MAX_PREEMPTIONS", count.to_string()),
            None => models.env_remove("LOOM_MAX_PREEMPTIONS"),
        };
        shell::run(&mut models)?;
    }
    Ok(())
}

/// Builds the unit tests of a crate for loom and returns the program.
fn build(root: &Path, name: &str) -> Result<PathBuf> {
    let mut cargo = Command::new("cargo");
    cargo.current_dir(root).args(["rustc", "-p", name, "--lib", "--profile", "test", "--locked"]);
    cargo.args(["--message-format=json-render-diagnostics", "--", "--cfg", "loom"]);
    // Lints are found in what users build; a model has constants of its own, such as no spins.
    cargo.args(["--cap-lints", "allow"]);
    let messages = shell::output(&mut cargo)?;
    let built = messages.lines().filter_map(program).next_back();
    built.with_context(|| format!("cargo named no test program of {name}"))
}

/// The executable that one of cargo's messages names, if any.
fn program(message: &str) -> Option<PathBuf> {
    let message: Value = serde_json::from_str(message).ok()?;
    message["executable"].as_str().map(PathBuf::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_test_program_is_found_among_cargos_messages() {
        assert_eq!(program(r#"{"executable":"/t/a-1"}"#), Some(PathBuf::from("/t/a-1")));
        assert_eq!(program(r#"{"executable":null}"#), None);
        assert_eq!(program("warning: text"), None);
    }
}
