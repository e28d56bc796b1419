//! Regions that leave the card and come back, from the host and from a disk, moves that fail, and ends.

use std::cell::Cell;
use std::ffi::CString;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;

use vramp_alloc::Config;
use vramp_capi::abi::vramp_status_t::{self, *};
use vramp_capi::abi::{vramp_allocator_t, vramp_export_t, vramp_stream_t};
use vramp_capi::graphs::vramp_capture_begin;
use vramp_capi::interface::*;
use vramp_capi::queries::vramp_on_shortage;
use vramp_capi::sharing::*;
use vramp_capi::sleep::abi::vramp_region_phase_t::*;
use vramp_capi::sleep::abi::{vramp_region_scope_t, *};
use vramp_capi::sleep::*;
use vramp_capi::testing;
use vramp_core::AddrRange;
use vramp_driver::wrapper::{Wrapped, Wrapper};
use vramp_driver::{Driver, DriverResult};

use crate::common::*;
use crate::common::{MIB, open_mapped, open_with_tiers};

// --- Regions that leave the card and come back ---

/// Writes a byte at both ends of a block of a simulated card that stores what is written.
fn fill(block: *mut std::ffi::c_void, size: usize, byte: u8) {
    // SAFETY: the block has as many bytes, and no other code uses them.
    unsafe {
        block.cast::<u8>().write(byte);
        block.cast::<u8>().add(size - 1).write(byte);
    }
}

fn holds(block: *mut std::ffi::c_void, size: usize, byte: u8) -> bool {
    // SAFETY: as of `fill`.
    let bytes = unsafe { (block.cast::<u8>().read(), block.cast::<u8>().add(size - 1).read()) };
    bytes == (byte, byte)
}

