//! The heap of one stream: blocks are taken, used, freed, and promoted once no stream uses them.

use crate::Bytes;
use crate::heap::bins::Bins;
use crate::heap::pieces::{NONE, Piece, Pieces, State};
use crate::heap::slabs::{HeapSlab, Slabs};
use crate::ids::{BlockId, Mark, StreamId};
use crate::pool::{BLOCK_ALIGN, Block, Pool, Slab, UnknownBlock};
use crate::waiting::add_mark;

/// Largest slab, except for one that a single request needs.
const SLAB_MAX: Bytes = Bytes::mib(32);
/// Most memory that a heap keeps in empty slabs, besides the oldest of them.
const EMPTY_MAX: Bytes = Bytes::mib(32);

/// Part of a heap up to which a request is small beside it.
const SMALL_PART: u64 = 256;

/// What remains to be done after a free.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a slab that is not needed goes back to the pool"]
pub enum Freed {
    /// Nothing.
    Kept,
    /// Give this slab back with [`Pool::take_back`].
    Surplus(Slab),
    /// Other streams used the block: free it with [`StreamHeap::free`], behind their marks.
    Noted,
}

/// The slabs of one stream.
#[derive(Debug)]
pub struct StreamHeap {
    pub(super) stream: StreamId,
    pub(super) pieces: Pieces,
    pub(super) bins: Bins,
    pub(super) slabs: Slabs,
}

impl StreamHeap {
    /// The longest request that is small beside any heap. Threads may keep freed blocks up to it at hand.
    pub const SMALL: Bytes = Bytes::kib(64);

    /// Creates a heap without slabs.
    pub fn new(stream: StreamId) -> StreamHeap {
        StreamHeap { stream, pieces: Pieces::default(), bins: Bins::new(), slabs: Slabs::default() }
    }

    /// The stream whose heap this is.
    pub fn stream(&self) -> StreamId {
        self.stream
    }

    /// Makes room for the records of a new slab and a block in it. Returns false if the host has no
    /// memory for them.
    pub fn make_room(&mut self) -> bool {
        self.pieces.make_room(2)
    }

    /// Returns a block for `request`, if a slab has room and the host has memory for its record. No
    /// heap memory except where the table of pieces doubles, no search.
    pub fn take(&mut self, request: Bytes) -> Option<Block> {
        let units = u32::try_from(request.count().div_ceil(BLOCK_ALIGN.count())).ok()?.max(1);
        let piece = self.bins.find(units, &self.pieces)?;
        if !self.pieces.make_room(1) {
            return None;
        }
        self.bins.remove(piece, &mut self.pieces);
        if self.pieces[piece].units > units {
            let rest = self.pieces.cut(piece, units);
            self.bins.insert(rest, &mut self.pieces);
        }
        let slab = self.pieces[piece].slab;
        if self.slabs[slab].taken_units == 0 {
            self.slabs.note_taken(slab);
        }
        self.slabs[slab].taken_units += units;
        let taken = &mut self.pieces[piece];
        taken.state = State::Used { requested: request, uses: Vec::new() };
        let id = BlockId { index: piece, generation: taken.generation };
        Some(Block { id, at: self.slabs[slab].origin + taken.offset(), len: taken.len() })
    }

    /// Returns the block with this id.
    pub fn block(&self, id: BlockId) -> Result<Block, UnknownBlock> {
        let piece = &self.pieces[self.lookup(id)?];
        let at = self.slabs[piece.slab].origin + piece.offset();
        Ok(Block { id, at, len: piece.len() })
    }

    /// Every allocated block.
    pub fn blocks(&self) -> impl Iterator<Item = Block> {
        (0..).zip(self.pieces.iter()).filter_map(|(index, piece)| {
            self.block(BlockId { index, generation: piece.generation }).ok()
        })
    }

    /// Notes a use on another stream: after its free the block waits until `mark` is over.
    pub fn note_use(&mut self, id: BlockId, mark: Mark) -> Result<(), UnknownBlock> {
        let piece = self.lookup(id)?;
        if let State::Used { uses, .. } = &mut self.pieces[piece].state {
            add_mark(uses, mark);
        }
        Ok(())
    }

    /// Frees a block whose work is all on the heap's own stream, or ordered before its present end.
    /// Changes nothing where uses on other streams were noted.
    pub fn free_in_order(&mut self, id: BlockId) -> Result<Freed, UnknownBlock> {
        let piece = self.lookup(id)?;
        if matches!(&self.pieces[piece].state, State::Used { uses, .. } if !uses.is_empty()) {
            return Ok(Freed::Noted);
        }
        self.pieces.retire_id(piece);
        Ok(self.give_back(piece))
    }

