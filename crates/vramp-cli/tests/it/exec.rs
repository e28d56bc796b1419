//! `vramp exec` around programs that need no GPU: exit codes, signals, variables, refusals, and the
//! conversion of what a process recorded.

use std::borrow::Cow;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use rustix::process::{Pid, Signal, getuid, kill_process};
use vramp_trace::spool::{Api, Change, Event, Record, encode, header};

/// A library of the system in the place of the one in front of the driver: it changes nothing.
fn library() -> PathBuf {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let path = maps
        .lines()
        .find_map(|line| line.split_whitespace().nth(5).filter(|it| it.contains("libgcc_s")));
    PathBuf::from(path.expect("Rust programs load the unwinder"))
}

/// `vramp exec` with arguments, without the variables that it reads.
fn exec(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vramp"));
    command.arg("exec").args(args).env("VRAMP_PRELOAD_LIBRARY", library());
    for variable in ["VRAMP_LIBRARY", "VRAMP_CONF", "VRAMP_EXEC", "LD_PRELOAD"] {
        command.env_remove(variable);
    }
    command
}

fn output(args: &[&str]) -> Output {
    exec(args).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

const LIMIT: [&str; 3] = ["--limit", "1GiB", "--"];

fn limited<'a>(program: &[&'a str]) -> Vec<&'a str> {
    [&LIMIT[..], program].concat()
}

fn shell(script: &str) -> Command {
    exec(&limited(&["sh", "-c", script]))
}

#[test]
fn the_exit_code_is_that_of_the_program() {
    for code in [0, 1, 3, 126, 255] {
        let found = shell(&format!("echo out; echo err >&2; exit {code}")).output().unwrap();
        assert_eq!(found.status.code(), Some(code));
        assert_eq!((text(&found.stdout), text(&found.stderr)), ("out\n".into(), "err\n".into()));
    }
}

#[test]
fn a_signal_that_ends_the_program_ends_vramp_without_a_second_core() {
    let folder = tempfile::tempdir().unwrap();
    for signal in
        [Signal::KILL, Signal::SEGV, Signal::ABORT, Signal::TERM, Signal::INT, Signal::USR1]
    {
        let mut command = shell(&format!("kill -{} $$", signal.as_raw()));
        let status = command.current_dir(&folder).status().unwrap();
        assert_eq!(status.signal(), Some(signal.as_raw()), "{status}");
        assert!(!status.core_dumped());
    }
}

#[test]
fn signals_of_other_processes_reach_the_program() {
    for (signal, name) in [(Signal::TERM, "TERM"), (Signal::INT, "INT"), (Signal::USR2, "USR2")] {
        // The shell handles a signal between two commands, and `read` ends by it.
        let script = format!("trap 'exit 7' {name}; echo ready; while :; do read line; done");
        let mut command = shell(&script);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        let id = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
        kill_process(id, signal).unwrap();
        // Some shells go on reading after a signal that they handle later.
        drop(child.stdin.take());
        assert_eq!(child.wait().unwrap().code(), Some(7), "{name}");
    }
}

#[test]
fn signals_that_are_ignored_stay_ignored() {
    let vramp = exec(&limited(&["grep", "SigIgn", "/proc/self/status"]));
    let mut shell = Command::new("sh");
    shell
        .args(["-c", "trap '' HUP INT; exec \"$0\" \"$@\""])
        .arg(vramp.get_program())
        .args(vramp.get_args());
    shell.env("VRAMP_PRELOAD_LIBRARY", library());
    let found = text(&shell.output().unwrap().stdout);
    let mask = u64::from_str_radix(found.trim_start_matches("SigIgn:").trim(), 16).unwrap();
    assert_eq!(mask & 0b11, 0b11, "{found}");
}

#[test]
fn the_program_sees_its_name_its_arguments_and_its_input() {
    let found = output(&limited(&["cat", "/proc/self/cmdline", "--", "-"]));
    assert_eq!(text(&found.stdout), "cat\0/proc/self/cmdline\0--\0-\0");
    let mut command = exec(&["--limit", "1GiB", "cat"]);
    let input = fs::File::open(env!("CARGO_MANIFEST_DIR").to_owned() + "/Cargo.toml").unwrap();
    let found = command.stdin(input).output().unwrap();
    assert!(text(&found.stdout).contains("name = \"vramp-cli\""));
}

