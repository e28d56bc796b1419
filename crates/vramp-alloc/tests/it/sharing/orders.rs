//! Orders of calls that programs meet.

use std::time::Duration;

use vramp_alloc::device::Driver;
use vramp_alloc::sharing::{ExportError, Peers, SharingConfig, range_of};
use vramp_alloc::{Bytes, Config};
use vramp_core::AddrRange;
use vramp_driver::sim::Kernel;
use vramp_driver::{CaptureMode, ErrorKind};

use super::*;

#[test]
fn a_trim_of_a_comm_pool_waits_for_the_work_of_a_destroyed_stream() {
    for destroyed in [false, true] {
        let machine = Machine::new(1);
        let owner = &machine.allocators[0];
        let comm = vramp_peers::comm_pool(owner, "nccl").unwrap();
        let stream = owner.create_stream().unwrap();
        let raw = owner.stream(stream).unwrap();
        let block = comm.malloc(MIB(40), stream).unwrap();
        let kernel = Kernel::new("late").writing(range_of(&block)).lasting(50_000_000);
        machine.cards[0].launch(raw, kernel).unwrap();
        comm.free(block, stream).unwrap();
        if destroyed {
            owner.destroy_stream(stream).unwrap();
        }
        comm.trim(Bytes::ZERO).unwrap();
        machine.check();
        comm.close().unwrap();
        machine.close();
    }
}

#[test]
fn a_pool_that_is_created_after_a_card_lost_access_gives_it_none() {
    let sharing = SharingConfig { peers: Peers::All, ..SharingConfig::default() };
    let machine = Machine::with(2, Config { sharing, ..Config::default() });
    let owner = &machine.allocators[0];
    assert_eq!(owner.sharing().peers, [1]);
    owner.revoke_access(1).unwrap();
    let pools =
        [owner.create_pool("side").unwrap(), vramp_peers::comm_pool(owner, "comm").unwrap()];
    for pool in &pools {
        assert!(pool.sharing().peers.is_empty(), "{:?}", pool.sharing());
    }
    for pool in pools {
        pool.close().unwrap();
    }
    machine.close();
}

#[test]
fn a_grant_does_not_wait_for_the_exporter_of_an_import() {
    let machine = Machine::new(2);
    let [owner, _] = &machine.allocators[..] else { unreachable!("there are two") };
    let stream = machine.streams[0];
    let block = owner.malloc(MIB(4), stream).unwrap();
    machine.fill(0, range_of(&block), 6);
    let export = owner.export(&block).unwrap();
    let imported = std::thread::scope(|scope| {
        let (done, granted) = std::sync::mpsc::channel();
        let mut done = Some(done);
        let mut fetch = fetch(&export);
        owner.import(export.description(), |index| {
            if let Some(done) = done.take() {
                scope.spawn(move || done.send(owner.grant_access(1).is_ok()));
                let granted = granted.recv_timeout(Duration::from_secs(10));
                assert_eq!(granted, Ok(true), "the grant waits for the import");
            }
            fetch(index)
        })
    });
    let imported = imported.unwrap();
    let target = machine.allocators[1].malloc(MIB(4), machine.streams[1]).unwrap();
    machine.copy(1, imported.range(), range_of(&target)).unwrap();
    machine.holds(1, range_of(&target), 6);
    imported.close().unwrap();
    drop(export);
    owner.free(block, stream).unwrap();
    machine.allocators[1].free(target, machine.streams[1]).unwrap();
    machine.close();
}

#[test]
fn closing_an_import_spoils_no_capture() {
    let machine = Machine::new(1);
    let (owner, stream) = (&machine.allocators[0], machine.streams[0]);
    let block = owner.malloc(MIB(4), stream).unwrap();
    let export = owner.export(&block).unwrap();
    let imported = owner.import(export.description(), fetch(&export)).unwrap();
    imported.record_use(stream).unwrap();
    machine.cards[0].begin_capture(machine.raw(0), CaptureMode::Relaxed).unwrap();
    let error = imported.close().unwrap_err();
    assert_eq!(error.kind, ErrorKind::Capturing, "{error}");
    let graph = machine.cards[0].end_capture(machine.raw(0)).expect("nothing spoilt it");
    machine.cards[0].destroy_graph(graph).unwrap();
    machine.check();
}

#[test]
fn a_trim_of_a_comm_pool_spoils_no_capture() {
    let machine = Machine::new(1);
    let (owner, stream) = (&machine.allocators[0], machine.streams[0]);
    let comm = vramp_peers::comm_pool(owner, "nccl").unwrap();
    let block = comm.malloc(MIB(40), stream).unwrap();
    comm.free(block, stream).unwrap();
    machine.cards[0].begin_capture(machine.raw(0), CaptureMode::Relaxed).unwrap();
    let _ = comm.trim(Bytes::ZERO);
    let graph = machine.cards[0].end_capture(machine.raw(0)).expect("nothing spoilt it");
    machine.cards[0].destroy_graph(graph).unwrap();
    comm.trim(Bytes::ZERO).unwrap();
    assert_eq!(comm.stats().unwrap().reserved, Bytes::ZERO);
    comm.close().unwrap();
    machine.close();
}

