//! A directory that keeps bytes.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::path::Path;
use std::sync::Arc;
use std::thread;

use crate::ledger::core::Tier;
use vramp_core::Bytes;
use vramp_host::{
    BlockIo, DISK_BLOCK, Direction, HostSpan, IoUnavailable, OsCode, ThreadPool, open_io,
};

use super::compress::{Compressing, Decompressing, THREADS_MOST};
use super::config::DiskConfig;
use super::error::DiskTierError;
use super::flight::Flight;
use super::header::OwnerId;
use super::shelf::{Shelf, StoredBytes};
use super::spans::{Place, Spans, cut};
use super::stats::DiskStats;
use super::sweep::{SweepReport, sweep};
use super::transfer::DiskTransfer;
use crate::ledger::shell::charge::Charge;
use crate::ledger::shell::reservation::Reservation;
use crate::ledger::shell::space::MemorySpace;
use crate::ledger::shell::tracked::LimitRule;

/// Threads that take sums: one of them keeps up with some GiB a second.
const WORKERS_MOST: usize = 4;

/// Who pays for what is written.
#[derive(Clone, Copy)]
pub enum ChargeTo<'a> {
    /// The space itself, up to its capacity.
    Space,
    /// A reservation in the store's space. The rule decides about what exceeds it.
    Reservation(&'a Reservation, &'a dyn LimitRule),
}

/// Files in one directory that keep bytes for this process alone. All of them go with it.
///
/// Calls may come from any thread. Transfers share an engine, and its depth.
pub struct DiskStore {
    shelf: Arc<Shelf>,
    swept: SweepReport,
    fell_back: Option<IoUnavailable>,
    direct: bool,
}

impl DiskStore {
    /// A store in `dir` whose bytes are charged to `space`. Looks at every file of the directory,
    /// and removes those that killed stores left. Preallocates nothing yet.
    ///
    /// # Errors
    /// The options make no sense, the directory is none or cannot be written, or the kernel does
    /// not offer the engine that was chosen.
    pub fn open(
        dir: impl AsRef<Path>,
        config: DiskConfig,
        space: &MemorySpace,
    ) -> Result<DiskStore, DiskTierError> {
        config.check(space.levels().granule)?;
        let opened = open_io(config.io, config.depth)?;
        let mut store = DiskStore::open_with(dir, config, space, opened.io)?;
        store.fell_back = opened.fell_back;
        Ok(store)
    }

    /// The same with an engine that others may use too; `config.io` and `config.depth` are not
    /// looked at.
    ///
    /// # Errors
    /// As [`open`](DiskStore::open).
    pub fn open_with(
        dir: impl AsRef<Path>,
        config: DiskConfig,
        space: &MemorySpace,
        io: Arc<dyn BlockIo>,
    ) -> Result<DiskStore, DiskTierError> {
        config.check(space.levels().granule)?;
        if space.id().tier != Tier::Disk {
            return Err(DiskTierError::NotADisk(space.id()));
        }
        let dir = dir.as_ref();
        let no_directory = |error: &std::io::Error| DiskTierError::NoDirectory {
            path: dir.into(),
            code: OsCode::of(error),
        };
        let swept = sweep(dir).map_err(|error| no_directory(&error))?;
        // Not what the current directory will be by then.
        let dir = std::path::absolute(dir).map_err(|error| no_directory(&error))?;
        let cores = thread::available_parallelism().map_or(1, |cores| cores.get());
        let count = match config.compression {
            None => (cores / 4).clamp(1, WORKERS_MOST),
            Some(_) => (cores / 2).clamp(1, THREADS_MOST),
        };
        let workers = ThreadPool::new("vramp-sums", count);
        let workers = workers
            .map_err(|error| IoUnavailable { engine: "threads", code: OsCode::of(&error) })?;
        let nonce = RandomState::new().build_hasher().finish();
        let owner = OwnerId { pid: std::process::id(), nonce };
        let shelf = Shelf::new(dir, config, space.clone(), io, workers, owner);
        // A first file, gone at once, tells what the directory is good for.
        let direct = shelf.make_file(Bytes::ZERO)?.is_direct();
        Ok(DiskStore { shelf: Arc::new(shelf), swept, fell_back: None, direct })
    }

    /// Starts to write the bytes of `spans`, one after the other, as one.
    ///
    /// # Errors
    /// Nobody pays, or there are no blocks for them. Nothing is charged or kept. With compression,
    /// waiting tells whether there are blocks: how many it takes, workers find out.
    pub fn begin_write(
        &self,
        spans: &[HostSpan],
        paid: ChargeTo<'_>,
    ) -> Result<DiskTransfer<StoredBytes>, DiskTierError> {
        let spans = Spans::new(spans);
        let charge = self.charge(spans.len(), paid)?;
        if let Some(compressor) = &self.shelf.compressor
            && spans.len() > DISK_BLOCK
        {
            return Ok(DiskTransfer::new(Compressing::begin(
                &self.shelf,
                compressor,
                spans,
                charge,
            )));
        }
        let holding = Arc::new(self.shelf.hold(spans.len(), charge)?);
        let places = self.shelf.places(&holding, spans.len());
        let pieces = cut(&spans, &places, self.shelf.config.piece);
        let summed = self.shelf.verifies();
        let flight = Flight::begin(holding, Direction::Write, spans, Vec::new(), pieces, summed);
        Ok(DiskTransfer::new(flight))
    }

