//! Offline planning: offsets for a recorded capture that need hardly more than its peak.
//!
//! Blocks are rectangles, time by memory, that may move up and down. Three kinds of passes, the
//! best result of all counts:
//!
//! 1. *The recorded layout*: nothing returned is worse.
//! 2. *In the order of the program*, each block into a gap among those that live: long lives from
//!    the bottom, short ones from the top of a stretch as high as the bound. That is how a
//!    forward and backward pass is stacked by hand, and takes O(n) times the live blocks.
//! 3. *In an order of importance*, by size, life or area, each block to the lowest place where
//!    nothing that conflicts is placed already. Then the blocks that stick out go first, again and
//!    again.
//!
//! Work is counted in visited blocks, never in time: the same recording gives the same layout.

use std::ops::Range;

use super::plan::Layout;
use super::recording::{NEVER, Position, Recording};

/// How many blocks all passes may visit together. Keeps 20,000 blocks of one stream under a second.
const BUDGET: u64 = 400_000_000;

/// As close to the bound as is worth any work: thousandths.
const GOOD_PER_MILLE: u64 = 2;

/// Offsets for the blocks of a recording, at most as high as the capture's own.
///
/// O(n²) at worst, cut off by a budget of visited blocks. The result passes [`Layout::check`].
pub fn pack(recording: &Recording) -> Layout {
    let bound = recording.lower_bound().count();
    let mut packer = Packer::new(recording, bound);
    packer.sweeps();
    packer.by_importance();
    packer.improve();
    Layout::of(recording, &packer.best)
}

/// A block with a place.
#[derive(Clone, Copy, Debug)]
struct Placed {
    offset: u64,
    end: u64,
    index: Position,
}

/// A pass that came to an end: too high, or out of budget.
struct Stopped;

struct Packer<'a> {
    recording: &'a Recording,
    /// Of blocks and then of obstacles.
    ranges: Vec<Range<Position>>,
    bound: u64,
    best: Vec<u64>,
    best_end: u64,
    /// The order of importance that gave the best layout of its kind.
    order: Vec<Position>,
    order_end: u64,
    visits_left: u64,
}

/// Where a sweep puts a block that fits in several gaps.
#[derive(Clone, Copy, Debug)]
enum Fit {
    First,
    Best,
}