#[test]
fn a_pin_outlives_its_range_in_every_order() {
    for order in 0..4 {
        let machine = Machine::new(1);
        let (owner, stream) = (&machine.allocators[0], machine.streams[0]);
        let range = owner.stable_range(MIB(64), MIB(16)).unwrap();
        range.back(stream).unwrap();
        machine.fill(0, range.range(), 7);
        let part = AddrRange::new(range.range().start + MIB(20), MIB(4));
        let pinned = owner.pin_range(part).unwrap();
        if order % 2 == 1 {
            range.lend(&[]);
            let _big = owner.malloc(MIB(40), stream).unwrap();
            owner.audit().unwrap();
        }
        if order < 2 {
            drop(range);
            owner.audit().unwrap();
            owner.wait_for_freed_memory().unwrap();
            owner.trim(Bytes::ZERO).unwrap();
            machine.holds(0, part, 7);
            let large = owner.malloc(MIB(300), stream).unwrap();
            owner.free(large, stream).unwrap();
            drop(pinned);
        } else {
            drop(pinned);
            range.back(stream).unwrap();
            drop(range);
        }
        owner.audit().unwrap();
        machine.close();
    }
}

#[test]
fn exports_end_in_every_order() {
    for order in 0..8 {
        let machine = Machine::new(1);
        let owner = machine.allocators[0].create_pool("side").unwrap();
        let stream = owner.create_stream().unwrap();
        let block = owner.malloc(MIB(8), stream).unwrap();
        owner.record_use(&block, machine.streams[0]).unwrap();
        let live = owner.stats().unwrap().live;
        let exports = [(); 2].map(|()| owner.export(&block).unwrap());
        let [first, second] = exports;
        owner.free(block, stream).unwrap();
        assert_eq!(owner.stats().unwrap().live, live, "it is in use until the exports end");
        owner.destroy_stream(stream).unwrap();
        if order & 1 == 0 {
            drop(first);
        } else {
            std::mem::forget(first);
        }
        owner.audit().unwrap();
        if order & 2 == 0 {
            drop(second);
            owner.audit().unwrap();
            owner.close().unwrap();
        } else {
            let kept = owner.close();
            kept.unwrap();
            assert!(matches!(second.descriptor(0), Err(ExportError::Unusable(_))));
            drop(second);
        }
        machine.close();
    }
}

/// The server of an exchange makes descriptors on its own thread.
#[test]
fn a_close_waits_for_descriptors_that_are_being_made() {
    for round in 0..400 {
        let machine = Machine::new(1);
        let owner = machine.allocators[0].create_pool("side").unwrap();
        let block = owner.malloc(MIB(4), machine.streams[0]).unwrap();
        let export = owner.export(&block).unwrap();
        let started = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                started.wait();
                loop {
                    match export.descriptor(0) {
                        Ok(_) => {}
                        Err(ExportError::Unusable(_)) => break,
                        Err(other) => panic!("round {round}: {other}"),
                    }
                }
            });
            started.wait();
            owner.close().unwrap();
        });
        drop(export);
        machine.close();
    }
}

#[test]
fn closing_an_import_and_destroying_its_stream_may_run_at_once() {
    for round in 0..200 {
        let machine = Machine::new(1);
        let (owner, stream) = (&machine.allocators[0], machine.streams[0]);
        let block = owner.malloc(MIB(4), stream).unwrap();
        let export = owner.export(&block).unwrap();
        let imported = owner.import(export.description(), fetch(&export)).unwrap();
        let streams: Vec<_> = (0..16).map(|_| owner.create_stream().unwrap()).collect();
        streams.iter().for_each(|&stream| imported.record_use(stream).unwrap());
        let started = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                started.wait();
                streams.iter().rev().for_each(|&stream| owner.destroy_stream(stream).unwrap());
            });
            started.wait();
            imported.close().unwrap_or_else(|error| panic!("round {round}: {error}"));
        });
        drop(export);
        owner.free(block, stream).unwrap();
        machine.close();
    }
}

#[test]
fn pinned_memory_and_comm_pools_count_against_the_limit() {
    let machine = Machine::with(1, Config { limit: Some(MIB(128)), ..Config::default() });
    let (owner, stream) = (&machine.allocators[0], machine.streams[0]);
    let comm = vramp_peers::comm_pool(owner, "nccl").unwrap();
    let in_comm = comm.malloc(MIB(60), stream).unwrap();
    owner.malloc(MIB(80), stream).unwrap_err();
    let block = owner.malloc(MIB(64), stream).unwrap();
    let pinned = owner.pin_range(range_of(&block)).unwrap();
    owner.free(block, stream).unwrap();
    comm.malloc(MIB(60), stream).unwrap_err();
    owner.trim(Bytes::ZERO).unwrap();
    owner.malloc(MIB(80), stream).unwrap_err();
    drop(pinned);
    comm.free(in_comm, stream).unwrap();
    comm.trim(Bytes::ZERO).unwrap();
    let large = owner.malloc(MIB(128), stream).unwrap();
    owner.free(large, stream).unwrap();
    comm.close().unwrap();
    machine.close();
}
