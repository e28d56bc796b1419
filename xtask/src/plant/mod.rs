//! `cargo xtask plant`: plants one bug at a time into a copy of the sources and lets the life-cycle
//! program find it. A bug that is not found means that the program does not test that promise.

mod table;

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use crate::shell;
use crate::suite::{self, Suite};
use table::{PLANTS, Plant};

/// The longest that a test may take; a planted bug may make it hang.
const TEST_LIMIT: Duration = Duration::from_secs(60);

/// Operations for each preset, at most.
const STEPS: &str = "100000";

/// What has to find a planted bug.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Finder {
    /// The life-cycle program, with many operations.
    LifeCycles,
    /// The tests, as continuous integration runs them.
    Tests,
}

/// The crates whose tests are tried, one after the other until one finds the bug.
const TRIED: [&str; 2] = ["vramp-check", "vramp-alloc"];

/// Plants the bug of this number, from 1, or all of them.
///
/// The copy and its build are kept in `target/plant`, so each bug builds what it changes.
pub fn run(root: &Path, only: Option<usize>, finder: Finder) -> Result<()> {
    let copy = root.join("target/plant/tree");
    let mut missed = Vec::new();
    sources(root, &copy)?;
    let known = match finder {
        Finder::LifeCycles => survey(&copy)?,
        Finder::Tests => PathBuf::new(),
    };
    for (number, plant) in (1..).zip(&PLANTS) {
        if only.is_some_and(|only| only != number) {
            continue;
        }
        let path = copy.join(plant.file);
        let text = std::fs::read_to_string(&path).with_context(|| plant.file)?;
        std::fs::write(&path, planted(plant, &text)?)?;
        let found = match finder {
            Finder::LifeCycles => finds(&copy, &known),
            Finder::Tests => fails(&copy),
        };
        std::fs::write(&path, text)?;
        match found? {
            Some(finding) => println!("{number:2} found: {}\n   {finding}", plant.breaks),
            None => {
                println!("{number:2} NOT FOUND: {}", plant.breaks);
                missed.push(number);
            }
        }
    }
    if !missed.is_empty() {
        bail!("not found: {missed:?}; the program does not test these promises");
    }
    Ok(())
}

/// Returns the text with the bug in it.
fn planted(plant: &Plant, text: &str) -> Result<String> {
    let count = text.matches(plant.old).count();
    let Plant { breaks, file, old, new } = plant;
    ensure!(count == 1, "{file}: {count} places for the bug '{breaks}': change its text\n{old}");
    Ok(text.replacen(old, new, 1))
}

/// Copies what a build needs, and removes what is gone. Files that did not change keep their times,
/// so cargo builds only what changed.
fn sources(root: &Path, copy: &Path) -> Result<()> {
    std::fs::create_dir_all(copy)?;
    let list = shell::output(Command::new("git").current_dir(root).args([
        "ls-files",
        "-co",
        "--exclude-standard",
    ]))?;
    for file in list.lines() {
        let (from, to) = (root.join(file), copy.join(file));
        let Ok(bytes) = std::fs::read(&from) else { continue };
        if std::fs::read(&to).is_ok_and(|there| there == bytes) {
            continue;
        }
        if let Some(folder) = to.parent() {
            std::fs::create_dir_all(folder)?;
        }
        std::fs::write(to, bytes)?;
    }
    remove_others(copy, &list.lines().map(|file| copy.join(file)).collect())
}

/// Removes the files under `folder` that are not `wanted`.
fn remove_others(folder: &Path, wanted: &HashSet<PathBuf>) -> Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            remove_others(&path, wanted)?;
        } else if !wanted.contains(&path) {
            std::fs::remove_file(path)?;
        }
    }
    Ok(())
}

/// Builds the program. Not as fast as a release, but built twice as fast.
fn build(copy: &Path) -> Result<Command> {
    let target = copy.with_file_name("build");
    shell::run(
        Command::new("cargo")
            .current_dir(copy)
            .env("CARGO_TARGET_DIR", &target)
            .env("CARGO_PROFILE_RELEASE_INCREMENTAL", "true")
            .env("CARGO_PROFILE_RELEASE_DEBUG", "false")
            .env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "1")
            .args(["build", "--quiet", "--release", "--offline", "-p", "vramp-check"]),
    )?;
    let mut program = Command::new(target.join("release/vramp-check"));
    program.args(["lifecycle", "--steps", STEPS, "--bound", "10000"]);
    Ok(program)
}

/// Writes down what the program finds without a planted bug: those findings do not count.
fn survey(copy: &Path) -> Result<PathBuf> {
    let known = copy.with_file_name("known.txt");
    let found = shell::output(build(copy)?.arg("--survey"))?;
    let classes = found.lines().filter(|line| line.starts_with("# preset")).count();
    if classes > 0 {
        println!("{classes} findings without a planted bug do not count, see {}", known.display());
    }
    std::fs::write(&known, found)?;
    Ok(known)
}

/// Returns the first line of what the program finds, beside what is known.
fn finds(copy: &Path, known: &Path) -> Result<Option<String>> {
    let ran = build(copy)?.arg("--known").arg(known).stdout(Stdio::null()).output()?;
    if ran.status.success() {
        return Ok(None);
    }
    let text = String::from_utf8_lossy(&ran.stderr).into_owned();
    Ok(Some(text.lines().next().unwrap_or_default().chars().take(160).collect()))
}

/// Returns the first test that fails, if any.
fn fails(copy: &Path) -> Result<Option<String>> {
    for name in TRIED {
        let arguments = ["-p", name, "--target-dir", "../build"].map(str::to_owned);
        let tests = suite::build(copy, &arguments)?.tests;
        if let Some(failure) = Suite::of(&tests)?.first_failure(copy, TEST_LIMIT)? {
            return Ok(Some(failure));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_planted_bug_has_one_place() {
        let root = crate::root();
        for plant in &PLANTS {
            let text = std::fs::read_to_string(root.join(plant.file)).expect(plant.file);
            if let Err(error) = planted(plant, &text) {
                panic!("{error}");
            }
        }
    }
}
