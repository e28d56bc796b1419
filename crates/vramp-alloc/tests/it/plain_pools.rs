//! A pool of plain allocations beside a virtual pool: what calls need that refuse mapped memory.

use crate::common::Rig;
use vramp_alloc::{AllocError, Allocator, Bytes, Config};
use vramp_driver::Call;
use vramp_driver::sim::{FaultPlan, Simulator};
use vramp_peers::Preset;

const MIB: Bytes = Bytes::mib(1);

fn rig(preset: Preset, limit: Option<Bytes>) -> (Rig, Allocator) {
    let rig = Rig::on(Simulator::builder().checked(), Config { limit, ..preset.config() });
    let plain = vramp_peers::plain_pool(&rig.allocator, "plain").unwrap();
    (rig, plain)
}

#[test]
fn each_segment_is_one_allocation_of_the_driver() {
    for preset in Preset::ALL {
        let (rig, plain) = rig(preset, None);
        let before = rig.sim.live();
        let large = plain.malloc(MIB * 30, rig.stream).unwrap();
        let small = plain.malloc(MIB * 2, rig.stream).unwrap();
        let after = rig.sim.live();
        assert_eq!(after.allocations, before.allocations + 2, "{}", preset.name());
        assert_eq!((after.mappings, after.handles), (before.mappings, before.handles));
        // What the driver says of an address begins at the segment's start.
        assert_eq!(plain.stats().unwrap().reserved, MIB * 50);
        assert_eq!(plain.stats().unwrap().live, MIB * 32);
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
    let (rig, plain) = rig(Preset::Vramp, Some(MIB * 100));
    let tensor = rig.allocator.malloc(MIB * 60, rig.stream).unwrap();
    let refused = plain.malloc(MIB * 60, rig.stream).unwrap_err();
    assert!(
        matches!(&refused, AllocError::OutOfMemory(report) if report.pool == "plain"),
        "{refused}"
    );
    rig.allocator.free(tensor, rig.stream).unwrap();
    let segment = plain.malloc(MIB * 60, rig.stream).unwrap();
    let refused = rig.allocator.malloc(MIB * 60, rig.stream).unwrap_err();
    assert!(matches!(refused, AllocError::OutOfMemory(_)), "{refused}");
    plain.free(segment, rig.stream).unwrap();
    let tensor = rig.allocator.malloc(MIB * 60, rig.stream).unwrap();
    assert_eq!(rig.sim.live().allocations, 0);
    rig.allocator.free(tensor, rig.stream).unwrap();
    plain.close().unwrap();
    rig.close();
}

#[test]
fn a_failing_call_leaves_a_plain_pool_as_it_was() {
    let (rig, plain) = rig(Preset::Vramp, None);
    rig.sim.set_faults(FaultPlan::nth_of(Call::AllocMemory, 1).with_code(304));
    let refused = plain.malloc(MIB * 30, rig.stream).unwrap_err();
    assert!(
        matches!(&refused, AllocError::Driver(error) if error.call == Call::AllocMemory),
        "{refused}"
    );
    assert_eq!(plain.stats().unwrap().reserved, Bytes::ZERO);
    let block = plain.malloc(MIB * 30, rig.stream).unwrap();
    plain.free(block, rig.stream).unwrap();
    rig.sim.set_faults(FaultPlan::nth_of(Call::FreeMemory, 1).with_code(304));
    plain.trim(Bytes::ZERO).unwrap_err();
    assert_eq!((plain.stats().unwrap().reserved, rig.sim.live().allocations), (MIB * 30, 1));
    let again = plain.malloc(MIB * 30, rig.stream).unwrap();
    plain.free(again, rig.stream).unwrap();
    plain.trim(Bytes::ZERO).unwrap();
    assert_eq!((plain.stats().unwrap().reserved, rig.sim.live().allocations), (Bytes::ZERO, 0));
    plain.close().unwrap();
    rig.close();
}
