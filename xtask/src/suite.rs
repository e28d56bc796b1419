//! Runs the tests of the workspace, each in a process of its own, as many at a time as there are
//! processors. So a test that crashes or does not end fails alone and is named, and the cost of each is
//! known.
//!
//! 1. [`build`] compiles all targets and returns the tests and the other programs.
//! 2. [`Suite::shard`] keeps a part of the tests.
//! 3. [`Suite::run`] runs them and prints what failed, and which tests cost most.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use wait4::Wait4;

use crate::cost::Cost;
use crate::shell;

/// How many of the most expensive tests are printed.
const SLOWEST: usize = 20;

/// One program of tests.
#[derive(Clone, Debug)]
pub struct Program {
    /// The crate and the target, such as `vramp-core it`.
    pub name: String,
    /// The folder of the crate, in which its tests run.
    folder: PathBuf,
    /// The executable file.
    pub file: PathBuf,
}

/// What a build made.
#[derive(Debug, Default)]
pub struct Built {
    pub tests: Vec<Program>,
    /// Those that users run, and the examples.
    pub programs: Vec<Program>,
    /// How many warnings were printed.
    pub warnings: usize,
}

/// Builds all targets of some crates with these arguments of `cargo build`.
pub fn build(root: &Path, arguments: &[String]) -> Result<Built> {
    let mut cargo = Command::new("cargo");
    cargo.current_dir(root);
    build_with(cargo, arguments)
}

/// Builds them with a command of cargo that has its folder and its variables.
pub fn build_with(mut cargo: Command, arguments: &[String]) -> Result<Built> {
    cargo.args(["build", "--all-targets", "--locked"]).args(arguments);
    if arguments == ["--workspace"] {
        // What is off by default is tested too.
        cargo.args(["--features", "vramp-cli/pictures"]);
    }
    let (messages, ended) = shell::captured(cargo.arg("--message-format=json"))?;
    let mut built = Built::default();
    for line in messages.lines() {
        let message: Value = serde_json::from_str(line)?;
        if let Some(text) = message["message"]["rendered"].as_str() {
            eprint!("{text}");
            built.warnings += usize::from(message["message"]["level"] == "warning");
        }
        match program(&message) {
            Some((program, true)) => built.tests.push(program),
            Some((program, false)) => built.programs.push(program),
            None => {}
        }
    }
    ended.map(|()| built)
}

impl Built {
    /// The program or the example of this name.
    pub fn program(&self, name: &str) -> Result<&Program> {
        let program = self.programs.iter().find(|program| program.target() == name);
        program.with_context(|| format!("there is no program {name}"))
    }
}

/// The program that one of cargo's messages names, if any, and whether it is one of tests.
fn program(message: &Value) -> Option<(Program, bool)> {
    let file = PathBuf::from(message["executable"].as_str()?);
    let manifest = Path::new(message["manifest_path"].as_str()?);
    let folder = manifest.parent()?.to_owned();
    let package = folder.file_name()?.to_str()?;
    let target = message["target"]["name"].as_str()?;
    let is_test = message["profile"]["test"] == true;
    Some((Program { name: format!("{package} {target}"), folder, file }, is_test))
}

/// Tests to run.
pub struct Suite {
    tests: Vec<Test>,
    variables: Vec<(&'static str, String)>,
}

struct Test {
    program: Program,
    name: String,
}

/// A test that ran.
struct Ran<'a> {
    test: &'a Test,
    cost: Cost,
    /// What it printed and how it ended, if it failed.
    failure: Option<String>,
}

impl Suite {
    /// The tests of programs.
    pub fn of(programs: &[Program]) -> Result<Suite> {
        Suite::with_variables(programs, Vec::new())
    }

