//! Arenas, captures and replays, with valid and invalid calls.

use std::ptr::{null, null_mut};

use crate::common::*;
use vramp_capi::abi::vramp_status_t::{self, *};
use vramp_capi::abi::{
    vramp_allocator_t, vramp_arena_report_t, vramp_arena_t, vramp_capture_report_t, vramp_graph_t,
    vramp_lease_t, vramp_stream_t,
};
use vramp_capi::graphs::*;
use vramp_capi::interface::*;

fn arena(
    allocator: vramp_allocator_t,
    options: &std::ffi::CStr,
) -> Result<vramp_arena_t, vramp_status_t> {
    let mut arena = vramp_arena_t::default();
    // SAFETY: the text ends with a zero and the result outlives the call.
    match unsafe { vramp_arena_create(allocator, options.as_ptr(), &mut arena) } {
        VRAMP_OK => Ok(arena),
        status => Err(status),
    }
}

fn end(
    allocator: vramp_allocator_t,
    arena: vramp_arena_t,
) -> Result<vramp_graph_t, vramp_status_t> {
    let mut graph = vramp_graph_t { id: u64::MAX };
    // SAFETY: the result outlives the call.
    match unsafe { vramp_capture_end(allocator, arena, &mut graph) } {
        VRAMP_OK => Ok(graph),
        status => {
            assert_eq!(graph, vramp_graph_t::default(), "a failure leaves no graph behind");
            Err(status)
        }
    }
}

fn launch(
    allocator: vramp_allocator_t,
    graph: vramp_graph_t,
    stream: vramp_stream_t,
) -> Result<vramp_lease_t, vramp_status_t> {
    let mut lease = vramp_lease_t { id: u64::MAX };
    // SAFETY: the result outlives the call.
    match unsafe { vramp_graph_launch(allocator, graph, stream, &mut lease) } {
        VRAMP_OK => Ok(lease),
        status => {
            assert_eq!(lease, vramp_lease_t::default(), "a failure leaves no lease behind");
            Err(status)
        }
    }
}

fn launch_without_lease(
    allocator: vramp_allocator_t,
    graph: vramp_graph_t,
    stream: vramp_stream_t,
) -> vramp_status_t {
    // SAFETY: null stands for no lease.
    unsafe { vramp_graph_launch(allocator, graph, stream, null_mut()) }
}

fn memory_of(allocator: vramp_allocator_t, arena: vramp_arena_t) -> vramp_arena_report_t {
    let size = size_of::<vramp_arena_report_t>() as u64;
    let mut report = vramp_arena_report_t { struct_size: size, ..vramp_arena_report_t::default() };
    // SAFETY: the struct is as large as it says.
    assert_eq!(unsafe { vramp_arena_report(allocator, arena, &mut report) }, VRAMP_OK);
    report
}

fn needed_by(allocator: vramp_allocator_t, graph: vramp_graph_t) -> vramp_capture_report_t {
    let size = size_of::<vramp_capture_report_t>() as u64;
    let mut report =
        vramp_capture_report_t { struct_size: size, ..vramp_capture_report_t::default() };
    // SAFETY: the struct is as large as it says.
    assert_eq!(unsafe { vramp_graph_report(allocator, graph, &mut report) }, VRAMP_OK);
    report
}

/// Captures a graph with one block of `mib` MiB.
fn graph_of(
    allocator: vramp_allocator_t,
    stream: vramp_stream_t,
    arena: vramp_arena_t,
    mib: usize,
) -> vramp_graph_t {
    assert_eq!(vramp_capture_begin(allocator, stream, arena), VRAMP_OK, "{}", last_error());
    let block = malloc(allocator, mib << 20, stream).expect("memory is there");
    assert_eq!(vramp_free(allocator, block, stream), VRAMP_OK);
    end(allocator, arena).expect("a capture ends")
}

