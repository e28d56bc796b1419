//! The program as a user runs it.
use std::fs;
use std::path::PathBuf;
use std::process::{Command as Process, Stdio};

use assert_cmd::Command;
use serde_json::Value;

/// Returns the program, run in the project's root without the variables that it reads.
fn vramp(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vramp"));
    command.current_dir(root()).args(args);
    for variable in [
        "VPMM_PAGE_SIZE",
        "VPMM_VA_SIZE",
        "VPMM_PAGES",
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
    ] {
        command.env_remove(variable);
    }
    command
}

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..")
}

const GNN: &str = "examples/traces/gnn.pickle.gz";
const OOM: &str = "examples/traces/llama_varlen_oom.pickle.gz";
const RESNET: &str = "examples/traces/resnet_multires_stacks.pickle.gz";

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("the test has set this up")
}

fn stdout(args: &[&str]) -> String {
    text(&vramp(args).assert().success().get_output().stdout)
}

fn lines(args: &[&str]) -> Vec<Value> {
    stdout(args)
        .lines()
        .map(|line| serde_json::from_str(line).expect("the test has set this up"))
        .collect()
}

/// Checks that the run fails with code 1, prints nothing to standard output and these words to
/// standard error, in one line.
fn refused(command: &mut Command, words: &[&str]) {
    let assert = command.assert().code(1);
    let output = assert.get_output();
    let error = text(&output.stderr);
    assert_eq!(text(&output.stdout), "", "{error}");
    assert_eq!(error.lines().count(), 1, "{error}");
    for word in words {
        assert!(error.contains(word), "'{word}' is not in: {error}");
    }
}

#[test]
fn the_command_of_the_readme_works() {
    let readme = fs::read_to_string(root().join("README.md")).expect("the test has set this up");
    let command = "cargo run --release -p vramp-cli -- replay examples/traces/*.gz";
    assert!(readme.contains(command), "the README has another command");
    let table = stdout(&["replay", GNN, OOM, RESNET, "--device", "sim"]);
    for words in ["gnn: 14,142 events on 1 stream", "allocated 15.39 GiB", "2 streams", "53.01 GiB"]
    {
        assert!(table.contains(words), "'{words}' is not in:\n{table}");
    }
    for allocator in ["recorded", "vramp", "vpmm", "torch ", "torch-expandable"] {
        let rows =
            table.lines().filter(|line| line.trim_start_matches(['*', ' ']).starts_with(allocator));
        assert!(rows.count() >= 3, "{allocator} lacks a row in:\n{table}");
    }
    assert!(table.contains("ran out of memory at event 1,029"), "{table}");
    assert!(table.is_ascii(), "{table}");
}

#[test]
fn json_has_one_object_for_each_run_with_exact_integers() {
    let runs = lines(&["replay", GNN, RESNET, "--device", "sim:h200", "--json"]);
    let named = |run: &Value| (run["trace"].clone(), run["allocator"].clone());
    let expected: Vec<(Value, Value)> = ["gnn", "resnet_multires_stacks"]
        .into_iter()
        .flat_map(|trace| {
            ["vramp", "vpmm", "torch", "torch-expandable"].map(|name| (trace.into(), name.into()))
        })
        .collect();
    assert_eq!(runs.iter().map(named).collect::<Vec<_>>(), expected);
    let run = &runs[0];
    assert_eq!(run["device"], "sim:h200");
    assert_eq!(run["events"], 14_142);
    assert_eq!(run["peak_live_bytes"], 16_522_160_092u64);
    assert_eq!(run["driver_ms_is"], "modelled");
    assert_eq!(run["oom_at_event"], Value::Null);
    for run in &runs {
        for integer in [
            "events",
            "requests",
            "streams",
            "peak_live_bytes",
            "peak_reserved_bytes",
            "hits",
            "misses",
            "driver_calls",
            "handles_created",
            "handles_moved",
            "moved_bytes",
        ] {
            assert!(run[integer].is_u64(), "{integer} is {}", run[integer]);
        }
        for number in ["overhead", "driver_ms", "worst_malloc_us", "replay_s", "read_s"] {
            assert!(run[number].is_f64(), "{number} is {}", run[number]);
        }
        assert_eq!(run["decisions_sha256"].as_str().expect("the test has set this up").len(), 64);
        let live = run["peak_live_bytes"].as_u64().expect("the test has set this up");
        let reserved = run["peak_reserved_bytes"].as_u64().expect("the test has set this up");
        assert!(live <= reserved, "{run}");
        let calls = run["calls"].as_object().expect("the test has set this up").values();
        let count: u64 =
            calls.map(|call| call["count"].as_u64().expect("the test has set this up")).sum();
        assert_eq!(run["driver_calls"], count);
    }
}

