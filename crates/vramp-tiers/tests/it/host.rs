//! The host pool: charges, runs of blocks, and reuse after work on streams.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common::blocks::until;
use crate::common::blocks::{BLOCKS, MIB, space};
use vramp_alloc::Driver;
use vramp_core::AddrRange;
use vramp_driver::sim::{Contents, FaultPlan, Kernel, Simulator};
use vramp_driver::{Call, CaptureMode, HostSlice, MemoryProperties};
use vramp_tiers::host::{HostMemoryError, HostPoolConfig, HostPoolError, NumaNode};
use vramp_tiers::reserve::LimitPolicy;
use vramp_tiers::{Bytes, HostPool, ReservationManager, SpaceConfig, SpaceId};

const PAGE: Bytes = Bytes::mib(2);

fn plain(capacity: Bytes) -> HostPool {
    HostPool::new(&space(capacity), BLOCKS, []).unwrap()
}

fn simulator() -> Simulator {
    Simulator::builder().memory(Bytes::gib(1)).contents(Contents::Stored).build()
}

#[test]
fn blocks_are_charged_while_somebody_has_them() {
    let pool = plain(Bytes::mib(10));
    assert_eq!(pool.space().total(), Bytes::ZERO, "what is only held is not charged");
    let three = pool.allocate(Bytes::new(2 * MIB.count() + 1)).unwrap();
    assert_eq!((three.blocks(), three.len()), (3, MIB * 3));
    assert_eq!(pool.space().total(), MIB * 3);
    let rest = pool.allocate(MIB * 7).unwrap();
    let Err(HostPoolError::Full(full)) = pool.allocate(MIB) else { panic!("there is no room") };
    assert_eq!(full.refusal.available, Bytes::ZERO);
    drop(three);
    assert_eq!(pool.space().total(), MIB * 7);
    drop(rest);
    assert_eq!(pool.stats().free_blocks, 10, "the last pool is as large as there was room");
    assert_eq!(pool.space().total(), Bytes::ZERO);
    pool.audit().unwrap();
}

#[test]
fn blocks_in_one_piece_lie_one_behind_the_other() {
    let pool = plain(Bytes::mib(12));
    assert!(pool.allocate_in_one(Bytes::ZERO).is_err());
    let all: Vec<_> = (0..12).map(|_| pool.allocate(MIB).unwrap()).collect();
    // Every other block is free: there is memory for two blocks, but in no piece.
    let mut kept: Vec<_> = all.into_iter().enumerate().collect();
    kept.retain(|(nth, _)| nth % 2 == 0);
    assert_eq!(pool.space().total(), MIB * 6);
    let Err(HostPoolError::Exhausted { asked: 2, .. }) = pool.allocate_in_one(MIB * 2) else {
        panic!("no two free blocks are neighbours")
    };
    assert_eq!(pool.space().total(), MIB * 6, "nothing stays charged");
    assert_eq!(pool.allocate(MIB * 2).unwrap().spans(Bytes::ZERO, MIB * 2).unwrap().len(), 2);
    drop(kept.remove(1));
    let piece = pool.allocate_in_one(Bytes::new(MIB.count() + 1)).unwrap();
    let spans = piece.spans(Bytes::ZERO, MIB * 2).unwrap();
    assert_eq!((piece.len(), spans.len()), (MIB * 2, 1));
    pool.audit().unwrap();
}

#[test]
fn memory_in_one_piece_is_pinned_at_once_however_long_it_is() {
    let pool = plain(Bytes::mib(64));
    let small = pool.allocate(MIB).unwrap();
    let piece = pool.allocate_in_one(MIB * 40).unwrap();
    assert_eq!(piece.spans(Bytes::ZERO, MIB * 40).unwrap().len(), 1);
    // What is left is too short, and what could be pinned too.
    assert!(pool.allocate_in_one(MIB * 23).is_err());
    drop((small, piece));
    assert_eq!(pool.space().total(), Bytes::ZERO);
    pool.audit().unwrap();
}

#[test]
fn nothing_is_an_allocation_of_no_blocks() {
    let pool = plain(Bytes::mib(10));
    let nothing = pool.allocate(Bytes::ZERO).unwrap();
    assert!(nothing.is_empty());
    assert!(nothing.block(0).is_none());
    assert!(nothing.spans(Bytes::ZERO, Bytes::ZERO).unwrap().is_empty());
    // A small one has an address of its own.
    let small: Vec<_> = (0..3).map(|_| pool.allocate_small(Bytes::ZERO).unwrap()).collect();
    let places: std::collections::BTreeSet<_> =
        small.iter().map(|one| one.span().as_ptr() as u64).collect();
    assert!(small.iter().all(|one| one.is_empty() && one.len() == Bytes::ZERO));
    assert_eq!((places.len(), pool.space().total()), (3, MIB));
    small[0].read(Bytes::ZERO, &mut []).unwrap();
    assert!(small[0].read(Bytes::ZERO, &mut [0]).is_err());
}

