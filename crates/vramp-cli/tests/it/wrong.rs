//! Wrong invocations and strange files: the exit code, one line that says what to do, and no panic.
//!
//! Every case of the table runs in a folder with the files of [`files`].
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use tempfile::TempDir;
use vramp::{Bytes, DeviceAddr};
use vramp_trace::{Event, EventKind, Frame, Stacks, StreamIndex, Trace};

const MIB: u64 = 1 << 20;

/// What a terminal would take as commands.
const CONTROL: &str = "\u{1b}[31mred\u{1b}]0;title\u{7}\u{9b}";

fn event(kind: EventKind, address: u64, size: u64) -> Event {
    Event {
        kind,
        device: 0,
        stream: StreamIndex(0),
        address: DeviceAddr::new(address),
        size: Bytes::new(size),
        time_us: 0,
        stack: None,
    }
}

fn alloc(address: u64, size: u64) -> Event {
    event(EventKind::Alloc, address, size)
}

fn free(address: u64, size: u64) -> [Event; 2] {
    [EventKind::FreeRequested, EventKind::FreeCompleted].map(|kind| event(kind, address, size))
}

fn trace(events: Vec<Event>) -> Trace {
    let device_count = 1;
    Trace { device_count, streams: vec![0], events, ..Trace::default() }
}

fn small() -> Trace {
    let [requested, completed] = free(MIB, 5 * MIB);
    trace(vec![alloc(MIB, 5 * MIB), requested, completed])
}

fn snapshot(trace: &Trace) -> Vec<u8> {
    let mut bytes = Vec::new();
    trace.write_snapshot(&mut bytes).unwrap();
    bytes
}

/// Makes the files of all cases.
fn files() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| fs::write(folder.path().join(name), bytes).unwrap();
    let good = snapshot(&small());
    write("good.pickle", &good);
    write("empty.pickle", b"");
    write("cut.pickle", &good[..good.len() / 2]);
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut compressed = fs::read(root.join("examples/traces/gnn.pickle.gz")).unwrap();
    let middle = compressed.len() / 2;
    write("cut.gz", &compressed[..middle]);
    compressed[middle] ^= 0x55;
    write("damaged.gz", &compressed);
    let mut vtrace = Vec::new();
    small().write_vtrace(&mut vtrace).unwrap();
    write("good.vtrace", &vtrace);
    write("cut.vtrace", &vtrace[..vtrace.len() - 4]);
    let middle = vtrace.len() / 2;
    vtrace[middle] ^= 0xff;
    write("damaged.vtrace", &vtrace);
    write("cut.csv", b"Thread,Time,Action,Pointer,Size,Stream\n1,10:00:00.000000,alloc");
    write("head.csv", b"Thread,Time,Action,Pointer,Size,Stream\n");
    write("trace.json", b"{\"traceEvents\": []}");
    write("page.html", b"<!DOCTYPE html><html></html>");
    write("program", &fs::read(env!("CARGO_BIN_EXE_vramp")).unwrap()[..4096]);
    write("pointer", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n");
    write("other.pickle", b"\x80\x04}\x94.");
    write("list.pickle", b"\x80\x04]\x94(K\x01K\x02e.");
    write("noise", &(0..4000u32).map(|n| ((n * n * 31) >> 3) as u8).collect::<Vec<u8>>());
    write("wrong.toml", b"a = 1\n");
    write("nan.toml", b"name = \"x\"\n[fixed]\nrecord = nan\n");
    strange(folder.path());
    folder
}

