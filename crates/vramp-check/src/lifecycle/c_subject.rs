//! The C interface as the subject of a life-cycle program: the functions of `vramp.h`, with handles
//! and addresses, as a program in C calls them.
//!
//! 1. An operation that C does not have is not drawn ([`Subject::can`]): further pools of a group,
//!    drops, tags, shortage handlers, stable ranges, panics.
//! 2. A handle is used after its allocator was closed, as the Rust objects are.
//! 3. An end that succeeded is tried again: a stale handle or address is an error each time.
//! 4. Subjects of several threads share one allocator, which the first one opened and closes.
//! 5. As the Python module calls it ([`Calls::Python`]), a block is allocated and freed at hand where that
//!    is possible.
//!
//! A status says less than an error in Rust; [`Subject::reported`] says which reasons it joins.
//!
//! Deliberately absent: what the promises are (`world/`).

use std::collections::HashMap;
use std::ffi::c_void;
use std::ops::Range;
use std::ptr::without_provenance_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use vramp::peers::{Config, Preset};
use vramp::{Bytes, DeviceAddr, Driver};
use vramp_capi::abi::vramp_status_t::*;
use vramp_capi::abi::{
    vramp_allocator_t, vramp_arena_t, vramp_graph_t, vramp_lease_t, vramp_status_t, vramp_stream_t,
};
use vramp_capi::graphs::{
    vramp_arena_destroy, vramp_arena_reset, vramp_capture_attach, vramp_capture_begin,
    vramp_graph_destroy, vramp_lease_end,
};
use vramp_capi::interface::{
    vramp_audit, vramp_close, vramp_free, vramp_record_use, vramp_set_limit, vramp_stream_forget,
    vramp_trim, vramp_unobserve,
};
use vramp_capi::kv::abi::{
    VRAMP_KV_INTERLEAVED, VRAMP_KV_SEPARATE, vramp_kv_options_t, vramp_kv_t,
};
use vramp_capi::kv::{vramp_kv_destroy, vramp_kv_record_use};
use vramp_capi::testing::{self, Observer, Refusal, done};
use vramp_core::AddrRange;
use vramp_driver::{CaptureMode, Stream};

use super::op::Op;
use super::subject::{
    ArenaChoice, CacheChoice, Outcome, PoolEnd, Reaction, Refused, Subject, Way, Why, in_way,
};

/// An object with the allocator that made it.
#[derive(Clone, Copy)]
struct Of<T> {
    allocator: vramp_allocator_t,
    id: T,
}

/// The capture that an arena serves.
#[derive(Clone, Copy)]
struct Capture {
    arena: u64,
    of: Of<vramp_arena_t>,
    attached: bool,
}

/// What an observer works with.
struct Callback {
    how: Reaction,
    allocator: vramp_allocator_t,
    stream: vramp_stream_t,
    /// Number of the observer. Zero until it is known, and once it was removed.
    registration: AtomicU64,
    /// True while it runs: its own calls cause events too.
    runs: AtomicBool,
    calls: AtomicU64,
}

impl Callback {
    fn call(&self) {
        if self.runs.swap(true, Ordering::Relaxed) {
            return;
        }
        let calls = self.calls.fetch_add(1, Ordering::Relaxed);
        match self.how {
            Reaction::Allocate => {
                let size = 4096 << (calls % 10);
                if let Ok(block) = testing::malloc(self.allocator, size, self.stream) {
                    let _ = vramp_free(self.allocator, block, self.stream);
                }
            }
            Reaction::Trim => {
                let _ = vramp_trim(self.allocator, 0);
            }
            Reaction::Unregister => self.remove(),
            Reaction::Count | Reaction::Panic => {}
        }
        self.runs.store(false, Ordering::Relaxed);
    }

    fn remove(&self) {
        let number = self.registration.swap(0, Ordering::Relaxed);
        if number != 0 {
            let _ = vramp_unobserve(self.allocator, number);
        }
    }
}

/// How blocks are allocated and freed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Calls {
    /// As a program in C does it.
    C,
    /// As the Python module does it: without the locks that others hold for long, and only if that does
    /// nothing, as in C.
    Python,
}

