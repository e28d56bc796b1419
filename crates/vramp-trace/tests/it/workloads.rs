//! Workloads from incomplete recordings: the smallest recording for each repair, and the rules of a
//! workload for random recordings.

use proptest::prelude::*;
use vramp_core::{Bytes, DeviceAddr};
use vramp_trace::{
    Block, BlockState, Coverage, Event, EventKind, Frame, Label, OlderBlocks, ReadLimits, Repairs,
    Request, Segment, StackId, StreamIndex, Trace, Workload, read,
};

use EventKind::{Alloc, FreeCompleted, FreeRequested, Oom};

fn event(kind: EventKind, address: u64, size: u64) -> Event {
    Event {
        kind,
        device: 0,
        stream: StreamIndex(0),
        address: DeviceAddr::new(address),
        size: Bytes::new(size),
        time_us: 0,
        stack: None,
    }
}

fn trace(events: &[Event], blocks: &[Block]) -> Trace {
    let segment = Segment {
        stack: None,
        device: 0,
        stream: StreamIndex(0),
        address: DeviceAddr::new(0),
        total_size: Bytes::gib(1),
        segment_type: "large".to_owned(),
        is_expandable: false,
        blocks: blocks.to_vec(),
    };
    Trace {
        device_count: 1,
        streams: vec![7],
        events: events.to_vec(),
        segments: if blocks.is_empty() { vec![] } else { vec![segment] },
        ..Trace::default()
    }
}

fn block(address: u64, size: u64, state: BlockState) -> Block {
    Block {
        address: DeviceAddr::new(address),
        size: Bytes::new(size),
        requested_size: None,
        state,
        stack: None,
    }
}

fn alloc(block: u32, size: u64) -> Request {
    Request::Alloc { block, size: Bytes::new(size), stream: 0 }
}

fn free(block: u32) -> Request {
    Request::Free { block }
}

fn free_completed(block: u32) -> Request {
    Request::FreeCompleted { block }
}

#[track_caller]
fn check(trace: &Trace, requests: &[Request], repairs: Repairs) -> Workload {
    let workload = Workload::from_trace(trace, 0);
    assert_eq!(workload.requests, requests);
    assert_eq!(workload.repairs, repairs);
    workload
}

#[test]
fn an_allocation_at_a_live_address_frees_what_was_there() {
    check(
        &trace(&[event(Alloc, 1, 10), event(Alloc, 1, 20)], &[]),
        &[alloc(0, 10), free(0), free_completed(0), alloc(1, 20)],
        Repairs { frees_lost: 1, ..Repairs::default() },
    );
}

#[test]
fn an_allocation_at_a_pending_address_completes_what_was_there() {
    check(
        &trace(&[event(Alloc, 1, 10), event(FreeRequested, 1, 10), event(Alloc, 1, 20)], &[]),
        &[alloc(0, 10), free(0), free_completed(0), alloc(1, 20)],
        Repairs { completions_lost: 1, ..Repairs::default() },
    );
}

#[test]
fn a_completion_without_a_request_is_both() {
    let workload = check(
        &trace(&[event(Alloc, 1, 10), event(FreeCompleted, 1, 10)], &[]),
        &[alloc(0, 10), free(0), free_completed(0)],
        Repairs { requests_lost: 1, ..Repairs::default() },
    );
    let events: Vec<Option<usize>> = (0..4).map(|request| workload.event_of(request)).collect();
    assert_eq!(events, [Some(0), Some(1), Some(1), None]);
}

#[test]
fn a_second_free_is_left_out() {
    check(
        &trace(
            &[
                event(Alloc, 1, 10),
                event(FreeRequested, 1, 10),
                event(FreeRequested, 1, 10),
                event(FreeCompleted, 1, 10),
                event(FreeCompleted, 1, 10),
            ],
            &[],
        ),
        &[alloc(0, 10), free(0), free_completed(0)],
        Repairs { frees_repeated: 2, ..Repairs::default() },
    );
}