#[test]
fn the_same_trace_gives_the_same_decisions_twice_and_others_elsewhere() {
    let digests = |device| -> Vec<Value> {
        let runs = lines(&["replay", RESNET, "--device", device, "--json"]);
        runs.iter().map(|run| run["decisions_sha256"].clone()).collect()
    };
    let first = digests("sim:h200");
    assert_eq!(first, digests("sim:h200"));
    assert_eq!(first, digests("sim:h100"));
    assert_ne!(first[0], first[1]);
}

#[test]
fn a_limit_below_the_peak_gives_the_event_that_ran_out_of_memory() {
    let args = ["replay", OOM, "--device", "sim", "--limit", "14.9GiB"];
    let table = stdout(&args);
    assert!(table.contains("out of memory at event"), "{table}");
    assert!(table.contains("the limit of 14.90 GiB allows no more"), "{table}");
    for run in lines(&[&args[..], &["--json"]].concat()) {
        assert_eq!(run["oom_at_event"], 1_024, "{run}");
        assert!(
            run["oom"]
                .as_str()
                .expect("the test has set this up")
                .starts_with("out of memory: tried to allocate"),
            "{run}"
        );
        assert_eq!(run["peak_live_bytes"], 16_071_045_524u64);
    }
}

#[test]
fn prefilled_memory_is_not_created_during_the_replay() {
    let args = ["replay", GNN, "--device", "sim", "--allocator", "vramp", "--json"];
    let created = |run: &Value| run["calls"]["create"]["count"].as_u64().unwrap_or(0);
    let plain = &lines(&args)[0];
    let filled = &lines(&[&args[..], &["--prefill", "16GiB"]].concat())[0];
    assert!(created(filled) < created(plain), "{filled}");
    assert!(filled["peak_reserved_bytes"].as_u64().expect("the test has set this up") >= 16 << 30);
}

#[test]
fn the_audit_finds_nothing_on_the_examples() {
    for run in lines(&["replay", OOM, RESNET, "--device", "sim", "--audit", "--json"]) {
        assert_eq!(run["hazards"], 0, "{run}");
    }
}

#[test]
fn wrong_input_is_one_clear_sentence() {
    let folder = tempfile::tempdir().expect("the test has set this up");
    let file = |name: &str, contents: &[u8]| {
        let path = folder.path().join(name);
        fs::write(&path, contents).expect("the test has set this up");
        path.to_str().expect("the test has set this up").to_owned()
    };
    let empty = file("empty.pickle", b"");
    let noise = file("noise.pickle", b"not a trace at all");
    let idle = file("idle.csv", b"Thread,Time,Action,Pointer,Size,Stream\n");
    let cut = fs::read(root().join(GNN)).expect("the test has set this up");
    let cut = file("cut.pickle.gz", &cut[..cut.len() / 2]);
    let out = file("out.txt", b"");
    for (args, words) in [
        (vec!["replay", "no/such.pickle"], vec!["no/such.pickle", "No such file"]),
        (vec!["replay", "examples/traces"], vec!["examples/traces", "is a folder"]),
        (vec!["replay", &empty], vec!["empty.pickle", "the file is empty"]),
        (vec!["replay", &noise], vec!["noise.pickle", "a text file without the header"]),
        (vec!["replay", &idle], vec!["idle.csv"]),
        (vec!["replay", &cut], vec!["cut.pickle.gz"]),
        (vec!["convert", GNN, &out], vec!["out.txt", ".vtrace, .pickle, .perfetto.json", "--to"]),
        (vec!["convert", GNN, "no/such/folder.vtrace"], vec!["cannot write", "No such file"]),
    ] {
        let mut args = args;
        if args[0] == "replay" {
            args.extend(["--device", "sim", "--json"]);
        }
        refused(&mut vramp(&args), &words);
    }
    for (device, words) in [
        ("sim:voodoo", ["voodoo", "known cards: h200"]),
        ("tpu", ["no device 'tpu'", "use auto"]),
        ("cuda:x", ["no device 'cuda:x'", "cuda:N"]),
    ] {
        refused(&mut vramp(&["replay", GNN, "--device", device]), &words);
        refused(&mut vramp(&["info", "--device", device]), &words);
    }
}

#[test]
fn a_file_that_cannot_be_opened_is_reported_once() {
    let output = vramp(&["replay", "no/such.pickle"]).assert().code(1);
    let error = text(&output.get_output().stderr);
    assert_eq!(error.matches("No such file").count(), 1, "{error}");
}

