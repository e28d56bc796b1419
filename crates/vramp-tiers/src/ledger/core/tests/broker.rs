//! The order in which waiters are served, and claims.

use proptest::prelude::*;
use proptest::strategy::Strategy;

use super::*;

fn strict(count: u32, bytes: u64) -> WaitQueue {
    WaitQueue::new(QueueConfig {
        overtaking: Overtaking { count, bytes: b(bytes) },
        promote_after: None,
    })
}

#[test]
fn one_release_serves_all_who_fit_and_nobody_else() {
    let (mut ledger, mut queue) = (ledger(), WaitQueue::default());
    let all = reserve(&mut ledger, GPU, 100, 1);
    let waiters = [40, 30, 50, 30, 1].map(|n| wait(&mut queue, &mut ledger, ask(&[GPU], n, n)));
    ledger.release(all).unwrap();
    let grants = queue.serve_waiters(&mut ledger, GPU);
    assert_eq!(who(&grants), [waiters[0], waiters[1], waiters[3]], "50 do not fit, nor does 1");
    assert_eq!((total(&ledger, GPU), queue.len()), (100, 2));
    assert!(queue.serve_waiters(&mut ledger, GPU).is_empty());
    ledger.release(grants[0].reservation).unwrap();
    let grants = queue.serve_waiters(&mut ledger, GPU);
    assert_eq!(who(&grants), [waiters[4]]);
}

#[test]
fn a_free_or_a_shrink_wakes_like_a_release() {
    let (mut ledger, mut queue) = (ledger(), WaitQueue::default());
    let id = reserve(&mut ledger, GPU, 100, 1);
    let _ = ledger.charge(id, b(60)).unwrap();
    let waiters = [40, 30, 30].map(|n| wait(&mut queue, &mut ledger, ask(&[GPU], n, 2)));
    assert_eq!(ledger.shrink_to_fit(id).unwrap(), b(40));
    assert_eq!(who(&queue.serve_waiters(&mut ledger, GPU)), [waiters[0]]);
    assert_eq!(ledger.release(id).unwrap(), b(0));
    assert_eq!(ledger.uncharge(id, b(30)).unwrap(), b(30));
    assert_eq!(who(&queue.serve_waiters(&mut ledger, GPU)), [waiters[1]]);
    assert_eq!(ledger.uncharge(id, b(30)).unwrap(), b(30));
    assert_eq!(who(&queue.serve_waiters(&mut ledger, GPU)), [waiters[2]]);
    total(&ledger, GPU);
}

#[test]
fn a_waiter_watches_all_its_candidates_and_is_served_once() {
    let (mut ledger, mut queue) = (ledger(), WaitQueue::default());
    let full = [reserve(&mut ledger, GPU, 100, 1), reserve(&mut ledger, GPU1, 100, 1)];
    let waiter = wait(&mut queue, &mut ledger, ask(&[GPU, GPU1], 60, 2));
    ledger.release(full[1]).unwrap();
    let grants = queue.serve_waiters(&mut ledger, GPU1);
    assert_eq!((who(&grants), grants[0].space), (vec![waiter], GPU1));
    ledger.release(full[0]).unwrap();
    assert!(queue.serve_waiters(&mut ledger, GPU).is_empty());
    assert_eq!((total(&ledger, GPU), total(&ledger, GPU1)), (0, 60));
}

#[test]
fn the_first_candidate_that_fits_is_taken_in_order_of_preference() {
    let (mut ledger, mut queue) = (ledger(), WaitQueue::default());
    reserve(&mut ledger, GPU1, 50, 1);
    let (_, space) = serve(&mut queue, &mut ledger, ask(&[GPU1, GPU, HOST], 60, 2));
    assert_eq!(space, GPU);
    let (_, space) = serve(&mut queue, &mut ledger, ask(&[GPU1, GPU, HOST], 600, 2));
    assert_eq!(space, HOST, "the GPUs are too small for it");
}

#[test]
fn priority_goes_first_and_age_decides_among_equals() {
    let (mut ledger, mut queue) = (ledger(), WaitQueue::default());
    let all = reserve(&mut ledger, GPU, 100, 1);
    let waiters = [0, 5, 0, 5].map(|priority| {
        let request = Request { priority: Priority(priority), ..ask(&[GPU], 25, 2) };
        wait(&mut queue, &mut ledger, request)
    });
    let order: Vec<WaiterId> = queue.waiting().map(|(id, _)| id).collect();
    let expected = [1, 3, 0, 2].map(|place: usize| waiters[place]);
    assert_eq!(order, expected);
    ledger.release(all).unwrap();
    assert_eq!(who(&queue.serve_waiters(&mut ledger, GPU)), expected);
}

