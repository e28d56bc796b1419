//! `cargo xtask ci`: what every change must pass, cheapest first.

use std::path::Path;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::{install, models, page, python, shell, site, tidy, torch};

/// Examples that need no card. Each runs to its end and must succeed.
const EXAMPLES: [&str; 10] = [
    "hello",
    "allocator",
    "reservations",
    "regions",
    "spill_manager",
    "three_lines",
    "larger_than_the_card",
    "read_in_place",
    "spill_soak",
    "sleep_soak",
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
    step("documentation", "mend the links: `cargo doc --workspace --no-deps`", || {
        let mut doc = cargo(root);
        doc.env("RUSTDOCFLAGS", "-D warnings");
        let args = ["doc", "--workspace", "--no-deps", "--document-private-items", "--locked"];
        shell::run(doc.args(args))
    })?;
    step("tests", "run the failed test alone: `cargo test -p CRATE NAME`", || tests(root))?;
    step("models", "explore them alone: `cargo xtask loom`", || models::run(root, models::SHORT))?;
    step("doc tests", "run them alone: `cargo test --doc -p CRATE`", || {
        shell::run(cargo(root).args(["test", "--workspace", "--doc", "--locked"]))
    })?;
    step("python", "check the package alone: `cargo xtask python`", || python::check(root, false))?;
    step("torch headers", "compile alone: `cargo xtask torch --headers`", || {
        torch::headers(root, &[])
    })?;
    step("site", "mend the links: `cargo xtask site`", || site::run(root))?;
    step("page", "open the pages alone: `cargo xtask page`; they are in `target/page`", || {
        page::run(root)
    })?;
    step("examples", "run the failed one: `cargo run -p CRATE --example NAME`", || examples(root))?;
    step("install", "install alone: `cargo xtask install-check`", || install::check::run(root))?;
    step("features", "build it alone: `cargo check -p vramp --no-default-features`", || {
        shell::run(cargo(root).args(["check", "-p", "vramp", "--no-default-features", "--locked"]))
    })?;
    step("packages", "see `cargo publish --workspace --dry-run`", || {
        let args = ["--workspace", "--dry-run", "--no-verify", "--allow-dirty", "--quiet"];
        shell::run(cargo(root).arg("publish").args(args))
    })?;
    step(
        "oldest Rust",
        "check with it alone: `rustup run VERSION cargo check -p vramp --lib`",
        || oldest(root),
    )?;
    println!("ci: everything passed in {:.0} s", start.elapsed().as_secs_f64());
    Ok(())
}

fn cargo(root: &Path) -> Command {
    let mut command = Command::new("cargo");
    command.current_dir(root);
    command
}

/// Checks the libraries that users build, with the oldest Rust that the manifest promises.
fn oldest(root: &Path) -> Result<()> {
    let manifest: toml::Table = std::fs::read_to_string(root.join("Cargo.toml"))?.parse()?;
    let version = manifest["workspace"]["package"]["rust-version"].as_str();
    let version = version.context("the workspace names no rust-version")?;
    if Command::new("rustup").arg("--version").output().is_err() {
        println!("ci: no rustup here, so Rust {version} is not tried");
        return Ok(());
    }
    let mut check = Command::new("rustup");
    // The variables with which cargo started this program choose its own toolchain.
    check.current_dir(root).env_remove("RUSTUP_TOOLCHAIN").env_remove("CARGO");
    let crates = ["-p", "vramp", "-p", "vramp-capi", "-p", "vramp-python"];
    check.args(["run", "--install", version, "cargo", "check", "--lib", "--locked"]);
    shell::run(check.args(crates))
}

/// Builds the examples with the features of the whole workspace, as the tests are, and runs them.
fn examples(root: &Path) -> Result<()> {
    let mut build = cargo(root);
    build.args(["build", "--workspace", "--locked", "--message-format=json-render-diagnostics"]);
    EXAMPLES.iter().for_each(|name| {
        build.args(["--example", name]);
    });
    let messages = shell::output(&mut build)?;
    let mut ran = 0;
    for line in messages.lines() {
        let message: Value = serde_json::from_str(line)?;
        if let Some(program) = message["executable"].as_str() {
            println!("ci: example {}", message["target"]["name"]);
            shell::run(Command::new(program).current_dir(root))?;
            ran += 1;
        }
    }
    ensure!(ran == EXAMPLES.len(), "{ran} examples ran of {}", EXAMPLES.len());
    Ok(())
}

/// Unit and integration tests, one program after the other.
fn tests(root: &Path) -> Result<()> {
    let args = ["test", "--workspace", "--lib", "--bins", "--tests", "--locked", "--no-fail-fast"];
    shell::run(cargo(root).args(args))
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
