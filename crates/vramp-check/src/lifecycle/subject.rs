//! What a program runs on: an interface of the allocator, with its objects by name.

use std::collections::HashMap;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use vramp::error::{CloseError, CreateError, StreamError, Unusable, UseError};
use vramp::graph::{
    ArenaConfig, ArenaError, ArenaPolicy, AttachedCapture, Capture, CaptureError, CaptureMode,
    CapturedGraph, GraphArena, GraphHold, LaunchError, Overlap, ReplayLease,
};
use vramp::kv::{self, Arrangement, KvError, Layout};
use vramp::observe::Registration;
use vramp::peers::{Config, Preset};
use vramp::range::{HostBackingError, StableRange};
use vramp::{AllocError, Allocation, Allocator, Bytes, Driver, DriverError, FreeError, StreamId};
use vramp_core::AddrRange;
use vramp_driver::{ErrorKind, GraphExec, Stream};

use super::op::Op;

/// Why a call was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// There is no memory.
    OutOfMemory,
    /// The stream is unknown or was destroyed.
    UnknownStream,
    /// Another object is unknown, or of another allocator.
    Foreign,
    /// A stream captures, or the capture forbids the call.
    Capturing,
    /// Another stream or another capture uses the arena.
    Busy,
    /// The arena cannot serve the capture.
    Arena,
    /// The allocator was closed.
    Closed,
    /// The capture is over.
    Over,
    /// The capture is another thread's.
    OtherThread,
    /// The capture was invalidated.
    Invalidated,
    /// The preset or the interface does not have it.
    NotSupported,
    /// The memory is backed by the host, or is not vacant.
    Occupied,
    /// A driver call failed.
    Driver,
    /// A driver call found that it would wait for ever: the simulator's answer to a wait behind a
    /// closed gate.
    Hang,
    /// An earlier panic left the pool inconsistent.
    Broken,
    /// Another reason.
    Other,
}

/// A refused call.
#[derive(Clone, Debug)]
pub struct Refused {
    /// Reason, for comparison.
    pub why: Why,
    /// The error's own text. Empty for want of memory, whose report is long and frequent.
    pub text: String,
}

impl Refused {
    /// Returns the refusal of a call that the interface does not have.
    pub fn absent() -> Refused {
        Refused { why: Why::NotSupported, text: String::new() }
    }
}

/// Result of a call.
pub type Outcome<T> = Result<T, Refused>;

/// How ending a pool ended.
pub enum PoolEnd {
    /// It is closed.
    Done,
    /// It is as before: a stream captures, or work could not be waited for.
    Refused(Refused),
    /// It is closed, and a driver call failed.
    Failed(Refused),
}

/// How an object is ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// By a call or a drop on the program's thread.
    Here,
    /// On another thread.
    Elsewhere,
    /// By a panic that unwinds.
    Panic,
}

/// Choices of an arena.
#[derive(Clone, Copy, Debug)]
pub struct ArenaChoice {
    /// Each block has addresses of its own.
    pub monotone: bool,
    /// Overlapping replays are ordered.
    pub order: bool,
    /// Mode of its captures.
    pub mode: CaptureMode,
}

/// Choices of an arena for caches.
#[derive(Clone, Copy, Debug)]
pub struct CacheChoice {
    /// Tensors.
    pub tensors: u32,
    /// Pages of each.
    pub pages: u32,
    /// The same page of all tensors is side by side.
    pub interleaved: bool,
    /// Pages of the longest handle.
    pub superpage: u32,
    /// Most pages.
    pub limit: Option<u32>,
}

impl CacheChoice {
    /// Length of a page.
    pub const PAGE: Bytes = Bytes::mib(2);

    /// Returns the bytes of so many pages of a tensor.
    pub fn bytes(pages: u32) -> Bytes {
        CacheChoice::PAGE * u64::from(pages)
    }

    /// Returns the bytes of the limit.
    pub fn limit_bytes(&self) -> Option<Bytes> {
        self.limit.map(|pages| CacheChoice::bytes(pages) * u64::from(self.tensors))
    }
}

/// What a callback does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reaction {
    /// Nothing.
    Count,
    /// Allocates and frees on a stream.
    Allocate,
    /// Trims the pool.
    Trim,
    /// Removes itself.
    Unregister,
    /// Panics, once.
    Panic,
}

