//! Buffers and leases, a store of the caller behind spilling, observers, locks by stream and statistics.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};
use std::sync::{Condvar, Mutex};
use std::thread;
use std::time::Duration;

use vramp_capi::abi::vramp_status_t::{self, *};
use vramp_capi::abi::{vramp_allocator_t, vramp_stream_t};
use vramp_capi::interface::*;
use vramp_capi::sleep::vramp_region_end;
use vramp_capi::tiers::abi::vramp_buffer_change_t::{self, *};
use vramp_capi::tiers::abi::vramp_buffer_state_t::*;
use vramp_capi::tiers::abi::*;
use vramp_capi::tiers::buffers::*;
use vramp_capi::tiers::leases::*;
use vramp_capi::tiers::observing::*;
use vramp_capi::tiers::*;

use crate::common::*;
use crate::common::{begin, pause, resume};

// --- Buffers and leases ---

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

// --- A store of the caller behind spilling ---

const DISK: vramp_space_t = vramp_space_t { tier: VRAMP_TIER_DISK, index: 0 };

/// Objects in memory, and what the functions return.
#[derive(Default)]
struct Objects {
    by_key: Mutex<BTreeMap<u64, Vec<u8>>>,
    write_returns: AtomicI32,
    read_returns: AtomicI32,
    /// Added to the first byte of what is read.
    damage: AtomicU32,
    released: AtomicU32,
    /// Allocator and stream that each function calls, and what the calls returned.
    calls: Mutex<Option<(vramp_allocator_t, vramp_stream_t)>>,
    returned: Mutex<Vec<vramp_status_t>>,
}

impl Objects {
    fn struct_of(&self) -> vramp_store_t {
        vramp_store_t {
            struct_size: size_of::<vramp_store_t>() as u64,
            capacity: 64 * MIB,
            user: std::ptr::from_ref(self).cast_mut().cast(),
            write: Some(write_object),
            read: Some(read_object),
            remove: Some(remove_object),
            release: Some(release_objects),
            threads: 0,
        }
    }

    fn count(&self) -> usize {
        self.by_key.lock().unwrap().len()
    }

    /// Calls vramp from inside a function.
    fn call_back(&self) {
        let Some((allocator, stream)) = *self.calls.lock().unwrap() else { return };
        let mut made = vramp_allocator_t::default();
        // SAFETY: the result outlives the call.
        let opened = unsafe { vramp_open(c"sim:h200".as_ptr(), c"".as_ptr(), &mut made) };
        let statuses = [
            opened,
            vramp_free(allocator, std::ptr::dangling_mut(), stream),
            malloc(allocator, 1000, stream).unwrap_err(),
            malloc(made, 1000, stream).unwrap_err(),
            buffer(allocator, MIB).unwrap_err(),
            vramp_tiers_close(allocator),
            vramp_close(allocator),
        ];
        let closed = std::thread::spawn(move || vramp_close(made)).join().unwrap();
        self.returned.lock().unwrap().extend(statuses.into_iter().chain([closed]));
    }
}

unsafe extern "C" fn write_object(
    user: *mut c_void,
    key: u64,
    bytes: *const c_void,
    size: usize,
) -> i32 {
    // SAFETY: the test keeps the objects, and the bytes are there.
    let (objects, bytes) =
        unsafe { (&*user.cast::<Objects>(), std::slice::from_raw_parts(bytes.cast::<u8>(), size)) };
    objects.call_back();
    let before = objects.by_key.lock().unwrap().insert(key, bytes.to_vec());
    assert_eq!(before, None, "a key is used once");
    objects.write_returns.load(Ordering::Relaxed)
}

unsafe extern "C" fn read_object(
    user: *mut c_void,
    key: u64,
    bytes: *mut c_void,
    size: usize,
) -> i32 {
    // SAFETY: as above.
    let (objects, bytes) = unsafe {
        (&*user.cast::<Objects>(), std::slice::from_raw_parts_mut(bytes.cast::<u8>(), size))
    };
    objects.call_back();
    bytes.copy_from_slice(&objects.by_key.lock().unwrap()[&key]);
    bytes[0] = bytes[0].wrapping_add(objects.damage.load(Ordering::Relaxed) as u8);
    objects.read_returns.load(Ordering::Relaxed)
}

