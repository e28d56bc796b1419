//! Tables of what a request gets, of the candidates of each strategy, and of levels and pressure.

use smallvec::smallvec;

use super::*;

// --- Tables of what a request gets: at once, as much as there is, and by rounds of spilling ---

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

// --- The candidates of each strategy, and their order ---

const KNOWN: [SpaceId; 6] = [GPU, GPU1, SpaceId::gpu(2), HOST, SpaceId::host(1), DISK];

fn of(strategy: Strategy) -> Vec<String> {
    let distance = |space: SpaceId| if space.index == 1 { 0 } else { 1 };
    let found = strategy.candidates(&KNOWN, distance).unwrap();
    found.iter().map(SpaceId::to_string).collect()
}

#[test]
fn the_nearest_of_a_tier_comes_first() {
    assert_eq!(of(Strategy::AnyInTier(Tier::Gpu)), ["gpu1", "gpu0", "gpu2"]);
    assert_eq!(of(Strategy::Specific(HOST)), ["host0"]);
}

#[test]
fn a_preference_falls_back_to_the_other_devices() {
    assert_eq!(of(Strategy::Prefer(SpaceId::gpu(2))), ["gpu2", "gpu1", "gpu0"]);
}

#[test]
fn tiers_come_in_the_order_in_which_they_are_named() {
    let tiers = Strategy::AnyInTiers(smallvec![Tier::Disk, Tier::Gpu]);
    assert_eq!(of(tiers), ["disk0", "gpu1", "gpu0", "gpu2"]);
}

#[test]
fn data_goes_down_and_up_to_the_next_tier_first() {
    assert_eq!(of(Strategy::Downgrade(GPU)), ["host1", "host0", "disk0"]);
    assert_eq!(of(Strategy::Downgrade(HOST)), ["disk0"]);
    assert_eq!(of(Strategy::Upgrade(DISK)), ["host1", "host0", "gpu1", "gpu0", "gpu2"]);
    assert_eq!((Tier::Gpu.below(), Tier::Disk.below()), (Some(Tier::Host), None));
    assert_eq!((Tier::Gpu.above(), Tier::Disk.above()), (None, Some(Tier::Host)));
}

#[test]
fn a_strategy_without_candidates_is_an_error_and_never_a_wait() {
    for strategy in [
        Strategy::Downgrade(DISK),
        Strategy::Upgrade(GPU),
        Strategy::AnyInTiers(smallvec![]),
        Strategy::Specific(SpaceId::gpu(9)),
        Strategy::Prefer(SpaceId::host(9)),
    ] {
        assert!(strategy.candidates(&KNOWN, |_| 0).is_err(), "{strategy:?}");
    }
    let error = Strategy::AnyInTier(Tier::Gpu).candidates(&[HOST], |_| 0).unwrap_err();
    assert!(error.to_string().contains("the spaces are host0"), "{error}");
}

#[test]
fn a_space_known_twice_is_one_candidate() {
    let found = Strategy::AnyInTier(Tier::Gpu).candidates(&[GPU, GPU1, GPU], |_| 0).unwrap();
    assert_eq!(found.as_slice(), [GPU, GPU1]);
}

