//! Captures begin, end and fail; blocks outlive them.
//!
//! Leases: one stream at a time.

use super::*;
use crate::{Epoch, Mark, StreamId};

const ID: ArenaId = ArenaId::new(7);

#[test]
fn a_capture_begins_once_and_ends_once() {
    let mut arena = arena(ArenaPolicy::Reusing, kib(4));
    assert_eq!(arena.end().err(), Some(ArenaCaptureError::NotRunning(ID)));
    assert_eq!(arena.abort(), Err(ArenaCaptureError::NotRunning(ID)));
    arena.begin().unwrap();
    let block = arena.alloc(kib(1), &[]).unwrap();
    assert_eq!(arena.begin(), Err(ArenaCaptureError::Running(ID)));
    assert_eq!(arena.block(block.id), Ok(block));
    assert!(arena.is_capturing());
    arena.end().unwrap();
    assert!(!arena.is_capturing());
}

#[test]
fn outside_of_a_capture_nothing_is_handed_out_and_no_point_exists() {
    let mut arena = capturing(ArenaPolicy::Reusing, kib(4));
    let block = arena.alloc(kib(1), &[]).unwrap();
    arena.end().unwrap();
    assert_eq!(arena.alloc(kib(1), &[]), Err(ArenaAllocError::NotCapturing(ID)));
    assert_eq!(arena.free(block.id, &[]), Err(ArenaFreeError::NotCapturing(ID)));
    assert_eq!(arena.record_use(block.id, &[]), Err(ArenaFreeError::NotCapturing(ID)));
    assert_eq!(arena.add_node(NodeId(1), &[]), Err(ArenaFreeError::NotCapturing(ID)));
    assert_eq!(arena.block(block.id), Ok(block));
}

#[test]
fn an_unknown_node_or_id_is_refused_and_changes_nothing() {
    let mut arena = capturing(ArenaPolicy::Reusing, kib(4));
    let mut other = Arena::new(ArenaId::new(8), ArenaPolicy::Reusing, kib(4));
    other.begin().unwrap();
    let foreign = other.alloc(kib(1), &[]).unwrap().id;
    let block = arena.alloc(kib(1), &[]).unwrap();
    let unknown = UnknownNode { node: NodeId(9) };
    assert_eq!(arena.alloc(kib(1), &[NodeId(9)]), Err(unknown.into()));
    assert_eq!(arena.free(block.id, &[NodeId(9)]), Err(unknown.into()));
    assert_eq!(arena.add_node(NodeId(1), &[NodeId(9)]), Err(unknown.into()));
    let missing = UnknownArenaBlock { arena: ID, id: foreign };
    assert_eq!(arena.free(foreign, &[]), Err(missing.into()));
    assert_eq!(arena.free_outside(foreign), Err(missing));
    arena.free(block.id, &[]).unwrap();
    let stale = UnknownArenaBlock { arena: ID, id: block.id };
    assert_eq!(arena.free(block.id, &[]), Err(stale.into()));
    assert_eq!(arena.record_use(block.id, &[]), Err(stale.into()));
    let again = arena.alloc(kib(1), &[]).unwrap();
    assert_eq!(again.offset, block.offset);
    assert_eq!(arena.free_outside(block.id), Err(stale));
    arena.audit().unwrap();
}

#[test]
fn what_escapes_a_capture_keeps_its_place_until_it_is_freed() {
    let mut arena = capturing(ArenaPolicy::Reusing, kib(4));
    let escaped = arena.alloc(kib(1), &[]).unwrap();
    let inner = arena.alloc(kib(1), &[]).unwrap();
    arena.free(inner.id, &[]).unwrap();
    assert_eq!(arena.end().unwrap().escaped(), 1);
    arena.begin().unwrap();
    assert_eq!(arena.alloc(kib(1), &[]).unwrap().offset, kib(1));
    arena.end().unwrap();
    let freed = arena.free_outside(escaped.id).unwrap();
    assert_eq!((freed.block, freed.of_this_capture), (escaped, false));
    arena.begin().unwrap();
    assert_eq!(arena.alloc(kib(1), &[]).unwrap().offset, Bytes::ZERO);
    arena.audit().unwrap();
}

#[test]
fn a_block_of_an_earlier_capture_serves_a_later_one_only_from_its_free_on() {
    let mut arena = capturing(ArenaPolicy::Reusing, kib(4));
    let earlier = arena.alloc(kib(4), &[]).unwrap();
    arena.add_node(NodeId(1), &[]).unwrap();
    arena.end().unwrap();
    arena.begin().unwrap();
    assert!(!arena.has_node(NodeId(1)));
    arena.add_node(NodeId(2), &[]).unwrap();
    arena.free(earlier.id, &[NodeId(2)]).unwrap();
    assert!(arena.alloc(kib(1), &[]).is_err(), "beside the node nothing is proven");
    assert_eq!(arena.alloc(kib(4), &[NodeId(2)]).unwrap().offset, Bytes::ZERO);
    let recording = arena.end().unwrap();
    assert_eq!(recording.lower_bound(), kib(4));
    pack(&recording).check(&recording).unwrap();
}

