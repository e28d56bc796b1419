//! Charges and credits of reservations, and refusals.

use proptest::prelude::*;
use proptest::strategy::Strategy;

use super::*;

const QUARTER_MORE: LimitPolicy =
    LimitPolicy::Increase { factor: GrowthFactor::QUARTER_MORE, beyond_limit: false };

#[test]
fn an_exact_reservation_is_never_smaller_than_asked_in_any_tier() {
    let spaces = [(GPU, plain(100, 80)), (HOST, plain(100, 80)), (DISK, plain(100, 80))];
    let mut ledger = Ledger::new(spaces).unwrap();
    for space in [GPU, HOST, DISK] {
        for too_much in [81, 101, u64::MAX] {
            let error = ledger.reserve(space, b(too_much), Owner(1), Tag::NONE).unwrap_err();
            let LedgerReserveError::Refused(refused) = error else { panic!("{error}") };
            assert_eq!((refused.requested, refused.available), (b(too_much), b(80)));
            assert!(refused.never_fits());
        }
        assert_eq!(total(&ledger, space), 0);
        let id = reserve(&mut ledger, space, 80, 1);
        assert_eq!(ledger.reservation(id).unwrap().size, b(80));
    }
}

#[test]
fn up_to_grants_all_there_is_in_whole_granules_and_says_how_much() {
    let config = SpaceConfig { granule: b(8), ..plain(120, 100) };
    let mut ledger = Ledger::new([(HOST, config)]).unwrap();
    let got = ledger.reserve_up_to(HOST, b(1)..=b(90), Owner(1), Tag::NONE).unwrap();
    assert_eq!(got.bytes, b(96));
    assert!(ledger.reserve_up_to(HOST, b(1)..=b(9), Owner(1), Tag::NONE).is_err());
    let empty = ledger.reserve_up_to(HOST, b(0)..=b(9), Owner(1), Tag::NONE).unwrap();
    assert_eq!(empty.bytes, b(0));
    ledger.release(got.id).unwrap();
    ledger.grow(empty.id, b(17)).unwrap();
    assert_eq!(total(&ledger, HOST), 24);
}

#[test]
fn a_reservation_becomes_a_charge_of_the_space_and_no_total_changes() {
    let mut ledger = ledger();
    let id = reserve(&mut ledger, GPU, 90, 1);
    assert_eq!(ledger.charge(id, b(10)).unwrap(), Charged::Within);
    let before = ledger.watch(GPU).unwrap();
    assert_eq!(ledger.into_unreserved(id).unwrap(), b(80));
    let census = ledger.census(GPU).unwrap();
    assert_eq!((census.total, census.reserved, census.reservations), (b(90), b(0), 0));
    assert_eq!((census.unreserved, census.orphaned, census.peak), (b(80), b(10), b(90)));
    assert_eq!(ledger.tag_census(GPU, Tag::NONE).unwrap().peak_charged, b(90));
    assert_eq!(ledger.next_crossing(&mut before.clone()), None, "the total fell at no moment");
    assert!(ledger.into_unreserved(id).is_err() && ledger.release(id).is_err());
    assert_eq!(ledger.uncharge_unreserved(GPU, b(80), Tag::NONE).unwrap(), b(80));
    assert_eq!(ledger.uncharge(id, b(10)).unwrap(), b(10));
    assert_eq!(total(&ledger, GPU), 0);
}

#[test]
fn a_charge_up_to_an_amount_takes_whole_granules_of_what_is_unused() {
    let config = SpaceConfig { granule: b(8), ..plain(120, 100) };
    let mut ledger = Ledger::new([(HOST, config)]).unwrap();
    let id = reserve(&mut ledger, HOST, 40, 1);
    for (max, charged) in [(1, 8), (17, 24), (100, 8), (100, 0)] {
        assert_eq!(ledger.charge_up_to(id, b(max)).unwrap(), b(charged));
    }
    assert_eq!((total(&ledger, HOST), ledger.reservation(id).unwrap().used), (40, b(40)));
}

