//! Devices, calibrations and tiers as a user runs them.

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use assert_cmd::Command;
use serde_json::Value;
use tempfile::TempDir;
use vramp::{Bytes, DeviceAddr};
use vramp_trace::EventKind::{self, Alloc, FreeCompleted, FreeRequested, SegmentAlloc};
use vramp_trace::{Block, BlockState, Event, ReadLimits, Segment, StreamIndex, Trace, read_trace};

// --- Recordings of several devices, as a user analyses them ---

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
    #[cfg(feature = "pictures")]
    one_device_is_drawn(&folder, &path, page);
}

#[cfg(feature = "pictures")]
fn one_device_is_drawn(folder: &TempDir, path: &str, page: &str) {
    let picture = folder.path().join("one.svg");
    let drawn = ["report", path, "-o", page, "--svg", picture.to_str().unwrap()];
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

// --- `vramp calibrate`, and the cards that its files describe ---

fn in_root(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vramp"));
    command.current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")).args(args);
    command
}

fn printed(args: &[&str]) -> String {
    let assert = in_root(args).assert().success();
    String::from_utf8(assert.get_output().stdout.clone()).unwrap()
}

fn stderr(args: &[&str]) -> String {
    let assert = in_root(args).assert().code(1);
    let error = String::from_utf8(assert.get_output().stderr.clone()).unwrap();
    assert_eq!(error.lines().count(), 1, "{error}");
    error
}

const TRACE: &str = "examples/traces/llama_varlen_oom.pickle.gz";

/// Returns driver time and peak of vramp on a device.
fn replayed(device: &[&str]) -> (f64, u64) {
    let args = [&["replay", TRACE, "--allocator", "vramp", "--json"], device].concat();
    let outcome: Value = serde_json::from_str(&printed(&args)).unwrap();
    (outcome["driver_ms"].as_f64().unwrap(), outcome["peak_reserved_bytes"].as_u64().unwrap())
}

#[test]
fn a_measured_card_is_simulated_with_its_own_costs_and_memory() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("card.toml");
    let file = path.to_str().unwrap();
    let said = printed(&["calibrate", "-o", file, "--device", "sim:l40s", "--seconds", "1"]);
    for part in ["NVIDIA L40S", "not measured, as on the H200: rates.host_numa_kernel", "--device"]
    {
        assert!(said.contains(part), "{said}");
    }
    let shown = printed(&["info", "--device", file]);
    assert!(shown.contains("sim:l40s") && shown.contains("43.99 GiB free of 44.99 GiB"), "{shown}");
    // The same decisions and costs as the card that was measured.
    let (ms, peak) = replayed(&["--device", "sim:l40s"]);
    let (again_ms, again) = replayed(&["--device", file]);
    assert_eq!(peak, again);
    assert!((again_ms / ms - 1.0).abs() < 0.02, "{again_ms} ms, {ms} ms");
    // The costs alone, on another card; standard output is the file.
    let other = printed(&["info", "--device", "sim:t4", "--costs", file]);
    assert!(other.contains("sim:t4") && other.contains("vramp calibrate"), "{other}");
    let auto = printed(&["info", "--costs", file]);
    assert!(auto.contains("sim:l40s"), "{auto}");
    let text = printed(&["calibrate", "--device", file]);
    assert!(text.contains("[sized.create]"), "{text}");
}

#[test]
fn a_bad_cost_file_is_an_error_that_names_file_and_key() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("card.toml");
    let file = path.to_str().unwrap();
    let good = printed(&["calibrate", "--device", "sim"]);
    for (from, to, words) in [
        ("record = ", "record = -", ["fixed.record = -0.19", "use a number"]),
        ("memory_mib = ", "# ", ["describes no card", "memory_mib"]),
        ("[rates]", "[fates]", ["fates", "card.toml"]),
    ] {
        assert!(good.contains(from), "{good}");
        std::fs::write(&path, good.replacen(&format!("\n{from}"), &format!("\n{to}"), 1)).unwrap();
        let error = stderr(&["info", "--device", file]);
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
    }
    let error = stderr(&["info", "--device", "nowhere.toml"]);
    assert!(error.contains("cannot read the cost file 'nowhere.toml'"), "{error}");
    let error = stderr(&["info", "--device", "cuda", "--costs", file]);
    assert!(error.contains("fates"), "{error}");
    std::fs::write(&path, good).unwrap();
    let error = stderr(&["info", "--device", "cuda", "--costs", file]);
    assert!(error.contains("simulated card only"), "{error}");
}