#[test]
fn a_card_that_cannot_be_opened_is_reported_once() {
    // No machine has so many: without a card the cause is the missing library, else the number.
    let missing = ["--device", "cuda:999"];
    for command in [&["info"][..], &["replay", GNN], &["bench", "hit"]] {
        let output = vramp(&[command, &missing].concat()).assert().code(1);
        let error = text(&output.get_output().stderr);
        let (cause, rest) = error.split_once("; use 'sim'").expect("the error says what to do");
        assert!(cause.contains("CUDA"), "{error}");
        assert_eq!(rest, " for a simulated card\n", "the cause stands once: {error}");
    }
}

#[test]
fn wrong_usage_ends_with_code_two_and_lists_what_is_valid() {
    for (args, words) in [
        (vec!["replay"], "TRACE"),
        (
            vec!["replay", GNN, "--allocator", "jemalloc"],
            "stream-ordered, torch or torch-expandable, or all",
        ),
        (vec!["replay", GNN, "--torch-config", "foo:1"], "use one of backend, expandable_segments"),
        (vec!["replay", GNN, "--torch-config", "max_split_size_mb:2"], "above 20"),
        (vec!["replay", GNN, "--limit", "80 parsecs"], "80GB"),
        (vec!["convert", GNN, "x.svg", "--to", "svg"], "vtrace, pickle, perfetto"),
        (vec!["replay", GNN, "--prefill=-1"], "not an amount of memory"),
        (vec!["explian"], "similar subcommands exist: 'replay', 'explain'"),
    ] {
        let assert = vramp(&args).assert().code(2);
        let error = text(&assert.get_output().stderr);
        assert!(error.contains(words), "'{words}' is not in: {error}");
    }
}

#[test]
fn variables_of_vpmm_change_vpmm_alone_and_bad_ones_are_named() {
    let args = ["replay", GNN, "--device", "sim", "--json", "--allocator"];
    let with = |name: &str, variable: &str, value: &str| {
        let mut command = vramp(&args);
        command.arg(name).env(variable, value);
        command
    };
    for (variable, value) in [
        ("VPMM_PAGE_SIZE", "many"),
        ("VPMM_PAGE_SIZE", "0"),
        ("VPMM_VA_SIZE", "-8"),
        ("VPMM_PAGES", "1.5"),
    ] {
        refused(&mut with("vpmm", variable, value), &[variable, &format!("'{value}'")]);
        with("vramp", variable, value).assert().success();
    }
    let output = with("vpmm", "VPMM_PAGE_SIZE", "16MiB").assert().success();
    let large: Value =
        serde_json::from_slice(&output.get_output().stdout).expect("the test has set this up");
    let usual = &lines(&[&args[..], &["vpmm"]].concat())[0];
    assert!(large["handles_created"].as_u64() < usual["handles_created"].as_u64(), "{large}");
    assert_eq!(large["variables"], serde_json::json!(["VPMM_PAGE_SIZE"]));
    assert_eq!(usual.get("variables"), None);
    // An argument takes precedence.
    let mut prefilled = with("vpmm", "VPMM_PAGES", "1000");
    let output = prefilled.args(["--prefill", "2MiB"]).assert().success();
    let line: Value =
        serde_json::from_slice(&output.get_output().stdout).expect("the test has set this up");
    assert_eq!(line.get("variables"), None);
}

#[test]
fn variables_of_pytorch_change_its_presets_and_are_named() {
    let replay = |args: &[&str], variables: &[(&str, &str)]| {
        let mut command = vramp(&["replay", GNN, "--device", "sim", "--json", "--allocator"]);
        let output = command.args(args).envs(variables.iter().copied()).assert().success();
        let line: Value =
            serde_json::from_slice(&output.get_output().stdout).expect("one line of JSON");
        let peak = line["peak_reserved_bytes"].as_u64().expect("a number");
        (peak, line.get("variables").cloned())
    };
    let (usual, named) = replay(&["torch"], &[]);
    assert_eq!(named, None);
    let expandable = [("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")];
    let (peak, named) = replay(&["torch"], &expandable);
    assert_eq!(named, Some(serde_json::json!(["PYTORCH_CUDA_ALLOC_CONF"])));
    assert_eq!(peak, replay(&["torch-expandable"], &[]).0);
    assert!(peak < usual, "{peak} of {usual}");
    let newer = [expandable[0], ("PYTORCH_ALLOC_CONF", "expandable_segments:False")];
    assert_eq!(replay(&["torch"], &newer).0, usual, "the newer name comes first");
    let given = ["torch", "--torch-config", "expandable_segments:False"];
    assert_eq!(replay(&given, &expandable), (usual, None), "an argument takes precedence");
    assert_eq!(replay(&["vramp"], &expandable).1, None);

    let mut table = vramp(&["replay", GNN, "--device", "sim", "--allocator", "torch"]);
    let output = table.env("PYTORCH_ALLOC_CONF", "max_split_size_mb:64").assert().success();
    let said = text(&output.get_output().stdout);
    assert!(said.contains("torch uses PYTORCH_ALLOC_CONF=max_split_size_mb:64.\n"), "{said}");
    let mut wrong = vramp(&["replay", GNN, "--device", "sim", "--allocator", "torch"]);
    wrong.env("PYTORCH_ALLOC_CONF", "max_split_size_mb:2");
    refused(&mut wrong, &["PYTORCH_ALLOC_CONF is invalid", "above 20"]);
}

