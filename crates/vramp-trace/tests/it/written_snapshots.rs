//! Writing snapshots: they read back equal, and PyTorch's viewers accept them.
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use vramp_core::{Bytes, DeviceAddr};
use vramp_trace::{
    Block, BlockState, Event, EventKind, ReadLimits, Segment, StreamIndex, Trace, read, read_trace,
};

const BASE: u64 = 0x7f2e_4000_0000;
const MIB: u64 = 1 << 20;

fn data(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(path)
}

fn load(path: &str) -> Trace {
    read_trace(data(path), &ReadLimits::default()).unwrap()
}

const EXAMPLES: [&str; 3] = [
    "examples/gnn.pickle.gz",
    "examples/llama_varlen_oom.pickle.gz",
    "examples/resnet_multires_stacks.pickle.gz",
];

fn snapshot(trace: &Trace) -> Vec<u8> {
    let mut file = Vec::new();
    trace.write_snapshot(&mut file).unwrap();
    file
}

/// Writes a snapshot and reads it back. A snapshot stores no name, so it is set again.
fn again(trace: &Trace) -> Trace {
    let found = read(&snapshot(trace)[..], &ReadLimits::default()).unwrap();
    Trace { name: trace.name.clone(), ..found }
}

fn rmm_log() -> Trace {
    let log = "Thread,Time,Action,Pointer,Size,Stream
1,16:06:30.678500,allocate,0x7f2e40000000,1000,0x0
1,16:06:30.678600,allocate,0x7f2e40000400,4096,0x0
1,16:06:30.678700,free,0x7f2e40000000,1000,0x0
1,16:06:30.678800,allocate,0x7f3e40000000,4194304,0x5
1,16:06:30.678900,allocate failure,0x0,1099511627776,0x0";
    read(log.as_bytes(), &ReadLimits::default()).unwrap()
}

#[test]
fn a_snapshot_comes_back_as_it_was() {
    for path in EXAMPLES {
        let trace = load(path);
        assert_eq!(again(&trace), trace, "{path}");
    }
    let excerpt = load("excerpt.pickle");
    assert_eq!(again(&excerpt), excerpt);
    let log = rmm_log();
    assert_eq!(again(&log), log);
}

#[test]
fn what_a_snapshot_cannot_leave_open_is_filled_in() {
    let mut trace = load("protocol4.pickle");
    let found = again(&trace);
    // A block of unknown request gets its size, and a segment without blocks an inactive one.
    trace.segments[0].blocks[3].requested_size = Some(Bytes::mib(8));
    let (address, size) = (trace.segments[1].address, trace.segments[1].total_size);
    let requested_size = Some(Bytes::ZERO);
    let state = BlockState::Inactive;
    trace.segments[1].blocks.push(Block { address, size, requested_size, state, stack: None });
    assert_eq!(found, trace);
}

#[test]
fn settings_come_back_as_their_texts() {
    let texts = [
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64"),
        ("empty", ""),
        ("nested.1", "0"),
        ("nested.2", "-1"),
        ("nested.deeper.still", "x"),
        ("flag", "False"),
        ("half", "0.5"),
        ("not.nested", "1"),
        ("not", "007"),
        ("huge", "99999999999999999999"),
        ("long", &"x".repeat(300)),
    ];
    let own = |(name, value): (&str, &str)| (name.to_owned(), value.to_owned());
    let trace =
        Trace { allocator_settings: texts.map(own).to_vec(), device_count: 1, ..Trace::default() };
    assert_eq!(again(&trace).allocator_settings, trace.allocator_settings);
}

#[test]
fn the_largest_numbers_come_back() {
    let event = Event {
        kind: EventKind::Alloc,
        device: 0,
        stream: StreamIndex(0),
        address: DeviceAddr::new(u64::MAX),
        size: Bytes::new(1 << 56),
        time_us: u64::MAX,
        stack: None,
    };
    let trace = Trace {
        device_count: 1,
        streams: vec![u64::MAX],
        events: vec![event, Event { kind: EventKind::Oom, ..event }],
        ..Trace::default()
    };
    assert_eq!(again(&trace), trace);
}

