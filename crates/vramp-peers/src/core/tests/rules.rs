//! One rule after the other, on segments of the driver's.

use proptest::prelude::*;

use super::random::{Step, step};
use super::*;
use crate::core::block;

const KIB: u64 = 1 << 10;

#[test]
fn segments_have_the_sizes_of_their_class() {
    let mut rig = Rig::plain();
    for (size, segment) in [
        (1, 2),
        (MIB, 2),
        (MIB + 1, 20),
        (10 * MIB - 512, 20),
        (10 * MIB, 10),
        (10 * MIB + 1, 12),
        (100 * MIB, 100),
    ] {
        let mut rig = Rig::plain();
        rig.malloc(size);
        assert_eq!(rig.reserved_by_last(), [segment], "{size}");
    }
    assert_eq!(rig.malloc(0).len, Bytes::new(512), "nothing gets an address too");
}

#[test]
fn small_blocks_are_split_down_to_512_bytes_and_large_ones_down_to_a_megabyte() {
    let mut rig = Rig::plain();
    let a = rig.malloc(MIB);
    let b = rig.malloc(MIB - 512);
    assert_eq!((a.segment, a.offset + a.len), (b.segment, b.offset));
    let c = rig.malloc(512);
    assert_eq!((c.segment, c.len), (a.segment, Bytes::new(512)));
    assert_eq!(rig.reserved(), Bytes::mib(2));

    let a = rig.malloc(9 * MIB);
    let b = rig.malloc(9 * MIB + 512);
    assert_eq!(a.segment, b.segment);
    assert_eq!(rig.reserved(), Bytes::mib(22), "both share one segment");
    let unsplit = rig.malloc(19 * MIB);
    assert_eq!(unsplit.len, Bytes::mib(20), "a rest of up to 1 MiB stays with the block");
}

#[test]
fn freed_blocks_merge_with_both_neighbours() {
    let mut rig = Rig::plain();
    let [a, b, c] = [4, 4, 4].map(|mib| rig.malloc(mib * MIB));
    rig.free(a);
    rig.free(c);
    assert_eq!(rig.pool.stats().inactive_split.all.current, 2);
    rig.free(b);
    assert_eq!(rig.pool.stats().inactive_split.all.current, 0);
    assert_eq!(rig.malloc(20 * MIB).at, a.at, "the whole segment is one block again");
    assert_eq!(rig.reserved(), Bytes::mib(20));
}

#[test]
fn the_smallest_block_that_fits_is_taken_and_of_equal_ones_the_lowest() {
    let mut rig = Rig::plain();
    let [a, b, c] = [40, 30, 30].map(|mib| rig.malloc(mib * MIB));
    assert!(c.at < b.at, "addresses go downwards");
    for block in [a, b, c] {
        rig.free(block);
    }
    assert_eq!(rig.malloc(28 * MIB).at, c.at);
    assert_eq!(rig.malloc(28 * MIB).at, b.at);
    assert_eq!(rig.malloc(28 * MIB).at, a.at);
}

#[test]
fn a_stream_never_gets_another_streams_free_block() {
    let mut rig = Rig::plain();
    let other = rig.pool.add_stream();
    let block = rig.malloc(30 * MIB);
    rig.free(block);
    let theirs = rig.try_malloc(30 * MIB, other.index() as u32).unwrap();
    assert_ne!(theirs.segment, block.segment);
    assert_eq!(rig.reserved(), Bytes::mib(60));
}

#[test]
fn a_block_used_on_another_stream_is_free_once_that_use_is_over() {
    let mut rig = Rig::plain();
    let other = rig.pool.add_stream();
    let block = rig.malloc(30 * MIB);
    rig.pool.record_use(block.id, other).unwrap();
    rig.free(block);
    let stats = *rig.pool.stats();
    assert_eq!((stats.allocation.all.current, stats.active.all.current), (0, 1));
    assert!(rig.pool.block(block.id).is_err(), "its id is gone");
    assert_ne!(rig.malloc(30 * MIB).at, block.at);
    let pending = rig.pool.pending();
    assert_eq!(pending.len(), 1);
    rig.pool.reached(pending[0]);
    assert_eq!(rig.malloc(30 * MIB).at, block.at);
}

