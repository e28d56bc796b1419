//! `vramp convert`: any trace in, a `.vtrace` out.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::Path;

use anyhow::{Context, Result, bail};
use vramp::Bytes;

use crate::args::Convert;
use crate::count::many;
use crate::replay_command::read;

pub(crate) fn run(args: &Convert, out: &mut dyn Write) -> Result<()> {
    let (input, output) = (&args.input, &args.output);
    if output.extension().is_none_or(|extension| extension != "vtrace") {
        bail!(
            "cannot write '{}': only .vtrace files are written; give the output a name that ends \
             in .vtrace",
            output.display()
        );
    }
    let trace = read(input)?;
    // Beside its final place first, so that a failure leaves no half of a file there, and a file
    // can be converted onto itself.
    let partial = output.with_extension("vtrace.partial");
    write(&partial, &trace)
        .and_then(|()| fs::rename(&partial, output))
        .inspect_err(|_| {
            // The error that is reported is the first one.
            let _ = fs::remove_file(&partial);
        })
        .with_context(|| format!("cannot write '{}'", output.display()))?;
    writeln!(
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
    Ok(())
}

fn write(path: &Path, trace: &vramp_trace::Trace) -> std::io::Result<()> {
    let mut file = BufWriter::new(File::create(path)?);
    trace.write_vtrace(&mut file)?;
    file.flush()
}

fn size(path: &Path) -> Result<Bytes> {
    let found =
        fs::metadata(path).with_context(|| format!("cannot look at '{}'", path.display()))?;
    Ok(Bytes::new(found.len()))
}