/// The C interface on one device.
pub struct CSubject {
    calls: Calls,
    device: Arc<dyn Driver>,
    config: Config,
    /// Open allocators.
    pools: HashMap<u64, vramp_allocator_t>,
    streams: HashMap<u64, vramp_stream_t>,
    blocks: HashMap<u64, Of<u64>>,
    arenas: HashMap<u64, Of<vramp_arena_t>>,
    captures: HashMap<u64, Capture>,
    graphs: HashMap<u64, Of<vramp_graph_t>>,
    leases: HashMap<u64, Of<vramp_lease_t>>,
    caches: HashMap<u64, Of<vramp_kv_t>>,
    observers: HashMap<u64, (Arc<Callback>, Observer)>,
    /// Values of adopted streams so far. Each is another stream.
    adopted: Arc<AtomicUsize>,
    /// True for a subject of one of several threads, on the allocator of another subject.
    is_shared: bool,
}

fn refused(Refusal { status, text }: Refusal) -> Refused {
    let why = match status {
        VRAMP_ERROR_UNKNOWN_ALLOCATOR => Why::Closed,
        VRAMP_ERROR_UNKNOWN_STREAM => Why::UnknownStream,
        VRAMP_ERROR_UNKNOWN_POINTER | VRAMP_ERROR_UNKNOWN_ARENA => Why::Foreign,
        VRAMP_ERROR_OUT_OF_MEMORY => Why::OutOfMemory,
        VRAMP_ERROR_BUSY => Why::Busy,
        VRAMP_ERROR_CAPTURE => Why::Capturing,
        VRAMP_ERROR_UNSUPPORTED => Why::NotSupported,
        // The code of a call that would wait for ever on the simulator.
        VRAMP_ERROR_DRIVER if text.contains("(600)") => Why::Hang,
        VRAMP_ERROR_DRIVER => Why::Driver,
        VRAMP_ERROR_INCONSISTENT | VRAMP_ERROR_INTERNAL => Why::Broken,
        _ => Why::Other,
    };
    let text = if why == Why::OutOfMemory { String::new() } else { text };
    Refused { why, text }
}

fn outcome(status: vramp_status_t) -> Outcome<()> {
    done(status).map_err(refused)
}

fn gone() -> Refused {
    Refused { why: Why::Other, text: "the program has no such object".to_owned() }
}

/// Ends an object and tries that again, with a stale handle. An object of a closed allocator has
/// ended with it.
fn end_twice(end: impl Fn() -> vramp_status_t, stale: vramp_status_t) -> Outcome<()> {
    match outcome(end()) {
        Ok(()) => {}
        Err(Refused { why: Why::Closed, .. }) => return Ok(()),
        Err(refused) => return Err(refused),
    }
    match end() {
        again if again == stale => Ok(()),
        again => {
            let text = format!("a stale handle gets {again:?} where {stale:?} is documented");
            Err(Refused { why: Why::Broken, text })
        }
    }
}

fn pointer(address: u64) -> *mut c_void {
    without_provenance_mut(address as usize)
}

impl CSubject {
    /// Returns the C interface of a preset on a device.
    pub fn new(device: Arc<dyn Driver>, preset: Preset, calls: Calls) -> CSubject {
        CSubject::with(device, Config::preset(preset), calls)
    }

    fn with(device: Arc<dyn Driver>, config: Config, calls: Calls) -> CSubject {
        CSubject {
            calls,
            device,
            config,
            pools: HashMap::new(),
            streams: HashMap::new(),
            blocks: HashMap::new(),
            arenas: HashMap::new(),
            captures: HashMap::new(),
            graphs: HashMap::new(),
            leases: HashMap::new(),
            caches: HashMap::new(),
            observers: HashMap::new(),
            adopted: Arc::default(),
            is_shared: false,
        }
    }

    fn pool(&self, pool: u64) -> Outcome<vramp_allocator_t> {
        self.pools.get(&pool).copied().ok_or_else(gone)
    }

    /// Returns the handle of a stream, also of one that never was.
    fn stream(&self, stream: u64) -> vramp_stream_t {
        self.streams.get(&stream).copied().unwrap_or(vramp_stream_t { id: u64::MAX })
    }

    fn add_stream(&mut self, pool: u64, stream: u64, handle: vramp_stream_t) -> Outcome<Stream> {
        let raw = testing::driver_stream(self.pool(pool)?, handle).ok_or_else(gone)?;
        self.streams.insert(stream, handle);
        Ok(raw)
    }

