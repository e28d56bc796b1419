//! Detects the format of a file by its contents and reads it.

use std::fmt;
use std::fs::File;
use std::io::{BufReader, Cursor, Read};
use std::path::Path;

use super::{pickle, rmm, vtrace};
use crate::formats::input::Input;
use crate::{ReadError, ReadLimits, Trace};

/// Format of a trace file. Detected by contents, never by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// A PyTorch memory snapshot.
    Pickle,
    /// A log of RMM's `logging_resource_adaptor`.
    RmmLog,
    /// The compact format of this project.
    Vtrace,
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Format::Pickle => "pickle",
            Format::RmmLog => "RMM log",
            Format::Vtrace => ".vtrace file",
        })
    }
}

/// Reads the trace in a file: a PyTorch snapshot, an RMM log or a `.vtrace`, each plain or
/// compressed by gzip or zstd. Detects the format by the contents. The trace is named after the
/// file unless the file stores a name.
///
/// One pass over the file. Needs memory for the trace and little else.
///
/// # Errors
/// Any [`ReadError`].
pub fn read_trace(path: impl AsRef<Path>, limits: &ReadLimits) -> Result<Trace, ReadError> {
    let path = path.as_ref();
    let file =
        File::open(path).map_err(|cause| ReadError::Open { path: path.to_owned(), cause })?;
    let mut trace = read(file, limits)?;
    // A .vtrace stores the name of its recording.
    if trace.name.is_empty() {
        trace.name = stem(path);
    }
    Ok(trace)
}

/// Reads a trace as [`read_trace`] does, from any source. The name is empty unless the source
/// stores one.
///
/// # Errors
/// Any [`ReadError`] but `Open`.
pub fn read(mut source: impl Read, limits: &ReadLimits) -> Result<Trace, ReadError> {
    let mut start = Vec::new();
    let failed = |cause| ReadError::Io { offset: 0, cause };
    source.by_ref().take(4).read_to_end(&mut start).map_err(failed)?;
    let whole = Cursor::new(start.clone()).chain(source);
    match start[..] {
        [] => Err(ReadError::Empty),
        [0x1f, 0x8b, ..] => {
            let buffered = BufReader::with_capacity(64 << 10, whole);
            detect(flate2::bufread::MultiGzDecoder::new(buffered), limits)
        }
        [0x28, 0xb5, 0x2f, 0xfd] => {
            detect(zstd::stream::read::Decoder::new(whole).map_err(failed)?, limits)
        }
        _ => detect(whole, limits),
    }
}

fn detect(contents: impl Read, limits: &ReadLimits) -> Result<Trace, ReadError> {
    let mut input = Input::new(contents, limits.contents);
    let start = input.peek(rmm::LONGEST_HEADER)?;
    match start {
        [] => Err(ReadError::Empty),
        [0x80, protocol, ..] => match protocol {
            2..=5 => pickle::read(input, limits),
            &protocol => Err(ReadError::Protocol { offset: 0, protocol }),
        },
        _ if start.starts_with(&vtrace::MAGIC) => vtrace::read(input, limits),
        _ if rmm::is_log(start) => rmm::read(input, limits),
        // Truncated within the first bytes, by which formats are detected.
        _ if vtrace::MAGIC.starts_with(start) => {
            Err(ReadError::Truncated { format: Format::Vtrace, offset: start.len() as u64 })
        }
        [0x80] => Err(ReadError::Truncated { format: Format::Pickle, offset: 1 }),
        _ => Err(ReadError::UnknownFormat { start: hex(&start[..start.len().min(8)]) }),
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().join(" ")
}

/// Returns the file's name without the extensions of formats and compression.
fn stem(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let mut stem = &*name;
    for extension in [".gz", ".zst", ".pickle", ".pkl", ".csv", ".txt", ".log", ".vtrace"] {
        stem = stem.strip_suffix(extension).filter(|rest| !rest.is_empty()).unwrap_or(stem);
    }
    stem.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_is_named_after_its_file() {
        for (path, name) in [
            ("runs/gnn.pickle.gz", "gnn"),
            ("gnn.vtrace", "gnn"),
            ("logs/rmm.dev0.csv.zst", "rmm.dev0"),
            ("snapshot", "snapshot"),
            (".gz", ".gz"),
        ] {
            assert_eq!(stem(Path::new(path)), name, "{path}");
        }
    }
}
