//! The naive twin: the order as a graph that is searched, and every pair of blocks compared.

use std::collections::BTreeMap;

use super::*;

/// Captured work without any cleverness.
#[derive(Clone, Debug, Default)]
pub(super) struct NaiveOrder(BTreeMap<NodeId, Vec<NodeId>>);

impl NaiveOrder {
    pub(super) fn add(&mut self, node: NodeId, predecessors: &[NodeId]) {
        self.0.insert(node, predecessors.to_vec());
    }

    /// Searches backwards from `later`.
    pub(super) fn reaches(&self, earlier: NodeId, later: NodeId) -> bool {
        let (mut open, mut seen) = (vec![later], Vec::new());
        while let Some(node) = open.pop() {
            if node == earlier {
                return true;
            }
            if !seen.contains(&node) {
                seen.push(node);
                open.extend(&self.0[&node]);
            }
        }
        false
    }

    fn covers(&self, last: &[NodeId], from: &[NodeId]) -> bool {
        last.iter().all(|&end| from.iter().any(|&start| self.reaches(end, start)))
    }
}

/// A block as the program used it.
#[derive(Clone, Debug)]
pub(super) struct NaiveLife {
    pub block: ArenaBlock,
    /// The point of its allocation.
    pub from: Vec<NodeId>,
    /// The points of its uses and its free. `None` while it lives.
    pub last: Option<Vec<NodeId>>,
    pub uses: Vec<NodeId>,
}

/// Two blocks in one place, and no order between all uses of one and the first of the other.
pub(super) fn first_clash(order: &NaiveOrder, lives: &[NaiveLife]) -> Option<String> {
    for (number, later) in lives.iter().enumerate() {
        for earlier in &lives[..number] {
            let (a, b) = (&earlier.block, &later.block);
            let overlap = a.offset < b.offset + b.len && b.offset < a.offset + a.len;
            let ordered = |first: &NaiveLife, second: &NaiveLife| {
                first.last.as_ref().is_some_and(|last| order.covers(last, &second.from))
            };
            if overlap && !ordered(earlier, later) {
                return Some(format!("{a:?} and {b:?}"));
            }
        }
    }
    None
}
