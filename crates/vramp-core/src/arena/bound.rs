//! Lower bounds for any layout of a recording.
//!
//! In program order the bound is the peak of live bytes. Between streams the captured order proves
//! less: take one cut point on each chain. Blocks that begin before some cut point and end before no
//! cut point conflict pairwise: a block that ended before another one begins would end before the
//! cut point that the other begins before. So each of them needs addresses of its own.

use std::collections::BTreeSet;

use super::order::Frontier;
use super::recording::{CaptureRecording, NEVER, Obstacle, Position};
use crate::Bytes;

/// With more chains only the peak is used: the search takes a pass for each chain.
const CHAINS_MOST: usize = 16;

/// Number of rounds that move all points. One is enough where no chain waits for another.
const ROUNDS: u32 = 4;

/// One place in each chain.
type Places = Vec<u32>;

/// A block, by places.
struct Use {
    len: u64,
    /// The places that its first work is ordered after.
    from: Places,
    /// The places of its last work, 0 in chains without any; `None` if it is in use to the end.
    last: Option<Places>,
}

impl Use {
    fn has_begun(&self, point: &Places) -> bool {
        is_before(&self.from, point)
    }

    fn is_over(&self, point: &Places) -> bool {
        self.last.as_ref().is_some_and(|last| is_before(last, point))
    }
}

fn is_before(places: &Places, point: &Places) -> bool {
    places.iter().zip(point).all(|(place, reached)| place <= reached)
}

impl CaptureRecording {
    /// Returns the peak of live bytes in program order, each block rounded to 256 bytes, with the
    /// blocks that were live before: no layout can go below it. O(n).
    pub fn lower_bound(&self) -> Bytes {
        Bytes::new(self.peak().0)
    }

    /// Returns a bound for layouts that rely on the captured order alone: the most bytes of blocks of
    /// which no two are ordered, as far as a search along the chains finds them. At least the lower
    /// bound, and exactly that with more than 16 chains. O(n log n) for each pair of
    /// chains.
    pub fn conflict_bound(&self) -> Bytes {
        let (peak, at) = self.peak();
        let lasts = self.lives.iter().map(|life| &life.last);
        let lasts = lasts.chain(self.obstacles.iter().map(|fixed| &fixed.last));
        let mut chains: Vec<u32> =
            lasts.flat_map(|last| last.steps()).map(|step| step.chain).collect();
        chains.sort_unstable();
        chains.dedup();
        let heads: BTreeSet<Option<u32>> = self.lives.iter().map(|life| life.from.head()).collect();
        if chains.len().max(heads.len()) > CHAINS_MOST {
            return Bytes::new(peak);
        }
        let uses = self.uses(&chains);
        let paths: Vec<Vec<&Places>> =
            heads.into_iter().map(|chain| self.path(&uses, chain)).collect();
        // The search begins where the program has its peak.
        let now = uses.get(self.obstacles.len() + at as usize);
        let reached = |path: &Vec<&Places>| {
            now.map_or(0, |now| path.partition_point(|point| is_before(point, &now.from)))
        };
        let mut points: Vec<Option<&Places>> =
            paths.iter().map(|path| path.get(reached(path).saturating_sub(1)).copied()).collect();
        let mut most = 0;
        for _ in 0..ROUNDS {
            let known = most;
            for (chain, path) in paths.iter().enumerate() {
                points[chain] = None;
                let others: Vec<&Places> = points.iter().flatten().copied().collect();
                let (live, point) = peak_along(&uses, &others, path);
                (most, points[chain]) = (most.max(live), point);
            }
            if most == known {
                break;
            }
        }
        Bytes::new(most.max(peak))
    }

    /// The peak of live bytes in program order, and the block that reaches it.
    fn peak(&self) -> (u64, Position) {
        let mut freed = vec![0; self.lives.len() + 1];
        let mut count = |until: Position, len: u64| {
            if let Some(freed) = freed.get_mut(until as usize) {
                *freed += len;
            }
        };
        self.lives.iter().for_each(|life| count(life.until, life.len));
        self.obstacles.iter().for_each(|fixed| count(fixed.until, fixed.len()));
        let mut live: u64 = self.obstacles.iter().map(Obstacle::len).sum();
        let (mut peak, mut at) = (live.max(self.obstacle_end()), 0);
        for ((index, life), freed) in (0..).zip(&self.lives).zip(&freed) {
            live = live - freed + life.len;
            if live > peak {
                (peak, at) = (live, index);
            }
        }
        (peak, at)
    }

    /// The blocks that were live before, then those of the capture.
    fn uses(&self, chains: &[u32]) -> Vec<Use> {
        let last = |until: Position, last: &Frontier| {
            let place = |&chain: &u32| {
                last.steps().iter().find(|step| step.chain == chain).map_or(0, |step| step.place)
            };
            (until != NEVER && !last.is_never()).then(|| chains.iter().map(place).collect())
        };
        let fixed = self.obstacles.iter().map(|fixed| Use {
            len: fixed.len(),
            from: vec![0; chains.len()],
            last: last(fixed.until, &fixed.last),
        });
        let lives = self.lives.iter().map(|life| {
            let point = self.clocks.point(&life.from);
            Use {
                len: life.len,
                from: chains.iter().map(|&chain| point.place_in(chain)).collect(),
                last: last(life.until, &life.last),
            }
        });
        fixed.chain(lives).collect()
    }

    /// Points of a chain where blocks begin, each after the one before.
    fn path<'a>(&self, uses: &'a [Use], chain: Option<u32>) -> Vec<&'a Places> {
        let mut path: Vec<&Places> = Vec::new();
        for (life, begun) in self.lives.iter().zip(&uses[self.obstacles.len()..]) {
            let is_here = life.from.head() == chain;
            if is_here && path.last().is_none_or(|before| is_before(before, &begun.from)) {
                path.push(&begun.from);
            }
        }
        path
    }
}

/// The most bytes in conflict at these points and one more of a path, and that point.
fn peak_along<'a>(
    uses: &[Use],
    others: &[&Places],
    path: &[&'a Places],
) -> (u64, Option<&'a Places>) {
    let (mut begun, mut over) = (vec![0_u64; path.len() + 1], vec![0_u64; path.len() + 1]);
    for used in uses.iter().filter(|used| !others.iter().any(|point| used.is_over(point))) {
        let from = match others.iter().any(|point| used.has_begun(point)) {
            true => 0,
            false => path.partition_point(|point| !used.has_begun(point)),
        };
        let until = path.partition_point(|point| !used.is_over(point));
        if from < until {
            begun[from] += used.len;
            over[until] += used.len;
        }
    }
    let (mut live, mut most) = (0, (0, path.first().copied()));
    for ((point, begun), over) in path.iter().zip(begun).zip(over) {
        live = live + begun - over;
        if live > most.0 {
            most = (live, Some(*point));
        }
    }
    most
}
