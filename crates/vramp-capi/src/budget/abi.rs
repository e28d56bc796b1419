//! The types of budgets, with their C names.
#![allow(non_camel_case_types, reason = "these are the names of the C interface")]

use std::ffi::{c_char, c_int, c_void};

/// How an allocator shares a card with other processes, for vramp_budget_join. Set the struct to zero before.
/// Amounts are in bytes. Later versions add fields at the end.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vramp_budget_options_t {
    /// Set by the caller to `sizeof(vramp_budget_options_t)`.
    pub struct_size: u64,
    /// A directory that only the user may use. It is made if it is missing, and its parent is there.
    pub directory: *const c_char,
    /// The card, by its UUID: the same text in all processes.
    pub card: *const c_char,
    /// Name of the group of processes.
    pub group: *const c_char,
    /// Name of this program in messages, of which 64 bytes are used. Null is none.
    pub program: *const c_char,
    /// What the group shares: the card's memory, less what contexts and other programs need. The same in all
    /// processes.
    pub capacity: u64,
    /// What this process can always claim.
    pub guaranteed: u64,
    /// What it may claim at most; zero for all of the capacity.
    pub limit: u64,
    /// What is claimed beyond a request where it is free; zero for 64 MiB.
    pub ahead: u64,
    /// Milliseconds to wait for others to give back, here and in each request that claims.
    pub patience_ms: u64,
    /// From 0 to 255: the larger is served first, and gives back last.
    pub priority: u32,
    /// Zero.
    pub reserved: u32,
}

/// What a process can have of a card that it shares, in bytes. Later versions add fields at the end.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct vramp_budget_room_t {
    /// Set by the caller to `sizeof(vramp_budget_room_t)`, as in vramp_stats_t.
    pub struct_size: u64,
    /// What it has claimed.
    pub claimed: u64,
    /// What it can claim now.
    pub available: u64,
    /// What it can claim once the others have given back what is idle.
    pub obtainable: u64,
    /// What it can claim if the others give back all that they are not guaranteed.
    pub most: u64,
}

/// Called when another process lacks so many bytes and nothing is idle, on the thread of the budget. No lock is
/// held. It may free blocks and call vramp, but for vramp_close. It must not unwind: no C++ exception may leave it.
pub type vramp_reclaim_handler_t = Option<unsafe extern "C" fn(bytes: u64, user: *mut c_void)>;

/// Called when `vramp ctl` or another program pauses (`resume` is 0) or resumes (1) the memory of this process, on
/// the thread of the budget. Returns 1 if that is done, 0 if it is not. No lock is held. It may call vramp, but for
/// vramp_close. It must not unwind: no C++ exception may leave it.
pub type vramp_sleep_handler_t =
    Option<unsafe extern "C" fn(resume: c_int, user: *mut c_void) -> c_int>;
