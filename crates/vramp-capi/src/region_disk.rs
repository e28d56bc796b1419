//! The disk of the process for backups of regions, which counts for allocators without tiers that have a
//! disk.
//!
//! 1. [`choose`] opens a store in a directory of the program's choice. Without a choice the first region or
//!    pause that needs a disk opens one in the directory of [`set_default`].
//! 2. All allocators of the process share the store. Another choice counts for copies from then on; a
//!    store ends with its last copy.
//! 3. Its files have no names where the filesystem allows that, and end with the process.
//!
//! The space is the filesystem's free space, or the part of it that the program allows. A directory whose
//! files are in memory is not chosen by itself: a backup there would save nothing.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use vramp_alloc::Bytes;
use vramp_host::topology::{Directory, Topology};
use vramp_tiers::disk::DiskConfig;
use vramp_tiers::{DiskStore, ReservationManager, SpaceConfig, SpaceId};

use crate::regions::RegionTable;
use crate::status::{Failure, Kind, Result};

/// Filesystems that keep files in memory.
const IN_MEMORY: [&str; 2] = ["tmpfs", "ramfs"];

/// Preallocated at a time. A small backup takes no more.
const FILE_SIZE: Bytes = Bytes::mib(256);

#[derive(Default)]
struct Chosen {
    store: Option<Arc<DiskStore>>,
    /// Where a store is opened when the first one is needed.
    default: Option<PathBuf>,
    /// Tables of regions that use it.
    tables: Vec<Weak<RegionTable>>,
}

static CHOSEN: Mutex<Chosen> =
    Mutex::new(Chosen { store: None, default: None, tables: Vec::new() });

fn chosen() -> MutexGuard<'static, Chosen> {
    CHOSEN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the store, if one was opened.
pub(crate) fn opened() -> Option<Arc<DiskStore>> {
    chosen().store.clone()
}

/// Lets a table of regions hear of other choices. O(tables).
pub(crate) fn register(table: &Arc<RegionTable>) {
    let mut chosen = chosen();
    chosen.tables.retain(|other| other.strong_count() > 0);
    if !chosen.tables.iter().any(|other| std::ptr::eq(other.as_ptr(), Arc::as_ptr(table))) {
        chosen.tables.push(Arc::downgrade(table));
    }
}

/// Names the directory in which a store is opened when one is needed and none was chosen.
pub(crate) fn set_default(directory: &Path) {
    chosen().default = Some(directory.to_owned());
}

/// Opens a store in the default directory unless there is a store.
pub(crate) fn open_default() -> Result<()> {
    let directory = {
        let chosen = chosen();
        if chosen.store.is_some() {
            return Ok(());
        }
        chosen.default.clone()
    };
    let Some(directory) = directory else {
        let text = "regions have no disk for their backups: open tiers with a disk, or choose a directory by \
                    vramp.set_region_disk in Python or vramp_region_set_disk in C";
        return Err(Failure::new(Kind::Option, text));
    };
    let found = look_at(&directory)?;
    if let Some(mount) = &found.mount
        && IN_MEMORY.contains(&mount.filesystem.as_str())
    {
        let text = format!(
            "regions need a directory for their backups on a disk, and {} is in memory: choose one by \
             vramp.set_region_disk in Python or vramp_region_set_disk in C",
            directory.display()
        );
        return Err(Failure::new(Kind::Option, text));
    }
    set(open(&directory, found.free)?);
    Ok(())
}

/// Opens a store of at most `limit` bytes in a directory, or of the free space there. It counts for copies
/// from now on.
pub(crate) fn choose(directory: &Path, limit: Option<Bytes>) -> Result<()> {
    let found = look_at(directory)?;
    set(open(directory, limit.unwrap_or(found.free))?);
    Ok(())
}

fn set(store: DiskStore) {
    let (before, tables) = {
        let mut chosen = chosen();
        (chosen.store.replace(Arc::new(store)), chosen.tables.clone())
    };
    tables.iter().filter_map(Weak::upgrade).for_each(|table| table.use_what_counts());
    // The store of the one before may end here, outside of the lock.
    drop(before);
}

fn look_at(directory: &Path) -> Result<Directory> {
    let failed = |error: String| {
        let text = format!("{}: {error}: choose another directory", directory.display());
        Failure::new(Kind::File, text)
    };
    let topology = Topology::discover().map_err(|error| failed(error.to_string()))?;
    topology.directory(directory).map_err(|error| failed(error.to_string()))
}

fn open(directory: &Path, capacity: Bytes) -> Result<DiskStore> {
    let id = SpaceId::disk(0);
    let spaces = ReservationManager::new([(id, SpaceConfig::disk(capacity))])
        .map_err(|error| Failure::new(Kind::Option, error.to_string()))?;
    let space = spaces.space(id).expect("it was configured");
    let config = DiskConfig { file_size: FILE_SIZE, ..DiskConfig::default() };
    Ok(DiskStore::open(directory, config, &space)?)
}
