//! Which captured work runs before which: the graph's dependencies, answered in one comparison.
//!
//! The nodes are covered by chains, in each of which every node is ordered after the one before
//! it. A node knows its place in its chain and, for each other chain, the furthest place that is
//! ordered before it. A capture on one stream is one chain and costs the same for every node;
//! streams add a chain each, and only a join makes a new list of the other chains.

use std::collections::BTreeMap;
use std::sync::Arc;

use smallvec::SmallVec;

/// A node of a captured graph, as the driver names it. The number means nothing here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub u64);

/// A node that the order was not told of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{node:?} is no node of this capture: add it, behind its predecessors, before it is used")]
pub struct UnknownNode {
    /// What was given.
    pub node: NodeId,
}

/// A place in a chain. Places count from 1, so that 0 is before all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Step {
    pub chain: u32,
    pub place: u32,
}

/// What a node is ordered after: the places of all chains.
#[derive(Clone, Debug)]
struct Node {
    step: Step,
    /// For each chain but its own, the furthest place before this node; missing ones are 0.
    others: Arc<[u32]>,
}

impl Node {
    fn place_in(&self, chain: u32) -> u32 {
        match chain == self.step.chain {
            true => self.step.place,
            false => self.others.get(chain as usize).copied().unwrap_or(0),
        }
    }
}

/// The order of a captured graph, told node by node.
///
/// ```
/// use vramp_core::{NodeId, Order};
/// let [root, left, right, join] = [0, 1, 2, 3].map(NodeId);
/// let mut order = Order::default();
/// order.add(root, &[])?;
/// order.add(left, &[root])?;
/// order.add(right, &[root])?;
/// order.add(join, &[left, right])?;
/// assert!(order.reaches(left, join) && order.reaches(root, join));
/// assert!(!order.reaches(left, right));
/// # Ok::<(), vramp_core::UnknownNode>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Order {
    nodes: BTreeMap<NodeId, Node>,
    /// The last place of each chain.
    ends: Vec<u32>,
}

impl Order {
    /// Adds a node behind its predecessors; one that is known already stays as it is.
    ///
    /// O(log n) where it continues a stream, O(chains) more where streams fork or join.
    ///
    /// # Errors
    /// A predecessor that was not added before. Nothing changes.
    pub fn add(&mut self, node: NodeId, predecessors: &[NodeId]) -> Result<(), UnknownNode> {
        if self.knows(node) {
            return Ok(());
        }
        let before = self.horizon(predecessors)?;
        let added = self.behind(&before);
        if added.step.place == 1 {
            self.ends.push(0);
        }
        self.ends[added.step.chain as usize] = added.step.place;
        self.nodes.insert(node, added);
        Ok(())
    }

    /// True if the node was added.
    pub fn knows(&self, node: NodeId) -> bool {
        self.nodes.contains_key(&node)
    }

    /// How many nodes there are.
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// True if nothing was captured.
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// True if `earlier` is `later`, or is ordered before it. O(log n); false for unknown nodes.
    pub fn reaches(&self, earlier: NodeId, later: NodeId) -> bool {
        match (self.nodes.get(&earlier), self.nodes.get(&later)) {
            (Some(earlier), Some(later)) => {
                earlier.step.place <= later.place_in(earlier.step.chain)
            }
            _ => false,
        }
    }

    /// Everything that work depending on these nodes is ordered after.
    pub(crate) fn horizon(&self, point: &[NodeId]) -> Result<Horizon, UnknownNode> {
        let known = |&node| self.nodes.get(&node).cloned().ok_or(UnknownNode { node });
        Ok(Horizon { nodes: point.iter().map(known).collect::<Result<_, _>>()? })
    }

    /// A node behind `before`: it continues a chain whose end is ordered before it, if any is.
    fn behind(&self, before: &Horizon) -> Node {
        let is_end = |node: &Node| self.ends[node.step.chain as usize] == node.step.place;
        let chain = match before.nodes.iter().find(|node| is_end(node)) {
            Some(node) => Some(node.step.chain),
            None => (0..).zip(&self.ends).find_map(|(chain, &end)| {
                (!before.nodes.is_empty() && before.place_in(chain) == end).then_some(chain)
            }),
        };
        let chain = chain.unwrap_or(self.ends.len() as u32);
        let place = 1 + self.ends.get(chain as usize).copied().unwrap_or(0);
        Node { step: Step { chain, place }, others: self.others(before, chain) }
    }

    /// The furthest places before a node of `chain`, in the other chains. A list is shared with a
    /// predecessor that knows as much.
    fn others(&self, before: &Horizon, chain: u32) -> Arc<[u32]> {
        if let Some(same) = before.nodes.iter().find(|node| node.step.chain == chain) {
            let knows =
                |&other: &u32| other == chain || same.place_in(other) >= before.place_in(other);
            if before.nodes.len() == 1 || (0..self.ends.len() as u32).all(|other| knows(&other)) {
                return Arc::clone(&same.others);
            }
        }
        let mut places: Vec<u32> =
            (0..self.ends.len() as u32).map(|other| before.place_in(other)).collect();
        if let Some(own) = places.get_mut(chain as usize) {
            *own = 0;
        }
        places.truncate(places.iter().rposition(|&place| place > 0).map_or(0, |last| last + 1));
        places.into()
    }
}

/// A point of a captured stream: everything that its next node will be ordered after.
#[derive(Clone, Debug, Default)]
pub(crate) struct Horizon {
    nodes: SmallVec<[Node; 1]>,
}

impl Horizon {
    /// The furthest place of a chain that is ordered before this point.
    pub(crate) fn place_in(&self, chain: u32) -> u32 {
        self.nodes.iter().map(|node| node.place_in(chain)).max().unwrap_or(0)
    }

    /// True if all work of the frontier is ordered before this point.
    pub(crate) fn covers(&self, frontier: &Frontier) -> bool {
        !frontier.never && frontier.steps.iter().all(|step| step.place <= self.place_in(step.chain))
    }

    /// The chains this point stands in: the same at the same point of a capture of the same shape.
    pub(crate) fn chains(&self) -> Chains {
        let mut chains: Chains = self.nodes.iter().map(|node| node.step.chain).collect();
        chains.sort_unstable();
        chains.dedup();
        chains
    }
}

/// The chains that a point stands in, in order.
pub(crate) type Chains = SmallVec<[u32; 2]>;

/// The last work that used a piece of memory: it may be used again where all of it is before.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Frontier {
    /// One place for each chain, in the order of the chains.
    steps: SmallVec<[Step; 2]>,
    /// No point of this capture is ordered after the work.
    never: bool,
}

impl Frontier {
    /// The frontier of memory that no point of this capture may use.
    pub(crate) fn never() -> Frontier {
        Frontier { steps: SmallVec::new(), never: true }
    }

    /// Adds the work up to a point.
    pub(crate) fn join(&mut self, point: &Horizon) {
        for Step { chain, place } in point.nodes.iter().map(|node| node.step) {
            match self.steps.binary_search_by_key(&chain, |known| known.chain) {
                Ok(at) => self.steps[at].place = self.steps[at].place.max(place),
                Err(at) => self.steps.insert(at, Step { chain, place }),
            }
        }
    }

    pub(crate) fn steps(&self) -> &[Step] {
        &self.steps
    }

    pub(crate) fn is_never(&self) -> bool {
        self.never
    }
}
