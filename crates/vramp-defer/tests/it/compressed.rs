//! Stores below the card: contents that take fewer bytes on a disk, a store of the program, a small host, and a
//! process that is killed while it spills.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use vramp_alloc::Driver;
use vramp_defer::report::PieceState;
use vramp_defer::{ObjectTier, SpillError, SpillTier, TiersError, TiersOptions};
use vramp_driver::HostSlice;
use vramp_host::Direction;
use vramp_tiers::config::{DiskSpaceConfig, SpaceLevels, TiersConfig};
use vramp_tiers::disk::{DiskTierError, ObjectStore, StoreError};
use vramp_tiers::movers::{MoveError, MoverConfig};

use super::below::{fail, flip, to_disk, until};
use super::faulty::{self, Child, EINTR, EIO, ENOSPC, Fault, Faulty};
use super::*;

// --- Contents that take fewer bytes on the disk, from the card and from the host ---

/// Compresses whatever saves a tenth, however long that takes.
const ALWAYS: CompressionConfig =
    CompressionConfig { least_saving_per_mille: 100, short_below_per_mille: 1000 };

/// How contents reach the disk.
#[derive(Clone, Copy, Debug)]
enum Way {
    /// From the card, for the host has no room but for staging.
    Straight,
    /// From the host, where they were first.
    Pushed,
}

const WAYS: [Way; 2] = [Way::Straight, Way::Pushed];

fn plan(way: Way, io: Option<Arc<dyn BlockIo>>) -> Plan {
    let host = match way {
        Way::Straight => MIB(4),
        Way::Pushed => MIB(512),
    };
    Plan { host, compression: Some(ALWAYS), ..to_disk(io) }
}

/// In turn a MiB of words of which every other is zero, one that does not compress, and one byte.
fn mixture(seed: u64, len: u64) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut bytes = vec![seed as u8; len as usize];
    for (index, part) in bytes.chunks_mut(1 << 20).enumerate() {
        match index % 3 {
            0 => part.chunks_mut(8).step_by(2).for_each(|word| random.fill(word)),
            1 => random.fill(part),
            _ => {}
        }
    }
    bytes
}

impl Rig {
    fn holding(&self, bytes: &[u8]) -> DeferrableBuffer {
        let len = Bytes::new(bytes.len() as u64);
        let buffer = self.manager.buffer(len).unwrap();
        let host = self.sim.alloc_host(len).unwrap();
        self.sim.write_host(host, Bytes::ZERO, bytes).unwrap();
        let lease = buffer.lease(Access::Exclusive, self.stream).unwrap();
        let slice = HostSlice { buffer: host, offset: Bytes::ZERO, len };
        self.sim.copy_to_device(self.queue, slice, lease.address(0).start).unwrap();
        drop(lease);
        self.sim.synchronize_stream(self.queue).unwrap();
        self.sim.free_host(host).unwrap();
        buffer
    }

    /// Reads all its bytes, under a lease.
    fn bytes_of(&self, buffer: &DeferrableBuffer) -> Result<Vec<u8>, SpillError> {
        let lease = buffer.lease(Access::Shared, self.stream)?;
        self.sim.synchronize_stream(self.queue).unwrap();
        Ok(self.sim.peek(lease.address(0)).unwrap())
    }

    /// Evicts everything to the disk, as far as possible.
    fn send(&self, way: Way) {
        self.manager.spill(MIB(64));
        if matches!(way, Way::Pushed) {
            self.manager.relieve_host(MIB(512));
        }
    }
}

#[test]
fn compressed_contents_come_back_whichever_way_they_reached_the_disk() {
    for (way, choice) in
        WAYS.iter().flat_map(|way| [IoChoice::Auto, IoChoice::Threads].map(|choice| (*way, choice)))
    {
        let rig = plan(way, Some(open_io(choice, 8).unwrap().io)).build();
        let contents = [mixture(1, (20 << 20) + 12_345), mixture(2, (9 << 20) + 1)];
        let buffers = contents.each_ref().map(|bytes| rig.holding(bytes));
        for _ in 0..2 {
            rig.send(way);
            assert!(buffers.iter().all(|buffer| !buffer.is_resident()));
            for (buffer, bytes) in buffers.iter().zip(&contents) {
                assert!(&rig.bytes_of(buffer).unwrap() == bytes, "{way:?} {choice:?}");
            }
        }
        rig.check();
        // A third is as it was, of the rest less than a third is left.
        let all: u64 = contents.iter().map(|bytes| bytes.len() as u64).sum();
        let on_disk = rig.total(SpaceId::disk(0)).count();
        assert!((all / 3..all * 6 / 10).contains(&on_disk), "{on_disk} of {all}");
        let stats = rig.store.as_ref().unwrap().stats().compression;
        assert!(stats.writes > 0 && stats.bytes > stats.on_disk, "{stats:?}");
        assert!(stats.decompressed * 2 > stats.bytes, "{stats:?}");
        // What moved is counted in bytes of the contents.
        assert_eq!(rig.manager.stats().to_disk_bytes, all);
        drop(buffers);
        rig.expect_nothing();
    }
}

