//! Memory that other cards and processes reach, and registered memory: on simulated cards of one
//! machine that store bytes, under the race detector.

use std::sync::Arc;
use std::time::{Duration, Instant};

use vramp_alloc::device::{Driver, ExportedHandle, HandleType};
use vramp_alloc::error::CreateError;
use vramp_alloc::sharing::{
    AccessError, Description, DmaBufError, Exchange, ExportError, ImportError, OpenError,
    OpenMemoryError, Peers, PinError, READY_MAX, Rdma, SharingConfig, range_of,
};
use vramp_alloc::{Allocator, Bytes, Config, Preset, StreamId};
use vramp_core::AddrRange;
use vramp_driver::sim::{Contents, FaultPlan, Kernel, Simulator};
use vramp_driver::{Call, CaptureMode, DeviceCopy, ErrorKind};

const MIB: fn(u64) -> Bytes = Bytes::mib;

/// Simulated cards of one machine with an allocator each.
struct Machine {
    cards: Vec<Arc<Simulator>>,
    allocators: Vec<Allocator>,
    streams: Vec<StreamId>,
}

impl Machine {
    fn new(cards: usize) -> Machine {
        Machine::with(cards, Config::default())
    }

    fn with(cards: usize, config: Config) -> Machine {
        let builder = Simulator::builder().memory(Bytes::gib(1)).contents(Contents::Stored);
        let cards: Vec<_> =
            builder.checked().build_machine(cards).into_iter().map(Arc::new).collect();
        let allocator = |card: &Arc<Simulator>| {
            Allocator::new(Arc::clone(card) as Arc<dyn Driver>, config.clone()).unwrap()
        };
        let allocators: Vec<_> = cards.iter().map(allocator).collect();
        let streams = allocators.iter().map(|of| of.create_stream().unwrap()).collect();
        Machine { cards, allocators, streams }
    }

    fn raw(&self, card: usize) -> vramp_driver::Stream {
        self.allocators[card].stream(self.streams[card]).unwrap()
    }

    fn fill(&self, card: usize, range: AddrRange, byte: u8) {
        self.cards[card].fill(self.raw(card), range, byte).unwrap();
        self.cards[card].synchronize_stream(self.raw(card)).unwrap();
    }

    /// Copies on a stream of `card`.
    fn copy(&self, card: usize, from: AddrRange, to: AddrRange) -> Result<(), ErrorKind> {
        let copy = DeviceCopy { from: from.start, to: to.start, len: from.len };
        self.cards[card].copy(self.raw(card), copy).map_err(|error| error.kind)?;
        self.cards[card].synchronize_stream(self.raw(card)).unwrap();
        Ok(())
    }

    fn holds(&self, card: usize, range: AddrRange, byte: u8) {
        let bytes = self.cards[card].peek(range).unwrap();
        assert!(bytes.iter().all(|&other| other == byte), "{range} is not all {byte}");
    }

    fn calls(&self, card: usize, call: Call) -> u64 {
        self.cards[card].calls_of(call)
    }

    fn check(&self) {
        for (card, allocator) in self.cards.iter().zip(&self.allocators) {
            allocator.audit().unwrap();
            assert!(card.hazards().is_empty(), "{:?}", card.hazards());
        }
    }

    /// Everything is returned to the cards.
    fn close(self) {
        self.check();
        for allocator in self.allocators {
            allocator.close().unwrap();
        }
        for card in self.cards {
            let live = card.live();
            assert_eq!((live.handles, live.mappings, live.reservations), (0, 0, 0), "{live:?}");
            assert_eq!(live.device_bytes, Bytes::ZERO);
        }
    }
}

// --- peers ---

