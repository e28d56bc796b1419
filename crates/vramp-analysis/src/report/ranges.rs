//! Reserved address ranges, and those that existed when the recording began.

use std::collections::BTreeMap;

use vramp_trace::{EventKind, Trace, Workload};

/// Disjoint address ranges: end by start. Adjacent ranges stay separate.
#[derive(Debug, Default)]
pub(super) struct Ranges(BTreeMap<u64, u64>);

impl Ranges {
    /// Adds `[start, end)`, without what is there already.
    pub(super) fn add(&mut self, start: u64, end: u64) {
        self.remove(start, end);
        if start < end {
            self.0.insert(start, end);
        }
    }

    /// Removes `[start, end)` from every range. O(log n) for each range that it meets.
    pub(super) fn remove(&mut self, start: u64, end: u64) {
        if start >= end {
            return;
        }
        if let Some((&first, &first_end)) = self.0.range(..start).next_back()
            && first_end > start
        {
            self.0.insert(first, start);
            if first_end > end {
                self.0.insert(end, first_end);
            }
        }
        while let Some((&next, &next_end)) = self.0.range(start..end).next() {
            self.0.remove(&next);
            if next_end > end {
                self.0.insert(end, next_end);
            }
        }
    }

    /// The ranges in address order.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, u64)> {
        self.0.iter().map(|(&start, &end)| (start, end))
    }
}

/// Returns the reserved ranges of the device of `workload` before its first event: those at the end, with
/// the events taken back. An expandable segment counts from its first to its last mapped byte. O(events of
/// the device).
pub(super) fn reserved_at_start(trace: &Trace, workload: &Workload) -> Ranges {
    let mut ranges = Ranges::default();
    for (_, segment) in workload.device_segments(trace) {
        let start = segment.address.number();
        ranges.add(start, start.saturating_add(segment.total_size.count()));
    }
    for (_, event) in workload.device_events(trace).rev() {
        let start = event.address.number();
        let end = start.saturating_add(event.size.count());
        match event.kind {
            EventKind::SegmentAlloc | EventKind::SegmentMap => ranges.remove(start, end),
            EventKind::SegmentFree | EventKind::SegmentUnmap => ranges.add(start, end),
            _ => {}
        }
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_as_bits_of_a_bitmap() {
        let mut random = fastrand::Rng::with_seed(7);
        let (mut ranges, mut bits) = (Ranges::default(), [false; 64]);
        for _ in 0..5000 {
            let start = random.u64(0..64);
            let end = random.u64(start..=64);
            let add = random.bool();
            if add {
                ranges.add(start, end)
            } else {
                ranges.remove(start, end)
            }
            bits[start as usize..end as usize].fill(add);
            let mut found = [false; 64];
            for (start, end) in ranges.iter() {
                assert!(start < end, "{ranges:?}");
                for bit in &mut found[start as usize..end as usize] {
                    assert!(!*bit, "two ranges overlap: {ranges:?}");
                    *bit = true;
                }
            }
            assert_eq!(found, bits);
        }
    }
}
