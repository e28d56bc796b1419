//! Counters of allocations, and peaks of streams and reservations.

use std::thread;

use crate::common::blocks::{Bench, KIB};
use vramp_driver::Call;
use vramp_driver::sim::FaultPlan;
use vramp_tiers::Bytes;
use vramp_tiers::tracked::{Count, Counts, MallocError, Policies, Scope};

/// A card with a budget of 16 MiB.
fn bench() -> Bench {
    Bench::new(Bytes::mib(16), Policies::default())
}

/// So many blocks of a KiB now, at most and in all.
fn blocks(now: i64, peak: i64, total: u64) -> Counts {
    let kib = |count: i64| count * 1024;
    Counts {
        bytes: Count { now: kib(now), peak: kib(peak), total: total * 1024 },
        blocks: Count { now, peak, total },
    }
}

#[test]
fn a_counter_without_events_and_one_after_all_frees_are_empty_again() {
    let Bench { tracked, streams: [stream, _], .. } = bench();
    let counter = tracked.count();
    assert_eq!(counter.counts(), Counts::default());
    let held: Vec<_> = (0..10).map(|_| tracked.malloc(KIB(1), stream).unwrap()).collect();
    assert_eq!(counter.counts(), blocks(10, 10, 10));
    held.into_iter().for_each(|block| tracked.free(block, stream).unwrap());
    assert_eq!(counter.counts(), blocks(0, 10, 10));
}

#[test]
fn counters_nest_and_an_inner_one_takes_nothing_from_the_outer() {
    let Bench { tracked, streams: [stream, _], .. } = bench();
    let outer = tracked.count();
    let first = tracked.malloc(KIB(1), stream).unwrap();
    {
        let inner = tracked.count();
        let second = tracked.malloc(KIB(1), stream).unwrap();
        tracked.free(second, stream).unwrap();
        assert_eq!(inner.counts(), blocks(0, 1, 1));
    }
    assert_eq!(outer.counts(), blocks(1, 2, 2));
    // They may also end in the order in which they began.
    let later = tracked.count();
    drop(outer);
    tracked.free(first, stream).unwrap();
    assert_eq!(later.counts(), blocks(-1, 0, 0));
}

#[test]
fn more_frees_than_allocations_within_a_counter_are_negative_and_nothing_underflows() {
    let Bench { tracked, space, streams: [stream, _], .. } = bench();
    let before: Vec<_> = (0..3).map(|_| tracked.malloc(KIB(1), stream).unwrap()).collect();
    let counter = tracked.count();
    let more = tracked.malloc(KIB(1), stream).unwrap();
    before.into_iter().for_each(|block| tracked.free(block, stream).unwrap());
    assert_eq!(counter.counts(), blocks(-2, 1, 1));
    tracked.free(more, stream).unwrap();
    assert_eq!((counter.counts(), space.total()), (blocks(-3, 1, 1), Bytes::ZERO));
}

#[test]
fn a_counter_counts_the_calls_of_all_threads() {
    let Bench { tracked, streams: [stream, _], .. } = bench();
    let all = tracked.count();
    let handed: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = (0..8)
            .map(|_| {
                scope.spawn(|| {
                    let kept = tracked.malloc(KIB(1), stream).unwrap();
                    let freed = tracked.malloc(KIB(1), stream).unwrap();
                    tracked.free(freed, stream).unwrap();
                    kept
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    handed.into_iter().for_each(|block| tracked.free(block, stream).unwrap());
    let counts = all.counts();
    assert_eq!((counts.blocks.now, counts.blocks.total), (0, 16));
}

#[test]
fn what_was_refused_or_failed_is_not_counted() {
    let Bench { device, tracked, space, streams: [stream, _], .. } = bench();
    let counter = tracked.count();
    assert!(matches!(tracked.malloc(Bytes::mib(64), stream), Err(MallocError::SpaceFull(_))));
    device.set_faults(FaultPlan::from_nth_of(Call::Create, 1));
    let error = tracked.malloc(Bytes::mib(8), stream);
    assert!(error.is_err(), "{error:?}");
    assert_eq!((counter.counts(), space.total()), (Counts::default(), Bytes::ZERO));
}

#[test]
fn each_stream_has_a_peak_that_begins_anew_when_reset() {
    let Bench { tracked, space, streams: [stream, _], .. } = bench();
    let other = tracked.allocator().create_stream().unwrap();
    for (stream, bytes) in [(stream, 64), (other, 32)] {
        let reservation = space.request(KIB(bytes)).now().unwrap();
        tracked.attach(Scope::Stream(stream), reservation).unwrap();
    }
    let peak = |stream| tracked.attached(Scope::Stream(stream)).unwrap().peak;
    let blocks = [(); 3].map(|()| tracked.malloc(KIB(8), stream).unwrap());
    let one = tracked.malloc(KIB(16), other).unwrap();
    assert_eq!((peak(stream), peak(other)), (KIB(24), KIB(16)));
    // A free on another stream lowers the use of the one that paid.
    blocks.into_iter().take(2).for_each(|block| tracked.free(block, other).unwrap());
    assert!(tracked.reset_peak(Scope::Stream(stream)));
    assert_eq!((peak(stream), peak(other)), (KIB(8), KIB(16)));
    assert!(!tracked.reset_peak(Scope::this_thread()), "nothing is attached to it");
    tracked.free(one, stream).unwrap();
    let mut detached = tracked.detach(Scope::Stream(other)).unwrap();
    assert_eq!((detached.peak(), detached.used()), (KIB(16), Bytes::ZERO));
    detached.reset_peak();
    assert_eq!(detached.peak(), Bytes::ZERO);
}

#[test]
fn room_comes_back_with_each_free_to_the_byte_and_one_more_is_refused() {
    let Bench { tracked, space, streams: [stream, _], .. } = bench();
    let mut held: Vec<_> = (0..4).map(|_| tracked.malloc(Bytes::mib(4), stream).unwrap()).collect();
    assert_eq!(space.total(), space.capacity());
    assert!(matches!(tracked.malloc(KIB(1), stream), Err(MallocError::SpaceFull(_))));
    tracked.free(held.pop().unwrap(), stream).unwrap();
    held.push(tracked.malloc(Bytes::mib(4), stream).unwrap());
    assert!(matches!(tracked.malloc(Bytes::new(1), stream), Err(MallocError::SpaceFull(_))));
    held.into_iter().for_each(|block| tracked.free(block, stream).unwrap());
    assert_eq!(space.total(), Bytes::ZERO);
}