#[test]
fn a_refusal_names_the_largest_holders() {
    let mut ledger = ledger();
    for (owner, bytes) in [(1, 5), (2, 30), (3, 10), (4, 20), (5, 7), (6, 1)] {
        reserve(&mut ledger, GPU, bytes, owner);
    }
    reserve(&mut ledger, GPU1, 90, 7);
    let error = ledger.reserve(GPU, b(28), Owner(9), Tag::NONE).unwrap_err();
    let LedgerReserveError::Refused(refused) = &error else { panic!("{error}") };
    let owners: Vec<u64> = refused.largest.iter().map(|holder| holder.owner.0).collect();
    assert_eq!(owners, [2, 4, 3, 5]);
    assert_eq!((refused.reserved, refused.reservations), (b(73), 6));
    assert!(!refused.never_fits());
    let text = error.to_string();
    assert!(text.contains("27 B") && text.contains("28 B") && text.contains("owner 2"), "{text}");
}

#[test]
fn a_grown_reservation_is_charged_once_and_all_of_it_comes_back() {
    let mut ledger = ledger();
    let id = reserve(&mut ledger, GPU, 10, 1);
    assert_eq!(ledger.charge(id, b(8)).unwrap(), Charged::Within);
    let done = ledger.charge_by(id, b(10), QUARTER_MORE).unwrap();
    assert_eq!(done, OverrunOutcome::Grown { by: b(10) }); // 8 are missing, and a quarter
    assert_eq!(total(&ledger, GPU), 20);
    assert_eq!(ledger.uncharge(id, b(10)).unwrap(), b(0));
    assert_eq!(ledger.uncharge(id, b(8)).unwrap(), b(0));
    assert_eq!(ledger.release(id).unwrap(), b(20));
    assert_eq!(total(&ledger, GPU), 0);
}

#[test]
fn a_growth_with_no_room_for_the_padding_is_exact_and_one_with_no_room_at_all_is_refused() {
    let mut ledger = ledger();
    let id = reserve(&mut ledger, GPU, 90, 1);
    assert_eq!(ledger.charge(id, b(90)).unwrap(), Charged::Within);
    let done = ledger.charge_by(id, b(9), QUARTER_MORE).unwrap();
    assert_eq!(done, OverrunOutcome::Grown { by: b(9) });
    let before = *ledger.reservation(id).unwrap();
    let error = ledger.charge_by(id, b(2), QUARTER_MORE).unwrap_err();
    assert!(matches!(error, ChargeError::Refused(ref refused) if refused.available == b(1)));
    assert_eq!(*ledger.reservation(id).unwrap(), before);
    assert_eq!(total(&ledger, GPU), 99);
}

#[test]
fn beyond_limit_is_read_and_ends_at_the_capacity() {
    let mut ledger = ledger();
    let policy = LimitPolicy::Increase { factor: GrowthFactor::default(), beyond_limit: true };
    let id = reserve(&mut ledger, GPU, 100, 1);
    assert_eq!(ledger.charge(id, b(100)).unwrap(), Charged::Within);
    assert_eq!(ledger.charge_by(id, b(8), policy).unwrap(), OverrunOutcome::Grown { by: b(10) });
    assert!(ledger.reservation(id).unwrap().beyond_limit);
    assert_eq!(ledger.charge_by(id, b(12), policy).unwrap(), OverrunOutcome::Grown { by: b(10) });
    assert_eq!(total(&ledger, GPU), 120);
    assert!(ledger.charge_by(id, b(1), policy).is_err());
    ledger.uncharge(id, b(120)).unwrap();
    assert_eq!(ledger.release(id).unwrap(), b(120));
}

#[test]
fn ignored_excess_is_charged_to_the_space_up_to_its_capacity() {
    let mut ledger = ledger();
    let id = reserve(&mut ledger, GPU, 10, 1);
    let done = ledger.charge_by(id, b(15), LimitPolicy::Ignore).unwrap();
    assert_eq!(done, OverrunOutcome::Ignored { by: b(5) });
    let done = ledger.charge_by(id, b(100), LimitPolicy::Ignore).unwrap();
    assert_eq!(done, OverrunOutcome::Ignored { by: b(100) });
    assert_eq!(total(&ledger, GPU), 115);
    assert!(ledger.charge_by(id, b(6), LimitPolicy::Ignore).is_err());
    assert_eq!(ledger.uncharge(id, b(100)).unwrap(), b(100));
    assert_eq!(ledger.uncharge(id, b(15)).unwrap(), b(5));
    assert_eq!(total(&ledger, GPU), 10);
}

