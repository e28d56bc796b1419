//! The blocks that are not placed yet, searched by time, length and importance.
//!
//! Blocks are kept in groups of neighbours, and a tree over the groups has the earliest end, the
//! shortest length and the most important block below each node. A search looks only where a block
//! may fit and be more important than what it has found: usually at O(log n) nodes and a few groups.
//! Among many blocks it is content with one that fits after a few nodes: a search for the most
//! important of all would look at more and more of those that end too late.
//! A block takes 12 bytes, and 2 for the tree.

use std::ops::Range;

use super::recording::Position;

/// Blocks in a group: compared without branches.
const GROUP: usize = 16;

/// Lengths are compared in units of this, the alignment of all of them; longer ones than two billion
/// units as if they had that many.
const UNIT: u64 = 256;

/// Most blocks among which the most important one that fits is found.
const EXACT_MOST: usize = 1 << 13;

/// Number of visits after which a search among more blocks ends, if it has found one.
const VISITS_ENOUGH: u64 = 12;

/// A block: it begins at its own position.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate {
    pub end: Position,
    pub len: u64,
    /// The greatest goes first, then the longest, and the later one of equals.
    pub key: u64,
}

/// What is below a node: nothing by default, which fits nowhere. Signed numbers are compared faster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Node {
    end: i32,
    units: i32,
    /// Place of the block in the order of the keys, from 1.
    rank: i32,
}

const NOTHING: Node = Node { end: i32::MAX, units: i32::MAX, rank: 0 };

/// Neighbours.
#[derive(Clone, Debug)]
#[repr(align(64))]
struct Group {
    end: [i32; GROUP],
    units: [i32; GROUP],
    rank: [i32; GROUP],
}

#[derive(Debug)]
pub(super) struct Candidates {
    /// The root is at 1, the children of `n` at `2 * n` and behind it; then the groups.
    nodes: Vec<Node>,
    groups: Vec<Group>,
    /// Number of the first group's node.
    first: usize,
    /// Blocks by rank.
    by_rank: Vec<Position>,
    visits_enough: u64,
    left: usize,
}

/// Where a block has to fit.
#[derive(Clone, Debug)]
pub(super) struct Fit {
    pub during: Range<Position>,
    pub room: u64,
}

fn units(len: u64) -> i32 {
    i32::try_from(len.div_ceil(UNIT)).unwrap_or(i32::MAX - 1)
}

fn signed(at: Position) -> i32 {
    i32::try_from(at).expect("fewer than two billion blocks")
}

impl Candidates {
    /// O(n log n).
    pub(super) fn new(candidates: &[Candidate]) -> Candidates {
        let left = candidates.len();
        // Key, length and position in one number: compared at once.
        let number = |(at, block): (u32, &Candidate)| {
            u128::from(block.key) << 64
                | u128::from(units(block.len).unsigned_abs()) << 32
                | u128::from(at)
        };
        let mut order: Vec<u128> = (0..).zip(candidates).map(number).collect();
        order.sort_unstable();
        let by_rank: Vec<Position> = order.iter().map(|&number| number as Position).collect();
        let first = left.div_ceil(GROUP).next_power_of_two();
        let empty =
            Group { end: [NOTHING.end; GROUP], units: [NOTHING.units; GROUP], rank: [0; GROUP] };
        let mut groups = vec![empty; left.div_ceil(GROUP)];
        for (at, block) in candidates.iter().enumerate() {
            let group = &mut groups[at / GROUP];
            (group.end[at % GROUP], group.units[at % GROUP]) =
                (signed(block.end), units(block.len));
        }
        for (rank, &block) in (1..).zip(&by_rank) {
            groups[block as usize / GROUP].rank[block as usize % GROUP] = rank;
        }
        let nodes = vec![NOTHING; 2 * first];
        let visits_enough = if left > EXACT_MOST { VISITS_ENOUGH } else { u64::MAX };
        let mut candidates = Candidates { nodes, groups, first, by_rank, visits_enough, left };
        for (node, group) in (first..).zip(&candidates.groups) {
            candidates.nodes[node] = group.sum();
        }
        (1..first).rev().for_each(|node| candidates.nodes[node] = candidates.joined(node));
        candidates
    }

    pub(super) fn is_empty(&self) -> bool {
        self.left == 0
    }

    pub(super) fn remove(&mut self, block: Position) {
        let (group, at) = (block as usize / GROUP, block as usize % GROUP);
        let neighbours = &mut self.groups[group];
        (neighbours.end[at], neighbours.units[at]) = (NOTHING.end, NOTHING.units);
        neighbours.rank[at] = NOTHING.rank;
        self.left -= 1;
        let (mut node, mut sum) = (self.first + group, neighbours.sum());
        while self.nodes[node] != sum {
            self.nodes[node] = sum;
            node /= 2;
            if node == 0 {
                break;
            }
            sum = self.joined(node);
        }
    }

