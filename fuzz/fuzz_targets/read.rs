//! Any bytes, as a file of any format: an error or a trace, never a panic, never much memory.
//! What is read must make workloads whose rules hold, and must come back from a `.vtrace` equal.
#![no_main]

use libfuzzer_sys::fuzz_target;
use vramp_fuzz::check;

fuzz_target!(|bytes: &[u8]| check(bytes));