#[test]
fn the_policy_that_fails_changes_nothing() {
    let mut ledger = ledger();
    let id = reserve(&mut ledger, GPU, 10, 1);
    let error = ledger.charge_by(id, b(11), LimitPolicy::Fail).unwrap_err();
    let ChargeError::OverReservation { overrun } = error else { panic!("{error}") };
    assert_eq!((overrun.by, overrun.size, overrun.used), (b(1), b(10), b(0)));
    assert_eq!(total(&ledger, GPU), 10);
}

#[test]
fn a_rule_of_the_users_own_decides_with_all_the_numbers() {
    let mut ledger = ledger();
    let id = reserve(&mut ledger, GPU, 10, 1);
    let Charged::Overrun(overrun) = ledger.charge(id, b(14)).unwrap() else { panic!("it fits") };
    let answer =
        OverrunAction::Grow { preferred: overrun.by * 3, min: overrun.by, beyond_limit: false };
    assert_eq!(
        ledger.charge_overrun(id, b(14), answer).unwrap(),
        OverrunOutcome::Grown { by: b(12) }
    );
    let mean = OverrunAction::Grow { preferred: b(1), min: b(0), beyond_limit: true };
    let error = ledger.charge_overrun(id, b(14), mean).unwrap_err();
    assert!(matches!(error, ChargeError::OverReservation { .. }), "{error}");
    assert_eq!(total(&ledger, GPU), 22);
}

#[test]
fn a_free_is_credited_to_its_origin_and_never_drives_another_one_negative() {
    let mut ledger = ledger();
    let (a, other) = (reserve(&mut ledger, GPU, 10, 1), reserve(&mut ledger, GPU, 10, 2));
    let _ = ledger.charge(a, b(6)).unwrap();
    let error = ledger.uncharge(other, b(6)).unwrap_err();
    assert_eq!(error, UnchargeError::TooMuch { id: other, freed: b(6), used: b(0) });
    assert_eq!(ledger.uncharge(a, b(6)).unwrap(), b(0));
    assert_eq!(ledger.reservation(a).unwrap().unused(), b(10));
}

#[test]
fn what_is_still_used_stays_charged_after_the_release_and_comes_back_on_its_frees() {
    let mut ledger = ledger();
    let id = reserve(&mut ledger, GPU, 10, 1);
    let _ = ledger.charge(id, b(6)).unwrap();
    assert_eq!(ledger.release(id).unwrap(), b(4));
    assert_eq!(total(&ledger, GPU), 6);
    assert_eq!(ledger.census(GPU).unwrap().orphaned, b(6));
    assert_eq!(ledger.charge(id, b(1)), Err(StaleReservation::Released { id, used: b(6) }));
    assert_eq!(ledger.release(id), Err(StaleReservation::Released { id, used: b(6) }));
    assert_eq!(ledger.uncharge(id, b(2)).unwrap(), b(2));
    assert_eq!(ledger.uncharge(id, b(4)).unwrap(), b(4));
    assert_eq!(total(&ledger, GPU), 0);
    assert_eq!(ledger.release(id), Err(StaleReservation::Unknown { id }));
}

#[test]
fn a_stale_id_never_reaches_the_reservation_that_took_its_place() {
    let mut ledger = ledger();
    let old = reserve(&mut ledger, GPU, 10, 1);
    ledger.release(old).unwrap();
    let new = reserve(&mut ledger, GPU, 10, 2);
    assert_ne!(old, new);
    assert_eq!(ledger.charge(old, b(1)), Err(StaleReservation::Unknown { id: old }));
    assert_eq!(ledger.shrink_to_fit(old), Err(StaleReservation::Unknown { id: old }));
    assert!(ledger.uncharge(old, b(1)).is_err() && ledger.grow(old, b(1)).is_err());
    let number = ReservationId::from_number(new.number());
    assert_eq!(number, new);
    assert!(ledger.release(ReservationId::from_number(u64::MAX)).is_err());
    assert_eq!(total(&ledger, GPU), 10);
}

