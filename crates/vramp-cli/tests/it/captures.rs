//! Upper bounds of the memory of captures recorded of real models.
use std::fs;
use std::path::PathBuf;

use assert_cmd::Command;
use serde_json::Value;

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