#[test]
fn a_block_freed_on_another_stream_waits_for_it() {
    let mut rig = Rig::plain();
    let other = rig.pool.add_stream();
    let block = rig.malloc(30 * MIB);
    rig.free_on(block.id, other.index() as u32);
    assert_eq!(rig.pool.pending().len(), 1);
    assert!(rig.pool.free(block.id, other).is_err(), "a second free misses");
}

#[test]
fn an_event_that_could_not_be_recorded_is_made_up_for() {
    let mut rig = Rig::plain();
    let other = rig.pool.add_stream();
    let block = rig.malloc(30 * MIB);
    let marks = rig.pool.free(block.id, other).unwrap();
    assert_eq!(rig.pool.unrecorded(), marks.to_vec());
    assert_eq!(rig.pool.pending(), []);
    rig.pool.recorded(marks[0]);
    assert_eq!(rig.pool.unrecorded(), []);
    assert_eq!(rig.pool.pending(), marks.to_vec());
}

#[test]
fn oversize_blocks_are_not_split_and_serve_only_requests_of_nearly_their_size() {
    let mut rig = Rig::new("max_split_size_mb:40", Bytes::gib(80), None);
    let large = rig.malloc(100 * MIB);
    assert_eq!(rig.pool.stats().oversize_allocations.current, 1);
    rig.free(large);
    assert_eq!(rig.malloc(10 * MIB).len, Bytes::mib(10), "too small for an oversize block");
    assert_eq!(rig.malloc(60 * MIB).len, Bytes::mib(60), "more than 20 MiB smaller");
    let near = rig.malloc(90 * MIB);
    assert_eq!((near.at, near.len), (large.at, Bytes::mib(100)), "used whole");
    assert_eq!(rig.pool.stats().oversize_segments.current, 2);
}

#[test]
fn how_much_an_unsplit_block_may_be_too_large_can_be_set() {
    let settings = "max_split_size_mb:40,max_non_split_rounding_mb:60";
    let mut rig = Rig::new(settings, Bytes::gib(80), None);
    let large = rig.malloc(100 * MIB);
    rig.free(large);
    assert_eq!(rig.malloc(60 * MIB).at, large.at);
}

#[test]
fn oversize_blocks_make_room_before_everything_else_does() {
    let mut rig = Rig::new("max_split_size_mb:40", Bytes::mib(290), None);
    let blocks = [100, 80, 60, 30].map(|mib| rig.malloc(mib * MIB));
    for block in blocks {
        rig.free(block);
    }
    rig.malloc(130 * MIB);
    assert_eq!(rig.released_by_last(), [100, 80], "from the largest on, until it is enough");
    assert_eq!(rig.pool.stats().num_alloc_retries, 0);
    rig.malloc(35 * MIB);
    rig.malloc(39 * MIB);
    assert_eq!(rig.released_by_last(), [60], "the smallest that is large enough");
}

#[test]
fn a_full_card_makes_all_unused_segments_go_and_the_request_is_tried_again() {
    let mut rig = Rig::new("", Bytes::mib(100), None);
    let kept = rig.malloc(4 * MIB);
    let blocks = [40, 30].map(|mib| rig.malloc(mib * MIB));
    for block in blocks {
        rig.free(block);
    }
    rig.malloc(60 * MIB);
    assert_eq!(rig.released_by_last(), [30, 40], "in the order of their sizes");
    assert_eq!(rig.pool.stats().num_alloc_retries, 1);
    assert_eq!(rig.reserved(), Bytes::mib(80), "the shared segment stays");
    rig.free(kept);
}

#[test]
fn freed_blocks_of_other_streams_are_waited_for_before_memory_is_given_up() {
    let mut rig = Rig::new("", Bytes::mib(100), None);
    let other = rig.pool.add_stream();
    let block = rig.malloc(80 * MIB);
    rig.pool.record_use(block.id, other).unwrap();
    rig.free(block);
    rig.malloc(60 * MIB);
    assert_eq!(rig.released_by_last(), [80]);
    assert_eq!(rig.pool.stats().num_sync_all_streams, 1);
}

