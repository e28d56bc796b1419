//! Addresses that stay while the memory behind them comes and goes.

use std::sync::Arc;

use crate::common::range_rig::{MIB, RangeRig, part};
use vramp_alloc::graph::ArenaError;
use vramp_alloc::{AllocError, Allocator, Bytes, Driver};
use vramp_core::AddrRange;
use vramp_peers::Preset;

/// A card of which the allocator may have 256 MiB.
fn rig() -> RangeRig {
    RangeRig::limited(MIB(256))
}

#[test]
fn memory_leaves_and_other_memory_comes_to_the_same_addresses() {
    let rig = rig();
    let range = rig.allocator.stable_range(MIB(128), MIB(16)).unwrap();
    let at = range.range();
    assert_eq!(range.memory().backed, Bytes::ZERO);
    range.back(rig.stream).unwrap();
    assert_eq!(range.memory().backed, MIB(128));
    rig.fill(at, 1);
    assert_eq!(range.lend(&[]), MIB(128));
    assert_eq!(range.memory().lent, MIB(128));
    // The whole limit: what was lent moves into the block.
    let all = rig.allocator.malloc(MIB(256), rig.stream).unwrap();
    assert_eq!(range.memory().lent, Bytes::ZERO);
    rig.fill(AddrRange::new(all.addr(), MIB(256)), 2);
    let Err(AllocError::OutOfMemory(report)) = range.back(rig.stream) else {
        panic!("there is no memory")
    };
    assert_eq!(report.shortage.requested, MIB(128));
    rig.allocator.free(all, rig.stream).unwrap();
    range.back(rig.stream).unwrap();
    assert_eq!(range.range(), at);
    rig.fill(at, 3);
    assert_eq!(rig.byte(at, MIB(127)), 3);
    rig.allocator.audit().unwrap();
    drop(range);
    let again = rig.allocator.malloc(MIB(256), rig.stream).unwrap();
    rig.allocator.free(again, rig.stream).unwrap();
    assert!(rig.sim.hazards().is_empty());
}

#[test]
fn what_nobody_took_comes_back_without_a_driver_call_and_with_its_bytes() {
    let rig = rig();
    let range = rig.allocator.stable_range(MIB(64), MIB(32)).unwrap();
    range.back(rig.stream).unwrap();
    rig.fill(range.range(), 7);
    let before = rig.sim.calls();
    assert_eq!(range.lend(&[]), MIB(64));
    range.back(rig.stream).unwrap();
    assert_eq!(rig.sim.calls(), before);
    assert_eq!(rig.byte(range.range(), MIB(63)), 7);
}

#[test]
fn ranges_that_are_used_once_leave_few_mappings() {
    let rig = rig();
    for _ in 0..5000 {
        let range = rig.allocator.stable_range(MIB(2), MIB(2)).unwrap();
        range.back(rig.stream).unwrap();
        rig.fill(range.range(), 1);
    }
    let live = rig.sim.live();
    assert!(live.mappings < 1100, "{live:?}");
    rig.allocator.audit().unwrap();
    assert!(rig.sim.hazards().is_empty());
}

#[test]
fn only_the_handles_that_nothing_kept_touches_are_lent() {
    let rig = rig();
    let range = rig.allocator.stable_range(MIB(64), MIB(16)).unwrap();
    range.back(rig.stream).unwrap();
    rig.fill(range.range(), 9);
    let byte = Bytes::new(1);
    let lent = range.lend(&[(Bytes::ZERO, byte), (MIB(32) - byte, byte)]);
    assert_eq!(lent, MIB(32), "the first and the second handle stay");
    assert_eq!(range.lend(&[(Bytes::ZERO, MIB(16))]), MIB(16));
    let block = rig.allocator.malloc(MIB(240), rig.stream).unwrap();
    rig.fill(AddrRange::new(block.addr(), MIB(240)), 5);
    assert_eq!(rig.byte(range.range(), MIB(15)), 9, "what is kept is kept");
    assert!(range.back(rig.stream).is_err());
    rig.allocator.free(block, rig.stream).unwrap();
    range.back(rig.stream).unwrap();
    assert_eq!(rig.byte(range.range(), MIB(15)), 9);
    rig.allocator.audit().unwrap();
}