/// An interface of the allocator. Objects have the names that the program gives them.
#[allow(missing_docs, reason = "the methods are the operations, which `Op` describes")]
pub trait Subject: Send {
    fn open(&mut self, pool: u64) -> Outcome<()>;
    fn end_pool(&mut self, pool: u64, way: u64) -> PoolEnd;
    /// Returns the driver's stream.
    fn create_stream(&mut self, pool: u64, stream: u64) -> Outcome<Stream>;
    /// Returns the driver's stream, and true if the program owns it.
    fn adopt_stream(&mut self, pool: u64, stream: u64) -> Outcome<(Stream, bool)>;
    fn destroy_stream(&mut self, pool: u64, stream: u64) -> Outcome<()>;
    fn malloc(
        &mut self,
        pool_and_stream: (u64, u64),
        size: Bytes,
        block: u64,
        tagged: bool,
    ) -> Outcome<AddrRange>;
    fn record_use(&mut self, block: u64, stream: u64) -> Outcome<()>;
    /// Returns true in the second place if the block is still the caller's.
    fn free(&mut self, block: u64, stream: u64, way: Way) -> Result<(), (Refused, bool)>;
    fn trim(&mut self, pool: u64, to: Bytes) -> Outcome<()>;
    fn set_limit(&mut self, pool: u64, limit: Option<Bytes>) -> Outcome<()>;
    fn audit(&self, pool: u64) -> Outcome<()>;
    /// Returns live and reserved bytes.
    fn usage(&self, pool: u64) -> Outcome<(Bytes, Bytes)>;
    fn arena(&mut self, pool: u64, arena: u64, choice: ArenaChoice) -> Outcome<()>;
    fn drop_arena(&mut self, arena: u64, way: Way) -> Outcome<()>;
    fn reset(&mut self, arena: u64) -> Outcome<()>;
    fn begin(&mut self, arena: u64, stream: u64, capture: u64) -> Outcome<()>;
    fn attach(&mut self, arena: u64, stream: u64, capture: u64) -> Outcome<()>;
    /// Ends a capture that was begun.
    fn end(&mut self, capture: u64, graph: u64, way: Way) -> Outcome<()>;
    /// Detaches from a capture that was attached.
    fn detach(&mut self, capture: u64, graph: u64) -> Outcome<()>;
    fn discard(&mut self, capture: u64, way: Way) -> Outcome<()>;
    fn launch(&mut self, graph: u64, stream: u64, lease: u64) -> Outcome<()>;
    fn end_lease(&mut self, lease: u64, way: Way) -> Outcome<()>;
    fn drop_graph(&mut self, graph: u64, way: Way) -> Outcome<()>;
    fn range(&mut self, pool: u64, range: u64, len: Bytes) -> Outcome<AddrRange>;
    fn back(&mut self, range: u64, stream: u64) -> Outcome<()>;
    fn lend(&mut self, range: u64) -> Outcome<Bytes>;
    fn host(&mut self, range: u64, len: Bytes) -> Outcome<()>;
    fn unhost(&mut self, range: u64, len: Bytes) -> Outcome<()>;
    fn use_range(&mut self, range: u64, stream: u64) -> Outcome<()>;
    fn drop_range(&mut self, range: u64, way: Way) -> Outcome<()>;
    fn cache(&mut self, pool: u64, cache: u64, choice: CacheChoice) -> Outcome<AddrRange>;
    fn commit(&mut self, cache: u64, pages: &[Range<u32>], stream: u64) -> Outcome<()>;
    fn take(&mut self, cache: u64, count: u32, stream: u64) -> Outcome<Vec<Range<u32>>>;
    /// Parks pages behind a stream, or all.
    fn park(&mut self, cache: u64, pages: &[Range<u32>], stream: Option<u64>) -> Outcome<()>;
    fn release(&mut self, cache: u64, keep: Bytes) -> Outcome<()>;
    fn use_cache(&mut self, cache: u64, stream: u64) -> Outcome<()>;
    fn drop_cache(&mut self, cache: u64, way: Way) -> Outcome<()>;
    /// Returns the committed and the moving pages.
    fn cache_pages(&self, cache: u64) -> (u32, u32);
    fn observe(&mut self, pool: u64, observer: u64, how: Reaction, stream: u64) -> Outcome<()>;
    /// Registers a shortage handler. It frees `blocks`, one at a time.
    fn handle(
        &mut self,
        pool_and_observer: (u64, u64),
        how: Reaction,
        blocks: &[u64],
        stream: u64,
    ) -> Outcome<()>;
    fn unobserve(&mut self, observer: u64) -> Outcome<()>;
    /// Returns a subject for another thread. It has this one's pools, and no other objects.
    fn share(&self) -> Outcome<Box<dyn Subject>>;
    /// Drops everything that is left, in no particular order.
    fn drop_all(&mut self);
    /// Returns false for an operation that the interface does not have. It is not drawn.
    fn can(&self, _: &Op) -> bool {
        true
    }
    /// Returns the reason by which the interface reports this one, if it distinguishes fewer.
    fn reported(&self, why: Why) -> Why {
        why
    }
}

