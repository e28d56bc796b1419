//! Slices on a libcuda of the tests' own, which finds work that is not ordered: see `tests/fake/libcuda.c`.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod checks;
mod graphs;
mod random;

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Output};

use cudarc::driver::CudaContext;

use checks::Rig;

/// What a child of a test does.
const ROLE: &str = "VRAMP_CUDARC_TEST_ROLE";

/// Runs the test `name` alone in a process with the tests' libcuda.
fn child(name: &str, role: &str) -> Output {
    let folder = tempfile::tempdir().unwrap();
    let library = folder.path().join("libcuda.so.1");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake/libcuda.c");
    let compiled = Command::new("cc")
        .args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC", "-pthread"])
        .args([Path::new("-o"), &library, &source])
        .output()
        .expect("a C compiler is installed");
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    std::os::unix::fs::symlink(&library, folder.path().join("libcuda.so")).unwrap();
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env("LD_LIBRARY_PATH", folder.path())
        .env(ROLE, role)
        .output()
        .unwrap()
}

fn role() -> Option<String> {
    let role = std::env::var(ROLE).ok()?;
    assert_eq!(CudaContext::new(0).unwrap().name().unwrap(), "Fake");
    Some(role)
}

fn assert_passed(output: &Output) {
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{}\n{}", text(&output.stdout), text(&output.stderr));
}

#[test]
fn every_check_of_a_card_passes() {
    if role().is_some() {
        for (name, check) in checks::CHECKS.iter().chain(graphs::CHECKS) {
            eprintln!("{name}");
            check();
        }
        return;
    }
    assert_passed(&child("every_check_of_a_card_passes", "checks"));
}

#[test]
fn a_lost_device_is_an_error_and_drops_go_on() {
    if role().is_some() {
        return checks::lost_device();
    }
    assert_passed(&child("a_lost_device_is_an_error_and_drops_go_on", "lost"));
}

#[test]
fn random_programs_on_several_streams_keep_their_contents() {
    if role().is_some() {
        (0..40).for_each(random::program);
        return;
    }
    assert_passed(&child("random_programs_on_several_streams_keep_their_contents", "random"));
}

/// As with `CudaSlice`, one event stands for the last read: two streams that read at once need a record by hand.
#[test]
fn two_streams_that_read_at_once_are_recorded_by_hand_and_found_otherwise() {
    if let Some(role) = role() {
        let rig = Rig::new();
        let streams = [rig.stream(), rig.stream(), rig.stream()];
        let from = rig.filled(&streams[0], 1);
        let mut copies = [1, 2].map(|it| rig.filled(&streams[it], 0));
        for (stream, to) in streams[1..].iter().zip(&mut copies) {
            rig.copy_late(stream, &from, to);
            if role == "recorded" {
                rig.pool.record_use(&from, stream).unwrap();
            }
        }
        drop(from);
        let _over = rig.filled(&streams[0], 2);
        return;
    }
    let name = "two_streams_that_read_at_once_are_recorded_by_hand_and_found_otherwise";
    assert_passed(&child(name, "recorded"));
    let unrecorded = child(name, "unrecorded");
    let stderr = String::from_utf8_lossy(&unrecorded.stderr);
    assert_eq!(unrecorded.status.signal(), Some(6), "{stderr}");
    assert!(stderr.contains("a write beside a read of the same bytes"), "{stderr}");
}

/// What the tests' libcuda is for: without these it would prove nothing.
#[test]
fn the_tests_libcuda_ends_programs_that_are_wrong() {
    if let Some(role) = role() {
        let rig = Rig::new();
        let (one, two) = (rig.stream(), rig.stream());
        match &*role {
            // SAFETY: it is not safe, which is to be found.
            "unordered" => unsafe { rig.context.disable_event_tracking() },
            "foreign free" => {
                let slice = rig.filled(&one, 1);
                let at = slice.block().addr().number();
                // SAFETY: it is not safe, which is to be found.
                drop(unsafe { one.upgrade_device_ptr::<u32>(at, 1) });
            }
            other => panic!("{other}"),
        }
        let (from, mut to) = (rig.filled(&one, 1), rig.filled(&two, 2));
        rig.copy_late(&one, &from, &mut to);
        drop(two.clone_dtoh(&to));
        return;
    }
    for (role, found) in [
        ("unordered", "work beside a write of the same bytes"),
        ("foreign free", "the driver's free of memory that is not the driver's"),
    ] {
        let output = child("the_tests_libcuda_ends_programs_that_are_wrong", role);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.signal(), Some(6), "{role}: {stderr}");
        assert!(stderr.contains(found), "{role}: {stderr}");
    }
}
