//! State of a store: its files, and which extents of them are allocated.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::extents::{BackingId, Extent, ExtentAllocator, ExtentList, OutOfExtents};
use vramp_core::Bytes;
use vramp_host::{
    BlockIo, DISK_BLOCK, DirectFile, Direction, DiskError, DiskErrorKind, OsCode, ThreadPool,
};

use super::compress::{Compressor, Frames};
use super::config::{Checksum, DiskConfig, FileNames};
use super::core::growth::{FileLen, without};
use super::error::DiskTierError;
use super::files::{Header, OwnerId, file_name};
use super::spans::{FileRange, blocks};
use super::stats::Counters;
use crate::ledger::shell::charge::Charge;
use crate::ledger::shell::space::MemorySpace;

/// File names to try before creating a file fails.
const NAMES_TRIED: u32 = 8;

/// State shared by a store, its transfers and its [`FileBytes`].
pub(super) struct Shared {
    pub dir: PathBuf,
    pub config: DiskConfig,
    pub space: MemorySpace,
    pub io: Arc<dyn BlockIo>,
    /// Threads for checksums, bounce copies and compression.
    pub workers: ThreadPool,
    pub owner: OwnerId,
    /// `None` if the store never compresses.
    pub compressor: Option<Arc<Compressor>>,
    /// Locked while a file is created, which takes milliseconds. The state is not locked meanwhile.
    growing: Mutex<()>,
    state: Mutex<State>,
}