    fn capture(
        &mut self,
        arena: u64,
        capture: u64,
        attached: bool,
        begin: impl Fn(Of<vramp_arena_t>) -> vramp_status_t,
    ) -> Outcome<()> {
        let of = *self.arenas.get(&arena).ok_or_else(gone)?;
        outcome(begin(of))?;
        self.captures.insert(capture, Capture { arena, of, attached });
        Ok(())
    }

    /// Ends a capture and destroys its graph, as a program in C discards one. Returns false if the
    /// call was refused.
    fn discard_graph(Capture { of, attached, .. }: Capture) -> bool {
        let Of { allocator, id } = of;
        let ended = match attached {
            true => testing::detach_capture(allocator, id),
            false => testing::end_capture(allocator, id),
        };
        ended.is_ok_and(|graph| vramp_graph_destroy(allocator, graph) == VRAMP_OK)
    }
}

impl Subject for CSubject {
    fn can(&self, op: &Op) -> bool {
        match *op {
            Op::Open { .. } => self.pools.is_empty(),
            // Nothing drops an allocator.
            Op::EndPool { way, .. } => way != 1,
            Op::DropArena { arena, .. } => {
                self.captures.values().all(|capture| capture.arena != arena)
            }
            // A callback in C does not unwind.
            Op::Observe { kind, .. } => kind % 5 != 4,
            Op::Tagged { .. }
            | Op::Handle { .. }
            | Op::Range { .. }
            | Op::Back { .. }
            | Op::WorkRange { .. }
            | Op::Lend { .. }
            | Op::Host { .. }
            | Op::Unhost { .. }
            | Op::DropRange { .. } => false,
            _ => true,
        }
    }

    fn reported(&self, why: Why) -> Why {
        match why {
            Why::Arena | Why::Over | Why::OtherThread | Why::Invalidated => Why::Capturing,
            Why::Occupied => Why::Other,
            why => why,
        }
    }

    fn open(&mut self, pool: u64) -> Outcome<()> {
        let opened = testing::open_on(Arc::clone(&self.device), self.config.clone());
        self.pools.insert(pool, opened.map_err(refused)?);
        Ok(())
    }

    fn end_pool(&mut self, pool: u64, way: u64) -> PoolEnd {
        let Some(&allocator) = self.pools.get(&pool) else { return PoolEnd::Done };
        let way = if way == 2 { Way::Elsewhere } else { Way::Here };
        let closed = in_way(way, move || outcome(vramp_close(allocator)));
        let is_open = vramp_audit(allocator) != VRAMP_ERROR_UNKNOWN_ALLOCATOR;
        match closed {
            Ok(()) if is_open => {
                let text = "a closed allocator is known".to_owned();
                return PoolEnd::Failed(Refused { why: Why::Broken, text });
            }
            Err(refused) if is_open => return PoolEnd::Refused(refused),
            _ => {}
        }
        self.pools.remove(&pool);
        self.observers.clear();
        match closed {
            Ok(()) => PoolEnd::Done,
            Err(refused) => PoolEnd::Failed(refused),
        }
    }

    fn create_stream(&mut self, pool: u64, stream: u64) -> Outcome<Stream> {
        let created = testing::create_stream(self.pool(pool)?).map_err(refused)?;
        self.add_stream(pool, stream, created)
    }

    /// The stream is the allocator's: no stream of a program reaches a device that is no card.
    fn adopt_stream(&mut self, pool: u64, stream: u64) -> Outcome<(Stream, bool)> {
        // Not one of the small numbers by which CUDA names streams of its own.
        let raw = 0x1000 + self.adopted.fetch_add(1, Ordering::Relaxed);
        let adopted = testing::adopt_stream(self.pool(pool)?, raw).map_err(refused)?;
        Ok((self.add_stream(pool, stream, adopted)?, false))
    }

    fn destroy_stream(&mut self, pool: u64, stream: u64) -> Outcome<()> {
        outcome(vramp_stream_forget(self.pool(pool)?, self.stream(stream)))
    }

