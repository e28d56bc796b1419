//! The ledger against a naive twin: a list of reservations that is summed after every step.

use proptest::prelude::*;
use proptest::strategy::Strategy;

use super::*;

const GRANULE: u64 = 4;
const CAPACITY: u64 = 240;
const LIMIT: u64 = 200;
/// Three quarters of the limit, in whole granules.
const TRIGGER: u64 = 148;
const STOP: u64 = 100;

#[derive(Clone, Debug)]
enum Act {
    Reserve { bytes: u64, tag: u32 },
    UpTo { min: u64, more: u64 },
    Grow { which: usize, by: u64 },
    Shrink { which: usize },
    Split { which: usize, bytes: u64 },
    Merge { into: usize, from: usize },
    Release { which: usize },
    Charge { which: usize, bytes: u64, policy: Policy },
    Uncharge { which: usize, bytes: u64 },
    Unreserved { bytes: u64, tag: u32 },
    FreeUnreserved { bytes: u64, tag: u32 },
}

#[derive(Clone, Copy, Debug)]
enum Policy {
    Fail,
    Ignore,
    Increase { beyond_limit: bool },
}

fn act() -> impl Strategy<Value = Act> {
    let policy = prop_oneof![
        Just(Policy::Fail),
        Just(Policy::Ignore),
        any::<bool>().prop_map(|beyond_limit| Policy::Increase { beyond_limit }),
    ];
    let which = || 0usize..16;
    prop_oneof![
        3 => (0u64..120, 0u32..3).prop_map(|(bytes, tag)| Act::Reserve { bytes, tag }),
        1 => (0u64..60, 0u64..120).prop_map(|(min, more)| Act::UpTo { min, more }),
        1 => (which(), 0u64..60).prop_map(|(which, by)| Act::Grow { which, by }),
        1 => which().prop_map(|which| Act::Shrink { which }),
        1 => (which(), 0u64..60).prop_map(|(which, bytes)| Act::Split { which, bytes }),
        1 => (which(), which()).prop_map(|(into, from)| Act::Merge { into, from }),
        2 => which().prop_map(|which| Act::Release { which }),
        5 => (which(), 0u64..60, policy)
            .prop_map(|(which, bytes, policy)| Act::Charge { which, bytes, policy }),
        4 => (which(), 0u64..60).prop_map(|(which, bytes)| Act::Uncharge { which, bytes }),
        1 => (0u64..60, 0u32..3).prop_map(|(bytes, tag)| Act::Unreserved { bytes, tag }),
        1 => (0u64..60, 0u32..3).prop_map(|(bytes, tag)| Act::FreeUnreserved { bytes, tag }),
    ]
}

#[derive(Clone, Debug)]
struct Twin {
    id: ReservationId,
    tag: u32,
    size: u64,
    used: u64,
    released: bool,
}

impl Twin {
    fn new(id: ReservationId, tag: u32, size: u64) -> Twin {
        Twin { id, tag, size, used: 0, released: false }
    }
}

#[derive(Clone, Debug, Default)]
struct Naive {
    all: Vec<Twin>,
    unreserved: [u64; 3],
    peak: u64,
    crossings: Vec<Crossing>,
}

fn up(bytes: u64) -> u64 {
    bytes.next_multiple_of(GRANULE)
}

impl Naive {
    fn charged(&self, tag: u32) -> u64 {
        let of_tag = self.all.iter().filter(|twin| twin.tag == tag);
        of_tag.map(|twin| twin.size.max(twin.used)).sum::<u64>() + self.unreserved[tag as usize]
    }

    fn total(&self) -> u64 {
        (0..3).map(|tag| self.charged(tag)).sum()
    }

    fn reserved(&self) -> u64 {
        self.all.iter().map(|twin| twin.size).sum()
    }

