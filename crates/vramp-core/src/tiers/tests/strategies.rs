//! Which spaces will do, in which order.

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
    assert!(error.to_string().contains("host0 exist"), "{error}");
}

#[test]
fn a_space_known_twice_is_one_candidate() {
    let found = Strategy::AnyInTier(Tier::Gpu).candidates(&[GPU, GPU1, GPU], |_| 0).unwrap();
    assert_eq!(found.as_slice(), [GPU, GPU1]);
}