#[test]
fn names_of_cards_are_forgiving_and_errors_helpful() {
    for name in ["sim:RTX 4090", "sim:4090", "sim:nvidia_geforce_rtx_4090"] {
        assert!(printed(&["info", "--device", name]).contains("sim:rtx4090"), "{name}");
    }
    let error = stderr(&["info", "--device", "sim:A100"]);
    assert!(error.contains("a100-40g, a100-80g"), "{error}");
    let error = stderr(&["info", "--device", "sim:h10"]);
    assert!(error.contains("did you mean 'h100'?") && error.contains("known cards"), "{error}");
}

#[test]
fn tables_of_driver_times_say_that_costs_follow_the_host() {
    let args = ["bench", "grow", "--device", "sim", "--seconds", "0.1", "--total", "64MiB"];
    assert!(printed(&args).contains("for every allocator alike"));
}

// --- `vramp tiers` as a user runs it: on this machine, and on one made of files ---

fn tiers(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vramp"));
    command.arg("tiers").args(args).env_remove("CUDA_VISIBLE_DEVICES");
    command
}

fn output(command: &mut Command) -> String {
    let assert = command.assert().success();
    String::from_utf8(assert.get_output().stdout.clone()).unwrap()
}

fn json(command: &mut Command) -> Value {
    serde_json::from_str(&output(command.arg("--json"))).unwrap()
}

fn fails(command: &mut Command, words: &[&str]) {
    let assert = command.assert().failure();
    let error = String::from_utf8(assert.get_output().stderr.clone()).unwrap();
    for word in words {
        assert!(error.contains(word), "'{word}' is not in: {error}");
    }
    assert!(!error.contains("panicked"), "{error}");
}

