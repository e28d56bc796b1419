//! Levels, pressure and crossings.

use super::*;

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
