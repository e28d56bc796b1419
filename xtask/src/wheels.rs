//! Files of packages of other projects: downloaded once into `target`.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::shell;

/// The CUDA runtime.
const CUDA_RUNTIME: &str = "nvidia-cuda-runtime==13.0.*";

/// Returns the folder with the headers and the library of the CUDA runtime, which are downloaded once.
pub fn cuda_runtime(root: &Path) -> Result<PathBuf> {
    let folder = root.join("target/cuda-runtime");
    let to = folder.join("cu13");
    if !to.join("include/cuda_runtime_api.h").is_file() {
        let mut wheel = download(CUDA_RUNTIME);
        wheel.args(["--platform", "manylinux2014_x86_64"]);
        unpack(&mut wheel, &folder, "nvidia/cu13/", &to)?;
    }
    Ok(to)
}

/// Downloads one wheel into the folder that is added.
pub fn download(what: &str) -> Command {
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]);
    pip.args(["--only-binary=:all:", what]);
    pip
}

/// Unpacks the files of a downloaded wheel whose names begin with `prefix` into `to`.
pub fn unpack(download: &mut Command, folder: &Path, prefix: &str, to: &Path) -> Result<()> {
    let wheels = folder.join("wheel");
    let half = folder.join("half");
    for old in [&wheels, &half, to] {
        if old.exists() {
            fs::remove_dir_all(old)?;
        }
    }
    shell::run(download.arg("--dest").arg(&wheels)).context("pip cannot download the headers")?;
    let program = "import sys, zipfile, pathlib\n\
        (wheel,) = pathlib.Path(sys.argv[1]).glob('*.whl')\n\
        file = zipfile.ZipFile(wheel)\n\
        file.extractall(sys.argv[2], [name for name in file.namelist() if name.startswith(sys.argv[3])])\n";
    let arguments: [OsString; 3] = [(&wheels).into(), (&half).into(), prefix.into()];
    shell::run(Command::new("python3").args(["-c", program]).args(arguments))?;
    fs::rename(half.join(prefix), to)
        .with_context(|| format!("the wheel has no files in {prefix}"))?;
    fs::remove_dir_all(&half)?;
    Ok(fs::remove_dir_all(&wheels)?)
}
