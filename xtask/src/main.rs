//! The project's own commands: `cargo xtask --help`.
#![forbid(unsafe_code)]

mod adversary;
mod bindings;
mod budget;
mod bundle;
mod charts;
mod ci;
mod compare;
mod cost;
mod header;
mod install;
mod library;
mod models;
mod mutants;
mod nightly;
mod page;
mod plant;
mod python;
mod quick;
mod rmm;
mod sanitize;
mod shell;
mod site;
mod size;
mod suite;
mod tidy;
mod torch;
mod tree;
mod wheels;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use clap::{Parser, Subcommand};
use mutants::Extent;
use nightly::Shard;
use plant::Finder;

#[derive(Parser)]
#[command(name = "cargo xtask", about = "The project's own commands")]
struct Args {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Everything a change must pass: format, tidy, lints, tests, documentation, examples.
    Ci,
    /// Everything at length: long random programs, every call that can fail, all models, planted bugs,
    /// mutants. Takes hours; the cost of each part is printed.
    Nightly {
        /// A part of the work, such as 1/4 for the first of four machines.
        #[arg(long, value_name = "K/N", value_parser = Shard::parse)]
        shard: Option<Shard>,
    },
    /// What a change breaks most often: format, tidy, and lints and tests of the crates that changed.
    Quick {
        /// The revision that they changed against. The default is the last commit.
        #[arg(value_name = "REVISION", default_value = "HEAD")]
        base: String,
    },
    /// Builds the tests and runs each in a process of its own, with its cost.
    Tests {
        /// Seconds after which a test fails.
        #[arg(long, value_name = "SECONDS", default_value = "180")]
        limit: u64,
        /// What to build, as for `cargo test`; without it, the workspace.
        #[arg(last = true)]
        arguments: Vec<String>,
    },
    /// The project rules that no compiler checks.
    Tidy,
    /// Prints the lines of code and of tests of each crate, and how many files there are.
    Size,
    /// Explores every order in which threads can meet on the fast path.
    Loom {
        /// Interrupt threads at most this often in one run; without it, as often as can be.
        #[arg(long, value_name = "COUNT")]
        preemptions: Option<u32>,
    },
    /// Runs the crates with unsafe code, life cycles through C and Python, and the tests of the Python
    /// package on AddressSanitizer. Builds them in `target/sanitizer`.
    Sanitize {
        /// How many times as many operations the life cycles have as in a short run.
        #[arg(long, value_name = "TIMES", default_value_t = 1)]
        length: u64,
    },
    /// Plants one bug at a time and lets the life-cycle program find it. Builds each, in
    /// `target/plant`.
    Plant {
        /// Let the tests find it, as CI runs them, instead of the long life-cycle program.
        #[arg(long)]
        tests: bool,
        /// Number of one planted bug; without it, all.
        #[arg(value_name = "NUMBER")]
        number: Option<usize>,
    },
    /// Changes one place of the planners at a time and lets their tests find it; needs cargo-mutants.
    Mutants {
        /// Only the files that take minutes.
        #[arg(long, conflicts_with = "sample")]
        short: bool,
        /// Only a sample, such as 0/10 for every tenth mutant.
        #[arg(long, value_name = "K/N")]
        sample: Option<String>,
    },
    /// Compares the decisions and driver calls of two builds on every trace.
    Compare {
        /// The build to compare with: a program, or a git revision to build.
        #[arg(value_name = "PROGRAM|REVISION")]
        base: String,
        /// The program to compare; without it, the one built from the working tree.
        #[arg(long, value_name = "PROGRAM")]
        new: Option<PathBuf>,
        /// A folder with more traces. May be given several times.
        #[arg(long, value_name = "DIR")]
        traces: Vec<PathBuf>,
    },
    /// Writes the declarations of libcuda anew from NVIDIA's header.
    Bindings,
    /// Writes the C header anew from the sources of `vramp-capi`.
    Header,
    /// Checks licences, advisories and duplicates of the dependencies; needs cargo-deny.
    Deny,
    /// Builds the documentation as one site into `target/site`, and checks its links.
    Site {
        /// The documentation of the crates too, which takes minutes.
        #[arg(long)]
        rustdoc: bool,
    },
    /// Opens pages of `vramp report` in a headless Chromium and uses them.
    Page {
        /// Instead, measure how this page opens and zooms.
        #[arg(long, value_name = "FILE")]
        measure: Option<PathBuf>,
    },
    /// Draws the charts of the pages anew from the results in `bench/results`.
    Charts,
    /// Runs `vramp bench adversary` on the simulator, and writes its bounds and its table in the page of
    /// benchmarks anew. Takes about two minutes.
    Adversary,
    /// Builds libvramp.so and puts it into a folder with its header.
    Library {
        /// The folder, made if it is not there.
        #[arg(long, value_name = "DIR", default_value = "target/library")]
        out: PathBuf,
    },
    /// Builds the C interface for release and installs it: header, shared library, static library,
    /// pkg-config and CMake files.
    Install {
        #[command(flatten)]
        to: install::To,
        /// Folder of the libraries, relative to the prefix.
        #[arg(long, value_name = "DIR", default_value = "lib")]
        libdir: PathBuf,
        /// Profile of cargo to build with.
        #[arg(long, value_name = "NAME", default_value = "release")]
        profile: String,
    },
    /// Removes what `install` wrote.
    Uninstall {
        #[command(flatten)]
        to: install::To,
    },
    /// Installs into a temporary folder and builds the examples in C and C++ against it.
    InstallCheck,
    /// Builds the Python package for users into `target/wheels`.
    Wheel,
    /// Builds the Python package, installs it into a fresh environment and checks it there.
    Python {
        /// Install CuPy, Numba, RMM and cuda.core too, and test the adaptors with them: 340 MB.
        #[arg(long)]
        libraries: bool,
        /// Check what the last run installed, without a build.
        #[arg(long, conflicts_with = "libraries")]
        installed: bool,
    },
    /// Tests `vramp.torch` with PyTorch 2.11 on a fake CUDA runtime, without a GPU: downloads 4.7 GB once.
    Torch {
        /// The allocator below PyTorch's functions. `native` shows that the tests ask what PyTorch does.
        #[arg(long, value_name = "NAME", default_value = "vramp")]
        allocator: torch::Allocator,
        /// Instead, compile the allocator class against PyTorch's headers of these versions, such as
        /// 2.11; `all` for every version that is supported. Without a version: the oldest, 2.11 and
        /// the newest. Downloads 140 MB for each.
        #[arg(long, value_name = "VERSION", num_args = 0.., conflicts_with = "allocator")]
        headers: Option<Vec<String>>,
    },
    /// Compiles `vramp/rmm.hpp` against the headers of every supported RMM and of CCCL, and runs its tests on the
    /// simulator: downloads 50 MB once.
    Rmm {
        /// Instead, build programs that compare vramp with RMM, and what they need, into this folder, for a machine
        /// with a card.
        #[arg(long, value_name = "DIR")]
        card: Option<PathBuf>,
    },
    /// Builds the folder `gpu-bundle`, which runs on a machine with a card and without Rust.
    GpuBundle {
        /// A folder with more traces to take along. May be given several times.
        #[arg(long, value_name = "DIR")]
        traces: Vec<PathBuf>,
    },
}

