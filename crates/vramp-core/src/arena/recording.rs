//! The recording of a capture: its blocks, when they were live, and the order of their uses.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::order::{Clocks, Frontier, Horizon};
use crate::Bytes;

/// Positions in a recording count allocations: position `n` is just before the `n`th, from 0.
pub(crate) type Position = u32;

/// The position after the end, for blocks that were not freed in the capture.
pub(crate) const NEVER: Position = Position::MAX;

/// One block of a capture. Its life begins at its own position in the list.
#[derive(Clone, Debug)]
pub(crate) struct Life {
    /// Rounded length in bytes.
    pub len: u64,
    /// Offset in the capture.
    pub offset: u64,
    /// Position of the free.
    pub until: Position,
    /// The work that its first use is ordered after.
    pub from: Horizon,
    /// Its last uses. Empty while it lives.
    pub last: Frontier,
}

/// Memory that was live when the capture began, and stays where it is: a block that this capture
/// freed, or all blocks between two free ranges.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Obstacle {
    pub range: Range<u64>,
    pub until: Position,
    pub last: Frontier,
}

/// The blocks of one capture in the order of the program. Made by [`super::Arena::end`].
#[derive(Clone, Debug, Default)]
pub struct CaptureRecording {
    pub(crate) lives: Vec<Life>,
    pub(crate) obstacles: Vec<Obstacle>,
    pub(crate) high_water: u64,
    /// What was live when the capture began.
    pub(crate) before: Digest,
    /// The lists to which the horizons of the lives refer.
    pub(crate) clocks: Clocks,
}

impl CaptureRecording {
    /// Number of blocks of the capture.
    pub fn blocks(&self) -> usize {
        self.lives.len()
    }

    /// Number of blocks that outlived it.
    pub fn escaped(&self) -> usize {
        self.lives.iter().filter(|life| life.until == NEVER).count()
    }

    /// Bytes that a bump pointer needs: all blocks one after the other, after those live before.
    pub fn monotone(&self) -> Bytes {
        Bytes::new(self.obstacle_end() + self.lives.iter().map(|life| life.len).sum::<u64>())
    }

    /// High-water mark of the capture.
    pub fn high_water(&self) -> Bytes {
        Bytes::new(self.high_water)
    }

    /// True if the other capture had the same blocks and the same order between all their uses, among
    /// the same memory that was live before: what is planned for one serves the other. O(n).
    pub fn is_same_shape(&self, other: &CaptureRecording) -> bool {
        let same = |(a, b): (&Life, &Life)| {
            a.len == b.len && a.until == b.until && a.from == b.from && a.last == b.last
        };
        self.lives.len() == other.lives.len()
            && self.before == other.before
            && self.lives.iter().zip(&other.lives).all(same)
            && self.obstacles == other.obstacles
            && self.clocks == other.clocks
    }

    /// Returns the same blocks with other ranges live throughout, given by offset and length: more
    /// may be live in the next capture than in this one. O(n).
    ///
    /// The offsets of this capture are replaced; a layout has to be packed anew.
    pub fn among(&self, live: impl IntoIterator<Item = (Bytes, Bytes)>) -> CaptureRecording {
        let obstacle = |(offset, len): (Bytes, Bytes)| Obstacle {
            range: offset.count()..(offset + len).count(),
            until: NEVER,
            last: Frontier::default(),
        };
        let mut moved = CaptureRecording {
            lives: self.lives.clone(),
            obstacles: live.into_iter().map(obstacle).collect(),
            clocks: self.clocks.clone(),
            ..CaptureRecording::default()
        };
        moved.before = Digest::default();
        for fixed in &moved.obstacles {
            moved.before.add(&fixed.range);
        }
        let mut end = moved.obstacle_end();
        for life in &mut moved.lives {
            life.offset = end;
            end += life.len;
        }
        moved.high_water = end;
        moved
    }

    /// True if the two may be in use at the same time, in program order or in the graph's order.
    pub(crate) fn conflict(&self, earlier: usize, later: usize) -> bool {
        let life = &self.lives[earlier];
        self.meets(life.until, &life.last, later)
    }

