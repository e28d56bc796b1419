//! Blocks of a capture: which arena a request belongs to, what order the captured nodes give it,
//! and what memory of others the graph keeps.

use vramp_core::{ArenaBlockId, ArenaId, Bytes, NodeId, StreamId};
use vramp_driver::{Driver, DriverError, ErrorKind, GraphNode};

use super::ArenaState;
use crate::allocation::{Allocation, Owner};
use crate::manager::Found;
use crate::virtual_pool::{Refusal, VirtualPool};

/// While a capture grows an arena, memory is taken ahead by this part of what it has.
const AHEAD: u64 = 32;

impl VirtualPool {
    /// A block of the capture that `stream` is part of. Memory is taken where it lacks.
    pub(crate) fn malloc_in_arena(
        &mut self,
        id: ArenaId,
        tips: &[GraphNode],
        size: Bytes,
        stream: StreamId,
    ) -> Result<Found, Refusal> {
        let at = self.learn_nodes(id, tips).map_err(Refusal::Driver)?;
        let state = self.arenas.get_mut(id);
        let block = state.arena.alloc(size, &at).map_err(Refusal::Arena)?;
        let end = block.offset + block.len;
        let backed = state.capturing.as_ref().map_or(Bytes::ZERO, |capturing| capturing.backed);
        let hit = end <= backed;
        if !hit {
            let page = self.pool.config().page.count();
            let ahead = (end.count() / AHEAD).next_multiple_of(page).max(page);
            let most = self.arenas.get(id).arena.capacity();
            let wanted = (end + Bytes::new(ahead)).min(most);
            let served = self.back(id, wanted, stream).map(|()| wanted);
            // Where that is too much, what is needed will do.
            match served.or_else(|_| self.back(id, end, stream).map(|()| end)) {
                Ok(upto) => {
                    let capturing = &mut self.arenas.get_mut(id).capturing;
                    capturing.as_mut().expect("the stream is part of it").backed = upto;
                }
                Err(refusal) => {
                    let freed = self.arenas.get_mut(id).arena.free(block.id, &at);
                    freed.expect("the block was made above");
                    return Err(refusal);
                }
            }
        }
        let addr = self.exec.addr(self.pool.arena_range(id).at) + block.offset;
        Ok(Found { addr, len: block.len, owner: Owner::of_arena(block.id), hit })
    }

    /// Takes a block of an arena back: in its capture where `stream` is part of that, else as one
    /// that escaped, used by what is queued on `stream`.
    pub(crate) fn free_in_arena(
        &mut self,
        block: ArenaBlockId,
        stream: StreamId,
    ) -> Result<(), DriverError> {
        let id = block.arena();
        // A capture that was spoilt says so to whoever ends it.
        let captured = self.capture_of(self.exec.stream(stream)).unwrap_or_default();
        let known = "the allocator looked the block up";
        match captured.filter(|(arena, _)| *arena == id) {
            Some((_, tips)) => match self.learn_nodes(id, &tips) {
                Ok(at) => {
                    self.arenas.get_mut(id).arena.free(block, &at).expect(known);
                }
                // Where its last use is not known it serves this capture no more.
                Err(error) => {
                    self.arenas.get_mut(id).arena.free_outside(block).expect(known);
                    return Err(error);
                }
            },
            None => {
                let mark = self.pool.now(stream);
                let state = self.arenas.get_mut(id);
                state.arena.free_outside(block).expect(known);
                state.leases.note_use(mark);
                self.remove_if_abandoned(id);
            }
        }
        Ok(())
    }

    /// Notes that work queued on `stream` so far uses the block.
    pub(crate) fn note_use_in_arena(&mut self, block: ArenaBlockId, stream: StreamId) {
        let id = block.arena();
        let captured = self.capture_of(self.exec.stream(stream)).unwrap_or_default();
        let known = "the allocator looked the block up";
        if let Some((_, tips)) = captured.filter(|(arena, _)| *arena == id)
            && let Ok(at) = self.learn_nodes(id, &tips)
        {
            self.arenas.get_mut(id).arena.record_use(block, &at).expect(known);
            return;
        }
        let mark = self.pool.now(stream);
        self.arenas.get_mut(id).leases.note_use(mark);
    }

    /// The arena whose capture keeps what is freed on `stream` although it is not its own.
    pub(crate) fn keeper_of(&self, allocation: &Allocation, stream: StreamId) -> Option<ArenaId> {
        let own = match allocation.owner {
            Owner::Arena { arena, .. } => Some(arena),
            _ => None,
        };
        let others =
            |(id, state): &(ArenaId, &ArenaState)| state.capturing.is_some() && Some(*id) != own;
        let (first, _) = self.arenas.iter().find(others)?;
        let noted = |(_, state): &(ArenaId, &ArenaState)| {
            state
                .capturing
                .as_ref()
                .is_some_and(|capturing| capturing.noted.contains(&allocation.addr))
        };
        if let Some((id, _)) = self.arenas.iter().filter(others).find(noted) {
            return Some(id);
        }
        match self.capture_of(self.exec.stream(stream)) {
            Ok(captured) => captured.map(|(id, _)| id).filter(|&id| Some(id) != own),
            // A spoilt capture makes no graph.
            Err(error) if error.kind == ErrorKind::Capturing => None,
            // Nobody knows: kept too long is better than freed too soon.
            Err(_) => Some(first),
        }
    }

    /// Notes that a capture which `stream` is part of uses memory of others: freed meanwhile, on
    /// whatever stream, it is kept.
    pub(crate) fn note_use_in_capture(&mut self, allocation: &Allocation, stream: StreamId) {
        if let Some(id) = self.keeper_of(allocation, stream)
            && let Some(capturing) = &mut self.arenas.get_mut(id).capturing
        {
            capturing.noted.push(allocation.addr);
        }
    }

    /// Keeps memory that is not the arena's for the graph that a capture makes.
    pub(crate) fn keep_for_graph(&mut self, id: ArenaId, allocation: Allocation) {
        let capturing = self.arenas.get_mut(id).capturing.as_mut();
        capturing.expect("the stream is part of it").kept.push(allocation);
    }

    /// Tells the arena every captured node up to `tips`. Each node is read once.
    pub(super) fn learn_nodes(
        &mut self,
        id: ArenaId,
        tips: &[GraphNode],
    ) -> Result<Vec<NodeId>, DriverError> {
        let driver = &self.exec.driver;
        let arena = &mut self.arenas.get_mut(id).arena;
        let name = |node: &GraphNode| NodeId(node.number());
        // Depth first, and a node after those it depends on.
        let mut path: Vec<(GraphNode, Option<Vec<GraphNode>>)> =
            tips.iter().map(|&tip| (tip, None)).collect();
        while let Some((node, before)) = path.pop() {
            if arena.knows(name(&node)) {
                continue;
            }
            match before {
                Some(before) => {
                    let before: Vec<NodeId> = before.iter().map(name).collect();
                    arena.add_node(name(&node), &before).expect("those before are told first");
                }
                None => {
                    let before = driver.node_dependencies(node)?;
                    path.push((node, Some(before.clone())));
                    path.extend(before.into_iter().map(|node| (node, None)));
                }
            }
        }
        Ok(tips.iter().map(name).collect())
    }
}
