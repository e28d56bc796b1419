//! A small part of a write, to know the rest by.

use vramp_core::Bytes;

use super::codec::Codec;
use super::decide::Sample;
use crate::disk::spans::Spans;

/// One stretch; what repeats does so within it.
const STRETCH: Bytes = Bytes::kib(16);
/// So many of them, spread over the write.
const STRETCHES: u64 = 8;

/// Where the samples of `len` bytes begin, and how long each is.
fn stretches(len: Bytes) -> (impl Iterator<Item = Bytes>, Bytes) {
    let count = (len.count() / STRETCH.count()).clamp(1, STRETCHES);
    let each = STRETCH.min(len);
    let last = len - each;
    let starts = (0..count).map(move |index| {
        let way = u128::from(last.count()) * u128::from(index) / u128::from((count - 1).max(1));
        Bytes::new(way as u64)
    });
    (starts, each)
}

/// Compresses a few stretches of `spans`, each on its own: 128 KiB at most.
pub(super) fn sample(spans: &Spans, codec: &mut Codec) -> Sample {
    let (starts, each) = stretches(spans.len());
    let mut sample = Sample { bytes: Bytes::ZERO, compressed: Bytes::ZERO };
    let len = each.count() as usize;
    for start in starts {
        spans.read(start, &mut codec.plain[..len]);
        sample.bytes += each;
        sample.compressed += codec.compress(len).unwrap_or(each);
    }
    sample
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_lie_within_and_reach_from_end_to_end() {
        let of = |len| {
            let (starts, each) = stretches(len);
            (starts.collect::<Vec<_>>(), each)
        };
        assert_eq!(of(Bytes::new(5000)), (vec![Bytes::ZERO], Bytes::new(5000)));
        assert_eq!(of(Bytes::kib(31)), (vec![Bytes::ZERO], Bytes::kib(16)));
        for len in [Bytes::kib(40), Bytes::new((16 << 20) + 77), Bytes::tib(1 << 20)] {
            let (starts, each) = of(len);
            assert_eq!((starts[0], starts[starts.len() - 1] + each), (Bytes::ZERO, len));
            assert!(starts.windows(2).all(|pair| pair[0] + each <= pair[1]), "{starts:?}");
            assert!(starts.len() <= 8);
        }
    }
}
