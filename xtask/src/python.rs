//! The Python package: `cargo xtask wheel`, and its checks.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::sanitize::{self, Build};
use crate::{nightly, shell};

/// Builds wheels; zig links them against an old C library.
const BUILDERS: [&str; 2] = ["maturin==1.16.0", "ziglang==0.17.1"];
/// Check the package.
const CHECKERS: [&str; 5] =
    [PYTEST, "mypy==2.4.1", "numpy>=1.26", "distributed==2026.8.*", "prometheus_client==0.26.*"];
/// Runs the tests in Python.
pub const PYTEST: &str = "pytest==9.2.0";
/// What `vramp.cupy`, `vramp.numba`, `vramp.rmm` and `vramp.cuda_core` adapt.
const LIBRARIES: [&str; 4] =
    ["cupy-cuda13x==14.2.*", "numba-cuda[cu13]==0.30.*", "cuda-core==1.2.*", "rmm-cu13==26.10.*"];
/// The oldest C library that a wheel for users runs on: RHEL 8, Debian 10, Ubuntu 20.04.
const PLATFORM: &str = "manylinux_2_28";
/// Its version.
const C_LIBRARY: (u32, u32) = (2, 28);
/// The library that unwinds stacks in every process of Linux. A second unwinder in a process cannot pass
/// the frames of the first: pthread_exit would crash.
const UNWINDER: &str = "libgcc_s.so.1";
/// What `vramp exec` puts in front of the driver.
const PRELOAD: &str = "libvramp_preload.so";
/// Largest wheel for users.
const MAX_BYTES: u64 = 8_000_000;

/// How a wheel is built.
#[derive(Clone, Copy)]
pub enum Kind<'a> {
    /// For users: optimized, stripped, for old systems too.
    Release,
    /// For the checks on this machine: with all assertions.
    Local,
    /// As `Local`, for a sanitizer.
    Sanitized(&'a Build),
}

/// Builds the wheel for users into `target/wheels` and prints its size.
pub fn wheel(root: &Path) -> Result<()> {
    let wheel = build(root, Kind::Release)?;
    let bytes = fs::metadata(&wheel)?.len();
    println!("{} has {:.2} MB", wheel.display(), bytes as f64 / 1e6);
    ensure!(bytes < MAX_BYTES, "the wheel has {bytes} bytes, and at most {MAX_BYTES} are allowed");
    check_links(root, &wheel)
}

/// Checks what the library of a wheel for users links: the unwinder of the process, and no functions
/// that the oldest C library lacks.
fn check_links(root: &Path, wheel: &Path) -> Result<()> {
    let out = root.join("target/wheel-contents");
    if out.exists() {
        fs::remove_dir_all(&out)?;
    }
    let mut unzip = Command::new("python3");
    shell::run(unzip.args(["-m", "zipfile", "-e"]).arg(wheel).arg(&out))?;
    for name in ["_native.abi3.so", PRELOAD] {
        let library = out.join("vramp").join(name);
        let needed = output(Command::new("readelf").args(["--wide", "--dynamic"]).arg(&library))?;
        let symbols = output(Command::new("readelf").args(["--wide", "--dyn-syms"]).arg(&library))?;
        let links = links(&needed, &symbols);
        links.with_context(|| format!("{} does not run everywhere", library.display()))?;
    }
    Ok(())
}

/// Checks the listings of `readelf --dynamic` and `readelf --dyn-syms`.
fn links(needed: &str, symbols: &str) -> Result<()> {
    let unwinder = format!("Shared library: [{UNWINDER}]");
    ensure!(
        needed.contains(&unwinder),
        "{UNWINDER} is not in NEEDED: exceptions would pass two unwinders"
    );
    let mut raises = false;
    for line in symbols.lines() {
        let mut words = line.split_whitespace().skip(6);
        let (Some(section), Some(name)) = (words.next(), words.next()) else { continue };
        if name.starts_with("_Unwind_") {
            ensure!(section == "UND", "the library has an unwinder of its own: it defines {name}");
            raises |= name.starts_with("_Unwind_RaiseException@");
        }
        let version = name.split_once("@GLIBC_").and_then(|(_, version)| {
            let (major, minor) = version.split_once('.')?;
            let minor = minor.split('.').next()?;
            Some((major.parse::<u32>().ok()?, minor.parse::<u32>().ok()?))
        });
        ensure!(
            version.is_none_or(|version| version <= C_LIBRARY),
            "{name} is newer than {PLATFORM}"
        );
    }
    // The symbols of an unwinder may be hidden.
    ensure!(raises, "the library raises exceptions, but not with {UNWINDER}");
    Ok(())
}

