//! Open captures, and their nodes in capture order: each depends on earlier ones only.
//!
//! Graphs and instantiated graphs.
//!
//! The nodes of an instantiated graph are assigned to *lanes*. In a lane every node depends on all
//! earlier ones, so a lane can run on a stream without adding an order that the capture did not have.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread::ThreadId;

use super::clock::Stamp;
use super::refusal::{Outcome, Refusal};
use super::streams::{Effect, Kernel, Point};
use crate::{CaptureMode, GraphNode};

/// One piece of captured work.
#[derive(Clone, Debug)]
pub(super) struct Node {
    pub kernel: Kernel,
    pub effect: Effect,
    /// Direct dependencies, by index.
    pub after: Vec<usize>,
}

/// The last record of an event.
#[derive(Clone, Debug)]
pub(super) enum Recorded {
    Never,
    At(Point),
    /// Recorded in a capture, with the dependencies of its stream.
    Captured {
        capture: u64,
        dependencies: Vec<usize>,
    },
}

#[derive(Debug)]
struct Capture {
    device: usize,
    origin: usize,
    mode: CaptureMode,
    thread: ThreadId,
    invalidated: bool,
    nodes: Vec<Node>,
    /// Dependencies of the next work of every stream of the capture.
    dependencies: BTreeMap<usize, Vec<usize>>,
}

#[derive(Debug, Default)]
pub(super) struct Captures {
    made: u64,
    open: BTreeMap<u64, Capture>,
    /// Number of captures invalidated so far.
    pub invalidated: u64,
}

/// Bits of a node's number for its index; the rest is the number of its capture.
const INDEX_BITS: u32 = 32;

pub(super) fn node_id(capture: u64, index: usize) -> GraphNode {
    GraphNode::from_number(capture << INDEX_BITS | index as u64)
}

/// Returns the capture and the index of a node.
pub(super) fn node_index(node: GraphNode) -> (u64, usize) {
    (node.number() >> INDEX_BITS, (node.number() & ((1 << INDEX_BITS) - 1)) as usize)
}

fn invalidated() -> Refusal {
    Refusal { code: 901, detail: "a refused call invalidated the capture".to_owned() }
}

impl Captures {
    /// Returns the capture that `stream` is part of.
    pub fn of(&self, stream: usize) -> Option<u64> {
        self.open
            .iter()
            .find(|(_, open)| open.dependencies.contains_key(&stream))
            .map(|(id, _)| *id)
    }

    /// Returns the number of open captures of a device.
    pub fn count(&self, device: usize) -> usize {
        self.open.values().filter(|open| open.device == device).count()
    }

    /// Returns the nodes of an open capture of a device.
    pub fn nodes(&self, device: usize, capture: u64) -> Option<&[Node]> {
        let open = self.open.get(&capture).filter(|open| open.device == device);
        open.map(|open| open.nodes.as_slice())
    }

    pub fn begin(&mut self, device: usize, stream: usize, mode: CaptureMode) {
        self.made += 1;
        let capture = Capture {
            device,
            origin: stream,
            mode,
            thread: std::thread::current().id(),
            invalidated: false,
            nodes: Vec::new(),
            dependencies: BTreeMap::from([(stream, Vec::new())]),
        };
        self.open.insert(self.made, capture);
    }

    /// Returns the capture unless it ended or is invalidated.
    fn valid(&mut self, capture: u64) -> Outcome<&mut Capture> {
        match self.open.get_mut(&capture) {
            Some(open) if open.invalidated => Err(invalidated()),
            Some(open) => Ok(open),
            None => Err(captured_event("its capture ended: record it again")),
        }
    }

    /// Refuses if `stream` is part of a capture that is invalidated.
    pub fn check_valid(&mut self, stream: usize) -> Outcome<()> {
        match self.of(stream) {
            Some(capture) => self.valid(capture).map(drop),
            None => Ok(()),
        }
    }

    pub fn dependencies(&mut self, capture: u64, stream: usize) -> Outcome<Vec<usize>> {
        Ok(self.valid(capture)?.dependencies[&stream].clone())
    }

    /// Adds work of `stream` as a node.
    pub fn add(
        &mut self,
        capture: u64,
        stream: usize,
        kernel: Kernel,
        effect: Effect,
    ) -> Outcome<()> {
        let open = self.valid(capture)?;
        let index = open.nodes.len();
        let after = std::mem::replace(open.dependencies.entry(stream).or_default(), vec![index]);
        open.nodes.push(Node { kernel, effect, after });
        Ok(())
    }

    /// Adds `dependencies` to the next work of `stream`, which may be new to the capture.
    pub fn join(&mut self, capture: u64, stream: usize, dependencies: &[usize]) -> Outcome<()> {
        let own = self.valid(capture)?.dependencies.entry(stream).or_default();
        own.extend(dependencies);
        own.sort_unstable();
        own.dedup();
        Ok(())
    }

    pub fn invalidate(&mut self, capture: u64) {
        if let Some(open) = self.open.get_mut(&capture)
            && !open.invalidated
        {
            open.invalidated = true;
            self.invalidated += 1;
        }
    }