fn file(root: &Path, path: &str, text: &str) {
    let path = root.join(path);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

/// Returns the files of a machine with two NUMA nodes and a card at each.
fn machine() -> TempDir {
    let root = TempDir::new().unwrap();
    let at = root.path();
    file(at, "sys/devices/system/node/online", "0-1");
    for node in 0..2 {
        let folder = format!("sys/devices/system/node/node{node}");
        file(at, &format!("{folder}/meminfo"), "Node 0 MemTotal: 67108864 kB\n");
        file(at, &format!("{folder}/cpulist"), &format!("{}-{}", node * 8, node * 8 + 7));
        let place = format!("devices/pci0000:{node}0/0000:{node}0:01.0/0000:{node}1:00.0");
        let address = format!("0000:{node}1:00.0");
        for (name, text) in [
            ("vendor", "0x10de"),
            ("class", "0x030200"),
            ("numa_node", &node.to_string()),
            ("max_link_speed", "32.0 GT/s PCIe"),
            ("max_link_width", "16"),
        ] {
            file(at, &format!("sys/{place}/{name}"), text);
        }
        fs::create_dir_all(at.join("sys/bus/pci/devices")).unwrap();
        let link = at.join(format!("sys/bus/pci/devices/{address}"));
        symlink(format!("../../../{place}"), link).unwrap();
        file(
            at,
            &format!("proc/driver/nvidia/gpus/{address}/information"),
            &format!("Model: \t NVIDIA H200\nGPU UUID: \t GPU-{node}abc\n"),
        );
    }
    root
}

#[test]
fn a_machine_without_a_card_shows_the_simulated_one_beside_its_own_memory() {
    let table = output(&mut tiers(&["--device", "sim"]));
    for words in ["The card is simulated.", "NVIDIA H200 (simulated)", "gpu0", "host0", "trigger"] {
        assert!(table.contains(words), "'{words}' is not in:\n{table}");
    }
    assert!(table.is_ascii(), "{table}");
    let outcome = json(&mut tiers(&["--device", "sim:a100-80g"]));
    assert_eq!(outcome["simulated"], true);
    let gpu = &outcome["spaces"][0];
    assert_eq!(gpu["space"], "gpu0");
    assert!(gpu["stop_bytes"].as_u64().unwrap() < gpu["trigger_bytes"].as_u64().unwrap());
    assert_eq!(outcome["links"][0]["from"], "gpu0");
}

#[test]
fn the_written_configuration_is_read_back_to_the_same_spaces() {
    let folder = TempDir::new().unwrap();
    let spill = folder.path().join("spill");
    fs::create_dir(&spill).unwrap();
    let spill = spill.to_str().unwrap();
    let written = output(&mut tiers(&["--device", "sim", "--directory", spill, "--write-config"]));
    assert!(written.contains("[[disk]]") && written.contains("blocks_per_pool = 128"), "{written}");
    let path = folder.path().join("tiers.toml");
    fs::write(&path, &written).unwrap();
    let path = path.to_str().unwrap();
    let again = output(&mut tiers(&["--device", "sim", "--config", path, "--write-config"]));
    assert_eq!(again, written);
    let spaces = json(&mut tiers(&["--device", "sim", "--config", path]))["spaces"].clone();
    assert_eq!(spaces.as_array().unwrap().len(), written.matches("[[").count());
}

#[test]
fn an_error_in_a_configuration_names_the_file_and_the_key() {
    let folder = TempDir::new().unwrap();
    file(folder.path(), "bad.toml", "[[gpu]]\nindex = 0\ncapacity = \"8GiB\"\ntrigger = 0.95\n");
    let bad = folder.path().join("bad.toml");
    let bad = bad.to_str().unwrap();
    let words = ["bad.toml", "[[gpu]] with index 0", "above the limit"];
    fails(&mut tiers(&["--device", "sim", "--config", bad]), &words);
    fails(&mut tiers(&["--device", "sim", "--config", "/no/such.toml"]), &["/no/such.toml"]);
    fails(&mut tiers(&["--device", "sim", "--directory", "/no/such"]), &["name one that exists"]);
    fails(&mut tiers(&["--device", "cuda:x"]), &["cuda:N"]);
    fails(&mut tiers(&["--sysroot", folder.path().to_str().unwrap()]), &["mount sysfs"]);
}

#[test]
fn cards_hidden_by_cuda_visible_devices_are_shown_as_hidden_and_bad_entries_are_reported() {
    let machine = machine();
    let root = machine.path().to_str().unwrap();
    let args = ["--device", "sim", "--sysroot", root];
    let visible = |variable: Option<&str>| {
        let mut command = tiers(&args);
        if let Some(variable) = variable {
            command.env("CUDA_VISIBLE_DEVICES", variable);
        }
        let outcome = json(&mut command);
        let cards = outcome["cards"].as_array().unwrap().clone();
        let names: Vec<Value> = cards.iter().map(|card| card["visible_as"].clone()).collect();
        (names, outcome["notes"].to_string())
    };
    assert_eq!(visible(None).0, ["cuda:0", "cuda:1"]);
    assert_eq!(visible(Some("1,0")).0, ["cuda:1", "cuda:0"]);
    assert_eq!(visible(Some("GPU-1")).0, [Value::Null, "cuda:0".into()]);
    assert_eq!(visible(Some("")).0, [Value::Null, Value::Null]);
    let (names, notes) = visible(Some("1,7"));
    assert_eq!(names, [Value::Null, "cuda:0".into()]);
    assert!(notes.contains("'7' in CUDA_VISIBLE_DEVICES"), "{notes}");
}

#[test]
fn nodes_cards_and_the_paths_between_them_are_tables() {
    let machine = machine();
    let root = machine.path().to_str().unwrap();
    let table = output(&mut tiers(&["--device", "sim", "--sysroot", root]));
    for words in ["PCIe 5 x16", "card1", "0000:11:00.0", "SYS", "64.00 GiB", "8-15", "GPU-1abc"] {
        assert!(table.contains(words), "'{words}' is not in:\n{table}");
    }
    // A simulated card has no place, so both nodes have a space.
    let outcome = json(&mut tiers(&["--device", "sim", "--sysroot", root]));
    let names: Vec<&Value> =
        outcome["spaces"].as_array().unwrap().iter().map(|space| &space["space"]).collect();
    assert_eq!(names, ["gpu0", "host0", "host1"]);
}

#[test]
fn links_are_measured_on_request() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_str().unwrap();
    let outcome = json(&mut tiers(&["--device", "sim", "--directory", path, "--measure"]));
    for link in outcome["links"].as_array().unwrap() {
        if link["from"] == "gpu0" && link["to"] != "host0" {
            continue; // a second node has no host pool for the only card
        }
        for way in ["there_bytes_per_s", "back_bytes_per_s"] {
            assert!(link[way].as_u64().is_some_and(|rate| rate > 1_000_000), "{way} of {link}");
        }
    }
    assert_eq!(outcome["notes"].as_array().unwrap().len(), 0, "{}", outcome["notes"]);
    let unmeasured = json(&mut tiers(&["--device", "sim"]));
    assert!(unmeasured["links"][0]["there_bytes_per_s"].is_null());
}