    /// The tests of programs that need these variables.
    pub fn with_variables(
        programs: &[Program],
        variables: Vec<(&'static str, String)>,
    ) -> Result<Suite> {
        let mut tests = Vec::new();
        for program in programs {
            let mut list = program.command();
            list.envs(variables.iter().map(|(name, value)| (name, value)));
            let listed = shell::output(list.args(["--list", "--format", "terse"]))?;
            let names = listed.lines().filter_map(|line| line.strip_suffix(": test"));
            let test = |name: &str| Test { program: program.clone(), name: name.to_owned() };
            tests.extend(names.map(test));
        }
        ensure!(!tests.is_empty(), "there are no tests");
        Ok(Suite { tests, variables })
    }

    /// Keeps the tests whose place, counted from 0, is wanted.
    pub fn shard(mut self, wanted: impl Fn(usize) -> bool) -> Suite {
        let mut places = 0..;
        self.tests.retain(|_| places.next().is_some_and(&wanted));
        self
    }

    /// Sets a variable for every test.
    pub fn with(mut self, name: &'static str, value: &str) -> Suite {
        self.variables.push((name, value.to_owned()));
        self
    }

    /// Runs the tests, each for at most `limit`, and returns the cost of each program.
    ///
    /// # Errors
    ///
    /// The names of the tests that failed, after the output of each was printed.
    pub fn run(self, root: &Path, limit: Duration) -> Result<BTreeMap<String, Cost>> {
        let mut ran = self.perform(root, limit, false)?;
        ran.sort_by_key(|ran| std::cmp::Reverse(ran.cost.cpu));
        println!("tests: the {SLOWEST} that cost most");
        for Ran { test, cost, .. } in ran.iter().take(SLOWEST) {
            println!("  {cost}  {test}");
        }
        let mut programs: BTreeMap<String, Cost> = BTreeMap::new();
        for Ran { test, cost, .. } in &ran {
            *programs.entry(test.program.name.clone()).or_default() += *cost;
        }
        let failed = ran.iter().filter(|ran| ran.failure.is_some());
        let mut failed: Vec<String> = failed.map(|ran| format!("\n  {}", ran.test)).collect();
        failed.sort_unstable();
        println!("tests: {} passed, {} failed", ran.len() - failed.len(), failed.len());
        ensure!(failed.is_empty(), "{} tests failed:{}", failed.len(), failed.concat());
        Ok(programs)
    }

    /// Runs the tests until one fails, and returns its name.
    pub fn first_failure(self, root: &Path, limit: Duration) -> Result<Option<String>> {
        let ran = self.perform(root, limit, true)?;
        let mut failed = ran.into_iter().filter(|ran| ran.failure.is_some());
        Ok(failed.next().map(|ran| ran.test.to_string()))
    }

    /// Runs the tests, or those before the first failure, and prints the output of those that fail.
    fn perform(&self, root: &Path, limit: Duration, only_first: bool) -> Result<Vec<Ran<'_>>> {
        let logs = root.join("target/test-logs");
        fs::create_dir_all(&logs)?;
        let next = AtomicUsize::new(0);
        let ran: Mutex<Vec<Ran>> = Mutex::new(Vec::new());
        let work = || -> Result<()> {
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                let Some(test) = self.tests.get(index) else { return Ok(()) };
                let one = self.run_one(test, &logs.join(format!("{index}.txt")), limit)?;
                if let Some(failure) = &one.failure {
                    println!("FAILED {test}\n{failure}");
                    if only_first {
                        next.store(self.tests.len(), Ordering::Relaxed);
                    }
                }
                ran.lock().expect("no thread panics with the lock").push(one);
            }
        };
        let threads = std::thread::available_parallelism()?.get();
        std::thread::scope(|scope| {
            let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
            let ended = workers.into_iter().map(|worker| worker.join().expect("it does not panic"));
            ended.collect::<Result<Vec<()>>>()
        })?;
        fs::remove_dir_all(&logs)?;
        Ok(ran.into_inner().expect("no thread panicked with the lock"))
    }

    /// Runs a test with its output in a file. If it takes longer than `limit`, it is killed, with what it
    /// started.
    fn run_one<'a>(&self, test: &'a Test, log: &Path, limit: Duration) -> Result<Ran<'a>> {
        let file = File::create(log)?;
        let mut command = Command::new("timeout");
        test.program.surround(&mut command);
        command.args(["--signal=KILL", &limit.as_secs().to_string()]).arg(&test.program.file);
        command.args(["--exact", "--nocapture", &test.name]);
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
        command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        let start = Instant::now();
        let mut child = command.spawn().context("cannot start `timeout` (Debian: coreutils)")?;
        let used = child.wait4()?;
        let cost = Cost { cpu: used.rusage.utime + used.rusage.stime, wall: start.elapsed() };
        let failure = (!used.status.success()).then(|| {
            let printed = fs::read(log).unwrap_or_default();
            let wall = cost.wall.as_secs_f64();
            let why = if cost.wall >= limit { ", the most that it may take" } else { "" };
            let printed = String::from_utf8_lossy(&printed);
            format!("{printed}it ended with {} after {wall:.1} s{why}", used.status)
        });
        fs::remove_file(log)?;
        Ok(Ran { test, cost, failure })
    }
}

