//! Makes a C library of the archive that rustc writes.
//!
//! Rustc's archive has 30,000 global symbols: Rust's own runtime, zstd and other libraries. In a program
//! that links another Rust library, or another version of zstd, they collide. So the objects that the
//! interface needs become one object, in which only the functions of the interface are global.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Result, ensure};

use crate::shell;

/// Writes an archive in which only `functions` are global symbols, without debug information.
pub fn make(built: &Path, functions: &BTreeSet<String>, to: &Path) -> Result<()> {
    let (whole, object) = (to.with_extension("whole.o"), to.with_extension("o"));
    let mut link = Command::new("ld");
    // Groups of sections that may be merged with those of other objects have names, which would end up
    // local: the members become plain sections.
    link.args(["-r", "--force-group-allocation", "-o"]).arg(&whole);
    link.args(functions.iter().map(|name| format!("--undefined={name}"))).arg(built);
    shell::run(&mut link)?;
    let mut strip = Command::new("objcopy");
    // The sections are bitcode of Rust's standard library, of which only one object may have one.
    strip.args(["--strip-debug", "--remove-section=.llvmbc", "--remove-section=.llvmcmd"]);
    strip.args(functions.iter().map(|name| format!("--keep-global-symbol={name}")));
    shell::run(strip.arg(&whole).arg(&object))?;
    if to.exists() {
        fs::remove_file(to)?;
    }
    shell::run(Command::new("ar").arg("rcs").arg(to).arg(&object))?;
    let found = globals(to)?;
    ensure!(
        found == *functions,
        "the archive's global symbols are not the interface's: {:?}",
        found.symmetric_difference(functions).collect::<Vec<_>>()
    );
    for file in [whole, object] {
        fs::remove_file(file)?;
    }
    Ok(())
}

fn globals(archive: &Path) -> Result<BTreeSet<String>> {
    let mut nm = Command::new("nm");
    let text =
        shell::output(nm.args(["--extern-only", "--defined-only", "--format=posix"]).arg(archive))?;
    // A line without a space names a member of the archive.
    Ok(text.lines().filter_map(|line| Some(line.split_once(' ')?.0.to_owned())).collect())
}
