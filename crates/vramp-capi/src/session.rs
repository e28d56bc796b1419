//! One open allocator with all that a program of another language has of it.
//!
//! | file | what |
//! |---|---|
//! | `session.rs` | the parts, opening and closing |
//! | `session/streams.rs` | streams: adopted, created, forgotten, and their names |
//! | `session/blocks.rs` | blocks by address |
//! | `session/pools.rs` | the allocator's pool, those of its regions, and that of plain allocations |
//! | `session/reports.rs` | history, snapshots, statistics, and the audit |
//!
//! Its graphs are in `graphs.rs`, its arenas for caches in `kv.rs`, host memory in `host.rs`, what it shares in `sharing.rs`, kept
//! memory in `kept.rs`, and its tiers in `tiers.rs`.

mod blocks;
mod pools;
mod reports;
mod streams;

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, RwLock};

use rustc_hash::FxHashMap;
use vramp_alloc::budget::PoolBudget;
use vramp_alloc::history::{HistoryRecording, HistorySize};
use vramp_alloc::{Allocator, Bytes, CloseError, StreamId};

use vramp_defer::Tiers;
use vramp_driver::Driver;
use vramp_host::barrier::prepare;
use vramp_tiers::config::TiersConfig;

use crate::abi::vramp_stream_t;
use crate::addresses::Addresses;
use crate::captures::Captures;
use crate::device::{Device, Listed};
use crate::environment::variable;
use crate::host::tables::HostBlocks;
use crate::kept::tables::KeptTables;
use crate::kv::tables::Caches;
use crate::options::Options;
use crate::print::write_line;
use crate::regions::{HostLoan, RegionTable};
use crate::sharing::tables::Shares;
use crate::status::{Failure, Kind, Result};
use crate::tiers::slot::TiersSlot;

/// A stream that memory is used on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StreamName {
    /// Number of a `cudaStream_t`. Zero is the legacy default stream.
    Raw(u64),
    /// A stream that the allocator created.
    Created(vramp_stream_t),
}

/// A block that was allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Address of its first byte.
    pub addr: u64,
    /// Usable bytes: those requested, rounded up.
    pub len: u64,
    /// True for a block of PyTorch's small pool: up to 1 MiB, or among such blocks.
    pub is_small: bool,
}

/// An open allocator, with all that a program of another language has of it: blocks by address, streams by
/// handle, regions of threads, tiers, and what is shared.
pub struct Session {
    device: Device,
    /// Shared with the tiers while they are open.
    allocator: Arc<Allocator>,
    /// `None` for a pool that no other card's tiers look for.
    listed: Option<Listed>,
    pub(crate) tiers: TiersSlot,
    /// `None` for a pool that serves no regions.
    regions: Option<Arc<RegionTable>>,
    /// The pool of plain allocations, once there is one.
    plain: OnceLock<Allocator>,
    blocks: Addresses,
    pub(crate) captures: Captures,
    pub(crate) caches: Caches,
    pub(crate) host_blocks: HostBlocks,
    /// The budget of the process that the allocator is tied to, if it is.
    pub(crate) budget: OnceLock<PoolBudget>,
    pub(crate) shares: Shares,
    pub(crate) kept: KeptTables,
    /// Also of the comm pools made from this allocator.
    adopted: Arc<RwLock<AdoptedStreams>>,
    /// Number of streams forgotten so far.
    forgets: Arc<AtomicU64>,
    /// The history being recorded.
    recording: Mutex<Option<HistoryRecording>>,
    /// Largest number of events that the recording keeps.
    recorded_events: AtomicU32,
    /// Upper half of stream ids. Unique to the allocator and its comm pools.
    tag: u32,
    /// True for an allocator that serves PyTorch, which is never closed.
    stays_open: bool,
    /// Number of the device in snapshots. `None` is that of the card, or 0 on the simulator.
    number: Option<u16>,
}

/// A close that failed.
pub(crate) struct CloseRefused {
    /// The allocator, if it stays open.
    pub session: Option<Box<Session>>,
    pub failure: Failure,
}

/// Adopted streams that were not forgotten. O(1), whatever number of them there is.
#[derive(Default)]
struct AdoptedStreams {
    /// By raw handle; also created streams of which the handle was given out.
    ids: FxHashMap<usize, StreamId>,
    raws: FxHashMap<StreamId, usize>,
    /// Handles of created streams that were given out.
    given_out: FxHashMap<StreamId, usize>,
}

static TAGS: AtomicU32 = AtomicU32::new(1);

