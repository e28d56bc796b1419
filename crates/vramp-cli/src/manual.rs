//! `vramp completions` and `vramp man`.

use std::io::Write;

use anyhow::{Context, Result};
use clap::CommandFactory;

use crate::args::{Args, Completions, Man};
use crate::text::printable;

/// Prints the completions of a shell.
pub(crate) fn completions(args: &Completions, out: &mut dyn Write) -> Result<()> {
    let mut printed = Vec::new();
    clap_complete::generate(args.shell, &mut Args::command(), "vramp", &mut printed);
    Ok(out.write_all(&printed)?)
}

/// Writes a manual page for each command.
pub(crate) fn write(args: &Man, out: &mut dyn Write) -> Result<()> {
    let folder = &args.folder;
    clap_mangen::generate_to(Args::command(), folder)
        .with_context(|| format!("cannot write manual pages into '{}'", folder.display()))?;
    let folder = printable(&folder.display().to_string());
    Ok(writeln!(out, "Wrote the manual pages into '{folder}': try man -l vramp.1")?)
}
