//! `vramp exec` around programs that do what few do with CUDA, and may.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use super::exec_cuda::{Run, changes};

const RECORD: [&str; 2] = ["--record", "run.vtrace"];

/// Runs a case of `attacks` in each mode.
fn in_every_mode(way: &str, case: &str) {
    for options in [&RECORD[..], &["--pool"], &["--pool", "--limit", "120MiB"]] {
        let ended = Run::new(options, &["attacks", way, case]).succeed();
        assert_eq!(ended.text(), "done\n", "{case} {options:?}");
    }
}

#[test]
fn frees_go_on_after_captures_however_they_end() {
    in_every_mode("threads", "captures");
}

#[test]
fn what_is_freed_in_a_capture_is_there_after_it() {
    in_every_mode("runtime", "kept");
}

#[test]
fn memory_of_another_context_outlives_the_primary_one() {
    in_every_mode("runtime", "reset");
    let ended = Run::new(&RECORD, &["attacks", "runtime", "reset"]).succeed();
    assert_eq!(changes(&ended.trace()), [1024, -1024, 2048, -2048]);
}

#[test]
fn requests_use_the_pool_that_the_program_chose() {
    let ended = Run::new(&["--pool"], &["attacks", "runtime", "pools"]).succeed();
    assert_eq!(ended.calls_of("cuMemAllocAsync"), 1, "{:?}", ended.calls());
    assert!(ended.error().contains("1 request served by the pool"), "{}", ended.error());
}

#[test]
fn threads_use_memory_until_their_end() {
    in_every_mode("runtime", "threads");
}

#[test]
fn streams_end_before_the_memory_of_their_order() {
    for late in ["0", "80"] {
        for options in [&RECORD[..], &["--pool"]] {
            let run = Run::new(options, &["attacks", "runtime", "streams", "200"]);
            run.env("FAKE_CUDA_LATE_US", late).succeed();
        }
    }
}

#[test]
fn a_pause_waits_for_captures_and_breaks_none() {
    let folder = tempfile::tempdir().unwrap();
    let mut run = Run::new(&["--pool", "--sleepable"], &["attacks", "runtime", "pauses"])
        .env("XDG_RUNTIME_DIR", folder.path());
    run.command.stderr(Stdio::null());
    let mut program = run.command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut output = BufReader::new(program.stdout.take().unwrap()).lines();
    assert_eq!(output.next().unwrap().unwrap(), "ready");
    for action in ["pause", "resume", "pause", "resume"] {
        let mut ctl = Command::new(env!("CARGO_BIN_EXE_vramp"));
        ctl.env("XDG_RUNTIME_DIR", folder.path()).args(["ctl", action, "attacks"]);
        let ended = ctl.output().unwrap();
        assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    }
    drop(program.stdin.take());
    assert_eq!(output.next().unwrap().unwrap(), "done");
    assert!(program.wait().unwrap().success());
}

#[test]
fn a_library_uses_memory_while_it_is_loaded_and_the_pool_opened() {
    for options in [&RECORD[..], &["--pool"]] {
        for after_us in ["0", "500", "1000", "2000"] {
            let run = Run::new(options, &["attacks", "runtime", "constructor", after_us]);
            assert_eq!(run.succeed().text(), "done\n", "{options:?} {after_us}");
        }
    }
}
