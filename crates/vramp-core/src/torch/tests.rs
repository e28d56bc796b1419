//! The caching allocator on paper: its rules one by one, then random programs.

use proptest::prelude::*;

use super::*;
use crate::place::Request;
use crate::{BlockId, Bytes, Shortage, StreamId};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// A pool on a card that is a number.
struct Paper {
    pool: TorchPool,
    card: u64,
    taken: u64,
    /// The operation that fails next, counted down.
    fails_in: Option<u32>,
}

impl Paper {
    fn new(settings: &str, card: Bytes, limit: Option<Bytes>) -> Paper {
        let config = TorchConfig::parse(settings).unwrap();
        let mut pool = TorchPool::new(config, card, limit);
        pool.add_stream();
        Paper { pool, card: card.count(), taken: 0, fails_in: None }
    }

    fn plain() -> Paper {
        Paper::new("", Bytes::gib(80), None)
    }

    fn expandable() -> Paper {
        Paper::new("expandable_segments:True", Bytes::gib(80), None)
    }

    fn stream(number: u32) -> StreamId {
        StreamId::new(number)
    }

    fn malloc(&mut self, size: u64) -> TorchBlock {
        self.try_malloc(size, 0).expect("there is memory")
    }

    fn try_malloc(&mut self, size: u64, stream: u32) -> Result<TorchBlock, Shortage> {
        let request = Request { size: Bytes::new(size), stream: Paper::stream(stream) };
        let mut attempt = TorchAttempt::new(request);
        loop {
            let step = self.pool.place(&mut attempt);
            self.pool.audit().unwrap();
            match step {
                TorchStep::Placed(block) => return Ok(block),
                // Nothing is over before somebody waits for it.
                TorchStep::Poll => {}
                TorchStep::Wait => self.wait(),
                TorchStep::Perform(plan) => {
                    if self.perform(plan.op()) {
                        self.pool.settle(plan);
                    } else {
                        attempt.full(&self.pool);
                    }
                }
                TorchStep::Short(shortage) => return Err(shortage),
            }
            self.pool.audit().unwrap();
        }
    }

    fn free(&mut self, block: TorchBlock) {
        self.free_on(block.id, 0);
    }

    fn free_on(&mut self, id: BlockId, stream: u32) {
        for mark in self.pool.free(id, Paper::stream(stream)).unwrap() {
            self.pool.recorded(mark);
        }
        self.pool.audit().unwrap();
    }

    fn wait(&mut self) {
        for mark in self.pool.waited_for() {
            self.pool.reached(mark);
        }
    }

    fn empty_cache(&mut self) {
        self.wait();
        let mut release = self.pool.release(Bytes::ZERO);
        while let Some(plan) = self.pool.next_release(&mut release) {
            assert!(self.perform(plan.op()), "giving back does not fail here");
            self.pool.settle(plan);
            self.pool.audit().unwrap();
        }
    }

    fn perform(&mut self, op: TorchOp) -> bool {
        if let Some(left) = &mut self.fails_in
            && matches!(
                op,
                TorchOp::Allocate { .. } | TorchOp::Map { .. } | TorchOp::Reserve { .. }
            )
        {
            *left = left.wrapping_sub(1);
            if *left == u32::MAX {
                self.fails_in = None;
                return false;
            }
        }
        match op {
            TorchOp::Allocate { len, .. } | TorchOp::Map { len, .. } => {
                if self.taken + len.count() > self.card {
                    return false;
                }
                self.taken += len.count();
            }
            TorchOp::Free { len, .. } | TorchOp::Unmap { len, .. } => self.taken -= len.count(),
            TorchOp::Reserve { .. } | TorchOp::FreeAddresses { .. } => {}
        }
        true
    }

    fn reserved(&self) -> Bytes {
        assert_eq!(self.pool.counters().reserved.count(), self.taken);
        Bytes::new(self.taken)
    }

    /// Sizes taken from the driver by the last request.
    fn taken_by_last(&self) -> Vec<u64> {
        let taken = |op: &TorchOp| match op {
            TorchOp::Allocate { len, .. } | TorchOp::Map { len, .. } => Some(len.count() / MIB),
            _ => None,
        };
        self.pool.performed().iter().filter_map(taken).collect()
    }