#[test]
fn a_recording_that_begins_between_request_and_completion_begins_with_a_pending_block() {
    let workload = check(
        &trace(&[event(FreeCompleted, 1, 10), event(Alloc, 1, 20)], &[]),
        &[alloc(0, 10), free(0), free_completed(0), alloc(1, 20)],
        Repairs { blocks_known_from_free: 1, ..Repairs::default() },
    );
    assert_eq!([workload.event_of(1), workload.event_of(2)], [None, Some(0)]);
}

#[test]
fn blocks_held_at_the_end_are_allocated_first_unless_the_recording_knows_them() {
    let blocks = [
        block(1, 512, BlockState::Active),
        block(2, 512, BlockState::Active),
        block(3, 512, BlockState::Inactive),
        block(4, 512, BlockState::Active),
    ];
    let events = [event(Alloc, 1, 10), event(Alloc, 4, 40), event(FreeCompleted, 4, 40)];
    check(
        &trace(&events, &blocks),
        &[alloc(0, 512), alloc(1, 10), alloc(2, 40), free(2), free_completed(2)],
        Repairs {
            blocks_known_from_segments: 1,
            requests_lost: 1,
            blocks_unexplained: 1,
            ..Repairs::default()
        },
    );
}

#[test]
fn the_peak_counts_from_allocation_to_the_request_to_free() {
    let events = [
        event(Alloc, 1, 10),
        event(Alloc, 2, 5),
        event(FreeRequested, 1, 10),
        event(Alloc, 3, 7),
        event(FreeCompleted, 1, 10),
        event(Alloc, 4, 3),
    ];
    let workload = Workload::from_trace(&trace(&events, &[]), 0);
    assert_eq!((workload.peak_live, workload.peak_live_request), (Bytes::new(15), 1));
    assert_eq!(workload.block_sizes(), [10, 5, 7, 3].map(Bytes::new));
}

#[test]
fn what_the_first_event_frees_is_not_in_the_peak() {
    let peak = |events: &[Event]| {
        let workload = Workload::from_trace(&trace(events, &[]), 0);
        (workload.peak_live.count(), workload.peak_demand.count())
    };
    assert_eq!(peak(&[event(FreeRequested, 1, 10)]), (0, 0));
    assert_eq!(peak(&[event(FreeCompleted, 1, 10)]), (0, 0));
    assert_eq!(peak(&[event(FreeRequested, 1, 10), event(FreeCompleted, 1, 10)]), (0, 0));
    // What a later event frees was allocated before that.
    assert_eq!(peak(&[event(FreeRequested, 1, 10), event(FreeRequested, 2, 7)]), (7, 7));
    assert_eq!(peak(&[event(Alloc, 3, 5), event(FreeRequested, 1, 10)]), (15, 15));
}

#[test]
fn sums_beyond_64_bits_are_no_panic() {
    let events: Vec<Event> = (0..3).map(|address| event(Alloc, address, u64::MAX)).collect();
    let workload = Workload::from_trace(&trace(&events, &[]), 0);
    assert_eq!(workload.peak_live, Bytes::new(u64::MAX));
}

#[test]
fn a_trace_that_points_outside_itself_is_not_written() {
    let good = trace(&[event(Alloc, 1, 10)], &[]);
    good.write_vtrace(Vec::new()).unwrap();
    let too_large = trace(&[event(Alloc, 1, u64::MAX)], &[]);
    let no_stream = Trace { streams: vec![], ..good.clone() };
    let no_device = Trace { device_count: 0, ..good };
    for bad in [too_large, no_stream, no_device] {
        let error = bad.write_vtrace(Vec::new()).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput);
        assert!(error.to_string().contains("event 0 cannot be written"), "{error}");
    }
}

