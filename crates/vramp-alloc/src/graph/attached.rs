//! Attached captures: another library begins, ends and replays the graph; an arena serves it.
//!
//! 1. The caller, or another library, begins a capture of a stream with the driver.
//! 2. [`Allocator::attach_capture`]: blocks allocated in the capture come from an arena, and memory
//!    freed within it is kept for the graph. Memory of another pool of the group is, if it is freed by
//!    [`Allocator::free_for_capture`].
//! 3. The capture ends, and [`AttachedCapture::detach`] returns a [`GraphHold`].
//! 4. The graph is launched with the driver, without the allocator. So there are no leases, and the
//!    arena is *unguarded* from then on: its memory stays and is never lent. Blocks freed outside
//!    of captures serve only the arena's next capture. Like all memory, that of the arena is ready in
//!    the order of the stream it was allocated for: a launch on a stream other than the one the arena
//!    was attached on has to be ordered after the work queued there before the capture.
//! 5. Dropping the hold means that the graph is not launched again. It waits for nothing: memory of
//!    the arena, and memory kept for the graph, is reused after all work queued so far on every
//!    stream of the allocator.
//!
//! ```
//! use vramp_alloc::graph::{ArenaConfig, CaptureMode};
//! use vramp_alloc::{Allocator, Bytes, Config};
//!
//! let device = vramp_alloc::open("sim:h200")?;
//! let allocator = Allocator::new(device.clone(), Config::default())?;
//! let stream = allocator.create_stream()?;
//! let queue = allocator.stream(stream).expect("it is open");
//! let arena = allocator.graph_arena(ArenaConfig::default())?;
//!
//! device.begin_capture(queue, CaptureMode::ThreadLocal)?;          // or another library does
//! let capture = allocator.attach_capture(stream, &arena)?;
//! let output = allocator.malloc(Bytes::mib(64), stream)?;          // from the arena
//! let graph = device.end_capture(queue)?;
//! let hold = capture.detach();
//! let exec = device.instantiate(graph)?;
//! device.launch_graph(exec, queue)?;                               // as often as you like
//! device.destroy_graph_exec(exec)?;
//! drop(hold);
//! # device.destroy_graph(graph)?;
//! # allocator.free(output, stream)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use vramp_core::{ArenaId, StreamId};
use vramp_driver::{CaptureInfo, DriverError};

use super::{CaptureError, CaptureReport, GraphArena, Handle};
use crate::allocation::Allocation;
use crate::allocator::Allocator;
use crate::arenas::NotAttached;
use crate::error::{FreeError, StreamError};
use crate::shared::Shared;
use crate::virtual_pool::Refusal;

/// A capture that another library began and ends, served by an arena.
///
/// Dropping it stops serving the capture, and means that its graph is never launched.
#[must_use = "a capture that is dropped is no longer served"]
pub struct AttachedCapture {
    arena: GraphArena,
    stream: StreamId,
    number: u64,
    begun: Instant,
    detached: bool,
    /// Memory of the group's other pools that was freed within it.
    foreign: Mutex<Vec<ForeignBlock>>,
}

/// Memory of another pool of the group that is kept for a graph.
struct ForeignBlock {
    pool: Arc<Shared>,
    allocation: Allocation,
}

impl ForeignBlock {
    /// Lets it be reused after the work that is queued now on any stream of the group: the graph may have
    /// been launched there.
    fn free(self) {
        let ForeignBlock { pool, allocation } = self;
        // A pool that was closed, or left unusable, reuses nothing.
        let Ok(mut inner) = pool.lock_asleep() else { return };
        let virtual_pool = inner.manager.virtual_pool().expect("its group has arenas");
        for user in virtual_pool.running_streams() {
            inner.manager.record_use(&allocation, user);
        }
        let stream = allocation.stream();
        let _ = inner.free(allocation, stream, pool.number);
        pool.note_reserved(&inner);
        drop(inner);
        pool.notify_waiters();
    }
}

/// Keeps the memory of a graph that is launched without the allocator: its arena, and memory freed
/// within its capture. Drop it before or after the graph is destroyed, but not before its last
/// launch.
#[must_use = "memory of a dropped hold is reused, also while the graph is still launched"]
pub struct GraphHold {
    arena: GraphArena,
    kept: Vec<Allocation>,
    foreign: Vec<ForeignBlock>,
    report: CaptureReport,
}

