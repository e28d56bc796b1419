//! Memory for CUDA graphs: the functions for arenas, captures and replays.
//!
//! There are two ways. The library captures and launches (`vramp_capture_begin`,
//! `vramp_capture_end`, `vramp_graph_launch`): leases serialize replays, and an idle arena lends
//! its memory. Or the caller captures and launches (`vramp_capture_attach`,
//! `vramp_capture_detach`): the library does not see replays.

use std::ffi::c_char;

use vramp_alloc::StreamId;
use vramp_alloc::graph::{ArenaConfig, CaptureError, CaptureReport};

use crate::abi::{
    vramp_allocator_t, vramp_arena_report_t, vramp_arena_t, vramp_capture_report_t, vramp_graph_t,
    vramp_lease_t, vramp_status_t, vramp_stream_t,
};
use crate::captures::{ActiveCapture, Graph, unknown_arena, unknown_graph};
use crate::ids::{next_id, unknown};
use crate::options::arena_config;
use crate::pointers::WithSize;
use crate::session::Session;
use crate::status::{Failure, Kind, Result};
use crate::{handles, pointers};

impl Session {
    pub(crate) fn create_arena(&self, config: ArenaConfig) -> Result<u64> {
        let arena = self.allocator().graph_arena(config)?;
        let id = next_id();
        self.captures.lock().arenas.insert(id, arena);
        Ok(id)
    }

    /// Destroys the handle of an arena. The arena lives as long as graphs and blocks need it.
    pub(crate) fn destroy_arena(&self, id: u64) -> Result<()> {
        let mut tables = self.captures.lock();
        if tables.active.contains_key(&id) {
            let text = "the arena has an active capture: end the capture first";
            return Err(Failure::new(Kind::Busy, text));
        }
        let arena = tables.arenas.remove(&id).ok_or_else(|| unknown_arena(id))?;
        drop(tables);
        drop(arena);
        Ok(())
    }

    pub(crate) fn reset_arena(&self, id: u64) -> Result<()> {
        Ok(self.captures.arena(id)?.reset()?)
    }

    pub(crate) fn report_arena(&self, id: u64) -> Result<vramp_arena_report_t> {
        let report = self.captures.arena(id)?.report();
        Ok(vramp_arena_report_t {
            struct_size: size_of::<vramp_arena_report_t>() as u64,
            capacity: report.capacity.count(),
            high_water: report.high_water.count(),
            live: report.live.count(),
            blocks: report.blocks as u64,
            backed: report.backed.count(),
            lent: report.lent.count(),
        })
    }

    pub(crate) fn begin_capture(&self, arena: u64, stream: StreamId) -> Result<()> {
        let capture = self.allocator().begin_capture(stream, &self.captures.arena(arena)?)?;
        self.captures.set_active(arena, ActiveCapture::Own(capture))
    }

    /// Ends a capture. The arena has no active capture afterwards, even on failure.
    pub(crate) fn end_capture(&self, arena: u64) -> Result<u64> {
        let begun = |capture: &ActiveCapture| matches!(capture, ActiveCapture::Own(_));
        let hint = "begin one with vramp_capture_begin; detach an attached one";
        let ActiveCapture::Own(mut capture) = self.captures.take_active(arena, begun, hint)? else {
            unreachable!("`take_active` checked the kind");
        };
        let ended = capture.end();
        if matches!(ended, Err(CaptureError::OtherThread)) {
            self.captures.set_active(arena, ActiveCapture::Own(capture))?;
        }
        Ok(self.captures.insert_graph(Graph::Owned(ended?)))
    }

    pub(crate) fn attach_capture(&self, arena: u64, stream: StreamId) -> Result<()> {
        let capture = self.allocator().attach_capture(stream, &self.captures.arena(arena)?)?;
        self.captures.set_active(arena, ActiveCapture::Attached(capture))
    }

    pub(crate) fn detach_capture(&self, arena: u64) -> Result<u64> {
        let attached = |capture: &ActiveCapture| matches!(capture, ActiveCapture::Attached(_));
        let hint = "attach one with vramp_capture_attach; end one that vramp began";
        let ActiveCapture::Attached(capture) = self.captures.take_active(arena, attached, hint)?
        else {
            unreachable!("`take_active` checked the kind");
        };
        Ok(self.captures.insert_graph(Graph::External(capture.detach())))
    }