#[test]
fn contents_that_do_not_compress_are_on_the_disk_as_they_are() {
    for way in WAYS {
        let rig = plan(way, None).build();
        let mut bytes = vec![0; 20 << 20];
        fastrand::Rng::with_seed(3).fill(&mut bytes);
        let buffer = rig.holding(&bytes);
        rig.send(way);
        assert_eq!(rig.total(SpaceId::disk(0)), MIB(20));
        assert!(rig.bytes_of(&buffer).unwrap() == bytes);
        let stats = rig.store.as_ref().unwrap().stats().compression;
        assert_eq!((stats.writes, stats.saved_too_little), (0, 5), "{way:?}");
        drop(buffer);
        rig.expect_nothing();
    }
}

#[test]
fn a_bit_that_flipped_in_compressed_contents_is_found_before_anybody_sees_them() {
    for way in WAYS {
        let rig = Plan { names: FileNames::Shown, ..plan(way, None) }.build();
        let bytes = mixture(5, 16 << 20);
        let buffer = rig.holding(&bytes);
        rig.send(way);
        let at = 4096 + (1 << 20) + 77;
        flip(&rig, at);
        let error = rig.bytes_of(&buffer).err().unwrap();
        let SpillError::Damaged { error: found, .. } = &error else { panic!("{error}") };
        assert!(matches!(found, DiskTierError::Corrupt { .. }), "{error}");
        assert!(!buffer.is_resident(), "what is wrong is never lent");
        flip(&rig, at);
        assert!(rig.bytes_of(&buffer).unwrap() == bytes);
        rig.check();
    }
}

#[test]
fn contents_whose_compressed_bytes_cannot_be_written_or_read_stay_whole_where_they_were() {
    for (way, code) in WAYS.iter().flat_map(|way| [EIO, ENOSPC].map(|code| (*way, code))) {
        let io = Faulty::new();
        let rig = plan(way, Some(Arc::<Faulty>::clone(&io))).build();
        let bytes = mixture(7, (24 << 20) + 5);
        let buffer = rig.holding(&bytes);
        for good in [0, 1, 5] {
            let mut seen = 0;
            io.set(move |request| {
                seen += u32::from(request.direction == Direction::Write);
                let hit = request.direction == Direction::Write && seen > good;
                if hit { Fault::Fail(code) } else { Fault::None }
            });
            rig.send(way);
            assert!(rig.manager.stats().failures > 0, "{way:?} {code} {good}");
            rig.check();
            io.heal();
            assert!(rig.bytes_of(&buffer).unwrap() == bytes);
            // Written again, it has no copy below.
            drop(buffer.lease(Access::Exclusive, rig.stream).unwrap());
        }
        rig.send(way);
        io.set(fail(Direction::Read, EIO));
        let error = rig.bytes_of(&buffer).err().unwrap();
        assert!(matches!(error, SpillError::Move(MoveError::Disk { .. })), "{error}");
        io.heal();
        assert!(rig.bytes_of(&buffer).unwrap() == bytes);
        drop(buffer);
        rig.expect_nothing();
    }
}

