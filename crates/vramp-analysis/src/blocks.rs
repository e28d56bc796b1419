//! The blocks of a workload: how large, from when to when, by whom.
//!
//! [`Blocks::of`] is one pass over the requests. It takes 32 bytes for each block, dead or live, and
//! everything else of the analysis reads it.

use vramp::Bytes;
use vramp_trace::{Request, StackId, Workload};

/// Index of a request in [`Workload::requests`].
pub type RequestIndex = u32;

/// Value of [`Block::free`] for a block that is never freed.
pub const NEVER: RequestIndex = u32::MAX;

/// One block of a workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Requested bytes.
    pub size: Bytes,
    /// The request that allocates it.
    pub alloc: RequestIndex,
    /// The request that frees it, or [`NEVER`].
    pub free: RequestIndex,
    /// Index into [`Workload::streams`].
    pub stream: u32,
    /// Call stack of the allocation, if recorded.
    pub stack: Option<StackId>,
}

const _: () =
    assert!(size_of::<Block>() <= 32, "two million blocks should not cost more than 64 MB");

impl Block {
    /// Returns true if the block is allocated just before the request at `moment`: its `Alloc` has
    /// been made and its `Free` has not.
    pub fn is_live_before(&self, moment: RequestIndex) -> bool {
        self.alloc < moment && moment <= self.free
    }
}

/// All blocks of a workload, by number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blocks(Vec<Block>);

impl Blocks {
    /// Collects the blocks of `workload`. O(requests).
    pub fn of(workload: &Workload) -> Blocks {
        let mut blocks: Vec<Block> = Vec::with_capacity(workload.blocks as usize);
        for (index, request) in (0..).zip(&workload.requests) {
            match *request {
                Request::Alloc { block, size, stream } => {
                    let stack = workload.stack_of(block);
                    blocks.push(Block { size, alloc: index, free: NEVER, stream, stack });
                }
                Request::Free { block } => blocks[block as usize].free = index,
                Request::FreeCompleted { .. } | Request::Oom { .. } => {}
            }
        }
        Blocks(blocks)
    }

    /// Returns the block of this number.
    pub fn get(&self, block: u32) -> &Block {
        &self.0[block as usize]
    }

    /// Returns every block with its number, in the order of their allocation.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &Block)> {
        (0..).zip(&self.0)
    }

    /// Returns the blocks that are live just before the request at `moment`. O(blocks before it).
    pub fn live_before(&self, moment: RequestIndex) -> impl Iterator<Item = (u32, &Block)> {
        let begun = self.0.partition_point(|block| block.alloc < moment);
        (0..).zip(&self.0[..begun]).filter(move |(_, block)| block.is_live_before(moment))
    }

    /// Returns the number of blocks.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns true if there is no block.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Event, alloc, completed, free, trace};

    #[test]
    fn a_block_is_live_from_its_allocation_until_its_free() {
        let events: [Event; 5] = [alloc(1, 100), alloc(2, 50), free(1), completed(1), alloc(3, 7)];
        let trace = trace(&events);
        let workload = Workload::from_trace(&trace, 0);
        let blocks = Blocks::of(&workload);
        let live =
            |moment| blocks.live_before(moment).map(|(number, _)| number).collect::<Vec<_>>();
        assert_eq!(live(1), [0]);
        assert_eq!(live(2), [0, 1]);
        assert_eq!(live(3), [1]);
        assert_eq!(live(5), [1, 2]);
        assert_eq!(blocks.get(2).free, NEVER);
    }
}