// --- Rust ---

/// The Rust interface.
pub struct RustSubject {
    device: Arc<dyn Driver>,
    config: Config,
    pools: HashMap<u64, Arc<Allocator>>,
    streams: HashMap<u64, StreamId>,
    blocks: HashMap<u64, (u64, Allocation)>,
    arenas: HashMap<u64, (u64, GraphArena)>,
    captures: HashMap<u64, Capture>,
    attached: HashMap<u64, AttachedCapture>,
    graphs: HashMap<u64, CapturedGraph>,
    holds: HashMap<u64, GraphHold>,
    leases: HashMap<u64, ReplayLease>,
    ranges: HashMap<u64, StableRange>,
    caches: HashMap<u64, kv::Arena>,
    observers: HashMap<u64, (u64, Arc<Callback>)>,
}

/// A registered callback.
struct Callback {
    how: Reaction,
    allocator: Weak<Allocator>,
    registration: Mutex<Option<Registration>>,
    /// True while it runs: its own calls cause events too.
    runs: AtomicBool,
    calls: AtomicU64,
    stream: StreamId,
    stash: Mutex<Vec<Allocation>>,
}

/// Payload of a panic that a program planned.
pub struct Planned;

impl Callback {
    /// Returns true if it freed something.
    fn call(&self) -> bool {
        if self.runs.swap(true, Ordering::Relaxed) {
            return false;
        }
        let calls = self.calls.fetch_add(1, Ordering::Relaxed);
        let freed = catch_unwind(AssertUnwindSafe(|| self.react(calls)));
        self.runs.store(false, Ordering::Relaxed);
        freed.unwrap_or_else(|panic| resume_unwind(panic))
    }

    fn react(&self, calls: u64) -> bool {
        let Some(allocator) = self.allocator.upgrade() else { return false };
        let stashed = self.stash.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let had = stashed.is_some();
        if let Some(block) = stashed {
            // The stream may be destroyed, and still takes frees.
            let _ = allocator.free(block, self.stream);
        }
        match self.how {
            Reaction::Count => {}
            Reaction::Allocate => {
                if let Ok(block) = allocator.malloc(Bytes::kib(4 << (calls % 10)), self.stream) {
                    let _ = allocator.free(block, self.stream);
                }
            }
            Reaction::Trim => {
                let _ = allocator.trim(Bytes::ZERO);
            }
            Reaction::Unregister => {
                let own = self.registration.lock().unwrap_or_else(PoisonError::into_inner).take();
                own.into_iter().for_each(|own| {
                    allocator.unregister(own);
                });
            }
            Reaction::Panic if calls == 0 => resume_unwind(Box::new(Planned)),
            Reaction::Panic => {}
        }
        had
    }
}

fn why_driver(error: &DriverError) -> Refused {
    let why = match (error.kind, error.code) {
        (_, 600) => Why::Hang,
        (ErrorKind::OutOfMemory, _) => Why::OutOfMemory,
        (ErrorKind::Capturing, _) => Why::Capturing,
        _ => Why::Driver,
    };
    Refused { why, text: error.to_string() }
}

fn other(why: Why, error: &dyn std::fmt::Display) -> Refused {
    Refused { why, text: error.to_string() }
}

fn why_unusable(error: &Unusable) -> Refused {
    match error {
        Unusable::Closed => other(Why::Closed, error),
        _ => other(Why::Broken, error),
    }
}

fn why_alloc(error: AllocError) -> Refused {
    match &error {
        AllocError::OutOfMemory(_) => Refused { why: Why::OutOfMemory, text: String::new() },
        AllocError::Driver(error) => why_driver(error),
        AllocError::UnknownStream(_) => other(Why::UnknownStream, &error),
        AllocError::Arena(_) if error.is_out_of_memory() => other(Why::OutOfMemory, &error),
        AllocError::Arena(_) => other(Why::Arena, &error),
        AllocError::HostMapped { .. } => other(Why::Occupied, &error),
        AllocError::Unusable(unusable) => why_unusable(unusable),
        _ => other(Why::Other, &error),
    }
}

