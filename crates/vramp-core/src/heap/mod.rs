//! Small and middle blocks: every stream has a heap of slabs, cut at 512 bytes.
//!
//! A slab is a used region of the pool, so all sizes draw on the same chunks. Within a slab free
//! pieces coalesce; the heap's free pieces of all slabs are binned by size in eighths of a power of
//! two, so finding one takes two bit scans. A heap is a value of its own, so that the shell can lock
//! each one apart from the pool: a hit touches nothing that other streams share.
//!
//! The larger the heap, the larger its slabs; what it does not use it sheds when the pool runs
//! short ([`StreamHeap::shed`]): whole slabs, and large free pieces cut out of them.
//!
//! Waste: a request is rounded up to 512 bytes, so a block of `n` bytes wastes under 512.
//!
//! One block: [`StreamHeap::take`] finds a free piece (`bins.rs`) and cuts it (`pieces.rs`); the
//! frees merge it with its neighbours; what is over goes back to the pool slab by slab (`slabs.rs`).
//! `check.rs` is what the audit and the census ask.

mod bins;
mod check;
mod pieces;
mod slabs;

use crate::Bytes;
use crate::ids::{BlockId, Mark, StreamId};
use crate::pool::{BLOCK_ALIGN, Block, Pool, UnknownBlock, note_use};

use bins::Bins;
use pieces::{Piece, State};
use slabs::Home;

pub use slabs::Slab;

/// No piece, where one could stand.
const NONE: u32 = u32::MAX;

/// What a free leaves to do.
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
    stream: StreamId,
    pieces: Vec<Piece>,
    vacant_pieces: Vec<u32>,
    slabs: Vec<Option<Home>>,
    vacant_slabs: Vec<u32>,
    bins: Bins,
    empty: Vec<u32>,
    empty_bytes: u64,
    bytes: u64,
    waiting: Vec<u32>,
}

impl StreamHeap {
    /// A heap without slabs.
    pub fn new(stream: StreamId) -> StreamHeap {
        StreamHeap {
            stream,
            pieces: Vec::new(),
            vacant_pieces: Vec::new(),
            slabs: Vec::new(),
            vacant_slabs: Vec::new(),
            bins: Bins::new(),
            empty: Vec::new(),
            empty_bytes: 0,
            bytes: 0,
            waiting: Vec::new(),
        }
    }

    /// Whose memory it is.
    pub fn stream(&self) -> StreamId {
        self.stream
    }

    /// A block for `request`, if a slab has room. No heap memory, no search.
    pub fn take(&mut self, request: Bytes) -> Option<Block> {
        let requested = request.count();
        let units = u32::try_from(requested.div_ceil(BLOCK_ALIGN)).ok()?.max(1);
        let (level, sub) = Bins::bin_of(units);
        let own = self.bins.heads[level][sub];
        let piece = if own != NONE && self.pieces[own as usize].units >= units {
            own
        } else {
            self.bins.head_above(units)?
        };
        self.unbin(piece);
        if self.pieces[piece as usize].units > units {
            let rest = self.cut(piece, units);
            self.bin(rest);
        }
        let Piece { slab, start, .. } = self.pieces[piece as usize];
        if self.home(slab).taken_units == 0 {
            self.forget_empty(slab);
        }
        let home = self.home_mut(slab);
        home.taken_units += units;
        let at = home.slab.at.plus(u64::from(start) * BLOCK_ALIGN);
        let taken = &mut self.pieces[piece as usize];
        taken.state = State::Used { requested, uses: Vec::new() };
        let id = BlockId { index: piece, generation: taken.generation };
        Some(Block { id, at, len: Bytes::new(u64::from(units) * BLOCK_ALIGN) })
    }

    /// The block under this id.
    pub fn block(&self, id: BlockId) -> Result<Block, UnknownBlock> {
        let piece = &self.pieces[self.lookup(id)? as usize];
        Ok(Block {
            id,
            at: self.home(piece.slab).slab.at.plus(u64::from(piece.start) * BLOCK_ALIGN),
            len: Bytes::new(u64::from(piece.units) * BLOCK_ALIGN),
        })
    }

    /// Every block in users' hands.
    pub fn blocks(&self) -> impl Iterator<Item = Block> {
        self.pieces.iter().enumerate().filter_map(|(index, piece)| {
            self.block(BlockId { index: index as u32, generation: piece.generation }).ok()
        })
    }

    /// Notes a use on another stream: the block is free again once `mark` is over.
    pub fn note_use(&mut self, id: BlockId, mark: Mark) -> Result<(), UnknownBlock> {
        let piece = self.lookup(id)?;
        if let State::Used { uses, .. } = &mut self.pieces[piece as usize].state {
            note_use(uses, mark);
        }
        Ok(())
    }

    /// Takes back a block whose work is all on the heap's own stream, or ordered before its present
    /// end. Changes nothing where uses on other streams were noted.
    pub fn free_in_order(&mut self, id: BlockId) -> Result<Freed, UnknownBlock> {
        let piece = self.lookup(id)?;
        if matches!(&self.pieces[piece as usize].state, State::Used { uses, .. } if !uses.is_empty())
        {
            return Ok(Freed::Noted);
        }
        self.end_id(piece);
        Ok(self.give_back(piece))
    }

    /// Takes a block back that was freed on `stream`.
    pub fn free(
        &mut self,
        id: BlockId,
        stream: StreamId,
        pool: &Pool,
    ) -> Result<Freed, UnknownBlock> {
        let piece = self.lookup(id)?;
        let state = std::mem::replace(&mut self.pieces[piece as usize].state, State::Free);
        let State::Used { uses: mut marks, .. } = state else {
            panic!("{id:?} is not in use");
        };
        self.end_id(piece);
        let is_open = |mark: Mark| !pool.streams.is_ordered(self.stream, mark);
        marks.retain(|&mark| is_open(mark));
        // No heap memory where the block is freed on its own stream.
        let now = pool.now(stream);
        if is_open(now) {
            marks.push(now);
        }
        if !marks.is_empty() {
            self.pieces[piece as usize].state = State::Waiting { marks };
            self.waiting.push(piece);
            return Ok(Freed::Kept);
        }
        Ok(self.give_back(piece))
    }

    /// Frees waiting blocks whose marks are over. True if there was one.
    pub fn promote(&mut self, pool: &Pool) -> bool {
        let before = self.waiting.len();
        for piece in std::mem::take(&mut self.waiting) {
            let State::Waiting { marks } = &self.pieces[piece as usize].state else {
                panic!("piece {piece} waits for nothing");
            };
            if marks.iter().all(|&mark| pool.streams.is_ordered(self.stream, mark)) {
                self.give_back_to_slab(piece);
            } else {
                self.waiting.push(piece);
            }
        }
        self.waiting.len() < before
    }

    /// Marks that waiting blocks wait for.
    pub fn awaited(&self) -> impl Iterator<Item = Mark> {
        self.waiting.iter().flat_map(|&piece| match &self.pieces[piece as usize].state {
            State::Waiting { marks } => marks.iter().copied(),
            _ => [].iter().copied(),
        })
    }

    fn lookup(&self, id: BlockId) -> Result<u32, UnknownBlock> {
        let known = self.pieces.get(id.index as usize).is_some_and(|piece| {
            piece.generation == id.generation && matches!(piece.state, State::Used { .. })
        });
        if known { Ok(id.index) } else { Err(UnknownBlock { id }) }
    }

    fn end_id(&mut self, piece: u32) {
        let known = &mut self.pieces[piece as usize];
        known.generation = known.generation.wrapping_add(1);
    }
}
