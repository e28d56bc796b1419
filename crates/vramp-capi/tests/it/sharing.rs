//! Exports, imports, access of other cards, pins and comm pools through the C interface.

use std::ffi::{CStr, c_void};
use std::ptr::{null, null_mut};
use std::time::{Duration, Instant};

use crate::common::*;
use vramp_capi::abi::vramp_handle_type_t::*;
use vramp_capi::abi::vramp_status_t::{self, *};
use vramp_capi::abi::{
    vramp_allocator_t, vramp_export_t, vramp_pin_t, vramp_sharing_t, vramp_ticket_t,
};
use vramp_capi::interface::*;
use vramp_capi::sharing::*;

const MIB: usize = 1 << 20;

fn export(
    allocator: vramp_allocator_t,
    block: *mut c_void,
) -> Result<vramp_export_t, vramp_status_t> {
    let mut exported = vramp_export_t::default();
    // SAFETY: the result outlives the call.
    match unsafe { vramp_export(allocator, block, &mut exported) } {
        VRAMP_OK => Ok(exported),
        status => Err(status),
    }
}

fn ticket(allocator: vramp_allocator_t, exported: vramp_export_t, keep: i32) -> vramp_ticket_t {
    let mut ticket = no_ticket();
    // SAFETY: the result outlives the call.
    let status = unsafe { vramp_export_ticket(allocator, exported, keep, &mut ticket) };
    assert_eq!(status, VRAMP_OK, "{}", last_error());
    ticket
}

fn import(
    allocator: vramp_allocator_t,
    ticket: &vramp_ticket_t,
) -> Result<(*mut c_void, usize), vramp_status_t> {
    let (mut address, mut size) = (std::ptr::dangling_mut(), 0);
    // SAFETY: ticket and results outlive the call.
    match unsafe { vramp_import(allocator, ticket, &mut address, &mut size) } {
        VRAMP_OK => Ok((address, size)),
        status => {
            assert!(address.is_null(), "a failure leaves no address behind");
            Err(status)
        }
    }
}

fn sharing(allocator: vramp_allocator_t) -> vramp_sharing_t {
    let mut state = no_sharing();
    // SAFETY: the struct is as large as it says.
    assert_eq!(unsafe { vramp_sharing(allocator, &mut state) }, VRAMP_OK);
    state
}

fn held(allocator: vramp_allocator_t, exported: vramp_export_t) -> (i32, u64) {
    let (mut held, mut opens) = (0, 0);
    // SAFETY: the results outlive the call.
    let status = unsafe { vramp_export_is_held(allocator, exported, &mut held, &mut opens) };
    assert_eq!(status, VRAMP_OK);
    (held, opens)
}

fn wait(allocator: vramp_allocator_t, exported: vramp_export_t, timeout_ms: u32) -> bool {
    let mut released = 0;
    // SAFETY: the result outlives the call.
    let status = unsafe { vramp_export_wait(allocator, exported, timeout_ms, &mut released) };
    assert_eq!(status, VRAMP_OK);
    released == 1
}

fn pin(
    allocator: vramp_allocator_t,
    block: *mut c_void,
    size: usize,
) -> Result<vramp_pin_t, vramp_status_t> {
    let mut pin = vramp_pin_t::default();
    // SAFETY: the result outlives the call.
    match unsafe { vramp_pin(allocator, block, size, &mut pin) } {
        VRAMP_OK => Ok(pin),
        status => Err(status),
    }
}

