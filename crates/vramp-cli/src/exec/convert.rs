//! Makes a `.vtrace` of what each process recorded.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use vramp::Bytes;
use vramp_analysis::number::plural;
use vramp_trace::spool::{End, Recording};

use super::summary::Line;
use super::symbols::Symbols;
use crate::output::Output;

/// Converts the recordings in `folder`: the first process that used a GPU writes `path`, each other a file
/// beside it, with its process id in the name. Returns what there is to say.
pub(super) fn all(path: &Path, folder: &Path) -> Vec<Line> {
    let mut lines = Vec::new();
    let mut recordings = Vec::new();
    for spool in spools(folder) {
        match read(&spool) {
            Ok(recording) => recordings.push(recording),
            Err(error) => lines.push(Line::error(format!("{error:#}"))),
        }
    }
    recordings.retain(|recording| !recording.events().is_empty());
    recordings.sort_by_key(|recording| recording.events().first().map(|event| event.ns));
    if recordings.is_empty() && lines.is_empty() {
        lines.push(Line::error(format!(
            "no GPU memory was requested: '{}' is not written",
            path.display()
        )));
    }
    let mut symbols = Symbols::default();
    for (index, recording) in recordings.iter().enumerate() {
        let target = if index == 0 { path.to_owned() } else { beside(path, recording.pid) };
        lines.push(match write(recording, &target, &mut symbols) {
            Ok(line) => line,
            Err(error) => Line::error(format!("{error:#}")),
        });
    }
    lines
}

fn spools(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut found: Vec<PathBuf> =
        entries.filter(|path| path.extension().is_some_and(|end| end == "spool")).collect();
    found.sort();
    found
}

fn read(path: &Path) -> Result<Recording> {
    let cannot_read = || format!("cannot read the recording '{}'", path.display());
    let bytes = fs::read(path).with_context(cannot_read)?;
    Recording::read(&bytes).with_context(cannot_read)
}

/// Returns `run.4711.vtrace` for `run.vtrace`.
fn beside(path: &Path, pid: u64) -> PathBuf {
    let extension = path.extension().map(|it| it.to_string_lossy().into_owned());
    let extension = extension.unwrap_or_else(|| "vtrace".to_owned());
    path.with_extension(format!("{pid}.{extension}"))
}

fn write(recording: &Recording, path: &Path, symbols: &mut Symbols) -> Result<Line> {
    let mut trace = recording.to_trace(|pc, module| symbols.frames(pc, module));
    let program = recording.command.first().map_or("", String::as_str);
    let program = program.rsplit('/').next().unwrap_or(program);
    program.clone_into(&mut trace.name);
    let cannot_write = || format!("cannot write '{}'", path.display());
    let output = Output::new(path).with_context(cannot_write)?;
    let bytes = output
        .write(&mut io::stdout(), |out| trace.write_vtrace(out))
        .with_context(cannot_write)?;
    let cut = match recording.end {
        End::Complete => "",
        End::Cut | End::Damaged { .. } => "; its end is damaged",
    };
    Ok(Line::of(
        recording.pid,
        program,
        format!(
            "{} recorded in {} ({}){cut}: vramp explain {}",
            plural(recording.events().len(), "event"),
            path.display(),
            Bytes::new(bytes),
            path.display()
        ),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn further_processes_have_their_id_in_the_name() {
        assert_eq!(beside(Path::new("/a/run.vtrace"), 7), Path::new("/a/run.7.vtrace"));
        assert_eq!(beside(Path::new("run"), 7), Path::new("run.7.vtrace"));
    }
}
