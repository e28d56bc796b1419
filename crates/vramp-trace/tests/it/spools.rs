//! Files of recorded processes: round trips, files that end anywhere, damaged files, and their traces.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::time::Instant;

use vramp_core::Bytes;
use vramp_trace::spool::{
    Api, Change, End, Event, FRAMES_MAX, FrameText, HEADER_BYTES, Module, Record, Recording,
    SpoolError, TEXT_MAX, encode, header, read,
};
use vramp_trace::{EventKind, ReadLimits, Trace, Workload};

const ADDRESS: u64 = 0x7f00_0000_0000;

fn event(change: Change, api: Api, address: u64, size: u64) -> Event {
    Event { change, api, device: 0, stack: None, ns: 1_000, address, size, stream: 0 }
}

fn alloc(address: u64, size: u64) -> Event {
    event(Change::Alloc, Api::MemAlloc, address, size)
}

fn free(address: u64) -> Event {
    event(Change::Free, Api::MemFree, address, 0)
}

fn file<'a>(records: impl IntoIterator<Item = Record<'a>>) -> Vec<u8> {
    let mut bytes = header(4711).to_vec();
    records.into_iter().for_each(|record| encode(&record, &mut bytes));
    bytes
}

fn events(events: impl IntoIterator<Item = Event>) -> Vec<u8> {
    file(events.into_iter().map(Record::Event))
}

fn unnamed(bytes: &[u8]) -> Trace {
    Recording::read(bytes).unwrap().to_trace(|pc, module| vec![FrameText::unknown(pc, module)])
}

fn random_text(random: &mut fastrand::Rng) -> Vec<u8> {
    let length = random.usize(..40);
    std::iter::repeat_with(|| random.u8(..)).take(length).collect()
}

fn random_record<'a>(random: &mut fastrand::Rng, text: &'a [u8]) -> Record<'a> {
    match random.u32(..6) {
        0 => Record::Program { start_us: random.u64(..), start_ns: random.u64(..), command: text },
        1 => Record::Device { device: random.u32(..), total: random.u64(..), name: text },
        2 => Record::Module {
            id: random.u32(..),
            bias: random.u64(..),
            start: random.u64(..),
            end: random.u64(..),
            path: text,
        },
        3 => {
            let frames = random.usize(..=FRAMES_MAX);
            let pcs = std::iter::repeat_with(|| random.u64(..)).take(frames).collect();
            Record::Stack { id: random.u32(..), pcs: Cow::Owned(pcs) }
        }
        4 => Record::Event(Event {
            change: [Change::Alloc, Change::Free, Change::OutOfMemory, Change::Map, Change::Unmap]
                [random.usize(..5)],
            api: Api::ALL[random.usize(..Api::ALL.len())],
            device: random.u16(..),
            stack: random.bool().then(|| random.u32(..u32::MAX)),
            ns: random.u64(..),
            address: random.u64(..),
            size: random.u64(..=1 << 56),
            stream: random.u64(..),
        }),
        _ => Record::Calls { count: random.u64(..), name: text },
    }
}

/// Random texts, and records that hold them.
fn random_texts(seed: u64, count: usize) -> (Vec<Vec<u8>>, fastrand::Rng) {
    let mut random = fastrand::Rng::with_seed(seed);
    let texts = std::iter::repeat_with(|| random_text(&mut random)).take(count).collect();
    (texts, random)
}

#[test]
fn records_come_back_as_they_were_written() {
    for seed in vramp_testing::seeds(20) {
        let (texts, mut random) = random_texts(seed, 200);
        let records: Vec<_> = texts.iter().map(|text| random_record(&mut random, text)).collect();
        let bytes = file(records.iter().cloned());
        assert!(bytes.len().is_multiple_of(8));
        let mut found = read(&bytes).unwrap();
        assert_eq!(found.pid(), 4711);
        assert!(found.by_ref().eq(records.iter().cloned()), "seed {seed}");
        assert_eq!((found.next(), found.end()), (None, Some(End::Complete)));

        // Zeros follow in a file that is mapped ahead.
        let ahead = [&bytes[..], &[0; 4096]].concat();
        assert_eq!(read(&ahead).unwrap().count(), records.len());
    }
}

