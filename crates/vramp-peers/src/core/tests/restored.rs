//! Pools that begin where another one stood.

use proptest::prelude::*;

use super::random::{Step, step};
use super::*;
use crate::core::block;

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
