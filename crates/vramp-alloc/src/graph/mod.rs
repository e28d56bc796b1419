//! Memory for CUDA graphs: arenas, captures into them, replays.
//!
//! ```
//! use vramp_alloc::{Allocator, ArenaConfig, Bytes, Config, Preset};
//!
//! let device = vramp_alloc::open("sim:h200")?.driver;
//! let allocator = Allocator::new(device.clone(), Config::preset(Preset::Vramp))?;
//! let stream = allocator.create_stream()?;
//! let queue = allocator.stream(stream).expect("it is open");
//!
//! let arena = allocator.graph_arena(ArenaConfig::default())?;
//! let input = allocator.malloc(Bytes::mib(64), stream)?;
//! let (graph, output) = allocator.capture(stream, &arena, || {
//!     let output = allocator.malloc(Bytes::mib(64), stream)?;      // from the arena
//!     device.copy(queue, vramp_driver::DeviceCopy { from: input.addr(), to: output.addr(), len: input.len() })?;
//!     Ok::<_, Box<dyn std::error::Error>>(output)
//! })?;
//! let output = output?;
//! drop(graph.launch(stream)?);                                     // replays, as often as you like
//! println!("{}", graph.report());
//! # allocator.free(output, stream)?;
//! # allocator.free(input, stream)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod attached;
mod error;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use vramp_core::{ArenaId, Bytes, Layout, LeaseId, PoolAddr, Recording, Shortage, StreamId, pack};
use vramp_driver::DriverError;