fn output(command: &mut Command) -> Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let run = command.env("LC_ALL", "C").output();
    let run = run.with_context(|| format!("{name} is missing (Debian: binutils and gcc)"))?;
    if !run.status.success() {
        bail!("{command:?}: {}", String::from_utf8_lossy(&run.stderr));
    }
    Ok(String::from_utf8(run.stdout)?)
}

/// Returns the path of the unwinder that C++ and the C library of this machine use.
fn unwinder() -> Result<PathBuf> {
    let found = output(Command::new("cc").arg(format!("-print-file-name={UNWINDER}")))?;
    let path = PathBuf::from(found.trim());
    // The compiler prints the bare name of a file that it does not find.
    ensure!(path.is_absolute(), "the compiler has no {UNWINDER} (Debian: libgcc-s1)");
    Ok(path)
}

/// Builds the package, installs it into a fresh environment, and runs its tests and type checks there.
/// With `libraries` the adaptors are tested with the libraries that they adapt, and all tests at length.
pub fn check(root: &Path, libraries: bool) -> Result<()> {
    install_package(root, libraries)?;
    check_installed(root, libraries)
}

/// Name of the environment in which the package is checked.
const CHECKED: &str = "python-check";

/// Builds the package and installs it into a fresh environment, with what its checks need.
pub fn install_package(root: &Path, libraries: bool) -> Result<()> {
    let wheel = build(root, Kind::Local)?;
    let adapted = if libraries { &LIBRARIES[..] } else { &[] };
    environment(root, CHECKED, &wheel, adapted)?;
    Ok(())
}

/// Runs the tests and type checks of the package that was installed last.
pub fn check_installed(root: &Path, libraries: bool) -> Result<()> {
    let environment = root.join("target").join(CHECKED);
    let mut tests = tests(root, &environment);
    if libraries {
        tests.env(vramp_testing::LENGTH, nightly::LENGTH.to_string());
    }
    shell::run(&mut tests)?;
    let program = |name: &str| {
        let mut command = Command::new(environment.join("bin").join(name));
        command.current_dir(root);
        command
    };
    // The stub says what the native module has, and mypy takes its word.
    shell::run(program("stubtest").arg("vramp._native"))?;
    shell::run(program("mypy").args(["--no-incremental", "-p", "vramp"]))?;
    shell::run(program("mypy").args([
        "--no-incremental",
        "--exclude",
        "/fake_torch/|/torch/|/workers/conftest",
        "python/tests",
        "python/tests_card",
    ]))
}

/// Installs a wheel, what checks it and further packages into a fresh environment, and returns its folder.
pub fn environment(root: &Path, name: &str, wheel: &Path, further: &[&str]) -> Result<PathBuf> {
    let environment = root.join("target").join(name);
    if environment.exists() {
        fs::remove_dir_all(&environment)?;
    }
    create(&environment)?;
    shell::run(install(&environment).args(CHECKERS).args(further).arg(wheel))?;
    Ok(environment)
}

/// Returns the command that runs the tests of the package that an environment has.
pub fn tests(root: &Path, environment: &Path) -> Command {
    let mut tests = Command::new(environment.join("bin/python"));
    tests.current_dir(root).args(["-m", "pytest", "--quiet", "-rs", "-p", "no:cacheprovider"]);
    tests.arg("python/tests");
    tests
}

/// Builds a wheel and returns its path.
pub fn build(root: &Path, kind: Kind<'_>) -> Result<PathBuf> {
    let tools = root.join("target/python-tools");
    let maturin = tools.join("bin/maturin");
    if !maturin.is_file() {
        create(&tools)?;
        shell::run(install(&tools).args(BUILDERS))?;
    }
    preload(root, &tools, kind)?;
    let out = root.join(match kind {
        Kind::Release => "target/wheels",
        Kind::Local => "target/wheels-local",
        Kind::Sanitized(_) => "target/wheels-sanitized",
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
            // zig links an unwinder of its own for what the libraries before it do not define. The
            // symbols of this one have had the same versions since GCC 4.2.
            command.arg("--").arg(format!("-Clink-arg={}", unwinder()?.display()));
        }
        Kind::Local => {
            command.args(["--profile", "dev", "--compatibility", "linux", "--features", "checks"]);
        }
        Kind::Sanitized(build) => {
            build.instrument(&mut command);
            command.args(["--profile", sanitize::PROFILE, "--target", &build.target]);
            command.args(["--compatibility", "linux", "--features", "checks"]);
        }
    }
    shell::run(&mut command)?;
    let built = fs::read_dir(&out)?.filter_map(|entry| Some(entry.ok()?.path()));
    let mut wheels = built.filter(|path| path.extension().is_some_and(|end| end == "whl"));
    let wheel = wheels.next();
    let wheel = wheel.with_context(|| format!("maturin wrote no wheel into {}", out.display()))?;
    // Programs without Python load the module too, with `vramp exec --pool`.
    let script = root.join("xtask/src/weaken.py");
    shell::run(Command::new(tools.join("bin/python")).arg(script).arg(&wheel))?;
    Ok(wheel)
}