#[test]
fn a_file_that_ends_anywhere_has_the_records_before() {
    let (texts, mut random) = random_texts(1, 12);
    let records: Vec<_> = texts.iter().map(|text| random_record(&mut random, text)).collect();
    let bytes = file(records.iter().cloned());
    let mut ends = vec![HEADER_BYTES];
    for record in &records {
        let mut one = Vec::new();
        encode(record, &mut one);
        ends.push(ends[ends.len() - 1] + one.len());
    }
    for length in 0..=bytes.len() {
        let whole = ends[1..].iter().filter(|&&end| end <= length).count();
        let mut found = read(&bytes[..length]).unwrap();
        assert!(found.by_ref().eq(records[..whole].iter().cloned()), "cut at {length}");
        let at_end = length < HEADER_BYTES || ends.contains(&length);
        let expected = if at_end { End::Complete } else { End::Cut };
        assert_eq!(found.end(), Some(expected), "cut at {length}");

        // A record whose first four bytes are not written yet, in a file that is mapped ahead.
        if length < HEADER_BYTES {
            continue;
        }
        let mut torn = bytes.clone();
        let begin = ends[whole];
        torn[length..].fill(0);
        torn.get_mut(begin..begin + 4).into_iter().for_each(|head| head.fill(0));
        let mut found = read(&torn).unwrap();
        assert_eq!(found.by_ref().count(), whole, "torn at {length}");
        assert_eq!(found.end(), Some(End::Complete));
    }
}

#[test]
fn a_damaged_file_is_read_up_to_the_damage() {
    let whole = events((0..8).map(|at| alloc(ADDRESS + at, 1)));
    let record = (whole.len() - HEADER_BYTES) / 8;
    for (at, value, what) in [
        (0, 9, "a kind that is not known"),
        (0, 0, "a length without a kind"),
        (1, 44, "a length that is no multiple of 8"),
        (1, 40, "a record that is too short"),
        (1, 56, "a record that is too long"),
        (8, 6, "a change that is not known"),
        (9, 16, "a function that is not known"),
        (39, 2, "a size beyond all addresses"),
    ] {
        let offset = HEADER_BYTES + 3 * record;
        let mut bytes = whole.clone();
        bytes[offset + at] = value;
        let found = Recording::read(&bytes).unwrap();
        assert_eq!(found.end, End::Damaged { offset: offset as u64 }, "{what}");
        assert_eq!(found.events().len(), 3, "{what}");
    }
}

#[test]
fn garbage_never_panics_and_its_trace_can_be_written() {
    for seed in vramp_testing::seeds(60) {
        let (texts, mut random) = random_texts(seed, 60);
        let records: Vec<_> = texts.iter().map(|text| random_record(&mut random, text)).collect();
        let mut bytes = file(records);
        for _ in 0..random.usize(..4) {
            let at = random.usize(HEADER_BYTES..bytes.len());
            bytes[at] = random.u8(..);
        }
        let trace = unnamed(&bytes);
        let mut written = Vec::new();
        trace.write_vtrace(&mut written).unwrap();
        assert_eq!(vramp_trace::read(&written[..], &ReadLimits::default()).unwrap(), trace);
        Workload::all(&trace);
        // As the commands do for pages and viewers.
        let mut shown = trace;
        shown.write_perfetto(std::io::sink()).unwrap();
        shown.infer_segments();
        shown.write_snapshot(std::io::sink()).unwrap();
        bytes[HEADER_BYTES..].fill_with(|| random.u8(..));
        unnamed(&bytes);
    }
}

#[test]
fn other_files_are_refused_with_what_to_do() {
    for bytes in [&b"PK\x03\x04"[..], b"V", b"VSPOOL\x01\n", &[0; 4096], b""] {
        let found = read(bytes);
        assert_eq!(found.is_err(), bytes.starts_with(b"PK"), "{bytes:?}");
        assert!(found.map_or(0, Iterator::count) == 0);
    }
    let error = read(b"VSPOOL\x02\n").unwrap_err();
    assert_eq!(error, SpoolError::Version { found: 2 });
    assert!(error.to_string().contains("of one release"), "{error}");
}

#[test]
fn texts_stacks_and_sizes_beyond_the_limits_are_cut() {
    let long = vec![b'x'; 2 * TEXT_MAX];
    let pcs: Vec<u64> = (0..100).collect();
    let whole = file([
        Record::Program { start_us: 0, start_ns: 0, command: &long },
        Record::Stack { id: 0, pcs: Cow::Borrowed(&pcs) },
        Record::Event(alloc(ADDRESS, u64::MAX)),
    ]);
    let found = read(&whole).unwrap().collect::<Vec<_>>();
    assert!(matches!(found[0], Record::Program { command, .. } if command.len() == TEXT_MAX));
    assert!(matches!(&found[1], Record::Stack { pcs: kept, .. } if **kept == pcs[..FRAMES_MAX]));
    assert!(matches!(found[2], Record::Event(Event { size, .. }) if size == 1 << 56));
}

