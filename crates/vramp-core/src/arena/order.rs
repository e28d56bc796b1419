//! The order of captured work: which node runs before which, found by one comparison.
//!
//! The nodes are covered by chains, in each of which every node is ordered after the one before
//! it. A node has its place in its chain and, for each other chain, the furthest place that is
//! ordered before it. A capture on one stream is one chain and costs the same for every node;
//! streams add a chain each, and only a join makes a new list of the other chains.

use std::collections::BTreeMap;

use smallvec::SmallVec;

/// A node of a captured graph, by the driver's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub u64);

/// The node was not added to the order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{node:?} is no node of this capture: add it, after its predecessors, before it is used")]
pub struct UnknownNode {
    /// The unknown node.
    pub node: NodeId,
}

/// A place in a chain. Places count from 1, so that 0 is before all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Step {
    pub chain: u32,
    pub place: u32,
}

/// Which list of [`Clocks`] a node has.
type Clock = u32;

/// A place, and what is ordered before it in the other chains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Node {
    step: Step,
    others: Clock,
}

/// Lists of the furthest place in each chain, shared by nodes: 0 for none, also where a list ends.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Clocks(Vec<Box<[u32]>>);

impl Clocks {
    /// The furthest place of a chain that is ordered before a node, or is the node.
    fn place_in(&self, chain: u32, node: Node) -> u32 {
        match chain == node.step.chain {
            true => node.step.place,
            false => self.0[node.others as usize].get(chain as usize).copied().unwrap_or(0),
        }
    }

    /// A point by these lists.
    pub(crate) fn point<'a>(&'a self, horizon: &'a Horizon) -> Point<'a> {
        Point { clocks: self, horizon }
    }
}

/// The order of a captured graph, built node by node.
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
    clocks: Clocks,
}

impl Order {
    /// Adds a node after its predecessors; one that was added already stays as it is.
    ///
    /// O(log n) where it continues a stream, O(chains) more where streams fork or join.
    ///
    /// # Errors
    /// A predecessor that was not added before. Nothing changes.
    pub fn add(&mut self, node: NodeId, predecessors: &[NodeId]) -> Result<(), UnknownNode> {
        if self.has_node(node) {
            return Ok(());
        }
        let before = self.horizon(predecessors)?;
        let before = self.clocks.point(&before);
        let step = self.next_step(before);
        let others = match self.shared(before, step.chain) {
            Some(clock) => clock,
            None => {
                let places = self.places(before, step.chain);
                self.clocks.0.push(places);
                Clock::try_from(self.clocks.0.len() - 1).expect("fewer than four billion joins")
            }
        };
        match self.ends.get_mut(step.chain as usize) {
            Some(end) => *end = step.place,
            None => self.ends.push(step.place),
        }
        let added = Node { step, others };
        self.nodes.insert(node, added);
        Ok(())
    }

    /// True if the node was added.
    pub fn has_node(&self, node: NodeId) -> bool {
        self.nodes.contains_key(&node)
    }

    /// Number of nodes.
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
            (Some(earlier), Some(&later)) => {
                earlier.step.place <= self.clocks.place_in(earlier.step.chain, later)
            }
            _ => false,
        }
    }

    /// Everything that work depending on these nodes is ordered after.
    pub(crate) fn horizon(&self, point: &[NodeId]) -> Result<Horizon, UnknownNode> {
        let known = |&node| self.nodes.get(&node).copied().ok_or(UnknownNode { node });
        Ok(Horizon { nodes: point.iter().map(known).collect::<Result<_, _>>()? })
    }

    /// The lists that horizons refer to.
    pub(crate) fn clocks(&self) -> &Clocks {
        &self.clocks
    }

    /// The lists alone, when nothing more is captured.
    pub(crate) fn into_clocks(self) -> Clocks {
        self.clocks
    }

    /// The place of a node after this point: it continues a chain whose end is ordered before it, if
    /// there is one, or begins a chain.
    fn next_step(&self, before: Point<'_>) -> Step {
        let nodes = &before.horizon.nodes;
        let is_end = |step: &Step| self.ends[step.chain as usize] == step.place;
        let continued = nodes.iter().map(|node| node.step).find(is_end).or_else(|| {
            let ends = (0..).zip(&self.ends).map(|(chain, &place)| Step { chain, place });
            ends.filter(|_| !nodes.is_empty()).find(|end| before.place_in(end.chain) == end.place)
        });
        match continued {
            Some(Step { chain, place }) => Step { chain, place: place + 1 },
            None => Step { chain: self.ends.len() as u32, place: 1 },
        }
    }

    /// The list of a predecessor in the same chain, if it covers all predecessors.
    fn shared(&self, before: Point<'_>, chain: u32) -> Option<Clock> {
        let nodes = &before.horizon.nodes;
        let same = nodes.iter().copied().find(|node| node.step.chain == chain)?;
        let knows = |other: u32| {
            other == chain || self.clocks.place_in(other, same) >= before.place_in(other)
        };
        let all = nodes.len() == 1 || (0..self.ends.len() as u32).all(knows);
        all.then_some(same.others)
    }

    /// The furthest places before this point in all chains but one.
    fn places(&self, before: Point<'_>, but: u32) -> Box<[u32]> {
        let place = |chain| if chain == but { 0 } else { before.place_in(chain) };
        let mut places: Vec<u32> = (0..self.ends.len() as u32).map(place).collect();
        places.truncate(places.iter().rposition(|&place| place > 0).map_or(0, |last| last + 1));
        places.into()
    }
}

/// A point of a captured stream: everything that its next node will be ordered after.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Horizon {
    nodes: SmallVec<[Node; 1]>,
}

impl Horizon {
    /// The chains this point stands in: the same at the same point of a capture of the same shape.
    pub(crate) fn chains(&self) -> Chains {
        let mut chains: Chains = self.nodes.iter().map(|node| node.step.chain).collect();
        chains.sort_unstable();
        chains.dedup();
        chains
    }

    /// The first of them; none before anything was captured.
    pub(crate) fn head(&self) -> Option<u32> {
        self.nodes.iter().map(|node| node.step.chain).min()
    }
}

/// The chains that a point stands in, in order.
pub(crate) type Chains = SmallVec<[u32; 2]>;

/// A horizon with the lists it refers to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Point<'a> {
    clocks: &'a Clocks,
    horizon: &'a Horizon,
}

impl Point<'_> {
    pub(crate) fn chains(&self) -> Chains {
        self.horizon.chains()
    }

    /// The furthest place of a chain that is ordered before this point.
    pub(crate) fn place_in(&self, chain: u32) -> u32 {
        if let [node] = self.horizon.nodes[..] {
            return self.clocks.place_in(chain, node);
        }
        let nodes = self.horizon.nodes.iter();
        nodes.map(|&node| self.clocks.place_in(chain, node)).max().unwrap_or(0)
    }

    /// True if all work of the frontier is ordered before this point.
    pub(crate) fn covers(&self, frontier: &Frontier) -> bool {
        !frontier.never && frontier.steps.iter().all(|step| step.place <= self.place_in(step.chain))
    }
}

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
