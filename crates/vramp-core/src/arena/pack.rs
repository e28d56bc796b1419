//! Offline planning: offsets for a recorded capture that need hardly more than its peak.
//!
//! Blocks are rectangles, time by memory, that may move up and down. Each pass takes them in an
//! order of importance, by size first of all, and puts each at the lowest place where nothing that
//! conflicts was put before. Then, in the best of these orders, the blocks that stick out go first,
//! again and again. The best layout counts, and the recorded one takes part: nothing returned is worse.
//!
//! Work is counted in visited blocks, never in time: the same recording gives the same layout.

use std::cmp::Reverse;
use std::ops::Range;

use super::plan::Layout;
use super::recording::{Position, Recording};

/// How many placed blocks all passes may visit together. Keeps 20,000 blocks of one stream under a
/// second.
pub(super) const BUDGET: u64 = 250_000_000;

/// So close to the bound, in thousandths of it, no more work is done.
const GOOD_PER_MILLE: u64 = 1;

/// What so many blocks cost to move up by one in a list, counted in visits.
const MOVED_PER_VISIT: u64 = 8;

/// Offsets for the blocks of a recording, at most as high as the capture's own.
///
/// O(n * n) at worst, cut off by a budget of visited blocks. The result passes [`Layout::check`].
pub fn pack(recording: &Recording) -> Layout {
    Layout::of(recording, &Packer::new(recording).run())
}

/// A block with a place, and when nothing else may be there.
#[derive(Clone, Debug)]
struct Placed {
    offset: u64,
    end: u64,
    index: Position,
    /// From the allocation to the first position that all later blocks are ordered after.
    open: Range<Position>,
}

/// No visits are left.
#[derive(Debug)]
struct OutOfBudget;

/// Offsets of all blocks, and their highest end.
#[derive(Clone, Debug)]
struct Packed {
    offsets: Vec<u64>,
    end: u64,
}

pub(super) struct Packer<'a> {
    recording: &'a Recording,
    /// When a block's place is closed to others. Obstacles come behind the blocks.
    open: Vec<Range<Position>>,
    bound: u64,
    best: Packed,
    visits_left: u64,
    random: u64,
}

