//! Last accesses to each byte of one body: an interval map.
//!
//! Each stretch of bytes records its last write and the last read of each actor since then. That is
//! enough: an access ordered after those is ordered after all earlier ones, or a race was reported
//! already.

use std::collections::BTreeMap;

use super::clock::{Clock, Part, Stamp, Touch};

/// Recorded accesses to one stretch of bytes.
#[derive(Clone, Debug, Default)]
struct Stretch {
    end: u64,
    write: Option<Touch>,
    /// At most one for each actor, its last.
    reads: Vec<Touch>,
}

impl Stretch {
    fn forget_seen(&mut self, seen: &Clock) {
        self.write = self.write.filter(|touch| seen.of(touch.actor) < touch.step);
        self.reads.retain(|touch| seen.of(touch.actor) < touch.step);
    }

    fn is_forgotten(&self) -> bool {
        self.write.is_none() && self.reads.is_empty()
    }
}

#[derive(Debug, Default)]
pub(super) struct History {
    stretches: BTreeMap<u64, Stretch>,
    /// Number of stretches at which the next sweep is due.
    sweep_at: usize,
}

impl History {
    pub fn split(&mut self, at: u64) {
        if let Some((start, stretch)) = self.stretches.range_mut(..at).next_back()
            && *start < at
            && stretch.end > at
        {
            let behind = stretch.clone();
            stretch.end = at;
            self.stretches.insert(at, behind);
        }
    }

    /// Records one access and returns the earlier ones that it races with, each with whether it
    /// writes.
    pub fn access(
        &mut self,
        stamp: &Stamp,
        touch: Touch,
        part: Part,
        seen: &Clock,
    ) -> Vec<(Touch, bool)> {
        let end = part.offset + part.len;
        self.split(part.offset);
        self.split(end);
        let mut conflicts: Vec<(Touch, bool)> = Vec::new();
        let mut note = |earlier: &Touch, writes| {
            let same = |(c, _): &(Touch, bool)| (c.actor, c.step) == (earlier.actor, earlier.step);
            if !stamp.covers(earlier) && !conflicts.iter().any(same) {
                conflicts.push((*earlier, writes));
            }
        };
        let mut met = 0;
        let mut covered_to = part.offset;
        let mut gaps = Vec::new();
        for (start, stretch) in self.stretches.range_mut(part.offset..end) {
            met += 1;
            stretch.forget_seen(seen);
            if let Some(write) = &stretch.write {
                note(write, true);
            }
            if part.writes {
                stretch.reads.iter().for_each(|read| note(read, false));
            } else {
                stretch.reads.retain(|read| read.actor != touch.actor);
                stretch.reads.push(touch);
            }
            if *start > covered_to {
                gaps.push((covered_to, *start));
            }
            covered_to = stretch.end;
        }
        if part.writes {
            // Earlier accesses are ordered before this write or reported, so the write replaces them.
            if met > 1 || !gaps.is_empty() {
                self.forget_within(part.offset, end);
            }
            let stretch = Stretch { end, write: Some(touch), reads: Vec::new() };
            self.stretches.insert(part.offset, stretch);
        } else {
            if covered_to < end {
                gaps.push((covered_to, end));
            }
            for (start, end) in gaps {
                let stretch = Stretch { end, write: None, reads: vec![touch] };
                self.stretches.insert(start, stretch);
            }
        }
        self.sweep(seen);
        conflicts
    }

    pub fn forget_within(&mut self, start: u64, end: u64) {
        while let Some((&at, _)) = self.stretches.range(start..end).next() {
            self.stretches.remove(&at);
        }
    }

    fn sweep(&mut self, seen: &Clock) {
        if self.stretches.len() < self.sweep_at.max(64) {
            return;
        }
        self.stretches.retain(|_, stretch| {
            stretch.forget_seen(seen);
            !stretch.is_forgotten()
        });
        self.sweep_at = 2 * self.stretches.len();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::clock::Body;
    use super::super::hazard::Checker;
    use super::*;
    use crate::Stream;
    use vramp_core::{AddrRange, Bytes, DeviceAddr};

    /// What [`History`] must be at any time.
    fn check(history: &History) {
        let mut reached = 0;
        for (start, stretch) in &history.stretches {
            assert!(*start >= reached, "a stretch at {start} overlaps one that ends at {reached}");
            assert!(stretch.end > *start, "the stretch at {start} is empty");
            assert!(!stretch.is_forgotten(), "the stretch at {start} remembers nothing");
            reached = stretch.end;
        }
    }

    proptest! {
        #[test]
        fn stretches_never_overlap_and_a_write_leaves_one(
            accesses in prop::collection::vec((0..3u64, 0..64u64, 1..32u64, any::<bool>()), 1..60),
        ) {
            let mut checker = Checker::default();
            let mut history = History::default();
            for (stream, offset, len, writes) in accesses {
                let range = AddrRange::new(DeviceAddr::new(offset), Bytes::new(len));
                let part = Part { body: Body::Pool(0), offset, len, range, writes };
                let stamp = checker.step(Stream::from_number(stream + 1));
                let touch = stamp.touch(0, range);
                history.access(&stamp, touch, part, &Clock::default());
                check(&history);
                if writes {
                    prop_assert_eq!(history.stretches.range(offset..offset + len).count(), 1);
                }
            }
        }
    }
}