    /// Sizes given back by the last request.
    fn given_by_last(&self) -> Vec<u64> {
        let given = |op: &TorchOp| match op {
            TorchOp::Free { len, .. } | TorchOp::Unmap { len, .. } => Some(len.count() / MIB),
            _ => None,
        };
        self.pool.performed().iter().filter_map(given).collect()
    }
}

#[test]
fn segments_have_the_sizes_of_their_class() {
    let mut paper = Paper::plain();
    for (size, segment) in [
        (1, 2),
        (MIB, 2),
        (MIB + 1, 20),
        (10 * MIB - 512, 20),
        (10 * MIB, 10),
        (10 * MIB + 1, 12),
        (100 * MIB, 100),
    ] {
        let mut paper = Paper::plain();
        paper.malloc(size);
        assert_eq!(paper.taken_by_last(), [segment], "{size}");
    }
    assert_eq!(paper.malloc(0).len, Bytes::new(512), "nothing gets an address too");
}

#[test]
fn small_blocks_are_split_down_to_512_bytes_and_large_ones_down_to_a_megabyte() {
    let mut paper = Paper::plain();
    let a = paper.malloc(MIB);
    let b = paper.malloc(MIB - 512);
    assert_eq!((a.segment, a.offset + a.len), (b.segment, b.offset));
    let c = paper.malloc(512);
    assert_eq!((c.segment, c.len), (a.segment, Bytes::new(512)));
    assert_eq!(paper.reserved(), Bytes::mib(2));

    let a = paper.malloc(9 * MIB);
    let b = paper.malloc(9 * MIB + 512);
    assert_eq!(a.segment, b.segment);
    assert_eq!(paper.reserved(), Bytes::mib(22), "both share one segment");
    let unsplit = paper.malloc(19 * MIB);
    assert_eq!(unsplit.len, Bytes::mib(20), "a rest of up to 1 MiB stays with the block");
}

#[test]
fn freed_blocks_merge_with_both_neighbours() {
    let mut paper = Paper::plain();
    let [a, b, c] = [4, 4, 4].map(|mib| paper.malloc(mib * MIB));
    paper.free(a);
    paper.free(c);
    assert_eq!(paper.pool.stats().inactive_split.all.current, 2);
    paper.free(b);
    assert_eq!(paper.pool.stats().inactive_split.all.current, 0);
    assert_eq!(paper.malloc(20 * MIB).at, a.at, "the whole segment is one block again");
    assert_eq!(paper.reserved(), Bytes::mib(20));
}

#[test]
fn the_smallest_block_that_fits_is_taken_and_of_equal_ones_the_lowest() {
    let mut paper = Paper::plain();
    let [a, b, c] = [40, 30, 30].map(|mib| paper.malloc(mib * MIB));
    assert!(c.at < b.at, "addresses go downwards");
    for block in [a, b, c] {
        paper.free(block);
    }
    assert_eq!(paper.malloc(28 * MIB).at, c.at);
    assert_eq!(paper.malloc(28 * MIB).at, b.at);
    assert_eq!(paper.malloc(28 * MIB).at, a.at);
}

#[test]
fn a_stream_never_gets_another_streams_free_block() {
    let mut paper = Paper::plain();
    let other = paper.pool.add_stream();
    let block = paper.malloc(30 * MIB);
    paper.free(block);
    let theirs = paper.try_malloc(30 * MIB, other.index() as u32).unwrap();
    assert_ne!(theirs.segment, block.segment);
    assert_eq!(paper.reserved(), Bytes::mib(60));
}

#[test]
fn a_block_used_on_another_stream_is_free_once_that_use_is_over() {
    let mut paper = Paper::plain();
    let other = paper.pool.add_stream();
    let block = paper.malloc(30 * MIB);
    paper.pool.record_use(block.id, other).unwrap();
    paper.free(block);
    let stats = *paper.pool.stats();
    assert_eq!((stats.allocation.all.current, stats.active.all.current), (0, 1));
    assert!(paper.pool.block(block.id).is_err(), "its id is gone");
    assert_ne!(paper.malloc(30 * MIB).at, block.at);
    let pending = paper.pool.pending();
    assert_eq!(pending.len(), 1);
    paper.pool.reached(pending[0]);
    assert_eq!(paper.malloc(30 * MIB).at, block.at);
}

