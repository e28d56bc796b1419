//! Memory for CUDA graphs: arenas, captures into them, replays.
//!
//! ```
//! use vramp_alloc::graph::{ArenaConfig, DeviceCopy};
//! use vramp_alloc::{Allocator, Bytes, Config};
//!
//! let device = vramp_alloc::open("sim:h200")?;
//! let allocator = Allocator::new(device.clone(), Config::default())?;
//! let stream = allocator.create_stream()?;
//! let queue = allocator.stream(stream).expect("it is open");
//!
//! let arena = allocator.graph_arena(ArenaConfig::default())?;
//! let input = allocator.malloc(Bytes::mib(64), stream)?;
//! let (graph, output) = allocator.capture(stream, &arena, || {
//!     let output = allocator.malloc(Bytes::mib(64), stream)?;      // from the arena
//!     let (from, to, len) = (input.addr(), output.addr(), input.len());
//!     device.copy(queue, DeviceCopy { from, to, len })?;
//!     Ok::<_, Box<dyn std::error::Error>>(output)
//! })?;
//! let output = output?;
//! drop(graph.launch(stream)?);                                  // replays, any number of times
//! println!("{}", graph.report());
//! # allocator.free(output, stream)?;
//! # allocator.free(input, stream)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod attached;
mod error;
mod planning;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use vramp_core::{ArenaLeaseId, Bytes, PoolAddr, Shortage, StreamId};
use vramp_driver::DriverError;
use vramp_host::fork::is_forked;

pub use vramp_core::{
    ArenaAllocError, ArenaBusy, ArenaFull, ArenaId, ArenaPolicy, ArenaResetError, Mark, NodeId,
    Overlap, UnknownNode,
};
pub use vramp_driver::{CaptureMode, DeviceCopy, Graph, GraphExec};

use crate::allocation::Allocation;
use crate::allocator::{Allocator, Relief};
use crate::arenas::NoLease;
use crate::error::AllocError;
use crate::observe::Event;
use crate::shared::Shared;
use crate::virtual_pool::Refusal;

pub use attached::{AttachedCapture, GraphHold};
pub use error::{ArenaError, CaptureError, LaunchError};

/// Configuration of a graph arena.
#[derive(Clone, Copy, Debug)]
pub struct ArenaConfig {
    /// Whether memory is reused within a capture.
    pub policy: ArenaPolicy,
    /// Addresses reserved. A reusing arena reserves memory only as captures need it, so this may be
    /// generous; a monotone one backs all of it before its first capture.
    ///
    /// Once the device has no more addresses, new reusing arenas get fewer, and each of the older ones
    /// gives up once, between two captures, what it has beyond twice its high-water mark and beyond
    /// 1 GiB. [`GraphArena::report`] says how many it has.
    pub capacity: Bytes,
    /// Behaviour of a replay while another stream's replay is not over.
    pub overlap: Overlap,
    /// Calls of other threads that are refused during a capture.
    pub mode: CaptureMode,
    /// Whether a tighter layout is planned after a capture of a reusing arena, for the next one of
    /// the same shape. That visits 2,400,000 blocks at most, which takes 3 to 9 ms, or as many as fit
    /// into a hundredth of the capture's time, if that is more; and none if the layout was planned
    /// from the same shape already.
    pub replan: bool,
}

impl Default for ArenaConfig {
    /// Returns a reusing arena with 512 GiB of addresses that refuses overlapping replays.
    fn default() -> ArenaConfig {
        ArenaConfig {
            policy: ArenaPolicy::Reusing,
            capacity: Bytes::gib(512),
            overlap: Overlap::Refuse,
            mode: CaptureMode::ThreadLocal,
            replan: true,
        }
    }
}

/// Memory at fixed addresses for captured graphs. Graphs captured one after the other share it:
/// together they need what the largest of them needs, and what is live between them. They never run
/// at the same time.
///
/// A clone is the same arena. The arena lives as long as one of its handles, graphs or blocks, and
/// must not be used after its allocator was closed.
#[derive(Clone)]
pub struct GraphArena(Arc<Handle>);

struct Handle {
    shared: Arc<Shared>,
    id: ArenaId,
    config: ArenaConfig,
    /// Time that a replay waits for memory to back the arena.
    patience: Duration,
    /// True during a capture: there is one at a time.
    capturing: AtomicBool,
}

