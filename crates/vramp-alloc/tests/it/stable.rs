//! Addresses that stay while the memory behind them comes and goes, also with host memory behind them: what a
//! kernel reads there, what comes back, and what is left when a driver call fails.

use std::sync::Arc;

use vramp_alloc::graph::ArenaError;
use vramp_alloc::range::{HostBacking, HostBackingError, NotVacant, StableRange};
use vramp_alloc::{AllocError, Allocator, Bytes, Config, Driver};
use vramp_core::AddrRange;
use vramp_driver::sim::{FaultPlan, Simulator};
use vramp_driver::{Call, Capabilities, DeviceCopy};
use vramp_peers::Preset;
use vramp_testing::fail_each_call;

use crate::common::range_rig::{MIB, RangeRig, part};

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

/// A card of which the allocator may have 128 MiB.
fn hosted_rig() -> RangeRig {
    RangeRig::limited(MIB(128))
}

impl RangeRig {
    /// Host memory of `len`, and addresses through which copies reach it.
    fn host(&self, len: Bytes) -> (HostBacking, StableRange) {
        let memory = self.allocator.host_backing(len, 0).unwrap();
        let door = self.allocator.stable_range(len, len).unwrap();
        door.map_host_part(Bytes::ZERO, &memory).unwrap();
        (memory, door)
    }
}

#[test]
fn what_was_copied_to_the_host_is_read_at_the_address_it_had_on_the_card() {
    let rig = hosted_rig();
    let range = rig.allocator.stable_range(MIB(64), MIB(32)).unwrap();
    range.back(rig.stream).unwrap();
    rig.fill(part(&range, Bytes::ZERO, MIB(32)), 1);
    rig.fill(part(&range, MIB(32), MIB(32)), 2);
    let (memory, door) = rig.host(MIB(32));
    rig.copy(part(&range, MIB(32), MIB(32)), door.range());
    range.lend(&[(Bytes::ZERO, MIB(32))]);
    range.map_host_part(MIB(32), &memory).unwrap();
    let had = range.memory();
    assert_eq!((had.backed, had.lent, had.host), (MIB(32), Bytes::ZERO, MIB(32)));
    assert_eq!(rig.allocator.census().hosted, MIB(64), "the door counts as well");
    rig.allocator.audit().unwrap();
    // The card's memory is free for others, all of it.
    let block = rig.allocator.malloc(MIB(96), rig.stream).unwrap();
    rig.fill(AddrRange::new(block.addr(), MIB(96)), 7);
    rig.copy(part(&range, MIB(32), MIB(32)), AddrRange::new(block.addr(), MIB(32)));
    rig.holds(AddrRange::new(block.addr(), MIB(32)), 2);
    rig.holds(part(&range, Bytes::ZERO, MIB(32)), 1);
    rig.allocator.free(block, rig.stream).unwrap();
    // Back to the card, through the door.
    range.unmap_host_part(MIB(32), MIB(32)).unwrap();
    range.back(rig.stream).unwrap();
    rig.copy(door.range(), part(&range, MIB(32), MIB(32)));
    rig.holds(part(&range, MIB(32), MIB(32)), 2);
    rig.holds(part(&range, Bytes::ZERO, MIB(32)), 1);
    rig.allocator.audit().unwrap();
    assert!(rig.sim.hazards().is_empty(), "{:?}", rig.sim.hazards());
}