#[test]
fn a_small_one_overtakes_only_so_often() {
    let (mut ledger, mut queue) = (ledger(), strict(2, 100));
    let half = reserve(&mut ledger, GPU, 50, 1);
    let big = wait(&mut queue, &mut ledger, ask(&[GPU], 60, 2));
    let (first, _) = serve(&mut queue, &mut ledger, ask(&[GPU], 1, 3));
    let _ = serve(&mut queue, &mut ledger, ask(&[GPU], 1, 3));
    let third = wait(&mut queue, &mut ledger, ask(&[GPU], 1, 3));
    ledger.release(first).unwrap();
    assert!(
        queue.serve_waiters(&mut ledger, GPU).is_empty(),
        "the order keeps the room for the big one"
    );
    let error = queue.submit_now(&mut ledger, &ask(&[GPU], 1, 3)).unwrap_err();
    assert!(matches!(error, SubmitError::NotNow { waiting: 2, .. }), "{error}");
    let _ = serve(&mut queue, &mut ledger, ask(&[GPU1], 1, 3));
    ledger.release(half).unwrap();
    assert_eq!(who(&queue.serve_waiters(&mut ledger, GPU)), [big, third]);
}

#[test]
fn small_ones_overtake_only_by_so_many_bytes() {
    let (mut ledger, mut queue) = (ledger(), strict(100, 20));
    reserve(&mut ledger, GPU, 50, 1);
    wait(&mut queue, &mut ledger, ask(&[GPU], 60, 2));
    let _ = serve(&mut queue, &mut ledger, ask(&[GPU], 15, 3));
    wait(&mut queue, &mut ledger, ask(&[GPU], 6, 3));
    let _ = serve(&mut queue, &mut ledger, ask(&[GPU], 5, 3));
    wait(&mut queue, &mut ledger, ask(&[GPU], 1, 3));
}

#[test]
fn whoever_was_kept_back_is_served_when_the_one_ahead_leaves() {
    for leaves_with_others in [false, true] {
        let (mut ledger, mut queue) = (ledger(), strict(0, 0));
        reserve(&mut ledger, GPU, 50, 1);
        let big = wait(&mut queue, &mut ledger, ask(&[GPU], 60, 2));
        let small = wait(&mut queue, &mut ledger, ask(&[GPU], 1, 3));
        let grants = if leaves_with_others {
            let other = wait(&mut queue, &mut ledger, ask(&[GPU], 60, 4));
            assert!(queue.leave(&mut ledger, &[]).is_empty());
            queue.leave(&mut ledger, &[big, other])
        } else {
            queue.cancel(&mut ledger, big).unwrap()
        };
        assert_eq!(who(&grants), [small]);
        assert_eq!(queue.cancel(&mut ledger, big), Err(UnknownWaiter { waiter: big }));
        assert!(queue.is_empty());
    }
}

#[test]
fn a_waiter_passed_too_often_by_higher_priorities_becomes_urgent() {
    let (mut ledger, config) =
        (ledger(), QueueConfig { promote_after: Some(3), ..QueueConfig::default() });
    let mut queue = WaitQueue::new(config);
    let mut held = reserve(&mut ledger, GPU, 100, 1);
    let low = wait(&mut queue, &mut ledger, ask(&[GPU], 100, 2));
    for round in 0..5 {
        let request = Request { priority: Priority(9), ..ask(&[GPU], 100, 3) };
        let high = wait(&mut queue, &mut ledger, request);
        ledger.release(held).unwrap();
        let grants = queue.serve_waiters(&mut ledger, GPU);
        if round == 3 {
            assert_eq!(who(&grants), [low]);
            return;
        }
        assert_eq!(who(&grants), [high]);
        held = grants[0].reservation;
    }
    panic!("it starves");
}

