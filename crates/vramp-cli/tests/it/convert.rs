//! `vramp convert`: where it writes, and what it refuses.

use std::fs;
use std::io::Read;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command as Process, Stdio};
use std::thread;

use assert_cmd::Command;
use tempfile::TempDir;

const MAGIC: &[u8] = b"\x89VTRACE\n";

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn gnn() -> PathBuf {
    root().join("examples/traces/gnn.pickle.gz")
}

/// Returns `vramp convert` in a folder.
fn convert(folder: &TempDir, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vramp"));
    command.current_dir(folder.path()).arg("convert").args(args);
    command
}

/// A folder with a trace, `in.pickle.gz`.
fn folder() -> TempDir {
    let folder = tempfile::tempdir().expect("the test has set this up");
    fs::copy(gnn(), folder.path().join("in.pickle.gz")).expect("the test has set this up");
    folder
}

fn bytes(path: impl AsRef<Path>) -> Vec<u8> {
    fs::read(path).expect("it was written")
}

fn error(command: &mut Command) -> String {
    let assert = command.assert().code(1);
    let error = String::from_utf8_lossy(&assert.get_output().stderr).into_owned();
    assert_eq!(error.lines().count(), 1, "{error}");
    error
}

fn names(folder: &TempDir) -> Vec<String> {
    let entries = fs::read_dir(folder.path()).expect("the test has set this up");
    let mut names: Vec<String> = entries
        .map(|entry| entry.expect("it is readable").file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

#[test]
fn standard_output_gets_the_file_and_nothing_else() {
    let folder = folder();
    for out in ["-", "/dev/stdout"] {
        let output = convert(&folder, &["in.pickle.gz", out, "--to", "vtrace"]).output();
        let output = output.expect("the test has set this up");
        assert!(output.status.success() && output.stdout.starts_with(MAGIC), "{output:?}");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains("14,142 events"), "{said}");
    }
    assert_eq!(names(&folder), ["in.pickle.gz"], "no file is called -");
    let error = error(&mut convert(&folder, &["in.pickle.gz", "-"]));
    assert!(error.contains("the format of standard output is unknown"), "{error}");
}

#[test]
fn standard_input_is_read() {
    let folder = folder();
    convert(&folder, &["-", "out.vtrace"]).write_stdin(bytes(gnn())).assert().success();
    assert!(bytes(folder.path().join("out.vtrace")).starts_with(MAGIC));
    let error = error(convert(&folder, &["-", "out.vtrace"]).write_stdin("{\"traceEvents\": 1}"));
    assert!(error.contains("cannot read the trace on standard input"), "{error}");
}

#[test]
fn devices_stay_devices() {
    let folder = folder();
    convert(&folder, &["in.pickle.gz", "/dev/null", "--to", "pickle"]).assert().success();
    let device = |path: &str| fs::metadata(path).expect("it is there").file_type().is_char_device();
    assert!(device("/dev/null"));
    for kind in ["vtrace", "pickle", "perfetto"] {
        let error = error(&mut convert(&folder, &["in.pickle.gz", "/dev/full", "--to", kind]));
        assert!(error.contains("cannot write '/dev/full': No space left on device"), "{error}");
    }
    assert!(device("/dev/full"));
    let full = fs::OpenOptions::new().write(true).open("/dev/full").expect("it is there");
    let output = Process::new(env!("CARGO_BIN_EXE_vramp"))
        .args(["convert", "in.pickle.gz", "-", "--to", "perfetto"])
        .current_dir(folder.path())
        .stdout(full)
        .output()
        .expect("the test has set this up");
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1));
    assert!(error.contains("cannot write standard output: No space left"), "{error}");
}

#[test]
fn pipes_and_sockets_are_written_through() {
    let folder = folder();
    let pipe = folder.path().join("pipe");
    let made = Process::new("mkfifo").arg(&pipe).status().expect("coreutils have mkfifo");
    assert!(made.success());
    let reader = thread::spawn({
        let pipe = pipe.clone();
        move || bytes(pipe)
    });
    convert(&folder, &["in.pickle.gz", "pipe", "--to", "vtrace"]).assert().success();
    assert!(reader.join().expect("it read").starts_with(MAGIC));
    assert!(fs::metadata(&pipe).expect("it is there").file_type().is_fifo());

    let socket = UnixListener::bind(folder.path().join("socket")).expect("a short path");
    let reader = thread::spawn(move || {
        let (mut stream, _) = socket.accept().expect("vramp connects");
        let mut found = Vec::new();
        stream.read_to_end(&mut found).expect("it is open");
        found
    });
    convert(&folder, &["in.pickle.gz", "socket", "--to", "vtrace"]).assert().success();
    assert!(reader.join().expect("it read").starts_with(MAGIC));
}

