//! The disk store, on real files.

mod compressed;
mod faults;
mod stored;

use crate::common::faulty;
use std::path::Path;
use std::sync::Arc;

use tempfile::TempDir;
use vramp_host::{BlockIo, HostMemory, HostSpan, IoChoice, PageKind, open_io};
use vramp_tiers::disk::{DiskConfig, DiskTierError, FileNames};
use vramp_tiers::{Bytes, DiskStore, MemorySpace, ReservationManager, SpaceConfig, SpaceId};

const DISK: SpaceId = SpaceId::disk(0);

/// Files of 4 MiB with names, pieces of 64 KiB.
const SMALL: DiskConfig = DiskConfig {
    file_size: Bytes::mib(4),
    io: IoChoice::Auto,
    depth: 8,
    piece: Bytes::kib(64),
    checksum: vramp_tiers::disk::Checksum::Crc32,
    names: FileNames::Shown,
    compression: None,
};

/// A directory with a store in it, and its space of 64 MiB.
struct World {
    store: DiskStore,
    space: MemorySpace,
    manager: ReservationManager,
    dir: TempDir,
}

fn space() -> (ReservationManager, MemorySpace) {
    let manager = ReservationManager::new([
        (DISK, SpaceConfig::disk(Bytes::mib(64))),
        (SpaceId::disk(1), SpaceConfig::disk(Bytes::mib(64))),
        (SpaceId::host(0), SpaceConfig::host(Bytes::mib(64))),
    ]);
    let manager = manager.unwrap();
    let space = manager.space(DISK).unwrap();
    (manager, space)
}

fn world(config: DiskConfig) -> World {
    let io = open_io(config.io, config.depth).unwrap().io;
    world_with(config, io)
}

fn world_with(config: DiskConfig, io: Arc<dyn BlockIo>) -> World {
    let dir = tempfile::tempdir().unwrap();
    let (manager, space) = space();
    let store = DiskStore::open_with(dir.path(), config, &space, io).unwrap();
    World { store, space, manager, dir }
}

impl World {
    /// Checks that nothing is stored or charged.
    fn assert_empty(&self) {
        self.store.audit().unwrap();
        assert_eq!(self.store.stats().extents.used, Bytes::ZERO);
        assert_eq!(self.space.total(), Bytes::ZERO);
    }

    /// Checks that `bytes` are stored and charged.
    fn assert_holds(&self, bytes: Bytes) {
        self.store.audit().unwrap();
        assert_eq!((self.store.stats().extents.used, self.space.total()), (bytes, bytes));
    }

    fn read(&self, stored: &vramp_tiers::disk::StoredBytes) -> Result<Vec<u8>, DiskTierError> {
        let into = zeros(stored.len().count());
        self.store.read(stored, std::slice::from_ref(&into))?;
        Ok(bytes_of(&into))
    }
}

fn pattern(seed: u64, len: u64) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut bytes = vec![0; len as usize];
    random.fill(&mut bytes);
    bytes
}

fn zeros(len: u64) -> HostSpan {
    let memory = HostMemory::new(Bytes::new(len.max(1)), None, PageKind::Small).unwrap();
    HostSpan::new(&memory, Bytes::ZERO, Bytes::new(len)).unwrap()
}

fn span(bytes: &[u8]) -> HostSpan {
    let span = zeros(bytes.len() as u64);
    span.write(Bytes::ZERO, bytes).unwrap();
    span
}

fn bytes_of(span: &HostSpan) -> Vec<u8> {
    let mut bytes = vec![0; span.len().count() as usize];
    span.read(Bytes::ZERO, &mut bytes).unwrap();
    bytes
}

fn files(dir: &Path) -> Vec<std::path::PathBuf> {
    let entries = std::fs::read_dir(dir).unwrap();
    let mut files: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}
