//! Offline planning: offsets for a recorded capture that need hardly more than its peak.
//!
//! Blocks are rectangles, time by memory, that may move up and down. Each pass takes them in an
//! order and puts each at the lowest place where nothing that conflicts was put before. The first
//! orders fill valleys (`skyline.rs`), the others go by size, area or life. Then, in the best of them,
//! the blocks that stick out go first, all of them and then one by one. The best layout counts, and
//! the recorded one takes part: nothing returned is worse.
//!
//! Work is counted in visited blocks, never in time: the same recording gives the same layout.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Range;

use super::plan::Layout;
use super::recording::{CaptureRecording, Position};
use super::skyline::Skyline;

/// How many placed blocks all passes may visit together. Keeps 20,000 blocks of one stream under a
/// second.
pub(super) const BUDGET: u64 = 250_000_000;

/// Part of that for moving single blocks: some ten milliseconds, enough for hundreds.
const SINGLES: u64 = 20_000_000;

/// Packing stops this close to the bound, in thousandths of it.
const GOOD_PER_MILLE: u64 = 1;

/// Number of blocks moved up by one in a list for the cost of one visit.
const MOVED_PER_VISIT: u64 = 8;

/// Most blocks for which valleys are filled: each block then lies above nearly all others, and
/// visits nearly all of them.
const VALLEYS_MOST: usize = 8_000;

/// Number of positions of a valley scanned for the cost of one visit.
const SCANNED_PER_VISIT: u64 = 2;

/// Returns offsets for the blocks of a recording, at most as high as the capture's own.
///
/// O(n * n) at worst, cut off by a budget of visited blocks. The result passes [`Layout::check`].
pub fn pack(recording: &CaptureRecording) -> Layout {
    Layout::of(recording, &Packer::new(recording).run())
}

/// A placed block, and the positions at which no other block may be there.
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

/// An order and its offsets.
#[derive(Clone, Debug)]
struct Pass {
    order: Vec<Position>,
    packed: Packed,
}

/// Importance of a block, by its length and its life.
type Key = fn(u64, &Range<Position>) -> (u64, u64);

/// How blocks are ordered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    /// The largest key first.
    Key,
    /// Into the lowest valley, the largest key first.
    Valleys,
    /// The same, one stream after the other.
    Streams,
}

/// The orders tried, one after the other, until a layout is good. Valleys by area alone bring recorded
/// training steps to within a thousandth of the bound.
const ORDERS: [(By, Key); 7] = [
    (By::Valleys, by_area),
    (By::Streams, by_area),
    (By::Key, by_size),
    (By::Key, by_area),
    (By::Key, by_end),
    (By::Key, by_life),
    (By::Valleys, by_life),
];

fn by_area(len: u64, life: &Range<Position>) -> (u64, u64) {
    (len.saturating_mul(u64::from(life.end - life.start)), len)
}

fn by_size(len: u64, life: &Range<Position>) -> (u64, u64) {
    (len, u64::from(life.end - life.start))
}

fn by_life(len: u64, life: &Range<Position>) -> (u64, u64) {
    (u64::from(life.end - life.start), len)
}

fn by_end(_: u64, life: &Range<Position>) -> (u64, u64) {
    (u64::from(life.end), u64::from(life.start))
}

pub(super) struct Packer<'a> {
    recording: &'a CaptureRecording,
    /// Positions at which a block's place is closed to others. Obstacles come after the blocks.
    open: Vec<Range<Position>>,
    bound: u64,
    best: Packed,
    visits_left: u64,
    random: u64,
}