#[test]
fn a_region_leaves_the_card_and_comes_back_with_its_bytes() {
    let allocator = open_mapped(256);
    let stream = stream(allocator);
    let scope = begin(allocator, "weights").unwrap();
    let sizes = [1000, 30 << 20];
    let blocks = sizes.map(|size| malloc(allocator, size, stream).unwrap());
    assert_eq!(vramp_region_end(scope), VRAMP_OK);
    for (block, size) in blocks.into_iter().zip(sizes) {
        fill(block, size, 7);
    }
    let awake = state(allocator, "weights");
    assert_eq!((awake.phase, awake.backup), (VRAMP_REGION_AWAKE, VRAMP_BACKUP_HOST));
    assert_eq!((awake.read_only, awake.tag_length, awake.asleep), (0, 7, 0));
    assert!(awake.on_card >= 30 * MIB && awake.on_card == stats(allocator).reserved);

    assert_eq!(pause(allocator, &["weights"]), VRAMP_OK, "{}", last_error());
    let asleep = state(allocator, "weights");
    assert_eq!((asleep.phase, asleep.on_card), (VRAMP_REGION_ASLEEP, 0));
    assert_eq!(asleep.asleep, awake.on_card);
    assert!(asleep.copied == asleep.to_copy && asleep.copied >= 30 * MIB, "{asleep:?}");
    assert!(asleep.on_host >= asleep.copied);
    assert_eq!(stats(allocator).reserved, 0);
    assert_eq!(pause(allocator, &["weights"]), VRAMP_OK, "it sleeps already");

    assert_eq!(resume(allocator, &["weights"]), VRAMP_OK, "{}", last_error());
    assert_eq!(resume(allocator, &["weights"]), VRAMP_OK, "it is awake already");
    assert_eq!(state(allocator, "weights").phase, VRAMP_REGION_AWAKE);
    for (block, size) in blocks.into_iter().zip(sizes) {
        assert!(holds(block, size, 7));
        assert_eq!(vramp_free(allocator, block, stream), VRAMP_OK);
    }
    assert_eq!(vramp_audit(allocator), VRAMP_OK);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn scopes_nest_are_disabled_and_belong_to_a_thread_and_an_allocator() {
    let (allocator, other) = (open(""), open(""));
    let (one, elsewhere) = (stream(allocator), stream(other));
    let take = |size: usize| malloc(allocator, size, one).unwrap();
    let on_card = |tag| state(allocator, tag).on_card;
    let outer = begin(allocator, "outer").unwrap();
    take(4 << 20);
    let inner = begin(allocator, "inner").unwrap();
    take(6 << 20);
    let outside = disable(allocator).unwrap();
    take(8 << 20);
    thread::scope(|scope| {
        scope.spawn(|| assert!(malloc(allocator, 10 << 20, one).is_ok()));
    });
    malloc(other, 12 << 20, elsewhere).unwrap();
    assert_eq!((on_card("outer"), on_card("inner")), (4 * MIB, 6 * MIB));
    assert_eq!(stats(allocator).live, 28 * MIB);
    assert_eq!(states(other).unwrap(), []);
    // In any order.
    assert_eq!(vramp_region_end(inner), VRAMP_OK);
    assert_eq!(vramp_region_end(outside), VRAMP_OK);
    take(4 << 20);
    assert_eq!((on_card("outer"), on_card("inner")), (8 * MIB, 6 * MIB));
    assert_eq!(vramp_region_end(outer), VRAMP_OK);
    take(2 << 20);
    assert_eq!((on_card("outer"), on_card("inner")), (8 * MIB, 6 * MIB));
    for allocator in [allocator, other] {
        assert_eq!(vramp_close(allocator), VRAMP_OK);
    }
}

#[test]
fn a_null_list_means_all_regions_and_an_empty_one_none() {
    let allocator = open("");
    let stream = stream(allocator);
    for tag in ["a", "b"] {
        let scope = begin(allocator, tag).unwrap();
        malloc(allocator, 4 << 20, stream).unwrap();
        assert_eq!(vramp_region_end(scope), VRAMP_OK);
    }
    let phases = || [state(allocator, "a").phase, state(allocator, "b").phase];
    assert_eq!(pause(allocator, &[]), VRAMP_OK);
    assert_eq!(phases(), [VRAMP_REGION_AWAKE; 2]);
    // SAFETY: null stands for all regions, and for the defaults.
    assert_eq!(unsafe { vramp_region_clean(allocator, null(), 0) }, VRAMP_OK);
    // SAFETY: as above.
    assert_eq!(unsafe { vramp_region_pause(allocator, null(), 0, null()) }, VRAMP_OK);
    assert_eq!(phases(), [VRAMP_REGION_ASLEEP; 2]);
    assert_eq!(resume(allocator, &[]), VRAMP_OK);
    assert_eq!(phases(), [VRAMP_REGION_ASLEEP; 2]);
    // SAFETY: as above.
    assert_eq!(unsafe { vramp_region_resume(allocator, null(), 0) }, VRAMP_OK);
    assert_eq!(phases(), [VRAMP_REGION_AWAKE; 2]);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn a_pause_keeps_discards_or_has_nothing_to_copy_as_the_options_say() {
    let allocator = open("");
    let stream = stream(allocator);
    for (tag, backup, read_only) in [
        ("kv", VRAMP_BACKUP_NONE, false),
        ("weights", VRAMP_BACKUP_HOST, true),
        ("cache", VRAMP_BACKUP_HOST, false),
    ] {
        let scope = begin_with(allocator, tag, &region_options(backup, read_only)).unwrap();
        // A handle leaves or stays as a whole, and a block of its size has one.
        for _ in 0..4 {
            malloc(allocator, 16 << 20, stream).unwrap();
        }
        assert_eq!(vramp_region_end(scope), VRAMP_OK);
    }
    // Without a backup nothing is copied.
    assert_eq!(pause(allocator, &["kv"]), VRAMP_OK);
    let kv = state(allocator, "kv");
    assert_eq!((kv.backup, kv.on_card, kv.on_host, kv.to_copy), (VRAMP_BACKUP_NONE, 0, 0, 0));
    // What is read-only is copied once.
    for copied in [64 * MIB, 0] {
        assert_eq!(pause(allocator, &["weights"]), VRAMP_OK);
        assert_eq!(state(allocator, "weights").copied, copied);
        assert_eq!(resume(allocator, &["weights"]), VRAMP_OK);
    }
    assert_eq!(state(allocator, "weights").read_only, 1);
    // A part stays, and then all of it goes without a copy.
    assert_eq!(pause_with(allocator, &["cache"], &pause_options(40 * MIB, false)), VRAMP_OK);
    let part = state(allocator, "cache");
    assert!(part.on_card > 0 && part.on_card <= 40 * MIB && part.on_host > 0, "{part:?}");
    assert_eq!(pause_with(allocator, &["cache"], &pause_options(0, true)), VRAMP_OK);
    let gone = state(allocator, "cache");
    assert_eq!((gone.on_card, gone.asleep, gone.on_host), (0, 64 * MIB, 0));
    // A copy made ahead serves the pause.
    assert_eq!(resume(allocator, &["cache"]), VRAMP_OK);
    assert_eq!(clean(allocator, &["cache"]), VRAMP_OK);
    assert_eq!(pause(allocator, &["cache"]), VRAMP_OK);
    assert_eq!(state(allocator, "cache").to_copy, 0);
    assert_eq!(vramp_close(allocator), VRAMP_OK, "a region that sleeps is closed too");
}

#[test]
fn a_shortage_pauses_regions_until_the_registration_ends() {
    let allocator = open("limit=128MiB");
    let stream = stream(allocator);
    let scope = begin(allocator, "cache").unwrap();
    malloc(allocator, 100 << 20, stream).unwrap();
    assert_eq!(vramp_region_end(scope), VRAMP_OK);
    assert_eq!(malloc(allocator, 60 << 20, stream), Err(VRAMP_ERROR_OUT_OF_MEMORY));
    let registration = on_pressure(allocator, &["cache"]).unwrap();
    let large = malloc(allocator, 60 << 20, stream).unwrap();
    assert_eq!(state(allocator, "cache").phase, VRAMP_REGION_ASLEEP);
    assert_eq!(vramp_unobserve(allocator, registration), VRAMP_OK);
    assert_eq!(vramp_unobserve(allocator, registration), VRAMP_ERROR_RANGE);
    assert_eq!(vramp_free(allocator, large, stream), VRAMP_OK);
    assert_eq!(vramp_trim(allocator, 0), VRAMP_OK);
    assert_eq!(resume(allocator, &["cache"]), VRAMP_OK, "{}", last_error());
    assert_eq!(malloc(allocator, 60 << 20, stream), Err(VRAMP_ERROR_OUT_OF_MEMORY));
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn states_are_written_as_far_as_there_is_room() {
    let allocator = open("");
    let mut count = usize::MAX;
    // SAFETY: without room the array is not written.
    let none = |count: &mut usize| unsafe { vramp_region_status(allocator, null_mut(), 0, count) };
    assert_eq!((none(&mut count), count), (VRAMP_OK, 0));
    for tag in ["c", "a", "b"] {
        assert_eq!(vramp_region_end(begin(allocator, tag).unwrap()), VRAMP_OK);
    }
    assert_eq!((none(&mut count), count), (VRAMP_OK, 3));
    let mut two = [no_status(); 3];
    two[1].struct_size = 0;
    // SAFETY: the array has as many structs.
    let status = unsafe { vramp_region_status(allocator, two.as_mut_ptr(), 2, &mut count) };
    assert_eq!((status, count), (VRAMP_OK, 3));
    assert_eq!(two[..2].iter().map(tag_of).collect::<Vec<_>>(), ["a", "b"]);
    assert_eq!(two.map(|state| state.struct_size), [SIZE; 3]);
    assert_eq!(two[2], no_status(), "nothing beyond");
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn states_are_written_for_older_and_newer_headers() {
    let allocator = open("");
    for tag in ["a", "b"] {
        assert_eq!(vramp_region_end(begin(allocator, tag).unwrap()), VRAMP_OK);
    }
    // The struct of one has its first three numbers, and that of the other a field more.
    for size in [24_usize, SIZE as usize + 8] {
        let (mut bytes, mut count) = (vec![u64::MAX; 2 * size / 8 + 1], 0);
        bytes[0] = size as u64;
        let to = bytes.as_mut_ptr().cast();
        // SAFETY: the array is as large as its first number says.
        let status = unsafe { vramp_region_status(allocator, to, 2, &mut count) };
        assert_eq!((status, count), (VRAMP_OK, 2));
        for one in bytes[..2 * size / 8].chunks(size / 8) {
            assert_eq!(one[0], size as u64);
            assert_eq!(one[1], u64::from(VRAMP_BACKUP_HOST) << 32 | VRAMP_REGION_AWAKE as u64);
            assert!(one.iter().skip(SIZE as usize / 8).all(|number| *number == u64::MAX));
        }
        assert_eq!(*bytes.last().unwrap(), u64::MAX, "nothing beyond");
    }
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn tags_up_to_their_bound_are_kept_and_longer_ones_refused() {
    let allocator = open("");
    let longest = "\u{e9}".repeat(VRAMP_TAG_MAX / 2) + "x";
    assert_eq!(longest.len(), VRAMP_TAG_MAX);
    assert_eq!(vramp_region_end(begin(allocator, &longest).unwrap()), VRAMP_OK);
    assert_eq!(begin(allocator, &(longest.clone() + "y")), Err(VRAMP_ERROR_RANGE));
    let states = states(allocator).unwrap();
    assert_eq!(states.iter().map(tag_of).collect::<Vec<_>>(), [longest]);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn a_region_is_removed_once_its_blocks_are_freed() {
    let allocator = open_mapped(256);
    let stream = stream(allocator);
    let before = stats(allocator).reserved;
    let scope = begin(allocator, "job").unwrap();
    let block = malloc(allocator, 3 << 20, stream).unwrap();
    assert_eq!(remove(allocator, "other"), VRAMP_ERROR_REGION);
    assert_eq!(remove(allocator, "job"), VRAMP_ERROR_REGION);
    assert!(last_error().contains("3.00 MiB allocated"), "{}", last_error());
    assert_eq!(vramp_free(allocator, block, stream), VRAMP_OK);
    assert_eq!(remove(allocator, "job"), VRAMP_OK, "{}", last_error());
    assert_eq!((states(allocator).unwrap().len(), stats(allocator).reserved), (0, before));
    assert_eq!(pause(allocator, &["job"]), VRAMP_ERROR_REGION);
    // The scope creates it anew.
    let block = malloc(allocator, 3 << 20, stream).unwrap();
    assert_eq!(states(allocator).unwrap().len(), 1);
    assert_eq!(vramp_free(allocator, block, stream), VRAMP_OK);
    assert_eq!(vramp_region_end(scope), VRAMP_OK);
    assert_eq!(remove(allocator, "job"), VRAMP_OK, "{}", last_error());
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

// --- Regions whose contents go to a disk. The disk is of the process, so one test has it ---

#[test]
fn a_region_backs_up_to_a_disk_is_read_there_and_ahead() {
    let allocator = open_mapped(256);
    let stream = stream(allocator);
    let options = region_options(VRAMP_BACKUP_DISK, false);
    // No disk was named.
    assert_eq!(begin_with(allocator, "optimizer", &options), Err(VRAMP_ERROR_OPTION));

    let folder = tempfile::tempdir().unwrap();
    let name = CString::new(folder.path().to_str().unwrap()).unwrap();
    let nowhere = CString::new(folder.path().join("nowhere").to_str().unwrap()).unwrap();
    // SAFETY: the texts end with a zero, or are null.
    let set = |name: &CString, limit| unsafe { vramp_region_set_disk(name.as_ptr(), limit) };
    // SAFETY: as above.
    assert_eq!(unsafe { vramp_region_set_disk(null(), 0) }, VRAMP_ERROR_NULL);
    assert_ne!(set(&nowhere, 0), VRAMP_OK);
    assert_eq!(set(&name, 64 * MIB), VRAMP_OK, "{}", last_error());

    let scope = begin_with(allocator, "optimizer", &options).unwrap();
    let size = 20 << 20;
    let block = malloc(allocator, size, stream).unwrap();
    assert_eq!(vramp_region_end(scope), VRAMP_OK);
    // SAFETY: the card stores what is written to the block, which has as many bytes.
    let bytes = unsafe { std::slice::from_raw_parts_mut(block.cast::<u8>(), size) };
    bytes.iter_mut().enumerate().for_each(|(at, byte)| *byte = at as u8 ^ (at >> 8) as u8);
    let expected = bytes.to_vec();

    let mut part = vec![0; 5 << 20];
    let mut read = |offset: usize| {
        // SAFETY: the address is a number, and the result has as many bytes.
        let status = unsafe {
            let at = block.cast::<u8>().add(offset).cast();
            vramp_region_read_backup(allocator, at, part.as_mut_ptr().cast(), part.len())
        };
        (status, part.clone())
    };
    assert_eq!(read(0).0, VRAMP_ERROR_REGION, "it is awake");
    for round in 0..2 {
        assert_eq!(pause(allocator, &["optimizer"]), VRAMP_OK, "{}", last_error());
        let asleep = state(allocator, "optimizer");
        assert_eq!((asleep.backup, asleep.on_card, asleep.on_host), (VRAMP_BACKUP_DISK, 0, 0));
        assert!(asleep.on_disk >= size as u64, "{asleep:?}");
        let offset = 3 << 20;
        let (status, found) = read(offset);
        assert_eq!(status, VRAMP_OK, "{}", last_error());
        assert!(found == expected[offset..][..found.len()], "round {round}");
        assert_eq!(read(size - 1).0, VRAMP_ERROR_REGION, "it ends behind the block");
        assert_eq!(prefetch(allocator, &["nothing"]), VRAMP_ERROR_REGION);
        assert_eq!(prefetch(allocator, &["optimizer"]), VRAMP_OK, "{}", last_error());
        assert!(state(allocator, "optimizer").on_host >= size as u64);
        assert_eq!(resume(allocator, &["optimizer"]), VRAMP_OK, "{}", last_error());
        // SAFETY: as above.
        let bytes = unsafe { std::slice::from_raw_parts(block.cast::<u8>(), size) };
        assert!(bytes == expected, "round {round}");
    }
    // SAFETY: null is refused.
    let status = unsafe { vramp_region_read_backup(allocator, block, null_mut(), 1) };
    assert_eq!(status, VRAMP_ERROR_NULL);
    assert_eq!(vramp_free(allocator, block, stream), VRAMP_OK);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
    let left = std::fs::read_dir(folder.path()).unwrap().count();
    assert!(left <= 1, "{left} files are left of a closed allocator");
}

// --- Moves that fail, and leave everything as it was ---

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

// --- Regions and the end of their allocator, their threads and their callbacks ---

/// Where a device that waits is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Door {
    Open,
    Armed,
    /// A call waits.
    Reached,
}

/// A device that waits before it unmaps memory.
struct Waiting {
    device: Arc<dyn Driver>,
    door: Arc<(Mutex<Door>, Condvar)>,
}

fn set(door: &(Mutex<Door>, Condvar), to: Door) {
    *door.0.lock().unwrap() = to;
    door.1.notify_all();
}

fn await_door(door: &(Mutex<Door>, Condvar), is: Door) {
    drop(door.1.wait_while(door.0.lock().unwrap(), |door| *door != is).unwrap());
}

impl Wrapper for Waiting {
    type Device = Arc<dyn Driver>;

    fn device(&self) -> &Arc<dyn Driver> {
        &self.device
    }

    fn unmap(&self, range: AddrRange) -> DriverResult<()> {
        let is_armed = *self.door.0.lock().unwrap() == Door::Armed;
        if is_armed {
            set(&self.door, Door::Reached);
            await_door(&self.door, Door::Open);
        }
        self.device.unmap(range)
    }
}

#[test]
fn a_close_waits_for_a_pause_on_another_thread() {
    let door = Arc::new((Mutex::new(Door::Open), Condvar::new()));
    let device = vramp_alloc::open("sim:h200").unwrap();
    let device = Waiting { device, door: Arc::clone(&door) };
    let allocator = testing::open_on(Arc::new(Wrapped(device)), Config::default()).unwrap();
    let stream = stream(allocator);
    let scope = begin(allocator, "weights").unwrap();
    malloc(allocator, 64 << 20, stream).unwrap();
    set(&door, Door::Armed);
    thread::scope(|threads| {
        let pauses = threads.spawn(|| pause(allocator, &["weights"]));
        await_door(&door, Door::Reached);
        let closes = threads.spawn(|| vramp_close(allocator));
        // Once the close has begun, it waits and calls are refused.
        while states(allocator).is_ok() {
            thread::yield_now();
        }
        assert_eq!(resume(allocator, &["weights"]), VRAMP_ERROR_UNKNOWN_ALLOCATOR);
        assert!(!pauses.is_finished() && !closes.is_finished());
        set(&door, Door::Open);
        assert_eq!(pauses.join().unwrap(), VRAMP_OK);
        assert_eq!(closes.join().unwrap(), VRAMP_OK);
    });
    // The scope outlived its allocator.
    assert_eq!(vramp_region_end(scope), VRAMP_OK);
    assert_eq!(vramp_region_end(scope), VRAMP_ERROR_REGION);
}

#[test]
fn a_scope_ends_once_and_on_its_own_thread() {
    let allocator = open("");
    let scope = begin(allocator, "weights").unwrap();
    let elsewhere = thread::spawn(move || vramp_region_end(scope)).join().unwrap();
    assert_eq!(elsewhere, VRAMP_ERROR_REGION);
    let stream = stream(allocator);
    malloc(allocator, 4 << 20, stream).unwrap();
    assert_eq!(state(allocator, "weights").on_card, 4 << 20, "it has not ended");
    // A scope that its thread leaves open ends with the thread.
    let left = thread::spawn(move || begin(allocator, "left").unwrap()).join().unwrap();
    assert_eq!(vramp_region_end(left), VRAMP_ERROR_REGION);
    assert_eq!(vramp_region_end(scope), VRAMP_OK);
    assert_eq!(vramp_region_end(scope), VRAMP_ERROR_REGION);
    assert!(last_error().contains("thread that began it"), "{}", last_error());
    assert_eq!(vramp_region_end(vramp_region_scope_t::default()), VRAMP_ERROR_REGION);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

/// Calls when its thread ends, after the storage of threads that vramp has.
struct CallsLast(Cell<Option<(vramp_allocator_t, vramp_region_scope_t)>>);

thread_local! {
    static LAST: CallsLast = const { CallsLast(Cell::new(None)) };
}

static AT_END: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];

impl Drop for CallsLast {
    fn drop(&mut self) {
        let Some((allocator, scope)) = self.0.get() else { return };
        let begun = begin(allocator, "weights").err().unwrap_or(VRAMP_OK);
        AT_END[0].store(begun as u64, Ordering::Relaxed);
        AT_END[1].store(vramp_region_end(scope) as u64, Ordering::Relaxed);
    }
}

#[test]
fn a_thread_that_ends_is_in_no_region_any_more() {
    let allocator = open("");
    thread::spawn(move || {
        // What is used first ends last.
        LAST.with(|last| {
            let scope = begin(allocator, "weights").unwrap();
            last.0.set(Some((allocator, scope)));
        });
    })
    .join()
    .unwrap();
    for status in &AT_END {
        assert_eq!(status.load(Ordering::Relaxed), VRAMP_ERROR_REGION as u64);
    }
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

/// Statuses of a pause and a resume in a handler, each plus one; zero before it was called.
static IN_HANDLER: [AtomicU64; 3] = [const { AtomicU64::new(0) }; 3];

unsafe extern "C" fn tries_to_pause(
    _: *const vramp_capi::abi::vramp_shortage_t,
    user: *mut std::ffi::c_void,
) -> std::ffi::c_int {
    let allocator = vramp_allocator_t { id: user as u64 };
    let statuses = [
        pause(allocator, &["weights"]),
        resume(allocator, &["weights"]),
        clean(allocator, &["weights"]),
    ];
    for (seen, status) in IN_HANDLER.iter().zip(statuses) {
        seen.store(status as u64 + 1, Ordering::Relaxed);
    }
    0
}

#[test]
fn regions_are_not_moved_inside_a_callback() {
    let allocator = open("limit=128MiB");
    let stream = stream(allocator);
    let scope = begin(allocator, "weights").unwrap();
    malloc(allocator, 100 << 20, stream).unwrap();
    assert_eq!(vramp_region_end(scope), VRAMP_OK);
    let mut registration = 0;
    let user = allocator.id as *mut std::ffi::c_void;
    // SAFETY: the handler does not dereference the number, and may be called at any time.
    let status =
        unsafe { vramp_on_shortage(allocator, Some(tries_to_pause), user, &mut registration) };
    assert_eq!(status, VRAMP_OK);
    assert_eq!(malloc(allocator, 100 << 20, stream), Err(VRAMP_ERROR_OUT_OF_MEMORY));
    let busy = VRAMP_ERROR_BUSY as u64 + 1;
    for seen in &IN_HANDLER {
        assert_eq!(seen.load(Ordering::Relaxed), busy);
    }
    assert_eq!(state(allocator, "weights").on_card, 100 << 20);
    assert_eq!(pause(allocator, &["weights"]), VRAMP_OK, "{}", last_error());
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}
