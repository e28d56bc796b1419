//! Regions that leave the card and come back.

use std::ptr::{null, null_mut};
use std::thread;

use crate::common::sleep::*;
use crate::common::tiers::{MIB, open_mapped};
use crate::common::*;
use vramp_capi::abi::vramp_status_t::*;
use vramp_capi::interface::*;
use vramp_capi::sleep::abi::vramp_region_phase_t::*;
use vramp_capi::sleep::abi::*;
use vramp_capi::sleep::*;

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
