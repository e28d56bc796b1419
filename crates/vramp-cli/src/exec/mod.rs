//! `vramp exec`: runs a program with a library in front of the CUDA driver.
//!
//! 1. [`find`] finds the program and the libraries, and [`elf`] refuses programs that the dynamic linker
//!    loads nothing into.
//! 2. [`environment`] says in two variables what the library does.
//! 3. [`child`] runs the program, passes signals on, and waits.
//! 4. [`convert`] makes a `.vtrace` of what each process recorded, with names by [`symbols`].
//! 5. [`summary`] prints what each process left as its report.
//!
//! The exit code is the program's; a program that a signal ended ends this one by the same signal.

pub(crate) mod args;
mod child;
mod convert;
mod elf;
mod environment;
mod find;
mod summary;
mod symbols;

use std::io::Write;
use std::path::Path;

pub(crate) use convert::{is_spool, read_spool};

use anyhow::{Context, Result};
use tempfile::TempDir;

use crate::exec::args::Exec;
use crate::exit::{Ended, InvalidArguments};
use crate::output::Output;

/// Runs the program. Returns its exit code as the error [`Ended`], unless it is 0.
pub(crate) fn run(args: &Exec, out: &mut dyn Write) -> Result<()> {
    if args.record.is_none() && !args.pool && args.limit.is_none() {
        return Err(InvalidArguments(
            "nothing to do: give --record FILE.vtrace, --pool or --limit SIZE".to_owned(),
        )
        .into());
    }
    let program = find::program(&args.program)?;
    elf::check(&program)?;
    let folders = Folders::new(args)?;
    let variables = environment::variables(args, &folders)?;
    out.flush()?;
    let ended = child::run(&program, &args.program, variables)?;
    // What went wrong with a recording is said, and does not change the program's exit code.
    let mut printed = summary::reports(folders.reports.path());
    let Folders { reports, records } = folders;
    if let (Some(path), Some(folder)) = (&args.record, records) {
        let converted = convert::all(path, folder.path());
        printed.extend(converted.lines);
        if converted.is_going_on {
            let _ = folder.keep();
        }
    }
    summary::print(&printed, args.quiet);
    drop(reports);
    child::end_as(ended)
}

/// Where the processes of the program write.
struct Folders {
    reports: TempDir,
    /// Beside the file of the recording, which may need much space.
    records: Option<TempDir>,
}

impl Folders {
    fn new(args: &Exec) -> Result<Folders> {
        let reports = tempfile::Builder::new().prefix("vramp-exec-").tempdir();
        let reports = reports.context("cannot create a folder for temporary files")?;
        let records = args.record.as_deref().map(records).transpose()?;
        Ok(Folders { reports, records })
    }
}

fn records(path: &Path) -> Result<TempDir> {
    let cannot_write = || format!("cannot write '{}'", path.display());
    // Before the program has run for hours.
    if let Output::Standard = Output::new(path).with_context(cannot_write)? {
        let text = "--record: standard output is the program's: give the name of a file";
        return Err(InvalidArguments(text.to_owned()).into());
    }
    let path = std::path::absolute(path).with_context(cannot_write)?;
    let folder = path.parent().unwrap_or(Path::new("/"));
    tempfile::Builder::new().prefix(".vramp-exec-").tempdir_in(folder).with_context(cannot_write)
}

/// Returns the exit code of the program as an error, unless it is 0.
fn exit_code(code: i32) -> Result<()> {
    match u8::try_from(code) {
        Ok(0) => Ok(()),
        Ok(code) => Err(Ended(code).into()),
        Err(_) => Err(Ended(u8::MAX).into()),
    }
}