    fn malloc(
        &mut self,
        (pool, stream): (u64, u64),
        size: Bytes,
        block: u64,
        _: bool,
    ) -> Outcome<AddrRange> {
        let allocator = self.pool(pool)?;
        let (size, stream) = (size.count() as usize, self.stream(stream));
        let at_hand = match self.calls {
            Calls::C => None,
            Calls::Python => testing::malloc_at_hand(allocator, size, stream),
        };
        let address = match at_hand {
            Some(address) => address as u64,
            None => testing::malloc(allocator, size, stream).map_err(refused)? as u64,
        };
        let len = testing::usable_size(allocator, address).map_err(refused)?;
        self.blocks.insert(block, Of { allocator, id: address });
        Ok(AddrRange::new(DeviceAddr::new(address), Bytes::new(len as u64)))
    }

    fn record_use(&mut self, block: u64, stream: u64) -> Outcome<()> {
        let Of { allocator, id } = *self.blocks.get(&block).ok_or_else(gone)?;
        outcome(vramp_record_use(allocator, pointer(id), self.stream(stream)))
    }

    fn free(&mut self, block: u64, stream: u64, way: Way) -> Result<(), (Refused, bool)> {
        let Of { allocator, id } = *self.blocks.get(&block).ok_or_else(|| (gone(), false))?;
        let stream = self.stream(stream);
        let calls = self.calls;
        let free = move || match calls {
            Calls::Python if testing::free_at_hand(allocator, id, stream) => VRAMP_OK,
            _ => vramp_free(allocator, pointer(id), stream),
        };
        // Another thread may have a new block there.
        let is_shared = self.is_shared;
        let freed = in_way(way, || match is_shared {
            true => outcome(free()),
            false => end_twice(free, VRAMP_ERROR_UNKNOWN_POINTER),
        });
        let still_ours = freed
            .as_ref()
            .is_err_and(|refused| matches!(refused.why, Why::Foreign | Why::UnknownStream));
        if !still_ours {
            self.blocks.remove(&block);
        }
        freed.map_err(|refused| (refused, still_ours))
    }

    fn trim(&mut self, pool: u64, to: Bytes) -> Outcome<()> {
        outcome(vramp_trim(self.pool(pool)?, to.count() as usize))
    }

    fn set_limit(&mut self, pool: u64, limit: Option<Bytes>) -> Outcome<()> {
        outcome(vramp_set_limit(self.pool(pool)?, limit.unwrap_or(Bytes::ZERO).count()))
    }

    fn audit(&self, pool: u64) -> Outcome<()> {
        outcome(vramp_audit(self.pool(pool)?))
    }

    fn usage(&self, pool: u64) -> Outcome<(Bytes, Bytes)> {
        let stats = testing::stats(self.pool(pool)?).map_err(refused)?;
        Ok((Bytes::new(stats.live), Bytes::new(stats.reserved)))
    }

    fn arena(&mut self, pool: u64, arena: u64, choice: ArenaChoice) -> Outcome<()> {
        let policy = match choice.monotone {
            true => "policy=monotone,capacity=12MiB",
            false => "policy=reusing,capacity=1GiB",
        };
        let overlap = if choice.order { "order" } else { "refuse" };
        let mode = match choice.mode {
            CaptureMode::Global => "global",
            CaptureMode::ThreadLocal => "thread-local",
            CaptureMode::Relaxed => "relaxed",
        };
        let allocator = self.pool(pool)?;
        let options = format!("{policy},overlap={overlap},mode={mode}");
        let id = testing::create_arena(allocator, &options).map_err(refused)?;
        self.arenas.insert(arena, Of { allocator, id });
        Ok(())
    }

    fn drop_arena(&mut self, arena: u64, way: Way) -> Outcome<()> {
        let Of { allocator, id } = self.arenas.remove(&arena).ok_or_else(gone)?;
        let end = move || vramp_arena_destroy(allocator, id);
        in_way(way, || end_twice(end, VRAMP_ERROR_UNKNOWN_ARENA))
    }

    fn reset(&mut self, arena: u64) -> Outcome<()> {
        let Of { allocator, id } = *self.arenas.get(&arena).ok_or_else(gone)?;
        outcome(vramp_arena_reset(allocator, id))
    }

    fn begin(&mut self, arena: u64, stream: u64, capture: u64) -> Outcome<()> {
        let stream = self.stream(stream);
        self.capture(arena, capture, false, |of| vramp_capture_begin(of.allocator, stream, of.id))
    }

    fn attach(&mut self, arena: u64, stream: u64, capture: u64) -> Outcome<()> {
        let stream = self.stream(stream);
        self.capture(arena, capture, true, |of| vramp_capture_attach(of.allocator, stream, of.id))
    }

