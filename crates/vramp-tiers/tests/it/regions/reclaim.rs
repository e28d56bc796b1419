//! Host memory of blocks that are freed while their region sleeps.

use super::*;

#[test]
fn what_is_freed_while_a_region_sleeps_leaves_the_host_and_the_rest_is_whole() {
    for keep in [0, 20, 60] {
        let rig = rig(Bytes::mib(128));
        let region = rig.region("weights", RegionOptions::default());
        let mut blocks: Vec<Option<Allocation>> =
            (1..=12).map(|n| Some(rig.block(&region, MIB * 5 + Bytes::kib(n), n as u8))).collect();
        pause(&rig, "weights", MIB * keep).unwrap();
        let before = region.status().on_host;
        for nth in [0, 3, 4, 7, 8, 9, 11] {
            let block = blocks[nth].take().unwrap();
            region.allocator().free(block, rig.stream).unwrap();
        }
        rig.regions.reclaim();
        let after = region.status().on_host;
        let most = if keep == 0 { MIB * 28 } else { before };
        assert!(after < most.max(MIB), "{after} of {before} stay with {keep} MiB on the card");
        assert_eq!(rig.host.space().total(), after);
        let mut bytes = vec![0; 5 << 20];
        for (nth, block) in blocks.iter().enumerate() {
            let Some(block) = block else { continue };
            match rig.regions.read_backup(block.addr(), &mut bytes) {
                Ok(()) => assert!(vramp_testing::is_filled(&bytes, nth as u8 + 1)),
                Err(error) => assert!(keep > 0, "{error}"),
            }
        }
        // What stays on the card leaves too, behind what was moved together.
        pause(&rig, "weights", Bytes::ZERO).unwrap();
        rig.regions.resume(&["weights"]).unwrap();
        for (nth, block) in blocks.into_iter().enumerate() {
            let Some(block) = block else { continue };
            rig.holds(&block, nth as u8 + 1);
            region.allocator().free(block, rig.stream).unwrap();
        }
        assert_eq!(rig.host.space().total(), Bytes::ZERO);
        assert_eq!(rig.card.hazards(), []);
    }
}

#[test]
fn a_copy_of_which_all_was_freed_is_dropped_wherever_it_is() {
    for backup in [Backup::Host, Backup::Disk] {
        let disk = disk::disk_rig(Bytes::mib(64));
        let rig = &disk.rig;
        let options = RegionOptions { backup, ..RegionOptions::default() };
        let region = rig.region("moments", options);
        let blocks: Vec<Allocation> = (1..=4).map(|n| rig.block(&region, MIB * 3, n)).collect();
        pause(rig, "moments", Bytes::ZERO).unwrap();
        for block in blocks {
            assert!(region.keeps_copy_asleep());
            let len = block.len();
            region.allocator().free(block, rig.stream).unwrap();
            region.note_free(len);
        }
        let RegionStatus { on_host, on_disk, phase, .. } = region.status();
        assert_eq!((on_host, on_disk, phase), (Bytes::ZERO, Bytes::ZERO, Phase::Asleep));
        rig.regions.resume(&["moments"]).unwrap();
        let block = rig.block(&region, MIB * 3, 9);
        rig.holds(&block, 9);
        region.allocator().free(block, rig.stream).unwrap();
    }
}

#[test]
fn frees_copy_at_most_three_bytes_for_each_that_they_free() {
    let rig = rig(Bytes::mib(128));
    let region = rig.region("weights", RegionOptions::default());
    let mut blocks: Vec<Allocation> =
        (0..64).map(|n| rig.block(&region, MIB * 2 - Bytes::kib(64), n)).collect();
    pause(&rig, "weights", Bytes::ZERO).unwrap();
    let (mut before, mut moved, mut freed) = (region.status().on_host, Bytes::ZERO, Bytes::ZERO);
    while let Some(block) = blocks.pop() {
        let len = block.len();
        region.allocator().free(block, rig.stream).unwrap();
        region.note_free(len);
        freed += len;
        let now = region.status().on_host;
        if now < before {
            moved += now;
        }
        before = now;
        let held = MIB * 2 * blocks.len() as u64;
        assert!(now <= held + held, "{now} on the host for {held}");
    }
    assert!(moved <= freed * 3, "{moved} moved for {freed}");
    assert_eq!((before, rig.host.space().total()), (Bytes::ZERO, Bytes::ZERO));
}
