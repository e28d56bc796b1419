//! Leases: what they order, those that overwrite or that a reservation pays for, locks by stream, and prefetches.

use std::sync::Arc;

use vramp_alloc::{Driver, StreamId};
use vramp_defer::events::BufferChange;
use vramp_defer::{Access, DeferrableBuffer, LeaseRefused, LeaseSet, SpillError, SpillTier};
use vramp_driver::Call;
use vramp_driver::sim::Kernel;
use vramp_tiers::tracked::{MallocError, Policies, Scope, TrackedAllocator};
use vramp_tiers::{Bytes, MemorySpace, Reservation, ReservationManager, SpaceConfig, SpaceId};

use super::below::until;
use super::waiting::Task;
use super::*;

// --- leases ---

#[test]
fn what_is_leased_does_not_leave() {
    let rig = rig();
    let (held, idle) = (rig.filled(MIB(32), 1), rig.filled(MIB(32), 2));
    let lease = held.lease(Access::Shared, rig.stream).unwrap();
    let spilled = rig.manager.spill(MIB(64));
    assert_eq!(spilled.freed, MIB(32));
    assert!(held.is_resident() && !idle.is_resident());
    assert_eq!(spilled.short.unwrap().leased, MIB(32));
    assert!(rig.allocator.malloc(MIB(40), rig.stream).is_err());
    drop(lease);
    let block = rig.allocator.malloc(MIB(40), rig.stream).unwrap();
    rig.allocator.free(block, rig.stream).unwrap();
    rig.check();
}

#[test]
fn work_in_flight_keeps_a_buffer_until_its_event() {
    let rig = rig();
    let buffer = rig.filled(MIB(64), 1);
    let lease = buffer.lease(Access::Exclusive, rig.stream).unwrap();
    let begin = rig.sim.now_ns();
    let slow = Kernel::new("slow").writing(lease.address(0)).lasting(50_000_000);
    rig.sim.launch(rig.queue, slow).unwrap();
    rig.sim.fill(rig.queue, lease.address(0), 9).unwrap();
    drop(lease);
    assert!(rig.sim.now_ns() < begin + 50_000_000, "the end of a lease waits for nothing");
    assert_eq!(rig.manager.spill(MIB(64)).freed, MIB(64));
    assert!(rig.sim.now_ns() > begin + 50_000_000, "the kernel was waited for");
    rig.expect(&buffer, 9);
    rig.check();
}

#[test]
fn readers_share_and_a_writer_is_alone() {
    let rig = rig();
    let buffer = rig.filled(PIECE, 1);
    let one = buffer.lease(Access::Shared, rig.stream).unwrap();
    let two = buffer.lease(Access::Shared, rig.stream).unwrap();
    let refused = buffer.lease(Access::Exclusive, rig.stream).unwrap_err();
    assert!(matches!(refused, SpillError::Refused(_)), "{refused}");
    drop((one, two));
    let alone = buffer.lease(Access::Exclusive, rig.stream).unwrap();
    assert!(buffer.lease(Access::Shared, rig.stream).is_err());
    drop(alone);
    drop(buffer.lease(Access::Shared, rig.stream).unwrap());
    rig.check();
}

#[test]
fn one_who_waits_is_served_when_the_other_ends() {
    let rig = rig();
    let buffer = rig.filled(PIECE, 1);
    let held = buffer.lease(Access::Exclusive, rig.stream).unwrap();
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| buffer.lease(Access::Shared, rig.stream).map(drop));
        until(|| rig.manager.census().waiting == 1);
        drop(held);
        waits.join().unwrap().unwrap();
    });
    assert_eq!(rig.manager.stats().waits, 1);
}

#[test]
fn streams_come_behind_each_others_writes() {
    let rig = rig();
    let other = rig.allocator.create_stream().unwrap();
    let queue = rig.allocator.stream(other).unwrap();
    let buffer = rig.filled(MIB(16), 1);
    for round in 2..10 {
        let (stream, raw) = if round % 2 == 0 { (other, queue) } else { (rig.stream, rig.queue) };
        let lease = buffer.lease(Access::Exclusive, stream).unwrap();
        let slow = Kernel::new("slow").writing(lease.address(0)).lasting(1_000_000);
        rig.sim.launch(raw, slow).unwrap();
        rig.sim.fill(raw, lease.address(0), round).unwrap();
        drop(lease);
        if round % 3 == 0 {
            rig.manager.spill(MIB(16));
        }
    }
    rig.expect(&buffer, 9);
    rig.check();
}