#[test]
fn a_part_that_is_in_use_or_hosted_or_outside_is_refused_and_says_what_to_do() {
    let rig = hosted_rig();
    let range = rig.allocator.stable_range(MIB(64), MIB(32)).unwrap();
    range.back(rig.stream).unwrap();
    let memory = rig.allocator.host_backing(MIB(32), 0).unwrap();
    let backed = range.map_host_part(MIB(32), &memory).unwrap_err();
    assert!(matches!(backed, HostBackingError::NotVacant(NotVacant::Backed)), "{backed}");
    for from in [MIB(34), Bytes::new(512), Bytes::new(u64::MAX)] {
        let outside = range.map_host_part(from, &memory).unwrap_err();
        assert!(matches!(outside, HostBackingError::Part { .. }), "{outside}");
    }
    range.lend(&[]);
    range.map_host_part(MIB(32), &memory).unwrap();
    let twice = range.map_host_part(MIB(16), &memory).unwrap_err();
    assert!(matches!(twice, HostBackingError::NotVacant(NotVacant::Hosted)), "{twice}");
    let wanted = range.back(rig.stream).unwrap_err();
    assert!(matches!(wanted, AllocError::HostMapped { at } if at == MIB(32)), "{wanted}");
    range.back_part(Bytes::ZERO, MIB(32), rig.stream).unwrap();
    let other = range.unmap_host_part(MIB(32), MIB(16)).unwrap_err();
    assert!(matches!(other, HostBackingError::NotMapped { .. }), "{other}");
    for len in [Bytes::ZERO, Bytes::new(4096)] {
        let length = rig.allocator.host_backing(len, 0).unwrap_err();
        assert!(matches!(length, HostBackingError::Length { .. }), "{length}");
    }
    rig.allocator.audit().unwrap();
}

#[test]
fn a_device_that_maps_no_host_memory_says_so() {
    let can = Simulator::builder().build().info().capabilities;
    let capabilities = Capabilities { host_numa: false, ..can };
    let driver: Arc<dyn Driver> = Arc::new(Simulator::builder().capabilities(capabilities).build());
    let allocator = Allocator::new(driver, Config::default()).unwrap();
    let refused = allocator.host_backing(MIB(2), 0).unwrap_err();
    assert!(matches!(refused, HostBackingError::NotSupported), "{refused}");
}

#[test]
fn memory_that_left_before_is_no_obstacle_and_neither_are_its_old_mappings() {
    let rig = hosted_rig();
    let range = rig.allocator.stable_range(MIB(128), MIB(32)).unwrap();
    range.back(rig.stream).unwrap();
    range.lend(&[]);
    // All of it moves into the block; what is left at the range are old mappings.
    let block = rig.allocator.malloc(MIB(128), rig.stream).unwrap();
    rig.fill(AddrRange::new(block.addr(), MIB(128)), 5);
    let (memory, door) = rig.host(MIB(32));
    rig.fill(door.range(), 3);
    range.map_host_part(MIB(64), &memory).unwrap();
    rig.holds(part(&range, MIB(64), MIB(32)), 3);
    rig.holds(AddrRange::new(block.addr(), MIB(128)), 5);
    rig.allocator.free(block, rig.stream).unwrap();
    rig.allocator.audit().unwrap();
    range.unmap_host_part(MIB(64), MIB(32)).unwrap();
    range.back(rig.stream).unwrap();
    rig.fill(range.range(), 6);
    rig.holds(door.range(), 3);
    rig.allocator.audit().unwrap();
}

#[test]
fn a_dropped_range_unmaps_its_host_memory_unless_work_on_it_is_under_way() {
    for noted in [false, true] {
        let rig = hosted_rig();
        let (memory, door) = rig.host(MIB(16));
        if noted {
            rig.sim.fill(rig.queue, door.range(), 1).unwrap();
            door.record_use(rig.stream);
        }
        drop((memory, door));
        let census = rig.allocator.census();
        assert!(census.hosted.is_zero());
        assert_eq!(census.quarantined_addresses, if noted { MIB(16) } else { Bytes::ZERO });
        rig.allocator.audit().unwrap();
        let RangeRig { sim, allocator, .. } = rig;
        allocator.close().unwrap();
        assert_eq!((sim.live().handles, sim.live().mappings), (0, 0), "noted: {noted}");
        assert!(sim.hazards().is_empty(), "{:?}", sim.hazards());
    }
}

