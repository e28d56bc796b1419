//! Contents in a store of the program.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use vramp_defer::{ObjectTier, SpillError, SpillTier, TiersError, TiersOptions};
use vramp_tiers::config::{DiskSpaceConfig, SpaceLevels, TiersConfig};
use vramp_tiers::disk::{ObjectStore, StoreError};
use vramp_tiers::movers::MoveError;

use super::*;

type Rule = Box<dyn Fn(&'static str, u64) -> Result<(), StoreError> + Send>;

/// A map, and what its calls do before they succeed.
struct Map {
    objects: Mutex<BTreeMap<u64, Vec<u8>>>,
    calls: Mutex<Vec<(&'static str, u64)>>,
    rule: Mutex<Rule>,
}

impl Map {
    fn new() -> Arc<Map> {
        let rule: Rule = Box::new(|_, _| Ok(()));
        Arc::new(Map { objects: Mutex::default(), calls: Mutex::default(), rule: Mutex::new(rule) })
    }

    fn set(&self, rule: impl Fn(&'static str, u64) -> Result<(), StoreError> + Send + 'static) {
        *self.rule.lock().unwrap_or_else(PoisonError::into_inner) = Box::new(rule);
    }

    fn heal(&self) {
        self.set(|_, _| Ok(()));
    }

    fn count(&self, what: &str) -> usize {
        self.calls.lock().unwrap().iter().filter(|(call, _)| *call == what).count()
    }

    fn note(&self, what: &'static str, key: u64) -> Result<(), StoreError> {
        self.calls.lock().unwrap().push((what, key));
        let rule = self.rule.lock().unwrap_or_else(PoisonError::into_inner);
        rule(what, key)
    }
}

impl ObjectStore for Map {
    fn put(&self, key: u64, bytes: &[u8]) -> Result<(), StoreError> {
        self.note("put", key)?;
        let before = self.objects.lock().unwrap().insert(key, bytes.to_vec());
        assert_eq!(before, None, "a key is used once");
        Ok(())
    }

    fn get(&self, key: u64, into: &mut [u8]) -> Result<(), StoreError> {
        self.note("get", key)?;
        into.copy_from_slice(&self.objects.lock().unwrap()[&key]);
        Ok(())
    }

    fn delete(&self, key: u64) -> Result<(), StoreError> {
        self.note("delete", key)?;
        self.objects.lock().unwrap().remove(&key);
        Ok(())
    }
}

fn over(map: &Arc<Map>) -> Rig {
    let objects = Some(Arc::clone(map) as Arc<dyn ObjectStore>);
    Plan { disk: Some(MIB(64)), objects, ..Plan::default() }.build()
}

fn used(rig: &Rig) -> Bytes {
    rig.store.as_ref().unwrap().space().total()
}

#[test]
fn contents_come_back_from_a_store_of_the_program_and_dropped_copies_are_deleted() {
    let map = Map::new();
    let rig = over(&map);
    let (kept, dropped) = (rig.filled(MIB(16), 1), rig.filled(MIB(10), 2));
    kept.spill_to(SpillTier::Disk).unwrap();
    dropped.spill_to(SpillTier::Disk).unwrap();
    // Steps of the mover are 4 MiB, pieces 8 MiB.
    assert_eq!((map.count("put"), used(&rig)), (7, MIB(26)));
    rig.check();
    drop(dropped);
    assert_eq!((map.count("delete"), map.objects.lock().unwrap().len()), (3, 4));
    assert_eq!(used(&rig), MIB(16));
    rig.expect(&kept, 1);
    // The copy below stays valid until the buffer is written.
    assert_eq!(used(&rig), MIB(16));
    rig.fill(&kept, 3);
    rig.expect(&kept, 3);
    assert_eq!((used(&rig), map.objects.lock().unwrap().len()), (Bytes::ZERO, 0));
    let stats = rig.store.as_ref().unwrap().stats();
    assert_eq!((stats.writes.transfers, stats.reads.bytes), (7, MIB(16)));
    rig.check();
}

#[test]
fn a_put_that_fails_keeps_the_contents_and_its_key_is_deleted() {
    type Failure = fn() -> StoreError;
    let failures: [Failure; 3] =
        [|| StoreError::failed("no route"), || StoreError::full("no route"), || panic!("no route")];
    for (failure, panics) in failures.into_iter().zip([0, 0, 1]) {
        let map = Map::new();
        let rig = over(&map);
        let buffer = rig.filled(MIB(8), 1);
        map.set(move |what, key| match (what, key) {
            ("put", 1) => Err(failure()),
            _ => Ok(()),
        });
        let error = buffer.spill_to(SpillTier::Disk).unwrap_err();
        assert!(matches!(error, SpillError::NotSpilled(_)), "{error}");
        let text = if panics == 0 { "no route" } else { "it panicked" };
        assert!(error.to_string().contains(text), "{error}");
        assert!(buffer.is_resident());
        assert_eq!(rig.spaces.panics(), panics);
        assert_eq!((used(&rig), map.objects.lock().unwrap().len()), (Bytes::ZERO, 0));
        assert_eq!(map.count("put"), map.count("delete"));
        rig.check();
        map.heal();
        rig.sim.advance(1_000_000_000);
        buffer.spill_to(SpillTier::Disk).unwrap();
        rig.expect(&buffer, 1);
        rig.check();
    }
}

#[test]
fn a_get_that_fails_refuses_the_lease_which_may_be_retried() {
    let map = Map::new();
    let rig = over(&map);
    let buffer = rig.filled(MIB(8), 1);
    buffer.spill_to(SpillTier::Disk).unwrap();
    for panics in [false, true] {
        map.set(move |what, _| match (what, panics) {
            ("get", true) => panic!("a bug"),
            ("get", false) => Err(StoreError::failed("connection reset")),
            _ => Ok(()),
        });
        let error = buffer.lease(Access::Shared, rig.stream).unwrap_err();
        assert!(matches!(error, SpillError::Move(MoveError::Disk { .. })), "{error}");
        assert!(!buffer.is_resident());
        rig.check();
    }
    map.heal();
    rig.expect(&buffer, 1);
}

#[test]
fn a_byte_that_the_store_changed_is_found() {
    let map = Map::new();
    let rig = over(&map);
    let buffer = rig.filled(MIB(8), 1);
    buffer.spill_to(SpillTier::Disk).unwrap();
    map.objects.lock().unwrap().get_mut(&1).unwrap()[77] ^= 1;
    let error = buffer.lease(Access::Shared, rig.stream).unwrap_err();
    assert!(matches!(error, SpillError::Damaged { .. }), "{error}");
    assert!(error.to_string().contains("object 1 of 4.00 MiB"), "{error}");
    {
        let lease = buffer.lease(Access::Overwrite, rig.stream).unwrap();
        rig.sim.fill(rig.queue, lease.address(0), 5).unwrap();
    }
    rig.expect(&buffer, 5);
    rig.check();
}

#[test]
fn a_delete_that_fails_is_counted_and_the_room_is_free_again() {
    let map = Map::new();
    let rig = over(&map);
    let buffer = rig.filled(MIB(8), 1);
    buffer.spill_to(SpillTier::Disk).unwrap();
    map.set(|what, key| match (what, key) {
        ("delete", 0) => Err(StoreError::failed("gone already")),
        ("delete", _) => panic!("a bug"),
        _ => Ok(()),
    });
    drop(buffer);
    assert_eq!(used(&rig), Bytes::ZERO);
    assert_eq!(rig.store.as_ref().unwrap().stats().failed_deletes, 2);
    rig.check();
}

#[test]
fn the_capacity_of_the_space_bounds_what_is_put() {
    let map = Map::new();
    let rig = over(&map);
    let buffers: Vec<_> = (0..2).map(|byte| rig.filled(MIB(32), byte)).collect();
    for buffer in &buffers {
        buffer.spill_to(SpillTier::Disk).unwrap();
    }
    let more = rig.filled(MIB(8), 9);
    assert!(more.spill_to(SpillTier::Disk).is_err());
    assert_eq!((map.count("put"), used(&rig)), (16, MIB(64)));
    rig.expect(&more, 9);
    rig.check();
}

#[test]
fn tiers_open_with_a_store_of_the_program_in_place_of_a_disk() {
    let text = r#"
        device = "sim:h200"
        [[gpu]]
        index = 0
        capacity = "64MiB"
        [[host]]
        index = 0
        capacity = "128MiB"
    "#;
    let mut config = TiersConfig::from_toml(text).unwrap();
    let map = Map::new();
    let objects = Some(ObjectTier::new(map.clone(), Bytes::gib(1)));
    let options = TiersOptions { objects, ..TiersOptions::default() };
    let tiers = options.open(&config).unwrap();
    assert_eq!(tiers.disk().unwrap().dir(), None);
    let buffer = tiers.buffer(MIB(8)).unwrap();
    buffer.write(MIB(3), b"of the program").unwrap();
    buffer.spill_to(SpillTier::Disk).unwrap();
    let mut back = [0; 14];
    buffer.read(MIB(3), &mut back).unwrap();
    assert_eq!(&back, b"of the program");
    assert_eq!((map.count("put"), map.count("get")), (1, 1));
    drop((buffer, tiers));
    assert_eq!(map.objects.lock().unwrap().len(), 0);
    let directory = std::env::temp_dir();
    config.disks.push(DiskSpaceConfig::new(0, directory, MIB(64), SpaceLevels::default()));
    assert!(matches!(options.open(&config), Err(TiersError::TwoDisks)));
}
