//! One open allocator with the maps that C needs: addresses and raw stream handles.

use std::cell::Cell;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};

use rustc_hash::FxHashMap;
use vramp_alloc::error::HostShortage;
use vramp_alloc::graph::AttachedCapture;
use vramp_alloc::history::{HistoryRecording, HistorySize, Trace};
use vramp_alloc::observe::{Event, Registration};
use vramp_alloc::sharing::{Export, ExportError};
use vramp_alloc::stats::ReservedMemory;
use vramp_alloc::{
    AllocError, Allocation, Allocator, Bytes, CloseError, DeviceAddr, FreeError, StreamId,
};

use vramp_core::AddrRange;
use vramp_defer::Tiers;
use vramp_driver::{Driver, Stream, StreamThread};
use vramp_host::barrier::prepare;
use vramp_tiers::config::TiersConfig;
use vramp_tiers::regions::Region;
use vramp_tiers::reserve::Charge;

use crate::abi::{vramp_stats_t, vramp_stream_t};
use crate::addresses::{Addresses, Taken};
use crate::captures::Captures;
use crate::device::{Device, Listed};
use crate::environment::variable;
use crate::options::{self, Options};
use crate::print::write_line;
use crate::regions::{HostLoan, RegionTable, sum, sum_of_memory};
use crate::sharing::tables::Shares;
use crate::status::{Failure, Kind, Result, unknown_stream};
use crate::tiers::slot::TiersSlot;
use crate::writing::write_trace;

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
    pub(crate) shares: Shares,
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

/// `cudaStreamPerThread`: in each thread it means another stream, with an id of its own that ends with the
/// thread. It is in no table.
const PER_THREAD: usize = 2;

/// Adopted streams that were not forgotten. O(1), whatever number of them there is.
#[derive(Default)]
struct AdoptedStreams {
    /// By raw handle; also created streams of which the handle was given out.
    ids: FxHashMap<usize, StreamId>,
    raws: FxHashMap<StreamId, usize>,
    /// Handles of created streams that were given out.
    given_out: FxHashMap<StreamId, usize>,
}

/// The stream that a thread adopted last. Most often it is the next one too.
#[derive(Clone, Copy)]
struct Adopted {
    tag: u32,
    raw: usize,
    /// Number of streams forgotten when it was looked up.
    forgets: u64,
    stream: StreamId,
}

