//! The candidates of each strategy, and their order.

use smallvec::smallvec;

use super::*;

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