fn why_arena(error: ArenaError) -> Refused {
    match &error {
        ArenaError::NotSupported => other(Why::NotSupported, &error),
        ArenaError::Driver(error) => why_driver(error),
        ArenaError::Unusable(unusable) => why_unusable(unusable),
        _ => other(Why::Other, &error),
    }
}

fn why_capture(error: CaptureError) -> Refused {
    match error {
        CaptureError::ArenaBusy | CaptureError::Served(_) => other(Why::Busy, &error),
        CaptureError::ForeignArena => other(Why::Foreign, &error),
        CaptureError::UnknownStream(_) => other(Why::UnknownStream, &error),
        CaptureError::NotCapturing(_) => other(Why::Other, &error),
        CaptureError::Alloc(error) => why_alloc(error),
        CaptureError::Query { ref error, .. } | CaptureError::Begin(ref error) => why_driver(error),
        CaptureError::Invalidated(_) => other(Why::Invalidated, &error),
        CaptureError::OtherThread => other(Why::OtherThread, &error),
        CaptureError::Over => other(Why::Over, &error),
        CaptureError::Unusable(ref unusable) => why_unusable(unusable),
        _ => other(Why::Other, &error),
    }
}

fn why_launch(error: LaunchError) -> Refused {
    match error {
        LaunchError::Busy(_) => other(Why::Busy, &error),
        LaunchError::Alloc(error) => why_alloc(error),
        LaunchError::UnknownStream(_) => other(Why::UnknownStream, &error),
        LaunchError::Capturing(_) => other(Why::Capturing, &error),
        LaunchError::Driver(ref error) => why_driver(error),
        LaunchError::Unusable(ref unusable) => why_unusable(unusable),
        _ => other(Why::Other, &error),
    }
}

fn why_stream(error: StreamError) -> Refused {
    match &error {
        StreamError::Unknown(_) => other(Why::UnknownStream, &error),
        StreamError::Capturing(_) => other(Why::Capturing, &error),
        StreamError::Driver(error) => why_driver(error),
        StreamError::Unusable(unusable) => why_unusable(unusable),
        _ => other(Why::Other, &error),
    }
}

fn why_host(error: HostBackingError) -> Refused {
    match &error {
        HostBackingError::NotSupported => other(Why::NotSupported, &error),
        HostBackingError::Driver(error) => why_driver(error),
        HostBackingError::NotVacant(_) => other(Why::Occupied, &error),
        HostBackingError::Unusable(unusable) => why_unusable(unusable),
        _ => other(Why::Other, &error),
    }
}

fn why_cache(error: KvError) -> Refused {
    match error {
        KvError::Memory(error) => why_alloc(error),
        KvError::Arena(error) => why_arena(error),
        KvError::Unusable(ref unusable) => why_unusable(unusable),
        KvError::UnknownStream(_) => other(Why::UnknownStream, &error),
        KvError::Limit { .. } | KvError::InUse { .. } => other(Why::OutOfMemory, &error),
        KvError::Committed { .. } | KvError::NotCommitted { .. } | KvError::NoPages { .. } => {
            other(Why::Occupied, &error)
        }
        _ => other(Why::Other, &error),
    }
}

/// Runs `end` on the thread that is asked for.
pub fn in_way<R: Send>(way: Way, end: impl FnOnce() -> R + Send) -> R {
    match way {
        Way::Here | Way::Panic => end(),
        Way::Elsewhere => std::thread::scope(|scope| match scope.spawn(end).join() {
            Ok(result) => result,
            Err(panic) => resume_unwind(panic),
        }),
    }
}

/// Drops `ended` the way that is asked for.
fn drop_in<T: Send>(way: Way, ended: T) {
    match way {
        Way::Panic => {
            let unwound = catch_unwind(AssertUnwindSafe(move || {
                let _ended = ended;
                resume_unwind(Box::new(Planned));
            }));
            if let Err(panic) = unwound
                && !panic.is::<Planned>()
            {
                resume_unwind(panic);
            }
        }
        way => in_way(way, move || drop(ended)),
    }
}

impl RustSubject {
    /// Returns the Rust interface of a preset on a device.
    pub fn new(device: Arc<dyn Driver>, preset: Preset, limit: Option<Bytes>) -> RustSubject {
        RustSubject::with(device, Config::preset(preset).with_limit(limit))
    }

