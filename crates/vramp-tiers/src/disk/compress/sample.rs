//! Compresses a small part of a write, to predict what compressing the rest saves.

use vramp_core::Bytes;

use super::codec::Codec;
use crate::disk::core::compression::Sample;
use crate::disk::core::sampling;
use crate::disk::spans::SpanList;

/// Compresses the sampled ranges of `spans`, each on its own.
pub(super) fn sample(spans: &SpanList, codec: &mut Codec) -> Sample {
    let (starts, each) = sampling::ranges(spans.len());
    let mut sample = Sample { bytes: Bytes::ZERO, compressed: Bytes::ZERO };
    let len = each.count() as usize;
    for start in starts {
        spans.read(start, &mut codec.plain[..len]);
        sample.bytes += each;
        sample.compressed += codec.compress(len).unwrap_or(each);
    }
    sample
}
