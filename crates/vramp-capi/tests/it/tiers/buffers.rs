//! Buffers and leases.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::thread;

use crate::common::sleep::{begin, pause, resume};
use crate::common::tiers::*;
use crate::common::*;
use vramp_capi::abi::vramp_status_t::*;
use vramp_capi::abi::vramp_stream_t;
use vramp_capi::interface::*;
use vramp_capi::sleep::vramp_region_end;
use vramp_capi::tiers::abi::vramp_buffer_state_t::*;
use vramp_capi::tiers::abi::*;
use vramp_capi::tiers::buffers::*;
use vramp_capi::tiers::leases::*;

const READ: u32 = VRAMP_ACCESS_READ;
const WRITE: u32 = VRAMP_ACCESS_WRITE;

#[test]
fn contents_leave_the_card_and_come_back_at_the_same_address() {
    let allocator = open_with_tiers(64, 128 * MIB);
    let stream = stream(allocator);
    let buffers: Vec<_> = (0..4).map(|_| buffer(allocator, 24 * MIB).unwrap()).collect();
    let fresh = info(allocator, buffers[0]).unwrap();
    assert_eq!((fresh.state, fresh.size, fresh.device_bytes), (VRAMP_BUFFER_EMPTY, 24 * MIB, 0));
    for (nth, &buffer) in buffers.iter().enumerate() {
        write(allocator, buffer, &vec![nth as u8 + 1; 24 * MIB as usize]).unwrap();
    }
    let first = info(allocator, buffers[0]).unwrap();
    assert_eq!((first.state, first.address), (VRAMP_BUFFER_DEFERRED, fresh.address));
    assert_eq!((first.device_bytes, first.host_bytes), (0, 24 * MIB));
    let last = info(allocator, buffers[3]).unwrap();
    assert_eq!((last.state, last.device_bytes), (VRAMP_BUFFER_RESIDENT, 24 * MIB));

    let uses = [(buffers[0], READ), (buffers[1], WRITE)];
    let (held, addresses) = lease(allocator, &uses, stream, 0).unwrap();
    assert_eq!(addresses[0], fresh.address);
    assert_eq!(addresses[1], info(allocator, buffers[1]).unwrap().address);
    // Nothing of it may leave, and no other lease may write it.
    let exclusive = lease(allocator, &[(buffers[0], WRITE)], stream, 0);
    assert_eq!(exclusive, Err(VRAMP_ERROR_TIMEOUT));
    let (shared, _) = lease(allocator, &[(buffers[0], READ)], stream, 0).unwrap();
    assert_eq!(vramp_buffer_discard(allocator, buffers[0]), VRAMP_ERROR_BUSY);
    assert_eq!(vramp_buffer_lease_cancel(allocator, shared), VRAMP_OK);
    assert_eq!(vramp_buffer_lease_wrote(allocator, held, 1, 0, MIB), VRAMP_OK);
    assert_eq!(vramp_buffer_lease_end(allocator, held), VRAMP_OK);
    for (nth, &buffer) in buffers.iter().enumerate() {
        let back = read(allocator, buffer, 24 * MIB as usize).unwrap();
        assert!(vramp_testing::is_filled(&back, nth as u8 + 1), "buffer {nth}");
    }
    assert_eq!(vramp_audit(allocator), VRAMP_OK);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn contents_that_a_lease_overwrites_are_not_copied_back() {
    let allocator = open_with_tiers(64, 64 * MIB);
    let stream = stream(allocator);
    let one = buffer(allocator, 16 * MIB).unwrap();
    write(allocator, one, &vec![5; 16 * MIB as usize]).unwrap();
    assert_eq!(evict(allocator, 16 * MIB), 16 * MIB);
    // A lease that is cancelled leaves the contents as they were.
    let overwrites = [(one, VRAMP_ACCESS_OVERWRITE)];
    let (held, _) = lease(allocator, &overwrites, stream, 0).unwrap();
    assert_eq!(lease(allocator, &[(one, READ)], stream, 0), Err(VRAMP_ERROR_TIMEOUT));
    assert_eq!(vramp_buffer_lease_cancel(allocator, held), VRAMP_OK);
    assert_eq!(read(allocator, one, 16 * MIB as usize).unwrap(), vec![5; 16 * MIB as usize]);
    assert_eq!(info(allocator, one).unwrap().state, VRAMP_BUFFER_DEFERRED);

    let (held, addresses) = lease(allocator, &overwrites, stream, 0).unwrap();
    // SAFETY: the card is simulated, with memory of the host at its addresses, and the lease is held.
    unsafe { std::slice::from_raw_parts_mut(addresses[0].cast::<u8>(), 16 * MIB as usize) }.fill(9);
    assert_eq!(vramp_buffer_lease_end(allocator, held), VRAMP_OK);
    assert_eq!(tiers_stats(allocator).from_host, 0);
    let state = info(allocator, one).unwrap();
    assert_eq!((state.device_bytes, state.host_bytes), (16 * MIB, 0), "the copies are stale");
    assert_eq!(evict(allocator, 16 * MIB), 16 * MIB);
    let (held, _) = lease(allocator, &[(one, READ)], stream, 0).unwrap();
    assert_eq!(vramp_buffer_lease_end(allocator, held), VRAMP_OK);
    assert_eq!(tiers_stats(allocator).from_host, 16 * MIB);
    assert_eq!(read(allocator, one, 16 * MIB as usize).unwrap(), vec![9; 16 * MIB as usize]);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn evictions_prefetches_and_hints_move_buffers() {
    let allocator = open_with_tiers(64, 64 * MIB);
    let (low, high) = (buffer(allocator, 16 * MIB).unwrap(), buffer(allocator, 16 * MIB).unwrap());
    assert_eq!(vramp_buffer_set_priority(allocator, high, 7), VRAMP_OK);
    for one in [low, high] {
        write(allocator, one, &vec![5; 16 * MIB as usize]).unwrap();
    }
    assert_eq!(evict(allocator, 16 * MIB), 16 * MIB);
    let states = |of| info(allocator, of).unwrap();
    assert_eq!((states(low).host_bytes, states(low).device_bytes), (16 * MIB, 0));
    assert_eq!((states(high).host_bytes, states(high).device_bytes), (0, 16 * MIB));
    assert_eq!(vramp_buffer_prefetch(allocator, low), VRAMP_OK);
    assert_eq!((states(low).state, states(low).device_bytes), (VRAMP_BUFFER_RESIDENT, 16 * MIB));
    assert_eq!(vramp_buffer_set_priority(allocator, high, 0), VRAMP_OK);
    assert_eq!(vramp_buffer_hint(allocator, low, VRAMP_HINT_WILL_NEED), VRAMP_OK);
    assert_eq!(vramp_buffer_hint(allocator, high, VRAMP_HINT_WONT_NEED), VRAMP_OK);
    assert_eq!(evict(allocator, 16 * MIB), 16 * MIB);
    assert_eq!(
        (states(low).state, states(high).state),
        (VRAMP_BUFFER_RESIDENT, VRAMP_BUFFER_DEFERRED)
    );
    assert_eq!(vramp_buffer_discard(allocator, high), VRAMP_OK);
    assert_eq!(states(high).state, VRAMP_BUFFER_EMPTY);
    assert_eq!(evict(allocator, 1 << 40), 16 * MIB, "no more than there is");
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn one_buffer_is_spilled_by_its_handle_and_to_a_tier() {
    let allocator = open_mapped(64);
    let folder = tempfile::tempdir().unwrap();
    let path = std::ffi::CString::new(folder.path().to_str().unwrap()).unwrap();
    let below = vramp_tiers_options_t {
        disk_directory: path.as_ptr(),
        disk_bytes: 64 * MIB,
        ..options(0, 256 * MIB)
    };
    assert_eq!(open_tiers(allocator, &below), VRAMP_OK, "{}", last_error());
    let stream = stream(allocator);
    let one = buffer(allocator, 8 * MIB).unwrap();
    write(allocator, one, &vec![3; 8 * MIB as usize]).unwrap();
    let (held, _) = lease(allocator, &[(one, READ)], stream, 0).unwrap();
    assert_eq!(info(allocator, one).unwrap().last_stream, stream);
    let mut freed = 0;
    // SAFETY: the results outlive the calls.
    unsafe {
        assert_eq!(vramp_buffer_spill(allocator, one, &mut freed), VRAMP_ERROR_BUSY);
        assert_eq!(vramp_buffer_lease_end(allocator, held), VRAMP_OK);
        assert_eq!(vramp_buffer_spill(allocator, one, &mut freed), VRAMP_OK, "{}", last_error());
        assert_eq!(freed, 8 * MIB);
        let state = info(allocator, one).unwrap();
        assert_eq!((state.host_bytes, state.disk_bytes, state.moving_bytes), (8 * MIB, 0, 0));
        let disk = VRAMP_TIER_DISK;
        assert_eq!(vramp_buffer_spill_to(allocator, one, disk, &mut freed), VRAMP_OK);
        assert_eq!(freed, 0, "it had left the card");
        let state = info(allocator, one).unwrap();
        assert_eq!((state.host_bytes, state.disk_bytes), (0, 8 * MIB));
    }
    let back = read(allocator, one, 8 * MIB as usize).unwrap();
    assert!(vramp_testing::is_filled(&back, 3));
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn a_malloc_that_finds_too_little_memory_evicts_buffers() {
    let allocator = open_with_tiers(64, 64 * MIB);
    let stream = stream(allocator);
    let spilled = buffer(allocator, 40 * MIB).unwrap();
    write(allocator, spilled, &vec![9; 40 * MIB as usize]).unwrap();
    let block = malloc(allocator, 36 * MIB as usize, stream).unwrap();
    assert_eq!(info(allocator, spilled).unwrap().state, VRAMP_BUFFER_DEFERRED);
    assert_eq!(vramp_free(allocator, block, stream), VRAMP_OK);
    let back = read(allocator, spilled, 40 * MIB as usize).unwrap();
    assert!(vramp_testing::is_filled(&back, 9));
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn a_set_that_never_fits_fails_at_once_and_a_held_one_until_it_ends() {
    let allocator = open_with_tiers(256, 512 * MIB);
    let stream = stream(allocator);
    let all: Vec<_> = (0..3).map(|_| (buffer(allocator, 100 * MIB).unwrap(), WRITE)).collect();
    let never = lease(allocator, &all, stream, VRAMP_FOREVER);
    assert_eq!(never, Err(VRAMP_ERROR_OUT_OF_MEMORY), "{}", last_error());
    let (held, _) = lease(allocator, &all[..2], stream, 0).unwrap();
    assert_eq!(lease(allocator, &all[2..], stream, 0), Err(VRAMP_ERROR_TIMEOUT));
    thread::scope(|scope| {
        // A stream is a number, and a lease may be ended by any thread.
        let waiter = scope.spawn(move || lease_number(allocator.id, all[2].0.id, stream));
        assert_eq!(vramp_buffer_lease_end(allocator, held), VRAMP_OK);
        let served = vramp_buffer_lease_t { id: waiter.join().unwrap() };
        assert_eq!(vramp_buffer_lease_end(allocator, served), VRAMP_OK);
        assert_eq!(vramp_buffer_lease_end(allocator, served), VRAMP_ERROR_UNKNOWN_LEASE);
    });
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

fn lease_number(allocator: u64, buffer: u64, stream: vramp_stream_t) -> u64 {
    let allocator = vramp_capi::abi::vramp_allocator_t { id: allocator };
    let uses = [(vramp_buffer_t { id: buffer }, WRITE)];
    lease(allocator, &uses, stream, VRAMP_FOREVER).unwrap().0.id
}

#[test]
fn a_destroyed_buffer_lives_until_its_lease_ends() {
    let allocator = open_with_tiers(256, 512 * MIB);
    let stream = stream(allocator);
    let gone = buffer(allocator, 200 * MIB).unwrap();
    let (held, addresses) = lease(allocator, &[(gone, WRITE)], stream, 0).unwrap();
    assert_eq!(vramp_buffer_destroy(allocator, gone), VRAMP_OK);
    assert_eq!(vramp_buffer_destroy(allocator, gone), VRAMP_ERROR_UNKNOWN_BUFFER);
    assert!(!addresses[0].is_null());
    let other = buffer(allocator, 200 * MIB).unwrap();
    assert_eq!(lease(allocator, &[(other, WRITE)], stream, 0), Err(VRAMP_ERROR_TIMEOUT));
    assert_eq!(vramp_buffer_lease_end(allocator, held), VRAMP_OK);
    let (held, _) = lease(allocator, &[(other, WRITE)], stream, VRAMP_FOREVER).unwrap();
    assert_eq!(vramp_buffer_lease_end(allocator, held), VRAMP_OK);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn ten_thousand_buffers_are_made_leased_and_destroyed_in_any_order() {
    let allocator = open_with_tiers(1024, 64 * MIB);
    let stream = stream(allocator);
    let mut random = fastrand::Rng::with_seed(7);
    let mut buffers: Vec<_> = (0..10_000).map(|_| buffer(allocator, 4096).unwrap()).collect();
    let set: Vec<_> = buffers.iter().take(400).map(|&buffer| (buffer, READ)).collect();
    let (held, addresses) = lease(allocator, &set, stream, 0).unwrap();
    let mut distinct = addresses.clone();
    distinct.sort_unstable();
    distinct.dedup();
    assert_eq!(distinct.len(), 400);
    random.shuffle(&mut buffers);
    for (nth, &buffer) in buffers.iter().enumerate() {
        if nth == 5_000 {
            assert_eq!(vramp_buffer_lease_end(allocator, held), VRAMP_OK);
        }
        assert_eq!(vramp_buffer_destroy(allocator, buffer), VRAMP_OK);
    }
    assert_eq!(vramp_audit(allocator), VRAMP_OK);
    let stats = space_stats(allocator, DEVICE).unwrap();
    assert_eq!(stats.reservations, 0);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn bytes_beyond_a_buffer_are_neither_read_nor_written() {
    let allocator = open_with_tiers(256, 64 * MIB);
    let one = buffer(allocator, 4096).unwrap();
    let mut bytes = [0_u8; 16];
    let at = bytes.as_mut_ptr().cast::<c_void>();
    for (offset, size) in [(4090, 16), (4097, 1), (u64::MAX, 16), (4096, 1)] {
        // SAFETY: the array has at least `size` bytes.
        let statuses = unsafe {
            [
                vramp_buffer_write(allocator, one, offset, at, size),
                vramp_buffer_read(allocator, one, offset, at, size),
            ]
        };
        assert_eq!(statuses, [VRAMP_ERROR_RANGE; 2], "{offset} {size}");
    }
    // SAFETY: no byte is read or written.
    let statuses = unsafe {
        [
            vramp_buffer_write(allocator, one, 4096, null_mut(), 0),
            vramp_buffer_read(allocator, one, 0, null_mut(), 0),
            vramp_buffer_write(allocator, one, 0, null_mut(), 1),
            vramp_buffer_read(allocator, one, 0, null_mut(), 1),
            vramp_buffer_read(allocator, one, 0, at, usize::MAX),
        ]
    };
    let (ok, null, range) = (VRAMP_OK, VRAMP_ERROR_NULL, VRAMP_ERROR_RANGE);
    assert_eq!(statuses, [ok, ok, null, null, range]);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

/// What `vramp_buffer_adopt` calls: frees the block.
struct Block {
    allocator: vramp_capi::abi::vramp_allocator_t,
    address: *mut c_void,
    stream: vramp_stream_t,
    released: std::cell::Cell<u32>,
}

unsafe extern "C" fn free_block(user: *mut c_void) {
    // SAFETY: the test keeps the block.
    let block = unsafe { &*user.cast::<Block>() };
    block.released.set(block.released.get() + 1);
    assert_eq!(vramp_free(block.allocator, block.address, block.stream), VRAMP_OK);
}

#[test]
fn an_adopted_block_is_released_once_its_contents_left_the_card() {
    let allocator = open_with_tiers(64, 64 * MIB);
    let stream = stream(allocator);
    let address = malloc(allocator, 8 * MIB as usize, stream).unwrap();
    // SAFETY: the card is simulated, with memory of the host at its addresses.
    unsafe { std::slice::from_raw_parts_mut(address.cast::<u8>(), 8 * MIB as usize) }.fill(7);
    let block = Block { allocator, address, stream, released: std::cell::Cell::new(0) };
    let user = std::ptr::from_ref(&block).cast_mut().cast::<c_void>();
    let mut made = vramp_buffer_t::default();
    let adopt = |size, release, made: &mut vramp_buffer_t| {
        // SAFETY: the block lives until the buffer has released it.
        unsafe { vramp_buffer_adopt(allocator, address, size, stream, release, user, made) }
    };
    assert_eq!(adopt(0, Some(free_block), &mut made), VRAMP_ERROR_RANGE, "{}", last_error());
    assert_eq!(adopt(8 * MIB, None, &mut made), VRAMP_ERROR_NULL);
    assert_eq!(block.released.get(), 0, "a call that fails takes nothing");
    assert_eq!(adopt(8 * MIB, Some(free_block), &mut made), VRAMP_OK, "{}", last_error());
    let (held, addresses) = lease(allocator, &[(made, READ)], stream, 0).unwrap();
    assert_eq!(addresses, [address], "it is where it was");
    assert_eq!(vramp_buffer_lease_end(allocator, held), VRAMP_OK);
    assert_eq!(vramp_sync_and_unlock(allocator, stream), VRAMP_OK);
    assert_eq!(block.released.get(), 0);
    assert!(evict(allocator, 8 * MIB) > 0);
    assert_eq!(block.released.get(), 1);
    let back = read(allocator, made, 8 * MIB as usize).unwrap();
    assert!(vramp_testing::is_filled(&back, 7));
    assert_eq!(vramp_buffer_destroy(allocator, made), VRAMP_OK);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
    assert_eq!(block.released.get(), 1);
}

#[test]
fn memory_of_a_region_is_not_adopted_and_stays_the_callers() {
    let allocator = open_with_tiers(64, 64 * MIB);
    let stream = stream(allocator);
    let scope = begin(allocator, "weights").unwrap();
    let address = malloc(allocator, 8 * MIB as usize, stream).unwrap();
    assert_eq!(vramp_region_end(scope), VRAMP_OK);
    let block = Block { allocator, address, stream, released: std::cell::Cell::new(0) };
    let user = std::ptr::from_ref(&block).cast_mut().cast::<c_void>();
    let mut made = vramp_buffer_t::default();
    let adopt = |made: &mut vramp_buffer_t| {
        // SAFETY: the block lives longer than the buffer, if one is made.
        unsafe {
            vramp_buffer_adopt(allocator, address, 8 * MIB, stream, Some(free_block), user, made)
        }
    };
    assert_eq!(adopt(&mut made), VRAMP_ERROR_UNSUPPORTED);
    assert!(last_error().contains("region \"weights\""), "{}", last_error());
    assert_eq!(block.released.get(), 0, "a call that fails takes nothing");
    assert_eq!(pause(allocator, &["weights"]), VRAMP_OK, "{}", last_error());
    assert_eq!(resume(allocator, &["weights"]), VRAMP_OK, "{}", last_error());
    assert_eq!(vramp_close(allocator), VRAMP_OK);
    assert_eq!(block.released.get(), 0);
}