unsafe extern "C" fn remove_object(user: *mut c_void, key: u64) -> i32 {
    // SAFETY: as above.
    let objects = unsafe { &*user.cast::<Objects>() };
    objects.call_back();
    assert!(objects.by_key.lock().unwrap().remove(&key).is_some());
    VRAMP_OK as i32
}

unsafe extern "C" fn release_objects(user: *mut c_void) {
    // SAFETY: as above.
    let objects = unsafe { &*user.cast::<Objects>() };
    objects.released.fetch_add(1, Ordering::Relaxed);
}

fn open_on_store(objects: &Objects) -> vramp_allocator_t {
    let allocator = open_mapped(64);
    let store = objects.struct_of();
    let below = vramp_tiers_options_t { store: &store, ..options(0, 64 * MIB) };
    assert_eq!(open_tiers(allocator, &below), VRAMP_OK, "{}", last_error());
    allocator
}

fn filled(allocator: vramp_allocator_t, byte: u8) -> vramp_buffer_t {
    let made = buffer(allocator, 8 * MIB).unwrap();
    write(allocator, made, &vec![byte; 8 * MIB as usize]).unwrap();
    made
}

fn spill_to_disk(allocator: vramp_allocator_t, buffer: vramp_buffer_t) -> vramp_status_t {
    // SAFETY: the result may be null.
    unsafe { vramp_buffer_spill_to(allocator, buffer, VRAMP_TIER_DISK, std::ptr::null_mut()) }
}

fn holds(allocator: vramp_allocator_t, buffer: vramp_buffer_t, byte: u8) -> bool {
    let back = read(allocator, buffer, 8 * MIB as usize).unwrap();
    vramp_testing::is_filled(&back, byte)
}

#[test]
fn contents_go_to_the_store_and_come_back_and_it_is_released_once() {
    let objects = Objects::default();
    let allocator = open_on_store(&objects);
    let (kept, dropped) = (filled(allocator, 1), filled(allocator, 2));
    for one in [kept, dropped] {
        assert_eq!(spill_to_disk(allocator, one), VRAMP_OK, "{}", last_error());
    }
    assert_eq!(info(allocator, kept).unwrap().disk_bytes, 8 * MIB);
    let space = space_stats(allocator, DISK).unwrap();
    assert_eq!((space.capacity, space.total), (64 * MIB, 16 * MIB));
    // An object for each step of a move.
    assert_eq!(objects.count(), 2);
    assert_eq!(vramp_buffer_destroy(allocator, dropped), VRAMP_OK);
    assert_eq!(objects.count(), 1);
    assert!(holds(allocator, kept, 1));
    assert_eq!(spill_to_disk(allocator, kept), VRAMP_OK);
    assert_eq!((objects.count(), objects.released.load(Ordering::Relaxed)), (1, 0));
    assert_eq!(vramp_audit(allocator), VRAMP_OK);
    assert_eq!(vramp_tiers_close(allocator), VRAMP_OK, "{}", last_error());
    assert_eq!((objects.count(), objects.released.load(Ordering::Relaxed)), (0, 1));
    assert_eq!(vramp_close(allocator), VRAMP_OK);
    assert_eq!(objects.released.load(Ordering::Relaxed), 1);
}

