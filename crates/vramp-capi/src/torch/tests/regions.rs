//! Tests of PyTorch's calls on threads that are in regions.

use vramp_tiers::regions::{PauseOptions, Regions};

use super::*;
use crate::regions::{Tagged, Target, begin, end};

/// Runs `work` on a thread that is in a region.
fn within<R>(torch: &Torch, tag: &str, work: impl FnOnce() -> R) -> R {
    let number = torch.session(0).unwrap().allocator().number();
    let tagged = Tagged { tag: tag.to_owned(), options: Default::default() };
    let scope = begin(Target::Allocator(number), Some(tagged));
    let result = work();
    end(Some(scope.unwrap())).unwrap();
    result
}

fn regions(torch: &Torch) -> Regions {
    torch.session(0).unwrap().regions_if_any().expect("a thread was in one")
}

fn pause(torch: &Torch, tag: &str) {
    regions(torch).pause(&[tag], PauseOptions::default()).unwrap();
}

fn reserved(torch: &Torch) -> u64 {
    torch.memory(0).unwrap().reserved
}

fn allocated(torch: &Torch, tag: &str) -> Bytes {
    regions(torch).get(tag).unwrap().allocator().stats().unwrap().live
}

#[test]
fn a_segment_sleeps_with_the_region_that_its_thread_was_in() {
    let torch = torch("");
    let outside = torch.segment_malloc(0, 2 << 20).unwrap().number();
    let inside = within(&torch, "graph", || torch.segment_malloc(0, 20 << 20)).unwrap().number();
    assert_eq!(reserved(&torch), 22 << 20);
    pause(&torch, "graph");
    assert_eq!(reserved(&torch), 2 << 20, "what sleeps is not reserved");
    let refused = within(&torch, "graph", || torch.segment_malloc(0, 2 << 20)).unwrap_err();
    assert_eq!(
        (refused.status(), refused.region.as_deref()),
        (VRAMP_ERROR_REGION, Some("graph")),
        "not an out of memory"
    );
    regions(&torch).resume(&["graph"]).unwrap();
    assert_eq!(reserved(&torch), 22 << 20);
    // Other threads free it, outside of the region and while it sleeps.
    pause(&torch, "graph");
    std::thread::scope(|threads| {
        let freed = threads.spawn(|| torch.segment_free(inside, true)).join();
        assert_eq!(freed.expect("it does not panic").unwrap(), 20 << 20);
    });
    torch.segment_free(outside, false).unwrap();
    regions(&torch).resume(&["graph"]).unwrap();
    assert_eq!(torch.live(), 0);
    torch.audit();
}

#[test]
fn a_block_of_a_region_goes_back_to_it_from_other_streams_and_threads() {
    let torch = torch("");
    let outside = torch.block_of(4 << 20, 0);
    let block = within(&torch, "weights", || torch.block_of(4 << 20, SIDE));
    torch.note(block.address, 0).unwrap();
    std::thread::scope(|threads| {
        let freed = threads.spawn(|| torch.free_block(block.address)).join();
        assert_eq!(freed.expect("it does not panic").unwrap().stream, SIDE as u64);
    });
    assert_eq!(allocated(&torch, "weights"), Bytes::ZERO);
    torch.free_block(outside.address).unwrap();
    torch.audit();
}

#[test]
fn the_parts_of_memory_keep_their_addresses_while_they_sleep() {
    let torch = torch("");
    let outside = torch.block_of(4 << 20, 0);
    let inside = within(&torch, "weights", || torch.block_of(8 << 20, 0));
    let sum = || -> u64 { torch.parts(0).unwrap().iter().map(|part| part.size).sum() };
    assert_eq!(sum(), reserved(&torch));
    assert!(torch.parts(0).unwrap().is_sorted_by_key(|part| part.address));
    pause(&torch, "weights");
    assert_eq!((sum(), reserved(&torch)), (12 << 20, 4 << 20));
    regions(&torch).resume(&["weights"]).unwrap();
    let blocks = torch.parts(0).unwrap();
    assert!(blocks.iter().any(|part| part.address == inside.address && part.state == 1));
    torch.free_block(inside.address).unwrap();
    torch.free_block(outside.address).unwrap();
    torch.audit();
}