pub(super) struct State {
    pub extents: ExtentAllocator,
    pub files: BTreeMap<BackingId, Arc<DirectFile>>,
    pub allocations: BTreeMap<AllocationId, AllocationRecord>,
    pub counters: Counters,
    next_allocation: u64,
    next_file: u32,
    /// The store was dropped, so new files are unlinked too.
    unlinked: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct AllocationId(u64);

/// The extents of one write.
#[derive(Clone, Debug)]
pub(super) struct AllocationRecord {
    pub extents: ExtentList,
    pub charged: Bytes,
    /// Quarantined bytes that have no new place yet.
    pub lost: Bytes,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    pub fn new(
        dir: PathBuf,
        config: DiskConfig,
        space: MemorySpace,
        io: Arc<dyn BlockIo>,
        workers: ThreadPool,
        owner: OwnerId,
    ) -> Shared {
        let state = State {
            extents: ExtentAllocator::new(DISK_BLOCK),
            files: BTreeMap::new(),
            allocations: BTreeMap::new(),
            counters: Counters::default(),
            next_allocation: 0,
            next_file: 0,
            unlinked: false,
        };
        let (growing, state) = (Mutex::new(()), Mutex::new(state));
        let compressor = config.compression.map(|how| Arc::new(Compressor::new(how)));
        Shared { dir, config, space, io, workers, owner, compressor, growing, state }
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    pub fn verifies(&self) -> bool {
        self.config.checksum == Checksum::Crc32
    }

    /// Allocates extents for `len` bytes, in new files if needed. `charge` pays for them.
    pub fn allocate(
        self: &Arc<Shared>,
        len: Bytes,
        charge: Charge,
    ) -> Result<DiskAllocation, DiskTierError> {
        let id = self.allocate_extents(len, charge.bytes())?;
        Ok(DiskAllocation { shared: Arc::clone(self), id, charge })
    }

    /// Allocates extents for `len` bytes. The caller keeps the charge of `charged` until it makes a
    /// [`DiskAllocation`].
    pub fn allocate_extents(
        &self,
        len: Bytes,
        charged: Bytes,
    ) -> Result<AllocationId, DiskTierError> {
        self.with_growth(|state| {
            let extents = state.extents.alloc(len)?;
            let id = AllocationId(state.next_allocation);
            state.next_allocation += 1;
            state.allocations.insert(id, AllocationRecord { extents, charged, lost: Bytes::ZERO });
            Ok(id)
        })
    }

    /// Calls `alloc`, and again after each file that is added, until it succeeds or no file can be
    /// added.
    fn with_growth<T>(
        &self,
        mut alloc: impl FnMut(&mut State) -> Result<T, OutOfExtents>,
    ) -> Result<T, DiskTierError> {
        if let Ok(got) = alloc(&mut self.state()) {
            return Ok(got);
        }
        let _alone = lock(&self.growing);
        loop {
            // Another thread may have added a file meanwhile.
            let allocated = alloc(&mut self.state());
            match allocated {
                Ok(got) => return Ok(got),
                Err(OutOfExtents { asked, free }) => self.grow(asked - free)?,
            }
        }
    }

    /// Adds a file for at least `missing` bytes, shorter than configured if the disk is nearly
    /// full.
    fn grow(&self, missing: Bytes) -> Result<(), DiskTierError> {
        let census = self.state().extents.census();
        let config = &self.config;
        let mut file_len =
            FileLen::first(config.file_size, self.space.capacity(), &census, missing);
        let made = loop {
            match (self.make_file(file_len.len()), file_len.shorter()) {
                (Err(error), Some(shorter)) if error.kind == DiskErrorKind::Full => {
                    file_len = shorter;
                }
                (made, _) => break made,
            }
        };
        let mut state = self.state();
        match made {
            Ok(file) => {
                if state.unlinked {
                    drop(file.unlink());
                }
                let id = state.extents.add(file_len.len());
                state.files.insert(id, Arc::new(file));
                Ok(())
            }
            Err(error) => {
                let error = DiskTierError::Disk(error);
                state.counters.count_error(&error);
                Err(error)
            }
        }
    }

    /// Creates a locked file with its header and preallocated blocks for `len` bytes.
    pub fn make_file(&self, len: Bytes) -> Result<DirectFile, DiskError> {
        let mut tried = 0;
        let file = loop {
            let index = {
                let mut state = self.state();
                state.next_file += 1;
                state.next_file - 1
            };
            tried += 1;
            let path = self.dir.join(file_name(self.owner, index));
            let made = match self.config.names {
                FileNames::Hidden => DirectFile::create_unnamed(&path),
                FileNames::Shown => DirectFile::create(&path),
            };
            match made {
                // A sweep of another store removed it before it was locked.
                Err(error) if error.kind == DiskErrorKind::Exists && tried < NAMES_TRIED => {}
                made => break made?,
            }
        };
        let whole = len + DISK_BLOCK;
        let failed = |code| DiskError::of_file("writing its header", file.path(), OsCode(code));
        let header = blocks(DISK_BLOCK).map_err(|_| failed(NO_MEMORY))?;
        let bytes = Header { owner: self.owner, len: whole }.encode();
        header.write(Bytes::ZERO, &bytes).expect("the header is one block");
        file.transfer_now(Direction::Write, Bytes::ZERO, &header)?;
        self.io.preallocate(&file, whole)?;
        Ok(file)
    }

    /// Returns where the first `len` bytes of an allocation lie, in order. All extents but the last
    /// are full.
    pub fn places(&self, allocation: &DiskAllocation, len: Bytes) -> Vec<FileRange> {
        let state = self.state();
        let mut left = len;
        let extents = state.allocations[&allocation.id].extents.iter();
        let places = extents.map(|extent| {
            let data = extent.len.min(left);
            left -= data;
            FileRange { file: state.file(extent.backing), extent: *extent, data }
        });
        places.collect()
    }

    /// Withdraws a part of an allocation that the disk cannot write.
    pub fn quarantine(&self, allocation: AllocationId, bad: &FileRange) {
        self.state().quarantine(allocation, bad.extent);
    }

    /// Allocates one extent in place of a quarantined part of an allocation.
    pub fn replace(
        &self,
        allocation: AllocationId,
        bad: &FileRange,
    ) -> Result<FileRange, DiskTierError> {
        self.with_growth(|state| {
            let list = state.extents.alloc(bad.extent.len)?;
            let &[extent] = list.as_slice() else {
                // Several extents would need as many pieces. A new file has it in one.
                for part in list {
                    state.extents.free(part).expect("it was just allocated");
                }
                return Err(OutOfExtents { asked: bad.extent.len, free: Bytes::ZERO });
            };
            let record =
                state.allocations.get_mut(&allocation).expect("its transfer has not ended");
            record.extents.push(extent);
            record.lost -= extent.len;
            state.counters.relocated_pieces += 1;
            Ok(FileRange { file: state.file(extent.backing), extent, data: bad.data })
        })
    }

    /// Removes files without used extents. Returns the bytes freed on the disk.
    pub fn trim(&self) -> Bytes {
        let _alone = lock(&self.growing);
        let mut state = self.state();
        let idle: Vec<BackingId> = state.extents.idle().collect();
        let files: Vec<Arc<DirectFile>> =
            idle.iter().filter_map(|id| state.files.remove(id)).collect();
        for id in idle {
            state.extents.remove(id).expect("nothing in it is used");
        }
        drop(state);
        files.iter().filter_map(|file| file.len().ok()).sum()
    }

    /// Unlinks all files, and files that are created later.
    pub fn unlink(&self) {
        let mut state = self.state();
        state.unlinked = true;
        // The sweep of a later store removes what cannot be unlinked now.
        state.files.values().for_each(|file| drop(file.unlink()));
    }

    /// Checks that allocations, extents, files and the charged space agree.
    pub fn audit(&self) -> Result<(), String> {
        let state = self.state();
        state.extents.audit()?;
        let mut all: Vec<Extent> = Vec::new();
        let mut charged = Bytes::ZERO;
        for (id, record) in &state.allocations {
            let used: Bytes = record.extents.iter().map(|extent| extent.len).sum();
            if used + record.lost != record.charged {
                return Err(format!("{id:?} is charged {} for {used}", record.charged));
            }
            charged += record.charged - record.lost;
            all.extend(record.extents.iter().copied());
        }
        all.sort_unstable();
        if let Some(pair) = all
            .windows(2)
            .find(|pair| pair[0].backing == pair[1].backing && pair[0].end() > pair[1].offset)
        {
            return Err(format!("two allocations overlap: {pair:?}"));
        }
        let used = state.extents.used();
        if charged != used {
            return Err(format!("allocations of {charged}, but {used} of extents in use"));
        }
        for (id, len) in state.extents.backings() {
            let file = state.files.get(&id).ok_or_else(|| format!("{id:?} has no file"))?;
            let found = file.len().map_err(|error| error.to_string())?;
            if found != len + DISK_BLOCK {
                return Err(format!(
                    "{} is {found} long, not {len} and a header",
                    file.path().display()
                ));
            }
        }
        if state.files.len() != state.extents.backings().count() {
            return Err(format!("{} files without extents", state.files.len()));
        }
        // The space may have other charges, and reservations are charged before their use.
        // Extents are allocated after their charge and freed before it, so this holds while the
        // state is locked.
        let total = self.space.total();
        match used <= total {
            true => Ok(()),
            false => Err(format!("{used} are stored and {total} charged to {}", self.space.id())),
        }
    }
}

/// `ENOMEM`.
const NO_MEMORY: i32 = 12;

impl State {
    fn file(&self, id: BackingId) -> Arc<DirectFile> {
        Arc::clone(self.files.get(&id).expect("a file outlives its extents"))
    }

