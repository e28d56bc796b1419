//! `cargo xtask torch`: `vramp.torch` with PyTorch, on machines without a GPU.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;

use crate::python::{self, Kind};
use crate::{shell, wheels};

/// Versions of PyTorch whose allocator class is supported, oldest first.
const VERSIONS: [&str; 7] = ["2.9", "2.10", "2.11", "2.12", "2.13", "2.14", "2.15"];
/// The version that the tests run with.
pub const TESTED: &str = "2.11";
/// The wheels of PyTorch for this system have 140 MB, those with CUDA 900. Their headers are the same.
const SMALL: [&str; 2] = ["macosx_14_0_arm64", "macosx_11_0_arm64"];
/// A header that only builds with CUDA have.
const CMAKE_MACROS: &str = "c10/cuda/impl/cuda_cmake_macros.h";
const CMAKE_TEXT: &str = "#pragma once\n#define C10_CUDA_BUILD_SHARED_LIBS\n";

/// The allocator that the tests run on.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Allocator {
    Vramp,
    Native,
}

/// Runs `python/tests/torch` in an environment with PyTorch and the package, on the fake CUDA runtime.
pub fn tests(root: &Path, allocator: Allocator) -> Result<()> {
    needs_compiler()?;
    let environment = root.join("target/torch-tests");
    let ready = environment.join("installed");
    if !ready.is_file() {
        println!(
            "torch: downloading PyTorch {TESTED} with CUDA into {}: 4.7 GB",
            environment.display()
        );
        python::create(&environment)?;
        let torch = format!("torch=={TESTED}.*");
        shell::run(python::install(&environment).args([&torch, "numpy", python::PYTEST]))?;
        fs::write(&ready, torch)?;
    }
    let wheel = python::build(root, Kind::Local)?;
    // Installed again without a look at its version, which is the same as before.
    let options = ["--force-reinstall", "--no-deps"];
    shell::run(python::install(&environment).args(options).arg(&wheel))?;
    let name = allocator.to_possible_value().context("both allocators have a name")?;
    shell::run(
        Command::new(environment.join("bin/python"))
            .current_dir(root)
            .args(["-m", "pytest", "--quiet", "-p", "no:cacheprovider", "python/tests/torch"])
            .env("VRAMP_TEST_ALLOCATOR", name.get_name())
            .env("VRAMP_TEST_DEVICE", "fake"),
    )
}

/// Compiles the allocator class against the headers of versions of PyTorch: the oldest, the tested one
/// and the newest if none is given, all for `all`.
pub fn headers(root: &Path, versions: &[String]) -> Result<()> {
    needs_compiler()?;
    let versions = chosen(versions)?;
    let folder = root.join("target/torch-headers");
    let cuda = wheels::cuda_runtime(root)?.join("include");
    for version in versions {
        let torch = unpacked(&folder, version)?;
        shell::run(&mut compile(root, version, &torch, &cuda)).with_context(|| {
            format!("the allocator class does not compile for PyTorch {version}")
        })?;
        println!("torch: the allocator class compiles for PyTorch {version}");
    }
    Ok(())
}

fn needs_compiler() -> Result<()> {
    let found = Command::new("g++").arg("--version").output();
    ensure!(
        found.is_ok_and(|it| it.status.success()),
        "the allocator class is C++: install g++ 10 or newer (Debian: apt-get install g++)"
    );
    Ok(())
}

/// Returns the versions that `names` stand for, oldest first, each once.
fn chosen(names: &[String]) -> Result<Vec<&'static str>> {
    let mut chosen = BTreeSet::new();
    for name in names {
        match VERSIONS.iter().position(|version| version == name) {
            Some(place) => chosen.extend([place]),
            None if name == "all" => chosen.extend(0..VERSIONS.len()),
            None => bail!("PyTorch {name} is not supported: use all, {}", VERSIONS.join(", ")),
        }
    }
    if names.is_empty() {
        let tested = VERSIONS.iter().position(|version| *version == TESTED);
        chosen.extend([Some(0), tested, Some(VERSIONS.len() - 1)].into_iter().flatten());
    }
    Ok(chosen.into_iter().map(|place| VERSIONS[place]).collect())
}

/// Returns the folder of PyTorch's headers, which are downloaded once.
fn unpacked(folder: &Path, version: &str) -> Result<PathBuf> {
    let to = folder.join(version);
    if !to.join(CMAKE_MACROS).is_file() {
        println!("torch: downloading the headers of PyTorch {version}: 140 MB");
        let platforms = SMALL.iter().flat_map(|platform| ["--platform", platform]);
        let mut wheel = wheels::download(&format!("torch=={version}.*"));
        wheel.args(platforms).args(["--python-version", "3.11"]);
        wheels::unpack(&mut wheel, folder, "torch/include/", &to)?;
        fs::create_dir_all(to.join("c10/cuda/impl"))?;
        // Written last: the folder is complete once it is there.
        fs::write(to.join(CMAKE_MACROS), CMAKE_TEXT)?;
    }
    Ok(to)
}

/// Returns the command that `vramp/torch/_build.py` would compile with, with all warnings and no output.
fn compile(root: &Path, version: &str, torch: &Path, cuda: &Path) -> Command {
    let package = root.join("python/vramp");
    let sources = package.join("torch/csrc");
    let (major, minor) = version.split_once('.').unwrap_or((version, "0"));
    let mut compiler = Command::new("g++");
    compiler.args(["-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror"]);
    compiler.arg(format!("-DVRAMP_TORCH={major}{minor:0>2}")).arg("-D_GLIBCXX_USE_CXX11_ABI=1");
    compiler.arg("-I").arg(package.join("include")).arg("-isystem").arg(torch);
    compiler.arg("-isystem").arg(cuda).arg("-idirafter").arg(sources.join("no_crt"));
    compiler.arg(sources.join("allocator.cpp"));
    compiler
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compiled_oldest_first_and_once() {
        let names = |texts: &[&str]| texts.iter().map(|&text| text.to_owned()).collect::<Vec<_>>();
        assert_eq!(chosen(&[]).unwrap(), ["2.9", "2.11", "2.15"]);
        assert_eq!(chosen(&names(&["all"])).unwrap(), VERSIONS);
        assert_eq!(chosen(&names(&["2.15", "2.9", "2.15"])).unwrap(), ["2.9", "2.15"]);
        let error = chosen(&names(&["2.8"])).unwrap_err().to_string();
        assert!(error.starts_with("PyTorch 2.8 is not supported: use all, 2.9, 2.10"), "{error}");
    }

    #[test]
    fn a_version_is_one_number_for_the_compiler() {
        let here = Path::new("/x");
        for (version, expected) in [("2.9", "-DVRAMP_TORCH=209"), ("2.15", "-DVRAMP_TORCH=215")] {
            let command = compile(here, version, here, here);
            assert!(command.get_args().any(|argument| argument == expected), "{command:?}");
        }
    }
}