#[test]
fn a_granted_card_reaches_what_is_mapped_and_what_will_be() {
    let machine = Machine::new(2);
    let [owner, _] = &machine.allocators[..] else { unreachable!("there are two") };
    let before = owner.malloc(MIB(64), machine.streams[0]).unwrap();
    let here = machine.allocators[1].malloc(MIB(64), machine.streams[1]).unwrap();
    machine.fill(0, range_of(&before), 7);
    let refused = machine.copy(1, range_of(&before), range_of(&here));
    assert_eq!(refused, Err(ErrorKind::InvalidUse), "as on a card: only set-access counts");

    let sets = machine.calls(0, Call::SetAccess);
    let cost = owner.grant_access(1).unwrap();
    assert_eq!(cost.calls, machine.calls(0, Call::SetAccess) - sets);
    assert!(cost.calls == 1 && cost.bytes >= MIB(64), "{cost:?}");
    machine.copy(1, range_of(&before), range_of(&here)).unwrap();
    machine.holds(1, range_of(&here), 7);

    // Later memory is granted in the call that is made anyway.
    let sets = machine.calls(0, Call::SetAccess);
    let after = owner.malloc(MIB(96), machine.streams[0]).unwrap();
    let alone = machine.calls(1, Call::SetAccess);
    let twin = machine.allocators[1].malloc(MIB(96), machine.streams[1]).unwrap();
    let alone = machine.calls(1, Call::SetAccess) - alone;
    assert_eq!(machine.calls(0, Call::SetAccess) - sets, alone, "as many calls as without a peer");
    machine.fill(0, range_of(&after), 9);
    machine.copy(1, range_of(&after), range_of(&twin)).unwrap();
    machine.holds(1, range_of(&twin), 9);
    assert_eq!(owner.sharing().peers, [1]);
    assert_eq!(owner.grant_access(1).unwrap(), Default::default(), "it has access already");

    owner.revoke_access(1).unwrap();
    assert_eq!(
        machine.copy(1, range_of(&after), range_of(&twin)),
        Err(ErrorKind::InvalidUse),
        "access was taken back"
    );
    assert!(owner.sharing().peers.is_empty());
    machine.copy(0, range_of(&before), AddrRange::new(after.addr(), MIB(64))).unwrap();
    machine.close();
}

#[test]
fn pools_arenas_ranges_and_comm_pools_are_granted_too() {
    let machine = Machine::new(2);
    let [owner, other] = &machine.allocators[..] else { unreachable!("there are two") };
    let stream = machine.streams[0];
    let target = other.malloc(MIB(32), machine.streams[1]).unwrap();
    let target = AddrRange::new(target.addr(), MIB(2));
    let side = owner.create_pool("side").unwrap();
    let comm = owner.comm_pool("comm").unwrap();
    let range = owner.stable_range(MIB(32), MIB(32)).unwrap();
    range.back(stream).unwrap();
    let in_side = side.malloc(MIB(4), stream).unwrap();
    let in_comm = comm.malloc(MIB(4), stream).unwrap();
    owner.grant_access(1).unwrap();
    let late = owner.create_pool("late").unwrap();
    let in_late = late.malloc(MIB(4), stream).unwrap();
    let late_comm = owner.comm_pool("late comm").unwrap();
    let in_late_comm = late_comm.malloc(MIB(4), stream).unwrap();
    let starts = [&in_side, &in_comm, &in_late, &in_late_comm].map(|block| block.addr());
    for (byte, start) in (1..).zip(starts.into_iter().chain([range.range().start])) {
        let part = AddrRange::new(start, MIB(2));
        machine.fill(0, part, byte);
        machine.copy(1, part, target).unwrap();
        machine.holds(1, target, byte);
    }
    for (pool, block) in
        [(&side, in_side), (&comm, in_comm), (&late, in_late), (&late_comm, in_late_comm)]
    {
        pool.free(block, stream).unwrap();
        pool.audit().unwrap();
    }
    drop(range);
    for pool in [side, comm, late, late_comm] {
        pool.close().unwrap();
    }
    machine.close();
}

