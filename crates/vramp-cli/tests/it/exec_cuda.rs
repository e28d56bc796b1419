//! `vramp exec` around C programs that use CUDA, on a driver without a card: every way to reach the driver,
//! children, deaths, limits, the pool, and other libraries that are preloaded.

mod sleep;

use std::collections::HashMap;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output};
use std::sync::OnceLock;

use tempfile::TempDir;
use vramp_trace::{EventKind, ReadLimits, Trace, Workload, read_trace};

const MIB: u64 = 1 << 20;

/// The driver and the programs, built once.
struct Built {
    folder: TempDir,
}

fn built() -> &'static Path {
    static BUILT: OnceLock<Built> = OnceLock::new();
    BUILT.get_or_init(Built::new).folder.path()
}

impl Built {
    fn new() -> Built {
        let folder = tempfile::tempdir().unwrap();
        let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("../vramp-preload/tests");
        let cc = |output: &str, sources: &[&str], options: &[&str]| -> Child {
            let mut cc = Command::new("cc");
            cc.args(["-O1", "-Wall", "-Wextra", "-Werror", "-o"]).arg(folder.path().join(output));
            cc.args(sources.iter().map(|source| tests.join(source))).args(options);
            cc.current_dir(folder.path()).spawn().expect("a C compiler is installed")
        };
        let finish = |children: Vec<Child>| {
            for mut child in children {
                assert!(child.wait().unwrap().success());
            }
        };
        let shared = ["-shared", "-fPIC"];
        let driver = ["fake_cuda/driver.c", "fake_cuda/memory.c", "fake_cuda/streams.c"];
        let options =
            ["-fvisibility=hidden", "-Wl,-soname,libcuda.so.1", "-Wl,-Bsymbolic", "-pthread"];
        let own_dlsym = ["-DOWN_DLSYM", "-ldl"];
        finish(vec![
            cc("libcuda.so.1", &driver, &[&shared[..], &options].concat()),
            cc("job", &["programs/job.c"], &["-ldl", "-pthread"]),
            cc("attacks", &["programs/attacks.c"], &["-ldl", "-pthread"]),
            cc("bare", &["programs/bare.c"], &[]),
            cc("worker", &["programs/worker.c"], &["-ldl"]),
            cc("host", &["programs/host.c"], &["-ldl"]),
            cc("interposer.so", &["programs/interposer.c"], &[&shared[..], &["-ldl"]].concat()),
            cc("dlsym.so", &["programs/interposer.c"], &[&shared[..], &own_dlsym].concat()),
        ]);
        finish(vec![
            cc("linked", &["programs/job.c"], &["-DLINKED", "libcuda.so.1", "-ldl", "-pthread"]),
            cc(
                "constructor.so",
                &["programs/constructor.c"],
                &["-shared", "-fPIC", "libcuda.so.1"],
            ),
            cc("plugin.so", &["programs/plugin.c"], &["-shared", "-fPIC", "libcuda.so.1", "-ldl"]),
        ]);
        Built { folder }
    }
}

/// Returns a library that cargo builds into the directory of the test.
fn library(name: &str) -> PathBuf {
    std::env::current_exe().unwrap().with_file_name(name)
}

/// One run of a program.
pub(super) struct Run {
    folder: TempDir,
    pub(super) command: Command,
}

impl Run {
    /// A run of a program under `vramp exec` with these options, on two devices of 128 MiB.
    pub(super) fn new(options: &[&str], program: &[&str]) -> Run {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vramp"));
        command.arg("exec").args(options).arg("--");
        Run::of(command, program)
    }

    /// A run without it.
    fn plain(program: &[&str]) -> Run {
        Run::of(Command::new("env"), program)
    }

