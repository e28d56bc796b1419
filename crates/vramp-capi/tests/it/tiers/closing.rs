//! The end of tiers and of their allocator, with objects of every kind alive.

use std::thread;

use crate::common::*;
use vramp_capi::abi::vramp_status_t::*;
use vramp_capi::graphs::*;
use vramp_capi::interface::*;
use vramp_capi::tiers::abi::*;
use vramp_capi::tiers::buffers::*;
use vramp_capi::tiers::leases::*;
use vramp_capi::tiers::reservations::*;
use vramp_capi::tiers::*;

const WRITE: u32 = VRAMP_ACCESS_WRITE;

#[test]
fn closing_the_allocator_ends_buffers_leases_and_reservations() {
    for closes_tiers_first in [false, true] {
        let allocator = open_with_tiers(256, 256 * MIB);
        let stream = stream(allocator);
        let block = malloc(allocator, 1000, stream).unwrap();
        let buffers: Vec<_> = (0..3).map(|_| buffer(allocator, 100 * MIB).unwrap()).collect();
        for &buffer in &buffers {
            write(allocator, buffer, &[1; 100]).unwrap();
        }
        let (held, _) = lease(allocator, &[(buffers[0], WRITE)], stream, 0).unwrap();
        let budget = reserve(allocator, HOST, MIB, 0).unwrap();
        if closes_tiers_first {
            assert_eq!(vramp_tiers_close(allocator), VRAMP_OK);
            assert_eq!(vramp_tiers_close(allocator), VRAMP_ERROR_NO_TIERS);
            assert_eq!(info(allocator, buffers[0]), Err(VRAMP_ERROR_NO_TIERS));
            // The allocator and its blocks are as before.
            assert_eq!(vramp_free(allocator, block, stream), VRAMP_OK);
            assert_eq!(vramp_audit(allocator), VRAMP_OK);
            assert_eq!(stats(allocator).live, 0);
            // Objects of the tiers that were closed are unknown to new ones.
            assert_eq!(open_tiers(allocator, &options(0, 64 * MIB)), VRAMP_OK);
            assert_eq!(info(allocator, buffers[0]), Err(VRAMP_ERROR_UNKNOWN_BUFFER));
            assert_eq!(vramp_buffer_lease_end(allocator, held), VRAMP_ERROR_UNKNOWN_LEASE);
            let status = vramp_reservation_release(allocator, budget);
            assert_eq!(status, VRAMP_ERROR_UNKNOWN_RESERVATION);
        }
        assert_eq!(vramp_close(allocator), VRAMP_OK, "{}", last_error());
        assert_eq!(info(allocator, buffers[0]), Err(VRAMP_ERROR_UNKNOWN_ALLOCATOR));
    }
}