thread_local! {
    static LAST_ADOPTED: Cell<Option<Adopted>> = const { Cell::new(None) };
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
            shares: Shares::default(),
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
            shares: Shares::default(),
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

    // --- streams ---

    /// Returns the handle of a stream.
    pub fn handle_of(&self, stream: StreamId) -> vramp_stream_t {
        handle(self.tag, stream)
    }

    /// Returns what [`Session::handle_of`] does, for callbacks, which may not keep the allocator.
    pub(crate) fn namer(&self) -> impl Fn(StreamId) -> vramp_stream_t + Send + Sync + use<> {
        let tag = self.tag;
        move |stream| handle(tag, stream)
    }

    /// Returns the stream of a handle. It may be forgotten, which the allocator finds.
    #[inline]
    pub fn stream(&self, handle: vramp_stream_t) -> Result<StreamId> {
        let index = (handle.id as u32).wrapping_sub(1);
        let stream = StreamId::new(index);
        if handle.id >> 32 != u64::from(self.tag) || index == u32::MAX {
            return Err(foreign_stream(handle));
        }
        Ok(stream)
    }

    /// Returns the driver's handle of a stream: for an adopted stream the value that was adopted.
    pub(crate) fn raw_stream(&self, stream: StreamId) -> Result<*mut c_void> {
        let adopted = self.adopted.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(&raw) = adopted.raws.get(&stream) {
            return Ok(raw as *mut c_void);
        }
        let created = self.allocator.stream(stream).ok_or_else(unknown_stream)?;
        if self.is_of_thread(created) {
            return Ok(PER_THREAD as *mut c_void);
        }
        match &self.device.card {
            Some(card) => {
                let raw = card.raw_stream(created).ok_or_else(unknown_stream)?;
                drop(adopted);
                self.note_given_out(stream, raw as usize);
                Ok(raw)
            }
            None => {
                let text = "a stream that vramp created on a simulated device has no CUstream: \
                            adopt a value of your own, or ask vramp_device before";
                Err(Failure::new(Kind::Unsupported, text))
            }
        }
    }

    /// Creates a stream on the device.
    pub fn create_stream(&self) -> Result<StreamId> {
        Ok(self.allocator.create_stream()?)
    }

    /// Adopts a stream that the caller made. Adopting it again returns the same id. On the
    /// simulator each raw value gets a simulated stream. `cudaStreamPerThread` is that of the calling thread.
    ///
    /// # Safety
    /// On a card, `raw` is null or a `CUstream` of the card's primary context, and lives until it
    /// is forgotten or the allocator is closed.
    #[inline]
    pub(crate) unsafe fn adopt(&self, raw: *mut c_void) -> Result<StreamId> {
        let forgets = self.forgets.load(Ordering::Acquire);
        let last = LAST_ADOPTED.try_with(Cell::get).ok().flatten();
        if let Some(last) = last
            && (last.tag, last.raw, last.forgets) == (self.tag, raw as usize, forgets)
        {
            return Ok(last.stream);
        }
        // SAFETY: this function's contract is the same.
        let stream = unsafe { self.look_up_or_adopt(raw) }?;
        let adopted = Adopted { tag: self.tag, raw: raw as usize, forgets, stream };
        // An ending thread has no thread-local storage, and looks it up every time.
        let _ = LAST_ADOPTED.try_with(|last| last.set(Some(adopted)));
        Ok(stream)
    }

    /// # Safety
    /// On a card a raw stream is null or a `CUstream` of the card's primary context, and lives until it is forgotten or
    /// the allocator is closed.
    unsafe fn look_up_or_adopt(&self, raw: *mut c_void) -> Result<StreamId> {
        let key = raw as usize;
        if key == PER_THREAD {
            return Ok(self.allocator.thread_stream()?);
        }
        let known =
            self.adopted.read().unwrap_or_else(PoisonError::into_inner).ids.get(&key).copied();
        if let Some(stream) = known {
            return Ok(stream);
        }
        let mut adopted = self.adopted.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(&stream) = adopted.ids.get(&key) {
            return Ok(stream);
        }
        let stream = match &self.device.card {
            // SAFETY: this function's contract is the same.
            Some(card) => self.allocator.adopt_stream(unsafe { card.adopt_stream(raw) }),
            None => self.allocator.create_stream()?,
        };
        adopted.ids.insert(key, stream);
        adopted.raws.insert(stream, key);
        Ok(stream)
    }

    /// Returns the handle that the caller gave for a stream; zero for others and for ended streams.
    pub(crate) fn raw(&self, stream: StreamId) -> u64 {
        let adopted = self.adopted.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(&raw) = adopted.raws.get(&stream) {
            return raw as u64;
        }
        drop(adopted);
        match self.allocator.stream(stream) {
            Some(open) if self.is_of_thread(open) => PER_THREAD as u64,
            _ => 0,
        }
    }

    fn is_of_thread(&self, stream: Stream) -> bool {
        self.device.driver.stream_thread(stream) != StreamThread::Any
    }

    /// Returns the stream of a raw handle, if it was adopted and not forgotten.
    pub(crate) fn adopted(&self, raw: usize) -> Option<StreamId> {
        self.adopted.read().unwrap_or_else(PoisonError::into_inner).ids.get(&raw).copied()
    }

    /// Returns the adopted streams that were not forgotten, and the default streams of threads. O(n).
    pub(crate) fn adopted_streams(&self) -> Vec<StreamId> {
        let adopted = self.adopted.read().unwrap_or_else(PoisonError::into_inner);
        let mut streams: Vec<StreamId> = adopted.raws.keys().copied().collect();
        drop(adopted);
        streams.extend(self.allocator.thread_streams());
        streams
    }

    /// Returns the stream of this name. Adopts a raw one.
    ///
    /// # Safety
    /// On a card a raw stream is null or a `CUstream` of the card's primary context, and lives until it is forgotten or
    /// the allocator is closed.
    #[inline]
    pub unsafe fn named(&self, stream: StreamName) -> Result<StreamId> {
        match stream {
            // SAFETY: this function's contract is the same.
            StreamName::Raw(raw) => unsafe { self.adopt(raw as *mut c_void) },
            StreamName::Created(handle) => self.stream(handle),
        }
    }

    /// Returns the stream of this name if it was used before and its table is not being changed.
    #[inline]
    pub(crate) fn named_at_hand(&self, stream: StreamName) -> Option<StreamId> {
        let raw = match stream {
            StreamName::Created(handle) => return self.stream(handle).ok(),
            StreamName::Raw(raw) => raw as usize,
        };
        let forgets = self.forgets.load(Ordering::Acquire);
        match LAST_ADOPTED.try_with(Cell::get).ok().flatten() {
            Some(last) if (last.tag, last.raw, last.forgets) == (self.tag, raw, forgets) => {
                Some(last.stream)
            }
            _ => self.adopted.try_read().ok()?.ids.get(&raw).copied(),
        }
    }

    /// Returns true for a stream that was used or created, and not forgotten.
    pub fn is_known(&self, name: StreamName) -> bool {
        match name {
            StreamName::Raw(raw) => self.adopted(raw as usize).is_some(),
            StreamName::Created(handle) => self.stream(handle).is_ok(),
        }
    }

    /// Forgets the stream of this name, as `vramp_stream_forget` does. Nothing happens to a raw stream that was
    /// not used.
    ///
    /// # Errors
    /// The stream captures a graph, or is unknown.
    pub fn forget_named(&self, name: StreamName) -> Result<()> {
        match name {
            StreamName::Raw(raw) => {
                self.adopted(raw as usize).map_or(Ok(()), |stream| self.forget(stream))
            }
            StreamName::Created(handle) => self.forget(self.stream(handle)?),
        }
    }

    /// Returns the address of a stream on a card.
    pub fn stream_number(&self, stream: StreamId) -> Option<u64> {
        let card = self.device.card.as_ref()?;
        let open = self.allocator.stream(stream)?;
        if self.is_of_thread(open) {
            return Some(PER_THREAD as u64);
        }
        let raw = card.raw_stream(open)?;
        self.note_given_out(stream, raw as usize);
        Some(raw.addr() as u64)
    }

    /// Records that the caller has the handle of a created stream. A call that names the stream by it
    /// means this one: another id for it would outlive the stream.
    fn note_given_out(&self, stream: StreamId, raw: usize) {
        let mut adopted = self.adopted.write().unwrap_or_else(PoisonError::into_inner);
        if !adopted.raws.contains_key(&stream) && adopted.given_out.insert(stream, raw).is_none() {
            adopted.ids.insert(raw, stream);
        }
    }

    /// Makes later work on `stream` wait for the work queued on `before` so far.
    pub fn order(&self, stream: StreamId, before: StreamId) -> Result<()> {
        let driver = &self.device.driver;
        let open = |id| self.allocator.stream(id).ok_or_else(unknown_stream);
        let (stream, before) = (open(stream)?, open(before)?);
        if stream == before {
            return Ok(());
        }
        let event = driver.create_event()?;
        let ordered = driver.record(event, before).and_then(|()| driver.wait(stream, event));
        let destroyed = driver.destroy_event(event);
        Ok(ordered.and(destroyed)?)
    }

    /// Forgets a stream, which the caller may destroy afterwards. Never waits. Where only the driver's
    /// stream could not be destroyed, another call tries that again.
    ///
    /// A capturing stream is refused: the event that replaces it would become part of the graph.
    pub(crate) fn forget(&self, stream: StreamId) -> Result<()> {
        let raw = self.allocator.stream(stream);
        let ended = self.allocator.destroy_stream(stream);
        if self.allocator.stream(stream).is_some() {
            return Ok(ended?);
        }
        let mut adopted = self.adopted.write().unwrap_or_else(PoisonError::into_inner);
        let was_adopted = match adopted.raws.remove(&stream) {
            Some(key) => adopted.ids.remove(&key).is_some(),
            None => {
                if let Some(key) = adopted.given_out.remove(&stream) {
                    adopted.ids.remove(&key);
                }
                false
            }
        };
        // After the id is gone from the table: a thread that adopts meanwhile could otherwise keep
        // the ended id under the new count.
        self.forgets.fetch_add(1, Ordering::Release);
        if was_adopted && let (Some(card), Some(raw)) = (&self.device.card, raw) {
            // The caller owns an adopted stream: the driver only forgets it.
            card.destroy_stream(raw)?;
        }
        Ok(ended?)
    }

    // --- memory ---

    /// Allocates a block and returns its length too.
    #[inline]
    pub fn place(&self, size: u64, stream: StreamId) -> Result<Block> {
        self.place_in(self.region_of_thread()?, size, stream)
    }

    /// Allocates a block in a region, or in the pool if that is `None`.
    #[inline]
    pub(crate) fn place_in(
        &self,
        region: Option<Arc<Region>>,
        size: u64,
        stream: StreamId,
    ) -> Result<Block> {
        self.place_with(region, size, stream, |allocation| {
            let inserted = self.blocks.try_insert(allocation);
            inserted.map_err(|allocation| (allocation, no_host_memory()))
        })
    }

    /// Allocates a block in a region, or in the pool if that is `None`, and stores it with `keep`. What that
    /// returns with an error is freed.
    #[inline]
    pub(crate) fn place_with(
        &self,
        region: Option<Arc<Region>>,
        size: u64,
        stream: StreamId,
        keep: impl FnOnce(Allocation) -> std::result::Result<(), (Allocation, Failure)>,
    ) -> Result<Block> {
        let mut rejected = None;
        // Observers may look the block up.
        let allocator = region.as_ref().map_or(self.allocator(), |region| region.allocator());
        let block = allocator.malloc_with(Bytes::new(size), stream, |allocation| {
            let (addr, len) = (allocation.addr().number(), allocation.len().count());
            let is_small = is_small(&allocation);
            rejected = keep(allocation).err();
            Block { addr, len, is_small }
        });
        let block = block.map_err(|error| match &region {
            Some(region) => crate::regions::not_allocated(region.tag(), error),
            None => error.into(),
        })?;
        match rejected {
            None => Ok(block),
            Some((allocation, failure)) => {
                allocator.free(allocation, stream)?;
                Err(failure)
            }
        }
    }

    /// Stores a new block that a reservation pays for.
    pub(crate) fn keep_paid(
        &self,
        allocation: Allocation,
        charge: Charge,
    ) -> std::result::Result<(), (Allocation, Failure)> {
        let inserted = self.blocks.try_insert_paid(allocation, Box::new(charge));
        inserted.map_err(|(allocation, _)| (allocation, no_host_memory()))
    }

    /// Allocates a block as `place` does if no lock has to be taken that is held during driver calls.
    #[inline]
    pub(crate) fn place_at_hand(&self, size: u64, stream: StreamName) -> Option<Block> {
        let stream = self.named_at_hand(stream)?;
        let region = self.region_at_hand().ok()?;
        let allocator = region.as_ref().map_or(self.allocator(), |region| region.allocator());
        let allocation = allocator.malloc_at_hand(Bytes::new(size), stream)?;
        let (addr, len) = (allocation.addr().number(), allocation.len().count());
        let is_small = is_small(&allocation);
        match self.blocks.insert_at_once(allocation) {
            Ok(()) => Some(Block { addr, len, is_small }),
            Err(allocation) => {
                // The thread's cache has the place that the block came from.
                let freed = allocator.free_at_hand(allocation, stream);
                let _ = freed.or_else(|allocation| allocator.free(allocation, stream));
                None
            }
        }
    }

    /// Frees a block as `free` does if no lock has to be taken that is held during driver calls.
    /// Otherwise returns false and does nothing.
    #[inline]
    pub(crate) fn free_at_hand(&self, addr: u64, stream: StreamName) -> bool {
        let Some(stream) = self.named_at_hand(stream) else { return false };
        let free = |allocation: Allocation| {
            let owner = self.owner(allocation.pool_number());
            owner.free_block_at_hand(allocation, stream)
        };
        self.blocks.take_at_once(addr, free)
    }

    /// Returns true if the process may access the memory at an address: that of a simulated card which
    /// has the host's memory. Blocks of the simulated driver's own pool have none; their addresses are
    /// above those of any process.
    pub fn is_host_memory(&self, addr: u64) -> bool {
        self.device.is_mapped && addr < 1 << 47
    }

    #[inline]
    pub(crate) fn free(&self, addr: u64, stream: StreamId) -> Result<()> {
        let Taken { allocation, charge } =
            self.blocks.remove(addr).ok_or_else(|| self.unknown_pointer(addr))?;
        let freed = self.owner(allocation.pool_number()).free_block(allocation, stream);
        freed.or_else(|error| self.not_freed(addr, error, charge))
    }

    /// Frees a block on the stream of this name. `cudaStreamPerThread` does not say which thread's: the block
    /// is freed on its own stream, after what the calling thread has queued on its default stream. So a
    /// collector of garbage may free what another thread uses.
    ///
    /// # Safety
    /// On a card a raw stream is null or a `CUstream` of the card's primary context, and lives until it is forgotten or
    /// the allocator is closed.
    pub unsafe fn free_named(&self, addr: u64, name: StreamName) -> Result<()> {
        // SAFETY: this function's contract is the same.
        let stream = unsafe { self.named(name) }?;
        if matches!(name, StreamName::Raw(raw) if raw == PER_THREAD as u64)
            && let Some((_, _, home)) = self.block(addr)
            && home != stream
        {
            self.record_use(addr, stream)?;
            return self.free(addr, home);
        }
        self.free(addr, stream)
    }

    /// Frees a block on the stream that it was allocated for. Returns it, its requested bytes and that
    /// stream; `None` if no block begins at `addr`.
    #[inline]
    pub(crate) fn free_on_own_stream(&self, addr: u64) -> Result<Option<(Block, u64, StreamId)>> {
        let Some(Taken { allocation, charge }) = self.blocks.remove(addr) else { return Ok(None) };
        let described = described(&allocation);
        let stream = allocation.stream();
        let freed = self.owner(allocation.pool_number()).free_block(allocation, stream);
        freed.or_else(|error| self.not_freed(addr, error, charge))?;
        Ok(Some(described))
    }

    /// Returns the block that begins at `addr`, its requested bytes and its stream.
    pub(crate) fn block(&self, addr: u64) -> Option<(Block, u64, StreamId)> {
        self.blocks.with(addr, described)
    }

    /// Frees a block, but keeps its memory for the graph of a capture that may use it. Returns
    /// false and does nothing if no block begins at `addr`.
    pub(crate) fn free_for_capture(
        &self,
        addr: u64,
        stream: StreamId,
        capture: &AttachedCapture,
    ) -> Result<bool> {
        let Some(Taken { allocation, charge }) = self.blocks.remove(addr) else { return Ok(false) };
        let owner = self.owner(allocation.pool_number());
        let freed = owner.free_for_capture(allocation, stream, capture);
        freed.or_else(|error| self.not_freed(addr, error, charge))?;
        Ok(true)
    }

    /// Puts a block that the caller still owns back into the map, with what a reservation pays for it.
    #[cold]
    fn not_freed(&self, addr: u64, error: FreeError, charge: Option<Box<Charge>>) -> Result<()> {
        match error {
            FreeError::UnknownStream { allocation, .. } => {
                self.blocks.insert(Taken { allocation, charge });
                Err(unknown_stream())
            }
            FreeError::Foreign(allocation) => {
                self.blocks.insert(Taken { allocation, charge });
                Err(self.unknown_pointer(addr))
            }
            error => Err(error.into()),
        }
    }

    /// Records that work queued on `stream` so far uses the block at `addr`. No driver call.
    ///
    /// # Errors
    /// No block begins there, or the stream is unknown.
    pub fn record_use(&self, addr: u64, stream: StreamId) -> Result<()> {
        let noted = self
            .blocks
            .with(addr, |block| self.owner(block.pool_number()).record_use(block, stream));
        Ok(noted.ok_or_else(|| self.unknown_pointer(addr))??)
    }

    /// Calls `f` with the block that begins at `addr`, which cannot be freed meanwhile.
    pub(crate) fn with_block<R>(&self, addr: u64, f: impl FnOnce(&Allocation) -> R) -> Result<R> {
        self.blocks.with(addr, f).ok_or_else(|| self.unknown_pointer(addr))
    }

    /// Waits on the host for the work queued on a stream so far.
    pub fn synchronize(&self, stream: StreamId) -> Result<()> {
        let raw = self.allocator.stream(stream).ok_or_else(unknown_stream)?;
        Ok(self.device.driver.synchronize_stream(raw)?)
    }

    /// Exports the block that begins at `addr`.
    pub(crate) fn export(&self, addr: u64) -> Result<std::result::Result<Export, ExportError>> {
        let exported =
            self.blocks.with(addr, |block| self.owner(block.pool_number()).export(block));
        exported.ok_or_else(|| self.unknown_pointer(addr))
    }

    /// Returns the usable bytes of a block.
    pub fn usable(&self, addr: u64) -> Result<u64> {
        let len = self.blocks.with(addr, |block| block.len().count());
        len.ok_or_else(|| self.unknown_pointer(addr))
    }

    /// Runs `work` while the table of blocks is locked at `addr`, where a block begins.
    #[cfg(test)]
    pub(crate) fn with_locked_block<R>(&self, addr: u64, work: impl FnOnce() -> R) -> R {
        self.blocks.with(addr, |_| work()).expect("a block begins there")
    }

    /// Returns true if a block begins at `addr`.
    pub(crate) fn has(&self, addr: u64) -> bool {
        self.blocks.with(addr, |_| ()).is_some()
    }

    /// Returns true if a block of a graph arena begins at `addr`.
    pub(crate) fn is_of_arena(&self, addr: u64) -> bool {
        self.blocks.with(addr, Allocation::is_in_arena).unwrap_or(false)
    }

    /// Returns true if a block of a graph arena of that pool begins at `addr`.
    pub(crate) fn is_of_arena_in(&self, addr: u64, pool_number: u64) -> bool {
        let is_of = |block: &Allocation| block.is_in_arena() && block.pool_number() == pool_number;
        self.blocks.with(addr, is_of).unwrap_or(false)
    }

    /// Returns the start and length of the block that contains `addr`. O(n).
    pub(crate) fn containing(&self, addr: u64) -> Option<(DeviceAddr, u64)> {
        self.blocks.containing(addr, usize::MAX)
    }

    /// Returns the addresses of all live blocks, ascending; blocks without a gap are one range. O(n log n).
    pub(crate) fn live_stretches(&self) -> Vec<AddrRange> {
        let mut ranges = self.blocks.ranges();
        ranges.sort_unstable_by_key(|range| range.start);
        let mut stretches: Vec<AddrRange> = Vec::new();
        for range in ranges {
            match stretches.last_mut() {
                Some(last) if last.start + last.len == range.start => last.len += range.len,
                _ => stretches.push(range),
            }
        }
        stretches
    }

    /// Releases idle memory of the card until at most `to` bytes of the pool are reserved, and all idle pinned
    /// memory of the host.
    pub fn trim(&self, to: u64) -> Result<()> {
        self.allocator.trim(Bytes::new(to))?;
        self.other_pools().try_for_each(|pool| pool.trim(Bytes::ZERO))?;
        if let Some(regions) = self.regions_if_any() {
            regions.reclaim();
        }
        for pool in self.host_pools() {
            pool.shrink(Bytes::ZERO);
        }
        Ok(())
    }

    /// Returns the error for an address at which no block begins.
    #[cold]
    pub(crate) fn unknown_pointer(&self, addr: u64) -> Failure {
        // A program may free wrong addresses all the time, with many blocks live.
        let text = match self.blocks.containing(addr, 1 << 14) {
            Some((start, len)) => format!(
                "{addr:#x} lies {} bytes inside the block of {len} bytes at {start}: pass the \
                 address that vramp_malloc returned",
                addr - start.number()
            ),
            None if addr == 0 => {
                "the address is null: pass one that vramp_malloc returned".to_owned()
            }
            None => format!(
                "no block of this allocator begins at {addr:#x}: it was freed already, belongs to \
                 another allocator, or lies inside a block"
            ),
        };
        Failure::new(Kind::UnknownPointer, text)
    }

    /// Sets the limit of reserved bytes. Zero means the memory of the device.
    pub fn set_limit(&self, limit: u64) -> Result<()> {
        Ok(self.allocator.set_limit((limit > 0).then_some(Bytes::new(limit)))?)
    }

    /// Sets the limit of reserved bytes from an option's value, such as `80GiB` or `90%`. `None` is the memory
    /// of the device. Idle memory above the limit is released at once.
    ///
    /// # Errors
    /// The limit is no size or is below a page, or a driver call failed.
    pub fn set_limit_text(&self, limit: Option<&str>) -> Result<()> {
        let Some(limit) = limit else { return self.set_limit(0) };
        let limits = self.device.driver.info().limits;
        self.set_limit(options::limit_of(limit, limits.memory, limits.page)?.count())
    }

    /// Sets the limit as a fraction of the device's memory.
    pub(crate) fn set_fraction(&self, fraction: f64) -> Result<()> {
        Ok(self.allocator.set_memory_fraction(fraction)?)
    }

    // --- other pools ---

    /// Returns the pool of plain allocations. The first call creates it.
    pub(crate) fn plain_pool(&self) -> Result<&Allocator> {
        if let Some(plain) = self.plain.get() {
            return Ok(plain);
        }
        let made = vramp_peers::plain_pool(&self.allocator, "plain")?;
        // Where another thread was first, this one goes.
        if self.plain.set(made).is_ok()
            && let Some(plain) = self.plain.get()
        {
            self.record_pool(plain);
        }
        Ok(self.plain.get().expect("it was set"))
    }

    /// Returns the pool of plain allocations, if there is one.
    pub(crate) fn plain_pool_if_any(&self) -> Option<&Allocator> {
        self.plain.get()
    }

    /// Returns the table of regions.
    pub(crate) fn region_table(&self) -> Result<&Arc<RegionTable>> {
        self.regions.as_ref().ok_or_else(|| {
            let text = "a pool for communication libraries has no regions: use the allocator's";
            Failure::new(Kind::Unsupported, text)
        })
    }

    /// Returns the table of regions; `None` for a pool that serves none.
    pub(crate) fn region_table_if_any(&self) -> Option<&Arc<RegionTable>> {
        self.regions.as_ref()
    }

    /// Returns the number of the device in the process, of an allocator that all interfaces share.
    pub(crate) fn device_number(&self) -> Option<u16> {
        self.number.filter(|_| self.stays_open)
    }

    /// Returns the counts of the allocator and its other pools. The peaks are sums of their peaks, so they
    /// may be above the peak of the sum.
    pub fn total_stats(&self) -> Result<vramp_alloc::stats::Stats> {
        let mut total = self.allocator.stats()?;
        for pool in self.other_pools() {
            total = sum(total, pool.stats()?);
        }
        Ok(total)
    }

    /// Calls `call` for the allocator, and then for its other pools.
    pub(crate) fn in_all_pools(&self, mut call: impl FnMut(&Allocator)) {
        call(&self.allocator);
        self.other_pools().for_each(|pool| call(&pool));
    }

    /// Sets all peaks to the current values, those of regions as well. O(threads) for each of them.
    pub fn reset_peaks(&self) {
        self.in_all_pools(Allocator::reset_peak_stats);
    }

    /// Returns the memory of the allocator and its other pools; that of regions that sleep is not reserved. The
    /// peak is the sum of their peaks.
    pub(crate) fn reserved_memory(&self) -> Result<ReservedMemory> {
        let mut total = self.allocator.reserved_memory()?;
        for pool in self.other_pools() {
            total = sum_of_memory(total, pool.reserved_memory()?);
        }
        Ok(total)
    }

    // --- diagnostics ---

    /// Starts to record the last `events` events. Zero stops the recording.
    pub fn record_history(&self, events: u32) -> Result<()> {
        check_events(events)?;
        let mut recording = self.recording.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(old) = recording.take() {
            self.allocator.stop_history(&old);
        }
        if events > 0 {
            self.recorded_events.store(events, Ordering::Relaxed);
            let size = HistorySize { events, ..HistorySize::default() };
            *recording = Some(self.allocator.record_history(size, None));
        }
        drop(recording);
        self.other_pools().for_each(|pool| self.record_pool(&pool));
        Ok(())
    }

    /// Records the events of another pool too, if a history is recorded.
    pub(crate) fn record_pool(&self, pool: &Allocator) {
        let recording = self.recording.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(recording) = &*recording {
            pool.join_history(recording);
        }
    }

    /// Writes all blocks and segments, and the history if one is recorded, to a file: a PyTorch
    /// snapshot, or a timeline if the path ends with `.json`.
    pub fn write_snapshot(&self, path: &str) -> Result<()> {
        write_trace(&self.snapshot()?, path)
    }

    /// Returns all blocks and segments, and the history if one is recorded, on the device with the number
    /// of the allocator.
    pub(crate) fn snapshot(&self) -> Result<Trace> {
        // A copy of the history, and a list of all blocks that doubles while it grows.
        let recorded = self.recorded_events.load(Ordering::Relaxed) as usize;
        let needed = (self.blocks.count() + recorded) * 256 + (1 << 20);
        vramp_host::check_host_for(needed).map_err(AllocError::HostMemory)?;
        let mut trace = {
            let recording = self.recording.lock().unwrap_or_else(PoisonError::into_inner);
            self.allocator.snapshot(recording.as_ref())
        };
        for pool in self.other_pools() {
            pool.add_to_snapshot(&mut trace);
        }
        if let Some(number) = self.number {
            trace.move_to_device(number);
        }
        let host = self.host_memory();
        for (name, bytes) in [("pinned", host.pinned), ("used", host.used)] {
            let name = format!("vramp.host.{}.{name}", self.number.unwrap_or(0));
            trace.allocator_settings.push((name, bytes.count().to_string()));
        }
        Ok(trace)
    }

    /// Registers `observer` for every event. Returns the number of the registration.
    pub(crate) fn observe(&self, observer: impl Fn(&Event<'_>) + Send + Sync + 'static) -> u64 {
        self.allocator.observe(observer).number()
    }

    /// Removes an observer and waits for its calls in progress on other threads. Returns false if
    /// the number is unknown.
    pub fn unobserve(&self, number: u64) -> bool {
        self.allocator.unregister(Registration::from_number(number))
    }

    pub(crate) fn stats(&self) -> Result<vramp_stats_t> {
        let stats = self.total_stats()?;
        let card = self.device.driver.memory_info()?;
        let host = self.host_memory();
        Ok(vramp_stats_t {
            struct_size: size_of::<vramp_stats_t>() as u64,
            live: stats.live.count(),
            live_peak: stats.live_peak.count(),
            reserved: stats.reserved.count(),
            reserved_peak: stats.reserved_peak.count(),
            placed: stats.placed,
            freed: stats.freed,
            hits: stats.hits,
            misses: stats.misses,
            chunks_created: stats.chunks_created,
            chunks_moved: stats.chunks_moved,
            chunks_reactivated: stats.chunks_reactivated,
            chunks_released: stats.chunks_released,
            moved: stats.moved.count(),
            plans_undone: stats.plans_undone,
            card_free: card.free.count(),
            card_total: card.total.count(),
            callback_panics: stats.callback_panics,
            released: stats.released.count(),
            limit: self.allocator.limit().map_or(0, Bytes::count),
            looked_at: stats.looked_at,
            quarantined: stats.quarantined.count(),
            quarantined_addresses: stats.quarantined_addresses.count(),
            host_pinned: host.pinned.count(),
            host_used: host.used.count(),
        })
    }

    /// Checks the invariants of the allocator, and of its tiers.
    pub fn audit(&self) -> Result<()> {
        if let Some(tiers) = self.tiers_if_open() {
            tiers.manager().audit()?;
            tiers.spaces().audit()?;
        }
        for pool in self.other_pools() {
            pool.audit()?;
        }
        Ok(self.allocator.audit()?)
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

#[cold]
fn no_host_memory() -> Failure {
    AllocError::HostMemory(HostShortage).into()
}

fn handle(tag: u32, stream: StreamId) -> vramp_stream_t {
    vramp_stream_t { id: u64::from(tag) << 32 | (stream.index() as u64 + 1) }
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

/// Returns true for a block that PyTorch's statistics count in the small pool: in a slab, or, of allocators
/// without slabs, up to 1 MiB.
#[inline]
fn is_small(allocation: &Allocation) -> bool {
    let has_slabs = allocation.is_in_slab() || allocation.is_in_pool();
    allocation.is_in_slab() || !has_slabs && allocation.len().count() <= SMALL_MAX
}

#[inline]
fn described(allocation: &Allocation) -> (Block, u64, StreamId) {
    let (addr, len) = (allocation.addr().number(), allocation.len().count());
    let block = Block { addr, len, is_small: is_small(allocation) };
    (block, allocation.requested().count(), allocation.stream())
}

#[cold]
fn foreign_stream(handle: vramp_stream_t) -> Failure {
    let text = match handle.id {
        0 => "the stream is zero: use one from vramp_stream_create or vramp_stream_adopt",
        _ => "the stream belongs to another allocator or was never made: use one of this allocator",
    };
    Failure::new(Kind::UnknownStream, format!("{text} (stream {:#x})", handle.id))
}