#[test]
fn a_reservation_of_another_tier_is_charged_where_it_is() {
    let mut ledger = ledger();
    let host = reserve(&mut ledger, HOST, 500, 1);
    let Charged::Overrun(overrun) = ledger.charge(host, b(501)).unwrap() else { panic!("it fits") };
    assert_eq!(overrun.space, HOST);
    assert_eq!((total(&ledger, GPU), total(&ledger, HOST)), (0, 500));
}

#[test]
fn two_cards_of_one_thread_have_their_own_reservations() {
    let mut ledger = ledger();
    let (a, other) = (reserve(&mut ledger, GPU, 50, 1), reserve(&mut ledger, GPU1, 20, 1));
    assert_eq!(ledger.charge(a, b(50)).unwrap(), Charged::Within);
    assert!(matches!(ledger.charge(other, b(21)).unwrap(), Charged::Overrun(_)));
    assert_eq!((total(&ledger, GPU), total(&ledger, GPU1)), (50, 20));
}

#[test]
fn shrinking_to_fit_returns_the_rest_to_the_space() {
    let mut ledger = ledger();
    let id = reserve(&mut ledger, GPU, 80, 1);
    let _ = ledger.charge(id, b(30)).unwrap();
    assert_eq!(ledger.shrink_to_fit(id).unwrap(), b(50));
    assert_eq!(total(&ledger, GPU), 30);
    assert_eq!(ledger.census(GPU).unwrap().reserved, b(30));
    let _ = ledger.charge_by(id, b(5), LimitPolicy::Ignore).unwrap();
    assert_eq!(ledger.shrink_to_fit(id).unwrap(), b(0));
    assert_eq!(total(&ledger, GPU), 35);
}

#[test]
fn splitting_and_merging_move_only_what_is_unused() {
    let mut ledger = ledger();
    let id = reserve(&mut ledger, GPU, 80, 1);
    let _ = ledger.charge(id, b(30)).unwrap();
    let error = ledger.split(id, b(51)).unwrap_err();
    assert_eq!(error, SplitError::TooLarge { requested: b(51), unused: b(50) });
    let part = ledger.split(id, b(20)).unwrap();
    let _ = ledger.charge(part, b(5)).unwrap();
    assert_eq!(total(&ledger, GPU), 80);
    ledger.merge(Merge { into: id, from: part }).unwrap();
    assert_eq!(total(&ledger, GPU), 80);
    assert_eq!(ledger.reservation(id).unwrap().size, b(75));
    assert_eq!(ledger.uncharge(part, b(5)).unwrap(), b(5));
    let far = reserve(&mut ledger, HOST, 1, 1);
    assert!(matches!(
        ledger.merge(Merge { into: id, from: far }),
        Err(MergeError::OtherSpace { .. })
    ));
    assert_eq!(ledger.merge(Merge { into: id, from: id }), Err(MergeError::Itself { id }));
    assert_eq!(total(&ledger, GPU), 75);
}

#[test]
fn memory_outside_any_reservation_counts_up_to_the_capacity() {
    let mut ledger = ledger();
    ledger.charge_unreserved(GPU, b(110), Tag::NONE).unwrap();
    let error = ledger.charge_unreserved(GPU, b(11), Tag::NONE).unwrap_err();
    assert!(matches!(error, UnreservedError::Refused(ref r) if r.available == b(10)), "{error}");
    assert!(!ledger.can_reserve(GPU, b(1)).unwrap());
    let error = ledger.uncharge_unreserved(GPU, b(111), Tag::NONE).unwrap_err();
    assert!(matches!(error, UnreservedError::TooMuch { .. }));
    assert_eq!(ledger.uncharge_unreserved(GPU, b(110), Tag::NONE).unwrap(), b(110));
    assert_eq!(total(&ledger, GPU), 0);
}

