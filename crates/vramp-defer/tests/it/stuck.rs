//! Leases without a deadline, when nothing can leave the card. A wait that never ends fails the test.

use std::sync::{Arc, mpsc};
use std::thread;

use vramp_defer::{Access, DeferrableBuffer, LeaseOwner, SpillError};
use vramp_tiers::reserve::RetryPolicy;
use vramp_tiers::{Deadline, SpaceId};

use super::below::until;
use super::{LONG, MIB, Plan, Rig, SpillConfig, patient};

/// A card of 64 MiB, of which leases have 56, above a host of 16 MiB.
fn narrow(budget: bool) -> Arc<Rig> {
    let usual = patient();
    let config = SpillConfig { capacity: Some(MIB(56)), ..usual.config.clone() };
    Arc::new(Plan { budget, host: MIB(16), config, ..usual }.build())
}

type Leased = Result<(), SpillError>;

/// Leases in a thread of its own.
fn leasing(
    rig: &Arc<Rig>,
    buffer: &DeferrableBuffer,
    deadline: Deadline,
) -> mpsc::Receiver<Leased> {
    let (ends, ended) = mpsc::channel();
    let (rig, buffer) = (Arc::clone(rig), buffer.clone());
    thread::spawn(move || {
        let set = [(&buffer, Access::Exclusive)];
        let leased = rig.manager.lease_on(&set, &[rig.stream], deadline).map(drop);
        // The test may have ended.
        let _ = ends.send(leased);
    });
    ended
}

fn expect_refused(ended: &mpsc::Receiver<Leased>) {
    let leased = ended.recv_timeout(LONG).expect("it is refused, and does not wait for ever");
    let error = leased.unwrap_err();
    assert!(matches!(error, SpillError::NothingCanLeave { .. }), "{error}");
    assert!(error.to_string().contains("drop or discard buffers"), "{error}");
}

/// Waits until the attempts of a request are over, so that it only waits.
fn expect_waiting(rig: &Rig, ended: &mpsc::Receiver<Leased>) {
    let retries = u64::from(RetryPolicy::default().max_retries);
    until(|| rig.manager.stats().spills > retries + 1);
    let leased = ended.recv_timeout(std::time::Duration::from_millis(400));
    assert!(leased.is_err(), "it waits: {leased:?}");
}

#[test]
fn a_lease_without_a_deadline_is_refused_when_all_is_idle_and_nothing_can_leave() {
    for budget in [false, true] {
        let rig = narrow(budget);
        let idle = rig.filled(MIB(48), 1);
        let wanted = rig.manager.buffer(MIB(48)).unwrap();
        expect_refused(&leasing(&rig, &wanted, Deadline::NEVER));
        // One with a deadline waits until it.
        let soon = Deadline::from(std::time::Duration::from_millis(50));
        let error = leasing(&rig, &wanted, soon).recv_timeout(LONG).unwrap().unwrap_err();
        assert!(!matches!(error, SpillError::NothingCanLeave { .. }), "{error}");
        assert_eq!((rig.manager.census().leases, rig.manager.census().waiting), (0, 0));
        rig.expect(&idle, 1);
        rig.check();
    }
}

#[test]
fn a_future_without_a_deadline_is_refused_when_nothing_can_leave() {
    let rig = narrow(true);
    let _idle = rig.filled(MIB(48), 1);
    let wanted = rig.manager.buffer(MIB(48)).unwrap();
    let (ends, ended) = mpsc::channel();
    let rig_of_task = Arc::clone(&rig);
    thread::spawn(move || {
        let set = [(&wanted, Access::Exclusive)];
        let request = rig_of_task.manager.request(&set).stream(rig_of_task.stream);
        ends.send(block_on(std::future::IntoFuture::into_future(request)).map(drop)).unwrap();
    });
    expect_refused(&ended);
    rig.check();
}

