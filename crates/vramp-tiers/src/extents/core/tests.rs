//! The extent allocator: named cases, and random programs against a model with a map of every unit.

use proptest::prelude::*;
use proptest::strategy::Strategy;

use vramp_core::Bytes;

use super::allocator::ExtentError;
use super::*;

fn b(count: u64) -> Bytes {
    Bytes::new(count)
}

fn extent(backing: u32, offset: u64, len: u64) -> Extent {
    Extent { backing: BackingId(backing), offset: b(offset), len: b(len) }
}

fn alloc(extents: &mut ExtentAllocator, len: u64) -> Vec<Extent> {
    let list = extents.alloc(b(len)).unwrap().into_vec();
    extents.audit().unwrap();
    list
}

#[test]
fn requests_take_whole_units_of_the_shortest_extent_that_is_long_enough() {
    let mut extents = ExtentAllocator::new(b(4));
    let id = extents.add(b(103));
    assert_eq!(extents.census().capacity, b(100));
    assert_eq!(alloc(&mut extents, 5), [extent(0, 0, 8)]);
    assert_eq!(alloc(&mut extents, 40), [extent(0, 8, 40)]);
    assert_eq!(alloc(&mut extents, 4), [extent(0, 48, 4)]);
    extents.free(extent(0, 0, 8)).unwrap();
    assert_eq!(alloc(&mut extents, 8), [extent(0, 0, 8)]);
    assert_eq!(alloc(&mut extents, 0), []);
    assert_eq!(extents.remove(id), Err(ExtentError::InUse { backing: id, used: b(52) }));
}

#[test]
fn a_request_that_fits_no_extent_is_split_over_the_longest_ones() {
    let mut extents = ExtentAllocator::new(b(1));
    extents.add(b(10));
    extents.add(b(30));
    extents.add(b(6));
    assert_eq!(alloc(&mut extents, 35), [extent(1, 0, 30), extent(2, 0, 5)]);
    let error = extents.alloc(b(12)).unwrap_err();
    assert_eq!(error, OutOfExtents { asked: b(12), free: b(11) });
    assert_eq!(alloc(&mut extents, 11), [extent(0, 0, 10), extent(2, 5, 1)]);
}

#[test]
fn free_neighbours_coalesce_in_any_order_of_frees() {
    for order in [[0, 10, 20], [20, 10, 0], [0, 20, 10], [10, 0, 20]] {
        let mut extents = ExtentAllocator::new(b(10));
        let id = extents.add(b(30));
        alloc(&mut extents, 30);
        for offset in order {
            extents.free(extent(0, offset, 10)).unwrap();
            extents.audit().unwrap();
        }
        assert_eq!(extents.census().largest_free, b(30));
        assert_eq!(extents.idle().collect::<Vec<_>>(), [id]);
        extents.remove(id).unwrap();
        assert_eq!(extents.census(), ExtentCensus::default());
    }
}

#[test]
fn a_free_that_repeats_or_reaches_too_far_is_refused_and_changes_nothing() {
    let mut extents = ExtentAllocator::new(b(2));
    extents.add(b(20));
    alloc(&mut extents, 12);
    extents.free(extent(0, 4, 2)).unwrap();
    let before = extents.census();
    for wrong in [(0, 4, 2), (0, 2, 4), (0, 10, 4), (0, 18, 4), (0, 1, 2), (0, 0, 0)] {
        let wrong = extent(wrong.0, wrong.1, wrong.2);
        assert_eq!(extents.free(wrong), Err(ExtentError::NotUsed(wrong)));
        assert_eq!(extents.quarantine(wrong), Err(ExtentError::NotUsed(wrong)));
    }
    let other = extent(7, 0, 2);
    assert_eq!(extents.free(other), Err(ExtentError::UnknownBacking(BackingId(7))));
    let far = Extent { offset: b(u64::MAX - 1), ..extent(0, 0, 2) };
    assert_eq!(extents.free(far), Err(ExtentError::NotUsed(far)));
    assert_eq!(extents.census(), before);
}

#[test]
fn quarantined_space_is_never_reused_and_keeps_its_backing() {
    let mut extents = ExtentAllocator::new(b(1));
    let id = extents.add(b(30));
    alloc(&mut extents, 30);
    extents.quarantine(extent(0, 10, 5)).unwrap();
    extents.free(extent(0, 0, 10)).unwrap();
    extents.free(extent(0, 15, 15)).unwrap();
    extents.audit().unwrap();
    assert_eq!(alloc(&mut extents, 25), [extent(0, 15, 15), extent(0, 0, 10)]);
    extents.free(extent(0, 15, 15)).unwrap();
    extents.free(extent(0, 0, 10)).unwrap();
    assert_eq!(extents.idle().count(), 0);
    assert_eq!(extents.census().quarantined, b(5));
    extents.remove(id).unwrap();
}