/// Builds the library that `vramp exec` puts in front of the driver, and copies it into the package.
fn preload(root: &Path, tools: &Path, kind: Kind<'_>) -> Result<()> {
    let mut cargo = Command::new("cargo");
    cargo.current_dir(root).args(["build", "--lib", "--locked", "-p", "vramp-preload"]);
    if let Kind::Release = kind {
        let linker = zig_linker(tools)?;
        let architecture = std::env::consts::ARCH.to_uppercase();
        cargo.env(format!("CARGO_TARGET_{architecture}_UNKNOWN_LINUX_GNU_LINKER"), linker);
        cargo.args(["--release", "--target-dir", "target/preload"]);
        cargo.env("CARGO_PROFILE_RELEASE_STRIP", "true");
    }
    let messages = shell::output(cargo.arg("--message-format=json-render-diagnostics"))?;
    let file = messages.lines().find_map(|message| built_file(message, PRELOAD));
    let file = file.with_context(|| format!("cargo names no {PRELOAD}"))?;
    fs::copy(&file, root.join("python/vramp").join(PRELOAD))?;
    Ok(())
}

/// The file of this name that one of cargo's messages names, if any.
fn built_file(message: &str, name: &str) -> Option<PathBuf> {
    let message: serde_json::Value = serde_json::from_str(message).ok()?;
    let mut files = message["filenames"].as_array()?.iter().filter_map(|file| file.as_str());
    files.find(|file| file.rsplit('/').next() == Some(name)).map(PathBuf::from)
}

/// Writes a linker that links against the old C library, with the unwinder of the process, as maturin does
/// for the native module.
fn zig_linker(tools: &Path) -> Result<PathBuf> {
    let linker = tools.join("bin/zig-linker");
    let (major, minor) = C_LIBRARY;
    let script = format!(
        "#!/bin/sh\n\
         for each do shift; [ \"$each\" = -lgcc_s ] && each='{}'; set -- \"$@\" \"$each\"; done\n\
         exec '{}' -m ziglang cc -target {}-linux-gnu.{major}.{minor} -Wl,--allow-shlib-undefined \"$@\"\n",
        unwinder()?.display(),
        tools.join("bin/python").display(),
        std::env::consts::ARCH,
    );
    fs::write(&linker, script)?;
    fs::set_permissions(&linker, fs::Permissions::from_mode(0o755))?;
    Ok(linker)
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

#[cfg(test)]
mod tests {
    use super::*;

    const NEEDED: &str = " 0x01 (NEEDED)   Shared library: [libgcc_s.so.1]";

    #[test]
    fn a_library_with_an_unwinder_or_newer_functions_is_refused() {
        let symbol = |section: &str, name: &str| {
            format!("  3: 0000 0 FUNC GLOBAL DEFAULT {section} {name} (3)")
        };
        let raise = symbol("UND", "_Unwind_RaiseException@GCC_3.0");
        let of = |more: &str| links(NEEDED, &format!("{raise}\n{more}"));
        of("").unwrap();
        of(&symbol("UND", "memcpy@GLIBC_2.14")).unwrap();
        of(&symbol("UND", "fcntl64@GLIBC_2.28")).unwrap();
        of(&symbol("UND", "free@GLIBC_2.2.5")).unwrap();
        assert!(of(&symbol("UND", "dlsym@GLIBC_2.34")).is_err());
        assert!(of(&symbol("12", "_Unwind_GetIP")).is_err());
        assert!(links("", &raise).is_err());
        assert!(links(NEEDED, &symbol("UND", "_Unwind_Resume@GCC_3.0")).is_err());
    }
}