#[test]
fn without_peers_nothing_costs_more() {
    let calls = |peers: Peers| {
        let sharing = SharingConfig { peers, ..SharingConfig::default() };
        let machine = Machine::with(2, Config { sharing, ..Config::default() });
        let (allocator, stream) = (&machine.allocators[0], machine.streams[0]);
        let blocks: Vec<_> =
            (1..64).map(|mib| allocator.malloc(MIB(mib % 13 + 1), stream).unwrap()).collect();
        for block in blocks.into_iter().step_by(2) {
            allocator.free(block, stream).unwrap();
        }
        let _large = allocator.malloc(MIB(100), stream).unwrap();
        allocator.trim(Bytes::ZERO).unwrap();
        (machine.cards[0].calls(), machine.cards[0].now_ns())
    };
    assert_eq!(calls(Peers::None), calls(Peers::OnDemand));
    let (all, with_all) = calls(Peers::All);
    let (none, with_none) = calls(Peers::None);
    assert!(all == none && with_all > with_none, "as many calls, but they take longer");
}

#[test]
fn a_setting_names_the_cards_that_may_have_access() {
    let machine = |peers| {
        let sharing = SharingConfig { peers, ..SharingConfig::default() };
        Machine::with(3, Config { sharing, ..Config::default() })
    };
    let none = machine(Peers::None);
    assert!(matches!(
        none.allocators[0].grant_access(1),
        Err(AccessError::Excluded { ordinal: 1 })
    ));
    let all = machine(Peers::All);
    assert_eq!(all.allocators[1].sharing().peers, [0, 2]);
    let owner = Simulator::builder().build_machine(3).remove(0);
    let these = |list: &[u32]| SharingConfig {
        peers: Peers::These(list.to_vec()),
        ..SharingConfig::default()
    };
    let owner: Arc<dyn Driver> = Arc::new(owner);
    let open =
        |sharing| Allocator::new(Arc::clone(&owner), Config { sharing, ..Config::default() });
    let listed = open(these(&[2, 2])).unwrap();
    assert_eq!(listed.sharing().peers, [2]);
    assert!(matches!(listed.grant_access(1), Err(AccessError::Excluded { ordinal: 1 })));
    assert!(matches!(open(these(&[0])), Err(CreateError::NoPeer { ordinal: 0, .. })));
    let error = all.allocators[0].grant_access(7).unwrap_err();
    assert_eq!(error.to_string(), "device 7 is no peer of sim:h200x3:0: its peers are [1, 2]");
    let plain = Allocator::new(Arc::clone(&owner), Config::preset(Preset::StreamOrdered)).unwrap();
    assert!(matches!(plain.grant_access(1), Err(AccessError::NotSupported { .. })));
}

/// A grant makes a driver call for each stretch of mapped addresses, not for each handle.
#[test]
fn a_grant_makes_one_call_for_each_stretch() {
    let calls = |blocks: u64| {
        let machine = Machine::new(2);
        for _ in 0..blocks {
            let _block = machine.allocators[0].malloc(MIB(2), machine.streams[0]).unwrap();
        }
        let handles = machine.allocators[0].stats().unwrap().chunks_created;
        (machine.allocators[0].grant_access(1).unwrap().calls, handles)
    };
    let (few, many) = (calls(8), calls(400));
    assert!(many.1 >= 20 && few.0 == many.0, "{few:?} {many:?}");
}