    /// The most important block that fits, or one of them where there are many blocks. Adds the nodes
    /// and groups it looked at to `visits`.
    pub(super) fn best(&self, fit: &Fit, visits: &mut u64) -> Option<Position> {
        let (start, end) = (fit.during.start, fit.during.end);
        let mut search = Search {
            start: start as usize,
            end: signed(end),
            units: units(fit.room),
            rank: 0,
            visits: 0,
        };
        // From below: most valleys are narrow.
        let mut from = self.first + start as usize / GROUP;
        let mut to = self.first + (end as usize).div_ceil(GROUP);
        while from < to {
            if from % 2 == 1 {
                self.look(from, &mut search);
                from += 1;
            }
            if to % 2 == 1 {
                to -= 1;
                self.look(to, &mut search);
            }
            (from, to) = (from / 2, to / 2);
        }
        *visits += search.visits;
        let rank = (search.rank as usize).checked_sub(1)?;
        Some(self.by_rank[rank])
    }

    fn joined(&self, node: usize) -> Node {
        let (a, b) = (self.nodes[2 * node], self.nodes[2 * node + 1]);
        Node { end: a.end.min(b.end), units: a.units.min(b.units), rank: a.rank.max(b.rank) }
    }

    /// Searches below a node if a block there may fit and be more important.
    #[inline]
    fn look(&self, node: usize, search: &mut Search) {
        search.visits += 1;
        let Node { end, units, rank } = self.nodes[node];
        if (end <= search.end) & (units <= search.units) & (rank > search.rank) {
            self.search(node, search);
        }
    }

    fn search(&self, node: usize, search: &mut Search) {
        if search.visits > self.visits_enough && search.rank > 0 {
            return;
        }
        if node >= self.first {
            search.rank = self.groups[node - self.first].best(node - self.first, search);
            return;
        }
        let mut halves = [2 * node, 2 * node + 1];
        if self.nodes[halves[1]].rank > self.nodes[halves[0]].rank {
            halves.swap(0, 1);
        }
        self.look(halves[0], search);
        self.look(halves[1], search);
    }
}

/// Where a block has to fit, and the most important one so far.
struct Search {
    start: usize,
    end: i32,
    units: i32,
    /// 0 for none.
    rank: i32,
    visits: u64,
}

impl Group {
    fn sum(&self) -> Node {
        let min = |numbers: &[i32; GROUP]| numbers.iter().fold(i32::MAX, |min, &n| min.min(n));
        let rank = self.rank.iter().fold(0, |max, &rank| max.max(rank));
        Node { end: min(&self.end), units: min(&self.units), rank }
    }

    /// The greatest rank of a block that fits, or the one known before. A block that ends in time
    /// begins in time.
    fn best(&self, number: usize, search: &Search) -> i32 {
        let before = search.start.saturating_sub(number * GROUP);
        let mut best = search.rank;
        let consider = |at: usize| {
            let fits = (self.end[at] <= search.end) & (self.units[at] <= search.units);
            best = best.max(self.rank[at] & -i32::from(fits));
        };
        match before {
            0 => (0..GROUP).for_each(consider),
            _ => (before..GROUP).for_each(consider),
        }
        best
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn blocks() -> impl Strategy<Value = Vec<Candidate>> {
        let block = (1..9u32, 1..5u64, 0..4u64);
        prop::collection::vec(block, 1..100).prop_map(|blocks| {
            let block = |(at, (lasts, len, key)): (u32, (u32, u64, u64))| Candidate {
                end: at + lasts,
                len: len * UNIT,
                key,
            };
            (0..).zip(blocks).map(block).collect()
        })
    }

    proptest! {
        #[test]
        fn the_tree_finds_what_a_search_of_all_finds(
            blocks in blocks(),
            fits in prop::collection::vec((0..100u32, 0..100u32, 0..6u64), 80),
        ) {
            let mut tree = Candidates::new(&blocks);
            let mut left: Vec<Option<Candidate>> = blocks.into_iter().map(Some).collect();
            for (start, len, room) in fits {
                let (end, room) = ((start + len).min(left.len() as u32), room * UNIT);
                let fit = Fit { during: start.min(end)..end, room };
                let best = (0..).zip(&left).filter_map(|(at, block)| Some((at, (*block)?)));
                let fits = |&(at, block): &(Position, Candidate)| {
                    start <= at && block.end <= end && block.len <= room
                };
                let best = best.filter(fits).max_by_key(|(_, block)| (block.key, block.len)).map(|(at, _)| at);
                prop_assert_eq!(tree.best(&fit, &mut 0), best);
                if let Some(best) = best {
                    tree.remove(best);
                    left[best as usize] = None;
                }
            }
            prop_assert_eq!(tree.is_empty(), left.iter().all(Option::is_none));
        }
    }
}