/// Runs the project's checker, which is in Python like PyTorch's viewers.
#[test]
fn python_and_the_viewer_understand_what_we_write() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new("python3");
    command.arg(data("check-snapshot.py")).arg("--story");
    let traces = EXAMPLES.map(load).into_iter().chain([rmm_log(), grown_in_place()]);
    for (index, mut trace) in traces.enumerate() {
        trace.infer_segments();
        let path = folder.path().join(format!("{index}.pickle"));
        std::fs::write(&path, snapshot(&trace)).unwrap();
        command.arg(path);
    }
    let output = command.output().expect("this test needs python3 on the PATH");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    assert_eq!(String::from_utf8_lossy(&output.stdout).matches("passed").count(), 5, "{errors}");
}

#[test]
fn a_trace_that_points_outside_itself_is_refused_before_a_byte_is_written() {
    let mut trace = load(EXAMPLES[1]);
    trace.streams.clear();
    let mut file = Vec::new();
    let error = trace.write_snapshot(&mut file).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    assert!(error.to_string().contains("event 0 cannot be written"), "{error}");
    assert!(trace.write_perfetto(&mut file).is_err());
    assert_eq!(file, b"");
}

fn segment(address: u64, size: u64, blocks: &[(u64, u64)]) -> Segment {
    let block = |&(address, size): &(u64, u64)| Block {
        address: DeviceAddr::new(address),
        size: Bytes::new(size),
        requested_size: None,
        state: BlockState::Active,
        stack: None,
    };
    Segment {
        device: 0,
        stream: StreamIndex(0),
        address: DeviceAddr::new(address),
        total_size: Bytes::new(size),
        segment_type: "large".to_owned(),
        is_expandable: false,
        stack: None,
        blocks: blocks.iter().map(block).collect(),
    }
}

#[test]
fn blocks_that_do_not_fit_their_segment_are_refused() {
    for wrong in [
        segment(BASE, 100, &[(BASE, 60), (BASE + 50, 50)]),
        segment(BASE, 100, &[(BASE + 50, 50), (BASE, 50)]),
        segment(BASE, 100, &[(BASE, 101)]),
        segment(BASE, 100, &[(BASE - 1, 10)]),
        segment(u64::MAX, 100, &[]),
        segment(BASE, 100, &[(u64::MAX, 100)]),
    ] {
        let trace =
            Trace { device_count: 1, streams: vec![0], segments: vec![wrong], ..Trace::default() };
        let error = trace.write_snapshot(io::sink()).unwrap_err();
        assert!(error.to_string().contains("segment 0 cannot be written"), "{error}");
    }
}

// --- segments from events ---

/// Address, size and blocks in use of a segment.
type Gist = (u64, u64, Vec<(u64, u64, BlockState)>);

fn gist(trace: &Trace) -> Vec<Gist> {
    let mut found: Vec<Gist> = trace.segments.iter().map(gist_of).collect();
    found.sort_by_key(|segment| segment.0);
    found
}

fn gist_of(segment: &Segment) -> Gist {
    let used = segment.blocks.iter().filter(|block| block.state != BlockState::Inactive);
    let block = |block: &Block| (block.address.number(), block.size.count(), block.state);
    (segment.address.number(), segment.total_size.count(), used.map(block).collect())
}

#[test]
fn events_show_the_very_segments_that_pytorch_recorded() {
    for path in &EXAMPLES[1..] {
        let recorded = load(path);
        let mut trace = recorded.clone();
        trace.segments.clear();
        assert_eq!(trace.infer_segments(), recorded.segments.len(), "{path}");
        let (found, expected) = (gist(&trace), gist(&recorded));
        for (found, expected) in found.iter().zip(&expected) {
            assert_eq!((found.0, found.1), (expected.0, expected.1), "{path}");
            let places = |gist: &Gist| -> Vec<(u64, BlockState)> {
                gist.2.iter().map(|&(at, _, state)| (at, state)).collect()
            };
            assert_eq!(places(found), places(expected), "{path}");
        }
        assert_eq!(trace.infer_segments(), 0, "no segments are inferred twice");
    }
}

fn inferred(events: &[(EventKind, u64, u64)]) -> Trace {
    let event = |&(kind, address, size): &(EventKind, u64, u64)| Event {
        kind,
        device: 0,
        stream: StreamIndex(0),
        address: DeviceAddr::new(address),
        size: Bytes::new(size),
        time_us: 0,
        stack: None,
    };
    let mut trace = Trace {
        device_count: 1,
        streams: vec![0],
        events: events.iter().map(event).collect(),
        ..Trace::default()
    };
    trace.infer_segments();
    trace.write_snapshot(io::sink()).expect("what is inferred fits together");
    trace
}

