//! Blocks and slabs: carved from free memory, used, taken back.

use super::Pool;
use crate::Bytes;
use crate::ids::{BlockId, Mark, StreamId};
use crate::pool::block::{Block, Slab, UnknownBlock};
use crate::pool::index::RegionKey;
use crate::pool::regions::{Kind, Region, Used};
use crate::pool::request::Request;
use crate::waiting::add_mark;

impl Pool {
    /// Returns the block with this id.
    pub fn block(&self, id: BlockId) -> Result<Block, UnknownBlock> {
        let region = self.regions.lookup(id.index, id.generation);
        region.and_then(|region| block_of(id, region)).ok_or(UnknownBlock { id })
    }

    /// Every allocated block except those in heaps, by address.
    pub fn blocks(&self) -> impl Iterator<Item = Block> {
        self.regions.iter().filter_map(|(key, region)| {
            block_of(BlockId { index: key, generation: region.generation }, region)
        })
    }

    /// Notes that `stream` uses the block too: work queued on it so far must be over, or ordered
    /// before, when the block is reused. No driver call.
    pub fn record_use(&mut self, id: BlockId, stream: StreamId) -> Result<(), UnknownBlock> {
        let mark = self.streams.now(stream);
        self.block(id)?;
        if let Kind::Used(used) = &mut self.regions.get_mut(id.index).kind {
            add_mark(&mut used.uses, mark);
        }
        Ok(())
    }

    /// Frees a block. Work on it must be queued on `stream`, or ordered before its present end, or
    /// noted by [`Pool::record_use`]; the pool keeps track of the work that the memory inherited.
    /// No driver call; O(log n) in the free regions.
    pub fn free(&mut self, id: BlockId, stream: StreamId) -> Result<(), UnknownBlock> {
        assert!(self.streams.contains(stream), "{stream} is unknown to the pool");
        self.block(id)?;
        let Kind::Used(used) = &mut self.regions.get_mut(id.index).kind else {
            return Err(UnknownBlock { id });
        };
        let (requested, mut uses) = (used.requested, std::mem::take(&mut used.uses));
        if used.stream != stream {
            add_mark(&mut uses, Mark { stream: used.stream, epoch: used.inherited });
        }
        self.counters.live -= requested;
        self.counters.freed += 1;
        self.release_region(id.index, stream, uses);
        Ok(())
    }

    /// Allocates the first `len` bytes of a free region as a block.
    pub(super) fn carve_block(
        &mut self,
        key: RegionKey,
        len: Bytes,
        request: Request,
        planned: bool,
    ) -> Block {
        let block = self.carve(key, len, request, false);
        self.counters.count_placed(request.size, planned);
        block
    }

    /// Allocates the first `len` bytes of a free region as a slab.
    pub(super) fn carve_slab(&mut self, key: RegionKey, len: Bytes, request: Request) -> Slab {
        let Block { at, len, .. } = self.carve(key, len, request, true);
        self.slabs += 1;
        Slab { region: key, at, len }
    }

    fn carve(
        &mut self,
        key: RegionKey,
        len: Bytes,
        Request { size, stream }: Request,
        slab: bool,
    ) -> Block {
        let inherited = self.view().free_of(key).epoch_of(Bytes::ZERO, len);
        let used = Used { stream, inherited, requested: size, uses: Vec::new(), slab };
        self.unindex(key);
        if self.regions.get(key).len > len {
            let rest = self.split_free(key, len);
            self.link_rest(rest);
        }
        let region = self.regions.get_mut(key);
        region.kind = Kind::Used(used);
        let id = BlockId { index: key, generation: region.generation };
        let block = Block { id, at: region.at, len };
        self.note_used(len);
        block
    }

    // --- slabs ---

    /// Number of slabs in heaps.
    pub fn slab_count(&self) -> usize {
        self.slabs
    }

    /// Takes back a slab that `stream` used. Its work may be in flight: the memory is stamped with
    /// the stream's present epoch.
    pub fn take_back(&mut self, slab: Slab, stream: StreamId) {
        self.slabs -= 1;
        self.release_region(slab.region, stream, Vec::new());
    }

    /// Cuts a slab in two. Returns the back.
    pub(crate) fn split_slab(&mut self, slab: &mut Slab, offset: Bytes) -> Slab {
        self.slabs += 1;
        let region = self.regions.split(slab.region, offset);
        let back = Slab { region, at: slab.at + offset, len: slab.len - offset };
        slab.len = offset;
        back
    }
}

fn block_of(id: BlockId, region: &Region) -> Option<Block> {
    match &region.kind {
        Kind::Used(used) if !used.slab => Some(Block { id, at: region.at, len: region.len }),
        _ => None,
    }
}
