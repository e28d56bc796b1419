//! `vramp convert`: any trace in; a `.vtrace`, a PyTorch snapshot or a Perfetto timeline out.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use vramp::Bytes;
use vramp_trace::Trace;

use crate::args::{Convert, Kind};
use crate::replay::read;
use vramp_analysis::number::plural;

pub(crate) fn run(args: &Convert, out: &mut dyn Write) -> Result<()> {
    let (input, output) = (&args.input, &args.output);
    let kind = kind(args)?;
    let mut trace = read(input)?;
    let inferred = match kind {
        // Viewers show the allocator's segments, which some recordings lack.
        Kind::Pickle => trace.infer_segments(),
        Kind::Vtrace | Kind::Perfetto => 0,
    };
    // Written under another name first: a failure leaves no partial file, and a file can be
    // converted onto itself.
    let partial = partial(output);
    write(&partial, kind, &trace)
        .and_then(|()| fs::rename(&partial, output))
        .inspect_err(|_| {
            // Only the first error is reported.
            let _ = fs::remove_file(&partial);
        })
        .with_context(|| format!("cannot write '{}'", output.display()))?;
    write!(
        out,
        "{} ({}) -> {} ({}): {}, {}, {}",
        input.display(),
        size(input)?,
        output.display(),
        size(output)?,
        plural(trace.events.len(), "event"),
        plural(trace.device_count as usize, "device"),
        plural(trace.streams.len(), "stream")
    )?;
    match inferred {
        0 => writeln!(out)?,
        segments => writeln!(out, ", {} inferred from events", plural(segments, "segment"))?,
    }
    Ok(())
}

/// Returns the format selected by `--to` or by the file's name.
fn kind(args: &Convert) -> Result<Kind> {
    if let Some(kind) = args.to {
        return Ok(kind);
    }
    let name = args.output.file_name().unwrap_or_default().to_string_lossy();
    match Kind::ENDINGS.iter().find(|(ending, _)| name.ends_with(ending)) {
        Some(&(_, kind)) => Ok(kind),
        None => bail!(
            "the format of '{}' is unknown: give it a name that ends in {}, or add --to vtrace, \
             --to pickle or --to perfetto",
            args.output.display(),
            Kind::ENDINGS.map(|(ending, _)| ending).join(", ")
        ),
    }
}

fn partial(output: &Path) -> PathBuf {
    let mut name = OsString::from(output);
    name.push(".partial");
    PathBuf::from(name)
}

fn write(path: &Path, kind: Kind, trace: &Trace) -> io::Result<()> {
    let mut file = BufWriter::with_capacity(1 << 20, File::create(path)?);
    match kind {
        Kind::Vtrace => trace.write_vtrace(&mut file)?,
        Kind::Pickle => trace.write_snapshot(&mut file)?,
        Kind::Perfetto => trace.write_perfetto(&mut file)?,
    }
    file.flush()
}

fn size(path: &Path) -> Result<Bytes> {
    let found = fs::metadata(path)
        .with_context(|| format!("cannot read the size of '{}'", path.display()))?;
    Ok(Bytes::new(found.len()))
}
