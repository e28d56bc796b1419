//! Processes that are killed after any step of a turn.

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use super::*;

/// Set in a child: the directory.
const DIRECTORY: &str = "VRAMP_TEST_TURNS";
/// Set in a child: the step after which it is killed.
const STEP: &str = "VRAMP_TEST_STEP";
const TEST: &str = "turns::tests::a_process_killed_after_any_step_leaves_no_turn_and_no_file";

/// Every step of a process that waits for the turn, holds it, and releases it.
const STEPS: [&str; 8] =
    ["made", "opened", "named", "placed", "requested", "held", "unmarked", "unlisted"];

const LONG: Duration = Duration::from_secs(60);

pub fn reach(step: &'static str) {
    if std::env::var(STEP).is_ok_and(|wanted| wanted == step) {
        let own = rustix::process::getpid();
        rustix::process::kill_process(own, rustix::process::Signal::KILL)
            .expect("it is this process");
    }
}

fn open(directory: &Path, program: &str) -> Turns {
    let directory = &directory.join("turns");
    Turns::open(&TurnsConfig { directory, card: "card", program }).expect("a directory of the test")
}

fn wait_until(what: &str, mut reached: impl FnMut() -> bool) {
    let deadline = Instant::now() + LONG;
    while !reached() {
        assert!(Instant::now() < deadline, "not reached: {what}");
        std::thread::yield_now();
    }
}

#[test]
fn a_process_killed_after_any_step_leaves_no_turn_and_no_file() {
    if let Ok(directory) = std::env::var(DIRECTORY) {
        let turns = open(Path::new(&directory), "killed");
        turns
            .acquire(Need::Card, LONG)
            .expect("the parent releases it")
            .release()
            .expect("released");
        panic!("it was not killed");
    }
    for step in STEPS {
        let folder = tempfile::tempdir().expect("a folder");
        let turns = open(folder.path(), "parent");
        let first = turns.acquire(Need::Card, LONG).expect("the turn is free");
        let program = std::env::current_exe().expect("this program");
        let mut child = Command::new(program)
            .args(["--exact", TEST])
            .env(DIRECTORY, folder.path())
            .env(STEP, step)
            .spawn()
            .expect("a child");
        let mut status = None;
        wait_until(step, || {
            status = child.try_wait().expect("a child");
            status.is_some() || turns.status().expect("a directory").waiting.len() == 1
        });
        // Another waits behind the child, if that lives.
        let mut behind = turns.join(Need::Card).expect("a directory");
        first.release().expect("held");
        assert!(behind.wait(LONG).expect("a directory"), "{step}");
        let status = status.map_or_else(|| child.wait(), Ok).expect("a child");
        assert_eq!(status.signal(), Some(9), "{step}: {status:?}");
        behind.into_turn().expect("it waited").release().expect("held");
        assert_eq!(
            turns.status().expect("a directory"),
            TurnsStatus { holder: None, waiting: vec![] }
        );
        let files = std::fs::read_dir(turns.directory()).expect("a directory");
        assert_eq!(files.count(), 0, "{step}");
    }
}