#[test]
fn a_grant_that_makes_a_waiter_urgent_serves_it_at_once_if_it_fits() {
    let config =
        QueueConfig { overtaking: Overtaking { count: 0, bytes: b(0) }, promote_after: Some(1) };
    let (mut ledger, mut queue) = (ledger(), WaitQueue::new(config));
    reserve(&mut ledger, GPU, 50, 1);
    let held = reserve(&mut ledger, GPU1, 100, 1);
    let high = |priority| Priority(priority);
    wait(&mut queue, &mut ledger, Request { priority: high(1), ..ask(&[GPU], 60, 2) });
    let low = wait(&mut queue, &mut ledger, ask(&[GPU, GPU1], 50, 3));
    ledger.shrink_to_fit(held).unwrap();
    let grown = ledger.reserve(GPU1, b(60), Owner(1), Tag::NONE).unwrap();
    assert!(
        queue.serve_waiters(&mut ledger, GPU1).is_empty(),
        "kept out of the first GPU by the order"
    );
    let request = Request { priority: high(2), ..ask(&[GPU1], 40, 4) };
    let Ok(Submitted::Granted { space, others, .. }) = queue.submit(&mut ledger, &request) else {
        panic!("no waiter of its priority waits for the second GPU")
    };
    assert_eq!((space, who(&others), others[0].space), (GPU1, vec![low], GPU));
    ledger.release(grown).unwrap();
    total(&ledger, GPU1);
}

#[test]
fn one_that_keeps_bytes_waits_behind_others_and_needs_no_room_as_the_first() {
    let (mut ledger, mut queue) = (ledger(), strict(2, 100));
    reserve(&mut ledger, GPU, 70, 1);
    let keeping = |kept, owner| Request { kept: b(kept), ..ask(&[GPU], 0, owner) };
    let _ = serve(&mut queue, &mut ledger, keeping(70, 2));
    let large = wait(&mut queue, &mut ledger, ask(&[GPU], 40, 3));
    // Two pass where as many bytes are free, and then none.
    let _ = serve(&mut queue, &mut ledger, keeping(30, 4));
    let [one, two] = [31, 30].map(|kept| {
        let waiter = queue.submit(&mut ledger, &keeping(kept, 5)).unwrap();
        matches!(waiter, Submitted::Waiting(_)).then_some(waiter)
    });
    assert!(one.is_some() && two.is_none());
    let last = wait(&mut queue, &mut ledger, keeping(1, 6));
    assert!(queue.has_waiters(GPU));
    queue.audit().unwrap();
    let served = who(&queue.cancel(&mut ledger, large).unwrap());
    assert_eq!((served.len(), served.last(), total(&ledger, GPU)), (2, Some(&last), 70));
    assert!(queue.is_empty() && !queue.has_waiters(GPU));
    queue.audit().unwrap();
}

#[test]
fn what_can_never_fit_is_refused_at_once_with_the_limits() {
    let (mut ledger, mut queue) = (ledger(), WaitQueue::default());
    let error = queue.submit(&mut ledger, &ask(&[GPU, HOST], 1001, 1)).unwrap_err();
    assert!(error.to_string().contains("gpu0 100 B, host0 1000 B"), "{error}");
    let error = queue.submit(&mut ledger, &ask(&[], 1, 1)).unwrap_err();
    assert_eq!(error, SubmitError::NoCandidates);
    let error = queue.submit(&mut ledger, &ask(&[GPU, DISK], 1, 1)).unwrap_err();
    assert_eq!(error, UnknownSpace { space: DISK }.into());
    let bad_tag = Request { tag: Tag(7), ..ask(&[GPU], 1, 1) };
    assert!(matches!(queue.submit(&mut ledger, &bad_tag), Err(SubmitError::UnknownTag(_))));
    assert!(queue.is_empty());
}

#[test]
fn shutdown_ends_every_wait_and_afterwards_nobody_waits() {
    let (mut ledger, mut queue) = (ledger(), WaitQueue::default());
    let all = reserve(&mut ledger, GPU, 100, 1);
    let waiters: Vec<WaiterId> =
        (0..1000).map(|_| wait(&mut queue, &mut ledger, ask(&[GPU], 10, 2))).collect();
    assert_eq!(queue.shutdown(), waiters);
    assert!(queue.shutdown().is_empty() && queue.is_shut_down());
    let error = queue.submit(&mut ledger, &ask(&[GPU], 1, 2)).unwrap_err();
    assert_eq!(error, SubmitError::ShutDown { bytes: b(1) });
    ledger.release(all).unwrap();
    assert!(queue.serve_waiters(&mut ledger, GPU).is_empty());
    let _ = serve(&mut queue, &mut ledger, ask(&[GPU], 1, 2));
}

