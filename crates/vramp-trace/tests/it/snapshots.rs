//! Reading snapshots that PyTorch wrote.

use std::io::Write;
use std::path::{Path, PathBuf};

use vramp_core::{Bytes, DeviceAddr};
use vramp_trace::{
    BlockState, Coverage, EventKind, ReadLimits, Request, Trace, Workload, read, read_trace,
};

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
