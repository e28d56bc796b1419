//! Snapshots that PyTorch wrote, what its versions write besides, and snapshots written for its viewers.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use vramp_core::{Bytes, DeviceAddr};
use vramp_trace::{
    Annotation, Block, BlockState, Coverage, Event, EventKind, Label, PoolId, ReadLimits, Request,
    Segment, Stage, StreamIndex, Trace, Workload, read, read_trace,
};

// --- Reading snapshots that PyTorch wrote ---

const BASE: u64 = 0x7f2e_4000_0000;
const GIB: u64 = 1 << 30;
const STREAM: u64 = 0x5581_2340;

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

fn example(name: &str) -> PathBuf {
    data("examples").join(name)
}

fn made() -> Trace {
    read_trace(data("protocol4.pickle"), &ReadLimits::default()).expect("the fixture is there")
}

#[test]
fn every_protocol_and_pickler_gives_the_same_trace() {
    let expected = made();
    for name in ["protocol2", "protocol3", "protocol5", "optimized", "pure_python"] {
        let mut trace =
            read_trace(data(&format!("{name}.pickle")), &ReadLimits::default()).unwrap();
        assert_eq!(trace.name, name);
        trace.name = "protocol4".to_owned();
        assert_eq!(trace, expected, "{name}");
    }
}

#[test]
fn compression_is_seen_in_the_contents_and_not_in_the_name() {
    let plain = std::fs::read(data("protocol4.pickle")).unwrap();
    let expected = read(&plain[..], &ReadLimits::default()).unwrap();

    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(&plain).unwrap();
    let zstd = zstd::bulk::compress(&plain, 1).unwrap();
    for compressed in [gzip.finish().unwrap(), zstd] {
        assert_eq!(read(&compressed[..], &ReadLimits::default()).unwrap(), expected);
    }
}

#[test]
fn events_keep_what_was_recorded() {
    let trace = made();
    assert_eq!(trace.device_count, 3, "a device without events counts too");
    assert_eq!(trace.streams, [0, STREAM]);
    assert_eq!(trace.actions, ["defragment"]);

    let names: Vec<&str> = trace.events.iter().map(|event| trace.action_name(event.kind)).collect();
    assert_eq!(
        names,
        [
            "free_requested",
            "free_completed",
            "segment_alloc",
            "alloc",
            "alloc",
            "free_requested",
            "free_completed",
            "user_defined",
            "oom",
            "defragment",
            "snapshot",
            "segment_map",
            "alloc",
            "segment_unmap",
            "segment_free",
        ]
    );
    let devices: Vec<u16> = trace.events.iter().map(|event| event.device).collect();
    assert_eq!(devices, [[0; 11].as_slice(), &[1; 4]].concat());

    let second_alloc = trace.events[4];
    assert_eq!(second_alloc.address, DeviceAddr::new(BASE + GIB + (5 << 20)));
    assert_eq!(second_alloc.size, Bytes::mib(3));
    assert_eq!(second_alloc.time_us, 1_700_000_000_000_004);
    assert_eq!(trace.raw_stream(second_alloc.stream), Some(STREAM));

    let oom = trace.events[8];
    assert_eq!(oom.kind, EventKind::Oom);
    assert_eq!(oom.size, Bytes::tib(1));
    assert_eq!(oom.device_free(), Some(Bytes::mib(123)));
    assert_eq!(second_alloc.device_free(), None);
}

#[test]
fn shared_stacks_are_kept_once() {
    let trace = made();
    assert_eq!(trace.stacks.len(), 2);
    let lines = |event: usize| -> Vec<(String, String, u32)> {
        let stack = trace.events[event].stack.unwrap();
        let frames = trace.stacks.frames(stack);
        frames.map(|frame| (frame.name.into(), frame.filename.into(), frame.line)).collect()
    };
    let main = ("main".to_owned(), "train.py".to_owned(), 10);
    assert_eq!(lines(0), [("forward".to_owned(), "model.py".to_owned(), 20), main.clone()]);
    assert_eq!(lines(4), [("backward".to_owned(), "model.py".to_owned(), 30), main]);
    assert_eq!(trace.events[0].stack, trace.events[1].stack);
    assert_eq!(trace.events[10].stack, None, "an empty list of frames is no stack");
}

#[test]
fn settings_and_segments_keep_what_was_recorded() {
    let trace = made();
    let settings: Vec<(&str, &str)> =
        trace.allocator_settings.iter().map(|(name, value)| (&name[..], &value[..])).collect();
    assert_eq!(
        settings,
        [
            ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64"),
            ("max_split_size", "-1"),
            ("garbage_collection_threshold", "0.5"),
            ("expandable_segments", "False"),
            ("roundup_power2_divisions.1", "0"),
            ("roundup_power2_divisions.2", "4"),
        ]
    );
    let [first, second] = &trace.segments[..] else { panic!("{:?}", trace.segments) };
    assert_eq!((first.device, first.total_size), (0, Bytes::mib(20)));
    assert_eq!(first.segment_type, "large");
    let states: Vec<BlockState> = first.blocks.iter().map(|block| block.state).collect();
    assert_eq!(
        states,
        [BlockState::Inactive, BlockState::Active, BlockState::Active, BlockState::PendingFree]
    );
    assert_eq!(first.blocks[2].requested_size, Some(Bytes::new((4 << 20) - 100)));
    assert_eq!(first.blocks[3].requested_size, None);
    assert_eq!(first.blocks[1].stack, trace.events[4].stack);
    assert!(second.is_expandable);
    assert_eq!(second.stack, trace.events[0].stack);
    assert_eq!(trace.raw_stream(second.stream), Some(STREAM));
}

