//! Tables of what a request gets: at once, as much as there is, and by rounds of spilling.

use super::*;

/// Bytes taken on each of the two GPUs, which have a limit of 100 each.
fn with_taken(taken: [u64; 2]) -> Ledger {
    let mut ledger = ledger();
    for (space, bytes) in [GPU, GPU1].into_iter().zip(taken) {
        reserve(&mut ledger, space, bytes, 1);
    }
    ledger
}

fn granted(submitted: Result<Submitted, SubmitError>, ledger: &Ledger) -> Option<(SpaceId, u64)> {
    match submitted {
        Ok(Submitted::Granted { reservation, space, .. }) => {
            Some((space, ledger.reservation(reservation).unwrap().size.count()))
        }
        Ok(Submitted::Waiting(_)) | Err(_) => None,
    }
}

#[test]
fn without_waiters_the_first_candidate_with_room_serves_the_request() {
    for (taken, candidates, bytes, expected) in [
        ([0, 0], &[GPU1, GPU][..], 100, Some(GPU1)),
        ([0, 90], &[GPU1, GPU], 20, Some(GPU)),
        ([90, 90], &[GPU1, GPU], 20, None),
        ([100, 100], &[GPU], 0, Some(GPU)),
        ([0, 0], &[GPU, HOST], 1000, Some(HOST)),
        ([0, 0], &[GPU, GPU1], 101, None),
        ([0, 0], &[GPU, DISK], 1, None),
        ([0, 0], &[], 1, None),
    ] {
        for may_wait in [false, true] {
            let (mut ledger, mut queue) = (with_taken(taken), WaitQueue::default());
            let request = ask(candidates, bytes, 2);
            let submitted = match may_wait {
                true => queue.submit(&mut ledger, &request),
                false => queue.submit_now(&mut ledger, &request),
            };
            let expected = expected.map(|space| (space, bytes));
            assert_eq!(granted(submitted, &ledger), expected, "{taken:?} {candidates:?} {bytes}");
        }
    }
}

#[test]
fn as_much_as_there_is_comes_from_the_candidate_with_the_most_room() {
    let both = [GPU, GPU1];
    for (taken, min, bytes, expected) in [
        ([50, 20], 1, 70, Some((GPU1, 70))),
        ([50, 20], 1, 90, Some((GPU1, 80))),
        ([50, 50], 1, 90, Some((GPU, 50))),
        ([0, 0], 1, 40, Some((GPU, 40))),
        ([90, 95], 10, 90, Some((GPU, 10))),
        ([90, 95], 11, 90, None),
        ([100, 100], 1, 90, None),
        ([100, 100], 0, 90, Some((GPU, 0))),
        ([0, 0], 101, 200, None),
    ] {
        let (mut ledger, mut queue) = (with_taken(taken), WaitQueue::default());
        let submitted = queue.submit_up_to(&mut ledger, &ask(&both, bytes, 2), b(min));
        assert_eq!(granted(submitted, &ledger), expected, "{taken:?} {min} {bytes}");
        assert!(queue.is_empty());
    }
    let (mut ledger, mut queue) = (ledger(), WaitQueue::default());
    let none = queue.submit_up_to(&mut ledger, &ask(&[], 1, 2), b(0));
    assert_eq!(none, Err(SubmitError::NoCandidates));
}

#[test]
fn as_much_as_there_is_does_not_overtake_beyond_the_bound() {
    let overtaking = Overtaking { count: 0, bytes: b(0) };
    let mut queue = WaitQueue::new(QueueConfig { overtaking, promote_after: None });
    let mut ledger = with_taken([60, 80]);
    wait(&mut queue, &mut ledger, ask(&[GPU], 50, 2));
    let submitted = queue.submit_up_to(&mut ledger, &ask(&[GPU, GPU1], 90, 3), b(1));
    assert_eq!(granted(submitted, &ledger), Some((GPU1, 20)), "a waiter goes first on the other");
    let submitted = queue.submit_up_to(&mut ledger, &ask(&[GPU], 90, 3), b(1));
    assert!(matches!(submitted, Err(SubmitError::NotNow { waiting: 1, .. })), "{submitted:?}");
}

