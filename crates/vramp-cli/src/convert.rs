//! `vramp convert`: any trace in; a `.vtrace`, a PyTorch snapshot or a Perfetto timeline out.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use vramp_alloc::Bytes;
use vramp_trace::Trace;

use crate::args::{Convert, Kind};
use crate::count::many;
use crate::replay_command::read;

pub(crate) fn run(args: &Convert, out: &mut dyn Write) -> Result<()> {
    let (input, output) = (&args.input, &args.output);
    let kind = kind(args)?;
    let mut trace = read(input)?;
    let inferred = match kind {
        // A viewer shows the state of the allocator, which some recordings do not hold.
        Kind::Pickle => trace.infer_segments(),
        Kind::Vtrace | Kind::Perfetto => 0,
    };
    // Beside its final place first, so that a failure leaves no half of a file there, and a file
    // can be converted onto itself.
    let partial = partial(output);
    write(&partial, kind, &trace)
        .and_then(|()| fs::rename(&partial, output))
        .inspect_err(|_| {
            // The error that is reported is the first one.
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
        many(trace.events.len(), "event"),
        many(trace.device_count as usize, "device"),
        many(trace.streams.len(), "stream")
    )?;
    match inferred {
        0 => writeln!(out)?,
        segments => writeln!(out, ", {} inferred from events", many(segments, "segment"))?,
    }
    Ok(())
}

/// What was asked for, by option or by name.
fn kind(args: &Convert) -> Result<Kind> {
    if let Some(kind) = args.to {
        return Ok(kind);
    }
    let name = args.output.file_name().unwrap_or_default().to_string_lossy();
    match Kind::ENDINGS.iter().find(|(ending, _)| name.ends_with(ending)) {
        Some(&(_, kind)) => Ok(kind),
        None => bail!(
            "cannot tell what to write to '{}': give it a name that ends in {}, or say --to vtrace, \
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
    let found =
        fs::metadata(path).with_context(|| format!("cannot look at '{}'", path.display()))?;
    Ok(Bytes::new(found.len()))
}
