//! The store: opening it, and starting writes and reads.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::path::Path;
use std::sync::Arc;
use std::thread;

use crate::ledger::core::Tier;
use vramp_core::Bytes;
use vramp_host::{
    BlockIo, DISK_BLOCK, Direction, HostSpan, IoUnavailable, OsCode, ThreadPool, open_io,
};

use super::config::DiskConfig;
use super::core::growth::worker_threads;
use super::error::DiskTierError;
use super::files::{OwnerId, SweepReport, sweep};
use super::job::{Held, Job};
use super::object_store::{ObjectStore, ObjectStoreConfig};
use super::objects::Objects;
use super::shared::{FileBytes, Shared};
use super::spans::{FileRange, SpanList};
use super::stats::DiskStats;
use super::transfer::{DiskTransfer, Stored, StoredBytes};
use crate::ledger::shell::charge::Charge;
use crate::ledger::shell::reservation::Reservation;
use crate::ledger::shell::space::MemorySpace;
use crate::ledger::shell::tracked::LimitRule;

/// What pays for the bytes of a write.
#[derive(Clone, Copy)]
pub enum ChargeTo<'a> {
    /// The store's space, up to its capacity.
    Space,
    /// A reservation in the store's space. The rule decides about bytes that exceed it.
    Reservation(&'a Reservation, &'a dyn LimitRule),
}

/// Files in one directory that store bytes for this process, or a store of the program's own. No file
/// outlives the process.
///
/// The store is `Sync`. Its transfers share one I/O engine and its depth.
pub struct DiskStore {
    backend: Backend,
}

enum Backend {
    Files(Files),
    Objects(Arc<Objects>),
}

struct Files {
    shared: Arc<Shared>,
    swept: SweepReport,
    fell_back: Option<IoUnavailable>,
    direct: bool,
}

impl DiskStore {
    /// Opens a store in `dir` whose bytes are charged to `space`. Removes the files in `dir` that
    /// killed processes left; see [`swept`](DiskStore::swept). Preallocates nothing. O(files).
    ///
    /// # Errors
    /// The options are invalid, the directory cannot be read or written, or the kernel does not
    /// offer the chosen engine.
    pub fn open(
        dir: impl AsRef<Path>,
        config: DiskConfig,
        space: &MemorySpace,
    ) -> Result<DiskStore, DiskTierError> {
        config.check(space.levels().granule)?;
        let opened = open_io(config.io, config.depth)?;
        let mut files = Files::open(dir.as_ref(), config, space, opened.io)?;
        files.fell_back = opened.fell_back;
        Ok(DiskStore { backend: Backend::Files(files) })
    }

    /// Opens a store that uses `io`, which other stores may share. `config.io` and `config.depth`
    /// are ignored.
    ///
    /// # Errors
    /// As [`open`](DiskStore::open).
    pub fn open_with(
        dir: impl AsRef<Path>,
        config: DiskConfig,
        space: &MemorySpace,
        io: Arc<dyn BlockIo>,
    ) -> Result<DiskStore, DiskTierError> {
        let files = Files::open(dir.as_ref(), config, space, io)?;
        Ok(DiskStore { backend: Backend::Files(files) })
    }

    /// Returns a store that keeps its bytes in `objects`, charged to `space`: the space's capacity
    /// bounds what is stored there. Starts [`ObjectStoreConfig::threads`] threads.
    ///
    /// # Errors
    /// The options are invalid, the space is not of the tier Disk, or no thread can be started.
    pub fn with_objects(
        objects: Arc<dyn ObjectStore>,
        config: ObjectStoreConfig,
        space: &MemorySpace,
    ) -> Result<DiskStore, DiskTierError> {
        config.check(space.levels().granule)?;
        check_tier(space)?;
        let objects = Objects::new(objects, config, space.clone())?;
        Ok(DiskStore { backend: Backend::Objects(Arc::new(objects)) })
    }

    /// Starts to write the bytes of `spans`, concatenated.
    ///
    /// # Errors
    /// The charge or the extents are refused. Nothing stays charged or allocated. With compression,
    /// extents are allocated later, so [`DiskTransfer::wait`] returns that error.
    pub fn begin_write(
        &self,
        spans: &[HostSpan],
        payer: ChargeTo<'_>,
    ) -> Result<DiskTransfer<StoredBytes>, DiskTierError> {
        let spans = SpanList::new(spans);
        let charge = self.charge(spans.len(), payer)?;
        match &self.backend {
            Backend::Files(files) => files.begin_write(spans, charge),
            Backend::Objects(objects) => {
                let object = objects.add(charge);
                let key = object.key;
                let held = Held { object: Some(object), ..Held::default() };
                let job = Job::new(None, Direction::Write, spans, held);
                job.begin_call(objects, key, None);
                Ok(DiskTransfer::new(job))
            }
        }
    }

