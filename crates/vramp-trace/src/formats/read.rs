//! Detects the format of a file by its contents and reads it.

use std::fmt;
use std::fs::File;
use std::io::{Cursor, Read};
use std::path::Path;

use super::archive::{is_archive, unpack};
use super::compressed::{Compression, LONGEST_MAGIC};
use super::foreign::{Foreign, LOOKED_AT};
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

/// Reads the trace in a file: a PyTorch snapshot, an RMM log or a `.vtrace`, each plain, compressed
/// by gzip, zstd or xz, or the only file of a zip archive. Detects the format by the contents. The
/// trace is named after the file unless the file stores a name.
///
/// One pass over the file. Needs memory for the trace and little else; for the whole archive too if
/// it is a zip archive.
///
/// # Errors
/// Any [`ReadError`].
pub fn read_trace(path: impl AsRef<Path>, limits: &ReadLimits) -> Result<Trace, ReadError> {
    let path = path.as_ref();
    let failed = |cause| ReadError::Open { path: path.to_owned(), cause };
    let file = File::open(path).map_err(failed)?;
    let mut trace = read(file, limits).map_err(|error| match error {
        // Where the contents say nothing, the name may.
        ReadError::UnknownFormat { .. } | ReadError::Io { .. } => {
            Foreign::of_path(path).map_or(error, ReadError::from)
        }
        error => error,
    })?;
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
pub fn read(source: impl Read, limits: &ReadLimits) -> Result<Trace, ReadError> {
    let (start, mut source) = peek(source)?;
    if !is_archive(&start) {
        return read_file(&start, &mut source, limits);
    }
    unpack(source, limits, |file, limits| {
        let (start, mut file) = peek(file)?;
        read_file(&start, &mut file, limits)
    })
}

/// Returns the first bytes of a source, and all of it.
fn peek<R: Read>(mut source: R) -> Result<(Vec<u8>, impl Read), ReadError> {
    let mut start = Vec::new();
    source
        .by_ref()
        .take(LONGEST_MAGIC as u64)
        .read_to_end(&mut start)
        .map_err(|cause| ReadError::Io { offset: 0, cause })?;
    let whole = Cursor::new(start.clone()).chain(source);
    Ok((start, whole))
}

/// Reads a file that is not an archive.
fn read_file(start: &[u8], whole: &mut dyn Read, limits: &ReadLimits) -> Result<Trace, ReadError> {
    match Compression::of(start) {
        _ if start.is_empty() => Err(ReadError::Empty),
        Some(compression) => {
            let failed = |cause| ReadError::Io { offset: 0, cause };
            detect(&mut compression.decoder(whole).map_err(failed)?, limits)
        }
        None => detect(whole, limits),
    }
}

fn detect(contents: &mut dyn Read, limits: &ReadLimits) -> Result<Trace, ReadError> {
    let mut input = Input::new(contents, limits.contents);
    // Windows programs begin a text with a byte order mark.
    if input.peek(BYTE_ORDER_MARK.len())? == BYTE_ORDER_MARK {
        input.consume(BYTE_ORDER_MARK.len() as u64, |_| ())?;
    }
    let start = input.peek(LOOKED_AT)?;
    match start {
        [] => Err(ReadError::Empty),
        [0x80, protocol, ..] => match (protocol, Foreign::of(start)) {
            (2..=5, None) => pickle::read(input, limits),
            (2..=5, Some(foreign)) => Err(foreign.into()),
            (&protocol, _) => Err(ReadError::Protocol { offset: 0, protocol }),
        },
        _ if start.starts_with(&vtrace::MAGIC) => vtrace::read(input, limits),
        _ if rmm::is_log(start) => rmm::read(input, limits),
        // Truncated within the first bytes, by which formats are detected.
        _ if vtrace::MAGIC.starts_with(start) => {
            Err(ReadError::Truncated { format: Format::Vtrace, offset: start.len() as u64 })
        }
        [0x80] => Err(ReadError::Truncated { format: Format::Pickle, offset: 1 }),
        _ => Err(match Foreign::of(start) {
            Some(foreign) => foreign.into(),
            None => ReadError::UnknownFormat { start: hex(&start[..start.len().min(8)]) },
        }),
    }
}

const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().join(" ")
}

/// Returns the file's name without the extensions of formats and compression.
fn stem(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let mut stem = &*name;
    for extension in
        [".gz", ".zst", ".xz", ".zip", ".pickle", ".pkl", ".csv", ".txt", ".log", ".vtrace"]
    {
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