#[test]
fn no_two_waiters_spill_for_one_deficit() {
    let (mut ledger, mut queue) = (ledger(), WaitQueue::default());
    let holder = reserve(&mut ledger, GPU, 95, 1);
    let [one, two] = [50, 30].map(|n| wait(&mut queue, &mut ledger, ask(&[GPU], n, n)));
    assert_eq!(queue.claim_deficit(&ledger, GPU, one).unwrap(), Some(b(45)));
    assert_eq!(queue.claim_deficit(&ledger, GPU, one).unwrap(), None, "it has an unfinished claim");
    assert_eq!(queue.claim_deficit(&ledger, GPU, two).unwrap(), Some(b(30)));
    assert_eq!(queue.claim_deficit(&ledger, GPU1, two).unwrap(), None, "not where it waits");
    let part = ledger.split(holder, b(30)).unwrap();
    ledger.release(part).unwrap();
    assert_eq!(who(&queue.serve_waiters(&mut ledger, GPU)), [two], "it overtakes");
    assert_eq!(queue.claim_left(&ledger, one).unwrap(), b(15), "the other claim is in progress");
    assert!(queue.reduce_claim(&ledger, two, b(0)).is_err(), "it has left the queue");
    assert_eq!(queue.claim_left(&ledger, one).unwrap(), b(45));
    ledger.release(holder).unwrap();
    assert_eq!(who(&queue.serve_waiters(&mut ledger, GPU)), [one]);
}

#[test]
fn a_claim_shrinks_when_memory_comes_from_elsewhere_and_can_be_renewed() {
    let (mut ledger, mut queue) = (ledger(), strict(9, 100));
    let [a, other] = [60, 40].map(|n| reserve(&mut ledger, GPU, n, n));
    let waiter = wait(&mut queue, &mut ledger, ask(&[GPU], 80, 1));
    assert_eq!(queue.claim_deficit(&ledger, GPU, waiter).unwrap(), Some(b(80)));
    let step = ledger.split(a, b(10)).unwrap();
    ledger.release(step).unwrap();
    assert_eq!(queue.reduce_claim(&ledger, waiter, b(10)).unwrap(), b(70));
    ledger.release(other).unwrap();
    assert_eq!(queue.reduce_claim(&ledger, waiter, b(0)).unwrap(), b(30));
    let (small, _) = serve(&mut queue, &mut ledger, ask(&[GPU], 20, 3));
    let step = ledger.split(a, b(30)).unwrap();
    ledger.release(step).unwrap();
    assert_eq!(queue.reduce_claim(&ledger, waiter, b(30)).unwrap(), b(0));
    assert!(queue.serve_waiters(&mut ledger, GPU).is_empty(), "the small one took 20 of it");
    assert_eq!(queue.claim_deficit(&ledger, GPU, waiter).unwrap(), Some(b(20)));
    ledger.release(small).unwrap();
    assert_eq!(who(&queue.serve_waiters(&mut ledger, GPU)), [waiter]);
}

#[test]
fn a_reservation_that_grows_passes_waiters_only_to_the_bound() {
    let (mut ledger, mut queue) = (ledger(), strict(2, 30));
    let rest = reserve(&mut ledger, GPU, 50, 1);
    let grows = reserve(&mut ledger, GPU, 10, 2);
    let large = wait(&mut queue, &mut ledger, ask(&[GPU], 60, 3));
    assert!(queue.grow(&mut ledger, grows, b(10), Priority(0)).unwrap().is_empty());
    let error = queue.grow(&mut ledger, grows, b(21), Priority(0)).unwrap_err();
    assert_eq!(error, GrowError::Behind { id: grows, by: b(21), waiting: 1 });
    assert!(queue.grow(&mut ledger, grows, b(5), Priority(0)).unwrap().is_empty());
    assert!(queue.grow(&mut ledger, grows, b(1), Priority(0)).is_err(), "it was passed twice");
    let error = queue.grow(&mut ledger, grows, b(90), Priority(0)).unwrap_err();
    assert!(matches!(error, GrowError::Refused(_)), "{error}");
    // Bytes that it uses beyond its size are charged already.
    let _ = ledger.charge_by(grows, b(30), LimitPolicy::Ignore).unwrap();
    assert!(queue.grow(&mut ledger, grows, b(5), Priority(0)).unwrap().is_empty());
    ledger.release(rest).unwrap();
    assert_eq!(who(&queue.serve_waiters(&mut ledger, GPU)), [large]);
    queue.audit().unwrap();
}