    fn of(mut command: Command, program: &[&str]) -> Run {
        let folder = tempfile::tempdir().unwrap();
        command.arg(built().join(program[0])).args(&program[1..]).current_dir(&folder);
        for variable in
            ["VRAMP_CONF", "VRAMP_EXEC", "VRAMP_DEVICE", "LD_PRELOAD", "FAKE_CUDA_LATE_US"]
        {
            command.env_remove(variable);
        }
        command
            .env("LD_LIBRARY_PATH", built())
            .env("VRAMP_PRELOAD_LIBRARY", library("libvramp_preload.so"))
            .env("VRAMP_LIBRARY", library("libvramp_capi.so"))
            .env("FAKE_CUDA_DEVICES", "2")
            .env("FAKE_CUDA_MEMORY", (128 * MIB).to_string())
            .env("FAKE_CUDA_COUNTS", folder.path().join("counts"));
        Run { folder, command }
    }

    pub(super) fn env(mut self, name: &str, value: impl AsRef<std::ffi::OsStr>) -> Run {
        self.command.env(name, value);
        self
    }

    pub(super) fn finish(mut self) -> Ended {
        let output = self.command.output().unwrap();
        Ended { folder: self.folder, output }
    }

    /// Runs it to an exit code of 0.
    pub(super) fn succeed(self) -> Ended {
        let ended = self.finish();
        assert!(ended.output.status.success(), "{}: {}", ended.output.status, ended.error());
        ended
    }
}

/// A run that is over.
pub(super) struct Ended {
    folder: TempDir,
    output: Output,
}

impl Ended {
    pub(super) fn text(&self) -> String {
        String::from_utf8(self.output.stdout.clone()).unwrap()
    }

    pub(super) fn error(&self) -> String {
        String::from_utf8(self.output.stderr.clone()).unwrap()
    }

    /// The recording in `run.vtrace`.
    pub(super) fn trace(&self) -> Trace {
        read_trace(self.folder.path().join("run.vtrace"), &ReadLimits::default()).unwrap()
    }

    /// The names of the recordings.
    fn recordings(&self) -> usize {
        let entries = fs::read_dir(&self.folder).unwrap().map(|entry| entry.unwrap().path());
        entries.filter(|path| path.extension().is_some_and(|end| end == "vtrace")).count()
    }

    /// How often each function of the driver was called.
    pub(super) fn calls(&self) -> HashMap<String, u64> {
        let bytes = fs::read(self.folder.path().join("counts")).unwrap_or_default();
        let entries = bytes.chunks_exact(64).filter(|entry| entry[0] != 0);
        entries
            .map(|entry| {
                let name = entry[..56].split(|&byte| byte == 0).next().unwrap();
                let count = u64::from_le_bytes(entry[56..].try_into().unwrap());
                (String::from_utf8(name.to_vec()).unwrap(), count)
            })
            .collect()
    }

    pub(super) fn calls_of(&self, name: &str) -> u64 {
        self.calls().get(name).copied().unwrap_or(0)
    }
}

const RECORD: [&str; 2] = ["--record", "run.vtrace"];

/// The modes in which a program has to do as it does without `vramp exec`.
const MODES: [&[&str]; 4] = [
    &["--record", "run.vtrace"],
    &["--limit", "100MiB"],
    &["--pool"],
    &["--pool", "--limit", "100MiB", "--record", "run.vtrace"],
];

/// Requests and frees in a recording, in KiB: frees are negative.
pub(super) fn changes(trace: &Trace) -> Vec<i64> {
    let change = |event: &vramp_trace::Event| {
        let size = i64::try_from(event.size.count() / 1024).unwrap();
        match event.kind {
            EventKind::Alloc => Some(size),
            EventKind::FreeRequested => Some(-size),
            _ => None,
        }
    };
    trace.events.iter().filter_map(change).collect()
}

const USUAL: [i64; 9] = [1024, 2048, 3072, 4096, -4096, 64, -1024, -3072, -64];

