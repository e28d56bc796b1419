//! Every invariant of the caching allocator, checked from scratch.

use super::block::{Class, Slot, State};
use super::pool::TorchPool;
use vramp_core::Inconsistency;

type Check = Result<(), String>;

impl TorchPool {
    /// Checks every invariant. O(n log n): for tests and `--audit`.
    pub fn audit(&self) -> Result<(), Inconsistency> {
        let checks = [
            self.blocks_fill_their_segments(),
            self.idle_neighbours_are_merged(),
            self.idle_blocks_are_listed(),
            self.waiting_blocks_are_queued(),
            self.sums_agree(),
        ];
        checks.into_iter().collect::<Check>().map_err(|what| Inconsistency { what })
    }

    fn blocks_fill_their_segments(&self) -> Check {
        let mut filled = vec![0u64; self.segments.len()];
        for (slot, block) in self.blocks.iter() {
            let Some(Some(segment)) = self.segments.get(block.segment.index()) else {
                return Err(format!("block {slot} lies in no segment"));
            };
            filled[block.segment.index()] += block.len;
            let begins = block.at == segment.at;
            let ends = block.at.since(segment.at) + block.len == segment.len;
            if block.len == 0 || begins != block.prev.is_none() || ends != block.next.is_none() {
                return Err(format!("block {slot} of {} is linked wrongly", block.segment));
            }
            if let Some(next) = block.next {
                let behind = self.blocks.get(next);
                if behind.at != block.at.plus(block.len) || behind.prev != Some(slot) {
                    return Err(format!("block {next} does not follow {slot}"));
                }
            }
        }
        let lengths = self.segments.iter().map(|segment| segment.as_ref().map_or(0, |s| s.len));
        match filled.into_iter().eq(lengths) {
            true => Ok(()),
            false => Err("the blocks of a segment do not fill it".to_owned()),
        }
    }

    fn idle_neighbours_are_merged(&self) -> Check {
        for (slot, block) in self.blocks.iter() {
            let same = block.next.filter(|&next| self.blocks.get(next).state == block.state);
            if let (Some(next), State::Free | State::Unmapped) = (same, block.state) {
                return Err(format!("blocks {slot} and {next} are both {:?}", block.state));
            }
        }
        Ok(())
    }

    fn idle_blocks_are_listed(&self) -> Check {
        let listed = |slot: Slot| {
            let block = self.blocks.get(slot);
            let lists = self.lists(block.class);
            match block.state {
                State::Free => lists.free.contains(&(block.stream, block.len, block.at, slot)),
                State::Unmapped => lists.unmapped.contains(&(block.stream, block.at, slot)),
                _ => true,
            }
        };
        if let Some((slot, _)) = self.blocks.iter().find(|&(slot, _)| !listed(slot)) {
            return Err(format!("block {slot} is not listed"));
        }
        let is_idle = |state| matches!(state, State::Free | State::Unmapped);
        let idle = self.blocks.iter().filter(|(_, block)| is_idle(block.state)).count();
        let all = Class::ALL.map(|class| self.lists(class));
        let listed: usize = all.iter().map(|lists| lists.free.len() + lists.unmapped.len()).sum();
        if idle == listed { Ok(()) } else { Err(format!("{idle} idle blocks, {listed} listed")) }
    }

    fn waiting_blocks_are_queued(&self) -> Check {
        for (slot, block) in self.blocks.iter() {
            let queued = self.streams.iter().flat_map(|(_, stream)| &stream.waiting);
            let queued = queued.filter(|(_, waiting)| *waiting == slot).count();
            let marks = if let State::Waiting(marks) = block.state { marks as usize } else { 0 };
            if queued != marks {
                return Err(format!("block {slot} waits for {marks} marks, {queued} are queued"));
            }
        }
        Ok(())
    }

    fn sums_agree(&self) -> Check {
        let sum = |wanted: fn(State) -> bool| -> u64 {
            let blocks = self.blocks.iter().map(|(_, block)| block);
            blocks.filter(|block| wanted(block.state)).map(|block| block.len).sum()
        };
        let requested: u64 = self
            .blocks
            .iter()
            .filter(|(_, b)| b.state == State::Used)
            .map(|(_, b)| b.requested)
            .sum();
        let split = self
            .blocks
            .iter()
            .filter(|(_, b)| b.state == State::Free && b.is_split() && !self.is_expandable(b));
        let split: u64 = split.map(|(_, block)| block.len).sum();
        let stats = &self.stats;
        for (what, counted, found) in [
            ("reserved", self.reserved, sum(|state| state != State::Unmapped)),
            ("reserved", stats.reserved_bytes.all.current, self.reserved),
            ("allocated", stats.allocated_bytes.all.current, sum(|state| state == State::Used)),
            (
                "active",
                stats.active_bytes.all.current,
                sum(|state| matches!(state, State::Used | State::Waiting(_))),
            ),
            ("live", self.counters.live.count(), requested),
            ("split", stats.inactive_split_bytes.all.current, split),
        ] {
            if counted != found {
                return Err(format!("{what}: {counted} counted, {found} found"));
            }
        }
        Ok(())
    }
}