impl Drop for Handle {
    fn drop(&mut self) {
        let mut inner = self.shared.lock_anyway();
        if !inner.closed
            && let Some(pool) = inner.manager.virtual_pool_mut()
        {
            pool.abandon_arena(self.id);
        }
    }
}

/// State of an arena.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ArenaReport {
    /// Addresses reserved: fewer than configured if the device ran out of them.
    pub capacity: Bytes,
    /// High-water mark of the blocks placed.
    pub high_water: Bytes,
    /// Live bytes, as requested.
    pub live: Bytes,
    /// Live blocks.
    pub blocks: usize,
    /// Bytes backed by memory of its own.
    pub backed: Bytes,
    /// Bytes lent: still mapped, and free for other requests.
    pub lent: Bytes,
}

impl GraphArena {
    /// Returns its present state. No driver call.
    pub fn report(&self) -> ArenaReport {
        let mut inner = self.0.shared.lock_anyway();
        if inner.closed {
            return ArenaReport::default();
        }
        let Some(pool) = inner.manager.virtual_pool_mut() else { return ArenaReport::default() };
        let memory = pool.pool.arena_memory(self.0.id);
        let arena = &pool.arenas.get(self.0.id).arena;
        ArenaReport {
            capacity: arena.capacity(),
            high_water: arena.high_water(),
            live: arena.live(),
            blocks: arena.census().blocks,
            backed: memory.backed,
            lent: memory.lent,
        }
    }

    /// Places the next blocks from the arena's start again: for a monotone arena whose graphs are
    /// no longer needed. Graphs captured before still run, one after the other, and write where
    /// later ones write.
    ///
    /// # Errors
    /// A capture runs, or a block is live.
    pub fn reset(&self) -> Result<(), ArenaResetError> {
        let mut inner = self.0.shared.lock_anyway();
        match inner.manager.virtual_pool_mut() {
            Some(pool) => pool.arenas.get_mut(self.0.id).arena.reset(),
            None => Ok(()),
        }
    }

    /// Returns true if both are handles of the same arena.
    pub fn is_same(&self, other: &GraphArena) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl fmt::Debug for GraphArena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("GraphArena").field(&self.0.id).finish()
    }
}

/// Memory that a capture needed, under each policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CaptureReport {
    /// Blocks that the capture allocated.
    pub blocks: usize,
    /// Blocks that outlive the capture.
    pub escaped: usize,
    /// Bytes without reuse.
    pub monotone: Bytes,
    /// Bytes that this capture took.
    pub taken: Bytes,
    /// Bytes that the next capture of the same shape takes, if a layout was planned.
    pub planned: Option<Bytes>,
    /// Number of blocks that planning visited; 0 if the layout was planned from a capture of the same
    /// shape.
    pub plan_visits: u64,
    /// True if planning left something untried because it may visit no more blocks. The layout is
    /// valid, and the best that was found.
    pub plan_stopped: bool,
    /// Peak of the live bytes: no layout needs less.
    pub lower_bound: Bytes,
    /// Bytes from outside the arena that were freed within the capture: the graph keeps them.
    pub kept: Bytes,
}

impl fmt::Display for CaptureReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CaptureReport { blocks, monotone, taken, lower_bound, .. } = self;
        write!(f, "{blocks} blocks, {lower_bound} live at most: {taken} taken")?;
        if let Some(planned) = self.planned {
            write!(f, ", {planned} planned")?;
        }
        write!(f, ", {monotone} without reuse")?;
        if !self.kept.is_zero() {
            write!(f, "; {} from before kept for the graph", self.kept)?;
        }
        Ok(())
    }
}

/// A captured graph, ready to launch. It keeps the arena that it was captured into.
pub struct CapturedGraph {
    arena: GraphArena,
    exec: GraphExec,
    /// Length of the arena's start that has to be backed for it.
    upto: Bytes,
    stream: StreamId,
    kept: Vec<Allocation>,
    report: CaptureReport,
}

