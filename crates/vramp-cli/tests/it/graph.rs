//! `vramp graph` as a user runs it: on the examples, and on synthetic recordings.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use assert_cmd::Command;
use serde_json::Value;
use vramp::{Bytes, DeviceAddr};
use vramp_trace::EventKind::{self, Alloc, FreeCompleted, FreeRequested, SegmentAlloc};
use vramp_trace::{Event, StreamIndex, Trace};

const GNN: &str = "examples/traces/gnn.pickle.gz";
const OOM: &str = "examples/traces/llama_varlen_oom.pickle.gz";
const RESNET: &str = "examples/traces/resnet_multires_stacks.pickle.gz";

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn graph(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vramp"));
    command.current_dir(root()).arg("graph").args(args);
    command
}

fn stdout(args: &[&str]) -> String {
    let assert = graph(args).assert().success();
    String::from_utf8(assert.get_output().stdout.clone()).unwrap()
}

fn lines(args: &[&str]) -> Vec<Value> {
    let printed = stdout(&[args, &["--json"]].concat());
    printed.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn refused(args: &[&str], code: i32, words: &[&str]) {
    let assert = graph(args).assert().code(code);
    let error = String::from_utf8(assert.get_output().stderr.clone()).unwrap();
    for word in words {
        assert!(error.contains(word), "'{word}' is not in: {error}");
    }
    assert!(!error.contains("panicked"), "{error}");
}

fn event(kind: EventKind, device: u16, stream: u32, address: u64, mib: u64) -> Event {
    Event {
        kind,
        device,
        stream: StreamIndex(stream),
        address: DeviceAddr::new(address << 20),
        size: Bytes::mib(mib),
        time_us: 0,
        stack: None,
    }
}

/// A recording in a file of its own.
fn recorded(folder: &Path, name: &str, devices: u32, events: Vec<Event>) -> String {
    let trace = Trace {
        name: name.to_owned(),
        device_count: devices,
        streams: vec![0, 1],
        events,
        ..Trace::default()
    };
    let path = folder.join(format!("{name}.vtrace"));
    trace.write_vtrace(File::create(&path).unwrap()).unwrap();
    path.to_str().unwrap().to_owned()
}

fn free(device: u16, stream: u32, address: u64, mib: u64) -> [Event; 2] {
    [FreeRequested, FreeCompleted].map(|kind| event(kind, device, stream, address, mib))
}

fn mib(row: &Value, key: &str) -> u64 {
    let bytes = row[key].as_u64().unwrap_or_else(|| panic!("{key} is {}", row[key]));
    assert_eq!(bytes % (1 << 20), 0, "{key}: {row}");
    bytes >> 20
}

#[test]
fn no_layout_is_below_the_bound_or_above_monotone() {
    let rows = lines(&[GNN, OOM, RESNET]);
    let names: Vec<_> = rows.iter().map(|row| row["trace"].as_str().unwrap()).collect();
    assert_eq!(names, ["gnn", "llama_varlen_oom", "resnet_multires_stacks"]);
    for row in &rows {
        let bytes = |key: &str| row[key].as_u64().unwrap();
        let bound = bytes("lower_bound_bytes");
        assert!(bound <= bytes("planned_bytes"), "{row}");
        assert!(bytes("planned_bytes") <= bytes("reusing_bytes"), "{row}");
        assert!(bytes("reusing_bytes") <= bytes("monotone_bytes"), "{row}");
        assert!(bytes("second_bytes") <= bytes("monotone_bytes"), "{row}");
        let ratio = row["planned_over_bound"].as_f64().unwrap();
        assert!((ratio - bytes("planned_bytes") as f64 / bound as f64).abs() < 1e-9, "{row}");
        assert!(bytes("escaped") < bytes("blocks"), "{row}");
        // Also where two streams share no memory.
        assert!(ratio <= 1.02, "{row}");
        assert_eq!(
            (&row["second_followed"], &row["second_bytes"]),
            (&true.into(), &row["planned_bytes"])
        );
    }
}

#[test]
fn the_same_recording_gives_the_same_numbers_in_every_format() {
    let folder = tempfile::tempdir().unwrap();
    let converted = folder.path().join("gnn.vtrace");
    let converted = converted.to_str().unwrap();
    let mut convert = Command::new(env!("CARGO_BIN_EXE_vramp"));
    convert.current_dir(root()).args(["convert", GNN, converted]).assert().success();
    let numbers = |path: &str| {
        let mut row = lines(&[path, "--window", "2000..5000"]).remove(0);
        row.as_object_mut().unwrap().remove("pack_ms");
        row
    };
    let first = numbers(GNN);
    assert_eq!((&first["first_event"], &first["end_event"]), (&2000.into(), &5000.into()));
    assert_eq!(first, numbers(GNN));
    assert_eq!(first, numbers(converted));
}

#[test]
fn a_capture_is_laid_out_in_each_way_and_compared_with_the_recorded_pool() {
    let folder = tempfile::tempdir().unwrap();
    let mut events = vec![event(SegmentAlloc, 0, 0, 100, 20), event(Alloc, 0, 0, 100, 12)];
    events.extend(free(0, 0, 100, 12));
    events.push(event(Alloc, 0, 0, 104, 16));
    let path = recorded(folder.path(), "synthetic", 1, events);
    let row = lines(&[&path]).remove(0);
    assert_eq!(
        (&row["blocks"], &row["escaped"], &row["streams"]),
        (&2.into(), &1.into(), &1.into())
    );
    assert_eq!((mib(&row, "lower_bound_bytes"), mib(&row, "planned_bytes")), (16, 16));
    assert_eq!((mib(&row, "reusing_bytes"), mib(&row, "monotone_bytes")), (16, 28));
    assert_eq!((mib(&row, "recorded_bytes"), &row["recorded_over_bound"]), (20, &1.25.into()));

    let table = stdout(&[&path]);
    for words in
        ["synthetic: 2 blocks on 1 stream, 1 of them outlive the capture. Lower bound (peak allocated) 16.00 MiB."]
            .into_iter()
            .chain(["recorded", "20.00 MiB", "1.250", "monotone", "1.750", "second capture"])
    {
        assert!(table.contains(words), "'{words}' is not in:\n{table}");
    }
    assert!(table.is_ascii() && table.lines().all(|line| line == line.trim_end()), "{table}");
}

#[test]
fn blocks_from_before_a_window_are_left_out() {
    let folder = tempfile::tempdir().unwrap();
    let mut events = vec![event(Alloc, 0, 0, 100, 512), event(Alloc, 0, 0, 1000, 8)];
    events.extend(free(0, 0, 100, 512));
    events.push(event(Alloc, 0, 0, 2000, 4));
    events.extend(free(0, 0, 1000, 8));
    let path = recorded(folder.path(), "long", 1, events);
    let row = lines(&[&path, "--window", "1..99"]).remove(0);
    assert_eq!((&row["blocks"], &row["older_blocks_freed"]), (&2.into(), &1.into()));
    assert_eq!((mib(&row, "lower_bound_bytes"), &row["end_event"]), (12, &7.into()));
    // The segment was reserved before the window, so nothing was recorded for it.
    assert_eq!(row["recorded_bytes"], Value::Null);
    assert!(stdout(&[&path, "--window", "1..99"]).contains("long, events 1..7: 2 blocks"));
    refused(&[&path, "--window", "5..7"], 1, &["allocates nothing in the window 5..7", "7 events"]);
    refused(&[&path, "--window", "70..80"], 1, &["70..80", "numbered from 0"]);
}

#[test]
fn streams_share_no_memory_and_each_device_is_a_capture() {
    let folder = tempfile::tempdir().unwrap();
    let mut events = vec![event(Alloc, 0, 0, 100, 8)];
    events.extend(free(0, 0, 100, 8));
    events.push(event(Alloc, 0, 1, 100, 8));
    events.push(event(Alloc, 1, 0, 100, 8));
    // Another stream uses it: the free is not complete when the recording ends.
    events.push(event(FreeRequested, 1, 0, 100, 8));
    events.push(event(Alloc, 1, 0, 200, 8));
    let path = recorded(folder.path(), "two", 2, events);
    let rows = lines(&[&path]);
    assert_eq!(rows.len(), 2);
    for (device, row) in rows.iter().enumerate() {
        assert_eq!((&row["trace_device"], &row["streams"]), (&device.into(), &2.into()), "{row}");
        assert_eq!((mib(row, "lower_bound_bytes"), mib(row, "planned_bytes")), (8, 16), "{row}");
    }
    assert!(stdout(&[&path]).contains("two, device 1: 2 blocks on 2 streams"));
}

#[test]
fn a_capture_of_empty_blocks_has_a_bound_all_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let path = recorded(folder.path(), "empty", 1, vec![event(Alloc, 0, 0, 100, 0)]);
    let row = lines(&[&path]).remove(0);
    assert_eq!((&row["lower_bound_bytes"], &row["planned_over_bound"]), (&256.into(), &1.0.into()));
}

