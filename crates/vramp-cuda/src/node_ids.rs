//! Ids of graph nodes.
//!
//! The driver identifies a node by a pointer, which it may reuse once the node is destroyed. So an id
//! stands for a pointer and the number of its capture, which is never reused. The dependencies of a
//! node are read once, while its capture is valid.
//!
//! A node is removed with its graph, or when its capture ended without one. The end of a capture that
//! other code ended is noticed at the next call on one of its streams.

use std::collections::HashMap;

use vramp_driver::{DriverResult, GraphNode};

/// A raw node: the pointer of the driver as a number.
pub(crate) type RawNode = usize;

#[derive(Default)]
pub(crate) struct NodeIds {
    made: u64,
    captures: HashMap<u64, Captured>,
    /// Direct dependencies of each node.
    dependencies: HashMap<GraphNode, Vec<GraphNode>>,
    /// Capture that each stream was last part of.
    seen: HashMap<u64, u64>,
}

#[derive(Default)]
struct Captured {
    ids: HashMap<RawNode, GraphNode>,
    /// True if it became a graph that still exists.
    kept: bool,
}

impl NodeIds {
    /// Records the capture that `stream` is part of now. Removes the previous one if no other stream
    /// is part of it.
    pub(crate) fn observe(&mut self, stream: u64, capture: Option<u64>) {
        let before = match capture {
            Some(capture) => self.seen.insert(stream, capture),
            None => self.seen.remove(&stream),
        };
        if let Some(before) = before
            && !self.seen.values().any(|other| *other == before)
            && self.captures.get(&before).is_some_and(|captured| !captured.kept)
        {
            self.remove(before);
        }
    }

    /// Returns the capture that `stream` was last part of.
    pub(crate) fn capture_of(&self, stream: u64) -> Option<u64> {
        self.seen.get(&stream).copied()
    }

    /// Returns the id of a node, and assigns ids to all its ancestors. `read` returns the direct
    /// dependencies of a node.
    pub(crate) fn id_of(
        &mut self,
        capture: u64,
        raw: RawNode,
        read: &mut impl FnMut(RawNode) -> DriverResult<Vec<RawNode>>,
    ) -> DriverResult<GraphNode> {
        let ids = &mut self.captures.entry(capture).or_default().ids;
        if let Some(node) = ids.get(&raw) {
            return Ok(*node);
        }
        let mut path = vec![(raw, read(raw)?)];
        loop {
            let (raw, before) = path.last().expect("it ends with the return below");
            let raw = *raw;
            if let Some(unnamed) = before.iter().find(|before| !ids.contains_key(before)) {
                let unnamed = *unnamed;
                path.push((unnamed, read(unnamed)?));
                continue;
            }
            self.made += 1;
            let node = GraphNode::from_number(self.made);
            let before = before.iter().map(|before| ids[before]).collect();
            self.dependencies.insert(node, before);
            ids.insert(raw, node);
            path.pop();
            if path.is_empty() {
                return Ok(node);
            }
        }
    }

    /// Returns the direct dependencies of `node`; `None` if it is unknown or removed.
    pub(crate) fn dependencies(&self, node: GraphNode) -> Option<&[GraphNode]> {
        self.dependencies.get(&node).map(Vec::as_slice)
    }

    /// Records that the capture became a graph: its nodes stay until [`NodeIds::remove`].
    pub(crate) fn keep(&mut self, capture: u64) {
        self.seen.retain(|_, seen| *seen != capture);
        if let Some(captured) = self.captures.get_mut(&capture) {
            captured.kept = true;
        }
    }

    /// Removes the nodes of a capture or of its graph.
    pub(crate) fn remove(&mut self, capture: u64) {
        self.seen.retain(|_, seen| *seen != capture);
        if let Some(captured) = self.captures.remove(&capture) {
            for node in captured.ids.values() {
                self.dependencies.remove(node);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 1 -> 2, 1 -> 3, 2 and 3 -> 4.
    fn diamond(raw: RawNode) -> DriverResult<Vec<RawNode>> {
        Ok(match raw {
            1 => vec![],
            2 | 3 => vec![1],
            _ => vec![2, 3],
        })
    }

    #[test]
    fn a_node_gets_ids_for_all_its_ancestors_and_each_is_read_once() {
        let mut nodes = NodeIds::default();
        let mut reads = Vec::new();
        let mut read = |raw| {
            reads.push(raw);
            diamond(raw)
        };
        let last = nodes.id_of(7, 4, &mut read).unwrap();
        let [left, right] = nodes.dependencies(last).unwrap() else { panic!("two were joined") };
        assert_eq!(nodes.dependencies(*left), nodes.dependencies(*right));
        assert_eq!(nodes.dependencies(nodes.dependencies(*left).unwrap()[0]), Some(&[][..]));
        let (left, right) = (*left, *right);
        assert_eq!(nodes.id_of(7, 2, &mut read), Ok(left));
        assert_eq!(nodes.id_of(7, 3, &mut read), Ok(right));
        assert_eq!(nodes.id_of(7, 4, &mut read), Ok(last));
        reads.sort_unstable();
        assert_eq!(reads, [1, 2, 3, 4]);
    }

    #[test]
    fn a_pointer_reused_in_another_capture_is_another_node() {
        let mut nodes = NodeIds::default();
        let first = nodes.id_of(1, 1, &mut diamond).unwrap();
        assert_ne!(nodes.id_of(2, 1, &mut diamond), Ok(first));
    }

    #[test]
    fn nodes_live_as_long_as_their_capture_or_graph() {
        let mut nodes = NodeIds::default();
        nodes.observe(10, Some(1));
        nodes.observe(11, Some(1));
        let node = nodes.id_of(1, 4, &mut diamond).unwrap();
        nodes.observe(10, None);
        assert!(nodes.dependencies(node).is_some(), "another stream is still part of it");
        nodes.observe(11, Some(2));
        assert_eq!(nodes.dependencies(node), None);

        nodes.observe(10, Some(3));
        let node = nodes.id_of(3, 4, &mut diamond).unwrap();
        nodes.keep(3);
        nodes.observe(10, None);
        assert!(nodes.dependencies(node).is_some(), "it is a graph now");
        nodes.remove(3);
        assert_eq!(nodes.dependencies(node), None);
        assert!(nodes.dependencies.is_empty() && nodes.captures.is_empty());
    }

    #[test]
    fn a_node_that_cannot_be_read_leaves_no_id_without_dependencies() {
        let mut nodes = NodeIds::default();
        let error = crate::error::invalid(vramp_driver::Call::CaptureInfo, "made up");
        let mut broken = |raw| if raw == 1 { Err(error.clone()) } else { diamond(raw) };
        assert!(nodes.id_of(1, 4, &mut broken).is_err());
        let node = nodes.id_of(1, 4, &mut diamond).unwrap();
        assert_eq!(nodes.dependencies(node).map(<[_]>::len), Some(2));
    }
}
