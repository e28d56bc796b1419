//! `cargo xtask gpu-bundle`: one folder that runs on a Linux machine with a card and without Rust.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use vramp_core::Bytes;

use crate::python::{self, Kind};
use crate::shell;

/// The crates whose tests say something on another machine: those that meet a real driver. What is
/// tested on the simulator is so anywhere, and `vramp-check` tests the allocator on the card.
const TESTED: [&str; 2] = ["vramp-driver", "vramp-cuda"];
/// The crates whose examples say something on a card.
const WITH_EXAMPLES: [&str; 4] = ["vramp-check", "vramp-defer", "vramp-capi", "vramp-cudarc"];
/// The examples of theirs that `run.sh` runs.
const EXAMPLES: [&str; 6] =
    ["card", "facts", "hit", "larger_than_the_card", "overhead", "read_in_place"];
/// What runs on the Python package, or beside it, by its path in the project and in the folder.
const PYTHON: [&str; 10] = [
    "bench/check-arrays.py",
    "bench/check-programs.py",
    "bench/check-torch.py",
    "bench/record-captures.py",
    "bench/sleep-device.py",
    "bench/sleep-llama.py",
    "bench/torch-programs",
    "bench/torch-pair.py",
    "bench/torch-workloads.py",
    "python/tests_card",
];
/// PyTorch's memory functions, which `run.sh` runs on the card.
const TORCH_TESTS: &str = "python/tests/torch";
/// Where recorded captures are kept, once there are any.
const CAPTURES: &str = "bench/captures";
/// What the folder may weigh.
const LIMIT: Bytes = Bytes::mib(64);
/// The C library of the machine with the card: Ubuntu 24.04.
const GLIBC: (u32, u32) = (2, 39);

/// Builds the folder `gpu-bundle` anew, with the traces of the project and those in `traces`.
pub fn run(root: &Path, traces: &[PathBuf]) -> Result<()> {
    let bundle = root.join("gpu-bundle");
    if bundle.exists() {
        fs::remove_dir_all(&bundle)?;
    }
    for folder in ["bin", "tests", "traces", "captures"] {
        fs::create_dir_all(bundle.join(folder))?;
    }
    for built in executables(root)? {
        let to = bundle.join(built.folder).join(&built.name);
        copy_file(&built.path, &to)?;
        shell::run(Command::new("strip").arg(&to))?;
        let needed = newest_glibc(&to)?;
        println!(
            "{:40} {:>10}  glibc {}.{}",
            built.name,
            size(&to)?.to_string(),
            needed.0,
            needed.1
        );
        ensure!(
            needed <= GLIBC,
            "{} needs glibc {needed:?}, the machine has {GLIBC:?}",
            built.name
        );
    }
    python_folders(root, &bundle)?;
    for folder in std::iter::once(&root.join("examples/traces")).chain(traces) {
        copy_files(folder, &bundle.join("traces"))?;
    }
    let captures = root.join(CAPTURES);
    if captures.exists() {
        copy_files(&captures, &bundle.join("captures"))?;
    }
    let script = bundle.join("run.sh");
    fs::write(&script, include_str!("gpu-run.sh"))?;
    shell::run(Command::new("chmod").arg("+x").arg(&script))?;
    let total = folder_size(&bundle)?;
    println!("{} in {}", total, bundle.display());
    ensure!(total <= LIMIT, "the bundle weighs {total}, at most {LIMIT} travels");
    Ok(())
}

/// What Python on that machine needs: the package in `site`, scripts and tests, and in `pytest` its wheels,
/// which Python imports as they are.
fn python_folders(root: &Path, bundle: &Path) -> Result<()> {
    let wheel = python::build(root, Kind::Release)?;
    let site = bundle.join("site");
    shell::run(Command::new("python3").args(["-m", "zipfile", "-e"]).arg(&wheel).arg(&site))?;
    let library = site.join("vramp/_native.abi3.so");
    let needed = newest_glibc(&library)?;
    println!(
        "{:40} {:>10}  glibc {}.{}",
        "site",
        folder_size(&site)?.to_string(),
        needed.0,
        needed.1
    );
    ensure!(needed <= GLIBC, "{} needs glibc {needed:?}", library.display());
    shell::run(
        Command::new("python3")
            .args(["-m", "pip", "download", "--quiet", "--disable-pip-version-check"])
            .args([python::PYTEST, "--dest"])
            .arg(bundle.join("pytest")),
    )?;
    for path in PYTHON.into_iter().chain([TORCH_TESTS]) {
        copy_sources(&root.join(path), &bundle.join(path))?;
    }
    Ok(())
}

/// Copies a file, or a folder without what Python and pytest left in it.
fn copy_sources(from: &Path, to: &Path) -> Result<()> {
    if from.is_file() {
        fs::create_dir_all(to.parent().context("a file lies in a folder")?)?;
        return copy_file(from, to);
    }
    for entry in fs::read_dir(from).with_context(|| format!("cannot read {}", from.display()))? {
        let name = entry?.file_name();
        let text = name.to_string_lossy();
        if !text.starts_with('.') && text != "__pycache__" {
            copy_sources(&from.join(&name), &to.join(&name))?;
        }
    }
    Ok(())
}

struct Built {
    /// Where in the bundle.
    folder: &'static str,
    name: String,
    path: PathBuf,
}