#[test]
fn wrong_input_is_reported_with_a_hint() {
    let folder = tempfile::tempdir().unwrap();
    let noise = folder.path().join("noise.pickle");
    fs::write(&noise, b"not a trace at all").unwrap();
    let noise = noise.to_str().unwrap().to_owned();
    let idle = recorded(folder.path(), "idle", 1, vec![event(SegmentAlloc, 0, 0, 1, 2)]);
    let nothing = recorded(folder.path(), "nothing", 0, Vec::new());
    let huge = |n: u64| Event { size: Bytes::tib(1 << 15), ..event(Alloc, 0, 0, n, 0) };
    let huge = recorded(folder.path(), "huge", 1, (1..=3).map(huge).collect());
    for (args, words) in [
        (vec!["no/such.pickle"], vec!["no/such.pickle", "No such file"]),
        (vec!["examples/traces"], vec!["is a folder"]),
        (vec![&noise], vec!["noise.pickle", "a text file without the header"]),
        (vec![&idle], vec!["allocates nothing", "before the capture begins"]),
        (vec![&nothing], vec!["allocates nothing"]),
        (vec![&huge], vec!["'huge' allocates more than", "--window"]),
    ] {
        refused(&args, 1, &words);
    }
    for window in ["", "5", "5..5", "9..5", "a..b", "-1..5", "1...5"] {
        refused(&[GNN, &format!("--window={window}")], 2, &["A..B", "first one below the second"]);
    }
    refused(&[], 2, &["TRACE"]);
    refused(&[GNN, "--device", "sim"], 2, &["--device"]);
}