    fn with(device: Arc<dyn Driver>, config: Config) -> RustSubject {
        RustSubject {
            device,
            config,
            pools: HashMap::new(),
            streams: HashMap::new(),
            blocks: HashMap::new(),
            arenas: HashMap::new(),
            captures: HashMap::new(),
            attached: HashMap::new(),
            graphs: HashMap::new(),
            holds: HashMap::new(),
            leases: HashMap::new(),
            ranges: HashMap::new(),
            caches: HashMap::new(),
            observers: HashMap::new(),
        }
    }

    fn close(&mut self, pool: u64, way: u64) -> PoolEnd {
        let Some(ended) = self.pools.remove(&pool) else { return PoolEnd::Done };
        let allocator = match Arc::try_unwrap(ended) {
            Ok(allocator) => allocator,
            Err(_) => return PoolEnd::Failed(gone()),
        };
        let closed = match way {
            0 => allocator.close(),
            1 => {
                drop(allocator);
                return PoolEnd::Done;
            }
            _ => in_way(Way::Elsewhere, move || allocator.close()),
        };
        match closed {
            Ok(()) => PoolEnd::Done,
            Err(CloseError::Driver(error)) => PoolEnd::Failed(why_driver(&error)),
            Err(error) => {
                let refused = match &error {
                    CloseError::NotSynchronized { error, .. } => why_driver(error),
                    _ => other(Why::Capturing, &error),
                };
                if let CloseError::Capturing { allocator, .. }
                | CloseError::NotSynchronized { allocator, .. } = error
                {
                    self.pools.insert(pool, Arc::from(allocator));
                }
                PoolEnd::Refused(refused)
            }
        }
    }

    fn pool(&self, pool: u64) -> Outcome<&Arc<Allocator>> {
        let closed = || Refused { why: Why::Closed, text: "the pool is closed".to_owned() };
        self.pools.get(&pool).ok_or_else(closed)
    }

    fn stream(&self, stream: u64) -> StreamId {
        self.streams.get(&stream).copied().unwrap_or(StreamId::new(u32::MAX))
    }
}

fn gone() -> Refused {
    Refused { why: Why::Other, text: "the program has no such object".to_owned() }
}

impl Subject for RustSubject {
    fn open(&mut self, pool: u64) -> Outcome<()> {
        let opened = match self.pools.values().next() {
            Some(first) => first.create_pool("further"),
            None => self.config.clone().open(Arc::clone(&self.device)),
        };
        let opened = opened.map_err(|error| match &error {
            CreateError::Driver(error) => why_driver(error),
            CreateError::NotSupported { .. } => other(Why::NotSupported, &error),
            _ => other(Why::Other, &error),
        })?;
        self.pools.insert(pool, Arc::new(opened));
        Ok(())
    }

    fn end_pool(&mut self, pool: u64, way: u64) -> PoolEnd {
        let ended = self.close(pool, way);
        // A refused close leaves the callbacks, with the blocks that they will free.
        if !matches!(ended, PoolEnd::Refused(_)) {
            self.observers.retain(|_, (of, _)| *of != pool);
        }
        ended
    }

    fn create_stream(&mut self, pool: u64, stream: u64) -> Outcome<Stream> {
        let allocator = self.pool(pool)?;
        let id = allocator.create_stream().map_err(|error| why_driver(&error))?;
        let raw = allocator.stream(id).ok_or_else(gone)?;
        self.streams.insert(stream, id);
        Ok(raw)
    }

    fn adopt_stream(&mut self, pool: u64, stream: u64) -> Outcome<(Stream, bool)> {
        let raw = self.device.create_stream().map_err(|error| why_driver(&error))?;
        let id = self.pool(pool)?.adopt_stream(raw);
        self.streams.insert(stream, id);
        Ok((raw, true))
    }

    fn destroy_stream(&mut self, pool: u64, stream: u64) -> Outcome<()> {
        let id = self.stream(stream);
        self.pool(pool)?.destroy_stream(id).map_err(why_stream)
    }

    fn malloc(
        &mut self,
        (pool, stream): (u64, u64),
        size: Bytes,
        block: u64,
        tagged: bool,
    ) -> Outcome<AddrRange> {
        let (allocator, stream) = (self.pool(pool)?, self.stream(stream));
        let placed = match tagged {
            true => allocator.malloc_tagged(size, stream, allocator.tag("tagged")),
            false => allocator.malloc(size, stream),
        };
        let allocation = placed.map_err(why_alloc)?;
        let range = AddrRange::new(allocation.addr(), allocation.len());
        self.blocks.insert(block, (pool, allocation));
        Ok(range)
    }

