//! The history ring of an allocator, and timelines for Perfetto.

use std::collections::HashMap;
use std::path::Path;

use proptest::prelude::*;
use serde_json::Value;
use vramp_core::{Bytes, DeviceAddr};
use vramp_trace::{
    ActionId, Annotation, Event, EventKind, Frame, History, HistorySize, Label, PoolId, ReadLimits,
    Record, StackId, Stage, StreamIndex, Trace, Workload, read, read_trace,
};

// --- Perfetto timelines: their counters and slices agree with the trace ---

fn load(path: &str) -> Trace {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    read_trace(root.join(path), &ReadLimits::default()).unwrap()
}

fn timeline(trace: &Trace) -> Vec<Value> {
    let mut file = Vec::new();
    trace.write_perfetto(&mut file).unwrap();
    let page: Value = serde_json::from_slice(&file).unwrap();
    page["traceEvents"].as_array().unwrap().clone()
}

fn of<'a>(entries: &'a [Value], ph: &'a str) -> impl Iterator<Item = &'a Value> {
    entries.iter().filter(move |entry| entry["ph"] == ph)
}

/// Returns the values of a counter, in order.
fn counter(entries: &[Value], name: &str) -> Vec<u64> {
    let own = of(entries, "C").filter(|entry| entry["name"] == name);
    own.map(|entry| entry["args"]["bytes"].as_u64().unwrap()).collect()
}

/// Every slice begins once and ends at most once, and time never runs backwards.
fn check(entries: &[Value]) {
    let mut open: HashMap<&str, &str> = HashMap::new();
    let mut last = HashMap::new();
    for entry in entries {
        let now = entry["ts"].as_u64().unwrap();
        let before = last.insert(entry["pid"].as_u64().unwrap(), now).unwrap_or(0);
        assert!(before <= now, "{entry}");
        let (name, id) = (entry["name"].as_str().unwrap(), entry["id"].as_str());
        match entry["ph"].as_str().unwrap() {
            "b" => assert_eq!(open.insert(id.unwrap(), name), None, "{entry}"),
            "e" => assert_eq!(open.remove(id.unwrap()), Some(name), "{entry}"),
            "n" => assert!(open.contains_key(id.unwrap()), "{entry}"),
            "C" | "i" | "M" => assert_eq!(id, None),
            other => panic!("{other}"),
        }
    }
}

#[test]
fn counters_reach_the_peaks_of_the_recording() {
    let trace = load("examples/gnn.pickle.gz");
    let entries = timeline(&trace);
    check(&entries);
    let peak = Workload::from_trace(&trace, 0).peak_live.count();
    assert_eq!(counter(&entries, "stream 0 allocated").into_iter().max(), Some(peak));
    // The recorded program never releases segments.
    let taken = trace.events.iter().filter(|event| event.kind == EventKind::SegmentAlloc);
    let reserved = counter(&entries, "stream 0 reserved");
    assert_eq!(reserved.last(), Some(&taken.map(|event| event.size.count()).sum()));
    assert_eq!(of(&entries, "b").count(), 4_710);
    assert_eq!(of(&entries, "e").count(), 4_707);
}

#[test]
fn reserved_bytes_end_as_the_recording_did() {
    for path in ["llama_varlen_oom", "resnet_multires_stacks"] {
        let trace = load(&format!("examples/{path}.pickle.gz"));
        let entries = timeline(&trace);
        check(&entries);
        for (index, &raw) in trace.streams.iter().enumerate() {
            let stream = StreamIndex(index as u32);
            let own = trace.segments.iter().filter(|segment| segment.stream == stream);
            let held: u64 = own.map(|segment| segment.total_size.count()).sum();
            let name = if raw == 0 { "0".to_owned() } else { format!("{raw:#x}") };
            let last = counter(&entries, &format!("stream {name} reserved")).last().copied();
            assert_eq!(last.unwrap_or(0), held, "{path} {name}");
        }
    }
}

#[test]
fn slices_are_named_by_size_and_innermost_frame() {
    let entries = timeline(&load("examples/resnet_multires_stacks.pickle.gz"));
    let first = of(&entries, "b").next().unwrap();
    assert_eq!(first["name"], "36.75 KiB convert");
    assert!(first["args"]["at"].as_str().unwrap().ends_with("modules/module.py:1364"), "{first}");
    assert_eq!(first["args"]["address"], "0x7efa95e00000");
    let waited = of(&entries, "n").count();
    assert_eq!(waited, 2, "two blocks waited for another stream");
    let title = of(&entries, "M").next().unwrap();
    assert_eq!(title["args"]["name"], "device 0 (resnet_multires_stacks)");
}

