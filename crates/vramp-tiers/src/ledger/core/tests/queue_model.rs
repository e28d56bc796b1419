//! The queue against a naive twin that starts over after every grant, and bounds that hold for
//! every waiter.

use proptest::prelude::*;
use proptest::strategy::Strategy;

use super::*;

#[derive(Clone, Debug)]
enum Act {
    Submit { spaces: u8, bytes: u64, priority: i32, deadline: Option<u64> },
    Release { which: usize },
    Grow { which: usize, by: u64 },
    Cancel { which: usize },
    Expire { after: u64 },
}

fn act() -> impl Strategy<Value = Act> {
    let deadline = prop::option::weighted(0.2, 1u64..9);
    prop_oneof![
        6 => (1u8..4, 1u64..101, 0i32..3, deadline).prop_map(|(spaces, bytes, priority, deadline)| {
            // Mostly small ones, some that need all.
            let bytes = if bytes > 85 { bytes } else { bytes / 4 + 1 };
            Act::Submit { spaces, bytes, priority, deadline }
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
        bytes: u64,
        priority: i32,
        deadline: Option<u64>,
    ) -> Twin {
        Twin {
            age,
            spaces,
            bytes,
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
        let allowed = |space: SpaceId| {
            self.waiting
                .iter()
                .filter(|ahead| Naive::before(ahead, twin) && ahead.spaces.contains(&space))
                .all(|ahead| {
                    ahead.overtaken < self.config.overtaking.count
                        && ahead.overtaken_bytes.saturating_add(twin.bytes)
                            <= self.config.overtaking.bytes.count()
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
                other.overtaken_bytes += twin.bytes;
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
            Act::Submit { spaces, bytes, priority, deadline } => {
                self.submit(spaces, bytes, priority, deadline)
            }
            Act::Release { which } if !self.held.is_empty() => self.release(which),
            Act::Grow { which, by } if !self.held.is_empty() => self.grow(which, by),
            Act::Cancel { which } if !self.naive.waiting.is_empty() => self.cancel(which),
            Act::Expire { after } => self.expire(after),
            Act::Release { .. } | Act::Grow { .. } | Act::Cancel { .. } => Ok(Grants::new()),
        }
    }

    fn submit(&mut self, spaces: u8, bytes: u64, priority: i32, deadline: Option<u64>) -> Checked {
        let spaces: Vec<SpaceId> =
            [GPU1, GPU].into_iter().filter(|s| spaces >> s.index & 1 == 1).collect();
        let deadline = deadline.map(|after| self.now + after);
        let twin = Twin::new(self.age, spaces.clone(), bytes, priority, deadline);
        let place = self.naive.place_for(&twin);
        let priority = Priority(priority);
        let request = Request { priority, ..ask(&spaces, bytes, self.age) };
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
        let twin = Twin::new(self.age, vec![space], by, 0, None);
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
