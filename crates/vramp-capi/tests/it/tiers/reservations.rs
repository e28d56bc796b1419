//! Spaces and reservations.

use std::ptr::{null, null_mut};
use std::thread;

use crate::common::tiers::*;
use crate::common::*;
use vramp_capi::abi::vramp_status_t::*;
use vramp_capi::interface::vramp_close;
use vramp_capi::tiers::abi::*;
use vramp_capi::tiers::leases::vramp_buffer_lease_end;
use vramp_capi::tiers::reservations::*;
use vramp_capi::tiers::spaces::*;
use vramp_capi::tiers::*;

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