#[test]
fn a_converted_trace_replays_to_the_same_decisions() {
    let folder = tempfile::tempdir().expect("the test has set this up");
    let path = folder.path().join("gnn.vtrace");
    let path = path.to_str().expect("the test has set this up");
    let said = stdout(&["convert", GNN, path]);
    assert!(said.contains("14,142 events, 1 device, 1 stream"), "{said}");
    let replayed = |trace| {
        let run =
            &lines(&["replay", trace, "--device", "sim", "--allocator", "vramp", "--json"])[0];
        (run["trace"].clone(), run["events"].clone(), run["decisions_sha256"].clone())
    };
    assert_eq!(replayed(path), replayed(GNN));
    let left = fs::read_dir(folder.path()).expect("the test has set this up").count();
    assert_eq!(left, 1, "a temporary file was left behind");
}

#[test]
fn a_trace_becomes_a_snapshot_that_replays_alike_and_a_timeline() {
    let folder = tempfile::tempdir().expect("the test has set this up");
    let path = |name: &str| folder.path().join(name).to_str().expect("plain names").to_owned();
    let digest = |trace: &str| {
        let run =
            &lines(&["replay", trace, "--device", "sim", "--allocator", "vramp", "--json"])[0];
        (run["events"].clone(), run["decisions_sha256"].clone())
    };
    let snapshot = path("gnn.pickle");
    let said = stdout(&["convert", GNN, &snapshot]);
    assert!(said.contains("18 segments inferred from events"), "{said}");
    assert_eq!(digest(&snapshot), digest(GNN));
    // The option wins over the name, and a file may be converted onto itself if forced.
    let said = stdout(&["convert", &snapshot, &snapshot, "--to", "vtrace", "--force"]);
    assert!(!said.contains("inferred"), "{said}");
    assert!(fs::read(&snapshot).expect("just written").starts_with(b"\x89VTRACE"));
    assert_eq!(digest(&snapshot), digest(GNN));

    let timeline = path("gnn.perfetto.json");
    stdout(&["convert", &snapshot, &timeline]);
    let page = fs::read(&timeline).expect("just written");
    let page: Value = serde_json::from_slice(&page).expect("it is JSON");
    let entries = page["traceEvents"].as_array().expect("Chrome's format");
    assert_eq!(entries.iter().filter(|entry| entry["ph"] == "b").count(), 4_710);
    let left = fs::read_dir(folder.path()).expect("the test has set this up").count();
    assert_eq!(left, 2, "a temporary file was left behind");
}

#[test]
fn info_describes_the_device_as_text_and_as_json() {
    let said = stdout(&["info", "--device", "sim:rtx4090"]);
    for words in ["sim:rtx4090", "22.99 GiB free of 23.99 GiB", "2.00 MiB", "not measured"] {
        assert!(said.contains(words), "'{words}' is not in:\n{said}");
    }
    let described = &lines(&["info", "--device", "sim", "--json"])[0];
    assert_eq!(described["simulated"], true);
    assert_eq!(described["capabilities"]["virtual_memory"], true);
    assert_eq!(described["page_bytes"], 2 << 20);
    let sharing = &described["sharing"];
    assert_eq!(sharing["default_handle_type"], "posix-fd");
    assert_eq!((&sharing["fabric"], &sharing["rdma"]), (&false.into(), &true.into()));
    let refused = sharing["fabric_refused"].as_str().expect("a reason");
    assert!(refused.contains("NOT_PERMITTED"), "{refused}");
    let said = stdout(&["info", "--device", "sim:h200x2"]);
    for words in ["by file descriptors (default); no fabric handles: ", "other cards: on demand"] {
        assert!(said.contains(words), "'{words}' is not in:\n{said}");
    }
}