/// # CUDA graphs
impl Allocator {
    /// Creates an arena: reserves its addresses. One driver call at most, and no memory.
    ///
    /// # Errors
    /// [`ArenaError::NotSupported`] unless the preset is vramp and the device has virtual memory
    /// management and graphs; [`ArenaError::Capacity`] for an impossible capacity.
    pub fn graph_arena(&self, config: ArenaConfig) -> Result<GraphArena, ArenaError> {
        let shared = self.shared();
        let mut inner = shared.lock()?;
        inner.check_host()?;
        let pool = inner.manager.virtual_pool_mut().filter(|pool| pool.heaps_serve.is_some());
        let pool = pool.ok_or(ArenaError::NotSupported)?;
        if !shared.driver.info().capabilities.graphs {
            return Err(ArenaError::NotSupported);
        }
        let max = PoolAddr::SPAN_LIMIT.round_down(pool.pool.config().page);
        if config.capacity.is_zero() || config.capacity > max {
            return Err(ArenaError::Capacity { capacity: config.capacity, max });
        }
        let id = pool.add_arena(config.policy, config.capacity)?;
        let handle = Handle {
            shared: Arc::clone(shared),
            id,
            config,
            patience: self.patience(),
            capturing: AtomicBool::new(false),
        };
        Ok(GraphArena(Arc::new(handle)))
    }

    /// Runs `body` while `stream` captures a graph. Blocks allocated on that stream, and on streams
    /// that the capture draws in, come from `arena`; all other requests are served as usual, on
    /// this and other threads. Memory from outside the arena that is freed on the capture's streams
    /// stays allocated until the graph is dropped, because its nodes may use it.
    ///
    /// The capture ends with `body`, also by a panic. Work queued by `body` has not run: launch the
    /// graph.
    ///
    /// Cost beside the driver's own: one call for each malloc and each free within the capture, and
    /// one for each captured node.
    ///
    /// # Errors
    /// The result of `body` is lost if the capture fails; blocks that it allocated and dropped stay
    /// in the arena.
    pub fn capture<R>(
        &self,
        stream: StreamId,
        arena: &GraphArena,
        body: impl FnOnce() -> R,
    ) -> Result<(CapturedGraph, R), CaptureError> {
        let mut capture = self.begin_capture(stream, arena)?;
        let result = body();
        Ok((capture.end()?, result))
    }

    /// Begins a capture as [`Allocator::capture`] does. It ends with [`Capture::end`], or is
    /// discarded when it is dropped.
    ///
    /// # Errors
    /// The capture did not begin.
    pub fn begin_capture(
        &self,
        stream: StreamId,
        arena: &GraphArena,
    ) -> Result<Capture, CaptureError> {
        let shared = self.shared();
        if !Arc::ptr_eq(shared, &arena.0.shared) {
            return Err(CaptureError::ForeignArena);
        }
        if arena.0.capturing.swap(true, Ordering::AcqRel) {
            return Err(CaptureError::ArenaBusy);
        }
        let mut capture = Capture {
            arena: arena.clone(),
            stream,
            thread: std::thread::current().id(),
            begun: Instant::now(),
            ended: true,
        };
        arena.refresh_plan();
        let mut inner = shared.lock_for_memory()?;
        inner.open_stream(stream).ok_or(CaptureError::UnknownStream(stream))?;
        inner.check_host().map_err(|short| CaptureError::Alloc(short.into()))?;
        let pool = inner.manager.virtual_pool_mut().expect("only a virtual pool has arenas");
        let begun = pool.begin_arena_capture(arena.0.id, stream, arena.0.config.mode);
        drop(inner);
        match begun {
            Ok(()) => {
                shared.captures.fetch_add(1, Ordering::Relaxed);
                capture.ended = false;
                Ok(capture)
            }
            Err(Refusal::Driver(error)) => Err(CaptureError::Begin(error)),
            Err(refusal) => Err(CaptureError::Alloc(self.refused(refusal, stream))),
        }
    }

    fn refused(&self, refusal: Refusal, stream: StreamId) -> AllocError {
        refused(self.shared(), refusal, stream)
    }
}

fn refused(shared: &Arc<Shared>, refusal: Refusal, stream: StreamId) -> AllocError {
    match refusal {
        Refusal::Driver(error) => AllocError::Driver(error),
        Refusal::Arena(error) => AllocError::Arena(Box::new(error)),
        Refusal::Host(short) => AllocError::HostMemory(short),
        Refusal::Short(shortage, call) => {
            AllocError::OutOfMemory(Box::new(shared.report(*shortage, call, stream)))
        }
    }
}

/// A capture under way.
#[must_use = "a capture that is dropped is discarded"]
pub struct Capture {
    arena: GraphArena,
    stream: StreamId,
    /// The thread that began it.
    thread: ThreadId,
    begun: Instant,
    ended: bool,
}

impl Capture {
    /// Ends the capture and makes its graph ready to launch.
    ///
    /// # Errors
    /// [`CaptureError::OtherThread`] if the capture goes on; otherwise it is over, and ending it
    /// again is [`CaptureError::Over`].
    pub fn end(&mut self) -> Result<CapturedGraph, CaptureError> {
        self.finish(self.is_endable_here())
    }

