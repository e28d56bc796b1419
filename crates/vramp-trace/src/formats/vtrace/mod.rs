//! `.vtrace`, the compact format of this project: smaller than a compressed pickle and faster to
//! read. `docs/trace-format.md` specifies every byte.

mod labels;
mod read;
mod write;

pub(crate) use read::read;

/// First bytes of every file. The first byte is not text. The last detects newline conversion.
pub(crate) const MAGIC: [u8; 8] = *b"\x89VTRACE\n";
/// Version that is written, and the newest that is read.
const VERSION: u16 = 3;
/// First version in which a segment has a stack.
const SEGMENT_STACKS: u16 = 2;
/// First version with annotations and labels.
const LABELS: u16 = 3;
/// In the head of an event: the kind is an unknown action, whose index follows.
const KIND_UNKNOWN: u8 = 10;
/// In the head of an event: the bits that hold the kind.
const KIND_BITS: u8 = 0x0f;
/// In the head of an event: the device differs from the event before and follows.
const NEW_DEVICE: u8 = 0x10;
/// In the head of an event: the stream differs from the event before and follows.
const NEW_STREAM: u8 = 0x20;
/// In the head of an event: the stack differs from the event before and follows.
const NEW_STACK: u8 = 0x40;