#[test]
fn what_is_allocated_beyond_a_reservation_does_not_queue() {
    let (mut ledger, mut queue) = (ledger(), strict(0, 0));
    let works = reserve(&mut ledger, GPU, 60, 1);
    let waiter = wait(&mut queue, &mut ledger, ask(&[GPU], 50, 2));
    // If it had to queue, it would keep its 60 bytes while it waits.
    let factor = GrowthFactor::new(1.0).unwrap();
    let policy = LimitPolicy::Increase { factor, beyond_limit: false };
    assert_eq!(
        ledger.charge_by(works, b(70), policy).unwrap(),
        OverrunOutcome::Grown { by: b(10) }
    );
    assert!(ledger.charge_unreserved(GPU, b(10), Tag::NONE).is_ok());
    assert!(queue.serve_waiters(&mut ledger, GPU).is_empty());
    assert_eq!(ledger.uncharge(works, b(70)).unwrap(), b(0));
    assert_eq!(ledger.release(works).unwrap(), b(70));
    assert_eq!(who(&queue.serve_waiters(&mut ledger, GPU)), [waiter]);
}

#[test]
fn one_served_in_the_midst_of_spilling_is_still_counted_on() {
    let (mut ledger, mut queue) = (ledger(), WaitQueue::default());
    let holder = reserve(&mut ledger, GPU, 100, 1);
    let [one, two] = [12, 5].map(|n| wait(&mut queue, &mut ledger, ask(&[GPU], n, n)));
    assert_eq!(queue.claim_deficit(&ledger, GPU, one).unwrap(), Some(b(12)));
    assert_eq!(queue.claim_deficit(&ledger, GPU, two).unwrap(), Some(b(5)));
    // The first spills all it claimed; the second overtakes it with the first step.
    for bytes in [5, 7] {
        let step = ledger.split(holder, b(bytes)).unwrap();
        ledger.release(step).unwrap();
        let served = who(&queue.serve_waiters(&mut ledger, GPU));
        assert_eq!(served, if bytes == 5 { vec![two] } else { vec![] });
    }
    assert_eq!(queue.reduce_claim(&ledger, one, b(5)).unwrap(), b(0));
    queue.end_claim(one);
    assert_eq!(queue.claim_deficit(&ledger, GPU, one).unwrap(), None, "the rest is claimed");
    let step = ledger.split(holder, b(5)).unwrap();
    ledger.release(step).unwrap();
    assert_eq!(who(&queue.serve_waiters(&mut ledger, GPU)), [one]);
    assert!(queue.deadlock(&ledger).is_none());
}

#[test]
fn a_waiter_that_leaves_between_two_steps_leaves_no_claim() {
    for in_step in [false, true] {
        let (mut ledger, mut queue) = (ledger(), WaitQueue::default());
        let _holder = reserve(&mut ledger, GPU, 90, 1);
        let [one, two] = [32, 48].map(|n| wait(&mut queue, &mut ledger, ask(&[GPU], n, n)));
        assert_eq!(queue.claim_deficit(&ledger, GPU, two).unwrap(), Some(b(38)));
        if !in_step {
            queue.end_step(two);
        }
        assert!(queue.cancel(&mut ledger, two).unwrap().is_empty());
        queue.audit().unwrap();
        // What a step frees will serve the other; nothing is freed where none is in progress.
        let lacks = if in_step { None } else { Some(b(22)) };
        assert_eq!(queue.claim_deficit(&ledger, GPU, one).unwrap(), lacks);
        queue.end_step(two);
        assert_eq!(queue.renew_claim(&ledger, GPU, one).unwrap(), Some(b(22)), "{in_step}");
    }
}

// --- The queue against a naive twin that starts over after every grant, and bounds that hold for every
// waiter ---

#[derive(Clone, Debug)]
enum Act {
    Submit {
        spaces: u8,
        bytes: u64,
        kept: u64,
        priority: i32,
        deadline: Option<u64>,
    },
    /// The same for one that had a place before.
    Return {
        age: u64,
        spaces: u8,
        bytes: u64,
    },
    Release {
        which: usize,
    },
    Grow {
        which: usize,
        by: u64,
    },
    Cancel {
        which: usize,
    },
    Expire {
        after: u64,
    },
}