#[test]
fn a_lease_for_two_streams_orders_both() {
    let rig = rig();
    let other = rig.allocator.create_stream().unwrap();
    let queue = rig.allocator.stream(other).unwrap();
    let buffer = rig.filled(MIB(32), 4);
    rig.manager.spill(MIB(32));
    let now = std::time::Duration::from_secs(1);
    let both = [rig.stream, other];
    let lease = rig.manager.lease_on(&[(&buffer, Access::Shared)], &both, now).unwrap();
    let read = Kernel::new("read").reading(lease.address(0));
    rig.sim.launch(rig.queue, read.clone()).unwrap();
    rig.sim.launch(queue, read).unwrap();
    drop(lease);
    rig.manager.spill(MIB(32));
    rig.expect(&buffer, 4);
    rig.check();
}

#[test]
fn a_set_is_leased_as_a_whole_and_one_too_large_is_refused_at_once() {
    let rig = rig();
    let buffers: Vec<_> = (1..=4).map(|byte| rig.filled(MIB(24), byte)).collect();
    let set = |all: &'static [usize]| -> Vec<(&DeferrableBuffer, Access)> {
        all.iter().map(|&index| (&buffers[index], Access::Shared)).collect()
    };
    let begin = std::time::Instant::now();
    let refused = rig.manager.lease(&set(&[0, 1, 2]), rig.stream).unwrap_err();
    assert!(refused.to_string().contains("lease fewer"), "{refused}");
    assert!(begin.elapsed() < std::time::Duration::from_millis(250), "it does not wait");
    for pair in [[0, 1], [2, 3], [1, 2], [3, 3]] {
        let pair: Vec<_> =
            pair.iter().map(|&index: &usize| (&buffers[index], Access::Shared)).collect();
        let lease = rig.manager.lease(&pair, rig.stream).unwrap();
        assert_eq!(lease.addresses().len(), 2);
    }
    for (buffer, byte) in buffers.iter().zip(1..) {
        rig.expect(buffer, byte);
    }
    rig.check();
}

#[test]
fn a_panic_or_an_error_between_lease_and_launch_releases_it() {
    let rig = rig();
    let buffer = rig.filled(PIECE, 1);
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let launch = |_: &vramp_defer::LeaseSet| panic!("before the launch");
        rig.manager.lock_and_launch_async(&[(&buffer, Access::Exclusive)], rig.stream, launch)
    }));
    assert!(panicked.is_err());
    rig.manager.spill(MIB(64));
    assert!(!buffer.is_resident(), "no lease holds it");
    let sum = rig
        .manager
        .lock_and_launch_async(&[(&buffer, Access::Exclusive)], rig.stream, |lease| {
            rig.sim.fill(rig.queue, lease.address(0), 5).unwrap();
            lease.addresses().len()
        })
        .unwrap();
    assert_eq!(sum, 1);
    rig.manager.lock_and_launch_async(&[(&buffer, Access::Shared)], rig.stream, |_| ()).unwrap();
    rig.manager.sync_and_unlock(rig.stream).unwrap();
    rig.expect(&buffer, 5);
    rig.check();
}

#[test]
fn a_view_is_the_same_buffer() {
    let rig = rig();
    let buffer = rig.filled(MIB(24), 1);
    let view = buffer.view(MIB(10), MIB(4)).unwrap();
    assert_eq!(view.addresses().start, buffer.addresses().start + MIB(10));
    rig.manager.spill(MIB(64));
    rig.fill(&view, 8);
    let lease = view.lease(Access::Shared, rig.stream).unwrap();
    assert_eq!(rig.manager.spill(MIB(64)).freed, Bytes::ZERO, "a view holds the whole");
    drop(lease);
    drop(buffer);
    rig.manager.spill(MIB(64));
    rig.expect(&view, 8);
    let inner = view.view(MIB(3), MIB(1)).unwrap();
    assert!(view.view(MIB(3), MIB(2)).is_err());
    drop(view);
    rig.expect(&inner, 8);
    drop(inner);
    assert_eq!(rig.manager.census().buffers, 0);
    rig.check();
}