impl Session {
    /// Opens an allocator on the device of this name, limited to `fraction` of its memory. Variables
    /// of the preset's own project count where no option does; those used are named on stderr.
    pub(crate) fn open(
        device: &str,
        options: &Options,
        fraction: Option<f64>,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Session> {
        Session::open_on(Device::open(device)?, options, fraction, variable)
    }

    /// Opens an allocator on an open device, with the environment's variables.
    pub(crate) fn open_device(device: Device, options: &Options) -> Result<Session> {
        Session::open_on(device, options, None, variable)
    }

    /// Opens an allocator on a device, as [`Session::open`] does.
    pub(crate) fn open_on(
        device: Device,
        options: &Options,
        fraction: Option<f64>,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Session> {
        let limits = device.driver.info().limits;
        options.check_limit(limits.memory, limits.page)?;
        let configured = options.with_variables(limits.memory, fraction, variable)?;
        let mut session = Session::on(device, configured.config)?;
        session.regions = Some(Arc::new(RegionTable::keeping(options.pinned_keep())));
        if let Some(notice) = configured.notice {
            write_line(&notice);
        }
        Ok(session)
    }

    /// Opens an allocator on an open device.
    pub(crate) fn on(device: Device, config: vramp_peers::Config) -> Result<Session> {
        prepare();
        let allocator = Arc::new(config.open(Arc::clone(&device.driver))?);
        let listed = Some(device.list(&allocator));
        Ok(Session {
            device,
            allocator,
            listed,
            tiers: TiersSlot::default(),
            regions: Some(Arc::default()),
            plain: OnceLock::new(),
            blocks: Addresses::new(),
            captures: Captures::default(),
            caches: Caches::default(),
            host_blocks: HostBlocks::default(),
            budget: OnceLock::new(),
            shares: Shares::default(),
            kept: KeptTables::default(),
            adopted: Arc::default(),
            forgets: Arc::default(),
            recording: Mutex::new(None),
            recorded_events: AtomicU32::new(0),
            tag: TAGS.fetch_add(1, Ordering::Relaxed),
            stays_open: false,
            number: None,
        })
    }

    /// Creates a pool for memory that communication libraries register. A stream's handle means the same
    /// stream in both.
    pub(crate) fn comm_pool(&self, name: &str) -> Result<Session> {
        Ok(Session {
            device: self.device.clone(),
            allocator: Arc::new(vramp_peers::comm_pool(&self.allocator, name)?),
            listed: None,
            tiers: TiersSlot::default(),
            regions: None,
            plain: OnceLock::new(),
            blocks: Addresses::new(),
            captures: Captures::default(),
            caches: Caches::default(),
            host_blocks: HostBlocks::default(),
            budget: OnceLock::new(),
            shares: Shares::default(),
            kept: KeptTables::default(),
            adopted: Arc::clone(&self.adopted),
            forgets: Arc::clone(&self.forgets),
            recording: Mutex::new(None),
            recorded_events: AtomicU32::new(0),
            tag: self.tag,
            stays_open: false,
            number: self.number,
        })
    }

    /// Returns the allocator of device `number` of the process, marked as never to be closed.
    pub(crate) fn kept_open(self, number: u16) -> Session {
        Session { stays_open: true, number: Some(number), ..self }
    }

    /// Returns the Rust allocator.
    #[inline]
    pub fn allocator(&self) -> &Allocator {
        &self.allocator
    }

    /// Returns the Rust allocator for an owner that lives no longer than this one: the tiers.
    pub fn shared_allocator(&self) -> &Arc<Allocator> {
        &self.allocator
    }

    /// Lets the allocator's regions use the host memory of tiers below it, until the loan is dropped. `None`
    /// for a pool that has no regions.
    pub fn lend_host_memory(&self, tiers: &Tiers) -> Option<HostLoan> {
        self.regions.as_ref().map(|regions| regions.lend(tiers))
    }

    /// Returns allocators of the cards that are a `[[peer]]` of the configuration, for [`TiersOptions::others`].
    ///
    /// [`TiersOptions::others`]: vramp_defer::TiersOptions::others
    pub fn others(&self, config: &TiersConfig) -> Vec<Arc<Allocator>> {
        self.device.others(config.peers.iter().map(|peer| peer.index))
    }

    /// Returns true if the device is a card, and not simulated or one that the caller made.
    pub(crate) fn is_on_card(&self) -> bool {
        self.device.card.is_some()
    }

    /// Returns the device.
    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// Returns the size of the device's memory.
    pub(crate) fn memory(&self) -> Bytes {
        self.device.driver.info().limits.memory
    }

    /// Returns an error if the allocator must stay open.
    pub(crate) fn check_closable(&self) -> Result<()> {
        let text = "the allocator serves PyTorch, which uses it until the process ends: do not \
                    close it";
        match self.stays_open {
            true => Err(Failure::new(Kind::InUse, text)),
            false => Ok(()),
        }
    }

    /// Ends the tiers, waits for the allocator's streams and releases all memory.
    pub(crate) fn close(self) -> std::result::Result<(), CloseRefused> {
        let refused =
            |session, failure| Err(CloseRefused { session: Some(Box::new(session)), failure });
        if let Err(failure) = self.end_tiers() {
            return refused(self, failure);
        }
        if let Err(failure) = self.close_regions() {
            return refused(self, failure);
        }
        let Session { allocator, .. } = self;
        let allocator = match Arc::try_unwrap(allocator) {
            Ok(allocator) => allocator,
            Err(allocator) => return refused(Session { allocator, ..self }, in_use()),
        };
        let Err(error) = allocator.close() else { return Ok(()) };
        let failure = Failure::of(&error);
        let session = match error {
            CloseError::Capturing { allocator, .. }
            | CloseError::NotSynchronized { allocator, .. } => {
                let allocator = Arc::new(*allocator);
                let listed = self.listed.is_some().then(|| self.device.list(&allocator));
                Some(Box::new(Session { allocator, listed, ..self }))
            }
            _ => None,
        };
        Err(CloseRefused { session, failure })
    }
}

#[cold]
pub(crate) fn in_use() -> Failure {
    let text =
        "tiers, buffers or leases of Python or Rust use the allocator: end them, and then close it";
    Failure::new(Kind::InUse, text)
}

/// Refuses to record more events than a recording may have.
pub(crate) fn check_events(events: u32) -> Result<()> {
    let max = HistorySize::EVENTS_MAX;
    if events <= max {
        return Ok(());
    }
    let text = format!("{events} events would take too much memory: use at most {max}");
    Err(Failure::new(Kind::Range, text))
}

/// Largest request of PyTorch's small pool, in bytes.
pub(crate) const SMALL_MAX: u64 = 1 << 20;
