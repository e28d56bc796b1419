//! Transfers in flight: waited for later, polled, cancelled, dropped.

use std::sync::atomic::Ordering;

use vramp_host::BlockIo;
use vramp_tiers::disk::{ChargeTo, DiskTierError};

use super::faulty::Faulty;
use super::*;

fn gated() -> (Arc<Faulty>, World) {
    let faulty = Faulty::new();
    let world = world_with(SMALL, Arc::<Faulty>::clone(&faulty));
    (faulty, world)
}

#[test]
fn several_transfers_are_under_way_at_the_same_time() {
    let (faulty, world) = gated();
    let data: Vec<_> = (0..6).map(|seed| pattern(seed, 1 << 20)).collect();
    faulty.close_gate();
    let begun: Vec<_> = data
        .iter()
        .map(|data| world.store.begin_write(&[span(data)], ChargeTo::Space).unwrap())
        .collect();
    assert!(begun.iter().all(|write| !write.is_done()));
    world.assert_holds(Bytes::mib(6));
    faulty.open_gate();
    let stored: Vec<_> = begun.into_iter().map(|write| write.wait().unwrap()).collect();
    let back: Vec<_> = data.iter().map(|_| zeros(1 << 20)).collect();
    let reads: Vec<_> = stored
        .iter()
        .zip(&back)
        .map(|(stored, back)| world.store.begin_read(stored, std::slice::from_ref(back)).unwrap())
        .collect();
    // Polling works as well as waiting.
    while !reads.iter().all(|read| read.is_done()) {
        vramp_testing::moment();
    }
    reads.into_iter().for_each(|read| read.wait().unwrap());
    assert!(back.iter().map(bytes_of).eq(data));
}

#[test]
fn no_call_is_larger_than_a_piece_however_much_is_written() {
    let (faulty, world) = gated();
    let data = pattern(1, 20 << 20);
    let stored = world.store.write(&[span(&data)], ChargeTo::Space).unwrap();
    assert!(world.read(&stored).unwrap() == data);
    assert_eq!(faulty.largest.load(Ordering::Relaxed), 64 << 10);
}

#[test]
fn a_cancelled_write_ends_between_pieces_and_gives_everything_back() {
    let (faulty, world) = gated();
    faulty.close_gate();
    let write = world.store.begin_write(&[zeros(4 << 20)], ChargeTo::Space).unwrap();
    write.cancel();
    assert!(!write.is_done());
    faulty.open_gate();
    let error = write.wait().unwrap_err();
    // Pieces that had begun have ended: as many as the depth of the engine.
    let moved = Bytes::kib(64) * faulty.depth() as u64;
    assert_eq!(error, DiskTierError::Cancelled { moved, len: Bytes::mib(4) });
    world.assert_empty();
    assert_eq!(world.store.stats().writes.failed, 1);
}

#[test]
fn a_cancelled_read_leaves_what_is_stored() {
    let (faulty, world) = gated();
    let data = pattern(1, 4 << 20);
    let stored = world.store.write(&[span(&data)], ChargeTo::Space).unwrap();
    faulty.close_gate();
    let into = zeros(4 << 20);
    let read = world.store.begin_read(&stored, &[into]).unwrap();
    read.cancel();
    faulty.open_gate();
    assert!(matches!(read.wait(), Err(DiskTierError::Cancelled { .. })));
    assert!(world.read(&stored).unwrap() == data);
}

#[test]
fn a_cancellation_that_comes_too_late_changes_nothing() {
    let (_faulty, world) = gated();
    let write = world.store.begin_write(&[zeros(64 << 10)], ChargeTo::Space).unwrap();
    while !write.is_done() {
        vramp_testing::moment();
    }
    write.cancel();
    let stored = write.wait().unwrap();
    world.assert_holds(Bytes::kib(64));
    drop(stored);
    world.assert_empty();
}

#[test]
fn a_transfer_dropped_without_a_wait_frees_everything() {
    let (_faulty, world) = gated();
    drop(world.store.begin_write(&[zeros(8 << 20)], ChargeTo::Space).unwrap());
    world.assert_empty();
}

#[test]
fn what_is_read_stays_until_it_is_read_though_its_owner_lets_go() {
    let (faulty, world) = gated();
    let data = pattern(1, 256 << 10);
    let stored = world.store.write(&[span(&data)], ChargeTo::Space).unwrap();
    faulty.close_gate();
    let into = zeros(256 << 10);
    let read = world.store.begin_read(&stored, std::slice::from_ref(&into)).unwrap();
    drop(stored);
    world.assert_holds(Bytes::kib(256));
    faulty.open_gate();
    read.wait().unwrap();
    assert!(bytes_of(&into) == data);
    world.assert_empty();
}

#[test]
fn a_store_dropped_with_transfers_under_way_lets_them_end() {
    let (faulty, world) = gated();
    let kept = world.store.write(&[span(&pattern(1, 1 << 20))], ChargeTo::Space).unwrap();
    faulty.close_gate();
    let write = world.store.begin_write(&[zeros(4 << 20)], ChargeTo::Space).unwrap();
    let into = zeros(1 << 20);
    let read = world.store.begin_read(&kept, std::slice::from_ref(&into)).unwrap();
    let World { store, space, dir, manager } = world;
    drop((store, manager));
    assert!(files(dir.path()).is_empty());
    faulty.open_gate();
    read.wait().unwrap();
    assert!(bytes_of(&into) == pattern(1, 1 << 20));
    let stored = write.wait().unwrap();
    assert_eq!(space.total(), Bytes::mib(5));
    drop((stored, kept));
    assert_eq!(space.total(), Bytes::ZERO);
}