    fn end(&mut self, capture: u64, graph: u64, way: Way) -> Outcome<()> {
        let Capture { of, .. } = *self.captures.get(&capture).ok_or_else(gone)?;
        let Of { allocator, id } = of;
        let ended = in_way(way, move || testing::end_capture(allocator, id)).map_err(refused);
        // On a wrong thread the capture goes on.
        if ended.is_ok() || way != Way::Elsewhere {
            self.captures.remove(&capture);
        }
        self.graphs.insert(graph, Of { allocator, id: ended? });
        Ok(())
    }

    fn detach(&mut self, capture: u64, graph: u64) -> Outcome<()> {
        let Of { allocator, id } = self.captures.remove(&capture).ok_or_else(gone)?.of;
        let hold = testing::detach_capture(allocator, id).map_err(refused)?;
        self.graphs.insert(graph, Of { allocator, id: hold });
        Ok(())
    }

    fn discard(&mut self, capture: u64, way: Way) -> Outcome<()> {
        let Some(ended) = self.captures.remove(&capture) else { return Ok(()) };
        // On a wrong thread it is refused, and ended here.
        if !in_way(way, move || CSubject::discard_graph(ended)) {
            CSubject::discard_graph(ended);
        }
        Ok(())
    }

    fn launch(&mut self, graph: u64, stream: u64, lease: u64) -> Outcome<()> {
        let Of { allocator, id } = *self.graphs.get(&graph).ok_or_else(gone)?;
        let launched = testing::launch(allocator, id, self.stream(stream)).map_err(refused)?;
        self.leases.insert(lease, Of { allocator, id: launched });
        Ok(())
    }

    fn end_lease(&mut self, lease: u64, way: Way) -> Outcome<()> {
        let Some(Of { allocator, id }) = self.leases.remove(&lease) else { return Ok(()) };
        let end = move || vramp_lease_end(allocator, id);
        in_way(way, || end_twice(end, VRAMP_ERROR_UNKNOWN_LEASE))
    }

    fn drop_graph(&mut self, graph: u64, way: Way) -> Outcome<()> {
        let Some(Of { allocator, id }) = self.graphs.remove(&graph) else { return Ok(()) };
        let end = move || vramp_graph_destroy(allocator, id);
        in_way(way, || end_twice(end, VRAMP_ERROR_UNKNOWN_GRAPH))
    }

    fn range(&mut self, _: u64, _: u64, _: Bytes) -> Outcome<AddrRange> {
        Err(Refused::absent())
    }

    fn back(&mut self, _: u64, _: u64) -> Outcome<()> {
        Err(Refused::absent())
    }

    fn lend(&mut self, _: u64) -> Outcome<Bytes> {
        Err(Refused::absent())
    }

    fn host(&mut self, _: u64, _: Bytes) -> Outcome<()> {
        Err(Refused::absent())
    }

    fn unhost(&mut self, _: u64, _: Bytes) -> Outcome<()> {
        Err(Refused::absent())
    }

    fn use_range(&mut self, _: u64, _: u64) -> Outcome<()> {
        Err(Refused::absent())
    }

    fn drop_range(&mut self, _: u64, _: Way) -> Outcome<()> {
        Err(Refused::absent())
    }

    fn cache(&mut self, pool: u64, cache: u64, choice: CacheChoice) -> Outcome<AddrRange> {
        let allocator = self.pool(pool)?;
        let (arrangement, unit) = match choice.interleaved {
            true => (VRAMP_KV_INTERLEAVED, choice.tensors),
            false => (VRAMP_KV_SEPARATE, 1),
        };
        let options = vramp_kv_options_t {
            tensors: choice.tensors,
            arrangement,
            bytes_each: CacheChoice::bytes(choice.pages).count(),
            superpage: CacheChoice::bytes(choice.superpage * unit).count(),
            limit: choice.limit_bytes().map_or(0, Bytes::count),
            ..vramp_kv_options_t::default()
        };
        let (id, start) = testing::create_cache(allocator, options).map_err(refused)?;
        self.caches.insert(cache, Of { allocator, id });
        let len = CacheChoice::bytes(choice.pages) * u64::from(choice.tensors);
        Ok(AddrRange::new(DeviceAddr::new(start), len))
    }