#[test]
fn of_equals_the_fastest_known_link_comes_first_then_the_unknown_by_their_numbers() {
    let rates = [(HOST, 10), (SpaceId::host(1), 50), (DISK, 99)];
    let rate = |(to, rate)| (LinkKey { from: GPU, to }, Rate { bytes_per_s: rate });
    let mut links: Links = rates.into_iter().map(rate).collect();
    links.set(LinkKey { from: GPU, to: SpaceId::gpu(2) }, Rate { bytes_per_s: 1 });
    let of = |strategy: Strategy| {
        let found = strategy.candidates(&KNOWN, links.distance_from(GPU)).unwrap();
        found.iter().map(SpaceId::to_string).collect::<Vec<_>>()
    };
    assert_eq!(of(Strategy::Downgrade(GPU)), ["host1", "host0", "disk0"], "the next tier first");
    assert_eq!(
        of(Strategy::AnyInTier(Tier::Gpu)),
        ["gpu0", "gpu2", "gpu1"],
        "here, known, unknown"
    );
    assert_eq!(of(Strategy::Prefer(GPU1)), ["gpu1", "gpu0", "gpu2"]);
    let tiers = Strategy::AnyInTiers(smallvec![Tier::Disk, Tier::Host]);
    assert_eq!(of(tiers), ["disk0", "host1", "host0"]);
    // The opposite direction is another link, of unknown rate.
    let up = Strategy::Upgrade(HOST).candidates(&KNOWN, links.distance_from(HOST)).unwrap();
    assert_eq!(up.as_slice(), [GPU, GPU1, SpaceId::gpu(2)]);
    let back = LinkKey { from: HOST, to: GPU };
    assert_eq!((links.rate(back), links.iter().count()), (None, 4));
    let link = LinkKey { from: GPU, to: HOST };
    assert_eq!(links.forget(link), Some(Rate { bytes_per_s: 10 }));
    assert_eq!(links.rate(link), None);
}

// --- Levels, pressure and crossings ---

#[test]
fn defaults_resolve_against_the_capacity() {
    let gpu = SpaceConfig::gpu(Bytes::mib(1000)).levels().unwrap();
    assert_eq!(gpu.limit, Bytes::mib(900));
    assert_eq!((gpu.trigger, gpu.stop), (Bytes::mib(750), Bytes::mib(650)));
    let host = SpaceConfig::of_tier(Tier::Host, Bytes::mib(1000)).levels().unwrap();
    assert_eq!((host.limit, host.granule), (Bytes::mib(900), Bytes::mib(1)));
    let disk = SpaceConfig::disk(Bytes::mib(1000)).levels().unwrap();
    assert_eq!((disk.limit, disk.trigger), (Bytes::mib(1000), Bytes::mib(950)));
    assert_eq!(disk.stop, Bytes::mib(900));
}

#[test]
fn a_limit_in_bytes_means_those_bytes_whatever_the_capacity() {
    for capacity in [Bytes::gib(4), Bytes::gib(80), Bytes::tib(7)] {
        let config = SpaceConfig {
            limit: Level::Bytes(Bytes::gib(3)),
            trigger: Level::Bytes(Bytes::gib(2)),
            stop: Level::Bytes(Bytes::gib(1)),
            ..SpaceConfig::gpu(capacity)
        };
        let levels = config.levels().unwrap();
        assert_eq!((levels.limit, levels.trigger), (Bytes::gib(3), Bytes::gib(2)));
        assert_eq!(levels.capacity, capacity);
    }
}

#[test]
fn the_whole_is_all_of_the_largest_capacity() {
    let levels = SpaceConfig { granule: b(1), ..SpaceConfig::disk(b(u64::MAX)) }.levels().unwrap();
    assert_eq!(levels.limit, b(u64::MAX));
}