#[test]
fn a_request_that_nothing_can_serve_is_a_shortage_with_numbers() {
    let mut rig = Rig::new("", Bytes::mib(100), Some(Bytes::mib(64)));
    let held = rig.malloc(20 * MIB);
    let shortage = rig.try_malloc(50 * MIB, 0).unwrap_err();
    assert_eq!(shortage.requested, Bytes::mib(50));
    assert_eq!((shortage.reserved, shortage.used), (Bytes::mib(20), Bytes::mib(20)));
    assert_eq!(shortage.limit, Some(Bytes::mib(64)));
    assert_eq!(rig.pool.stats().num_ooms, 1);
    rig.free(held);
    rig.malloc(50 * MIB);
    for absurd in [u64::MAX, 1 << 60, 1 << 45] {
        assert!(rig.try_malloc(absurd, 0).is_err(), "{absurd}");
    }
}

#[test]
fn the_memory_fraction_is_a_limit() {
    let mut rig = Rig::new("per_process_memory_fraction:0.5", Bytes::mib(100), None);
    rig.malloc(30 * MIB);
    assert!(rig.try_malloc(30 * MIB, 0).is_err());
}

#[test]
fn garbage_is_collected_by_age_above_the_threshold_of_the_limit() {
    let settings = "garbage_collection_threshold:0.8";
    let mut rig = Rig::new(settings, Bytes::gib(80), Some(Bytes::mib(200)));
    let [old, young] = [60, 50].map(|mib| rig.malloc(mib * MIB));
    rig.free(old);
    for _ in 0..10 {
        let churn = rig.malloc(62 * MIB);
        rig.free(churn);
    }
    rig.free(young);
    rig.malloc(64 * MIB);
    assert_eq!(rig.released_by_last(), [60], "the old one alone: it is enough");
    assert_eq!(rig.pool.stats().num_alloc_retries, 0);
    let mut without_limit = Rig::new(settings, Bytes::gib(80), None);
    let block = without_limit.malloc(60 * MIB);
    without_limit.free(block);
    without_limit.malloc(70 * MIB);
    assert_eq!(without_limit.released_by_last(), [0u64; 0]);
}

#[test]
fn statistics_are_pytorchs() {
    let mut rig = Rig::plain();
    let a = rig.malloc(KIB - 100);
    let b = rig.malloc(3 * MIB);
    let stats = *rig.pool.stats();
    assert_eq!(stats.allocated_bytes.small_pool.current, KIB);
    assert_eq!(stats.requested_bytes.small_pool.current, KIB - 100);
    assert_eq!(stats.reserved_bytes.all.current, 22 * MIB);
    assert_eq!(stats.inactive_split_bytes.large_pool.current, 17 * MIB);
    assert_eq!((stats.segment.all.current, stats.num_device_alloc), (2, 2));
    rig.free(a);
    rig.free(b);
    rig.empty_cache();
    let stats = *rig.pool.stats();
    for now in [stats.allocation, stats.segment, stats.active, stats.reserved_bytes] {
        assert_eq!((now.all.current, now.all.allocated), (0, now.all.freed));
        assert!(now.all.peak > 0);
    }
    assert_eq!(stats.num_device_free, 2);
}

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

/// The segments of a pool as a recording would tell of them, and the ids of their blocks in order.
fn recorded(pool: &TorchPool) -> (Vec<TorchSegment>, Vec<BlockId>) {
    let address = |at: vramp_core::PoolAddr| vramp_core::DeviceAddr::new(at.offset().count());
    let mut by_address: Vec<_> = pool.blocks.iter().collect();
    by_address.sort_by_key(|(_, block)| block.at);
    let (mut segments, mut ids) = (Vec::<TorchSegment>::new(), Vec::new());
    for (slot, block) in by_address {
        if block.prev.is_none() {
            let (start, stream) = (address(block.at), block.stream);
            segments.push(TorchSegment { start, len: Bytes::ZERO, stream, held: Vec::new() });
        }
        let segment = segments.last_mut().unwrap();
        segment.len += Bytes::new(block.len);
        if block.state == block::State::Used {
            segment.held.push((address(block.at), Bytes::new(block.requested)));
            ids.push(pool.blocks.id(slot));
        }
    }
    (segments, ids)
}