    fn quarantine(&mut self, allocation: AllocationId, bad: Extent) {
        self.extents.quarantine(bad).expect("a part of an allocation is used");
        let record = self.allocations.get_mut(&allocation).expect("its transfer has not ended");
        record.extents = without(&record.extents, bad);
        record.lost += bad.len;
    }
}

/// Extents and the charge for them. Dropping it frees the extents, then credits the charge.
pub(super) struct DiskAllocation {
    pub shared: Arc<Shared>,
    pub id: AllocationId,
    /// Dropped after the extents are freed, so that a waiter woken by the credit finds them free.
    pub charge: Charge,
}

impl Drop for DiskAllocation {
    fn drop(&mut self) {
        let mut state = self.shared.state();
        for extent in
            state.allocations.remove(&self.id).into_iter().flat_map(|record| record.extents)
        {
            let freed = state.extents.free(extent);
            debug_assert!(freed.is_ok(), "an allocation's extents are used: {freed:?}");
        }
    }
}

/// One extent of stored bytes, and the checksum of its data.
#[derive(Clone, Debug)]
pub(super) struct StoredExtent {
    pub place: FileRange,
    pub sum: Option<u32>,
}

/// Bytes in the extents of one write.
pub(super) struct FileBytes {
    pub allocation: Arc<DiskAllocation>,
    pub extents: Vec<StoredExtent>,
    /// `Some` if at least one frame is compressed.
    pub frames: Option<Arc<Frames>>,
    pub len: Bytes,
}
