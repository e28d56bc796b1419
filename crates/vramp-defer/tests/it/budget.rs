//! Leases and reservations in one space: one queue, one account.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use vramp_defer::{Access, DeferrableBuffer, LeaseSet, RestoreJob, SpillError};
use vramp_tiers::reserve::{Overtaking, ReserveError};
use vramp_tiers::{Deadline, MemorySpace, Reservation, SpaceId};

use super::waiting::{Task, block_on};
use super::{LONG, MIB, Plan, Rig, patient};

/// A card of 64 MiB, of which 57.6 may be reserved, whose leases wait until they are granted.
fn shared_budget() -> Arc<Rig> {
    Arc::new(Plan { budget: true, ..patient() }.build())
}

fn space(rig: &Rig) -> MemorySpace {
    rig.spaces.space(SpaceId::gpu(0)).unwrap()
}

fn now() -> Deadline {
    Deadline::from(std::time::Instant::now())
}

/// Waits until `count` requests are in the queue of the spaces.
fn until_waiting(rig: &Rig, count: usize) {
    while rig.spaces.waiting() < count {
        vramp_testing::moment();
    }
}

/// A reservation of `bytes` in a thread of its own, once it waits.
fn queued(rig: &Arc<Rig>, bytes: u64) -> thread::JoinHandle<Result<Reservation, ReserveError>> {
    let before = rig.spaces.waiting();
    let reserving = {
        let rig = Arc::clone(rig);
        thread::spawn(move || space(&rig).request(MIB(bytes)).deadline(LONG).wait())
    };
    until_waiting(rig, before + 1);
    reserving
}

#[test]
fn a_queued_reservation_is_served_while_six_threads_lease_in_turn() {
    serve_a_reservation_among(|rig, buffer| buffer.lease(Access::Shared, rig.stream));
}

#[test]
fn a_queued_reservation_is_served_while_six_tasks_lease_in_turn() {
    serve_a_reservation_among(|rig, buffer| {
        let wanted = [(buffer, Access::Shared)];
        block_on(rig.manager.request(&wanted).stream(rig.stream).deadline(LONG))
    });
}