/// A grant or a revoke of which any driver call fails changes nothing.
#[test]
fn a_failed_change_of_access_changes_nothing() {
    for (call, change) in [(Call::SetAccess, true), (Call::RevokeAccess, false)] {
        let machine = Machine::new(2);
        let [owner, other] = &machine.allocators[..] else { unreachable!("there are two") };
        let (stream, theirs) = (machine.streams[0], machine.streams[1]);
        // Two stretches in each of two pools.
        let side = owner.create_pool("side").unwrap();
        let mut blocks = Vec::new();
        for pool in [owner, &side] {
            blocks.push(pool.malloc(MIB(16), stream).unwrap());
            let range = pool.stable_range(MIB(64), MIB(8)).unwrap();
            range.back_part(Bytes::ZERO, MIB(8), stream).unwrap();
            range.back_part(MIB(32), MIB(8), stream).unwrap();
            std::mem::forget(range);
        }
        let target = range_of(&other.malloc(MIB(16), theirs).unwrap());
        if !change {
            owner.grant_access(1).unwrap();
        }
        let mut nth = 1;
        loop {
            machine.cards[0].set_faults(FaultPlan::nth_of(call, nth).with_code(999));
            machine.cards[0].set_faults(FaultPlan::nth_of(call, nth).with_code(800));
            let changed = if change { owner.grant_access(1) } else { owner.revoke_access(1) };
            machine.cards[0].set_faults(FaultPlan::none());
            owner.audit().unwrap();
            side.audit().unwrap();
            if changed.is_ok() {
                break;
            }
            nth += 1;
            assert_eq!(owner.sharing().peers.is_empty(), change);
            assert_eq!(side.sharing().peers.is_empty(), change);
            for block in &blocks {
                let copied = machine.copy(1, range_of(block), target);
                assert_eq!(copied.is_err(), change, "access is as before");
            }
        }
        assert!(nth > 4, "{call}: there are several calls to fail, not {nth}");
        assert_eq!(owner.sharing().peers.is_empty(), !change);
    }
}

// --- pins ---

#[test]
fn a_pinned_range_keeps_its_memory_after_a_free() {
    let machine = Machine::new(1);
    let (allocator, stream) = (&machine.allocators[0], machine.streams[0]);
    let block = allocator.malloc(MIB(64), stream).unwrap();
    let range = range_of(&block);
    machine.fill(0, range, 5);
    let pinned = allocator.pin_range(range).unwrap();
    assert!(pinned.bytes() >= MIB(64) && allocator.pinned().1 == pinned.bytes());
    allocator.free(block, stream).unwrap();
    allocator.wait_for_freed_memory().unwrap();
    let [unmaps, releases] = [Call::Unmap, Call::Release].map(|call| machine.calls(0, call));
    allocator.trim(Bytes::ZERO).unwrap();
    let _large = allocator.malloc(MIB(512), stream).unwrap();
    assert_eq!(machine.calls(0, Call::Unmap), unmaps);
    assert_eq!(machine.calls(0, Call::Release), releases);
    machine.holds(0, AddrRange::new(range.start, MIB(32)), 5);
    drop(pinned);
    assert_eq!(allocator.pinned(), (0, Bytes::ZERO));
    machine.close();
}

#[test]
fn only_memory_of_the_allocator_is_pinned() {
    let machine = Machine::new(1);
    let (allocator, stream) = (&machine.allocators[0], machine.streams[0]);
    let block = allocator.malloc(MIB(2), stream).unwrap();
    let foreign = AddrRange::new(vramp_alloc::DeviceAddr::new(1 << 20), MIB(1));
    assert!(matches!(allocator.pin_range(foreign), Err(PinError::NotOwned { .. })));
    let beyond = AddrRange::new(block.addr(), Bytes::gib(300));
    assert!(matches!(allocator.pin_range(beyond), Err(PinError::NotOwned { .. })));
    let endless = AddrRange::new(block.addr(), Bytes::MAX);
    assert!(matches!(allocator.pin_range(endless), Err(PinError::NotOwned { .. })));
    let torch = Allocator::new(
        Arc::clone(&machine.cards[0]) as Arc<dyn Driver>,
        Config::preset(Preset::Torch),
    );
    let torch = torch.unwrap();
    let stream = torch.create_stream().unwrap();
    let other = torch.malloc(MIB(2), stream).unwrap();
    assert!(matches!(torch.pin_range(range_of(&other)), Err(PinError::NotSupported { .. })));
}

