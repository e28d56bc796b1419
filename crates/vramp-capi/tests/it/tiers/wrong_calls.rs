//! Every function of tiers with invalid arguments.

use std::ffi::{c_char, c_void};
use std::ptr::{null, null_mut};

use crate::common::tiers::*;
use crate::common::*;
use vramp_capi::abi::vramp_status_t::{self, *};
use vramp_capi::abi::{vramp_allocator_t, vramp_stream_t};
use vramp_capi::interface::vramp_close;
use vramp_capi::tiers::abi::*;
use vramp_capi::tiers::buffers::*;
use vramp_capi::tiers::leases::*;
use vramp_capi::tiers::observing::*;
use vramp_capi::tiers::reservations::*;
use vramp_capi::tiers::spaces::*;
use vramp_capi::tiers::*;

unsafe extern "C" fn ignore_event(_: *const vramp_buffer_event_t, _: *mut c_void) {}

unsafe extern "C" fn ignore_text(_: *const c_char, _: *mut c_void) {}

/// Calls every function that needs tiers, with these objects.
fn every_call(
    allocator: vramp_allocator_t,
    stream: vramp_stream_t,
    id: u64,
) -> Vec<vramp_status_t> {
    let (mut space, mut count, mut bytes) = ([DEVICE; 2], 0, 0);
    let mut stats = vramp_space_stats_t { struct_size: 152, ..vramp_space_stats_t::default() };
    let mut about =
        vramp_reservation_info_t { struct_size: 48, ..vramp_reservation_info_t::default() };
    let mut of_all = vramp_tiers_stats_t { struct_size: 184, ..vramp_tiers_stats_t::default() };
    let mut registration = 0;
    let (mut of_buffer, mut memory) = (no_info(), [0_u8; 8]);
    let at = memory.as_mut_ptr().cast::<c_void>();
    let (mut reservation, mut buffer) = (vramp_reservation_t { id }, vramp_buffer_t { id });
    let mut lease = vramp_buffer_lease_t { id };
    let uses = [vramp_buffer_use_t { buffer, access: VRAMP_ACCESS_WRITE }];
    let (held, kept) = (lease, reservation);
    // SAFETY: every result outlives its call.
    unsafe {
        vec![
            vramp_spaces(allocator, space.as_mut_ptr(), 2, &mut count),
            vramp_space_stats(allocator, DEVICE, &mut stats),
            vramp_space_reset_peak(allocator, DEVICE),
            vramp_reserve(allocator, DEVICE, 1, 0, 0, &mut reservation),
            vramp_reserve_up_to(allocator, DEVICE, 0, 1, &mut reservation, null_mut()),
            vramp_buffer_create(allocator, 4096, &mut buffer),
            vramp_evict(allocator, 0, &mut bytes),
            vramp_tiers_stats(allocator, &mut of_all),
            vramp_tiers_failures(allocator, Some(ignore_text), null_mut()),
            vramp_buffers_observe(allocator, Some(ignore_event), null_mut(), &mut registration),
            vramp_sync_and_unlock(allocator, stream),
            // From here on calls that need an object.
            vramp_reservation_info(allocator, kept, &mut about),
            vramp_reservation_grow(allocator, kept, 1, 0),
            vramp_reservation_shrink(allocator, kept, &mut bytes),
            vramp_reservation_attach(allocator, kept, stream),
            vramp_reservation_detach(allocator, kept),
            vramp_reservation_release(allocator, kept),
            vramp_buffer_info(allocator, uses[0].buffer, &mut of_buffer),
            vramp_buffer_set_priority(allocator, uses[0].buffer, 1),
            vramp_buffer_hint(allocator, uses[0].buffer, VRAMP_HINT_WILL_NEED),
            vramp_buffer_prefetch(allocator, uses[0].buffer),
            vramp_buffer_write(allocator, uses[0].buffer, 0, at, 8),
            vramp_buffer_read(allocator, uses[0].buffer, 0, at, 8),
            vramp_buffer_discard(allocator, uses[0].buffer),
            vramp_buffer_retrieve(allocator, uses[0].buffer, 0),
            vramp_buffer_spill(allocator, uses[0].buffer, &mut bytes),
            vramp_buffer_spill_to(allocator, uses[0].buffer, VRAMP_TIER_DISK, &mut bytes),
            vramp_lock(allocator, uses.as_ptr(), 1, stream, 0, null_mut()),
            vramp_buffers_lease(allocator, uses.as_ptr(), 1, stream, 0, null_mut(), &mut lease),
            vramp_buffer_destroy(allocator, uses[0].buffer),
            vramp_buffer_lease_wrote(allocator, held, 0, 0, 1),
            vramp_buffer_lease_end(allocator, held),
            vramp_buffer_lease_cancel(allocator, held),
            vramp_unlock(allocator, stream),
        ]
    }
}

/// Calls of [`every_call`] that need no object, buffers, reservations and leases.
const COUNTS: [usize; 4] = [11, 6, 13, 4];

#[test]
fn an_unknown_allocator_or_one_without_tiers_is_an_error_of_every_function() {
    let allocator = open("");
    let stream = stream(allocator);
    let calls = COUNTS.iter().sum();
    assert_eq!(every_call(allocator, stream, 1), vec![VRAMP_ERROR_NO_TIERS; calls]);
    assert_eq!(vramp_tiers_close(allocator), VRAMP_ERROR_NO_TIERS);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
    for id in [0, 1, allocator.id, u64::MAX] {
        let unknown = vramp_allocator_t { id };
        let statuses = every_call(unknown, stream, 1);
        assert_eq!(statuses, vec![VRAMP_ERROR_UNKNOWN_ALLOCATOR; calls], "{id:#x}");
        assert_eq!(open_tiers(unknown, &options(0, MIB)), VRAMP_ERROR_UNKNOWN_ALLOCATOR);
        assert_eq!(vramp_tiers_close(unknown), VRAMP_ERROR_UNKNOWN_ALLOCATOR);
    }
}