    fn record_use(&mut self, block: u64, stream: u64) -> Outcome<()> {
        let (pool, allocation) = self.blocks.get(&block).ok_or_else(gone)?;
        let recorded = self.pool(*pool)?.record_use(allocation, self.stream(stream));
        recorded.map_err(|error| match error {
            UseError::UnknownStream(_) => other(Why::UnknownStream, &error),
            UseError::Foreign(_) => other(Why::Foreign, &error),
            _ => other(Why::Broken, &error),
        })
    }

    fn free(&mut self, block: u64, stream: u64, way: Way) -> Result<(), (Refused, bool)> {
        let (pool, allocation) = self.blocks.remove(&block).ok_or_else(|| (gone(), false))?;
        let stream = self.stream(stream);
        let allocator = self.pool(pool).map_err(|refused| (refused, false))?;
        let freed = in_way(way, || allocator.free(allocation, stream));
        freed.map_err(|error| {
            let why = match &error {
                FreeError::Foreign(_) => Why::Foreign,
                FreeError::UnknownStream { .. } => Why::UnknownStream,
                FreeError::Driver(error) => why_driver(error).why,
                _ => Why::Broken,
            };
            let refused = other(why, &error);
            match error {
                FreeError::Foreign(allocation) | FreeError::UnknownStream { allocation, .. } => {
                    self.blocks.insert(block, (pool, allocation));
                    (refused, true)
                }
                _ => (refused, false),
            }
        })
    }

    fn trim(&mut self, pool: u64, to: Bytes) -> Outcome<()> {
        self.pool(pool)?.trim(to).map_err(why_alloc)
    }

    fn set_limit(&mut self, pool: u64, limit: Option<Bytes>) -> Outcome<()> {
        self.pool(pool)?.set_limit(limit).map_err(why_alloc)
    }

    fn audit(&self, pool: u64) -> Outcome<()> {
        self.pool(pool)?.audit().map_err(|error| other(Why::Broken, &error))
    }

    fn usage(&self, pool: u64) -> Outcome<(Bytes, Bytes)> {
        let stats = self.pool(pool)?.stats().map_err(|error| why_driver(&error))?;
        Ok((stats.live, stats.reserved))
    }

    fn arena(&mut self, pool: u64, arena: u64, choice: ArenaChoice) -> Outcome<()> {
        let (policy, capacity) = match choice.monotone {
            true => (ArenaPolicy::Monotone, Bytes::mib(12)),
            false => (ArenaPolicy::Reusing, Bytes::gib(1)),
        };
        let overlap = if choice.order { Overlap::Order } else { Overlap::Refuse };
        let mode = choice.mode;
        let config = ArenaConfig { policy, capacity, overlap, mode, ..ArenaConfig::default() };
        let made = self.pool(pool)?.graph_arena(config).map_err(why_arena)?;
        self.arenas.insert(arena, (pool, made));
        Ok(())
    }

    fn drop_arena(&mut self, arena: u64, way: Way) -> Outcome<()> {
        drop_in(way, self.arenas.remove(&arena));
        Ok(())
    }

    fn reset(&mut self, arena: u64) -> Outcome<()> {
        let (_, arena) = self.arenas.get(&arena).ok_or_else(gone)?;
        arena.reset().map_err(|error| other(Why::Busy, &error))
    }

    fn begin(&mut self, arena: u64, stream: u64, capture: u64) -> Outcome<()> {
        let (pool, arena) = self.arenas.get(&arena).ok_or_else(gone)?;
        let begun = self.pool(*pool)?.begin_capture(self.stream(stream), arena);
        self.captures.insert(capture, begun.map_err(why_capture)?);
        Ok(())
    }

    fn attach(&mut self, arena: u64, stream: u64, capture: u64) -> Outcome<()> {
        let (pool, arena) = self.arenas.get(&arena).ok_or_else(gone)?;
        let attached = self.pool(*pool)?.attach_capture(self.stream(stream), arena);
        self.attached.insert(capture, attached.map_err(why_capture)?);
        Ok(())
    }