#[test]
fn out_of_memory_is_an_instant_with_its_numbers() {
    let entries = timeline(&load("examples/llama_varlen_oom.pickle.gz"));
    let instants = of(&entries, "i").filter_map(|entry| entry["name"].as_str());
    let failed: Vec<&str> = instants.filter(|name| name.starts_with("out of memory")).collect();
    let [failed] = failed[..] else { panic!("{failed:?}") };
    assert!(failed.contains(" requested, ") && failed.ends_with(" free on the card"), "{failed}");
}

#[test]
fn a_log_without_segments_has_no_reserved_bytes() {
    let log = "Thread,Time,Action,Pointer,Size,Stream
1,16:06:30.678500,allocate,0x7f2e40000000,1000,0x0
1,16:06:30.678700,free,0x7f2e40000000,1000,0x0";
    let entries = timeline(&read(log.as_bytes(), &ReadLimits::default()).unwrap());
    check(&entries);
    assert_eq!(counter(&entries, "stream 0 allocated"), [1000, 0]);
    assert_eq!(of(&entries, "C").count(), 2);
}

#[test]
fn each_event_takes_a_microsecond_in_a_recording_without_times() {
    let mut trace = load("examples/gnn.pickle.gz");
    trace.events.iter_mut().for_each(|event| event.time_us = 0);
    let entries = timeline(&trace);
    check(&entries);
    let last = entries.last().unwrap()["ts"].as_u64().unwrap();
    assert_eq!(last, trace.events.len() as u64 - 1);
}

#[test]
fn a_trace_without_anything_is_an_empty_timeline() {
    assert!(timeline(&Trace::default()).is_empty());
}

/// A label by small numbers, so that labels repeat.
#[derive(Clone, Copy, Debug)]
struct OwnLabel(i64, usize, usize, usize);

impl OwnLabel {
    fn label(&self) -> Label<'static> {
        const TEXTS: [&str; 3] = ["", "first", "second"];
        let OwnLabel(pool, metadata, compile_context, category) = *self;
        Label {
            pool: PoolId(pool, -pool),
            metadata: TEXTS[metadata],
            compile_context: TEXTS[compile_context],
            category: TEXTS[category],
        }
    }
}

fn label() -> impl Strategy<Value = OwnLabel> {
    (0i64..3, 0usize..3, 0usize..3, 0usize..3).prop_map(|(a, b, c, d)| OwnLabel(a, b, c, d))
}

#[test]
fn ranges_that_the_program_marked_are_slices() {
    let entries = timeline(&load("labelled.pickle"));
    check(&entries);
    let of_ranges = |ph| of(&entries, ph).filter(|entry| entry["cat"] == "annotation");
    let times = |ph| -> Vec<u64> { of_ranges(ph).map(|e| e["ts"].as_u64().unwrap()).collect() };
    assert_eq!(times("b"), [5, 15]);
    assert_eq!(times("e"), [35]);
    assert_eq!(of_ranges("e").next().unwrap()["id"], "0.range2", "the innermost ends first");
    let mark = of(&entries, "i").find(|entry| entry["name"] == "load MARK").unwrap();
    assert_eq!(mark["ts"], 45);
    let block = of(&entries, "b").find(|entry| entry["args"]["metadata"] == "layer 1").unwrap();
    assert_eq!(block["args"]["address"], "0x7f2e40000200");
}

