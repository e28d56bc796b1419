//! While a stream captures a graph: memory comes and goes, and nothing is done that spoils it.

use crate::common::{Rig, pages};
use vramp_alloc::{Bytes, Config};
use vramp_driver::sim::{Kernel, Simulator};
use vramp_driver::{Call, CaptureMode, Driver};
use vramp_peers::Preset;

/// A pool that is full but for what is free on the capturing stream or idle elsewhere.
fn crowded() -> Rig {
    let config = Config { limit: Some(pages(64)), ..Config::default() };
    Rig::on(Simulator::builder().checked().logged(100_000), config)
}

#[test]
fn a_stream_that_captures_waits_for_nothing_and_no_event_is_recorded_on_it() {
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
    let log = rig.sim.take_log();
    let on_it = |of: Call| log.iter().filter(|c| c.call == of && c.stream == Some(raw)).count();
    assert_eq!(on_it(Call::Wait), 0, "it would be part of the graph");
    assert!(on_it(Call::Record) <= 1, "an event that was refused is not tried again");
    let queries = log.iter().filter(|logged| logged.call == Call::Query).count();
    assert!(queries > 0, "work of other streams is asked about");
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

#[test]
fn memory_of_other_streams_serves_one_that_captures_once_their_work_is_over() {
    for preset in [Preset::Vramp, Preset::Vpmm] {
        let rig = Rig::on(
            Simulator::builder().checked().logged(1_000),
            Config { limit: Some(pages(16)), span: Bytes::gib(1), ..preset.config() },
        );
        let other = rig.allocator.create_stream().expect("a stream can be made");
        let raw = rig.raw(rig.stream);
        let gate = rig.sim.gate();
        rig.sim.launch(rig.raw(other), Kernel::new("busy").until(gate)).expect("it is open");
        let block = rig.malloc_on(16, other);
        rig.free_on(block, other);
        // An event stands for the work.
        rig.allocator.trim(Bytes::ZERO).expect("nothing is over");
        rig.sim.begin_capture(raw, CaptureMode::Global).expect("it does not capture yet");
        // It may not wait for the other stream on the device.
        let refused = rig.allocator.malloc(pages(16), rig.stream);
        assert!(refused.is_err_and(|error| error.is_out_of_memory()), "{preset:?}");
        rig.sim.open(gate);
        rig.sim.advance(1);
        let block = rig.malloc(16);
        let graph = rig.sim.end_capture(raw).expect("nothing spoilt the capture");
        rig.sim.destroy_graph(graph).expect("it is there");
        rig.free(block);
        rig.close();
    }
}

#[test]
fn a_miss_learns_of_many_captures_at_once_and_asks_no_other_stream() {
    for idle in [0, 1_000] {
        let rig = crowded();
        let create = || rig.allocator.create_stream().expect("a stream can be made");
        let capturing: Vec<_> = (0..20).map(|_| create()).collect();
        let open = create();
        let _: Vec<_> = (0..idle).map(|_| create()).collect();
        let users = || capturing.iter().chain([&open]);
        let blocks: Vec<_> = users().map(|&stream| rig.malloc_on(3, stream)).collect();
        users().zip(blocks).for_each(|(&stream, block)| rig.free_on(block, stream));
        for &stream in &capturing {
            rig.sim.begin_capture(rig.raw(stream), CaptureMode::Relaxed).expect("it can begin");
        }
        // One page is left. What the open stream freed serves the request; the others keep theirs.
        let before = rig.sim.calls();
        let block = rig.malloc(3);
        let calls = rig.sim.calls() - before;
        assert!(calls < 200, "{idle} idle streams: {calls} calls");
        let (asked, next) =
            rig.calls(Call::IsCapturing, || rig.allocator.malloc(pages(3), rig.stream));
        assert!(next.is_err_and(|error| error.is_out_of_memory()), "all else is held");
        assert!(asked <= 2 * 20, "{idle} idle streams: {asked} were asked");
        for &stream in &capturing {
            let graph = rig.sim.end_capture(rig.raw(stream)).expect("nothing spoilt the capture");
            rig.sim.destroy_graph(graph).expect("it is there");
        }
        rig.free(block);
        let all = rig.malloc(60);
        rig.free(all);
        assert_eq!(rig.sim.hazards(), []);
        rig.close();
    }
}
