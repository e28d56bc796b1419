//! Recordings of several devices, as a user analyses them.
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use assert_cmd::Command;
use serde_json::Value;
use vramp::{Bytes, DeviceAddr};
use vramp_trace::EventKind::{Alloc, FreeCompleted, FreeRequested, SegmentAlloc};
use vramp_trace::{
    Block, BlockState, Event, EventKind, ReadLimits, Segment, StreamIndex, Trace, read_trace,
};

const MIB: u64 = 1 << 20;

fn vramp(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vramp"));
    command.args(args);
    command
}

fn stdout(args: &[&str]) -> String {
    let assert = vramp(args).assert().success();
    String::from_utf8(assert.get_output().stdout.clone()).unwrap()
}

fn lines(args: &[&str]) -> Vec<Value> {
    let printed = stdout(&[args, &["--json"]].concat());
    printed.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn refused(args: &[&str], code: i32, words: &[&str]) {
    let assert = vramp(args).assert().code(code);
    let error = String::from_utf8(assert.get_output().stderr.clone()).unwrap();
    for word in words {
        assert!(error.contains(word), "'{word}' is not in: {error}");
    }
    assert!(!error.contains("panicked"), "{error}");
}

fn event(kind: EventKind, device: u16, address: u64, mib: u64) -> Event {
    Event {
        kind,
        device,
        stream: StreamIndex(0),
        address: DeviceAddr::new(address << 20),
        size: Bytes::mib(mib),
        time_us: 0,
        stack: None,
    }
}

/// Device `number` reserves 100 MiB, and 10 MiB more for each number; it allocates and frees blocks that
/// peak at 32 MiB and 8 MiB more for each number. The addresses are the same on every device.
fn job(number: u16) -> Vec<Event> {
    let more = u64::from(number);
    vec![
        event(SegmentAlloc, number, 1000, 100 + 10 * more),
        event(Alloc, number, 1000, 20 + 8 * more),
        event(Alloc, number, 1064, 12),
        event(FreeRequested, number, 1000, 20 + 8 * more),
        event(FreeCompleted, number, 1000, 20 + 8 * more),
        event(Alloc, number, 1000, 5),
    ]
}

fn recorded(events: Vec<Event>, device_count: u32) -> Trace {
    Trace { name: "job".to_owned(), device_count, streams: vec![0], events, ..Trace::default() }
}

/// A snapshot of PyTorch with a job on each of these devices.
fn snapshot(folder: &Path, name: &str, devices: &[u16], device_count: u32) -> String {
    let events = devices.iter().flat_map(|&device| job(device)).collect();
    save(folder, name, &recorded(events, device_count))
}

fn save(folder: &Path, name: &str, trace: &Trace) -> String {
    let path = folder.join(format!("{name}.pickle"));
    trace.write_snapshot(File::create(&path).unwrap()).unwrap();
    path.to_str().unwrap().to_owned()
}

fn numbers(rows: &[Value]) -> Vec<u64> {
    rows.iter().map(|row| row["trace_device"].as_u64().unwrap()).collect()
}

const TWO: [&str; 4] = ["--device", "sim", "--allocator", "vramp,torch"];

#[test]
fn every_device_is_replayed_as_if_it_were_alone() {
    let folder = tempfile::tempdir().unwrap();
    for devices in [&[0u16, 1][..], &[0, 1, 2, 3, 4, 5, 6, 7], &[1, 5]] {
        // PyTorch writes a list of events for every device that it sees.
        let path = snapshot(folder.path(), "all", devices, 8);
        let rows = lines(&[&["replay", &path], &TWO[..]].concat());
        assert_eq!(rows.len(), 2 * devices.len());
        for (pair, &device) in rows.chunks(2).zip(devices) {
            let alone = recorded(job(device), u32::from(device) + 1);
            let alone = save(folder.path(), "alone", &alone);
            let expected = lines(&[&["replay", &alone], &TWO[..]].concat());
            for (row, expected) in pair.iter().zip(&expected) {
                assert_eq!(row["trace_device"], device);
                for key in ["allocator", "events", "requests", "peak_live_bytes"] {
                    assert_eq!(row[key], expected[key], "{key} of device {device}");
                }
                assert_eq!(row["decisions_sha256"], expected["decisions_sha256"]);
                assert_eq!(row["peak_reserved_bytes"], expected["peak_reserved_bytes"]);
                assert_eq!(
                    row["calls"].as_object().unwrap().len(),
                    expected["calls"].as_object().unwrap().len()
                );
            }
        }
    }
}

#[test]
fn the_table_has_each_device_and_the_sums() {
    let folder = tempfile::tempdir().unwrap();
    let path = snapshot(folder.path(), "eight", &[0, 1, 2, 3, 4, 5, 6, 7], 8);
    let text = stdout(&[&["replay", &path], &TWO[..]].concat());
    for device in 0..8 {
        let headline = format!("eight, device {device}: 6 events on 1 stream");
        assert!(text.contains(&headline), "'{headline}' is not in:\n{text}");
    }
    let (live, recorded): (u64, u64) = (0..8)
        .map(|more| (32 + 8 * more, 100 + 10 * more))
        .fold((0, 0), |a, b| (a.0 + b.0, a.1 + b.1));
    let headline = format!(
        "eight, sum of 8 devices (0, 1, 2, 3, 4, 5, 6, 7): 48 events, sum of peaks allocated {}.",
        Bytes::mib(live)
    );
    let (_, sums) =
        text.split_once(&headline).unwrap_or_else(|| panic!("{headline} is not in:\n{text}"));
    assert!(sums.contains("sum of peaks reserved"), "{sums}");
    assert!(sums.contains("a sum of peaks may be more"), "{sums}");
    let row = |name: &str| {
        let row = sums.lines().find(|line| line.trim_start_matches(['*', ' ']).starts_with(name));
        row.unwrap_or_else(|| panic!("no row of {name} in {sums}")).to_owned()
    };
    assert!(row("recorded").contains(&Bytes::mib(recorded).to_string()), "{sums}");
    let rows = lines(&[&["replay", &path], &TWO[..]].concat());
    for name in ["vramp", "torch"] {
        let own = rows.iter().filter(|row| row["allocator"] == name);
        let sum = |key: &str| own.clone().map(|row| row[key].as_u64().unwrap()).sum::<u64>();
        assert!(row(name).contains(&Bytes::new(sum("peak_reserved_bytes")).to_string()), "{sums}");
        assert!(row(name).contains(&sum("driver_calls").to_string()), "{sums}");
    }
}

#[test]
fn a_device_that_runs_out_of_memory_is_named_in_the_sums() {
    let folder = tempfile::tempdir().unwrap();
    let path = snapshot(folder.path(), "two", &[0, 5], 8);
    let args = [&["replay", &path, "--limit", "60MiB"], &TWO[..]].concat();
    let text = stdout(&args);
    let (_, sums) = text.split_once("sum of 2 devices (0, 5)").unwrap();
    assert!(sums.contains("out of memory on device"), "{sums}");
    let row = sums.lines().find(|line| line.trim_start().starts_with("vramp")).unwrap();
    assert!(row.trim_end().ends_with(" 5") && row.contains(" - "), "{sums}");
    vramp(&[&args[..], &["--fail-on-oom"]].concat()).assert().code(3);
}

#[test]
fn one_device_is_printed_without_number_and_sums() {
    let folder = tempfile::tempdir().unwrap();
    let path = snapshot(folder.path(), "one", &[0], 8);
    for command in ["replay", "explain"] {
        let text = stdout(&[command, &path]);
        assert!(text.starts_with("one: ") || text.contains("\none: "), "{text}");
        assert!(!text.contains("sum of") && !text.contains("device 0"), "{text}");
    }
}

#[test]
fn devices_are_selected_by_number_with_every_command() {
    let folder = tempfile::tempdir().unwrap();
    let path = snapshot(folder.path(), "gaps", &[1, 4, 6], 8);
    let select = |args: &[&str]| numbers(&lines(args));
    let replay = ["replay", &path, "--device", "sim", "--allocator", "vramp"];
    assert_eq!(select(&replay), [1, 4, 6]);
    assert_eq!(select(&[&replay[..], &["--trace-device", "4"]].concat()), [4]);
    assert_eq!(select(&[&replay[..], &["--trace-device", "6,1"]].concat()), [1, 6]);
    assert_eq!(
        select(&[&replay[..], &["--trace-device", "6", "--trace-device", "4"]].concat()),
        [4, 6]
    );
    for command in
        [&["explain", &path][..], &["advise", &path, "--limit", "1GiB"], &["graph", &path]]
    {
        assert_eq!(select(command), [1, 4, 6], "{command:?}");
        assert_eq!(select(&[command, &["--trace-device", "4,6"]].concat()), [4, 6], "{command:?}");
    }
    let differences = lines(&["diff", &path, &path, "--trace-device", "1,6"]);
    let compared = differences.iter().map(|row| &row["after"]["trace_device"]);
    assert!(compared.eq(&[1, 6].map(Value::from)));
}

#[test]
fn a_device_that_was_not_recorded_is_refused_and_the_others_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = snapshot(folder.path(), "gaps", &[1, 4], 8);
    let out = folder.path().join("out.vtrace");
    let out = out.to_str().unwrap();
    let words = ["gaps.pickle", "--trace-device 2", "it has devices 1, 4"];
    for command in [
        &["replay", &path][..],
        &["explain", &path],
        &["advise", &path, "--limit", "1GiB"],
        &["graph", &path],
        &["diff", &path, &path],
        &["report", &path, "-o", out],
        &["convert", &path, out],
    ] {
        refused(&[command, &["--trace-device", "2"]].concat(), 2, &words);
        refused(&[command, &["--trace-device", "1,2"]].concat(), 2, &words);
        refused(&[command, &["--trace-device", "-1"]].concat(), 2, &["--trace-device"]);
        refused(&[command, &["--trace-device", "70000"]].concat(), 2, &["--trace-device"]);
    }
    assert!(!Path::new(out).exists());
}