/// Spills the second half of a range to the host, reads it there, and brings it back. Returns what
/// failed; what is whole is checked on the way.
fn there_and_back(rig: &RangeRig, range: &StableRange) -> Result<(), HostBackingError> {
    let (at, len) = (MIB(32), MIB(32));
    let memory = rig.allocator.host_backing(len, 0)?;
    let door = rig.allocator.stable_range(len, len).map_err(|_| HostBackingError::NotSupported)?;
    door.map_host_part(Bytes::ZERO, &memory)?;
    let copy = |from: AddrRange, to: AddrRange| {
        rig.sim.copy(rig.queue, DeviceCopy { from: from.start, to: to.start, len })?;
        // What was queued has to be over before anything is unmapped.
        rig.sim.synchronize_stream(rig.queue).or_else(|error| {
            rig.sim.synchronize_stream(rig.queue)?;
            Err(error)
        })
    };
    copy(part(range, at, len), door.range())?;
    range.lend(&[(Bytes::ZERO, at)]);
    range.map_host_part(at, &memory)?;
    rig.holds(part(range, at, len), 9);
    range.unmap_host_part(at, len)?;
    range.back(rig.stream).map_err(|_| HostBackingError::NotSupported)?;
    copy(door.range(), part(range, at, len))?;
    rig.holds(part(range, at, len), 9);
    Ok(())
}

#[test]
fn every_driver_call_fails_once_and_the_rest_of_the_range_stays_whole() {
    let mut most = 0;
    fail_each_call(|nth| {
        let rig = hosted_rig();
        let range = rig.allocator.stable_range(MIB(64), MIB(16)).unwrap();
        range.back(rig.stream).unwrap();
        rig.fill(range.range(), 9);
        rig.sim.set_faults(FaultPlan::nth(nth));
        let before = rig.sim.calls();
        let result = there_and_back(&rig, &range);
        let calls = rig.sim.calls() - before;
        most = most.max(calls);
        rig.sim.set_faults(FaultPlan::none());
        rig.allocator.audit().unwrap();
        rig.holds(part(&range, Bytes::ZERO, MIB(32)), 9);
        if nth == 0 || nth > calls {
            result.unwrap();
            return calls;
        }
        // What is not spoilt serves again, whole.
        for (from, len) in range.host_parts() {
            range.unmap_host_part(from, len).unwrap();
        }
        if rig.allocator.census().quarantined_addresses.is_zero() {
            range.back(rig.stream).unwrap();
        }
        rig.allocator.audit().unwrap();
        drop(range);
        let RangeRig { sim, allocator, .. } = rig;
        allocator.close().unwrap();
        // A drop cannot report a release that failed.
        let untold = usize::from(result.is_ok());
        assert!(sim.live().handles <= untold, "call {nth}: {:?}", sim.live());
        assert_eq!(sim.live().mappings, 0, "call {nth}");
        assert!(sim.hazards().is_empty(), "call {nth}: {:?}", sim.hazards());
        calls
    });
    assert!(most >= 12, "only {most} calls");
}

