//! Captures that cudarc begins and ends.

use std::sync::Arc;

use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{CudaGraph, CudaStream};
use vramp_cudarc::VrampSlice;
use vramp_cudarc::graph::ArenaConfig;

use crate::checks::Rig;

/// Checks by name, for every libcuda.
pub const CHECKS: &[(&str, fn())] = &[
    ("a graph replays on slices from before its capture", slices_from_before),
    ("a graph has the memory of slices that its capture made", slices_of_a_capture),
];

fn capture<R>(stream: &Arc<CudaStream>, body: impl FnOnce() -> R) -> (CudaGraph, R) {
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    let result = body();
    (stream.end_capture(CUgraphInstantiate_flags(0)).unwrap().unwrap(), result)
}

fn words(stream: &Arc<CudaStream>, slice: &VrampSlice<u32>) -> Vec<u32> {
    let words = stream.clone_dtoh(slice).unwrap();
    stream.synchronize().unwrap();
    words
}

fn slices_from_before() {
    let rig = Rig::new();
    // SAFETY: all uses are on one stream.
    unsafe { rig.context.disable_event_tracking() };
    let stream = rig.stream();
    let mut from = rig.pool.clone_htod(&stream, &[1u32, 2]).unwrap();
    let mut to = rig.pool.alloc_zeros::<u32>(&stream, 2).unwrap();
    let (graph, ()) = capture(&stream, || stream.memcpy_dtod(&from, &mut to).unwrap());
    assert_eq!(words(&stream, &to), [0, 0]);
    graph.launch().unwrap();
    assert_eq!(words(&stream, &to), [1, 2]);
    stream.memcpy_htod(&[3, 4], &mut from).unwrap();
    graph.launch().unwrap();
    assert_eq!(words(&stream, &to), [3, 4]);
    rig.pool.allocator().audit().unwrap();
}

fn slices_of_a_capture() {
    let rig = Rig::new();
    // SAFETY: all uses are on one stream.
    unsafe { rig.context.disable_event_tracking() };
    let (pool, stream) = (&rig.pool, rig.stream());
    let mut from = pool.clone_htod(&stream, &[5u32; 1000]).unwrap();
    let arena = pool.allocator().graph_arena(ArenaConfig::default()).unwrap();
    let (graph, (attached, to)) = capture(&stream, || {
        let id = pool.stream_id(&stream).unwrap();
        let attached = pool.allocator().attach_capture(id, &arena).unwrap();
        let temporary = pool.clone_dtod(&stream, &from).unwrap();
        assert!(temporary.block().is_in_arena());
        let to = temporary.clone();
        drop(temporary);
        (attached, to)
    });
    let hold = attached.detach();
    assert_eq!(hold.report().blocks, 2);
    // What is allocated outside is not where the graph works.
    let outside: Vec<_> =
        (0..100).map(|_| pool.clone_htod(&stream, &[9u32; 1000]).unwrap()).collect();
    for round in [6, 7] {
        stream.memcpy_htod(&[round; 1000], &mut from).unwrap();
        graph.launch().unwrap();
        assert_eq!(words(&stream, &to), [round; 1000]);
    }
    assert!(outside.iter().all(|it| words(&stream, it) == [9; 1000]));
    drop((graph, hold, to));
    pool.allocator().audit().unwrap();
}