/// Makes recordings that no job leaves, but that can be read.
fn strange(folder: &Path) {
    let write = |name: &str, trace: &Trace| {
        trace.write_snapshot(File::create(folder.join(name)).unwrap()).unwrap();
    };
    write("no-events.pickle", &trace(Vec::new()));
    write("no-devices.pickle", &Trace::default());
    let mut second = trace(vec![Event { device: 1, ..alloc(MIB, 5 * MIB) }]);
    second.device_count = 2;
    write("second.pickle", &second);
    write("one.pickle", &trace(vec![alloc(MIB, 5 * MIB)]));
    write("oom.pickle", &trace(vec![event(EventKind::Oom, MIB, 9 * MIB)]));
    write("frees.pickle", &trace((1..6).flat_map(|at| free(at * MIB, MIB)).collect()));
    write("huge.pickle", &trace((1..300).map(|at| alloc(at * MIB, 1 << 56)).collect()));
    write("zero.pickle", &trace(vec![alloc(MIB, 0), alloc(2 * MIB, 0)]));
    let times = [100, 50, 10].map(|time_us| Event { time_us, ..alloc(time_us * MIB, MIB) });
    write("backwards.pickle", &trace(times.to_vec()));
    let mut devices = trace(vec![Event { device: u16::MAX - 1, ..alloc(MIB, MIB) }]);
    devices.device_count = 65_535;
    write("devices.pickle", &devices);
    let streams = (0..2_000).map(|at| {
        let stream = StreamIndex(u32::try_from(at).unwrap());
        Event { stream, ..alloc((at + 1) * 4 * MIB, MIB) }
    });
    let mut many = trace(streams.collect());
    many.streams = (0..2_000).collect();
    write("streams.pickle", &many);
    let mut control = small();
    let mut stacks = Stacks::default();
    let filename = &format!("{CONTROL}.py");
    let stack = stacks.add([Frame { name: CONTROL, filename, line: 7 }]);
    control.stacks = stacks;
    control.events[0].stack = stack;
    control.events.insert(1, Event { stack, ..event(EventKind::Oom, MIB, 9 * MIB) });
    control.name = CONTROL.to_owned();
    for setting in ["PYTORCH_CUDA_ALLOC_CONF", CONTROL] {
        control.allocator_settings.push((setting.to_owned(), format!("{CONTROL}:1")));
    }
    control.write_vtrace(File::create(folder.join("control.vtrace")).unwrap()).unwrap();
    write("\u{1b}[31m.pickle", &control);
}

fn run(folder: &Path, args: &[&str], input: &[u8]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vramp"));
    command.current_dir(folder).args(args).env("RUST_BACKTRACE", "0");
    command.env_remove("PYTORCH_ALLOC_CONF").env_remove("PYTORCH_CUDA_ALLOC_CONF");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    // A command that fails early does not read its input.
    let _ = child.stdin.take().unwrap().write_all(input);
    child.wait_with_output().unwrap()
}

/// Checks the exit code, the words, and what holds for every run.
fn check(args: &[&str], output: &Output, code: i32, words: &[&str]) {
    let (stdout, stderr) =
        [&output.stdout, &output.stderr].map(|it| String::from_utf8_lossy(it)).into();
    let said = format!("{args:?}\nstdout: {stdout}\nstderr: {stderr}");
    assert!(!stderr.contains("panicked"), "{said}");
    assert_eq!(output.status.code(), Some(code), "{said}");
    let is_control = |c: char| c.is_control() && c != '\n';
    assert!(!stdout.contains(is_control) && !stderr.contains(is_control), "{said}");
    if code != 0 {
        assert_eq!(stdout, "", "{said}");
    }
    // The parser of arguments prints more lines, which begin with `error: `.
    if code == 1 || stderr.starts_with("vramp: ") {
        assert_eq!(stderr.lines().count(), 1, "{said}");
        assert!(stderr.starts_with("vramp: "), "{said}");
    }
    let text = if code == 0 { stdout } else { stderr };
    for word in words {
        assert!(text.contains(word), "'{word}' is not in: {said}");
    }
}

type Case = (&'static [&'static str], i32, &'static [&'static str]);

fn check_all(cases: &[Case]) {
    let folder = files();
    for &(args, code, words) in cases {
        check(args, &run(folder.path(), args, b""), code, words);
    }
}

