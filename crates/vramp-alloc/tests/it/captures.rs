//! While a stream captures a graph: memory comes and goes, and nothing is done that spoils it.

use crate::common::{Rig, pages};
use vramp_alloc::{Bytes, Config, Preset};
use vramp_driver::sim::Simulator;
use vramp_driver::{Call, CaptureMode, Driver};

/// A pool that is full but for what is free on the capturing stream or idle elsewhere.
fn crowded() -> Rig {
    let config = Config { limit: Some(pages(64)), ..Config::default() };
    Rig::on(Simulator::builder().checked().logged(100_000), config)
}

#[test]
fn no_event_is_recorded_waited_for_or_asked_about_while_a_stream_captures() {
    let rig = crowded();
    let other = rig.allocator.create_stream().expect("a stream can be made");
    let raw = rig.allocator.stream(rig.stream).expect("it is known");
    // Work of both streams is in flight, and memory of both is free behind it.
    let blocks = [6, 6, 6, 6].map(|count| rig.malloc(count));
    let others = [6, 6, 6].map(|count| rig.malloc_on(count, other));
    let [first, second, third, fourth] = blocks;
    rig.free(first);
    rig.free(third);
    for block in others {
        rig.free_on(block, other);
    }
    rig.sim.begin_capture(raw, CaptureMode::Global).expect("it does not capture yet");
    rig.sim.take_log();
    let mut captured = Vec::new();
    for count in [4, 10, 3, 12] {
        if let Ok(block) = rig.allocator.malloc(pages(count), rig.stream) {
            captured.push(block);
        }
        let small = rig.allocator.malloc(Bytes::kib(40), rig.stream).expect("a page is free");
        rig.allocator.free(small, rig.stream).expect("it is ours");
    }
    assert!(captured.len() >= 3, "the capture is served from what is its own or new");
    rig.free(second);
    for block in captured {
        rig.free(block);
    }
    // Other streams are served, too, and do not wait for the capture.
    if let Ok(block) = rig.allocator.malloc(pages(8), other) {
        rig.free_on(block, other);
    }
    rig.allocator.trim(Bytes::ZERO).expect("nothing fails");
    let order = [Call::Record, Call::Wait];
    let log = rig.sim.take_log();
    let drawn = log.iter().find(|call| order.contains(&call.call) && call.stream == Some(raw));
    assert_eq!(drawn, None, "an event would be part of the graph");
    let graph = rig.sim.end_capture(raw).expect("nothing spoilt the capture");
    rig.sim.destroy_graph(graph).expect("it is there");

    // Afterwards everything is as before: all of it is one block's.
    rig.free(fourth);
    rig.sim.advance(1);
    let all = rig.malloc(64);
    rig.free(all);
    assert_eq!(rig.sim.hazards(), []);
    rig.close();
}

#[test]
fn a_capture_may_grow_and_remap() {
    let rig = Rig::new(Preset::Vramp);
    let raw = rig.allocator.stream(rig.stream).expect("it is known");
    let blocks: Vec<_> = (0..12).map(|_| rig.malloc(8)).collect();
    let mut kept = Vec::new();
    for (n, block) in blocks.into_iter().enumerate() {
        if n % 2 == 0 { rig.free(block) } else { kept.push(block) }
    }
    rig.sim.begin_capture(raw, CaptureMode::Global).expect("it does not capture yet");
    let moved = rig.malloc(48);
    let grown = rig.malloc(200);
    let graph = rig.sim.end_capture(raw).expect("nothing spoilt the capture");
    rig.sim.destroy_graph(graph).expect("it is there");
    assert!(rig.allocator.stats().expect("no call fails").chunks_moved > 0, "it was remapped");
    for block in kept.into_iter().chain([moved, grown]) {
        rig.free(block);
    }
    rig.close();
}
