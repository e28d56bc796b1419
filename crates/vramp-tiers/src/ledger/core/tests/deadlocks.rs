//! Deadlock detection against a search through all orders of grants and ends.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

#[test]
fn two_who_hold_half_and_want_more_are_a_deadlock_and_the_youngest_gives_up() {
    let (mut ledger, mut queue) = (ledger(), WaitQueue::default());
    let held = [1, 2].map(|owner| reserve(&mut ledger, GPU, 50, owner));
    let one = wait(&mut queue, &mut ledger, ask(&[GPU], 10, 1));
    assert_eq!(queue.deadlock(&ledger), None, "the second owner can still end");
    let two = wait(&mut queue, &mut ledger, ask(&[GPU], 10, 2));
    let deadlock = queue.deadlock(&ledger).unwrap();
    assert_eq!(deadlock.stuck, [one, two]);
    let Resolution::Abort { owner, waiter, reservations } = deadlock.resolution else { panic!() };
    assert_eq!((owner, waiter, reservations), (Owner(2), two, vec![held[1]]));
    queue.cancel(&mut ledger, two).unwrap();
    ledger.release(held[1]).unwrap();
    assert_eq!(who(&queue.serve_waiters(&mut ledger, GPU)), [one]);
}

#[test]
fn what_an_owner_keeps_outside_reservations_lets_it_pass_and_makes_no_owner_give_up() {
    for passes in [false, true] {
        let overtaking = Overtaking { count: 0, bytes: b(0) };
        let mut queue = WaitQueue::new(QueueConfig { overtaking, promote_after: None });
        let mut ledger = ledger();
        ledger.charge_unreserved(GPU, b(60), Tag::NONE).unwrap();
        let large = wait(&mut queue, &mut ledger, ask(&[GPU], 50, 1));
        let [keeps, other] = [(60, 40), (0, 1)].map(|(held, bytes)| {
            let held = if passes { b(held) } else { Bytes::ZERO };
            wait(&mut queue, &mut ledger, Request { held, ..ask(&[GPU], bytes, bytes) })
        });
        let candidates = [GPU].into_iter().collect();
        let claims = queue.claim_first_spillable(&ledger, keeps, &candidates, |_| true);
        assert_eq!(claims, !passes, "it lacks nothing");
        let Some(deadlock) = queue.deadlock(&ledger) else {
            assert!(!passes, "the large one waits for the owner that waits behind it");
            continue;
        };
        assert_eq!(deadlock.stuck, [large, keeps, other]);
        assert_eq!(deadlock.resolution, Resolution::GrantOutOfOrder(keeps));
        assert_eq!(who(&queue.grant_out_of_order(&mut ledger, keeps).unwrap()), [keeps]);
        assert_eq!(queue.deadlock(&ledger), None, "it can end now");
    }
    // Two that keep more than there is are no deadlock here: other threads may end what they keep.
    let (mut ledger, mut queue) = (ledger(), WaitQueue::default());
    ledger.charge_unreserved(GPU, b(100), Tag::NONE).unwrap();
    for owner in [1, 2] {
        wait(&mut queue, &mut ledger, Request { held: b(50), ..ask(&[GPU], 60, owner) });
    }
    assert_eq!(queue.deadlock(&ledger), None);
}

#[test]
fn the_lowest_priority_gives_up_whatever_its_age() {
    let (mut ledger, mut queue) = (ledger(), WaitQueue::default());
    for owner in 1..=3 {
        reserve(
            &mut ledger,
            [GPU, GPU1, HOST][owner as usize - 1],
            [100, 100, 1000][owner as usize - 1],
            owner,
        );
    }
    let waits = [(1, GPU1, 0), (2, HOST, -3), (3, GPU, 0)].map(|(owner, space, priority)| {
        let request = Request { priority: Priority(priority), ..ask(&[space], 10, owner) };
        wait(&mut queue, &mut ledger, request)
    });
    let deadlock = queue.deadlock(&ledger).unwrap();
    assert_eq!(deadlock.cycle.len(), 3);
    let next: BTreeMap<u64, u64> =
        (0..3).map(|n| (deadlock.cycle[n].owner.0, deadlock.cycle[(n + 1) % 3].owner.0)).collect();
    assert_eq!(next, BTreeMap::from([(1, 2), (2, 3), (3, 1)]));
    assert!(matches!(deadlock.resolution, Resolution::Abort { waiter, .. } if waiter == waits[1]));
}

