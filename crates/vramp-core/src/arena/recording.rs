//! The recording of a capture: its blocks, when they were live, and the order of their uses.

use std::collections::BTreeSet;
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

/// A block that was live when the capture began: it stays where it is.
#[derive(Clone, Debug)]
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

    /// Ranges that were live when the capture began: offsets and lengths, by offset.
    pub fn before(&self) -> impl Iterator<Item = (Bytes, Bytes)> {
        let ranges = self.obstacles.iter().map(|obstacle| &obstacle.range);
        ranges.map(|range| (Bytes::new(range.start), Bytes::new(range.end - range.start)))
    }

    /// Returns the same blocks with other ranges live throughout, given by offset and length: more
    /// may be live in the next capture than in this one.
    ///
    /// The offsets of this capture are replaced; a layout has to be packed anew.
    pub fn among(&self, live: impl IntoIterator<Item = (Bytes, Bytes)>) -> CaptureRecording {
        let obstacle = |(offset, len): (Bytes, Bytes)| Obstacle {
            range: offset.count()..(offset + len).count(),
            until: NEVER,
            last: Frontier::default(),
        };
        let mut moved = CaptureRecording {
            obstacles: live.into_iter().map(obstacle).collect(),
            ..self.clone()
        };
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

    pub(crate) fn obstacle_end(&self) -> u64 {
        self.obstacles.iter().map(|fixed| fixed.range.end).max().unwrap_or(0)
    }
}

impl Obstacle {
    pub(crate) fn len(&self) -> u64 {
        self.range.end - self.range.start
    }
}

/// From which position on every later block is ordered after a block's last use.
#[derive(Clone, Debug, Default)]
pub(crate) struct FreeFrom {
    pub lives: Vec<Position>,
    pub obstacles: Vec<Position>,
}

impl CaptureRecording {
    /// With one stream that is where a block is freed; a frontier that some later point does not
    /// cover keeps it open. O(n log n) for each chain of the order.
    pub(crate) fn free_from(&self) -> FreeFrom {
        let mut free = FreeFrom {
            lives: self.lives.iter().map(|life| life.until).collect(),
            obstacles: self.obstacles.iter().map(|fixed| fixed.until).collect(),
        };
        let lasts = self.lives.iter().map(|life| &life.last);
        let lasts = lasts.chain(self.obstacles.iter().map(|fixed| &fixed.last));
        let lasts: Vec<&Frontier> = lasts.collect();
        let steps = lasts.iter().flat_map(|last| last.steps());
        let chains: BTreeSet<u32> = steps.map(|step| step.chain).collect();
        for chain in chains {
            // The nearest place of this chain that any block from here on is ordered after.
            let mut least: Vec<u32> = Vec::with_capacity(self.lives.len());
            for life in self.lives.iter().rev() {
                let place = self.clocks.point(&life.from).place_in(chain);
                least.push(least.last().map_or(place, |&last| place.min(last)));
            }
            least.reverse();
            let froms = free.lives.iter_mut().chain(&mut free.obstacles);
            for (from, last) in froms.zip(&lasts) {
                for step in last.steps().iter().filter(|step| step.chain == chain) {
                    let covered = least.partition_point(|&place| place < step.place);
                    *from = (*from).max(covered as Position);
                }
            }
        }
        free
    }
}