#[test]
fn what_a_store_fails_at_is_a_status_and_no_contents_are_lost() {
    let objects = Objects::default();
    let allocator = open_on_store(&objects);
    let stream = stream(allocator);
    let one = filled(allocator, 7);
    for failure in [VRAMP_ERROR_OUT_OF_MEMORY as i32, VRAMP_ERROR_FILE as i32, -5] {
        objects.write_returns.store(failure, Ordering::Relaxed);
        assert_eq!(spill_to_disk(allocator, one), VRAMP_ERROR_FILE);
        assert!(last_error().contains(&format!("it returned {failure} (")), "{}", last_error());
        let state = info(allocator, one).unwrap();
        assert_eq!((state.state, state.disk_bytes), (VRAMP_BUFFER_RESIDENT, 0));
        assert_eq!(objects.count(), 0, "an object that was not written is removed");
        assert_eq!(space_stats(allocator, DISK).unwrap().total, 0);
    }
    objects.write_returns.store(0, Ordering::Relaxed);
    assert_eq!(spill_to_disk(allocator, one), VRAMP_OK, "{}", last_error());

    objects.read_returns.store(-1, Ordering::Relaxed);
    assert_eq!(lease(allocator, &[(one, VRAMP_ACCESS_READ)], stream, 0), Err(VRAMP_ERROR_FILE));
    assert!(last_error().contains("it returned -1 (unknown)"), "{}", last_error());
    objects.read_returns.store(0, Ordering::Relaxed);
    objects.damage.store(1, Ordering::Relaxed);
    assert_eq!(read(allocator, one, 8), Err(VRAMP_ERROR_CONTENTS), "{}", last_error());
    objects.damage.store(0, Ordering::Relaxed);
    assert!(holds(allocator, one, 7), "the store has it still");

    // What can no longer be read back can be overwritten.
    assert_eq!(spill_to_disk(allocator, one), VRAMP_OK);
    objects.damage.store(1, Ordering::Relaxed);
    let (held, _) = lease(allocator, &[(one, VRAMP_ACCESS_OVERWRITE)], stream, 0).unwrap();
    assert_eq!(vramp_buffer_lease_end(allocator, held), VRAMP_OK);
    assert_eq!((objects.count(), vramp_audit(allocator)), (0, VRAMP_OK));
    assert_eq!(vramp_close(allocator), VRAMP_OK);
    assert_eq!(objects.released.load(Ordering::Relaxed), 1);
}

