//! The records, as the writer passes them and the reader returns them.

use std::borrow::Cow;

use super::Api;

/// Most frames of a stack. Of a deeper one the innermost are kept.
pub const FRAMES_MAX: usize = 64;

/// Most bytes of a text. A longer one is cut.
pub const TEXT_MAX: usize = 64 << 10;

/// One record of a file.
///
/// Texts are bytes as the system has them, mostly UTF-8.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Record<'a> {
    /// The program. Once, at the beginning.
    Program {
        /// When the recording began, in microseconds since 1970.
        start_us: u64,
        /// `CLOCK_MONOTONIC` at the same moment, in nanoseconds.
        start_ns: u64,
        /// Program and arguments, separated by NUL.
        command: &'a [u8],
    },
    /// A device that the program uses.
    Device {
        /// Its number, as the program counts devices.
        device: u32,
        /// Bytes of its memory.
        total: u64,
        /// Its name.
        name: &'a [u8],
    },
    /// A file of code that is loaded. Before the first stack with an address in it.
    Module {
        /// Counts from 0.
        id: u32,
        /// Load address minus link address.
        bias: u64,
        /// First address of its mapped range.
        start: u64,
        /// Address after that range.
        end: u64,
        /// Path of the file.
        path: &'a [u8],
    },
    /// A call stack. Before the first event that has it.
    Stack {
        /// Counts from 0.
        id: u32,
        /// Return addresses, innermost first.
        pcs: Cow<'a, [u64]>,
    },
    /// A change of the memory that the program holds, or a request that failed.
    Event(Event),
    /// How often the program called a function that no event is recorded of.
    Calls {
        /// Number of calls.
        count: u64,
        /// Name of the function.
        name: &'a [u8],
    },
}

/// What [`Record::Event`] holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// What changed.
    pub change: Change,
    /// The driver's function that the program called.
    pub api: Api,
    /// Number of the device.
    pub device: u16,
    /// Id of the call stack, if recorded.
    pub stack: Option<u32>,
    /// `CLOCK_MONOTONIC` in nanoseconds.
    pub ns: u64,
    /// First address. Of [`Change::OutOfMemory`] the bytes that were free on the device, or all ones.
    pub address: u64,
    /// Requested bytes. Of [`Change::Free`] zero if unknown. Above 2^56, 2^56 is written.
    pub size: u64,
    /// The stream's handle as a number; zero where the function has no stream.
    pub stream: u64,
}

/// What changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Change {
    /// The program allocated a block.
    Alloc,
    /// The program freed the block at this address.
    Free,
    /// The request failed.
    OutOfMemory,
    /// The program mapped memory at this address.
    Map,
    /// The program unmapped the range, which may hold several mappings.
    Unmap,
    /// All blocks and mappings of the device are gone, as after `cudaDeviceReset`.
    Reset,
}

impl Change {
    /// All of them, in the order of their numbers in a file.
    pub(super) const ALL: [Change; 6] = [
        Change::Alloc,
        Change::Free,
        Change::OutOfMemory,
        Change::Map,
        Change::Unmap,
        Change::Reset,
    ];
}

/// A file of code of the recorded process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Module {
    /// Load address minus link address.
    pub bias: u64,
    /// First address of its mapped range.
    pub start: u64,
    /// Address after that range.
    pub end: u64,
    /// Path of the file.
    pub path: String,
}