/// An export ends at the server, on its own thread.
fn until_nothing_is_exported(allocator: vramp_allocator_t) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while sharing(allocator).exported > 0 {
        assert!(Instant::now() < deadline, "every export ends");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_block_is_exported_opened_and_kept_beyond_its_free() {
    let allocator = open("");
    let stream = stream(allocator);
    let block = malloc(allocator, 64 * MIB, stream).unwrap();
    let exported = export(allocator, block).unwrap();
    assert_eq!(held(allocator, exported), (0, 0));
    let kept = ticket(allocator, exported, 1);
    let lost = ticket(allocator, exported, 1);
    let plain = ticket(allocator, exported, 0);
    assert_eq!(held(allocator, exported), (1, 0), "two tickets keep it");
    let (first, size) = import(allocator, &kept).unwrap();
    let (second, _) = import(allocator, &plain).unwrap();
    assert!(size == 64 * MIB && first == second && first != block, "it is mapped once");
    assert_eq!(held(allocator, exported), (1, 2));
    let mut revoked = 0;
    // SAFETY: ticket and result outlive the calls.
    unsafe {
        assert_eq!(vramp_export_revoke(allocator, exported, &lost, &mut revoked), VRAMP_OK);
        assert_eq!(revoked, 1);
        assert_eq!(vramp_export_revoke(allocator, exported, &lost, &mut revoked), VRAMP_OK);
        assert_eq!(revoked, 0, "it was revoked before");
    }
    assert_eq!(vramp_free(allocator, block, stream), VRAMP_OK);
    assert_eq!(vramp_free(allocator, block, stream), VRAMP_ERROR_UNKNOWN_POINTER);
    assert_eq!(vramp_import_close(allocator, first), VRAMP_OK);
    assert!(!wait(allocator, exported, 1), "one import is open");
    assert_eq!(vramp_trim(allocator, 0), VRAMP_OK);
    assert!(stats(allocator).reserved >= 64 << 20, "the memory is kept");
    assert_eq!(vramp_import_record_use(allocator, second, stream), VRAMP_OK);
    assert_eq!(vramp_import_close(allocator, second), VRAMP_OK);
    assert!(wait(allocator, exported, 20_000));
    assert_eq!(vramp_export_close(allocator, exported), VRAMP_OK);
    until_nothing_is_exported(allocator);
    assert_eq!(vramp_trim(allocator, 0), VRAMP_OK);
    assert_eq!(stats(allocator).reserved, 0);
    assert_eq!(vramp_audit(allocator), VRAMP_OK);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn wrong_ids_tickets_and_addresses_are_errors() {
    let (allocator, other) = (open(""), open(""));
    let stream_here = stream(allocator);
    let block = malloc(allocator, 4 * MIB, stream_here).unwrap();
    let exported = export(allocator, block).unwrap();
    let good = ticket(allocator, exported, 0);
    let inside = block.wrapping_byte_add(512);
    for wrong in [null_mut(), inside, 0x1000 as *mut c_void] {
        assert_eq!(export(allocator, wrong), Err(VRAMP_ERROR_UNKNOWN_POINTER));
        assert_eq!(vramp_import_close(allocator, wrong), VRAMP_ERROR_UNKNOWN_POINTER);
        let record = vramp_import_record_use(allocator, wrong, stream_here);
        assert_eq!(record, VRAMP_ERROR_UNKNOWN_POINTER);
    }
    assert_eq!(export(other, block), Err(VRAMP_ERROR_UNKNOWN_POINTER));
    assert_eq!(vramp_import_close(allocator, block), VRAMP_ERROR_UNKNOWN_POINTER, "no import");
    for (from, id) in [(allocator, 0), (allocator, u64::MAX), (other, exported.id)] {
        let made_up = vramp_export_t { id };
        let mut ticket = no_ticket();
        // SAFETY: the result outlives the calls.
        let statuses = unsafe {
            [
                vramp_export_ticket(from, made_up, 1, &mut ticket),
                vramp_export_is_held(from, made_up, null_mut(), null_mut()),
                vramp_export_wait(from, made_up, 0, null_mut()),
                vramp_export_revoke(from, made_up, &good, null_mut()),
                vramp_export_close(from, made_up),
            ]
        };
        assert_eq!(statuses, [VRAMP_ERROR_UNKNOWN_EXPORT; 5], "{id}");
        assert_eq!(vramp_unpin(from, vramp_pin_t { id }), VRAMP_ERROR_UNKNOWN_PIN);
    }
    assert_eq!(import(allocator, &no_ticket()), Err(VRAMP_ERROR_TICKET));
    let mut damaged = good;
    damaged.length = 253;
    assert_eq!(import(allocator, &damaged), Err(VRAMP_ERROR_TICKET));
    damaged.length = u32::MAX;
    assert_eq!(import(allocator, &damaged), Err(VRAMP_ERROR_TICKET));
    assert!(last_error().contains("damaged on its way"), "{}", last_error());
    // Whatever byte is wrong: an error, or the same memory where the byte does not matter.
    let mut refusals = 0;
    for at in 0..good.length as usize {
        let mut damaged = good;
        damaged.bytes[at] ^= 0x10;
        match import(allocator, &damaged) {
            Ok((address, size)) => {
                assert_eq!(size, 4 * MIB);
                assert_eq!(vramp_import_close(allocator, address), VRAMP_OK);
            }
            Err(status) => {
                refusals += 1;
                let known = [VRAMP_ERROR_TICKET, VRAMP_ERROR_EXPORT_ENDED, VRAMP_ERROR_EXCHANGE];
                assert!(known.contains(&status), "byte {at}: {status:?}");
            }
        }
    }
    assert!(refusals >= 32, "address and secret alone have 32 bytes: {refusals}");
    assert_eq!(sharing(allocator).imports, 0);
    assert_eq!(pin(allocator, 0x1000 as *mut c_void, 1), Err(VRAMP_ERROR_UNKNOWN_POINTER));
    assert_eq!(pin(allocator, block, usize::MAX), Err(VRAMP_ERROR_UNKNOWN_POINTER));
    let (mut number, mut offset, mut made) = (-1, 0, vramp_pin_t::default());
    // SAFETY: the results outlive the call.
    let empty =
        unsafe { vramp_export_dma_buf(allocator, block, 0, &mut number, &mut offset, &mut made) };
    assert_eq!((empty, number, made.id), (VRAMP_ERROR_RANGE, -1, 0));
    for open in [allocator, other] {
        assert_eq!(vramp_close(open), VRAMP_OK);
    }
}

/// Exports, imports, pins and comm pools may be open at the close, and end after it in any order.
#[test]
fn a_close_ends_what_is_shared_in_any_order() {
    for order in 0..3 {
        let allocator = open("");
        let stream_here = stream(allocator);
        let block = malloc(allocator, 8 * MIB, stream_here).unwrap();
        let exported = export(allocator, block).unwrap();
        let kept = ticket(allocator, exported, 1);
        let (imported, _) = import(allocator, &ticket(allocator, exported, 0)).unwrap();
        assert_eq!(vramp_import_record_use(allocator, imported, stream_here), VRAMP_OK);
        let pinned = pin(allocator, block, MIB).unwrap();
        let mut pool = vramp_allocator_t::default();
        // SAFETY: the result outlives the call.
        assert_eq!(unsafe { vramp_comm_pool(allocator, null(), &mut pool) }, VRAMP_OK);
        let in_pool = malloc(pool, 4 * MIB, stream_here).unwrap();
        let of_pool = export(pool, in_pool).unwrap();
        if order == 1 {
            assert_eq!(vramp_close(pool), VRAMP_OK);
        }
        assert_eq!(vramp_close(allocator), VRAMP_OK);
        assert_eq!(vramp_export_close(allocator, exported), VRAMP_ERROR_UNKNOWN_ALLOCATOR);
        assert_eq!(vramp_import_close(allocator, imported), VRAMP_ERROR_UNKNOWN_ALLOCATOR);
        assert_eq!(vramp_unpin(allocator, pinned), VRAMP_ERROR_UNKNOWN_ALLOCATOR);
        let next = open("");
        assert_eq!(import(next, &kept), Err(VRAMP_ERROR_EXPORT_ENDED));
        assert!(last_error().contains("withdrew the export"), "{}", last_error());
        if order == 2 {
            // The pool outlives the allocator that it was made from.
            assert_eq!(vramp_free(pool, in_pool, stream_here), VRAMP_OK);
            assert_eq!(vramp_export_close(pool, of_pool), VRAMP_OK);
            assert_eq!(vramp_audit(pool), VRAMP_OK);
        }
        if order != 1 {
            assert_eq!(vramp_close(pool), VRAMP_OK);
        }
        assert_eq!(vramp_close(next), VRAMP_OK);
    }
}

/// If the wait kept the allocator open, the close would wait for an hour.
#[test]
fn a_wait_does_not_hold_up_a_close() {
    let allocator = open("");
    let stream = stream(allocator);
    let block = malloc(allocator, 4 * MIB, stream).unwrap();
    let exported = export(allocator, block).unwrap();
    let _keeps = ticket(allocator, exported, 1);
    let waiting = std::thread::spawn(move || {
        let mut released = 0;
        // SAFETY: the result outlives the call.
        let status = unsafe { vramp_export_wait(allocator, exported, 3_600_000, &mut released) };
        (status, released)
    });
    assert_eq!(vramp_close(allocator), VRAMP_OK);
    // The close ends the ticket, and so the wait.
    let ended = waiting.join().unwrap();
    let began_too_late = ended.0 == VRAMP_ERROR_UNKNOWN_ALLOCATOR;
    assert!(ended == (VRAMP_OK, 1) || began_too_late, "{ended:?}");
}

#[test]
fn pinned_memory_stays_until_it_is_unpinned() {
    let allocator = open("");
    let stream = stream(allocator);
    let block = malloc(allocator, 32 * MIB, stream).unwrap();
    let pins = [pin(allocator, block, 32 * MIB).unwrap(), pin(allocator, block, 1).unwrap()];
    assert_eq!(vramp_free(allocator, block, stream), VRAMP_OK);
    assert_eq!(vramp_trim(allocator, 0), VRAMP_OK);
    let state = sharing(allocator);
    assert!(state.pinned >= 1 && state.pinned_bytes >= 32 << 20);
    assert!(stats(allocator).reserved >= 32 << 20);
    for pin in pins {
        assert_eq!(vramp_unpin(allocator, pin), VRAMP_OK);
    }
    assert_eq!(vramp_trim(allocator, 0), VRAMP_OK);
    assert_eq!((stats(allocator).reserved, sharing(allocator).pinned), (0, 0));
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn cards_of_a_machine_are_granted_access_and_it_costs_what_it_says() {
    let allocator = open_on("sim:h200x4:1", "").unwrap();
    let stream = stream(allocator);
    let block = malloc(allocator, 64 * MIB, stream).unwrap();
    let (mut calls, mut bytes) = (7, 7);
    // SAFETY: the results outlive the calls.
    unsafe {
        assert_eq!(vramp_grant_access(allocator, 3, &mut calls, &mut bytes), VRAMP_OK);
        assert!(calls == 1 && bytes >= 64 << 20, "{calls} {bytes}");
        assert_eq!(vramp_grant_access(allocator, 3, &mut calls, &mut bytes), VRAMP_OK);
        assert_eq!((calls, bytes), (0, 0), "it has access");
        assert_eq!(vramp_grant_access(allocator, 0, null_mut(), null_mut()), VRAMP_OK);
        assert_eq!(sharing(allocator).peers, 0b1001);
        assert_eq!(vramp_grant_access(allocator, 1, &mut calls, &mut bytes), VRAMP_ERROR_RANGE);
        assert_eq!(vramp_revoke_access(allocator, 3, &mut calls, &mut bytes), VRAMP_OK);
        assert_eq!((calls, sharing(allocator).peers), (1, 1));
    }
    assert_eq!(vramp_free(allocator, block, stream), VRAMP_OK);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
    let excluded = open_on("sim:h200x2:0", "peers=none").unwrap();
    // SAFETY: null is allowed.
    let refused = unsafe { vramp_grant_access(excluded, 1, null_mut(), null_mut()) };
    assert_eq!(refused, VRAMP_ERROR_UNSUPPORTED, "{}", last_error());
    assert_eq!(vramp_close(excluded), VRAMP_OK);
}

#[test]
fn the_state_says_what_is_possible_and_why_not() {
    let fallback = |state: &vramp_sharing_t| {
        // SAFETY: it ends with a zero.
        unsafe { CStr::from_ptr(state.fallback.as_ptr()) }.to_str().unwrap().to_owned()
    };
    for (options, handle_type, rdma, why) in [
        ("", VRAMP_HANDLE_POSIX_FD, 0, ""),
        ("sharing=none", VRAMP_HANDLE_NONE, 0, ""),
        ("rdma=on", VRAMP_HANDLE_POSIX_FD, 1, ""),
        ("sharing=fabric", VRAMP_HANDLE_POSIX_FD, 0, "NOT_PERMITTED"),
    ] {
        let allocator = open(options);
        let state = sharing(allocator);
        assert_eq!((state.handle_type, state.rdma), (handle_type, rdma), "{options}");
        assert!(fallback(&state).contains(why), "{options}: {}", fallback(&state));
        assert_eq!(why.is_empty(), fallback(&state).is_empty());
        if options == "sharing=none" {
            let stream = stream(allocator);
            let block = malloc(allocator, 4 * MIB, stream).unwrap();
            assert_eq!(export(allocator, block), Err(VRAMP_ERROR_UNSUPPORTED));
            assert!(last_error().contains("posix-fd"), "{}", last_error());
        }
        assert_eq!(vramp_close(allocator), VRAMP_OK);
    }
}

#[test]
fn a_comm_pool_has_the_streams_and_the_limit_of_its_allocator() {
    let allocator = open("limit=256MiB");
    let created = stream(allocator);
    let mut pool = vramp_allocator_t::default();
    // SAFETY: text and result outlive the call.
    assert_eq!(unsafe { vramp_comm_pool(allocator, c"nccl".as_ptr(), &mut pool) }, VRAMP_OK);
    let adopted = adopt(pool, 0x70).unwrap();
    assert_eq!(adopt(allocator, 0x70), Ok(adopted), "one stream in both");
    let block = malloc(pool, 100 * MIB, created).unwrap();
    assert_eq!(malloc(allocator, 200 * MIB, created), Err(VRAMP_ERROR_OUT_OF_MEMORY));
    assert_eq!(vramp_free(allocator, block, created), VRAMP_ERROR_UNKNOWN_POINTER);
    assert_eq!(vramp_record_use(pool, block, adopted), VRAMP_OK);
    assert_eq!(vramp_stream_forget(allocator, adopted), VRAMP_OK);
    assert_eq!(malloc(pool, MIB, adopted), Err(VRAMP_ERROR_UNKNOWN_STREAM), "forgotten in both");
    let again = adopt(pool, 0x70).unwrap();
    assert_ne!(again, adopted);
    assert_eq!(vramp_free(pool, block, created), VRAMP_OK);
    assert_eq!(vramp_close(pool), VRAMP_OK);
    assert_eq!(malloc(allocator, MIB, again).map(|_| ()), Ok(()), "the streams go on");
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn threads_export_and_import_the_same_block() {
    let allocator = open("");
    let stream = stream(allocator);
    let block = malloc(allocator, 4 * MIB, stream).unwrap() as usize;
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..50 {
                    let exported = export(allocator, block as *mut c_void).unwrap();
                    let kept = ticket(allocator, exported, 1);
                    let (address, _) = import(allocator, &kept).unwrap();
                    assert_eq!(vramp_export_close(allocator, exported), VRAMP_OK);
                    assert_eq!(vramp_import_close(allocator, address), VRAMP_OK);
                }
            });
        }
    });
    until_nothing_is_exported(allocator);
    assert_eq!((sharing(allocator).imports, sharing(allocator).pinned), (0, 0));
    assert_eq!(vramp_free(allocator, block as *mut c_void, stream), VRAMP_OK);
    assert_eq!(vramp_audit(allocator), VRAMP_OK);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}
