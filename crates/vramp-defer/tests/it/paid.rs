//! Leases that a reservation pays for.

use std::sync::Arc;

use vramp_alloc::StreamId;
use vramp_defer::{Access, DeferrableBuffer, LeaseSet, SpillError};
use vramp_tiers::tracked::{MallocError, Policies, Scope, TrackedAllocator};
use vramp_tiers::{Bytes, MemorySpace, Reservation, ReservationManager, SpaceConfig, SpaceId};

use super::waiting::Task;
use super::{MIB, Plan, Rig};

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
