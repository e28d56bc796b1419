//! Exports and imports in one process, and tickets between processes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use vramp_alloc::device::{Driver, ExportedHandle, HandleType};
use vramp_alloc::error::CreateError;
use vramp_alloc::kv::{Layout, Options};
use vramp_alloc::sharing::{
    Description, Exchange, ExportError, ImportError, OpenError, OpenMemoryError, Peers, READY_MAX,
    Rdma, SharingConfig, range_of,
};
use vramp_alloc::{Allocator, Bytes, Config};
use vramp_core::AddrRange;
use vramp_driver::Call;
use vramp_driver::sim::{FaultPlan, Simulator};
use vramp_peers::Preset;
use vramp_testing::fail_each_call;

use super::*;

#[test]
fn imported_memory_is_the_exporters() {
    let machine = Machine::new(2);
    let [owner, _] = &machine.allocators[..] else { unreachable!("there are two") };
    let stream = machine.streams[0];
    // In several handles, behind another block.
    let first = owner.malloc(MIB(2), stream).unwrap();
    let block = owner.malloc(MIB(200), stream).unwrap();
    machine.fill(0, range_of(&block), 3);
    let export = owner.export(&block).unwrap();
    assert!(export.description().handles.len() > 1);
    let imported = owner.import(export.description(), fetch(&export)).unwrap();
    assert_eq!(imported.range().len, block.len());
    machine.holds(0, imported.range(), 3);
    machine.fill(0, imported.range(), 4);
    machine.holds(0, range_of(&block), 4);

    // The importer's mapping outlives the exporter's block.
    owner.free(block, stream).unwrap();
    drop(export);
    owner.wait_for_freed_memory().unwrap();
    owner.trim(Bytes::ZERO).unwrap();
    machine.holds(0, imported.range(), 4);
    imported.record_use(stream).unwrap();
    imported.close().unwrap();
    owner.free(first, stream).unwrap();
    machine.close();
}

#[test]
fn pages_of_a_cache_are_exported_and_stay_while_they_are_parked() {
    let machine = Machine::new(1);
    let (owner, stream) = (&machine.allocators[0], machine.streams[0]);
    let layout = Layout { tensors: 2, bytes_each: MIB(64), ..Layout::default() };
    let cache = owner.kv_arena(layout, Options::default()).unwrap();
    cache.commit(0..4, stream).unwrap();
    let whole = cache.range(1);
    let pages = |len| AddrRange::new(whole.start + MIB(2), MIB(len));
    assert!(matches!(owner.export_range(pages(8)), Err(ExportError::NotExportable { .. })));
    machine.fill(0, pages(4), 7);
    let export = owner.export_range(pages(4)).unwrap();
    let imported = owner.import(export.description(), fetch(&export)).unwrap();
    cache.park(0..4, stream).unwrap();
    assert_eq!(cache.release(Bytes::ZERO).unwrap(), MIB(12), "all but the two that are exported");
    machine.holds(0, imported.range(), 7);
    assert_eq!(owner.exported(), 0, "no block is kept");
    drop(export);
    cache.release(Bytes::ZERO).unwrap();
    machine.holds(0, imported.range(), 7);
    imported.close().unwrap();
    drop(cache);
    machine.close();
}

#[test]
fn a_block_of_an_expandable_segment_is_exported_with_all_its_handles() {
    let machine = Machine::with(1, Preset::TorchExpandable.config());
    let (owner, stream) = (&machine.allocators[0], machine.streams[0]);
    let _before = owner.malloc(MIB(30), stream).unwrap();
    let block = owner.malloc(MIB(100), stream).unwrap();
    machine.fill(0, range_of(&block), 3);
    let export = owner.export(&block).unwrap();
    assert!(export.description().is_possible() && export.description().handles.len() > 1);
    assert!(export.description().offset < export.description().handles[0]);
    let imported = owner.import(export.description(), fetch(&export)).unwrap();
    assert_eq!(imported.range().len, block.len());
    machine.holds(0, imported.range(), 3);
    owner.free(block, stream).unwrap();
    owner.trim(Bytes::ZERO).unwrap();
    machine.fill(0, imported.range(), 4);
    imported.close().unwrap();
    drop(export);
    machine.close();
}