#[test]
fn peaks_and_tags_tell_who_needed_how_much() {
    let mut ledger = ledger();
    let sort = ledger.add_tag("sort");
    assert_eq!(ledger.add_tag("sort"), sort);
    assert_eq!(ledger.tag_name(sort), Ok("sort"));
    let id = ledger.reserve(GPU, b(40), Owner(1), sort).unwrap();
    let _ = ledger.charge(id, b(25)).unwrap();
    ledger.charge_unreserved(GPU, b(10), sort).unwrap();
    reserve(&mut ledger, GPU, 20, 2);
    ledger.release(id).unwrap();
    ledger.uncharge(id, b(25)).unwrap();
    let tag = ledger.tag_census(GPU, sort).unwrap();
    let [charged, used] = [tag.charged, tag.used].map(Bytes::count);
    assert_eq!((charged, used), (10, 10));
    assert_eq!((tag.peak_charged, tag.peak_used), (b(50), b(35)));
    assert_eq!(ledger.census(GPU).unwrap().peak, b(70));
    ledger.reset_peaks(GPU).unwrap();
    assert_eq!(ledger.census(GPU).unwrap().peak, b(30));
    assert_eq!(ledger.tag_census(GPU, sort).unwrap().peak_used, b(10));
    assert!(ledger.reserve(GPU, b(1), Owner(1), Tag(9)).is_err());
    assert_eq!(total(&ledger, GPU), 30);
}

#[test]
fn unknown_spaces_are_errors_of_every_call() {
    let mut ledger = ledger();
    let unknown = UnknownSpace { space: DISK };
    assert_eq!(ledger.total(DISK), Err(unknown));
    assert_eq!(ledger.census(DISK), Err(unknown));
    assert_eq!(ledger.pressure(DISK), Err(unknown));
    assert_eq!(ledger.watch(DISK), Err(unknown));
    assert_eq!(ledger.reset_peaks(DISK), Err(unknown));
    assert!(ledger.reserve(DISK, b(1), Owner(1), Tag::NONE).is_err());
    assert!(ledger.charge_unreserved(DISK, b(1), Tag::NONE).is_err());
}

#[test]
fn amounts_of_any_size_are_refused_and_not_added_up() {
    let mut ledger = Ledger::new([(GPU, SpaceConfig::gpu(Bytes::gib(1)))]).unwrap();
    let huge = b(u64::MAX);
    let id = reserve(&mut ledger, GPU, 512, 1);
    let _ = ledger.charge(id, b(512)).unwrap();
    assert!(ledger.reserve(GPU, huge, Owner(1), Tag::NONE).is_err());
    assert!(ledger.grow(id, huge).is_err() && ledger.uncharge(id, huge).is_err());
    assert!(ledger.split(id, huge).is_err());
    assert!(ledger.charge_unreserved(GPU, huge, Tag::NONE).is_err());
    for beyond_limit in [false, true] {
        let grow = LimitPolicy::Increase { factor: GrowthFactor::default(), beyond_limit };
        for policy in [LimitPolicy::Fail, LimitPolicy::Ignore, grow] {
            assert!(ledger.charge_by(id, huge, policy).is_err());
        }
    }
    let up_to = ledger.reserve_up_to(GPU, b(1)..=huge, Owner(1), Tag::NONE).unwrap();
    assert!(ledger.available(GPU, Bound::Limit).unwrap() < b(256), "{up_to:?}");
    ledger.audit().unwrap();
}

#[test]
fn reserving_and_releasing_takes_no_heap_memory_once_warm() {
    let mut ledger = ledger();
    let mut queue = WaitQueue::default();
    let mut round = |ledger: &mut Ledger| {
        let id = reserve(ledger, GPU, 40, 1);
        assert_eq!(ledger.charge(id, b(30)).unwrap(), Charged::Within);
        ledger.charge_by(id, b(20), QUARTER_MORE).unwrap();
        let part = ledger.split(id, b(1)).unwrap();
        ledger.merge(Merge { into: id, from: part }).unwrap();
        ledger.uncharge(id, b(50)).unwrap();
        ledger.shrink_to_fit(id).unwrap();
        ledger.release(id).unwrap();
        let (id, space) = serve(&mut queue, ledger, ask(&[GPU], 10, 1));
        ledger.release(id).unwrap();
        assert!(queue.serve_waiters(ledger, space).is_empty());
    };
    round(&mut ledger);
    let used = allocation_counter::measure(|| (0..100).for_each(|_| round(&mut ledger)));
    assert_eq!(used.count_total, 0, "{} bytes of heap memory", used.bytes_total);
    let counted = allocation_counter::measure(|| drop(std::hint::black_box(Box::new(1))));
    assert_eq!(counted.count_total, 1);
}

// --- The ledger against a naive twin: a list of reservations that is summed after every step ---

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