fn any_event() -> impl Strategy<Value = Event> {
    let kinds = prop_oneof![
        4 => Just(Alloc),
        3 => Just(FreeRequested),
        3 => Just(FreeCompleted),
        1 => prop::sample::select(&EventKind::NAMED[..]),
        1 => (0..2u16).prop_map(|id| EventKind::Unknown(vramp_trace::ActionId(id))),
    ];
    let stacks = prop::option::of(0..3usize);
    (kinds, 0..2u16, 0..3u32, 0..8u64, 0..100u64, any::<u64>(), stacks).prop_map(
        |(kind, device, stream, address, size, time_us, stack)| Event {
            kind,
            device,
            stream: StreamIndex(stream),
            address: match kind {
                Oom if address == 0 => Event::UNKNOWN_FREE,
                _ => DeviceAddr::new(address << 40),
            },
            size: Bytes::new(size),
            time_us,
            stack: stack.and_then(vramp_trace::StackId::from_index),
        },
    )
}

fn any_block() -> impl Strategy<Value = Block> {
    let states = vec![BlockState::Active, BlockState::PendingFree, BlockState::Inactive];
    (0..8u64, 1..100u64, prop::option::of(0..100u64), prop::sample::select(states)).prop_map(
        |(address, size, requested, state)| Block {
            requested_size: requested.map(Bytes::new),
            ..block(address << 40, size, state)
        },
    )
}

prop_compose! {
    fn any_trace()(
        events in prop::collection::vec(any_event(), 0..60),
        blocks in prop::collection::vec(any_block(), 0..6),
        texts in prop::collection::vec(".{0,6}", 3),
        name in ".{0,12}",
    ) -> Trace {
        let mut made = trace(&events, &blocks);
        made.name = name;
        made.device_count = 2;
        made.streams = vec![0, 7, u64::MAX];
        made.actions = vec!["defragment".to_owned(), texts[0].clone()];
        made.allocator_settings = vec![(texts[1].clone(), texts[2].clone())];
        for (line, text) in (0..).zip(["a", "b", "c"]) {
            let frame = vramp_trace::Frame { name: text, filename: &texts[0], line };
            made.stacks.add(vec![frame; line as usize]).expect("there are ids for three stacks");
        }
        made
    }
}

proptest! {
    #[test]
    fn any_trace_comes_back_from_a_vtrace_as_it_was(trace in any_trace()) {
        let mut file = Vec::new();
        trace.write_vtrace(&mut file).unwrap();
        prop_assert_eq!(read(&file[..], &ReadLimits::default()).unwrap(), trace);
    }

    /// Every block is allocated once, then freed at most once, then done at most once; the peak is
    /// what a naive sum says; requests stay in the order of their events.
    #[test]
    fn any_history_makes_a_workload_that_keeps_the_rules(trace in any_trace()) {
        for device in 0..2 {
            let workload = Workload::from_trace(&trace, device);
            let mut sizes: Vec<(u64, u8)> = Vec::new();
            let (mut peak, mut peak_at) = (0, 0);
            for (index, request) in workload.requests.iter().enumerate() {
                match *request {
                    Request::Alloc { block, size, stream } => {
                        prop_assert_eq!(block as usize, sizes.len());
                        prop_assert!((stream as usize) < workload.streams.len());
                        sizes.push((size.count(), 0));
                    }
                    Request::Free { block } => {
                        prop_assert_eq!(std::mem::replace(&mut sizes[block as usize].1, 1), 0);
                    }
                    Request::FreeCompleted { block } => {
                        prop_assert_eq!(std::mem::replace(&mut sizes[block as usize].1, 2), 1);
                    }
                    Request::Oom { stream, .. } => {
                        prop_assert!((stream as usize) < workload.streams.len());
                    }
                }
                let live = sizes.iter().filter(|(_, state)| *state == 0).map(|(size, _)| size);
                let live: u64 = live.sum();
                let next = workload.requests.get(index + 1);
                let begins = workload.event_of(index + 1).is_some() || next.is_none();
                let is_kept = !matches!(next, Some(Request::Free { .. }));
                let counts = workload.event_of(index).is_some() || (begins && is_kept);
                if live > peak && counts {
                    (peak, peak_at) = (live, index);
                }
            }
            prop_assert_eq!(sizes.len(), workload.blocks as usize);
            prop_assert_eq!((workload.peak_live.count(), workload.peak_live_request), (peak, peak_at));

            let events: Vec<Option<usize>> =
                (0..workload.requests.len()).map(|request| workload.event_of(request)).collect();
            prop_assert!(events.is_sorted(), "requests out of order: {:?}", events);
            for event in events.into_iter().flatten() {
                prop_assert_eq!(u32::from(trace.events[event].device), device);
            }
            let asked = trace.events.iter().filter(|event| {
                u32::from(event.device) == device && event.kind == Alloc
            });
            let earlier = workload.repairs.blocks_known_from_free
                + workload.repairs.blocks_known_from_segments;
            prop_assert_eq!(asked.count(), (workload.blocks - earlier) as usize);
        }
    }
}