#[test]
fn one_who_holds_too_much_for_its_own_wish_is_a_deadlock_alone() {
    let (mut ledger, mut queue) = (ledger(), WaitQueue::default());
    reserve(&mut ledger, GPU, 60, 1);
    let waiter = wait(&mut queue, &mut ledger, ask(&[GPU], 50, 1));
    let deadlock = queue.deadlock(&ledger).unwrap();
    assert_eq!((deadlock.stuck, deadlock.cycle.len()), (vec![waiter], 1));
}

#[test]
fn another_candidate_whose_holder_goes_on_is_no_deadlock() {
    let (mut ledger, mut queue) = (ledger(), WaitQueue::default());
    reserve(&mut ledger, GPU, 60, 1);
    reserve(&mut ledger, GPU1, 60, 2);
    wait(&mut queue, &mut ledger, ask(&[GPU, GPU1], 50, 1));
    assert_eq!(queue.deadlock(&ledger), None);
}

#[test]
fn orphaned_memory_is_held_by_its_owner_and_unreserved_memory_by_nobody() {
    let (mut ledger, mut queue) = (ledger(), WaitQueue::default());
    let id = reserve(&mut ledger, GPU, 60, 1);
    let _ = ledger.charge(id, b(60)).unwrap();
    ledger.release(id).unwrap();
    let waiter = wait(&mut queue, &mut ledger, ask(&[GPU], 50, 1));
    assert!(queue.deadlock(&ledger).is_some());
    queue.cancel(&mut ledger, waiter).unwrap();
    ledger.uncharge(id, b(60)).unwrap();
    ledger.charge_unreserved(GPU, b(60), Tag::NONE).unwrap();
    wait(&mut queue, &mut ledger, ask(&[GPU], 50, 1));
    assert_eq!(queue.deadlock(&ledger), None);
}

#[test]
fn order_alone_never_locks_for_ever() {
    let config =
        QueueConfig { overtaking: Overtaking { count: 0, bytes: b(0) }, promote_after: None };
    let (mut ledger, mut queue) = (ledger(), WaitQueue::new(config));
    let held = reserve(&mut ledger, GPU, 50, 1);
    let big = wait(&mut queue, &mut ledger, ask(&[GPU], 60, 2));
    let small = wait(&mut queue, &mut ledger, ask(&[GPU], 10, 1));
    let deadlock = queue.deadlock(&ledger).unwrap();
    assert_eq!(deadlock.resolution, Resolution::GrantOutOfOrder(small));
    assert!(queue.grant_out_of_order(&mut ledger, big).unwrap().is_empty(), "it does not fit");
    let grants = queue.grant_out_of_order(&mut ledger, small).unwrap();
    assert_eq!(who(&grants), [small]);
    ledger.release(grants[0].reservation).unwrap();
    ledger.release(held).unwrap();
    assert_eq!(who(&queue.serve_waiters(&mut ledger, GPU)), [big]);
}

/// A state of the search.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
struct World {
    /// Owner, space, bytes.
    held: Vec<(u64, SpaceId, u64)>,
    /// Waiter, owner, candidates, bytes.
    waiting: Vec<(WaiterId, u64, Vec<SpaceId>, u64)>,
    /// Owners that were served, and so may end.
    served: BTreeSet<u64>,
}