#[test]
fn small_pieces_are_up_to_a_block_long() {
    let pool = plain(Bytes::mib(10));
    let mut half = pool.allocate_small(Bytes::kib(300)).unwrap();
    let other = pool.allocate_small(Bytes::kib(512)).unwrap();
    assert_eq!(pool.space().total(), MIB, "two of 512 KiB share a block");
    half.write(Bytes::ZERO, &[7; 300 << 10]).unwrap();
    let mut last = [0];
    half.read(Bytes::new((300 << 10) - 1), &mut last).unwrap();
    assert_eq!(last, [7]);
    let whole = pool.allocate_small(MIB).unwrap();
    assert_eq!(pool.space().total(), MIB * 2);
    let too_long = MIB + Bytes::new(1);
    assert!(matches!(pool.allocate_small(too_long), Err(HostPoolError::Config(_))));
    drop((half, other, whole));
    pool.trim(Bytes::ZERO);
    assert_eq!(pool.space().total(), Bytes::ZERO);
    pool.audit().unwrap();
}

#[test]
fn bytes_are_numbered_through_whatever_runs_they_lie_in() {
    let pool = plain(Bytes::mib(10));
    let first = pool.allocate(MIB * 3).unwrap();
    let mut across = pool.allocate(MIB * 4).unwrap();
    assert_eq!(
        across.spans(Bytes::ZERO, across.len()).unwrap().len(),
        1,
        "one pool holds them all"
    );
    let mut split = pool.allocate(MIB * 3).unwrap();
    assert_eq!(split.spans(Bytes::ZERO, split.len()).unwrap().len(), 2);
    let pattern: Vec<u8> = (0..3 << 20).map(|i: u32| (i % 253) as u8).collect();
    split.write(Bytes::ZERO, &pattern).unwrap();
    across.write(Bytes::ZERO, &vec![0xFF; 4 << 20]).unwrap();
    let mut back = vec![0; 100];
    split.read(Bytes::new((2 << 20) - 50), &mut back).unwrap();
    assert_eq!(back, pattern[(2 << 20) - 50..(2 << 20) + 50]);
    let mut second = [0; 2];
    split.block(1).unwrap().read(Bytes::new(7), &mut second).unwrap();
    assert_eq!(second, pattern[(1 << 20) + 7..(1 << 20) + 9]);
    let outside = split.write(MIB * 3 - Bytes::new(1), &[1, 2]).unwrap_err();
    assert_eq!(outside.size, MIB * 3);
    assert!(split.spans(Bytes::new(u64::MAX), MIB).is_err());
    assert!(split.block(3).is_none() && split.block(usize::MAX).is_none());
    drop(first);
}

#[test]
fn blocks_that_are_read_go_back_after_the_allocation_and_its_readers() {
    let pool = plain(Bytes::mib(10));
    let mut four = pool.allocate(MIB * 4).unwrap();
    four.write(Bytes::ZERO, &vec![7; 4 << 20]).unwrap();
    let readers = [MIB, MIB * 3].map(|at| four.reader(at, MIB).unwrap());
    assert!(four.reader(MIB * 4, Bytes::new(1)).is_err());
    // The tail, which the second one reads, is an allocation of its own.
    drop(four.split_off(MIB * 2));
    assert_eq!((pool.space().total(), four.len()), (MIB * 4, MIB * 2));
    drop(four);
    assert_eq!(pool.space().total(), MIB * 4);
    let mut others = pool.allocate(MIB * 6).unwrap();
    others.write(Bytes::ZERO, &vec![9; 6 << 20]).unwrap();
    for reader in &readers {
        let mut bytes = vec![0; 1 << 20];
        reader.read(&mut bytes).unwrap();
        assert!(vramp_testing::is_filled(&bytes, 7), "another allocation has the blocks");
        assert!(reader.read(&mut vec![0; (1 << 20) + 1]).is_err());
    }
    let [one, other] = readers;
    drop(one);
    assert_eq!(pool.space().total(), MIB * 10);
    drop(other);
    assert_eq!(pool.space().total(), MIB * 6);
    drop(others);
    pool.audit().unwrap();
}