/// # Memory that a graph keeps
impl Allocator {
    /// Returns the number of the capture that `stream` is part of, unique in the process; `None` if
    /// it is part of none. One driver call, legal during captures.
    ///
    /// # Errors
    /// [`StreamError::Driver`] with [`ErrorKind::Capturing`](crate::error::ErrorKind::Capturing) if
    /// the capture was invalidated.
    pub fn capture_number(&self, stream: StreamId) -> Result<Option<u64>, StreamError> {
        let raw = self.stream(stream).ok_or(StreamError::Unknown(stream))?;
        let info = self.driver().capture_info(raw)?;
        Ok(info.map(|CaptureInfo { capture, .. }| capture))
    }

    /// Serves the capture that `stream` is part of from `arena`, as [`Allocator::capture`] does:
    /// blocks allocated on its streams come from the arena, and other memory freed on them is kept.
    /// The arena never lends from now on. Launches on another stream than `stream` have to be ordered
    /// after the work queued on `stream` before the capture.
    ///
    /// The stream cannot wait for other streams any more. So the host waits here for their work on the arena's
    /// memory: what it is made of, and launches of other graphs.
    ///
    /// Cost beside the driver's own: one call now, and one for each request within the capture.
    ///
    /// # Errors
    /// [`CaptureError::NotCapturing`] and [`CaptureError::Served`], beside those of
    /// [`Allocator::begin_capture`]; [`CaptureError::Query`] also if another stream, whose work may use the
    /// arena's memory, captures too. The capture goes on unserved.
    pub fn attach_capture(
        &self,
        stream: StreamId,
        arena: &GraphArena,
    ) -> Result<AttachedCapture, CaptureError> {
        let shared = self.shared();
        if !Arc::ptr_eq(shared, &arena.0.shared) {
            return Err(CaptureError::ForeignArena);
        }
        if arena.0.capturing.swap(true, Ordering::AcqRel) {
            return Err(CaptureError::ArenaBusy);
        }
        let mut capture = AttachedCapture {
            arena: arena.clone(),
            stream,
            number: 0,
            begun: Instant::now(),
            detached: true,
            foreign: Mutex::default(),
        };
        arena.refresh_plan();
        shared.wait_for_arena(arena.0.id, stream)?;
        let mut inner = shared.lock_for_memory()?;
        inner.open_stream(stream).ok_or(CaptureError::UnknownStream(stream))?;
        inner.check_host().map_err(|short| CaptureError::Alloc(short.into()))?;
        let pool = inner.manager.virtual_pool_mut().expect("only a virtual pool has arenas");
        let attached = pool.attach_arena(arena.0.id, stream);
        drop(inner);
        capture.number = attached.map_err(|refused| match refused {
            NotAttached::NoCapture => CaptureError::NotCapturing(stream),
            NotAttached::Served => CaptureError::Served(stream),
            NotAttached::Refused(Refusal::Driver(error)) => CaptureError::Query { stream, error },
            NotAttached::Refused(refusal) => CaptureError::Alloc(self.refused(refusal, stream)),
        })?;
        shared.captures.fetch_add(1, Ordering::Relaxed);
        capture.detached = false;
        Ok(capture)
    }

    /// Frees an allocation that an attached capture may use although `stream` is not part of that
    /// capture, or although this is another pool of the group than the arena's: the memory is kept for the
    /// graph. Blocks of the pool's own arenas are freed as by [`Allocator::free`]. O(1); no driver call.
    ///
    /// # Errors
    /// As of [`Allocator::free`].
    pub fn free_for_capture(
        &self,
        allocation: Allocation,
        stream: StreamId,
        capture: &AttachedCapture,
    ) -> Result<(), FreeError> {
        let Handle { shared, id, .. } = &*capture.arena.0;
        let is_own = Arc::ptr_eq(shared, self.shared());
        if !Arc::ptr_eq(&shared.group, &self.shared().group) || is_own && allocation.is_in_arena() {
            return self.free(allocation, stream);
        }
        let allocation = self.check_free(allocation, stream)?;
        self.notify_freed(&allocation, stream);
        if is_own {
            shared.lock_asleep()?.keep_for_graph(*id, allocation, stream);
            return Ok(());
        }
        let pool = Arc::clone(self.shared());
        pool.lock_asleep()?.manager.record_use(&allocation, stream);
        let mut foreign = capture.foreign.lock().unwrap_or_else(PoisonError::into_inner);
        foreign.push(ForeignBlock { pool, allocation });
        Ok(())
    }
}

