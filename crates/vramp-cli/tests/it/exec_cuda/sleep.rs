//! Programs whose memory leaves the card while they work: `--sleepable`.

use std::os::unix::fs::FileExt;
use std::process::Stdio;
use std::thread;
use std::time::{Duration, Instant};

use super::*;

/// A program that works, under `vramp exec --sleepable`.
struct Worker {
    run: Child,
    folder: PathBuf,
}

impl Worker {
    /// Works on so many MiB. `number` tells workers of one folder apart.
    fn start(folder: &Path, number: u32, mib: &str) -> Worker {
        let steps = folder.join(format!("steps{number}"));
        let options = ["--pool", "--sleepable", "--capacity", "100MiB"];
        let mut run = Run::new(&options, &["worker", mib, steps.to_str().unwrap()])
            .env("XDG_RUNTIME_DIR", folder)
            .env("FAKE_CUDA_COUNTS", folder.join("counts"));
        let command = run.command.current_dir(folder);
        let run = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        Worker { run, folder: steps }
    }

    fn steps(&self) -> u64 {
        let mut bytes = [0; 8];
        let file = fs::File::open(&self.folder);
        match file.and_then(|file| file.read_exact_at(&mut bytes, 0)) {
            Ok(()) => u64::from_le_bytes(bytes),
            Err(_) => 0,
        }
    }

    fn wait_for_steps(&self, more: u64) {
        let (start, before) = (Instant::now(), self.steps());
        while self.steps() < before + more {
            assert!(start.elapsed() < Duration::from_secs(60), "no step in a minute");
            thread::sleep(Duration::from_millis(2));
        }
    }

    fn finish(self) -> (String, String) {
        let file = fs::File::options().write(true).open(&self.folder).unwrap();
        file.write_all_at(&1_u64.to_le_bytes(), 8).unwrap();
        let output = self.run.wait_with_output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        let (out, error) = (text(output.stdout), text(output.stderr));
        assert!(output.status.success(), "{}: {error}", output.status);
        (out, error)
    }
}

fn ctl(folder: &Path, action: &str) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vramp"));
    let done =
        command.args(["ctl", action, "worker"]).env("XDG_RUNTIME_DIR", folder).output().unwrap();
    assert!(done.status.success(), "{action}: {}", String::from_utf8_lossy(&done.stderr));
}

#[test]
fn a_program_sleeps_and_works_on_where_it_was() {
    let folder = tempfile::tempdir().unwrap();
    let worker = Worker::start(folder.path(), 0, "24");
    for round in 0..12 {
        worker.wait_for_steps(1 + round % 3);
        ctl(folder.path(), "pause");
        let before = worker.steps();
        thread::sleep(Duration::from_millis(10));
        assert_eq!(worker.steps(), before, "the program works while its memory is away");
        ctl(folder.path(), "resume");
    }
    let (out, error) = worker.finish();
    assert_eq!(out, "right\n");
    assert!(!error.contains("does not"), "{error}");
}

#[test]
fn two_programs_that_do_not_fit_together_take_turns() {
    let folder = tempfile::tempdir().unwrap();
    let start = |number| Worker::start(folder.path(), number, "60");
    let first = start(0);
    first.wait_for_steps(1);
    let second = start(1);
    second.wait_for_steps(1);
    first.wait_for_steps(1);
    for worker in [first, second] {
        assert_eq!(worker.finish().0, "right\n");
    }
}
