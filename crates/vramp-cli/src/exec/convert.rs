//! Makes a `.vtrace` of what each process recorded.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use vramp::Bytes;
use vramp_analysis::number::plural;
use vramp_trace::Trace;
use vramp_trace::spool::{End, Recording};

use super::summary::Line;
use super::symbols::Symbols;
use crate::output::Output;

/// What there is to say about recordings.
pub(super) struct Converted {
    pub lines: Vec<Line>,
    /// A process that records still runs: its file must stay.
    pub is_going_on: bool,
}

/// Converts the recordings in `folder`: the first process that used a GPU writes `path`, each other a file
/// beside it, with its process id in the name.
pub(super) fn all(path: &Path, folder: &Path) -> Converted {
    let mut lines = Vec::new();
    let mut recordings = Vec::new();
    let mut is_going_on = false;
    for spool in spools(folder) {
        match read(&spool) {
            Ok(recording) if is_running(recording.pid) => {
                is_going_on = true;
                let place = spool.display();
                let text = format!("goes on, and records into {place}: vramp explain {place}");
                lines.push(Line::of(recording.pid, recording.program(), text));
            }
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
        let earlier = recordings[..index].iter().filter(|it| it.pid == recording.pid).count();
        let target = match index {
            0 => path.to_owned(),
            _ => beside(path, recording.pid, earlier),
        };
        lines.push(match write(recording, &target, &mut symbols) {
            Ok(line) => line,
            Err(error) => Line::error(format!("{error:#}")),
        });
    }
    Converted { lines, is_going_on }
}

/// Returns true for processes that have not ended, whether or not their parent knows it yet.
fn is_running(pid: u64) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    state.is_some_and(|state| !matches!(state, 'Z' | 'X'))
}

/// Returns true for what a process records into while it runs.
pub(crate) fn is_spool(path: &Path) -> bool {
    let mut start = [0; 6];
    let read = File::open(path).and_then(|mut file| file.read_exact(&mut start));
    read.is_ok() && start == *b"VSPOOL"
}

/// Reads what a process has recorded so far.
///
/// # Errors
/// An error that names the file.
pub(crate) fn read_spool(path: &Path) -> Result<Trace> {
    Ok(trace(&read(path)?, &mut Symbols::default()))
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

/// Returns `run.4711.vtrace` for `run.vtrace`; `run.4711-2.vtrace` if the process had recorded as another
/// program before.
fn beside(path: &Path, pid: u64, earlier: usize) -> PathBuf {
    let extension = path.extension().map(|it| it.to_string_lossy().into_owned());
    let extension = extension.unwrap_or_else(|| "vtrace".to_owned());
    let again = if earlier > 0 { format!("-{}", earlier + 1) } else { String::new() };
    path.with_extension(format!("{pid}{again}.{extension}"))
}

fn trace(recording: &Recording, symbols: &mut Symbols) -> Trace {
    let mut trace = recording.to_trace(|pc, module| symbols.frames(pc, module));
    recording.program().clone_into(&mut trace.name);
    trace
}

fn write(recording: &Recording, path: &Path, symbols: &mut Symbols) -> Result<Line> {
    let trace = trace(recording, symbols);
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
        recording.program(),
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
    fn a_process_that_has_ended_is_not_running() {
        assert!(is_running(std::process::id().into()));
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = child.id().into();
        while is_running(pid) {
            std::thread::yield_now();
        }
        assert!(child.wait().unwrap().success());
        assert!(!is_running(pid) && !is_running(0));
    }

    #[test]
    fn further_processes_have_their_id_in_the_name() {
        assert_eq!(beside(Path::new("/a/run.vtrace"), 7, 0), Path::new("/a/run.7.vtrace"));
        assert_eq!(beside(Path::new("run"), 7, 1), Path::new("run.7-2.vtrace"));
    }
}