    /// Charges an allocation by a policy. False, and nothing changed, if that is refused.
    fn charge(&mut self, at: usize, bytes: u64, policy: Policy) -> bool {
        let twin = &self.all[at];
        let missing = (twin.used + up(bytes)).saturating_sub(twin.size);
        if twin.released {
            return false;
        }
        if missing == 0 || bytes == 0 {
            self.all[at].used += up(bytes);
            return true;
        }
        let padded = up((missing as f64 * 1.25).ceil() as u64);
        match policy {
            Policy::Fail => false,
            Policy::Ignore => {
                let mut after = self.clone();
                after.all[at].used += up(bytes);
                let fits = after.total() <= CAPACITY;
                if fits {
                    *self = after;
                }
                fits
            }
            Policy::Increase { beyond_limit } => {
                let bound = if beyond_limit { CAPACITY } else { LIMIT };
                let mut grow = |by: u64| {
                    self.total() <= bound
                        && self.bounded(bound, |after| {
                            after.all[at].size += by;
                            after.all[at].used += up(bytes);
                        })
                };
                grow(padded) || grow(missing)
            }
        }
    }

    /// Makes the change if the totals stay below the bound.
    fn bounded(&mut self, bound: u64, change: impl FnOnce(&mut Naive)) -> bool {
        let mut after = self.clone();
        change(&mut after);
        let fits = after.total() <= bound.max(self.total()) && after.reserved() <= bound;
        if fits {
            *self = after;
        }
        fits
    }

    fn end_step(&mut self) {
        self.all.retain(|twin| !twin.released || twin.used > 0);
        let total = self.total();
        self.peak = self.peak.max(total);
        let high = self.crossings.len() % 2 == 1;
        if high && total <= STOP {
            self.crossings.push(Crossing::Stop);
        } else if !high && total >= TRIGGER {
            self.crossings.push(Crossing::Trigger);
        }
    }
}

type Checked = Result<(), TestCaseError>;

/// The ledger and its twin, with one function for each act.
struct Model {
    ledger: Ledger,
    naive: Naive,
}

impl Model {
    fn step(&mut self, act: Act) -> Checked {
        match act {
            Act::Reserve { bytes, tag } => self.reserve(bytes, tag)?,
            Act::UpTo { min, more } => self.reserve_up_to(min, more)?,
            Act::Unreserved { bytes, tag } => self.charge_unreserved(bytes, tag)?,
            Act::FreeUnreserved { bytes, tag } => self.free_unreserved(bytes, tag)?,
            Act::Grow { which, by } => self.on(which, |model, at| model.grow(at, by))?,
            Act::Shrink { which } => self.on(which, Model::shrink)?,
            Act::Split { which, bytes } => self.on(which, |model, at| model.split(at, bytes))?,
            Act::Merge { into, from } => {
                self.on(into, |model, into| model.on(from, |model, from| model.merge(into, from)))?;
            }
            Act::Release { which } => self.on(which, Model::release)?,
            Act::Charge { which, bytes, policy } => {
                self.on(which, |model, at| model.charge(at, bytes, policy))?;
            }
            Act::Uncharge { which, bytes } => {
                self.on(which, |model, at| model.uncharge(at, bytes))?;
            }
        }
        self.naive.end_step();
        Ok(())
    }

    /// Acts on one of the reservations, if there is any.
    fn on(&mut self, which: usize, act: impl FnOnce(&mut Model, usize) -> Checked) -> Checked {
        match self.naive.all.len() {
            0 => Ok(()),
            count => act(self, which % count),
        }
    }

    fn reserve(&mut self, bytes: u64, tag: u32) -> Checked {
        let total = self.naive.total();
        let fits = total + up(bytes) <= LIMIT || bytes == 0 && total >= LIMIT;
        let reserved = self.ledger.reserve(GPU, b(bytes), Owner(1), Tag(tag));
        prop_assert_eq!(reserved.is_ok(), fits);
        self.naive.all.extend(reserved.map(|id| Twin::new(id, tag, up(bytes))));
        Ok(())
    }

