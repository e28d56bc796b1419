//! Counterparts of PyTorch's tests of snapshots and histories, by the promise that each of them
//! makes. `docs/background/peer-tests.md` says which is whose.

use std::sync::{Arc, Mutex};

use crate::common::{Rig, pages};
use vramp_alloc::history::HistorySize;
use vramp_alloc::observe::Event;
use vramp_alloc::{Allocation, Bytes, Config};
use vramp_driver::sim::Simulator;
use vramp_peers::Preset;
use vramp_trace::{BlockState, EventKind, Trace};

fn on_card(mib: u64, config: Config) -> Rig {
    Rig::on(Simulator::builder().memory(Bytes::mib(mib)), config)
}

fn malloc(rig: &Rig, size: Bytes) -> Allocation {
    rig.allocator.malloc(size, rig.stream).expect("there is memory")
}

/// A stack that says where in a made program it was taken.
fn stacks(place: &Arc<Mutex<&'static str>>) -> vramp_alloc::history::StackSource {
    let place = Arc::clone(place);
    Arc::new(move || {
        let name = *place.lock().expect("whole");
        vec![(name.to_owned(), "model.py".to_owned(), 7)]
    })
}

fn innermost(trace: &Trace, event: &vramp_trace::Event) -> Option<String> {
    let frames: Vec<_> = trace.stacks.frames(event.stack?).collect();
    frames.first().map(|frame| frame.name.to_owned())
}

#[test]
fn a_snapshot_shows_each_segment_and_block_of_pytorchs_allocator() {
    for preset in [Preset::Torch, Preset::TorchExpandable] {
        let rig = Rig::new(preset);
        let other = rig.allocator.create_stream().expect("a stream can be made");
        let small = malloc(&rig, Bytes::new(700));
        let [large, used_elsewhere, gone] = [3, 5, 4].map(|count| rig.malloc(count));
        rig.allocator.record_use(&used_elsewhere, other).expect("both are known");
        let pending = used_elsewhere.addr();
        rig.free(used_elsewhere);
        rig.free(gone);
        let trace = rig.allocator.snapshot(None);
        let total: Bytes = trace.segments.iter().map(|segment| segment.total_size).sum();
        assert_eq!(total, rig.allocator.stats().expect("no call fails").reserved);
        for segment in &trace.segments {
            let sum: Bytes = segment.blocks.iter().map(|block| block.size).sum();
            assert_eq!(sum, segment.total_size);
            assert_eq!(segment.blocks[0].address, segment.address);
            assert_eq!(segment.is_expandable, preset == Preset::TorchExpandable);
        }
        let find = |addr| {
            let segments = trace.segments.iter();
            let blocks =
                segments.flat_map(|s| s.blocks.iter().map(|b| (s.segment_type.clone(), b)));
            blocks.into_iter().find(|(_, block)| block.address == addr).expect("it is shown")
        };
        let (pool, shown) = find(small.addr());
        assert_eq!((pool.as_str(), shown.state), ("small", BlockState::Active));
        assert_eq!(shown.requested_size, Some(Bytes::new(700)));
        let (pool, shown) = find(large.addr());
        assert_eq!(
            (pool.as_str(), shown.state, shown.size),
            ("large", BlockState::Active, pages(3))
        );
        assert_eq!(find(pending).1.state, BlockState::PendingFree);
        let mut file = Vec::new();
        trace.write_snapshot(&mut file).expect("memory takes it");
        rig.free(small);
        rig.free(large);
    }
}

#[test]
fn a_free_has_a_stack_of_its_own_and_so_has_what_the_card_gave() {
    for preset in [Preset::Vramp, Preset::Torch, Preset::TorchExpandable] {
        let rig = Rig::new(preset);
        let place = Arc::new(Mutex::new("forward"));
        let recording = rig.allocator.record_history(HistorySize::default(), Some(stacks(&place)));
        let block = rig.malloc(20);
        *place.lock().expect("whole") = "backward";
        rig.free(block);
        rig.sim.advance(1);
        *place.lock().expect("whole") = "empty_cache";
        rig.allocator.empty_cache().expect("nothing fails");
        let trace = rig.allocator.snapshot(Some(&recording));
        let by = |kind| {
            let found = trace.events.iter().find(|event| event.kind == kind);
            found.and_then(|event| innermost(&trace, event))
        };
        assert_eq!(by(EventKind::Alloc).as_deref(), Some("forward"), "{}", preset.name());
        assert_eq!(by(EventKind::FreeRequested).as_deref(), Some("backward"));
        assert_eq!(by(EventKind::SegmentMap).as_deref(), Some("forward"), "{}", preset.name());
        assert_eq!(by(EventKind::SegmentUnmap).as_deref(), Some("empty_cache"));
    }
}

#[test]
fn a_recording_without_stacks_takes_none_and_ends_when_told() {
    let rig = Rig::new(Preset::Vramp);
    let recording = rig
        .allocator
        .record_history(HistorySize { events: 4, stacks: 4, ..HistorySize::default() }, None);
    for count in [1, 2, 3] {
        let block = rig.malloc(count);
        rig.free(block);
    }
    assert!(rig.allocator.stop_history(&recording));
    let late = rig.malloc(9);
    let trace = rig.allocator.snapshot(Some(&recording));
    assert_eq!(trace.events.len(), 4, "the last ones alone");
    assert!(trace.events.iter().all(|event| event.stack.is_none() && event.size < late.len()));
    rig.free(late);
}

#[test]
fn an_observer_records_the_actions_that_it_wants() {
    let rig = Rig::new(Preset::Torch);
    let kept = Arc::new(Mutex::new(Vec::new()));
    let sink = Arc::clone(&kept);
    rig.allocator.observe(move |event| {
        if let Event::Freed { requested, .. } = event {
            sink.lock().expect("whole").push(*requested);
        }
    });
    for count in [3, 4] {
        let block = rig.malloc(count);
        rig.free(block);
    }
    assert_eq!(*kept.lock().expect("whole"), [pages(3), pages(4)]);
}

#[test]
fn running_out_is_in_the_history_with_what_was_asked() {
    for preset in Preset::ALL {
        let rig = on_card(64, preset.config());
        let recording = rig.allocator.record_history(HistorySize::default(), None);
        assert!(rig.allocator.malloc(Bytes::mib(100), rig.stream).is_err());
        let trace = rig.allocator.snapshot(Some(&recording));
        let oom = trace.events.iter().find(|event| event.kind == EventKind::Oom);
        assert_eq!(oom.map(|event| event.size), Some(Bytes::mib(100)), "{}", preset.name());
    }
}