fn restored(from: &TorchPool) -> (Rig, Vec<(BlockId, BlockId)>) {
    let mut rig = Rig::plain();
    rig.pool.add_stream();
    rig.pool.add_stream();
    let (segments, ids) = recorded(from);
    for plan in rig.pool.restore(&segments).unwrap() {
        assert!(rig.perform(plan.op()));
        rig.pool.settle(plan);
    }
    let blocks = rig.pool.hold_restored(&segments);
    rig.pool.audit().unwrap();
    let twins = ids.into_iter().zip(blocks.into_iter().map(|block| block.unwrap().id)).collect();
    (rig, twins)
}

proptest! {
    /// A pool restored from what another one holds goes on exactly as that one does.
    #[test]
    fn a_restored_pool_decides_like_the_recorded_one(
        before in prop::collection::vec(step(), 1..40),
        after in prop::collection::vec(step(), 1..40),
    ) {
        let mut first = Rig::plain();
        first.pool.add_stream();
        first.pool.add_stream();
        let mut held: Vec<BlockId> = Vec::new();
        for step in before {
            match step {
                Step::Malloc { size, stream } => held.push(first.try_malloc(size, stream).unwrap().id),
                Step::Free { pick, stream } if !held.is_empty() => {
                    let id = held.swap_remove(pick % held.len());
                    first.free_on(id, stream);
                }
                _ => {}
            }
        }
        first.wait();
        let (mut second, mut twins) = restored(&first.pool);
        prop_assert_eq!(first.reserved(), second.reserved());
        for step in after {
            match step {
                Step::Malloc { size, stream } => {
                    let a = first.try_malloc(size, stream).unwrap();
                    let b = second.try_malloc(size, stream).unwrap();
                    prop_assert_eq!((a.at, a.len), (b.at, b.len));
                    twins.push((a.id, b.id));
                }
                Step::Free { pick, stream } if !twins.is_empty() => {
                    let (a, b) = twins.swap_remove(pick % twins.len());
                    first.free_on(a, stream);
                    second.free_on(b, stream);
                    first.wait();
                    second.wait();
                }
                _ => {}
            }
            prop_assert_eq!(first.reserved(), second.reserved());
        }
    }
}

#[test]
fn impossible_segments_are_not_restored() {
    let segment = |start, len| TorchSegment {
        start: vramp_core::DeviceAddr::new(start),
        len: Bytes::new(len),
        stream: Rig::stream(0),
        held: Vec::new(),
    };
    let pool = Rig::plain().pool;
    for segments in [
        vec![segment(2 * MIB, 2 * MIB), segment(MIB, 2 * MIB)],
        vec![segment(0, 0)],
        vec![segment(0, 2 * MIB), segment(1 << 60, 2 * MIB)],
        vec![segment(u64::MAX - 5, 2 * MIB)],
        vec![TorchSegment { stream: Rig::stream(7), ..segment(0, MIB) }],
    ] {
        assert!(pool.restore(&segments).is_none(), "{segments:?}");
    }
    let mut used = Rig::plain();
    used.malloc(1);
    assert!(used.pool.restore(&[]).is_none(), "only an empty pool begins anew");
}

#[test]
fn a_recorded_block_outside_of_free_memory_is_left_out() {
    let mut rig = Rig::plain();
    let address = |mib: u64| vramp_core::DeviceAddr::new(mib * MIB);
    let held = vec![
        (address(64), Bytes::mib(3)),
        (address(65), Bytes::mib(3)),
        (address(90), Bytes::mib(1)),
    ];
    let segment =
        TorchSegment { start: address(64), len: Bytes::mib(20), stream: Rig::stream(0), held };
    let segments = [segment];
    for plan in rig.pool.restore(&segments).unwrap() {
        assert!(rig.perform(plan.op()));
        rig.pool.settle(plan);
    }
    let blocks = rig.pool.hold_restored(&segments);
    assert_eq!(blocks.iter().map(Option::is_some).collect::<Vec<_>>(), [false, true, false]);
    rig.pool.audit().unwrap();
}
