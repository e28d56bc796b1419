//! Streams that end, and blocks that wait for streams on which nothing happens, on paper.

use crate::paper::rig::{PAGE, Rig, range};
use vramp_core::{Bytes, Mixed, Policy, StreamId};

fn mixed() -> Policy {
    Policy::Mixed(Mixed { heap_limit: Bytes::ZERO, ..Mixed::default() })
}

fn known(rig: &Rig) -> Vec<StreamId> {
    rig.shell.pool.streams().collect()
}

#[test]
fn a_stream_that_ended_leaves_once_its_work_is_over_and_its_memory_serves_others() {
    for policy in [mixed(), Policy::Vpmm] {
        let mut rig = Rig::with(policy, 2, None);
        let [open, ended] = [rig.streams[0], rig.streams[1]];
        let (first, late) = (rig.malloc(2, 1), rig.malloc(3, 1));
        rig.shell.paper.touch(ended, 1, range(first));
        rig.free(first, 1);
        assert!(rig.shell.end_stream(ended));
        assert_eq!(known(&rig), [open, ended], "its work may run");
        rig.finish(1);
        rig.shell.poll();
        // VPMM's regions keep their owners until other streams take them.
        let (again, (_, created, _)) = rig.costly(2, 0);
        assert_eq!((again.block.at, created), (first.block.at, 0), "{policy:?}");
        assert_eq!(known(&rig), [open], "{policy:?}");
        // A block outlives its stream, and its memory serves at once.
        rig.free(late, 1);
        let (again, cost) = rig.costly(3, 0);
        assert_eq!((again.block.at, cost), (late.block.at, (0, 0, 0)), "{policy:?}");
        assert_eq!(known(&rig), [open], "{policy:?}");
        assert!(rig.shell.pool.has_stream(ended) && !rig.shell.pool.is_open(ended));
    }
}

#[test]
fn the_only_stream_may_end_and_its_memory_serves_the_next_one() {
    let mut rig = Rig::with(mixed(), 1, None);
    let (first, late) = (rig.malloc(2, 0), rig.malloc(2, 0));
    rig.free(first, 0);
    assert!(rig.shell.end_stream(rig.streams[0]));
    rig.finish(0);
    rig.shell.poll();
    rig.free(late, 0);
    assert_eq!(known(&rig), []);
    let next = rig.shell.add_stream();
    rig.streams.push(next);
    let (_, cost) = rig.costly(4, 1);
    assert_eq!(cost, (0, 0, 0));
}

#[test]
fn a_stream_may_have_an_id_far_above_those_that_the_pool_knows() {
    let mut rig = Rig::with(mixed(), 1, None);
    let (before, after) = (StreamId::new(700), StreamId::new(1_000));
    rig.shell.pool.skip_streams(500);
    rig.shell.pool.add_stream_as(before);
    assert_eq!(known(&rig), [rig.streams[0], before]);
    let gone = rig.shell.pool.now(StreamId::new(123));
    assert!(rig.shell.pool.is_over(gone), "it ended before the pool heard of it");
    assert!(!rig.shell.pool.has_stream(after));
    rig.shell.pool.audit().expect("every invariant holds");
}

#[test]
fn blocks_that_wait_for_a_quiet_stream_serve_again() {
    for policy in [mixed(), Policy::Vpmm] {
        let mut rig = Rig::with(policy, 2, None);
        for round in 0..200 {
            let block = rig.malloc(4, 0);
            rig.shell.record_use(block, rig.streams[1]);
            rig.free(block, 0);
            rig.finish(0);
            rig.finish(1);
            let reserved = rig.shell.pool.counters().reserved;
            // One in use, and those that wait for an event and for its record.
            assert!(reserved <= PAGE * 12, "{policy:?}, round {round}: {reserved}");
        }
    }
}