#[test]
fn a_pin_keeps_a_buffer_on_the_card_after_its_lease() {
    let rig = rig();
    let stays = |buffer: &DeferrableBuffer| {
        rig.manager.spill(MIB(64));
        buffer.is_resident()
    };
    let buffer = rig.filled(PIECE, 1);
    let lease = buffer.lease(Access::Shared, rig.stream).unwrap();
    let pin = lease.pin(0).unwrap();
    drop(lease);
    assert!(stays(&buffer));
    drop(pin);
    assert!(!stays(&buffer));
    rig.check();
}

#[test]
fn wrong_uses_are_errors_that_say_what_to_do() {
    let (rig, other) = (rig(), rig());
    let buffer = rig.filled(PIECE, 1);
    let foreign = other.manager.lease(&[(&buffer, Access::Shared)], other.stream).unwrap_err();
    assert!(matches!(foreign, SpillError::OtherManager));
    assert!(rig.manager.buffer(Bytes::ZERO).is_err());
    assert!(rig.manager.buffer(Bytes::tib(100)).is_err());
    assert!(rig.manager.group().buffer(PIECE + Bytes::new(1)).is_err());
    let lease = buffer.lease(Access::Shared, rig.stream).unwrap();
    assert!(matches!(lease.pin(1), Err(SpillError::NotNamed { index: 1 })));
    lease.cancel();
    let ended = rig.allocator.create_stream().unwrap();
    rig.allocator.destroy_stream(ended).unwrap();
    assert!(buffer.lease(Access::Shared, ended).is_err());
    rig.sim.begin_capture(rig.queue, vramp_alloc::device::CaptureMode::ThreadLocal).unwrap();
    let captured = buffer.lease(Access::Shared, rig.stream).unwrap_err();
    assert!(matches!(captured, SpillError::Capturing(_)), "{captured}");
    rig.sim.end_capture(rig.queue).unwrap();
    let small = SpillConfig { piece: MIB(1), ..SpillConfig::default() };
    let driver = Arc::clone(rig.allocator.driver());
    let mover = Mover::new(driver, &rig.pool, MoverConfig::default()).unwrap();
    let parts = SpillParts {
        allocator: rig.allocator.clone(),
        mover,
        disk: None,
        budget: None,
        peers: vec![],
    };
    assert!(SpillManager::new(parts, small).is_err());
}

// --- Leases that overwrite: nothing is restored, and what a cancelled one leaves ---

#[test]
fn nothing_is_copied_back_for_what_is_overwritten() {
    let rig = rig();
    let buffer = rig.filled(PIECE * 3, 1);
    buffer.spill().unwrap();
    let events = rig.manager.events(16);
    let lease = buffer.lease(Access::Overwrite, rig.stream).unwrap();
    rig.sim.fill(rig.queue, lease.address(0), 2).unwrap();
    drop(lease);
    assert_eq!(rig.manager.stats().from_host_bytes, 0);
    assert!(buffer.is_resident());
    let overwritten = BufferChange::Overwritten { bytes: PIECE * 3 };
    let all = [BufferChange::Locked, overwritten, BufferChange::Unlocked];
    assert_eq!(
        std::iter::from_fn(|| events.try_recv().ok()).map(|e| e.change).collect::<Vec<_>>(),
        all
    );
    rig.expect(&buffer, 2);
    buffer.spill().unwrap();
    assert_eq!(rig.manager.stats().to_host_bytes, PIECE.count() * 6, "the old copies were stale");
    rig.expect(&buffer, 2);
    rig.check();
}

#[test]
fn a_cancelled_overwrite_leaves_the_contents_as_they_were() {
    let rig = rig();
    let buffer = rig.filled(PIECE * 2, 1);
    buffer.spill().unwrap();
    buffer.lease(Access::Overwrite, rig.stream).unwrap().cancel();
    assert!(buffer.is_deferred());
    rig.expect(&buffer, 1);
    buffer.lease(Access::Overwrite, rig.stream).unwrap().cancel();
    rig.expect(&buffer, 1);
    // An empty one stays empty.
    let empty = rig.manager.buffer(PIECE).unwrap();
    empty.lease(Access::Overwrite, rig.stream).unwrap().cancel();
    assert_eq!(rig.manager.census().empty, PIECE);
    rig.check();
}