#[test]
fn a_block_that_is_exported_stays_beyond_its_free() {
    for size in [Bytes::new(4096), MIB(3), MIB(64)] {
        let machine = Machine::new(1);
        let (owner, stream) = (&machine.allocators[0], machine.streams[0]);
        let block = owner.malloc(size, stream).unwrap();
        let range = range_of(&block);
        machine.fill(0, range, 8);
        let exports = [(); 2].map(|()| owner.export(&block).unwrap());
        owner.free(block, stream).unwrap();
        for export in exports {
            assert_eq!(owner.exported(), 1);
            let next = owner.malloc(size, stream).unwrap();
            assert_ne!(next.addr(), range.start, "the block is not free");
            machine.fill(0, range_of(&next), 1);
            owner.free(next, stream).unwrap();
            owner.wait_for_freed_memory().unwrap();
            owner.trim(Bytes::ZERO).unwrap();
            machine.holds(0, range, 8);
            drop(export);
        }
        assert_eq!((owner.exported(), owner.pinned().0), (0, 0));
        owner.wait_for_freed_memory().unwrap();
        owner.trim(Bytes::ZERO).unwrap();
        assert_eq!(owner.stats().unwrap().reserved, Bytes::ZERO, "{size}");
        machine.close();
    }
}

#[test]
fn only_memory_that_was_created_for_it_is_exported() {
    let refused = |config: Config| {
        let machine = Machine::with(1, config);
        let block = machine.allocators[0].malloc(MIB(4), machine.streams[0]).unwrap();
        machine.allocators[0].export(&block).unwrap_err().to_string()
    };
    let sharing = SharingConfig { handle_type: HandleType::None, ..SharingConfig::default() };
    let error = refused(Config { sharing, ..Config::default() });
    assert!(error.contains("set `sharing` to posix-fd"), "{error}");
    assert!(refused(Preset::StreamOrdered.config()).contains("use the preset vramp"));
    assert!(refused(Preset::Torch.config()).contains("comm pool"));

    let machine = Machine::new(2);
    let block = machine.allocators[0].malloc(MIB(4), machine.streams[0]).unwrap();
    let error = machine.allocators[1].export(&block).unwrap_err();
    assert!(matches!(error, ExportError::Foreign(at) if at == block.addr()));
    let export = machine.allocators[0].export(&block).unwrap();
    let count = export.description().handles.len();
    assert!(matches!(
        export.descriptor(count),
        Err(ExportError::NoSuchHandle { index, count: all }) if index == count && all == count
    ));
}

#[test]
fn fabric_handles_fall_back_and_say_why() {
    let sharing = |handle_type, rdma| SharingConfig { handle_type, rdma, peers: Peers::None };
    let open = |builder: vramp_driver::sim::SimulatorBuilder, sharing| {
        let card: Arc<dyn Driver> = Arc::new(builder.build());
        Allocator::new(card, Config { sharing, ..Config::default() })
    };
    let refused = open(Simulator::builder(), sharing(HandleType::Fabric, Rdma::Auto)).unwrap();
    let state = refused.sharing();
    assert_eq!((state.handle_type, state.rdma), (HandleType::PosixFd, true));
    assert!(state.fallback.unwrap().contains("NOT_PERMITTED"));
    let permitted =
        open(Simulator::builder().with_fabric(), sharing(HandleType::Fabric, Rdma::Off)).unwrap();
    let state = permitted.sharing();
    assert_eq!((state.handle_type, state.rdma, state.fallback), (HandleType::Fabric, false, None));
    let can = Simulator::builder().build().info().capabilities;
    let less = vramp_driver::Capabilities { rdma: false, posix_fd: false, ..can };
    let less = || Simulator::builder().capabilities(less);
    assert!(matches!(open(less(), sharing(HandleType::PosixFd, Rdma::On)), Err(CreateError::Rdma)));
    let private = open(less(), sharing(HandleType::PosixFd, Rdma::Auto)).unwrap().sharing();
    assert_eq!((private.handle_type, private.rdma), (HandleType::None, false));
    assert!(private.fallback.is_some());
}

#[test]
fn an_impossible_description_is_refused() {
    let machine = Machine::new(1);
    let import = |handles: Vec<Bytes>, offset: Bytes, len: Bytes| {
        let description = Description { handles, offset, len };
        let fetch =
            |_| -> Result<ExportedHandle, ExportError> { unreachable!("nothing is fetched") };
        machine.allocators[0].import(&description, fetch).unwrap_err()
    };
    for (handles, offset, len) in [
        (vec![], Bytes::ZERO, MIB(1)),
        (vec![MIB(2)], Bytes::ZERO, Bytes::ZERO),
        (vec![MIB(2)], MIB(1), MIB(2)),
        (vec![MIB(2), Bytes::ZERO], Bytes::ZERO, MIB(1)),
        (vec![MIB(1)], Bytes::ZERO, MIB(1)),
        (vec![MIB(2)], Bytes::MAX, MIB(1)),
        (vec![Bytes::MAX, Bytes::MAX], Bytes::ZERO, MIB(1)),
    ] {
        assert!(matches!(import(handles, offset, len), ImportError::Description(_)));
    }
    machine.close();
}

