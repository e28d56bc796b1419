//! Moves that fail, and leave everything as it was.

use crate::common::sleep::*;
use crate::common::tiers::{MIB, open_with_tiers};
use crate::common::*;
use vramp_capi::abi::vramp_status_t::{self, *};
use vramp_capi::abi::{vramp_allocator_t, vramp_export_t, vramp_stream_t};
use vramp_capi::graphs::vramp_capture_begin;
use vramp_capi::interface::*;
use vramp_capi::sharing::*;
use vramp_capi::sleep::abi::vramp_region_phase_t::*;
use vramp_capi::sleep::*;
use vramp_capi::testing;

/// Allocates a block in a region.
fn malloc_in(
    allocator: vramp_allocator_t,
    tag: &str,
    size: usize,
    stream: vramp_stream_t,
) -> Result<*mut std::ffi::c_void, vramp_status_t> {
    let scope = begin(allocator, tag).unwrap();
    let block = malloc(allocator, size, stream);
    assert_eq!(vramp_region_end(scope), VRAMP_OK);
    block
}

#[test]
fn a_capture_forbids_a_pause_until_it_ends() {
    let allocator = open("");
    let stream = stream(allocator);
    malloc_in(allocator, "weights", 4 << 20, stream).unwrap();
    let arena = testing::create_arena(allocator, "").unwrap();
    assert_eq!(vramp_capture_begin(allocator, stream, arena), VRAMP_OK);
    for refused in [pause(allocator, &["weights"]), clean(allocator, &["weights"])] {
        assert_eq!(refused, VRAMP_ERROR_CAPTURE, "{}", last_error());
    }
    assert!(last_error().contains("end the capture"), "{}", last_error());
    let state_ = state(allocator, "weights");
    assert_eq!((state_.phase, state_.on_card), (VRAMP_REGION_AWAKE, 4 * MIB));
    testing::end_capture(allocator, arena).unwrap();
    assert_eq!(pause(allocator, &["weights"]), VRAMP_OK, "{}", last_error());
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn of_several_regions_those_before_the_one_that_failed_are_resumed() {
    let allocator = open("");
    let stream = stream(allocator);
    malloc_in(allocator, "a", 4 << 20, stream).unwrap();
    let block = malloc_in(allocator, "b", 4 << 20, stream).unwrap();
    let mut exported = vramp_export_t::default();
    // SAFETY: the result outlives the call.
    assert_eq!(unsafe { vramp_export(allocator, block, &mut exported) }, VRAMP_OK);
    assert_eq!(pause(allocator, &["a", "b"]), VRAMP_ERROR_REGION);
    assert!(last_error().contains("\"b\"") && last_error().contains("pinned"), "{}", last_error());
    for tag in ["a", "b"] {
        assert_eq!(state(allocator, tag).on_card, 4 * MIB);
    }
    assert_eq!(vramp_export_close(allocator, exported), VRAMP_OK);
    assert_eq!(pause(allocator, &["a", "b"]), VRAMP_OK, "{}", last_error());
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn a_host_without_room_keeps_the_region_on_the_card() {
    // The pinned memory of the tiers, where the copies go while they are open.
    let allocator = open_with_tiers(256, 32 * MIB);
    let stream = stream(allocator);
    malloc_in(allocator, "weights", 64 << 20, stream).unwrap();
    assert_eq!(pause(allocator, &["weights"]), VRAMP_ERROR_OUT_OF_MEMORY);
    assert!(last_error().contains("host"), "{}", last_error());
    let state_ = state(allocator, "weights");
    assert_eq!((state_.phase, state_.on_card, state_.on_host), (VRAMP_REGION_AWAKE, 64 * MIB, 0));
    assert_eq!(pause_with(allocator, &["weights"], &pause_options(0, true)), VRAMP_OK);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn a_card_without_room_leaves_the_region_asleep_and_a_later_resume_goes_on() {
    let allocator = open("limit=128MiB");
    let stream = stream(allocator);
    let inside = malloc_in(allocator, "weights", 64 << 20, stream).unwrap();
    assert_eq!(pause(allocator, &["weights"]), VRAMP_OK);
    let outside = malloc(allocator, 100 << 20, stream).unwrap();
    assert_eq!(resume(allocator, &["weights"]), VRAMP_ERROR_OUT_OF_MEMORY);
    assert_eq!(state(allocator, "weights").phase, VRAMP_REGION_ASLEEP);
    // Requests in it are refused, and frees are served.
    assert_eq!(malloc_in(allocator, "weights", 512, stream), Err(VRAMP_ERROR_REGION));
    assert!(last_error().contains("sleeps"), "{}", last_error());
    assert_eq!(vramp_free(allocator, outside, stream), VRAMP_OK);
    assert_eq!(vramp_trim(allocator, 0), VRAMP_OK);
    assert_eq!(resume(allocator, &["weights"]), VRAMP_OK, "{}", last_error());
    assert_eq!(vramp_free(allocator, inside, stream), VRAMP_OK);
    assert_eq!(vramp_audit(allocator), VRAMP_OK);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn presets_without_addresses_of_their_own_cannot_pause() {
    for preset in ["torch", "stream-ordered", "vpmm"] {
        let allocator = open(&format!("preset={preset}"));
        let stream = stream(allocator);
        let scope = begin(allocator, "weights").unwrap();
        let block = malloc(allocator, 4 << 20, stream).unwrap();
        assert_eq!(vramp_region_end(scope), VRAMP_OK);
        assert_eq!(pause(allocator, &["weights"]), VRAMP_ERROR_UNSUPPORTED, "{preset}");
        assert_eq!(vramp_free(allocator, block, stream), VRAMP_OK);
        assert_eq!(vramp_close(allocator), VRAMP_OK);
    }
}
