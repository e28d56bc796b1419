//! Pins, dma-bufs, comm pools and pools of plain allocations: memory that something outside holds physically, or
//! that calls need which refuse mapped memory.

use std::sync::Arc;

use vramp_alloc::device::Driver;
use vramp_alloc::sharing::{DmaBufError, PinError, range_of};
use vramp_alloc::{AllocError, Allocator, Bytes, Config};
use vramp_core::AddrRange;
use vramp_driver::Call;
use vramp_driver::sim::{FaultPlan, Simulator};
use vramp_peers::Preset;

use super::*;
use crate::common::Rig;

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
    let torch =
        Allocator::new(Arc::clone(&machine.cards[0]) as Arc<dyn Driver>, Preset::Torch.config());
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

#[test]
fn segments_of_a_comm_pool_are_one_handle_each_and_stay() {
    let machine = Machine::new(1);
    let (owner, stream) = (&machine.allocators[0], machine.streams[0]);
    let comm = vramp_peers::comm_pool(owner, "nccl").unwrap();
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
        let comm = vramp_peers::comm_pool(owner, "nccl").unwrap();
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

fn plain_rig(preset: Preset, limit: Option<Bytes>) -> (Rig, Allocator) {
    let rig = Rig::on(Simulator::builder().checked(), Config { limit, ..preset.config() });
    let plain = vramp_peers::plain_pool(&rig.allocator, "plain").unwrap();
    (rig, plain)
}

#[test]
fn each_segment_is_one_allocation_of_the_driver() {
    for preset in Preset::ALL {
        let (rig, plain) = plain_rig(preset, None);
        let before = rig.sim.live();
        let large = plain.malloc(MIB(30), rig.stream).unwrap();
        let small = plain.malloc(MIB(2), rig.stream).unwrap();
        let after = rig.sim.live();
        assert_eq!(after.allocations, before.allocations + 2, "{}", preset.name());
        assert_eq!((after.mappings, after.handles), (before.mappings, before.handles));
        // What the driver says of an address begins at the segment's start.
        assert_eq!(plain.stats().unwrap().reserved, MIB(50));
        assert_eq!(plain.stats().unwrap().live, MIB(32));
        for block in [large, small] {
            plain.free(block, rig.stream).unwrap();
        }
        plain.trim(Bytes::ZERO).unwrap();
        assert_eq!(rig.sim.live().allocations, before.allocations);
        plain.audit().unwrap();
        plain.close().unwrap();
        rig.close();
    }
}

#[test]
fn plain_and_mapped_memory_share_the_limit_and_idle_memory_of_each_serves_the_other() {
    let (rig, plain) = plain_rig(Preset::Vramp, Some(MIB(100)));
    let tensor = rig.allocator.malloc(MIB(60), rig.stream).unwrap();
    let refused = plain.malloc(MIB(60), rig.stream).unwrap_err();
    assert!(
        matches!(&refused, AllocError::OutOfMemory(report) if report.pool == "plain"),
        "{refused}"
    );
    rig.allocator.free(tensor, rig.stream).unwrap();
    let segment = plain.malloc(MIB(60), rig.stream).unwrap();
    let refused = rig.allocator.malloc(MIB(60), rig.stream).unwrap_err();
    assert!(matches!(refused, AllocError::OutOfMemory(_)), "{refused}");
    plain.free(segment, rig.stream).unwrap();
    let tensor = rig.allocator.malloc(MIB(60), rig.stream).unwrap();
    assert_eq!(rig.sim.live().allocations, 0);
    rig.allocator.free(tensor, rig.stream).unwrap();
    plain.close().unwrap();
    rig.close();
}

#[test]
fn a_failing_call_leaves_a_plain_pool_as_it_was() {
    let (rig, plain) = plain_rig(Preset::Vramp, None);
    rig.sim.set_faults(FaultPlan::nth_of(Call::AllocMemory, 1).with_code(304));
    let refused = plain.malloc(MIB(30), rig.stream).unwrap_err();
    assert!(
        matches!(&refused, AllocError::Driver(error) if error.call == Call::AllocMemory),
        "{refused}"
    );
    assert_eq!(plain.stats().unwrap().reserved, Bytes::ZERO);
    let block = plain.malloc(MIB(30), rig.stream).unwrap();
    plain.free(block, rig.stream).unwrap();
    rig.sim.set_faults(FaultPlan::nth_of(Call::FreeMemory, 1).with_code(304));
    plain.trim(Bytes::ZERO).unwrap_err();
    assert_eq!((plain.stats().unwrap().reserved, rig.sim.live().allocations), (MIB(30), 1));
    let again = plain.malloc(MIB(30), rig.stream).unwrap();
    plain.free(again, rig.stream).unwrap();
    plain.trim(Bytes::ZERO).unwrap();
    assert_eq!((plain.stats().unwrap().reserved, rig.sim.live().allocations), (Bytes::ZERO, 0));
    plain.close().unwrap();
    rig.close();
}
