//! Models of the hand-over for loom: all orders of ends, waits, deadlines, and tasks that are polled and
//! dropped. `cargo xtask loom` explores them. A lost wake-up shows as a thread that never ends.

use std::collections::VecDeque;
use std::sync::Arc;

use loom::sync::Mutex;
use loom::thread;

use super::*;

/// A thing that one at a time has, and the queue for it.
#[derive(Default)]
struct Queue {
    is_held: bool,
    order: VecDeque<u64>,
    next: u64,
    waiters: Waiters<u64, Held>,
}

/// The thing, handed over.
struct Held;

type Slot = Arc<WaitSlot<Held>>;

/// The queue behind a lock, as managers have theirs.
struct Model(Mutex<Queue>);

impl Model {
    fn new() -> Arc<Model> {
        Arc::new(Model(Mutex::new(Queue::default())))
    }

    /// Makes a change, serves the first waiter if the thing is free, and wakes after unlocking.
    fn update<R>(&self, change: impl FnOnce(&mut Queue) -> R) -> R {
        let mut queue = lock(&self.0);
        let result = change(&mut queue);
        if !queue.is_held
            && let Some(first) = queue.order.pop_front()
        {
            queue.is_held = true;
            queue.waiters.complete(first, Held);
        }
        let ended = queue.waiters.take_ended();
        drop(queue);
        ended.iter().for_each(|slot| slot.wake());
        result
    }

    fn take(&self) -> Held {
        self.update(|queue| assert!(!std::mem::replace(&mut queue.is_held, true)));
        Held
    }

    fn ask(&self) -> (u64, Slot) {
        self.update(|queue| {
            queue.next += 1;
            queue.order.push_back(queue.next);
            (queue.next, queue.waiters.add(queue.next, None))
        })
    }

    fn end(&self, _: Held) {
        self.update(|queue| queue.is_held = false);
    }

    /// Waits without end, and ends.
    fn wait(&self) {
        let (_, slot) = self.ask();
        self.end(slot.wait(None).expect("it is served"));
    }

    /// Takes a waiter out of the queue, as a deadline and a dropped task do.
    fn give_up(&self, id: u64, slot: &Slot) -> Option<Held> {
        let left = self.update(|queue| {
            queue.order.retain(|other| *other != id);
            queue.waiters.remove(id)
        });
        (!left).then(|| slot.take().expect("its wait has ended"))
    }

    fn is_at_rest(&self) {
        self.update(|queue| {
            assert!(!queue.is_held && queue.order.is_empty() && queue.waiters.is_empty());
        });
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
fn an_end_serves_one_waiter_and_then_the_next() {
    loom::model(|| {
        let model = Model::new();
        let held = model.take();
        let waiters = [(); 2].map(|()| spawn(&model, Model::wait));
        model.end(held);
        join(waiters);
        model.is_at_rest();
    });
}

#[test]
fn each_served_waiter_is_woken_once() {
    loom::model(|| {
        let model = Model::new();
        let held = model.take();
        let waiters = [model.ask(), model.ask()].map(|(_, slot)| {
            spawn(&model, move |model| model.end(slot.wait(None).expect("it is served")))
        });
        model.end(held);
        join(waiters);
        assert_eq!(lock(&model.0).waiters.completed(), 2);
        model.is_at_rest();
    });
}

#[test]
fn a_deadline_that_races_with_a_grant_loses_nothing() {
    loom::model(|| {
        let model = Model::new();
        let held = model.take();
        let (id, slot) = model.ask();
        let waiter = spawn(&model, move |model| {
            if let Some(held) = model.give_up(id, &slot) {
                model.end(held);
            }
        });
        let other = spawn(&model, Model::wait);
        model.end(held);
        join([waiter, other]);
        model.is_at_rest();
    });
}

#[test]
fn a_waiter_that_is_to_take_a_step_is_woken_whenever_it_looks() {
    loom::model(|| {
        let model = Model::new();
        let held = model.take();
        let (id, slot) = model.ask();
        let due = Instant::now();
        model.update(|queue| queue.waiters.set_deadline(id, Some(due)));
        let expires =
            spawn(&model, move |model| model.update(|queue| queue.waiters.expire(due, |_| None)));
        let alarm = Arc::new(Bell::default());
        let waker = Waker::from(Arc::clone(&alarm));
        // Only the wake-up for the step ends this: nothing is handed over.
        while model.update(|queue| queue.waiters.has_deadlines()) {
            assert!(slot.poll(&waker).is_none());
            if model.update(|queue| queue.waiters.has_deadlines()) {
                alarm.wait(None);
            }
        }
        assert!(model.give_up(id, &slot).is_none());
        join([expires]);
        model.end(held);
        model.is_at_rest();
    });
}

#[test]
fn a_notification_is_seen_whenever_the_waiter_looks() {
    loom::model(|| {
        let slot = Arc::new(WaitSlot::<Held>::default());
        let notifies = Arc::clone(&slot);
        let thread = thread::spawn(move || notifies.notify());
        let alarm = Arc::new(Bell::default());
        let waker = Waker::from(Arc::clone(&alarm));
        loop {
            assert!(slot.poll(&waker).is_none());
            if slot.take_notified() {
                break;
            }
            alarm.wait(None);
        }
        thread.join().expect("a notification does not panic");
    });
}

#[test]
fn a_task_that_moves_is_woken_by_its_last_waker() {
    loom::model(|| {
        let model = Model::new();
        let held = model.take();
        let (_, slot) = model.ask();
        let before = Waker::from(Arc::new(Bell::default()));
        let task = spawn(&model, move |model| {
            let alarm = Arc::new(Bell::default());
            let waker = Waker::from(Arc::clone(&alarm));
            let mut held = slot.poll(&before);
            while held.is_none() {
                held = slot.poll(&waker);
                if held.is_none() {
                    alarm.wait(None);
                }
            }
            model.end(held.expect("it was found above"));
        });
        model.end(held);
        join([task]);
        model.is_at_rest();
    });
}

#[test]
fn a_task_that_is_dropped_while_it_is_served_lets_the_next_go_on() {
    loom::model(|| {
        let model = Model::new();
        let held = model.take();
        let (id, slot) = model.ask();
        let (_, next) = model.ask();
        let dropped = spawn(&model, move |model| {
            let waker = Waker::from(Arc::new(Bell::default()));
            if let Some(held) = slot.poll(&waker).or_else(|| model.give_up(id, &slot)) {
                model.end(held);
            }
        });
        let waits = spawn(&model, move |model| {
            model.end(next.wait(None).expect("it is served"));
        });
        model.end(held);
        join([dropped, waits]);
        model.is_at_rest();
    });
}