#[test]
fn a_history_that_begins_in_the_middle_starts_with_the_blocks_it_must_have_had() {
    let workload = Workload::from_trace(&made(), 0);
    let (small, large) = (Bytes::new(512), Bytes::new((4 << 20) - 100));
    let alloc = |block, size, stream| Request::Alloc { block, size, stream };
    assert_eq!(
        workload.requests,
        [
            alloc(0, small, 0),
            alloc(1, large, 0),
            alloc(2, Bytes::mib(8), 0),
            Request::Free { block: 2 },
            Request::Free { block: 0 },
            Request::FreeCompleted { block: 0 },
            alloc(3, Bytes::mib(5), 0),
            alloc(4, Bytes::mib(3), 1),
            Request::Free { block: 3 },
            Request::FreeCompleted { block: 3 },
            Request::Oom { size: Bytes::tib(1), device_free: Some(Bytes::mib(123)), stream: 0 },
        ]
    );
    assert_eq!(workload.streams, [0, STREAM]);
    assert_eq!(workload.blocks, 5);
    // Block 2 was freed before the first event, and block 0 by it.
    assert_eq!(workload.peak_live, large + Bytes::mib(8));
    assert_eq!(workload.peak_live_request, 7);
    assert_eq!(workload.event_of(3), None);
    assert_eq!(workload.event_of(4), Some(0));
    assert_eq!(workload.event_of(10), Some(8));
    assert_eq!(workload.repairs.blocks_known_from_free, 1);
    assert_eq!(workload.repairs.blocks_known_from_segments, 2);
}

#[test]
fn a_request_for_nothing_is_kept() {
    let workload = Workload::from_trace(&made(), 1);
    assert_eq!(workload.requests, [Request::Alloc { block: 0, size: Bytes::ZERO, stream: 0 }]);
    assert_eq!(Workload::from_trace(&made(), 2).requests, []);
    assert_eq!(Workload::from_trace(&made(), 99).requests, []);
}

#[test]
fn the_example_traces_need_no_repair() {
    // Events, blocks and peak, computed with Python's pickle and a naive sum.
    for (name, events, blocks, peak, streams) in [
        ("gnn", 14_142, 4_710, 16_522_160_092, 1),
        ("llama_varlen_oom", 1_510, 456, 16_071_045_524, 1),
        ("resnet_multires_stacks", 14_337, 4_735, 11_643_517_784, 2),
    ] {
        let path = example(&format!("{name}.pickle.gz"));
        let trace = read_trace(path, &ReadLimits::default()).unwrap();
        let workload = Workload::from_trace(&trace, 0);
        assert_eq!(trace.name, name);
        assert_eq!(trace.events.len(), events, "{name}");
        assert_eq!(workload.blocks, blocks, "{name}");
        assert_eq!(workload.streams.len(), streams, "{name}");
        assert_eq!(workload.peak_live.count(), peak, "{name}");
        assert_eq!(workload.coverage(), Coverage::Whole, "{name}");
        assert!(workload.repairs.is_empty(), "{name}: {:?}", workload.repairs);
    }
}

#[test]
fn a_trace_comes_back_from_a_vtrace_as_it_was() {
    for path in [
        data("protocol4.pickle"),
        data("excerpt.pickle"),
        example("gnn.pickle.gz"),
        example("llama_varlen_oom.pickle.gz"),
        example("resnet_multires_stacks.pickle.gz"),
    ] {
        let trace = read_trace(&path, &ReadLimits::default()).unwrap();
        let mut file = Vec::new();
        trace.write_vtrace(&mut file).unwrap();
        let size = std::fs::metadata(&path).unwrap().len();
        assert!((file.len() as u64) < size, "{}: {} bytes", path.display(), file.len());
        assert_eq!(read(&file[..], &ReadLimits::default()).unwrap(), trace);
    }
}

#[test]
fn a_vtrace_of_version_one_is_read_without_stacks_of_segments() {
    // A device, a stream, and a segment of 3 bytes at address 5; all other lists are empty.
    let contents = [0, 1, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 5, 3, 0, 1, 0, 0];
    let mut file = b"\x89VTRACE\n\x01\0\0\0".to_vec();
    file.extend((contents.len() as u64).to_le_bytes());
    file.extend(crc32fast::hash(&contents).to_le_bytes());
    file.extend(zstd::bulk::compress(&contents, 1).unwrap());
    let trace = read(&file[..], &ReadLimits::default()).unwrap();
    let [segment] = &trace.segments[..] else { panic!("{:?}", trace.segments) };
    assert_eq!((segment.address, segment.total_size), (DeviceAddr::new(5), Bytes::new(3)));
    assert!(segment.is_expandable && segment.stack.is_none() && segment.blocks.is_empty());
}

