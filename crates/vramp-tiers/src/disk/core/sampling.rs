//! Which ranges of a write are compressed as a sample of the rest.

use vramp_core::Bytes;

/// Length of one range. Repetition that LZ4 finds lies within this distance.
const RANGE: Bytes = Bytes::kib(16);
/// Most ranges for one write.
const RANGES_MOST: u64 = 8;

/// Returns where the sampled ranges of `len` bytes begin, and the length of each. They are spread
/// evenly from the first byte to the last, and add up to 128 KiB at most.
pub(in crate::disk) fn ranges(len: Bytes) -> (impl Iterator<Item = Bytes>, Bytes) {
    let count = (len.count() / RANGE.count()).clamp(1, RANGES_MOST);
    let each = RANGE.min(len);
    let last = len - each;
    let starts = (0..count).map(move |index| {
        let start = u128::from(last.count()) * u128::from(index) / u128::from((count - 1).max(1));
        Bytes::new(start as u64)
    });
    (starts, each)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_lie_within_and_reach_from_end_to_end() {
        let of = |len| {
            let (starts, each) = ranges(len);
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
