//! `vramp top` and `vramp ctl` on budgets of this process.
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use assert_cmd::Command;
use serde_json::Value;
use vramp::budget::{Budget, BudgetConfig, Sleep, Usage};

const GIB: u64 = 1 << 30;

fn join(directory: &Path, group: &str, program: &str) -> Budget {
    Budget::join(&BudgetConfig {
        directory,
        card: "GPU-1",
        group,
        program,
        capacity: 80 * GIB,
        guaranteed: 10 * GIB,
        limit: None,
        priority: 3,
        timeout: Duration::ZERO,
    })
    .expect("a directory of the test")
}

fn vramp(directory: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vramp"));
    command.args(args).arg("--directory").arg(directory);
    command
}

fn stdout(directory: &Path, args: &[&str]) -> String {
    let assert = vramp(directory, args).assert().success();
    String::from_utf8(assert.get_output().stdout.clone()).expect("it is text")
}

fn refused(directory: &Path, args: &[&str], words: &[&str]) {
    let assert = vramp(directory, args).assert().code(1);
    let error = String::from_utf8(assert.get_output().stderr.clone()).expect("it is text");
    for word in words {
        assert!(error.contains(word), "'{word}' is not in: {error}");
    }
    assert_eq!(error.lines().count(), 1, "{error}");
}

#[test]
fn top_shows_the_members_of_all_groups_and_what_they_publish() {
    let folder = tempfile::tempdir().expect("a folder");
    let directory = &folder.path().join("vramp");
    let none = stdout(directory, &["top", "--once"]);
    assert!(none.starts_with("No process has a budget in "), "{none}");
    let (chat, search) = (join(directory, "a", "chat"), join(directory, "a", "search"));
    let other = join(directory, "b", "batch");
    chat.claim(30 * GIB, Duration::ZERO).expect("it is free");
    let looks = AtomicU64::new(0);
    let look = move || Usage { parked: looks.fetch_add(1, SeqCst) + GIB, ..Usage::default() };
    chat.on_look(look).expect("it is this process");
    let table = stdout(directory, &["top"]);
    let words = ["GPU-1, group a: 40.00 GiB of 80.00 GiB claimed or guaranteed, 40.00 GiB free"];
    for words in words.into_iter().chain(["GPU-1, group b", "chat", "batch", "guaranteed"]) {
        assert!(table.contains(words), "'{words}' is not in:\n{table}");
    }
    let json = stdout(directory, &["top", "--once", "--json", "--group", "a"]);
    let looks: Vec<Value> =
        json.lines().map(|line| serde_json::from_str(line).expect("it is JSON")).collect();
    let [look] = looks.as_slice() else { panic!("{json}") };
    assert_eq!((&look["group"], &look["free_bytes"]), (&"a".into(), &(40 * GIB).into()));
    let row = &look["members"][0];
    assert_eq!((&row["program"], &row["pid"]), (&"chat".into(), &std::process::id().into()));
    assert_eq!(row["claimed_bytes"], 30 * GIB);
    assert!(row["parked_bytes"].as_u64() > Some(GIB), "it was published for this look: {row}");
    assert!(row["limit_bytes"].is_null() && row["waits_for_bytes"].is_null());
    drop((chat, search, other));
    let none = stdout(directory, &["top", "--once"]);
    assert!(none.starts_with("No process has a budget in "), "{none}");
}

#[test]
fn ctl_sends_commands_and_says_what_came_of_them() {
    let folder = tempfile::tempdir().expect("a folder");
    let directory = &folder.path().join("vramp");
    let chat = join(directory, "a", "chat");
    chat.claim(30 * GIB, Duration::ZERO).expect("it is free");
    refused(directory, &["ctl", "pause", "chat"], &["(chat) has no handler for this"]);
    chat.on_request(|request| request.bytes.min(8 * GIB)).expect("it is this process");
    chat.on_sleep(|sleep| sleep == Sleep::Pause).expect("it is this process");
    let done = |args: &[&str]| stdout(directory, args);
    let id = std::process::id().to_string();
    let given = done(&["ctl", "give-back", &id, "4GiB"]);
    assert_eq!(given, format!("process {id} (chat): 4.00 GiB given back\n"));
    assert!(done(&["ctl", "limit", "chat", "24GiB"]).ends_with("limit set, 2.00 GiB given back\n"));
    assert_eq!((chat.claimed(), chat.limit()), (24 * GIB, Some(24 * GIB)));
    assert!(done(&["ctl", "limit", "chat", "none"]).ends_with("limit set\n"));
    assert_eq!(chat.limit(), None);
    assert!(done(&["ctl", "pause", "chat"]).ends_with("paused\n"));
    refused(directory, &["ctl", "resume", "chat"], &["could not"]);
    refused(directory, &["ctl", "give-back", "chat", "20GiB"], &["gave back only 16.00 GiB"]);
    refused(
        directory,
        &["ctl", "pause", "nosuch"],
        &["no process nosuch has a budget", "vramp top"],
    );
    let other = join(directory, "b", "chat");
    refused(directory, &["ctl", "pause", "chat"], &["chat means 2 members", "--all"]);
    other.on_sleep(|_| true).expect("it is this process");
    assert_eq!(done(&["ctl", "pause", "chat", "--all"]).lines().count(), 2);
    assert_eq!(done(&["ctl", "pause", "chat", "--group", "b"]).lines().count(), 1);
    for wrong in [&["ctl", "limit", "chat", "3"][..], &["top", "--interval", "0"], &["ctl"]] {
        vramp(directory, wrong).assert().code(2);
    }
}
