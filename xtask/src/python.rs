//! The Python package: `cargo xtask wheel`, and its checks.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::shell;

/// Builds wheels; zig links them against an old C library.
const BUILDERS: [&str; 2] = ["maturin==1.16.0", "ziglang==0.17.1"];
/// Check the package.
const CHECKERS: [&str; 3] = [PYTEST, "mypy==2.4.1", "numpy>=1.26"];
/// Runs the tests in Python.
pub const PYTEST: &str = "pytest==9.2.0";
/// What `vramp.cupy`, `vramp.numba`, `vramp.rmm` and `vramp.cuda_core` adapt.
const LIBRARIES: [&str; 4] =
    ["cupy-cuda13x==14.2.*", "numba-cuda[cu13]==0.30.*", "cuda-core==1.2.*", "rmm-cu13==26.10.*"];
/// The oldest C library that a wheel for users runs on: RHEL 8, Debian 10, Ubuntu 20.04.
const PLATFORM: &str = "manylinux_2_28";
/// Largest wheel for users.
const MAX_BYTES: u64 = 6 << 20;

/// How a wheel is built.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// For users: optimized, stripped, for old systems too.
    Release,
    /// For the checks on this machine, on the profile that tests are built on.
    Local,
}

/// Builds the wheel for users into `target/wheels` and prints its size.
pub fn wheel(root: &Path) -> Result<()> {
    let wheel = build(root, Kind::Release)?;
    let bytes = fs::metadata(&wheel)?.len();
    println!("{} has {:.2} MB", wheel.display(), bytes as f64 / 1e6);
    ensure!(bytes < MAX_BYTES, "the wheel has {bytes} bytes, and at most {MAX_BYTES} are allowed");
    Ok(())
}

/// Builds the package, installs it into a fresh environment, and runs its tests and type checks there.
/// With `libraries` the adaptors are tested with the libraries that they adapt.
pub fn check(root: &Path, libraries: bool) -> Result<()> {
    let wheel = build(root, Kind::Local)?;
    let environment = root.join("target/python-check");
    if environment.exists() {
        fs::remove_dir_all(&environment)?;
    }
    create(&environment)?;
    let program = |name: &str| {
        let mut command = Command::new(environment.join("bin").join(name));
        command.current_dir(root);
        command
    };
    let libraries = if libraries { &LIBRARIES[..] } else { &[] };
    shell::run(install(&environment).args(CHECKERS).args(libraries).arg(&wheel))?;
    let tests = ["-m", "pytest", "--quiet", "-rs", "-p", "no:cacheprovider", "python/tests"];
    shell::run(program("python").args(tests))?;
    // The stub says what the native module has, and mypy takes its word.
    shell::run(program("stubtest").arg("vramp._native"))?;
    shell::run(program("mypy").args(["--no-incremental", "-p", "vramp"]))?;
    shell::run(program("mypy").args([
        "--no-incremental",
        "--exclude",
        "/fake_torch/|/torch/",
        "python/tests",
        "python/tests_card",
    ]))
}

/// Builds a wheel and returns its path.
pub fn build(root: &Path, kind: Kind) -> Result<PathBuf> {
    let tools = root.join("target/python-tools");
    let maturin = tools.join("bin/maturin");
    if !maturin.is_file() {
        create(&tools)?;
        shell::run(install(&tools).args(BUILDERS))?;
    }
    let out = root.join(match kind {
        Kind::Release => "target/wheels",
        Kind::Local => "target/wheels-local",
    });
    // An older wheel would be found instead.
    if out.exists() {
        fs::remove_dir_all(&out)?;
    }
    let mut command = Command::new(&maturin);
    command.current_dir(root).args(["build", "--locked", "--quiet", "--out"]).arg(&out);
    match kind {
        Kind::Release => {
            // maturin finds zig as a module of the Python that is first in the path.
            let path = std::env::var_os("PATH").unwrap_or_default();
            let found = std::env::split_paths(&path);
            let path = std::env::join_paths(std::iter::once(tools.join("bin")).chain(found))?;
            command.env("PATH", path).env("VIRTUAL_ENV", &tools);
            command.args(["--release", "--strip", "--zig", "--compatibility", PLATFORM]);
        }
        Kind::Local => {
            command.args(["--profile", "dev", "--compatibility", "linux"]);
        }
    }
    shell::run(&mut command)?;
    let built = fs::read_dir(&out)?.filter_map(|entry| Some(entry.ok()?.path()));
    let mut wheels = built.filter(|path| path.extension().is_some_and(|end| end == "whl"));
    wheels.next().with_context(|| format!("maturin wrote no wheel into {}", out.display()))
}

/// Makes an environment of Python.
pub fn create(environment: &Path) -> Result<()> {
    shell::run(Command::new("python3").args(["-m", "venv"]).arg(environment))
        .context("the package needs Python 3.10 with its module venv (Debian: python3-venv)")
}

/// Installs into an environment.
pub fn install(environment: &Path) -> Command {
    let mut pip = Command::new(environment.join("bin/pip"));
    pip.args(["install", "--quiet", "--disable-pip-version-check"]);
    pip
}