#[test]
fn it_is_exclusive_and_all_of_it_counts_as_written() {
    let rig = rig();
    let buffer = rig.filled(PIECE * 2, 1);
    buffer.spill().unwrap();
    let mut lease = buffer.lease(Access::Overwrite, rig.stream).unwrap();
    let now = std::time::Instant::now();
    let second = rig.manager.lease_on(&[(&buffer, Access::Shared)], &[rig.stream], now);
    assert!(matches!(second, Err(SpillError::Refused(LeaseRefused::Busy { .. }))), "{second:?}");
    rig.sim.fill(rig.queue, lease.address(0), 2).unwrap();
    lease.wrote_only(0, Bytes::ZERO, Bytes::new(1)).unwrap();
    drop(lease);
    buffer.spill().unwrap();
    rig.expect(&buffer, 2);
    rig.check();
}

#[test]
fn a_part_or_a_buffer_that_is_also_read_is_restored() {
    let rig = rig();
    let buffer = rig.filled(PIECE * 2, 1);
    let part = buffer.view(Bytes::ZERO, PIECE).unwrap();
    buffer.spill().unwrap();
    let lease = part.lease(Access::Overwrite, rig.stream).unwrap();
    rig.sim.fill(rig.queue, lease.address(0), 2).unwrap();
    drop(lease);
    rig.expect(&part, 2);
    rig.expect(&buffer.view(PIECE, PIECE).unwrap(), 1);
    buffer.spill().unwrap();
    let both = [(&buffer, Access::Overwrite), (&part, Access::Shared)];
    drop(rig.manager.lease(&both, rig.stream).unwrap());
    rig.expect(&part, 2);
    rig.check();
}

#[test]
fn other_buffers_of_the_lease_are_restored() {
    let rig = rig();
    let [source, target] = [rig.filled(PIECE, 1), rig.filled(PIECE, 2)];
    rig.manager.spill(MIB(64));
    let set = [(&source, Access::Shared), (&target, Access::Overwrite)];
    let lease = rig.manager.lease(&set, rig.stream).unwrap();
    assert_eq!(rig.manager.stats().from_host_bytes, PIECE.count());
    rig.sim.fill(rig.queue, lease.address(1), 3).unwrap();
    drop(lease);
    rig.expect(&source, 1);
    rig.expect(&target, 3);
    rig.check();
}

#[test]
fn writing_all_from_the_host_restores_nothing_and_repairs_a_corrupt_buffer() {
    use vramp_tiers::disk::FileNames;
    let rig = Plan { disk: Some(MIB(512)), names: FileNames::Shown, ..patient() }.build();
    let buffer = rig.filled(PIECE, 1);
    buffer.spill_to(SpillTier::Disk).unwrap();
    for file in std::fs::read_dir(rig.store.as_ref().unwrap().dir().unwrap()).unwrap() {
        use std::os::unix::fs::FileExt;
        let file = std::fs::OpenOptions::new().write(true).open(file.unwrap().path()).unwrap();
        for at in (0..32 << 20).step_by(1 << 16) {
            file.write_all_at(b"damaged", at).unwrap();
        }
    }
    let error = buffer.lease(Access::Exclusive, rig.stream).unwrap_err();
    assert!(error.to_string().contains("write them anew"), "{error}");
    let whole = vec![7; PIECE.count() as usize];
    buffer.write(Bytes::ZERO, &whole).unwrap();
    rig.expect(&buffer, 7);
    buffer.spill().unwrap();
    rig.expect(&buffer, 7);
    rig.check();
}

// --- Locks that the manager keeps by stream, and what ends them ---

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

// --- Restoring ahead of need: what the calling thread waits for ---

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

// --- Leases that a reservation pays for ---

/// A card of 64 MiB, of which 57.6 may be reserved, a spilled buffer filled with ones, and an allocator
/// whose reservations pay.
struct Budget {
    tracked: TrackedAllocator,
    buffer: DeferrableBuffer,
    space: MemorySpace,
    rig: Rig,
}

impl Budget {
    fn new(buffer: Bytes) -> Budget {
        let rig = Plan { budget: true, ..Plan::default() }.build();
        let space = rig.spaces.space(SpaceId::gpu(0)).unwrap();
        let buffer = rig.filled(buffer, 1);
        rig.manager.spill(MIB(64));
        assert_eq!(space.total(), MIB(0));
        let tracked =
            TrackedAllocator::new(Arc::clone(&rig.allocator), &space, Policies::default());
        Budget { tracked, buffer, space, rig }
    }