/// The programs, the examples that say something on a card, and the tests, all built for release.
fn executables(root: &Path) -> Result<Vec<Built>> {
    let tested = TESTED.iter().flat_map(|name| ["-p", name]);
    let mut tests: Vec<&str> = vec!["test", "--no-run", "--lib", "--tests"];
    tests.extend(tested);
    let programs = ["build", "-p", "vramp-cli", "-p", "vramp-check", "--bins"];
    let with_examples = WITH_EXAMPLES.iter().flat_map(|name| ["-p", name]);
    let mut examples: Vec<&str> = vec!["build"];
    examples.extend(EXAMPLES.iter().flat_map(|name| ["--example", name]));
    examples.extend(with_examples);
    let mut built = build(root, &programs)?;
    built.extend(build(root, &examples)?);
    built.extend(build(root, &tests)?);
    Ok(built)
}

fn build(root: &Path, args: &[&str]) -> Result<Vec<Built>> {
    let messages = shell::output(Command::new("cargo").current_dir(root).args(args).args([
        "--release",
        "--locked",
        "--message-format=json-render-diagnostics",
    ]))?;
    messages.lines().filter_map(|line| built(line).transpose()).collect()
}

/// The executable that one of cargo's messages tells of, if any.
fn built(message: &str) -> Result<Option<Built>> {
    let message: serde_json::Value = serde_json::from_str(message)?;
    let Some(path) = message["executable"].as_str() else { return Ok(None) };
    let target = message["target"]["name"].as_str().context("cargo names every target")?;
    let manifest = message["manifest_path"].as_str().context("cargo names every manifest")?;
    let package = Path::new(manifest).parent().and_then(Path::file_name).unwrap_or_default();
    let test = message["profile"]["test"].as_bool().unwrap_or(false);
    // Tests of different crates may share a name.
    let name = match test {
        true => format!("{}--{target}", package.to_string_lossy()),
        false => target.to_owned(),
    };
    Ok(Some(Built { folder: if test { "tests" } else { "bin" }, name, path: path.into() }))
}

/// The newest version of the C library that a program's symbols ask for.
fn newest_glibc(program: &Path) -> Result<(u32, u32)> {
    let text =
        shell::output(Command::new("readelf").args(["--wide", "--version-info"]).arg(program))?;
    Ok(newest_version(&text))
}

fn newest_version(text: &str) -> (u32, u32) {
    text.split("GLIBC_")
        .skip(1)
        .filter_map(|rest| {
            let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
            let (major, minor) = rest[..end].split_once('.')?;
            let minor = minor.split('.').next()?;
            Some((major.parse().ok()?, minor.parse().ok()?))
        })
        .max()
        .unwrap_or((0, 0))
}

fn copy_file(from: &Path, to: &Path) -> Result<()> {
    fs::copy(from, to).with_context(|| format!("cannot copy {}", from.display())).map(|_| ())
}

fn copy_files(from: &Path, to: &Path) -> Result<()> {
    for entry in fs::read_dir(from).with_context(|| format!("cannot read {}", from.display()))? {
        let path = entry?.path();
        if let (true, Some(name)) = (path.is_file(), path.file_name()) {
            copy_file(&path, &to.join(name))?;
        }
    }
    Ok(())
}

fn folder_size(folder: &Path) -> Result<Bytes> {
    let mut total = Bytes::ZERO;
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        total += if path.is_dir() { folder_size(&path)? } else { size(&path)? };
    }
    Ok(total)
}

fn size(path: &Path) -> Result<Bytes> {
    Ok(Bytes::new(fs::metadata(path)?.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_python_left_in_a_folder_is_not_copied() {
        let folder = std::env::temp_dir().join(format!("vramp-bundle-{}", std::process::id()));
        let from = folder.join("from");
        for path in ["a.py", "sub/b.cpp", "sub/__pycache__/b.pyc", ".pytest_cache/README.md"] {
            let path = from.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "12345").unwrap();
        }
        let to = folder.join("to/deep");
        copy_sources(&from, &to).unwrap();
        assert!(to.join("a.py").is_file() && to.join("sub/b.cpp").is_file());
        assert_eq!(folder_size(&to).unwrap(), Bytes::new(10));
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn the_newest_version_counts_by_number_and_not_by_letter() {
        let text = "Name: GLIBC_2.9 x\n Name: GLIBC_2.34\n Name: GLIBC_2.2.5 y GLIBC_PRIVATE";
        assert_eq!(newest_version(text), (2, 34));
        assert_eq!(newest_version("statically linked"), (0, 0));
    }

    #[test]
    fn cargos_messages_tell_programs_from_tests() {
        let message = |test| {
            format!(
                r#"{{"reason":"compiler-artifact","manifest_path":"/x/crates/vramp/Cargo.toml",
                    "target":{{"name":"pool"}},"profile":{{"test":{test}}},"executable":"/x/pool-1"}}"#
            )
        };
        let test = built(&message(true)).unwrap().unwrap();
        assert_eq!((test.folder, test.name.as_str()), ("tests", "vramp--pool"));
        let program = built(&message(false)).unwrap().unwrap();
        assert_eq!((program.folder, program.name.as_str()), ("bin", "pool"));
        assert!(built(r#"{"reason":"build-finished"}"#).unwrap().is_none());
    }
}
