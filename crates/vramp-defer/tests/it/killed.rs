//! A process that is killed while it spills, and the next one.

use std::path::Path;

use crate::child::Child;

use super::below::{to_disk, until};
use super::*;

/// A rig with its files in `directory`.
fn spilling(directory: &Path, names: FileNames) -> Rig {
    Plan { names, directory: Some(directory.to_owned()), ..to_disk(None) }.build()
}

/// In the child: spills buffers to the disk and restores them until it is killed.
fn spill_until_killed(directory: &Path) -> ! {
    let rig = spilling(directory, child::names());
    let buffers: Vec<_> = (1..=4).map(|byte| rig.filled(MIB(24), byte)).collect();
    let mut told = false;
    loop {
        for (buffer, byte) in buffers.iter().zip(1..) {
            rig.fill(buffer, byte);
        }
        rig.manager.spill(MIB(64));
        if !std::mem::replace(&mut told, true) {
            child::ready();
        }
    }
}

fn files(directory: &Path) -> usize {
    std::fs::read_dir(directory).unwrap().count()
}

#[test]
fn of_a_process_killed_while_it_spills_no_file_is_left_at_the_next_start() {
    if let Some(directory) = child::directory() {
        spill_until_killed(&directory);
    }
    let name = "killed::of_a_process_killed_while_it_spills_no_file_is_left_at_the_next_start";
    let directory = tempfile::tempdir().unwrap();
    let child = Child::start(name, directory.path(), FileNames::Shown);
    child.kill();
    assert!(files(directory.path()) > 0);
    let next = || spilling(directory.path(), FileNames::Shown);
    // The kernel closes the last files once their transfers have ended.
    until(|| next().store.as_ref().unwrap().swept().in_use == 0);
    assert_eq!(files(directory.path()), 0);
    let rig = next();
    let buffer = rig.filled(MIB(24), 5);
    rig.manager.spill(MIB(24));
    rig.expect(&buffer, 5);
    drop(buffer);
    drop(rig);
    assert_eq!(files(directory.path()), 0);
}

#[test]
fn hidden_files_of_a_process_killed_while_it_spills_are_gone_at_once() {
    if let Some(directory) = child::directory() {
        spill_until_killed(&directory);
    }
    let name = "killed::hidden_files_of_a_process_killed_while_it_spills_are_gone_at_once";
    let directory = tempfile::tempdir().unwrap();
    let child = Child::start(name, directory.path(), FileNames::Hidden);
    assert_eq!(files(directory.path()), 0);
    child.kill();
    assert_eq!(files(directory.path()), 0);
}
