//! One open allocator, with what C needs beside it: addresses and raw streams.

use std::cell::Cell;
use std::collections::HashSet;
use std::ffi::c_void;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use rustc_hash::FxHashMap;
use vramp_alloc::graph::AttachedCapture;
use vramp_alloc::history::{HistoryRecording, HistorySize};
use vramp_alloc::observe::{Event, Registration};
use vramp_alloc::{Allocation, Allocator, Bytes, DeviceAddr, FreeError, StreamId};

use vramp_driver::Driver;

use crate::abi::vramp_status_t::*;
use crate::abi::{vramp_stats_t, vramp_stream_t};
use crate::addresses::Addresses;
use crate::captures::Captures;
use crate::device::Device;
use crate::options::Options;
use crate::status::{Failure, Result};

/// An open allocator.
pub(crate) struct Context {
    device: Device,
    allocator: Allocator,
    blocks: Addresses,
    pub captures: Captures,
    /// Streams made elsewhere, by the driver's own handle.
    adopted: RwLock<FxHashMap<usize, StreamId>>,
    forgotten: RwLock<HashSet<StreamId>>,
    /// So many streams were forgotten.
    forgets: AtomicU64,
    /// The history that is being recorded.
    recording: Mutex<Option<HistoryRecording>>,
    observers: Mutex<Vec<Registration>>,
    /// Tells the streams of different allocators apart.
    tag: u32,
    /// True for an allocator of PyTorch's, which is never closed.
    stays_open: bool,
}

/// The stream that a thread adopted last, which is most often the next one too.
#[derive(Clone, Copy)]
struct Adopted {
    tag: u32,
    raw: usize,
    /// How many streams were forgotten before it was looked up.
    forgets: u64,
    stream: StreamId,
}

thread_local! {
    static LAST_ADOPTED: Cell<Option<Adopted>> = const { Cell::new(None) };
}

static TAGS: AtomicU32 = AtomicU32::new(1);

impl Context {
    /// An allocator on the device of this name, of whose memory `fraction` may be used.
    pub fn open(device: &str, options: &Options, fraction: Option<f64>) -> Result<Context> {
        let device = Device::open(device)?;
        let config = options.config(device.driver.info().limits.memory, fraction);
        let allocator = Allocator::new(Arc::clone(&device.driver), config)?;
        Ok(Context {
            device,
            allocator,
            blocks: Addresses::new(),
            captures: Captures::default(),
            adopted: RwLock::default(),
            forgotten: RwLock::default(),
            forgets: AtomicU64::new(0),
            recording: Mutex::new(None),
            observers: Mutex::new(Vec::new()),
            tag: TAGS.fetch_add(1, Ordering::Relaxed),
            stays_open: false,
        })
    }

    /// The same, never to be closed.
    pub fn kept_open(self) -> Context {
        Context { stays_open: true, ..self }
    }

    /// The same for Rust.
    #[inline]
    pub fn allocator(&self) -> &Allocator {
        &self.allocator
    }

    /// The device's memory.
    pub fn memory(&self) -> Bytes {
        self.device.driver.info().limits.memory
    }

    /// Whether it may be closed.
    pub fn closable(&self) -> Result<()> {
        let text = "the allocator serves PyTorch, which uses it until the process ends: leave it \
                    open";
        match self.stays_open {
            true => Err(Failure::new(VRAMP_ERROR_IN_USE, text)),
            false => Ok(()),
        }
    }

    // --- streams ---

    /// The number by which C knows a stream.
    pub fn name(&self, stream: StreamId) -> vramp_stream_t {
        vramp_stream_t { id: u64::from(self.tag) << 32 | (stream.index() as u64 + 1) }
    }

    /// The stream that C means.
    #[inline]
    pub fn stream(&self, name: vramp_stream_t) -> Result<StreamId> {
        let index = (name.id as u32).wrapping_sub(1);
        let stream = StreamId::new(index);
        let foreign = name.id >> 32 != u64::from(self.tag) || index == u32::MAX;
        if foreign || self.is_forgotten(stream) {
            return Err(unknown_stream(name, foreign));
        }
        Ok(stream)
    }

    #[inline]
    fn is_forgotten(&self, stream: StreamId) -> bool {
        self.forgets.load(Ordering::Acquire) > 0
            && self.forgotten.read().unwrap_or_else(PoisonError::into_inner).contains(&stream)
    }

    /// A new stream of the device.
    pub fn create_stream(&self) -> Result<StreamId> {
        Ok(self.allocator.create_stream()?)
    }

