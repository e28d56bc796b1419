//! Processes that are killed while they write, and file size limits.

use crate::common::child;
use std::process::Command;

use crate::common::child::Child;
use vramp_tiers::disk::{ChargeTo, SweepReport};

use super::*;

/// In the child: writes until it is killed.
fn write_until_killed(dir: &Path) -> ! {
    let (_manager, space) = space();
    let config = DiskConfig { names: child::names(), ..SMALL };
    let store = DiskStore::open(dir, config, &space).unwrap();
    let data = [span(&pattern(1, 8 << 20))];
    let _kept = store.write(&data, ChargeTo::Space).unwrap();
    // All files exist from here on. A file that is being created may be swept and created again.
    drop(store.write(&data, ChargeTo::Space).unwrap());
    child::ready();
    loop {
        drop(store.write(&data, ChargeTo::Space).unwrap());
    }
}

#[test]
fn what_a_killed_process_left_is_swept_and_a_living_ones_files_are_not() {
    if let Some(dir) = child::directory() {
        write_until_killed(&dir);
    }
    let name = "disk::killed::what_a_killed_process_left_is_swept_and_a_living_ones_files_are_not";
    let dir = tempfile::tempdir().unwrap();
    let (_manager, space) = space();
    let open = || DiskStore::open(dir.path(), SMALL, &space).unwrap();
    let mut child = Child::start(name, dir.path(), FileNames::Shown);
    let living = open().swept();
    assert_eq!(living, SweepReport { in_use: 4, ..SweepReport::default() });
    assert!(child.is_alive(), "the child still writes");

    child.kill();
    assert_eq!(files(dir.path()).len(), 4);
    // The kernel unlocks the last files only after their transfers.
    let mut store = open();
    let mut removed = store.swept().removed;
    for _ in 0..100 {
        if store.swept().in_use == 0 {
            break;
        }
        store = open();
        removed += store.swept().removed;
    }
    assert_eq!((removed, store.swept().foreign), (4, 0));
    assert!(files(dir.path()).is_empty());
    drop(store.write(&[zeros(1 << 20)], ChargeTo::Space).unwrap());
    assert_eq!(open().swept().removed, 0);
}

#[test]
fn of_hidden_files_nothing_is_left_when_a_process_is_killed() {
    if let Some(dir) = child::directory() {
        write_until_killed(&dir);
    }
    let name = "disk::killed::of_hidden_files_nothing_is_left_when_a_process_is_killed";
    let dir = tempfile::tempdir().unwrap();
    let child = Child::start(name, dir.path(), FileNames::Hidden);
    assert!(files(dir.path()).is_empty());
    child.kill();
    assert!(files(dir.path()).is_empty());
}

#[test]
fn a_limit_on_the_size_of_files_is_a_full_disk_and_does_not_kill() {
    if let Some(dir) = child::directory() {
        let (_manager, space) = space();
        let store = DiskStore::open(dir, SMALL, &space).unwrap();
        // Files of 4 MiB are too long here; shorter ones are not.
        drop(store.write(&[zeros(500 << 10)], ChargeTo::Space).unwrap());
        let error = store.write(&[zeros(3 << 20)], ChargeTo::Space).unwrap_err();
        assert!(error.to_string().contains("ulimit -f"), "{error}");
        assert_eq!(space.total(), Bytes::ZERO);
        store.audit().unwrap();
        return;
    }
    let name = "disk::killed::a_limit_on_the_size_of_files_is_a_full_disk_and_does_not_kill";
    let dir = tempfile::tempdir().unwrap();
    // 2048 blocks of 512 bytes.
    let mut limited = Command::new("sh");
    limited.args(["-c", "ulimit -f 2048 && exec \"$0\" --exact \"$1\""]);
    limited.arg(std::env::current_exe().unwrap()).arg(name).env(child::DIR, dir.path());
    let output = limited.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"), "{output:?}");
}
