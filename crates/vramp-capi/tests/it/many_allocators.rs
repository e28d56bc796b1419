//! The maximum number of allocators. Needs its own process: no other test could open one meanwhile.

use crate::common::*;
use vramp_capi::abi::vramp_status_t::*;
use vramp_capi::interface::*;

#[test]
fn as_many_allocators_open_as_there_are_numbers_for() {
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
