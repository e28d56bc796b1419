//! Compresses and decompresses LZ4 blocks.

use std::panic::{AssertUnwindSafe, catch_unwind};

use lz4_flex::block::{
    CompressTable, compress_into_with_table, decompress_into, get_maximum_output_size,
};
use vramp_core::Bytes;

use super::frames::FRAME;

/// Buffers for one frame, used by one thread at a time. Compressing allocates nothing else.
pub(in crate::disk) struct Codec {
    /// Bytes to compress, or the result of decompressing.
    pub plain: Vec<u8>,
    /// The result of compressing, or bytes to decompress.
    pub compressed: Vec<u8>,
    table: CompressTable,
}

/// Why bytes do not decompress.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DecodeError(pub String);

impl Codec {
    pub fn new() -> Codec {
        let frame = FRAME.count() as usize;
        Codec {
            plain: vec![0; frame],
            compressed: vec![0; get_maximum_output_size(frame)],
            table: CompressTable::large(),
        }
    }

    /// Compresses the first `len` bytes of `plain`. Returns `None` if the library fails.
    pub fn compress(&mut self, len: usize) -> Option<Bytes> {
        let Codec { plain, compressed, table } = self;
        // A panic of the library leaves the frame uncompressed.
        let done = catch_unwind(AssertUnwindSafe(|| {
            compress_into_with_table(&plain[..len], compressed, table)
        }));
        done.ok()?.ok().map(|len| Bytes::new(len as u64))
    }

    /// Decompresses the first `compressed` bytes of `compressed` to `len` bytes of `plain`.
    pub fn decompress(&mut self, compressed: usize, len: usize) -> Result<(), DecodeError> {
        let Codec { plain, compressed: from, .. } = self;
        let done = catch_unwind(AssertUnwindSafe(|| {
            decompress_into(&from[..compressed], &mut plain[..len])
        }));
        match done {
            Ok(Ok(made)) if made == len => Ok(()),
            Ok(Ok(made)) => Err(DecodeError(format!("they decompress to {made} bytes"))),
            Ok(Err(error)) => Err(DecodeError(error.to_string())),
            Err(_) => Err(DecodeError("the decompressor panicked".into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fills `plain` with bytes of which every second half word is zero.
    fn words(codec: &mut Codec, len: usize) -> Vec<u8> {
        let mut random = fastrand::Rng::with_seed(len as u64);
        for word in codec.plain[..len].chunks_mut(16) {
            word.fill(0);
            random.fill(&mut word[..8.min(len)]);
        }
        codec.plain[..len].to_vec()
    }

    #[test]
    fn frames_of_any_length_decompress_to_the_same_bytes() {
        let mut codec = Codec::new();
        for len in [0, 1, 15, 16, 4096, 65_534, 65_535, 65_536, 300_007, FRAME.count() as usize] {
            let len = len / 16 * 16;
            let plain = words(&mut codec, len);
            let compressed = codec.compress(len).unwrap();
            assert!(len < 4096 || compressed.count() < len as u64 * 7 / 10);
            codec.plain.fill(0xff);
            codec.decompress(compressed.count() as usize, len).unwrap();
            assert!(codec.plain[..len] == plain, "{len}");
        }
    }

    #[test]
    fn a_frame_that_was_cut_or_changed_is_an_error_or_of_the_right_length_and_never_a_panic() {
        let mut codec = Codec::new();
        let len = 8192;
        words(&mut codec, len);
        let compressed = codec.compress(len).unwrap().count() as usize;
        let good = codec.compressed[..compressed].to_vec();
        let mut refused = 0;
        for bit in 0..compressed * 8 {
            codec.compressed[..compressed].copy_from_slice(&good);
            codec.compressed[bit / 8] ^= 1 << (bit % 8);
            refused += u32::from(codec.decompress(compressed, len).is_err());
        }
        assert!(refused > 0);
        for cut in 0..compressed {
            codec.compressed[..compressed].copy_from_slice(&good);
            assert!(codec.decompress(cut, len).is_err(), "{cut}");
        }
        codec.compressed[..compressed].copy_from_slice(&good);
        assert!(codec.decompress(compressed, len - 1).is_err());
        assert!(codec.decompress(compressed, len + 1).is_err());
        assert!(codec.decompress(0, len).is_err());
    }
}