#[test]
fn a_graph_that_was_captured_in_a_region_sleeps_with_it_and_replays_afterwards() {
    let torch = torch("");
    let driver = torch.driver();
    torch.get(512, SIDE).unwrap();
    let queue = torch.queue(SIDE);
    let (source, result, graph) = within(&torch, "graph", || {
        torch.begin_pool(0, POOL).unwrap();
        driver.begin_capture(queue, CaptureMode::Relaxed).unwrap();
        let places = [4 << 20, 4 << 20].map(|size| torch.get(size, SIDE).unwrap());
        let range = |addr| AddrRange::new(DeviceAddr::new(addr), Bytes::mib(4));
        driver.fill(queue, range(places[0]), 7).unwrap();
        let error = regions(&torch).pause(&["graph"], PauseOptions::default()).unwrap_err();
        assert!(error.to_string().contains("captures a graph"), "{error}");
        let graph = driver.end_capture(queue).unwrap();
        torch.pools(0).unwrap().end(POOL).unwrap();
        (range(places[0]), range(places[1]), graph)
    });
    assert!(torch.is_in_arena(source.start.number()));
    driver.fill(queue, result, 9).unwrap();
    let before = reserved(&torch);
    pause(&torch, "graph");
    assert!(reserved(&torch) <= before - (8 << 20), "the arena sleeps too");
    regions(&torch).resume(&["graph"]).unwrap();
    let exec = driver.instantiate(graph).unwrap();
    driver.launch_graph(exec, queue).unwrap();
    driver.synchronize_stream(queue).unwrap();
    driver.destroy_graph_exec(exec).unwrap();
    driver.destroy_graph(graph).unwrap();
    torch.release(POOL).unwrap();
    for range in [source, result] {
        torch.put(range.start.number(), SIDE).unwrap();
    }
    torch.audit();
}

#[test]
fn memory_of_other_regions_that_is_freed_in_a_capture_is_kept_for_its_graph() {
    let torch = torch("");
    let outside = torch.get(4 << 20, 0).unwrap();
    let [on_stream, by_thread, recorded, small] =
        [("a", SIDE, 4 << 20), ("b", 0, 4 << 20), ("c", 0, 4 << 20), ("d", SIDE, 512)]
            .map(|(tag, stream, size)| within(&torch, tag, || torch.get(size, stream)).unwrap());
    let unused = within(&torch, "e", || torch.get(4 << 20, 0)).unwrap();
    let capture = within(&torch, "graph", || torch.capture(POOL, SIDE));
    let inside = within(&torch, "graph", || torch.get(4 << 20, SIDE)).unwrap();
    torch.note(recorded, SIDE).unwrap();
    // Threads that the capture does not know.
    for (block, stream) in [(on_stream, SIDE), (recorded, 0), (unused, 0)] {
        std::thread::scope(|threads| {
            let freed = threads.spawn(|| torch.put(block, stream)).join();
            freed.expect("it does not panic").unwrap();
        });
    }
    for (block, stream) in [(by_thread, 0), (small, SIDE), (outside, 0)] {
        torch.put(block, stream).unwrap();
    }
    let kept = ["a", "b", "c", "d", "e"].map(|tag| allocated(&torch, tag));
    let four = Bytes::mib(4);
    assert_eq!(kept, [four, four, four, Bytes::new(512), Bytes::ZERO]);
    capture.end(POOL);
    // What is kept sleeps with its region, and ends while it sleeps.
    pause(&torch, "a");
    regions(&torch).resume(&["a"]).unwrap();
    pause(&torch, "b");
    torch.put(inside, SIDE).unwrap();
    torch.release(POOL).unwrap();
    assert_eq!(torch.live(), 0);
    regions(&torch).resume(&["b"]).unwrap();
    torch.audit();
}

#[test]
fn a_block_of_another_regions_graph_is_kept_by_a_capture_that_uses_it() {
    let torch = torch("");
    let first = within(&torch, "first", || torch.capture(POOL, SIDE));
    let output = within(&torch, "first", || torch.get(4 << 20, SIDE)).unwrap();
    first.end(POOL);
    let second = within(&torch, "second", || torch.capture((2, 0), SIDE));
    let inside = within(&torch, "second", || torch.get(4 << 20, SIDE)).unwrap();
    assert!(torch.is_in_arena(output) && torch.is_in_arena(inside));
    torch.put(output, SIDE).unwrap();
    assert_eq!(allocated(&torch, "first"), Bytes::mib(4), "the second graph may use it");
    second.end((2, 0));
    torch.put(inside, SIDE).unwrap();
    torch.release((2, 0)).unwrap();
    assert_eq!(torch.live(), 0);
    torch.release(POOL).unwrap();
    torch.audit();
}