#[test]
fn failures_of_the_disk_at_random_lose_no_compressed_contents() {
    for seed in 0..6 {
        let io = Faulty::new();
        let way = WAYS[(seed % 2) as usize];
        let rig = plan(way, Some(Arc::<Faulty>::clone(&io))).build();
        let mut random = fastrand::Rng::with_seed(seed);
        let contents = [1, 2, 3].map(|index| mixture(seed * 3 + index, random.u64(5..20) << 20));
        let buffers = contents.each_ref().map(|bytes| rig.holding(bytes));
        let mut dice = fastrand::Rng::with_seed(seed + 1000);
        io.set(move |_| match dice.u32(..40) {
            0 => Fault::Fail(EIO),
            1 => Fault::Fail(ENOSPC),
            2..6 => Fault::Short(Bytes::kib(4)),
            6..9 => Fault::Fail(EINTR),
            _ => Fault::None,
        });
        for _ in 0..8 {
            rig.send(way);
            for buffer in &buffers {
                // It may fail.
                let _ = buffer.lease(Access::Exclusive, rig.stream);
            }
            rig.manager.audit().unwrap();
        }
        io.heal();
        for (buffer, bytes) in buffers.iter().zip(&contents) {
            assert!(&rig.bytes_of(buffer).unwrap() == bytes, "{way:?} {seed}");
        }
        rig.check();
        drop(buffers);
        rig.expect_nothing();
    }
}

// --- Contents in a store of the program ---

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

// --- A host that is small beside the staging of a disk ---

#[test]
fn a_host_smaller_than_the_staging_of_the_disk_takes_copies_in_its_other_half() {
    let staging = MoverConfig { step: MIB(4), ..MoverConfig::default() };
    let staging = staging.step * u64::from(staging.staging_pieces);
    let rig = Plan { host: staging, disk: Some(MIB(512)), ..Plan::default() }.build();
    let buffers: Vec<_> = (0..6).map(|byte| rig.filled(PIECE, byte)).collect();
    rig.sim.synchronize_stream(rig.queue).unwrap();
    assert_eq!(rig.manager.spill(MIB(48)).freed, MIB(48));
    let census = rig.manager.census();
    assert_eq!(
        (census.host_copies, census.disk_copies),
        (staging.round_down(PIECE) - PIECE, MIB(40))
    );
    let on_host = buffers.iter().flat_map(|buffer| buffer.states());
    let on_host =
        on_host.filter(|state| matches!(state, PieceState::Spilled { copies } if copies.host));
    assert_eq!(on_host.count(), 1);
    for (byte, buffer) in (0..).zip(&buffers) {
        rig.expect(buffer, byte);
    }
    rig.check();
}

// --- A process that is killed while it spills, and the next one ---

/// A rig with its files in `directory`.
fn spilling(directory: &Path, names: FileNames) -> Rig {
    Plan { names, directory: Some(directory.to_owned()), ..to_disk(None) }.build()
}

/// In the child: spills buffers to the disk and restores them until it is killed.
fn spill_until_killed(directory: &Path) -> ! {
    let rig = spilling(directory, faulty::names());
    let buffers: Vec<_> = (1..=4).map(|byte| rig.filled(MIB(24), byte)).collect();
    let mut told = false;
    loop {
        for (buffer, byte) in buffers.iter().zip(1..) {
            rig.fill(buffer, byte);
        }
        rig.manager.spill(MIB(64));
        if !std::mem::replace(&mut told, true) {
            faulty::ready();
        }
    }
}

fn files(directory: &Path) -> usize {
    std::fs::read_dir(directory).unwrap().count()
}

#[test]
fn of_a_process_killed_while_it_spills_no_file_is_left_at_the_next_start() {
    if let Some(directory) = faulty::directory() {
        spill_until_killed(&directory);
    }
    let name = "compressed::of_a_process_killed_while_it_spills_no_file_is_left_at_the_next_start";
    let directory = tempfile::tempdir().unwrap();
    let child = Child::start(name, directory.path(), FileNames::Shown);
    child.kill();
    assert!(files(directory.path()) > 0);
    let next = || spilling(directory.path(), FileNames::Shown);
    // The kernel closes the last files once their transfers have ended.
    until(|| next().store.as_ref().unwrap().swept().in_use == 0);
    assert_eq!(files(directory.path()), 0);
    let rig = next();
    let buffer = rig.filled(MIB(24), 5);
    rig.manager.spill(MIB(24));
    rig.expect(&buffer, 5);
    drop(buffer);
    drop(rig);
    assert_eq!(files(directory.path()), 0);
}

#[test]
fn hidden_files_of_a_process_killed_while_it_spills_are_gone_at_once() {
    if let Some(directory) = faulty::directory() {
        spill_until_killed(&directory);
    }
    let name = "compressed::hidden_files_of_a_process_killed_while_it_spills_are_gone_at_once";
    let directory = tempfile::tempdir().unwrap();
    let child = Child::start(name, directory.path(), FileNames::Hidden);
    assert_eq!(files(directory.path()), 0);
    child.kill();
    assert_eq!(files(directory.path()), 0);
}