/// Polls a future in this thread until it is ready.
fn block_on<F: Future + Unpin>(mut future: F) -> F::Output {
    struct Unpark(thread::Thread);
    impl std::task::Wake for Unpark {
        fn wake(self: Arc<Unpark>) {
            self.0.unpark();
        }
    }
    let waker = std::task::Waker::from(Arc::new(Unpark(thread::current())));
    let mut context = std::task::Context::from_waker(&waker);
    loop {
        match std::pin::Pin::new(&mut future).poll(&mut context) {
            std::task::Poll::Ready(output) => return output,
            std::task::Poll::Pending => thread::park(),
        }
    }
}

#[test]
fn a_lease_without_a_deadline_waits_for_another_owner_and_is_refused_once_that_cannot_help() {
    for budget in [false, true] {
        let rig = narrow(budget);
        let idle = rig.filled(MIB(40), 1);
        let small = rig.filled(MIB(8), 2);
        // The other owner keeps 8 MiB, and leaves them idle in the end.
        let set = [(&small, Access::Shared)];
        let held = rig.manager.request(&set).owner(LeaseOwner::new());
        let held = held.stream(rig.stream).now().unwrap();
        let wanted = rig.manager.buffer(MIB(40)).unwrap();
        let ended = leasing(&rig, &wanted, Deadline::NEVER);
        expect_waiting(&rig, &ended);
        drop(held);
        expect_refused(&ended);
        rig.expect(&idle, 1);
        rig.expect(&small, 2);
        rig.check();
    }
}

#[test]
fn the_callers_own_lease_is_no_other_owner() {
    for budget in [false, true] {
        let rig = narrow(budget);
        let (idle, outer) = (rig.filled(MIB(40), 1), rig.filled(MIB(8), 2));
        let (ends, ended) = mpsc::channel();
        let (own, outer) = (Arc::clone(&rig), outer.clone());
        thread::spawn(move || {
            let _held = outer.lease(Access::Shared, own.stream).unwrap();
            let wanted = own.manager.buffer(MIB(48)).unwrap();
            let set = [(&wanted, Access::Exclusive)];
            let leased = own.manager.lease_on(&set, &[own.stream], Deadline::NEVER).map(drop);
            ends.send(leased).unwrap();
        });
        expect_refused(&ended);
        rig.expect(&idle, 1);
        rig.check();
    }
}

#[test]
fn a_discard_serves_a_lease_that_waits_for_room_below() {
    for budget in [false, true] {
        let rig = narrow(budget);
        let below = rig.filled(MIB(16), 2);
        rig.manager.spill(MIB(16));
        let idle = rig.filled(MIB(48), 1);
        let wanted = rig.manager.buffer(MIB(24)).unwrap();
        let ended = leasing(&rig, &wanted, Deadline::from(LONG));
        expect_waiting(&rig, &ended);
        below.discard().unwrap();
        ended.recv_timeout(LONG / 4).expect("it is served").unwrap();
        wanted.discard().unwrap();
        rig.expect(&idle, 1);
        rig.check();
    }
}

#[test]
fn host_memory_freed_by_others_serves_a_lease_that_waits_for_room_below() {
    for (budget, reserved) in [(false, false), (true, false), (false, true), (true, true)] {
        for deadline in [Deadline::NEVER, Deadline::from(LONG)] {
            let rig = narrow(budget);
            let host = rig.spaces.space(SpaceId::host(0)).unwrap();
            let others: Box<dyn std::any::Any + Send> = match reserved {
                true => Box::new(host.request(MIB(14)).now().unwrap()),
                false => Box::new(rig.pool.allocate(MIB(16)).unwrap()),
            };
            let idle = rig.filled(MIB(48), 1);
            let wanted = rig.manager.buffer(MIB(24)).unwrap();
            let ended = leasing(&rig, &wanted, deadline);
            expect_waiting(&rig, &ended);
            drop(others);
            ended.recv_timeout(LONG / 4).expect("it is served").unwrap();
            assert!(rig.total(SpaceId::host(0)) >= MIB(8));
            wanted.discard().unwrap();
            rig.expect(&idle, 1);
            rig.check();
        }
    }
}