    /// Takes in a stream that was made elsewhere; one that is known already keeps its number. On
    /// the simulator, where no such streams are, a simulated one stands for it.
    ///
    /// # Safety
    /// On a card, `raw` is null or a `CUstream` of the card's primary context, and lives until it
    /// is forgotten or the allocator is closed.
    #[inline]
    pub unsafe fn adopt(&self, raw: *mut c_void) -> Result<StreamId> {
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
        // A thread that is ending looks it up anew.
        let _ = LAST_ADOPTED.try_with(|last| last.set(Some(adopted)));
        Ok(stream)
    }

    /// # Safety
    /// As for [`Context::adopt`].
    unsafe fn look_up_or_adopt(&self, raw: *mut c_void) -> Result<StreamId> {
        let key = raw as usize;
        let known = self.adopted.read().unwrap_or_else(PoisonError::into_inner).get(&key).copied();
        if let Some(stream) = known {
            return Ok(stream);
        }
        let mut adopted = self.adopted.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(&stream) = adopted.get(&key) {
            return Ok(stream);
        }
        let stream = match &self.device.card {
            // SAFETY: this function's contract is the same.
            Some(card) => self.allocator.adopt_stream(unsafe { card.adopt_stream(raw) }),
            None => self.allocator.create_stream()?,
        };
        adopted.insert(key, stream);
        Ok(stream)
    }

    /// Lets go of a stream, which may be destroyed afterwards. Never waits.
    ///
    /// One that captures is refused: the event that stands for it would be part of the graph.
    pub fn forget(&self, stream: StreamId) -> Result<()> {
        // Held all along: a stream is forgotten once.
        let mut forgotten = self.forgotten.write().unwrap_or_else(PoisonError::into_inner);
        let raw = self.allocator.stream(stream).filter(|_| !forgotten.contains(&stream));
        let raw = raw.ok_or_else(|| unknown_stream(self.name(stream), false))?;
        if self.device.driver.info().capabilities.graphs && self.device.driver.is_capturing(raw)? {
            let text = "the stream captures a graph: end the capture before it is forgotten";
            return Err(Failure::new(VRAMP_ERROR_CAPTURE, text));
        }
        self.allocator.destroy_stream(stream)?;
        forgotten.insert(stream);
        let mut adopted = self.adopted.write().unwrap_or_else(PoisonError::into_inner);
        let was_adopted = adopted.values().any(|known| *known == stream);
        adopted.retain(|_, known| *known != stream);
        if was_adopted && let Some(card) = &self.device.card {
            // One that was adopted is not ours to destroy: the card only forgets it.
            card.destroy_stream(raw)?;
        }
        self.forgets.fetch_add(1, Ordering::Release);
        Ok(())
    }

    // --- memory ---

    #[inline]
    pub fn malloc(&self, size: u64, stream: StreamId) -> Result<DeviceAddr> {
        let allocation = self.allocator.malloc(Bytes::new(size), stream)?;
        let addr = allocation.addr();
        self.blocks.insert(allocation);
        Ok(addr)
    }

    #[inline]
    pub fn free(&self, addr: u64, stream: StreamId) -> Result<()> {
        let allocation = self.blocks.remove(addr).ok_or_else(|| self.unknown_pointer(addr))?;
        let freed = self.allocator.free(allocation, stream);
        freed.or_else(|error| self.not_freed(addr, error))
    }

    /// Takes a block back, but keeps its memory for the graph of a capture that may use it. False,
    /// and nothing done, for a block of an arena, and where there is none.
    pub fn free_for_capture(
        &self,
        addr: u64,
        stream: StreamId,
        capture: &AttachedCapture,
    ) -> Result<bool> {
        if self.is_of_arena(addr) {
            return Ok(false);
        }
        let Some(allocation) = self.blocks.remove(addr) else { return Ok(false) };
        let freed = self.allocator.free_for_capture(allocation, stream, capture);
        freed.or_else(|error| self.not_freed(addr, error))?;
        Ok(true)
    }

    /// What is still the caller's goes back into the map.
    #[cold]
    fn not_freed(&self, addr: u64, error: FreeError) -> Result<()> {
        match error {
            FreeError::UnknownStream { allocation, stream } => {
                self.blocks.insert(allocation);
                Err(unknown_stream(self.name(stream), false))
            }
            FreeError::Foreign(allocation) => {
                self.blocks.insert(allocation);
                Err(self.unknown_pointer(addr))
            }
            error => Err(error.into()),
        }
    }

    pub fn record_use(&self, addr: u64, stream: StreamId) -> Result<()> {
        let noted = self.blocks.look(addr, |block| self.allocator.record_use(block, stream));
        Ok(noted.ok_or_else(|| self.unknown_pointer(addr))??)
    }

    /// How many bytes of a block may be used.
    pub fn usable(&self, addr: u64) -> Result<u64> {
        let len = self.blocks.look(addr, |block| block.len().count());
        len.ok_or_else(|| self.unknown_pointer(addr))
    }

