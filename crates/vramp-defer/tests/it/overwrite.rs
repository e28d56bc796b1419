//! Leases that overwrite: nothing is restored, and what a cancelled one leaves.

use vramp_alloc::Driver;
use vramp_defer::events::BufferChange;
use vramp_defer::{Access, LeaseRefused, SpillError, SpillTier};
use vramp_tiers::Bytes;

use super::{MIB, PIECE, Plan, patient, rig};

#[test]
fn nothing_is_copied_back_for_what_is_overwritten() {
    let rig = rig();
    let buffer = rig.filled(PIECE * 3, 1);
    buffer.spill().unwrap();
    let events = rig.manager.events(16);
    let lease = buffer.lease(Access::Overwrite, rig.stream).unwrap();
    rig.sim.fill(rig.queue, lease.address(0), 2).unwrap();
    drop(lease);
    assert_eq!(rig.manager.stats().from_host_bytes, 0);
    assert!(buffer.is_resident());
    let overwritten = BufferChange::Overwritten { bytes: PIECE * 3 };
    let all = [BufferChange::Locked, overwritten, BufferChange::Unlocked];
    assert_eq!(
        std::iter::from_fn(|| events.try_recv().ok()).map(|e| e.change).collect::<Vec<_>>(),
        all
    );
    rig.expect(&buffer, 2);
    buffer.spill().unwrap();
    assert_eq!(rig.manager.stats().to_host_bytes, PIECE.count() * 6, "the old copies were stale");
    rig.expect(&buffer, 2);
    rig.check();
}

#[test]
fn a_cancelled_overwrite_leaves_the_contents_as_they_were() {
    let rig = rig();
    let buffer = rig.filled(PIECE * 2, 1);
    buffer.spill().unwrap();
    buffer.lease(Access::Overwrite, rig.stream).unwrap().cancel();
    assert!(buffer.is_deferred());
    rig.expect(&buffer, 1);
    buffer.lease(Access::Overwrite, rig.stream).unwrap().cancel();
    rig.expect(&buffer, 1);
    // An empty one stays empty.
    let empty = rig.manager.buffer(PIECE).unwrap();
    empty.lease(Access::Overwrite, rig.stream).unwrap().cancel();
    assert_eq!(rig.manager.census().empty, PIECE);
    rig.check();
}

#[test]
fn it_is_exclusive_and_all_of_it_counts_as_written() {
    let rig = rig();
    let buffer = rig.filled(PIECE * 2, 1);
    buffer.spill().unwrap();
    let mut lease = buffer.lease(Access::Overwrite, rig.stream).unwrap();
    let now = std::time::Instant::now();
    let second = rig.manager.lease_on(&[(&buffer, Access::Shared)], &[rig.stream], now);
    assert!(matches!(second, Err(SpillError::Refused(LeaseRefused::Busy { .. }))), "{second:?}");
    rig.sim.fill(rig.queue, lease.address(0), 2).unwrap();
    lease.wrote_only(0, Bytes::ZERO, Bytes::new(1)).unwrap();
    drop(lease);
    buffer.spill().unwrap();
    rig.expect(&buffer, 2);
    rig.check();
}

#[test]
fn a_part_or_a_buffer_that_is_also_read_is_restored() {
    let rig = rig();
    let buffer = rig.filled(PIECE * 2, 1);
    let part = buffer.view(Bytes::ZERO, PIECE).unwrap();
    buffer.spill().unwrap();
    let lease = part.lease(Access::Overwrite, rig.stream).unwrap();
    rig.sim.fill(rig.queue, lease.address(0), 2).unwrap();
    drop(lease);
    rig.expect(&part, 2);
    rig.expect(&buffer.view(PIECE, PIECE).unwrap(), 1);
    buffer.spill().unwrap();
    let both = [(&buffer, Access::Overwrite), (&part, Access::Shared)];
    drop(rig.manager.lease(&both, rig.stream).unwrap());
    rig.expect(&part, 2);
    rig.check();
}

#[test]
fn other_buffers_of_the_lease_are_restored() {
    let rig = rig();
    let [source, target] = [rig.filled(PIECE, 1), rig.filled(PIECE, 2)];
    rig.manager.spill(MIB(64));
    let set = [(&source, Access::Shared), (&target, Access::Overwrite)];
    let lease = rig.manager.lease(&set, rig.stream).unwrap();
    assert_eq!(rig.manager.stats().from_host_bytes, PIECE.count());
    rig.sim.fill(rig.queue, lease.address(1), 3).unwrap();
    drop(lease);
    rig.expect(&source, 1);
    rig.expect(&target, 3);
    rig.check();
}

#[test]
fn writing_all_from_the_host_restores_nothing_and_repairs_a_corrupt_buffer() {
    use vramp_tiers::disk::FileNames;
    let rig = Plan { disk: Some(MIB(512)), names: FileNames::Shown, ..patient() }.build();
    let buffer = rig.filled(PIECE, 1);
    buffer.spill_to(SpillTier::Disk).unwrap();
    for file in std::fs::read_dir(rig.store.as_ref().unwrap().dir().unwrap()).unwrap() {
        use std::os::unix::fs::FileExt;
        let file = std::fs::OpenOptions::new().write(true).open(file.unwrap().path()).unwrap();
        for at in (0..32 << 20).step_by(1 << 16) {
            file.write_all_at(b"damaged", at).unwrap();
        }
    }
    let error = buffer.lease(Access::Exclusive, rig.stream).unwrap_err();
    assert!(error.to_string().contains("write them anew"), "{error}");
    let whole = vec![7; PIECE.count() as usize];
    buffer.write(Bytes::ZERO, &whole).unwrap();
    rig.expect(&buffer, 7);
    buffer.spill().unwrap();
    rig.expect(&buffer, 7);
    rig.check();
}