const WAYS: [(&str, &str); 10] = [
    ("job", "dlopen"),
    ("job", "default"),
    ("job", "proc"),
    ("job", "runtime"),
    ("job", "threads"),
    ("linked", "linked"),
    ("linked", "default"),
    ("linked", "next"),
    ("linked", "self"),
    ("linked", "linked"),
];

#[test]
fn every_way_to_the_driver_is_recorded() {
    for (program, way) in WAYS {
        let ended = Run::new(&RECORD, &[program, way, "usual"]).succeed();
        assert_eq!(ended.text(), "done\n");
        assert_eq!(changes(&ended.trace()), USUAL, "{program} {way}");
        assert_eq!(ended.calls_of("cuMemAlloc_v2"), 3, "{program} {way}");
        let workload = Workload::from_trace(&ended.trace(), 0);
        assert!(workload.repairs.is_empty(), "{}", workload.repairs);
    }
}

#[test]
fn every_way_to_the_driver_is_pooled() {
    for (program, way) in WAYS {
        let ended = Run::new(&["--pool"], &[program, way, "usual"]).succeed();
        let served: u64 =
            ["cuMemAlloc_v2", "cuMemAllocAsync", "cuMemAllocAsync_ptsz", "cuMemAllocPitch_v2"]
                .map(|name| ended.calls_of(name))
                .iter()
                .sum();
        assert_eq!(served, 0, "{program} {way}: {:?}", ended.calls());
        assert!(ended.calls_of("cuMemCreate") > 0, "{program} {way}");
        assert!(ended.error().contains("5 requests served by the pool"), "{}", ended.error());
    }
}

#[test]
fn recordings_name_the_functions_that_hold_memory() {
    let ended = Run::new(&RECORD, &["job", "runtime", "usual"]).succeed();
    let mut explain = Command::new(env!("CARGO_BIN_EXE_vramp"));
    let explained =
        explain.args(["explain", "run.vtrace"]).current_dir(&ended.folder).output().unwrap();
    let text = String::from_utf8(explained.stdout).unwrap();
    for words in
        ["job make_block", "libcuda.so.1 cuMemAlloc", "job usual", "libcuda.so.1 cuMemAllocAsync"]
    {
        assert!(text.contains(words), "'{words}' is not in:\n{text}");
    }
    assert!(!text.contains("preload"), "{text}");
    // No allocator of PyTorch stood between.
    assert!(!text.contains("PyTorch") && text.contains("stream-ordered"), "{text}");

    let none = Run::new(&[&RECORD[..], &["--stacks", "0"]].concat(), &["job", "runtime", "usual"])
        .succeed();
    assert_eq!(changes(&none.trace()), USUAL);
    let trace = none.trace();
    let stacks: Vec<_> = trace
        .events
        .iter()
        .map(|event| trace.stacks.frames(event.stack.unwrap()).count())
        .collect();
    assert!(stacks.iter().all(|&frames| frames == 1), "{stacks:?}");
}

#[test]
fn memory_that_a_program_maps_counts() {
    for (options, expected) in [
        (&RECORD[..], "free 80 MiB of 128 MiB\n48 MiB more: 0\n"),
        (
            &["--limit", "64MiB", "--record", "run.vtrace"],
            "free 16 MiB of 64 MiB\n48 MiB more: 2\n",
        ),
        (&["--pool", "--record", "run.vtrace"], "free 80 MiB of 128 MiB\n48 MiB more: 0\n"),
    ] {
        let ended = Run::new(options, &["job", "dlopen", "mapped"]).succeed();
        assert_eq!(ended.text(), expected, "{options:?}");
        assert_eq!(changes(&ended.trace()), [16 << 10, 16 << 10, -(16 << 10), -(16 << 10)]);
    }
}

#[test]
fn programs_do_the_same_in_every_mode() {
    for case in
        ["questions", "contexts", "pools", "devices", "threads", "late-fork", "give", "capture"]
    {
        let expected = Run::plain(&["job", "runtime", case]).succeed().text();
        for options in MODES {
            let ended = Run::new(options, &["job", "runtime", case]).succeed();
            assert_eq!(ended.text(), expected, "{case} {options:?}");
        }
    }
}

