//! PyTorch's memory snapshots: what `torch.cuda.memory._dump_snapshot` writes.
//!
//! Reading:
//! 1. The machine steps through the opcodes and puts values in an arena; it can build plain data
//!    and nothing else. Opcodes that load objects or run code are refused by name.
//! 2. The dict of an event is turned into an [`crate::Event`] as soon as it joins its device's
//!    history, and freed.
//! 3. At the end the outermost dict gives the settings, the segments and the order of devices.
//!
//! Writing goes the other way in one pass, with every text, frame and stack written once.
//!
//! Deliberately absent: protocols 0 and 1 (text, which PyTorch never wrote), classes, persistent
//! ids, out-of-band buffers.

mod fields;
mod machine;
mod opcode;
mod pickler;
mod segments;
mod snapshot;
mod values;
mod write;

pub(crate) use machine::read;