pub use vramp_core::{
    ArenaAllocError, ArenaBusy, ArenaFull, ArenaPolicy, ArenaResetError, NodeId, Overlap,
    UnknownNode,
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

/// What an arena is told when it is made.
#[derive(Clone, Copy, Debug)]
pub struct ArenaConfig {
    /// Whether memory serves twice within a capture.
    pub policy: ArenaPolicy,
    /// Addresses set aside. A reusing arena takes memory only as captures need it, so this may be
    /// generous; a monotone one takes all of it before its first capture.
    pub capacity: Bytes,
    /// What a replay does while another stream's replay is not over.
    pub overlap: Overlap,
    /// Which calls of other threads a capture refuses.
    pub mode: CaptureMode,
    /// Plan a tighter layout after each capture of a reusing arena, for the next one of the same
    /// shape. Milliseconds for thousands of blocks.
    pub replan: bool,
}

impl Default for ArenaConfig {
    /// Reusing, 512 GiB of addresses, more than a card has, overlapping replays refused.
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

/// Memory that captured graphs keep their addresses in. Graphs captured one after the other share
/// it: together they need what the largest of them needs, and what is live between them. They never
/// run at the same time.
///
/// A clone is the same arena. It lives as long as one of its handles, graphs or blocks does, and
/// must not be used after its allocator was closed.
#[derive(Clone)]
pub struct GraphArena(Arc<Handle>);

struct Handle {
    shared: Arc<Shared>,
    id: ArenaId,
    config: ArenaConfig,
    /// How long a replay waits for memory to bring the arena back.
    patience: Duration,
    /// One capture at a time.
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

/// What an arena has at present.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ArenaReport {
    /// Addresses.
    pub capacity: Bytes,
    /// Up to where blocks were ever placed.
    pub high_water: Bytes,
    /// What users asked for and hold.
    pub live: Bytes,
    /// Blocks that users hold.
    pub blocks: usize,
    /// Memory of its own.
    pub backed: Bytes,
    /// Memory at its addresses that others may take.
    pub lent: Bytes,
}

impl GraphArena {
    /// What it has at present. No driver call.
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

    /// Begins anew at its start: for a monotone arena whose graphs are all done with. Graphs that
    /// were captured before still run, and write where later ones write, one after the other.
    ///
    /// # Errors
    /// While a capture runs, or somebody holds a block: says which.
    pub fn reset(&self) -> Result<(), vramp_core::ArenaResetError> {
        let mut inner = self.0.shared.lock_anyway();
        match inner.manager.virtual_pool_mut() {
            Some(pool) => pool.arenas.get_mut(self.0.id).arena.reset(),
            None => Ok(()),
        }
    }

    /// Plans the next capture of a shape, if the arena is to, without the lock; and reports.
    fn plan(&self, recording: &Recording, kept: Bytes) -> CaptureReport {
        let config = &self.0.config;
        let mut report = CaptureReport {
            blocks: recording.blocks(),
            escaped: recording.escaped(),
            monotone: recording.monotone(),
            taken: recording.high_water(),
            planned: None,
            lower_bound: recording.lower_bound(),
            kept,
        };
        if config.replan && config.policy == ArenaPolicy::Reusing {
            let layout = pack(recording);
            report.planned = Some(layout.high_water());
            self.set_plan(layout, recording.clone());
        }
        report
    }

    /// Plans around what is live by now, if that is not what the plan goes around.
    fn plan_anew(&self) {
        let inner = self.0.shared.lock_anyway();
        let pool = inner.manager.virtual_pool().expect("it made the arena");
        let outdated = pool.outdated_plan(self.0.id);
        drop(inner);
        if let Some(recording) = outdated {
            self.set_plan(pack(&recording), recording);
        }
    }

    fn set_plan(&self, layout: Layout, recording: Recording) {
        let mut inner = self.0.shared.lock_anyway();
        let pool = inner.manager.virtual_pool_mut().expect("it made the arena");
        pool.set_plan(self.0.id, layout, recording);
    }

    /// True if both are the same arena.
    pub fn is(&self, other: &GraphArena) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl fmt::Debug for GraphArena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("GraphArena").field(&self.0.id).finish()
    }
}

/// How much memory a capture needed, under each policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CaptureReport {
    /// Blocks that the capture made.
    pub blocks: usize,
    /// Blocks that outlive it.
    pub escaped: usize,
    /// Nothing serves twice.
    pub monotone: Bytes,
    /// What this capture took.
    pub taken: Bytes,
    /// What the next one of the same shape takes, where a layout was planned.
    pub planned: Option<Bytes>,
    /// The most that was live at once: no layout needs less.
    pub lower_bound: Bytes,
    /// Memory of others that was freed within the capture and is the graph's now.
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

/// A graph that can be launched, and its hold on the arena it was captured into.
pub struct CapturedGraph {
    arena: GraphArena,
    exec: GraphExec,
    /// Up to where the arena has to be backed for it.
    upto: Bytes,
    stream: StreamId,
    kept: Vec<Allocation>,
    report: CaptureReport,
}

impl Allocator {
    /// Sets an arena's addresses aside. One driver call at most, and no memory.
    pub fn graph_arena(&self, config: ArenaConfig) -> Result<GraphArena, ArenaError> {
        let shared = self.shared();
        let mut inner = shared.lock()?;
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

    /// Runs `body` while `stream` captures a graph: what it allocates on that stream, and on those
    /// that the capture draws in, comes from `arena`. Everything else goes its usual way, also from
    /// other threads. Memory from outside that is freed on the capture's streams stays taken until
    /// the graph is gone, for its nodes may use it.
    ///
    /// However `body` ends, by a panic too, the stream is out of the capture afterwards and the
    /// allocator serves as before. What it queued has not run: launch the graph.
    ///
    /// Cost beside the driver's own: one call for each malloc and each free within the capture, and
    /// one for each captured node.
    ///
    /// # Errors
    /// The result of `body` is lost where the capture came to nothing; blocks it made and dropped
    /// stay in the arena.
    pub fn capture<R>(
        &self,
        stream: StreamId,
        arena: &GraphArena,
        body: impl FnOnce() -> R,
    ) -> Result<(CapturedGraph, R), CaptureError> {
        let mut capture = self.begin_capture(stream, arena)?;
        let result = body();
        Ok((capture.finish(true)?, result))
    }

    /// The same in two halves, for whoever has no closure: the capture ends with
    /// [`Capture::end`], or comes to nothing when it is dropped.
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
        let mut capture = Capture { arena: arena.clone(), stream, ended: true };
        arena.plan_anew();
        let (_turn, mut inner) = shared.lock_for_memory()?;
        inner.open_stream(stream, &shared.group).ok_or(CaptureError::UnknownStream(stream))?;
        let pool = inner.manager.virtual_pool_mut().expect("it made the arena");
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
        Refusal::Short(shortage, call) => {
            AllocError::OutOfMemory(Box::new(shared.report(*shortage, call, stream)))
        }
    }
}

/// A capture under way.
#[must_use = "a capture that is dropped comes to nothing"]
pub struct Capture {
    arena: GraphArena,
    stream: StreamId,
    ended: bool,
}

impl Capture {
    /// Ends the capture and makes its graph ready to launch.
    ///
    /// # Errors
    /// [`CaptureError::OtherThread`] if the capture goes on; otherwise it is over, and ending it
    /// again is [`CaptureError::Over`].
    pub fn end(&mut self) -> Result<CapturedGraph, CaptureError> {
        self.finish(false)
    }

    /// Ends the capture; on a thread that cannot, only if it is to end here `anyway`.
    fn finish(&mut self, anyway: bool) -> Result<CapturedGraph, CaptureError> {
        if self.ended {
            return Err(CaptureError::Over);
        }
        let Handle { shared, id, .. } = &*self.arena.0;
        let mut inner = shared.lock_anyway();
        if inner.closed {
            self.ended = true;
            return Err(CaptureError::Over);
        }
        let pool = inner.manager.virtual_pool_mut().expect("it made the arena");
        let graph = match pool.end_driver_capture(self.stream) {
            Err(error) if !anyway && pool.still_captures(self.stream) => {
                return Err(CaptureError::OtherThread(error));
            }
            graph => graph,
        };
        self.ended = true;
        let captured = pool.end_arena_capture(*id, self.stream, graph);
        shared.captures.fetch_sub(1, Ordering::Relaxed);
        drop(inner);
        // Making a graph ready takes as long as it is large: without the lock.
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
        let exec = match exec {
            Ok(exec) => exec,
            Err(error) => {
                // No graph will use it.
                let mut inner = shared.lock_anyway();
                if !inner.closed {
                    for allocation in captured.kept {
                        let _ = inner.free(&allocation, self.stream, shared.number);
                    }
                }
                return Err(CaptureError::Invalidated(error));
            }
        };
        let kept = captured.kept.iter().map(Allocation::requested).sum();
        let report = self.arena.plan(&captured.recording, kept);
        Ok(CapturedGraph {
            arena: self.arena.clone(),
            exec,
            upto: captured.recording.high_water(),
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
    /// Queues a replay on `stream`, with a lease on the arena: until the lease is dropped, and the
    /// work queued on `stream` up to then is over, graphs of the arena run on no other stream. On
    /// the same stream they run one after the other, with any number of leases.
    ///
    /// Hold the lease until whatever reads the graph's results is queued on `stream`. Memory that
    /// the arena lent is brought back first.
    ///
    /// Cost beside the launch: one driver call, which asks whether the stream captures, where the
    /// last replay was on the same stream and nothing was lent; otherwise an event, a query and a wait, and for each chunk that has to be
    /// brought back an unmap, a map and a set-access.
    ///
    /// # Errors
    /// [`LaunchError::Busy`] if another stream holds a lease; and unless the arena orders
    /// overlapping replays, if the work of another stream is not over.
    pub fn launch(&self, stream: StreamId) -> Result<Lease, LaunchError> {
        let Handle { shared, patience, .. } = &*self.arena.0;
        let mut relief = Relief::new(*patience);
        loop {
            let (shortage, call) = match self.try_launch(stream)? {
                Tried::Launched(lease) => return Ok(lease),
                Tried::Short(shortage, call) => (shortage, call),
            };
            shared.observers.notify(&Event::Short(&shortage));
            if !shared.relieve(&mut relief, &shortage).map_err(LaunchError::Alloc)? {
                let report = Box::new(shared.report(shortage, call, stream));
                shared.observers.notify(&Event::OutOfMemory(&report));
                return Err(LaunchError::Alloc(AllocError::OutOfMemory(report)));
            }
        }
    }

    fn try_launch(&self, stream: StreamId) -> Result<Tried, LaunchError> {
        let Handle { shared, id, config, .. } = &*self.arena.0;
        let (_turn, mut guard) = shared.lock_for_memory()?;
        let inner = &mut *guard;
        if inner.closed {
            return Err(LaunchError::Closed);
        }
        let raw =
            inner.open_stream(stream, &shared.group).ok_or(LaunchError::UnknownStream(stream))?;
        if shared.driver.is_capturing(raw)? {
            return Err(LaunchError::Capturing(stream));
        }
        let pool = inner.manager.virtual_pool_mut().expect("it made the arena");
        let lease = match pool.take_lease(*id, self.upto, stream, config.overlap) {
            Ok(lease) => lease,
            Err(NoLease::Busy(busy)) => return Err(LaunchError::Busy(busy)),
            Err(NoLease::Refused(Refusal::Driver(error))) => {
                return Err(LaunchError::Driver(error));
            }
            Err(NoLease::Refused(Refusal::Short(shortage, call))) => {
                return Ok(Tried::Short(*shortage, call));
            }
            Err(NoLease::Refused(Refusal::Arena(refused))) => {
                return Err(LaunchError::Alloc(AllocError::Arena(Box::new(refused))));
            }
        };
        let lease = Lease { arena: self.arena.clone(), lease, stream };
        let launched = shared.driver.launch_graph(self.exec, raw);
        drop(guard);
        launched?;
        Ok(Tried::Launched(lease))
    }

    /// What its capture needed.
    pub fn report(&self) -> &CaptureReport {
        &self.report
    }

    /// The driver's own name of it.
    pub fn exec(&self) -> GraphExec {
        self.exec
    }

    /// The arena it was captured into.
    pub fn arena(&self) -> &GraphArena {
        &self.arena
    }
}

impl Drop for CapturedGraph {
    fn drop(&mut self) {
        let Handle { shared, id, .. } = &*self.arena.0;
        // A launch in flight completes; whoever wants to know of a failure asks the driver.
        let _ = shared.driver.destroy_graph_exec(self.exec);
        let mut inner = shared.lock_anyway();
        if inner.closed {
            return;
        }
        let kept = std::mem::take(&mut self.kept);
        if kept.is_empty() {
            return;
        }
        let pool = inner.manager.virtual_pool_mut().expect("it made the arena");
        let leases = &pool.arenas.get(*id).leases;
        let users: Vec<StreamId> =
            leases.unfinished().map(|mark| mark.stream).chain(leases.holder()).collect();
        for allocation in kept {
            for &user in &users {
                inner.manager.record_use(&allocation, user);
            }
            let _ = inner.free(&allocation, self.stream, shared.number);
        }
    }
}

impl fmt::Debug for CapturedGraph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "graph in {:?}: {}", self.arena, self.report)
    }
}

/// What one try to launch came to.
enum Tried {
    Launched(Lease),
    Short(Shortage, Option<DriverError>),
}

/// The right of one stream to an arena.
///
/// Dropping it ends it: work queued on the stream so far is what others wait for.
#[must_use = "a lease that is dropped at once does not cover what reads the results"]
pub struct Lease {
    arena: GraphArena,
    lease: LeaseId,
    stream: StreamId,
}

impl Lease {
    /// Whose it is.
    pub fn stream(&self) -> StreamId {
        self.stream
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut inner = self.arena.0.shared.lock_anyway();
        if !inner.closed
            && let Some(pool) = inner.manager.virtual_pool_mut()
        {
            pool.end_lease(self.arena.0.id, self.lease, self.stream);
        }
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "lease of {} on {:?}", self.stream, self.arena)
    }
}
