//! `vramp calibrate`, and the cards that its files describe.

use std::path::Path;

use assert_cmd::Command;
use serde_json::Value;

fn vramp(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vramp"));
    command.current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")).args(args);
    command
}

fn stdout(args: &[&str]) -> String {
    let assert = vramp(args).assert().success();
    String::from_utf8(assert.get_output().stdout.clone()).unwrap()
}

fn stderr(args: &[&str]) -> String {
    let assert = vramp(args).assert().code(1);
    let error = String::from_utf8(assert.get_output().stderr.clone()).unwrap();
    assert_eq!(error.lines().count(), 1, "{error}");
    error
}

const TRACE: &str = "examples/traces/llama_varlen_oom.pickle.gz";

/// Returns driver time and peak of vramp on a device.
fn replayed(device: &[&str]) -> (f64, u64) {
    let args = [&["replay", TRACE, "--allocator", "vramp", "--json"], device].concat();
    let outcome: Value = serde_json::from_str(&stdout(&args)).unwrap();
    (outcome["driver_ms"].as_f64().unwrap(), outcome["peak_reserved_bytes"].as_u64().unwrap())
}

#[test]
fn a_measured_card_is_simulated_with_its_own_costs_and_memory() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("card.toml");
    let file = path.to_str().unwrap();
    let said = stdout(&["calibrate", "-o", file, "--device", "sim:l40s", "--seconds", "1"]);
    for part in ["NVIDIA L40S", "not measured, as on the H200: rates.host_numa_kernel", "--device"]
    {
        assert!(said.contains(part), "{said}");
    }
    let shown = stdout(&["info", "--device", file]);
    assert!(shown.contains("sim:l40s") && shown.contains("43.99 GiB free of 44.99 GiB"), "{shown}");
    // The same decisions and costs as the card that was measured.
    let (ms, peak) = replayed(&["--device", "sim:l40s"]);
    let (again_ms, again) = replayed(&["--device", file]);
    assert_eq!(peak, again);
    assert!((again_ms / ms - 1.0).abs() < 0.02, "{again_ms} ms, {ms} ms");
    // The costs alone, on another card; standard output is the file.
    let other = stdout(&["info", "--device", "sim:t4", "--costs", file]);
    assert!(other.contains("sim:t4") && other.contains("vramp calibrate"), "{other}");
    let auto = stdout(&["info", "--costs", file]);
    assert!(auto.contains("sim:l40s"), "{auto}");
    let text = stdout(&["calibrate", "--device", file]);
    assert!(text.contains("[sized.create]"), "{text}");
}

#[test]
fn a_bad_cost_file_is_an_error_that_names_file_and_key() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("card.toml");
    let file = path.to_str().unwrap();
    let good = stdout(&["calibrate", "--device", "sim"]);
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
        assert!(stdout(&["info", "--device", name]).contains("sim:rtx4090"), "{name}");
    }
    let error = stderr(&["info", "--device", "sim:A100"]);
    assert!(error.contains("a100-40g, a100-80g"), "{error}");
    let error = stderr(&["info", "--device", "sim:h10"]);
    assert!(error.contains("did you mean 'h100'?") && error.contains("known cards"), "{error}");
}

#[test]
fn tables_of_driver_times_say_that_costs_follow_the_host() {
    let args = ["bench", "grow", "--device", "sim", "--seconds", "0.1", "--total", "64MiB"];
    assert!(stdout(&args).contains("for every allocator alike"));
}
