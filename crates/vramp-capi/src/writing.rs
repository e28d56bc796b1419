//! Writes a snapshot to the file that a caller names.

use std::fs::File;
use std::io::{BufWriter, Write};

use vramp_alloc::history::Trace;

use crate::status::{Failure, Kind, Result};

/// Writes a PyTorch snapshot, or a timeline for Perfetto if the path ends with `.json`.
pub(crate) fn write_trace(trace: &Trace, path: &str) -> Result<()> {
    let written = File::create(path).and_then(|file| {
        let mut file = BufWriter::new(file);
        match path.ends_with(".json") {
            true => trace.write_perfetto(&mut file)?,
            false => trace.write_snapshot(&mut file)?,
        }
        file.flush()
    });
    written.map_err(|error| Failure::new(Kind::File, format!("cannot write {path}: {error}")))
}