    /// Returns true if the driver makes a graph of the capture on this thread. An end on another
    /// one is refused by the driver, and discards the capture.
    fn is_endable_here(&self) -> bool {
        self.arena.0.config.mode == CaptureMode::Relaxed
            || self.thread == std::thread::current().id()
    }

    /// Ends the capture, for its graph or to discard it, unless `may_end` is false.
    fn finish(&mut self, may_end: bool) -> Result<CapturedGraph, CaptureError> {
        if self.ended {
            return Err(CaptureError::Over);
        }
        let Handle { shared, id, .. } = &*self.arena.0;
        let mut inner = shared.lock_anyway();
        if inner.closed {
            self.ended = true;
            return Err(CaptureError::Over);
        }
        let pool = inner.manager.virtual_pool_mut().expect("only a virtual pool has arenas");
        if !may_end {
            return Err(CaptureError::OtherThread);
        }
        let graph = pool.end_own_capture(*id, self.stream);
        self.ended = true;
        let captured = pool.end_arena_capture(*id, graph);
        let has_graph = captured.graph.is_ok();
        shared.captures.fetch_sub(1, Ordering::Relaxed);
        drop(inner);
        // Instantiation takes time by the size of the graph: without the lock.
        let exec = captured.graph.and_then(|graph| {
            let exec = shared.driver.instantiate(graph);
            match (exec, shared.driver.destroy_graph(graph)) {
                (Ok(exec), Err(error)) => {
                    let _ = shared.driver.destroy_graph_exec(exec);
                    Err(error)
                }
                (exec, _) => exec,
            }
        });
        let mut inner = shared.lock_anyway();
        let closed = inner.closed;
        if let Some(pool) = inner.manager.virtual_pool_mut().filter(|_| has_graph && !closed) {
            pool.instantiated(*id, self.stream);
        }
        let exec = match exec {
            Ok(exec) => exec,
            Err(error) => {
                // No graph uses it.
                if !closed {
                    for allocation in captured.kept {
                        let _ = inner.free(allocation, self.stream, shared.number);
                    }
                }
                return Err(CaptureError::Invalidated(error));
            }
        };
        drop(inner);
        let kept = captured.kept.iter().map(Allocation::requested).sum();
        let upto = captured.recording.high_water();
        let report = self.arena.plan(captured.recording, kept, self.begun);
        Ok(CapturedGraph {
            arena: self.arena.clone(),
            exec,
            upto,
            stream: self.stream,
            kept: captured.kept,
            report,
        })
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        if !self.ended {
            let _ = self.finish(true);
        }
        self.arena.0.capturing.store(false, Ordering::Release);
    }
}

impl CapturedGraph {
    /// Queues a replay on `stream` and returns a lease on the arena: until the lease is dropped,
    /// and the work queued on `stream` up to then is over, graphs of the arena run on no other
    /// stream. On the same stream they run one after the other, with any number of leases.
    ///
    /// Keep the lease until the work that reads the graph's results is queued on `stream`. Memory
    /// that the arena lent is backed again first.
    ///
    /// Cost beside the launch: one driver call (whether the stream captures) if the last replay was
    /// on the same stream and nothing was lent. Otherwise also an event, a query and a wait, and an
    /// unmap, a map and a set-access for each chunk that has to be mapped again. Unless the arena orders
    /// overlapping replays, the end of the lease records an event, and one in eight queries some.
    ///
    /// # Errors
    /// [`LaunchError::Busy`] if another stream holds a lease; and unless the arena orders
    /// overlapping replays, if the work of another stream is not over. [`LaunchError::Driver`] of
    /// kind `Capturing` if that other stream captures: nothing can wait for its earlier work then.
    pub fn launch(&self, stream: StreamId) -> Result<ReplayLease, LaunchError> {
        let Handle { shared, patience, .. } = &*self.arena.0;
        let mut relief = Relief::new(*patience);
        loop {
            let (shortage, call) = match self.try_launch(stream)? {
                Attempted::Launched(lease) => return Ok(lease),
                Attempted::Short(shortage, call) => (shortage, call),
            };
            shared.observers.notify(&Event::Short(&shortage));
            if !shared.relieve(&mut relief, &shortage).map_err(LaunchError::Alloc)? {
                let report = Box::new(shared.report(shortage, call, stream));
                shared.observers.notify(&Event::OutOfMemory(&report));
                return Err(LaunchError::Alloc(AllocError::OutOfMemory(report)));
            }
        }
    }