#[test]
fn a_block_freed_on_another_stream_waits_for_it() {
    let mut paper = Paper::plain();
    let other = paper.pool.add_stream();
    let block = paper.malloc(30 * MIB);
    paper.free_on(block.id, other.index() as u32);
    assert_eq!(paper.pool.pending().len(), 1);
    assert!(paper.pool.free(block.id, other).is_err(), "a second free misses");
}

#[test]
fn an_event_that_could_not_be_recorded_is_made_up_for() {
    let mut paper = Paper::plain();
    let other = paper.pool.add_stream();
    let block = paper.malloc(30 * MIB);
    let marks = paper.pool.free(block.id, other).unwrap();
    assert_eq!(paper.pool.unrecorded(), marks.to_vec());
    assert_eq!(paper.pool.pending(), []);
    paper.pool.recorded(marks[0]);
    assert_eq!(paper.pool.unrecorded(), []);
    assert_eq!(paper.pool.pending(), marks.to_vec());
}

#[test]
fn oversize_blocks_are_not_split_and_serve_only_requests_of_nearly_their_size() {
    let mut paper = Paper::new("max_split_size_mb:40", Bytes::gib(80), None);
    let large = paper.malloc(100 * MIB);
    assert_eq!(paper.pool.stats().oversize_allocations.current, 1);
    paper.free(large);
    assert_eq!(paper.malloc(10 * MIB).len, Bytes::mib(10), "too small for an oversize block");
    assert_eq!(paper.malloc(60 * MIB).len, Bytes::mib(60), "more than 20 MiB smaller");
    let near = paper.malloc(90 * MIB);
    assert_eq!((near.at, near.len), (large.at, Bytes::mib(100)), "used whole");
    assert_eq!(paper.pool.stats().oversize_segments.current, 2);
}

#[test]
fn how_much_an_unsplit_block_may_be_too_large_can_be_set() {
    let settings = "max_split_size_mb:40,max_non_split_rounding_mb:60";
    let mut paper = Paper::new(settings, Bytes::gib(80), None);
    let large = paper.malloc(100 * MIB);
    paper.free(large);
    assert_eq!(paper.malloc(60 * MIB).at, large.at);
}

#[test]
fn oversize_blocks_make_room_before_everything_else_does() {
    let mut paper = Paper::new("max_split_size_mb:40", Bytes::mib(290), None);
    let blocks = [100, 80, 60, 30].map(|mib| paper.malloc(mib * MIB));
    for block in blocks {
        paper.free(block);
    }
    paper.malloc(130 * MIB);
    assert_eq!(paper.given_by_last(), [100, 80], "from the largest on, until it is enough");
    assert_eq!(paper.pool.stats().num_alloc_retries, 0);
    paper.malloc(35 * MIB);
    paper.malloc(39 * MIB);
    assert_eq!(paper.given_by_last(), [60], "the smallest that is large enough");
}

#[test]
fn a_full_card_makes_all_unused_segments_go_and_the_request_is_tried_again() {
    let mut paper = Paper::new("", Bytes::mib(100), None);
    let kept = paper.malloc(4 * MIB);
    let blocks = [40, 30].map(|mib| paper.malloc(mib * MIB));
    for block in blocks {
        paper.free(block);
    }
    paper.malloc(60 * MIB);
    assert_eq!(paper.given_by_last(), [30, 40], "in the order of their sizes");
    assert_eq!(paper.pool.stats().num_alloc_retries, 1);
    assert_eq!(paper.reserved(), Bytes::mib(80), "the shared segment stays");
    paper.free(kept);
}

#[test]
fn freed_blocks_of_other_streams_are_waited_for_before_memory_is_given_up() {
    let mut paper = Paper::new("", Bytes::mib(100), None);
    let other = paper.pool.add_stream();
    let block = paper.malloc(80 * MIB);
    paper.pool.record_use(block.id, other).unwrap();
    paper.free(block);
    paper.malloc(60 * MIB);
    assert_eq!(paper.given_by_last(), [80]);
    assert_eq!(paper.pool.stats().num_sync_all_streams, 1);
}