    /// True if a block begins at `addr`.
    pub fn has(&self, addr: u64) -> bool {
        self.blocks.look(addr, |_| ()).is_some()
    }

    /// True if a block of a graph arena begins at `addr`.
    pub fn is_of_arena(&self, addr: u64) -> bool {
        self.blocks.look(addr, Allocation::is_in_arena).unwrap_or(false)
    }

    /// The start and length of the block that `addr` lies in. O(n).
    pub fn around(&self, addr: u64) -> Option<(DeviceAddr, u64)> {
        self.blocks.around(addr)
    }

    pub fn trim(&self, to: u64) -> Result<()> {
        Ok(self.allocator.trim(Bytes::new(to))?)
    }

    #[cold]
    fn unknown_pointer(&self, addr: u64) -> Failure {
        let text = match self.around(addr) {
            Some((start, len)) => format!(
                "{addr:#x} lies {} bytes inside the block of {len} bytes at {start}: give the \
                 address that vramp_malloc returned",
                addr - start.number()
            ),
            None if addr == 0 => "the address is null: there is no block".to_owned(),
            None => format!(
                "no block of this allocator is at {addr:#x}: it was freed already, or is another \
                 allocator's"
            ),
        };
        Failure::new(VRAMP_ERROR_UNKNOWN_POINTER, text)
    }

    /// The most physical memory it may hold; zero for as much as the card has.
    pub fn set_limit(&self, limit: u64) -> Result<()> {
        Ok(self.allocator.set_limit((limit > 0).then_some(Bytes::new(limit)))?)
    }

    /// The same as a part of the card's memory.
    pub fn set_fraction(&self, fraction: f64) -> Result<()> {
        Ok(self.allocator.set_memory_fraction(fraction)?)
    }

    // --- looking in ---

    /// Records the last `events` events from now on, or none any more if that is zero.
    pub fn record_history(&self, events: u32) {
        let mut recording = self.recording.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(old) = recording.take() {
            self.allocator.stop_history(&old);
        }
        if events > 0 {
            let size = HistorySize { events, ..HistorySize::default() };
            *recording = Some(self.allocator.record_history(size, None));
        }
    }

    /// Writes all the allocator holds, and its history if one is recorded, as a file for PyTorch's
    /// viewers.
    pub fn write_snapshot(&self, path: &str) -> Result<()> {
        let trace = {
            let recording = self.recording.lock().unwrap_or_else(PoisonError::into_inner);
            self.allocator.snapshot(recording.as_ref())
        };
        let written = File::create(path).and_then(|file| {
            let mut file = BufWriter::new(file);
            match path.ends_with(".json") {
                true => trace.write_perfetto(&mut file)?,
                false => trace.write_snapshot(&mut file)?,
            }
            file.flush()
        });
        written.map_err(|error| {
            Failure::new(VRAMP_ERROR_FILE, format!("cannot write {path}: {error}"))
        })
    }

    /// Calls `observer` for every event from now on. Returns a number to take it back by.
    pub fn observe(&self, observer: impl Fn(&Event<'_>) + Send + Sync + 'static) -> u64 {
        let registration = self.allocator.observe(observer);
        let mut observers = self.observers.lock().unwrap_or_else(PoisonError::into_inner);
        observers.push(registration);
        observers.len() as u64
    }

    /// Takes an observer back. False for a number that names none.
    pub fn unobserve(&self, number: u64) -> bool {
        let observers = self.observers.lock().unwrap_or_else(PoisonError::into_inner);
        let index = (number as usize).checked_sub(1);
        let registration = index.and_then(|index| observers.get(index)).copied();
        registration.is_some_and(|registration| self.allocator.unregister(registration))
    }

    pub fn stats(&self) -> Result<vramp_stats_t> {
        let stats = self.allocator.stats()?;
        let card = self.device.driver.memory_info()?;
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
        })
    }

    pub fn audit(&self) -> Result<()> {
        Ok(self.allocator.audit()?)
    }

    /// Waits for the allocator's streams and gives everything back to the device.
    pub fn close(self) -> Result<()> {
        let Context { allocator, blocks, captures, .. } = self;
        drop(captures);
        drop(blocks);
        Ok(allocator.close()?)
    }
}

#[cold]
fn unknown_stream(name: vramp_stream_t, foreign: bool) -> Failure {
    let text = match (name.id, foreign) {
        (0, _) => "no stream was given: use one from vramp_stream_create or vramp_stream_adopt",
        (_, true) => "the stream is another allocator's, or no stream at all: use one of this",
        (_, false) => "the stream is unknown to this allocator or was forgotten: adopt it anew",
    };
    Failure::new(VRAMP_ERROR_UNKNOWN_STREAM, format!("{text} (stream {:#x})", name.id))
}
