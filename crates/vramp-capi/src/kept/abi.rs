//! The types of kept memory, with their C names.
#![allow(non_camel_case_types, reason = "these are the names of the C interface")]

use std::ffi::{c_char, c_void};

/// Lock of kept memory: processes read it, and none writes.
pub const VRAMP_KEPT_READ: u32 = 0;
/// Lock of kept memory: this process writes it, and no other reads.
pub const VRAMP_KEPT_WRITE: u32 = 1;
/// No lock of kept memory: other processes may write it meanwhile.
pub const VRAMP_KEPT_UNLOCKED: u32 = 2;

/// Handle of a keeper. Zero is none.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct vramp_keeper_t {
    /// Opaque. May be compared.
    pub id: u64,
}

/// Handle of kept memory: a draft, or memory that is open. Zero is none.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct vramp_kept_t {
    /// Opaque. May be compared.
    pub id: u64,
}

/// What kept memory is made as, for vramp_kept_draft. Set the struct to zero before. Later versions add fields at
/// the end.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct vramp_kept_options_t {
    /// Set by the caller to `sizeof(vramp_kept_options_t)`.
    pub struct_size: u64,
    /// Most bytes that will be placed in it, with 511 more for each place. Not zero.
    pub bytes: u64,
    /// Bytes of one physical handle, rounded up to whole pages. Zero for 1 GiB.
    pub part: u64,
    /// Nanoseconds that the keeper keeps it when no process has it open. Zero for ever.
    pub kept_for_ns: u64,
    /// Where the keeper needs room, memory without holders goes by this, the lowest first.
    pub priority: i32,
    /// Zero.
    pub reserved: u32,
}

/// How kept memory is opened, for vramp_kept_open. Zero is the default of each field. Later versions add fields at
/// the end.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct vramp_kept_open_options_t {
    /// Set by the caller to `sizeof(vramp_kept_open_options_t)`.
    pub struct_size: u64,
    /// Lock that it is opened with: VRAMP_KEPT_READ, VRAMP_KEPT_WRITE or VRAMP_KEPT_UNLOCKED.
    pub lock: u32,
    /// 1 if work of the card writes it. Otherwise a write ends the context.
    pub writable: i32,
    /// 1 if it may lie anywhere. Otherwise it has the addresses that its publisher had, where they are free here.
    pub any_addresses: i32,
    /// Zero.
    pub reserved: u32,
}

/// What a handle of kept memory stands for.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum vramp_kept_phase_t {
    /// Memory that is being made. No other process sees it.
    VRAMP_KEPT_DRAFT = 0,
    /// Memory of a name.
    VRAMP_KEPT_OPEN = 1,
    /// A commit failed: the memory is this process's own until it is closed.
    VRAMP_KEPT_PRIVATE = 2,
}

/// The state of kept memory. Later versions add fields at the end.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct vramp_kept_state_t {
    /// Set by the caller to `sizeof(vramp_kept_state_t)`, as in vramp_stats_t.
    pub struct_size: u64,
    /// Address of the first byte in this process. It does not change.
    pub address: *mut c_void,
    /// Bytes in use.
    pub bytes: u64,
    /// Number of the last commit. Of a draft, that of the name's memory when the draft began; zero for a new name.
    pub epoch: u64,
    /// Bytes of the layout.
    pub layout_bytes: u64,
    /// The publisher's digest. Of a draft, that of the name's memory when the draft began.
    pub digest: [u8; 32],
    /// Whether it is a draft, memory of a name, or private to this process.
    pub phase: vramp_kept_phase_t,
    /// Lock of this process: VRAMP_KEPT_READ, VRAMP_KEPT_WRITE or VRAMP_KEPT_UNLOCKED.
    pub lock: u32,
    /// 1 if work of the card may write it. Otherwise 0.
    pub writable: i32,
    /// 1 if a process ended while it wrote. Otherwise 0.
    pub torn: i32,
    /// 1 if the name has other memory by now, or none. This memory stays as it is. Otherwise 0.
    pub superseded: i32,
    /// 1 while no keeper knows of it. It stays valid, and is restored at the next keeper. Otherwise 0.
    pub adrift: i32,
    /// 1 if a process waits to write. Otherwise 0.
    pub writer_waits: i32,
    /// Zero.
    pub reserved: u32,
}

/// A name of a keeper. Later versions add fields at the end.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct vramp_kept_entry_t {
    /// In the first struct of an array, set by the caller to `sizeof(vramp_kept_entry_t)`: the distance from one to
    /// the next. On return the same number is in all of them.
    pub struct_size: u64,
    /// Bytes on the card; zero if the name has no memory yet.
    pub bytes: u64,
    /// Number of the last commit; zero if the name has no memory yet.
    pub epoch: u64,
    /// How often it is open.
    pub holders: u64,
    /// Calls that wait for its lock, or to make a draft of the name.
    pub waiting: u64,
    /// Earlier memory of the name that processes have open.
    pub superseded: u64,
    /// Nanoseconds that no process has had it open; zero while one has.
    pub idle_ns: u64,
    /// Where the keeper needs room, memory without holders goes by this, the lowest first.
    pub priority: i32,
    /// 1 if a process ended while it wrote. Otherwise 0.
    pub torn: i32,
    /// Process with the lock for writing; zero for none.
    pub writer: u32,
    /// Process that makes a draft of the name; zero for none.
    pub drafter: u32,
    /// Its card. Ends with a zero, and is cut to the array.
    pub device: [c_char; 96],
    /// The name. Ends with a zero.
    pub name: [c_char; 208],
}