    /// Launches a graph. Returns the id of its lease if `held`; otherwise the lease ends after the
    /// launch.
    pub(crate) fn launch(&self, graph: u64, stream: StreamId, held: bool) -> Result<u64> {
        let graph = self.captures.graph(graph)?;
        let Graph::Owned(graph) = &*graph else {
            let text = "the graph was captured by the caller, and vramp holds only its memory: \
                        launch it with the driver";
            return Err(Failure::new(Kind::Capture, text));
        };
        let lease = graph.launch(stream)?;
        if !held {
            return Ok(0);
        }
        let id = next_id();
        self.captures.lock().leases.insert(id, lease);
        Ok(id)
    }

    pub(crate) fn end_lease(&self, id: u64) -> Result<()> {
        let lease = self.captures.lock().leases.remove(&id);
        drop(lease.ok_or_else(|| {
            let from = "vramp_graph_launch";
            unknown(Kind::UnknownLease, "lease", from, id)
        })?);
        Ok(())
    }

    pub(crate) fn report_graph(&self, id: u64) -> Result<vramp_capture_report_t> {
        let graph = self.captures.graph(id)?;
        let CaptureReport { blocks, escaped, monotone, taken, planned, lower_bound, kept, .. } =
            *match &*graph {
                Graph::Owned(graph) => graph.report(),
                Graph::External(hold) => hold.report(),
            };
        Ok(vramp_capture_report_t {
            struct_size: size_of::<vramp_capture_report_t>() as u64,
            blocks: blocks as u64,
            escaped: escaped as u64,
            monotone: monotone.count(),
            taken: taken.count(),
            planned: planned.map_or(0, |planned| planned.count()),
            lower_bound: lower_bound.count(),
            kept: kept.count(),
        })
    }

    pub(crate) fn destroy_graph(&self, id: u64) -> Result<()> {
        let graph = self.captures.lock().graphs.remove(&id);
        drop(graph.ok_or_else(|| unknown_graph(id))?);
        Ok(())
    }
}

/// Creates an arena: an address range for the memory of captured graphs. Graphs captured one after
/// the other into one arena share its memory: together they need as much as the largest of them,
/// plus blocks that stay live between them. They must never run at the same time. Where one reads
/// the results of another, they must run in the order of their captures.
///
/// `options` are key=value pairs separated by commas. The default comes first: policy (reusing; or
/// monotone, which never reuses freed blocks), capacity (size of the address range, 512GiB; a
/// monotone arena reserves as much memory before its first capture, a reusing one only what
/// captures need), overlap (refuse or order: what a launch does while a replay on another stream is
/// in flight), mode (thread-local, global or relaxed: of the driver's capture), replan (on or off:
/// whether to plan a tighter layout for the next capture of the same shape). Null means the
/// defaults. Only the preset vramp has arenas.
///
/// # Safety
/// `options` is null or is zero-terminated; `arena` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_arena_create(
    allocator: vramp_allocator_t,
    options: *const c_char,
    arena: *mut vramp_arena_t,
) -> vramp_status_t {
    let create = |session: &Session| {
        // SAFETY: required by this function's contract.
        let options = unsafe { pointers::text(options, "options") }?;
        Ok(vramp_arena_t { id: session.create_arena(arena_config(options)?)? })
    };
    // SAFETY: required by this function's contract.
    unsafe { handles::out(allocator, (arena, "arena"), create) }
}

/// Destroys an arena. Its memory is released once its graphs are destroyed and its blocks freed.
/// VRAMP_ERROR_BUSY during a capture into it.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_arena_destroy(
    allocator: vramp_allocator_t,
    arena: vramp_arena_t,
) -> vramp_status_t {
    handles::on(allocator, |session| session.destroy_arena(arena.id))
}

/// Resets a monotone arena to its start, after the last use of its graphs. VRAMP_ERROR_BUSY during
/// a capture into it and while a block of it is live.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_arena_reset(
    allocator: vramp_allocator_t,
    arena: vramp_arena_t,
) -> vramp_status_t {
    handles::on(allocator, |session| session.reset_arena(arena.id))
}

/// Reports the memory of an arena. Set `report->struct_size` to `sizeof(vramp_arena_report_t)`
/// before.
///
/// # Safety
/// `report` is null, or its first eight bytes hold a size that is valid for reading and writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_arena_report(
    allocator: vramp_allocator_t,
    arena: vramp_arena_t,
    report: *mut vramp_arena_report_t,
) -> vramp_status_t {
    let find = |session: &Session| session.report_arena(arena.id);
    // SAFETY: the struct begins with its size; the rest is this function's contract.
    unsafe { handles::out(allocator, WithSize(report, "report"), find) }
}

