//! The cost of deadlines, in steps.

#![allow(clippy::unwrap_used, reason = "a test ends where something is missing")]

use std::time::{Duration, Instant};

use super::*;
use crate::planner::{Access, DeferConfig, HolderKey, LeaseRequest};
use vramp_core::Bytes;

/// Waiters for one buffer that is leased, with their deadlines.
fn queue(deadlines: impl IntoIterator<Item = Option<Instant>>) -> (Deferrables, Waiting) {
    let mut core = Deferrables::new(DeferConfig::new(Bytes::gib(1))).unwrap();
    let buffers = [(core.add_buffer(Bytes::mib(2)).unwrap().buffer, Access::Exclusive)];
    let request = |holder| LeaseRequest {
        buffers: &buffers,
        holder: HolderKey(holder),
        ..LeaseRequest::default()
    };
    let _held = core.lease(&request(0), 0).unwrap();
    let mut waiting = Waiting::default();
    for (until, holder) in deadlines.into_iter().zip(1..) {
        let ticket = core.enqueue(&request(holder), &[], None).unwrap();
        let slot = Arc::new(LeaseSlot::default());
        waiting.add(ticket, Entry { slot, in_place: SmallVec::new(), until });
    }
    (core, waiting)
}

#[test]
fn a_look_at_deadlines_takes_as_many_steps_with_10_000_waiters_as_with_10() {
    let start = Instant::now();
    let steps = [10, 10_000].map(|count| {
        // Two are due, one much later, and the others have none.
        let late = start + Duration::from_secs(3_600);
        let some = [None, Some(start), Some(late), Some(start)].into_iter();
        let (mut core, mut waiting) = queue(some.chain(std::iter::repeat(None)).take(count));
        waiting.expire(&mut core, start);
        assert_eq!((waiting.len(), waiting.woken), (count - 2, 2));
        let of_two = waiting.deadline_steps;
        waiting.expire(&mut core, start);
        [of_two, waiting.deadline_steps - of_two]
    });
    assert_eq!(steps, [[3, 1], [3, 1]]);
}

#[test]
fn deadlines_end_in_their_order_and_leave_with_their_waiters() {
    let start = Instant::now();
    let at = |ms| start + Duration::from_millis(ms);
    let (mut core, mut waiting) = queue([Some(at(3)), Some(at(1)), Some(at(2)), Some(at(2))]);
    let slots: Vec<_> =
        waiting.entries.iter().map(|(&ticket, entry)| (ticket, Arc::clone(&entry.slot))).collect();
    // One gives up by itself.
    assert!(waiting.leave(&mut core, slots[3].0, &slots[3].1).is_none());
    waiting.expire(&mut core, at(2));
    let is_woken = |index: usize, woken: &Arc<LeaseSlot>| Arc::ptr_eq(woken, &slots[index].1);
    assert!(is_woken(1, &waiting.to_wake[0]) && is_woken(2, &waiting.to_wake[1]));
    assert!(waiting.has_deadlines());
    waiting.expire(&mut core, at(3));
    assert!(waiting.is_empty() && !waiting.has_deadlines());
    assert_eq!(waiting.woken, 3);
}
