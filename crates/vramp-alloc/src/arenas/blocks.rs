//! Blocks of a capture: the arena of a request, the order of its captured nodes, and the memory
//! from outside that the graph keeps.

use vramp_core::{ArenaBlockId, ArenaId, Bytes, NodeId, StreamId};
use vramp_driver::{Driver, DriverError, ErrorKind, GraphNode};

use super::Capturing;
use crate::allocation::Found;
use crate::allocation::{Allocation, Owner};
use crate::virtual_pool::{Refusal, VirtualPool};

/// While a capture grows an arena, memory is reserved ahead by this part of its length.
const AHEAD: u64 = 32;

impl VirtualPool {
    /// Allocates for the capture that `stream` is part of, and backs the block.
    pub(crate) fn malloc_in_arena(
        &mut self,
        id: ArenaId,
        tips: &[GraphNode],
        size: Bytes,
        stream: StreamId,
    ) -> Result<Found, Refusal> {
        let at = self.add_nodes(id, tips).map_err(Refusal::Driver)?;
        let state = self.arenas.get_mut(id);
        let block = state.arena.alloc(size, &at).map_err(Refusal::Arena)?;
        let end = block.offset + block.len;
        let capturing = state.capturing.as_ref().expect("the stream is part of it");
        let backed = capturing.backed;
        // A launch of an own graph waits for all earlier work on the memory. One that the allocator
        // does not see is ordered after the work of the stream that was attached, and no other's.
        let ready_on = if capturing.own { stream } else { capturing.stream };
        let hit = end <= backed;
        if !hit {
            let page = self.pool.config().page.count();
            let ahead = (end.count() / AHEAD).next_multiple_of(page).max(page);
            let most = self.arenas.get(id).arena.capacity();
            let wanted = (end + Bytes::new(ahead)).min(most);
            let served = self.back(id, wanted, ready_on).map(|()| wanted);
            // If that is too much, back only what is needed.
            match served.or_else(|_| self.back(id, end, ready_on).map(|()| end)) {
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
        Ok(Found { addr, len: block.len, owner: Owner::in_arena(block.id), hit })
    }

    /// Frees a block of an arena: within its capture if `stream` is part of that, else as a block
    /// that escaped the capture.
    ///
    /// Either way the work queued on `stream` so far may use the block. A stream that captures has
    /// work too: what was queued before its capture runs, and a replay comes only after it.
    pub(crate) fn free_in_arena(
        &mut self,
        block: ArenaBlockId,
        stream: StreamId,
    ) -> Result<(), DriverError> {
        let id = block.arena();
        self.arenas.list_to_lend(id);
        // An invalidated capture fails when it is ended.
        let captured = self.capture_of(stream).unwrap_or_default();
        let at =
            captured.filter(|(arena, _)| *arena == id).map(|(_, tips)| self.add_nodes(id, &tips));
        let mark = self.pool.now(stream);
        let state = self.arenas.get_mut(id);
        let known = "the allocator looked the block up";
        if state.arena.is_from_before(block) {
            state.leases.note_use(mark);
        }
        match at {
            Some(Ok(at)) => {
                state.arena.free(block, &at).expect(known);
            }
            // Its last use is not known, so this capture does not reuse it.
            Some(Err(error)) => {
                state.arena.free_outside(block).expect(known);
                return Err(error);
            }
            None => {
                state.arena.free_outside(block).expect(known);
                state.leases.note_use(mark);
                self.remove_if_abandoned(id);
            }
        }
        Ok(())
    }

    /// Records that work queued on `stream` so far uses the block: captured work, and work that was
    /// queued before the capture.
    pub(crate) fn note_use_in_arena(&mut self, block: ArenaBlockId, stream: StreamId) {
        let id = block.arena();
        let captured = self.capture_of(stream);
        let known = "the allocator looked the block up";
        let mark = self.pool.now(stream);
        let at = match captured {
            Ok(Some((arena, tips))) if arena == id => self.add_nodes(id, &tips).map(Some),
            Ok(_) => Ok(None),
            Err(error) => Err(error),
        };
        let state = self.arenas.get_mut(id);
        match at {
            Ok(Some(at)) => {
                state.arena.record_use(block, &at).expect(known);
                if state.arena.is_from_before(block) {
                    state.leases.note_use(mark);
                }
                return;
            }
            Ok(None) => {}
            // Which captured work uses it is not known, so the running capture does not reuse it.
            Err(_) => state.arena.record_unknown_use(block).expect(known),
        }
        state.leases.note_use(mark);
    }

    /// Returns the arena whose capture keeps an allocation from outside that is freed on `stream`.
    #[inline]
    pub(crate) fn keeper_of(&self, allocation: &Allocation, stream: StreamId) -> Option<ArenaId> {
        match self.arenas.any_capture() {
            true => self.find_keeper_of(allocation, stream),
            false => None,
        }
    }

    #[cold]
    fn find_keeper_of(&self, allocation: &Allocation, stream: StreamId) -> Option<ArenaId> {
        let own = match allocation.owner {
            Owner::Arena { arena, .. } => Some(arena),
            _ => None,
        };
        let others = || self.arenas.captures().filter(|&(id, _)| Some(id) != own);
        let (first, _) = others().next()?;
        let used =
            |(_, capturing): &(ArenaId, &Capturing)| capturing.used.contains(&allocation.addr);
        if let Some((id, _)) = others().find(used) {
            return Some(id);
        }
        match self.capture_of(stream) {
            Ok(captured) => captured.map(|(id, _)| id).filter(|&id| Some(id) != own),
            // An invalidated capture makes no graph.
            Err(error) if error.kind == ErrorKind::Capturing => None,
            // Unknown: keeping it too long is safe, freeing it too soon is not.
            Err(_) => Some(first),
        }
    }

    /// Records that a capture which `stream` is part of uses memory from outside its arena: if it
    /// is freed meanwhile, on any stream, the graph keeps it.
    pub(crate) fn note_use_in_capture(&mut self, allocation: &Allocation, stream: StreamId) {
        if let Some(id) = self.keeper_of(allocation, stream)
            && let Some(capturing) = &mut self.arenas.get_mut(id).capturing
        {
            capturing.used.insert(allocation.addr);
        }
    }

    /// Keeps memory from outside the arena for the graph of a capture. The caller recorded the use
    /// of the stream that it was freed on.
    pub(crate) fn keep_for_graph(&mut self, id: ArenaId, allocation: Allocation) {
        let capturing = self.arenas.get_mut(id).capturing.as_mut();
        capturing.expect("the stream is part of it").kept.push(allocation);
    }

    /// Adds every captured node up to `tips` to the arena. Each node is read once.
    pub(super) fn add_nodes(
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
            if arena.has_node(name(&node)) {
                continue;
            }
            match before {
                Some(before) => {
                    let before: Vec<NodeId> = before.iter().map(name).collect();
                    arena.add_node(name(&node), &before).expect("those before are added first");
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
