//! `cargo xtask page`: the pages of `vramp report` in a headless Chromium.
//!
//! Playwright, from Python's package index, drives the Chromium of the system. `page.py` has the
//! checks.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::shell;

/// The tool that drives the browser. Its own browsers are not downloaded.
const PLAYWRIGHT: &str = "playwright==1.65.2";
/// The browser's programs, in the order in which `page.py` looks for them.
const CHROMIUM: [&str; 3] =
    ["/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome"];
/// Recordings of which pages are opened too.
const TRACES: [&str; 2] = ["llama_varlen_oom", "resnet_multires_stacks"];

/// How many of the pages are opened.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// One page whose names are hostile, and its moments.
    Smoke,
    /// All of them, in several widths and colours.
    Whole,
}

/// Builds the program that writes the pages, and returns its path.
pub fn build(root: &Path) -> Result<PathBuf> {
    let build = ["build", "--quiet", "--locked", "-p", "vramp-cli"];
    shell::run(Command::new("cargo").current_dir(root).args(build))?;
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or(root.join("target"), PathBuf::from);
    Ok(target.join("debug/vramp"))
}

/// Lets the program write pages, opens them and uses them. Pages and pictures of them are left in
/// `target/page`.
pub fn run(root: &Path, program: &Path, scope: Scope) -> Result<()> {
    let mut page = Command::new(install(root)?);
    page.current_dir(root).arg("xtask/src/page.py");
    if scope == Scope::Smoke {
        page.arg("--smoke");
    }
    page.arg(program).arg(root.join("target/page"));
    page.args(TRACES.map(|name| format!("examples/traces/{name}.pickle.gz")));
    shell::run(&mut page)
}

/// Prints how long a page takes to open and how smoothly it zooms.
pub fn measure(root: &Path, page: &Path) -> Result<()> {
    let python = install(root)?;
    shell::run(Command::new(python).arg(root.join("xtask/src/page.py")).arg("--measure").arg(page))
}

/// The browser from Debian's packages if there is none, and an environment of its own for the tool.
fn install(root: &Path) -> Result<PathBuf> {
    if !CHROMIUM.iter().any(|path| Path::new(path).exists()) {
        shell::run(Command::new("apt-get").args(["update", "-qq"]))?;
        let install = ["install", "-y", "-qq", "--no-install-recommends", "chromium"];
        shell::run(Command::new("apt-get").args(install))
            .context("the page is tested with Chromium (Debian: chromium)")?;
    }
    let environment = root.join("target/page-tools");
    let python = environment.join("bin/python");
    if !environment.join("bin/playwright").is_file() {
        shell::run(Command::new("python3").args(["-m", "venv"]).arg(&environment)).context(
            "the page is tested with Python 3 and its module venv (Debian: python3-venv)",
        )?;
        let pip = ["install", "--quiet", "--disable-pip-version-check", PLAYWRIGHT];
        shell::run(Command::new(environment.join("bin/pip")).args(pip))?;
    }
    Ok(python)
}
