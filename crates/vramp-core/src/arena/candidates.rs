//! The blocks that are not placed yet, searched by time, length and importance.
//!
//! Blocks are kept in groups of neighbours, and a tree over the groups has the earliest end, the
//! shortest length and the most important block below each node. A search looks only where a block
//! may fit and be more important than what it has found: usually at O(log n) nodes and a few groups.
//! A block takes 12 bytes, and 2 for the tree.

use std::ops::Range;

use super::recording::Position;

/// Blocks in a group: compared without branches.
const GROUP: usize = 16;

/// Lengths are compared in units of this, the alignment of all of them; longer ones than four billion
/// units as if they had that many.
const UNIT: u64 = 256;

/// A block: it begins at its own position.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate {
    pub end: Position,
    pub len: u64,
    /// The greatest goes first, and the later one of equals.
    pub key: (u64, u64),
}

/// What is below a node: nothing by default, which fits nowhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Node {
    end: Position,
    units: u32,
    /// Place of the block in the order of the keys, from 1.
    rank: u32,
}

const NOTHING: Node = Node { end: Position::MAX, units: u32::MAX, rank: 0 };

#[derive(Debug)]
pub(super) struct Candidates {
    /// The root is at 1, the children of `n` at `2 * n` and behind it.
    nodes: Vec<Node>,
    groups: usize,
    blocks: Vec<Node>,
    /// Blocks by rank.
    by_rank: Vec<Position>,
    left: usize,
}

/// Where a block has to fit.
#[derive(Clone, Debug)]
pub(super) struct Fit {
    pub during: Range<Position>,
    pub room: u64,
}

fn units(len: u64) -> u32 {
    u32::try_from(len.div_ceil(UNIT)).unwrap_or(u32::MAX - 1)
}

impl Candidates {
    /// O(n log n).
    pub(super) fn new(candidates: &[Candidate]) -> Candidates {
        let left = candidates.len();
        let mut by_rank: Vec<Position> = (0..left as Position).collect();
        by_rank.sort_by_key(|&block| candidates[block as usize].key);
        let node = |candidate: &Candidate| Node {
            end: candidate.end,
            units: units(candidate.len),
            rank: 0,
        };
        let mut blocks: Vec<Node> = candidates.iter().map(node).collect();
        for (rank, &block) in (1..).zip(&by_rank) {
            blocks[block as usize].rank = rank;
        }
        blocks.resize(left.next_multiple_of(GROUP), NOTHING);
        let groups = (blocks.len() / GROUP).next_power_of_two();
        let nodes = vec![NOTHING; 2 * groups];
        let mut candidates = Candidates { nodes, groups, blocks, by_rank, left };
        (0..candidates.blocks.len() / GROUP).for_each(|group| candidates.sum_up(group));
        (1..groups).rev().for_each(|node| candidates.join(node));
        candidates
    }

    pub(super) fn is_empty(&self) -> bool {
        self.left == 0
    }

    pub(super) fn remove(&mut self, block: Position) {
        let group = block as usize / GROUP;
        self.blocks[block as usize] = NOTHING;
        self.left -= 1;
        self.sum_up(group);
        let mut node = self.groups + group;
        while node > 1 {
            node /= 2;
            let before = self.nodes[node];
            self.join(node);
            if self.nodes[node] == before {
                break;
            }
        }
    }

    /// The most important block that fits. Adds the nodes and groups it looked at to `visits`.
    pub(super) fn best(&self, fit: &Fit, visits: &mut u64) -> Option<Position> {
        let within = fit.during.start as usize..fit.during.end as usize;
        let mut search = Search { end: fit.during.end, units: units(fit.room), rank: 0, visits: 0 };
        // From below: most valleys are narrow.
        let mut first = self.groups + within.start / GROUP;
        let mut end = self.groups + within.end.div_ceil(GROUP);
        while first < end {
            if first % 2 == 1 {
                self.search(first, &within, &mut search);
                first += 1;
            }
            if end % 2 == 1 {
                end -= 1;
                self.search(end, &within, &mut search);
            }
            (first, end) = (first / 2, end / 2);
        }
        *visits += search.visits;
        let rank = (search.rank as usize).checked_sub(1)?;
        Some(self.by_rank[rank])
    }

    fn sum_up(&mut self, group: usize) {
        let blocks = self.blocks[group * GROUP..][..GROUP].iter();
        self.nodes[self.groups + group] = blocks.fold(NOTHING, |sum, &block| sum.and(block));
    }

    fn join(&mut self, node: usize) {
        self.nodes[node] = self.nodes[2 * node].and(self.nodes[2 * node + 1]);
    }

    /// Searches below a node if a block there may fit and be more important.
    fn search(&self, node: usize, within: &Range<usize>, search: &mut Search) {
        search.visits += 1;
        let Node { end, units, rank } = self.nodes[node];
        if end > search.end || units > search.units || rank <= search.rank {
            return;
        }
        if node >= self.groups {
            let group = (node - self.groups) * GROUP..(node - self.groups + 1) * GROUP;
            let (from, to) = (group.start.max(within.start), group.end.min(within.end));
            for block in &self.blocks[from..to] {
                let fits = block.end <= search.end && block.units <= search.units;
                search.rank = search.rank.max(if fits { block.rank } else { 0 });
            }
            return;
        }
        let mut halves = [2 * node, 2 * node + 1];
        if self.nodes[halves[1]].rank > self.nodes[halves[0]].rank {
            halves.swap(0, 1);
        }
        for half in halves {
            self.search(half, within, search);
        }
    }
}

/// Where a block has to fit, and the most important one so far.
struct Search {
    end: Position,
    units: u32,
    /// 0 for none.
    rank: u32,
    visits: u64,
}

impl Node {
    fn and(self, other: Node) -> Node {
        Node {
            end: self.end.min(other.end),
            units: self.units.min(other.units),
            rank: self.rank.max(other.rank),
        }
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
                key: (key, len),
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
                let best = best.filter(fits).max_by_key(|(_, block)| block.key).map(|(at, _)| at);
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
