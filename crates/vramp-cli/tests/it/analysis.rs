//! `vramp explain`, `vramp advise` and `vramp diff` as a user runs them.
use std::fs::File;
use std::path::{Path, PathBuf};

use assert_cmd::Command;
use serde_json::Value;
use tempfile::TempDir;
use vramp_trace::{ReadLimits, Trace, read_trace};

const GNN: &str = "examples/traces/gnn.pickle.gz";
const OOM: &str = "examples/traces/llama_varlen_oom.pickle.gz";
const RESNET: &str = "examples/traces/resnet_multires_stacks.pickle.gz";

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn vramp(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vramp"));
    command.current_dir(root()).args(args);
    command
}

fn stdout(args: &[&str]) -> String {
    let assert = vramp(args).assert().success();
    String::from_utf8(assert.get_output().stdout.clone()).unwrap()
}

fn json(args: &[&str]) -> Value {
    serde_json::from_str(&stdout(&[args, &["--json"]].concat())).unwrap()
}

#[test]
fn the_verdict_names_the_demand_and_the_limit() {
    let text = stdout(&["explain", OOM]);
    for words in [
        "needs 16.91 GiB at once (14.97 GiB allocated and 1.94 GiB requested)",
        "a limit between 15.20 GiB and 17.14 GiB, while 123.92 GiB of the card were free",
        "workloads.py:32 w_llama_varlen",
        "activation",
    ] {
        assert!(text.contains(words), "'{words}' is not in:\n{text}");
    }
    let text = stdout(&["explain", OOM, "--limit", "16GiB"]);
    assert!(text.contains("no allocator fits it in 16.00 GiB"), "{text}");
    let found = json(&["explain", OOM]);
    assert_eq!(found["schema_version"], 2);
    assert_eq!(found["verdict"]["cause"], "limit");
    assert_eq!(found["demand_bytes"].as_u64(), Some(18_156_037_524));
}

/// Returns what follows the last heading of a text.
fn last_part<'a>(text: &'a str, heading: &str) -> &'a str {
    text.rsplit_once(heading).unwrap_or_else(|| panic!("no '{heading}' in:\n{text}")).1
}

#[test]
fn an_explanation_ends_with_what_to_do_and_names_the_request_first() {
    let text = stdout(&["explain", OOM]);
    let request = "The request that failed: workloads.py:32 w_llama_varlen, which requested 1.94 GiB \
                   (in torch/nn/functional.py:3504 cross_entropy) at event 1,029.";
    let line = text.lines().position(|line| line.contains(request)).expect(&text);
    assert!(line < 6, "{text}");
    let last = last_part(&text, "What to do\n");
    for words in [
        "Raise the limit of the process to 18.00 GiB: the card has 139.12 GiB.",
        "torch.cuda.set_per_process_memory_fraction(0.13)",
        "1.94 GiB less at that moment is enough",
    ] {
        assert!(last.contains(words), "'{words}' is not in:\n{text}");
    }
    // Rows that are alike are one, and an asterisk has its meaning.
    assert!(text.contains("4 x  171.50 MiB"), "{text}");
    assert!(text.contains("An asterisk marks the least"), "{text}");
}

#[test]
fn a_job_that_fits_is_told_to_change_nothing() {
    for (trace, limit) in [(OOM, "24GiB"), (RESNET, "l4"), (GNN, "24GiB")] {
        let found = json(&["advise", trace, "--limit", limit]);
        let conclusion = &found["conclusions"][0];
        let remedies = conclusion["remedies"].as_array().unwrap();
        assert_eq!(remedies[0]["kind"], "nothing", "{trace}: {remedies:?}");
        let own = found["tried"][0]["limited"][0]["peak_reserved_bytes"].as_u64().unwrap();
        for remedy in &remedies[1..] {
            let name = remedy["text"].as_str().unwrap().split(' ').next().unwrap();
            let tried = found["tried"].as_array().unwrap().iter();
            let mut of = tried.filter(|it| it["name"] == name);
            let peak = of.next().unwrap()["limited"][0]["peak_reserved_bytes"].as_u64().unwrap();
            assert!(peak <= own / 100 * 98, "{trace}: {remedy}");
        }
    }
    let text = stdout(&["advise", RESNET, "--limit", "l4"]);
    assert!(text.contains("To fit into l4 (21.49 GiB)\n- It fits already"), "{text}");
    let text = stdout(&["explain", OOM, "--limit", "l4"]);
    assert!(text.contains("fits in l4 (21.49 GiB)"), "{text}");
    assert!(last_part(&text, "What to do\n").starts_with("- It fits already: change nothing."));
}

#[test]
fn sums_and_stacks_equal_an_independent_computation() {
    let mut command = std::process::Command::new("python3");
    command.current_dir(root()).arg("bench/check-explain.py");
    command.args(["--vramp", env!("CARGO_BIN_EXE_vramp"), GNN, OOM, RESNET]);
    let output = command.output().expect("this test needs python3 on the PATH");
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(printed.contains("3 snapshots checked, 0 differences"), "{output:?}");
}

#[test]
fn a_job_that_would_fit_is_fragmented_and_what_fits_is_named() {
    // PyTorch releases what it caches, and fits in 19.79 GiB.
    let found = json(&["explain", GNN, "--limit", "24GiB"]);
    assert_eq!(found["verdict"]["cause"], "none");
    let found = json(&["explain", GNN, "--limit", "18GiB"]);
    assert_eq!(found["verdict"]["cause"], "fragmentation");
    let remedies = found["verdict"]["remedies"].as_array().unwrap();
    assert!(
        remedies
            .iter()
            .any(|it| it["kind"] == "vramp" && it["code"].as_str().unwrap().contains("enable()"))
    );
    let peak = &found["peak"];
    assert_eq!(peak["live_bytes"].as_u64(), Some(16_522_160_092));
    let sums = ["sites", "categories", "streams"].map(|list| {
        let shares = peak[list].as_array().unwrap();
        shares.iter().map(|share| share["bytes"].as_u64().unwrap()).sum::<u64>()
    });
    assert_eq!(sums, [16_522_160_092; 3]);
}