#[test]
fn memory_is_reused_after_the_work_on_it() {
    for options in MODES {
        let run = Run::new(options, &["job", "dlopen", "ordered"]);
        assert_eq!(
            run.env("FAKE_CUDA_LATE_US", "150").succeed().text(),
            "in order\n",
            "{options:?}"
        );
    }
}

#[test]
fn blocks_keep_what_was_written_last() {
    let grouped = ["--pool", "--group", "tests", "--capacity", "120MiB", "--guaranteed", "8MiB"];
    for seed in vramp_testing::seeds(2) {
        let case = format!("chaos-{seed}");
        let program = ["job", "runtime", &case];
        for late in ["0", "60"] {
            for options in [&RECORD[..], &["--pool"], &["--pool", "--sleepable"], &grouped] {
                let run = Run::new(options, &program).env("FAKE_CUDA_LATE_US", late);
                let run = run.env("XDG_RUNTIME_DIR", built());
                assert_eq!(run.succeed().text(), "in order\n", "{options:?} {late} {seed}");
            }
        }
    }
}

#[test]
fn what_ends_with_a_context_is_recorded_as_freed() {
    let ended = Run::new(&RECORD, &["job", "runtime", "contexts"]).succeed();
    let mut changes = changes(&ended.trace());
    assert_eq!(changes.iter().sum::<i64>(), 0, "{changes:?}");
    changes.truncate(4);
    assert_eq!(changes, [1024, 2048, -2048, 3072]);

    let ended = Run::new(&RECORD, &["job", "runtime", "devices"]).succeed();
    let trace = ended.trace();
    let devices: Vec<(u16, u64)> =
        trace.events.iter().map(|event| (event.device, event.size.count() / MIB)).collect();
    assert_eq!(devices, [(0, 1), (0, 1), (0, 1), (1, 2), (1, 2), (1, 2)]);
}

#[test]
fn children_are_recorded_too() {
    for (case, files, requests) in
        [("fork", 2, 6), ("exec", 1, 3), ("spawn", 1, 3), ("system", 1, 3)]
    {
        let ended = Run::new(&RECORD, &["job", "runtime", case]).succeed();
        assert_eq!(ended.recordings(), files, "{case}: {}", ended.error());
        assert_eq!(ended.calls_of("cuMemAlloc_v2"), requests, "{case}");
        assert_eq!(changes(&ended.trace()), USUAL, "{case}");
    }
    // A process that becomes another program has two recordings.
    let ended = Run::new(&RECORD, &["job", "runtime", "become"]).succeed();
    assert_eq!((ended.recordings(), changes(&ended.trace())), (2, vec![7 << 10]));
}

#[test]
fn a_recording_outlives_the_process() {
    for (case, signal) in
        [("signal-9", Some(9)), ("signal-11", Some(11)), ("signal-6", Some(6)), ("_exit", None)]
    {
        for options in [&RECORD[..], &["--pool", "--record", "run.vtrace"]] {
            let ended = Run::new(options, &["job", "runtime", case]).finish();
            let status = ended.output.status;
            assert_eq!(
                (status.signal(), status.code()),
                (signal, signal.xor(Some(7)).filter(|_| signal.is_none()))
            );
            assert_eq!(changes(&ended.trace()), [5 << 10], "{case}");
        }
    }
}

#[test]
fn a_recording_that_cannot_be_written_ends_no_program() {
    let job = built().join("job");
    // In blocks of 512 or 1024 bytes. The driver's memory is files too.
    let script = format!("ulimit -f 3000; exec {} runtime late-fork", job.display());
    let ended = Run::new(&RECORD, &["/bin/sh", "-c", &script]).succeed();
    assert!(ended.error().contains("nothing is recorded, because"), "{}", ended.error());
}