    /// Refuses a call that a capture forbids to the calling thread. Invalidates every capture that
    /// forbids it.
    pub fn refuse_unsafe(&mut self) -> Outcome<()> {
        if self.open.is_empty() {
            return Ok(());
        }
        let thread = std::thread::current().id();
        let forbids = |open: &Capture| match open.mode {
            CaptureMode::Global => true,
            CaptureMode::ThreadLocal => open.thread == thread,
            CaptureMode::Relaxed => false,
        };
        let forbidding = self.open.iter().filter(|(_, open)| forbids(open));
        let forbidding: Vec<(u64, usize)> =
            forbidding.map(|(capture, open)| (*capture, open.origin)).collect();
        forbidding.iter().for_each(|(capture, _)| self.invalidate(*capture));
        match forbidding.first() {
            None => Ok(()),
            Some((_, origin)) => {
                Err(Refusal::capturing(format!("stream {} is capturing", origin + 1)))
            }
        }
    }

    /// Ends the capture that began on `stream`.
    pub fn end(&mut self, stream: usize) -> Outcome<(u64, Vec<Node>)> {
        let Some(capture) = self.of(stream) else {
            return Err(Refusal { code: 401, detail: "the stream is not capturing".to_owned() });
        };
        let open = &self.open[&capture];
        if open.origin != stream {
            let detail = format!("the capture began on stream {}", open.origin + 1);
            self.invalidate(capture);
            return Err(Refusal { code: 903, detail });
        }
        let ended = self.open.remove(&capture).expect("it was found by its stream");
        if ended.mode != CaptureMode::Relaxed && ended.thread != std::thread::current().id() {
            self.invalidated += 1;
            let detail = "the capture began on another thread, and is discarded".to_owned();
            return Err(Refusal { code: 908, detail });
        }
        if ended.invalidated {
            return Err(invalidated());
        }
        match ended.unjoined() {
            None => Ok((capture, ended.nodes)),
            Some(stream) => {
                self.invalidated += 1;
                let detail =
                    format!("the last work of stream {} was not joined to the origin", stream + 1);
                Err(Refusal { code: 904, detail })
            }
        }
    }
}

impl Capture {
    /// Returns a stream whose last work the origin does not depend on.
    fn unjoined(&self) -> Option<usize> {
        let mut joined = vec![false; self.nodes.len()];
        self.dependencies[&self.origin].iter().for_each(|node| joined[*node] = true);
        for (index, node) in self.nodes.iter().enumerate().rev() {
            if joined[index] {
                node.after.iter().for_each(|before| joined[*before] = true);
            }
        }
        let left_out = |dependencies: &Vec<usize>| dependencies.iter().any(|node| !joined[*node]);
        self.dependencies
            .iter()
            .find(|(_, dependencies)| left_out(dependencies))
            .map(|(stream, _)| *stream)
    }
}

pub(super) fn captured_event(detail: &str) -> Refusal {
    Refusal { code: 907, detail: format!("the event was recorded in a capture; {detail}") }
}

#[derive(Debug, Default)]
pub(super) struct Graphs {
    /// Device and nodes, by the number of the capture.
    pub graphs: BTreeMap<u64, (usize, Arc<Vec<Node>>)>,
    pub execs: BTreeMap<u64, Exec>,
    pub execs_made: u64,
    /// Internal streams of destroyed graphs, to be reused.
    pub spare: Vec<usize>,
}

#[derive(Clone, Debug)]
pub(super) struct Exec {
    pub device: usize,
    pub layout: Arc<Layout>,
    /// Streams of all lanes but the first.
    pub lanes: Vec<usize>,
    /// End of the last launch.
    pub last: Option<Mark>,
}

/// Assignment of nodes to lanes.
#[derive(Debug)]
pub(super) struct Layout {
    pub nodes: Arc<Vec<Node>>,
    /// Lane of each node.
    pub lane_of: Vec<usize>,
    pub lanes: usize,
}

/// A point in a stream's work, for the streams and for the race detector.
#[derive(Clone, Debug)]
pub(super) struct Mark {
    pub point: Point,
    pub stamp: Option<Stamp>,
}

impl Layout {
    /// O(nodes x lanes).
    pub fn new(nodes: Arc<Vec<Node>>) -> Layout {
        let mut lane_of = Vec::with_capacity(nodes.len());
        // Number of nodes of each lane, and how many of them each node depends on or is.
        let mut lengths: Vec<usize> = Vec::new();
        let mut reached: Vec<Vec<usize>> = Vec::with_capacity(nodes.len());
        for node in nodes.iter() {
            let mut known = vec![0; lengths.len()];
            for before in &node.after {
                for (most, count) in known.iter_mut().zip(&reached[*before]) {
                    *most = (*most).max(*count);
                }
            }
            let whole = known.iter().zip(&lengths).position(|(known, length)| known == length);
            let lane = whole.unwrap_or_else(|| {
                lengths.push(0);
                known.push(0);
                lengths.len() - 1
            });
            lengths[lane] += 1;
            known[lane] = lengths[lane];
            lane_of.push(lane);
            reached.push(known);
        }
        Layout { nodes, lane_of, lanes: lengths.len() }
    }
}

impl Graphs {
    /// Returns the number of graphs of a device.
    pub fn graphs(&self, device: usize) -> usize {
        self.graphs.values().filter(|(owner, _)| *owner == device).count()
    }

    /// Returns the number of instantiated graphs of a device.
    pub fn execs(&self, device: usize) -> usize {
        self.execs.values().filter(|exec| exec.device == device).count()
    }

    pub fn nodes(&self, device: usize, graph: u64) -> Outcome<&Arc<Vec<Node>>> {
        let known = self.graphs.get(&graph).filter(|(owner, _)| *owner == device);
        known.map(|(_, nodes)| nodes).ok_or_else(|| Refusal::unknown("graph", graph))
    }
}