impl<'a> Packer<'a> {
    pub(super) fn new(recording: &'a CaptureRecording) -> Packer<'a> {
        let free_from = recording.free_from();
        let lives = (0..).zip(&free_from.lives).map(|(from, &until)| from..until);
        let obstacles = free_from.obstacles.iter().map(|&until| 0..until);
        let offsets = recording.lives.iter().map(|life| life.offset).collect();
        Packer {
            recording,
            open: lives.chain(obstacles).collect(),
            bound: recording.conflict_bound().count(),
            best: Packed { offsets, end: recording.high_water },
            visits_left: BUDGET,
            random: 0x9e37_79b9_7f4a_7c15,
        }
    }

    /// The best offsets that the budget allows.
    pub(super) fn run(&mut self) -> Vec<u64> {
        // The best layout so far counts when the budget is spent.
        let _out_of_budget = self.by_importance();
        std::mem::take(&mut self.best.offsets)
    }

    /// Unspent budget.
    #[cfg(test)]
    pub(super) fn visits_left(&self) -> u64 {
        self.visits_left
    }

    fn by_importance(&mut self) -> Result<(), OutOfBudget> {
        let mut foremost: Option<Pass> = None;
        let valleys = self.recording.lives.len() <= VALLEYS_MOST;
        for (by, key) in ORDERS.into_iter().filter(|&(by, _)| valleys || by == By::Key) {
            if self.is_good() {
                return Ok(());
            }
            let order = match by {
                By::Key => self.by_key(key),
                By::Valleys => self.by_valleys(key, vec![false; self.recording.lives.len()])?,
                By::Streams => self.by_streams(key)?,
            };
            let Some(packed) = self.place(&order, u64::MAX)? else { continue };
            if foremost.as_ref().is_none_or(|least| packed.end < least.packed.end) {
                foremost = Some(Pass { order, packed });
            }
        }
        let Some(mut pass) = foremost else { return Ok(()) };
        self.lift_all(&mut pass)?;
        self.lift_one_by_one(&mut pass)
    }

    fn is_good(&self) -> bool {
        self.best.end <= self.bound + self.bound / 1000 * GOOD_PER_MILLE
    }

    /// All blocks, those with the largest key first.
    fn by_key(&self, key: Key) -> Vec<Position> {
        let blocks = self.recording.lives.len() as Position;
        let mut order: Vec<Position> = (0..blocks).collect();
        order.sort_by_cached_key(|&block| {
            let life = &self.recording.lives[block as usize];
            Reverse(key(life.len, &(block..life.until.min(blocks))))
        });
        order
    }

    /// The blocks of one stream after those of the other, each stream's by valleys: streams that do
    /// not wait for each other share no memory, and leave no holes if each has a band of its own.
    fn by_streams(&mut self, key: Key) -> Result<Vec<Position>, OutOfBudget> {
        let lives = &self.recording.lives;
        let mut streams: BTreeMap<Option<u32>, Vec<bool>> = BTreeMap::new();
        for (block, life) in lives.iter().enumerate() {
            let stream = life.from.chains().first().copied();
            streams.entry(stream).or_insert_with(|| vec![true; lives.len()])[block] = false;
        }
        let mut order = Vec::with_capacity(lives.len());
        for is_placed in streams.into_values() {
            order.extend(self.by_valleys(key, is_placed)?);
        }
        Ok(order)
    }

    /// The blocks that are not placed yet, each put into the lowest valley of those before it; where
    /// several fit wholly into the valley, the one with the largest key.
    fn by_valleys(
        &mut self,
        key: Key,
        mut is_placed: Vec<bool>,
    ) -> Result<Vec<Position>, OutOfBudget> {
        let lives = &self.recording.lives;
        let blocks = lives.len() as Position;
        let mut skyline = Skyline::new(blocks);
        let mut left = is_placed.iter().filter(|placed| !**placed).count();
        let mut order = Vec::with_capacity(left);
        while left > 0 {
            let valley = skyline.valley();
            self.spend(u64::from(valley.end - valley.start) / SCANNED_PER_VISIT + 1)?;
            let life = |block: Position| block..lives[block as usize].until.min(blocks);
            let len = |block: Position| lives[block as usize].len;
            // One block begins at each position, so the valley names the blocks that may fit.
            let unplaced = valley.clone().filter(|&block| !is_placed[block as usize]);
            let fits = unplaced.filter(|&block| life(block).end <= valley.end);
            match fits.max_by_key(|&block| key(len(block), &life(block))) {
                Some(block) => {
                    skyline.put(life(block), len(block));
                    is_placed[block as usize] = true;
                    order.push(block);
                    left -= 1;
                }
                None => skyline.fill(valley),
            }
        }
        Ok(order)
    }

    /// Moves the blocks above the goal to the front of the order, all at once.
    fn lift_all(&mut self, pass: &mut Pass) -> Result<(), OutOfBudget> {
        const ROUNDS: u32 = 64;
        let mut other = pass.clone();
        for _ in 0..ROUNDS {
            if self.is_good() {
                break;
            }
            let goal = other.packed.end - other.packed.end.saturating_sub(self.bound) / 2;
            let (mut first, rest): (Vec<Position>, Vec<Position>) =
                other.order.iter().partition(|&&block| self.end(&other.packed, block) > goal);
            self.shuffle(&mut first);
            first.extend(rest);
            other.order = first;
            let Some(packed) = self.place(&other.order, u64::MAX)? else { break };
            other.packed = packed;
            if other.packed.end < pass.packed.end {
                *pass = other.clone();
            }
        }
        Ok(())
    }

    /// Moves single blocks above the bound to an earlier place in the order, and keeps moves that are
    /// no worse: most leave the top as it is, and a later one lowers it.
    fn lift_one_by_one(&mut self, pass: &mut Pass) -> Result<(), OutOfBudget> {
        const ROUNDS: u32 = 512;
        let enough = self.visits_left.saturating_sub(SINGLES);
        for _ in 0..ROUNDS {
            if self.is_good() || self.visits_left <= enough {
                break;
            }
            let sticks_out = |&at: &usize| self.end(&pass.packed, pass.order[at]) > self.bound;
            let high: Vec<usize> = (1..pass.order.len()).filter(sticks_out).collect();
            if high.is_empty() {
                break;
            }
            let from = high[self.below(high.len())];
            let to = self.below(from);
            pass.order[to..=from].rotate_right(1);
            match self.place(&pass.order, pass.packed.end)? {
                Some(packed) => pass.packed = packed,
                None => pass.order[to..=from].rotate_left(1),
            }
        }
        Ok(())
    }

    fn end(&self, packed: &Packed, block: Position) -> u64 {
        packed.offsets[block as usize] + self.recording.lives[block as usize].len
    }

    /// Places blocks in this order, each as low as it may be, and keeps the best layout. `None` if a
    /// block ends above the limit.
    fn place(&mut self, order: &[Position], limit: u64) -> Result<Option<Packed>, OutOfBudget> {
        let mut placed = self.obstacles();
        let end = self.recording.obstacle_end();
        let mut packed = Packed { offsets: vec![0; order.len()], end };
        for &block in order {
            let offset = self.first_fit(&placed, block)?;
            let end = offset + self.recording.lives[block as usize].len;
            if end > limit {
                return Ok(None);
            }
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
        Ok(Some(packed))
    }

    /// The blocks that were live before the capture, lowest first.
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

    /// The lowest offset where no conflicting block lies.
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

    /// Shuffles blocks, in the same way each time.
    fn shuffle(&mut self, blocks: &mut [Position]) {
        for at in (1..blocks.len()).rev() {
            let other = self.below(at + 1);
            blocks.swap(at, other);
        }
    }

    /// A number below `end`, the same one each time.
    fn below(&mut self, end: usize) -> usize {
        // Xorshift: any numbers do, as long as they are the same each time.
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random % end as u64) as usize
    }
}