#[test]
fn a_pinned_part_of_a_range_is_not_lent() {
    let machine = Machine::new(1);
    let (allocator, stream) = (&machine.allocators[0], machine.streams[0]);
    let range = allocator.stable_range(MIB(64), MIB(16)).unwrap();
    range.back(stream).unwrap();
    let part = AddrRange::new(range.range().start + MIB(20), MIB(4));
    let pinned = allocator.pin_range(part).unwrap();
    assert_eq!(pinned.bytes(), MIB(16));
    assert_eq!(range.lend(&[]), MIB(48));
    pinned.unpin();
    assert_eq!(range.lend(&[]), MIB(16));
    drop(range);
    machine.close();
}

// --- dma-bufs ---

#[test]
fn a_dma_buf_pins_its_range_and_keeps_the_memory() {
    let machine = Machine::new(1);
    let (allocator, stream) = (&machine.allocators[0], machine.streams[0]);
    let block = allocator.malloc(MIB(8), stream).unwrap();
    // In the middle of a page of the host, and longer than one handle.
    let part = AddrRange::new(block.addr() + Bytes::new(512), MIB(8) - Bytes::new(1024));
    let buffer = allocator.export_dma_buf(part).unwrap();
    assert_eq!((buffer.range(), buffer.offset()), (part, Bytes::new(512)));
    allocator.free(block, stream).unwrap();
    allocator.wait_for_freed_memory().unwrap();
    allocator.trim(Bytes::ZERO).unwrap();
    assert!(allocator.stats().unwrap().reserved >= MIB(8), "the range is pinned");
    let (pinned, descriptor) = buffer.into_parts();
    drop(pinned);
    allocator.trim(Bytes::ZERO).unwrap();
    assert_eq!(allocator.stats().unwrap().reserved, Bytes::ZERO);
    let kept = machine.cards[0].live();
    assert!(kept.device_bytes >= MIB(8), "the descriptor keeps the memory: {kept:?}");
    drop(descriptor);
    machine.close();
}

#[test]
fn a_dma_buf_that_is_refused_pins_nothing() {
    let machine = Machine::new(1);
    let (allocator, stream) = (&machine.allocators[0], machine.streams[0]);
    let block = allocator.malloc(MIB(8), stream).unwrap();
    let empty = AddrRange::new(block.addr(), Bytes::ZERO);
    assert!(matches!(allocator.export_dma_buf(empty), Err(DmaBufError::Empty)));
    let beyond = AddrRange::new(block.addr(), Bytes::gib(300));
    assert!(matches!(allocator.export_dma_buf(beyond), Err(DmaBufError::Pin(_))));
    machine.cards[0].set_faults(FaultPlan::nth_of(Call::ExportDmaBuf, 1).with_code(800));
    let failed = allocator.export_dma_buf(range_of(&block));
    assert!(matches!(failed, Err(DmaBufError::Driver(_))));
    machine.cards[0].set_faults(FaultPlan::none());
    assert_eq!(allocator.pinned(), (0, Bytes::ZERO));
    allocator.free(block, stream).unwrap();
    machine.close();

    let can = Simulator::builder().build().info().capabilities;
    let without = vramp_driver::Capabilities { dma_buf: false, ..can };
    let card: Arc<dyn Driver> = Arc::new(Simulator::builder().capabilities(without).build());
    let allocator = Allocator::new(card, Config::default()).unwrap();
    let stream = allocator.create_stream().unwrap();
    let block = allocator.malloc(MIB(8), stream).unwrap();
    let refused = allocator.export_dma_buf(range_of(&block)).unwrap_err();
    assert!(matches!(refused, DmaBufError::NotSupported { .. }), "{refused}");
}

// --- comm pools ---

#[test]
fn segments_of_a_comm_pool_are_one_handle_each_and_stay() {
    let machine = Machine::new(1);
    let (owner, stream) = (&machine.allocators[0], machine.streams[0]);
    let comm = owner.comm_pool("nccl").unwrap();
    let creates = machine.calls(0, Call::Create);
    let large = comm.malloc(MIB(100), stream).unwrap();
    assert_eq!(machine.calls(0, Call::Create) - creates, 1, "one handle");
    let export = comm.export(&large).unwrap();
    assert_eq!((export.description().handles.len(), export.description().offset), (1, Bytes::ZERO));
    let at = large.addr();
    comm.free(large, stream).unwrap();
    comm.trim(Bytes::ZERO).unwrap();
    assert_eq!(machine.calls(0, Call::Unmap), 0, "it is exported");
    drop(export);
    let again = comm.malloc(MIB(100), stream).unwrap();
    assert_eq!(again.addr(), at, "the cached segment serves it");
    comm.free(again, stream).unwrap();
    comm.trim(Bytes::ZERO).unwrap();
    assert_eq!(comm.stats().unwrap().reserved, Bytes::ZERO);
    comm.close().unwrap();
    machine.close();
}