#[test]
fn a_request_that_nothing_can_serve_is_a_shortage_with_numbers() {
    let mut paper = Paper::new("", Bytes::mib(100), Some(Bytes::mib(64)));
    let held = paper.malloc(20 * MIB);
    let shortage = paper.try_malloc(50 * MIB, 0).unwrap_err();
    assert_eq!(shortage.requested, Bytes::mib(50));
    assert_eq!((shortage.reserved, shortage.used), (Bytes::mib(20), Bytes::mib(20)));
    assert_eq!(shortage.limit, Some(Bytes::mib(64)));
    assert_eq!(paper.pool.stats().num_ooms, 1);
    paper.free(held);
    paper.malloc(50 * MIB);
    for absurd in [u64::MAX, 1 << 60, 1 << 45] {
        assert!(paper.try_malloc(absurd, 0).is_err(), "{absurd}");
    }
}

#[test]
fn the_memory_fraction_is_a_limit() {
    let mut paper = Paper::new("per_process_memory_fraction:0.5", Bytes::mib(100), None);
    paper.malloc(30 * MIB);
    assert!(paper.try_malloc(30 * MIB, 0).is_err());
}

#[test]
fn garbage_is_collected_by_age_above_the_threshold_of_the_limit() {
    let settings = "garbage_collection_threshold:0.8";
    let mut paper = Paper::new(settings, Bytes::gib(80), Some(Bytes::mib(200)));
    let [old, young] = [60, 50].map(|mib| paper.malloc(mib * MIB));
    paper.free(old);
    for _ in 0..10 {
        let churn = paper.malloc(62 * MIB);
        paper.free(churn);
    }
    paper.free(young);
    paper.malloc(64 * MIB);
    assert_eq!(paper.given_by_last(), [60], "the old one alone: it is enough");
    assert_eq!(paper.pool.stats().num_alloc_retries, 0);
    let mut without_limit = Paper::new(settings, Bytes::gib(80), None);
    let block = without_limit.malloc(60 * MIB);
    without_limit.free(block);
    without_limit.malloc(70 * MIB);
    assert_eq!(without_limit.given_by_last(), [0u64; 0]);
}

#[test]
fn statistics_are_pytorchs() {
    let mut paper = Paper::plain();
    let a = paper.malloc(KIB - 100);
    let b = paper.malloc(3 * MIB);
    let stats = *paper.pool.stats();
    assert_eq!(stats.allocated_bytes.small_pool.current, KIB);
    assert_eq!(stats.requested_bytes.small_pool.current, KIB - 100);
    assert_eq!(stats.reserved_bytes.all.current, 22 * MIB);
    assert_eq!(stats.inactive_split_bytes.large_pool.current, 17 * MIB);
    assert_eq!((stats.segment.all.current, stats.num_device_alloc), (2, 2));
    paper.free(a);
    paper.free(b);
    paper.empty_cache();
    let stats = *paper.pool.stats();
    for now in [stats.allocation, stats.segment, stats.active, stats.reserved_bytes] {
        assert_eq!((now.all.current, now.all.allocated), (0, now.all.freed));
        assert!(now.all.peak > 0);
    }
    assert_eq!(stats.num_device_free, 2);
}

#[test]
fn expandable_segments_are_mapped_as_far_as_needed_and_grow_in_place() {
    let mut paper = Paper::expandable();
    let a = paper.malloc(50 * MIB);
    assert_eq!(paper.taken_by_last(), [60], "whole handles of 20 MiB");
    let b = paper.malloc(25 * MIB);
    assert_eq!(paper.taken_by_last(), [20], "what is left of the last handle is used");
    assert_eq!((b.segment, b.offset), (a.segment, a.len));
    assert_eq!(b.len, Bytes::mib(25), "rests of any size are split off");
    paper.malloc(100);
    assert_eq!(paper.taken_by_last(), [2], "small requests have a range of their own");
    assert_eq!(paper.reserved(), Bytes::mib(82));
}

#[test]
fn free_and_unmapped_stretches_side_by_side_serve_one_request() {
    let mut paper = Paper::expandable();
    let [a, b, c] = [40, 40, 40].map(|mib| paper.malloc(mib * MIB));
    paper.free(a);
    paper.free(c);
    let _ = b;
    let d = paper.malloc(90 * MIB);
    assert_eq!(d.at, c.at, "behind b: the free end and new memory");
    assert_eq!(paper.taken_by_last(), [60]);
    assert_eq!(paper.malloc(40 * MIB).at, a.at);
}