#[test]
fn a_call_with_an_allocator_inside_a_store_is_refused_and_changes_nothing() {
    let objects = Objects::default();
    let allocator = open_on_store(&objects);
    let stream = stream(allocator);
    let one = filled(allocator, 3);
    *objects.calls.lock().unwrap() = Some((allocator, stream));
    assert_eq!(spill_to_disk(allocator, one), VRAMP_OK, "{}", last_error());
    // Its object is written, read, and removed on the thread of the call.
    let (held, _) = lease(allocator, &[(one, VRAMP_ACCESS_WRITE)], stream, 0).unwrap();
    assert_eq!(vramp_buffer_lease_end(allocator, held), VRAMP_OK);
    assert_eq!(objects.count(), 0);
    *objects.calls.lock().unwrap() = None;
    let busy = VRAMP_ERROR_BUSY;
    let expected = [VRAMP_OK, busy, busy, busy, busy, busy, busy, VRAMP_OK];
    let returned = objects.returned.lock().unwrap();
    assert_eq!(returned.len(), 3 * expected.len(), "one object");
    for statuses in returned.chunks(expected.len()) {
        assert_eq!(statuses, expected);
    }
    // Afterwards the thread may call again.
    assert_eq!(stats(allocator).live, 0);
    assert!(holds(allocator, one, 3));
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn a_store_that_cannot_be_is_refused_and_not_released() {
    let objects = Objects::default();
    let allocator = open_mapped(64);
    let good = objects.struct_of();
    let open_on = |store: vramp_store_t, below: vramp_tiers_options_t| {
        open_tiers(allocator, &vramp_tiers_options_t { store: &store, ..below })
    };
    let below = options(0, 64 * MIB);
    for (bad, status) in [
        (vramp_store_t { write: None, ..good }, VRAMP_ERROR_NULL),
        (vramp_store_t { read: None, ..good }, VRAMP_ERROR_NULL),
        (vramp_store_t { remove: None, ..good }, VRAMP_ERROR_NULL),
        (vramp_store_t { capacity: 0, ..good }, VRAMP_ERROR_OPTION),
        (vramp_store_t { threads: 65, ..good }, VRAMP_ERROR_OPTION),
        (vramp_store_t { threads: u64::MAX, ..good }, VRAMP_ERROR_OPTION),
        (vramp_store_t { struct_size: 8, ..good }, VRAMP_ERROR_STRUCT_SIZE),
    ] {
        assert_eq!(open_on(bad, below), status, "{}", last_error());
    }
    let folder = tempfile::tempdir().unwrap();
    let path = std::ffi::CString::new(folder.path().to_str().unwrap()).unwrap();
    let both =
        vramp_tiers_options_t { disk_directory: path.as_ptr(), disk_bytes: 64 * MIB, ..below };
    assert_eq!(open_on(good, both), VRAMP_ERROR_OPTION, "{}", last_error());
    assert_eq!(open_on(good, options(0, 5)), VRAMP_ERROR_OPTION, "{}", last_error());
    assert_eq!(open_on(good, below), VRAMP_OK, "{}", last_error());
    let second = Objects::default();
    assert_eq!(open_on(second.struct_of(), below), VRAMP_ERROR_BUSY);
    let released = |of: &Objects| of.released.load(Ordering::Relaxed);
    assert_eq!((released(&objects), released(&second)), (0, 0));
    assert_eq!(vramp_close(allocator), VRAMP_OK);
    assert_eq!((released(&objects), released(&second)), (1, 0));
}

// --- Observers of buffers, locks by stream, statistics and failures ---

type Act = Box<dyn Fn(&vramp_buffer_event_t) -> Vec<vramp_status_t> + Send + Sync>;

/// What an observer saw, and what it does with each event.
#[derive(Default)]
struct Seen {
    events: Mutex<Vec<vramp_buffer_event_t>>,
    statuses: Mutex<Vec<vramp_status_t>>,
    arrived: Condvar,
    act: Option<Act>,
}

impl Seen {
    fn user(&self) -> *mut c_void {
        std::ptr::from_ref(self).cast_mut().cast()
    }

    /// Waits until the last event is of this kind, and returns all.
    fn until(&self, last: vramp_buffer_change_t) -> Vec<vramp_buffer_event_t> {
        let mut events = self.events.lock().unwrap();
        while events.last().is_none_or(|event| event.change != last) {
            let waited = self.arrived.wait_timeout(events, Duration::from_secs(60)).unwrap();
            assert!(!waited.1.timed_out(), "no event {last:?}: {:?}", waited.0);
            events = waited.0;
        }
        events.clone()
    }
}

unsafe extern "C" fn see(event: *const vramp_buffer_event_t, user: *mut c_void) {
    // SAFETY: the tests keep it until the observer is removed.
    let seen = unsafe { &*user.cast::<Seen>() };
    // SAFETY: an event is valid during the call.
    let event = unsafe { *event };
    if let Some(act) = &seen.act {
        seen.statuses.lock().unwrap().extend(act(&event));
    }
    seen.events.lock().unwrap().push(event);
    seen.arrived.notify_all();
}

fn observe(allocator: vramp_allocator_t, seen: &Seen) -> u64 {
    let mut registration = 0;
    // SAFETY: the tests keep `seen` until the observer is removed.
    let status =
        unsafe { vramp_buffers_observe(allocator, Some(see), seen.user(), &mut registration) };
    assert_eq!(status, VRAMP_OK, "{}", last_error());
    registration
}

#[test]
fn an_observer_sees_the_life_of_a_buffer_in_order() {
    let allocator = open_with_tiers(64, 64 * MIB);
    let stream = stream(allocator);
    let seen = Seen::default();
    let registration = observe(allocator, &seen);
    let one = buffer(allocator, 8 * MIB).unwrap();
    write(allocator, one, &vec![1; 8 * MIB as usize]).unwrap();
    assert_eq!(evict(allocator, 8 * MIB), 8 * MIB);
    let (held, _) = lease(allocator, &[(one, VRAMP_ACCESS_READ)], stream, 0).unwrap();
    assert_eq!(info(allocator, one).unwrap().leases, 1);
    assert_eq!(vramp_buffer_lease_end(allocator, held), VRAMP_OK);
    assert_eq!(vramp_buffer_destroy(allocator, one), VRAMP_OK);
    // The work that the lease was for is complete.
    assert_eq!(vramp_sync_and_unlock(allocator, stream), VRAMP_OK);
    let events = seen.until(VRAMP_BUFFER_FREED);
    assert!(events.iter().all(|event| event.buffer == one && event.size == 8 * MIB));
    let kinds: Vec<_> = events.iter().map(|event| event.change).collect();
    let expected = [
        VRAMP_BUFFER_CREATED,
        VRAMP_BUFFER_LOCKED,
        VRAMP_BUFFER_UNLOCKED,
        VRAMP_BUFFER_WAS_DEFERRED,
        VRAMP_BUFFER_LOCKED,
        VRAMP_BUFFER_RETRIEVED,
        VRAMP_BUFFER_UNLOCKED,
        VRAMP_BUFFER_FREED,
    ];
    assert_eq!(kinds, expected);
    let deferred = events[3];
    assert_eq!((deferred.from, deferred.to), (VRAMP_TIER_DEVICE, VRAMP_TIER_HOST));
    assert_eq!((deferred.bytes, deferred.deferred_bytes), (8 * MIB, 8 * MIB));
    assert_eq!((events[4].leases, events[6].leases), (1, 0));
    assert_eq!(vramp_buffers_unobserve(allocator, registration), VRAMP_OK);
    assert_eq!(vramp_buffers_unobserve(allocator, registration), VRAMP_ERROR_RANGE);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn a_removed_observer_gets_no_event_and_others_go_on() {
    let allocator = open_with_tiers(64, 64 * MIB);
    let (first, second) = (Seen::default(), Seen::default());
    let registrations = [observe(allocator, &first), observe(allocator, &second)];
    buffer(allocator, 4096).unwrap();
    second.until(VRAMP_BUFFER_CREATED);
    assert_eq!(vramp_buffers_unobserve(allocator, registrations[0]), VRAMP_OK);
    let before = first.events.lock().unwrap().len();
    assert_eq!(before, 1, "observers are called in the order of registration");
    let other = buffer(allocator, 4096).unwrap();
    assert_eq!(vramp_buffer_destroy(allocator, other), VRAMP_OK);
    second.until(VRAMP_BUFFER_FREED);
    assert_eq!(first.events.lock().unwrap().len(), before);
    // The end of the tiers ends observers: none of its buffers' ends is seen.
    let seen = second.events.lock().unwrap().len();
    assert_eq!(vramp_close(allocator), VRAMP_OK);
    assert_eq!(second.events.lock().unwrap().len(), seen);
}

#[test]
fn an_observer_may_call_the_interface_but_close_nothing() {
    let allocator = open_with_tiers(64, 64 * MIB);
    let other = open("");
    let act: Act = Box::new(move |event| {
        let mut statuses =
            vec![vramp_tiers_close(allocator), vramp_close(allocator), vramp_close(other)];
        if event.change == VRAMP_BUFFER_CREATED {
            assert_eq!(info(allocator, event.buffer).map(|info| info.size), Ok(4096));
            statuses.push(vramp_buffer_destroy(allocator, event.buffer));
        }
        statuses
    });
    let seen = Seen { act: Some(act), ..Seen::default() };
    let registration = observe(allocator, &seen);
    buffer(allocator, 4096).unwrap();
    assert_eq!(seen.until(VRAMP_BUFFER_FREED).len(), 2);
    assert_eq!(vramp_buffers_unobserve(allocator, registration), VRAMP_OK);
    let busy = VRAMP_ERROR_BUSY;
    let expected = [busy, busy, busy, VRAMP_OK, busy, busy, busy];
    assert_eq!(*seen.statuses.lock().unwrap(), expected);
    assert_eq!((vramp_close(allocator), vramp_close(other)), (VRAMP_OK, VRAMP_OK));
}

#[test]
fn an_observer_removes_itself() {
    let allocator = open_with_tiers(64, 64 * MIB);
    let own = std::sync::Arc::new(Mutex::new(0));
    let number = std::sync::Arc::clone(&own);
    let act: Act =
        Box::new(move |_| vec![vramp_buffers_unobserve(allocator, *number.lock().unwrap())]);
    let seen = Seen { act: Some(act), ..Seen::default() };
    *own.lock().unwrap() = observe(allocator, &seen);
    buffer(allocator, 4096).unwrap();
    seen.until(VRAMP_BUFFER_CREATED);
    buffer(allocator, 4096).unwrap();
    assert_eq!(vramp_close(allocator), VRAMP_OK);
    assert_eq!(*seen.statuses.lock().unwrap(), [VRAMP_OK]);
    assert_eq!(seen.events.lock().unwrap().len(), 1);
}

#[test]
fn locks_of_a_stream_end_together() {
    let allocator = open_with_tiers(64, 64 * MIB);
    let (one, other) = (stream(allocator), stream(allocator));
    let buffers: Vec<_> = (0..3).map(|_| buffer(allocator, 8 * MIB).unwrap()).collect();
    let lock = |wanted: &[usize], stream| {
        let uses: Vec<_> = wanted
            .iter()
            .map(|&nth| vramp_buffer_use_t { buffer: buffers[nth], access: VRAMP_ACCESS_WRITE })
            .collect();
        let mut addresses = [null_mut(); 3];
        let (from, to) = (uses.as_ptr(), addresses.as_mut_ptr());
        // SAFETY: the arrays have as many elements, and outlive the call.
        let status = unsafe { vramp_lock(allocator, from, uses.len(), stream, 0, to) };
        outcome(status, addresses)
    };
    let leases = |nth: usize| info(allocator, buffers[nth]).unwrap().leases;
    let addresses = lock(&[0, 1], one).unwrap();
    assert_eq!(addresses[1], info(allocator, buffers[1]).unwrap().address);
    lock(&[2], one).unwrap();
    assert_eq!(lock(&[1], other), Err(VRAMP_ERROR_TIMEOUT));
    assert_eq!([leases(0), leases(1), leases(2)], [1, 1, 1]);
    assert_eq!(vramp_unlock(allocator, other), VRAMP_ERROR_UNKNOWN_LEASE);
    assert_eq!(vramp_unlock(allocator, one), VRAMP_OK);
    assert_eq!([leases(0), leases(1), leases(2)], [0, 0, 0]);
    lock(&[0, 2], other).unwrap();
    assert_eq!(evict(allocator, 1 << 30), 8 * MIB, "the one that is not locked");
    assert_eq!(vramp_stream_forget(allocator, other), VRAMP_OK);
    assert_eq!(leases(0), 1, "a lock outlives the handle of its stream");
    assert_eq!(vramp_sync_and_unlock(allocator, other), VRAMP_OK);
    assert_eq!(leases(0), 0);
    assert_eq!(vramp_sync_and_unlock(allocator, one), VRAMP_OK, "it only waits");
    assert!(evict(allocator, 1 << 30) >= 16 * MIB);
    assert_eq!(info(allocator, buffers[0]).unwrap().device_bytes, 0);
    assert_eq!(vramp_buffer_retrieve(allocator, buffers[0], 0), VRAMP_OK);
    assert_eq!(info(allocator, buffers[0]).unwrap().device_bytes, 8 * MIB);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

unsafe extern "C" fn count(text: *const c_char, user: *mut c_void) {
    // SAFETY: a text is valid during the call.
    assert!(!unsafe { CStr::from_ptr(text) }.is_empty());
    // SAFETY: the caller passes a number.
    unsafe { *user.cast::<u32>() += 1 };
}

#[test]
fn statistics_sum_buffers_and_moves() {
    let allocator = open_with_tiers(64, 64 * MIB);
    let one = buffer(allocator, 8 * MIB).unwrap();
    write(allocator, one, &vec![1; 8 * MIB as usize]).unwrap();
    evict(allocator, 8 * MIB);
    let mut stats = vramp_tiers_stats_t {
        struct_size: size_of::<vramp_tiers_stats_t>() as u64,
        ..vramp_tiers_stats_t::default()
    };
    // SAFETY: the result outlives the call.
    assert_eq!(unsafe { vramp_tiers_stats(allocator, &mut stats) }, VRAMP_OK);
    assert_eq!((stats.buffers, stats.leases, stats.total), (1, 0, 8 * MIB));
    assert_eq!((stats.deferred, stats.host_copies, stats.to_host), (8 * MIB, 8 * MIB, 8 * MIB));
    assert_eq!((stats.evicted, stats.failures, stats.resident), (8 * MIB, 0, 0));
    let mut failures = 0_u32;
    let user = (&raw mut failures).cast::<c_void>();
    // SAFETY: the number outlives the call.
    assert_eq!(unsafe { vramp_tiers_failures(allocator, Some(count), user) }, VRAMP_OK);
    assert_eq!(failures, 0);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}