#[test]
fn a_reservation_pays_and_may_go_before_its_blocks() {
    let space = space(Bytes::mib(10));
    let pool = HostPool::new(&space, BLOCKS, []).unwrap();
    let reservation = space.request(MIB * 4).now().unwrap();
    let charge = reservation.charge(MIB * 3, &LimitPolicy::Fail).unwrap();
    let blocks = pool.allocate_with(charge).unwrap();
    assert_eq!(space.total(), MIB * 4, "the reservation covers the blocks");
    assert!(reservation.charge(MIB * 2, &LimitPolicy::Fail).is_err());
    drop(reservation);
    assert_eq!(space.total(), MIB * 3);
    drop(blocks);
    assert_eq!(space.total(), Bytes::ZERO);
}

#[test]
fn a_charge_of_another_space_or_of_half_a_block_buys_nothing() {
    let pool = plain(Bytes::mib(10));
    let other = space(Bytes::mib(10));
    let foreign = other.charge(MIB).unwrap();
    assert!(matches!(pool.allocate_with(foreign), Err(HostPoolError::WrongCharge(..))));
    assert_eq!(other.total(), Bytes::ZERO, "it is credited");
    let half = pool.space().charge(Bytes::kib(512));
    assert!(matches!(pool.allocate_with(half.unwrap()), Err(HostPoolError::WrongCharge(..))));
    assert_eq!(pool.space().total(), Bytes::ZERO);
}

#[test]
fn an_allocation_grows_at_its_end_and_gives_its_tail_away() {
    let pool = plain(Bytes::mib(10));
    let mut blocks = pool.allocate(MIB * 2).unwrap();
    blocks.write(MIB, &[7; 16]).unwrap();
    blocks.grow(MIB * 3).unwrap();
    assert_eq!((blocks.len(), pool.space().total()), (MIB * 5, MIB * 5));
    blocks.write(MIB * 4, &[9; 16]).unwrap();
    assert!(matches!(blocks.grow(MIB * 6), Err(HostPoolError::Full(_))));
    assert_eq!(blocks.len(), MIB * 5, "a growth that failed changes nothing");
    assert!(blocks.split_off(MIB * 5).is_none());
    let tail = blocks.split_off(Bytes::new(1)).unwrap();
    assert_eq!((blocks.len(), tail.len()), (MIB, MIB * 4));
    let mut bytes = [0; 2];
    tail.read(Bytes::ZERO, &mut bytes).unwrap();
    assert_eq!(bytes, [7, 7]);
    tail.read(MIB * 3, &mut bytes).unwrap();
    assert_eq!(bytes, [9, 9]);
    drop(blocks);
    assert_eq!(pool.space().total(), MIB * 4);
    drop(tail);
    assert_eq!(pool.space().total(), Bytes::ZERO);
    assert_eq!(pool.stats().free_blocks, pool.stats().blocks);
    pool.audit().unwrap();
}

#[test]
fn a_configuration_that_makes_no_sense_is_refused() {
    let host = space(Bytes::mib(10));
    let refused =
        |config| matches!(HostPool::new(&host, config, []), Err(HostPoolError::Config(_)));
    assert!(refused(HostPoolConfig { block: Bytes::ZERO, ..BLOCKS }));
    assert!(refused(HostPoolConfig { block: Bytes::new(5000), ..BLOCKS }));
    assert!(refused(HostPoolConfig { block: Bytes::kib(4), ..BLOCKS }), "less than a granule");
    assert!(refused(HostPoolConfig { blocks_per_pool: 0, ..BLOCKS }));
    assert!(refused(HostPoolConfig { initial_pools: 3, ..BLOCKS }), "12 MiB in a space of 10");
    let gpu = SpaceId::gpu(0);
    let manager = ReservationManager::new([(gpu, SpaceConfig::gpu(Bytes::gib(1)))]).unwrap();
    let card = manager.space(gpu).unwrap();
    assert!(matches!(HostPool::new(&card, BLOCKS, []), Err(HostPoolError::Config(_))));
    let elsewhere = HostPoolConfig { node: Some(NumaNode(1020)), ..BLOCKS };
    let refused = HostPool::new(&host, elsewhere, []).unwrap_err();
    assert!(matches!(refused, HostPoolError::NoMemory(HostMemoryError::BadNode { .. })));
}

