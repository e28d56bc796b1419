//! `cargo xtask nightly`: everything at length, before a release and after a change of a state machine.

use std::path::Path;
use std::time::Duration;

use anyhow::{Result, ensure};

use crate::ci::{self, Steps};
use crate::plant::{self, Finder};
use crate::suite::{self, Suite};
use crate::{install, models, mutants, page, python, rmm, sanitize, shell, torch};

/// How many times as many random programs are run as in CI.
pub const LENGTH: u32 = 20;
/// Tests run optimized, with all their assertions.
const PROFILE: &str = "nightly";
/// The longest that a test may take.
const TEST_LIMIT: Duration = Duration::from_secs(3600);
/// Operations of the life-cycle program for each preset.
const STEPS: &str = "1000000";

/// One of several machines that share the work, counted from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    index: usize,
    count: usize,
}

impl Shard {
    /// All of the work.
    pub const WHOLE: Shard = Shard { index: 0, count: 1 };

    /// Reads `1/4`, the first of four.
    pub fn parse(text: &str) -> Result<Shard, String> {
        let parts = text.split_once('/').and_then(|(nth, count)| {
            Some((nth.parse::<usize>().ok()?, count.parse::<usize>().ok()?))
        });
        match parts {
            Some((nth, count)) if 1 <= nth && nth <= count => Ok(Shard { index: nth - 1, count }),
            _ => Err(format!("'{text}' is no shard such as 1/4, the first of four")),
        }
    }

    fn has(self, place: usize) -> bool {
        place % self.count == self.index
    }
}

type Part = (&'static str, fn(&Path) -> Result<()>);

/// What runs beside the tests, the longest first.
const PARTS: [Part; 18] = [
    ("mutants", |root| mutants::run(root, &mutants::Extent::All)),
    ("planted bugs", |root| plant::run(root, None, Finder::LifeCycles)),
    ("planted bugs by tests", |root| plant::run(root, None, Finder::Tests)),
    ("models", |root| models::run(root, models::LONG)),
    ("life cycles", |root| lifecycle(root, &["--interface", "rust"])),
    ("life cycles through C", |root| lifecycle(root, &["--interface", "c"])),
    ("life cycles with threads", |root| lifecycle(root, &["--threads", "8"])),
    ("sanitizer", |root| sanitize::run(root, u64::from(LENGTH))),
    ("torture", |root| check(root, &["torture", "sim", "--seconds", "120"])),
    ("soaks", |root| {
        check(root, &["kv-soak", "sim", "--operations", "1000000"])?;
        check(root, &["spill-soak", "sim", "--seconds", "120"])?;
        check(root, &["sleep-soak", "sim", "--moves", "20000"])
    }),
    ("tests in one process", |root| {
        // Tests of one program run beside each other, as with `cargo test`.
        let tests = ["test", "--workspace", "--lib", "--bins", "--tests", "--locked"];
        shell::run(ci::cargo(root).args(tests).args(["--profile", PROFILE]))
    }),
    ("python with libraries", |root| python::check(root, true)),
    ("documentation", |root| {
        let mut doc = ci::cargo(root);
        doc.env("RUSTDOCFLAGS", "-D warnings");
        let args = ["doc", "--workspace", "--no-deps", "--document-private-items", "--locked"];
        shell::run(doc.args(args))
    }),
    ("torch headers", |root| torch::headers(root, &["all".to_owned()])),
    ("rmm", rmm::run),
    ("install", install::check::run),
    ("oldest Rust", ci::oldest),
    ("page", |root| page::run(root, &page::build(root)?, page::Scope::Whole)),
];

/// Runs a shard of everything. A part that fails ends it last: the others run first.
pub fn run(root: &Path, shard: Shard) -> Result<()> {
    let mut steps = Steps::default();
    let mut failed = Vec::new();
    let arguments = ["--workspace", "--profile", PROFILE];
    let built =
        steps.run("build", "build alone: `cargo test --no-run --profile nightly`", || {
            suite::build(root, &arguments.map(str::to_owned))
        })?;
    let tests = steps.run("tests at length", "repeat a test with the variables it prints", || {
        let suite = Suite::of(&built.tests)?.shard(|place| shard.has(place));
        suite.with(vramp_testing::LENGTH, &LENGTH.to_string()).run(root, TEST_LIMIT)
    });
    failed.extend(tests.err());
    for (place, (name, work)) in PARTS.into_iter().enumerate() {
        if shard.has(place) {
            failed.extend(steps.run(name, "see above", || work(root)).err());
        }
    }
    for (name, cost) in steps.finish() {
        println!("{cost}  {name}");
    }
    ensure!(
        failed.is_empty(),
        "{}",
        failed.iter().map(|it| format!("{it:#}\n")).collect::<String>()
    );
    println!("nightly: everything passed");
    Ok(())
}

fn lifecycle(root: &Path, arguments: &[&str]) -> Result<()> {
    check(root, &[&["lifecycle", "--steps", STEPS], arguments].concat())
}

/// Runs a program of `vramp-check`.
fn check(root: &Path, arguments: &[&str]) -> Result<()> {
    let run = ["run", "--release", "--locked", "-p", "vramp-check", "--"];
    shell::run(ci::cargo(root).args(run).args(arguments))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_divide_the_work() {
        assert_eq!(Shard::parse("1/1"), Ok(Shard::WHOLE));
        for place in 0..40 {
            let has = |nth: usize| Shard::parse(&format!("{nth}/4")).unwrap().has(place);
            assert_eq!((1..=4).filter(|nth| has(*nth)).count(), 1);
        }
        for wrong in ["", "0/4", "5/4", "1", "1/0", "a/b"] {
            assert!(Shard::parse(wrong).is_err(), "{wrong}");
        }
    }
}