#[test]
fn explanations_end_with_a_row_for_each_device_and_the_sum() {
    let folder = tempfile::tempdir().unwrap();
    let path = snapshot(folder.path(), "two", &[0, 3], 8);
    let text = stdout(&["explain", &path]);
    for words in ["two, device 0: 6 events", "two, device 3: 6 events", "two: 2 devices"] {
        assert!(text.contains(words), "'{words}' is not in:\n{text}");
    }
    let (_, overview) = text.split_once("two: 2 devices").unwrap();
    let row = |name: &str| {
        let row =
            overview.lines().find(|line| line.trim_start_matches(['*', ' ']).starts_with(name));
        row.unwrap_or_else(|| panic!("no row {name} in {overview}")).to_owned()
    };
    assert!(row("device 3").contains("56.00 MiB"), "{overview}");
    for words in ["12", "88.00 MiB", "230.00 MiB"] {
        assert!(row("sum").contains(words), "{overview}");
    }
    assert!(overview.contains("Devices may reach their peaks at different times"), "{overview}");
    // An event that only some devices have.
    let events = [job(0), job(3), vec![event(Alloc, 3, 2000, 1)]].concat();
    let path = save(folder.path(), "longer", &recorded(events, 8));
    let found = lines(&["explain", &path, "--at", "6"]);
    assert!(found[0]["at"].is_null() && found[1]["at"].is_object());
    refused(&["explain", &path, "--at", "7"], 2, &["a number from 0 to 6"]);
}

