//! The Python module and the benchmark scripts, with a mock of PyTorch.

use std::path::Path;
use std::process::Command;

#[test]
fn the_python_module_serves_both_routes_and_the_bench() {
    passes("scenario.py");
}

#[test]
fn the_scripts_for_a_machine_with_a_card_name_what_is_missing() {
    passes("scripts.py");
}

/// Runs a Python test program, which prints "passed" at its end.
fn passes(program: &str) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/python");
    let library = std::env::current_exe().expect("a test knows where it is");
    let output = Command::new("python3")
        .arg("-B")
        .arg(folder.join(program))
        .arg(folder.join("repository"))
        .env("VRAMP_LIBRARY", library.with_file_name("libvramp_capi.so"))
        .env("VRAMP_DEVICE", "sim:h200")
        .env_remove("VRAMP_CONF")
        .env_remove("PYTORCH_CUDA_ALLOC_CONF")
        .env_remove("PYTORCH_ALLOC_CONF")
        .output()
        .expect("Python 3 is installed");
    let printed = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{printed}");
    assert_eq!(output.stdout, b"passed\n", "{printed}");
}