#[test]
fn a_block_freed_beside_the_capture_serves_the_next_one() {
    let mut arena = capturing(ArenaPolicy::Reusing, kib(4));
    let block = arena.alloc(kib(3), &[]).unwrap();
    assert!(arena.free_outside(block.id).unwrap().of_this_capture);
    arena.audit().unwrap();
    let full = arena.alloc(kib(2), &[]).unwrap_err();
    assert!(matches!(full, ArenaAllocError::Full(full) if full.largest_free == kib(1)));
    arena.end().unwrap();
    arena.begin().unwrap();
    assert_eq!(arena.alloc(kib(4), &[]).unwrap().offset, Bytes::ZERO);
}

#[test]
fn a_capture_that_fails_loses_nothing() {
    let mut arena = capturing(ArenaPolicy::Reusing, kib(4));
    let [kept, freed] = [kib(1), kib(1)].map(|len| arena.alloc(len, &[]).unwrap());
    arena.free(freed.id, &[]).unwrap();
    arena.abort().unwrap();
    arena.audit().unwrap();
    assert_eq!(arena.block(kept.id), Ok(kept));
    arena.free_outside(kept.id).unwrap();
    arena.begin().unwrap();
    assert_eq!(arena.alloc(kib(4), &[]).unwrap().offset, Bytes::ZERO);
}

#[test]
fn many_captures_over_one_arena_need_as_much_as_the_largest() {
    let mut arena = arena(ArenaPolicy::Reusing, kib(1024));
    let mut largest = Bytes::ZERO;
    for capture in 0..200 {
        let lens = [kib(capture % 17 + 1), kib(capture % 5 + 1)].map(Ask::Take);
        let [first, second] = lens;
        let recording = record(&mut arena, &[first, second, Ask::Free(0), Ask::Free(1)]);
        largest = largest.max(recording.high_water());
    }
    assert_eq!(arena.high_water(), largest);
}

#[test]
fn the_census_adds_up_to_the_capacity_and_live_ranges_lie_between_free_ones() {
    let mut arena = capturing(ArenaPolicy::Reusing, kib(16));
    let blocks = [1, 2, 3].map(|len| arena.alloc(kib(len), &[]).unwrap());
    arena.free(blocks[1].id, &[]).unwrap();
    let census =
        ArenaCensus { blocks: 2, live: kib(4), used: kib(4), free: kib(2), untouched: kib(10) };
    assert_eq!(arena.census(), census);
    let live: Vec<_> = arena.live_ranges().collect();
    assert_eq!(live, [(Bytes::ZERO, kib(1)), (kib(3), kib(3))]);
}

#[test]
fn blocks_that_escaped_ten_thousand_captures_are_one_obstacle_to_the_next() {
    let mut arena = arena(ArenaPolicy::Reusing, Bytes::gib(1));
    let asks = [Ask::Take(kib(8)), Ask::Take(kib(1)), Ask::Free(0)];
    for capture in 0..10_000 {
        arena.begin().unwrap();
        let scratch = arena.alloc(kib(8), &[]).unwrap();
        arena.alloc(kib(1), &[]).unwrap();
        arena.free(scratch.id, &[]).unwrap();
        let recording = arena.end().unwrap();
        assert!(recording.obstacles.len() <= 1, "{} after {capture}", recording.obstacles.len());
        assert!(arena.space.stretches().count() <= 2);
    }
    assert_eq!(arena.blocks(), 10_000);
    let recording = record(&mut arena, &asks);
    assert_eq!(recording.obstacles.len(), 1);
    // A block of an earlier capture that this one frees is an obstacle of its own.
    let ids: Vec<ArenaBlockId> = arena.held.keys().copied().collect();
    arena.begin().unwrap();
    for &id in &ids[5_000..5_003] {
        arena.free(id, &[]).unwrap();
    }
    let recording = arena.end().unwrap();
    arena.audit().unwrap();
    assert_eq!(recording.obstacles.len(), 5);
    // Freed in any order, they leave one free piece behind.
    for (at, &id) in ids.iter().enumerate().rev().step_by(2).chain(ids.iter().enumerate()) {
        if !(5_000..5_003).contains(&at) && arena.block(id).is_ok() {
            arena.free_outside(id).unwrap();
        }
    }
    arena.begin().unwrap();
    assert_eq!(arena.space.stretches().count(), 1);
    arena.audit().unwrap();
}