/// Begins a capture of `stream` into an arena. Allocations on this stream, and on streams that join
/// the capture, come from the arena. Allocations on other streams are not affected. Memory from
/// before the capture that is freed on those streams is kept until the graph is destroyed. An arena
/// serves one capture at a time. Until the capture ends, one thread at a time may use its streams, in
/// calls of this library and of CUDA.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_capture_begin(
    allocator: vramp_allocator_t,
    stream: vramp_stream_t,
    arena: vramp_arena_t,
) -> vramp_status_t {
    handles::on(allocator, |session| session.begin_capture(arena.id, session.stream(stream)?))
}

/// Ends the capture into an arena and instantiates its graph. On failure the capture is discarded
/// and `*graph` is zero. Unless the arena's mode is relaxed, call it on the thread that began the
/// capture: on another thread it is refused, and the capture goes on.
///
/// # Safety
/// `graph` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_capture_end(
    allocator: vramp_allocator_t,
    arena: vramp_arena_t,
    graph: *mut vramp_graph_t,
) -> vramp_status_t {
    let end = |session: &Session| Ok(vramp_graph_t { id: session.end_capture(arena.id)? });
    // SAFETY: required by this function's contract.
    unsafe { handles::out_or(allocator, (graph, "graph"), vramp_graph_t::default(), end) }
}

/// Attaches an arena to the capture of `stream`, which the caller began and will end. Allocations
/// and frees behave as after vramp_capture_begin, with the same rule for threads. The library does not see replays of the graph:
/// the arena never lends its memory from then on, and the caller must not let replays of its graphs
/// overlap.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_capture_attach(
    allocator: vramp_allocator_t,
    stream: vramp_stream_t,
    arena: vramp_arena_t,
) -> vramp_status_t {
    handles::on(allocator, |session| session.attach_capture(arena.id, session.stream(stream)?))
}

/// Detaches an arena from a capture, after the caller ended the capture. `*graph` is a hold on the
/// memory of the caller's graph, also if the capture failed: destroy it after the last launch.
/// Until then memory that was freed in the capture is kept, and memory of the arena that is freed
/// later is reused only by the arena's next capture.
///
/// # Safety
/// `graph` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_capture_detach(
    allocator: vramp_allocator_t,
    arena: vramp_arena_t,
    graph: *mut vramp_graph_t,
) -> vramp_status_t {
    let detach = |session: &Session| Ok(vramp_graph_t { id: session.detach_capture(arena.id)? });
    // SAFETY: required by this function's contract.
    unsafe { handles::out_or(allocator, (graph, "graph"), vramp_graph_t::default(), detach) }
}

/// Launches a graph on `stream`. Takes lent memory of the arena back first. While a lease on the
/// arena is held, and until the work queued on its stream before its end completes, launches on
/// other streams return VRAMP_ERROR_BUSY; with overlap=order they are ordered after that work.
///
/// `*lease` receives the lease. End it after queueing the work on `stream` that reads the graph's
/// results. If `lease` is null, the lease ends directly after the launch.
///
/// # Safety
/// `lease` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_graph_launch(
    allocator: vramp_allocator_t,
    graph: vramp_graph_t,
    stream: vramp_stream_t,
    lease: *mut vramp_lease_t,
) -> vramp_status_t {
    let launch = |session: &Session| {
        let id = session.launch(graph.id, session.stream(stream)?, !lease.is_null())?;
        Ok(vramp_lease_t { id })
    };
    // SAFETY: required by this function's contract.
    unsafe { handles::out_or(allocator, lease, vramp_lease_t::default(), launch) }
}

/// Ends a lease. Other streams wait for the work queued on its stream so far.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_lease_end(
    allocator: vramp_allocator_t,
    lease: vramp_lease_t,
) -> vramp_status_t {
    handles::on(allocator, |session| session.end_lease(lease.id))
}

/// Reports the memory that the capture of a graph needed. Set `report->struct_size` to
/// `sizeof(vramp_capture_report_t)` before.
///
/// # Safety
/// `report` is null, or its first eight bytes hold a size that is valid for reading and writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_graph_report(
    allocator: vramp_allocator_t,
    graph: vramp_graph_t,
    report: *mut vramp_capture_report_t,
) -> vramp_status_t {
    let find = |session: &Session| session.report_graph(graph.id);
    // SAFETY: the struct begins with its size; the rest is this function's contract.
    unsafe { handles::out(allocator, WithSize(report, "report"), find) }
}

/// Destroys a graph, or a hold on the memory of a caller's graph. Never waits: a launch in flight
/// completes, and the memory is reused after it. Memory of a caller's graph is reused after all
/// work queued so far on every stream of the allocator.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_graph_destroy(
    allocator: vramp_allocator_t,
    graph: vramp_graph_t,
) -> vramp_status_t {
    handles::on(allocator, |session| session.destroy_graph(graph.id))
}
