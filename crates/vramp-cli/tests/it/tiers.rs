//! `vramp tiers` as a user runs it: on this machine, and on one made of files.
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use assert_cmd::Command;
use serde_json::Value;
use tempfile::TempDir;

fn tiers(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vramp"));
    command.arg("tiers").args(args).env_remove("CUDA_VISIBLE_DEVICES");
    command
}

fn stdout(command: &mut Command) -> String {
    let assert = command.assert().success();
    String::from_utf8(assert.get_output().stdout.clone()).unwrap()
}

fn json(command: &mut Command) -> Value {
    serde_json::from_str(&stdout(command.arg("--json"))).unwrap()
}

fn refused(command: &mut Command, words: &[&str]) {
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
    let table = stdout(&mut tiers(&["--device", "sim"]));
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
    let written = stdout(&mut tiers(&["--device", "sim", "--directory", spill, "--write-config"]));
    assert!(written.contains("[[disk]]") && written.contains("blocks_per_pool = 128"), "{written}");
    let path = folder.path().join("tiers.toml");
    fs::write(&path, &written).unwrap();
    let path = path.to_str().unwrap();
    let again = stdout(&mut tiers(&["--device", "sim", "--config", path, "--write-config"]));
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
    refused(&mut tiers(&["--device", "sim", "--config", bad]), &words);
    refused(&mut tiers(&["--device", "sim", "--config", "/no/such.toml"]), &["/no/such.toml"]);
    refused(&mut tiers(&["--device", "sim", "--directory", "/no/such"]), &["name one that exists"]);
    refused(&mut tiers(&["--device", "cuda:x"]), &["cuda:N"]);
    refused(&mut tiers(&["--sysroot", folder.path().to_str().unwrap()]), &["mount sysfs"]);
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
    let table = stdout(&mut tiers(&["--device", "sim", "--sysroot", root]));
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
