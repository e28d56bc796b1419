//! Tickets between processes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use vramp_alloc::device::Driver;
use vramp_alloc::sharing::{Exchange, OpenError, OpenMemoryError, READY_MAX, range_of};
use vramp_alloc::{Allocator, Bytes, Config};
use vramp_driver::Call;

use super::*;

#[test]
fn tickets_open_memory_until_it_is_withdrawn() {
    let machine = Machine::new(1);
    let (owner, stream) = (&machine.allocators[0], machine.streams[0]);
    let exchange = Exchange::new();
    let block = owner.malloc(MIB(200), stream).unwrap();
    let range = range_of(&block);
    machine.fill(0, range, 6);
    let shared = exchange.share(owner.export(&block).unwrap()).unwrap();
    let ticket = shared.grant().unwrap().to_bytes();
    assert!(shared.is_held(), "the grant is on its way");
    owner.free(block, stream).unwrap();

    let opened = exchange.open(owner, &ticket).unwrap();
    let again = exchange.open(owner, &shared.ticket().to_bytes()).unwrap();
    machine.holds(0, opened.range(), 6);
    machine.holds(0, again.range(), 6);
    assert!(opened.range().start != again.range().start && shared.opens() == 2);
    drop(shared);
    assert_eq!(owner.exported(), 1, "both have it open");
    opened.close().unwrap();
    assert_eq!(owner.exported(), 1, "one has it open");
    drop(again);
    let deadline = soon();
    while owner.exported() > 0 {
        assert!(Instant::now() < deadline, "the block is free once all have closed it");
        std::thread::sleep(Duration::from_millis(1));
    }
    let error = exchange.open(owner, &ticket).unwrap_err();
    assert!(matches!(error, OpenMemoryError::Open(OpenError::Withdrawn { .. })), "{error}");
    assert!(matches!(exchange.open(owner, &[1, 2]), Err(OpenMemoryError::Ticket(_))));
    assert_eq!(exchange.published(), 0);
    machine.close();
}

#[test]
fn a_ticket_of_a_closed_allocator_is_refused_and_what_is_open_stays() {
    let machine = Machine::new(1);
    let card: Arc<dyn Driver> = Arc::clone(&machine.cards[0]) as Arc<dyn Driver>;
    let owner = Allocator::new(card, Config::default()).unwrap();
    let stream = owner.create_stream().unwrap();
    let block = owner.malloc(MIB(4), stream).unwrap();
    let exchange = Exchange::new();
    let shared = exchange.share(owner.export(&block).unwrap()).unwrap();
    let ticket = shared.ticket().to_bytes();
    let importer = &machine.allocators[0];
    let opened = exchange.open(importer, &ticket).unwrap();
    machine.fill(0, opened.range(), 5);
    owner.close().unwrap();
    let error = exchange.open(importer, &ticket).unwrap_err();
    assert!(matches!(error, OpenMemoryError::Open(OpenError::Source { .. })), "{error}");
    machine.holds(0, opened.range(), 5);
    opened.close().unwrap();
    assert!(shared.wait_released(soon()));
    drop(shared);
    machine.close();
}

/// Descriptors of this process.
fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// An import that a captured stream uses cannot be unmapped, so the exporter keeps its block.
#[test]
fn memory_that_a_capture_uses_is_not_reported_as_closed() {
    let machine = Machine::new(1);
    let (owner, stream) = (&machine.allocators[0], machine.streams[0]);
    let exchange = Exchange::new();
    let block = owner.malloc(MIB(4), stream).unwrap();
    let shared = exchange.share(owner.export(&block).unwrap()).unwrap();
    for closes in [true, false] {
        let opened = exchange.open(owner, &shared.ticket().to_bytes()).unwrap();
        let opens = shared.opens();
        opened.record_use(stream).unwrap();
        let raw = machine.raw(0);
        machine.cards[0].begin_capture(raw, vramp_driver::CaptureMode::Relaxed).unwrap();
        if closes {
            opened.close().unwrap_err();
        } else {
            drop(opened);
        }
        let graph = machine.cards[0].end_capture(raw).unwrap();
        machine.cards[0].destroy_graph(graph).unwrap();
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(shared.opens(), opens, "the exporter keeps the block");
    }
    drop(shared);
    owner.free(block, stream).unwrap();
    assert_eq!(owner.exported(), 1);
}

/// However many exports there are, a bounded number of descriptors is open.
#[test]
fn descriptors_do_not_grow_with_the_exports() {
    let machine = Machine::new(1);
    let (owner, stream) = (&machine.allocators[0], machine.streams[0]);
    let exchange = Exchange::new();
    let exports = machine.calls(0, Call::Export);
    let shared: Vec<_> = (0..2000)
        .map(|_| {
            let block = owner.malloc(Bytes::new(4096), stream).unwrap();
            let shared = exchange.share(owner.export(&block).unwrap()).unwrap();
            owner.free(block, stream).unwrap();
            shared
        })
        .collect();
    assert_eq!(machine.calls(0, Call::Export) - exports, READY_MAX as u64);
    // All can be opened, also those without a descriptor that was made before.
    for one in shared.iter().rev().step_by(199) {
        exchange.open(owner, &one.ticket().to_bytes()).unwrap().close().unwrap();
    }
    drop(shared);
    let deadline = soon();
    while owner.exported() > 0 {
        assert!(Instant::now() < deadline, "every export ends");
        std::thread::sleep(Duration::from_millis(1));
    }
    machine.close();
}

/// 2,000 cycles leave no descriptor, mapping or byte.
#[test]
fn cycles_leave_nothing() {
    let machine = Machine::new(1);
    let (owner, stream) = (&machine.allocators[0], machine.streams[0]);
    let exchange = Exchange::new();
    let cycle = || {
        let block = owner.malloc(MIB(4), stream).unwrap();
        let shared = exchange.share(owner.export(&block).unwrap()).unwrap();
        let opened = exchange.open(owner, &shared.grant().unwrap().to_bytes()).unwrap();
        owner.free(block, stream).unwrap();
        opened.close().unwrap();
        assert!(shared.wait_released(soon()));
    };
    cycle();
    let open = descriptors();
    (0..2000).for_each(|_| cycle());
    let deadline = soon();
    while owner.exported() > 0 {
        assert!(Instant::now() < deadline, "every export ends");
        std::thread::sleep(Duration::from_millis(1));
    }
    // Tests beside this one open descriptors too; 2,000 leaked ones would show.
    assert!(descriptors() < open + 500, "{open} before, {} after", descriptors());
    owner.wait_for_freed_memory().unwrap();
    owner.trim(Bytes::ZERO).unwrap();
    let live = machine.cards[0].live();
    assert_eq!((live.handles, live.mappings, live.device_bytes), (0, 0, Bytes::ZERO));
    assert_eq!((owner.pinned().0, exchange.published()), (0, 0));
    machine.close();
}