fn act() -> impl Strategy<Value = Act> {
    let deadline = prop::option::weighted(0.2, 1u64..9);
    prop_oneof![
        6 => (1u8..4, 1u64..101, 0u64..100, 0i32..3, deadline).prop_map(
            |(spaces, bytes, kept, priority, deadline)| {
                // Mostly small ones, some that need all, and some that keep bytes.
                let bytes = if bytes > 85 { bytes } else { bytes / 4 + 1 };
                let kept = kept.saturating_sub(75);
                let bytes = if kept % 2 == 1 { 0 } else { bytes };
                Act::Submit { spaces, bytes, kept, priority, deadline }
            }
        ),
        1 => (0u64..150, 1u8..4, 1u64..60).prop_map(|(age, spaces, bytes)| {
            Act::Return { age, spaces, bytes }
        }),
        5 => (0usize..64).prop_map(|which| Act::Release { which }),
        2 => (0usize..64, 0u64..60).prop_map(|(which, by)| Act::Grow { which, by: by / 4 }),
        1 => (0usize..64).prop_map(|which| Act::Cancel { which }),
        1 => (0u64..4).prop_map(|after| Act::Expire { after }),
    ]
}

/// One waiter of the twin.
#[derive(Clone, Debug)]
struct Twin {
    age: u64,
    spaces: Vec<SpaceId>,
    bytes: u64,
    kept: u64,
    priority: i32,
    deadline: Option<u64>,
    urgent: bool,
    passed: u32,
    overtaken: u32,
    overtaken_bytes: u64,
    /// All grants to younger ones in a space it waits for.
    younger: u32,
}

impl Twin {
    fn new(
        age: u64,
        spaces: Vec<SpaceId>,
        (bytes, kept): (u64, u64),
        priority: i32,
        deadline: Option<u64>,
    ) -> Twin {
        Twin {
            age,
            spaces,
            bytes,
            kept,
            priority,
            deadline,
            urgent: false,
            passed: 0,
            overtaken: 0,
            overtaken_bytes: 0,
            younger: 0,
        }
    }
}

struct Naive {
    config: QueueConfig,
    waiting: Vec<Twin>,
    /// What is taken of each card.
    taken: [u64; 2],
}

fn card(space: SpaceId) -> usize {
    space.index as usize
}

impl Naive {
    fn before(one: &Twin, other: &Twin) -> bool {
        let rank =
            |twin: &Twin| (!twin.urgent, if twin.urgent { 0 } else { -twin.priority }, twin.age);
        rank(one) < rank(other)
    }

    fn place_for(&self, twin: &Twin) -> Option<SpaceId> {
        let takes = twin.bytes + twin.kept;
        let allowed = |space: SpaceId| {
            self.waiting
                .iter()
                .filter(|ahead| Naive::before(ahead, twin) && ahead.spaces.contains(&space))
                .all(|ahead| {
                    ahead.overtaken < self.config.overtaking.count
                        && ahead.overtaken_bytes.saturating_add(takes)
                            <= self.config.overtaking.bytes.count()
                        && self.taken[card(space)] + takes <= 100
                })
        };
        let fits = |space: SpaceId| self.taken[card(space)] + twin.bytes <= 100;
        twin.spaces.iter().copied().find(|&space| fits(space) && allowed(space))
    }

    /// Serves the waiter, which has been taken out of the list.
    fn serve(&mut self, twin: &Twin, space: SpaceId) {
        self.taken[card(space)] += twin.bytes;
        let mut urgent = Vec::new();
        for (place, other) in self.waiting.iter_mut().enumerate() {
            if !other.spaces.contains(&space) {
                continue;
            }
            other.younger += u32::from(other.age < twin.age);
            if Naive::before(other, twin) {
                other.overtaken += 1;
                other.overtaken_bytes += twin.bytes + twin.kept;
            } else if other.age < twin.age {
                other.passed += 1;
                if self
                    .config
                    .promote_after
                    .is_some_and(|promote_after| other.passed >= promote_after)
                {
                    urgent.push(place);
                }
            }
        }
        urgent.into_iter().for_each(|place| self.waiting[place].urgent = true);
    }

