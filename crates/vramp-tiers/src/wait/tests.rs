//! The cost and the order of deadlines.

#![allow(clippy::unwrap_used, reason = "a test ends where something is missing")]

use super::*;

/// Waiters numbered from zero, with their deadlines.
fn queue(deadlines: impl IntoIterator<Item = Option<Instant>>) -> Waiters<usize, &'static str> {
    let mut waiters = Waiters::default();
    for (id, until) in deadlines.into_iter().enumerate() {
        waiters.add(id, until);
    }
    waiters
}

#[test]
fn a_look_at_deadlines_takes_as_many_steps_with_10_000_waiters_as_with_10() {
    let start = Instant::now();
    let steps = [10, 10_000].map(|count| {
        // Two are due, one much later, and the others have none.
        let late = start + Duration::from_secs(3_600);
        let some = [None, Some(start), Some(late), Some(start)].into_iter();
        let mut waiters = queue(some.chain(std::iter::repeat(None)).take(count));
        waiters.expire(start, |_| Some("late"));
        assert_eq!((waiters.len(), waiters.completed()), (count - 2, 2));
        let of_two = waiters.deadline_steps;
        waiters.expire(start, |_| Some("late"));
        [of_two, waiters.deadline_steps - of_two]
    });
    assert_eq!(steps, [[3, 1], [3, 1]]);
}

#[test]
fn deadlines_end_in_their_order_and_leave_with_their_waiters() {
    let start = Instant::now();
    let at = |ms| start + Duration::from_millis(ms);
    let mut waiters = queue([Some(at(3)), Some(at(1)), Some(at(2)), Some(at(2))]);
    // One gives up by itself, and one is served.
    assert!(waiters.remove(3) && !waiters.remove(3));
    let served = Arc::clone(waiters.slot(0).unwrap());
    waiters.complete(0, "served");
    let mut ended = Vec::new();
    waiters.expire(at(2), |id| {
        ended.push(id);
        Some("late")
    });
    assert_eq!(ended, [1, 2]);
    assert!(waiters.is_empty() && !waiters.has_deadlines());
    let outcomes: Vec<_> = waiters.take_ended().iter().map(|slot| slot.take()).collect();
    assert_eq!(outcomes, [Some("served"), Some("late"), Some("late")]);
    assert_eq!((waiters.completed(), waiters.has_ended(), served.take()), (3, false, None));
}

#[test]
fn a_waiter_that_is_to_take_a_step_is_woken_once_and_stays() {
    let start = Instant::now();
    let mut waiters = queue([None]);
    let slot = Arc::clone(waiters.slot(0).unwrap());
    for _ in 0..2 {
        waiters.set_deadline(0, Some(start + Duration::from_secs(3_600)));
        waiters.set_deadline(0, Some(start));
        waiters.expire(start, |_| None);
        waiters.expire(start, |_| None);
        assert_eq!((waiters.take_ended().len(), waiters.has_deadlines()), (1, false));
    }
    assert_eq!((waiters.len(), waiters.completed(), slot.take()), (1, 0, None));
    assert!(waiters.remove(0));
    waiters.set_deadline(0, Some(start));
    assert!(!waiters.has_deadlines(), "it is not there any more");
}

#[test]
fn notifications_before_a_look_are_one_and_an_outcome_is_kept() {
    let slot = WaitSlot::default();
    slot.notify();
    slot.notify();
    assert_eq!(slot.poll(Waker::noop()), None);
    assert!(slot.take_notified() && !slot.take_notified());
    assert_eq!(slot.wait(Some(Instant::now())), None);
    slot.complete(7);
    assert_eq!(slot.wait(None), Some(7));
}