// --- where blocks come from ---

fn stack(trace: &mut Trace, name: &'static str) -> Option<StackId> {
    trace.stacks.add([Frame { name, filename: "model.py", line: 1 }])
}

#[test]
fn a_block_has_the_stack_of_its_alloc_or_of_its_segment() {
    let active = |address| block(address, 512, BlockState::Active);
    let events = [
        event(Alloc, 0x1000, 512),
        event(Alloc, 0x2000, 512),
        event(FreeRequested, 0x4000, 512),
        event(Alloc, 0x5000, 512),
    ];
    let mut trace = trace(&events, &[active(0x2000), active(0x3000), active(0x5000)]);
    let [of_alloc, of_segment, older, of_free] =
        ["alloc", "segment", "older", "free"].map(|name| stack(&mut trace, name));
    trace.events[0].stack = of_alloc;
    trace.events[2].stack = of_free;
    trace.events[3].stack = of_alloc;
    trace.segments[0].blocks[0].stack = of_segment;
    trace.segments[0].blocks[1].stack = older;
    trace.segments[0].blocks[2].stack = of_segment;
    let named = |category| Label { category, ..Label::default() };
    trace.labels.label_event(0, named("activation"));
    trace.labels.label_block(0, 1, named("parameter"));

    let workload = Workload::from_trace(&trace, 0);
    // Older blocks come first, by address.
    let stacks: Vec<Option<StackId>> = (0..5).map(|block| workload.stack_of(block)).collect();
    assert_eq!(stacks, [older, None, of_alloc, of_segment, of_alloc]);
    let categories: Vec<&str> =
        (0..6).map(|block| workload.label_of(&trace.labels, block).category).collect();
    assert_eq!(categories, ["parameter", "", "activation", "", "", ""]);
    assert_eq!(workload.stack_of(5), None);
}

#[test]
fn the_coverage_says_what_is_older_than_the_recording() {
    let active =
        [block(0x1000, 512, BlockState::Active), block(0x2000, 1024, BlockState::PendingFree)];
    let middle = trace(&[event(FreeRequested, 0x9000, 100)], &active);
    let older = OlderBlocks { blocks: 3, bytes: Bytes::new(512 + 1024 + 100) };
    assert_eq!(middle.coverage(0), Coverage::FromTheMiddle { older });

    let held = OlderBlocks { blocks: 2, bytes: Bytes::new(512 + 1024) };
    assert_eq!(trace(&[], &active).coverage(0), Coverage::NoEvents { held });
    assert_eq!(middle.coverage(1), Coverage::NoEvents { held: OlderBlocks::default() });
    let whole = trace(&[event(Alloc, 0x1000, 512), event(FreeRequested, 0x1000, 512)], &[]);
    assert_eq!(whole.coverage(0), Coverage::Whole);
}
