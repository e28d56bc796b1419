//! Any bytes as a file of any format: an error or a trace, without a panic, in bounded memory. A
//! trace must make valid workloads and read back equal from a `.vtrace`.
#![no_main]

use libfuzzer_sys::fuzz_target;
use vramp_fuzz::check;

fuzz_target!(|bytes: &[u8]| check(bytes));