impl Shared {
    /// Waits on the host for work on an arena's memory that `stream` is not ordered behind. No lock is held
    /// meanwhile.
    fn wait_for_arena(&self, id: ArenaId, stream: StreamId) -> Result<(), CaptureError> {
        let query = |error| CaptureError::Query { stream, error };
        loop {
            let mut inner = self.lock()?;
            let pool = inner.manager.virtual_pool_mut().expect("only a virtual pool has arenas");
            let awaited = pool.begin_arena_waits(id, stream).map_err(query)?;
            drop(inner);
            if awaited.is_empty() {
                return Ok(());
            }
            let (mut waits, mut failed) = (Vec::new(), Ok(()));
            for awaited in awaited {
                let waited = awaited.synchronize(&*self.driver);
                waits.push((awaited, waited.is_ok()));
                failed = failed.and(waited);
            }
            let mut inner = self.lock_anyway();
            let pool = inner.manager.virtual_pool_mut().expect("only a virtual pool has arenas");
            pool.end_waits(waits);
            failed.map_err(query)?;
        }
    }
}

impl AttachedCapture {
    /// Returns the driver's number of the capture.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Returns the stream it was attached on.
    pub fn stream(&self) -> StreamId {
        self.stream
    }

    /// Returns true until the capture ends. One driver call. An invalidated capture is under way
    /// until it is ended.
    ///
    /// # Errors
    /// A driver call failed.
    pub fn is_under_way(&self) -> Result<bool, DriverError> {
        let Handle { shared, .. } = &*self.arena.0;
        let Some(raw) = shared.group.open_stream(self.stream) else { return Ok(false) };
        match shared.driver.capture_info(raw) {
            Ok(info) => Ok(info.is_some_and(|CaptureInfo { capture, .. }| capture == self.number)),
            Err(error) if error.kind == vramp_driver::ErrorKind::Capturing => Ok(true),
            Err(error) => Err(error),
        }
    }

    /// Stops serving the capture. Call it after the capture's end: later requests of a capture that
    /// goes on are served as outside of captures.
    pub fn detach(mut self) -> GraphHold {
        self.detach_now()
    }

    fn detach_now(&mut self) -> GraphHold {
        let Handle { shared, id, .. } = &*self.arena.0;
        self.detached = true;
        let foreign = self.foreign.get_mut().unwrap_or_else(PoisonError::into_inner);
        let foreign = std::mem::take(foreign);
        let mut inner = shared.lock_anyway();
        if inner.closed {
            let (kept, report) = (Vec::new(), CaptureReport::default());
            return GraphHold { arena: self.arena.clone(), kept, foreign, report };
        }
        let pool = inner.manager.virtual_pool_mut().expect("only a virtual pool has arenas");
        let (recording, kept) = pool.detach_arena(*id);
        shared.captures.fetch_sub(1, Ordering::Relaxed);
        drop(inner);
        let all = kept.iter().chain(foreign.iter().map(|block| &block.allocation));
        let bytes = all.map(Allocation::requested).sum();
        let report = self.arena.plan(recording, bytes, self.begun);
        GraphHold { arena: self.arena.clone(), kept, foreign, report }
    }
}

impl Drop for AttachedCapture {
    fn drop(&mut self) {
        if !self.detached {
            drop(self.detach_now());
        }
        self.arena.0.capturing.store(false, Ordering::Release);
    }
}

impl fmt::Debug for AttachedCapture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "capture {} of {} into {:?}", self.number, self.stream, self.arena)
    }
}

impl GraphHold {
    /// Returns the memory that the capture needed.
    pub fn report(&self) -> &CaptureReport {
        &self.report
    }

    /// Returns the arena it was captured into.
    pub fn arena(&self) -> &GraphArena {
        &self.arena
    }
}

impl Drop for GraphHold {
    fn drop(&mut self) {
        self.free_own();
        std::mem::take(&mut self.foreign).into_iter().for_each(ForeignBlock::free);
    }
}

impl GraphHold {
    fn free_own(&mut self) {
        let Handle { shared, id, .. } = &*self.arena.0;
        let mut inner = shared.lock_anyway();
        if inner.closed {
            return;
        }
        // The graph may have been launched on a stream that this pool never served.
        inner.add_streams(&shared.group);
        let pool = inner.manager.virtual_pool_mut().expect("only a virtual pool has arenas");
        let users = pool.used_anywhere(*id);
        for allocation in std::mem::take(&mut self.kept) {
            for &user in &users {
                inner.manager.record_use(&allocation, user);
            }
            let stream = allocation.stream();
            let _ = inner.free(allocation, stream, shared.number);
        }
    }
}

impl fmt::Debug for GraphHold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "graph launched elsewhere, in {:?}: {}", self.arena, self.report)
    }
}
