//! The ledger against a naive twin: a list of reservations, summed anew after every step.

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
    Upto { least: u64, more: u64 },
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
        1 => (0u64..60, 0u64..120).prop_map(|(least, more)| Act::Upto { least, more }),
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

    /// The change, if what it makes of the totals stays below the bound.
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

fn step(ledger: &mut Ledger, naive: &mut Naive, act: Act) -> Result<(), TestCaseError> {
    let count = naive.all.len().max(1);
    let get = |naive: &Naive, which: usize| naive.all.get(which % count).cloned();
    let new = |id, tag, size| Twin { id, tag, size, used: 0, released: false };
    match act {
        Act::Reserve { bytes, tag } => {
            let fits = naive.total() + up(bytes) <= LIMIT || bytes == 0 && naive.total() >= LIMIT;
            match ledger.reserve(GPU, b(bytes), Owner(1), Tag(tag)) {
                Ok(id) => {
                    prop_assert!(fits);
                    naive.all.push(new(id, tag, up(bytes)));
                }
                Err(_) => prop_assert!(!fits),
            }
        }
        Act::Upto { least, more } => {
            let room = LIMIT.saturating_sub(naive.total());
            let sizes = b(least)..=b(least + more);
            match ledger.reserve_up_to(GPU, sizes, Owner(1), Tag::NONE) {
                Ok(Reserved { id, bytes }) => {
                    prop_assert!(up(least) <= room);
                    prop_assert_eq!(bytes.count(), up(least + more).min(room));
                    naive.all.push(new(id, 0, bytes.count()));
                }
                Err(_) => prop_assert!(up(least) > room),
            }
        }
        Act::Grow { which, by } => {
            let Some(twin) = get(naive, which) else { return Ok(()) };
            let grown = !twin.released
                && naive.bounded(LIMIT, |after| after.all[which % count].size += up(by));
            prop_assert_eq!(ledger.grow(twin.id, b(by)).is_ok(), grown);
        }
        Act::Shrink { which } => {
            let Some(twin) = get(naive, which) else { return Ok(()) };
            match ledger.shrink_to_fit(twin.id) {
                Ok(back) => {
                    prop_assert!(!twin.released);
                    naive.all[which % count].size = twin.size.min(twin.used);
                    prop_assert_eq!(back.count(), twin.size.saturating_sub(twin.used));
                }
                Err(_) => prop_assert!(twin.released),
            }
        }
        Act::Split { which, bytes } => {
            let Some(twin) = get(naive, which) else { return Ok(()) };
            let fits = !twin.released && twin.used + up(bytes) <= twin.size.max(twin.used);
            match ledger.split(twin.id, b(bytes)) {
                Ok(id) => {
                    prop_assert!(fits);
                    naive.all[which % count].size -= up(bytes);
                    naive.all.push(new(id, twin.tag, up(bytes)));
                }
                Err(_) => prop_assert!(!fits),
            }
        }
        Act::Merge { into, from } => {
            let (Some(a), Some(c)) = (get(naive, into), get(naive, from)) else { return Ok(()) };
            let good = a.id != c.id && !a.released && !c.released;
            let merged = ledger.merge(Merge { into: a.id, from: c.id });
            prop_assert_eq!(merged.is_ok(), good);
            if good {
                let unused = c.size.saturating_sub(c.used);
                // Room for the use above the size of the one that goes on is found as well.
                naive.all[into % count].size += unused;
                naive.all[from % count].size = 0;
                naive.all[from % count].released = true;
            }
        }
        Act::Release { which } => {
            let Some(twin) = get(naive, which) else { return Ok(()) };
            prop_assert_eq!(ledger.release(twin.id).is_ok(), !twin.released);
            naive.all[which % count].released = true;
            naive.all[which % count].size = 0;
        }
        Act::Charge { which, bytes, policy } => {
            let Some(twin) = get(naive, which) else { return Ok(()) };
            let place = which % count;
            let lacking = (twin.used + up(bytes)).saturating_sub(twin.size);
            let padded = up((lacking as f64 * 1.25).ceil() as u64);
            let mut done = false;
            if !twin.released && (lacking == 0 || bytes == 0) {
                done = true;
                naive.all[place].used += up(bytes);
            } else if !twin.released {
                let grow = |naive: &mut Naive, by: u64, bound: u64| {
                    let new = |after: &mut Naive| {
                        after.all[place].size += by;
                        after.all[place].used += up(bytes);
                    };
                    let fits = naive.total() <= bound;
                    fits && naive.bounded(bound, new)
                };
                done = match policy {
                    Policy::Fail => false,
                    Policy::Ignore => {
                        let mut after = naive.clone();
                        after.all[place].used += up(bytes);
                        let fits = after.total() <= CAPACITY;
                        if fits {
                            *naive = after;
                        }
                        fits
                    }
                    Policy::Increase { beyond_limit } => {
                        let bound = if beyond_limit { CAPACITY } else { LIMIT };
                        grow(naive, padded, bound) || grow(naive, lacking, bound)
                    }
                };
            }
            let policy = match policy {
                Policy::Fail => LimitPolicy::Fail,
                Policy::Ignore => LimitPolicy::Ignore,
                Policy::Increase { beyond_limit } => {
                    LimitPolicy::Increase { factor: GrowthFactor::QUARTER_MORE, beyond_limit }
                }
            };
            prop_assert_eq!(ledger.charge_by(twin.id, b(bytes), policy).is_ok(), done);
        }
        Act::Uncharge { which, bytes } => {
            let Some(twin) = get(naive, which) else { return Ok(()) };
            let before = naive.total();
            match ledger.uncharge(twin.id, b(bytes)) {
                Ok(back) => {
                    prop_assert!(up(bytes) <= twin.used);
                    naive.all[which % count].used -= up(bytes);
                    prop_assert_eq!(back.count(), before - naive.total());
                }
                Err(_) => prop_assert!(up(bytes) > twin.used),
            }
        }
        Act::Unreserved { bytes, tag } => {
            let fits = naive.total() + up(bytes) <= CAPACITY;
            prop_assert_eq!(ledger.charge_unreserved(GPU, b(bytes), Tag(tag)).is_ok(), fits);
            naive.unreserved[tag as usize] += if fits { up(bytes) } else { 0 };
        }
        Act::FreeUnreserved { bytes, tag } => {
            let fits = up(bytes) <= naive.unreserved[tag as usize];
            prop_assert_eq!(ledger.uncharge_unreserved(GPU, b(bytes), Tag(tag)).is_ok(), fits);
            naive.unreserved[tag as usize] -= if fits { up(bytes) } else { 0 };
        }
    }
    naive.end_step();
    Ok(())
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
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn random_programs_account_like_a_list_that_is_summed_anew(
        acts in prop::collection::vec(act(), 1..120),
    ) {
        let config = SpaceConfig { granule: b(GRANULE), ..plain(CAPACITY, LIMIT) };
        let mut ledger = Ledger::new([(GPU, config), (GPU1, config)]).unwrap();
        ledger.add_tag("one");
        ledger.add_tag("two");
        let mut watch = ledger.watch(GPU).unwrap();
        let mut naive = Naive::default();
        for act in acts {
            let before = naive.clone();
            step(&mut ledger, &mut naive, act.clone())?;
            compare(&ledger, &naive)
                .map_err(|error| TestCaseError::fail(format!("{act:?} of {before:?}: {error}")))?;
            ledger.audit().map_err(|error| TestCaseError::fail(error.to_string()))?;
        }
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
