//! A process that is killed while it spills, and the next one.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use super::below::{to_disk, until};
use super::*;

/// Where the child of a test shall spill to, and whether its files are hidden.
const DIR: &str = "VRAMP_TEST_SPILLING_DIR";
const HIDDEN: &str = "VRAMP_TEST_SPILLING_HIDDEN";
const READY: &str = "it spills";

/// In the child: sends buffers to the disk and takes them back until it is killed.
fn spill_until_killed(directory: &Path) -> ! {
    let names = match std::env::var_os(HIDDEN) {
        Some(_) => FileNames::Hidden,
        None => FileNames::Shown,
    };
    let directory = Some(directory.to_owned());
    let rig = Plan { names, directory, ..to_disk(None) }.build();
    let buffers: Vec<_> = (1..=4).map(|byte| rig.filled(MIB(24), byte)).collect();
    let mut told = false;
    loop {
        for (buffer, byte) in buffers.iter().zip(1..) {
            rig.fill(buffer, byte);
        }
        rig.manager.spill(MIB(64));
        if !std::mem::replace(&mut told, true) {
            println!("{READY}");
        }
    }
}

/// This test binary again, running the test `name` alone. Returns once it has spilled.
fn child(name: &str, directory: &Path, hidden: bool) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", name, "--nocapture"]).env(DIR, directory).stdout(Stdio::piped());
    if hidden {
        command.env(HIDDEN, "");
    }
    let mut child = command.spawn().unwrap();
    let lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
    assert!(lines.map(Result::unwrap).any(|line| line.contains(READY)), "the child ended early");
    child
}

fn files(directory: &Path) -> usize {
    std::fs::read_dir(directory).unwrap().count()
}

#[test]
fn of_a_process_killed_while_it_spills_no_file_is_left_at_the_next_start() {
    if let Some(directory) = std::env::var_os(DIR) {
        spill_until_killed(Path::new(&directory));
    }
    let name = "killed::of_a_process_killed_while_it_spills_no_file_is_left_at_the_next_start";
    let directory = tempfile::tempdir().unwrap();
    let mut child = child(name, directory.path(), false);
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(files(directory.path()) > 0);
    let next = || {
        let names = FileNames::Shown;
        Plan { names, directory: Some(directory.path().to_owned()), ..to_disk(None) }.build()
    };
    // The kernel lets go of the last files once their transfers have ended.
    until(|| next().store.as_ref().unwrap().swept().alive == 0);
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
    if let Some(directory) = std::env::var_os(DIR) {
        spill_until_killed(Path::new(&directory));
    }
    let name = "killed::hidden_files_of_a_process_killed_while_it_spills_are_gone_at_once";
    let directory = tempfile::tempdir().unwrap();
    let mut child = child(name, directory.path(), true);
    assert_eq!(files(directory.path()), 0);
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(files(directory.path()), 0);
}
