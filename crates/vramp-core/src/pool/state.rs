//! The virtual pool: one state, changed only by the functions in this file and in `settle.rs`.
//!
//! Life of a block:
//!
//! 1. `place` finds a free region, or returns a plan that makes one (`place.rs`, `vpmm.rs`).
//! 2. The region is carved: its front becomes the user's block, the rest stays free.
//! 3. `free` stamps the region with its stream's epoch and merges it with its free neighbours. No
//!    driver call: an event is recorded only when somebody else wants the memory.
//! 4. The same stream may reuse it at once; another one once the epoch is reached, or behind a wait.
//!
//! Deliberately absent: a device, a lock, a clock. What the shell saw comes in through `reached`;
//! what it shall do goes out as a [`Plan`](crate::Plan).

use std::collections::{BTreeMap, BTreeSet};

use smallvec::smallvec;

use crate::Bytes;
use crate::heap::Slab;
use crate::ids::{ArenaId, BlockId, Epoch, Mark, PoolAddr, StreamId};
use crate::pool::chunks::Chunks;
use crate::pool::config::{ConfigError, Policy, PoolConfig};
use crate::pool::index::{FreeIndex, RegionKey};
use crate::pool::plan::Backing;
use crate::pool::plan::Request;
use crate::pool::regions::{Free, Kind, Part, Regions, Used};
use crate::pool::streams::{Stream, Streams};

/// Large blocks begin and end at multiples of this.
pub(crate) const BLOCK_ALIGN: u64 = 512;

/// A block as handed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Names it until it is freed.
    pub id: BlockId,
    /// Where it begins.
    pub at: PoolAddr,
    /// How many bytes may be used: what was asked, rounded up.
    pub len: Bytes,
}

/// An id that names no block: freed already, or of another pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{id:?} names no block of this pool: it was freed already, or belongs to another pool")]
pub struct UnknownBlock {
    /// What was given.
    pub id: BlockId,
}

/// What happened in a pool since it was made. Only ever grows, but for `live` and `reserved`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Bytes users asked for and hold.
    pub live: Bytes,
    /// The most that `live` was.
    pub live_peak: Bytes,
    /// Physical memory the pool holds.
    pub reserved: Bytes,
    /// The most that `reserved` was.
    pub reserved_peak: Bytes,
    /// Blocks served without a plan: from the stream's own free memory, or from another's whose
    /// work was over.
    pub hits: u64,
    /// Blocks that needed at least one plan.
    pub misses: u64,
    /// Blocks handed out.
    pub placed: u64,
    /// Blocks freed.
    pub freed: u64,
    /// Chunks created.
    pub chunks_created: u64,
    /// Chunks mapped at a new address.
    pub chunks_moved: u64,
    /// Chunks moved to an address where they were still mapped.
    pub chunks_reactivated: u64,
    /// Chunks given back to the card.
    pub chunks_released: u64,
    /// Bytes of the chunks given back to the card.
    pub released: Bytes,
    /// Bytes of the chunks moved or reactivated.
    pub moved: Bytes,
    /// Plans that failed and were undone.
    pub plans_undone: u64,
}

/// The virtual pool. See the module's page.
#[derive(Clone)]
pub struct Pool {
    pub(crate) config: PoolConfig,
    pub(crate) regions: Regions,
    pub(crate) chunks: Chunks,
    pub(crate) streams: Streams,
    /// Slabs that heaps have.
    pub(crate) slabs: usize,
    /// Marks that freed blocks in heaps wait for, as the shell last told.
    pub(crate) awaited: Vec<Mark>,
    /// Physical memory of others that counts against the same limit.
    pub(crate) elsewhere: u64,
    /// Every hole, smallest first.
    pub(crate) holes: BTreeSet<(u64, PoolAddr, RegionKey)>,
    pub(crate) arenas: BTreeMap<ArenaId, Backing>,
    /// How many there ever were: an id is never used again.
    pub(crate) arenas_made: u32,
    /// Every retired mapping by address.
    pub(crate) retired: BTreeMap<PoolAddr, RegionKey>,
    /// Freed regions that wait for other streams than their owner, oldest first.
    pub(crate) waiting: Vec<RegionKey>,
    /// Bytes in blocks of the page heap, slabs included: what must be mapped at least.
    pub(crate) used: u64,
    pub(crate) used_peak: u64,
    pub(crate) births: u64,
    pub(crate) counters: Counters,
}

