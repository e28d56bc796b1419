//! Models of the hand-over for loom: all orders of leases that end, waits, deadlines, and futures that are
//! polled and dropped. `cargo xtask loom` explores them. A lost wake-up shows as a thread that never ends.

use std::sync::Arc;
use std::task::{Wake, Waker};

use loom::sync::{Condvar, Mutex};
use loom::thread;
use smallvec::SmallVec;

use super::{Entry, Hooks, LeaseSlot, Outcome, Waiting};
use crate::planner::{
    Access, BufferId, DeferConfig, Deferrables, GrantedLease, HolderKey, LeaseEnd, LeaseRequest,
    Ticket,
};
use crate::sync::lock;
use vramp_core::Bytes;

/// The planner and the slots behind a lock, as the manager has them.
struct Model {
    inner: Mutex<(Deferrables, Waiting)>,
    buffer: BufferId,
}

/// A request that is served, or in the queue.
enum Asked {
    Granted(GrantedLease),
    Queued(Ticket, Arc<LeaseSlot>),
}

impl Model {
    fn new() -> Arc<Model> {
        let mut core = Deferrables::new(DeferConfig::new(Bytes::gib(1))).expect("it is valid");
        let buffer = core.add_buffer(Bytes::mib(2)).expect("a valid length").buffer;
        Arc::new(Model { inner: Mutex::new((core, Waiting::default())), buffer })
    }

    /// Makes a change, as under the manager's lock.
    fn update<R>(&self, change: impl FnOnce(&mut Deferrables, &mut Waiting) -> R) -> R {
        let mut guard = lock(&self.inner);
        let (core, waiting) = &mut *guard;
        let result = change(core, waiting);
        let hooks = Hooks { is_mapped: &|_, _| false, on_grant: &mut |_, _| {} };
        waiting.hand_over(core, hooks, 0);
        let woken = std::mem::take(&mut waiting.to_wake);
        drop(guard);
        woken.iter().for_each(|slot| slot.wake());
        result
    }

    fn ask(&self, holder: u64, access: Access) -> Asked {
        self.update(|core, waiting| {
            let buffers = [(self.buffer, access)];
            let holder = HolderKey(holder);
            let request = LeaseRequest { buffers: &buffers, holder, ..LeaseRequest::default() };
            if let Ok(granted) = core.lease(&request, 0) {
                return Asked::Granted(granted);
            }
            let ticket = core.enqueue(&request, &[], None).expect("the buffer exists");
            let slot = Arc::new(LeaseSlot::default());
            let entry = Entry { slot: Arc::clone(&slot), in_place: SmallVec::new(), until: None };
            waiting.add(ticket, entry);
            Asked::Queued(ticket, slot)
        })
    }

    fn take(&self, holder: u64) -> GrantedLease {
        match self.ask(holder, Access::Exclusive) {
            Asked::Granted(granted) => granted,
            Asked::Queued(..) => panic!("the buffer is free"),
        }
    }

    fn end(&self, granted: &GrantedLease) {
        self.update(|core, _| core.end_lease(granted.lease, &LeaseEnd::default(), 0).map(drop))
            .expect("the lease is held");
    }

    /// Leases, waiting without end, and ends the lease.
    fn wait(&self, holder: u64, access: Access) {
        let granted = match self.ask(holder, access) {
            Asked::Granted(granted) => granted,
            Asked::Queued(_, slot) => granted(slot.wait(None)).expect("it is served"),
        };
        self.end(&granted);
    }

    /// Takes a waiter out of the queue, as a deadline and a dropped future do.
    fn give_up(&self, ticket: Ticket, slot: &LeaseSlot) -> Option<GrantedLease> {
        granted(self.update(|core, waiting| waiting.leave(core, ticket, slot)))
    }

    /// Checks that nothing is left.
    fn is_at_rest(&self) {
        self.update(|core, waiting| {
            core.audit().expect("the planner is consistent");
            let census = core.census();
            assert_eq!((census.leases, census.waiting, waiting.is_empty()), (0, 0, true));
        });
    }
}

fn granted(outcome: Option<Outcome>) -> Option<GrantedLease> {
    match outcome? {
        Outcome::Granted(granted) => Some(granted),
        Outcome::Refused(_) | Outcome::TimedOut(_) | Outcome::Cancelled => {
            panic!("no request is refused")
        }
    }
}

fn spawn(model: &Arc<Model>, run: impl FnOnce(&Model) + 'static) -> thread::JoinHandle<()> {
    let model = Arc::clone(model);
    thread::spawn(move || run(&model))
}

fn join(threads: impl IntoIterator<Item = thread::JoinHandle<()>>) {
    threads.into_iter().for_each(|thread| thread.join().expect("no thread panics"));
}

