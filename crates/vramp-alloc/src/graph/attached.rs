//! Captures that somebody else begins, ends and replays: an arena serves them and is told no more.
//!
//! 1. Somebody begins a capture of a stream with the driver.
//! 2. [`Allocator::attach_capture`]: what the capture asks for comes from an arena, and what is freed
//!    within it is kept for the graph.
//! 3. The capture ends, and [`AttachedCapture::detach`] leaves a [`GraphHold`].
//! 4. The graph is launched where nobody tells. So there are no leases, and the arena is *unguarded*
//!    from then on: its memory stays where it is and is never lent. What is freed outside of
//!    captures serves the arena's next capture, and nobody else.
//! 5. Dropping the hold says that the graph will not be launched again. Nobody waits: memory of the
//!    arena and what was kept come back behind all work queued so far on every stream that the
//!    allocator knows.
//!
//! ```
//! use vramp_alloc::{Allocator, ArenaConfig, Bytes, CaptureMode, Config, Preset};
//!
//! let device = vramp_alloc::open("sim:h200")?.driver;
//! let allocator = Allocator::new(device.clone(), Config::preset(Preset::Vramp))?;
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
use std::sync::Arc;
use std::sync::atomic::Ordering;

use vramp_core::StreamId;
use vramp_driver::{CaptureInfo, DriverError};

use super::{CaptureError, CaptureReport, GraphArena, Handle};
use crate::allocation::Allocation;
use crate::allocator::Allocator;
use crate::arenas::NotAttached;
use crate::error::{FreeError, StreamError};
use crate::virtual_pool::Refusal;

/// A capture under way that somebody else began and will end, served by an arena.
///
/// Dropping it serves the capture no more, and says that nothing of it will be launched.
#[must_use = "a capture that is dropped is not served any more"]
pub struct AttachedCapture {
    arena: GraphArena,
    stream: StreamId,
    number: u64,
    detached: bool,
}

/// What a graph that is launched elsewhere needs: its arena, and memory that was freed within its
/// capture. Drop it before or after the graph is destroyed, but not before its last launch.
#[must_use = "memory that a dropped hold kept may be anybody's while the graph still runs"]
pub struct GraphHold {
    arena: GraphArena,
    kept: Vec<Allocation>,
    report: CaptureReport,
}

impl Allocator {
    /// The number of the capture that `stream` is part of, which no other capture of the process
    /// has; `None` if it is part of none. One driver call, legal during captures.
    ///
    /// # Errors
    /// [`StreamError::Driver`] with [`vramp_driver::ErrorKind::Capturing`] if the capture is spoilt.
    pub fn capture_of(&self, stream: StreamId) -> Result<Option<u64>, StreamError> {
        let raw = self.stream(stream).ok_or(StreamError::Unknown(stream))?;
        let told = self.driver().capture_info(raw)?;
        Ok(told.map(|CaptureInfo { capture, .. }| capture))
    }

    /// Lets `arena` serve the capture that `stream` is part of, whoever began it, as
    /// [`Allocator::capture`] does: what is asked for on its streams comes from the arena, and other
    /// memory that is freed on them is kept. The arena never lends from now on.
    ///
    /// Beside the driver's own cost: one call now, and one for each request within the capture.
    ///
    /// # Errors
    /// [`CaptureError::NotCapturing`] and [`CaptureError::Served`], beside those of
    /// [`Allocator::begin_capture`]. The capture goes on unserved.
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
        let mut capture =
            AttachedCapture { arena: arena.clone(), stream, number: 0, detached: true };
        arena.plan_anew();
        let (_turn, mut inner) = shared.lock_for_memory()?;
        inner.open_stream(stream, &shared.group).ok_or(CaptureError::UnknownStream(stream))?;
        let pool = inner.manager.virtual_pool_mut().expect("it made the arena");
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

    /// Takes memory back as [`Allocator::free`] does, where an attached capture may use it although
    /// `stream` is not part of that: it is kept for the graph. Blocks of arenas are freed as ever.
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
        if allocation.is_of_arena() || !Arc::ptr_eq(shared, self.shared()) {
            return self.free(allocation, stream);
        }
        let mut inner = shared.lock()?;
        if inner.any_stream(stream, &shared.group).is_none() {
            return Err(FreeError::UnknownStream { stream, allocation });
        }
        if allocation.allocator != shared.number || !inner.manager.owns(&allocation) {
            return Err(FreeError::Foreign(allocation));
        }
        let pool = inner.manager.virtual_pool_mut().expect("it made the arena");
        pool.keep_for_graph(*id, allocation);
        Ok(())
    }
}

impl AttachedCapture {
    /// The driver's number of it.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// The stream it was attached on.
    pub fn stream(&self) -> StreamId {
        self.stream
    }

    /// True until its end. One driver call; a spoilt capture is under way until somebody ends it.
    pub fn is_under_way(&self) -> Result<bool, DriverError> {
        let Handle { shared, .. } = &*self.arena.0;
        let known = shared.group.stream(self.stream).filter(|known| !known.ended);
        let Some(known) = known else { return Ok(false) };
        match shared.driver.capture_info(known.raw) {
            Ok(told) => Ok(told.is_some_and(|CaptureInfo { capture, .. }| capture == self.number)),
            Err(error) if error.kind == vramp_driver::ErrorKind::Capturing => Ok(true),
            Err(error) => Err(error),
        }
    }

    /// Serves the capture no more. To be called after its end; what a capture that goes on asks for
    /// later comes from where everything else does.
    pub fn detach(mut self) -> GraphHold {
        self.detach_now()
    }

    fn detach_now(&mut self) -> GraphHold {
        let Handle { shared, id, .. } = &*self.arena.0;
        self.detached = true;
        let mut inner = shared.lock_anyway();
        let pool = inner.manager.virtual_pool_mut().expect("it made the arena");
        let (recording, kept) = pool.detach_arena(*id);
        shared.captures.fetch_sub(1, Ordering::Relaxed);
        drop(inner);
        let report = self.arena.plan(&recording, kept.iter().map(Allocation::requested).sum());
        GraphHold { arena: self.arena.clone(), kept, report }
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
    /// What the capture needed.
    pub fn report(&self) -> &CaptureReport {
        &self.report
    }

    /// The arena it was captured into.
    pub fn arena(&self) -> &GraphArena {
        &self.arena
    }
}

impl Drop for GraphHold {
    fn drop(&mut self) {
        let Handle { shared, id, .. } = &*self.arena.0;
        let mut inner = shared.lock_anyway();
        if inner.closed {
            return;
        }
        let pool = inner.manager.virtual_pool_mut().expect("it made the arena");
        let users = pool.used_anywhere(*id);
        for allocation in std::mem::take(&mut self.kept) {
            for &user in &users {
                inner.manager.record_use(&allocation, user);
            }
            let _ = inner.free(&allocation, allocation.stream(), shared.number);
        }
    }
}

impl fmt::Debug for GraphHold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "graph launched elsewhere, in {:?}: {}", self.arena, self.report)
    }
}