#[test]
fn a_trace_has_what_the_program_held() {
    let map = |address, size| event(Change::Map, Api::MemMap, address, size);
    let other = |event: Event| Event { device: 1, ..event };
    let bytes = events([
        alloc(ADDRESS, 100),
        other(alloc(ADDRESS + 4096, 50)),
        map(ADDRESS + (1 << 21), 1 << 21),
        map(ADDRESS + (2 << 21), 1 << 21),
        map(ADDRESS + (3 << 21), 1 << 21),
        // The current device is another than that of the block.
        other(free(ADDRESS)),
        event(Change::Unmap, Api::MemUnmap, ADDRESS + (1 << 21), 2 << 21),
        event(Change::OutOfMemory, Api::MemAlloc, 12_345, 1 << 40),
        alloc(ADDRESS, 30),
        event(Change::Reset, Api::DevicePrimaryCtxReset, 0, 0),
    ]);
    let trace = unnamed(&bytes);
    assert_eq!((trace.device_count, trace.devices()), (2, vec![0, 1]));
    let first = Workload::from_trace(&trace, 0);
    assert!(first.repairs.is_empty(), "{}", first.repairs);
    assert_eq!(first.peak_live, Bytes::new(100 + (3 << 21)));
    assert_eq!(first.peak_demand, Bytes::new((1 << 40) + (1 << 21)));
    let kinds: Vec<_> = trace
        .events
        .iter()
        .filter(|it| it.device == 0)
        .map(|it| (it.kind, it.size.count()))
        .collect();
    let pair = |size| [(EventKind::FreeRequested, size), (EventKind::FreeCompleted, size)];
    let expected = [
        &[(EventKind::Alloc, 100)][..],
        &[(EventKind::Alloc, 1 << 21); 3],
        &pair(100),
        &pair(1 << 21),
        &pair(1 << 21),
        &[(EventKind::Oom, 1 << 40), (EventKind::Alloc, 30)],
        &pair(30),
        &pair(1 << 21),
    ];
    assert_eq!(kinds, expected.concat());
    let oom = trace.events.iter().find(|it| it.kind == EventKind::Oom).unwrap();
    assert_eq!(oom.device_free(), Some(Bytes::new(12_345)));
    // The other device keeps its block.
    assert_eq!(trace.events.iter().filter(|it| it.device == 1).count(), 1);
}

/// What a program holds, counted naively: device and size by address.
type Held = BTreeMap<u64, (u16, u64)>;

fn live(held: &Held, device: u16) -> u64 {
    held.values().filter(|(of, _)| *of == device).map(|(_, size)| size).sum()
}

#[test]
fn random_programs_hold_what_a_naive_count_says() {
    const PAGE: u64 = 2 << 20;
    for seed in vramp_testing::seeds(40) {
        let mut random = fastrand::Rng::with_seed(seed);
        let (mut held, mut mapped, mut recorded) = (Held::new(), Held::new(), Vec::new());
        let mut peaks = [0; 3];
        for step in 0..300 {
            let device = random.u16(..3);
            let on = |event: Event| Event { device, ns: 1_000 * step, ..event };
            let next = match random.u32(..10) {
                0..4 => {
                    let (address, size) = (ADDRESS + random.u64(..50) * 4096, random.u64(1..=4096));
                    if held.insert(address, (device, size)).is_some() {
                        recorded.push(on(free(address)));
                    }
                    on(alloc(address, size))
                }
                4..6 if !held.is_empty() => {
                    let address = *held.keys().nth(random.usize(..held.len())).unwrap();
                    held.remove(&address);
                    // Whichever device is current.
                    on(free(address))
                }
                6..8 => {
                    let address = 2 * ADDRESS + random.u64(..20) * PAGE;
                    if mapped.contains_key(&address) {
                        continue;
                    }
                    mapped.insert(address, (device, PAGE));
                    on(event(Change::Map, Api::MemMap, address, PAGE))
                }
                8 => {
                    let (first, pages) = (random.u64(..20), random.u64(1..5));
                    let begin = 2 * ADDRESS + first * PAGE;
                    mapped.retain(|address, _| !(begin..begin + pages * PAGE).contains(address));
                    on(event(Change::Unmap, Api::MemUnmap, begin, pages * PAGE))
                }
                _ if random.u32(..20) == 0 => {
                    held.retain(|_, (of, _)| *of != device);
                    mapped.retain(|_, (of, _)| *of != device);
                    on(event(Change::Reset, Api::DevicePrimaryCtxReset, 0, 0))
                }
                _ => continue,
            };
            recorded.push(next);
            for (device, peak) in (0..).zip(&mut peaks) {
                *peak = (*peak).max(live(&held, device) + live(&mapped, device));
            }
        }
        let trace = unnamed(&events(recorded));
        for (device, peak) in (0..).zip(peaks) {
            let workload = Workload::from_trace(&trace, device);
            assert_eq!(workload.peak_live, Bytes::new(peak), "seed {seed}, device {device}");
        }
    }
}

