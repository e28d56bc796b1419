//! `vramp keep`, with a keeper in a process of its own.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use assert_cmd::Command;
use serde_json::Value;
use vramp::sharing::kept::{Keeper, KeptOptions, MapAs, OpenKept};
use vramp::{Allocator, Bytes, Config};

/// A keeper, which ends with the test.
struct Served {
    process: Child,
    directory: PathBuf,
    _folder: tempfile::TempDir,
}

impl Served {
    fn new(options: &[&str]) -> Served {
        let folder = tempfile::tempdir().unwrap();
        let directory = folder.path().join("vramp");
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_vramp"));
        command.arg("keep").args(options).arg("--directory").arg(&directory);
        let mut process = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, format!("keeps memory in {}\n", directory.display()));
        Served { process, directory, _folder: folder }
    }

    fn run(&self, args: &[&str]) -> Command {
        vramp(&self.directory, args)
    }

    fn says(&self, args: &[&str]) -> String {
        let assert = self.run(args).assert().success();
        String::from_utf8(assert.get_output().stdout.clone()).unwrap()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn vramp(directory: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vramp"));
    command.arg("keep").args(args).arg("--directory").arg(directory);
    command
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

#[test]
fn people_see_and_end_what_is_kept() {
    let served = Served::new(&[]);
    assert_eq!(served.says(&["list"]), "nothing is kept\n");
    let keeper = Keeper::new(&served.directory, Duration::from_secs(20));
    let allocator = Allocator::new(vramp::open("sim:h200").unwrap(), Config::default()).unwrap();
    let options = KeptOptions { bytes: Bytes::mib(3), ..KeptOptions::default() };
    for name in ["model/0", "model/1"] {
        let mut draft = allocator.draft_kept(&keeper, name, &options, soon()).unwrap();
        draft.place(Bytes::mib(3)).unwrap();
        drop(draft.commit(b"", [0; 32], MapAs::ReadOnly).unwrap());
    }
    let opened = allocator.open_kept(&keeper, "model/1", OpenKept::default(), soon()).unwrap();
    let table = served.says(&["list"]);
    let pid = std::process::id();
    for words in ["model/0", "4.00 MiB", "whole", "idle for", &format!("{pid} (read)")] {
        assert!(table.contains(words), "{words} is not in {table}");
    }
    let lines = served.says(&["list", "--json"]);
    let rows: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(rows.len(), 2);
    assert_eq!((&rows[1]["bytes"], &rows[1]["epoch"]), (&Value::from(4 << 20), &Value::from(1)));
    assert_eq!(rows[1]["holders"][0]["pid"], Value::from(pid));

    // What is open stays.
    assert_eq!(served.says(&["evict", "1GiB"]), "sim:h200: 4.00 MiB freed\n");
    assert_eq!(served.says(&["remove", "model/1"]), "removed model/1\n");
    drop(opened);
    assert_eq!(served.says(&["list"]), "nothing is kept\n");
    served.run(&["remove", "model/1"]).assert().code(1);
    assert_eq!(served.says(&["stop"]), "stopped\n");
    let gone = served.run(&["list"]).assert().code(1);
    assert!(String::from_utf8_lossy(&gone.get_output().stderr).contains("vramp keep"));
}

#[test]
fn a_second_keeper_and_wrong_arguments_are_refused() {
    let served = Served::new(&["--limit", "1GiB", "--idle-exit", "3600"]);
    let second = vramp(&served.directory, &[]).assert().code(1);
    let error = String::from_utf8_lossy(&second.get_output().stderr).into_owned();
    assert!(error.contains(&served.process.id().to_string()), "{error}");
    vramp(&served.directory, &["--limit", "0"]).assert().code(2);
    vramp(&served.directory, &["--idle-exit", "never"]).assert().code(2);
    served.run(&["evict", "many"]).assert().code(2);
    let unit = served.says(&["service", "--program", "/opt/bin/vramp"]);
    assert!(unit.contains("ExecStart=/opt/bin/vramp keep --directory"), "{unit}");
    let percent = vramp(Path::new("/srv/50%d"), &["service"]).assert().success();
    let unit = String::from_utf8_lossy(&percent.get_output().stdout).into_owned();
    assert!(unit.contains("--directory \"/srv/50%%d\""), "{unit}");
}
