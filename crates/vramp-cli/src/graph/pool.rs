//! Memory that the recorded allocator reserved for the blocks of a capture.

use std::collections::BTreeMap;

use vramp::Bytes;
use vramp_trace::{Event, EventKind};

/// Returns the peak of the bytes reserved within `events`, if every block was placed in memory
/// reserved there: PyTorch has a pool for each capture. O(n log n).
pub(super) fn private_pool(events: &[Event], device: u32) -> Option<Bytes> {
    // Start and end of each reserved range.
    let mut reserved: BTreeMap<u64, u64> = BTreeMap::new();
    let (mut current, mut peak) = (0u128, 0u128);
    for event in events.iter().filter(|event| u32::from(event.device) == device) {
        let start = event.address.number();
        let end = start.checked_add(event.size.count())?;
        match event.kind {
            EventKind::SegmentAlloc | EventKind::SegmentMap => {
                let before = reserved.insert(start, end).map_or(0, |old| old - start);
                current += u128::from(end - start);
                current -= u128::from(before);
                peak = peak.max(current);
            }
            EventKind::SegmentFree | EventKind::SegmentUnmap => {
                // The range may be from before the window, or a part of a reserved one.
                current -= u128::from(release(&mut reserved, start, end));
            }
            EventKind::Alloc => {
                let (_, &until) = reserved.range(..=start).next_back()?;
                if until <= start {
                    return None;
                }
            }
            _ => {}
        }
    }
    u64::try_from(peak).ok().filter(|&peak| peak > 0).map(Bytes::new)
}

/// Removes a range from the reserved ones and returns how many bytes of it were reserved.
fn release(reserved: &mut BTreeMap<u64, u64>, start: u64, end: u64) -> u64 {
    let touched: Vec<(u64, u64)> = reserved
        .range(..end)
        .rev()
        .take_while(|&(_, &until)| until > start)
        .map(|(&from, &until)| (from, until))
        .collect();
    let mut released = 0;
    for (from, until) in touched {
        reserved.remove(&from);
        if from < start {
            reserved.insert(from, start);
        }
        if until > end {
            reserved.insert(end, until);
        }
        released += until.min(end) - from.max(start);
    }
    released
}

#[cfg(test)]
mod tests {
    use vramp::DeviceAddr;
    use vramp_trace::StreamIndex;

    use super::*;

    fn peak_reserved(events: &[(EventKind, u64, u64)]) -> Option<u64> {
        let event = |&(kind, address, size): &(EventKind, u64, u64)| Event {
            kind,
            device: 0,
            stream: StreamIndex(0),
            address: DeviceAddr::new(address),
            size: Bytes::new(size),
            time_us: 0,
            stack: None,
        };
        let events: Vec<Event> = events.iter().map(event).collect();
        private_pool(&events, 0).map(Bytes::count)
    }

    use EventKind::{Alloc, SegmentAlloc, SegmentFree, SegmentMap, SegmentUnmap};

    #[test]
    fn the_peak_of_the_reserved_bytes_is_returned() {
        let first = [(SegmentAlloc, 100, 50), (Alloc, 100, 30), (SegmentFree, 100, 50)];
        let second = [(SegmentAlloc, 300, 20), (Alloc, 310, 10), (SegmentAlloc, 400, 40)];
        assert_eq!(peak_reserved(&[first, second].concat()), Some(60));
    }

    #[test]
    fn parts_of_an_expandable_segment_come_and_go() {
        let events = [(SegmentMap, 0, 100), (Alloc, 0, 90), (SegmentUnmap, 20, 30)];
        assert_eq!(peak_reserved(&[&events[..], &[(SegmentMap, 200, 10)]].concat()), Some(100));
        assert_eq!(peak_reserved(&[&events[..], &[(SegmentMap, 200, 40)]].concat()), Some(110));
    }

    #[test]
    fn a_block_in_older_memory_gives_no_result() {
        assert_eq!(peak_reserved(&[(SegmentAlloc, 100, 50), (Alloc, 150, 1)]), None);
        assert_eq!(peak_reserved(&[(Alloc, 100, 1), (SegmentAlloc, 100, 50)]), None);
        assert_eq!(peak_reserved(&[(SegmentFree, 100, 50)]), None);
        assert_eq!(peak_reserved(&[]), None);
    }

    #[test]
    fn segments_from_before_the_window_do_not_count() {
        assert_eq!(peak_reserved(&[(SegmentFree, 500, 50), (SegmentAlloc, 100, 50)]), Some(50));
        assert_eq!(peak_reserved(&[(SegmentAlloc, u64::MAX - 1, 50)]), None);
    }
}