#[test]
fn emptying_the_cache_unmaps_whole_handles_and_the_holes_are_filled_first() {
    let mut paper = Paper::expandable();
    let [a, b] = [50, 50].map(|mib| paper.malloc(mib * MIB));
    paper.free(a);
    paper.empty_cache();
    assert_eq!(paper.given_by_last(), [40], "the third handle is half in use");
    assert_eq!(paper.reserved(), Bytes::mib(60));
    let c = paper.malloc(50 * MIB);
    assert_eq!((c.at, paper.taken_by_last()), (a.at, vec![40]));
    paper.free(b);
    paper.free(c);
    paper.empty_cache();
    assert_eq!(paper.reserved(), Bytes::ZERO);
    assert!(
        paper.pool.performed().iter().any(|op| matches!(op, TorchOp::FreeAddresses { .. })),
        "the range goes with the last of its memory"
    );
}

#[test]
fn a_full_card_unmaps_what_is_free_and_the_request_is_tried_again() {
    let mut paper = Paper::new("expandable_segments:True", Bytes::mib(100), None);
    let other = paper.pool.add_stream();
    let block = paper.malloc(60 * MIB);
    paper.free(block);
    let theirs = paper.try_malloc(80 * MIB, other.index() as u32).unwrap();
    assert_eq!(paper.given_by_last(), [60]);
    assert_eq!(paper.reserved(), Bytes::mib(80));
    assert!(paper.try_malloc(40 * MIB, 0).is_err());
    paper.free_on(theirs.id, other.index() as u32);
    paper.malloc(40 * MIB);
}

#[test]
fn more_than_a_range_of_addresses_holds_is_a_shortage() {
    let mut paper = Paper::new("expandable_segments:True", Bytes::mib(100), None);
    assert!(paper.try_malloc(200 * MIB, 0).is_err());
}

#[derive(Clone, Debug)]
enum Step {
    Malloc { size: u64, stream: u32 },
    Free { pick: usize, stream: u32 },
    Use { pick: usize, stream: u32 },
    Reach,
    EmptyCache,
    Fail { after: u32 },
}

fn step() -> impl Strategy<Value = Step> {
    let size = prop_oneof![0..MIB, MIB..30 * MIB, Just(MIB), Just(10 * MIB), 1..200 * MIB];
    prop_oneof![
        8 => (size, 0..3u32).prop_map(|(size, stream)| Step::Malloc { size, stream }),
        6 => (any::<usize>(), 0..3u32).prop_map(|(pick, stream)| Step::Free { pick, stream }),
        2 => (any::<usize>(), 0..3u32).prop_map(|(pick, stream)| Step::Use { pick, stream }),
        1 => Just(Step::Reach),
        1 => Just(Step::EmptyCache),
        1 => (0..3u32).prop_map(|after| Step::Fail { after }),
    ]
}

fn settings() -> impl Strategy<Value = &'static str> {
    prop_oneof![
        Just(""),
        Just("expandable_segments:True"),
        Just("max_split_size_mb:21,garbage_collection_threshold:0.3"),
        Just("expandable_segments:True,max_split_size_mb:30,garbage_collection_threshold:0.6"),
        Just("roundup_power2_divisions:4"),
    ]
}