    /// Serves the first who can be, again and again.
    fn settle(&mut self) -> Vec<(u64, SpaceId)> {
        let mut served = Vec::new();
        loop {
            let mut order: Vec<usize> = (0..self.waiting.len()).collect();
            order.sort_by(|&one, &other| {
                let before = Naive::before(&self.waiting[one], &self.waiting[other]);
                if before { std::cmp::Ordering::Less } else { std::cmp::Ordering::Greater }
            });
            let next = order.into_iter().find_map(|n| Some((n, self.place_for(&self.waiting[n])?)));
            let Some((place, space)) = next else { return served };
            let twin = self.waiting.remove(place);
            self.serve(&twin, space);
            served.push((twin.age, space));
        }
    }

    /// True if the grants to younger requests are within their bounds for every waiter.
    fn no_waiter_starves(&self) -> bool {
        let Some(promote_after) = self.config.promote_after else { return true };
        let most = self.config.overtaking.count + promote_after;
        self.waiting.iter().all(|twin| {
            twin.younger <= most
                && twin.overtaken <= self.config.overtaking.count
                && twin.overtaken_bytes <= self.config.overtaking.bytes.count()
        })
    }
}

fn pairs(grants: &[Granted]) -> Vec<(u64, SpaceId)> {
    grants.iter().map(|granted| (granted.waiter.number(), granted.space)).collect()
}

type Checked = Result<Grants, TestCaseError>;

/// The queue and its twin, with one function for each act. Each returns the grants that follow.
struct Model {
    ledger: Ledger,
    queue: WaitQueue,
    naive: Naive,
    held: Vec<(ReservationId, SpaceId, u64)>,
    now: u64,
    /// Age of the next request.
    age: u64,
}

impl Model {
    fn new(config: QueueConfig) -> Model {
        Model {
            ledger: ledger(),
            queue: WaitQueue::new(config),
            naive: Naive { config, waiting: Vec::new(), taken: [0, 0] },
            held: Vec::new(),
            now: 0,
            age: 0,
        }
    }

    fn act(&mut self, act: Act) -> Checked {
        match act {
            Act::Submit { spaces, bytes, kept, priority, deadline } => {
                self.submit(spaces, (bytes, kept), priority, deadline, None)
            }
            Act::Return { age, spaces, bytes } => {
                self.submit(spaces, (bytes, 0), 1, None, Some(age % (self.age + 1)))
            }
            Act::Release { which } if !self.held.is_empty() => self.release(which),
            Act::Grow { which, by } if !self.held.is_empty() => self.grow(which, by),
            Act::Cancel { which } if !self.naive.waiting.is_empty() => self.cancel(which),
            Act::Expire { after } => self.expire(after),
            Act::Release { .. } | Act::Grow { .. } | Act::Cancel { .. } => Ok(Grants::new()),
        }
    }

    fn submit(
        &mut self,
        spaces: u8,
        (bytes, kept): (u64, u64),
        priority: i32,
        deadline: Option<u64>,
        place_before: Option<u64>,
    ) -> Checked {
        let spaces: Vec<SpaceId> =
            [GPU1, GPU].into_iter().filter(|s| spaces >> s.index & 1 == 1).collect();
        let deadline = deadline.map(|after| self.now + after);
        let is_taken = |&age: &u64| self.naive.waiting.iter().any(|twin| twin.age == age);
        let age = place_before.filter(|age| !is_taken(age)).unwrap_or(self.age);
        let twin = Twin::new(age, spaces.clone(), (bytes, kept), priority, deadline);
        let place = self.naive.place_for(&twin);
        let before = place_before.map(WaiterId);
        let (priority, kept, asked) = (Priority(priority), b(kept), ask(&spaces, bytes, self.age));
        let request = Request { priority, kept, place: before, ..asked };
        self.age += 1;
        match self.queue.submit(&mut self.ledger, &request).unwrap() {
            Submitted::Waiting(id) => {
                prop_assert_eq!((id.number(), place), (twin.age, None));
                self.naive.waiting.push(twin);
                Ok(Grants::new())
            }
            Submitted::Granted { reservation, space, others } => {
                prop_assert_eq!(place, Some(space));
                self.naive.serve(&twin, space);
                self.held.push((reservation, space, bytes));
                Ok(others)
            }
        }
    }

    fn release(&mut self, which: usize) -> Checked {
        let (id, space, bytes) = self.held.swap_remove(which % self.held.len());
        prop_assert_eq!(self.ledger.release(id).unwrap(), b(bytes));
        self.naive.taken[card(space)] -= bytes;
        Ok(self.queue.serve_waiters(&mut self.ledger, space))
    }