    /// Frees a block on `stream`.
    pub fn free(
        &mut self,
        id: BlockId,
        stream: StreamId,
        pool: &mut Pool,
    ) -> Result<Freed, UnknownBlock> {
        let piece = self.lookup(id)?;
        let state = std::mem::replace(&mut self.pieces[piece].state, State::Free);
        let State::Used { uses: mut marks, .. } = state else {
            panic!("{id:?} is not in use");
        };
        self.pieces.retire_id(piece);
        let is_open = |mark: Mark| !pool.is_ordered(self.stream, mark);
        marks.retain(|&mark| is_open(mark));
        // No heap memory where the block is freed on its own stream.
        let now = pool.now(stream);
        if is_open(now) {
            marks.push(now);
        }
        if !marks.is_empty() {
            self.pieces[piece].state = State::Waiting;
            pool.wait_in_heap(self.stream, piece, marks);
            return Ok(Freed::Kept);
        }
        Ok(self.give_back(piece))
    }

    /// Frees waiting blocks whose marks are over. Returns true if there was one. O(log n) for each.
    pub fn promote(&mut self, pool: &mut Pool) -> bool {
        let ready = pool.take_ready_in_heap(self.stream);
        for &piece in &ready {
            assert_eq!(self.pieces[piece].state, State::Waiting, "piece {piece}");
            self.coalesce(piece);
        }
        !ready.is_empty()
    }

    /// True if the heap is to grow for a request that finds no room, where other streams have heaps too. What
    /// is free in one serves no other, and with requests that are large beside it that is half of a heap: the
    /// pool places those for all streams.
    pub fn is_to_grow_for(&self, request: Bytes) -> bool {
        request <= Self::SMALL.max(Bytes::new(self.slabs.bytes.count() / SMALL_PART))
    }

    /// The length of the slab to ask the pool for when `request` finds no room: a quarter of what
    /// the heap has, within bounds.
    pub fn wanted(&self, request: Bytes, page: Bytes) -> Bytes {
        let least = request.max(Bytes::new(1)).checked_round_up(page).unwrap_or(request);
        let quarter = Bytes::new(self.slabs.bytes.count() / 4);
        quarter.min(SLAB_MAX).round_down(page).max(least)
    }

    /// Adds a slab to the heap.
    pub fn add(&mut self, slab: Slab) {
        self.slabs.bytes += slab.len;
        let units = slab.len.whole(BLOCK_ALIGN) as u32;
        let origin = slab.at;
        let number = self.slabs.add(HeapSlab::new(slab, origin, NONE, 0));
        let whole = self.pieces.add(Piece::free(number, 0, units));
        self.slabs[number].first = whole;
        self.slabs.note_empty(number);
        self.bins.insert(whole, &mut self.pieces);
    }

    /// Frees a piece. Returns its slab if that is empty and not worth keeping.
    fn give_back(&mut self, piece: u32) -> Freed {
        let slab = self.coalesce(piece);
        let kept = self.slabs.is_first_empty(slab) || self.slabs.empty_bytes <= EMPTY_MAX;
        if self.slabs[slab].taken_units > 0 || kept {
            return Freed::Kept;
        }
        Freed::Surplus(self.remove_empty(slab))
    }

    /// Makes a piece free and merges it with its free neighbours. Returns its slab.
    fn coalesce(&mut self, piece: u32) -> u32 {
        let Piece { slab, units, .. } = self.pieces[piece];
        self.pieces[piece].state = State::Free;
        let mut front = piece;
        if let Some(next) = self.pieces.if_free(self.pieces[front].next) {
            self.bins.remove(next, &mut self.pieces);
            self.pieces.absorb_next(front);
        }
        if let Some(prev) = self.pieces.if_free(self.pieces[front].prev) {
            self.bins.remove(prev, &mut self.pieces);
            self.pieces.absorb_next(prev);
            front = prev;
        }
        self.bins.insert(front, &mut self.pieces);
        self.slabs[slab].taken_units -= units;
        if self.slabs[slab].taken_units == 0 {
            self.slabs.note_empty(slab);
        }
        slab
    }

    /// Takes an empty slab out of the heap.
    pub(super) fn remove_empty(&mut self, number: u32) -> Slab {
        self.slabs.note_taken(number);
        let HeapSlab { slab, first, .. } = self.slabs.remove(number);
        self.bins.remove(first, &mut self.pieces);
        self.pieces.vacate(first);
        self.slabs.bytes -= slab.len;
        slab
    }

    fn lookup(&self, id: BlockId) -> Result<u32, UnknownBlock> {
        let known = self.pieces.get(id.index).is_some_and(|piece| {
            piece.generation == id.generation && matches!(piece.state, State::Used { .. })
        });
        if known { Ok(id.index) } else { Err(UnknownBlock { id }) }
    }
}