#[test]
fn blocks_serve_again_once_the_work_that_uses_them_is_done() {
    let sim = Arc::new(simulator());
    let device: Arc<dyn Driver> = sim.clone();
    let pool = HostPool::new(&space(Bytes::mib(4)), BLOCKS, [Arc::clone(&device)]).unwrap();
    let at = device.reserve(PAGE * 2, PAGE).unwrap();
    device.map(at, device.create(PAGE * 2, MemoryProperties::DEVICE).unwrap()).unwrap();
    device.set_access(AddrRange::new(at, PAGE * 2), &[]).unwrap();
    let stream = device.create_stream().unwrap();
    device.fill(stream, AddrRange::new(at, PAGE * 2), 0x3C).unwrap();
    let mut blocks = pool.allocate(MIB * 4).unwrap();
    let slices = blocks.slices(&device, Bytes::ZERO, MIB * 4).unwrap();
    assert_eq!(slices.len(), 1);
    device.copy_to_host(stream, at, slices[0]).unwrap();
    blocks.record_stream(&device, stream).unwrap();
    drop(blocks);
    assert_eq!(pool.space().total(), Bytes::ZERO, "what is dropped is not charged");
    assert_eq!(pool.stats().pending_blocks, 4);
    // A copy still writes to all four, and the capacity is used up: this waits for the copy.
    let again = pool.allocate(MIB).unwrap();
    assert_eq!(pool.stats().waits_for_work, 1);
    let mut byte = [0];
    again.read(MIB - Bytes::new(1), &mut byte).unwrap();
    assert_eq!(byte, [0x3C], "the copy was over before the block was handed out");
    assert_eq!(sim.calls_of(Call::SynchronizeStream), 0, "an event is waited for, not a stream");
}

#[test]
fn dropping_memory_with_noted_work_leaves_a_capture_as_it_is() {
    let sim = Arc::new(simulator());
    let device: Arc<dyn Driver> = sim.clone();
    let pool = HostPool::new(&space(Bytes::mib(4)), BLOCKS, [Arc::clone(&device)]).unwrap();
    let (stream, captured) = (device.create_stream().unwrap(), device.create_stream().unwrap());
    let mut blocks = pool.allocate(MIB).unwrap();
    let mut piece = pool.allocate_small(Bytes::new(700)).unwrap();
    blocks.record_stream(&device, stream).unwrap();
    piece.record_stream(&device, stream).unwrap();
    device.begin_capture(captured, CaptureMode::Global).unwrap();
    drop((blocks, piece));
    device.end_capture(captured).unwrap();
    assert_eq!(sim.invalidated_captures(), 0);
    assert_eq!(sim.calls_of(Call::Query), 0);
    assert_eq!(pool.stats().pending_blocks, 0);
}

/// Returns a simulator and a pool of which a block was dropped while a kernel uses it.
fn pool_in_use() -> (Arc<Simulator>, HostPool) {
    let sim = Arc::new(simulator());
    let device: Arc<dyn Driver> = sim.clone();
    let pool = HostPool::new(&space(Bytes::mib(4)), BLOCKS, [Arc::clone(&device)]).unwrap();
    let stream = device.create_stream().unwrap();
    sim.launch(stream, Kernel::new("busy").lasting(1_000_000)).unwrap();
    let mut blocks = pool.allocate(MIB).unwrap();
    blocks.record_stream(&device, stream).unwrap();
    drop(blocks);
    assert_eq!(sim.live().host_buffers, 1);
    (sim, pool)
}

#[test]
fn a_pool_that_ends_while_a_stream_captures_waits_and_leaves_the_capture_as_it_is() {
    for mode in CaptureMode::ALL {
        let (sim, pool) = pool_in_use();
        let captured = sim.create_stream().unwrap();
        sim.begin_capture(captured, mode).unwrap();
        let begin = sim.now_ns();
        drop(pool);
        assert!(sim.now_ns() > begin + 900_000, "the kernel was waited for");
        assert_eq!(sim.live().host_buffers, 0, "{mode:?}");
        sim.end_capture(captured).unwrap();
        assert_eq!(sim.invalidated_captures(), 0, "{mode:?}");
    }
}

#[test]
fn a_pool_whose_work_cannot_be_waited_for_leaves_its_memory_pinned() {
    let (sim, pool) = pool_in_use();
    sim.set_faults(FaultPlan::from_nth_of(Call::SynchronizeEvent, 1).with_code(304));
    drop(pool);
    assert_eq!(sim.live().host_buffers, 1);
}