    fn grow(&mut self, which: usize, by: u64) -> Checked {
        let place = which % self.held.len();
        let (id, space, bytes) = self.held[place];
        let twin = Twin::new(self.age, vec![space], (by, 0), 0, None);
        // A growth by nothing takes no memory. Any other counts as a request while others wait.
        let can = by == 0 || self.naive.place_for(&twin).is_some();
        let counts = by > 0 && can && !self.naive.waiting.is_empty();
        let grown = self.queue.grow(&mut self.ledger, id, b(by), Priority(0));
        prop_assert_eq!(grown.is_ok(), can);
        if counts {
            self.age += 1;
            self.naive.serve(&twin, space);
        } else if can {
            self.naive.taken[card(space)] += by;
        }
        if can {
            self.held[place].2 = bytes + by;
        }
        Ok(grown.unwrap_or_default())
    }

    fn cancel(&mut self, which: usize) -> Checked {
        let twin = self.naive.waiting.remove(which % self.naive.waiting.len());
        let id = self.queue.waiting().map(|(id, _)| id).find(|id| id.number() == twin.age);
        Ok(self.queue.cancel(&mut self.ledger, id.unwrap()).unwrap())
    }

    fn expire(&mut self, after: u64) -> Checked {
        self.now += after;
        let now = self.now;
        let late = |twin: &Twin| twin.deadline.is_some_and(|deadline| deadline <= now);
        let gone: Vec<u64> = self.naive.waiting.iter().filter(|t| late(t)).map(|t| t.age).collect();
        self.naive.waiting.retain(|twin| !late(twin));
        let waiting = self.queue.waiting().map(|(id, _)| id);
        let gone: Vec<WaiterId> = waiting.filter(|id| gone.contains(&id.number())).collect();
        Ok(self.queue.leave(&mut self.ledger, &gone))
    }

    /// Compares the grants with the twin's, and both states.
    fn compare(&mut self, grants: &Grants) -> Result<(), TestCaseError> {
        prop_assert_eq!(pairs(grants), self.naive.settle());
        for granted in grants {
            let bytes = self.ledger.reservation(granted.reservation).unwrap().size.count();
            self.held.push((granted.reservation, granted.space, bytes));
        }
        prop_assert!(self.naive.no_waiter_starves());
        self.queue.audit().unwrap();
        prop_assert_eq!(self.queue.len(), self.naive.waiting.len());
        for space in [GPU, GPU1] {
            prop_assert_eq!(total(&self.ledger, space), self.naive.taken[card(space)]);
        }
        Ok(())
    }
}

fn run(config: QueueConfig, acts: Vec<Act>) -> Result<(), TestCaseError> {
    let mut model = Model::new(config);
    for act in acts {
        let grants = model.act(act)?;
        model.compare(&grants)?;
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(vramp_testing::cases(100)))]

    #[test]
    fn exactly_those_are_served_whom_the_naive_twin_serves_and_nobody_starves(
        acts in prop::collection::vec(act(), 1..150),
        count in 0u32..5,
        bytes in prop_oneof![Just(0u64), 1u64..120, Just(u64::MAX)],
        promote_after in prop::option::weighted(0.8, 1u32..5),
    ) {
        let overtaking = Overtaking { count, bytes: b(bytes) };
        run(QueueConfig { overtaking, promote_after }, acts)?;
    }

    #[test]
    fn claims_add_up_to_what_is_missing(
        free in 0u64..101,
        wishes in prop::collection::vec(1u64..101, 1..8),
    ) {
        let (mut ledger, mut queue) = (ledger(), WaitQueue::default());
        reserve(&mut ledger, GPU, 100 - free, 99);
        let mut queued = Vec::new();
        for (owner, bytes) in wishes.into_iter().enumerate() {
            let request = ask(&[GPU], bytes, owner as u64);
            match queue.submit(&mut ledger, &request).unwrap() {
                Submitted::Waiting(id) => queued.push((id, bytes)),
                Submitted::Granted { .. } => {}
            }
        }
        let available = ledger.available(GPU, Bound::Limit).unwrap().count();
        let wanted: u64 = queued.iter().map(|&(_, bytes)| bytes).sum();
        let claimed: u64 = queued
            .iter()
            .filter_map(|&(id, _)| queue.claim_deficit(&ledger, GPU, id).unwrap())
            .map(Bytes::count)
            .sum();
        prop_assert_eq!(claimed, wanted.saturating_sub(available));
    }
}
