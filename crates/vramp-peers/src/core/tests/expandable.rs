//! The rules of expandable segments.

use super::*;

#[test]
fn expandable_segments_are_mapped_as_far_as_needed_and_grow_in_place() {
    let mut rig = Rig::expandable();
    let a = rig.malloc(50 * MIB);
    assert_eq!(rig.reserved_by_last(), [60], "whole handles of 20 MiB");
    let b = rig.malloc(25 * MIB);
    assert_eq!(rig.reserved_by_last(), [20], "what is left of the last handle is used");
    assert_eq!((b.segment, b.offset), (a.segment, a.len));
    assert_eq!(b.len, Bytes::mib(25), "rests of any size are split off");
    rig.malloc(100);
    assert_eq!(rig.reserved_by_last(), [2], "small requests have a range of their own");
    assert_eq!(rig.reserved(), Bytes::mib(82));
}

#[test]
fn free_and_unmapped_stretches_side_by_side_serve_one_request() {
    let mut rig = Rig::expandable();
    let [a, b, c] = [40, 40, 40].map(|mib| rig.malloc(mib * MIB));
    rig.free(a);
    rig.free(c);
    let _ = b;
    let d = rig.malloc(90 * MIB);
    assert_eq!(d.at, c.at, "behind b: the free end and new memory");
    assert_eq!(rig.reserved_by_last(), [60]);
    assert_eq!(rig.malloc(40 * MIB).at, a.at);
}

#[test]
fn emptying_the_cache_unmaps_whole_handles_and_the_holes_are_filled_first() {
    let mut rig = Rig::expandable();
    let [a, b] = [50, 50].map(|mib| rig.malloc(mib * MIB));
    rig.free(a);
    rig.empty_cache();
    assert_eq!(rig.released_by_last(), [40], "the third handle is half in use");
    assert_eq!(rig.reserved(), Bytes::mib(60));
    let c = rig.malloc(50 * MIB);
    assert_eq!((c.at, rig.reserved_by_last()), (a.at, vec![40]));
    rig.free(b);
    rig.free(c);
    rig.empty_cache();
    assert_eq!(rig.reserved(), Bytes::ZERO);
    assert!(
        rig.pool.performed().iter().any(|op| matches!(op, TorchOp::FreeAddresses { .. })),
        "the range goes with the last of its memory"
    );
}

#[test]
fn a_full_card_unmaps_what_is_free_and_the_request_is_tried_again() {
    let mut rig = Rig::new("expandable_segments:True", Bytes::mib(100), None);
    let other = rig.pool.add_stream();
    let block = rig.malloc(60 * MIB);
    rig.free(block);
    let theirs = rig.try_malloc(80 * MIB, other.index() as u32).unwrap();
    assert_eq!(rig.released_by_last(), [60]);
    assert_eq!(rig.reserved(), Bytes::mib(80));
    assert!(rig.try_malloc(40 * MIB, 0).is_err());
    rig.free_on(theirs.id, other.index() as u32);
    rig.malloc(40 * MIB);
}

#[test]
fn more_than_a_range_of_addresses_holds_is_a_shortage() {
    let mut rig = Rig::new("expandable_segments:True", Bytes::mib(100), None);
    assert!(rig.try_malloc(200 * MIB, 0).is_err());
}