#[test]
fn a_segment_of_which_any_call_fails_leaves_nothing() {
    for call in [Call::Reserve, Call::Create, Call::Map, Call::SetAccess] {
        let machine = Machine::new(1);
        let (owner, stream) = (&machine.allocators[0], machine.streams[0]);
        let comm = owner.comm_pool("nccl").unwrap();
        machine.cards[0].set_faults(FaultPlan::nth_of(call, 1).with_code(800));
        comm.malloc(MIB(100), stream).unwrap_err();
        machine.cards[0].set_faults(FaultPlan::none());
        comm.audit().unwrap();
        let live = machine.cards[0].live();
        assert_eq!((live.handles, live.mappings), (0, 0), "{call}");
        let block = comm.malloc(MIB(100), stream).unwrap();
        comm.free(block, stream).unwrap();
        comm.close().unwrap();
        machine.close();
    }
}

// --- export and import ---

fn fetch(
    export: &vramp_alloc::sharing::Export,
) -> impl FnMut(usize) -> Result<ExportedHandle, ExportError> + '_ {
    |index| export.descriptor(index)
}

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
    let machine = Machine::with(1, Config::preset(Preset::TorchExpandable));
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
    assert!(refused(Config::preset(Preset::StreamOrdered)).contains("use the preset vramp"));
    assert!(refused(Config::preset(Preset::Torch)).contains("comm pool"));

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
        for nth in 1.. {
            machine.cards[0].set_faults(FaultPlan::nth_of(call, nth).with_code(800));
            let imported = owner.import(export.description(), fetch(&export));
            machine.cards[0].set_faults(FaultPlan::none());
            owner.audit().unwrap();
            if let Ok(imported) = imported {
                imported.close().unwrap();
                break;
            }
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
    assert!(failures > 8, "there are several handles: {failures} failures");
    drop(export);
    owner.free(block, stream).unwrap();
    machine.close();
}

// --- the exchange ---

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
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

// --- orders that programs meet ---

#[test]
fn a_block_in_several_handles_of_an_expandable_segment_is_exported_whole() {
    let machine = Machine::with(1, Config::preset(Preset::TorchExpandable));
    let (owner, stream) = (&machine.allocators[0], machine.streams[0]);
    let before = owner.malloc(MIB(12), stream).unwrap();
    let block = owner.malloc(MIB(100), stream).unwrap();
    machine.fill(0, range_of(&block), 3);
    let export = owner.export(&block).unwrap();
    assert!(export.description().is_possible(), "{:?}", export.description());
    assert!(export.description().handles.len() >= 5);
    let imported = owner.import(export.description(), fetch(&export)).unwrap();
    machine.holds(0, imported.range(), 3);
    imported.close().unwrap();
    owner.free(block, stream).unwrap();
    drop(export);
    owner.free(before, stream).unwrap();
    machine.close();
}

#[test]
fn a_trim_of_a_comm_pool_waits_for_the_work_of_a_destroyed_stream() {
    for destroyed in [false, true] {
        let machine = Machine::new(1);
        let owner = &machine.allocators[0];
        let comm = owner.comm_pool("nccl").unwrap();
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
    let pools = [owner.create_pool("side").unwrap(), owner.comm_pool("comm").unwrap()];
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
    let comm = owner.comm_pool("nccl").unwrap();
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
    let comm = owner.comm_pool("nccl").unwrap();
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