#[test]
fn the_first_claim_is_in_the_first_candidate_with_a_spiller() {
    for (with_spiller, expected) in [
        (&[][..], None),
        (&[GPU], Some((GPU, 20))),
        (&[GPU1], Some((GPU1, 10))),
        (&[GPU, GPU1], Some((GPU1, 10))),
        (&[HOST], None),
    ] {
        let (mut ledger, mut queue) = (with_taken([90, 80]), WaitQueue::default());
        let candidates = Candidates::from_slice(&[GPU1, GPU]);
        let waiter = wait(&mut queue, &mut ledger, ask(&candidates, 30, 2));
        let has_spiller = |space: SpaceId| with_spiller.contains(&space);
        let claimed = queue.claim_first_spillable(&ledger, waiter, &candidates, has_spiller);
        assert_eq!(claimed, expected.is_some(), "{with_spiller:?}");
        let left = queue.claim_left(&ledger, waiter).unwrap();
        assert_eq!(left, b(expected.map_or(0, |(_, bytes)| bytes)), "{with_spiller:?}");
    }
}

#[test]
fn spilled_bytes_that_another_request_took_still_count_for_the_claim() {
    // Bytes that came back, bytes that another request took of them, and the rest of the claim.
    for (back, taken, left) in [(0, 0, 50), (20, 0, 30), (20, 20, 30), (20, 5, 35), (50, 50, 0)] {
        let overtaking = Overtaking { count: 9, bytes: b(100) };
        let mut queue = WaitQueue::new(QueueConfig { overtaking, promote_after: None });
        let mut ledger = with_taken([0, 0]);
        let holder = reserve(&mut ledger, GPU, 100, 1);
        let waiter = wait(&mut queue, &mut ledger, ask(&[GPU], 50, 2));
        assert_eq!(queue.claim_deficit(&ledger, GPU, waiter), Ok(Some(b(50))));
        let part = ledger.split(holder, b(back)).unwrap();
        ledger.release(part).unwrap();
        reserve(&mut ledger, GPU, taken, 3);
        let rest = queue.record_spilled(&ledger, waiter, b(50), b(back));
        assert_eq!(rest, Ok(b(left)), "{back} {taken}");
    }
}

#[test]
fn rounds_of_spilling_go_on_as_long_as_a_spiller_may_free_more() {
    use SpillResult::{Covered, NoSpiller, Short, WaitOver};
    // Results of one round, the number of candidates tried, and whether a retry follows.
    for (results, tried, retried) in [
        (&[NoSpiller, NoSpiller][..], 2, false),
        (&[NoSpiller, Short], 2, true),
        (&[Short, Short], 2, true),
        (&[Covered, Short], 1, true),
        (&[Short, Covered], 2, true),
        (&[Short, WaitOver], 2, false),
        (&[WaitOver, Short], 1, false),
    ] {
        let mut rounds = SpillRounds::new(1);
        assert_eq!(rounds.begin_round(), Some(1));
        let goes_on = results.iter().take_while(|&&result| rounds.report(result)).count();
        assert_eq!((goes_on + 1).min(results.len()), tried, "{results:?}");
        assert_eq!(rounds.end_round(), retried.then_some(1), "{results:?}");
        assert_eq!(rounds.is_over(), !retried);
        assert_eq!(rounds.begin_round(), retried.then_some(2), "{results:?}");
    }
}

#[test]
fn rounds_of_spilling_are_bounded_and_begin_anew() {
    let mut rounds = SpillRounds::new(2);
    for _ in 0..2 {
        for round in 1..=3 {
            assert_eq!(rounds.begin_round(), Some(round));
            assert!(rounds.report(SpillResult::Short));
            assert_eq!(rounds.end_round(), (round <= 2).then_some(round));
        }
        assert_eq!((rounds.begin_round(), rounds.is_over()), (None, true));
        rounds.restart();
    }
    rounds.stop();
    assert_eq!(rounds.begin_round(), None);
}

#[test]
fn the_call_of_a_spiller_ends_the_candidate_when_nothing_is_missing_or_the_wait_is_over() {
    for (left, deadline_passed, expected) in [
        (Some(b(1)), false, None),
        (Some(b(1)), true, Some(SpillResult::WaitOver)),
        (Some(b(0)), true, Some(SpillResult::Covered)),
        (Some(b(0)), false, Some(SpillResult::Covered)),
        (None, false, Some(SpillResult::WaitOver)),
    ] {
        assert_eq!(SpillResult::after_call(left, deadline_passed), expected);
    }
}

#[test]
fn a_check_for_deadlock_is_within_its_steps_or_postponed() {
    let (mut ledger, mut queue) = (with_taken([100, 100]), WaitQueue::default());
    assert!(queue.deadlock_check_is_within(&ledger, 2));
    for owner in 2..4 {
        wait(&mut queue, &mut ledger, ask(&[GPU], 1, owner));
    }
    // Two waiters times two waiters and two reservations.
    for (steps, within) in [(0, false), (7, false), (8, true)] {
        assert_eq!(queue.deadlock_check_is_within(&ledger, steps), within, "{steps}");
    }
}
