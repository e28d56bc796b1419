//! `cargo xtask ci`: what every change must pass, cheapest first.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::budget::Budgets;
use crate::cost::{Cost, Watch};
use crate::suite::{self, Built, Suite};
use crate::{models, page, python, shell, site, tidy, torch};

/// Examples that need no card. Each runs to its end and must succeed.
const EXAMPLES: [&str; 8] = [
    "hello",
    "allocator",
    "reservations",
    "regions",
    "spill_manager",
    "three_lines",
    "larger_than_the_card",
    "read_in_place",
];

/// The longest that a test may take in CI, on a machine as fast as that of the budgets. Far above what
/// any takes: it ends tests that hang.
const TEST_LIMIT: Duration = Duration::from_secs(180);

/// Runs every step; the first failure ends it and says what to do. What cost too much is said at the end.
pub fn run(root: &Path) -> Result<()> {
    let budgets = Budgets::read(root)?;
    let slowness = budgets.slowness()?;
    let mut steps = Steps::default();
    steps.run("format", "run `cargo fmt --all`", || format(root))?;
    steps.run("tidy", "mend what is printed above; `cargo xtask tidy` checks again", || {
        tidy::run(root)
    })?;
    // One build: the lints are found while the tests are compiled.
    shell::lint_builds();
    let hint = "mend the errors and the lints; `cargo clippy --workspace --all-targets` shows them";
    let built = steps.run("build and lints", hint, || {
        let built = suite::build(root, &["--workspace".to_owned()])?;
        ensure!(built.warnings == 0, "{} warnings", built.warnings);
        Ok(built)
    })?;
    let programs =
        steps.run("tests", "run the failed test alone: `cargo test -p CRATE NAME`", || {
            Suite::of(&built.tests)?.run(root, TEST_LIMIT.mul_f64(slowness))
        })?;
    // The tests of the Python package run in one thread, beside steps that hardly use two. The build may
    // have replaced the file of this program.
    steps.run("python package", "install it alone: `cargo xtask python`", || {
        python::install_package(root, false)
    })?;
    let mut python = Command::new("/proc/self/exe");
    let python = shell::Background::start(
        python.current_dir(root).args(["python", "--installed"]),
        &root.join("target/python-check.log"),
    )?;
    steps.run("models", "explore them alone: `cargo xtask loom`", || {
        models::run(root, models::SHORT)
    })?;
    let hint = "mend the links, `cargo doc -p CRATE`, or the examples, `cargo test --doc -p CRATE`";
    steps.run("documentation", hint, || {
        let mut doc = cargo(root);
        doc.env("RUSTDOC", root.join("xtask/src/rustdoc.sh"));
        shell::run(doc.args(["test", "--workspace", "--doc", "--locked"]))
    })?;
    steps.run("torch headers", "compile alone: `cargo xtask torch --headers`", || {
        torch::headers(root, &[torch::TESTED.to_owned()])
    })?;
    steps.run("site", "mend the links: `cargo xtask site`", || {
        site::run(root, &built.program("vramp")?.file, false)
    })?;
    steps.run(
        "page",
        "open the pages alone: `cargo xtask page`; they are in `target/page`",
        || page::run(root, &built.program("vramp")?.file, page::Scope::Smoke),
    )?;
    steps.run("examples", "run the failed one: `cargo run -p CRATE --example NAME`", || {
        examples(root, &built)
    })?;
    steps.run(
        "features",
        "build it alone: `cargo check -p vramp --no-default-features`",
        || {
            shell::run(cargo(root).args([
                "check",
                "-p",
                "vramp",
                "--no-default-features",
                "--locked",
            ]))
        },
    )?;
    steps.run("packages", "see `cargo publish --workspace --dry-run`", || {
        let args = ["--workspace", "--dry-run", "--no-verify", "--allow-dirty", "--quiet"];
        shell::run(cargo(root).arg("publish").args(args))
    })?;
    steps.run("python", "check the package alone: `cargo xtask python`", || python.wait())?;
    budgets.check(slowness, &steps.finish(), &programs)?;
    println!("ci: everything passed");
    Ok(())
}

/// Builds what `cargo test` builds with these arguments, and runs the tests.
pub fn tests(root: &Path, limit: Duration, arguments: &[String]) -> Result<()> {
    shell::lint_builds();
    let workspace = ["--workspace".to_owned()];
    let built = suite::build(root, if arguments.is_empty() { &workspace } else { arguments })?;
    let programs = Suite::of(&built.tests)?.run(root, limit)?;
    for (name, cost) in &programs {
        println!("  {cost}  {name}");
    }
    Ok(())
}

/// Checks the format of every crate.
pub fn format(root: &Path) -> Result<()> {
    shell::run(cargo(root).args(["fmt", "--all", "--check"]))
}

/// A command of cargo in the workspace.
pub fn cargo(root: &Path) -> Command {
    let mut command = Command::new("cargo");
    command.current_dir(root);
    command
}

/// Checks the libraries that users build, with the oldest Rust that the manifest promises.
pub fn oldest(root: &Path) -> Result<()> {
    let manifest: toml::Table = std::fs::read_to_string(root.join("Cargo.toml"))?.parse()?;
    let version = manifest["workspace"]["package"]["rust-version"].as_str();
    let version = version.context("the workspace names no rust-version")?;
    if Command::new("rustup").arg("--version").output().is_err() {
        println!("no rustup here, so Rust {version} is not tried");
        return Ok(());
    }
    let mut check = Command::new("rustup");
    // The variables with which cargo started this program choose its own toolchain.
    check.current_dir(root).env_remove("RUSTUP_TOOLCHAIN").env_remove("CARGO");
    let crates = ["-p", "vramp", "-p", "vramp-capi", "-p", "vramp-python"];
    check.args(["run", "--install", version, "cargo", "check", "--lib", "--locked"]);
    shell::run(check.args(crates))
}

/// Runs the examples that need no card.
fn examples(root: &Path, built: &Built) -> Result<()> {
    for name in EXAMPLES {
        println!("ci: example {name}");
        built.program(name)?.run(root)?;
    }
    Ok(())
}

/// The steps that ran, with their costs.
#[derive(Default)]
pub struct Steps {
    done: Vec<(String, Cost)>,
}

impl Steps {
    /// Runs one step between two lines that name it and its cost.
    pub fn run<T>(
        &mut self,
        name: &str,
        hint: &str,
        work: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        println!("step {name} ...");
        let watch = Watch::start()?;
        let made = work().with_context(|| format!("{name} failed; {hint}"))?;
        let cost = watch.read()?;
        println!("step {name} passed: {cost}");
        self.done.push((name.to_owned(), cost));
        Ok(made)
    }

    /// All steps and their sum, which is called `all`.
    pub fn finish(mut self) -> Vec<(String, Cost)> {
        let mut all = Cost::default();
        self.done.iter().for_each(|(_, cost)| all += *cost);
        self.done.push(("all".to_owned(), all));
        self.done
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_step_says_what_to_do() {
        let crooked = || -> Result<()> { anyhow::bail!("it is crooked") };
        let error = Steps::default().run("format", "run `cargo fmt`", crooked).unwrap_err();
        assert_eq!(error.to_string(), "format failed; run `cargo fmt`");
        assert_eq!(error.root_cause().to_string(), "it is crooked");
    }
}
