//! The maximum number of allocators, in a process of its own: other tests could open none meanwhile.

use std::process::Command;

use crate::common::*;
use vramp_capi::abi::vramp_status_t::*;
use vramp_capi::interface::*;

/// Set in the process that this test starts.
const ALONE: &str = "VRAMP_TEST_ALONE";

#[test]
fn as_many_allocators_open_as_there_are_numbers_for() {
    if std::env::var_os(ALONE).is_none() {
        let test = "many_allocators::as_many_allocators_open_as_there_are_numbers_for";
        let mut alone = Command::new(std::env::current_exe().unwrap());
        let status = alone.args(["--exact", test]).env(ALONE, "1").status().unwrap();
        assert!(status.success());
        return;
    }
    let mut opened = Vec::new();
    let refusal = loop {
        match open_on("sim", "") {
            Ok(allocator) => opened.push(allocator),
            Err(status) => break status,
        }
        assert!(opened.len() <= 256);
    };
    assert_eq!(refusal, VRAMP_ERROR_TOO_MANY);
    assert_eq!(opened.len(), 256);
    for allocator in opened {
        assert_eq!(vramp_close(allocator), VRAMP_OK);
        assert_eq!(vramp_close(allocator), VRAMP_ERROR_UNKNOWN_ALLOCATOR);
    }
}