/// State of one unit in the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unit {
    Free,
    Used,
    Quarantined,
}

#[derive(Clone, Debug)]
enum Act {
    Add(u64),
    Alloc(u64),
    Free(usize),
    FreePart { which: usize, cut: u64 },
    Quarantine(usize),
    RemoveIdle,
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        1 => (0u64..40).prop_map(Act::Add),
        6 => (0u64..50).prop_map(Act::Alloc),
        4 => (0usize..64).prop_map(Act::Free),
        2 => (0usize..64, 1u64..9).prop_map(|(which, cut)| Act::FreePart { which, cut }),
        1 => (0usize..64).prop_map(Act::Quarantine),
        1 => Just(Act::RemoveIdle),
    ]
}

type Map = std::collections::BTreeMap<BackingId, Vec<Unit>>;

fn units(map: &Map, wanted: Unit) -> u64 {
    map.values().flatten().filter(|unit| **unit == wanted).count() as u64
}

fn paint(map: &mut Map, extent: Extent, from: Unit, to: Unit) {
    let range = extent.offset.count() as usize..extent.end().count() as usize;
    for unit in &mut map.get_mut(&extent.backing).unwrap()[range] {
        assert_eq!(*unit, from, "{extent:?}");
        *unit = to;
    }
}

/// Returns how many of the longest free runs hold `len` units.
fn fewest(map: &Map, len: u64) -> usize {
    let mut runs: Vec<u64> = map
        .values()
        .flat_map(|units| units.split(|unit| *unit != Unit::Free))
        .map(|run| run.len() as u64)
        .collect();
    runs.sort_unstable();
    let mut left = len;
    let mut count = 0;
    while left > 0 {
        left = left.saturating_sub(runs.pop().unwrap());
        count += 1;
    }
    count
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(vramp_testing::cases(100)))]
    #[test]
    fn extents_agree_with_a_map_of_every_unit(acts in prop::collection::vec(act(), 1..80)) {
        let mut extents = ExtentAllocator::new(b(1));
        let mut map = Map::new();
        let mut held: Vec<Extent> = Vec::new();
        for act in acts {
            match act {
                Act::Add(len) => {
                    map.insert(extents.add(b(len)), vec![Unit::Free; len as usize]);
                }
                Act::Alloc(len) => match extents.alloc(b(len)) {
                    Ok(list) => {
                        prop_assert_eq!(list.len(), fewest(&map, len));
                        let sum: Bytes = list.iter().map(|extent| extent.len).sum();
                        prop_assert_eq!(sum, b(len));
                        for extent in list {
                            paint(&mut map, extent, Unit::Free, Unit::Used);
                            held.push(extent);
                        }
                    }
                    Err(error) => {
                        prop_assert_eq!(error.free, b(units(&map, Unit::Free)));
                        prop_assert!(error.free < b(len));
                    }
                },
                Act::Free(which) if !held.is_empty() => {
                    let extent = held.swap_remove(which % held.len());
                    extents.free(extent).unwrap();
                    paint(&mut map, extent, Unit::Used, Unit::Free);
                }
                Act::FreePart { which, cut } if !held.is_empty() => {
                    let which = which % held.len();
                    let cut = b(cut).min(held[which].len - b(1));
                    if !cut.is_zero() {
                        let front = Extent { len: cut, ..held[which] };
                        held[which].offset += cut;
                        held[which].len -= cut;
                        extents.free(front).unwrap();
                        paint(&mut map, front, Unit::Used, Unit::Free);
                    }
                }
                Act::Quarantine(which) if !held.is_empty() => {
                    let extent = held.swap_remove(which % held.len());
                    extents.quarantine(extent).unwrap();
                    paint(&mut map, extent, Unit::Used, Unit::Quarantined);
                }
                Act::RemoveIdle => {
                    let idle: Vec<_> = extents.idle().collect();
                    for id in idle {
                        extents.remove(id).unwrap();
                        let units = map.remove(&id).unwrap();
                        prop_assert!(units.iter().all(|unit| *unit == Unit::Free));
                    }
                }
                _ => {}
            }
            extents.audit().unwrap();
            let census = extents.census();
            prop_assert_eq!(census.used, b(units(&map, Unit::Used)));
            prop_assert_eq!(census.free, b(units(&map, Unit::Free)));
            prop_assert_eq!(census.quarantined, b(units(&map, Unit::Quarantined)));
            prop_assert_eq!((extents.used(), extents.free_bytes()), (census.used, census.free));
        }
    }
}
