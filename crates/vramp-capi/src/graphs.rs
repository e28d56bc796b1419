//! Memory for CUDA graphs: the functions of the interface about arenas, captures and replays.
//!
//! Two ways. Either the library captures and launches (`vramp_capture_begin`, `vramp_capture_end`,
//! `vramp_graph_launch`): then leases keep replays apart, and an idle arena lends its memory. Or the
//! caller does (`vramp_capture_attach`, `vramp_capture_detach`): then nothing is known of replays.

use std::ffi::c_char;

use crate::abi::{
    vramp_allocator_t, vramp_arena_report_t, vramp_arena_t, vramp_capture_report_t, vramp_graph_t,
    vramp_lease_t, vramp_status_t, vramp_stream_t,
};
use crate::options::arena_config;
use crate::status::status_of;
use crate::{handles, pointers};

/// Sets addresses aside for the memory of captured graphs. Graphs captured one after the other into
/// one arena share its memory: together they need what the largest of them needs, and what is live
/// between them. They must never run at the same time, and run in the order of their captures where
/// one reads what another left.
///
/// `options` are key=value pairs with commas between: policy (reusing, or monotone, in which nothing
/// serves twice), capacity (addresses, 512GiB; a monotone arena takes as much memory before its first
/// capture, a reusing one only what captures need), overlap (refuse, or order: what a replay does
/// while another stream's is not over), mode (thread-local, global or relaxed: of the driver's
/// capture), replan (on or off: whether to plan a tighter layout for the next capture of the same
/// shape); null means the defaults, which come first here. Only the preset vramp has arenas.
///
/// # Safety
/// `options` is null or ends with a zero; `arena` is null or good for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_arena_create(
    allocator: vramp_allocator_t,
    options: *const c_char,
    arena: *mut vramp_arena_t,
) -> vramp_status_t {
    status_of(|| {
        pointers::check(arena, "arena")?;
        // SAFETY: this function's contract says so.
        let options = unsafe { pointers::text(options, "options") }?;
        let id = handles::with(allocator, |context| context.create_arena(arena_config(options)?))?;
        // SAFETY: this function's contract says so.
        unsafe { pointers::write(arena, vramp_arena_t { id }, "arena") }
    })
}

/// Lets go of an arena. Its memory goes once its graphs are destroyed and its blocks freed. Busy
/// while it serves a capture.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_arena_destroy(
    allocator: vramp_allocator_t,
    arena: vramp_arena_t,
) -> vramp_status_t {
    status_of(|| handles::with(allocator, |context| context.destroy_arena(arena.id)))
}

/// Lets a monotone arena begin anew at its start, once its graphs are done with. Busy while it
/// serves a capture or a block of it is held.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_arena_reset(
    allocator: vramp_allocator_t,
    arena: vramp_arena_t,
) -> vramp_status_t {
    status_of(|| handles::with(allocator, |context| context.reset_arena(arena.id)))
}

/// What an arena has at present. Set `report->struct_size` to `sizeof(vramp_arena_report_t)` before.
///
/// # Safety
/// `report` is null, or its first eight bytes hold a size that is good for reading and writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_arena_report(
    allocator: vramp_allocator_t,
    arena: vramp_arena_t,
    report: *mut vramp_arena_report_t,
) -> vramp_status_t {
    status_of(|| {
        let find = || handles::with(allocator, |context| context.report_arena(arena.id));
        // SAFETY: the struct begins with its size; the rest is this function's contract.
        unsafe { pointers::write_sized(report, find, "report") }
    })
}

/// Begins a capture of `stream` into an arena: what is asked for on it, and on streams that the
/// capture draws in, comes from the arena; all else as ever, also from other threads. Memory from
/// outside that is freed on those streams stays taken until the graph is destroyed. An arena serves
/// one capture at a time.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_capture_begin(
    allocator: vramp_allocator_t,
    stream: vramp_stream_t,
    arena: vramp_arena_t,
) -> vramp_status_t {
    status_of(|| {
        handles::with(allocator, |context| context.begin_capture(arena.id, context.stream(stream)?))
    })
}