#[test]
fn a_program_without_cuda_is_left_alone() {
    let plain = Run::plain(&["bare", "a", "b c"]).env("SOME", "x=y").finish();
    assert_eq!(plain.output.status.code(), Some(5));
    let libraries = |ended: &Ended| ended.error().trim().parse::<u32>().unwrap();
    for options in [&["--limit", "1GiB"][..], &["--pool"], &[&RECORD[..], &["--quiet"]].concat()] {
        let counts = plain.folder.path().join("counts");
        let run = Run::new(options, &["bare", "a", "b c"]).env("SOME", "x=y");
        let mut run = run.env("FAKE_CUDA_COUNTS", counts);
        // The line about a recording without requests follows that of the program.
        let output = run.command.output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        let ended = Ended {
            folder: run.folder,
            output: Output {
                status: output.status,
                stdout: output.stdout,
                stderr: error.lines().next().unwrap().as_bytes().to_vec(),
            },
        };
        assert_eq!(ended.output.status.code(), Some(5));
        assert_eq!(sorted(&ended.text()), sorted(&plain.text()), "{options:?}");
        // The library, and the unwinder that it needs.
        let added = libraries(&ended) - libraries(&plain);
        assert!((1..=3).contains(&added), "{added} libraries more");
        assert!(!plain.folder.path().join("counts").exists(), "the driver was called");
    }
}

fn sorted(text: &str) -> Vec<&str> {
    let mut lines: Vec<&str> = text.lines().collect();
    lines.sort_unstable();
    lines
}

#[test]
fn a_full_device_is_the_programs_to_handle() {
    let whole = "total 128 MiB and 128 MiB, free 128 MiB\n8 blocks, then error 2, free 0 MiB\n";
    let part = "total 64 MiB and 64 MiB, free 64 MiB\n4 blocks, then error 2, free 0 MiB\n";
    for (options, expected) in [
        (&RECORD[..], whole),
        (&["--limit", "64MiB", "--record", "run.vtrace"], part),
        (&["--pool", "--record", "run.vtrace"], whole),
        (&["--pool", "--limit", "64MiB", "--record", "run.vtrace"], part),
    ] {
        let ended = Run::new(options, &["job", "runtime", "full"]).succeed();
        assert_eq!(ended.text(), expected, "{options:?}");
        let trace = ended.trace();
        let refused = trace.events.iter().filter(|event| event.kind == EventKind::Oom);
        assert_eq!(refused.count(), 3, "{options:?}");
    }
}

#[test]
fn other_preloaded_libraries_go_on_working() {
    for (program, way, library) in [
        ("job", "dlopen", "dlsym.so"),
        ("job", "runtime", "dlsym.so"),
        ("linked", "linked", "interposer.so"),
        ("linked", "default", "dlsym.so"),
        ("linked", "next", "interposer.so"),
    ] {
        let library = built().join(library);
        for options in MODES {
            let run = Run::new(options, &[program, way, "usual"]).env("LD_PRELOAD", &library);
            assert_eq!(run.succeed().text(), "done\n", "{way} {library:?} {options:?}");
        }
        let run = Run::new(&RECORD, &[program, way, "usual"]).env("LD_PRELOAD", &library);
        let ended = run.succeed();
        assert_eq!(changes(&ended.trace()), USUAL, "{way} {library:?}");
        if (program, way) == ("linked", "linked") {
            assert_eq!(
                ended.error().matches("interposed cuMemAlloc").count(),
                3,
                "{}",
                ended.error()
            );
        }
    }
}

#[test]
fn a_library_in_a_scope_of_its_own_finds_what_it_sees() {
    let plugin = built().join("plugin.so");
    let plugin = plugin.to_str().unwrap();
    Run::plain(&["host", plugin]).succeed();
    Run::new(&["--limit", "64MiB"], &["host", plugin]).succeed();
}
