//! `cargo xtask compare`: whether two builds of the program make the same decisions.
//!
//! Both replay every trace on every allocator on the simulated card, without a limit and under two
//! limits, and plan every recorded graph capture. All that they print as JSON is compared, digests
//! of decisions and counts of driver calls included, except for times of the host.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Map, Value};

use crate::shell;

/// Folders with traces, relative to the root. One that is absent is named and passed over.
const TRACES: [&str; 2] = ["examples/traces", "../shared/traces"];
const CAPTURES: &str = "bench/captures";
/// Fields that are no decisions: times of the host, and the text of an out-of-memory error.
const IGNORED: [&str; 4] = ["replay_s", "read_s", "pack_ms", "oom"];
/// Arguments of the replays, besides traces and format.
const REPLAYS: [&[&str]; 3] = [&[], &["--limit", "20GiB"], &["--limit", "11500MiB"]];

/// Compares the programs built from `base` and from the working tree, or the program `new`.
///
/// `base` is a program, or a git revision that is built in `target/compare`.
pub fn run(root: &Path, base: &str, new: Option<&Path>, more: &[PathBuf]) -> Result<()> {
    let old = match Path::new(base).is_file() {
        true => PathBuf::from(base),
        false => build_revision(root, base)?,
    };
    let new = match new {
        Some(program) => program.to_owned(),
        None => build(root)?,
    };
    let mut traces = Vec::new();
    for folder in TRACES.iter().map(|folder| root.join(folder)).chain(more.iter().cloned()) {
        match folder.is_dir() {
            true => traces.extend(files(&folder)?),
            false => println!("compare: no folder {}", folder.display()),
        }
    }
    let captures = files(&root.join(CAPTURES))?;
    let mut differences = 0;
    for arguments in REPLAYS {
        let mut replay = vec!["replay", "--device", "sim:h200", "--allocator", "all"];
        replay.extend(arguments);
        differences += compare(&old, &new, &replay, &traces)?;
    }
    differences += compare(&old, &new, &["graph"], &captures)?;
    ensure!(differences == 0, "compare: {differences} rows differ");
    Ok(())
}

/// Prints each field that differs, and returns how many rows have one.
fn compare(old: &Path, new: &Path, arguments: &[&str], inputs: &[PathBuf]) -> Result<usize> {
    let (old, new) = (rows(old, arguments, inputs)?, rows(new, arguments, inputs)?);
    let name = arguments.join(" ");
    ensure!(!old.is_empty(), "`{name}` printed no row");
    ensure!(old.len() == new.len(), "`{name}`: {} rows and {} rows", old.len(), new.len());
    let mut differing = 0;
    for (old, new) in old.iter().zip(&new) {
        let fields = differences(old, new);
        for field in &fields {
            println!("{name}: {} {}: {field}", text(old, "trace"), text(old, "allocator"));
        }
        differing += usize::from(!fields.is_empty());
    }
    println!("compare: {name}: {} rows, {differing} differ", old.len());
    Ok(differing)
}

fn text(row: &Map<String, Value>, key: &str) -> String {
    row.get(key).and_then(Value::as_str).unwrap_or_default().to_owned()
}

/// The fields whose values differ, each with both values.
fn differences(old: &Map<String, Value>, new: &Map<String, Value>) -> Vec<String> {
    let mut keys: Vec<&String> = old.keys().chain(new.keys()).collect();
    keys.sort();
    keys.dedup();
    keys.into_iter()
        .filter(|key| !IGNORED.contains(&key.as_str()) && old.get(*key) != new.get(*key))
        .map(|key| {
            let show =
                |row: &Map<String, Value>| row.get(key).map_or("absent".into(), Value::to_string);
            format!("{key} was {}, is {}", show(old), show(new))
        })
        .collect()
}

/// What `program` prints. It may fail: running out of memory is a result as well.
fn rows(program: &Path, arguments: &[&str], inputs: &[PathBuf]) -> Result<Vec<Map<String, Value>>> {
    let mut command = Command::new(program);
    command.args(arguments).arg("--json").args(inputs).stderr(Stdio::inherit());
    let output = command.output().with_context(|| format!("cannot start {command:?}"))?;
    String::from_utf8(output.stdout)?
        .lines()
        .map(|line| serde_json::from_str(line).with_context(|| format!("no object: {line}")))
        .collect()
}

/// The recordings in a folder, by name.
fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in
        fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?
    {
        let path = entry?.path();
        if path.extension().is_some_and(|end| end == "gz") {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// Builds the program in a working tree of the revision, which is kept for the next comparison.
fn build_revision(root: &Path, revision: &str) -> Result<PathBuf> {
    let git =
        |arguments: &[&str]| shell::output(Command::new("git").current_dir(root).args(arguments));
    let commit = git(&["rev-parse", "--verify", &format!("{revision}^{{commit}}")])
        .with_context(|| format!("{revision} is neither a program nor a revision"))?;
    let tree = root.join("target/compare").join(commit.trim());
    if !tree.is_dir() {
        let Some(path) = tree.to_str() else { bail!("{} is no UTF-8", tree.display()) };
        git(&["worktree", "add", "--detach", path, commit.trim()])?;
    }
    build(&tree)
}

/// Builds the program of the working tree `root` for release.
fn build(root: &Path) -> Result<PathBuf> {
    let mut cargo = Command::new("cargo");
    cargo.current_dir(root).env("CARGO_TARGET_DIR", root.join("target"));
    shell::run(cargo.args([
        "build",
        "--release",
        "-p",
        "vramp-cli",
        "--bin",
        "vramp",
        "--locked",
    ]))?;
    Ok(root.join("target/release/vramp"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(text: &str) -> Map<String, Value> {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn fields_that_differ_or_are_absent_are_found_and_host_times_are_not() {
        let old = row(r#"{"decisions_sha256":"a","calls":{"map":{"count":1}},"replay_s":1.0}"#);
        assert!(differences(&old, &old).is_empty());
        let new = row(r#"{"decisions_sha256":"b","calls":{"map":{"count":2}},"replay_s":2.0}"#);
        let found = differences(&old, &new);
        assert_eq!(found.len(), 2);
        assert_eq!(found[1], "decisions_sha256 was \"a\", is \"b\"");
        let less = row(r#"{"decisions_sha256":"a"}"#);
        assert_eq!(differences(&old, &less), [r#"calls was {"map":{"count":1}}, is absent"#]);
    }
}