#[test]
fn a_reader_that_goes_away_is_quiet() {
    let folder = folder();
    let mut child = Process::new(env!("CARGO_BIN_EXE_vramp"))
        .args(["convert", "in.pickle.gz", "-", "--to", "perfetto"])
        .current_dir(folder.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the test has set this up");
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("the test has set this up");
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
}

#[test]
fn links_stay_links_and_their_files_are_replaced() {
    let folder = folder();
    let path = |name: &str| folder.path().join(name);
    fs::create_dir(path("far")).expect("the test has set this up");
    fs::write(path("far/old.vtrace"), "old").expect("the test has set this up");
    symlink("far/old.vtrace", path("first")).expect("the test has set this up");
    symlink("first", path("second")).expect("the test has set this up");
    symlink("far/new.vtrace", path("dangling")).expect("the test has set this up");
    symlink("loop", path("loop")).expect("the test has set this up");
    for (link, file) in [("second", "far/old.vtrace"), ("dangling", "far/new.vtrace")] {
        convert(&folder, &["in.pickle.gz", link, "--to", "vtrace"]).assert().success();
        assert!(path(link).is_symlink() && path("first").is_symlink(), "{link}");
        assert!(!path(file).is_symlink());
        assert!(bytes(path(file)).starts_with(MAGIC), "{link}");
    }
    let error = error(&mut convert(&folder, &["in.pickle.gz", "loop", "--to", "vtrace"]));
    assert!(error.contains("cannot write 'loop'"), "{error}");
}

#[test]
fn permissions_of_a_replaced_file_are_kept_and_those_of_a_new_one_usual() {
    let folder = folder();
    let path = |name: &str| folder.path().join(name);
    let mode = |name: &str| fs::metadata(path(name)).expect("it is there").mode() & 0o777;
    for old in [0o600, 0o640, 0o664] {
        fs::write(path("old.vtrace"), "old").expect("the test has set this up");
        let permissions = fs::Permissions::from_mode(old);
        fs::set_permissions(path("old.vtrace"), permissions).expect("the test has set this up");
        convert(&folder, &["in.pickle.gz", "old.vtrace"]).assert().success();
        assert_eq!(mode("old.vtrace"), old);
    }
    convert(&folder, &["in.pickle.gz", "new.vtrace"]).assert().success();
    fs::write(path("usual"), "").expect("the test has set this up");
    assert_eq!(mode("new.vtrace"), mode("usual"));
    assert_eq!(names(&folder), ["in.pickle.gz", "new.vtrace", "old.vtrace", "usual"]);
}

#[test]
fn the_input_is_not_replaced_unless_forced() {
    let folder = folder();
    let path = |name: &str| folder.path().join(name);
    fs::hard_link(path("in.pickle.gz"), path("hard")).expect("the test has set this up");
    symlink("in.pickle.gz", path("soft")).expect("the test has set this up");
    let before = bytes(path("in.pickle.gz"));
    for out in ["in.pickle.gz", "./in.pickle.gz", "hard", "soft"] {
        let error = error(&mut convert(&folder, &["in.pickle.gz", out, "--to", "pickle"]));
        assert!(error.contains("is the file that is read"), "{error}");
        assert!(error.contains("keys that vramp does not read") && error.contains("--force"));
    }
    assert_eq!(bytes(path("in.pickle.gz")), before);
    let args = ["in.pickle.gz", "soft", "--to", "pickle", "--force"];
    let assert = convert(&folder, &args).assert().success();
    let said = String::from_utf8_lossy(&assert.get_output().stdout).into_owned();
    assert!(said.contains("not kept: keys that vramp does not read"), "{said}");
    assert!(path("soft").is_symlink() && bytes(path("in.pickle.gz")).starts_with(b"\x80\x04"));
    assert_eq!(bytes(path("hard")), before, "another name of the old file");
}

#[test]
fn a_failure_leaves_the_old_file() {
    let folder = folder();
    let path = |name: &str| folder.path().join(name);
    fs::write(path("old.vtrace"), "old").expect("the test has set this up");
    fs::write(path("broken"), b"\x80\x04}").expect("the test has set this up");
    let broken = error(&mut convert(&folder, &["broken", "old.vtrace"]));
    assert!(broken.contains("cannot read the trace 'broken'"), "{broken}");
    assert_eq!(bytes(path("old.vtrace")), b"old");
    assert_eq!(names(&folder), ["broken", "in.pickle.gz", "old.vtrace"]);
    let into = error(&mut convert(&folder, &["in.pickle.gz", ".", "--to", "vtrace"]));
    assert!(into.contains("cannot write '.'"), "{into}");
}

#[test]
fn the_limits_on_reading_are_arguments() {
    let folder = folder();
    for (option, value) in [("--max-memory", "1MiB"), ("--max-events", "100")] {
        let few = error(&mut convert(&folder, &["in.pickle.gz", "out.vtrace", option, value]));
        assert!(few.contains(option) && few.contains("ReadLimits::"), "{few}");
    }
    let enough = ["in.pickle.gz", "out.vtrace", "--max-memory", "16MiB", "--max-events", "14142"];
    convert(&folder, &enough).assert().success();
}
