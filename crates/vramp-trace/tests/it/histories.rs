//! The history ring: order, counts, and no heap allocation once it is full.
use proptest::prelude::*;
use vramp_core::{Bytes, DeviceAddr};
use vramp_trace::{
    ActionId, Event, EventKind, Frame, History, HistorySize, ReadLimits, Record, StackId, read,
};

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
