//! The file that `vramp exec` lets a process append to while it runs, and the trace made from it.
//!
//! 1. The recorder in the process writes [`header`] and then records, each made by [`encode()`], to a file
//!    that it has mapped and that is zero beyond what was written. It writes the first four bytes of a
//!    record last, by one atomic store: what is before them then outlives the process, however it ended.
//! 2. [`read`] returns the records up to the first that is not whole. [`Recording::read`] collects them.
//! 3. [`Recording::to_trace`] makes the [`Trace`](crate::Trace), with names for the addresses of the call
//!    stacks.
//!
//! # Format
//! Numbers are little-endian. The file begins with 16 bytes: the magic `VSPOOL\x01\n` and the process id as
//! u64. Every record begins with u32 `kind | length << 8`; the length counts all bytes of the record and is
//! a multiple of 8. Texts are padded with zeros. Kind 0 ends the file.
//!
//! | kind | contents after the first four bytes |
//! |---|---|
//! | 1 program | u32 bytes of the text; u64 start in us since 1970; u64 `CLOCK_MONOTONIC` in ns at that moment; the command line, its arguments separated by NUL |
//! | 2 device | u32 number; u64 bytes of memory; u32 bytes of the text; u32 zero; the name |
//! | 3 module | u32 id; u64 bias; u64 start; u64 end; u32 bytes of the text; u32 zero; the path |
//! | 4 stack | u32 id; return addresses, u64 each, innermost first |
//! | 5 event | u32 stack, or all ones; u8 what; u8 api; u16 device; u32 zero; u64 ns; u64 address; u64 size; u64 stream |
//! | 6 calls | u32 bytes of the text; u64 number of calls; the name of the function |
//!
//! Pure: bytes in, records out. It needs neither the feature `formats` nor any library.

mod api;
mod encode;
mod error;
mod fields;
mod reader;
mod record;
mod recording;

pub use api::Api;
pub use encode::{encode, header};
pub use error::SpoolError;
pub use reader::{End, Records, read};
pub use record::{Change, Event, FRAMES_MAX, Module, Record, TEXT_MAX};
pub use recording::{FrameText, Recording};

/// First eight bytes of a file. The seventh is the version.
const MAGIC: [u8; 8] = *b"VSPOOL\x01\n";

/// Bytes before the first record.
pub const HEADER_BYTES: usize = 16;

/// Longest record, in bytes: the largest multiple of 8 that 24 bits hold.
const RECORD_MAX: usize = (1 << 24) - 8;

/// Numbers of the kinds of records.
mod kind {
    pub const END: u8 = 0;
    pub const PROGRAM: u8 = 1;
    pub const DEVICE: u8 = 2;
    pub const MODULE: u8 = 3;
    pub const STACK: u8 = 4;
    pub const EVENT: u8 = 5;
    pub const CALLS: u8 = 6;
}
