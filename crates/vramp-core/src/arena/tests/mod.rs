//! The arena's rules, one by one, and random programs against a naive twin.

mod captures;
mod packing;
mod random;
mod reuse;

use super::*;
use crate::{ArenaId, Bytes};

fn kib(count: u64) -> Bytes {
    Bytes::kib(count)
}

fn arena(policy: ArenaPolicy, capacity: Bytes) -> Arena {
    Arena::new(ArenaId::new(7), policy, capacity)
}

fn capturing(policy: ArenaPolicy, capacity: Bytes) -> Arena {
    let mut arena = arena(policy, capacity);
    arena.begin().unwrap();
    arena
}

/// A stream that captures: each node is behind the one before.
#[derive(Clone, Debug, Default)]
struct Line(Vec<NodeId>);

impl Line {
    /// Captures a node, which also waits for `others`.
    fn work(&mut self, arena: &mut Arena, number: u64, others: &[NodeId]) {
        self.0.extend_from_slice(others);
        arena.add_node(NodeId(number), &self.0).unwrap();
        self.0 = vec![NodeId(number)];
    }
}

/// Records the allocations and frees of one stream: a length, or the index of what to free.
enum Ask {
    Take(Bytes),
    Free(usize),
}

fn record(arena: &mut Arena, asks: &[Ask]) -> CaptureRecording {
    arena.begin().unwrap();
    let (mut line, mut blocks) = (Line::default(), Vec::new());
    for (number, ask) in (0..).zip(asks) {
        match *ask {
            Ask::Take(len) => blocks.push(arena.alloc(len, &line.0).unwrap().id),
            Ask::Free(which) => drop(arena.free(blocks[which], &line.0).unwrap()),
        }
        line.work(arena, number, &[]);
    }
    arena.audit().unwrap();
    arena.end().unwrap()
}
