//! `vramp bench adversary` as a user runs it.

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use assert_cmd::Command;
use serde_json::Value;
use vramp::peers::Preset;
use vramp_bench::Device;
use vramp_bench::adversary::{self, Bounds};

fn adversary(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vramp"));
    command.args(["bench", "adversary", "--device", "sim:h200"]).args(args);
    command
}

fn printed(args: &[&str]) -> String {
    let assert = adversary(args).assert().success();
    String::from_utf8(assert.get_output().stdout.clone()).unwrap()
}

/// Returns the rows without what a clock measured.
fn rows(args: &[&str]) -> Vec<Value> {
    let parsed = printed(&[args, &["--json"]].concat());
    let rows = parsed.lines().map(|line| {
        let mut row: Value = serde_json::from_str(line).unwrap();
        let row_of = row.as_object_mut().unwrap();
        assert!(row_of.remove("request_host_ns").unwrap().as_f64().unwrap() >= 0.0);
        row_of.remove("best_in").unwrap();
        row
    });
    rows.collect()
}

#[test]
fn every_allocator_gets_the_same_requests_and_figures_repeat() {
    let pattern = ["ping-pong/200MiB/8x2MiB", "hand-off/foreign-free"];
    let first = rows(&pattern);
    assert_eq!(first, rows(&pattern));
    let names: Vec<&str> = first.iter().map(|row| row["allocator"].as_str().unwrap()).collect();
    let each = ["vramp", "vpmm", "stream-ordered", "torch", "torch-expandable"];
    assert_eq!(names, [each, each].concat());
    for of_pattern in first.chunks(5) {
        for row in of_pattern {
            for figure in ["pattern", "mallocs", "pairs", "peak_live_bytes"] {
                assert_eq!(row[figure], of_pattern[0][figure], "{row}");
            }
            assert_eq!((&row["bench"], &row["failed"]), (&"adversary".into(), &0.into()), "{row}");
            assert_eq!(row["driver_ns_is"], "modelled");
            let [live, reserved] = ["peak_live_bytes", "peak_reserved_bytes"]
                .map(|figure| row[figure].as_u64().unwrap());
            assert!(0 < live && live <= reserved, "{row}");
        }
    }
    let other = [&pattern[1..], &["--seed", "2", "--allocator", "vramp"]].concat();
    assert_ne!(rows(&other)[0]["peak_live_bytes"], first[5]["peak_live_bytes"]);
}

#[test]
fn patterns_are_listed_and_chosen_by_the_first_parts_of_their_names() {
    let listed = printed(&["--list"]);
    for name in ["ping-pong/200MiB/64x8KiB", "scattered/card-80GiB", "robson/64GiB/x2"] {
        assert!(listed.lines().any(|line| line.trim_start().starts_with(name)), "{listed}");
    }
    let table = printed(&["ping-pong/200MiB/1x2MiB", "--allocator", "vramp,torch"]);
    assert!(table.contains("1 pattern, seed 1. Driver time is modelled"), "{table}");
    assert!(table.is_ascii() && !table.contains("vpmm"), "{table}");

    let refused = adversary(&["ping"]).assert().failure();
    let error = String::from_utf8(refused.get_output().stderr.clone()).unwrap();
    assert!(error.contains("there is no pattern 'ping': --list prints all"), "{error}");
}

fn bounds_file() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../bench/adversary-bounds.toml")
}

/// The gate, of which a short run has some patterns: `vramp bench adversary --bounds FILE` says the same, and with `--write` writes the file.
#[test]
fn the_quick_patterns_stay_within_their_bounds() {
    let bounds = Bounds::parse(&std::fs::read_to_string(bounds_file()).unwrap()).unwrap();
    let device = Device::open("sim:h200").unwrap();
    let mut patterns = adversary::select(&[], false).unwrap();
    let sample: Vec<u64> = vramp_testing::sampled(patterns.len() as u64, 8).collect();
    let mut number = 0;
    patterns.retain(|_| {
        number += 1;
        sample.contains(&number)
    });
    let (next, exceeded) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().unwrap().get().min(8) {
            scope.spawn(|| {
                while let Some(pattern) = patterns.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let row = adversary::run(&device, pattern, Preset::Vramp, 1).unwrap();
                    exceeded.lock().unwrap().extend(bounds.exceeded(&row));
                }
            });
        }
    });
    let exceeded = exceeded.into_inner().unwrap();
    assert!(exceeded.is_empty(), "above the bounds:\n{}", exceeded.join("\n"));
    assert_eq!(bounds.unknown(&adversary::patterns()), [""; 0], "bounds of patterns that are gone");
}

#[test]
fn bounds_are_written_and_then_held() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("bounds.toml");
    let name = "cost/small-fragments/1000";
    let with = |more: &[&str]| {
        let args = [name, "--allocator", "vramp,torch", "--bounds", file.to_str().unwrap()];
        adversary(&[&args[..], more].concat()).assert()
    };
    with(&[]).failure();
    with(&["--write"]).success();
    with(&[]).success();
    let text = std::fs::read_to_string(&file).unwrap();
    let all = std::fs::read_to_string(bounds_file()).unwrap();
    let line = text.lines().find(|line| line.contains(name)).unwrap();
    assert!(all.contains(line.split(" = {").next().unwrap()), "{line}");

    let ratio = line.split("ratio = ").nth(1).unwrap().split(',').next().unwrap();
    std::fs::write(&file, text.replace(&format!("ratio = {ratio}"), "ratio = 0.5")).unwrap();
    let error = with(&[]).failure();
    let error = String::from_utf8(error.get_output().stderr.clone()).unwrap();
    assert!(error.contains("1 figure above their bounds"), "{error}");
    assert!(error.contains("cost/small-fragments/1000: ratio 1."), "{error}");
    assert!(error.contains("bound 0.5"), "{error}");
    with(&["--seed", "2"]).failure();
}

#[test]
fn the_table_in_markdown_marks_what_is_missed() {
    let table = printed(&["cost/fragments/1000", "--markdown"]);
    assert!(table.starts_with("| pattern | peak allocated | vramp | vpmm |"), "{table}");
    assert_eq!(table.lines().filter(|line| line.starts_with("| cost/")).count(), 1, "{table}");
    let misses = table.lines().filter(|line| line.starts_with("- cost/fragments/1000: ")).count();
    assert_eq!(misses > 0, table.contains("**"), "{table}");
}