    /// As [`new`](Budget::new), with a buffer of 32 MiB and a reservation attached to the stream.
    fn attached(reservation: Bytes) -> Budget {
        let budget = Budget::new(MIB(32));
        budget.attach(budget.stream(), reservation);
        budget
    }

    fn stream(&self) -> Scope {
        Scope::Stream(self.rig.stream)
    }

    fn reserve(&self, bytes: Bytes) -> Reservation {
        self.space.request(bytes).wait().unwrap()
    }

    fn attach(&self, scope: Scope, bytes: Bytes) {
        self.tracked.attach(scope, self.reserve(bytes)).unwrap();
    }

    /// Bytes that an attached reservation pays.
    fn used(&self, scope: Scope) -> Bytes {
        self.tracked.attached(scope).unwrap().used
    }

    fn lease(&self) -> LeaseSet {
        self.buffer.lease(Access::Shared, self.rig.stream).unwrap()
    }
}

#[test]
fn a_reservation_attached_to_the_stream_or_the_thread_pays_for_a_lease() {
    for by_thread in [false, true] {
        let budget = Budget::new(MIB(32));
        let Budget { rig, space, buffer, tracked } = &budget;
        let scope = if by_thread { Scope::this_thread() } else { budget.stream() };
        budget.attach(scope, MIB(40));
        let lease = budget.lease();
        assert_eq!(space.total(), MIB(40), "the reservation pays, and nothing besides");
        assert_eq!(budget.used(scope), MIB(32));
        drop(lease);
        rig.expect(buffer, 1);
        assert_eq!(space.total(), MIB(40));
        drop(tracked.detach(scope));
        assert_eq!(space.total(), MIB(32), "what is resident stays charged");
        rig.manager.spill(MIB(32));
        assert_eq!(space.total(), MIB(0));
        rig.check();
    }
}

#[test]
fn a_reservation_named_in_the_request_pays_for_a_lease() {
    let budget = Budget::new(MIB(32));
    let Budget { rig, space, buffer, .. } = &budget;
    let reservation = Arc::new(budget.reserve(MIB(40)));
    let wanted = [(buffer, Access::Shared)];
    let request = rig.manager.request(&wanted).stream(rig.stream).paid_by(&reservation);
    let lease = request.wait().unwrap();
    assert_eq!(space.total(), MIB(40), "the reservation pays, and nothing besides");
    drop(lease);
    rig.expect(buffer, 1);
    drop(reservation);
    assert_eq!(space.total(), MIB(32), "what is resident stays charged");
    rig.check();
}

#[test]
fn a_reservation_of_another_space_or_manager_pays_for_no_lease() {
    let budget = Budget::new(MIB(8));
    let Budget { rig, space, buffer, .. } = &budget;
    let host = rig.spaces.space(SpaceId::host(0)).unwrap();
    let card = [(SpaceId::gpu(0), SpaceConfig::gpu(MIB(64)))];
    let others = ReservationManager::new(card).unwrap();
    let of_others = others.space(SpaceId::gpu(0)).unwrap();
    let wanted = [(buffer, Access::Shared)];
    for other in [host, of_others] {
        let reservation = Arc::new(other.request(MIB(16)).wait().unwrap());
        let refused = rig.manager.request(&wanted).paid_by(&reservation).now();
        assert!(matches!(refused, Err(SpillError::OtherSpace { .. })), "{refused:?}");
        let refused = Task::new(rig.manager.request(&wanted).paid_by(&reservation)).poll();
        assert!(matches!(refused, Some(Err(SpillError::OtherSpace { .. }))), "{refused:?}");
        assert_eq!((reservation.used(), space.total()), (MIB(0), MIB(0)));
    }
    rig.expect(buffer, 1);
    assert_eq!(space.total(), MIB(8));
    rig.check();
}

#[test]
fn a_lease_beyond_its_reservation_takes_the_rest_from_the_space() {
    let budget = Budget::attached(MIB(20));
    let Budget { rig, space, .. } = &budget;
    let scope = budget.stream();
    let lease = budget.lease();
    assert_eq!(space.total(), MIB(32));
    assert_eq!(budget.used(scope), MIB(20));
    drop(lease);
    rig.manager.spill(MIB(32));
    // The space's part goes first, then the reservation's.
    assert_eq!(budget.used(scope), MIB(0));
    assert_eq!(space.total(), MIB(20));
    rig.check();
}

