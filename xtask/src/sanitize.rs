//! `cargo xtask sanitize`: everything with `unsafe` code on AddressSanitizer, which ends a program at the
//! first access to memory that was freed or never allocated.
//!
//! 1. [`Build::new`] makes a shared library of the runtime that comes with the compiler. A program in C, a
//!    program in Rust and an interpreter have one runtime then: the first library that each loads.
//! 2. The tests of the crates with `unsafe`, those of the C interface among them, run as in CI.
//! 3. The life-cycle programs run on 8 threads, through C and as the Python module calls it.
//! 4. The Python package is built and installed, and its tests run.
//!
//! Deliberately absent: leaks, since what a library keeps until its process ends is one to the sanitizer;
//! the tests of the package count instead.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::python::{self, Kind};
use crate::suite::{self, Suite};
use crate::{ci, shell};

/// The crates that may have `unsafe`, but for the Python module, whose tests are in Python; and the program
/// of the life cycles.
const CRATES: [&str; 5] = ["vramp-host", "vramp-cuda", "vramp-cudarc", "vramp-capi", "vramp-check"];
/// Operations of the life-cycle programs for each preset in a run of length 1.
const STEPS: u64 = 50_000;
/// Threads that perform them.
const THREADS: &str = "8";
/// The longest that a test may take. The sanitizer doubles what tests cost.
const TEST_LIMIT: Duration = Duration::from_secs(600);
/// Tests run optimized, with all their assertions.
pub const PROFILE: &str = "nightly";
/// What the runtime is asked for. Tests ask for more memory than there is, and expect an error.
const OPTIONS: &str = "detect_leaks=0:allocator_may_return_null=1:abort_on_error=1";
/// Runs only where the runtime is a part of a program, so a shared library may not have it.
const NOT_SHARED: &str = "asan_preinit.cpp.o";
/// Tests in Python that compare the memory of the process. The sanitizer keeps what is freed.
const MEASURES_MEMORY: &str =
    "leave_nothing or cost_a_few_bytes or evicted_thousands or dasks_defaults";
/// Tests in Python that make garbage on many threads. They run as long as the life cycles.
const GARBAGE: &str = "test_garbage";

/// Runs everything, the life cycles with `length` times as many operations as in a short run.
pub fn run(root: &Path, length: u64) -> Result<()> {
    let build = Build::new(root)?;
    let mut arguments = vec!["--profile".to_owned(), PROFILE.to_owned()];
    arguments.extend(["--target".to_owned(), build.target.clone()]);
    arguments.extend(CRATES.iter().flat_map(|name| ["-p".to_owned(), (*name).to_owned()]));
    let mut cargo = ci::cargo(root);
    build.instrument(&mut cargo);
    let built = suite::build_with(cargo, &arguments)?;
    let unsafe_ones = built.tests.iter().filter(|it| !it.name.starts_with("vramp-check "));
    let programs: Vec<_> = unsafe_ones.cloned().collect();
    Suite::with_variables(&programs, build.variables())?.run(root, TEST_LIMIT)?;
    let steps = STEPS.saturating_mul(length).to_string();
    let check = built.program("vramp-check")?;
    for interface in ["c", "python"] {
        let mut program = Command::new(&check.file);
        program.args(["lifecycle", "--threads", THREADS, "--bound", "120000", "--steps", &steps]);
        shell::run(program.args(["--interface", interface]).envs(build.variables()))?;
    }
    package(root, &build, length)
}

/// Builds the Python package and runs its tests.
fn package(root: &Path, build: &Build, length: u64) -> Result<()> {
    let wheel = python::build(root, Kind::Sanitized(build))?;
    let environment = python::environment(root, "python-sanitized", &wheel, &[])?;
    let others = format!("not ({MEASURES_MEMORY} or {GARBAGE})");
    for (chosen, length) in [(others.as_str(), 1), (GARBAGE, length)] {
        let mut tests = python::tests(root, &environment);
        tests.args(["-k", chosen]).envs(build.variables()).env("PYTHONMALLOC", "malloc");
        shell::run(tests.env(vramp_testing::LENGTH, length.to_string()))?;
    }
    Ok(())
}

/// How crates are built for the sanitizer, and what their programs need.
pub struct Build {
    /// Apart from other builds: cargo compiles everything anew for other flags.
    folder: PathBuf,
    runtime: PathBuf,
    /// The platform. With one named, programs that only run during a build are built as always.
    pub target: String,
}

impl Build {
    fn new(root: &Path) -> Result<Build> {
        let target = std::env::var_os("CARGO_TARGET_DIR");
        let folder = target.map_or(root.join("target"), PathBuf::from).join("sanitizer");
        fs::create_dir_all(&folder)?;
        let sysroot = shell::output(Command::new("rustc").args(["--print", "sysroot"]))?;
        let version = shell::output(Command::new("rustc").arg("-vV"))?;
        let host = version.lines().find_map(|line| line.strip_prefix("host: "));
        let target = host.context("rustc -vV names no host")?.to_owned();
        let libraries = Path::new(sysroot.trim()).join("lib/rustlib").join(&target).join("lib");
        // The static runtime of other programs refuses a library that has the name of the one of GCC.
        let runtime = folder.join("runtime.so");
        link(&archive(&libraries)?, &runtime)?;
        Ok(Build { folder, runtime, target })
    }

    /// Lets a command of cargo or maturin build for the sanitizer.
    pub fn instrument(&self, command: &mut Command) {
        let runtime = self.runtime.display();
        let flags = format!("-Zsanitizer=address -Zexternal-clangrt -Clink-arg={runtime}");
        command.env("RUSTFLAGS", flags).env("CARGO_TARGET_DIR", &self.folder);
        // Sanitizers need no other compiler, but are not yet among its stable flags.
        command.env("RUSTC_BOOTSTRAP", "1");
        // Reports name lines.
        command.env("CARGO_PROFILE_NIGHTLY_DEBUG", "line-tables-only");
    }

    /// What a program runs with, and what it starts.
    fn variables(&self) -> Vec<(&'static str, String)> {
        let runtime = self.runtime.display().to_string();
        vec![("LD_PRELOAD", runtime), ("ASAN_OPTIONS", OPTIONS.to_owned())]
    }
}

/// Returns the runtime that comes with the compiler.
fn archive(libraries: &Path) -> Result<PathBuf> {
    let files = fs::read_dir(libraries)?.filter_map(|entry| Some(entry.ok()?.path()));
    let mut runtimes = files.filter(|path| path.to_string_lossy().ends_with("_rt.asan.a"));
    runtimes.next().with_context(|| format!("{} has no sanitizer", libraries.display()))
}

/// Makes a shared library of the runtime.
fn link(archive: &Path, runtime: &Path) -> Result<()> {
    let copy = runtime.with_extension("a");
    fs::copy(archive, &copy)?;
    shell::run(Command::new("ar").arg("d").arg(&copy).arg(NOT_SHARED))?;
    let mut linker = Command::new("cc");
    linker.args(["-shared", "-o"]).arg(runtime).arg("-Wl,--whole-archive").arg(&copy);
    shell::run(linker.args(["-Wl,--no-whole-archive", "-ldl", "-lrt", "-lpthread", "-lm"]))?;
    let symbols = shell::output(Command::new("nm").args(["--dynamic", "-j"]).arg(runtime))?;
    ensure!(symbols.lines().any(|name| name == "__asan_init"), "the runtime has no __asan_init");
    Ok(())
}