proptest! {
    /// Every step keeps every invariant (the audit runs in each), no two blocks overlap, and at the
    /// end nothing is left.
    #[test]
    fn random_programs_keep_every_invariant(
        settings in settings(),
        steps in prop::collection::vec(step(), 1..60),
    ) {
        let mut paper = Paper::new(settings, Bytes::mib(600), Some(Bytes::mib(500)));
        paper.pool.add_stream();
        paper.pool.add_stream();
        let mut held: Vec<TorchBlock> = Vec::new();
        for step in steps {
            match step {
                Step::Malloc { size, stream } => {
                    if let Ok(block) = paper.try_malloc(size, stream) {
                        prop_assert!(block.len.count() >= size);
                        let end = block.at.plus(block.len.count());
                        for other in &held {
                            let apart = end <= other.at || other.at.plus(other.len.count()) <= block.at;
                            prop_assert!(apart, "{block:?} overlaps {other:?}");
                        }
                        held.push(block);
                    }
                }
                Step::Free { pick, stream } if !held.is_empty() => {
                    let block = held.swap_remove(pick % held.len());
                    paper.free_on(block.id, stream);
                    prop_assert!(paper.pool.block(block.id).is_err());
                }
                Step::Use { pick, stream } if !held.is_empty() => {
                    let block = held[pick % held.len()];
                    paper.pool.record_use(block.id, Paper::stream(stream)).unwrap();
                }
                Step::Reach => paper.wait(),
                Step::EmptyCache => paper.empty_cache(),
                Step::Fail { after } => paper.fails_in = Some(after),
                _ => {}
            }
            // PyTorch checks the limit before it rounds up to whole handles.
            let rounding = if settings.contains("expandable") { 20 } else { 0 };
            prop_assert!(paper.reserved() <= Bytes::mib(500 + rounding));
        }
        for block in held {
            paper.free(block);
        }
        paper.empty_cache();
        prop_assert_eq!(paper.reserved(), Bytes::ZERO);
        prop_assert_eq!(paper.pool.counters().live, Bytes::ZERO);
    }
}

/// The segments of a pool as a recording would tell of them, and the ids of their blocks in order.
fn recorded(pool: &TorchPool) -> (Vec<TorchSegment>, Vec<BlockId>) {
    let address = |at: crate::Spot| crate::DeviceAddr::new(at.offset().count());
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

fn restored(from: &TorchPool) -> (Paper, Vec<(BlockId, BlockId)>) {
    let mut paper = Paper::plain();
    paper.pool.add_stream();
    paper.pool.add_stream();
    let (segments, ids) = recorded(from);
    for plan in paper.pool.restore(&segments).unwrap() {
        assert!(paper.perform(plan.op()));
        paper.pool.settle(plan);
    }
    let blocks = paper.pool.hold_restored(&segments);
    paper.pool.audit().unwrap();
    let twins = ids.into_iter().zip(blocks.into_iter().map(|block| block.unwrap().id)).collect();
    (paper, twins)
}

proptest! {
    /// A pool restored from what another one holds goes on exactly as that one does.
    #[test]
    fn a_restored_pool_decides_like_the_recorded_one(
        before in prop::collection::vec(step(), 1..40),
        after in prop::collection::vec(step(), 1..40),
    ) {
        let mut first = Paper::plain();
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
        start: crate::DeviceAddr::new(start),
        len: Bytes::new(len),
        stream: Paper::stream(0),
        held: Vec::new(),
    };
    let pool = Paper::plain().pool;
    for segments in [
        vec![segment(2 * MIB, 2 * MIB), segment(MIB, 2 * MIB)],
        vec![segment(0, 0)],
        vec![segment(0, 2 * MIB), segment(1 << 60, 2 * MIB)],
        vec![segment(u64::MAX - 5, 2 * MIB)],
        vec![TorchSegment { stream: Paper::stream(7), ..segment(0, MIB) }],
    ] {
        assert!(pool.restore(&segments).is_none(), "{segments:?}");
    }
    let mut used = Paper::plain();
    used.malloc(1);
    assert!(used.pool.restore(&[]).is_none(), "only an empty pool begins anew");
}

#[test]
fn a_recorded_block_outside_of_free_memory_is_left_out() {
    let mut paper = Paper::plain();
    let address = |mib: u64| crate::DeviceAddr::new(mib * MIB);
    let held = vec![
        (address(64), Bytes::mib(3)),
        (address(65), Bytes::mib(3)),
        (address(90), Bytes::mib(1)),
    ];
    let segment =
        TorchSegment { start: address(64), len: Bytes::mib(20), stream: Paper::stream(0), held };
    let segments = [segment];
    for plan in paper.pool.restore(&segments).unwrap() {
        assert!(paper.perform(plan.op()));
        paper.pool.settle(plan);
    }
    let blocks = paper.pool.hold_restored(&segments);
    assert_eq!(blocks.iter().map(Option::is_some).collect::<Vec<_>>(), [false, true, false]);
    paper.pool.audit().unwrap();
}
