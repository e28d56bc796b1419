//! Ranges of device memory that one transfer copies one behind the other.

use smallvec::SmallVec;
use vramp_core::{AddrRange, Bytes, DeviceAddr};

/// Ranges in the order in which they are copied. A place is found in O(log ranges).
#[derive(Clone, Debug)]
pub(crate) struct Gather {
    ranges: SmallVec<[AddrRange; 1]>,
    /// Where each range ends in the sum of all.
    ends: SmallVec<[Bytes; 1]>,
}

impl Gather {
    pub fn new(ranges: impl IntoIterator<Item = AddrRange>) -> Gather {
        let ranges: SmallVec<[AddrRange; 1]> = ranges.into_iter().collect();
        let mut sum = Bytes::ZERO;
        let ends = ranges.iter().map(|range| {
            sum = sum.saturating_add(range.len);
            sum
        });
        let ends = ends.collect();
        Gather { ranges, ends }
    }

    pub fn ranges(&self) -> &[AddrRange] {
        &self.ranges
    }

    /// Returns the length of all ranges together.
    pub fn len(&self) -> Bytes {
        self.ends.last().copied().unwrap_or_default()
    }

    /// Returns the bytes below an address, of ranges that ascend and do not overlap.
    pub fn below(&self, address: DeviceAddr) -> Bytes {
        let index = self.ranges.partition_point(|range| range.start + range.len <= address);
        let before = if index == 0 { Bytes::ZERO } else { self.ends[index - 1] };
        let within =
            self.ranges.get(index).and_then(|range| address.checked_offset_from(range.start));
        before + within.unwrap_or_default()
    }

    /// Returns the memory from `from` to `to`, counted over all ranges: a piece of each range.
    pub fn pieces(&self, from: Bytes, to: Bytes) -> impl Iterator<Item = AddrRange> {
        let first = self.ends.partition_point(|&end| end <= from);
        let found = self.ranges[first..].iter().zip(&self.ends[first..]);
        found
            .map(move |(range, &end)| {
                let start = end - range.len;
                let (low, high) = (from.max(start), to.min(end));
                (range.start + (low - start), high.saturating_sub(low))
            })
            .take_while(|(_, len)| !len.is_zero())
            .map(|(start, len)| AddrRange::new(start, len))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_below_an_address_are_counted() {
        let range = |start: u64, len: u64| AddrRange::new(DeviceAddr::new(start), Bytes::new(len));
        let gather = Gather::new([range(100, 10), range(200, 5)]);
        let below = |at: u64| gather.below(DeviceAddr::new(at)).count();
        let found = [0, 100, 103, 110, 150, 200, 204, 205, 300].map(below);
        assert_eq!(found, [0, 0, 3, 10, 10, 10, 14, 15, 15]);
    }

    #[test]
    fn pieces_follow_the_ranges() {
        let range = |start: u64, len: u64| AddrRange::new(DeviceAddr::new(start), Bytes::new(len));
        let gather = Gather::new([range(100, 10), range(500, 5), range(50, 20)]);
        assert_eq!(gather.len(), Bytes::new(35));
        let pieces = |from: u64, to: u64| -> Vec<AddrRange> {
            gather.pieces(Bytes::new(from), Bytes::new(to)).collect()
        };
        assert_eq!(pieces(0, 35), [range(100, 10), range(500, 5), range(50, 20)]);
        assert_eq!(pieces(3, 7), [range(103, 4)]);
        assert_eq!(pieces(9, 16), [range(109, 1), range(500, 5), range(50, 1)]);
        assert_eq!(pieces(10, 15), [range(500, 5)]);
        assert_eq!(pieces(35, 35), []);
        assert_eq!(Gather::new([]).pieces(Bytes::ZERO, Bytes::ZERO).count(), 0);
    }
}
