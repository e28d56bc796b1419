//! Restoring ahead of need: what the calling thread waits for.

use vramp_driver::Call;
use vramp_driver::sim::Kernel;

use super::*;

/// Calls in which a thread waits.
fn waits(rig: &Rig) -> u64 {
    let calls = [Call::SynchronizeEvent, Call::SynchronizeStream];
    calls.into_iter().map(|call| rig.sim.calls_of(call)).sum()
}

#[test]
fn a_prefetch_behind_a_long_kernel_waits_for_nothing() {
    let rig = rig();
    let [busy, spilled] = [1, 2].map(|byte| rig.filled(MIB(16), byte));
    rig.sim.synchronize_stream(rig.queue).unwrap();
    spilled.wont_need();
    assert_eq!(rig.manager.spill(MIB(16)).freed, MIB(16));
    assert!(!spilled.is_resident());
    let lease = busy.lease(Access::Exclusive, rig.stream).unwrap();
    let slow = Kernel::new("slow").writing(lease.address(0)).lasting(1_000_000_000);
    rig.sim.launch(rig.queue, slow).unwrap();
    rig.sim.fill(rig.queue, lease.address(0), 3).unwrap();
    drop(lease);
    let (before, began) = (waits(&rig), rig.sim.now_ns());
    busy.prefetch().unwrap();
    spilled.prefetch().unwrap();
    busy.prefetch().unwrap();
    assert_eq!(waits(&rig), before, "no call waits");
    assert!(spilled.is_resident());
    // The restore does not wait for the kernel of the other buffer.
    let other = rig.allocator.create_stream().unwrap();
    let queue = rig.allocator.stream(other).unwrap();
    let lease = spilled.lease(Access::Shared, other).unwrap();
    rig.sim.synchronize_stream(queue).unwrap();
    assert_eq!(rig.sim.peek(AddrRange::new(lease.address(0).start, Bytes::new(1))).unwrap(), [2]);
    assert!(rig.sim.now_ns() < began + 1_000_000_000, "the kernel still runs");
    drop(lease);
    rig.expect(&busy, 3);
    rig.check();
}

#[test]
fn a_prefetch_restores_what_a_lease_then_finds_there() {
    let rig = rig();
    let buffer = rig.filled(MIB(24), 7);
    assert_eq!(rig.manager.spill(MIB(24)).freed, MIB(24));
    buffer.prefetch().unwrap();
    assert!(buffer.is_resident());
    let restored = rig.manager.counters().restored_bytes;
    rig.expect(&buffer, 7);
    assert_eq!(rig.manager.counters().restored_bytes, restored);
    rig.check();
}