#[test]
fn a_part_is_brought_back_alone() {
    let rig = rig();
    let range = rig.allocator.stable_range(MIB(128), MIB(16)).unwrap();
    range.back_part(MIB(40), MIB(20), rig.stream).unwrap();
    assert_eq!(range.memory().backed, MIB(20));
    rig.fill(part(&range, MIB(40), MIB(20)), 8);
    range.back(rig.stream).unwrap();
    assert_eq!(range.memory().backed, MIB(128));
    rig.fill(part(&range, Bytes::ZERO, MIB(40)), 1);
    assert_eq!(rig.byte(range.range(), MIB(59)), 8);
    assert_eq!(range.lend(&[]), MIB(128));
    // Only the handles that the part touches come back; the others are still the pool's.
    range.back_part(MIB(70), MIB(2), rig.stream).unwrap();
    let memory = range.memory();
    assert!(memory.backed >= MIB(2) && memory.backed <= MIB(32), "{memory:?}");
    assert_eq!(memory.backed + memory.lent, MIB(128));
    rig.allocator.audit().unwrap();
    let most = MIB(256) - memory.backed;
    let block = rig.allocator.malloc(most, rig.stream).unwrap();
    rig.fill(AddrRange::new(block.addr(), most), 3);
    rig.allocator.audit().unwrap();
    rig.allocator.free(block, rig.stream).unwrap();
    for from in [0, 100, 37, 3] {
        range.back_part(MIB(from), MIB(1), rig.stream).unwrap();
        rig.allocator.audit().unwrap();
    }
    range.back(rig.stream).unwrap();
    rig.fill(range.range(), 2);
    rig.allocator.audit().unwrap();
}

#[test]
fn parts_come_and_go_at_random_and_the_rest_keeps_its_bytes() {
    for seed in vramp_testing::seeds(10) {
        let rig = rig();
        let mut random = fastrand::Rng::with_seed(seed);
        let range =
            rig.allocator.stable_range(MIB(96), MIB([2, 8, 16][seed as usize % 3])).unwrap();
        let mut contents: [Option<u8>; 12] = [None; 12];
        let piece = MIB(8);
        let place = |index: u64| part(&range, piece * index, piece);
        let mut blocks = Vec::new();
        for step in 0..60_u8 {
            let index = random.u64(..12);
            match random.u32(..4) {
                0 if range.back_part(piece * index, piece, rig.stream).is_ok() => {
                    rig.fill(place(index), step);
                    contents[index as usize] = Some(step);
                }
                1 => {
                    contents[index as usize] = None;
                    let kept = (0..12).filter(|&kept| contents[kept as usize].is_some());
                    let keep: Vec<_> = kept.map(|kept| (piece * kept, piece)).collect();
                    range.lend(&keep);
                }
                2 => {
                    let len = MIB(random.u64(1..60));
                    if let Ok(block) = rig.allocator.malloc(len, rig.stream) {
                        rig.fill(AddrRange::new(block.addr(), len), 0xFF);
                        blocks.push(block);
                    }
                }
                _ if !blocks.is_empty() => {
                    let block = blocks.swap_remove(random.usize(..blocks.len()));
                    rig.allocator.free(block, rig.stream).unwrap();
                }
                _ => {}
            }
            rig.allocator.audit().unwrap();
            for (index, content) in contents.iter().enumerate() {
                let Some(byte) = content else { continue };
                let ends = [Bytes::ZERO, piece - Bytes::new(1)];
                for offset in ends {
                    assert_eq!(rig.byte(range.range(), piece * index as u64 + offset), *byte);
                }
            }
        }
        for block in blocks {
            rig.allocator.free(block, rig.stream).unwrap();
        }
        drop(range);
        rig.allocator.audit().unwrap();
        assert!(rig.sim.hazards().is_empty());
    }
}

#[test]
fn a_dropped_ranges_memory_serves_others_behind_the_work_that_was_noted() {
    for noted in [true, false] {
        let rig = rig();
        let range = rig.allocator.stable_range(MIB(256), MIB(32)).unwrap();
        range.back(rig.stream).unwrap();
        let [user, other] = [(); 2].map(|()| rig.allocator.create_stream().unwrap());
        let queues = [user, other].map(|stream| rig.allocator.stream(stream).unwrap());
        rig.sim.fill(queues[0], range.range(), 4).unwrap();
        if noted {
            range.record_use(user);
        }
        drop(range);
        let block = rig.allocator.malloc(MIB(256), other).unwrap();
        rig.sim.fill(queues[1], AddrRange::new(block.addr(), MIB(256)), 6).unwrap();
        rig.sim.synchronize_stream(queues[1]).unwrap();
        assert_eq!(rig.sim.hazards().is_empty(), noted, "{:?}", rig.sim.hazards());
        rig.allocator.free(block, other).unwrap();
    }
}

#[test]
fn ranges_are_refused_where_they_cannot_be() {
    let rig = rig();
    let none = rig.allocator.stable_range(Bytes::ZERO, MIB(16)).unwrap_err();
    assert!(matches!(none, ArenaError::Capacity { .. }));
    let much = rig.allocator.stable_range(Bytes::tib(100), MIB(16)).unwrap_err();
    assert!(matches!(much, ArenaError::Capacity { .. }));
    let range = rig.allocator.stable_range(Bytes::new(1), Bytes::ZERO).unwrap();
    assert_eq!(range.range().len, MIB(2), "whole pages");
    let driver: Arc<dyn Driver> = rig.sim.clone();
    let plain = Allocator::new(driver, Preset::StreamOrdered.config()).unwrap();
    assert!(matches!(plain.stable_range(MIB(2), MIB(2)), Err(ArenaError::NotSupported)));
}