#[test]
fn advice_for_the_process_is_what_fits_on_every_device() {
    let folder = tempfile::tempdir().unwrap();
    let path = snapshot(folder.path(), "two", &[0, 7], 8);
    let text = stdout(&["advise", &path, "--limit", "60MiB,1GiB"]);
    for words in ["two, device 0: needs 32.00 MiB", "two, device 7: needs 88.00 MiB"] {
        assert!(text.contains(words), "'{words}' is not in:\n{text}");
    }
    let (_, common) = text.split_once("two: settings for all 2 devices").unwrap();
    assert!(
        common.contains("60.00 MiB on each device: nothing that was tried fits on all"),
        "{common}"
    );
    assert!(common.contains("1.00 GiB on each device: fits with"), "{common}");
    assert!(common.contains("sum of peaks reserved"), "{common}");
}

#[test]
fn runs_are_compared_device_by_device_and_in_sum() {
    let folder = tempfile::tempdir().unwrap();
    let before = snapshot(folder.path(), "before", &[0, 1, 2], 8);
    let after = save(
        folder.path(),
        "after",
        &recorded([job(0), job(1), vec![event(Alloc, 1, 2000, 50)], job(5)].concat(), 8),
    );
    let assert = vramp(&["diff", &before, &after]).assert().success();
    let output = assert.get_output();
    let text = String::from_utf8_lossy(&output.stdout);
    for words in ["after, device 0", "after, device 1", "after, sum of 2 devices"] {
        assert!(text.contains(words), "'{words}' is not in:\n{text}");
    }
    let row = text.lines().find(|line| line.contains("sum of peaks allocated")).unwrap();
    assert!(row.contains("72.00 MiB"), "{text}");
    let notices = String::from_utf8_lossy(&output.stderr);
    for (device, path) in [(2, &before), (5, &after)] {
        let notice = format!("Not compared: device {device} is in '{path}' alone");
        assert!(notices.contains(&notice), "'{notice}' is not in:\n{notices}");
    }
    let found = lines(&["diff", &before, &after]);
    assert!(found.iter().map(|row| &row["before"]["trace_device"]).eq(&[0, 1].map(Value::from)));
}

