//! Any bytes as the contents of a `.vtrace` with a valid header and checksum, which the fuzzer could
//! not guess.
#![no_main]

use libfuzzer_sys::fuzz_target;
use vramp_fuzz::check;

fuzz_target!(|body: &[u8]| {
    let mut file = b"\x89VTRACE\n".to_vec();
    file.extend_from_slice(&3u16.to_le_bytes());
    file.extend_from_slice(&0u16.to_le_bytes());
    file.extend_from_slice(&(body.len() as u64).to_le_bytes());
    file.extend_from_slice(&crc32fast::hash(body).to_le_bytes());
    file.extend_from_slice(&zstd::bulk::compress(body, 1).expect("memory can be compressed"));
    check(&file);
});