#[test]
fn only_the_stream_and_the_allocator_of_the_attachment_count() {
    let budget = Budget::new(MIB(8));
    let Budget { rig, space, buffer, .. } = &budget;
    let other = rig.allocator.create_stream().unwrap();
    let scope = Scope::Stream(other);
    budget.attach(scope, MIB(16));
    drop(budget.lease());
    assert_eq!(space.total(), MIB(24), "its stream has no reservation");
    assert_eq!(budget.used(scope), MIB(0));
    rig.manager.spill(MIB(8));
    let streams: [StreamId; 2] = [rig.stream, other];
    let wanted = [(buffer, Access::Shared)];
    drop(rig.manager.lease_on(&wanted, &streams, super::LONG).unwrap());
    assert_eq!(space.total(), MIB(16), "one of its streams has");
    rig.check();
}

#[test]
fn an_allocation_of_the_reservation_takes_idle_buffers_memory_back() {
    let budget = Budget::attached(MIB(40));
    let scope = budget.stream();
    drop(budget.lease());
    let Budget { rig, space, buffer, tracked } = budget;
    assert_eq!(tracked.attached(scope).unwrap().unused(), MIB(8));
    // The space has 17.6 MiB: the buffer stays as far as the space can pay for it.
    let block = tracked.malloc(MIB(16), rig.stream).unwrap();
    assert!(buffer.is_resident());
    assert_eq!(space.total(), MIB(48), "8 MiB of the buffer are the space's now");
    // More than that: pieces leave.
    let more = tracked.malloc(MIB(24), rig.stream).unwrap();
    assert!(!buffer.is_resident());
    assert_eq!(tracked.attached(scope).unwrap().unused(), MIB(0));
    assert!(space.total() <= space.limit());
    // A third one exceeds the reservation for good.
    assert!(matches!(tracked.malloc(MIB(1), rig.stream), Err(MallocError::OverReservation(_))));
    tracked.free(block, rig.stream).unwrap();
    tracked.free(more, rig.stream).unwrap();
    rig.expect(&buffer, 1);
    drop((tracked, buffer));
    assert_eq!(space.total(), MIB(0));
    rig.check();
}

#[test]
fn an_allocation_of_the_reservation_takes_nothing_from_a_lease() {
    let budget = Budget::attached(MIB(40));
    let Budget { rig, tracked, .. } = &budget;
    let scope = budget.stream();
    let lease = budget.lease();
    assert!(matches!(tracked.malloc(MIB(16), rig.stream), Err(MallocError::OverReservation(_))));
    assert_eq!(budget.used(scope), MIB(32));
    drop(lease);
    let block = tracked.malloc(MIB(16), rig.stream).unwrap();
    tracked.free(block, rig.stream).unwrap();
    rig.check();
}

#[test]
fn a_request_of_the_space_does_not_evict_what_a_reservation_pays() {
    let budget = Budget::attached(MIB(40));
    let Budget { rig, space, buffer, tracked } = &budget;
    let scope = budget.stream();
    drop(budget.lease());
    // Evicting the buffer would return nothing to the space.
    assert!(space.request(MIB(24)).spilling(vramp_tiers::spill::Spilling::AlsoNow).now().is_err());
    assert!(buffer.is_resident());
    // Once the reservation is released the buffer is charged to the space, and leaves for others.
    drop(tracked.detach(scope));
    drop(budget.reserve(MIB(48)));
    assert!(!buffer.is_resident());
    rig.check();
}

#[test]
fn a_reservation_of_too_little_leaves_a_lease_to_the_queue() {
    let budget = Budget::attached(MIB(8));
    let Budget { rig, space, buffer, .. } = &budget;
    let scope = budget.stream();
    let others = budget.reserve(MIB(40));
    let now = vramp_tiers::Deadline::from(std::time::Instant::now());
    match rig.manager.lease_on(&[(buffer, Access::Shared)], &[rig.stream], now) {
        Err(SpillError::NoBudget { error, .. }) => {
            assert_eq!(error.refusal().unwrap().requested, MIB(24), "8 MiB were paid for");
        }
        other => panic!("48 of 57.6 MiB are reserved: {other:?}"),
    }
    assert_eq!(budget.used(scope), MIB(0), "nothing stays charged");
    assert_eq!(space.total(), MIB(48));
    drop(others);
    rig.expect(buffer, 1);
    rig.check();
}
