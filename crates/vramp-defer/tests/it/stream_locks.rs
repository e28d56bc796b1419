//! Locks that the manager keeps by stream, and what ends them.

use vramp_alloc::Driver;
use vramp_defer::{Access, SpillError};

use super::{PIECE, rig};

#[test]
fn a_stream_that_is_synchronized_unlocks_its_buffers_and_no_others() {
    let rig = rig();
    let other = rig.allocator.create_stream().unwrap();
    let [one, two, three] = [1, 2, 3].map(|byte| rig.filled(PIECE, byte));
    let both = [(&one, Access::Shared), (&two, Access::Exclusive)];
    let lock = rig.manager.lock(&both, rig.stream).unwrap();
    assert_eq!(lock.addresses, [one.addresses(), two.addresses()]);
    rig.sim.fill(rig.queue, lock.addresses[1], 9).unwrap();
    // The same buffer may be locked twice, and for another stream.
    let again = rig.manager.lock(&[(&one, Access::Shared)], rig.stream).unwrap();
    let elsewhere = rig.manager.lock(&[(&one, Access::Shared)], other).unwrap();
    rig.manager.lock(&[(&three, Access::Shared)], other).unwrap();
    assert_eq!((one.status().leases, two.status().leases), (3, 1));
    assert_eq!((rig.manager.locks_of(rig.stream), rig.manager.locks_of(other)), (2, 2));
    assert!(one.spill().is_err());

    rig.manager.sync_and_unlock(rig.stream).unwrap();
    assert_eq!((one.status().leases, two.is_locked()), (1, false));
    assert!(matches!(rig.manager.unlock(again.id), Err(SpillError::UnknownLock { .. })));
    two.spill().unwrap();
    rig.manager.unlock(elsewhere.id).unwrap();
    assert_eq!(elsewhere.id.stream(), other);
    assert!(!one.is_locked() && three.is_locked());
    assert_eq!(rig.manager.unlock_stream(other), 1);
    assert_eq!(rig.manager.unlock_stream(other), 0);
    for (buffer, byte) in [(&one, 1), (&two, 9), (&three, 3)] {
        buffer.spill().unwrap();
        rig.expect(buffer, byte);
    }
    rig.check();
}

#[test]
fn a_lease_is_a_value_that_synchronizing_does_not_end() {
    let rig = rig();
    let buffer = rig.filled(PIECE, 1);
    let lease = buffer.lease(Access::Shared, rig.stream).unwrap();
    rig.manager.sync_and_unlock(rig.stream).unwrap();
    assert!(buffer.is_locked());
    drop(lease);
    let lock = rig.manager.lock(&[(&buffer, Access::Shared)], rig.stream).unwrap();
    rig.manager.lock_and_launch_async(&[(&buffer, Access::Shared)], rig.stream, |_| ()).unwrap();
    assert_eq!(buffer.status().leases, 1, "the lock stays");
    rig.manager.unlock(lock.id).unwrap();
    rig.check();
}

#[test]
fn any_thread_unlocks_and_a_failed_wait_leaves_the_locks() {
    let rig = rig();
    let buffer = rig.filled(PIECE, 1);
    rig.manager.lock(&[(&buffer, Access::Exclusive)], rig.stream).unwrap();
    rig.fail(vramp_driver::sim::FaultPlan::nth_of(vramp_driver::Call::SynchronizeStream, 1));
    assert!(rig.manager.sync_and_unlock(rig.stream).is_err());
    assert!(buffer.is_locked());
    rig.fail(vramp_driver::sim::FaultPlan::none());
    std::thread::scope(|scope| {
        scope.spawn(|| rig.manager.sync_and_unlock(rig.stream).unwrap());
    });
    assert!(!buffer.is_locked());
    // Work of a stream that was destroyed is waited for as well.
    let stream = rig.allocator.create_stream().unwrap();
    rig.manager.lock(&[(&buffer, Access::Exclusive)], stream).unwrap();
    rig.sim.fill(rig.allocator.stream(stream).unwrap(), buffer.addresses(), 5).unwrap();
    rig.allocator.destroy_stream(stream).unwrap();
    rig.manager.sync_and_unlock(stream).unwrap();
    buffer.spill().unwrap();
    rig.expect(&buffer, 5);
    rig.check();
}

#[test]
fn the_last_handle_of_the_manager_unlocks_all() {
    let rig = rig();
    let buffer = rig.filled(PIECE, 1);
    let clone = rig.manager.clone();
    clone.lock(&[(&buffer, Access::Shared)], rig.stream).unwrap();
    drop(clone);
    assert!(buffer.is_locked(), "another handle is left");
    let allocator = std::sync::Arc::clone(&rig.allocator);
    drop(rig);
    assert!(!buffer.is_locked());
    drop(buffer);
    assert_eq!(std::sync::Arc::strong_count(&allocator), 1);
}