/// An expandable segment that is mapped and unmapped in steps while blocks come and go.
fn grown_in_place() -> Trace {
    use EventKind::{Alloc, FreeCompleted, FreeRequested, SegmentMap, SegmentUnmap};
    inferred(&[
        (SegmentMap, BASE, 2 * MIB),
        (SegmentMap, BASE + 2 * MIB, 2 * MIB),
        (Alloc, BASE, 3 * MIB),
        (FreeRequested, BASE, 3 * MIB),
        (FreeCompleted, BASE, 3 * MIB),
        (SegmentUnmap, BASE, 4 * MIB),
        (SegmentMap, BASE + 2 * MIB, 4 * MIB),
        (Alloc, BASE + 2 * MIB, MIB),
        (SegmentUnmap, BASE + 4 * MIB, 2 * MIB),
        (FreeRequested, BASE + 2 * MIB, MIB),
    ])
}

#[test]
fn mapped_stretches_grow_together_and_unmapping_cuts_them() {
    use EventKind::{Alloc, SegmentMap, SegmentUnmap};
    let trace = inferred(&[
        (SegmentMap, BASE, 2 * MIB),
        (SegmentMap, BASE + 4 * MIB, 2 * MIB),
        (SegmentMap, BASE + 2 * MIB, 2 * MIB),
        (Alloc, BASE + 100, 10),
        (SegmentMap, BASE + 6 * MIB, 6 * MIB),
        (SegmentUnmap, BASE + 8 * MIB, 2 * MIB),
    ]);
    let block = (BASE + 100, 512, BlockState::Active);
    assert_eq!(gist(&trace), [(BASE, 8 * MIB, vec![block]), (BASE + 10 * MIB, 2 * MIB, vec![])]);
    assert!(trace.segments.iter().all(|segment| segment.is_expandable));
}

#[test]
fn blocks_alone_show_segments_with_their_neighbours() {
    use EventKind::{Alloc, FreeCompleted, FreeRequested};
    let trace = inferred(&[
        (Alloc, BASE, 1000),
        (Alloc, BASE + MIB, 1000),
        (Alloc, BASE + 64 * MIB, 0),
        // Older than the recording, and still pending.
        (FreeRequested, BASE + 128 * MIB, 512),
        (FreeRequested, BASE, 1000),
        (FreeCompleted, BASE, 1000),
    ]);
    assert_eq!(
        gist(&trace),
        [
            (BASE, MIB + 1024, vec![(BASE + MIB, 1024, BlockState::Active)]),
            (BASE + 64 * MIB, 512, vec![]),
            (BASE + 128 * MIB, 512, vec![(BASE + 128 * MIB, 512, BlockState::PendingFree)]),
        ]
    );
}

#[test]
fn a_segment_freed_under_its_blocks_is_gone() {
    use EventKind::{Alloc, FreeCompleted, SegmentAlloc, SegmentFree};
    let trace = inferred(&[
        (SegmentAlloc, BASE, 2 * MIB),
        (Alloc, BASE, 512),
        (SegmentFree, BASE, 2 * MIB),
        // Older than the recording. Its segment is released as well.
        (FreeCompleted, BASE + 64 * MIB, 512),
        (SegmentFree, BASE + 64 * MIB, 2 * MIB),
        (SegmentAlloc, BASE + 32 * MIB, 20 * MIB),
    ]);
    assert_eq!(gist(&trace), [(BASE + 32 * MIB, 20 * MIB, vec![])]);
}

// --- cost ---

#[test]
fn writing_streams_whatever_the_number_of_events() {
    let mut events = Vec::new();
    for number in 0..100_000u64 {
        events.push((EventKind::Alloc, BASE + number % 512 * MIB, number));
        events.push((EventKind::FreeCompleted, BASE + number % 512 * MIB, number));
    }
    let trace = inferred(&events);
    let used = allocation_counter::measure(|| trace.write_snapshot(io::sink()).unwrap());
    assert!(used.bytes_max < 64 << 10, "{used:?}");
}
