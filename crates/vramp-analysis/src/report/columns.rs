//! Compact binary columns: numbers as varints, compressed with zlib, as base64 text.

use std::io::{self, Write};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use flate2::Compression;
use flate2::write::ZlibEncoder;

/// Compression level: 5 million events take about two seconds.
const LEVEL: u32 = 6;

/// Numbers of one kind, in seven bits per byte, lowest first. The top bit is set if more follow.
#[derive(Debug, Default)]
pub(super) struct Column(Vec<u8>);

impl Column {
    /// Appends one byte as it is.
    pub(super) fn byte(&mut self, byte: u8) {
        self.0.push(byte);
    }

    /// Appends a number of 1 to 10 bytes.
    pub(super) fn number(&mut self, mut number: u64) {
        while number >= 0x80 {
            self.0.push(number as u8 | 0x80);
            number >>= 7;
        }
        self.0.push(number as u8);
    }

    /// Appends the difference modulo 2^64, zigzag-encoded, so that small differences are short.
    pub(super) fn step(&mut self, from: u64, to: u64) {
        self.number(zigzag(from, to));
    }

    /// Compresses the column.
    pub(super) fn packed(self) -> io::Result<Vec<u8>> {
        pack(&self.0)
    }
}

/// Returns the difference modulo 2^64 as a number that is small if the difference is.
pub(super) fn zigzag(from: u64, to: u64) -> u64 {
    let delta = to.wrapping_sub(from).cast_signed();
    ((delta << 1) ^ (delta >> 63)).cast_unsigned()
}

/// Compresses bytes into the format that browsers call `deflate`: zlib.
pub(super) fn pack(bytes: &[u8]) -> io::Result<Vec<u8>> {
    let mut encoder = ZlibEncoder::new(Vec::new(), Compression::new(LEVEL));
    encoder.write_all(bytes)?;
    encoder.finish()
}

/// Returns how long `bytes` are as base64.
pub(super) fn base64_len(bytes: usize) -> u64 {
    (bytes as u64).div_ceil(3) * 4
}

/// Writes bytes as base64.
pub(super) fn write_base64(out: &mut dyn Write, bytes: &[u8]) -> io::Result<()> {
    // A multiple of three bytes has no padding, so the pieces join.
    let mut text = String::new();
    for piece in bytes.chunks(3 << 14) {
        text.clear();
        STANDARD.encode_string(piece, &mut text);
        out.write_all(text.as_bytes())?;
    }
    Ok(())
}

/// Returns bytes as base64.
pub(super) fn base64(bytes: &[u8]) -> String {
    STANDARD.encode(bytes)
}