#[test]
fn a_device_without_history_is_left_out_of_the_sums() {
    let folder = tempfile::tempdir().unwrap();
    let mut trace = recorded([job(0), job(2)].concat(), 4);
    let block = Block {
        address: DeviceAddr::new(1 << 30),
        size: Bytes::mib(2),
        requested_size: None,
        state: BlockState::Active,
        stack: None,
    };
    trace.segments.push(Segment {
        device: 3,
        stream: StreamIndex(0),
        address: DeviceAddr::new(1 << 30),
        total_size: Bytes::mib(20),
        segment_type: "large".to_owned(),
        is_expandable: false,
        stack: None,
        blocks: vec![block],
    });
    let path = save(folder.path(), "held", &trace);
    let text = stdout(&[&["replay", &path], &TWO[..]].concat());
    assert!(text.contains("held, device 3: 0 events"), "{text}");
    assert!(text.contains("sum of 2 devices (0, 2)"), "{text}");
    assert!(text.contains("Not in the sums: 1 device without a recorded history."), "{text}");
    let text = stdout(&["explain", &path]);
    let row = text.lines().find(|line| line.contains("sum of the 2 with a history"));
    assert!(row.is_some_and(|row| row.contains("80.00 MiB")), "{text}");
    let text = stdout(&["diff", &path, &path]);
    assert!(text.contains("held, device 3") && text.contains("sum of 2 devices"), "{text}");
    let assert = vramp(&["advise", &path, "--limit", "1GiB"]).assert().success();
    let notices = String::from_utf8_lossy(&assert.get_output().stderr).into_owned();
    assert!(notices.contains("device 3: The recording has no history"), "{notices}");
    refused(&["advise", &path, "--limit", "1GiB", "--trace-device", "3"], 1, &["no history"]);
}

#[test]
fn a_device_whose_events_refer_to_nothing_live_is_repaired_alone() {
    let folder = tempfile::tempdir().unwrap();
    let lost = vec![event(FreeRequested, 4, 1000, 3), event(FreeCompleted, 4, 1064, 2)];
    let path = save(folder.path(), "lost", &recorded([job(0), lost].concat(), 8));
    let rows = lines(&["replay", &path, "--device", "sim", "--allocator", "vramp"]);
    assert_eq!(numbers(&rows), [0, 4]);
    let repairs = |row: &Value| row["repairs"]["blocks_known_from_free"].as_u64().unwrap_or(0);
    assert_eq!((repairs(&rows[0]), repairs(&rows[1])), (0, 2));
    assert_eq!(rows[0]["peak_live_bytes"], 32 * MIB);
}

#[test]
fn a_page_has_a_part_for_each_device_and_a_picture_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = snapshot(folder.path(), "two", &[0, 1], 8);
    let page = folder.path().join("page.html");
    let page = page.to_str().unwrap();
    let said = stdout(&["report", &path, "-o", page]);
    assert!(said.contains("two, device 0: ") && said.contains("two, device 1: "), "{said}");
    assert!(said.contains("of 2 recorded devices"), "{said}");
    assert!(fs::read_to_string(page).unwrap().contains("two, device 1"));
    let picture = folder.path().join("one.svg");
    let drawn = ["report", &path, "-o", page, "--svg", picture.to_str().unwrap()];
    refused(&drawn, 1, &["have 2; choose one with --trace-device"]);
    stdout(&[&drawn[..], &["--trace-device", "1"]].concat());
    assert!(fs::read_to_string(&picture).unwrap().contains("<svg"));
}

#[test]
fn a_conversion_keeps_every_device_or_the_selected_ones() {
    let folder = tempfile::tempdir().unwrap();
    let path = snapshot(folder.path(), "gaps", &[1, 4, 6], 8);
    let out = |name: &str| folder.path().join(name);
    let read = |path: &PathBuf| read_trace(path, &ReadLimits::default()).unwrap();
    let all = out("all.vtrace");
    let said = stdout(&["convert", &path, all.to_str().unwrap()]);
    assert!(said.contains("18 events, 3 of 8 devices, 1 stream"), "{said}");
    assert_eq!(read(&all).events, read(&PathBuf::from(&path)).events);
    let some = out("some.pickle");
    let said = stdout(&["convert", &path, some.to_str().unwrap(), "--trace-device", "4"]);
    assert!(said.contains("6 events, 1 of 8 devices, 1 stream, 1 segment inferred"), "{said}");
    let found = read(&some);
    assert_eq!((found.devices(), found.device_count), (vec![4], 8));
    assert_eq!(found.events, job(4));
}

#[test]
fn a_window_counts_the_events_of_each_device() {
    let folder = tempfile::tempdir().unwrap();
    let path = snapshot(folder.path(), "two", &[0, 1], 2);
    let rows = lines(&["graph", &path, "--window", "1..3"]);
    assert_eq!(numbers(&rows), [0, 1]);
    for row in &rows {
        assert_eq!((&row["blocks"], &row["first_event"]), (&2.into(), &1.into()));
    }
    let text = stdout(&["graph", &path, "--window", "1..3"]);
    assert!(
        text.contains("two, device 0, events 1..3") && text.contains("two, device 1"),
        "{text}"
    );
    refused(&["graph", &path, "--window", "6..9"], 1, &["6 events", "numbered from 0"]);
}