/// Whichever call fails, an import leaves nothing behind, and the exporter is as before.
#[test]
fn an_import_of_which_any_call_fails_leaves_nothing() {
    let machine = Machine::new(1);
    let (owner, stream) = (&machine.allocators[0], machine.streams[0]);
    let mut failures = 0;
    for call in [Call::Reserve, Call::Export, Call::Import, Call::Map, Call::SetAccess] {
        fail_each_call(|nth| {
            // In new handles, of which no descriptor was made yet.
            let block = owner.malloc(MIB(64), stream).unwrap();
            machine.fill(0, range_of(&block), 3);
            let export = owner.export(&block).unwrap();
            let before = machine.cards[0].live();
            let calls = machine.cards[0].calls_of(call);
            machine.cards[0].set_faults(FaultPlan::nth_of(call, nth).with_code(800));
            let imported = owner.import(export.description(), fetch(&export));
            machine.cards[0].set_faults(FaultPlan::none());
            owner.audit().unwrap();
            let made = machine.cards[0].calls_of(call) - calls;
            match imported {
                Ok(imported) => imported.close().unwrap(),
                Err(_) => {
                    failures += 1;
                    let after = machine.cards[0].live();
                    assert_eq!(
                        (after.handles, after.mappings, after.reservations, after.device_bytes),
                        (before.handles, before.mappings, before.reservations, before.device_bytes),
                        "{call} {nth}"
                    );
                    machine.holds(0, range_of(&block), 3);
                }
            }
            drop(export);
            owner.free(block, stream).unwrap();
            owner.wait_for_freed_memory().unwrap();
            owner.trim(Bytes::ZERO).unwrap();
            made
        });
    }
    assert!(failures > 8, "there are several handles: {failures} failures");
    machine.close();
}

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
    assert!(opened.range() == again.range() && shared.opens() == 2, "it is mapped once");
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

/// However many handles are exported, a bounded number of descriptors is open.
#[test]
fn descriptors_do_not_grow_with_the_handles() {
    let machine = Machine::with(1, Preset::Vpmm.config());
    let (owner, stream) = (&machine.allocators[0], machine.streams[0]);
    let exchange = Exchange::new();
    let exports = machine.calls(0, Call::Export);
    let shared: Vec<_> = (0..READY_MAX + 100)
        .map(|_| {
            let block = owner.malloc(MIB(2), stream).unwrap();
            let shared = exchange.share(owner.export(&block).unwrap()).unwrap();
            owner.free(block, stream).unwrap();
            shared
        })
        .collect();
    let made = machine.calls(0, Call::Export) - exports;
    assert!(made <= READY_MAX as u64, "{made}: exports of other tests count too");
    // All can be opened, also those without a descriptor that was made before.
    for one in shared.iter().rev().step_by(29) {
        exchange.open(owner, &one.ticket().to_bytes()).unwrap().close().unwrap();
    }
    drop(shared);
    wait_for_exports(owner);
    machine.close();
}

#[test]
fn the_blocks_of_a_handle_share_one_descriptor_which_outlasts_their_exports() {
    let machine = Machine::new(1);
    let (owner, stream) = (&machine.allocators[0], machine.streams[0]);
    let exchange = Exchange::new();
    for _ in 0..500 {
        let block = owner.malloc(Bytes::kib(4), stream).unwrap();
        let shared = exchange.share(owner.export(&block).unwrap()).unwrap();
        exchange.open(owner, &shared.ticket().to_bytes()).unwrap().close().unwrap();
        owner.free(block, stream).unwrap();
        drop(shared);
        wait_for_exports(owner);
    }
    assert_eq!(machine.calls(0, Call::Export), 1);
    // The descriptor would keep the memory on the card.
    owner.wait_for_freed_memory().unwrap();
    owner.trim(Bytes::ZERO).unwrap();
    assert_eq!(machine.cards[0].live().device_bytes, Bytes::ZERO);
    // Memory that was created since has a descriptor of its own.
    let block = owner.malloc(Bytes::kib(4), stream).unwrap();
    let shared = exchange.share(owner.export(&block).unwrap()).unwrap();
    machine.fill(0, range_of(&block), 9);
    let opened = exchange.open(owner, &shared.ticket().to_bytes()).unwrap();
    machine.holds(0, opened.range(), 9);
    assert_eq!(machine.calls(0, Call::Export), 2);
    opened.close().unwrap();
    drop(shared);
    owner.free(block, stream).unwrap();
    wait_for_exports(owner);
    machine.close();
}

fn wait_for_exports(owner: &Allocator) {
    let deadline = soon();
    while owner.exported() > 0 {
        assert!(Instant::now() < deadline, "every export ends");
        std::thread::sleep(Duration::from_millis(1));
    }
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