impl Pool {
    /// An empty pool. Reserves nothing: the first request does.
    pub fn new(config: PoolConfig) -> Result<Pool, ConfigError> {
        config.validate()?;
        Ok(Pool {
            config,
            regions: Regions::default(),
            chunks: Chunks::default(),
            streams: Streams::default(),
            slabs: 0,
            awaited: Vec::new(),
            elsewhere: 0,
            holes: BTreeSet::new(),
            arenas: BTreeMap::new(),
            arenas_made: 0,
            retired: BTreeMap::new(),
            waiting: Vec::new(),
            used: 0,
            used_peak: 0,
            births: 0,
            counters: Counters::default(),
        })
    }

    /// What the pool was told when it was made.
    pub fn config(&self) -> &PoolConfig {
        &self.config
    }

    /// Makes another stream known.
    pub fn add_stream(&mut self) -> StreamId {
        let free = match self.config.policy {
            Policy::Mixed(_) => FreeIndex::first_fit(),
            Policy::Vpmm => FreeIndex::best_fit(),
        };
        self.streams.add(Stream::new(free))
    }

    /// Ends a stream for which an event was just recorded: no work will be queued on it again, and
    /// that event covers all that was. Blocks may still be freed on it.
    pub fn end_stream(&mut self, stream: StreamId) {
        self.streams.get_mut(stream).ended = true;
    }

    /// Says whether events may be recorded on a stream at present: not while it captures a graph.
    /// What it frees meanwhile is its own.
    pub fn hold(&mut self, stream: StreamId, held: bool) {
        self.streams.get_mut(stream).held = held;
    }

    /// True if events may not be recorded on some stream at present.
    pub fn holds_any(&self) -> bool {
        self.streams.ids().any(|id| self.streams.get(id).held)
    }

    /// True if events may not be recorded on the stream at present.
    pub fn is_held(&self, stream: StreamId) -> bool {
        self.streams.get(stream).held
    }

    /// True if a request may be made for this stream: it is known and was not ended.
    pub fn is_open(&self, stream: StreamId) -> bool {
        self.has_stream(stream) && !self.streams.get(stream).ended
    }

    /// Sets the most physical memory that the pool may hold, and how much of it others hold. What
    /// the pool holds already stays: trim to give it back.
    pub fn set_limit(&mut self, limit: Option<Bytes>, elsewhere: Bytes) {
        self.config.limit = limit;
        self.elsewhere = elsewhere.count();
    }

    /// Physical memory that counts against the limit.
    pub(crate) fn charged(&self) -> u64 {
        self.chunks.bytes().saturating_add(self.elsewhere)
    }

    /// True if the pool knows this stream.
    pub fn has_stream(&self, stream: StreamId) -> bool {
        self.streams.contains(stream)
    }

    /// What happened so far.
    pub fn counters(&self) -> Counters {
        Counters { reserved: Bytes::new(self.chunks.bytes()), ..self.counters }
    }

    /// Lets the peaks begin anew at what is held now.
    pub fn reset_peaks(&mut self) {
        self.counters.reserved_peak = Bytes::new(self.chunks.bytes());
        self.counters.live_peak = self.counters.live;
    }

    // --- progress ---

    /// Streams with recorded events that are not known to be reached, each with the last epoch
    /// recorded: what a poll should ask about.
    pub fn pending(&self) -> impl Iterator<Item = Mark> {
        self.streams.ids().filter_map(|id| {
            let stream = self.streams.get(id);
            let recorded = stream.recorded();
            (stream.reached < recorded).then_some(Mark { stream: id, epoch: recorded })
        })
    }

    /// Tells the pool that the work before `mark` is over.
    ///
    /// # Panics
    /// If no event was recorded for that epoch: nobody can have seen it.
    pub fn reached(&mut self, mark: Mark) {
        let stream = self.streams.get_mut(mark.stream);
        assert!(
            mark.epoch <= stream.recorded(),
            "{} cannot have reached {:?}: recorded up to {:?}",
            mark.stream,
            mark.epoch,
            stream.recorded()
        );
        stream.reached = stream.reached.max(mark.epoch);
    }