#[test]
fn a_capture_refuses_the_end_and_nothing_changes() {
    let allocator = open_with_tiers(256, 256 * MIB);
    let stream = stream(allocator);
    let kept = buffer(allocator, MIB).unwrap();
    write(allocator, kept, &[3; 100]).unwrap();
    let mut arena = vramp_capi::abi::vramp_arena_t::default();
    let mut graph = vramp_capi::abi::vramp_graph_t::default();
    // SAFETY: the results outlive the calls.
    unsafe {
        assert_eq!(vramp_arena_create(allocator, std::ptr::null(), &mut arena), VRAMP_OK);
    }
    assert_eq!(vramp_capture_begin(allocator, stream, arena), VRAMP_OK);
    assert_eq!(vramp_tiers_close(allocator), VRAMP_ERROR_CAPTURE);
    assert_eq!(vramp_close(allocator), VRAMP_ERROR_CAPTURE);
    assert_eq!(lease(allocator, &[(kept, WRITE)], stream, 0), Err(VRAMP_ERROR_CAPTURE));
    // SAFETY: as above.
    assert_eq!(unsafe { vramp_capture_end(allocator, arena, &mut graph) }, VRAMP_OK);
    assert_eq!(read(allocator, kept, 100).unwrap(), [3; 100]);
    // Waits are possible again.
    let all = reserve(allocator, DEVICE, 200 * MIB, 0).unwrap();
    assert_eq!(reserve(allocator, DEVICE, 200 * MIB, 1_000), Err(VRAMP_ERROR_TIMEOUT));
    assert_eq!(vramp_reservation_release(allocator, all), VRAMP_OK);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn threads_use_buffers_while_the_allocator_is_closed() {
    for _ in 0..5 {
        let allocator = open_with_tiers(128, 256 * MIB);
        let buffers: Vec<_> = (0..6).map(|_| buffer(allocator, 8 * MIB).unwrap()).collect();
        thread::scope(|scope| {
            for nth in 0..4_usize {
                let buffers = &buffers;
                scope.spawn(move || {
                    let over = [VRAMP_ERROR_UNKNOWN_ALLOCATOR, VRAMP_ERROR_CANCELLED];
                    let mut done = 0;
                    loop {
                        let stream = stream_or_end(allocator);
                        let Some(stream) = stream else { break done };
                        let pair = [(buffers[nth], WRITE), (buffers[nth + 2], WRITE)];
                        match lease(allocator, &pair, stream, VRAMP_FOREVER) {
                            Ok((held, _)) => {
                                // A close ends it first.
                                let ended = vramp_buffer_lease_end(allocator, held);
                                let gone =
                                    [VRAMP_ERROR_UNKNOWN_LEASE, VRAMP_ERROR_UNKNOWN_ALLOCATOR];
                                assert!(ended == VRAMP_OK || gone.contains(&ended), "{ended:?}");
                            }
                            Err(status) if over.contains(&status) => break done,
                            Err(status) => panic!("{status:?}: {}", last_error()),
                        }
                        vramp_stream_forget(allocator, stream);
                        done += 1;
                    }
                });
            }
            while stats(allocator).live_peak == 0
                && space_stats(allocator, DEVICE).unwrap().peak == 0
            {
                thread::yield_now();
            }
            assert_eq!(vramp_close(allocator), VRAMP_OK);
        });
    }
}

fn stream_or_end(
    allocator: vramp_capi::abi::vramp_allocator_t,
) -> Option<vramp_capi::abi::vramp_stream_t> {
    let mut made = vramp_capi::abi::vramp_stream_t::default();
    // SAFETY: the result outlives the call.
    let status = unsafe { vramp_stream_create(allocator, &mut made) };
    (status == VRAMP_OK).then_some(made)
}

#[test]
fn buffers_of_two_allocators_are_strangers_to_each_other() {
    let (one, other) = (open_with_tiers(256, 64 * MIB), open_with_tiers(256, 64 * MIB));
    let (mine, theirs) = (buffer(one, MIB).unwrap(), buffer(other, MIB).unwrap());
    let stream = stream(one);
    let mixed = lease(one, &[(mine, WRITE), (theirs, WRITE)], stream, 0);
    assert_eq!(mixed, Err(VRAMP_ERROR_UNKNOWN_BUFFER));
    assert_eq!(vramp_buffer_destroy(one, theirs), VRAMP_ERROR_UNKNOWN_BUFFER);
    assert_eq!(vramp_close(one), VRAMP_OK);
    assert_eq!(vramp_buffer_destroy(other, theirs), VRAMP_OK);
    assert_eq!(vramp_close(other), VRAMP_OK);
}

#[test]
fn a_close_ends_a_lease_that_another_thread_waits_for() {
    for closes_allocator in [false, true] {
        let allocator = open_with_tiers(64, 64 * MIB);
        let stream = stream(allocator);
        let one = buffer(allocator, MIB).unwrap();
        lease(allocator, &[(one, WRITE)], stream, 0).unwrap();
        thread::scope(|scope| {
            let waiter = scope.spawn(move || {
                // Without the addresses, which do not go to another thread.
                lease(allocator, &[(one, WRITE)], stream, VRAMP_FOREVER).map(|_| ())
            });
            while tiers_stats(allocator).waiting == 0 {
                thread::yield_now();
            }
            if !closes_allocator {
                assert_eq!(vramp_tiers_close(allocator), VRAMP_OK);
            }
            assert_eq!(vramp_close(allocator), VRAMP_OK);
            assert_eq!(waiter.join().unwrap(), Err(VRAMP_ERROR_CANCELLED));
        });
    }
}

/// Closes an allocator, or its tiers first, while a lease of another thread waits for ever.
fn close_beside_a_waiting_lease(
    allocator: vramp_capi::abi::vramp_allocator_t,
    wanted: vramp_buffer_t,
    closes_allocator: bool,
) {
    let stream = stream(allocator);
    thread::scope(|scope| {
        let waiter = scope
            .spawn(move || lease(allocator, &[(wanted, WRITE)], stream, VRAMP_FOREVER).map(|_| ()));
        let waits =
            || tiers_stats(allocator).waiting + space_stats(allocator, DEVICE).unwrap().waiting;
        while waits() == 0 {
            thread::yield_now();
        }
        if !closes_allocator {
            assert_eq!(vramp_tiers_close(allocator), VRAMP_OK);
        }
        assert_eq!(vramp_close(allocator), VRAMP_OK);
        assert_eq!(waiter.join().unwrap(), Err(VRAMP_ERROR_CANCELLED));
    });
}

#[test]
fn a_close_ends_a_lease_that_waits_for_memory_that_is_reserved() {
    for closes_allocator in [false, true] {
        let allocator = open_with_tiers(64, 64 * MIB);
        let wanted = buffer(allocator, 16 * MIB).unwrap();
        reserve(allocator, DEVICE, 56 * MIB, 0).unwrap();
        close_beside_a_waiting_lease(allocator, wanted, closes_allocator);
    }
}

#[test]
fn a_lease_for_which_nothing_can_leave_is_refused_and_does_not_wait() {
    let allocator = open_with_tiers(64, 4 * MIB);
    let (kept, wanted) =
        (buffer(allocator, 40 * MIB).unwrap(), buffer(allocator, 40 * MIB).unwrap());
    write(allocator, kept, &[1; 100]).unwrap();
    let stream = stream(allocator);
    let refused = lease(allocator, &[(wanted, WRITE)], stream, VRAMP_FOREVER).map(|_| ());
    assert_eq!(refused, Err(VRAMP_ERROR_OUT_OF_MEMORY));
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn a_close_that_is_refused_lets_later_leases_wait() {
    let allocator = open_with_tiers(64, 64 * MIB);
    let stream = stream(allocator);
    let one = buffer(allocator, MIB).unwrap();
    let (held, _) = lease(allocator, &[(one, WRITE)], stream, 0).unwrap();
    let mut arena = vramp_capi::abi::vramp_arena_t::default();
    let mut graph = vramp_capi::abi::vramp_graph_t::default();
    let capturing = crate::common::stream(allocator);
    // SAFETY: the results outlive the calls.
    unsafe {
        assert_eq!(vramp_arena_create(allocator, std::ptr::null(), &mut arena), VRAMP_OK);
    }
    assert_eq!(vramp_capture_begin(allocator, capturing, arena), VRAMP_OK);
    assert_eq!(vramp_close(allocator), VRAMP_ERROR_CAPTURE);
    assert_eq!(vramp_tiers_close(allocator), VRAMP_ERROR_CAPTURE);
    // SAFETY: as above.
    assert_eq!(unsafe { vramp_capture_end(allocator, arena, &mut graph) }, VRAMP_OK);
    thread::scope(|scope| {
        let waiter = scope.spawn(move || {
            lease(allocator, &[(one, WRITE)], stream, VRAMP_FOREVER).map(|(held, _)| held)
        });
        while tiers_stats(allocator).waiting == 0 {
            thread::yield_now();
        }
        assert_eq!(vramp_buffer_lease_end(allocator, held), VRAMP_OK, "the close ended nothing");
        let served = waiter.join().unwrap().unwrap();
        assert_eq!(vramp_buffer_lease_end(allocator, served), VRAMP_OK);
    });
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}
