//! Exports and imports, in one process.

use std::sync::Arc;

use vramp_alloc::device::{Driver, ExportedHandle, HandleType};
use vramp_alloc::error::CreateError;
use vramp_alloc::sharing::{
    Description, ExportError, ImportError, Peers, Rdma, SharingConfig, range_of,
};
use vramp_alloc::{Allocator, Bytes, Config};
use vramp_driver::Call;
use vramp_driver::sim::{FaultPlan, Simulator};
use vramp_peers::Preset;

use super::*;
use vramp_testing::fail_each_call;

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
    let block = owner.malloc(MIB(200), stream).unwrap();
    machine.fill(0, range_of(&block), 3);
    let export = owner.export(&block).unwrap();
    let before = machine.cards[0].live();
    let mut failures = 0;
    for call in [Call::Reserve, Call::Export, Call::Import, Call::Map, Call::SetAccess] {
        fail_each_call(|nth| {
            let calls = machine.cards[0].calls_of(call);
            machine.cards[0].set_faults(FaultPlan::nth_of(call, nth).with_code(800));
            let imported = owner.import(export.description(), fetch(&export));
            machine.cards[0].set_faults(FaultPlan::none());
            owner.audit().unwrap();
            if let Ok(imported) = imported {
                imported.close().unwrap();
                return machine.cards[0].calls_of(call) - calls;
            }
            failures += 1;
            let after = machine.cards[0].live();
            assert_eq!(
                (after.handles, after.mappings, after.reservations, after.device_bytes),
                (before.handles, before.mappings, before.reservations, before.device_bytes),
                "{call} {nth}"
            );
            machine.holds(0, range_of(&block), 3);
            machine.cards[0].calls_of(call) - calls
        });
    }
    assert!(failures > 8, "there are several handles: {failures} failures");
    drop(export);
    owner.free(block, stream).unwrap();
    machine.close();
}
