//! `cargo xtask rmm`: `vramp/rmm.hpp` with CCCL and RMM, on machines without a GPU.
//!
//! Their headers and libraries come from RMM's wheels, 5 MB each. The programs run on the simulator and call no CUDA:
//! RMM's library looks for a driver only when it is called for one.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::{library, shell, wheels};

/// A version of RMM.
struct Version {
    name: &'static str,
    package: &'static str,
    standard: &'static str,
    /// The resource is a `cuda::mr::resource` for it.
    has_concept: bool,
    /// It has the base class `device_memory_resource`.
    has_base: bool,
}

const fn version(
    name: &'static str,
    package: &'static str,
    has_concept: bool,
    has_base: bool,
) -> Version {
    Version { name, package, standard: "-std=c++17", has_concept, has_base }
}

/// The supported versions, oldest first. The programs run with the last one.
const VERSIONS: [Version; 9] = [
    version("24.12", "librmm-cu12", false, true),
    version("25.6", "librmm-cu12", false, true),
    version("25.10", "librmm-cu13", false, true),
    version("25.12", "librmm-cu13", true, true),
    version("26.2", "librmm-cu13", true, true),
    version("26.4", "librmm-cu13", true, true),
    version("26.6", "librmm-cu13", true, false),
    version("26.8", "librmm-cu13", true, false),
    Version { standard: "-std=c++20", ..version("26.10", "librmm-cu13", true, false) },
];
/// What RMM's library logs with.
const LOGGER: &str = "rapids-logger==0.3.*";
const SOURCES: &str = "crates/vramp-capi/tests/rmm";

/// Compiles the header for every version, and runs its tests with the newest one and without RMM.
pub fn run(root: &Path) -> Result<()> {
    let place = Place {
        root,
        cuda: wheels::cuda_headers(root)?,
        logger: unpacked(root, LOGGER, "rapids_logger", "logger")?,
        out: root.join("target/rmm"),
        library: library::build(root, "dev")?.shared,
    };
    for version in &VERSIONS {
        let rmm = place.rmm(version)?;
        for (is_there, source) in
            [(version.has_concept, "resource.cpp"), (version.has_base, "base_class.cpp")]
        {
            if is_there {
                let mut compiler = place.compiler(version, &rmm, source);
                shell::run(compiler.arg("-fsyntax-only")).with_context(|| {
                    format!("{source} does not compile for RMM {}", version.name)
                })?;
            }
        }
        println!("rmm: the header compiles for RMM {}", version.name);
    }
    let newest = VERSIONS.last().context("there are versions")?;
    let rmm = place.rmm(newest)?;
    for (name, macros) in [
        ("with RMM", &[][..]),
        ("with RMM and per-thread default streams", &["-DCUDA_API_PER_THREAD_DEFAULT_STREAM"][..]),
        ("with CCCL alone", &["-DVRAMP_WITHOUT_RMM"][..]),
    ] {
        place.check(newest, &rmm, macros).with_context(|| format!("the resource {name} fails"))?;
        println!("rmm: the tests pass {name}");
    }
    Ok(())
}

struct Place<'a> {
    root: &'a Path,
    cuda: PathBuf,
    logger: PathBuf,
    out: PathBuf,
    library: PathBuf,
}

impl Place<'_> {
    /// Returns the folder of a version, which is downloaded once.
    fn rmm(&self, version: &Version) -> Result<PathBuf> {
        let wanted = format!("{}=={}.*", version.package, version.name);
        unpacked(self.root, &wanted, "librmm", version.name)
    }

    fn compiler(&self, version: &Version, rmm: &Path, source: &str) -> Command {
        let mut compiler = Command::new("g++");
        compiler.args([version.standard, "-O1", "-pthread", "-Wall", "-Wextra", "-Werror"]);
        // Files of old versions print that they moved.
        compiler.args(["-ftrack-macro-expansion=0", "-DRMM_DEPRECATE_MR_DEVICE_HEADERS=0"]);
        compiler.arg("-I").arg(self.root.join("crates/vramp-capi/include"));
        let includes = [
            rmm.join("include"),
            rmm.join("include/rapids"),
            // RMM before 25.02 has this part of CCCL in a folder of its own.
            rmm.join("include/rapids/libcudacxx"),
            self.logger.join("include"),
            self.cuda.clone(),
        ];
        for folder in includes {
            compiler.arg("-isystem").arg(folder);
        }
        compiler.arg("-idirafter").arg(self.root.join("python/vramp/torch/csrc/no_crt"));
        compiler.arg(self.root.join(SOURCES).join(source));
        compiler
    }

    /// Builds the tests and runs them on the simulator.
    fn check(&self, version: &Version, rmm: &Path, macros: &[&str]) -> Result<()> {
        fs::create_dir_all(&self.out)?;
        let own = self.out.join(library::NAME);
        fs::copy(&self.library, &own)?;
        let soname = self.out.join(library::soname(crate::header::Version::read(self.root)?));
        fs::copy(&self.library, soname)?;
        let program = self.out.join("resource");
        let mut compiler = self.compiler(version, rmm, "resource.cpp");
        compiler.args(macros).arg("-o").arg(&program);
        for (folder, library) in [
            (self.out.clone(), "-lvramp"),
            (rmm.join("lib64"), "-lrmm"),
            (self.logger.join("lib64"), "-lrapids_logger"),
        ] {
            compiler.arg("-L").arg(&folder).arg(format!("-Wl,-rpath,{}", folder.display()));
            compiler.arg(library);
        }
        shell::run(&mut compiler)?;
        let printed = shell::output(&mut Command::new(&program))?;
        ensure!(printed == "passed\n", "{} printed: {printed}", program.display());
        Ok(())
    }
}

/// Returns the folder `package` of a wheel.
fn unpacked(root: &Path, wheel: &str, package: &str, name: &str) -> Result<PathBuf> {
    let folder = root.join("target/rmm-wheels");
    let to = folder.join(name);
    if !to.join("include").is_dir() {
        println!("rmm: downloading {wheel}");
        wheels::unpack(&mut wheels::download(wheel), &folder, &format!("{package}/"), &to)?;
    }
    Ok(to)
}