    fn try_launch(&self, stream: StreamId) -> Result<Attempted, LaunchError> {
        let Handle { shared, id, config, .. } = &*self.arena.0;
        // Declared before the guard and so dropped after it, also when the driver panics: ending a
        // lease takes the lock.
        let lease: ReplayLease;
        let mut guard = shared.lock_for_memory()?;
        let inner = &mut *guard;
        let raw = inner.open_stream(stream).ok_or(LaunchError::UnknownStream(stream))?;
        if shared.driver.is_capturing(raw)? {
            return Err(LaunchError::Capturing(stream));
        }
        inner.check_host().map_err(|short| LaunchError::Alloc(short.into()))?;
        let pool = inner.manager.virtual_pool_mut().expect("only a virtual pool has arenas");
        let taken = match pool.take_lease(*id, self.upto, stream, config.overlap) {
            Ok(taken) => taken,
            Err(NoLease::Busy(busy)) => return Err(LaunchError::Busy(busy)),
            Err(NoLease::Refused(Refusal::Driver(error))) => {
                return Err(LaunchError::Driver(error));
            }
            Err(NoLease::Refused(Refusal::Short(shortage, call))) => {
                return Ok(Attempted::Short(*shortage, call));
            }
            Err(NoLease::Refused(Refusal::Arena(refused))) => {
                return Err(LaunchError::Alloc(AllocError::Arena(Box::new(refused))));
            }
            Err(NoLease::Refused(Refusal::Host(short))) => {
                return Err(LaunchError::Alloc(AllocError::HostMemory(short)));
            }
        };
        lease = ReplayLease { arena: self.arena.clone(), lease: taken, stream };
        let launched = shared.driver.launch_graph(self.exec, raw);
        drop(guard);
        launched?;
        Ok(Attempted::Launched(lease))
    }

    /// Returns the memory that its capture needed.
    pub fn report(&self) -> &CaptureReport {
        &self.report
    }

    /// Returns the driver's handle of the graph.
    pub fn exec(&self) -> GraphExec {
        self.exec
    }

    /// Returns the arena it was captured into.
    pub fn arena(&self) -> &GraphArena {
        &self.arena
    }
}

impl Drop for CapturedGraph {
    fn drop(&mut self) {
        let Handle { shared, id, .. } = &*self.arena.0;
        if is_forked() {
            return;
        }
        // A launch in flight completes. A drop cannot report a failure.
        let _ = shared.driver.destroy_graph_exec(self.exec);
        let mut inner = shared.lock_anyway();
        if inner.closed {
            return;
        }
        let kept = std::mem::take(&mut self.kept);
        if kept.is_empty() {
            return;
        }
        let pool = inner.manager.virtual_pool_mut().expect("only a virtual pool has arenas");
        let leases = &pool.arenas.get(*id).leases;
        let users: Vec<StreamId> =
            leases.unfinished().map(|mark| mark.stream).chain(leases.holder()).collect();
        for allocation in kept {
            for &user in &users {
                inner.manager.record_use(&allocation, user);
            }
            let _ = inner.free(allocation, self.stream, shared.number);
        }
    }
}

impl fmt::Debug for CapturedGraph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "graph in {:?}: {}", self.arena, self.report)
    }
}

/// Outcome of one attempt to launch.
enum Attempted {
    Launched(ReplayLease),
    Short(Shortage, Option<DriverError>),
}

/// The right of one stream to an arena, from a launch until it is dropped. Other streams wait for
/// the work queued on its stream until then.
#[must_use = "a lease that is dropped at once does not cover what reads the results"]
pub struct ReplayLease {
    arena: GraphArena,
    lease: ArenaLeaseId,
    stream: StreamId,
}

impl ReplayLease {
    /// Returns its stream.
    pub fn stream(&self) -> StreamId {
        self.stream
    }
}

impl Drop for ReplayLease {
    fn drop(&mut self) {
        let Handle { shared, id, config, .. } = &*self.arena.0;
        let mut inner = shared.lock_anyway();
        if !inner.closed
            && let Some(pool) = inner.manager.virtual_pool_mut()
        {
            pool.end_lease(*id, self.lease, self.stream, config.overlap);
        }
    }
}

impl fmt::Debug for ReplayLease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "lease of {} on {:?}", self.stream, self.arena)
    }
}