#[test]
fn a_shortened_arena_keeps_what_it_ever_used() {
    for policy in [ArenaPolicy::Monotone, ArenaPolicy::Reusing] {
        let mut arena = capturing(policy, kib(64));
        let blocks = [1, 2, 3].map(|len| arena.alloc(kib(len), &[]).unwrap());
        arena.free(blocks[2].id, &[]).unwrap();
        arena.end().unwrap();
        arena.shorten(kib(16));
        arena.audit().unwrap();
        assert_eq!(arena.capacity(), kib(16));
        arena.shorten(kib(1));
        arena.shorten(kib(32));
        arena.audit().unwrap();
        assert_eq!((arena.capacity(), arena.high_water()), (kib(6), kib(6)));
        arena.begin().unwrap();
        assert!(arena.alloc(kib(4), &[]).is_err());
        assert_eq!(arena.alloc(kib(3), &[]).is_ok(), policy == ArenaPolicy::Reusing);
        arena.audit().unwrap();
    }
}

fn mark(stream: u32, epoch: u64) -> Mark {
    Mark { stream: StreamId::new(stream), epoch: Epoch(epoch) }
}

fn stream(number: u32) -> StreamId {
    StreamId::new(number)
}

const RUNNING: fn(Mark) -> bool = |_| false;
const OVER: fn(Mark) -> bool = |_| true;

#[test]
fn overlapping_replays_of_two_streams_are_refused_until_the_first_is_over() {
    let mut leases = Leases::default();
    let first = leases.take(stream(0), Overlap::Refuse, RUNNING).unwrap();
    let held = ArenaBusy::Held { holder: stream(0), taker: stream(1) };
    assert_eq!(leases.take(stream(1), Overlap::Refuse, OVER), Err(held));
    assert_eq!(leases.take(stream(1), Overlap::Order, OVER), Err(held));
    leases.end(first.lease, mark(0, 3)).unwrap();
    let unfinished = ArenaBusy::Unfinished { unfinished: mark(0, 3), taker: stream(1) };
    assert_eq!(leases.take(stream(1), Overlap::Refuse, RUNNING), Err(unfinished));
    assert!(!leases.is_idle(RUNNING));
    let second = leases.take(stream(1), Overlap::Refuse, OVER).unwrap();
    assert_eq!(second.waits, []);
    assert_eq!(leases.holder(), Some(stream(1)));
}

#[test]
fn an_ordered_taker_waits_for_all_that_is_not_over() {
    let mut leases = Leases::default();
    let first = leases.take(stream(0), Overlap::Order, RUNNING).unwrap();
    leases.end(first.lease, mark(0, 3)).unwrap();
    leases.note_use(mark(2, 5));
    leases.note_use(mark(2, 4));
    let second = leases.take(stream(1), Overlap::Order, RUNNING).unwrap();
    assert_eq!(second.waits, [mark(0, 3), mark(2, 5)]);
}

#[test]
fn one_stream_holds_several_leases_and_never_waits_for_itself() {
    let mut leases = Leases::default();
    let [first, second] =
        [(); 2].map(|()| leases.take(stream(0), Overlap::Refuse, RUNNING).unwrap());
    leases.end(first.lease, mark(0, 1)).unwrap();
    assert!(leases.take(stream(1), Overlap::Order, OVER).is_err(), "one lease is still held");
    leases.end(second.lease, mark(0, 2)).unwrap();
    let third = leases.take(stream(0), Overlap::Refuse, RUNNING).unwrap();
    assert_eq!(third.waits, []);
    leases.cancel(third.lease).unwrap();
    assert!(leases.is_idle(|mark| mark.epoch <= Epoch(2)));
    assert!(!leases.is_idle(|mark| mark.epoch <= Epoch(1)));
}

#[test]
fn a_lease_ends_once_and_with_a_mark_of_its_stream() {
    let mut leases = Leases::default();
    let taken = leases.take(stream(0), Overlap::Refuse, OVER).unwrap();
    let other = LeaseEndError::OtherStream { holder: stream(0), mark: mark(1, 1) };
    assert_eq!(leases.end(taken.lease, mark(1, 1)), Err(other));
    assert_eq!(leases.holder(), Some(stream(0)));
    leases.end(taken.lease, mark(0, 1)).unwrap();
    let unknown = UnknownArenaLease { lease: taken.lease };
    assert_eq!(leases.end(taken.lease, mark(0, 1)), Err(unknown.into()));
    assert_eq!(leases.cancel(taken.lease), Err(unknown));
}

#[test]
fn memory_is_lent_only_when_no_stream_reads_results_any_more() {
    let mut leases = Leases::default();
    assert!(leases.is_idle(RUNNING));
    leases.note_use(mark(4, 9));
    assert!(!leases.is_idle(RUNNING));
    assert!(leases.is_idle(OVER));
}