#[test]
fn memory_stays_pinned_until_the_last_allocation_of_a_pool_that_is_gone() {
    let (sim, pool) = pool_in_use();
    let (mut blocks, piece) =
        (pool.allocate(MIB).unwrap(), pool.allocate_small(Bytes::kib(16)).unwrap());
    drop(pool);
    blocks.write(Bytes::ZERO, &[7; 100]).unwrap();
    drop(piece);
    assert_eq!(sim.live().host_buffers, 1);
    let begin = sim.now_ns();
    drop(blocks);
    assert!(sim.now_ns() > begin + 900_000, "the kernel was waited for");
    assert_eq!(sim.live().host_buffers, 0);
}

#[test]
fn small_pieces_whose_work_is_over_serve_again_before_a_block_is_taken() {
    let device: Arc<dyn Driver> = Arc::new(simulator());
    let pool = HostPool::new(&space(MIB * 4), BLOCKS, [Arc::clone(&device)]).unwrap();
    let stream = device.create_stream().unwrap();
    for _ in 0..100 {
        let mut piece = pool.allocate_small(Bytes::kib(64)).unwrap();
        piece.record_stream(&device, stream).unwrap();
    }
    assert_eq!(pool.space().total(), MIB);
}

#[test]
fn a_tail_whose_work_cannot_be_noted_is_never_reused() {
    let sim = Arc::new(simulator());
    let device: Arc<dyn Driver> = sim.clone();
    let pool = HostPool::new(&space(Bytes::mib(4)), BLOCKS, [Arc::clone(&device)]).unwrap();
    let stream = device.create_stream().unwrap();
    let mut blocks = pool.allocate(MIB * 4).unwrap();
    blocks.record_stream(&device, stream).unwrap();
    let waits = FaultPlan::from_nth_of(Call::SynchronizeStream, 1);
    sim.set_faults(FaultPlan::from_nth_of(Call::Record, 1).and(waits));
    let tail = blocks.split_off(MIB).unwrap();
    sim.set_faults(FaultPlan::none());
    drop((blocks, tail));
    let stats = pool.stats();
    assert_eq!((stats.leaked_blocks, stats.free_blocks), (3, 1));
    assert_eq!(pool.space().total(), MIB * 3, "they stay charged");
    pool.audit().unwrap();
}

#[test]
fn one_question_to_a_stream_brings_all_its_blocks_back() {
    let sim = Arc::new(simulator());
    let device: Arc<dyn Driver> = sim.clone();
    let pool = HostPool::new(&space(MIB * 32), BLOCKS, [Arc::clone(&device)]).unwrap();
    let (first, second) = (device.create_stream().unwrap(), device.create_stream().unwrap());
    let gates: Vec<_> = [first, second].map(|stream| (stream, sim.gate())).into();
    for &(stream, gate) in &gates {
        sim.launch(stream, Kernel::new("busy").until(gate)).unwrap();
    }
    let all: Vec<_> = (0..32).map(|_| pool.allocate(MIB).unwrap()).collect();
    for (count, mut blocks) in all.into_iter().enumerate() {
        // Work behind which the later blocks wait, and the earlier ones do not.
        if count == 28 {
            sim.launch(second, Kernel::new("late").until(sim.gate())).unwrap();
        }
        blocks.record_stream(&device, if count % 2 == 0 { first } else { second }).unwrap();
    }
    assert_eq!(pool.stats().pending_blocks, 32);
    gates.iter().for_each(|&(_, gate)| sim.open(gate));
    let before = sim.calls_of(Call::Query);
    let block = pool.allocate(MIB).unwrap();
    // One query for each stream, and one for each use on the second up to the first incomplete one.
    assert_eq!(sim.calls_of(Call::Query) - before, 2 + 15);
    assert_eq!(pool.stats().pending_blocks, 2, "the last two on the second stream");
    drop(block);
    pool.audit().unwrap();
}

#[test]
fn those_who_wait_for_the_same_work_are_all_served() {
    let sim = Arc::new(simulator());
    let device: Arc<dyn Driver> = sim.clone();
    let pool = HostPool::new(&space(Bytes::mib(4)), BLOCKS, [Arc::clone(&device)]).unwrap();
    for _ in 0..50 {
        let stream = device.create_stream().unwrap();
        let at = device.alloc_memory(PAGE * 2).unwrap();
        let mut blocks = pool.allocate(MIB * 4).unwrap();
        for slice in blocks.slices(&device, Bytes::ZERO, MIB * 4).unwrap() {
            device.copy_to_device(stream, slice, at).unwrap();
        }
        blocks.record_stream(&device, stream).unwrap();
        drop(blocks);
        let all = std::sync::Barrier::new(4);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    all.wait();
                    assert_eq!(pool.allocate(MIB).unwrap().blocks(), 1);
                });
            }
        });
        device.free_memory(at).unwrap();
        device.destroy_stream(stream).unwrap();
    }
}