    fn commit(&mut self, cache: u64, pages: &[Range<u32>], stream: u64) -> Outcome<()> {
        let Of { allocator, id } = *self.caches.get(&cache).ok_or_else(gone)?;
        testing::commit(allocator, id, pages, self.stream(stream)).map_err(refused)
    }

    fn take(&mut self, cache: u64, count: u32, stream: u64) -> Outcome<Vec<Range<u32>>> {
        let Of { allocator, id } = *self.caches.get(&cache).ok_or_else(gone)?;
        testing::take(allocator, id, count, self.stream(stream)).map_err(refused)
    }

    fn park(&mut self, cache: u64, pages: &[Range<u32>], stream: Option<u64>) -> Outcome<()> {
        let Of { allocator, id } = *self.caches.get(&cache).ok_or_else(gone)?;
        let stream = stream.map_or(vramp_stream_t::default(), |stream| self.stream(stream));
        testing::park(allocator, id, pages, stream).map_err(refused)
    }

    fn release(&mut self, cache: u64, keep: Bytes) -> Outcome<()> {
        let Of { allocator, id } = *self.caches.get(&cache).ok_or_else(gone)?;
        testing::release(allocator, id, keep.count()).map(drop).map_err(refused)
    }

    fn use_cache(&mut self, cache: u64, stream: u64) -> Outcome<()> {
        let Of { allocator, id } = *self.caches.get(&cache).ok_or_else(gone)?;
        outcome(vramp_kv_record_use(allocator, id, self.stream(stream)))
    }

    fn drop_cache(&mut self, cache: u64, way: Way) -> Outcome<()> {
        let Some(Of { allocator, id }) = self.caches.remove(&cache) else { return Ok(()) };
        let end = move || vramp_kv_destroy(allocator, id);
        in_way(way, || end_twice(end, VRAMP_ERROR_UNKNOWN_ARENA))
    }

    fn cache_pages(&self, cache: u64) -> (u32, u32) {
        let Some(&Of { allocator, id }) = self.caches.get(&cache) else { return (0, 0) };
        let stats = testing::cache_stats(allocator, id).unwrap_or_default();
        (stats.committed, stats.moving)
    }

    fn observe(&mut self, pool: u64, observer: u64, how: Reaction, stream: u64) -> Outcome<()> {
        let allocator = self.pool(pool)?;
        let callback = Arc::new(Callback {
            how,
            allocator,
            stream: self.stream(stream),
            registration: AtomicU64::new(0),
            runs: AtomicBool::new(false),
            calls: AtomicU64::new(0),
        });
        let called = Arc::clone(&callback);
        let registered = Observer::new(allocator, move |_| called.call()).map_err(refused)?;
        callback.registration.store(registered.registration(), Ordering::Relaxed);
        self.observers.insert(observer, (callback, registered));
        Ok(())
    }

    fn handle(&mut self, _: (u64, u64), _: Reaction, _: &[u64], _: u64) -> Outcome<()> {
        Err(Refused::absent())
    }

    fn unobserve(&mut self, observer: u64) -> Outcome<()> {
        self.observers.remove(&observer);
        Ok(())
    }

    fn share(&self) -> Outcome<Box<dyn Subject>> {
        let mut shared = CSubject::with(Arc::clone(&self.device), self.config.clone(), self.calls);
        shared.pools.clone_from(&self.pools);
        shared.adopted = Arc::clone(&self.adopted);
        shared.is_shared = true;
        Ok(Box::new(shared))
    }

    fn drop_all(&mut self) {
        for allocator in self.pools.drain().map(|(_, allocator)| allocator) {
            if !self.is_shared {
                let _ = vramp_close(allocator);
            }
        }
    }
}

impl Drop for CSubject {
    fn drop(&mut self) {
        // A program that found something may have left captures, which would keep the allocators
        // open.
        for capture in self.captures.values() {
            CSubject::discard_graph(*capture);
        }
        let allocators: Vec<vramp_allocator_t> = self.pools.values().copied().collect();
        for (allocator, stream) in
            allocators.iter().flat_map(|pool| self.streams.values().map(move |at| (*pool, *at)))
        {
            if let Some(raw) = testing::driver_stream(allocator, stream)
                && self.device.is_capturing(raw).unwrap_or(false)
                && let Ok(graph) = self.device.end_capture(raw)
            {
                let _ = self.device.destroy_graph(graph);
            }
        }
        self.drop_all();
    }
}