/// Files that cannot be read, by the words that the error has for them.
const UNREADABLE: [(&str, &[&str]); 23] = [
    ("missing", &["'missing': No such file or directory"]),
    (".", &["is a folder", "give the traces in it"]),
    ("good.pickle/x", &["'good.pickle/x': Not a directory"]),
    ("/proc/self/mem", &["'/proc/self/mem'", "Input/output error"]),
    ("/dev/null", &["the file is empty"]),
    ("/dev/full", &["unknown trace format"]),
    ("empty.pickle", &["the file is empty", "finished writing"]),
    ("cut.pickle", &["truncated at byte", "copy the file again"]),
    ("cut.gz", &["truncated at byte", "copy the file again"]),
    ("damaged.gz", &["'damaged.gz'"]),
    ("cut.vtrace", &["the .vtrace file is truncated", "copy the file again"]),
    ("damaged.vtrace", &["malformed .vtrace file"]),
    ("cut.csv", &["'cut.csv'"]),
    ("head.csv", &["'head.csv'"]),
    ("trace.json", &["Chrome trace", "_record_memory_history"]),
    ("page.html", &["web page", ".pickle"]),
    ("program", &["ELF", "_dump_snapshot"]),
    ("pointer", &["Git LFS", "git lfs pull"]),
    ("other.pickle", &["not a memory snapshot", "_dump_snapshot"]),
    ("list.pickle", &["segment 0", "expected a dict"]),
    ("noise", &["unknown trace format", "PyTorch snapshot"]),
    ("no-events.pickle", &["allocates nothing", "_record_memory_history"]),
    ("no-devices.pickle", &["allocates nothing", "_record_memory_history"]),
];

#[test]
fn every_command_refuses_a_file_that_is_no_recording() {
    let folder = files();
    for (file, words) in UNREADABLE {
        let commands: [&[&str]; 5] = [
            &["explain", file],
            &["advise", file, "--limit", "1GiB"],
            &["diff", "good.pickle", file],
            &["diff", file, "good.pickle"],
            &["replay", file, "--device", "sim"],
        ];
        for args in commands {
            check(args, &run(folder.path(), args, b""), 1, words);
        }
        if !file.starts_with("no-") && file != "head.csv" {
            let args = ["convert", file, "out.vtrace"];
            check(&args, &run(folder.path(), &args, b""), 1, words);
        }
    }
    assert!(!folder.path().join("out.vtrace").exists());
}

#[test]
fn invalid_amounts_and_numbers_name_their_option() {
    const AMOUNT: &[&str] = &["--limit", "is not an amount of memory", "1.5GiB"];
    check_all(&[
        (&["explain", "good.pickle", "--limit", "0"], 2, &["--limit", "it is 0"]),
        (&["explain", "good.pickle", "--limit", "0GiB"], 2, &["--limit", "it is 0"]),
        (&["explain", "good.pickle", "--limit", "16"], 2, &["no unit", "16GiB"]),
        (&["explain", "good.pickle", "--limit", "1.5"], 2, &["no unit", "1.5GiB"]),
        (&["explain", "good.pickle", "--limit", "-1"], 2, AMOUNT),
        (&["explain", "good.pickle", "--limit", "-1GiB"], 2, AMOUNT),
        (&["explain", "good.pickle", "--limit", "--json"], 2, AMOUNT),
        (&["explain", "good.pickle", "--limit", "NaN"], 2, &["--limit", "nor a card"]),
        (&["explain", "good.pickle", "--limit", "inf"], 2, &["--limit", "nor a card"]),
        (&["explain", "good.pickle", "--limit", ""], 2, AMOUNT),
        (&["explain", "good.pickle", "--limit", "GiB"], 2, &["--limit", "nor a card"]),
        (&["explain", "good.pickle", "--limit", "1e99GiB"], 2, AMOUNT),
        (&["explain", "good.pickle", "--limit", "16777216TiB"], 2, &["below 16 EiB"]),
        (&["explain", "good.pickle", "--limit"], 2, &["--limit"]),
        (&["explain", "good.pickle", "--limit", "1GiB", "--limit", "2GiB"], 2, &["--limit"]),
        (&["advise", "good.pickle", "--limit", "1GiB,,2GiB"], 2, AMOUNT),
        (&["advise", "good.pickle", "--limit", "-1GiB"], 2, AMOUNT),
        (&["advise", "good.pickle"], 2, &["--limit <SIZE>"]),
        (&["advise", "--limit", "1GiB"], 2, &["<RUN>"]),
        (&["replay", "good.pickle", "--limit", "-1GiB"], 2, AMOUNT),
        (&["replay", "good.pickle", "--prefill", "0"], 2, &["--prefill", "it is 0"]),
        (&["explain", "good.pickle", "--at", "-1"], 2, &["--at"]),
        (&["explain", "good.pickle", "--at", "x"], 2, &["--at"]),
        (&["explain", "good.pickle", "--at", "3"], 2, &["--at 3", "from 0 to 2"]),
        (
            &["explain", "good.pickle", "--at", "18446744073709551615"],
            2,
            &["--at 18446744073709551615"],
        ),
        (&["explain", "good.pickle", "--at", "18446744073709551616"], 2, &["--at"]),
        (&["explain", "good.pickle", "--top", "-1"], 2, &["--top"]),
        (&["diff", "good.pickle", "good.pickle", "--top", "1.5"], 2, &["--top"]),
        (&["explain", "good.pickle", "--max-memory", "1KiB"], 1, &["1024 bytes", "--max-memory"]),
        (&["explain", "good.pickle", "--max-memory", "0"], 2, &["--max-memory"]),
        (&["explain", "good.pickle", "--max-events", "1"], 1, &["--max-events"]),
        (&["diff", "good.pickle", "good.pickle", "--max-events", "0"], 1, &["--max-events"]),
        (&["convert", "good.pickle", "o.vtrace", "--max-events", "-1"], 2, &["--max-events"]),
        (&["advise", "good.pickle", "--limit", "1GiB", "--max-events", "1"], 1, &["--max-events"]),
    ]);
}