#[test]
fn a_lease_that_ends_serves_a_writer_and_then_a_reader() {
    loom::model(|| {
        let model = Model::new();
        let held = model.take(1);
        let waiters = [(2, Access::Exclusive), (3, Access::Shared)]
            .map(|(holder, access)| spawn(&model, move |model| model.wait(holder, access)));
        model.end(&held);
        join(waiters);
        model.is_at_rest();
    });
}

#[test]
fn each_served_waiter_is_woken_once() {
    loom::model(|| {
        let model = Model::new();
        let held = model.take(1);
        let Asked::Queued(_, first) = model.ask(2, Access::Shared) else { panic!("it is held") };
        let Asked::Queued(_, second) = model.ask(3, Access::Shared) else { panic!("it is held") };
        let waiters = [first, second].map(|slot| {
            spawn(&model, move |model| {
                model.end(&granted(slot.wait(None)).expect("it is served"));
            })
        });
        model.end(&held);
        join(waiters);
        assert_eq!(lock(&model.inner).1.woken, 2);
        model.is_at_rest();
    });
}

#[test]
fn a_deadline_that_races_with_a_grant_loses_no_lease() {
    loom::model(|| {
        let model = Model::new();
        let held = model.take(1);
        let Asked::Queued(ticket, slot) = model.ask(2, Access::Exclusive) else {
            panic!("it is held")
        };
        let waiter = spawn(&model, move |model| {
            if let Some(granted) = model.give_up(ticket, &slot) {
                model.end(&granted);
            }
        });
        let other = spawn(&model, |model| model.wait(3, Access::Shared));
        model.end(&held);
        join([waiter, other]);
        model.is_at_rest();
    });
}

/// A waker that a thread can wait for.
struct Alarm {
    rung: Mutex<bool>,
    changed: Condvar,
}

impl Alarm {
    fn new() -> Arc<Alarm> {
        Arc::new(Alarm { rung: Mutex::new(false), changed: Condvar::new() })
    }

    fn wait(&self) {
        let mut rung = lock(&self.rung);
        while !std::mem::take(&mut *rung) {
            rung = self.changed.wait(rung).expect("no holder panics");
        }
    }
}

impl Wake for Alarm {
    fn wake(self: Arc<Alarm>) {
        *lock(&self.rung) = true;
        self.changed.notify_one();
    }
}

#[test]
fn a_task_is_woken_whenever_it_is_polled() {
    loom::model(|| {
        let model = Model::new();
        let held = model.take(1);
        let task = spawn(&model, |model| {
            let granted = match model.ask(2, Access::Exclusive) {
                Asked::Granted(granted) => granted,
                Asked::Queued(_, slot) => {
                    let alarm = Alarm::new();
                    let waker = Waker::from(Arc::clone(&alarm));
                    loop {
                        if let Some(granted) = granted(slot.poll(&waker)) {
                            break granted;
                        }
                        alarm.wait();
                    }
                }
            };
            model.end(&granted);
        });
        model.end(&held);
        join([task]);
        model.is_at_rest();
    });
}

#[test]
fn a_task_that_moves_is_woken_by_its_last_waker() {
    loom::model(|| {
        let model = Model::new();
        let held = model.take(1);
        let Asked::Queued(_, slot) = model.ask(2, Access::Exclusive) else { panic!("it is held") };
        let before = Waker::from(Alarm::new());
        let task = spawn(&model, move |model| {
            let alarm = Alarm::new();
            let waker = Waker::from(Arc::clone(&alarm));
            let mut lease = granted(slot.poll(&before));
            while lease.is_none() {
                lease = granted(slot.poll(&waker));
                if lease.is_none() {
                    alarm.wait();
                }
            }
            model.end(&lease.expect("it was found above"));
        });
        model.end(&held);
        join([task]);
        model.is_at_rest();
    });
}

#[test]
fn a_future_that_is_dropped_while_it_is_served_lets_the_next_go_on() {
    loom::model(|| {
        let model = Model::new();
        let held = model.take(1);
        let Asked::Queued(ticket, slot) = model.ask(2, Access::Exclusive) else {
            panic!("it is held")
        };
        let Asked::Queued(_, next) = model.ask(3, Access::Exclusive) else { panic!("it is held") };
        let dropped = spawn(&model, move |model| {
            let waker = Waker::from(Alarm::new());
            if let Some(granted) =
                granted(slot.poll(&waker)).or_else(|| model.give_up(ticket, &slot))
            {
                model.end(&granted);
            }
        });
        let waits = spawn(&model, move |model| {
            model.end(&granted(next.wait(None)).expect("it is served"));
        });
        model.end(&held);
        join([dropped, waits]);
        model.is_at_rest();
    });
}
