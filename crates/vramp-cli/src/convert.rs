//! `vramp convert`: any trace in; a `.vtrace`, a PyTorch snapshot or a Perfetto timeline out.

use std::io::{self, IsTerminal, Write};
use std::path::Path;

use anyhow::{Context, Result, bail};
use vramp::Bytes;
use vramp_trace::Trace;

use crate::args::{Convert, Kind};
use crate::output::Output;
use crate::reading::{STANDARD, size};
use crate::text::printable;
use vramp_analysis::number::plural;

pub(crate) fn run(args: &Convert, out: &mut dyn Write) -> Result<()> {
    let (input, output) = (&args.input, &args.output);
    let cannot_write = || format!("cannot write {}", name(output, "standard output"));
    let target = Output::new(output).with_context(cannot_write)?;
    let kind = kind(args, &target)?;
    let is_same_file = target.is_same_file(input);
    if is_same_file && !args.force {
        bail!(
            "'{}' is the file that is read, and would lose {}: give another name, or add --force",
            output.display(),
            kind.loses()
        );
    }
    let input_size = size(input);
    let mut trace = args.reading.read(input)?;
    let inferred = match kind {
        // Viewers show the allocator's segments, which some recordings lack.
        Kind::Pickle => trace.infer_segments(),
        Kind::Vtrace | Kind::Perfetto => 0,
    };
    let bytes = target.write(out, |out| write(out, kind, &trace)).with_context(cannot_write)?;
    let summary = Summary { args, kind, trace: &trace, inferred, input_size, bytes, is_same_file };
    match target {
        // The file itself is on standard output. If standard error is closed, the file is complete
        // all the same.
        Output::Standard => drop(summary.write(&mut io::stderr())),
        Output::Through(_) | Output::Replaced(_) => summary.write(out)?,
    }
    Ok(())
}

/// Returns the format selected by `--to` or by the file's name.
fn kind(args: &Convert, target: &Output) -> Result<Kind> {
    let file = args.output.file_name().unwrap_or_default().to_string_lossy();
    let by_name = Kind::ENDINGS.iter().find(|(ending, _)| file.ends_with(ending));
    let Some(kind) = args.to.or(by_name.map(|&(_, kind)| kind)) else {
        bail!(
            "the format of {} is unknown: give it a name that ends in {}, or add --to vtrace, \
             --to pickle or --to perfetto",
            name(&args.output, "standard output"),
            Kind::ENDINGS.map(|(ending, _)| ending).join(", ")
        )
    };
    let is_binary = matches!(kind, Kind::Vtrace | Kind::Pickle);
    if is_binary && matches!(target, Output::Standard) && io::stdout().is_terminal() {
        bail!("standard output is a terminal, and the file is binary: redirect it, or name a file");
    }
    Ok(kind)
}

fn write(out: &mut dyn Write, kind: Kind, trace: &Trace) -> io::Result<()> {
    match kind {
        Kind::Vtrace => trace.write_vtrace(out),
        Kind::Pickle => trace.write_snapshot(out),
        Kind::Perfetto => trace.write_perfetto(out),
    }
}

/// Returns the path in quotes, or the name of a standard stream.
fn name(path: &Path, standard: &str) -> String {
    match path == Path::new(STANDARD) {
        true => standard.to_owned(),
        false => format!("'{}'", path.display()),
    }
}

/// Returns a path as a terminal can show it.
fn shown(path: &Path) -> String {
    printable(&path.display().to_string())
}

/// Returns the number of devices, and how many of several have events or segments.
fn devices(trace: &Trace) -> String {
    let all = plural(trace.device_count as usize, "device");
    match trace.devices().len() {
        used if trace.device_count > 1 && used < trace.device_count as usize => {
            format!("{used} of {all}")
        }
        _ => all,
    }
}

/// What was converted.
struct Summary<'a> {
    args: &'a Convert,
    kind: Kind,
    trace: &'a Trace,
    inferred: usize,
    input_size: Option<Bytes>,
    bytes: u64,
    is_same_file: bool,
}

impl Summary<'_> {
    fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        write!(out, "{}", shown(&self.args.input))?;
        if let Some(size) = self.input_size {
            write!(out, " ({size})")?;
        }
        write!(
            out,
            " -> {} ({}): {}, {}, {}",
            shown(&self.args.output),
            Bytes::new(self.bytes),
            plural(self.trace.events.len(), "event"),
            devices(self.trace),
            plural(self.trace.streams.len(), "stream")
        )?;
        if self.inferred > 0 {
            write!(out, ", {} inferred from events", plural(self.inferred, "segment"))?;
        }
        if self.is_same_file {
            write!(out, "; not kept: {}", self.kind.loses())?;
        }
        writeln!(out)
    }
}
