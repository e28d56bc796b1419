//! Wrappers of regions for tests.

use std::ffi::{CString, c_char};
use std::ptr::null;

use vramp_capi::abi::{vramp_allocator_t, vramp_status_t};
use vramp_capi::sleep::abi::vramp_region_phase_t::VRAMP_REGION_AWAKE;
use vramp_capi::sleep::abi::*;
use vramp_capi::sleep::*;

use super::tiers::outcome;

type Outcome<T> = Result<T, vramp_status_t>;

pub const SIZE: u64 = size_of::<vramp_region_status_t>() as u64;

pub fn region_options(backup: u32, read_only: bool) -> vramp_region_options_t {
    let struct_size = size_of::<vramp_region_options_t>() as u64;
    vramp_region_options_t { struct_size, backup, read_only: i32::from(read_only) }
}

pub fn pause_options(keep: u64, discard: bool) -> vramp_pause_options_t {
    let struct_size = size_of::<vramp_pause_options_t>() as u64;
    vramp_pause_options_t { struct_size, keep, discard: i32::from(discard) }
}

pub fn begin_with(
    allocator: vramp_allocator_t,
    tag: &str,
    options: &vramp_region_options_t,
) -> Outcome<vramp_region_scope_t> {
    let tag = CString::new(tag).unwrap();
    let mut scope = vramp_region_scope_t::default();
    // SAFETY: the text ends with a zero, and the struct and the result outlive the call.
    outcome(unsafe { vramp_region_begin(allocator, tag.as_ptr(), options, &mut scope) }, ())
        .map(|()| scope)
}

pub fn begin(allocator: vramp_allocator_t, tag: &str) -> Outcome<vramp_region_scope_t> {
    begin_with(allocator, tag, &region_options(VRAMP_BACKUP_HOST, false))
}

pub fn disable(allocator: vramp_allocator_t) -> Outcome<vramp_region_scope_t> {
    let mut scope = vramp_region_scope_t::default();
    // SAFETY: the result outlives the call.
    outcome(unsafe { vramp_region_disable(allocator, &mut scope) }, ()).map(|()| scope)
}

/// Calls `call` with tags as C passes them.
fn with_tags<R>(tags: &[&str], call: impl FnOnce(*const *const c_char, usize) -> R) -> R {
    let texts: Vec<CString> = tags.iter().map(|tag| CString::new(*tag).unwrap()).collect();
    // Not null without tags, which would mean all regions.
    let pointers: Vec<_> = texts.iter().map(|text| text.as_ptr()).chain([null()]).collect();
    call(pointers.as_ptr(), tags.len())
}

pub fn pause_with(
    allocator: vramp_allocator_t,
    tags: &[&str],
    options: &vramp_pause_options_t,
) -> vramp_status_t {
    // SAFETY: the texts and the struct outlive the call.
    with_tags(tags, |tags, count| unsafe { vramp_region_pause(allocator, tags, count, options) })
}

pub fn pause(allocator: vramp_allocator_t, tags: &[&str]) -> vramp_status_t {
    // SAFETY: the texts outlive the call; null stands for the defaults.
    with_tags(tags, |tags, count| unsafe { vramp_region_pause(allocator, tags, count, null()) })
}

pub fn resume(allocator: vramp_allocator_t, tags: &[&str]) -> vramp_status_t {
    // SAFETY: the texts outlive the call.
    with_tags(tags, |tags, count| unsafe { vramp_region_resume(allocator, tags, count) })
}

pub fn clean(allocator: vramp_allocator_t, tags: &[&str]) -> vramp_status_t {
    // SAFETY: the texts outlive the call.
    with_tags(tags, |tags, count| unsafe { vramp_region_clean(allocator, tags, count) })
}

pub fn prefetch(allocator: vramp_allocator_t, tags: &[&str]) -> vramp_status_t {
    // SAFETY: the texts outlive the call.
    with_tags(tags, |tags, count| unsafe { vramp_region_prefetch(allocator, tags, count) })
}

pub fn remove(allocator: vramp_allocator_t, tag: &str) -> vramp_status_t {
    let tag = CString::new(tag).unwrap();
    // SAFETY: the text outlives the call.
    unsafe { vramp_region_remove(allocator, tag.as_ptr()) }
}

pub fn on_pressure(allocator: vramp_allocator_t, tags: &[&str]) -> Outcome<u64> {
    let mut number = 0;
    // SAFETY: the texts and the result outlive the call.
    let status = with_tags(tags, |tags, count| unsafe {
        vramp_region_on_pressure(allocator, tags, count, &mut number)
    });
    outcome(status, number)
}

/// A struct for `vramp_region_status` to fill.
pub fn no_status() -> vramp_region_status_t {
    vramp_region_status_t {
        struct_size: SIZE,
        phase: VRAMP_REGION_AWAKE,
        backup: u32::MAX,
        read_only: -1,
        tag_length: u32::MAX,
        on_card: u64::MAX,
        asleep: u64::MAX,
        on_host: u64::MAX,
        on_disk: u64::MAX,
        copied: u64::MAX,
        to_copy: u64::MAX,
        tag: [1; 128],
    }
}

/// Returns the states of all regions.
pub fn states(allocator: vramp_allocator_t) -> Outcome<Vec<vramp_region_status_t>> {
    let (mut found, mut count) = ([no_status(); 16], 0);
    // SAFETY: the array has as many structs, and the results outlive the call.
    let status = unsafe { vramp_region_status(allocator, found.as_mut_ptr(), 16, &mut count) };
    outcome(status, ()).map(|()| found[..count].to_vec())
}

/// Returns the state of the region with a tag.
pub fn state(allocator: vramp_allocator_t, tag: &str) -> vramp_region_status_t {
    let states = states(allocator).unwrap();
    *states.iter().find(|state| tag_of(state) == tag).expect("the region exists")
}

/// Returns the tag of a region.
pub fn tag_of(state: &vramp_region_status_t) -> String {
    let bytes: Vec<u8> = state.tag.iter().map(|&c| c as u8).take_while(|&c| c != 0).collect();
    String::from_utf8(bytes).expect("it is cut between characters")
}
