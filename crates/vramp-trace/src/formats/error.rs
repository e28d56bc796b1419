//! Why a file could not be read, where in it, and what to do about it.

use std::io;
use std::path::PathBuf;

use vramp_core::Bytes;

use crate::Format;

/// A file that is not a trace this crate can read.
///
/// Offsets count bytes of the *uncompressed* contents. No error leaves memory behind, and none is
/// a panic: a hostile file is a user's input like any other.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReadError {
    /// The file could not be opened.
    #[error("cannot open {}: {cause}", path.display())]
    Open {
        /// Which file.
        path: PathBuf,
        /// What the system said.
        cause: io::Error,
    },
    /// Reading or decompressing failed.
    #[error("cannot read or decompress at byte {offset}: {cause}")]
    Io {
        /// How much had been read.
        offset: u64,
        /// What the system or the decompressor said.
        cause: io::Error,
    },
    /// There is nothing in the file.
    #[error(
        "the file is empty: was the program still running, or killed, when it wrote the snapshot?"
    )]
    Empty,
    /// The contents are of no known format.
    #[error(
        "not a known trace format (it begins with {start}): expected a PyTorch snapshot pickle \
         (protocol 2 to 5), an RMM log or a .vtrace file, plain, gzip or zstd"
    )]
    UnknownFormat {
        /// The first bytes, in hexadecimal.
        start: String,
    },
    /// The contents end too early.
    #[error("the {format} ends too early, at byte {offset}: copy the file again, or record again")]
    Truncated {
        /// What was being read.
        format: Format,
        /// Where it ends.
        offset: u64,
    },
    /// The pickle wants to run code or to load an object.
    #[error(
        "refused to run the opcode {opcode} at byte {offset}: a memory snapshot is plain data, and \
         this pickle wants to load an object or run code; save it with \
         torch.cuda.memory._dump_snapshot"
    )]
    Refused {
        /// Where the opcode stands.
        offset: u64,
        /// Its name in Python's pickletools.
        opcode: &'static str,
    },
    /// The pickle uses a protocol that PyTorch never writes.
    #[error(
        "pickle protocol {protocol} at byte {offset} is not supported: save it with protocol 2, 3, \
         4 or 5"
    )]
    Protocol {
        /// Where the protocol shows.
        offset: u64,
        /// Its number.
        protocol: u8,
    },
    /// The bytes do not follow the rules of their format.
    #[error("broken {format} at byte {offset}: {what}")]
    Malformed {
        /// What was being read.
        format: Format,
        /// Where it was noticed.
        offset: u64,
        /// What is wrong.
        what: &'static str,
    },
    /// A good file of a known format that holds something else than a trace.
    #[error(
        "this pickle is not a memory snapshot: {what}; save one with \
         torch.cuda.memory._dump_snapshot"
    )]
    NotASnapshot {
        /// What is missing or different.
        what: &'static str,
    },
    /// A field has a value that it cannot have.
    #[error("{place}: {field} is {found}, expected {expected}")]
    BadField {
        /// Which event, block or line.
        place: String,
        /// Which of its fields.
        field: &'static str,
        /// What stands there.
        found: String,
        /// What may stand there.
        expected: &'static str,
    },
    /// Reading on would cost more than the caller allows.
    #[error("more than {allowed} {what} at byte {offset}: raise ReadLimits::{limit} to read it")]
    Limit {
        /// The field of [`crate::ReadLimits`].
        limit: &'static str,
        /// What it counts.
        what: &'static str,
        /// Its value.
        allowed: u64,
        /// Where it was reached.
        offset: u64,
    },
    /// The `.vtrace` file is newer than this program.
    #[error("a .vtrace file of version {found}; this program reads up to version {supported}")]
    Version {
        /// What the file says.
        found: u16,
        /// The newest version this crate reads.
        supported: u16,
    },
    /// The `.vtrace` file is damaged.
    #[error(
        "the .vtrace file is damaged: its checksum is {computed:#010x}, expected {stored:#010x}"
    )]
    Checksum {
        /// What the file says.
        stored: u32,
        /// What its contents give.
        computed: u32,
    },
}

/// How much a file may cost to read. The defaults fit every recording seen so far and keep a
/// hostile file from taking the machine down.
///
/// ```
/// use vramp_core::Bytes;
/// use vramp_trace::ReadLimits;
/// let frugal = ReadLimits { memory: Bytes::mib(256), ..ReadLimits::default() };
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadLimits {
    /// Uncompressed contents. This bounds the time too: no byte is looked at more than a few times.
    pub contents: Bytes,
    /// Memory held while reading: events, stacks, names and what is not understood yet. Counted by
    /// this crate, and close to what the process takes; buffers and the decompressor come on top:
    /// under 1 MiB, or as much as 130 MiB for zstd with the longest window.
    pub memory: Bytes,
    /// Events in all.
    pub events: u32,
    /// Containers within containers.
    pub depth: u32,
    /// One text, in bytes.
    pub text: Bytes,
}

impl Default for ReadLimits {
    /// 16 GiB of contents, 2 GiB of memory, 100 million events, 100 levels, 16 MiB of text.
    fn default() -> ReadLimits {
        ReadLimits {
            contents: Bytes::gib(16),
            memory: Bytes::gib(2),
            events: 100_000_000,
            depth: 100,
            text: Bytes::mib(16),
        }
    }
}