#[test]
fn invalid_settings_devices_and_cost_files_are_named() {
    const ADVISE: [&str; 4] = ["advise", "good.pickle", "--limit", "1GiB"];
    let folder = files();
    for (settings, words) in [
        ("voodoo:1", &["'voodoo' is not a setting", "expandable_segments"][..]),
        ("", &["--settings", "it is empty"]),
        ("max_split_size_mb:1", &["above 20"]),
        ("max_split_size_mb:nan", &["above 20"]),
        ("garbage_collection_threshold:nan", &["above 0 and below 1"]),
        ("garbage_collection_threshold:inf", &["above 0 and below 1"]),
        ("expandable_segments:maybe", &["True or False"]),
        ("per_process_memory_fraction:nan", &["from 0 to 1"]),
        ("roundup_power2_divisions:[256:1", &["a power of two"]),
        ("backend:voodoo", &["native"]),
        ("\u{1b}[31m:1", &["is not a setting"]),
    ] {
        let args = [&ADVISE[..], &["--settings", settings]].concat();
        check(&args, &run(folder.path(), &args, b""), 2, words);
    }
    for (device, words) in [
        ("sim:voodoo", &["unknown simulated card 'voodoo'", "h200"][..]),
        ("sim:h10", &["did you mean 'h100'?"]),
        ("sim:", &["known cards: h200"]),
        ("voodoo", &["there is no device 'voodoo'", "sim:CARD"]),
        ("cuda:-1", &["there is no device 'cuda:-1'"]),
        ("", &["there is no device ''"]),
        ("\u{1b}x", &["there is no device '?x'"]),
        ("missing.toml", &["missing.toml", "No such file"]),
    ] {
        for command in ["info", "calibrate"] {
            let args = [command, "--device", device];
            check(&args, &run(folder.path(), &args, b""), 1, words);
        }
    }
    for (file, words) in [
        ("missing.toml", &["'missing.toml'", "No such file"][..]),
        (".", &["Is a directory"]),
        ("wrong.toml", &["wrong.toml", "line 1", "vramp calibrate"]),
        ("nan.toml", &["nan.toml", "vramp calibrate"]),
        ("empty.pickle", &["empty.pickle", "vramp calibrate"]),
        ("program", &["program", "cost file"]),
    ] {
        for args in [
            &["info", "--costs", file][..],
            &["explain", "good.pickle", "--costs", file],
            &["advise", "good.pickle", "--limit", "1GiB", "--costs", file],
        ] {
            check(args, &run(folder.path(), args, b""), 1, words);
        }
    }
}

/// A machine with a card opens it, and there is nothing to refuse.
#[test]
fn a_card_that_is_not_there_is_an_error_with_the_alternative() {
    let folder = files();
    let args = ["info", "--device", "cuda:4000"];
    check(&args, &run(folder.path(), &args, b""), 1, &["sim"]);
}