#[test]
fn a_reader_that_goes_away_is_no_failure() {
    let mut child = Process::new(env!("CARGO_BIN_EXE_vramp"))
        .args(["replay", GNN, OOM, RESNET, "--device", "sim", "--json"])
        .current_dir(root())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the test has set this up");
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("the test has set this up");
    assert!(output.status.success(), "{output:?}");
    assert_eq!(text(&output.stderr), "");
}

fn fidelity(args: &[&str]) -> Vec<Value> {
    lines(
        &[&["replay"], args, &["--device", "sim", "--allocator", "torch", "--fidelity", "--json"]]
            .concat(),
    )
    .iter()
    .map(|run| run["fidelity"].clone())
    .collect()
}

#[test]
fn the_model_matches_every_segment_of_the_recorded_jobs() {
    for found in fidelity(&[GNN, OOM, RESNET]) {
        assert_eq!(found["faithful"], true, "{found}");
        assert_eq!((&found["missing"], &found["extra"]), (&0.into(), &0.into()), "{found}");
        assert_eq!(found["recorded"], found["foretold"], "{found}");
        assert_eq!(found["recorded_peak_bytes"], found["foretold_peak_bytes"], "{found}");
        assert_eq!(found["first_difference"], Value::Null, "{found}");
    }
    let args = ["replay", OOM, "--device", "sim", "--allocator", "torch", "--fidelity"];
    let said = stdout(&args);
    assert!(said.contains("torch matches 143 of 143 recorded segment events (100.00 %)"), "{said}");
}

#[test]
fn another_configuration_than_the_recorded_one_does_not_match() {
    let config = ["--torch-config", "roundup_power2_divisions:4"];
    let args = ["replay", GNN, "--device", "sim", "--allocator", "torch", "--fidelity"];
    let assert = vramp(&[&args[..], &config].concat()).assert().code(1);
    let output = assert.get_output();
    assert!(text(&output.stdout).contains("The first difference is at event"));
    assert!(text(&output.stderr).contains("'gnn' on torch"), "{}", text(&output.stderr));
}

#[test]
fn settings_without_effect_are_named() {
    let config = "pinned_use_background_threads:True,expandable_segments:True";
    let args = ["replay", GNN, "--device", "sim", "--allocator", "torch", "--torch-config", config];
    let said = stdout(&args);
    let sentence = "The setting pinned_use_background_threads has no effect on the model.";
    assert!(said.contains(sentence), "{said}");
    assert!(said.contains("25.16 GiB"), "its segments are expandable: {said}");
}

#[test]
fn fidelity_needs_pytorchs_allocator_and_recorded_segments() {
    let args = ["replay", GNN, "--device", "sim", "--fidelity"];
    refused(&mut vramp(&args), &["add --allocator torch"]);
    let folder = tempfile::tempdir().expect("the test has set this up");
    let log = folder.path().join("log.csv");
    let lines = "Thread,Time,Action,Pointer,Size,Stream\n1,10:00:00.000000,allocate,0x10,64,0\n";
    fs::write(&log, lines).expect("the test has set this up");
    let log = log.to_str().expect("the test has set this up");
    let args = ["replay", log, "--device", "sim", "--fidelity", "--allocator", "torch"];
    refused(
        &mut vramp(&[&args[..], &["--json"]].concat()),
        &["no events of segments to compare with"],
    );
}

#[test]
fn expandable_segments_take_what_they_took_of_pytorch() {
    let args = ["replay", GNN, "--device", "sim", "--allocator", "torch-expandable", "--json"];
    let run = &lines(&args)[0];
    let taken = run["peak_reserved_bytes"].as_u64().expect("the test has set this up") as f64;
    // The same job on PyTorch 2.11 with expandable_segments:True, on an H200: 25.16 GiB.
    let recorded = 25.16 * f64::from(1 << 30);
    assert!((taken / recorded - 1.0).abs() < 0.03, "{taken} instead of {recorded}");
}

#[test]
fn the_audit_finds_nothing_in_pytorchs_allocator() {
    for allocator in ["torch", "torch-expandable"] {
        let args = ["replay", OOM, RESNET, "--device", "sim", "--audit", "--json", "--allocator"];
        for run in lines(&[&args[..], &[allocator]].concat()) {
            assert_eq!(run["hazards"], 0, "{run}");
        }
    }
}