    fn end(&mut self, capture: u64, graph: u64, way: Way) -> Outcome<()> {
        let mut begun = self.captures.remove(&capture).ok_or_else(gone)?;
        let ended = in_way(way, || begun.end());
        match ended {
            Ok(ended) => {
                self.graphs.insert(graph, ended);
                Ok(())
            }
            Err(error) => {
                if matches!(error, CaptureError::OtherThread) {
                    self.captures.insert(capture, begun);
                }
                Err(why_capture(error))
            }
        }
    }

    fn detach(&mut self, capture: u64, graph: u64) -> Outcome<()> {
        let attached = self.attached.remove(&capture).ok_or_else(gone)?;
        self.holds.insert(graph, attached.detach());
        Ok(())
    }

    fn discard(&mut self, capture: u64, way: Way) -> Outcome<()> {
        drop_in(way, (self.captures.remove(&capture), self.attached.remove(&capture)));
        Ok(())
    }

    fn launch(&mut self, graph: u64, stream: u64, lease: u64) -> Outcome<()> {
        let captured = self.graphs.get(&graph).ok_or_else(gone)?;
        let launched = captured.launch(self.stream(stream)).map_err(why_launch)?;
        self.leases.insert(lease, launched);
        Ok(())
    }

    fn end_lease(&mut self, lease: u64, way: Way) -> Outcome<()> {
        drop_in(way, self.leases.remove(&lease));
        Ok(())
    }

    fn drop_graph(&mut self, graph: u64, way: Way) -> Outcome<()> {
        drop_in(way, (self.graphs.remove(&graph), self.holds.remove(&graph)));
        Ok(())
    }

    fn range(&mut self, pool: u64, range: u64, len: Bytes) -> Outcome<AddrRange> {
        let made = self.pool(pool)?.stable_range(len, Bytes::mib(4)).map_err(why_arena)?;
        let addresses = made.range();
        self.ranges.insert(range, made);
        Ok(addresses)
    }

    fn back(&mut self, range: u64, stream: u64) -> Outcome<()> {
        let range = self.ranges.get(&range).ok_or_else(gone)?;
        range.back(self.stream(stream)).map_err(why_alloc)
    }

    fn lend(&mut self, range: u64) -> Outcome<Bytes> {
        Ok(self.ranges.get(&range).ok_or_else(gone)?.lend(&[]))
    }

    fn host(&mut self, range: u64, len: Bytes) -> Outcome<()> {
        let range = self.ranges.get(&range).ok_or_else(gone)?;
        let Some(allocator) = self.pools.values().next() else { return Err(gone()) };
        let memory = allocator.host_backing(len, 0).map_err(why_host)?;
        range.map_host_part(Bytes::ZERO, &memory).map_err(why_host)
    }

    fn unhost(&mut self, range: u64, len: Bytes) -> Outcome<()> {
        let range = self.ranges.get(&range).ok_or_else(gone)?;
        range.unmap_host_part(Bytes::ZERO, len).map_err(why_host)
    }

    fn use_range(&mut self, range: u64, stream: u64) -> Outcome<()> {
        self.ranges.get(&range).ok_or_else(gone)?.record_use(self.stream(stream));
        Ok(())
    }

    fn drop_range(&mut self, range: u64, way: Way) -> Outcome<()> {
        drop_in(way, self.ranges.remove(&range));
        Ok(())
    }

    fn cache(&mut self, pool: u64, cache: u64, choice: CacheChoice) -> Outcome<AddrRange> {
        let arrangement = match choice.interleaved {
            true => Arrangement::Interleaved,
            false => Arrangement::Separate,
        };
        let unit = if choice.interleaved { choice.tensors } else { 1 };
        let layout = Layout {
            tensors: choice.tensors,
            bytes_each: CacheChoice::bytes(choice.pages),
            page: CacheChoice::PAGE,
            arrangement,
        };
        let options = kv::Options {
            superpage: CacheChoice::bytes(choice.superpage * unit),
            limit: choice.limit_bytes(),
            ..kv::Options::default()
        };
        let made = self.pool(pool)?.kv_arena(layout, options).map_err(why_cache)?;
        let whole = made.whole();
        self.caches.insert(cache, made);
        Ok(whole)
    }

    fn commit(&mut self, cache: u64, pages: &[Range<u32>], stream: u64) -> Outcome<()> {
        let cache = self.caches.get(&cache).ok_or_else(gone)?;
        cache.commit(pages, self.stream(stream)).map_err(why_cache)
    }

