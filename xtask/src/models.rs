//! `cargo xtask loom`: the models of what threads share, in every order that they can run in.

use std::ffi::OsString;
use std::path::Path;
use std::process::Command;

use anyhow::Result;

use crate::shell;

/// How often a thread may be interrupted where it would have gone on; more is hardly ever needed to
/// show a fault.
pub const SHORT: Option<u32> = Some(3);

/// Explores the models; at most so many preemptions in one run of a model, or all that there can be.
///
/// They are built with `--cfg loom`, in a target folder of their own: the flag goes to every crate.
pub fn run(root: &Path, preemptions: Option<u32>) -> Result<()> {
    let mut command = Command::new("cargo");
    command.current_dir(root).env("CARGO_TARGET_DIR", target(root)).env("RUSTFLAGS", "--cfg loom");
    match preemptions {
        Some(count) => command.env("LOOM_MAX_PREEMPTIONS", count.to_string()),
        None => command.env_remove("LOOM_MAX_PREEMPTIONS"),
    };
    shell::run(command.args([
        "test",
        "-p",
        "vramp-alloc",
        "-p",
        "vramp-tiers",
        "--lib",
        "--release",
        "--locked",
        "models::",
    ]))
}

/// Inside the usual target folder, which may be elsewhere.
fn target(root: &Path) -> OsString {
    let usual = std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| root.join("target").into());
    Path::new(&usual).join("loom").into()
}
