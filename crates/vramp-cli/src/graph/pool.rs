//! What the recorded allocator held for the blocks of a capture.

use std::collections::BTreeMap;

use vramp_alloc::Bytes;
use vramp_trace::{Event, EventKind};

/// The most that was taken from the driver within `events`, if every block that was asked for lies
/// in memory taken there: PyTorch gives each capture a pool of its own. O(n log n).
pub(super) fn private_pool(events: &[Event], device: u32) -> Option<Bytes> {
    // Start and end of what was taken.
    let mut taken: BTreeMap<u64, u64> = BTreeMap::new();
    let (mut held, mut peak) = (0u128, 0u128);
    for event in events.iter().filter(|event| u32::from(event.device) == device) {
        let start = event.address.number();
        let end = start.checked_add(event.size.count())?;
        match event.kind {
            EventKind::SegmentAlloc | EventKind::SegmentMap => {
                let before = taken.insert(start, end).map_or(0, |old| old - start);
                held += u128::from(end - start);
                held -= u128::from(before);
                peak = peak.max(held);
            }
            EventKind::SegmentFree | EventKind::SegmentUnmap => {
                // It may be from before, or a part of what was taken at once.
                held -= u128::from(give(&mut taken, start, end));
            }
            EventKind::Alloc => {
                let (_, &until) = taken.range(..=start).next_back()?;
                if until <= start {
                    return None;
                }
            }
            _ => {}
        }
    }
    u64::try_from(peak).ok().filter(|&peak| peak > 0).map(Bytes::new)
}

/// Takes a stretch out of those that were taken; how much of it was there.
fn give(taken: &mut BTreeMap<u64, u64>, start: u64, end: u64) -> u64 {
    let touched: Vec<(u64, u64)> = taken
        .range(..end)
        .rev()
        .take_while(|&(_, &until)| until > start)
        .map(|(&from, &until)| (from, until))
        .collect();
    let mut given = 0;
    for (from, until) in touched {
        taken.remove(&from);
        if from < start {
            taken.insert(from, start);
        }
        if until > end {
            taken.insert(end, until);
        }
        given += until.min(end) - from.max(start);
    }
    given
}

#[cfg(test)]
mod tests {
    use vramp_alloc::DeviceAddr;
    use vramp_trace::StreamIndex;

    use super::*;

    fn held(events: &[(EventKind, u64, u64)]) -> Option<u64> {
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
    fn the_peak_of_what_was_taken_counts() {
        let first = [(SegmentAlloc, 100, 50), (Alloc, 100, 30), (SegmentFree, 100, 50)];
        let second = [(SegmentAlloc, 300, 20), (Alloc, 310, 10), (SegmentAlloc, 400, 40)];
        assert_eq!(held(&[first, second].concat()), Some(60));
    }

    #[test]
    fn parts_of_an_expandable_segment_come_and_go() {
        let events = [(SegmentMap, 0, 100), (Alloc, 0, 90), (SegmentUnmap, 20, 30)];
        assert_eq!(held(&[&events[..], &[(SegmentMap, 200, 10)]].concat()), Some(100));
        assert_eq!(held(&[&events[..], &[(SegmentMap, 200, 40)]].concat()), Some(110));
    }

    #[test]
    fn nothing_is_said_where_a_block_lies_in_older_memory() {
        assert_eq!(held(&[(SegmentAlloc, 100, 50), (Alloc, 150, 1)]), None);
        assert_eq!(held(&[(Alloc, 100, 1), (SegmentAlloc, 100, 50)]), None);
        assert_eq!(held(&[(SegmentFree, 100, 50)]), None);
        assert_eq!(held(&[]), None);
    }

    #[test]
    fn what_is_freed_from_before_does_not_count() {
        assert_eq!(held(&[(SegmentFree, 500, 50), (SegmentAlloc, 100, 50)]), Some(50));
        assert_eq!(held(&[(SegmentAlloc, u64::MAX - 1, 50)]), None);
    }
}