#[test]
fn the_smallest_limit_fits_and_a_little_less_does_not() {
    let found = json(&["explain", RESNET]);
    for fit in found["fits"].as_array().unwrap() {
        let name = fit["allocator"].as_str().unwrap();
        let name = if name == "PyTorch's defaults" { "torch" } else { name };
        let limit = fit["smallest_limit_bytes"].as_u64().unwrap();
        let runs = |limit: u64| {
            let limit = limit.to_string();
            json(&["replay", RESNET, "--device", "sim", "--allocator", name, "--limit", &limit])
        };
        assert_eq!(runs(limit)["oom_at_event"], Value::Null, "{name}");
        assert!(runs(limit / 100 * 98)["oom_at_event"].is_u64(), "{name}");
        assert!(runs(limit)["peak_reserved_bytes"].as_u64().unwrap() <= limit, "{name}");
    }
}

#[test]
fn advice_is_a_line_to_paste_for_each_limit_and_replays_the_same() {
    let text = stdout(&["advise", GNN, "--limit", "16GiB,24GiB", "--limit", "60GiB"]);
    assert!(text.contains("export PYTORCH_CUDA_ALLOC_CONF="), "{text}");
    assert!(text.contains("To fit into 60.00 GiB\n- It fits already: change nothing."), "{text}");
    let found = json(&["advise", GNN, "--limit", "24GiB"]);
    for tried in found["tried"].as_array().unwrap() {
        let Some(line) = tried["line"].as_str() else { continue };
        let Some(settings) = line.strip_prefix("export PYTORCH_CUDA_ALLOC_CONF=") else { continue };
        if settings.starts_with("backend") {
            continue;
        }
        let args = ["replay", GNN, "--device", "sim", "--allocator", "torch", "--limit", "24GiB"];
        let replayed = json(&[&args[..], &["--torch-config", settings]].concat());
        let run = &tried["limited"][0];
        assert_eq!(run["fits"], replayed["oom_at_event"].is_null(), "{settings}");
        assert_eq!(run["peak_reserved_bytes"], replayed["peak_reserved_bytes"], "{settings}");
    }
}

#[test]
fn what_does_not_fit_ends_with_code_three_if_asked() {
    let args = ["advise", OOM, "--limit", "16GiB"];
    let text = stdout(&args);
    assert!(text.contains("No allocator fits it below 16.91 GiB"), "{text}");
    vramp(&[&args[..], &["--fail-on-oom"]].concat()).assert().code(3);
    vramp(&["replay", OOM, "--limit", "16GiB", "--fail-on-oom"]).assert().code(3);
    vramp(&["replay", OOM, "--limit", "20GiB", "--fail-on-oom"]).assert().success();
}

/// Writes an example as a snapshot after `change`.
fn changed(folder: &TempDir, example: &str, change: impl FnOnce(&mut Trace)) -> String {
    let mut trace = read_trace(root().join(example), &ReadLimits::default()).unwrap();
    change(&mut trace);
    let path = folder.path().join("run.pickle");
    trace.write_snapshot(File::create(&path).unwrap()).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn a_recording_without_history_promises_no_savings() {
    let folder = TempDir::new().unwrap();
    let path = changed(&folder, RESNET, |trace| trace.events.clear());
    let text = stdout(&["replay", &path]);
    assert!(text.contains("The recording has no history"), "{text}");
    assert!(text.contains("_record_memory_history"), "{text}");
    assert!(!text.contains("less"), "{text}");
    let text = stdout(&["explain", &path]);
    assert!(
        text.contains("The recording has no history, so it does not show why memory ran out"),
        "{text}"
    );
    vramp(&["advise", &path, "--limit", "1GiB"]).assert().code(1);
}

#[test]
fn a_recording_that_begins_in_the_middle_promises_no_savings() {
    let folder = TempDir::new().unwrap();
    let path = changed(&folder, RESNET, |trace| {
        let late = trace.events.split_off(trace.events.len() / 2);
        trace.events = late;
    });
    let text = stdout(&["replay", &path]);
    for words in ["begins in the middle of the job", "Repaired: ", "were reserved already"] {
        assert!(text.contains(words), "'{words}' is not in:\n{text}");
    }
    assert!(!text.contains("less ("), "{text}");
}

#[test]
fn two_runs_are_compared_by_line() {
    let found = json(&["diff", OOM, OOM]);
    let changes = found["sites"].as_array().unwrap();
    assert!(changes.iter().all(|it| it["before_bytes"] == it["after_bytes"]), "{found}");
    let text = stdout(&["diff", RESNET, OOM]);
    assert!(text.contains("+4.12 GiB"), "{text}");
    assert!(text.contains("workloads.py:32 w_llama_varlen"), "{text}");
}

#[test]
fn completions_and_manual_pages_are_complete() {
    for shell in ["bash", "zsh", "fish"] {
        assert!(stdout(&["completions", shell]).contains("fail-on-oom"), "{shell}");
    }
    let folder = TempDir::new().unwrap();
    stdout(&["man", folder.path().to_str().unwrap()]);
    assert!(Path::new(&folder.path().join("vramp-explain.1")).exists());
}