#[test]
fn wrong_arguments_end_with_code_two() {
    check_all(&[
        (&[], 2, &["Usage: vramp"]),
        (&["explian", "good.pickle"], 2, &["'explian'", "explain"]),
        (&["explain"], 2, &["<RUN>"]),
        (&["explain", ""], 2, &["<RUN>"]),
        (&["explain", "--json=1", "good.pickle"], 2, &["--json"]),
        (&["explain", "good.pickle", "--fail-on-oom"], 2, &["--fail-on-oom"]),
        (&["diff", "good.pickle"], 2, &["<AFTER>"]),
        (&["diff", "good.pickle", "good.pickle", "good.pickle"], 2, &["good.pickle"]),
        (&["convert", "good.pickle"], 2, &["<OUT>"]),
        (&["convert", "good.pickle", "x.vtrace", "--to", "voodoo"], 2, &["perfetto"]),
        (&["info", "extra"], 2, &["'extra'"]),
        (&["completions", "tcsh"], 2, &["bash, elvish, fish, powershell, zsh"]),
        (&["completions"], 2, &["<SHELL>"]),
        (&["man"], 2, &["<FOLDER>"]),
        (&["calibrate", "--device", "sim", "--seconds", "nan"], 2, &["--seconds", "above 0"]),
        (&["calibrate", "--device", "sim", "--seconds", "-1"], 2, &["--seconds", "above 0"]),
        (&["calibrate", "--device", "sim", "--seconds", "1e300"], 2, &["up to 3600"]),
    ]);
}

#[test]
fn places_that_cannot_be_written_are_named_without_temporary_names() {
    const FULL: &[&str] = &["cannot write '/dev/full': No space left on device"];
    check_all(&[
        (&["man", "missing"], 1, &["'missing': No such file"]),
        (&["man", "good.pickle"], 1, &["'good.pickle': Not a directory"]),
        (&["man", "/proc"], 1, &["'/proc'"]),
        (&["convert", "good.pickle", "."], 1, &["cannot write '.'"]),
        (&["convert", "good.pickle", "out"], 1, &["--to vtrace"]),
        (&["convert", "good.pickle", "\u{1b}.x"], 1, &["'?.x'", "--to vtrace"]),
        (&["convert", "good.pickle", "good.pickle"], 1, &["--force"]),
        (&["convert", "good.pickle", "missing/o.vtrace"], 1, &["'missing/o.vtrace': No such file"]),
        (&["convert", "missing", "/proc/o.vtrace"], 1, &["cannot read the trace 'missing'"]),
        (&["convert", "good.pickle", "/dev/full", "--to", "vtrace"], 1, FULL),
        (
            &["calibrate", "--device", "sim", "-o", "missing/c.toml"],
            1,
            &["'missing/c.toml': No such"],
        ),
        (&["calibrate", "--device", "sim", "-o", "."], 1, &["cannot write '.'"]),
        (&["calibrate", "--device", "sim", "-o", "/dev/full"], 1, FULL),
    ]);
    let folder = files();
    let args = ["convert", "good.pickle", "/proc/o.vtrace"];
    let output = run(folder.path(), &args, b"");
    check(&args, &output, 1, &["cannot write '/proc/o.vtrace'"]);
    assert!(!String::from_utf8_lossy(&output.stderr).contains(".vramp-"), "{output:?}");
}

#[test]
fn a_full_standard_output_is_named() {
    let folder = files();
    for args in [
        &["explain", "good.pickle"][..],
        &["explain", "good.pickle", "--json"],
        &["advise", "good.pickle", "--limit", "1GiB", "--json"],
        &["diff", "good.pickle", "good.pickle"],
        &["info", "--device", "sim"],
        &["completions", "zsh"],
        &["calibrate", "--device", "sim", "--seconds", "1"],
    ] {
        let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_vramp"));
        let output = command.current_dir(folder.path()).args(args).stdout(full).output().unwrap();
        check(args, &output, 1, &["cannot write standard output: No space left on device"]);
    }
}