fn ever_served(world: &World, seen: &mut BTreeSet<World>, served: &mut BTreeSet<WaiterId>) {
    if !seen.insert(world.clone()) {
        return;
    }
    let owners: BTreeSet<u64> = world.held.iter().map(|held| held.0).collect();
    for owner in owners {
        let waits = world.waiting.iter().any(|waiter| waiter.1 == owner);
        if !waits || world.served.contains(&owner) {
            let mut next = world.clone();
            next.held.retain(|held| held.0 != owner);
            ever_served(&next, seen, served);
        }
    }
    for (place, (id, owner, candidates, bytes)) in world.waiting.iter().enumerate() {
        for &space in candidates {
            let taken: u64 = world.held.iter().filter(|held| held.1 == space).map(|h| h.2).sum();
            if taken + bytes <= 100 {
                served.insert(*id);
                let mut next = world.clone();
                next.waiting.remove(place);
                next.held.push((*owner, space, *bytes));
                next.held.sort();
                next.served.insert(*owner);
                ever_served(&next, seen, served);
            }
        }
    }
}

fn spaces_of(bits: u8) -> Vec<SpaceId> {
    [GPU, GPU1].into_iter().enumerate().filter(|&(n, _)| bits >> n & 1 == 1).map(|x| x.1).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(vramp_testing::cases(100)))]

    /// The search is exponential: few owners, few requests.
    #[test]
    fn a_deadlock_is_found_exactly_when_a_search_finds_somebody_who_is_never_served(
        holdings in prop::collection::vec((1u64..4, 0u8..2, 1u64..70), 0..5),
        wishes in prop::collection::vec((1u64..4, 1u8..4, 1u64..101), 1..5),
    ) {
        let (mut ledger, mut queue) = (ledger(), WaitQueue::default());
        let mut held = Vec::new();
        for (owner, space, bytes) in holdings {
            let space = [GPU, GPU1][space as usize];
            if ledger.reserve(space, b(bytes), Owner(owner), Tag::NONE).is_ok() {
                held.push((owner, space, bytes));
            }
        }
        let mut waiting = Vec::new();
        for (owner, bits, bytes) in wishes {
            let spaces = spaces_of(bits);
            match queue.submit(&mut ledger, &ask(&spaces, bytes, owner)).unwrap() {
                Submitted::Waiting(id) => waiting.push((id, owner, spaces, bytes)),
                Submitted::Granted { space, .. } => held.push((owner, space, bytes)),
            }
        }
        held.sort();
        let mut served = BTreeSet::new();
        let world = World { held, waiting: waiting.clone(), served: BTreeSet::new() };
        ever_served(&world, &mut BTreeSet::new(), &mut served);
        let never: Vec<WaiterId> =
            waiting.iter().map(|waiter| waiter.0).filter(|id| !served.contains(id)).collect();
        let deadlock = queue.deadlock(&ledger);
        let found = deadlock.as_ref().filter(|d| matches!(d.resolution, Resolution::Abort { .. }));
        prop_assert_eq!(found.map_or(&[][..], |deadlock| &deadlock.stuck), &never[..]);
        if let Some(Deadlock { cycle, resolution: Resolution::Abort { reservations, .. }, .. }) =
            deadlock
        {
            prop_assert!(!reservations.is_empty());
            for (place, link) in cycle.iter().enumerate() {
                let before = &cycle[(place + cycle.len() - 1) % cycle.len()];
                let wanted = &waiting.iter().find(|waiter| waiter.0 == before.waiter).unwrap().2;
                prop_assert!(!link.holds.is_empty());
                for &id in &link.holds {
                    let record = ledger.reservation(id).unwrap();
                    prop_assert!(record.owner == link.owner && wanted.contains(&record.space));
                }
            }
        }
    }

    /// Owners reserve more and more, then end. Whenever all of them wait there is a resolution, and
    /// with it all owners end.
    #[test]
    fn with_the_way_out_everybody_comes_to_an_end(
        plans in prop::collection::vec(
            prop::collection::vec((1u8..4, 1u64..101, -1i32..2), 1..6), 1..7),
        count in 0u32..3,
        promote_after in prop::option::of(1u32..4),
        choices in prop::collection::vec(any::<u16>(), 200),
    ) {
        let overtaking = Overtaking { count, bytes: b(40) };
        let mut queue = WaitQueue::new(QueueConfig { overtaking, promote_after });
        let mut ledger = ledger();
        let mut plans = plans;
        let mut held: Vec<Vec<ReservationId>> = vec![Vec::new(); plans.len()];
        let mut waits: Vec<Option<WaiterId>> = vec![None; plans.len()];
        let mut live: BTreeSet<usize> = (0..plans.len()).collect();
        let mut choices = choices.into_iter().cycle();
        let mut steps = 0;
        while !live.is_empty() {
            steps += 1;
            prop_assert!(steps < 1000, "it does not end");
            let running = live.iter().copied().filter(|&n| waits[n].is_none());
            let running: Vec<usize> = running.collect();
            let mut grants = Grants::new();
            if running.is_empty() {
                let deadlock = queue.deadlock(&ledger).expect("all wait");
                match deadlock.resolution {
                    Resolution::GrantOutOfOrder(waiter) => {
                        grants = queue.grant_out_of_order(&mut ledger, waiter).unwrap();
                        prop_assert!(who(&grants).contains(&waiter));
                    }
                    Resolution::Abort { owner, waiter, .. } => {
                        let n = owner.0 as usize;
                        prop_assert_eq!(waits[n].take(), Some(waiter));
                        grants.extend(queue.cancel(&mut ledger, waiter).unwrap());
                        live.remove(&n);
                        for id in held[n].drain(..) {
                            ledger.release(id).unwrap();
                        }
                        for space in [GPU, GPU1] {
                            grants.extend(queue.serve_waiters(&mut ledger, space));
                        }
                    }
                }
            } else {
                let n = running[choices.next().unwrap() as usize % running.len()];
                if let Some((bits, bytes, priority)) = plans[n].pop() {
                    let priority = Priority(priority);
                    let request = Request { priority, ..ask(&spaces_of(bits), bytes, n as u64) };
                    match queue.submit(&mut ledger, &request).unwrap() {
                        Submitted::Waiting(id) => waits[n] = Some(id),
                        Submitted::Granted { reservation, others, .. } => {
                            held[n].push(reservation);
                            grants = others;
                        }
                    }
                } else {
                    live.remove(&n);
                    for id in held[n].drain(..) {
                            ledger.release(id).unwrap();
                        }
                    for space in [GPU, GPU1] {
                        grants.extend(queue.serve_waiters(&mut ledger, space));
                    }
                }
            }
            for granted in grants {
                let n = waits.iter().position(|&wait| wait == Some(granted.waiter));
                let n = n.expect("only waiters are served");
                waits[n] = None;
                held[n].push(granted.reservation);
            }
            ledger.audit().unwrap();
        }
        prop_assert_eq!((total(&ledger, GPU), total(&ledger, GPU1)), (0, 0));
        prop_assert!(queue.is_empty());
    }
}

#[test]
fn one_who_spills_is_in_no_deadlock_before_it_gives_that_up() {
    let (mut ledger, mut queue) = (ledger(), WaitQueue::default());
    reserve(&mut ledger, GPU, 80, 1);
    let waiter = wait(&mut queue, &mut ledger, ask(&[GPU], 50, 1));
    assert!(queue.deadlock(&ledger).is_some());
    assert_eq!(queue.claim_deficit(&ledger, GPU, waiter).unwrap(), Some(b(30)));
    assert!(queue.deadlock(&ledger).is_none());
    queue.end_claim(waiter);
    assert!(queue.deadlock(&ledger).is_some());
}
