//! Random captures with forks, joins and uses, against the naive twin; the same check finds a
//! planted bug.
//!
//! The naive twin: the order as a graph that is searched, and every pair of blocks compared.

use std::collections::BTreeMap;

use proptest::prelude::*;
use proptest::sample::Index;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

use super::*;

const STREAMS: usize = 4;

#[derive(Clone, Debug)]
pub(super) enum Step {
    Work {
        stream: usize,
    },
    /// One stream waits for another, and perhaps captures nothing behind it.
    Wait {
        stream: usize,
        on: usize,
        work: bool,
    },
    Alloc {
        grains: u64,
        stream: usize,
    },
    Use {
        pick: usize,
        stream: usize,
    },
    Free {
        pick: usize,
        stream: usize,
    },
    FreeOutside {
        pick: usize,
    },
    NextCapture {
        plan: bool,
    },
}

/// What is left out of a program to see that the check finds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bug {
    None,
    /// Streams that join keep only their own order, as if the arena took it for more.
    InventedJoins,
    /// Uses on other streams are forgotten.
    ForgottenUses,
}

pub(super) fn step() -> impl Strategy<Value = Step> {
    let (stream, on, pick) = (0..STREAMS, 0..STREAMS, any::<usize>());
    prop_oneof![
        6 => stream.clone().prop_map(|stream| Step::Work { stream }),
        3 => (stream.clone(), on, any::<bool>())
            .prop_map(|(stream, on, work)| Step::Wait { stream, on, work }),
        8 => (1..9u64, stream.clone()).prop_map(|(grains, stream)| Step::Alloc { grains, stream }),
        3 => (pick, stream.clone()).prop_map(|(pick, stream)| Step::Use { pick, stream }),
        6 => (pick, stream).prop_map(|(pick, stream)| Step::Free { pick, stream }),
        1 => pick.prop_map(|pick| Step::FreeOutside { pick }),
        1 => any::<bool>().prop_map(|plan| Step::NextCapture { plan }),
    ]
}

/// A program that uses each block on the streams that free it or say so.
struct Program {
    arena: Arena,
    order: NaiveOrder,
    bug: Bug,
    points: Vec<Vec<NodeId>>,
    next: u64,
    lives: Vec<NaiveLife>,
    /// Indices into `lives` of what is not freed.
    held: Vec<usize>,
    ceiling: Ceiling,
}

/// How high a capture may reach: what was live before and what it took below the plan's high-water
/// mark while it followed the plan, and on top the blocks that came elsewhere.
#[derive(Clone, Copy, Debug, Default)]
struct Ceiling {
    taken: u64,
    elsewhere: u64,
}

impl Program {
    fn new(policy: ArenaPolicy, bug: Bug) -> Program {
        Program {
            arena: capturing(policy, Bytes::mib(1)),
            order: NaiveOrder::default(),
            bug,
            points: vec![Vec::new(); STREAMS],
            next: 0,
            lives: Vec::new(),
            held: Vec::new(),
            ceiling: Ceiling::default(),
        }
    }

    /// Notes a block of this capture, and sees that it lies below the ceiling.
    fn note(&mut self, follows: bool, block: ArenaBlock) {
        let plan = self.arena.plan.as_ref().filter(|_| follows);
        let (end, len) = (block.offset.count() + block.len.count(), block.len.count());
        match plan.is_some_and(|plan| end <= plan.high_water) {
            true => self.ceiling.taken = self.ceiling.taken.max(end),
            false => self.ceiling.elsewhere += len,
        }
        let reached = self.arena.capture_high_water().count();
        assert!(reached <= self.ceiling.taken + self.ceiling.elsewhere, "{:?}", self.ceiling);
    }

    fn work(&mut self, stream: usize) {
        let node = NodeId(self.next);
        self.next += 1;
        self.arena.add_node(node, &self.points[stream]).unwrap();
        self.order.add(node, &self.points[stream]);
        self.points[stream] = vec![node];
    }

    fn next_capture(&mut self, plan: bool) {
        let recording = self.arena.end().unwrap();
        let layout = pack(&recording);
        layout.check(&recording).unwrap();
        let fixed = self.lives.len() - recording.blocks();
        let mut planned = self.lives.clone();
        for (life, spot) in planned[fixed..].iter_mut().zip(&layout.blocks) {
            life.block.offset = Bytes::new(spot.offset);
        }
        if self.bug == Bug::None {
            assert_eq!(first_clash(&self.order, &planned), None);
        }
        assert!(layout.high_water() <= recording.high_water());
        if self.arena.plan.is_none() && self.arena.policy() == ArenaPolicy::Reusing {
            assert!(recording.high_water() <= recording.monotone());
        }
        let bounds = [recording.lower_bound(), recording.conflict_bound(), layout.high_water()];
        assert!(bounds.is_sorted(), "{bounds:?}");
        if self.arena.policy() == ArenaPolicy::Reusing {
            self.arena.set_plan(plan.then_some(layout));
        }
        self.arena.begin().unwrap();
        let taken = self.arena.capture_high_water().count();
        self.ceiling = Ceiling { taken, elsewhere: 0 };
        // Graphs never replay together: only what is live matters to the next capture.
        self.order = NaiveOrder::default();
        self.points = vec![Vec::new(); STREAMS];
        self.lives = self.held.iter().map(|&index| self.lives[index].clone()).collect();
        self.held = (0..self.lives.len()).collect();
        for life in &mut self.lives {
            (life.from, life.uses) = (Vec::new(), Vec::new());
        }
    }