    /// True if the work before `mark` is known to be over.
    pub fn is_over(&self, mark: Mark) -> bool {
        self.streams.is_over(mark)
    }

    /// True if later work on `stream` is known to run after the work before `mark`.
    pub fn is_ordered(&self, stream: StreamId, mark: Mark) -> bool {
        self.streams.is_ordered(stream, mark)
    }

    /// The mark that an event recorded on `stream` now would have. After recording it, call
    /// [`Pool::recorded`].
    pub fn now(&self, stream: StreamId) -> Mark {
        self.streams.now(stream)
    }

    /// Tells the pool that an event was recorded for the stream's present epoch.
    pub fn recorded(&mut self, mark: Mark) {
        self.streams.record(mark);
    }

    /// Tells the pool that `stream` now waits for `on`, so what it frees later comes after that.
    pub fn waits(&mut self, stream: StreamId, on: Mark) {
        self.streams.waits(stream, on);
    }

    // --- blocks ---

    /// The block under this id.
    pub fn block(&self, id: BlockId) -> Result<Block, UnknownBlock> {
        match self.regions.lookup(id.index, id.generation) {
            Some(region) if matches!(&region.kind, Kind::Used(used) if !used.slab) => {
                Ok(Block { id, at: region.at, len: Bytes::new(region.len) })
            }
            _ => Err(UnknownBlock { id }),
        }
    }

    /// Every block a user holds but for those in heaps, by address.
    pub fn blocks(&self) -> impl Iterator<Item = Block> {
        self.regions.iter().filter_map(|(key, region)| match &region.kind {
            Kind::Used(used) if !used.slab => Some(Block {
                id: BlockId { index: key, generation: region.generation },
                at: region.at,
                len: Bytes::new(region.len),
            }),
            _ => None,
        })
    }

    /// Notes that `stream` uses the block too: work queued on it so far must be over, or ordered
    /// before, when the block is reused. No driver call.
    pub fn record_use(&mut self, id: BlockId, stream: StreamId) -> Result<(), UnknownBlock> {
        let mark = self.streams.now(stream);
        self.block(id)?;
        if let Kind::Used(used) = &mut self.regions.get_mut(id.index).kind {
            note_use(&mut used.uses, mark);
        }
        Ok(())
    }

    /// Takes a block back. Work on it must be queued on `stream`, or ordered before its present
    /// end, or noted by [`Pool::record_use`]; what the memory inherited from its former owners is
    /// the pool's to remember. No driver call; O(log n) in the free regions.
    pub fn free(&mut self, id: BlockId, stream: StreamId) -> Result<(), UnknownBlock> {
        assert!(self.streams.contains(stream), "{stream} is unknown to the pool");
        self.block(id)?;
        let Kind::Used(used) = &mut self.regions.get_mut(id.index).kind else {
            return Err(UnknownBlock { id });
        };
        let (requested, mut uses) = (used.requested, std::mem::take(&mut used.uses));
        if used.stream != stream {
            note_use(&mut uses, Mark { stream: used.stream, epoch: used.inherited });
        }
        self.counters.live -= Bytes::new(requested);
        self.counters.freed += 1;
        self.release_region(id.index, stream, uses);
        Ok(())
    }

    /// Makes a used region free, or waiting if other streams may still touch it.
    pub(crate) fn release_region(&mut self, key: RegionKey, stream: StreamId, uses: Vec<Mark>) {
        self.regions.retire_id(key);
        let len = self.regions.get(key).len;
        self.used -= len;
        let epoch = self.streams.now(stream).epoch;
        let mut marks = uses;
        marks.retain(|&mark| !self.streams.is_ordered(stream, mark));
        if marks.is_empty() {
            self.make_free(key, stream, epoch);
        } else {
            self.regions.get_mut(key).kind = Kind::Waiting { owner: stream, epoch, marks };
            self.waiting.push(key);
        }
    }