fn main() -> ExitCode {
    match perform(&Args::parse().task, &root()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn perform(task: &Task, root: &Path) -> Result<()> {
    match task {
        Task::Ci => ci::run(root),
        Task::Nightly { shard } => nightly::run(root, shard.unwrap_or(Shard::WHOLE)),
        Task::Quick { base } => quick::run(root, base),
        Task::Tests { limit, arguments } => ci::tests(root, Duration::from_secs(*limit), arguments),
        Task::Tidy => tidy::run(root),
        Task::Size => size::run(root),
        Task::Loom { preemptions } => models::run(root, *preemptions),
        Task::Sanitize { length } => sanitize::run(root, *length),
        Task::Plant { number, tests } => {
            let finder = if *tests { Finder::Tests } else { Finder::LifeCycles };
            plant::run(root, *number, finder)
        }
        Task::Mutants { short: true, .. } => mutants::run(root, &Extent::Short),
        Task::Mutants { sample: Some(shard), .. } => {
            mutants::run(root, &Extent::Sample(shard.clone()))
        }
        Task::Mutants { .. } => mutants::run(root, &Extent::All),
        Task::Compare { base, new, traces } => compare::run(root, base, new.as_deref(), traces),
        Task::Bindings => bindings::run(root),
        Task::Deny => shell::run(
            std::process::Command::new("cargo").current_dir(root).args(["deny", "check"]),
        ),
        Task::Site { rustdoc } => {
            page::build(root).and_then(|program| site::run(root, &program, *rustdoc))
        }
        Task::Page { measure: None } => {
            page::build(root).and_then(|program| page::run(root, &program, page::Scope::Whole))
        }
        Task::Page { measure: Some(page) } => page::measure(root, page),
        Task::Charts => charts::write(root),
        Task::Adversary => adversary::run(root),
        Task::Header => header::write(root),
        Task::Library { out } => library::run(root, &root.join(out)),
        Task::Install { to, libdir, profile } => {
            install::run(root, &install::Destination::new(to, libdir)?, profile)
        }
        Task::Uninstall { to } => install::uninstall(to),
        Task::InstallCheck => install::check::run(root),
        Task::Wheel => python::wheel(root),
        Task::Python { installed: true, .. } => python::check_installed(root, false),
        Task::Python { libraries, .. } => python::check(root, *libraries),
        Task::Torch { headers: Some(versions), .. } => torch::headers(root, versions),
        Task::Torch { allocator, headers: None } => torch::tests(root, *allocator),
        Task::Rmm { card: Some(out) } => rmm::for_card(root, &std::path::absolute(out)?),
        Task::Rmm { card: None } => rmm::run(root),
        Task::GpuBundle { traces } => bundle::run(root, traces),
    }
}

/// The folder of the workspace.
fn root() -> PathBuf {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    own.parent().expect("xtask lies in the workspace").to_owned()
}
