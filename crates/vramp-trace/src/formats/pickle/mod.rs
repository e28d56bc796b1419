//! Reads and writes PyTorch memory snapshots, which `torch.cuda.memory._dump_snapshot` writes.
//!
//! Reading:
//! 1. The machine runs the opcodes and stores values in an arena. It can build plain data and
//!    nothing else. Opcodes that load objects or run code are refused by name.
//! 2. The dict of an event is converted to an [`crate::Event`] as soon as it is appended to the
//!    history of its device, and freed.
//! 3. At the end the outermost dict provides the settings, the segments and the order of devices.
//!
//! Writing takes one pass. Every text, frame and stack is written once.
//!
//! Deliberately absent: protocols 0 and 1 (text, which PyTorch never wrote), classes, persistent
//! ids, out-of-band buffers.

mod annotations;
mod fields;
mod machine;
mod opcode;
mod pickler;
mod segments;
mod snapshot;
mod values;
mod write;

pub(crate) use machine::read;