// --- Upper bounds of the memory of captures recorded of real models ---

/// Returns the output of `vramp graph --json` for each recorded capture.
fn rows() -> Vec<Value> {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
    let files = fs::read_dir(root.join("bench/captures")).unwrap();
    let mut files: Vec<PathBuf> = files.map(|file| file.unwrap().path()).collect();
    files.retain(|file| file.extension().is_some_and(|extension| extension == "gz"));
    files.sort_unstable();
    let mut command = Command::new(env!("CARGO_BIN_EXE_vramp"));
    let assert = command.arg("graph").args(&files).arg("--json").assert().success();
    let printed = String::from_utf8(assert.get_output().stdout.clone()).unwrap();
    let rows: Vec<Value> =
        printed.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(rows.len(), files.len());
    rows
}

#[test]
fn recorded_captures_need_hardly_more_than_is_live_at_once() {
    let rows = rows();
    assert_eq!(rows.len(), 6);
    for row in &rows {
        let bytes = |key: &str| row[key].as_u64().unwrap();
        let keys = ["lower_bound_bytes", "conflict_bound_bytes", "planned_bytes"];
        let higher = ["reusing_bytes", "monotone_bytes"];
        let ascending: Vec<u64> = keys.into_iter().chain(higher).map(bytes).collect();
        assert!(ascending.is_sorted(), "{row}");
        assert_eq!(bytes("second_bytes"), bytes("planned_bytes"), "{row}");
        assert_eq!(row["second_followed"], true, "{row}");
        let within = |key: &str, per_mille: u64, bound: &str| {
            assert!(bytes(key) * 1000 <= bytes(bound) * per_mille, "{key} of {bound}: {row}");
        };
        // Whatever the streams: no layout could be lower in the order that is known.
        within("planned_bytes", 1002, "conflict_bound_bytes");
        if row["streams"] == 1 {
            assert_eq!(bytes("conflict_bound_bytes"), bytes("lower_bound_bytes"), "{row}");
            within("reusing_bytes", 1150, "lower_bound_bytes");
        }
    }
}