proptest! {
    /// Broken recordings too: inferred segments are consistent, and both writers accept them.
    #[test]
    fn any_events_can_be_written(
        events in proptest::collection::vec((0usize..10, 0u64..40, 0u64..12, 0u16..2, label()), 0..80),
        marks in proptest::collection::vec((0usize..3, 0u16..3, 0u64..90), 0..8),
        of_blocks in proptest::collection::vec((0usize..4, 0usize..4, label()), 0..8),
    ) {
        let far = |place: u64| if place == 39 { u64::MAX - 1000 } else { place << 20 };
        let sizes = [0, 1, 512, 1000, 1 << 20, 3 << 20, 20 << 20, 1 << 56, 700, 2 << 20, 4, 1 << 30];
        let mut time_us = 0;
        let labels: Vec<(u16, OwnLabel)> =
            events.iter().map(|event| (event.3, event.4)).collect();
        let events = events.into_iter().map(|(kind, place, size, device, _)| {
            time_us += 1;
            Event {
                kind: EventKind::NAMED[kind],
                device,
                stream: StreamIndex(u32::from(device)),
                address: DeviceAddr::new(far(place)),
                size: Bytes::new(sizes[size as usize]),
                time_us,
                stack: None,
            }
        });
        let mut events: Vec<Event> = events.collect();
        events.sort_by_key(|event| event.device);
        let mut trace =
            Trace { device_count: 2, streams: vec![0, 7], events, ..Trace::default() };
        trace.infer_segments();
        let mut by_device = labels;
        by_device.sort_by_key(|&(device, _)| device);
        for (index, (_, own)) in by_device.into_iter().enumerate() {
            trace.labels.label_event(index, own.label());
        }
        for (segment, block, own) in of_blocks {
            let segments = trace.segments.len();
            if segments > 0 {
                let segment = segment % segments;
                trace.labels.label_segment(segment, own.label());
                if block < trace.segments[segment].blocks.len() {
                    trace.labels.label_block(segment, block, own.label());
                }
            }
        }
        trace.annotations.extend(marks.into_iter().map(|(stage, device, time_us)| Annotation {
            stage: [Stage::Start, Stage::End, Stage::Other("x".into())][stage].clone(),
            name: ["step", "load"][time_us as usize % 2].into(),
            device: Some(device).filter(|&device| device < 2),
            time_us,
        }));
        let mut file = Vec::new();
        trace.write_snapshot(&mut file).unwrap();
        let found = read(&file[..], &ReadLimits::default()).unwrap();
        prop_assert_eq!(found.segments.len(), trace.segments.len());
        prop_assert_eq!(found.events.len(), trace.events.len());
        prop_assert_eq!(&found.annotations, &trace.annotations);
        for (index, segment) in trace.segments.iter().enumerate() {
            prop_assert_eq!(found.labels.of_segment(index), trace.labels.of_segment(index));
            for block in 0..segment.blocks.len() {
                let expected = trace.labels.of_block(index, block);
                prop_assert_eq!(found.labels.of_block(index, block), expected);
            }
        }
        for index in 0..trace.events.len() {
            prop_assert_eq!(found.labels.of_event(index), trace.labels.of_event(index));
        }
        file.clear();
        trace.write_vtrace(&mut file).unwrap();
        prop_assert_eq!(&read(&file[..], &ReadLimits::default()).unwrap(), &trace);
        check(&timeline(&trace));
    }
}

// --- The history ring: order, counts, and no heap allocation once it is full ---

const STACK: [Frame<'static>; 2] = [
    Frame { name: "forward", filename: "model.py", line: 20 },
    Frame { name: "main", filename: "train.py", line: 10 },
];

fn sized(events: u32) -> HistorySize {
    HistorySize { events, ..HistorySize::default() }
}

fn record(number: u64, stack: Option<StackId>) -> Record {
    Record {
        kind: EventKind::NAMED[number as usize % EventKind::NAMED.len()],
        device: 0,
        stream: number % 3,
        address: DeviceAddr::new(number),
        size: Bytes::kib(number),
        time_us: number,
        stack,
    }
}

fn times(history: &History) -> Vec<u64> {
    history.snapshot_events().map(|event| event.time_us).collect()
}

#[test]
fn a_full_history_records_without_heap_memory() {
    let mut history = History::new(sized(1000));
    for number in 0..1000 {
        let stack = history.intern(STACK);
        history.record(&record(number, stack));
    }
    let used = allocation_counter::measure(|| {
        for number in 1000..5000 {
            let stack = history.intern(STACK);
            history.record(&record(number, stack));
        }
    });
    assert_eq!(used.count_total, 0, "{used:?}");
    assert_eq!(history.overwritten(), 4000);
    assert_eq!(times(&history), (4000..5000).collect::<Vec<u64>>());
}

proptest! {
    #[test]
    fn the_last_events_come_out_in_order(size in 0u32..20, records in 0u64..60) {
        let mut history = History::new(sized(size));
        for number in 0..records {
            history.record(&record(number, None));
        }
        let kept = records.min(u64::from(size));
        prop_assert_eq!(times(&history), (records - kept..records).collect::<Vec<u64>>());
        prop_assert_eq!(history.len() as u64, kept);
        prop_assert_eq!(history.is_empty(), kept == 0);
        prop_assert_eq!(history.overwritten(), records - kept);
        history.clear();
        prop_assert!(history.is_empty() && history.overwritten() == 0);
        history.record(&record(7, None));
        prop_assert_eq!(history.len(), size.min(1) as usize);
    }
}