impl fmt::Display for Test {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.program.name, self.name)
    }
}

impl Program {
    /// A command with the folder and the variables that `cargo test` gives to a program.
    fn command(&self) -> Command {
        let mut command = Command::new(&self.file);
        self.surround(&mut command);
        command
    }

    fn surround(&self, command: &mut Command) {
        command.current_dir(&self.folder).env("CARGO_MANIFEST_DIR", &self.folder);
    }

    /// Runs an example to its end.
    pub fn run(&self, root: &Path) -> Result<()> {
        shell::run(Command::new(&self.file).current_dir(root))
    }

    /// The name of the target alone.
    pub fn target(&self) -> &str {
        self.name.split_once(' ').map_or(&self.name, |(_, target)| target)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A program of tests that is a shell script: its second argument but one is the test.
    fn suite(folder: &Path, names: &[&str]) -> Suite {
        let file = folder.join("tests.sh");
        let script = "#!/bin/sh\ncase $3 in\n  fails) echo 'it is wrong'; exit 101;;\n  \
                      hangs) sleep 60;;\nesac\n";
        fs::write(&file, script).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        fs::set_permissions(&file, mode).unwrap();
        let program = Program { name: "made it".to_owned(), folder: folder.to_owned(), file };
        let test = |name: &&str| Test { program: program.clone(), name: (*name).to_owned() };
        Suite { tests: names.iter().map(test).collect(), variables: Vec::new() }
    }

    #[test]
    fn failures_and_tests_that_hang_are_named_and_the_others_run() {
        let folder = tempfile::tempdir().unwrap();
        let suite = suite(folder.path(), &["passes", "fails", "hangs", "passes"]);
        let ran = suite.perform(folder.path(), Duration::from_secs(1), false).unwrap();
        assert_eq!(ran.len(), 4);
        for Ran { test, failure, .. } in ran {
            match (test.name.as_str(), failure) {
                ("passes", None) => {}
                ("fails", Some(text)) => assert!(text.starts_with("it is wrong\n"), "{text}"),
                ("hangs", Some(text)) => assert!(text.contains("the most that it may"), "{text}"),
                (name, failure) => panic!("{name}: {failure:?}"),
            }
        }
    }

    #[test]
    fn what_passes_costs_and_what_fails_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let limit = Duration::from_secs(20);
        let costs = suite(folder.path(), &["passes"; 3]).run(folder.path(), limit).unwrap();
        assert_eq!(costs.keys().collect::<Vec<_>>(), ["made it"]);
        let failed = suite(folder.path(), &["passes", "fails"]).run(folder.path(), limit);
        assert_eq!(failed.unwrap_err().to_string(), "1 tests failed:\n  made it fails");
        let first = suite(folder.path(), &["fails"; 50]).first_failure(folder.path(), limit);
        assert_eq!(first.unwrap(), Some("made it fails".to_owned()));
    }

    #[test]
    fn programs_of_tests_are_found_among_cargos_messages() {
        let of = |test: bool| {
            let text = format!(
                r#"{{"executable":"/t/it-1","manifest_path":"/w/crates/vramp-core/Cargo.toml",
                "target":{{"name":"it"}},"profile":{{"test":{test}}}}}"#
            );
            program(&serde_json::from_str(&text).unwrap()).unwrap()
        };
        let (found, is_test) = of(true);
        assert!(is_test && !of(false).1);
        assert_eq!((found.name.as_str(), found.target()), ("vramp-core it", "it"));
        assert!(program(&serde_json::json!({"executable": null})).is_none());
    }
}
