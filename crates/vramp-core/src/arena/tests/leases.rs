//! Leases: one stream at a time.

use super::*;
use crate::{Epoch, Mark, StreamId};

fn mark(stream: u32, epoch: u64) -> Mark {
    Mark { stream: StreamId::new(stream), epoch: Epoch(epoch) }
}

fn stream(number: u32) -> StreamId {
    StreamId::new(number)
}

const RUNNING: fn(Mark) -> bool = |_| false;
const OVER: fn(Mark) -> bool = |_| true;

#[test]
fn overlapping_replays_of_two_streams_are_refused_until_the_first_is_over() {
    let mut leases = Leases::default();
    let first = leases.take(stream(0), Overlap::Refuse, RUNNING).unwrap();
    let held = ArenaBusy::Held { holder: stream(0), taker: stream(1) };
    assert_eq!(leases.take(stream(1), Overlap::Refuse, OVER), Err(held));
    assert_eq!(leases.take(stream(1), Overlap::Order, OVER), Err(held));
    leases.end(first.lease, mark(0, 3)).unwrap();
    let unfinished = ArenaBusy::Unfinished { unfinished: mark(0, 3), taker: stream(1) };
    assert_eq!(leases.take(stream(1), Overlap::Refuse, RUNNING), Err(unfinished));
    assert!(!leases.is_idle(RUNNING));
    let second = leases.take(stream(1), Overlap::Refuse, OVER).unwrap();
    assert_eq!(second.waits, []);
    assert_eq!(leases.holder(), Some(stream(1)));
}

#[test]
fn an_ordered_taker_waits_for_all_that_is_not_over() {
    let mut leases = Leases::default();
    let first = leases.take(stream(0), Overlap::Order, RUNNING).unwrap();
    leases.end(first.lease, mark(0, 3)).unwrap();
    leases.note_use(mark(2, 5));
    leases.note_use(mark(2, 4));
    let second = leases.take(stream(1), Overlap::Order, RUNNING).unwrap();
    assert_eq!(second.waits, [mark(0, 3), mark(2, 5)]);
}

#[test]
fn one_stream_holds_several_leases_and_never_waits_for_itself() {
    let mut leases = Leases::default();
    let [first, second] =
        [(); 2].map(|()| leases.take(stream(0), Overlap::Refuse, RUNNING).unwrap());
    leases.end(first.lease, mark(0, 1)).unwrap();
    assert!(leases.take(stream(1), Overlap::Order, OVER).is_err(), "one lease is still held");
    leases.end(second.lease, mark(0, 2)).unwrap();
    let third = leases.take(stream(0), Overlap::Refuse, RUNNING).unwrap();
    assert_eq!(third.waits, []);
    leases.cancel(third.lease).unwrap();
    assert!(leases.is_idle(|mark| mark.epoch <= Epoch(2)));
    assert!(!leases.is_idle(|mark| mark.epoch <= Epoch(1)));
}

#[test]
fn a_lease_ends_once_and_with_a_mark_of_its_stream() {
    let mut leases = Leases::default();
    let taken = leases.take(stream(0), Overlap::Refuse, OVER).unwrap();
    let other = LeaseEndError::OtherStream { holder: stream(0), mark: mark(1, 1) };
    assert_eq!(leases.end(taken.lease, mark(1, 1)), Err(other));
    assert_eq!(leases.holder(), Some(stream(0)));
    leases.end(taken.lease, mark(0, 1)).unwrap();
    let unknown = UnknownArenaLease { lease: taken.lease };
    assert_eq!(leases.end(taken.lease, mark(0, 1)), Err(unknown.into()));
    assert_eq!(leases.cancel(taken.lease), Err(unknown));
}

#[test]
fn memory_is_lent_only_when_no_stream_reads_results_any_more() {
    let mut leases = Leases::default();
    assert!(leases.is_idle(RUNNING));
    leases.note_use(mark(4, 9));
    assert!(!leases.is_idle(RUNNING));
    assert!(leases.is_idle(OVER));
}