#[test]
fn a_capture_that_another_thread_tries_to_end_goes_on() {
    let allocator = open("");
    let stream = stream(allocator);
    let arena = arena(allocator, c"").unwrap();
    assert_eq!(vramp_capture_begin(allocator, stream, arena), VRAMP_OK);
    let elsewhere = std::thread::spawn(move || end(allocator, arena)).join().unwrap();
    assert_eq!(elsewhere, Err(VRAMP_ERROR_CAPTURE));
    let block = malloc(allocator, 4 << 20, stream).unwrap();
    let graph = end(allocator, arena).unwrap();
    assert_eq!(needed_by(allocator, graph).blocks, 1);
    assert_eq!(vramp_free(allocator, block, stream), VRAMP_OK);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn a_graph_is_captured_launched_and_destroyed() {
    let allocator = open("");
    let stream = stream(allocator);
    let arena = arena(allocator, c"").unwrap();
    let input = malloc(allocator, 4 << 20, stream).unwrap();
    assert_eq!(vramp_capture_begin(allocator, stream, arena), VRAMP_OK);
    let scratch = malloc(allocator, 8 << 20, stream).unwrap();
    assert_eq!(vramp_free(allocator, scratch, stream), VRAMP_OK);
    let output = malloc(allocator, 8 << 20, stream).unwrap();
    assert_eq!(output, scratch, "freed memory is reused");
    assert_eq!(vramp_free(allocator, input, stream), VRAMP_OK);
    assert_eq!(vramp_stream_forget(allocator, stream), VRAMP_ERROR_CAPTURE);
    let graph = end(allocator, arena).unwrap();

    let needed = needed_by(allocator, graph);
    assert_eq!((needed.blocks, needed.escaped, needed.kept), (2, 1, 4 << 20));
    assert_eq!((needed.monotone, needed.taken, needed.lower_bound), (16 << 20, 8 << 20, 8 << 20));
    assert_eq!(needed.planned, 8 << 20);
    let memory = memory_of(allocator, arena);
    assert_eq!((memory.live, memory.blocks, memory.high_water), (8 << 20, 1, 8 << 20));
    assert!(memory.backed >= 8 << 20 && memory.lent == 0 && memory.capacity == 1 << 39);

    for _ in 0..3 {
        let lease = launch(allocator, graph, stream).unwrap();
        assert_eq!(vramp_lease_end(allocator, lease), VRAMP_OK);
        assert_eq!(vramp_lease_end(allocator, lease), VRAMP_ERROR_UNKNOWN_LEASE);
    }
    assert_eq!(stats(allocator).live, 12 << 20, "memory of the graph is kept");
    assert_eq!(vramp_arena_destroy(allocator, arena), VRAMP_OK);
    assert_eq!(
        launch_without_lease(allocator, graph, stream),
        VRAMP_OK,
        "the graph holds the arena"
    );
    assert_eq!(vramp_graph_destroy(allocator, graph), VRAMP_OK);
    assert_eq!(launch(allocator, graph, stream), Err(VRAMP_ERROR_UNKNOWN_GRAPH));
    assert_eq!(vramp_free(allocator, output, stream), VRAMP_OK);
    assert_eq!(stats(allocator).live, 0);
    assert_eq!((vramp_trim(allocator, 0), vramp_audit(allocator)), (VRAMP_OK, VRAMP_OK));
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn a_lease_keeps_other_streams_out() {
    let allocator = open("");
    let (one, two) = (stream(allocator), stream(allocator));
    let arena = arena(allocator, c"overlap=order").unwrap();
    let graphs = [4, 8].map(|mib| graph_of(allocator, one, arena, mib));
    let lease = launch(allocator, graphs[0], one).unwrap();
    assert_eq!(launch_without_lease(allocator, graphs[1], one), VRAMP_OK, "in order of its stream");
    assert_eq!(launch(allocator, graphs[1], two), Err(VRAMP_ERROR_BUSY));
    assert!(last_error().contains("holds a lease"), "{}", last_error());
    assert_eq!(vramp_lease_end(allocator, lease), VRAMP_OK);
    assert_eq!(
        launch_without_lease(allocator, graphs[1], two),
        VRAMP_OK,
        "after the work of the other stream"
    );
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn an_idle_arena_lends_and_gets_its_memory_back() {
    let allocator = open("limit=64MiB");
    let stream = stream(allocator);
    let arena = arena(allocator, c"").unwrap();
    let graph = graph_of(allocator, stream, arena, 48);
    let block = malloc(allocator, 60 << 20, stream).unwrap();
    assert_eq!(launch(allocator, graph, stream), Err(VRAMP_ERROR_OUT_OF_MEMORY));
    assert_eq!(vramp_free(allocator, block, stream), VRAMP_OK);
    assert_eq!(launch_without_lease(allocator, graph, stream), VRAMP_OK, "{}", last_error());
    assert_eq!(memory_of(allocator, arena).backed, 48 << 20);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn a_full_arena_says_so() {
    let allocator = open("");
    let stream = stream(allocator);
    let arena = arena(allocator, c"policy=monotone,capacity=4MiB").unwrap();
    assert_eq!(vramp_capture_begin(allocator, stream, arena), VRAMP_OK);
    let block = malloc(allocator, 3 << 20, stream).unwrap();
    assert_eq!(malloc(allocator, 2 << 20, stream), Err(VRAMP_ERROR_OUT_OF_MEMORY));
    assert!(last_error().contains("Make the arena larger"), "{}", last_error());
    assert_eq!(vramp_arena_reset(allocator, arena), VRAMP_ERROR_BUSY);
    assert_eq!(vramp_arena_destroy(allocator, arena), VRAMP_ERROR_BUSY);
    let graph = end(allocator, arena).unwrap();
    assert_eq!(vramp_arena_reset(allocator, arena), VRAMP_ERROR_BUSY, "a block is held");
    assert_eq!(vramp_free(allocator, block, stream), VRAMP_OK);
    assert_eq!(vramp_arena_reset(allocator, arena), VRAMP_OK);
    assert_eq!(vramp_graph_destroy(allocator, graph), VRAMP_OK);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn what_is_not_this_allocators_is_unknown_and_changes_nothing() {
    let (mine, other) = (open(""), open(""));
    let (own, theirs) = (stream(mine), stream(other));
    let (kept, foreign) = (arena(mine, c"").unwrap(), arena(other, c"").unwrap());
    let (graph, foreign_graph) =
        (graph_of(mine, own, kept, 4), graph_of(other, theirs, foreign, 4));
    let foreign_lease = launch(other, foreign_graph, theirs).unwrap();
    let mut report = vramp_arena_report_t { struct_size: 56, ..vramp_arena_report_t::default() };
    let mut needed =
        vramp_capture_report_t { struct_size: 64, ..vramp_capture_report_t::default() };
    for id in [0, u64::MAX, 1 << 63, foreign.id, foreign_graph.id, foreign_lease.id, graph.id] {
        let wrong = vramp_arena_t { id };
        assert_eq!(vramp_capture_begin(mine, own, wrong), VRAMP_ERROR_UNKNOWN_ARENA, "{id:#x}");
        assert_eq!(vramp_capture_attach(mine, own, wrong), VRAMP_ERROR_UNKNOWN_ARENA);
        assert_eq!(end(mine, wrong), Err(VRAMP_ERROR_UNKNOWN_ARENA));
        assert_eq!(vramp_arena_reset(mine, wrong), VRAMP_ERROR_UNKNOWN_ARENA);
        assert_eq!(vramp_arena_destroy(mine, wrong), VRAMP_ERROR_UNKNOWN_ARENA);
        // SAFETY: the struct is as large as it says.
        let status = unsafe { vramp_arena_report(mine, wrong, &mut report) };
        assert_eq!(status, VRAMP_ERROR_UNKNOWN_ARENA);
    }
    for id in [0, u64::MAX, foreign.id, foreign_graph.id, foreign_lease.id, kept.id] {
        let wrong = vramp_graph_t { id };
        assert_eq!(launch(mine, wrong, own), Err(VRAMP_ERROR_UNKNOWN_GRAPH), "{id:#x}");
        assert_eq!(vramp_graph_destroy(mine, wrong), VRAMP_ERROR_UNKNOWN_GRAPH);
        // SAFETY: the struct is as large as it says.
        let status = unsafe { vramp_graph_report(mine, wrong, &mut needed) };
        assert_eq!(status, VRAMP_ERROR_UNKNOWN_GRAPH);
        assert_eq!(vramp_lease_end(mine, vramp_lease_t { id }), VRAMP_ERROR_UNKNOWN_LEASE);
    }
    assert_eq!(vramp_capture_begin(mine, theirs, kept), VRAMP_ERROR_UNKNOWN_STREAM);
    assert_eq!(launch(mine, graph, theirs), Err(VRAMP_ERROR_UNKNOWN_STREAM));
    assert_eq!(launch_without_lease(mine, graph, own), VRAMP_OK, "all of it is still there");
    assert_eq!(vramp_lease_end(other, foreign_lease), VRAMP_OK);
    assert_eq!((vramp_audit(mine), vramp_audit(other)), (VRAMP_OK, VRAMP_OK));
    assert_eq!((vramp_close(mine), vramp_close(other)), (VRAMP_OK, VRAMP_OK));
}

#[test]
fn captures_out_of_order_are_errors() {
    let allocator = open("");
    let (one, two) = (stream(allocator), stream(allocator));
    let (first, second) = (arena(allocator, c"").unwrap(), arena(allocator, c"").unwrap());
    assert_eq!(end(allocator, first), Err(VRAMP_ERROR_CAPTURE));
    assert_eq!(vramp_capture_attach(allocator, one, first), VRAMP_ERROR_CAPTURE);
    assert!(last_error().contains("captures no graph"), "{}", last_error());
    assert_eq!(vramp_capture_begin(allocator, one, first), VRAMP_OK);
    assert_eq!(vramp_capture_begin(allocator, two, first), VRAMP_ERROR_BUSY);
    assert_eq!(vramp_capture_begin(allocator, one, second), VRAMP_ERROR_CAPTURE);
    assert_eq!(vramp_capture_attach(allocator, one, second), VRAMP_ERROR_CAPTURE);
    let mut graph = vramp_graph_t { id: 7 };
    // SAFETY: the result outlives the call.
    let detached = unsafe { vramp_capture_detach(allocator, first, &mut graph) };
    assert_eq!((detached, graph.id), (VRAMP_ERROR_CAPTURE, 0), "it was begun, not attached");
    let graph = end(allocator, first).unwrap();
    assert_eq!(vramp_capture_begin(allocator, one, second), VRAMP_OK);
    assert_eq!(launch(allocator, graph, one), Err(VRAMP_ERROR_CAPTURE), "it would be captured");
    assert_eq!(launch_without_lease(allocator, graph, two), VRAMP_OK);
    assert!(end(allocator, second).is_ok());
    assert_eq!(vramp_audit(allocator), VRAMP_OK);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn options_and_presets_that_have_no_arena_say_why() {
    let allocator = open("");
    assert_eq!(arena(allocator, c"policy=tight"), Err(VRAMP_ERROR_OPTION));
    assert_eq!(arena(allocator, c"capacity=900TiB"), Err(VRAMP_ERROR_RANGE));
    assert_eq!(arena(allocator, c"\xff"), Err(VRAMP_ERROR_TEXT));
    let mut made = vramp_arena_t::default();
    // SAFETY: null means the defaults, and the result outlives the call.
    assert_eq!(unsafe { vramp_arena_create(allocator, null(), &mut made) }, VRAMP_OK);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
    for preset in ["vpmm", "stream-ordered", "torch"] {
        let allocator = open(&format!("preset={preset}"));
        assert_eq!(arena(allocator, c""), Err(VRAMP_ERROR_UNSUPPORTED), "{preset}");
        assert_eq!(vramp_close(allocator), VRAMP_OK);
    }
}

#[test]
fn closing_takes_captures_graphs_and_leases_with_it() {
    let allocator = open("");
    let (one, two) = (stream(allocator), stream(allocator));
    let (first, second) = (arena(allocator, c"").unwrap(), arena(allocator, c"").unwrap());
    let graph = graph_of(allocator, one, first, 4);
    let lease = launch(allocator, graph, one).unwrap();
    assert_eq!(vramp_capture_begin(allocator, two, second), VRAMP_OK);
    malloc(allocator, 1 << 20, two).unwrap();
    assert_eq!(vramp_close(allocator), VRAMP_OK, "{}", last_error());
    assert_eq!(vramp_lease_end(allocator, lease), VRAMP_ERROR_UNKNOWN_ALLOCATOR);
}