#[test]
fn levels_that_make_no_sense_are_named() {
    use SpaceConfigError as E;
    let good = plain(120, 100);
    let level = |bytes| Level::Bytes(b(bytes));
    let error = |config: SpaceConfig| config.levels().unwrap_err();
    assert!(matches!(error(SpaceConfig { capacity: b(0), ..good }), E::ZeroCapacity { .. }));
    assert!(matches!(error(SpaceConfig { granule: b(0), ..good }), E::ZeroGranule));
    assert!(matches!(error(SpaceConfig { granule: b(121), ..good }), E::ZeroCapacity { .. }));
    for part in [f64::NAN, -0.1, 1.1, f64::INFINITY] {
        let config = SpaceConfig { trigger: Level::Fraction(part), ..good };
        assert!(matches!(error(config), E::InvalidFraction { name: LevelName::Trigger, .. }));
    }
    let config = SpaceConfig { limit: level(121), ..good };
    assert!(matches!(error(config), E::AboveCapacity { name: LevelName::Limit, .. }));
    let config = SpaceConfig { trigger: level(101), ..good };
    assert!(matches!(error(config), E::TriggerAboveLimit { .. }));
    let config = SpaceConfig { stop: level(75), ..good };
    assert!(matches!(error(config), E::StopNotBelowTrigger { .. }));
    let coarse = SpaceConfig { stop: level(65), trigger: level(70), granule: b(32), ..good };
    assert!(matches!(error(coarse), E::StopNotBelowTrigger { .. }), "equal once rounded");
    assert_eq!(Ledger::new([]).unwrap_err(), LedgerError::NoSpaces);
    let twice = Ledger::new([(GPU, good), (GPU, good)]).unwrap_err();
    assert_eq!(twice, LedgerError::Duplicate { space: GPU });
    let named = Ledger::new([(HOST, SpaceConfig { capacity: b(0), ..good })]).unwrap_err();
    assert!(named.to_string().starts_with("host0: a capacity of 0 B"), "{named}");
}

#[test]
fn the_trigger_fires_at_its_part_of_the_capacity_by_reservations_alone() {
    let config = SpaceConfig {
        limit: Level::Fraction(0.85),
        trigger: Level::Fraction(0.85),
        granule: b(1),
        ..SpaceConfig::gpu(b(1000))
    };
    let mut ledger = Ledger::new([(GPU, config)]).unwrap();
    let id = reserve(&mut ledger, GPU, 849, 1);
    assert!(!ledger.pressure(GPU).unwrap().should_downgrade());
    ledger.grow(id, b(1)).unwrap();
    let pressure = ledger.pressure(GPU).unwrap();
    assert!(pressure.should_downgrade() && pressure.high);
    assert_eq!(pressure.amount_to_downgrade(), b(200));
    ledger.release(id).unwrap();
    let pressure = ledger.pressure(GPU).unwrap();
    assert!(pressure.should_stop() && pressure.amount_to_downgrade().is_zero());
}

#[test]
fn each_crossing_is_seen_exactly_once_by_each_subscriber() {
    let mut ledger = ledger();
    let mut watches = [ledger.watch(GPU).unwrap(), ledger.watch(GPU).unwrap()];
    let id = reserve(&mut ledger, GPU, 74, 1);
    assert_eq!(ledger.next_crossing(&mut watches[0]), None);
    ledger.grow(id, b(1)).unwrap();
    assert_eq!(ledger.next_crossing(&mut watches[0]), Some(Crossing::Trigger));
    assert_eq!(ledger.next_crossing(&mut watches[0]), None);
    ledger.grow(id, b(25)).unwrap();
    let part = ledger.split(id, b(49)).unwrap();
    ledger.release(part).unwrap();
    assert_eq!(ledger.next_crossing(&mut watches[0]), None, "51 is above the stop");
    let again = reserve(&mut ledger, GPU, 30, 1);
    assert_eq!(ledger.next_crossing(&mut watches[0]), None, "it never was at the stop");
    ledger.release(again).unwrap();
    ledger.release(id).unwrap();
    let late = ledger.watch(GPU).unwrap();
    reserve(&mut ledger, GPU, 100, 1);
    for watch in &mut watches {
        let seen: Vec<Crossing> = std::iter::from_fn(|| ledger.next_crossing(watch)).collect();
        assert_eq!(seen[seen.len() - 2..], [Crossing::Stop, Crossing::Trigger]);
    }
    let mut late = late;
    assert_eq!(ledger.next_crossing(&mut late), Some(Crossing::Trigger));
    assert_eq!((late.space(), ledger.next_crossing(&mut late)), (GPU, None));
}

#[test]
fn a_factor_below_one_or_not_a_number_is_refused() {
    for factor in [0.0, 0.99, -1.0, f64::NAN, f64::INFINITY] {
        assert!(GrowthFactor::new(factor).is_err());
    }
    assert!(GrowthFactor::new(1.0).is_ok());
}