/// Has six threads lease in turn while a reservation waits.
fn serve_a_reservation_among(
    lease: impl Fn(&Rig, &DeferrableBuffer) -> Result<LeaseSet, SpillError> + Copy + Send + 'static,
) {
    // Each thread has one resident buffer, which it leases again and again, or two in turn.
    for buffers_each in [1, 2] {
        let rig = shared_budget();
        let (over, leases) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let threads: Vec<_> = (0..6u8)
            .map(|byte| {
                let (rig, over, leases) =
                    (Arc::clone(&rig), Arc::clone(&over), Arc::clone(&leases));
                thread::spawn(move || {
                    let own: Vec<_> = (0..buffers_each).map(|_| rig.filled(MIB(8), byte)).collect();
                    while !over.load(Ordering::Relaxed) {
                        for buffer in &own {
                            drop(lease(&rig, buffer).unwrap());
                            leases.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                })
            })
            .collect();
        while leases.load(Ordering::Relaxed) < 100 {
            vramp_testing::moment();
        }
        let reserved = space(&rig).request(MIB(32)).deadline(LONG).wait();
        over.store(true, Ordering::Relaxed);
        let total = space(&rig).total();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(reserved.unwrap().bytes(), MIB(32), "with {buffers_each} buffers each");
        assert!(total <= space(&rig).limit(), "{total} are charged");
        rig.manager.spill(MIB(64));
        assert_eq!(space(&rig).total(), MIB(0));
        rig.check();
    }
}

#[test]
fn leases_overtake_a_queued_reservation_at_most_as_often_as_its_bound() {
    let rig = shared_budget();
    let held = rig.filled(MIB(32), 1);
    let others: Vec<_> = (0..4).map(|byte| rig.filled(MIB(8), byte)).collect();
    let lease = held.lease(Access::Shared, rig.stream).unwrap();
    // 32 MiB are leased, so this one waits.
    let reserving = queued(&rig, 32);
    // Leases from a thread that holds none.
    let granted = {
        let (rig, others) = (Arc::clone(&rig), others.clone());
        let many = thread::spawn(move || {
            let of = |buffer: &DeferrableBuffer| {
                rig.manager.lease_on(&[(buffer, Access::Shared)], &[rig.stream], now()).is_ok()
            };
            (0..100).flat_map(|_| &others).filter(|buffer| of(buffer)).count()
        });
        many.join().unwrap()
    };
    let bound = Overtaking::default().count as usize;
    assert!(granted <= bound + others.len(), "{granted} leases overtook the reservation");
    drop(lease);
    assert_eq!(reserving.join().unwrap().unwrap().bytes(), MIB(32));
    rig.check();
}

#[test]
fn a_reservation_that_waits_for_a_lease_is_served_when_it_ends() {
    let rig = shared_budget();
    let buffer = rig.filled(MIB(48), 1);
    let lease = buffer.lease(Access::Shared, rig.stream).unwrap();
    let retries = vramp_tiers::reserve::RetryPolicy::default();
    let reserving = queued(&rig, 32);
    // Its attempts to have something spilled are over long before the lease ends.
    let attempts = || rig.manager.stats().spills;
    while attempts() <= u64::from(retries.max_retries) {
        vramp_testing::moment();
    }
    drop(lease);
    drop(reserving.join().unwrap().unwrap());
    rig.expect(&buffer, 1);
    rig.check();
}

#[test]
fn leases_stay_within_the_limit_and_a_set_above_it_is_refused_at_once() {
    let rig = shared_budget();
    let large = rig.manager.buffer(MIB(60)).unwrap();
    match large.lease(Access::Exclusive, rig.stream) {
        Err(SpillError::Refused(vramp_defer::LeaseRefused::TooLarge { needed, capacity })) => {
            assert_eq!((needed, capacity), (MIB(60), space(&rig).limit()));
        }
        other => panic!("60 MiB do not fit below the limit: {other:?}"),
    }
    let many: Vec<_> = (0..12).map(|byte| rig.filled(MIB(8), byte)).collect();
    assert!(space(&rig).peak() <= space(&rig).limit());
    many.iter().zip(0..).for_each(|(buffer, byte)| rig.expect(buffer, byte));
    assert!(space(&rig).peak() <= space(&rig).limit());
}

#[test]
fn a_lease_that_waits_for_budget_holds_nothing() {
    let rig = shared_budget();
    let buffer = rig.filled(MIB(16), 1);
    rig.manager.spill(MIB(16));
    let reserved = space(&rig).request(MIB(48)).now().unwrap();
    let waiting = {
        let (rig, buffer) = (Arc::clone(&rig), buffer.clone());
        thread::spawn(move || rig.expect(&buffer, 1))
    };
    // First it spills what is idle, under a lease, then it waits.
    while (rig.spaces.waiting(), rig.manager.census().leases) != (1, 0) {
        vramp_testing::moment();
    }
    assert_eq!(space(&rig).total(), MIB(48));
    drop(reserved);
    waiting.join().unwrap();
    assert_eq!(space(&rig).total(), MIB(16));
    rig.check();
}

#[test]
fn a_lease_that_waits_for_budget_ends_at_its_deadline_and_says_who_has_it() {
    let rig = shared_budget();
    let buffer = rig.filled(MIB(16), 1);
    rig.manager.spill(MIB(16));
    let reserved = space(&rig).request(MIB(48)).now().unwrap();
    for deadline in [now(), Deadline::from(std::time::Duration::from_millis(20))] {
        let leased = rig.manager.lease_on(&[(&buffer, Access::Shared)], &[rig.stream], deadline);
        match leased {
            Err(SpillError::NoBudget { error, .. }) => {
                let refusal = error.refusal().unwrap();
                assert_eq!(refusal.requested, MIB(16));
                assert_eq!(refusal.spaces[0].largest[0].reservation, reserved.id());
            }
            other => panic!("48 of 57.6 MiB are reserved: {other:?}"),
        }
    }
    assert_eq!((space(&rig).total(), rig.spaces.waiting()), (MIB(48), 0));
    rig.check();
}

/// A spilled buffer of 16 MiB, and a reservation of 48 MiB that keeps it from the card.
fn kept_out() -> (Arc<Rig>, DeferrableBuffer, Reservation) {
    let rig = shared_budget();
    let buffer = rig.filled(MIB(16), 1);
    rig.manager.spill(MIB(16));
    let reserved = space(&rig).request(MIB(48)).now().unwrap();
    (rig, buffer, reserved)
}

#[test]
fn a_task_that_waits_for_budget_stands_in_the_spaces_queue() {
    let (rig, buffer, reserved) = kept_out();
    let wanted = [(&buffer, Access::Shared)];
    let mut task = Task::new(rig.manager.request(&wanted).stream(rig.stream));
    assert!(task.poll().is_none());
    assert_eq!((rig.spaces.waiting(), rig.manager.census().leases), (1, 0));
    // Its place is before that of a younger reservation.
    let younger = queued(&rig, 48);
    drop(reserved);
    drop(task.wait().unwrap());
    rig.manager.spill(MIB(16));
    drop(younger.join().unwrap().unwrap());
    rig.expect(&buffer, 1);
    rig.check();
}

#[test]
fn a_task_waits_behind_a_reservation_that_leases_would_starve() {
    let rig = shared_budget();
    let buffer = rig.filled(MIB(48), 1);
    let lease = buffer.lease(Access::Shared, rig.stream).unwrap();
    let reserving = queued(&rig, 32);
    // Its attempts have found that leases keep what it lacks.
    let retries = vramp_tiers::reserve::RetryPolicy::default();
    while rig.manager.stats().spills <= u64::from(retries.max_retries) {
        vramp_testing::moment();
    }
    let wanted = [(&buffer, Access::Shared)];
    let mut task = Task::new(rig.manager.request(&wanted).stream(rig.stream));
    assert!(task.poll().is_none(), "another reader keeps the buffer on the card");
    assert_eq!((rig.spaces.waiting(), rig.manager.census().leases), (2, 1));
    // A lease of the same owner is not behind: the reservation waits for what the owner holds.
    let own = rig.manager.request(&wanted).stream(rig.stream).owner(lease.owner());
    drop(block_on(own).unwrap());
    drop(lease);
    drop(reserving.join().unwrap().unwrap());
    drop(task.wait().unwrap());
    rig.expect(&buffer, 1);
    rig.check();
}

#[test]
fn a_dropped_task_leaves_the_spaces_queue() {
    let (rig, buffer, reserved) = kept_out();
    let slots =
        || rig.manager.footprint().iter().find(|(name, _)| *name == "slots of waiters").unwrap().1;
    let wanted = [(&buffer, Access::Shared)];
    let request = || Task::new(rig.manager.request(&wanted).stream(rig.stream).deadline(LONG));
    let mut waits = request();
    assert!(waits.poll().is_none());
    assert_eq!((rig.spaces.waiting(), slots()), (1, 1));
    drop(waits);
    assert_eq!((rig.spaces.waiting(), slots()), (0, 0));
    // Also one that was served, and is dropped before it is polled.
    let mut served = request();
    assert!(served.poll().is_none());
    drop(reserved);
    assert_eq!(space(&rig).total(), MIB(16), "it has its bytes");
    drop(served);
    assert_eq!((rig.spaces.waiting(), slots(), space(&rig).total()), (0, 0, MIB(0)));
    rig.check();
}

#[test]
fn a_task_that_waits_for_budget_ends_at_its_deadline() {
    let (rig, buffer, reserved) = kept_out();
    let wanted = [(&buffer, Access::Shared)];
    let soon = std::time::Duration::from_millis(20);
    match block_on(rig.manager.request(&wanted).stream(rig.stream).deadline(soon)) {
        Err(SpillError::NoBudget { error, .. }) => {
            assert_eq!(error.refusal().unwrap().requested, MIB(16));
        }
        other => panic!("48 of 57.6 MiB are reserved: {other:?}"),
    }
    assert_eq!((space(&rig).total(), rig.spaces.waiting()), (MIB(48), 0));
    drop(reserved);
    rig.check();
}

#[test]
fn a_task_spills_for_its_budget_in_a_job() {
    let (rig, buffer, reserved) = kept_out();
    let wanted = [(&buffer, Access::Shared)];
    let (sender, jobs) = std::sync::mpsc::channel::<RestoreJob>();
    let request = rig.manager.request(&wanted).stream(rig.stream);
    let mut task = Task::new(request.restore_on(move |job| drop(sender.send(job))));
    assert!(task.poll().is_none());
    let restore = jobs.try_recv().expect("the buffer is not resident");
    restore();
    // The lease lacks its budget, and the next poll enters the queue.
    assert!(task.poll().is_none());
    assert_eq!(rig.spaces.waiting(), 1);
    drop(reserved);
    let mut ran = 0;
    let lease = loop {
        if let Some(leased) = task.poll() {
            break leased.unwrap();
        }
        if let Ok(job) = jobs.try_recv() {
            job();
            ran += 1;
        }
    };
    assert!(ran >= 2, "it spilled, and restored");
    drop(lease);
    rig.expect(&buffer, 1);
    rig.check();
}

#[test]
fn a_request_that_lacks_budget_keeps_its_place_among_the_leases_and_no_other_from_its_buffers() {
    let (rig, spilled, reserved) = kept_out();
    let resident = rig.manager.buffer(MIB(2)).unwrap();
    drop(resident.lease(Access::Exclusive, rig.stream).unwrap());
    let both = [(&resident, Access::Exclusive), (&spilled, Access::Shared)];
    let mut first = Task::new(rig.manager.request(&both).stream(rig.stream));
    assert!(first.poll().is_none());
    assert_eq!((rig.spaces.waiting(), rig.manager.census().leases), (1, 0));
    let wanted = [(&resident, Access::Exclusive)];
    let request = || rig.manager.request(&wanted).stream(rig.stream);
    let holds = block_on(request()).expect("a request without budget keeps no other waiting");
    let mut later = Task::new(request());
    assert!(later.poll().is_none());
    // It has its bytes, gives them back, and waits for the lease in front of the later one.
    drop(reserved);
    assert!(first.poll().is_none());
    assert_eq!((rig.spaces.waiting(), space(&rig).total()), (0, MIB(2)));
    drop(holds);
    let served = first.wait().unwrap();
    assert!(later.poll().is_none(), "the older one holds it");
    drop(served);
    drop(later.wait().unwrap());
    rig.check();
}

#[test]
fn requests_for_budget_cost_as_much_beside_a_thousand_as_beside_ten_and_leave_nothing() {
    let steps = [10, 1_000].map(|count| {
        let (rig, buffer, reserved) = kept_out();
        let wanted = [(&buffer, Access::Shared)];
        let deadline = |index| if index % 2 == 0 { Deadline::NEVER } else { LONG.into() };
        let request = |index| rig.manager.request(&wanted).deadline(deadline(index));
        assert!(Task::new(request(0)).poll().is_none());
        let before = rig.manager.footprint();
        let mut tasks: Vec<Task> = (0..count).map(|index| Task::new(request(index))).collect();
        assert!(tasks.iter_mut().all(|task| task.poll().is_none()));
        assert_eq!((rig.spaces.waiting(), rig.manager.census().leases), (count, 0));
        let counters = || rig.manager.counters().queue_steps + rig.manager.counters().looked_at;
        let steps = counters();
        let mut last = Task::new(request(0));
        assert!(last.poll().is_none());
        let steps = counters() - steps;
        // One gives up, all others are cancelled.
        drop(tasks.pop());
        assert_eq!(rig.spaces.waiting(), count);
        rig.manager.cancel_waits();
        tasks.push(last);
        for task in &mut tasks {
            assert!(matches!(task.poll(), Some(Err(SpillError::Cancelled))));
        }
        assert_eq!((rig.spaces.waiting(), space(&rig).total()), (0, MIB(48)));
        assert_eq!(rig.manager.footprint(), before);
        let refused = block_on(request(0));
        assert!(matches!(refused, Err(SpillError::Cancelled)), "{refused:?}");
        rig.manager.allow_waits();
        drop(reserved);
        drop(block_on(request(0)).unwrap());
        rig.expect(&buffer, 1);
        rig.check();
        steps
    });
    assert!(steps[1] <= steps[0], "{steps:?}");
}

#[test]
fn a_request_that_lacks_more_than_it_reserved_goes_before_those_that_came_since() {
    let rig = shared_budget();
    let [small, large] = [(8, 1), (16, 2)].map(|(len, byte)| rig.filled(MIB(len), byte));
    large.spill().unwrap();
    let reserved = space(&rig).request(MIB(40)).now().unwrap();
    let held = small.lease(Access::Shared, rig.stream).unwrap();
    let both = [(&small, Access::Shared), (&large, Access::Shared)];
    let mut waits = Task::new(rig.manager.request(&both).stream(rig.stream));
    assert!(waits.poll().is_none());
    let younger = queued(&rig, 40);
    // The small one is evicted for the request, and the lease needs it too: it lacks more.
    drop(held);
    while (rig.spaces.waiting(), space(&rig).total()) != (2, MIB(40)) {
        assert!(waits.poll().is_none());
        vramp_testing::moment();
    }
    assert!(!small.is_resident());
    drop(reserved);
    let lease = waits.wait().unwrap();
    assert_eq!(rig.spaces.waiting(), 1, "the younger one waits for the lease");
    drop(lease);
    drop(younger.join().unwrap().unwrap());
    rig.expect(&small, 1);
    rig.expect(&large, 2);
    rig.check();
}

#[test]
fn an_owner_is_not_kept_behind_a_reservation_that_waits_for_its_lease() {
    let rig = shared_budget();
    let [large, small] = [(48, 1), (2, 2)].map(|(len, byte)| rig.filled(MIB(len), byte));
    small.spill().unwrap();
    let outer = large.lease(Access::Shared, rig.stream).unwrap();
    let reserving = queued(&rig, 32);
    let attempts = u64::from(vramp_tiers::reserve::RetryPolicy::default().max_retries);
    while rig.manager.stats().spills <= attempts {
        vramp_testing::moment();
    }
    // More often than the bound of overtaking.
    for _ in 0..Overtaking::default().count + 8 {
        drop(small.lease(Access::Shared, rig.stream).unwrap());
        while small.is_resident() {
            // The reservation may be having it evicted.
            let _ = small.spill();
        }
    }
    assert_eq!(rig.spaces.waiting(), 1, "the reservation waits on");
    // Without a lease there is no reason to pass.
    let wanted = [(&small, Access::Shared)];
    let mut other = Task::new(rig.manager.request(&wanted).stream(rig.stream));
    assert!(other.poll().is_none());
    drop(outer);
    drop(reserving.join().unwrap().unwrap());
    drop(other.wait().unwrap());
    rig.check();
}