#[test]
fn variables_say_what_the_library_does() {
    let library = library();
    let folder = tempfile::Builder::new().prefix("a;b%").tempdir().unwrap();
    let file = folder.path().join("run.vtrace");
    let arguments = [
        "--limit",
        "1GiB",
        "--record",
        file.to_str().unwrap(),
        "--stacks",
        "7",
        "--pool",
        "--preset",
        "vpmm",
        "--option",
        "page=4MiB",
        "env",
    ];
    let mut command = exec(&arguments);
    command
        .env("LD_PRELOAD", &library)
        .env("VRAMP_CONF", "span=1TiB")
        .env("VRAMP_LIBRARY", &library);
    let found = command.output().unwrap();
    let variables = text(&found.stdout);
    let value = |name: &str| {
        let line = variables.lines().find_map(|line| line.strip_prefix(&format!("{name}=")));
        line.unwrap_or_else(|| panic!("no {name} in {variables}")).to_owned()
    };
    // The library that was preloaded already is there once.
    let canonical = fs::canonicalize(&library).unwrap().display().to_string();
    let preloaded = value("LD_PRELOAD");
    assert!(preloaded.split(':').next() == Some(&canonical), "{preloaded}");
    assert_eq!(value("VRAMP_CONF"), "span=1TiB,preset=vpmm,limit=1073741824,page=4MiB");
    let settings = value("VRAMP_EXEC");
    let keys: Vec<&str> = settings.split(';').map(|pair| pair.split_once('=').unwrap().0).collect();
    assert_eq!(keys, ["report", "record", "stacks", "limit", "pool", "library"]);
    let escaped = folder.path().display().to_string().replace('%', "%25").replace(';', "%3B");
    for part in [&format!("record={escaped}/.vramp-exec-"), "stacks=7;limit=1073741824;pool=1"] {
        assert!(settings.contains(part), "'{part}' is not in {settings}");
    }
    let error = text(&found.stderr);
    assert!(error.contains("no GPU memory was requested") && !file.exists(), "{error}");
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 0, "temporary files are left");
}

/// A file with these contents that may be executed.
fn executable(folder: &Path, name: &str, contents: &[u8]) -> PathBuf {
    let path = folder.join(name);
    fs::write(&path, contents).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}

/// The header of a program without parts: statically linked.
fn elf(class: u8, machine: u16) -> Vec<u8> {
    let mut bytes = vec![0_u8; 64];
    bytes[..7].copy_from_slice(&[0x7f, b'E', b'L', b'F', class, 1, 1]);
    bytes[16..18].copy_from_slice(&2_u16.to_le_bytes());
    bytes[18..20].copy_from_slice(&machine.to_le_bytes());
    bytes[20..24].copy_from_slice(&1_u32.to_le_bytes());
    bytes[52..54].copy_from_slice(&64_u16.to_le_bytes());
    bytes[54..56].copy_from_slice(&56_u16.to_le_bytes());
    bytes
}

#[test]
fn programs_that_cannot_be_preloaded_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let machine = if cfg!(target_arch = "x86_64") { 62 } else { 183 };
    let fixed = executable(folder.path(), "static", &elf(2, machine));
    let other = executable(folder.path(), "other", &elf(2, 21));
    let narrow = executable(folder.path(), "narrow", &elf(1, 3));
    let script = format!("#!  {} -x\n", fixed.display());
    let script = executable(folder.path(), "script", script.as_bytes());
    let setuid = match getuid().is_root() {
        true => {
            let copy = folder.path().join("setuid");
            fs::copy("/bin/true", &copy).unwrap();
            chown(&copy, Some(1), Some(1)).unwrap();
            fs::set_permissions(&copy, fs::Permissions::from_mode(0o4755)).unwrap();
            copy
        }
        false => PathBuf::from("/usr/bin/passwd"),
    };
    let plain = folder.path().join("plain");
    fs::write(&plain, "text").unwrap();
    for (path, code, words) in [
        (&fixed, 126, "statically linked"),
        (&other, 126, "is not a program for"),
        (&narrow, 126, "32 bits"),
        (&script, 126, "statically linked"),
        (&setuid, 126, "it is setuid"),
        (&plain, 126, "cannot be run"),
        (&folder.path().to_owned(), 126, "cannot be run"),
        (&folder.path().join("missing"), 127, "no such file"),
        (
            &PathBuf::from("no-such-program"),
            127,
            "no program no-such-program in the folders of PATH",
        ),
        (&PathBuf::from("--recrod"), 127, "no option --recrod"),
    ] {
        let found = output(&limited(&[path.to_str().unwrap()]));
        let error = text(&found.stderr);
        assert_eq!(found.status.code(), Some(code), "{error}");
        assert!(
            error.contains(words) && error.lines().count() == 1,
            "'{words}' is not in: {error}"
        );
    }
}

#[test]
fn invalid_arguments_and_missing_libraries_are_said_before_the_program_runs() {
    for (arguments, code, words) in [
        (&["true"][..], 2, "nothing to do"),
        (&["--limit", "1GiB"], 2, "required"),
        (&["--option", "page=4MiB", "--limit", "1GiB", "true"], 2, "--pool"),
        (&["--pool", "--option", "page", "true"], 2, "KEY=VALUE"),
        (&["--record", "/no/such/folder/run.vtrace", "true"], 1, "/no/such/folder/run.vtrace"),
        (&["--record", "-", "true"], 2, "standard output is the program's"),
        (&["--pool", "echo", "ran"], 1, "/no/such.so (VRAMP_LIBRARY)"),
    ] {
        let found = exec(arguments).env("VRAMP_LIBRARY", "/no/such.so").output().unwrap();
        let error = text(&found.stderr);
        assert_eq!(found.status.code(), Some(code), "{error}");
        assert!(error.contains(words) && found.stdout.is_empty(), "'{words}' is not in: {error}");
    }
    let mut command = exec(&limited(&["echo", "ran"]));
    let found = command.env("VRAMP_PRELOAD_LIBRARY", "/no/such.so").output().unwrap();
    let error = text(&found.stderr);
    assert!(
        error.contains("/no/such.so (VRAMP_PRELOAD_LIBRARY)") && found.stdout.is_empty(),
        "{error}"
    );
}

