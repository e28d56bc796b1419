//! The arena's sums and invariants, from scratch.

use std::ops::Range;

use super::blocks::{Arena, ArenaCensus, Held};
use super::recording::{CaptureRecording, Digest, NEVER};
use crate::{Bytes, Inconsistency};

impl Arena {
    /// Bytes by state, added up from scratch. O(live blocks).
    pub fn census(&self) -> ArenaCensus {
        let used = self.held.values().map(|held| held.range.end - held.range.start).sum::<u64>();
        ArenaCensus {
            blocks: self.held.len(),
            live: Bytes::new(self.held.values().map(|held| held.requested).sum()),
            used: Bytes::new(used),
            free: Bytes::new(self.touched - used),
            untouched: Bytes::new(self.capacity - self.touched),
        }
    }

    /// Checks every invariant. O(n log n): for tests.
    ///
    /// # Errors
    /// The first that does not hold.
    pub fn audit(&self) -> Result<(), Inconsistency> {
        let checks = [self.stretches_lie_end_to_end(), self.tables_agree(), self.sums_agree()];
        let checked: Result<(), String> = checks.into_iter().collect();
        checked.map_err(|what| Inconsistency { what: format!("{}: {what}", self.id) })
    }

    fn stretches_lie_end_to_end(&self) -> Result<(), String> {
        let held = self.held.values().map(|held| held.range.clone());
        let mut all: Vec<Range<u64>> = self.space.stretches().chain(held).collect();
        all.sort_unstable_by_key(|range| range.start);
        let mut at = 0;
        for range in all {
            if range.start != at || range.is_empty() {
                return Err(format!("{range:?} does not follow what ends at {at}"));
            }
            at = range.end;
        }
        match (at == self.capacity, self.space.unmerged()) {
            (false, _) => Err(format!("blocks and free pieces end at {at}")),
            (true, Some(start)) => Err(format!("the free piece at {start} is not merged")),
            (true, None) => Ok(()),
        }
    }

    fn tables_agree(&self) -> Result<(), String> {
        for (id, held) in &self.held {
            if self.offsets.get(&held.range.start) != Some(id) {
                return Err(format!("{id:?} is not listed at its offset {}", held.range.start));
            }
            let recorded = self
                .capture
                .as_ref()
                .is_none_or(|capture| held.capture < self.captures || capture.recording.has(held));
            if !recorded {
                return Err(format!("{id:?} is not recorded as it is"));
            }
        }
        match self.offsets.len() == self.held.len() {
            true => Ok(()),
            false => Err(format!("{} offsets for {} blocks", self.offsets.len(), self.held.len())),
        }
    }

    fn sums_agree(&self) -> Result<(), String> {
        let live: u64 = self.held.values().map(|held| held.requested).sum();
        let end = self.held.values().map(|held| held.range.end).max().unwrap_or(0);
        let mut digest = Digest::default();
        self.held.values().for_each(|held| digest.add(&held.range));
        if digest != self.digest {
            return Err(format!("the digest of live memory is {:?}", self.digest));
        }
        match (live == self.live, end <= self.touched && self.touched <= self.capacity) {
            (false, _) => Err(format!("{live} bytes are live, {} are counted", self.live)),
            (true, false) => Err(format!("a block ends at {end}, above {}", self.touched)),
            (true, true) => Ok(()),
        }
    }
}

impl CaptureRecording {
    fn has(&self, held: &Held) -> bool {
        held.life.is_none_or(|index| {
            self.lives.get(index).is_some_and(|life| {
                life.until == NEVER && held.range == (life.offset..life.offset + life.len)
            })
        })
    }
}
