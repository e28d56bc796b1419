//! The offset of the next block: the planned one if it is proven free, else the first fit.

use std::ops::Range;

use super::blocks::{Arena, ArenaPolicy, Capture};
use super::order::Point;
use super::plan::{Layout, PlannedBlock};

/// Number of single blocks that a capture may place off its plan before it leaves the plan.
const MISSES_MOST: u32 = 64;

/// How an allocation compares with the plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// The block is at its planned offset.
    Followed,
    /// The capture is as planned, but the offset was not free.
    Missed,
    /// There is no plan, or the capture differs from it.
    Departed,
}

impl Arena {
    /// The offset of the next block, or `None` if nothing fits.
    pub(super) fn choose(
        &self,
        capture: &Capture,
        len: u64,
        point: Point<'_>,
    ) -> Option<(u64, Step)> {
        let plan = self.plan.as_ref().filter(|_| capture.follows);
        let index = capture.recording.lives.len();
        let same = |block: &&PlannedBlock| block.len == len && block.chains == point.chains();
        let planned = plan.and_then(|plan| Some((plan, plan.blocks.get(index).filter(same)?)));
        let Some((plan, block)) = planned else {
            return Some((self.search(len, point, &[])?, Step::Departed));
        };
        if self.is_usable(block.offset, len, point) {
            return Some((block.offset, Step::Followed));
        }
        let ceiling = plan.high_water.max(capture.recording.high_water);
        let beside = self.search(len, point, &planned_during_life(plan, index));
        let beside = beside.filter(|offset| offset + len <= ceiling);
        Some((beside.or_else(|| self.search(len, point, &[]))?, Step::Missed))
    }

    /// Notes how the last allocation compares with the plan.
    pub(super) fn note(&mut self, step: Step) {
        let Some(capture) = &mut self.capture else { return };
        capture.misses += u32::from(step == Step::Missed);
        capture.follows &= step != Step::Departed && capture.misses <= MISSES_MOST;
    }

    fn is_usable(&self, offset: u64, len: u64, point: Point<'_>) -> bool {
        let end = offset.checked_add(len).filter(|&end| end <= self.capacity);
        end.is_some_and(|end| self.space.is_usable(offset..end, point))
    }

    /// The policy's offset for a block. Reusing takes the first fit: on recorded training steps it
    /// stays lower than best fit, whose exact fits near the top keep the top in use.
    fn search(&self, len: u64, point: Point<'_>, avoid: &[Range<u64>]) -> Option<u64> {
        if self.policy == ArenaPolicy::Monotone {
            return (self.touched.checked_add(len)? <= self.capacity).then_some(self.touched);
        }
        let mut runs = self.space.runs(point).flat_map(|run| without(run, avoid));
        runs.find(|run| run.end - run.start >= len).map(|run| run.start)
    }
}

/// The planned ranges of blocks that begin during the life of this one, by offset.
fn planned_during_life(plan: &Layout, index: usize) -> Vec<Range<u64>> {
    let until = (plan.blocks[index].until as usize).min(plan.blocks.len());
    let during = plan.blocks[index + 1..until].iter();
    let mut ranges: Vec<Range<u64>> =
        during.map(|block| block.offset..block.offset + block.len).collect();
    ranges.sort_unstable_by_key(|range| range.start);
    ranges
}

/// The parts of a run outside of some ranges, which are sorted by start.
pub(super) fn without(run: Range<u64>, avoid: &[Range<u64>]) -> impl Iterator<Item = Range<u64>> {
    let (mut at, end) = (run.start, run.end);
    let within = avoid.iter().take_while(move |stop| stop.start < end);
    let stops = within.cloned().chain(std::iter::once(end..end));
    stops.filter_map(move |stop| {
        let free = at..stop.start.min(end);
        at = at.max(stop.end);
        (!free.is_empty()).then_some(free)
    })
}