    fn reserve_up_to(&mut self, min: u64, more: u64) -> Checked {
        let room = LIMIT.saturating_sub(self.naive.total());
        let sizes = b(min)..=b(min + more);
        let reserved = self.ledger.reserve_up_to(GPU, sizes, Owner(1), Tag::NONE);
        prop_assert_eq!(reserved.is_ok(), up(min) <= room);
        if let Ok(Reserved { id, bytes }) = reserved {
            prop_assert_eq!(bytes.count(), up(min + more).min(room));
            self.naive.all.push(Twin::new(id, 0, bytes.count()));
        }
        Ok(())
    }

    fn grow(&mut self, at: usize, by: u64) -> Checked {
        let Twin { id, released, .. } = self.naive.all[at];
        let grown = !released && self.naive.bounded(LIMIT, |after| after.all[at].size += up(by));
        prop_assert_eq!(self.ledger.grow(id, b(by)).is_ok(), grown);
        Ok(())
    }

    fn shrink(&mut self, at: usize) -> Checked {
        let twin = &mut self.naive.all[at];
        let shrunk = self.ledger.shrink_to_fit(twin.id);
        prop_assert_eq!(shrunk.is_ok(), !twin.released);
        if let Ok(back) = shrunk {
            prop_assert_eq!(back.count(), twin.size.saturating_sub(twin.used));
            twin.size = twin.size.min(twin.used);
        }
        Ok(())
    }

    fn split(&mut self, at: usize, bytes: u64) -> Checked {
        let twin = &mut self.naive.all[at];
        let fits = !twin.released && twin.used + up(bytes) <= twin.size.max(twin.used);
        let split = self.ledger.split(twin.id, b(bytes));
        prop_assert_eq!(split.is_ok(), fits);
        if let Ok(id) = split {
            twin.size -= up(bytes);
            let tag = twin.tag;
            self.naive.all.push(Twin::new(id, tag, up(bytes)));
        }
        Ok(())
    }

    fn merge(&mut self, into: usize, from: usize) -> Checked {
        let (a, c) = (self.naive.all[into].clone(), self.naive.all[from].clone());
        let good = a.id != c.id && !a.released && !c.released;
        let merged = self.ledger.merge(Merge { into: a.id, from: c.id });
        prop_assert_eq!(merged.is_ok(), good);
        if good {
            // Room for the use above the size of the one that goes on is found as well.
            self.naive.all[into].size += c.size.saturating_sub(c.used);
            self.naive.all[from].size = 0;
            self.naive.all[from].released = true;
        }
        Ok(())
    }

    fn release(&mut self, at: usize) -> Checked {
        let twin = &mut self.naive.all[at];
        prop_assert_eq!(self.ledger.release(twin.id).is_ok(), !twin.released);
        twin.released = true;
        twin.size = 0;
        Ok(())
    }

    fn charge(&mut self, at: usize, bytes: u64, policy: Policy) -> Checked {
        let id = self.naive.all[at].id;
        let charged = self.naive.charge(at, bytes, policy);
        let policy = match policy {
            Policy::Fail => LimitPolicy::Fail,
            Policy::Ignore => LimitPolicy::Ignore,
            Policy::Increase { beyond_limit } => {
                LimitPolicy::Increase { factor: GrowthFactor::QUARTER_MORE, beyond_limit }
            }
        };
        prop_assert_eq!(self.ledger.charge_by(id, b(bytes), policy).is_ok(), charged);
        Ok(())
    }

    fn uncharge(&mut self, at: usize, bytes: u64) -> Checked {
        let before = self.naive.total();
        let Twin { id, used, .. } = self.naive.all[at];
        let uncharged = self.ledger.uncharge(id, b(bytes));
        prop_assert_eq!(uncharged.is_ok(), up(bytes) <= used);
        if let Ok(back) = uncharged {
            self.naive.all[at].used -= up(bytes);
            prop_assert_eq!(back.count(), before - self.naive.total());
        }
        Ok(())
    }