#[test]
fn times_count_from_the_start_of_the_program() {
    let at = |ns| Event { ns, ..alloc(ADDRESS, 1) };
    let program =
        Record::Program { start_us: 1_000_000, start_ns: 5_000_000, command: b"job\0-x\0" };
    let bytes = file([program, Record::Event(at(7_000_000)), Record::Event(at(4_000_000))]);
    let recording = Recording::read(&bytes).unwrap();
    assert_eq!((recording.pid, &recording.command[..2]), (4711, &["job".into(), "-x".into()][..]));
    let trace = recording.to_trace(|_, _| Vec::new());
    assert_eq!(trace.events.iter().map(|it| it.time_us).collect::<Vec<_>>(), [1_002_000, 999_000]);
}

fn module(id: u32, start: u64, path: &[u8]) -> Record<'_> {
    Record::Module { id, bias: start - 0x100, start, end: start + 0x1000, path }
}

#[test]
fn frames_are_looked_up_in_the_module_that_was_loaded_then() {
    let stack = |id, pcs: &[u64]| Record::Stack { id, pcs: Cow::Owned(pcs.to_vec()) };
    let with = |stack| Record::Event(Event { stack: Some(stack), ..alloc(ADDRESS, 1) });
    let bytes = file([
        module(0, 0x1000, b"/usr/lib/libvramp_preload.so"),
        module(1, 0x2000, b"/lib/old.so"),
        module(2, 0x3000, b"/bin/program"),
        // The first three frames are the recorder's own and of what it calls.
        stack(0, &[0x8888, 0x1010, 0x1020, 0x2010, 0x3010, 0x9999]),
        with(0),
        // Another file takes the place of old.so. A call at its very end returns to the program's start.
        module(3, 0x2000, b"/lib/new.so"),
        stack(1, &[0x2010, 0x4000]),
        with(1),
        with(0),
    ]);
    let mut asked = Vec::new();
    let trace = Recording::read(&bytes).unwrap().to_trace(|pc, module: Option<(&Module, u64)>| {
        asked.push(pc);
        vec![FrameText::unknown(pc, module)]
    });
    let frames = |event: usize| {
        let frames = trace.stacks.frames(trace.events[event].stack.unwrap());
        frames.map(|frame| format!("{} {}", frame.filename, frame.name)).collect::<Vec<_>>()
    };
    let old = ["libcuda.so.1 cuMemAlloc", "/lib/old.so +0x10f", "/bin/program +0x10f", " 0x9999"];
    assert_eq!(frames(0), old);
    assert_eq!(
        frames(1),
        ["libcuda.so.1 cuMemAlloc", "/lib/new.so +0x10f", "/bin/program +0x10ff"]
    );
    assert_eq!(frames(2), old);
    assert_eq!(asked, [0x2010, 0x3010, 0x9999, 0x2010, 0x4000], "each place is looked up once");
}

#[test]
fn many_events_take_linear_time() {
    let mut took = Vec::new();
    for count in [30_000, 300_000] {
        let blocks = (0..count / 2).map(|at| ADDRESS + at % 5_000 * 512);
        let bytes = events(blocks.flat_map(|address| [alloc(address, 512), free(address)]));
        let start = Instant::now();
        let trace = Recording::read(&bytes).unwrap().to_trace(|_, _| Vec::new());
        took.push(start.elapsed());
        assert_eq!(trace.events.len() as u64, count / 2 * 3);
    }
    // Ten times as many; square growth would take a hundred times as long.
    assert!(took[1] < 40 * took[0], "{took:?}");
}
