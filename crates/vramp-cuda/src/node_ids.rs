//! The nodes that captures were seen to have.
//!
//! The driver names a node by a pointer, which may come again once the node is gone. So a pointer
//! means something only together with the capture it was seen in, whose number never comes again,
//! and what a node comes behind is read once, while the capture is known to be sound.
//!
//! A node is forgotten with its graph, or when its capture ended without one. The end of a capture
//! that somebody else began shows when its streams are asked about again.

use std::collections::HashMap;

use vramp_driver::{DriverResult, GraphNode};

/// A node as the driver names it.
pub(crate) type RawNode = usize;

#[derive(Default)]
pub(crate) struct Nodes {
    made: u64,
    captures: HashMap<u64, Captured>,
    /// What each node comes directly behind.
    behind: HashMap<GraphNode, Vec<GraphNode>>,
    /// The capture that each stream was last seen in.
    seen: HashMap<u64, u64>,
}

#[derive(Default)]
struct Captured {
    named: HashMap<RawNode, GraphNode>,
    /// True if it became a graph that is still there.
    kept: bool,
}

impl Nodes {
    /// Takes note of the capture that `stream` is in now. Forgets the one before if no other stream
    /// was seen in it last.
    pub(crate) fn see(&mut self, stream: u64, capture: Option<u64>) {
        let before = match capture {
            Some(capture) => self.seen.insert(stream, capture),
            None => self.seen.remove(&stream),
        };
        if let Some(before) = before
            && !self.seen.values().any(|other| *other == before)
            && self.captures.get(&before).is_some_and(|captured| !captured.kept)
        {
            self.forget(before);
        }
    }

    /// The capture that `stream` was last seen in.
    pub(crate) fn seen(&self, stream: u64) -> Option<u64> {
        self.seen.get(&stream).copied()
    }

    /// The name of a node, and of all nodes before it. `read` tells what a node comes behind.
    pub(crate) fn name(
        &mut self,
        capture: u64,
        raw: RawNode,
        read: &mut impl FnMut(RawNode) -> DriverResult<Vec<RawNode>>,
    ) -> DriverResult<GraphNode> {
        let named = &mut self.captures.entry(capture).or_default().named;
        if let Some(node) = named.get(&raw) {
            return Ok(*node);
        }
        let mut path = vec![(raw, read(raw)?)];
        loop {
            let (raw, before) = path.last().expect("it ends with the return below");
            let raw = *raw;
            if let Some(unnamed) = before.iter().find(|before| !named.contains_key(before)) {
                let unnamed = *unnamed;
                path.push((unnamed, read(unnamed)?));
                continue;
            }
            self.made += 1;
            let node = GraphNode::from_number(self.made);
            let before = before.iter().map(|before| named[before]).collect();
            self.behind.insert(node, before);
            named.insert(raw, node);
            path.pop();
            if path.is_empty() {
                return Ok(node);
            }
        }
    }

    /// What `node` comes directly behind; `None` if it is unknown, or forgotten.
    pub(crate) fn behind(&self, node: GraphNode) -> Option<&[GraphNode]> {
        self.behind.get(&node).map(Vec::as_slice)
    }

    /// The capture became a graph: its nodes stay until [`Nodes::forget`].
    pub(crate) fn keep(&mut self, capture: u64) {
        self.seen.retain(|_, seen| *seen != capture);
        if let Some(captured) = self.captures.get_mut(&capture) {
            captured.kept = true;
        }
    }

    /// The capture, or its graph, is gone.
    pub(crate) fn forget(&mut self, capture: u64) {
        self.seen.retain(|_, seen| *seen != capture);
        if let Some(captured) = self.captures.remove(&capture) {
            for node in captured.named.values() {
                self.behind.remove(node);
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
        let mut nodes = Nodes::default();
        let mut reads = Vec::new();
        let mut read = |raw| {
            reads.push(raw);
            diamond(raw)
        };
        let last = nodes.name(7, 4, &mut read).unwrap();
        let [left, right] = nodes.behind(last).unwrap() else { panic!("two were joined") };
        assert_eq!(nodes.behind(*left), nodes.behind(*right));
        assert_eq!(nodes.behind(nodes.behind(*left).unwrap()[0]), Some(&[][..]));
        let (left, right) = (*left, *right);
        assert_eq!(nodes.name(7, 2, &mut read), Ok(left));
        assert_eq!(nodes.name(7, 3, &mut read), Ok(right));
        assert_eq!(nodes.name(7, 4, &mut read), Ok(last));
        reads.sort_unstable();
        assert_eq!(reads, [1, 2, 3, 4]);
    }

    #[test]
    fn a_pointer_reused_in_another_capture_is_another_node() {
        let mut nodes = Nodes::default();
        let first = nodes.name(1, 1, &mut diamond).unwrap();
        assert_ne!(nodes.name(2, 1, &mut diamond), Ok(first));
    }

    #[test]
    fn nodes_live_as_long_as_their_capture_or_graph() {
        let mut nodes = Nodes::default();
        nodes.see(10, Some(1));
        nodes.see(11, Some(1));
        let node = nodes.name(1, 4, &mut diamond).unwrap();
        nodes.see(10, None);
        assert!(nodes.behind(node).is_some(), "another stream is still in it");
        nodes.see(11, Some(2));
        assert_eq!(nodes.behind(node), None);

        nodes.see(10, Some(3));
        let node = nodes.name(3, 4, &mut diamond).unwrap();
        nodes.keep(3);
        nodes.see(10, None);
        assert!(nodes.behind(node).is_some(), "it is a graph now");
        nodes.forget(3);
        assert_eq!(nodes.behind(node), None);
        assert!(nodes.behind.is_empty() && nodes.captures.is_empty());
    }

    #[test]
    fn a_node_that_cannot_be_read_leaves_no_id_without_dependencies() {
        let mut nodes = Nodes::default();
        let error = crate::error::invalid(vramp_driver::Call::CaptureInfo, "made up");
        let mut broken = |raw| if raw == 1 { Err(error.clone()) } else { diamond(raw) };
        assert!(nodes.name(1, 4, &mut broken).is_err());
        let node = nodes.name(1, 4, &mut diamond).unwrap();
        assert_eq!(nodes.behind(node).map(<[_]>::len), Some(2));
    }
}