#[test]
fn a_capture_without_requests_keeps_regions_awake_until_its_end() {
    let torch = torch("");
    let block = within(&torch, "weights", || torch.get(4 << 20, 0)).unwrap();
    // SAFETY: on the simulator any value is a stream.
    unsafe { torch.note_capture(0, raw(SIDE)) }.unwrap();
    let session = torch.session(0).unwrap();
    let stream = session.adopted(SIDE).expect("it is known before the capture begins");
    let capture = torch.capture(POOL, SIDE);
    let paused = || regions(&torch).pause(&["weights"], PauseOptions::default());
    let refused = std::thread::scope(|threads| threads.spawn(paused).join()).unwrap();
    let text = refused.unwrap_err().to_string();
    assert!(text.contains(&format!("{stream} captures a graph")), "{text}");
    assert!(!regions(&torch).get("weights").unwrap().allocator().is_asleep());
    capture.end(POOL);
    paused().unwrap();
    torch.put(block, 0).unwrap();
    torch.release(POOL).unwrap();
    torch.audit();
}

#[test]
fn an_address_in_a_segment_that_sleeps_is_refused() {
    let torch = torch("");
    let outside = torch.segment_malloc(0, 2 << 20).unwrap().number();
    let inside = within(&torch, "pool", || torch.segment_malloc(0, 20 << 20)).unwrap().number();
    let cached = inside + (5 << 20);
    torch.check_awake(0, cached).unwrap();
    pause(&torch, "pool");
    let refused = torch.check_awake(0, cached).unwrap_err();
    assert_eq!((refused.status(), refused.region.as_deref()), (VRAMP_ERROR_REGION, Some("pool")));
    for other in [outside, inside + (20 << 20), 0] {
        torch.check_awake(0, other).unwrap();
    }
    regions(&torch).resume(&["pool"]).unwrap();
    torch.check_awake(0, cached).unwrap();
    torch.segment_free(inside, false).unwrap();
    torch.segment_free(outside, false).unwrap();
    torch.audit();
}

#[test]
fn the_statistics_of_pytorch_have_the_blocks_of_regions_also_of_those_that_sleep() {
    let torch = torch("");
    let outside = torch.get(4 << 20, 0).unwrap();
    let [large, small] =
        [8 << 20, 1000].map(|size| within(&torch, "weights", || torch.get(size, SIDE)).unwrap());
    let now = || {
        let stats = torch.session(0).unwrap().memory_stats().unwrap();
        let (bytes, blocks) = (stats.allocated_bytes, stats.allocation);
        assert_eq!(blocks.all.current, blocks.small_pool.current + blocks.large_pool.current);
        (bytes.all.current, blocks.small_pool.current, stats.reserved_bytes.all.current)
    };
    let (bytes, small_blocks, awake) = now();
    assert_eq!((bytes, small_blocks), ((12 << 20) + 1024, 1));
    pause(&torch, "weights");
    let (bytes, small_blocks, asleep) = now();
    assert_eq!((bytes, small_blocks, asleep), ((12 << 20) + 1024, 1, 4 << 20));
    regions(&torch).resume(&["weights"]).unwrap();
    assert_eq!(now().2, awake);
    for (block, stream) in [(outside, 0), (large, SIDE), (small, SIDE)] {
        torch.put(block, stream).unwrap();
    }
    assert_eq!(now().0, 0);
    torch.audit();
}

#[test]
fn statistics_are_read_while_the_memory_of_a_graph_that_ended_waits() {
    let torch = torch("");
    let side = torch.get(4 << 20, 0).unwrap();
    let capture = within(&torch, "graph", || torch.capture(POOL, SIDE));
    let inside = within(&torch, "graph", || torch.get(1000, SIDE)).unwrap();
    torch.put(inside, SIDE).unwrap();
    capture.end(POOL);
    // Work that is queued when the memory is released, so that it waits.
    for stream in [0, SIDE, SIDE + 1] {
        let range = AddrRange::new(DeviceAddr::new(side), Bytes::mib(4));
        torch.driver().fill(torch.queue(stream), range, 1).unwrap();
    }
    torch.release(POOL).unwrap();
    let stats = torch.session(0).unwrap().memory_stats().unwrap();
    assert_eq!(stats.allocated_bytes.all.current, 4 << 20);
    assert!(stats.active_bytes.all.current > 4 << 20, "the arena's memory waits: {stats:?}");
    torch.put(side, 0).unwrap();
    torch.audit();
}
