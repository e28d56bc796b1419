//! A store's files, and which of their bytes are whose.

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
use super::error::DiskTierError;
use super::header::{Header, OwnerId, file_name};
use super::spans::{Place, blocks};
use super::stats::Counters;
use crate::ledger::shell::charge::Charge;
use crate::ledger::shell::space::MemorySpace;

/// Names that others may have taken before a file is given up.
const NAMES_TRIED: u32 = 8;

/// What the store, its transfers and what it keeps have in common.
pub(super) struct Shelf {
    pub dir: PathBuf,
    pub config: DiskConfig,
    pub space: MemorySpace,
    pub io: Arc<dyn BlockIo>,
    /// Take sums beside the transfers, and do what would keep the engine waiting.
    pub workers: ThreadPool,
    pub owner: OwnerId,
    /// Where writes may be compressed.
    pub compressor: Option<Arc<Compressor>>,
    /// Held while a file is made, which takes milliseconds; the state is not.
    growing: Mutex<()>,
    state: Mutex<State>,
}

pub(super) struct State {
    pub extents: ExtentAllocator,
    pub files: BTreeMap<BackingId, Arc<DirectFile>>,
    pub held: BTreeMap<HoldingId, Held>,
    pub counters: Counters,
    next_holding: u64,
    next_file: u32,
    /// The store is gone: files have no names any more.
    unlinked: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct HoldingId(u64);

/// What one write got.
#[derive(Clone, Debug)]
pub(super) struct Held {
    pub extents: ExtentList,
    pub charged: Bytes,
    /// What of it was quarantined and has no other place yet.
    pub lost: Bytes,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shelf {
    pub fn new(
        dir: PathBuf,
        config: DiskConfig,
        space: MemorySpace,
        io: Arc<dyn BlockIo>,
        workers: ThreadPool,
        owner: OwnerId,
    ) -> Shelf {
        let state = State {
            extents: ExtentAllocator::new(DISK_BLOCK),
            files: BTreeMap::new(),
            held: BTreeMap::new(),
            counters: Counters::default(),
            next_holding: 0,
            next_file: 0,
            unlinked: false,
        };
        let (growing, state) = (Mutex::new(()), Mutex::new(state));
        let compressor = config.compression.map(|how| Arc::new(Compressor::new(how)));
        Shelf { dir, config, space, io, workers, owner, compressor, growing, state }
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    pub fn verifies(&self) -> bool {
        self.config.checksum == Checksum::Crc32
    }

    /// ExtentAllocator for `len` bytes that `charge` pays for, in new files if need be.
    pub fn hold(self: &Arc<Shelf>, len: Bytes, charge: Charge) -> Result<Holding, DiskTierError> {
        let id = self.take_extents(len, charge.bytes())?;
        Ok(Holding { shelf: Arc::clone(self), id, _charge: charge })
    }

    /// The same for a charge of so much, which stays the caller's until there is a [`Holding`].
    pub fn take_extents(&self, len: Bytes, charged: Bytes) -> Result<HoldingId, DiskTierError> {
        self.with_room(|state| {
            let extents = state.extents.alloc(len)?;
            let id = HoldingId(state.next_holding);
            state.next_holding += 1;
            state.held.insert(id, Held { extents, charged, lost: Bytes::ZERO });
            Ok(id)
        })
    }

    /// Asks again after each file that is added, until there is room or no further file.
    fn with_room<T>(
        &self,
        mut ask: impl FnMut(&mut State) -> Result<T, OutOfExtents>,
    ) -> Result<T, DiskTierError> {
        if let Ok(got) = ask(&mut self.state()) {
            return Ok(got);
        }
        let _alone = lock(&self.growing);
        loop {
            // Somebody else may have added what is missing.
            let asked = ask(&mut self.state());
            match asked {
                Ok(got) => return Ok(got),
                Err(OutOfExtents { asked, free }) => self.grow(asked - free)?,
            }
        }
    }

    /// Adds a file: a whole segment, less where the space's capacity or the disk ends.
    fn grow(&self, missing: Bytes) -> Result<(), DiskTierError> {
        let census = self.state().extents.census();
        let allowed = self.space.capacity() + census.quarantined;
        let allowed = allowed.saturating_sub(census.capacity).max(missing);
        let whole =
            self.config.file_size.min(allowed.checked_round_up(DISK_BLOCK).unwrap_or(allowed));
        let least = whole.min(missing);
        let mut len = whole;
        let made = loop {
            match self.make_file(len) {
                Err(error) if error.kind == DiskErrorKind::Full && len > least => {
                    len = Bytes::new(len.count() / 2).round_down(DISK_BLOCK).max(least);
                }
                made => break made,
            }
        };
        let mut state = self.state();
        match made {
            Ok(file) => {
                if state.unlinked {
                    drop(file.unlink());
                }
                let id = state.extents.add(len);
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

    /// A file with its header, locked, hidden if it shall be, and with blocks for `len` bytes.
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
                // A sweep met it before it was locked.
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

    /// Where the bytes of a holding lie, in order. All but the last of `len` bytes fill their
    /// extents.
    pub fn places(&self, holding: &Holding, len: Bytes) -> Vec<Place> {
        let state = self.state();
        let mut left = len;
        let extents = state.held[&holding.id].extents.iter();
        let places = extents.map(|extent| {
            let data = extent.len.min(left);
            left -= data;
            Place { file: state.file(extent.backing), extent: *extent, data }
        });
        places.collect()
    }

    /// Takes a part of a holding out of use for good, for the disk cannot write it.
    pub fn quarantine(&self, holding: HoldingId, bad: &Place) {
        self.state().quarantine(holding, bad.extent);
    }

    /// Another place for a quarantined part of a holding, in one stretch.
    pub fn replace(&self, holding: HoldingId, bad: &Place) -> Result<Place, DiskTierError> {
        self.with_room(|state| {
            let list = state.extents.alloc(bad.extent.len)?;
            let &[extent] = list.as_slice() else {
                // In parts it would take as many pieces: a new file has it whole.
                for part in list {
                    state.extents.free(part).expect("it was just allocated");
                }
                return Err(OutOfExtents { asked: bad.extent.len, free: Bytes::ZERO });
            };
            let held = state.held.get_mut(&holding).expect("a transfer holds it");
            held.extents.push(extent);
            held.lost -= extent.len;
            state.counters.relocated_pieces += 1;
            Ok(Place { file: state.file(extent.backing), extent, data: bad.data })
        })
    }

    /// Removes files that hold nothing. Returns what the disk got back.
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

    /// Takes the names of all files away, and of those to come.
    pub fn unlink(&self) {
        let mut state = self.state();
        state.unlinked = true;
        // What the directory does not let go, the next sweep finds.
        state.files.values().for_each(|file| drop(file.unlink()));
    }
}

/// What the kernel says when it has no memory.
const NO_MEMORY: i32 = 12;

impl State {
    fn file(&self, segment: BackingId) -> Arc<DirectFile> {
        Arc::clone(self.files.get(&segment).expect("a file stays as long as its segment"))
    }

    fn quarantine(&mut self, holding: HoldingId, bad: Extent) {
        self.extents.quarantine(bad).expect("a part of a holding is used");
        let held = self.held.get_mut(&holding).expect("a transfer holds it");
        let around = held.extents.iter().flat_map(|extent| {
            let hit = extent.backing == bad.backing
                && extent.offset <= bad.offset
                && bad.end() <= extent.end();
            let front = Extent { len: bad.offset.saturating_sub(extent.offset), ..*extent };
            let back = Extent {
                offset: bad.end(),
                len: extent.end().saturating_sub(bad.end()),
                ..*extent
            };
            if hit { [front, back] } else { [*extent, Extent { len: Bytes::ZERO, ..*extent }] }
        });
        held.extents = around.filter(|extent| !extent.len.is_zero()).collect();
        held.lost += bad.len;
    }
}

/// ExtentAllocator and what pays for them, until this is dropped.
pub(super) struct Holding {
    pub shelf: Arc<Shelf>,
    pub id: HoldingId,
    /// Credited last: whoever is woken by it finds the extents free.
    pub _charge: Charge,
}

impl Drop for Holding {
    fn drop(&mut self) {
        let mut state = self.shelf.state();
        for extent in state.held.remove(&self.id).into_iter().flat_map(|held| held.extents) {
            let freed = state.extents.free(extent);
            debug_assert!(freed.is_ok(), "a holding's extents are used: {freed:?}");
        }
    }
}

/// One extent of what is stored, and the sum of its data.
#[derive(Clone, Debug)]
pub(super) struct StoredExtent {
    pub place: Place,
    pub sum: Option<u32>,
}

/// Bytes that a store keeps until this is dropped.
#[must_use = "the bytes are given up when this is dropped"]
pub struct StoredBytes {
    pub(super) holding: Arc<Holding>,
    pub(super) extents: Vec<StoredExtent>,
    /// Where some of them are compressed.
    pub(super) frames: Option<Arc<Frames>>,
    pub(super) len: Bytes,
}

impl StoredBytes {
    /// How many bytes were written.
    pub fn len(&self) -> Bytes {
        self.len
    }

    /// True for none.
    pub fn is_empty(&self) -> bool {
        self.len.is_zero()
    }

    /// What is charged for them: whole blocks of 4 KiB, as many as they take on the disk.
    pub fn charged(&self) -> Bytes {
        self.holding._charge.bytes()
    }

    /// How many stretches of the disk they are in.
    pub fn extents(&self) -> usize {
        self.extents.len()
    }
}

impl std::fmt::Debug for StoredBytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} in {} extents", self.len, self.extents.len())
    }
}
