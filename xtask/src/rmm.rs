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
/// The page whose code compiles.
const PAGE: &str = "docs/cpp.md";
/// Programs for a card.
const PROGRAMS: [&str; 2] = ["examples/rmm/containers.cpp", "bench/peers/rmm_resources.cpp"];
/// A trace that the second one replays.
const TRACE: &str = "examples/traces/gnn.pickle.gz";

/// Compiles the header for every version, and runs its tests with the newest one and without RMM.
pub fn run(root: &Path) -> Result<()> {
    let place = Place::new(root, root.join("target/rmm"), "dev")?;
    for version in &VERSIONS {
        let rmm = place.rmm(version)?;
        for (is_there, source) in
            [(version.has_concept, "resource.cpp"), (version.has_base, "base_class.cpp")]
        {
            if is_there {
                let mut compiler = place.compiler(version, &rmm);
                compiler.arg(root.join(SOURCES).join(source));
                shell::run(compiler.arg("-fsyntax-only")).with_context(|| {
                    format!("{source} does not compile for RMM {}", version.name)
                })?;
            }
        }
        println!("rmm: the header compiles for RMM {}", version.name);
    }
    let newest = VERSIONS.last().context("there are versions")?;
    let rmm = place.rmm(newest)?;
    for source in
        PROGRAMS.map(|program| root.join(program)).into_iter().chain(place.code_of_page()?)
    {
        let mut compiler = place.compiler(newest, &rmm);
        shell::run(compiler.arg("-fsyntax-only").arg(&source))
            .with_context(|| format!("{} does not compile", source.display()))?;
    }
    println!("rmm: the programs and the code of {PAGE} compile");
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

/// Fills a folder with programs that compare vramp with RMM, and all libraries that they need, for a machine with a
/// card.
pub fn for_card(root: &Path, out: &Path) -> Result<()> {
    let place = Place::new(root, out.to_owned(), "release")?;
    let newest = VERSIONS.last().context("there are versions")?;
    let rmm = place.rmm(newest)?;
    let cudart = place.cuda.join("lib/libcudart.so.13");
    let libraries =
        [rmm.join("lib64/librmm.so"), place.logger.join("lib64/librapids_logger.so"), cudart];
    for library in &libraries {
        let name = library.file_name().context("a library has a name")?;
        fs::copy(library, out.join(name))
            .with_context(|| format!("{} is missing", library.display()))?;
    }
    for source in PROGRAMS {
        let source = root.join(source);
        let mut compiler = place.compiler(newest, &rmm);
        compiler.arg(&source).arg("-o").arg(out.join(source.file_stem().context("it has a name")?));
        // CCCL's types look uninitialized to the optimizer.
        compiler.args(["-O2", "-Wno-maybe-uninitialized", "-Wl,-rpath,$ORIGIN", "-L"]).arg(out);
        shell::run(compiler.args(["-lvramp", "-lrmm", "-lrapids_logger", "-l:libcudart.so.13"]))?;
    }
    let mut convert = Command::new("python3");
    convert.arg(root.join("bench/peers/trace-to-bin.py")).arg(root.join(TRACE));
    shell::run(convert.arg(out.join("gnn.bin")))?;
    println!("rmm: run {0}/containers and {0}/rmm_resources {0}/gnn.bin on a card", out.display());
    Ok(())
}

struct Place<'a> {
    root: &'a Path,
    cuda: PathBuf,
    logger: PathBuf,
    out: PathBuf,
}

impl Place<'_> {
    /// Builds vramp's library into a folder.
    fn new<'a>(root: &'a Path, out: PathBuf, profile: &str) -> Result<Place<'a>> {
        fs::create_dir_all(&out)?;
        let library = library::build(root, profile)?.shared;
        for name in [library::NAME.to_owned(), library::soname(crate::header::Version::read(root)?)]
        {
            fs::copy(&library, out.join(name))?;
        }
        let logger = unpacked(root, LOGGER, "rapids_logger", "logger")?;
        Ok(Place { root, cuda: wheels::cuda_runtime(root)?, logger, out })
    }

    /// Writes each piece of code of the page into a file.
    fn code_of_page(&self) -> Result<Vec<PathBuf>> {
        let page = fs::read_to_string(self.root.join(PAGE))?;
        let names = fs::read_to_string(self.root.join(SOURCES).join("fragment.hpp"))?;
        let mut files = Vec::new();
        for code in page.split("\n```cpp\n").skip(1) {
            let code = code.split("```").next().unwrap_or_default();
            let file = self.out.join(format!("page-{}.cpp", files.len()));
            let text = match code.contains("int main(") {
                true => code.to_owned(),
                false => format!("{names}\n{code}\n}}\n"),
            };
            fs::write(&file, text)?;
            files.push(file);
        }
        ensure!(files.len() > 4, "{PAGE} has too little code");
        Ok(files)
    }

    /// Returns the folder of a version, which is downloaded once.
    fn rmm(&self, version: &Version) -> Result<PathBuf> {
        let wanted = format!("{}=={}.*", version.package, version.name);
        unpacked(self.root, &wanted, "librmm", version.name)
    }

    fn compiler(&self, version: &Version, rmm: &Path) -> Command {
        let mut compiler = Command::new("g++");
        compiler.args([version.standard, "-O1", "-pthread", "-Wall", "-Wextra", "-Werror"]);
        // RMM's own headers use what it has deprecated.
        compiler.arg("-Wno-deprecated-declarations");
        // Files of old versions print that they moved.
        compiler.args(["-ftrack-macro-expansion=0", "-DRMM_DEPRECATE_MR_DEVICE_HEADERS=0"]);
        compiler.arg("-I").arg(self.root.join("crates/vramp-capi/include"));
        let includes = [
            rmm.join("include"),
            rmm.join("include/rapids"),
            // RMM before 25.02 has this part of CCCL in a folder of its own.
            rmm.join("include/rapids/libcudacxx"),
            self.logger.join("include"),
            self.cuda.join("include"),
        ];
        for folder in includes {
            compiler.arg("-isystem").arg(folder);
        }
        compiler.arg("-idirafter").arg(self.root.join("python/vramp/torch/csrc/no_crt"));
        compiler
    }

    /// Builds the tests and runs them on the simulator.
    fn check(&self, version: &Version, rmm: &Path, macros: &[&str]) -> Result<()> {
        let program = self.out.join("resource");
        let mut compiler = self.compiler(version, rmm);
        compiler.arg(self.root.join(SOURCES).join("resource.cpp"));
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
