//! `cargo xtask mutants`: changes one place of the planners at a time and lets the tests of
//! `vramp-core` find it, with cargo-mutants; random programs do not count. A change that no test finds
//! is a promise that no test checks, unless `xtask/mutants.toml` says why it changes none.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// The files that are changed, from the workspace's root.
const FILES: [&str; 8] = [
    "crates/vramp-core/src/pool/index.rs",
    "crates/vramp-core/src/waiting.rs",
    "crates/vramp-core/src/pool/plan/vpmm.rs",
    "crates/vramp-core/src/pool/plan/order.rs",
    "crates/vramp-core/src/pool/plan/idle.rs",
    "crates/vramp-core/src/pool/plan/fill.rs",
    "crates/vramp-core/src/pool/state/free.rs",
    "crates/vramp-core/src/pool/state/idle.rs",
];

/// How many of them a short run changes.
const SHORT: usize = 2;

/// The table of explained mutants.
const TABLE: &str = "xtask/mutants.toml";

/// Mutants by file and name, and how many have that name.
type Mutants = BTreeMap<(String, String), usize>;

/// Which mutants are tried.
#[derive(Clone, Debug)]
pub enum Extent {
    All,
    /// Those of the first few files.
    Short,
    /// A sample: in cargo-mutants' words a shard, such as `0/10` for every tenth.
    Sample(String),
}

/// Runs cargo-mutants over the planners and compares what the tests do not find with the table.
pub fn run(root: &Path, extent: &Extent) -> Result<()> {
    let files = if matches!(extent, Extent::Short) { &FILES[..SHORT] } else { &FILES[..] };
    let explained = explained(&std::fs::read_to_string(root.join(TABLE))?)?;
    let out = root.join("target/mutants");
    std::fs::create_dir_all(&out)?;
    let mut mutants = Command::new("cargo");
    mutants.current_dir(root).args(["mutants", "--package", "vramp-core", "--no-shuffle"]);
    mutants.args(["--jobs", "1", "--timeout", "30", "--output"]).arg(&out);
    mutants.args(files.iter().flat_map(|file| ["--file", file]));
    if let Extent::Sample(shard) = extent {
        mutants.args(["--shard", shard]);
    }
    // What a random program finds is found by chance, and arenas do not use these files.
    mutants.args(["--", "--lib", "--test", "it", "--", "--skip", "random", "--skip", "arena::"]);
    // Each mutant is built anew and its tests take less than a second.
    mutants.env("CARGO_PROFILE_DEV_OPT_LEVEL", "0");
    let status = mutants.status().context("cannot start cargo: `cargo install cargo-mutants`")?;
    // 2: a mutant was missed. 3: the tests of one did not end, which is found.
    ensure!(matches!(status.code(), Some(0 | 2 | 3)), "{mutants:?} ended with {status}");
    let missed = std::fs::read_to_string(out.join("mutants.out/missed.txt"))?;
    // Of a sample it is unknown whether tests find the others of the table.
    let tried = if matches!(extent, Extent::Sample(_)) { &[][..] } else { files };
    compare(&missed, &explained, tried)
}

/// The mutants of the table: entries `[[survivor]]` with a file, the mutation as cargo-mutants names it
/// without its place, and the reason. Each stands for one mutant.
fn explained(text: &str) -> Result<Mutants> {
    let table: toml::Table = text.parse().context(TABLE)?;
    let survivors = table.get("survivor").and_then(toml::Value::as_array);
    let mut mutants = Mutants::new();
    for survivor in survivors.into_iter().flatten() {
        let text =
            |name: &str| survivor.get(name).and_then(toml::Value::as_str).unwrap_or_default();
        let (file, mutation, reason) = (text("file"), text("mutation"), text("reason"));
        ensure!(FILES.contains(&file), "{TABLE}: '{file}' is not among the files that are changed");
        ensure!(
            !mutation.is_empty() && !reason.is_empty(),
            "{TABLE}: {file}: no mutation or reason"
        );
        *mutants.entry((file.to_owned(), mutation.to_owned())).or_default() += 1;
    }
    Ok(mutants)
}

/// Fails if a mutant was missed that the table does not have, or if the table has one of the files that
/// were tried whole that was found.
fn compare(missed: &str, explained: &Mutants, tried: &[&str]) -> Result<()> {
    let mut found = Mutants::new();
    for mutant in missed.lines().filter_map(mutant) {
        *found.entry(mutant).or_default() += 1;
    }
    let unexplained = beyond(&found, explained, &FILES);
    ensure!(
        unexplained.is_empty(),
        "no test finds these: write one, or say why in {TABLE}{unexplained}"
    );
    let stale = beyond(explained, &found, tried);
    ensure!(stale.is_empty(), "tests find these: take them out of {TABLE}{stale}");
    let count: usize = found.values().sum();
    println!("{count} mutants were not found, each with its reason in {TABLE}");
    Ok(())
}

/// Lists the mutants of these files that `some` has more often than `others`.
fn beyond(some: &Mutants, others: &Mutants, files: &[&str]) -> String {
    let more = some.iter().filter(|(mutant, count)| {
        files.contains(&mutant.0.as_str()) && others.get(mutant).unwrap_or(&0) < count
    });
    more.map(|((file, mutation), count)| format!("\n  {file}: {mutation} ({count} times)"))
        .collect()
}

/// The mutant of a line `file:line:column: mutation`.
fn mutant(line: &str) -> Option<(String, String)> {
    let (place, mutation) = line.split_once(": ")?;
    let file = place.split(':').next()?;
    Some((file.to_owned(), mutation.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MISSED: &str = "crates/vramp-core/src/waiting.rs:7:5: replace > with >= in find\n";

    #[test]
    fn a_missed_mutant_needs_a_reason_and_a_reason_needs_a_missed_mutant() {
        let name = mutant(MISSED.trim_end()).expect("it has a place");
        let listed = Mutants::from([(name, 1)]);
        assert!(compare(MISSED, &listed, &FILES).is_ok());
        assert!(compare(&MISSED.repeat(2), &listed, &FILES).is_err(), "two of that name");
        assert!(compare(MISSED, &Mutants::new(), &FILES).is_err());
        assert!(compare("", &listed, &FILES).is_err());
        assert!(compare("", &listed, &FILES[..1]).is_ok(), "its file was not changed");
        assert!(compare(MISSED, &Mutants::new(), &[]).is_err(), "a sample");
    }

    #[test]
    fn each_entry_of_the_table_has_a_reason_and_a_file_that_exists() {
        let root = crate::root();
        let table = std::fs::read_to_string(root.join(TABLE)).expect("the table is there");
        explained(&table).expect("the table can be read");
        assert!(FILES.iter().all(|file| root.join(file).is_file()));
    }
}