/// Ends the capture that an arena serves, and makes its graph ready to launch. On failure the
/// capture came to nothing and `*graph` is none. Unless the arena's mode is relaxed, call it on the
/// thread that began.
///
/// # Safety
/// `graph` is null or good for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_capture_end(
    allocator: vramp_allocator_t,
    arena: vramp_arena_t,
    graph: *mut vramp_graph_t,
) -> vramp_status_t {
    status_of(|| {
        pointers::check(graph, "graph")?;
        let ended = handles::with(allocator, |context| context.end_capture(arena.id));
        let id = *ended.as_ref().unwrap_or(&0);
        // SAFETY: this function's contract says so.
        unsafe { pointers::write(graph, vramp_graph_t { id }, "graph") }?;
        ended.map(drop)
    })
}

/// Lets an arena serve the capture that `stream` is part of, which the caller began and will end:
/// requests and frees as of vramp_capture_begin. Nothing is known of the graph's replays, so the
/// arena never lends from then on, and to keep replays of its graphs apart is the caller's.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_capture_attach(
    allocator: vramp_allocator_t,
    stream: vramp_stream_t,
    arena: vramp_arena_t,
) -> vramp_status_t {
    status_of(|| {
        handles::with(allocator, |context| {
            context.attach_capture(arena.id, context.stream(stream)?)
        })
    })
}

/// Ends what vramp_capture_attach began, after the caller ended the capture. `*graph` names the hold
/// on the memory of the caller's graph, or of none if that came to nothing: destroy it after the last
/// launch. Until then memory that was freed within the capture stays taken, and memory of
/// the arena that is freed later serves the arena's next capture only.
///
/// # Safety
/// `graph` is null or good for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_capture_detach(
    allocator: vramp_allocator_t,
    arena: vramp_arena_t,
    graph: *mut vramp_graph_t,
) -> vramp_status_t {
    status_of(|| {
        pointers::check(graph, "graph")?;
        let detached = handles::with(allocator, |context| context.detach_capture(arena.id));
        let id = *detached.as_ref().unwrap_or(&0);
        // SAFETY: this function's contract says so.
        unsafe { pointers::write(graph, vramp_graph_t { id }, "graph") }?;
        detached.map(drop)
    })
}

/// Queues a replay on `stream`, and brings back first what the arena lent. While a lease on the
/// arena is held, and until the work that was queued on its stream up to its end is over, graphs of
/// the arena are busy for other streams; with overlap=order such a replay comes behind that work.
///
/// `lease` gets the lease: end it once what reads the graph's results is queued on `stream`. With
/// null it ends behind the launch.
///
/// # Safety
/// `lease` is null or good for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_graph_launch(
    allocator: vramp_allocator_t,
    graph: vramp_graph_t,
    stream: vramp_stream_t,
    lease: *mut vramp_lease_t,
) -> vramp_status_t {
    status_of(|| {
        let held = !lease.is_null();
        let launched = handles::with(allocator, |context| {
            context.launch(graph.id, context.stream(stream)?, held)
        });
        if held {
            let id = *launched.as_ref().unwrap_or(&0);
            // SAFETY: this function's contract says so.
            unsafe { pointers::write(lease, vramp_lease_t { id }, "lease") }?;
        }
        launched.map(drop)
    })
}

/// Ends a lease: other streams wait for what is queued on its stream by now.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_lease_end(
    allocator: vramp_allocator_t,
    lease: vramp_lease_t,
) -> vramp_status_t {
    status_of(|| handles::with(allocator, |context| context.end_lease(lease.id)))
}

/// How much memory the capture of a graph needed. Set `report->struct_size` to
/// `sizeof(vramp_capture_report_t)` before.
///
/// # Safety
/// `report` is null, or its first eight bytes hold a size that is good for reading and writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_graph_report(
    allocator: vramp_allocator_t,
    graph: vramp_graph_t,
    report: *mut vramp_capture_report_t,
) -> vramp_status_t {
    status_of(|| {
        let find = || handles::with(allocator, |context| context.report_graph(graph.id));
        // SAFETY: the struct begins with its size; the rest is this function's contract.
        unsafe { pointers::write_sized(report, find, "report") }
    })
}

/// Destroys a graph, or the hold on the memory of the caller's own. Never waits: a launch in flight
/// completes, and its memory comes back behind it; that of the caller's graph comes back behind all
/// work that is queued by now on any stream that the allocator knows.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_graph_destroy(
    allocator: vramp_allocator_t,
    graph: vramp_graph_t,
) -> vramp_status_t {
    status_of(|| handles::with(allocator, |context| context.destroy_graph(graph.id)))
}
