//! What needs a card: captures, the time that kernels take, pinned memory, and the card's free memory.

use std::sync::Arc;

use cudarc::driver::sys::{CUevent_flags, CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{CudaGraph, CudaStream};
use vramp_cudarc::VrampSlice;
use vramp_cudarc::graph::ArenaConfig;

use crate::checks::Rig;

/// Checks by name, for cards.
pub const CHECKS: &[(&str, fn())] = &[
    ("a graph replays on slices from before its capture", slices_from_before),
    ("a graph has the memory of slices that its capture made", slices_of_a_capture),
    ("two streams read a slice at once", reads_at_once),
    ("copies from and to pinned memory", pinned_memory),
    ("a pool that is dropped gives its memory back", memory_comes_back),
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

fn reads_at_once() {
    let rig = Rig::new();
    let (one, two) = (rig.stream(), rig.stream());
    let from = rig.filled(&one, 1);
    let (mut first, mut second) = (rig.filled(&one, 0), rig.filled(&two, 0));
    let event =
        |stream: &CudaStream| stream.record_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).unwrap();
    rig.copy_late(&one, &from, &mut first);
    let first_ends = event(&one);
    let second_begins = event(&two);
    rig.copy_late(&two, &from, &mut second);
    let second_ends = event(&two);
    let between = second_begins.elapsed_ms(&first_ends).unwrap();
    assert!(between > 0.0, "the second waited for the first: {between} ms");
    let all = second_begins.elapsed_ms(&second_ends).unwrap();
    assert!(all < 1.6 * between, "{all} ms, {between} ms until the first ended");
    for stream in [&one, &two] {
        rig.pool.record_use(&from, stream).unwrap();
    }
    drop(from);
    assert_eq!((words(&one, &first)[0], words(&two, &second)[0]), (1, 1));
}

fn pinned_memory() {
    let rig = Rig::new();
    let stream = rig.stream();
    // SAFETY: it is written before it is read.
    let mut host = unsafe { rig.context.alloc_pinned::<u32>(1000) }.unwrap();
    // SAFETY: nothing else uses it.
    unsafe { std::slice::from_raw_parts_mut(host.as_mut_ptr().unwrap(), 1000) }.fill(7);
    let slice = rig.pool.clone_htod(&stream, &host).unwrap();
    assert_eq!(words(&stream, &slice), [7; 1000]);
    let zeros = rig.pool.alloc_zeros::<u32>(&stream, 1000).unwrap();
    stream.memcpy_dtoh(&zeros, &mut host).unwrap();
    assert_eq!(host.as_slice().unwrap(), [0; 1000]);
}

fn memory_comes_back() {
    let rig = Rig::new();
    let stream = rig.stream();
    let free = || rig.context.mem_get_info().unwrap().0;
    let before = free();
    let slice = rig.pool.alloc_zeros::<u8>(&stream, 1 << 30).unwrap();
    assert!(free() + (1 << 30) <= before);
    rig.pool.close();
    let Rig { pool, context, .. } = rig;
    drop((pool, slice));
    context.synchronize().unwrap();
    let after = context.mem_get_info().unwrap().0;
    assert!(after + (16 << 20) > before, "{after} of {before}");
}