#[test]
fn host_memory_that_is_neither_allowed_nor_unmapped_leaves_addresses_out_of_use_until_it_is() {
    let rig = hosted_rig();
    let (memory, door) = rig.host(MIB(16));
    let range = rig.allocator.stable_range(MIB(16), MIB(16)).unwrap();
    rig.sim.set_faults(
        FaultPlan::nth_of(Call::SetAccess, 1).and(FaultPlan::from_nth_of(Call::Unmap, 1)),
    );
    assert!(matches!(range.map_host_part(Bytes::ZERO, &memory), Err(HostBackingError::Driver(_))));
    assert_eq!(rig.allocator.census().quarantined_addresses, MIB(16));
    let gone = range.map_host_part(Bytes::ZERO, &memory).unwrap_err();
    assert!(matches!(gone, HostBackingError::NotVacant(NotVacant::Quarantined)), "{gone}");
    assert!(range.back(rig.stream).unwrap_err().is_out_of_memory());
    rig.sim.set_faults(FaultPlan::none());
    range.map_host_part(Bytes::ZERO, &memory).unwrap();
    assert_eq!(rig.allocator.census().quarantined_addresses, Bytes::ZERO);
    range.unmap_host_part(Bytes::ZERO, MIB(16)).unwrap();
    range.back(rig.stream).unwrap();
    rig.sim.set_faults(FaultPlan::nth_of(Call::Unmap, 1));
    assert!(matches!(door.unmap_host_part(Bytes::ZERO, MIB(16)), Err(HostBackingError::Driver(_))));
    assert_eq!(door.memory().host, MIB(16), "it is mapped as before");
    door.unmap_host_part(Bytes::ZERO, MIB(16)).unwrap();
    door.back(rig.stream).unwrap();
    rig.allocator.audit().unwrap();
}

#[test]
fn parts_are_backed_lent_and_hosted_at_random_and_keep_their_bytes() {
    for seed in vramp_testing::seeds(12) {
        let rig = hosted_rig();
        let mut random = fastrand::Rng::with_seed(seed);
        let (piece, count) = (MIB(8), 10);
        let handle = MIB([2, 8, 16][seed as usize % 3]);
        let range = rig.allocator.stable_range(piece * count, handle).unwrap();
        let place = |index: usize| part(&range, piece * index as u64, piece);
        let mut contents: Vec<Option<u8>> = vec![None; count as usize];
        let mut hosts: Vec<Option<(HostBacking, StableRange)>> = Vec::new();
        hosts.resize_with(count as usize, || None);
        let mut blocks = Vec::new();
        for step in 0..80_u8 {
            let index = random.usize(..count as usize);
            let at = piece * index as u64;
            let is_hosted = hosts[index].is_some();
            match random.u32(..6) {
                0 | 1 if !is_hosted && range.back_part(at, piece, rig.stream).is_ok() => {
                    rig.fill(place(index), step);
                    contents[index] = Some(step);
                }
                2 if !is_hosted && contents[index].is_some() => {
                    let (memory, door) = rig.host(piece);
                    rig.copy(place(index), door.range());
                    let stays = |&kept: &usize| {
                        kept != index && contents[kept].is_some() && hosts[kept].is_none()
                    };
                    let kept = (0..count as usize).filter(stays);
                    let keep: Vec<_> = kept.map(|kept| (piece * kept as u64, piece)).collect();
                    range.lend(&keep);
                    match range.map_host_part(at, &memory) {
                        Ok(()) => hosts[index] = Some((memory, door)),
                        // A long handle that a neighbour keeps stays whole, with its bytes.
                        Err(HostBackingError::NotVacant(NotVacant::Backed)) => {}
                        Err(error) => panic!("seed {seed}: {error}"),
                    }
                }
                3 if is_hosted => {
                    range.unmap_host_part(at, piece).unwrap();
                    let (_memory, door) = hosts[index].take().unwrap();
                    match range.back_part(at, piece, rig.stream) {
                        Ok(()) => rig.copy(door.range(), place(index)),
                        Err(_) => contents[index] = None,
                    }
                }
                4 => {
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
                for offset in [Bytes::ZERO, piece - Bytes::new(1)] {
                    assert_eq!(rig.byte(place(index), offset), *byte, "seed {seed}");
                }
            }
        }
        for block in blocks {
            rig.allocator.free(block, rig.stream).unwrap();
        }
        drop((hosts, range));
        rig.allocator.audit().unwrap();
        let RangeRig { sim, allocator, .. } = rig;
        allocator.close().unwrap();
        assert_eq!((sim.live().handles, sim.live().mappings), (0, 0), "seed {seed}");
        assert!(sim.hazards().is_empty(), "{:?}", sim.hazards());
    }
}
