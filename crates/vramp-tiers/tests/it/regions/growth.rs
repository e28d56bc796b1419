//! How pauses and resumes grow.

use std::sync::atomic::{AtomicU64, Ordering};

use super::disk::{ON_DISK, disk_rig};
use super::*;
use vramp_host::{BlockIo, DirectFile, DiskError, IoRequest};
use vramp_tiers::disk::{Checksum, DiskConfig};
use vramp_tiers::{DiskStore, ReservationManager, SpaceConfig, SpaceId};

/// A disk that keeps nothing and counts calls.
#[derive(Default)]
struct Counted {
    calls: AtomicU64,
    bytes: AtomicU64,
}

impl BlockIo for Counted {
    fn name(&self) -> &'static str {
        "counted"
    }

    fn depth(&self) -> usize {
        16
    }

    fn submit(&self, batch: Vec<IoRequest>) {
        for request in batch {
            let len = request.span.len();
            self.calls.fetch_add(1, Ordering::Relaxed);
            self.bytes.fetch_add(len.count(), Ordering::Relaxed);
            (request.done)(Ok(len));
        }
    }

    fn preallocate(&self, _: &DirectFile, _: Bytes) -> Result<(), DiskError> {
        Ok(())
    }
}

/// Longer than what slabs have, so that each block is a piece of its own.
const PIECE: Bytes = Bytes::mib(2);

/// Calls of a pause and a resume, with so many pieces of contents that have no neighbours.
struct Counts {
    copies: u64,
    driver: u64,
    disk: u64,
    bytes: Bytes,
}

fn count(pieces: usize, backup: Backup) -> Counts {
    let card = Arc::new(Simulator::builder().memory(Bytes::gib(64)).build());
    let driver: Arc<dyn Driver> = card.clone();
    let allocator = Allocator::new(driver.clone(), Config::default()).unwrap();
    let stream = allocator.create_stream().unwrap();
    let host = HostPool::new(&space(Bytes::gib(1)), BLOCKS, [driver.clone()]).unwrap();
    let config = MoverConfig { step: MIB * 4, steps_in_flight: 4, staging_pieces: 4 };
    let regions = Regions::new(Mover::new(driver, &host, config).unwrap());
    let disk = SpaceId::disk(0);
    let manager = ReservationManager::new([(disk, SpaceConfig::disk(Bytes::gib(32)))]).unwrap();
    let (dir, io) = (tempfile::tempdir().unwrap(), Arc::new(Counted::default()));
    let config = DiskConfig { checksum: Checksum::Off, ..DiskConfig::default() };
    let on_disk = manager.space(disk).unwrap();
    let store = DiskStore::open_with(dir.path(), config, &on_disk, Arc::<Counted>::clone(&io));
    regions.set_disk(Some(Arc::new(store.unwrap())));
    let options = RegionOptions { backup, read_only: false, graph_pins: true };
    let region = regions.region(&allocator, "weights", options).unwrap();
    let malloc = |_| region.allocator().malloc(PIECE, stream).unwrap();
    let mut blocks: Vec<Allocation> = (0..pieces * 2).map(malloc).collect();
    blocks.sort_by_key(Allocation::addr);
    for block in blocks.into_iter().step_by(2) {
        region.allocator().free(block, stream).unwrap();
    }
    let (calls, copies) = (card.calls(), card.calls_of(Call::CopyToHost));
    regions.pause(&["weights"], PauseOptions::default()).unwrap();
    let bytes = region.status().copied;
    regions.resume(&["weights"]).unwrap();
    assert_eq!(bytes, PIECE * pieces as u64, "one piece for each block");
    Counts {
        copies: card.calls_of(Call::CopyToHost) - copies,
        driver: card.calls() - calls,
        disk: io.calls.load(Ordering::Relaxed),
        bytes: Bytes::new(io.bytes.load(Ordering::Relaxed)),
    }
}

#[test]
fn calls_grow_with_the_pieces_of_contents_and_no_faster() {
    // Pinned memory of the host is real, so there are fewer pieces.
    let sizes = [(Backup::Host, &[10, 100, 300][..]), (Backup::Disk, &[10, 100, 1_000, 10_000])];
    for (backup, sizes) in sizes {
        let mut last: Option<(u64, Counts)> = None;
        for &pieces in sizes {
            let (now, many) = (count(pieces, backup), pieces as u64);
            // A piece lies in two steps, or in several blocks of a buffer.
            assert!((many..=many * 4).contains(&now.copies), "{} of {pieces}", now.copies);
            assert!(now.driver <= many * 20 + 60, "{} driver calls for {pieces}", now.driver);
            // Each byte is written and read once, in disk calls of 1 MiB.
            let on_disk = if backup == Backup::Disk { PIECE * many * 2 } else { Bytes::ZERO };
            assert_eq!((now.bytes, Bytes::mib(now.disk)), (on_disk, on_disk));
            if let Some((fewer, before)) = last {
                let most = before.driver * (many / fewer) + 60;
                assert!(now.driver <= most, "{} driver calls, at most {most}", now.driver);
            }
            last = Some((many, now));
        }
    }
}

#[test]
fn hundreds_of_pauses_leave_no_file_and_no_host_memory() {
    let disk = disk_rig(Bytes::mib(64));
    let rig = &disk.rig;
    let region = rig.region("weights", ON_DISK);
    let read_only = rig.region("read only", RegionOptions { read_only: true, ..ON_DISK });
    let one = rig.block(&region, MIB + Bytes::kib(3), 1);
    let two = rig.block(&read_only, MIB * 2, 2);
    let mut steady = 0;
    for round in 0..vramp_testing::cases(300) {
        rig.regions.pause(&["weights", "read only"], PauseOptions::default()).unwrap();
        if round % 3 == 0 {
            rig.regions.prefetch("weights").unwrap();
        }
        rig.regions.resume(&["weights", "read only"]).unwrap();
        assert_eq!(rig.host.space().total(), Bytes::ZERO);
        assert_eq!(disk.space.total(), MIB * 2, "the copy of the read-only region");
        let extents = disk.store.stats().extents;
        match round {
            10 => steady = extents.backings,
            11.. => assert!(extents.backings <= steady, "{extents:?}"),
            _ => {}
        }
    }
    rig.holds(&one, 1);
    rig.holds(&two, 2);
    let discard = PauseOptions { discard: true, ..PauseOptions::default() };
    rig.regions.pause(&["read only"], discard).unwrap();
    disk.assert_empty();
}
