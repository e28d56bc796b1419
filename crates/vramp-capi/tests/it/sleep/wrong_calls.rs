//! Every function of regions with invalid arguments.

use std::ptr::{null, null_mut};

use crate::common::sleep::*;
use crate::common::*;
use vramp_capi::abi::vramp_allocator_t;
use vramp_capi::abi::vramp_status_t::{self, *};
use vramp_capi::interface::*;
use vramp_capi::sharing::vramp_comm_pool;
use vramp_capi::sleep::abi::vramp_region_phase_t::*;
use vramp_capi::sleep::abi::*;
use vramp_capi::sleep::*;

fn every_call(allocator: vramp_allocator_t) -> Vec<vramp_status_t> {
    vec![
        begin(allocator, "a").err().unwrap_or(VRAMP_OK),
        disable(allocator).err().unwrap_or(VRAMP_OK),
        pause(allocator, &["a"]),
        resume(allocator, &["a"]),
        clean(allocator, &["a"]),
        on_pressure(allocator, &["a"]).err().unwrap_or(VRAMP_OK),
        states(allocator).err().unwrap_or(VRAMP_OK),
        remove(allocator, "a"),
    ]
}

#[test]
fn a_wrong_allocator_is_found_by_every_call() {
    let allocator = open("");
    assert_eq!(vramp_close(allocator), VRAMP_OK);
    for wrong in [allocator, vramp_allocator_t::default(), vramp_allocator_t { id: u64::MAX }] {
        assert_eq!(every_call(wrong), [VRAMP_ERROR_UNKNOWN_ALLOCATOR; 8]);
    }
}

#[test]
fn null_pointers_are_refused_and_change_nothing() {
    let allocator = open("");
    let (mut scope, mut count) = (vramp_region_scope_t::default(), 0);
    let (tags, nulls) = ([c"a".as_ptr()], [null()]);
    // SAFETY: null is what the functions must withstand.
    let statuses = unsafe {
        [
            vramp_region_begin(allocator, null(), null(), &mut scope),
            vramp_region_begin(allocator, c"a".as_ptr(), null(), null_mut()),
            vramp_region_disable(allocator, null_mut()),
            vramp_region_pause(allocator, null(), 1, null()),
            vramp_region_pause(allocator, nulls.as_ptr(), 1, null()),
            vramp_region_resume(allocator, null(), 1),
            vramp_region_resume(allocator, nulls.as_ptr(), 1),
            vramp_region_clean(allocator, nulls.as_ptr(), 1),
            vramp_region_on_pressure(allocator, nulls.as_ptr(), 1, &mut 0),
            vramp_region_on_pressure(allocator, tags.as_ptr(), 1, null_mut()),
            vramp_region_status(allocator, null_mut(), 0, null_mut()),
            vramp_region_status(allocator, null_mut(), 1, &mut count),
            vramp_region_remove(allocator, null()),
        ]
    };
    assert_eq!(statuses, [VRAMP_ERROR_NULL; 13]);
    assert_eq!(states(allocator).unwrap(), []);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn structs_that_are_too_small_are_refused() {
    let allocator = open("");
    let (mut scope, mut count) = (vramp_region_scope_t::default(), usize::MAX);
    let region = vramp_region_options_t { struct_size: 15, ..vramp_region_options_t::default() };
    let pause = vramp_pause_options_t { struct_size: 0, ..vramp_pause_options_t::default() };
    let mut status = vramp_region_status_t { struct_size: 8, ..no_status() };
    // SAFETY: the structs outlive the call.
    let statuses = unsafe {
        [
            vramp_region_begin(allocator, c"a".as_ptr(), &region, &mut scope),
            vramp_region_pause(allocator, null(), 0, &pause),
            vramp_region_status(allocator, &mut status, 1, &mut count),
        ]
    };
    assert_eq!(statuses, [VRAMP_ERROR_STRUCT_SIZE; 3]);
    assert_eq!((count, states(allocator).unwrap().len()), (usize::MAX, 0));
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn a_wrong_tag_names_those_that_there_are_and_changes_nothing() {
    let allocator = open("");
    for call in [pause, resume, clean] {
        assert_eq!(call(allocator, &["a"]), VRAMP_ERROR_REGION, "there is none");
    }
    assert_eq!(on_pressure(allocator, &[]), Err(VRAMP_ERROR_REGION));
    let stream = stream(allocator);
    let scope = begin(allocator, "weights").unwrap();
    malloc(allocator, 4 << 20, stream).unwrap();
    assert_eq!(vramp_region_end(scope), VRAMP_OK);
    for call in [pause, resume, clean] {
        assert_eq!(call(allocator, &["weights", "wieghts"]), VRAMP_ERROR_REGION);
        assert!(last_error().contains("[\"weights\"]"), "{}", last_error());
    }
    assert_eq!(on_pressure(allocator, &["wieghts"]), Err(VRAMP_ERROR_REGION));
    assert_eq!(state(allocator, "weights").phase, VRAMP_REGION_AWAKE);
    assert_eq!(state(allocator, "weights").to_copy, 0);
    let broken = [c"\xff".as_ptr()];
    // SAFETY: the text ends with a zero.
    let status = unsafe { vramp_region_pause(allocator, broken.as_ptr(), 1, null()) };
    assert_eq!(status, VRAMP_ERROR_TEXT);
    // SAFETY: as many tags are refused before they are read.
    let status = unsafe { vramp_region_resume(allocator, broken.as_ptr(), usize::MAX) };
    assert_eq!(status, VRAMP_ERROR_RANGE);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn options_that_cannot_be_or_differ_are_refused() {
    let allocator = open("");
    for unknown in [3, u32::MAX] {
        let options = region_options(unknown, false);
        assert_eq!(begin_with(allocator, "a", &options), Err(VRAMP_ERROR_RANGE));
        assert!(last_error().contains("VRAMP_BACKUP_NONE"), "{}", last_error());
    }
    assert_eq!(states(allocator).unwrap(), []);
    assert_eq!(vramp_region_end(begin(allocator, "a").unwrap()), VRAMP_OK);
    for other in [region_options(VRAMP_BACKUP_NONE, false), region_options(VRAMP_BACKUP_HOST, true)]
    {
        assert_eq!(begin_with(allocator, "a", &other), Err(VRAMP_ERROR_OPTION));
    }
    // No scope was left behind.
    let stream = stream(allocator);
    malloc(allocator, 4 << 20, stream).unwrap();
    assert_eq!(state(allocator, "a").on_card, 0);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn a_pool_for_communication_libraries_has_no_regions() {
    let allocator = open("");
    let mut comm = vramp_allocator_t::default();
    // SAFETY: the result outlives the call.
    assert_eq!(unsafe { vramp_comm_pool(allocator, null(), &mut comm) }, VRAMP_OK);
    assert_eq!(begin(comm, "a"), Err(VRAMP_ERROR_UNSUPPORTED));
    assert_eq!(disable(comm), Err(VRAMP_ERROR_UNSUPPORTED));
    assert_eq!(states(comm).unwrap(), []);
    assert_eq!(vramp_close(comm), VRAMP_OK);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}
