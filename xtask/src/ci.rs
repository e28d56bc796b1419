//! `cargo xtask ci`: what every change must pass, cheapest first.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result};

use crate::{models, shell, tidy};

/// Examples that need no card, as package and name. Each runs to its end and must succeed.
const EXAMPLES: [(&str, &str); 4] = [
    ("vramp-alloc", "hello"),
    ("vramp-defer", "larger_than_the_card"),
    ("vramp-defer", "read_in_place"),
    ("vramp-defer", "spill_soak"),
];

/// Runs every step; the first failure ends it and says what to do.
pub fn run(root: &Path) -> Result<()> {
    let start = Instant::now();
    step("format", "run `cargo fmt --all`", || {
        shell::run(cargo(root).args(["fmt", "--all", "--check"]))
    })?;
    step("tidy", "mend what is printed above; `cargo xtask tidy` checks again", || {
        tidy::run(root)
    })?;
    step("clippy", "mend the lints; `cargo clippy --workspace --all-targets` shows them", || {
        let args = ["clippy", "--workspace", "--all-targets", "--locked", "--", "-D", "warnings"];
        shell::run(cargo(root).args(args))
    })?;
    step("tests", "run the failed test alone: `cargo test -p CRATE NAME`", || tests(root))?;
    step("models", "explore them alone: `cargo xtask loom`", || models::run(root, models::SHORT))?;
    step("doc tests", "run them alone: `cargo test --doc -p CRATE`", || {
        shell::run(cargo(root).args(["test", "--workspace", "--doc", "--locked"]))
    })?;
    step("documentation", "mend the links: `cargo doc --workspace --no-deps`", || {
        let mut doc = cargo(root);
        doc.env("RUSTDOCFLAGS", "-D warnings");
        shell::run(doc.args([
            "doc",
            "--workspace",
            "--no-deps",
            "--document-private-items",
            "--locked",
        ]))
    })?;
    step("examples", "run the failed one: `cargo run -p CRATE --example NAME`", || {
        shell::run(cargo(root).args(["build", "--workspace", "--examples", "--locked"]))?;
        EXAMPLES.iter().try_for_each(|(package, name)| {
            shell::run(cargo(root).args(["run", "--locked", "-p", package, "--example", name]))
        })
    })?;
    println!("ci: everything passed in {:.0} s", start.elapsed().as_secs_f64());
    Ok(())
}

fn cargo(root: &Path) -> Command {
    let mut command = Command::new("cargo");
    command.current_dir(root);
    command
}

/// Unit and integration tests: with nextest where it is installed, which prints one summary.
fn tests(root: &Path) -> Result<()> {
    let nextest = cargo(root)
        .args(["nextest", "--version"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success());
    if nextest {
        shell::run(cargo(root).args([
            "nextest",
            "run",
            "--workspace",
            "--locked",
            "--no-fail-fast",
        ]))
    } else {
        shell::run(cargo(root).args([
            "test",
            "--workspace",
            "--lib",
            "--bins",
            "--tests",
            "--locked",
        ]))
    }
}

/// Runs one step between two lines that name it and its time.
fn step(name: &str, hint: &str, work: impl FnOnce() -> Result<()>) -> Result<()> {
    println!("ci: {name} ...");
    let start = Instant::now();
    work().with_context(|| format!("ci: {name} failed; {hint}"))?;
    println!("ci: {name} passed in {:.1} s", start.elapsed().as_secs_f64());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_step_says_what_to_do() {
        let error =
            step("format", "run `cargo fmt`", || anyhow::bail!("it is crooked")).unwrap_err();
        assert_eq!(error.to_string(), "ci: format failed; run `cargo fmt`");
        assert_eq!(error.root_cause().to_string(), "it is crooked");
    }
}