    /// Gives waiting regions whose marks are over to their owners. True if there was one.
    pub(crate) fn promote_waiting(&mut self) -> bool {
        let mut promoted = false;
        let waiting = std::mem::take(&mut self.waiting);
        for key in waiting {
            let Kind::Waiting { owner, epoch, marks } = &self.regions.get(key).kind else {
                panic!("region {key} waits for nothing");
            };
            let owner = *owner;
            if marks.iter().all(|&mark| self.streams.is_over(mark)) {
                self.make_free(key, owner, *epoch);
                promoted = true;
            } else if marks.iter().all(|&mark| self.streams.is_ordered(owner, mark)) {
                // The owner's wait came after the free: only the present epoch covers it.
                self.make_free(key, owner, self.streams.now(owner).epoch);
                promoted = true;
            } else {
                self.waiting.push(key);
            }
        }
        promoted
    }

    /// Turns a region into free memory of `owner` and merges it with its neighbours.
    pub(crate) fn make_free(&mut self, key: RegionKey, owner: StreamId, epoch: Epoch) {
        let born = self.births;
        self.births += 1;
        let region = self.regions.get_mut(key);
        let len = region.len;
        region.kind =
            Kind::Free(Free { owner, parts: smallvec![Part { len, epoch }], born, lent_by: None });
        self.link_free(key);
    }

    /// Merges a free region that is not in an index with its free neighbours of the same owner,
    /// and indexes the result.
    pub(crate) fn link_free(&mut self, key: RegionKey) -> RegionKey {
        let owner = self.free_of(key).owner;
        let mut front = key;
        if let Some(next) = self.regions.next(front).filter(|&next| self.is_free_of(next, owner)) {
            self.unindex(next);
            self.merge_next(front);
        }
        if let Some(prev) = self.regions.prev(front).filter(|&prev| self.is_free_of(prev, owner)) {
            self.unindex(prev);
            self.merge_next(prev);
            front = prev;
        }
        self.index(front);
        front
    }

    /// Joins a free region with the free one behind it. Neither is in an index.
    pub(crate) fn merge_next(&mut self, key: RegionKey) {
        let next = self.regions.next(key).expect("a merge has a right side");
        let Free { parts: behind, born, .. } = self.free_of(next).clone();
        let reached = self.streams.get(self.free_of(key).owner).reached;
        self.regions.absorb_next(key);
        let free = self.free_of_mut(key);
        free.born = free.born.max(born);
        for part in behind {
            push_part(&mut free.parts, part, reached);
        }
    }

    pub(crate) fn free_of(&self, key: RegionKey) -> &Free {
        match &self.regions.get(key).kind {
            Kind::Free(free) => free,
            other => panic!("region {key} is not free but {other:?}"),
        }
    }

    pub(crate) fn free_of_mut(&mut self, key: RegionKey) -> &mut Free {
        match &mut self.regions.get_mut(key).kind {
            Kind::Free(free) => free,
            other => panic!("region {key} is not free but {other:?}"),
        }
    }

    pub(crate) fn is_free_of(&self, key: RegionKey, owner: StreamId) -> bool {
        let own = |free: &Free| free.owner == owner && free.lent_by.is_none();
        matches!(&self.regions.get(key).kind, Kind::Free(free) if own(free))
    }

    /// Lets a free region be found by its owner. One that an arena lends never is.
    pub(crate) fn index(&mut self, key: RegionKey) {
        let (at, len) = (self.regions.get(key).at, self.regions.get(key).len);
        let &Free { owner, lent_by: None, .. } = self.free_of(key) else { return };
        self.streams.get_mut(owner).free.insert(at, len, key);
    }

    pub(crate) fn unindex(&mut self, key: RegionKey) {
        let (at, len) = (self.regions.get(key).at, self.regions.get(key).len);
        let &Free { owner, lent_by: None, .. } = self.free_of(key) else { return };
        self.streams.get_mut(owner).free.remove(at, len, key);
    }

    /// Cuts a free region that is not in an index at `offset`; both sides keep their parts.
    pub(crate) fn split_free(&mut self, key: RegionKey, offset: u64) -> RegionKey {
        let back = self.regions.split(key, offset);
        let free = self.free_of_mut(key);
        let mut kept = 0;
        let mut front = smallvec![];
        let mut rest = smallvec![];
        for part in std::mem::take(&mut free.parts) {
            let here = part.len.min(offset - kept);
            kept += here;
            if here > 0 {
                front.push(Part { len: here, ..part });
            }
            if part.len > here {
                rest.push(Part { len: part.len - here, ..part });
            }
        }
        free.parts = front;
        self.free_of_mut(back).parts = rest;
        back
    }