/// The largest id of a process on Linux.
const LARGEST: u64 = 1 << 22;

/// What a process with this id would have recorded: a block of 1 MiB by a function of this program.
fn recording(pid: u64, program: &str, ns: u64) -> Vec<u8> {
    let path = std::env::current_exe().unwrap();
    let mut bytes = header(pid).to_vec();
    let event = |change, api, address, size| {
        Record::Event(Event {
            change,
            api,
            device: 0,
            stack: Some(0),
            ns,
            address,
            size,
            stream: 0,
        })
    };
    let command = format!("/bin/{program}\0-x");
    for record in [
        Record::Program { start_us: 1_000_000, start_ns: 0, command: command.as_bytes() },
        Record::Device { device: 0, total: 80 << 30, name: b"NVIDIA H100" },
        Record::Module {
            id: 0,
            bias: 0,
            start: 0,
            end: u64::MAX,
            path: path.to_str().unwrap().as_bytes(),
        },
        Record::Stack { id: 0, pcs: Cow::Borrowed(&[0x10]) },
        event(Change::Alloc, Api::MemAlloc, 0x7f00_0000_0000, 1 << 20),
        event(Change::OutOfMemory, Api::MemAllocAsync, 1 << 20, 1 << 40),
    ] {
        encode(&record, &mut bytes);
    }
    bytes
}

#[test]
fn what_each_process_recorded_becomes_a_trace() {
    let folder = tempfile::tempdir().unwrap();
    let spools = folder.path().join("spools");
    fs::create_dir(&spools).unwrap();
    fs::write(spools.join("7.spool"), recording(LARGEST + 7, "second", 2000)).unwrap();
    let first = recording(LARGEST + 9, "first", 1000);
    fs::write(spools.join("9.spool"), [&first[..], &[0; 4096]].concat()).unwrap();
    // A process that requested nothing, and one that a newer vramp recorded.
    fs::write(spools.join("8.spool"), header(LARGEST + 8)).unwrap();
    fs::write(spools.join("6.spool"), b"VSPOOL\x09\n").unwrap();
    let file = folder.path().join("run.vtrace");
    let script = format!(
        "folder=${{VRAMP_EXEC#*record=}}; cp {}/* \"${{folder%%;*}}\"; report=${{VRAMP_EXEC#*report=}}; \
         printf 'device 0\\nheld 0\\nheld_peak 1048576\\n' > \"${{report%%;*}}/9.report\"; exit 5",
        spools.display()
    );
    let found = output(&["--record", file.to_str().unwrap(), "sh", "-c", &script]);
    let error = text(&found.stderr);
    assert_eq!(found.status.code(), Some(5), "{error}");
    for words in [
        "(process 9): held at most 1.00 MiB on device 0",
        "first (process 4194313): 2 events recorded in ",
        "second (process 4194311): 2 events recorded in ",
        "has version 9",
    ] {
        assert!(error.contains(words), "'{words}' is not in:\n{error}");
    }
    let mut names: Vec<String> = fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, ["run.4194311.vtrace", "run.vtrace", "spools"]);
    let trace = vramp_trace::read_trace(&file, &vramp_trace::ReadLimits::default()).unwrap();
    assert_eq!((trace.name.as_str(), trace.events.len()), ("first", 2));
    let frames: Vec<&str> =
        trace.stacks.frames(trace.events[1].stack.unwrap()).map(|frame| frame.name).collect();
    assert_eq!(frames, ["cuMemAllocAsync", "+0xf"]);
}

#[test]
fn a_recording_that_goes_on_is_kept_and_read() {
    let folder = tempfile::tempdir().unwrap();
    let spool = folder.path().join("spool");
    fs::write(&spool, recording(std::process::id().into(), "server", 1000)).unwrap();
    let file = folder.path().join("run.vtrace");
    let script = format!(
        "folder=${{VRAMP_EXEC#*record=}}; cp {} \"${{folder%%;*}}/1.spool\"",
        spool.display()
    );
    let found = output(&["--record", file.to_str().unwrap(), "sh", "-c", &script]);
    let error = text(&found.stderr);
    assert!(error.contains("): goes on, and records into "), "{error}");
    let place = error.split("vramp explain ").nth(1).unwrap_or_else(|| panic!("{error}")).trim();
    assert!(!file.exists() && Path::new(place).is_file(), "{error}");
    let mut convert = Command::new(env!("CARGO_BIN_EXE_vramp"));
    let converted = convert.args(["convert", place]).arg(&file).output().unwrap();
    assert!(text(&converted.stdout).contains("2 events"), "{}", text(&converted.stderr));
}
