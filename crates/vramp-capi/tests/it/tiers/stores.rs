//! A store of the caller behind spilling.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::Mutex;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};

use crate::common::tiers::*;
use crate::common::*;
use vramp_capi::abi::vramp_status_t::{self, *};
use vramp_capi::abi::{vramp_allocator_t, vramp_stream_t};
use vramp_capi::interface::*;
use vramp_capi::tiers::abi::vramp_buffer_state_t::*;
use vramp_capi::tiers::abi::*;
use vramp_capi::tiers::buffers::*;
use vramp_capi::tiers::leases::*;
use vramp_capi::tiers::*;

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