#[test]
fn a_made_up_object_is_an_error_of_every_function() {
    let allocator = open_with_tiers(256, 64 * MIB);
    let stream = stream(allocator);
    for id in [0, u64::MAX, 1 << 63] {
        let statuses = every_call(allocator, stream, id);
        let expected = [
            (VRAMP_OK, COUNTS[0]),
            (VRAMP_ERROR_UNKNOWN_RESERVATION, COUNTS[1]),
            (VRAMP_ERROR_UNKNOWN_BUFFER, COUNTS[2]),
            (VRAMP_ERROR_UNKNOWN_LEASE, COUNTS[3]),
        ];
        let expected: Vec<_> =
            expected.into_iter().flat_map(|(status, count)| vec![status; count]).collect();
        assert_eq!(statuses, expected, "{id:#x}");
    }
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn null_results_are_refused_before_anything_happens() {
    let allocator = open_with_tiers(256, 64 * MIB);
    let stream = stream(allocator);
    let before = space_stats(allocator, DEVICE).unwrap();
    let mut lease = vramp_buffer_lease_t::default();
    let (buffer, mut count, mut registration) = (vramp_buffer_t::default(), 0, 0);
    // SAFETY: null is what the functions must withstand.
    let statuses = unsafe {
        [
            vramp_tiers_open_with(allocator, null()),
            vramp_spaces(allocator, null_mut(), 0, null_mut()),
            vramp_spaces(allocator, null_mut(), 1, &mut count),
            vramp_space_stats(allocator, DEVICE, null_mut()),
            vramp_reserve(allocator, DEVICE, 1, 0, 0, null_mut()),
            vramp_reserve_up_to(allocator, DEVICE, 0, 1, null_mut(), null_mut()),
            vramp_reservation_info(allocator, vramp_reservation_t::default(), null_mut()),
            vramp_buffer_create(allocator, 4096, null_mut()),
            vramp_buffer_info(allocator, buffer, null_mut()),
            vramp_buffers_lease(allocator, null(), 1, stream, 0, null_mut(), &mut lease),
            vramp_buffers_lease(allocator, null(), 0, stream, 0, null_mut(), null_mut()),
            vramp_lock(allocator, null(), 1, stream, 0, null_mut()),
            vramp_tiers_stats(allocator, null_mut()),
            vramp_tiers_failures(allocator, None, null_mut()),
            vramp_buffers_observe(allocator, None, null_mut(), &mut registration),
            vramp_buffers_observe(allocator, Some(ignore_event), null_mut(), null_mut()),
        ]
    };
    assert_eq!(statuses, [VRAMP_ERROR_NULL; 16]);
    assert_eq!(space_stats(allocator, DEVICE).unwrap(), before);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn numbers_that_name_nothing_are_refused() {
    let allocator = open_with_tiers(256, 64 * MIB);
    let stream = stream(allocator);
    let one = buffer(allocator, 4096).unwrap();
    for tier in [3, u32::MAX] {
        let space = vramp_space_t { tier, index: 0 };
        assert_eq!(space_stats(allocator, space), Err(VRAMP_ERROR_RANGE));
        assert_eq!(reserve(allocator, space, 1, 0), Err(VRAMP_ERROR_RANGE));
    }
    for space in [
        vramp_space_t { tier: VRAMP_TIER_DEVICE, index: 1 },
        vramp_space_t { tier: VRAMP_TIER_DISK, index: 0 },
    ] {
        assert_eq!(space_stats(allocator, space), Err(VRAMP_ERROR_UNKNOWN_SPACE));
        assert_eq!(reserve(allocator, space, 1, 0), Err(VRAMP_ERROR_UNKNOWN_SPACE));
    }
    let no_disk = vramp_space_t { tier: VRAMP_TIER_DISK, index: VRAMP_ANY_INDEX };
    assert_eq!(reserve(allocator, no_disk, 1, 0), Err(VRAMP_ERROR_UNKNOWN_SPACE));
    assert_eq!(lease(allocator, &[(one, 7)], stream, 0), Err(VRAMP_ERROR_RANGE));
    assert_eq!(vramp_buffer_hint(allocator, one, 9), VRAMP_ERROR_RANGE);
    for tier in [VRAMP_TIER_DEVICE, VRAMP_TIER_PEER, u32::MAX] {
        // SAFETY: the result may be null.
        let status = unsafe { vramp_buffer_spill_to(allocator, one, tier, null_mut()) };
        assert_eq!(status, VRAMP_ERROR_RANGE);
    }
    assert_eq!(buffer(allocator, 0), Err(VRAMP_ERROR_RANGE), "{}", last_error());
    let mut lease_ = vramp_buffer_lease_t::default();
    // SAFETY: as many elements are refused before they are read.
    let status = unsafe {
        vramp_buffers_lease(allocator, null(), usize::MAX, stream, 0, null_mut(), &mut lease_)
    };
    assert_eq!(status, VRAMP_ERROR_RANGE);
    let foreign = vramp_stream_t { id: 7 };
    assert_eq!(lease(allocator, &[(one, 0)], foreign, 0), Err(VRAMP_ERROR_UNKNOWN_STREAM));
    let (held, _) = lease(allocator, &[(one, 0)], stream, 0).unwrap();
    assert_eq!(vramp_buffer_lease_wrote(allocator, held, 0, 0, 1), VRAMP_ERROR_UNSUPPORTED);
    assert_eq!(vramp_buffer_lease_wrote(allocator, held, 1, 0, 1), VRAMP_ERROR_RANGE);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}
