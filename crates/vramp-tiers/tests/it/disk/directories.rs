//! Sweeping a directory, and directories that cannot be used.

use std::fs;
use std::path::Path;

use vramp_host::DiskErrorKind;
use vramp_tiers::disk::{ChargeTo, DiskTierError, SweepReport};

use super::*;

fn open(dir: &Path) -> Result<DiskStore, DiskTierError> {
    let (_manager, space) = space();
    DiskStore::open(dir, SMALL, &space)
}

#[test]
fn directories_that_will_not_do_are_errors_that_name_them() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("missing");
    let error = open(&missing).unwrap_err();
    assert!(matches!(error, DiskTierError::NoDirectory { .. }), "{error}");
    assert!(error.to_string().contains("missing"), "{error}");
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    let error = open(&file).unwrap_err();
    assert!(matches!(error, DiskTierError::NoDirectory { .. }), "{error}");
    // Not even root creates files there.
    let error = open(Path::new("/sys")).unwrap_err();
    let DiskTierError::Disk(disk) = &error else { panic!("{error}") };
    assert_eq!(disk.kind, DiskErrorKind::Denied);
    assert!(error.to_string().contains("/sys/vramp-"), "{error}");
}

#[test]
fn a_space_that_is_no_disk_and_odd_granules_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (manager, _) = space();
    let host = manager.space(SpaceId::host(0)).unwrap();
    // Its granule of 1 MiB is refused first.
    assert!(matches!(DiskStore::open(dir.path(), SMALL, &host), Err(DiskTierError::Config(_))));
    let gpu = SpaceConfig { granule: Bytes::new(512), ..SpaceConfig::gpu(Bytes::gib(1)) };
    let manager = ReservationManager::new([(SpaceId::gpu(0), gpu)]).unwrap();
    let gpu = manager.space(SpaceId::gpu(0)).unwrap();
    let error = DiskStore::open(dir.path(), SMALL, &gpu).unwrap_err();
    assert_eq!(error, DiskTierError::NotADisk(SpaceId::gpu(0)));
}

#[test]
fn two_living_stores_share_a_directory_and_leave_each_others_files_alone() {
    let dir = tempfile::tempdir().unwrap();
    let one = open(dir.path()).unwrap();
    let data = pattern(1, 1 << 20);
    let stored = one.write(&[span(&data)], ChargeTo::Space).unwrap();
    let other = open(dir.path()).unwrap();
    assert_eq!(other.swept(), SweepReport { in_use: 1, ..SweepReport::default() });
    drop(other);
    let back = zeros(1 << 20);
    one.read(&stored, std::slice::from_ref(&back)).unwrap();
    assert!(bytes_of(&back) == data);
}

#[test]
fn strangers_and_garbage_are_left_alone_and_only_what_is_ours_is_swept() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let name = |index: u32| format!("vramp-4711-00000000deadbeef-{index}.segment");
    // A dead store's file: a copy of a live one under another name.
    let store = open(dir.path()).unwrap();
    let _stored = store.write(&[zeros(4096)], ChargeTo::Space).unwrap();
    let ours = files(dir.path()).remove(0);
    let copy = fs::read(&ours).unwrap();
    let own = ours.file_name().unwrap().to_str().unwrap().replace("-1.segment", "-99.segment");
    fs::write(at(&own), &copy).unwrap();
    // Created, but never written.
    fs::write(at(&name(0)), "").unwrap();
    fs::write(at(&name(1)), [0; 4096]).unwrap();
    // Names of this format with another content: another owner's header, garbage, a directory.
    fs::write(at(&name(2)), &copy).unwrap();
    fs::write(at(&name(3)), "garbage").unwrap();
    fs::create_dir(at(&name(4))).unwrap();
    // Other names.
    fs::write(at("data.bin"), "data").unwrap();
    fs::write(at("vramp-1-2-3.segment"), "").unwrap();

    let swept = open(dir.path()).unwrap().swept();
    let bytes = Bytes::new(copy.len() as u64) + Bytes::kib(4);
    assert_eq!(swept, SweepReport { removed: 3, bytes, in_use: 1, foreign: 3 });
    for kept in [name(2), name(3), name(4), "data.bin".into(), "vramp-1-2-3.segment".into()] {
        assert!(at(&kept).exists(), "{kept}");
    }
    for gone in [own, name(0), name(1)] {
        assert!(!at(&gone).exists(), "{gone}");
    }
    assert!(ours.exists());
}

#[test]
fn a_reservation_on_a_disk_has_the_directory_of_its_store() {
    let dir = tempfile::tempdir().unwrap();
    let (manager, disk) = space();
    let before = disk.request(Bytes::kib(4)).now().unwrap();
    assert_eq!((disk.directory(), before.directory()), (None, None));
    let store = DiskStore::open(dir.path(), SMALL, &disk).unwrap();
    assert_eq!(before.directory().as_deref(), store.dir());
    assert_eq!(disk.directory().as_deref(), Some(dir.path()));
    let host = manager.space(SpaceId::host(0)).unwrap();
    assert_eq!(host.request(Bytes::kib(4)).now().unwrap().directory(), None);
    // A program that writes files of its own names the directory itself.
    let other = tempfile::tempdir().unwrap();
    disk.set_directory(other.path());
    assert_eq!(before.directory().as_deref(), Some(other.path()));
}