impl<'a> Packer<'a> {
    fn new(recording: &'a Recording, bound: u64) -> Packer<'a> {
        let free_from = recording.free_from();
        let born = 0..recording.lives.len() as Position;
        let lives = born.zip(&free_from.lives).map(|(from, &until)| from..until);
        let obstacles = free_from.obstacles.iter().map(|&until| 0..until);
        let ranges = lives.chain(obstacles).collect();
        let best: Vec<u64> = recording.lives.iter().map(|life| life.offset).collect();
        Packer {
            recording,
            ranges,
            bound,
            best_end: recording.high_water,
            best,
            order: Vec::new(),
            order_end: u64::MAX,
            visits_left: BUDGET,
        }
    }

    fn is_good(&self) -> bool {
        self.best_end <= self.bound + self.bound / 1000 * GOOD_PER_MILLE
    }

    fn len(&self, index: Position) -> u64 {
        self.recording.lives[index as usize].len
    }

    fn life(&self, index: Position) -> u64 {
        let end =
            (self.recording.lives[index as usize].until).min(self.recording.lives.len() as u32);
        u64::from(end - index)
    }

    fn spend(&mut self, visits: u64) -> Result<(), Stopped> {
        self.visits_left = self.visits_left.checked_sub(visits).ok_or(Stopped)?;
        Ok(())
    }

    fn keep(&mut self, offsets: Vec<u64>) {
        let ends = offsets.iter().zip(&self.recording.lives).map(|(at, life)| at + life.len);
        let end = ends.max().unwrap_or(0).max(self.recording.obstacle_end());
        if end < self.best_end {
            (self.best, self.best_end) = (offsets, end);
        }
    }

    /// True if the two may be in use at once. Blocks have smaller indices than obstacles.
    fn conflict(&self, a: Position, b: Position) -> bool {
        let (first, second) = (a.min(b), a.max(b));
        let blocks = self.recording.lives.len() as Position;
        if second >= blocks {
            let fixed = &self.recording.obstacles[(second - blocks) as usize];
            return self.recording.is_blocked(fixed, first as usize);
        }
        self.recording.conflict(first as usize, second as usize)
    }

    fn obstacles(&self) -> Vec<Placed> {
        let first = self.recording.lives.len() as Position;
        let fixed = self.recording.obstacles.iter().map(|fixed| &fixed.range);
        let mut placed: Vec<Placed> = (first..)
            .zip(fixed)
            .map(|(index, range)| Placed { offset: range.start, end: range.end, index })
            .collect();
        placed.sort_unstable_by_key(|placed| placed.offset);
        placed
    }

    /// Passes in the order of the program, with several ideas of what a long life is.
    fn sweeps(&mut self) {
        let mut lives: Vec<u64> =
            (0..self.recording.lives.len() as u32).map(|i| self.life(i)).collect();
        lives.sort_unstable();
        lives.dedup();
        for fit in [Fit::First, Fit::Best] {
            for percent in [0, 50, 75, 25, 90, 60, 40, 95, 10, 99] {
                let Some(&long) = lives.get(lives.len() * percent / 100) else { return };
                if self.is_good() {
                    return;
                }
                match self.sweep(fit, long) {
                    Ok(offsets) => {
                        let end = offsets
                            .iter()
                            .zip(&self.recording.lives)
                            .map(|(at, life)| at + life.len)
                            .max()
                            .unwrap_or(0);
                        if std::env::var("PACKDBG").is_ok() {
                            eprintln!(
                                "sweep {fit:?} {percent} {:.4}",
                                end as f64 / self.bound as f64
                            );
                        }
                        self.keep(offsets)
                    }
                    Err(Stopped) if self.visits_left == 0 => return,
                    Err(Stopped) => {}
                }
            }
        }
    }

    fn sweep(&mut self, fit: Fit, long: u64) -> Result<Vec<u64>, Stopped> {
        let mut offsets = Vec::with_capacity(self.recording.lives.len());
        let mut open = self.obstacles();
        for block in 0..self.recording.lives.len() as Position {
            open.retain(|placed| self.ranges[placed.index as usize].end > block);
            self.spend(open.len() as u64 + 1)?;
            let is_long = self.life(block) >= long;
            let offset = self.gap(&open, block, fit, is_long);
            let end = offset + self.len(block);
            let at = open.partition_point(|placed| placed.offset < offset);
            open.insert(at, Placed { offset, end, index: block });
            offsets.push(offset);
        }
        Ok(offsets)
    }

    /// The gap below the bound that suits a block, or the lowest above.
    fn gap(&self, open: &[Placed], block: Position, fit: Fit, is_long: bool) -> u64 {
        let len = self.len(block);
        let mut at = 0;
        let mut chosen: Option<Range<u64>> = None;
        let met = open.iter().filter(|placed| self.conflict(placed.index, block));
        for stretch in
            met.map(|placed| placed.offset..placed.end).chain([self.bound.max(len)..u64::MAX])
        {
            let gap = at..stretch.start.min(self.bound);
            if gap.end >= gap.start + len {
                let better = match (&chosen, fit) {
                    (None, _) => true,
                    (Some(old), Fit::Best) if gap.end - gap.start != old.end - old.start => {
                        gap.end - gap.start < old.end - old.start
                    }
                    (Some(_), _) => !is_long,
                };
                if better {
                    chosen = Some(gap);
                }
            }
            at = at.max(if stretch.end == u64::MAX { at } else { stretch.end });
        }
        match chosen {
            Some(gap) if is_long => gap.start,
            Some(gap) => gap.end - len,
            None => self.first_fit(open, block),
        }
    }

    /// The lowest place where nothing that conflicts lies.
    fn first_fit(&self, placed: &[Placed], block: Position) -> u64 {
        let (len, life) = (self.len(block), &self.ranges[block as usize]);
        let mut at = 0;
        for other in placed {
            if other.offset >= at + len {
                break;
            }
            let range = &self.ranges[other.index as usize];
            if other.end > at
                && range.start < life.end
                && life.start < range.end
                && self.conflict(other.index, block)
            {
                at = other.end;
            }
        }
        at
    }

    /// Passes that place important blocks first.
    fn by_importance(&mut self) {
        type Key = fn(&Packer<'_>, Position) -> (u64, u64);
        let keys: [(&str, Key); 4] = [
            ("size", |packer, block| (packer.len(block), packer.life(block))),
            ("life", |packer, block| (packer.life(block), packer.len(block))),
            ("area", |packer, block| (packer.len(block).saturating_mul(packer.life(block)), 0)),
            ("wide", |packer, block| {
                let len = packer.len(block);
                (63 - u64::from(len.leading_zeros()), packer.life(block))
            }),
        ];
        for (name, key) in keys {
            if self.is_good() {
                return;
            }
            let mut order: Vec<Position> = (0..self.recording.lives.len() as Position).collect();
            order.sort_by_key(|&block| std::cmp::Reverse(key(self, block)));
            let Ok(offsets) = self.place_in(&order) else {
                if self.visits_left == 0 {
                    return;
                }
                continue;
            };
            let end = offsets
                .iter()
                .zip(&self.recording.lives)
                .map(|(at, life)| at + life.len)
                .max()
                .unwrap_or(0);
            if std::env::var("PACKDBG").is_ok() {
                eprintln!("order {name} {:.4}", end as f64 / self.bound as f64);
            }
            if end < self.order_end {
                (self.order, self.order_end) = (order, end);
            }
            self.keep(offsets);
        }
    }

    fn place_in(&mut self, order: &[Position]) -> Result<Vec<u64>, Stopped> {
        let mut offsets = vec![0; self.recording.lives.len()];
        let mut placed = self.obstacles();
        for &block in order {
            let offset = self.first_fit(&placed, block);
            let end = offset + self.len(block);
            let at = placed.partition_point(|placed| placed.offset < offset);
            self.spend(at as u64 + (placed.len() - at) as u64 / 8 + 1)?;
            placed.insert(at, Placed { offset, end, index: block });
            offsets[block as usize] = offset;
        }
        Ok(offsets)
    }

    /// Lets the blocks that stick out go first, as long as that helps now and then.
    fn improve(&mut self) {
        let mut random = 0x9e37_79b9_7f4a_7c15_u64;
        let mut order = self.order.clone();
        while !self.is_good() && !order.is_empty() {
            let Ok(offsets) = self.place_in(&order) else { return };
            let goal = self.best_end.min(self.bound + self.bound / 1000 * GOOD_PER_MILLE);
            let sticks_out = |&block: &Position| offsets[block as usize] + self.len(block) > goal;
            let (mut first, rest): (Vec<Position>, Vec<Position>) =
                order.iter().partition(|block| sticks_out(block));
            self.keep(offsets);
            if first.is_empty() {
                return;
            }
            for at in (1..first.len()).rev() {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                first.swap(at, (random % (at as u64 + 1)) as usize);
            }
            first.extend(rest);
            order = first;
        }
        let _ = NEVER;
    }
}
