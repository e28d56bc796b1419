//! Spaces, reservations, and the allocations that they pay for.

use std::ptr::{null, null_mut};
use std::thread;

use vramp_capi::abi::vramp_status_t::*;
use vramp_capi::abi::{vramp_allocator_t, vramp_stream_t};
use vramp_capi::graphs::vramp_capture_begin;
use vramp_capi::interface::{vramp_close, *};
use vramp_capi::queries::vramp_free_on_own_stream;
use vramp_capi::sleep::vramp_region_end;
use vramp_capi::testing;
use vramp_capi::tiers::abi::*;
use vramp_capi::tiers::leases::vramp_buffer_lease_end;
use vramp_capi::tiers::paying::vramp_reservation_malloc;
use vramp_capi::tiers::reservations::*;
use vramp_capi::tiers::spaces::*;
use vramp_capi::tiers::*;

use crate::common::*;
use crate::common::{begin, pause, resume};

// --- Spaces and reservations ---

#[test]
fn tiers_are_opened_from_toml_and_list_their_spaces() {
    let allocator = open("limit=1GiB");
    let folder = tempfile::tempdir().unwrap();
    let config = format!(
        "[[gpu]]\nindex = 0\ncapacity = \"1GiB\"\n[[host]]\nindex = 3\ncapacity = \"256MiB\"\n\
         [[disk]]\nindex = 7\ncapacity = \"1GiB\"\ndirectory = \"{}\"\0",
        folder.path().display()
    );
    // SAFETY: the text ends with a zero.
    let status = unsafe { vramp_tiers_open(allocator, config.as_ptr().cast()) };
    assert_eq!(status, VRAMP_OK, "{}", last_error());
    let mut spaces = [vramp_space_t::default(); 4];
    let mut count = 0;
    // SAFETY: the array has as many elements.
    let status = unsafe { vramp_spaces(allocator, spaces.as_mut_ptr(), 4, &mut count) };
    assert_eq!((status, count), (VRAMP_OK, 3));
    let listed: Vec<_> = spaces[..3].iter().map(|space| (space.tier, space.index)).collect();
    assert_eq!(listed, [(VRAMP_TIER_DEVICE, 0), (VRAMP_TIER_HOST, 3), (VRAMP_TIER_DISK, 7)]);
    // As many as there is room for, and the number of all.
    let mut one = [vramp_space_t { tier: 9, index: 9 }; 2];
    // SAFETY: as above.
    assert_eq!(unsafe { vramp_spaces(allocator, one.as_mut_ptr(), 1, &mut count) }, VRAMP_OK);
    assert_eq!((one[0].tier, one[1].tier, count), (VRAMP_TIER_DEVICE, 9, 3));
    // SAFETY: without room the array is not written.
    assert_eq!(unsafe { vramp_spaces(allocator, null_mut(), 0, &mut count) }, VRAMP_OK);
    let stats = space_stats(allocator, spaces[2]).unwrap();
    assert_eq!((stats.capacity, stats.available_capacity), (1 << 30, 1 << 30));
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn a_configuration_that_cannot_be_is_refused_and_can_be_corrected() {
    let allocator = open("limit=1GiB");
    for (text, status) in [
        (c"", VRAMP_ERROR_OPTION),
        (c"colour = 1", VRAMP_ERROR_OPTION),
        (c"[[gpu]]\nindex = 0\ncapacity = \"1GiB\"", VRAMP_ERROR_OPTION),
        (
            c"[[gpu]]\nindex = 5\ncapacity = \"1GiB\"\n[[host]]\nindex = 0\ncapacity = \"1GiB\"",
            VRAMP_ERROR_OPTION,
        ),
        (c"\xff", VRAMP_ERROR_TEXT),
    ] {
        // SAFETY: the text ends with a zero.
        assert_eq!(unsafe { vramp_tiers_open(allocator, text.as_ptr()) }, status, "{text:?}");
    }
    // SAFETY: null is what the function must withstand.
    assert_eq!(unsafe { vramp_tiers_open(allocator, null()) }, VRAMP_ERROR_NULL);
    let nowhere = vramp_tiers_options_t {
        disk_directory: c"/nowhere/at/all".as_ptr(),
        disk_bytes: 1 << 30,
        ..options(0, 64 * MIB)
    };
    assert_eq!(open_tiers(allocator, &nowhere), VRAMP_ERROR_FILE, "{}", last_error());
    let without_size = vramp_tiers_options_t { disk_bytes: 0, ..nowhere };
    assert_eq!(open_tiers(allocator, &without_size), VRAMP_ERROR_OPTION);
    assert_eq!(open_tiers(allocator, &options(0, 1)), VRAMP_ERROR_OPTION);
    let small = vramp_tiers_options_t { struct_size: 8, ..options(0, 64 * MIB) };
    assert_eq!(open_tiers(allocator, &small), VRAMP_ERROR_STRUCT_SIZE);
    assert_eq!(space_stats(allocator, DEVICE), Err(VRAMP_ERROR_NO_TIERS));

    assert_eq!(open_tiers(allocator, &options(0, 64 * MIB)), VRAMP_OK, "{}", last_error());
    assert_eq!(open_tiers(allocator, &options(0, 64 * MIB)), VRAMP_ERROR_BUSY);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn a_program_with_an_older_header_gets_the_defaults_of_newer_fields() {
    let allocator = open("limit=1GiB");
    // The header had none of the last three fields: what lies there is not read.
    let older = vramp_tiers_options_t {
        struct_size: 24,
        disk_directory: std::ptr::dangling(),
        disk_bytes: 5,
        store: std::ptr::dangling(),
        ..options(512 * MIB, 64 * MIB)
    };
    assert_eq!(open_tiers(allocator, &older), VRAMP_OK, "{}", last_error());
    assert_eq!(space_stats(allocator, DEVICE).unwrap().capacity, 512 * MIB);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn a_reservation_grows_shrinks_and_is_released() {
    let allocator = open_with_tiers(1024, 64 * MIB);
    let held = reserve(allocator, DEVICE, 300 * MIB, 0).unwrap();
    let stats = space_stats(allocator, DEVICE).unwrap();
    assert_eq!((stats.reserved, stats.total, stats.reservations), (300 * MIB, 300 * MIB, 1));
    assert_eq!(vramp_reservation_grow(allocator, held, 100 * MIB, 0), VRAMP_OK);
    assert_eq!(vramp_reservation_grow(allocator, held, 100 * MIB, VRAMP_FOREVER), VRAMP_OK);
    let info = reservation(allocator, held).unwrap();
    assert_eq!((info.size, info.used, info.unused), (500 * MIB, 0, 500 * MIB));
    assert_eq!((info.space.tier, info.space.index), (VRAMP_TIER_DEVICE, 0));
    // Beyond the limit of the space no wait can help.
    for timeout in [0, VRAMP_FOREVER] {
        let status = vramp_reservation_grow(allocator, held, 1 << 40, timeout);
        assert_eq!(status, VRAMP_ERROR_OUT_OF_MEMORY);
        let status = vramp_reservation_grow(allocator, held, u64::MAX, timeout);
        assert_eq!(status, VRAMP_ERROR_OUT_OF_MEMORY);
    }
    let mut released = 0;
    // SAFETY: the result outlives the call.
    assert_eq!(unsafe { vramp_reservation_shrink(allocator, held, &mut released) }, VRAMP_OK);
    assert_eq!((released, reservation(allocator, held).unwrap().size), (500 * MIB, 0));
    assert_eq!(vramp_reservation_release(allocator, held), VRAMP_OK);
    assert_eq!(vramp_reservation_release(allocator, held), VRAMP_ERROR_UNKNOWN_RESERVATION);
    let stats = space_stats(allocator, DEVICE).unwrap();
    assert_eq!((stats.total, stats.peak, stats.releases), (0, 500 * MIB, stats.reserves));
    assert_eq!(vramp_space_reset_peak(allocator, DEVICE), VRAMP_OK);
    assert_eq!(space_stats(allocator, DEVICE).unwrap().peak, 0);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn a_request_gets_what_there_is_within_its_bounds() {
    let allocator = open_with_tiers(1024, 64 * MIB);
    let all = reserve(allocator, DEVICE, 600 * MIB, 0).unwrap();
    let (mut made, mut bytes) = (vramp_reservation_t::default(), 0);
    let any = vramp_space_t { index: VRAMP_ANY_INDEX, ..DEVICE };
    let (least, most) = (100 * MIB, 900 * MIB);
    // SAFETY: the results outlive the call.
    let status = unsafe { vramp_reserve_up_to(allocator, any, least, most, &mut made, &mut bytes) };
    assert_eq!(status, VRAMP_OK, "{}", last_error());
    let stats = space_stats(allocator, DEVICE).unwrap();
    assert_eq!((bytes, stats.available), (stats.limit - 600 * MIB, 0));
    // SAFETY: as above.
    let status = unsafe { vramp_reserve_up_to(allocator, any, 1, most, &mut made, &mut bytes) };
    assert_eq!(status, VRAMP_ERROR_TIMEOUT);
    // SAFETY: as above.
    let status = unsafe { vramp_reserve_up_to(allocator, any, 2, 1, &mut made, null_mut()) };
    assert_eq!(status, VRAMP_ERROR_RANGE);
    assert_eq!(vramp_reservation_release(allocator, all), VRAMP_OK);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn a_request_waits_for_its_turn_or_its_deadline() {
    let allocator = open_with_tiers(1024, 64 * MIB);
    let all = reserve(allocator, DEVICE, 900 * MIB, 0).unwrap();
    assert_eq!(reserve(allocator, DEVICE, 200 * MIB, 0), Err(VRAMP_ERROR_TIMEOUT));
    assert_eq!(reserve(allocator, DEVICE, 200 * MIB, 1_000_000), Err(VRAMP_ERROR_TIMEOUT));
    assert_eq!(reserve(allocator, DEVICE, 1 << 40, VRAMP_FOREVER), Err(VRAMP_ERROR_OUT_OF_MEMORY));
    thread::scope(|scope| {
        let waiter = scope.spawn(move || reserve(allocator, DEVICE, 200 * MIB, VRAMP_FOREVER));
        while space_stats(allocator, DEVICE).unwrap().waiting == 0 {
            vramp_testing::moment();
        }
        assert_eq!(vramp_reservation_release(allocator, all), VRAMP_OK);
        let served = waiter.join().unwrap().unwrap();
        assert_eq!(reservation(allocator, served).unwrap().size, 200 * MIB);
    });
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn a_reservation_that_is_released_while_it_grows_ends_the_growth() {
    let allocator = open_with_tiers(1024, 64 * MIB);
    let growing = reserve(allocator, DEVICE, 100 * MIB, 0).unwrap();
    let all = reserve(allocator, DEVICE, 800 * MIB, 0).unwrap();
    thread::scope(|scope| {
        let grown = scope
            .spawn(move || vramp_reservation_grow(allocator, growing, 200 * MIB, VRAMP_FOREVER));
        while space_stats(allocator, DEVICE).unwrap().waiting == 0 {
            vramp_testing::moment();
        }
        // Other calls on it do not wait for the growth.
        assert_eq!(reservation(allocator, growing).unwrap().size, 100 * MIB);
        assert_eq!(vramp_reservation_release(allocator, growing), VRAMP_OK);
        assert_eq!(vramp_reservation_release(allocator, all), VRAMP_OK);
        assert_eq!(grown.join().unwrap(), VRAMP_ERROR_UNKNOWN_RESERVATION);
    });
    assert_eq!(space_stats(allocator, DEVICE).unwrap().total, 0);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn a_close_ends_requests_that_wait() {
    let allocator = open_with_tiers(1024, 64 * MIB);
    reserve(allocator, DEVICE, 900 * MIB, 0).unwrap();
    let wait = move || reserve(allocator, DEVICE, 200 * MIB, VRAMP_FOREVER);
    let waiter = thread::spawn(wait);
    while space_stats(allocator, DEVICE).unwrap().waiting == 0 {
        vramp_testing::moment();
    }
    assert_eq!(vramp_tiers_close(allocator), VRAMP_OK);
    assert_eq!(waiter.join().unwrap(), Err(VRAMP_ERROR_CANCELLED));
    assert_eq!(open_tiers(allocator, &options(0, 64 * MIB)), VRAMP_OK);
    reserve(allocator, DEVICE, 900 * MIB, 0).unwrap();
    let waiter = thread::spawn(wait);
    while space_stats(allocator, DEVICE).unwrap().waiting == 0 {
        vramp_testing::moment();
    }
    assert_eq!(vramp_close(allocator), VRAMP_OK);
    assert_eq!(waiter.join().unwrap(), Err(VRAMP_ERROR_CANCELLED));
}

#[test]
fn a_reservation_pays_for_the_leases_of_its_stream() {
    let allocator = open_with_tiers(512, 64 * MIB);
    let (one, other) = (stream(allocator), stream(allocator));
    let held = reserve(allocator, DEVICE, 300 * MIB, 0).unwrap();
    let second = reserve(allocator, DEVICE, MIB, 0).unwrap();
    let of_host = reserve(allocator, HOST, MIB, 0).unwrap();
    let large = [(buffer(allocator, 256 * MIB).unwrap(), VRAMP_ACCESS_WRITE)];
    // Beside the reservation there is no room for it.
    assert!(lease(allocator, &large, one, 0).is_err());
    assert_eq!(vramp_reservation_detach(allocator, held), VRAMP_ERROR_RANGE);
    assert_eq!(vramp_reservation_attach(allocator, held, one), VRAMP_OK, "{}", last_error());
    assert_eq!(vramp_reservation_attach(allocator, held, other), VRAMP_ERROR_BUSY);
    assert_eq!(vramp_reservation_attach(allocator, second, one), VRAMP_ERROR_BUSY);
    assert_eq!(vramp_reservation_attach(allocator, of_host, other), VRAMP_ERROR_UNKNOWN_SPACE);
    assert_eq!(vramp_reservation_grow(allocator, held, MIB, 0), VRAMP_ERROR_BUSY);
    let (leased, _) = lease(allocator, &large, one, 0).unwrap();
    let info = reservation(allocator, held).unwrap();
    assert_eq!((info.size, info.used), (300 * MIB, 256 * MIB));
    assert_eq!(space_stats(allocator, DEVICE).unwrap().total, 301 * MIB);
    assert_eq!(vramp_reservation_detach(allocator, held), VRAMP_OK);
    assert_eq!(reservation(allocator, held).unwrap().used, 256 * MIB);
    assert_eq!(vramp_reservation_attach(allocator, held, one), VRAMP_OK);
    assert_eq!(vramp_buffer_lease_end(allocator, leased), VRAMP_OK);
    assert_eq!(vramp_reservation_release(allocator, held), VRAMP_OK);
    assert_eq!(vramp_reservation_attach(allocator, second, one), VRAMP_OK, "its place is free");
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

// --- Allocations that a reservation pays for ---

const NONE: vramp_reservation_t = vramp_reservation_t { id: 0 };

fn used(allocator: vramp_allocator_t, held: vramp_reservation_t) -> u64 {
    reservation(allocator, held).unwrap().used
}

fn total(allocator: vramp_allocator_t) -> u64 {
    space_stats(allocator, DEVICE).unwrap().total
}

/// Returns what the space counts for a block: its usable bytes in whole granules.
fn charged(allocator: vramp_allocator_t, block: *mut std::ffi::c_void) -> u64 {
    let granule = space_stats(allocator, DEVICE).unwrap().granule;
    let usable = testing::usable_size(allocator, block as u64).unwrap() as u64;
    usable.next_multiple_of(granule)
}

#[test]
fn a_block_is_charged_by_its_length_and_every_free_gives_it_back() {
    let allocator = open_with_tiers(512, 64 * MIB);
    let (one, other) = (stream(allocator), stream(allocator));
    let held = reserve(allocator, DEVICE, 100 * MIB, 0).unwrap();
    let frees: [fn(vramp_allocator_t, *mut std::ffi::c_void, vramp_stream_t); 3] = [
        |allocator, block, stream| assert_eq!(vramp_free(allocator, block, stream), VRAMP_OK),
        |allocator, block, _| assert_eq!(vramp_free_on_own_stream(allocator, block), VRAMP_OK),
        |allocator, block, stream| {
            let block = block as usize;
            let free = move || vramp_free(allocator, block as *mut std::ffi::c_void, stream);
            assert_eq!(thread::spawn(free).join().unwrap(), VRAMP_OK);
        },
    ];
    let mut most = 0;
    for free in frees {
        let mut sum = 0;
        let sizes = [0, 1, 511, 512, 513, 5000, 3 << 20, (20 << 20) + 1];
        let blocks = sizes.map(|size| {
            let block = malloc_paid(allocator, held, size, one).unwrap();
            sum += charged(allocator, block);
            assert_eq!(used(allocator, held), sum, "{size}");
            block
        });
        most = sum;
        // The reservation has them already.
        assert_eq!(total(allocator), 100 * MIB);
        let unpaid = malloc(allocator, 3 << 20, one).unwrap();
        assert_eq!(used(allocator, held), sum, "other blocks are not charged");
        assert_eq!(vramp_free(allocator, unpaid, one), VRAMP_OK);
        for block in blocks {
            sum -= charged(allocator, block);
            free(allocator, block, other);
            assert_eq!(used(allocator, held), sum);
        }
        assert_eq!(sum, 0);
    }
    assert_eq!(reservation(allocator, held).unwrap().peak, most);
    assert_eq!(vramp_audit(allocator), VRAMP_OK);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn ten_thousand_blocks_are_charged_one_by_one() {
    let allocator = open_with_tiers(512, 64 * MIB);
    let stream = stream(allocator);
    let held = reserve(allocator, DEVICE, 100 * MIB, 0).unwrap();
    let blocks: Vec<_> =
        (0..10_000).map(|nth| malloc_paid(allocator, held, nth, stream).unwrap()).collect();
    let sum = |blocks: &[_]| blocks.iter().map(|&block| charged(allocator, block)).sum::<u64>();
    assert_eq!(used(allocator, held), sum(&blocks));
    let (first, second) = blocks.split_at(5_000);
    first.iter().for_each(|&block| assert_eq!(vramp_free(allocator, block, stream), VRAMP_OK));
    assert_eq!(used(allocator, held), sum(second));
    second.iter().for_each(|&block| assert_eq!(vramp_free(allocator, block, stream), VRAMP_OK));
    assert_eq!((used(allocator, held), total(allocator)), (0, 100 * MIB));
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn a_reservation_that_is_too_small_refuses_and_nothing_changes() {
    let allocator = open_with_tiers(512, 64 * MIB);
    let stream = stream(allocator);
    let held = reserve(allocator, DEVICE, 10 * MIB, 0).unwrap();
    let block = malloc_paid(allocator, held, 6 << 20, stream).unwrap();
    let before = (stats(allocator), space_stats(allocator, DEVICE).unwrap().total);
    for size in [(4 << 20) + 1, 1 << 40, usize::MAX - 511, usize::MAX] {
        let refused = malloc_paid(allocator, held, size, stream);
        assert_eq!(refused, Err(VRAMP_ERROR_OVER_RESERVATION), "{size}: {}", last_error());
    }
    assert_eq!(malloc_paid(allocator, held, (4 << 20) + 1, stream).err().unwrap() as i32, 39);
    let text = last_error();
    assert!(text.contains("6.00 MiB of its 10.00 MiB are used"), "{text}");
    assert!(text.contains("vramp_reservation_grow"), "{text}");
    assert_eq!(used(allocator, held), 6 * MIB);
    assert_eq!((stats(allocator), space_stats(allocator, DEVICE).unwrap().total), before);
    // What the text says to do helps.
    assert_eq!(vramp_reservation_grow(allocator, held, MIB, 0), VRAMP_OK);
    let more = malloc_paid(allocator, held, (4 << 20) + 1, stream).unwrap();
    assert_eq!(vramp_free(allocator, block, stream), VRAMP_OK);
    let again = malloc_paid(allocator, held, 6 << 20, stream).unwrap();
    for block in [more, again] {
        assert_eq!(vramp_free(allocator, block, stream), VRAMP_OK);
    }
    // SAFETY: the result may be null.
    assert_eq!(unsafe { vramp_reservation_shrink(allocator, held, null_mut()) }, VRAMP_OK);
    assert_eq!(malloc_paid(allocator, held, 0, stream), Err(VRAMP_ERROR_OVER_RESERVATION));
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn wrong_reservations_are_refused() {
    let (allocator, other) = (open_with_tiers(256, 64 * MIB), open_with_tiers(256, 64 * MIB));
    let one = stream(allocator);
    let foreign = reserve(other, DEVICE, MIB, 0).unwrap();
    let released = reserve(allocator, DEVICE, MIB, 0).unwrap();
    assert_eq!(vramp_reservation_release(allocator, released), VRAMP_OK);
    for wrong in [NONE, foreign, released, vramp_reservation_t { id: u64::MAX }] {
        let refused = malloc_paid(allocator, wrong, 512, one);
        assert_eq!(refused, Err(VRAMP_ERROR_UNKNOWN_RESERVATION));
    }
    let of_host = reserve(allocator, HOST, MIB, 0).unwrap();
    assert_eq!(malloc_paid(allocator, of_host, 512, one), Err(VRAMP_ERROR_UNKNOWN_SPACE));
    let held = reserve(allocator, DEVICE, MIB, 0).unwrap();
    let no_stream = vramp_stream_t { id: 7 };
    assert_eq!(malloc_paid(allocator, held, 512, no_stream), Err(VRAMP_ERROR_UNKNOWN_STREAM));
    // SAFETY: null is what the function must withstand.
    let status = unsafe { vramp_reservation_malloc(allocator, held, 512, one, null_mut()) };
    assert_eq!(status, VRAMP_ERROR_NULL);
    assert_eq!((used(allocator, held), used(allocator, of_host)), (0, 0));
    assert_eq!(vramp_tiers_close(allocator), VRAMP_OK);
    assert_eq!(malloc_paid(allocator, held, 512, one), Err(VRAMP_ERROR_NO_TIERS));
    for allocator in [allocator, other] {
        assert_eq!(vramp_close(allocator), VRAMP_OK);
        let refused = malloc_paid(allocator, held, 512, one);
        assert_eq!(refused, Err(VRAMP_ERROR_UNKNOWN_ALLOCATOR));
    }
}

#[test]
fn a_card_without_memory_gives_the_charge_back() {
    let allocator = open_with_tiers(256, 64 * MIB);
    let stream = stream(allocator);
    let held = reserve(allocator, DEVICE, 200 * MIB, 0).unwrap();
    // Blocks that nothing pays for take memory from below the reservation.
    let unpaid = malloc(allocator, 200 << 20, stream).unwrap();
    assert_eq!(malloc_paid(allocator, held, 100 << 20, stream), Err(VRAMP_ERROR_OUT_OF_MEMORY));
    assert_eq!(used(allocator, held), 0);
    assert_eq!(vramp_free(allocator, unpaid, stream), VRAMP_OK);
    malloc_paid(allocator, held, 100 << 20, stream).unwrap();
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn a_free_that_is_refused_keeps_the_charge() {
    let allocator = open_with_tiers(256, 64 * MIB);
    let stream = stream(allocator);
    let held = reserve(allocator, DEVICE, MIB, 0).unwrap();
    let block = malloc_paid(allocator, held, 1000, stream).unwrap();
    // A stream that this allocator never made, and one of no allocator.
    for id in [stream.id + 1000, 7] {
        let status = vramp_free(allocator, block, vramp_stream_t { id });
        assert_eq!(status, VRAMP_ERROR_UNKNOWN_STREAM);
        assert_eq!(used(allocator, held), 1024);
    }
    assert_eq!(vramp_free(allocator, block, stream), VRAMP_OK);
    assert_eq!(vramp_free(allocator, block, stream), VRAMP_ERROR_UNKNOWN_POINTER);
    assert_eq!(used(allocator, held), 0);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn a_block_outlives_its_reservation_and_a_waiter_gets_its_bytes() {
    let allocator = open_with_tiers(1024, 64 * MIB);
    let stream = stream(allocator);
    let held = reserve(allocator, DEVICE, 900 * MIB, 0).unwrap();
    let block = malloc_paid(allocator, held, 500 << 20, stream).unwrap();
    assert_eq!(vramp_reservation_release(allocator, held), VRAMP_OK);
    let stats = space_stats(allocator, DEVICE).unwrap();
    assert_eq!((stats.reservations, stats.orphaned, stats.total), (0, 500 * MIB, 500 * MIB));
    assert_eq!(reserve(allocator, DEVICE, 800 * MIB, 0), Err(VRAMP_ERROR_TIMEOUT));
    thread::scope(|scope| {
        let waiter = scope.spawn(move || reserve(allocator, DEVICE, 800 * MIB, VRAMP_FOREVER));
        while space_stats(allocator, DEVICE).unwrap().waiting == 0 {
            vramp_testing::moment();
        }
        assert_eq!(vramp_free(allocator, block, stream), VRAMP_OK);
        let served = waiter.join().unwrap().unwrap();
        assert_eq!(reservation(allocator, served).unwrap().size, 800 * MIB);
    });
    assert_eq!(total(allocator), 800 * MIB);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn blocks_outlive_the_tiers_and_end_with_the_allocator() {
    let allocator = open_with_tiers(256, 64 * MIB);
    let stream = stream(allocator);
    let held = reserve(allocator, DEVICE, 10 * MIB, 0).unwrap();
    let [first, second] =
        [1000, 2000].map(|size| malloc_paid(allocator, held, size, stream).unwrap());
    assert_eq!(vramp_tiers_close(allocator), VRAMP_OK, "{}", last_error());
    assert_eq!(vramp_free(allocator, first, stream), VRAMP_OK);
    // New tiers know nothing of blocks from before.
    assert_eq!(open_tiers(allocator, &options(0, 64 * MIB)), VRAMP_OK);
    assert_eq!(total(allocator), 0);
    assert_eq!(vramp_free(allocator, second, stream), VRAMP_OK);
    assert_eq!((total(allocator), stats(allocator).live), (0, 0));
    let held = reserve(allocator, DEVICE, 10 * MIB, 0).unwrap();
    malloc_paid(allocator, held, 1000, stream).unwrap();
    assert_eq!(vramp_close(allocator), VRAMP_OK, "{}", last_error());
}

#[test]
fn one_reservation_pays_for_leases_on_its_stream_and_for_blocks() {
    let allocator = open_with_tiers(512, 256 * MIB);
    let (one, other) = (stream(allocator), stream(allocator));
    let held = reserve(allocator, DEVICE, 200 * MIB, 0).unwrap();
    assert_eq!(vramp_reservation_attach(allocator, held, one), VRAMP_OK);
    let large = [(buffer(allocator, 128 * MIB).unwrap(), VRAMP_ACCESS_WRITE)];
    let (leased, _) = lease(allocator, &large, one, 0).unwrap();
    assert_eq!(used(allocator, held), 128 * MIB);
    let block = malloc_paid(allocator, held, 64 << 20, other).unwrap();
    assert_eq!(used(allocator, held), 192 * MIB);
    // The lease holds the rest.
    let refused = malloc_paid(allocator, held, 64 << 20, other);
    assert_eq!(refused, Err(VRAMP_ERROR_OVER_RESERVATION));
    assert_eq!(vramp_buffer_lease_end(allocator, leased), VRAMP_OK);
    // The idle buffer gives back what the reservation paid for it.
    let more = malloc_paid(allocator, held, 64 << 20, other).unwrap();
    assert!(used(allocator, held) >= 128 * MIB && used(allocator, held) <= 200 * MIB);
    assert_eq!(vramp_reservation_detach(allocator, held), VRAMP_OK);
    for block in [block, more] {
        assert_eq!(vramp_free(allocator, block, one), VRAMP_OK);
    }
    assert_eq!(vramp_audit(allocator), VRAMP_OK);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn blocks_of_captures_and_regions_are_paid_too() {
    let allocator = open_with_tiers(256, 256 * MIB);
    let stream = stream(allocator);
    let held = reserve(allocator, DEVICE, 100 * MIB, 0).unwrap();
    let arena = testing::create_arena(allocator, "").unwrap();
    assert_eq!(vramp_capture_begin(allocator, stream, arena), VRAMP_OK);
    let inside = malloc_paid(allocator, held, 3 << 20, stream).unwrap();
    let escaped = malloc_paid(allocator, held, 300, stream).unwrap();
    let lengths = [inside, escaped].map(|block| charged(allocator, block));
    assert_eq!(used(allocator, held), lengths[0] + lengths[1]);
    assert_eq!(vramp_free(allocator, inside, stream), VRAMP_OK);
    testing::end_capture(allocator, arena).unwrap();
    assert_eq!(used(allocator, held), lengths[1]);
    assert_eq!(vramp_free(allocator, escaped, stream), VRAMP_OK);

    let scope = begin(allocator, "weights").unwrap();
    let block = malloc_paid(allocator, held, 4 << 20, stream).unwrap();
    assert_eq!(pause(allocator, &["weights"]), VRAMP_OK, "{}", last_error());
    assert_eq!(used(allocator, held), 4 * MIB);
    // A region that sleeps allocates nothing, and the charge is given back.
    assert_eq!(malloc_paid(allocator, held, 4 << 20, stream), Err(VRAMP_ERROR_REGION));
    assert_eq!(used(allocator, held), 4 * MIB);
    assert_eq!(vramp_free(allocator, block, stream), VRAMP_OK);
    assert_eq!(used(allocator, held), 0);
    assert_eq!(resume(allocator, &["weights"]), VRAMP_OK);
    assert_eq!(vramp_region_end(scope), VRAMP_OK);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn threads_share_a_reservation_while_it_moves_and_is_released() {
    let allocator = open_with_tiers(512, 64 * MIB);
    let stream = stream(allocator);
    let held = reserve(allocator, DEVICE, 4 * MIB, 0).unwrap();
    thread::scope(|scope| {
        for nth in 1..5_usize {
            scope.spawn(move || {
                // Each has at most one block, and all of them fit.
                for _ in 0..500 {
                    let block = malloc_paid(allocator, held, nth * 100_000, stream).unwrap();
                    assert_eq!(vramp_free(allocator, block, stream), VRAMP_OK);
                }
            });
        }
        scope.spawn(move || {
            for _ in 0..500 {
                assert_eq!(vramp_reservation_attach(allocator, held, stream), VRAMP_OK);
                assert!(used(allocator, held) <= 4 * MIB);
                assert_eq!(vramp_reservation_detach(allocator, held), VRAMP_OK);
            }
        });
    });
    assert_eq!(used(allocator, held), 0);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(move || {
                loop {
                    match malloc_paid(allocator, held, 1000, stream) {
                        Ok(block) => assert_eq!(vramp_free(allocator, block, stream), VRAMP_OK),
                        Err(status) => break assert_eq!(status, VRAMP_ERROR_UNKNOWN_RESERVATION),
                    }
                }
            });
        }
        assert_eq!(vramp_reservation_release(allocator, held), VRAMP_OK);
    });
    assert_eq!((total(allocator), stats(allocator).live), (0, 0));
    assert_eq!(vramp_audit(allocator), VRAMP_OK);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}