    /// True if the block of an earlier capture may be in use at the same time.
    pub(crate) fn is_blocked(&self, by: &Obstacle, later: usize) -> bool {
        self.meets(by.until, &by.last, later)
    }

    fn meets(&self, until: Position, last: &Frontier, later: usize) -> bool {
        until as usize > later || !self.clocks.point(&self.lives[later].from).covers(last)
    }

    /// Number of chains in which a block is used last. O(n).
    pub(crate) fn chains(&self) -> usize {
        let lasts = self.lives.iter().map(|life| &life.last);
        let lasts = lasts.chain(self.obstacles.iter().map(|fixed| &fixed.last));
        let chains = lasts.flat_map(|last| last.steps()).map(|step| step.chain);
        chains.collect::<BTreeSet<u32>>().len()
    }

    pub(crate) fn obstacle_end(&self) -> u64 {
        self.obstacles.iter().map(|fixed| fixed.range.end).max().unwrap_or(0)
    }
}

/// A number for a set of addresses, kept up to date by what is added and removed. It does not depend
/// on how the set is cut into ranges. Two sets may have the same number: it decides whether a plan is
/// made again, not whether memory is free.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Digest(u64);

impl Digest {
    pub(crate) fn add(&mut self, range: &Range<u64>) {
        self.0 = self.0.wrapping_add(Digest::of(range));
    }

    pub(crate) fn remove(&mut self, range: &Range<u64>) {
        self.0 = self.0.wrapping_sub(Digest::of(range));
    }

    /// Neighbours add up to what their union has.
    fn of(range: &Range<u64>) -> u64 {
        let mix = |at: u64| {
            let at = at.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            (at ^ (at >> 31)).wrapping_mul(0xbf58_476d_1ce4_e5b9)
        };
        mix(range.end).wrapping_sub(mix(range.start))
    }
}

impl Obstacle {
    pub(crate) fn len(&self) -> u64 {
        self.range.end - self.range.start
    }
}

impl CaptureRecording {
    /// For each block, from which position on every later block is ordered after its last use. With
    /// one stream that is where it is freed; a frontier that some later point does not cover keeps it
    /// open. O(n), and O(n) for each chain of the order.
    pub(crate) fn free_from(&self) -> Vec<Position> {
        let lives: Vec<Position> = (0..self.lives.len() as Position).collect();
        self.free_from_among(&lives, &mut 0)
    }

    /// The same for some of the blocks, as if there were no others: indices into them. O(m log m), and
    /// O(m) for each chain that uses one of the `m` blocks. Adds the number of visited blocks to
    /// `visits`.
    pub(crate) fn free_from_among(&self, members: &[Position], visits: &mut u64) -> Vec<Position> {
        let first = |until: Position| match until {
            NEVER => NEVER,
            until if members.get(until as usize) == Some(&until) => until,
            until => members.partition_point(|&member| member < until) as Position,
        };
        let lives = || members.iter().map(|&member| &self.lives[member as usize]);
        let mut from: Vec<Position> = lives().map(|life| first(life.until)).collect();
        // By chain: the places of last uses, and whose they are.
        let mut chains: BTreeMap<u32, Vec<(u32, u32)>> = BTreeMap::new();
        for (end, life) in (0..).zip(lives()).filter(|(_, life)| life.until != NEVER) {
            for step in life.last.steps() {
                chains.entry(step.chain).or_default().push((step.place, end));
            }
        }
        let mut least = vec![0; members.len()];
        for (chain, steps) in chains {
            *visits += (members.len() + steps.len()) as u64;
            // The nearest place of this chain that any member from here on is ordered after.
            let mut nearest = u32::MAX;
            for (least, life) in least.iter_mut().zip(lives()).rev() {
                nearest = nearest.min(self.clocks.point(&life.from).place_in(chain));
                *least = nearest;
            }
            for (last, end) in steps {
                let from = &mut from[end as usize];
                // Usually whatever begins after the free is ordered after it.
                if least.get(*from as usize).is_some_and(|&place| place < last) {
                    *from = least.partition_point(|&place| place < last) as Position;
                }
            }
        }
        from
    }
}