    fn charge(&self, len: Bytes, paid: ChargeTo<'_>) -> Result<Charge, DiskTierError> {
        // Memory holds less than the last whole block that 64 bits can count.
        let bytes = len.checked_round_up(DISK_BLOCK).unwrap_or(len);
        let space = &self.shelf.space;
        Ok(match paid {
            ChargeTo::Space => space.charge(bytes)?,
            ChargeTo::Reservation(reservation, rule) => {
                let same = Arc::ptr_eq(reservation.shared(), &space.shared);
                if !same || reservation.space() != space.id() {
                    let given = reservation.space();
                    return Err(DiskTierError::OtherSpace { store: space.id(), given });
                }
                reservation.charge(bytes, rule)?
            }
        })
    }

    /// Starts to read what is stored into the bytes of `spans`, one after the other.
    ///
    /// # Errors
    /// The memory is shorter or longer, or another store keeps the bytes.
    pub fn begin_read(
        &self,
        stored: &StoredBytes,
        spans: &[HostSpan],
    ) -> Result<DiskTransfer<()>, DiskTierError> {
        if !Arc::ptr_eq(&stored.holding.shelf, &self.shelf) {
            return Err(DiskTierError::OtherStore);
        }
        let spans = Spans::new(spans);
        if spans.len() != stored.len() {
            return Err(DiskTierError::Length { stored: stored.len(), given: spans.len() });
        }
        if let (Some(frames), Some(compressor)) = (&stored.frames, &self.shelf.compressor) {
            let read = Decompressing::begin(stored, frames, spans, compressor)?;
            return Ok(DiskTransfer::new(read));
        }
        let places: Vec<Place> = stored.extents.iter().map(|extent| extent.place.clone()).collect();
        let pieces = cut(&spans, &places, self.shelf.config.piece);
        let (holding, expected) = (Arc::clone(&stored.holding), stored.extents.clone());
        let summed = self.shelf.verifies();
        let flight = Flight::begin(holding, Direction::Read, spans, expected, pieces, summed);
        Ok(DiskTransfer::new(flight))
    }

    /// Writes and waits.
    ///
    /// # Errors
    /// As [`begin_write`](DiskStore::begin_write) and [`DiskTransfer::wait`].
    pub fn write(
        &self,
        spans: &[HostSpan],
        paid: ChargeTo<'_>,
    ) -> Result<StoredBytes, DiskTierError> {
        self.begin_write(spans, paid)?.wait()
    }

    /// Reads and waits.
    ///
    /// # Errors
    /// As [`begin_read`](DiskStore::begin_read) and [`DiskTransfer::wait`].
    pub fn read(&self, stored: &StoredBytes, spans: &[HostSpan]) -> Result<(), DiskTierError> {
        self.begin_read(stored, spans)?.wait()
    }

    /// Removes the files that hold nothing, and returns what the disk got back. Memory that was kept
    /// to compress goes, too.
    pub fn trim(&self) -> Bytes {
        if let Some(compressor) = &self.shelf.compressor {
            compressor.trim();
        }
        self.shelf.trim()
    }

    /// Where the files are.
    pub fn dir(&self) -> &Path {
        &self.shelf.dir
    }

    /// What pays.
    pub fn space(&self) -> &MemorySpace {
        &self.shelf.space
    }

    /// What opening it found of other stores.
    pub fn swept(&self) -> SweepReport {
        self.swept
    }

    /// Why the engine is not io_uring, where [`Auto`](vramp_host::IoChoice::Auto) would have it.
    pub fn fell_back(&self) -> Option<&IoUnavailable> {
        self.fell_back.as_ref()
    }

    /// What it has done, and holds. O(extents).
    pub fn stats(&self) -> DiskStats {
        let state = self.shelf.state();
        let counters = &state.counters;
        DiskStats {
            engine: self.shelf.io.name(),
            direct: self.direct,
            writes: counters.writes,
            reads: counters.reads,
            relocated_pieces: counters.relocated_pieces,
            media_errors: counters.media_errors,
            full_errors: counters.full_errors,
            corrupt_extents: counters.corrupt_extents,
            compression: self.shelf.compressor.as_ref().map(|own| own.stats()).unwrap_or_default(),
            extents: state.extents.census(),
        }
    }

    /// Compares the store's books with its extents, its files and its space. O(n log n).
    ///
    /// # Errors
    /// The first that does not agree, in words.
    pub fn audit(&self) -> Result<(), String> {
        self.shelf.audit()
    }
}

impl Drop for DiskStore {
    fn drop(&mut self) {
        // Transfers under way go on in files without a name.
        self.shelf.unlink();
    }
}

impl std::fmt::Debug for DiskStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let used = self.shelf.state().extents.used();
        write!(f, "{used} in {} by {}", self.shelf.dir.display(), self.shelf.io.name())
    }
}