    /// The nodes of a stream's point, as passed to the arena.
    fn nodes_at(&self, stream: usize) -> Vec<NodeId> {
        match self.bug {
            Bug::InventedJoins => self.points.concat(),
            _ => self.points[stream].clone(),
        }
    }

    fn step(&mut self, step: &Step) {
        match *step {
            Step::Work { stream } => self.work(stream),
            Step::Wait { stream, on, work } => {
                let others = self.points[on].clone();
                self.points[stream].extend(others);
                self.points[stream].dedup();
                if work {
                    self.work(stream);
                }
            }
            Step::Alloc { grains, stream } => {
                let point = self.nodes_at(stream);
                let follows = self.arena.follows_plan();
                let Ok(block) = self.arena.alloc(Bytes::new(grains * 256), &point) else { return };
                if self.arena.policy() == ArenaPolicy::Reusing {
                    self.note(follows, block);
                }
                self.held.push(self.lives.len());
                let (from, uses) = (self.points[stream].clone(), Vec::new());
                self.lives.push(NaiveLife { block, from, last: None, uses });
            }
            Step::Use { pick, stream } if !self.held.is_empty() => {
                let life = &mut self.lives[self.held[pick % self.held.len()]];
                life.uses.extend(&self.points[stream]);
                if self.bug != Bug::ForgottenUses {
                    self.arena.record_use(life.block.id, &self.points[stream]).unwrap();
                }
            }
            Step::Free { pick, stream } if !self.held.is_empty() => {
                let index = self.held.swap_remove(pick % self.held.len());
                let life = &mut self.lives[index];
                self.arena.free(life.block.id, &self.points[stream]).unwrap();
                let uses = std::mem::take(&mut life.uses);
                life.last = Some([uses, self.points[stream].clone()].concat());
            }
            Step::FreeOutside { pick } if !self.held.is_empty() => {
                // For the naive twin it lives on in this capture: nothing may have its place.
                let index = self.held.swap_remove(pick % self.held.len());
                self.arena.free_outside(self.lives[index].block.id).unwrap();
            }
            Step::NextCapture { plan } => self.next_capture(plan),
            _ => {}
        }
        self.arena.audit().unwrap();
    }

    fn run(policy: ArenaPolicy, bug: Bug, steps: &[Step]) -> Result<(), String> {
        let mut program = Program::new(policy, bug);
        for step in steps {
            program.step(step);
            if let Some(clash) = first_clash(&program.order, &program.lives) {
                return Err(clash);
            }
        }
        program.next_capture(false);
        Ok(())
    }
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    prop::collection::vec(step(), 1..80)
}

/// For each node, some of the nodes before it.
fn graph() -> impl Strategy<Value = Vec<Vec<Index>>> {
    prop::collection::vec(prop::collection::vec(any::<Index>(), 0..4), 1..40)
}

/// The first pair of nodes of which the order, given at most so many predecessors of each node, says
/// something else than a search.
fn first_difference(graph: &[Vec<Index>], given: usize) -> Option<(NodeId, NodeId)> {
    let (mut order, mut naive) = (Order::default(), NaiveOrder::default());
    let nodes = || (0..graph.len() as u64).map(NodeId);
    for (node, before) in nodes().zip(graph) {
        let known = |pick: &Index| NodeId(pick.index(node.0 as usize) as u64);
        let before = if node.0 == 0 { Vec::new() } else { before.iter().map(known).collect() };
        order.add(node, &before[..given.min(before.len())]).unwrap();
        naive.add(node, &before);
    }
    let mut pairs = nodes().flat_map(|a| nodes().map(move |b| (a, b)));
    pairs.find(|&(a, b)| order.reaches(a, b) != naive.reaches(a, b))
}

proptest! {
    #[test]
    fn the_order_is_the_one_a_search_finds(graph in graph()) {
        prop_assert_eq!(first_difference(&graph, usize::MAX), None);
    }

    #[test]
    fn no_two_blocks_ever_meet(steps in steps(), monotone in any::<bool>()) {
        let policy = if monotone { ArenaPolicy::Monotone } else { ArenaPolicy::Reusing };
        prop_assert_eq!(Program::run(policy, Bug::None, &steps), Ok(()));
    }
}

/// True if one of many random inputs shows it.
fn is_found<T>(inputs: impl Strategy<Value = T>, shows: impl Fn(&T) -> bool) -> bool {
    let mut runner = TestRunner::deterministic();
    (0..2000).any(|_| shows(&inputs.new_tree(&mut runner).unwrap().current()))
}

#[test]
fn an_order_that_forgets_joins_is_found() {
    assert!(is_found(graph(), |graph| first_difference(graph, 1).is_some()));
}

#[test]
fn order_that_nothing_captured_is_found() {
    let run = |steps: &Vec<Step>| Program::run(ArenaPolicy::Reusing, Bug::InventedJoins, steps);
    assert!(is_found(steps(), |steps| run(steps).is_err()));
}

#[test]
fn a_forgotten_use_is_found() {
    let run = |steps: &Vec<Step>| Program::run(ArenaPolicy::Reusing, Bug::ForgottenUses, steps);
    assert!(is_found(steps(), |steps| run(steps).is_err()));
}

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