    fn charge_unreserved(&mut self, bytes: u64, tag: u32) -> Checked {
        let fits = self.naive.total() + up(bytes) <= CAPACITY;
        let charged = self.ledger.charge_unreserved(GPU, b(bytes), Tag(tag));
        prop_assert_eq!(charged.is_ok(), fits);
        self.naive.unreserved[tag as usize] += if fits { up(bytes) } else { 0 };
        Ok(())
    }

    fn free_unreserved(&mut self, bytes: u64, tag: u32) -> Checked {
        let fits = up(bytes) <= self.naive.unreserved[tag as usize];
        let freed = self.ledger.uncharge_unreserved(GPU, b(bytes), Tag(tag));
        prop_assert_eq!(freed.is_ok(), fits);
        self.naive.unreserved[tag as usize] -= if fits { up(bytes) } else { 0 };
        Ok(())
    }
}

fn compare(ledger: &Ledger, naive: &Naive) -> Result<(), TestCaseError> {
    let census = ledger.census(GPU).unwrap();
    prop_assert_eq!(census.total.count(), naive.total());
    prop_assert!(census.total.count() <= CAPACITY);
    prop_assert_eq!(census.reserved.count(), naive.reserved());
    prop_assert_eq!(census.unreserved.count(), naive.unreserved.iter().sum::<u64>());
    prop_assert_eq!(census.peak.count(), naive.peak);
    let active = naive.all.iter().filter(|twin| !twin.released).count();
    prop_assert_eq!(census.reservations, active);
    prop_assert_eq!(ledger.reservations().count(), naive.all.len());
    for twin in &naive.all {
        let record = ledger.reservation(twin.id).unwrap();
        prop_assert_eq!((record.size.count(), record.used.count()), (twin.size, twin.used));
        prop_assert_eq!(record.released, twin.released);
    }
    for tag in 0..3 {
        let census = ledger.tag_census(GPU, Tag(tag)).unwrap();
        prop_assert_eq!(census.charged.count(), naive.charged(tag));
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(vramp_testing::cases(100)))]

    #[test]
    fn random_programs_account_like_a_list_that_is_summed_anew(
        acts in prop::collection::vec(act(), 1..120),
    ) {
        let config = SpaceConfig { granule: b(GRANULE), ..plain(CAPACITY, LIMIT) };
        let mut ledger = Ledger::new([(GPU, config), (GPU1, config)]).unwrap();
        ledger.add_tag("one");
        ledger.add_tag("two");
        let mut watch = ledger.watch(GPU).unwrap();
        let mut model = Model { ledger, naive: Naive::default() };
        for act in acts {
            let before = model.naive.clone();
            model.step(act.clone())?;
            let Model { ledger, naive } = &model;
            compare(ledger, naive)
                .map_err(|error| TestCaseError::fail(format!("{act:?} of {before:?}: {error}")))?;
            ledger.audit().map_err(|error| TestCaseError::fail(error.to_string()))?;
        }
        let Model { mut ledger, naive } = model;
        let crossings: Vec<Crossing> =
            std::iter::from_fn(|| ledger.next_crossing(&mut watch)).collect();
        prop_assert_eq!(crossings, naive.crossings);
        for twin in naive.all {
            if !twin.released {
                ledger.release(twin.id).unwrap();
            }
            if twin.used > 0 {
                ledger.uncharge(twin.id, b(twin.used)).unwrap();
            }
        }
        for (tag, &bytes) in naive.unreserved.iter().enumerate() {
            ledger.uncharge_unreserved(GPU, b(bytes), Tag(tag as u32)).unwrap();
        }
        prop_assert_eq!(total(&ledger, GPU), 0);
        prop_assert_eq!(ledger.reservations().count(), 0);
    }
}