#[test]
fn standard_input_can_be_empty_closed_and_named_once() {
    let folder = files();
    let good = snapshot(&small());
    const TWICE: &[&str] = &["standard input (-) is given twice", "save one"];
    for (args, code, words) in [
        (&["explain", "-"][..], 0, &["5.00 MiB"][..]),
        (&["diff", "-", "good.pickle"], 0, &["peak allocated"]),
        (&["explain", "-", "-"], 2, TWICE),
        (&["explain", "good.pickle", "-", "/dev/stdin"], 2, TWICE),
        (&["diff", "-", "-"], 2, TWICE),
        (&["advise", "-", "-", "--limit", "1GiB"], 2, TWICE),
        (&["replay", "-", "-", "--device", "sim"], 2, TWICE),
        (&["graph", "-", "-"], 2, TWICE),
    ] {
        check(args, &run(folder.path(), args, &good), code, words);
    }
    let empty = &["on standard input", "the file is empty"];
    check(&["explain", "-"], &run(folder.path(), &["explain", "-"], b""), 1, empty);
    let mut shell = Command::new("sh");
    shell.args(["-c", "exec \"$0\" explain - <&-", env!("CARGO_BIN_EXE_vramp")]);
    check(&["explain", "- <&-"], &shell.output().unwrap(), 1, empty);
}

#[test]
fn of_several_files_the_good_ones_are_explained_until_one_is_bad() {
    let folder = files();
    let args = ["explain", "good.pickle", "cut.pickle", "good.pickle"];
    let output = run(folder.path(), &args, b"");
    assert_eq!(output.status.code(), Some(1));
    let (stdout, stderr) = (output.stdout, String::from_utf8_lossy(&output.stderr).into_owned());
    assert_eq!(String::from_utf8_lossy(&stdout).matches("good: 3 events").count(), 1);
    assert!(stderr.contains("'cut.pickle'") && stderr.lines().count() == 1, "{stderr}");
    let twice = run(folder.path(), &["explain", "good.pickle", "good.pickle"], b"");
    assert!(twice.status.success());
    assert_eq!(String::from_utf8_lossy(&twice.stdout).matches("good: 3 events").count(), 2);
}

#[test]
fn recordings_that_no_job_leaves_are_explained_without_a_panic() {
    let folder = files();
    for (file, words) in [
        ("one.pickle", "one: 1 event on 1 stream"),
        ("second.pickle", "second, device 1: 1 event"),
        ("oom.pickle", "0 B allocated and 9.00 MiB requested"),
        ("frees.pickle", "begins in the middle of the job"),
        ("huge.pickle", "16384.00 PiB"),
        ("zero.pickle", "2 events"),
        ("backwards.pickle", "3.00 MiB in 3 blocks"),
        ("devices.pickle", "device 65534: 1 event"),
        ("control.vtrace", "?[31mred?]0;title??"),
        ("\u{1b}[31m.pickle", "?[31m: 4 events"),
    ] {
        for args in [&["explain", file, "--at", "0", "--limit", "1KiB"][..], &["explain", file]] {
            check(args, &run(folder.path(), args, b""), 0, &[words]);
        }
        for args in [
            &["explain", file, "--top", "0"][..],
            &["explain", file, "--top", "18446744073709551615", "--json"],
            &["explain", file, "--limit", "18446744073709551615"],
            &["advise", file, "--limit", "1B,18446744073709551615"],
            &["diff", file, file, "--top", "0"],
            &["diff", "good.pickle", file],
        ] {
            check(args, &run(folder.path(), args, b""), 0, &[]);
        }
        let args = ["convert", file, "out.perfetto.json"];
        check(&args, &run(folder.path(), &args, b""), 0, &["out.perfetto.json"]);
    }
}

#[test]
fn thousands_of_streams_are_explained() {
    check_all(&[
        (&["explain", "streams.pickle"], 0, &["2,000 events on 2,000 streams"]),
        (&["diff", "streams.pickle", "streams.pickle"], 0, &["1.95 GiB"]),
    ]);
}

#[test]
fn names_that_are_no_utf8_are_read() {
    let folder = files();
    let name = std::ffi::OsStr::from_bytes(b"a\xff.pickle");
    fs::copy(folder.path().join("good.pickle"), folder.path().join(name)).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_vramp"));
    let output = command.current_dir(folder.path()).arg("explain").arg(name).output().unwrap();
    check(&["explain", "a\\xff.pickle"], &output, 0, &["3 events"]);
}