#[test]
fn small_pieces_of_every_length_are_aligned_and_apart() {
    let pool = plain(Bytes::mib(10));
    let mut seen = std::collections::BTreeMap::new();
    let lengths = [1, 511, 512, 513, 1024, 2000, 4096, 5000, 8192, 8193, 32 << 10, 64 << 10];
    let pieces: Vec<_> =
        lengths.iter().map(|&len| pool.allocate_small(Bytes::new(len)).unwrap()).collect();
    for (piece, len) in pieces.iter().zip(lengths) {
        let start = piece.span().as_ptr() as u64;
        assert_eq!(start % len.next_power_of_two().clamp(512, 4096), 0);
        assert_eq!(piece.len(), Bytes::new(len));
        seen.insert(start, start + len);
    }
    assert_eq!(seen.len(), lengths.len());
    let ends = seen.values().copied();
    assert!(ends.zip(seen.keys().copied().skip(1)).all(|(end, next)| end <= next));
    drop(pieces);
    let again = pool.allocate_small(Bytes::new(512)).unwrap().span().as_ptr() as u64;
    assert!(seen.contains_key(&again), "what was returned serves again");
}

#[test]
fn small_pieces_share_a_block_and_return_in_stream_order_too() {
    let sim = Arc::new(simulator());
    let device: Arc<dyn Driver> = sim.clone();
    let pool = HostPool::new(&space(Bytes::mib(10)), BLOCKS, [Arc::clone(&device)]).unwrap();
    let mut pieces: Vec<_> =
        (0..100).map(|_| pool.allocate_small(Bytes::new(700)).unwrap()).collect();
    assert_eq!(pool.space().total(), MIB, "one block for all");
    for (number, piece) in pieces.iter_mut().enumerate() {
        piece.write(Bytes::ZERO, &[number as u8; 700]).unwrap();
    }
    for (number, piece) in pieces.iter().enumerate() {
        let mut bytes = [0xEE; 700];
        piece.read(Bytes::ZERO, &mut bytes).unwrap();
        assert_eq!(bytes, [number as u8; 700], "pieces do not overlap");
        assert_eq!(piece.span().as_ptr() as u64 % 1024, 0);
        let HostSlice { offset, len, .. } = piece.slice(&device).unwrap();
        assert_eq!((offset.count() % 1024, len), (0, Bytes::new(700)));
    }
    assert!(pieces[0].write(Bytes::new(700), &[1]).is_err());
    let large = pool.allocate_small(Bytes::kib(64)).unwrap();
    assert_eq!(pool.space().total(), MIB * 2, "each length has its own block");
    drop(large);
    let stream = device.create_stream().unwrap();
    let at = device.alloc_memory(PAGE).unwrap();
    let gate = sim.gate();
    sim.launch(stream, Kernel::new("busy").until(gate)).unwrap();
    let mut last = pieces.pop().unwrap();
    device.copy_to_device(stream, last.slice(&device).unwrap(), at).unwrap();
    last.record_stream(&device, stream).unwrap();
    let place = last.span().as_ptr();
    drop(last);
    let next = pool.allocate_small(Bytes::new(700)).unwrap();
    assert_ne!(next.span().as_ptr(), place, "a piece in use is not handed out");
    sim.open(gate);
    device.synchronize_stream(stream).unwrap();
    drop((pieces, next));
    assert_eq!(pool.trim(Bytes::ZERO), MIB * 4);
    assert_eq!(pool.space().total(), Bytes::ZERO);
    pool.audit().unwrap();
}

#[test]
fn free_memory_is_unpinned_and_memory_in_use_is_not() {
    let sim = Arc::new(simulator());
    let device: Arc<dyn Driver> = sim.clone();
    let pool = HostPool::new(&space(Bytes::mib(20)), BLOCKS, [device]).unwrap();
    let one = pool.allocate(MIB).unwrap();
    let many = pool.allocate(MIB * 12).unwrap();
    assert_eq!(sim.live().host_buffers, 4);
    drop(many);
    assert_eq!(pool.trim(MIB * 8), MIB * 8, "down to what is to be kept");
    assert_eq!(pool.trim(Bytes::ZERO), MIB * 4);
    assert_eq!((sim.live().host_buffers, pool.stats().pools_unpinned), (1, 3));
    drop(one);
    drop(pool);
    assert_eq!(sim.live().host_buffers, 0);
    assert_eq!(sim.live().events, 0);
}

