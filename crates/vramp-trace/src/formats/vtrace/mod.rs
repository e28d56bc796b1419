//! `.vtrace`, this project's own format: smaller than a compressed pickle and quicker to read, with
//! nothing in it that a replay does not use. `docs/trace-format.md` has every byte.

mod read;
mod write;

pub(crate) use read::read;

/// The first bytes of every file. The first is no text, the last shows a broken newline
/// conversion.
pub(crate) const MAGIC: [u8; 8] = *b"\x89VTRACE\n";
/// The version that is written, and the newest that is read.
const VERSION: u16 = 2;
/// The first version in which a segment has a stack.
const SEGMENT_STACKS: u16 = 2;
/// In the head of an event: its kind is an unknown action, whose number follows.
const KIND_UNKNOWN: u8 = 10;
/// In the head of an event: the bits that hold the kind.
const KIND_BITS: u8 = 0x0f;
/// In the head of an event: another device than the event before; its number follows.
const NEW_DEVICE: u8 = 0x10;
/// In the head of an event: another stream than the event before; its index follows.
const NEW_STREAM: u8 = 0x20;
/// In the head of an event: another stack than the event before; its number follows.
const NEW_STACK: u8 = 0x40;