    fn charge(&self, len: Bytes, payer: ChargeTo<'_>) -> Result<Charge, DiskTierError> {
        // Saturates beyond the last block that 64 bits can count; no memory is that large.
        let bytes = len.checked_round_up(DISK_BLOCK).unwrap_or(len);
        let space = self.space();
        Ok(match payer {
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

    /// Starts to read stored bytes into `spans`, concatenated.
    ///
    /// # Errors
    /// The memory has another length, or another store wrote the bytes.
    pub fn begin_read(
        &self,
        stored: &StoredBytes,
        spans: &[HostSpan],
    ) -> Result<DiskTransfer<()>, DiskTierError> {
        let spans = SpanList::new(spans);
        let check_length = || match spans.len() == stored.len() {
            true => Ok(()),
            false => Err(DiskTierError::Length { stored: stored.len(), given: spans.len() }),
        };
        match (&self.backend, &stored.0) {
            (Backend::Files(files), Stored::Files(bytes)) if files.has(bytes) => {
                check_length()?;
                files.begin_read(bytes, spans)
            }
            (Backend::Objects(objects), Stored::Object(bytes)) if objects.has(bytes) => {
                check_length()?;
                let held = Held { object: Some(Arc::clone(&bytes.object)), ..Held::default() };
                let job = Job::new(None, Direction::Read, spans, held);
                job.begin_call(objects, bytes.object.key, bytes.sum);
                Ok(DiskTransfer::new(job))
            }
            _ => Err(DiskTierError::OtherStore),
        }
    }

    /// Writes, and waits until all bytes are written.
    ///
    /// # Errors
    /// As [`begin_write`](DiskStore::begin_write) and [`DiskTransfer::wait`].
    pub fn write(
        &self,
        spans: &[HostSpan],
        payer: ChargeTo<'_>,
    ) -> Result<StoredBytes, DiskTierError> {
        self.begin_write(spans, payer)?.wait()
    }

    /// Reads, and waits until all bytes are read and verified.
    ///
    /// # Errors
    /// As [`begin_read`](DiskStore::begin_read) and [`DiskTransfer::wait`].
    pub fn read(&self, stored: &StoredBytes, spans: &[HostSpan]) -> Result<(), DiskTierError> {
        self.begin_read(stored, spans)?.wait()
    }

    /// Removes files without used extents and frees buffers kept for compression or objects. Returns
    /// the bytes freed on the disk.
    pub fn trim(&self) -> Bytes {
        match &self.backend {
            Backend::Files(files) => files.trim(),
            Backend::Objects(objects) => {
                objects.trim();
                Bytes::ZERO
            }
        }
    }

    /// Returns the directory of the files; `None` for a store of the program.
    pub fn dir(&self) -> Option<&Path> {
        self.files().map(|files| &*files.shared.dir)
    }

    fn files(&self) -> Option<&Files> {
        match &self.backend {
            Backend::Files(files) => Some(files),
            Backend::Objects(_) => None,
        }
    }

    /// Returns the space that is charged.
    pub fn space(&self) -> &MemorySpace {
        match &self.backend {
            Backend::Files(files) => &files.shared.space,
            Backend::Objects(objects) => &objects.space,
        }
    }

    /// Returns what the sweep found when the store was opened.
    pub fn swept(&self) -> SweepReport {
        self.files().map(|files| files.swept).unwrap_or_default()
    }

    /// Returns why [`Auto`](vramp_host::IoChoice::Auto) did not choose io_uring.
    pub fn fell_back(&self) -> Option<&IoUnavailable> {
        self.files()?.fell_back.as_ref()
    }

    /// Returns statistics. O(extents).
    pub fn stats(&self) -> DiskStats {
        match &self.backend {
            Backend::Files(files) => files.stats(),
            Backend::Objects(objects) => objects.stats(),
        }
    }

    /// Checks that allocations agree with extents, files and space. O(n log n).
    ///
    /// # Errors
    /// Describes the first disagreement.
    pub fn audit(&self) -> Result<(), String> {
        match &self.backend {
            Backend::Files(files) => files.shared.audit(),
            Backend::Objects(objects) => objects.audit(),
        }
    }
}

fn check_tier(space: &MemorySpace) -> Result<(), DiskTierError> {
    match space.id().tier {
        Tier::Disk => Ok(()),
        _ => Err(DiskTierError::NotADisk(space.id())),
    }
}

impl Files {
    fn open(
        dir: &Path,
        config: DiskConfig,
        space: &MemorySpace,
        io: Arc<dyn BlockIo>,
    ) -> Result<Files, DiskTierError> {
        config.check(space.levels().granule)?;
        check_tier(space)?;
        let no_directory = |error: &std::io::Error| DiskTierError::NoDirectory {
            path: dir.into(),
            code: OsCode::of(error),
        };
        let swept = sweep(dir).map_err(|error| no_directory(&error))?;
        // The current directory may change later.
        let dir = std::path::absolute(dir).map_err(|error| no_directory(&error))?;
        let cores = thread::available_parallelism().map_or(1, |cores| cores.get());
        let count = worker_threads(cores, config.compression.is_some());
        let workers = ThreadPool::new("vramp-sums", count);
        let workers = workers
            .map_err(|error| IoUnavailable { engine: "threads", code: OsCode::of(&error) })?;
        let nonce = RandomState::new().build_hasher().finish();
        let owner = OwnerId { pid: std::process::id(), nonce };
        let shared = Shared::new(dir, config, space.clone(), io, workers, owner);
        // An empty file, dropped at once, shows whether the directory supports direct I/O.
        let direct = shared.make_file(Bytes::ZERO)?.is_direct();
        space.set_directory(&shared.dir);
        Ok(Files { shared: Arc::new(shared), swept, fell_back: None, direct })
    }

    fn begin_write(
        &self,
        spans: SpanList,
        charge: Charge,
    ) -> Result<DiskTransfer<StoredBytes>, DiskTierError> {
        let Files { shared, .. } = self;
        if shared.compressor.is_some() && spans.len() > DISK_BLOCK {
            let held = Held { charge: Some(charge), ..Held::default() };
            let job = Job::new(Some(shared), Direction::Write, spans, held);
            job.begin_compressing();
            return Ok(DiskTransfer::new(job));
        }
        let allocation = Arc::new(shared.allocate(spans.len(), charge)?);
        let places = shared.places(&allocation, spans.len());
        let job = Job::new(Some(shared), Direction::Write, spans, Held::default());
        job.begin_transfer(allocation, &places, None, Vec::new(), shared.verifies());
        Ok(DiskTransfer::new(job))
    }

    fn has(&self, stored: &FileBytes) -> bool {
        Arc::ptr_eq(&stored.allocation.shared, &self.shared)
    }

    fn begin_read(
        &self,
        stored: &FileBytes,
        spans: SpanList,
    ) -> Result<DiskTransfer<()>, DiskTierError> {
        let shared = &self.shared;
        let (mut held, mut list) = (Held::default(), None);
        if let (Some(frames), Some(compressor)) = (&stored.frames, &shared.compressor) {
            let memory = compressor.memory(stored.len)?;
            list = Some(frames.list(&spans, &memory));
            (held.frames, held.memory) = (Some(Arc::clone(frames)), Some(memory));
        }
        let places: Vec<FileRange> =
            stored.extents.iter().map(|extent| extent.place.clone()).collect();
        let (allocation, expected) = (Arc::clone(&stored.allocation), stored.extents.clone());
        let summed = list.is_some() || shared.verifies();
        let job = Job::new(Some(shared), Direction::Read, spans, held);
        job.begin_transfer(allocation, &places, list, expected, summed);
        Ok(DiskTransfer::new(job))
    }

    fn trim(&self) -> Bytes {
        if let Some(compressor) = &self.shared.compressor {
            compressor.trim();
        }
        self.shared.trim()
    }

    fn stats(&self) -> DiskStats {
        let state = self.shared.state();
        let extents = state.extents.census();
        let stats = state.counters.stats(self.shared.io.name(), self.direct, extents);
        let compressor = self.shared.compressor.as_ref();
        let compression = compressor.map(|own| own.stats()).unwrap_or_default();
        DiskStats { compression, ..stats }
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        // Transfers in flight continue in unlinked files.
        self.shared.unlink();
    }
}

impl std::fmt::Debug for DiskStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let stats = self.stats();
        write!(f, "{} stored ", stats.extents.used)?;
        match self.dir() {
            Some(dir) => write!(f, "in {} by {}", dir.display(), stats.engine),
            None => f.write_str("in the program's store"),
        }
    }
}