#[test]
fn a_repeated_stack_has_one_id() {
    let mut history = History::new(sized(10));
    let first = history.intern(STACK);
    let other = history.intern([STACK[1]]);
    assert_ne!(first, other);
    assert_eq!(history.intern(STACK), first);
    assert_eq!(history.to_trace().stacks.len(), 2);
}

#[test]
fn stacks_beyond_the_limit_are_counted_and_known_ones_still_found() {
    let mut history = History::new(HistorySize { events: 10, stacks: 2, ..HistorySize::default() });
    let line = |line| [Frame { line, ..STACK[0] }];
    let first = history.intern(line(1));
    let second = history.intern(line(2));
    assert_eq!(history.intern(line(3)), None);
    assert_eq!(history.intern([STACK[0], STACK[1]]), None);
    // All of its frames are interned, the stack is not.
    assert_eq!(history.intern([line(1)[0], line(2)[0]]), None);
    assert_eq!((history.intern(line(1)), history.intern(line(2))), (first, second));
    assert_eq!(history.stacks_refused(), 3);
}

#[test]
fn a_history_of_any_size_has_a_largest_number_of_events() {
    let capacity = |events| History::new(sized(events)).capacity();
    let max = HistorySize::EVENTS_MAX;
    assert_eq!([7, max, max + 1, u32::MAX].map(capacity), [7, max, max, max]);
}

#[test]
fn stacks_are_bounded_by_their_bytes_and_known_ones_still_found() {
    let stack_bytes = 10_000;
    let mut history = History::new(HistorySize { stack_bytes, ..sized(10) });
    let name = "f".repeat(100);
    // Each has a function of its own: 100 bytes of name, 64 beside it, and 32 for the stack.
    let names: Vec<String> = (0..1000).map(|number| format!("{name}{number:03}")).collect();
    let stack = |name| [Frame { name, filename: "model.py", line: 1 }];
    let ids: Vec<_> = names.iter().map(|name| history.intern(stack(name))).collect();
    let known = ids.iter().flatten().count();
    assert!((40..=60).contains(&known), "{known}");
    assert_eq!(history.stacks_refused(), 1000 - known as u64);
    let again: Vec<_> = names.iter().map(|name| history.intern(stack(name))).collect();
    assert_eq!(ids, again);
    let stacks = history.to_trace().stacks;
    assert_eq!(stacks.len(), known, "a refused stack leaves nothing");
}

#[test]
fn ids_and_actions_of_elsewhere_do_not_get_in() {
    let mut elsewhere = History::new(sized(10));
    elsewhere.intern(STACK);
    let foreign = elsewhere.intern([STACK[0]]);
    let mut history = History::new(sized(10));
    history.record(&Record { kind: EventKind::Unknown(ActionId(3)), ..record(1, foreign) });
    let event = history.snapshot_events().next().unwrap();
    assert_eq!((event.kind, event.stack), (EventKind::UserDefined, None));
}

#[test]
fn a_history_of_two_devices_becomes_a_snapshot_that_reads_back() {
    let mut history = History::new(sized(100));
    let stack = history.intern(STACK);
    for number in 0..20 {
        let mut record = record(number, stack.filter(|_| number % 2 == 0));
        record.device = number as u16 % 2;
        if record.kind == EventKind::Oom {
            record.address = Event::UNKNOWN_FREE;
        }
        history.record(&record);
    }
    let mut trace = history.to_trace();
    let mut file = Vec::new();
    trace.write_snapshot(&mut file).unwrap();
    let found = read(&file[..], &ReadLimits::default()).unwrap();
    // Streams are numbered in the order of the file, which is grouped by device.
    let raw = |trace: &vramp_trace::Trace| -> Vec<(Event, u64)> {
        let events = trace.events.iter();
        events
            .map(|&event| {
                let raw = trace.raw_stream(event.stream).unwrap();
                (Event { stream: Default::default(), ..event }, raw)
            })
            .collect()
    };
    assert_eq!(raw(&found), raw(&trace));
    assert_eq!(found.stacks, trace.stacks);
    let devices: Vec<u16> = trace.events.iter().map(|event| event.device).collect();
    assert_eq!(devices, [[0; 10], [1; 10]].concat());
    assert!(trace.infer_segments() > 0);
    trace.write_vtrace(&mut file).unwrap();
}