#[test]
fn blocks_are_pinned_before_they_are_needed() {
    let config = HostPoolConfig { spare_blocks: 2, ..BLOCKS };
    let pool = HostPool::new(&space(Bytes::mib(64)), config, []).unwrap();
    let three = pool.allocate(MIB * 3).unwrap();
    let begin = Instant::now();
    while pool.stats().pools_ahead < 2 {
        assert!(begin.elapsed() < Duration::from_secs(30), "nothing grew in the background");
        vramp_testing::moment();
    }
    let four = pool.allocate(MIB * 4).unwrap();
    assert_eq!(pool.stats().pools_on_demand, 0, "no allocation waited for pinning");
    drop((three, four));
}

#[test]
fn what_is_idle_is_unpinned_in_the_background_down_to_the_floor() {
    let config = HostPoolConfig { idle: Some(Duration::ZERO), ..BLOCKS };
    let pool = HostPool::new(&space(Bytes::mib(64)), config, []).unwrap();
    drop(pool.allocate(MIB * 23).unwrap());
    let begin = Instant::now();
    while pool.stats().blocks > 4 {
        assert!(begin.elapsed() < Duration::from_secs(30), "nothing was unpinned");
        vramp_testing::moment();
    }
    assert_eq!((pool.stats().pools_unpinned, pool.floor()), (5, MIB * 4));
    pool.audit().unwrap();
}

#[test]
fn memory_that_a_device_cannot_unpin_is_counted_and_unpinned_later() {
    let sims = [(); 2].map(|()| Arc::new(simulator()));
    let devices = sims.clone().map(|sim| -> Arc<dyn Driver> { sim });
    let pool = HostPool::new(&space(Bytes::mib(8)), BLOCKS, devices).unwrap();
    drop(pool.allocate(MIB * 8).unwrap());
    sims[1].set_faults(FaultPlan::nth_of(Call::FreeHost, 1).with_code(304));
    assert_eq!(pool.trim(Bytes::ZERO), MIB * 4, "one of two");
    let stats = pool.stats();
    assert_eq!((stats.blocks, stats.free_blocks, stats.quarantined_blocks), (4, 0, 4));
    assert_eq!((stats.unpins_failed, stats.pools_unpinned), (1, 1));
    assert_eq!([&sims[0], &sims[1]].map(|sim| sim.live().host_buffers), [0, 1]);
    pool.audit().unwrap();
    let half = pool.allocate(MIB * 4).unwrap();
    let full = pool.allocate(MIB);
    assert!(matches!(full, Err(HostPoolError::Exhausted { .. })), "it counts: {full:?}");
    assert_eq!(pool.trim(Bytes::ZERO), MIB * 4, "no call to the device that has done so");
    let stats = pool.stats();
    assert_eq!((stats.blocks, stats.quarantined_blocks, stats.unpins_failed), (4, 0, 1));
    drop((half, pool.allocate(MIB).unwrap()));
    pool.audit().unwrap();
    drop(pool);
    assert_eq!([&sims[0], &sims[1]].map(|sim| sim.live().host_buffers), [0, 0]);
}

#[test]
fn a_thousand_allocations_that_ended_leave_nothing() {
    let sim = Arc::new(simulator());
    let device: Arc<dyn Driver> = sim.clone();
    let config = HostPoolConfig { initial_pools: 0, ..BLOCKS };
    let pool = HostPool::new(&space(Bytes::gib(1)), config, [Arc::clone(&device)]).unwrap();
    let stream = device.create_stream().unwrap();
    let mut kept = std::collections::VecDeque::new();
    for nth in 0..1000 {
        let mut blocks = pool.allocate(MIB * (1 + nth % 7)).unwrap();
        blocks.record_stream(&device, stream).unwrap();
        kept.push_back((blocks, pool.allocate_small(Bytes::kib(nth)).unwrap()));
        if kept.len() > 8 {
            kept.pop_front();
        }
    }
    assert!(pool.stats().blocks < 96, "{:?}", pool.stats());
    kept.clear();
    pool.trim(Bytes::ZERO);
    let stats = pool.stats();
    assert_eq!((stats.blocks, stats.pending_blocks), (0, 0));
    assert_eq!((sim.live().host_buffers, pool.space().total()), (0, Bytes::ZERO));
    assert!(sim.live().events < 64, "events are used again");
}