    fn take(&mut self, cache: u64, count: u32, stream: u64) -> Outcome<Vec<Range<u32>>> {
        let cache = self.caches.get(&cache).ok_or_else(gone)?;
        cache.take(count, self.stream(stream)).map_err(why_cache)
    }

    fn park(&mut self, cache: u64, pages: &[Range<u32>], stream: Option<u64>) -> Outcome<()> {
        let cache = self.caches.get(&cache).ok_or_else(gone)?;
        let parked = match stream {
            Some(stream) => cache.park(pages, self.stream(stream)),
            None => cache.park_behind_all(pages),
        };
        parked.map_err(why_cache)
    }

    fn release(&mut self, cache: u64, keep: Bytes) -> Outcome<()> {
        let cache = self.caches.get(&cache).ok_or_else(gone)?;
        cache.release(keep).map(drop).map_err(why_cache)
    }

    fn use_cache(&mut self, cache: u64, stream: u64) -> Outcome<()> {
        self.caches.get(&cache).ok_or_else(gone)?.record_use(self.stream(stream));
        Ok(())
    }

    fn drop_cache(&mut self, cache: u64, way: Way) -> Outcome<()> {
        drop_in(way, self.caches.remove(&cache));
        Ok(())
    }

    fn cache_pages(&self, cache: u64) -> (u32, u32) {
        let stats = self.caches.get(&cache).map(kv::Arena::stats).unwrap_or_default();
        (stats.committed, stats.moving)
    }

    fn observe(&mut self, pool: u64, observer: u64, how: Reaction, stream: u64) -> Outcome<()> {
        let callback = self.callback(pool, how, stream)?;
        let allocator = self.pool(pool)?;
        let called = Arc::clone(&callback);
        let registration = allocator.observe(move |_| {
            called.call();
        });
        *callback.registration.lock().unwrap_or_else(PoisonError::into_inner) = Some(registration);
        self.observers.insert(observer, (pool, callback));
        Ok(())
    }

    fn handle(
        &mut self,
        (pool, observer): (u64, u64),
        how: Reaction,
        blocks: &[u64],
        stream: u64,
    ) -> Outcome<()> {
        let callback = self.callback(pool, how, stream)?;
        for block in blocks {
            if let Some((_, block)) = self.blocks.remove(block) {
                callback.stash.lock().unwrap_or_else(PoisonError::into_inner).push(block);
            }
        }
        let called = Arc::clone(&callback);
        let registration = self.pool(pool)?.on_shortage(move |_| called.call());
        *callback.registration.lock().unwrap_or_else(PoisonError::into_inner) = Some(registration);
        self.observers.insert(observer, (pool, callback));
        Ok(())
    }

    fn unobserve(&mut self, observer: u64) -> Outcome<()> {
        let Some((pool, callback)) = self.observers.remove(&observer) else { return Ok(()) };
        let allocator = self.pool(pool)?;
        let own = callback.registration.lock().unwrap_or_else(PoisonError::into_inner).take();
        own.into_iter().for_each(|own| {
            allocator.unregister(own);
        });
        let stash: Vec<Allocation> =
            callback.stash.lock().unwrap_or_else(PoisonError::into_inner).drain(..).collect();
        for block in stash {
            let _ = allocator.free(block, callback.stream);
        }
        Ok(())
    }

    fn share(&self) -> Outcome<Box<dyn Subject>> {
        let mut shared = RustSubject::with(Arc::clone(&self.device), self.config.clone());
        shared.pools.clone_from(&self.pools);
        Ok(Box::new(shared))
    }

    fn drop_all(&mut self) {
        self.leases.clear();
        self.captures.clear();
        self.attached.clear();
        self.graphs.clear();
        self.holds.clear();
        self.ranges.clear();
        self.caches.clear();
        self.arenas.clear();
        self.blocks.clear();
        self.observers.clear();
        self.pools.clear();
    }
}

impl RustSubject {
    fn callback(&self, pool: u64, how: Reaction, stream: u64) -> Outcome<Arc<Callback>> {
        Ok(Arc::new(Callback {
            how,
            allocator: Arc::downgrade(self.pool(pool)?),
            registration: Mutex::new(None),
            runs: AtomicBool::new(false),
            calls: AtomicU64::new(0),
            stream: self.stream(stream),
            stash: Mutex::default(),
        }))
    }

    /// Returns the driver's handle of a graph that was captured here.
    pub fn exec(&self, graph: u64) -> Option<GraphExec> {
        self.graphs.get(&graph).map(CapturedGraph::exec)
    }
}