// --- Writing snapshots: they read back equal, and PyTorch's viewers accept them ---

const MIB: u64 = 1 << 20;

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

// --- What newer and older versions of PyTorch write besides: labels, annotations, histories of blocks ---

fn labelled(name: &str) -> Trace {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name);
    read_trace(path, &ReadLimits::default()).unwrap()
}

#[test]
fn labels_of_events_segments_and_blocks_are_read() {
    let labels = labelled("labelled.pickle").labels;
    let expected = [
        Label::default(),
        Label { metadata: "layer 1", ..Label::default() },
        Label { pool: PoolId(0, 7), compile_context: "0/1", ..Label::default() },
        Label { category: "activation", ..Label::default() },
        Label { metadata: "layer 1", ..Label::default() },
        Label::default(),
    ];
    let found: Vec<Label<'_>> = (0..6).map(|event| labels.of_event(event)).collect();
    assert_eq!(found, expected);
    assert_eq!(labels.of_segment(0), Label { pool: PoolId(3, -1), ..Label::default() });
    assert_eq!(labels.of_block(0, 0), Label { category: "parameter", ..Label::default() });
    assert_eq!(labels.of_block(0, 1), Label::default());
    assert_eq!(labels.of_event(usize::MAX), Label::default());
}

#[test]
fn annotations_are_read() {
    let step = |stage, time_us| Annotation { stage, name: "step".into(), device: Some(0), time_us };
    let mark = Stage::Other("MARK".into());
    assert_eq!(
        labelled("labelled.pickle").annotations,
        [
            step(Stage::Start, 5),
            step(Stage::Start, 15),
            step(Stage::End, 35),
            Annotation { stage: mark, name: "load".into(), device: None, time_us: 45 },
        ]
    );
    assert_eq!(labelled("protocol4.pickle").annotations, [step(Stage::Start, 1)]);
    assert_eq!(labelled("protocol4.pickle").labels.of_event(7).metadata, "step 1");
}

#[test]
fn both_formats_keep_labels_and_annotations() {
    let trace = labelled("labelled.pickle");
    let mut file = Vec::new();
    trace.write_vtrace(&mut file).unwrap();
    assert_eq!(read(&file[..], &ReadLimits::default()).unwrap(), trace);
    file.clear();
    trace.write_snapshot(&mut file).unwrap();
    let found = read(&file[..], &ReadLimits::default()).unwrap();
    assert_eq!(Trace { name: trace.name.clone(), ..found }, trace);
}

#[test]
fn labels_stay_with_their_events_when_devices_are_out_of_order() {
    let mut trace = labelled("labelled.pickle");
    let labels = |trace: &Trace| -> Vec<(u64, String)> {
        let events = trace.events.iter().enumerate();
        let label = |index| trace.labels.of_event(index).metadata.to_owned();
        let mut found: Vec<(u64, String)> =
            events.map(|(index, event)| (event.address.number(), label(index))).collect();
        found.sort();
        found
    };
    trace.device_count = 2;
    trace.events[0].device = 1;
    trace.events[2].device = 1;
    let mut file = Vec::new();
    trace.write_snapshot(&mut file).unwrap();
    let found = read(&file[..], &ReadLimits::default()).unwrap();
    assert!(found.events.is_sorted_by_key(|event| event.device));
    assert_eq!(labels(&found), labels(&trace));
}

#[test]
fn a_label_of_an_event_that_is_not_there_is_refused() {
    let mut trace = labelled("labelled.pickle");
    trace.events.truncate(2);
    let error = trace.write_vtrace(std::io::sink()).unwrap_err();
    assert!(error.to_string().contains("labels of events"), "{error}");
}

#[test]
fn blocks_of_torch_2_0_have_the_stack_and_size_of_their_last_request() {
    let trace = labelled("torch_2_0.pickle");
    let [segment] = &trace.segments[..] else { panic!("{:?}", trace.segments) };
    let [first, second, third] = &segment.blocks[..] else { panic!("{:?}", segment.blocks) };
    assert_eq!(first.requested_size, Some(Bytes::new(1000)));
    let frames: Vec<&str> =
        trace.stacks.frames(first.stack.unwrap()).map(|frame| frame.name).collect();
    assert_eq!(frames, ["forward"]);
    assert_eq!((second.state, second.stack), (BlockState::PendingFree, None));
    assert_eq!(second.requested_size, Some(Bytes::new(7)));
    assert_eq!((third.requested_size, third.state), (None, BlockState::Inactive));
    assert_eq!(third.address, DeviceAddr::new(0x7f2e_4000_0000 + 1536));
}