#[test]
fn a_device_that_pins_nothing_is_an_error_and_leaves_nothing_charged() {
    for n in 1..=2 {
        let faults = FaultPlan::nth_of(Call::RegisterHost, n).with_code(2);
        let sim = Arc::new(Simulator::builder().faults(faults).build());
        let device: Arc<dyn Driver> = sim.clone();
        let made = HostPool::new(&space(Bytes::mib(20)), BLOCKS, [device]);
        match n {
            1 => assert!(matches!(made, Err(HostPoolError::Pin(_)))),
            _ => {
                let pool = made.unwrap();
                let refused = pool.allocate(MIB * 5).unwrap_err();
                assert!(matches!(refused, HostPoolError::Pin(_)), "{refused}");
                assert_eq!(pool.space().total(), Bytes::ZERO);
                assert_eq!(pool.allocate(MIB * 5).unwrap().blocks(), 5, "it is tried again");
                assert_eq!(pool.stats().free_blocks, 8);
            }
        }
        assert_eq!(sim.live().host_buffers, 0);
    }
}

#[test]
fn a_pool_knows_only_the_devices_it_was_made_for() {
    let ours: Arc<dyn Driver> = Arc::new(simulator());
    let strange: Arc<dyn Driver> = Arc::new(simulator());
    let pool = HostPool::new(&space(Bytes::mib(4)), BLOCKS, [Arc::clone(&ours)]).unwrap();
    let mut blocks = pool.allocate(MIB).unwrap();
    let refused = blocks.slices(&strange, Bytes::ZERO, MIB).unwrap_err();
    assert!(matches!(refused, HostPoolError::NotPinnedFor(_)));
    let stream = strange.create_stream().unwrap();
    assert!(matches!(blocks.record_stream(&strange, stream), Err(HostPoolError::NotPinnedFor(_))));
    assert!(blocks.slices(&ours, MIB, Bytes::new(1)).is_err());
}

#[test]
fn two_devices_see_the_same_blocks() {
    let devices: [Arc<dyn Driver>; 2] = [Arc::new(simulator()), Arc::new(simulator())];
    let pool = HostPool::new(&space(Bytes::mib(4)), BLOCKS, devices.clone()).unwrap();
    let mut blocks = pool.allocate(MIB).unwrap();
    blocks.write(Bytes::new(100), b"shared").unwrap();
    for device in &devices {
        let slice = blocks.slices(device, Bytes::new(100), Bytes::new(6)).unwrap()[0];
        let mut seen = [0; 6];
        device.read_host(slice.buffer, slice.offset, &mut seen).unwrap();
        assert_eq!(&seen, b"shared");
    }
}

#[test]
fn threads_that_allocate_and_free_at_random_share_no_block_and_leave_nothing() {
    // The background thread pins ahead, and unpins whatever it finds free twice.
    let config = HostPoolConfig { spare_blocks: 3, idle: Some(Duration::ZERO), ..BLOCKS };
    let pool = HostPool::new(&space(Bytes::mib(24)), config, []).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..8_u8 {
            let pool = &pool;
            scope.spawn(move || {
                let mut random = fastrand::Rng::with_seed(thread.into());
                for round in 0..200_u32 {
                    let mark = [thread, round as u8, 0xA5];
                    if random.u32(..3) == 0 {
                        let Ok(mut piece) = pool.allocate_small(Bytes::new(random.u64(3..4000)))
                        else {
                            continue;
                        };
                        piece.write(Bytes::ZERO, &mark).unwrap();
                        std::thread::yield_now();
                        let mut back = [0; 3];
                        piece.read(Bytes::ZERO, &mut back).unwrap();
                        assert_eq!(back, mark);
                        continue;
                    }
                    let allocated = pool.allocate(MIB * random.u64(1..5));
                    let Ok(mut blocks) = allocated else {
                        assert!(matches!(allocated, Err(HostPoolError::Full(_))), "{allocated:?}");
                        continue;
                    };
                    for block in 0..blocks.blocks() as u64 {
                        blocks.write(MIB * block, &mark).unwrap();
                    }
                    if random.bool() {
                        drop(blocks.split_off(MIB));
                    }
                    std::thread::yield_now();
                    for block in 0..blocks.blocks() as u64 {
                        let mut back = [0; 3];
                        blocks.read(MIB * block, &mut back).unwrap();
                        assert_eq!(back, mark, "two have the same block");
                    }
                    if random.u32(..20) == 0 {
                        pool.trim(MIB * 8);
                    }
                }
            });
        }
    });
    pool.audit().unwrap();
    pool.trim(Bytes::ZERO);
    assert_eq!(pool.space().total(), Bytes::ZERO);
    // What the background thread unpins just now counts until it has.
    until(|| {
        let stats = pool.stats();
        (stats.free_blocks, stats.pending_blocks) == (stats.blocks, 0)
    });
}
