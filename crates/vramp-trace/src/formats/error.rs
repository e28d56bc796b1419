//! Errors and limits of reading.

use std::io;
use std::path::PathBuf;

use vramp_core::Bytes;

use crate::Format;

/// Why a file could not be read.
///
/// Offsets count bytes of the *uncompressed* contents. No file causes a panic.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReadError {
    /// The file could not be opened.
    #[error("cannot open {}: {cause}", path.display())]
    Open {
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        cause: io::Error,
    },
    /// Reading or decompressing failed.
    #[error("cannot read or decompress at byte {offset}: {cause}")]
    Io {
        /// Bytes read before the failure.
        offset: u64,
        /// Error of the operating system or the decompressor.
        cause: io::Error,
    },
    /// The file is empty.
    #[error("the file is empty: check that the program finished writing the snapshot")]
    Empty,
    /// The format of the contents is unknown.
    #[error(
        "unknown trace format (the file begins with {start}): expected a PyTorch snapshot pickle \
         (protocol 2 to 5), an RMM log or a .vtrace file, plain, gzip, zstd, xz or zip"
    )]
    UnknownFormat {
        /// First bytes, in hexadecimal.
        start: String,
    },
    /// The file is of another kind.
    #[error("this is {looks}: {advice}")]
    NotATrace {
        /// What the file is.
        looks: &'static str,
        /// What to do.
        advice: &'static str,
    },
    /// A zip archive has more than one file.
    #[error("this zip archive holds {count} files ({names}): unpack it and give one of them")]
    SeveralFiles {
        /// Number of files.
        count: usize,
        /// Their names; of many, the first.
        names: String,
    },
    /// The file is truncated.
    #[error("the {format} is truncated at byte {offset}: copy the file again, or record again")]
    Truncated {
        /// Format of the file.
        format: Format,
        /// Offset of the end.
        offset: u64,
    },
    /// The pickle would load an object or run code.
    #[error(
        "refused the opcode {opcode} at byte {offset}: this pickle would load an object or run \
         code, and a memory snapshot is plain data; save one with torch.cuda.memory._dump_snapshot"
    )]
    Refused {
        /// Offset of the opcode.
        offset: u64,
        /// Name of the opcode in Python's pickletools.
        opcode: &'static str,
    },
    /// The pickle protocol is not supported.
    #[error(
        "pickle protocol {protocol} at byte {offset} is not supported: save it with protocol 2, 3, \
         4 or 5"
    )]
    Protocol {
        /// Offset of the first opcode of that protocol.
        offset: u64,
        /// Number of the protocol.
        protocol: u8,
    },
    /// The contents are malformed.
    #[error("malformed {format} at byte {offset}: {what}")]
    Malformed {
        /// Format of the file.
        format: Format,
        /// Offset at which it was detected.
        offset: u64,
        /// Description of the defect.
        what: &'static str,
    },
    /// The pickle is valid but is not a memory snapshot.
    #[error(
        "this pickle is not a memory snapshot: {what}; save one with \
         torch.cuda.memory._dump_snapshot"
    )]
    NotASnapshot {
        /// Description of what is missing or different.
        what: &'static str,
    },
    /// The value of a field is invalid.
    #[error("{place}: {field} is {found}, expected {expected}")]
    BadField {
        /// The event, block or line of the field.
        place: String,
        /// Name of the field.
        field: &'static str,
        /// The value found.
        found: String,
        /// The values expected.
        expected: &'static str,
    },
    /// A limit of [`ReadLimits`] was reached.
    #[error("more than {allowed} {what} at byte {offset}: raise {} to read it", raise(limit))]
    Limit {
        /// Name of the field of [`ReadLimits`].
        limit: &'static str,
        /// What the limit counts.
        what: &'static str,
        /// Value of the limit.
        allowed: u64,
        /// Offset at which it was reached.
        offset: u64,
    },
    /// The version of the `.vtrace` file is not supported.
    #[error(".vtrace version {found} is not supported: this program reads up to {supported}")]
    Version {
        /// Version of the file.
        found: u16,
        /// Newest version that this crate reads.
        supported: u16,
    },
    /// The checksum of the `.vtrace` file does not match.
    #[error(
        "the .vtrace file is damaged: its checksum is {computed:#010x}, expected {stored:#010x}"
    )]
    Checksum {
        /// Checksum in the file.
        stored: u32,
        /// Checksum of its contents.
        computed: u32,
    },
}

/// Returns the names by which a limit is raised, in code and on the command line.
fn raise(limit: &str) -> String {
    match limit {
        "memory" | "events" => format!("ReadLimits::{limit} (vramp: --max-{limit})"),
        _ => format!("ReadLimits::{limit}"),
    }
}

/// Limits on what reading a file may cost. The defaults fit every recording seen so far and bound
/// the cost of a hostile file.
///
/// ```
/// use vramp_core::Bytes;
/// use vramp_trace::ReadLimits;
/// let frugal = ReadLimits { memory: Bytes::mib(256), ..ReadLimits::default() };
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadLimits {
    /// Bytes of uncompressed contents. This bounds the time too, which is linear in them.
    pub contents: Bytes,
    /// Memory for events, stacks, names and values that are not parsed yet, as it is allocated:
    /// lists with their spare capacity, and twice while they grow. Buffers and the decompressor come
    /// on top: a few MiB, or up to 130 MiB for zstd with the longest window.
    pub memory: Bytes,
    /// Number of events.
    pub events: u32,
    /// Nesting depth of containers.
    pub depth: u32,
    /// Bytes of one string.
    pub text: Bytes,
}

impl Default for ReadLimits {
    /// 16 GiB of contents, 1 GiB of memory, 100 million events, 100 levels, 16 MiB of text.
    fn default() -> ReadLimits {
        ReadLimits {
            contents: Bytes::gib(16),
            memory: Bytes::gib(1),
            events: 100_000_000,
            depth: 100,
            text: Bytes::mib(16),
        }
    }
}