impl<'a> Packer<'a> {
    pub(super) fn new(recording: &'a Recording) -> Packer<'a> {
        let free_from = recording.free_from();
        let lives = (0..).zip(&free_from.lives).map(|(from, &until)| from..until);
        let obstacles = free_from.obstacles.iter().map(|&until| 0..until);
        let offsets = recording.lives.iter().map(|life| life.offset).collect();
        Packer {
            recording,
            open: lives.chain(obstacles).collect(),
            bound: recording.lower_bound().count(),
            best: Packed { offsets, end: recording.high_water },
            visits_left: BUDGET,
            random: 0x9e37_79b9_7f4a_7c15,
        }
    }

    /// The best offsets that the budget allows.
    pub(super) fn run(&mut self) -> Vec<u64> {
        // Whoever runs out of budget leaves the best layout behind.
        let _out_of_budget = self.by_importance();
        std::mem::take(&mut self.best.offsets)
    }

    /// How much of the budget was not needed.
    #[cfg(test)]
    pub(super) fn visits_left(&self) -> u64 {
        self.visits_left
    }

    fn by_importance(&mut self) -> Result<(), OutOfBudget> {
        let by_size = self.ordered(|len, life| (len, u64::from(life.end - life.start)));
        let by_area =
            self.ordered(|len, life| (len.saturating_mul(u64::from(life.end - life.start)), len));
        let backwards = self.ordered(|_, life| (u64::from(life.end), u64::from(life.start)));
        let by_life = self.ordered(|len, life| (u64::from(life.end - life.start), len));
        let mut foremost: Option<(u64, Vec<Position>)> = None;
        for order in [by_size, by_area, backwards, by_life] {
            if self.is_good() {
                return Ok(());
            }
            let end = self.place(&order)?.end;
            if foremost.as_ref().is_none_or(|(least, _)| end < *least) {
                foremost = Some((end, order));
            }
        }
        foremost.map_or(Ok(()), |(_, order)| self.improve(order))
    }

    fn is_good(&self) -> bool {
        self.best.end <= self.bound + self.bound / 1000 * GOOD_PER_MILLE
    }

    /// All blocks, those with the largest key of length and life first.
    fn ordered(&self, key: impl Fn(u64, Range<Position>) -> (u64, u64)) -> Vec<Position> {
        let blocks = self.recording.lives.len() as Position;
        let mut order: Vec<Position> = (0..blocks).collect();
        order.sort_by_cached_key(|&block| {
            let life = &self.recording.lives[block as usize];
            Reverse(key(life.len, block..life.until.min(blocks)))
        });
        order
    }

    /// Lets those blocks go first that stick out, again and again.
    fn improve(&mut self, mut order: Vec<Position>) -> Result<(), OutOfBudget> {
        const ROUNDS: u32 = 64;
        for _ in 0..ROUNDS {
            if self.is_good() {
                break;
            }
            let packed = self.place(&order)?;
            let goal = packed.end - packed.end.saturating_sub(self.bound) / 2;
            let ends_above = |&block: &Position| {
                packed.offsets[block as usize] + self.recording.lives[block as usize].len > goal
            };
            let (mut first, rest): (Vec<Position>, Vec<Position>) =
                order.iter().partition(|block| ends_above(block));
            self.shuffle(&mut first);
            first.extend(rest);
            order = first;
        }
        Ok(())
    }

    /// Places blocks in this order, each as low as it may be, and keeps the best layout.
    fn place(&mut self, order: &[Position]) -> Result<Packed, OutOfBudget> {
        let mut placed = self.obstacles();
        let end = self.recording.obstacle_end();
        let mut packed = Packed { offsets: vec![0; order.len()], end };
        for &block in order {
            let offset = self.first_fit(&placed, block)?;
            let end = offset + self.recording.lives[block as usize].len;
            let at = placed.partition_point(|placed| placed.offset < offset);
            self.spend((placed.len() - at) as u64 / MOVED_PER_VISIT)?;
            let open = self.open[block as usize].clone();
            placed.insert(at, Placed { offset, end, index: block, open });
            packed.offsets[block as usize] = offset;
            packed.end = packed.end.max(end);
        }
        if packed.end < self.best.end {
            self.best = packed.clone();
        }
        Ok(packed)
    }

    /// What stays where it is, lowest first.
    fn obstacles(&self) -> Vec<Placed> {
        let blocks = self.recording.lives.len();
        let fixed = self.recording.obstacles.iter().zip(&self.open[blocks..]);
        let mut placed: Vec<Placed> = (blocks as Position..)
            .zip(fixed)
            .map(|(index, (fixed, open))| {
                let (offset, end) = (fixed.range.start, fixed.range.end);
                Placed { offset, end, index, open: open.clone() }
            })
            .collect();
        placed.sort_unstable_by_key(|placed| placed.offset);
        placed
    }

    /// The lowest place where nothing that conflicts lies.
    fn first_fit(&mut self, placed: &[Placed], block: Position) -> Result<u64, OutOfBudget> {
        let len = self.recording.lives[block as usize].len;
        let open = &self.open[block as usize];
        let (mut at, mut visits) = (0, 1);
        for other in placed {
            if other.offset >= at + len {
                break;
            }
            visits += 1;
            let may_meet = other.open.start < open.end && open.start < other.open.end;
            if other.end > at && may_meet && self.conflict(other.index, block) {
                at = other.end;
            }
        }
        self.spend(visits)?;
        Ok(at)
    }

    /// True if both may be in use at once: a block and another one, or an obstacle.
    fn conflict(&self, other: Position, block: Position) -> bool {
        match (other as usize).checked_sub(self.recording.lives.len()) {
            Some(fixed) => {
                self.recording.is_blocked(&self.recording.obstacles[fixed], block as usize)
            }
            None => {
                let (earlier, later) = (other.min(block), other.max(block));
                self.recording.conflict(earlier as usize, later as usize)
            }
        }
    }

    fn spend(&mut self, visits: u64) -> Result<(), OutOfBudget> {
        self.visits_left = self.visits_left.checked_sub(visits).ok_or(OutOfBudget)?;
        Ok(())
    }

    /// Another order of the same blocks, the same one each time.
    fn shuffle(&mut self, blocks: &mut [Position]) {
        for at in (1..blocks.len()).rev() {
            // Xorshift: what order it is does not matter, that it is the same does.
            self.random ^= self.random << 13;
            self.random ^= self.random >> 7;
            self.random ^= self.random << 17;
            blocks.swap(at, (self.random % (at as u64 + 1)) as usize);
        }
    }
}