    /// Hands the first `len` bytes of a free region to a user, or to a slab.
    pub(crate) fn carve(
        &mut self,
        key: RegionKey,
        len: u64,
        Request { size, stream }: Request,
        slab: bool,
    ) -> Block {
        let inherited = self.free_of(key).epoch_of(0, len);
        let used = Used { stream, inherited, requested: size.count(), uses: Vec::new(), slab };
        self.unindex(key);
        if self.regions.get(key).len > len {
            let rest = self.split_free(key, len);
            self.index(rest);
        }
        let region = self.regions.get_mut(key);
        region.kind = Kind::Used(used);
        let block = Block {
            id: BlockId { index: key, generation: region.generation },
            at: region.at,
            len: Bytes::new(len),
        };
        self.used += len;
        self.used_peak = self.used_peak.max(self.used);
        block
    }

    /// Counts a block that a user got.
    pub(crate) fn count_placed(&mut self, requested: u64, planned: bool) {
        let counters = &mut self.counters;
        counters.live += Bytes::new(requested);
        counters.live_peak = counters.live_peak.max(counters.live);
        counters.placed += 1;
        if planned {
            counters.misses += 1;
        } else {
            counters.hits += 1;
        }
    }

    // --- slabs ---

    /// How many slabs heaps have.
    pub fn slab_count(&self) -> usize {
        self.slabs
    }

    /// Makes a carved region a slab.
    pub(crate) fn as_slab(&mut self, block: Block) -> Slab {
        self.slabs += 1;
        Slab { region: block.id.index, at: block.at, len: block.len.count() }
    }

    /// Takes a slab back that `stream` used. Its work may still run: it is stamped as now.
    pub fn take_back(&mut self, slab: Slab, stream: StreamId) {
        self.slabs -= 1;
        self.release_region(slab.region, stream, Vec::new());
    }

    /// Cuts a slab in two. Returns the back.
    pub(crate) fn split_slab(&mut self, slab: &mut Slab, offset: u64) -> Slab {
        self.slabs += 1;
        let region = self.regions.split(slab.region, offset);
        let back = Slab { region, at: slab.at.plus(offset), len: slab.len - offset };
        slab.len = offset;
        back
    }

    /// Tells the pool what freed blocks in heaps wait for: where memory is short, it is waited for.
    pub fn heaps_await(&mut self, marks: Vec<Mark>) {
        self.awaited = marks;
    }

    // --- holes ---

    pub(crate) fn add_hole(&mut self, key: RegionKey) {
        let mut key = key;
        self.regions.get_mut(key).kind = Kind::Hole;
        let is_hole = |regions: &Regions, key: &RegionKey| regions.get(*key).kind == Kind::Hole;
        if let Some(next) = self.regions.next(key).filter(|next| is_hole(&self.regions, next)) {
            self.drop_hole(next);
            self.regions.absorb_next(key);
        }
        if let Some(prev) = self.regions.prev(key).filter(|prev| is_hole(&self.regions, prev)) {
            self.drop_hole(prev);
            self.regions.absorb_next(prev);
            key = prev;
        }
        let region = self.regions.get(key);
        self.holes.insert((region.len, region.at, key));
    }

    pub(crate) fn drop_hole(&mut self, key: RegionKey) {
        let region = self.regions.get(key);
        let known = self.holes.remove(&(region.len, region.at, key));
        assert!(known, "hole {key} at {:?} is not indexed", region.at);
    }
}

/// Appends a part, joining it with the last one where nobody could tell them apart.
pub(crate) fn push_part(parts: &mut crate::pool::regions::Parts, part: Part, reached: Epoch) {
    let part = if part.epoch <= reached { Part { epoch: Epoch::START, ..part } } else { part };
    if let Some(last) = parts.last_mut() {
        if last.epoch <= reached {
            last.epoch = Epoch::START;
        }
        if last.epoch == part.epoch {
            last.len += part.len;
            return;
        }
    }
    parts.push(part);
}

pub(crate) fn note_use(uses: &mut Vec<Mark>, mark: Mark) {
    match uses.iter_mut().find(|known| known.stream == mark.stream) {
        Some(known) => known.epoch = known.epoch.max(mark.epoch),
        None => uses.push(mark),
    }
}
