//! The types of regions, with their C names.
#![allow(non_camel_case_types, reason = "these are the names of the C interface")]

use std::ffi::{c_char, c_int, c_void};

/// Backup of a region: its contents are copied to pinned memory of the host while it sleeps.
pub const VRAMP_BACKUP_HOST: u32 = 0;
/// Backup of a region: none. After a resume its contents are undefined.
pub const VRAMP_BACKUP_NONE: u32 = 1;
/// Backup of a region: its contents go to a disk, through a few pinned blocks: that of the allocator's tiers,
/// or else that of vramp_region_set_disk.
pub const VRAMP_BACKUP_DISK: u32 = 2;

/// Longest tag of a region in bytes, without the final zero.
pub const VRAMP_TAG_MAX: usize = 127;

/// Handle of a scope: the calling thread allocates in a region, or outside of regions. Zero is none.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct vramp_region_scope_t {
    /// Opaque. May be compared.
    pub id: u64,
}

/// Options of a region, for vramp_region_begin. Set the struct to zero before. Later versions add fields at
/// the end.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct vramp_region_options_t {
    /// Set by the caller to `sizeof(vramp_region_options_t)`.
    pub struct_size: u64,
    /// Where contents go while the region sleeps: VRAMP_BACKUP_HOST, VRAMP_BACKUP_NONE or
    /// VRAMP_BACKUP_DISK.
    pub backup: u32,
    /// Not zero if the program writes each block once, before the first pause after its allocation. Then
    /// later pauses copy nothing until something is allocated or freed in the region.
    pub read_only: i32,
}

/// Options of a pause, for vramp_region_pause. Set the struct to zero before. Later versions add fields at
/// the end.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct vramp_pause_options_t {
    /// Set by the caller to `sizeof(vramp_pause_options_t)`.
    pub struct_size: u64,
    /// Bytes of each region that stay on the card, at most.
    pub keep: u64,
    /// Not zero to give contents up instead of copying them. After the resume all contents of the regions
    /// are undefined, also those of memory that stayed on the card.
    pub discard: i32,
}

/// Called around the sleep of regions. It returns zero, or another number if it failed. No lock is held. It may
/// allocate, free, export and pin; calls that move or read a region return VRAMP_ERROR_BUSY in it, and vramp_close of the
/// allocator too. Moves of regions that it covers wait for it. It must not unwind: no C++ exception may leave it.
pub type vramp_sleep_callback_t = Option<unsafe extern "C" fn(user: *mut c_void) -> c_int>;

/// A pair of callbacks around the sleep of regions, for vramp_region_around_sleep. Set the struct to zero before. Later
/// versions add fields at the end.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vramp_sleep_callbacks_t {
    /// Set by the caller to `sizeof(vramp_sleep_callbacks_t)`.
    pub struct_size: u64,
    /// A name for error messages, not null.
    pub name: *const c_char,
    /// Called before memory leaves the card. Null calls nothing.
    pub before: vramp_sleep_callback_t,
    /// Called after memory is back. Null calls nothing.
    pub after: vramp_sleep_callback_t,
    /// Passed to both.
    pub user: *mut c_void,
    /// Not zero if the callbacks wait for other processes, which pause and resume too: regions that the pair covers are
    /// not paused under pressure then, which other processes need not have.
    pub is_collective: i32,
}

/// What a region does.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum vramp_region_phase_t {
    /// It serves requests.
    VRAMP_REGION_AWAKE = 0,
    /// It is being paused, or copied ahead.
    VRAMP_REGION_PAUSING = 1,
    /// Some or all of its memory is off the card.
    VRAMP_REGION_ASLEEP = 2,
    /// It is being resumed.
    VRAMP_REGION_RESUMING = 3,
}

/// State of a region at one moment. Amounts are in bytes. Later versions add fields at the end.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct vramp_region_status_t {
    /// In the first struct of an array, set by the caller to `sizeof(vramp_region_status_t)`: the distance
    /// from one to the next. On return the same number is in all of them.
    pub struct_size: u64,
    /// What it does.
    pub phase: vramp_region_phase_t,
    /// Its backup: VRAMP_BACKUP_HOST, VRAMP_BACKUP_NONE or VRAMP_BACKUP_DISK.
    pub backup: u32,
    /// 1 if it is read-only. Otherwise 0.
    pub read_only: i32,
    /// Bytes of the tag, which may be longer than `tag` if Python made the region.
    pub tag_length: u32,
    /// Memory of the card.
    pub on_card: u64,
    /// Memory that is the region's but not on the card.
    pub asleep: u64,
    /// Pinned memory of the host that keeps its contents.
    pub on_host: u64,
    /// What is charged to the disk for its contents.
    pub on_disk: u64,
    /// What the move in progress, or the last one, has copied.
    pub copied: u64,
    /// What that has to copy.
    pub to_copy: u64,
    /// The tag. Ends with a zero, and is cut to the array.
    pub tag: [c_char; 128],
}
