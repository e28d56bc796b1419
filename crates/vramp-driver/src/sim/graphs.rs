//! Graphs and instantiated graphs.
//!
//! The nodes of an instantiated graph are assigned to *lanes*. In a lane every node depends on all
//! earlier ones, so a lane can run on a stream without adding an order that the capture did not have.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::captures::Node;
use super::clock::Stamp;
use super::refusal::{Outcome, Refusal};
use super::streams::Point;

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
