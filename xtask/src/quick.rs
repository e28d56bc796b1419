//! `cargo xtask quick`: what a change breaks most often, in a minute and a half.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::cost::Watch;
use crate::suite::{self, Suite};
use crate::{ci, shell, tidy};

/// The longest that a test may take.
const TEST_LIMIT: Duration = Duration::from_secs(60);

/// Checks the format and the rules of the project, and runs the lints and the tests of the crates that
/// differ from the revision `base`.
pub fn run(root: &Path, base: &str) -> Result<()> {
    let watch = Watch::start()?;
    let files = changed(root, base)?;
    ci::format(root)?;
    tidy::run(root)?;
    let crates = crates(files.iter().map(String::as_str));
    if crates.is_empty() {
        println!("quick: no crate differs from {base}");
    } else {
        println!("quick: {} differ from {base}", Vec::from_iter(crates.iter().copied()).join(", "));
        let packages: Vec<String> =
            crates.iter().flat_map(|name| ["-p", name]).map(str::to_owned).collect();
        shell::lint_builds();
        let built = suite::build(root, &packages)?;
        ensure!(built.warnings == 0, "{} warnings; mend what is printed above", built.warnings);
        if built.tests.is_empty() {
            println!("quick: they have no tests");
        } else {
            Suite::of(&built.tests)?.run(root, TEST_LIMIT)?;
        }
    }
    for (folder, command) in [("python/", "cargo xtask python"), ("docs/", "cargo xtask site")] {
        if files.iter().any(|file| file.starts_with(folder)) {
            println!("quick: {folder} differs too, which `{command}` checks");
        }
    }
    println!("quick: passed: {}", watch.read()?);
    Ok(())
}

/// The files that differ from a revision, and those that are new.
fn changed(root: &Path, base: &str) -> Result<Vec<String>> {
    let git =
        |arguments: &[&str]| shell::output(Command::new("git").current_dir(root).args(arguments));
    let tracked = git(&["diff", "--name-only", base, "--"]).with_context(|| {
        format!("git cannot compare with '{base}'; give a branch, a tag or a commit")
    })?;
    let new = git(&["ls-files", "--others", "--exclude-standard"])?;
    Ok(tracked.lines().chain(new.lines()).map(str::to_owned).collect())
}

/// The crates that files belong to.
fn crates<'a>(files: impl Iterator<Item = &'a str>) -> BTreeSet<&'a str> {
    let name = |file: &'a str| {
        let mut folders = file.split('/');
        match folders.next() {
            Some("crates") => folders.next(),
            Some("xtask") => Some("xtask"),
            _ => None,
        }
    };
    files.filter_map(name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_belong_to_crates() {
        let files = ["crates/vramp-core/src/lib.rs", "xtask/src/ci.rs", "docs/a.md", "Cargo.toml"];
        let both = crates(files.into_iter().chain(["crates/vramp-core/README.md"]));
        assert_eq!(Vec::from_iter(both), ["vramp-core", "xtask"]);
    }

    #[test]
    fn what_is_not_committed_differs_from_the_last_commit_or_nothing_does() {
        let files = changed(&crate::root(), "HEAD").unwrap();
        assert!(files.iter().all(|file| !file.is_empty()));
        assert!(changed(&crate::root(), "no-such-revision").is_err());
    }
}
