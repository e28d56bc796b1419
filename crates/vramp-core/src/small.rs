//! Small blocks: slabs of one page, cut at 512 bytes.
//!
//! A slab is a used region of the page heap, so small and large blocks draw on the same chunks. It
//! belongs to one stream; an empty one goes back to the page heap, all but one for each stream.
//! Within a slab free pieces coalesce; a stream's free pieces of all slabs are binned by size in
//! eighths of a power of two, so finding one takes two bit scans.
//!
//! Waste: a request is rounded up to 512 bytes, so a block of `n` bytes wastes under 512.

use crate::Bytes;
use crate::fit::RegionKey;
use crate::ids::{BlockId, Mark, Spot, StreamId};
use crate::pool::{Block, GRAIN};
use crate::stream::Streams;

const NONE: u32 = u32::MAX;
/// Block ids of small blocks have this bit; region keys never do.
const SMALL: u32 = 1 << 31;

#[derive(Clone, Debug, PartialEq, Eq)]
enum State {
    Vacant,
    Free,
    Used { requested: u64, uses: Vec<Mark> },
    Waiting { marks: Vec<Mark> },
}

/// A piece of a slab, in units of the grain.
#[derive(Clone, Debug)]
struct Piece {
    slab: u32,
    start: u32,
    units: u32,
    state: State,
    generation: u32,
    prev: u32,
    next: u32,
    bin_prev: u32,
    bin_next: u32,
}

#[derive(Clone, Debug)]
struct Slab {
    region: RegionKey,
    at: Spot,
    stream: StreamId,
    first: u32,
    taken_units: u32,
}

const SUB_BITS: u32 = 3;
const SUBS: usize = 1 << SUB_BITS;
const LEVELS: usize = 32;

/// One stream's free pieces.
#[derive(Clone, Debug)]
struct Bins {
    heads: [[u32; SUBS]; LEVELS],
    levels: u32,
    subs: [u8; LEVELS],
    empty_slabs: Vec<u32>,
}

impl Bins {
    fn new() -> Bins {
        Bins {
            heads: [[NONE; SUBS]; LEVELS],
            levels: 0,
            subs: [0; LEVELS],
            empty_slabs: Vec::new(),
        }
    }

    fn bin_of(units: u32) -> (usize, usize) {
        let level = units.ilog2();
        let sub = (units << SUB_BITS >> level) as usize & (SUBS - 1);
        (level as usize, sub)
    }

    /// The first piece of the lowest occupied bin above `units`' own.
    fn head_above(&self, units: u32) -> Option<u32> {
        let (level, sub) = Bins::bin_of(units);
        let above = (u32::from(self.subs[level]) >> sub >> 1) as u8;
        if above != 0 {
            return Some(self.heads[level][sub + 1 + above.trailing_zeros() as usize]);
        }
        let levels = self.levels.checked_shr(level as u32 + 1).unwrap_or(0);
        if levels == 0 {
            return None;
        }
        let level = level + 1 + levels.trailing_zeros() as usize;
        Some(self.heads[level][self.subs[level].trailing_zeros() as usize])
    }
}

/// What a free of a small block leaves to do.
pub(crate) struct Freed {
    pub requested: u64,
    /// A slab that nobody needs: give it back.
    pub empty_slab: Option<u32>,
}

/// All slabs of all streams.
#[derive(Clone, Debug)]
pub(crate) struct SmallHeap {
    slab_units: u32,
    pieces: Vec<Piece>,
    vacant_pieces: Vec<u32>,
    slabs: Vec<Option<Slab>>,
    vacant_slabs: Vec<u32>,
    bins: Vec<Bins>,
    waiting: Vec<u32>,
}

impl SmallHeap {
    pub(crate) fn new(slab_bytes: u64) -> SmallHeap {
        SmallHeap {
            slab_units: (slab_bytes / GRAIN) as u32,
            pieces: Vec::new(),
            vacant_pieces: Vec::new(),
            slabs: Vec::new(),
            vacant_slabs: Vec::new(),
            bins: Vec::new(),
            waiting: Vec::new(),
        }
    }

    pub(crate) fn add_stream(&mut self) {
        self.bins.push(Bins::new());
    }

    /// The number the next slab will have.
    pub(crate) fn next_slab(&self) -> u32 {
        self.vacant_slabs.last().copied().unwrap_or(self.slabs.len() as u32)
    }

    /// Makes a used region of one page a slab.
    pub(crate) fn add_slab(&mut self, region: RegionKey, at: Spot, stream: StreamId) {
        let slab = self.next_slab();
        if self.vacant_slabs.pop().is_none() {
            self.slabs.push(None);
        }
        let whole = self.new_piece(Piece {
            slab,
            start: 0,
            units: self.slab_units,
            state: State::Free,
            generation: 0,
            prev: NONE,
            next: NONE,
            bin_prev: NONE,
            bin_next: NONE,
        });
        self.slabs[slab as usize] = Some(Slab { region, at, stream, first: whole, taken_units: 0 });
        self.bins[stream.index()].empty_slabs.push(slab);
        self.bin(whole);
    }

    /// Forgets an empty slab. Returns its region and owner.
    pub(crate) fn remove_slab(&mut self, slab: u32) -> (RegionKey, StreamId) {
        let Slab { region, stream, first, taken_units, .. } =
            self.slabs[slab as usize].take().unwrap_or_else(|| panic!("slab {slab} is gone"));
        assert_eq!(taken_units, 0, "slab {slab} is not empty");
        self.unbin(first, stream);
        self.vacate(first);
        self.vacant_slabs.push(slab);
        self.bins[stream.index()].empty_slabs.retain(|&empty| empty != slab);
        (region, stream)
    }

    /// Every slab that holds nothing.
    pub(crate) fn empty_slabs(&self) -> Vec<u32> {
        self.bins.iter().flat_map(|bins| bins.empty_slabs.iter().copied()).collect()
    }

    /// A block for `requested` bytes, if a slab of the stream has room. No heap memory.
    pub(crate) fn take(&mut self, requested: u64, stream: StreamId) -> Option<Block> {
        let units = requested.div_ceil(GRAIN).max(1) as u32;
        let bins = &self.bins[stream.index()];
        let (level, sub) = Bins::bin_of(units);
        let own = bins.heads[level][sub];
        let piece = if own != NONE && self.pieces[own as usize].units >= units {
            own
        } else {
            bins.head_above(units)?
        };
        self.unbin(piece, stream);
        if self.pieces[piece as usize].units > units {
            let rest = self.cut(piece, units);
            self.bin(rest);
        }
        let Piece { slab, start, .. } = self.pieces[piece as usize];
        let home = self.slabs[slab as usize].as_mut().expect("a piece lies in a slab");
        if home.taken_units == 0 {
            self.bins[stream.index()].empty_slabs.retain(|&empty| empty != slab);
        }
        home.taken_units += units;
        let at = home.at.plus(u64::from(start) * GRAIN);
        let taken = &mut self.pieces[piece as usize];
        taken.state = State::Used { requested, uses: Vec::new() };
        let id = BlockId { index: piece | SMALL, generation: taken.generation };
        Some(Block { id, at, len: Bytes::new(u64::from(units) * GRAIN) })
    }

    fn lookup(&self, id: BlockId) -> Option<u32> {
        let piece = id.index & !SMALL;
        let known = id.index & SMALL != 0
            && self.pieces.get(piece as usize).is_some_and(|known| {
                known.generation == id.generation && matches!(known.state, State::Used { .. })
            });
        known.then_some(piece)
    }

    pub(crate) fn block(&self, id: BlockId) -> Option<Block> {
        let piece = &self.pieces[self.lookup(id)? as usize];
        let slab = self.slabs[piece.slab as usize].as_ref().expect("a piece lies in a slab");
        Some(Block {
            id,
            at: slab.at.plus(u64::from(piece.start) * GRAIN),
            len: Bytes::new(u64::from(piece.units) * GRAIN),
        })
    }

    pub(crate) fn blocks(&self) -> impl Iterator<Item = Block> {
        self.pieces.iter().enumerate().filter_map(|(index, piece)| {
            self.block(BlockId { index: index as u32 | SMALL, generation: piece.generation })
        })
    }

    pub(crate) fn uses_mut(&mut self, id: BlockId) -> Option<&mut Vec<Mark>> {
        let piece = self.lookup(id)?;
        match &mut self.pieces[piece as usize].state {
            State::Used { uses, .. } => Some(uses),
            _ => None,
        }
    }

    /// Takes a block back that was freed at `mark`.
    pub(crate) fn free(&mut self, id: BlockId, mark: Mark, streams: &Streams) -> Freed {
        let piece = self.lookup(id).unwrap_or_else(|| panic!("{id:?} is no small block"));
        let state = std::mem::replace(&mut self.pieces[piece as usize].state, State::Free);
        let State::Used { requested, uses: mut marks } = state else {
            panic!("{id:?} is not in use");
        };
        let known = &mut self.pieces[piece as usize];
        known.generation = known.generation.wrapping_add(1);
        let stream = self.stream_of(piece);
        marks.push(mark);
        marks.retain(|&mark| !streams.is_ordered(stream, mark));
        if !marks.is_empty() {
            self.pieces[piece as usize].state = State::Waiting { marks };
            self.waiting.push(piece);
            return Freed { requested, empty_slab: None };
        }
        Freed { requested, empty_slab: self.give_back(piece) }
    }

    /// Frees waiting pieces whose marks are over. True if there was one.
    pub(crate) fn promote_waiting(&mut self, streams: &Streams) -> bool {
        let before = self.waiting.len();
        for piece in std::mem::take(&mut self.waiting) {
            let State::Waiting { marks } = &self.pieces[piece as usize].state else {
                panic!("piece {piece} waits for nothing");
            };
            let stream = self.stream_of(piece);
            if marks.iter().all(|&mark| streams.is_ordered(stream, mark)) {
                self.pieces[piece as usize].state = State::Free;
                // A slab that empties here stays as the stream's spare one or is swept later.
                if let Some(slab) = self.give_back(piece) {
                    self.bins[stream.index()].empty_slabs.push(slab);
                }
            } else {
                self.waiting.push(piece);
            }
        }
        self.waiting.len() < before
    }

    /// Marks that waiting pieces of `stream` wait for.
    pub(crate) fn awaited(&self) -> impl Iterator<Item = Mark> {
        self.waiting.iter().flat_map(|&piece| match &self.pieces[piece as usize].state {
            State::Waiting { marks } => marks.iter().copied(),
            _ => [].iter().copied(),
        })
    }

    fn stream_of(&self, piece: u32) -> StreamId {
        let slab = self.pieces[piece as usize].slab;
        self.slabs[slab as usize].as_ref().expect("a piece lies in a slab").stream
    }

    /// Merges a freed piece with its neighbours. Returns its slab if that is empty and not needed.
    fn give_back(&mut self, piece: u32) -> Option<u32> {
        let Piece { slab, units, .. } = self.pieces[piece as usize];
        let stream = self.stream_of(piece);
        let home = self.slabs[slab as usize].as_mut().expect("a piece lies in a slab");
        home.taken_units -= units;
        let empty = home.taken_units == 0;
        let mut front = piece;
        let next = self.pieces[front as usize].next;
        if next != NONE && self.pieces[next as usize].state == State::Free {
            self.unbin(next, stream);
            self.absorb_next(front);
        }
        let prev = self.pieces[front as usize].prev;
        if prev != NONE && self.pieces[prev as usize].state == State::Free {
            self.unbin(prev, stream);
            self.absorb_next(prev);
            front = prev;
        }
        self.bin(front);
        if !empty {
            return None;
        }
        let spare = &mut self.bins[stream.index()].empty_slabs;
        if spare.is_empty() {
            spare.push(slab);
            return None;
        }
        Some(slab)
    }

    // --- pieces in address order ---

    fn new_piece(&mut self, mut piece: Piece) -> u32 {
        match self.vacant_pieces.pop() {
            Some(index) => {
                piece.generation = self.pieces[index as usize].generation;
                self.pieces[index as usize] = piece;
                index
            }
            None => {
                self.pieces.push(piece);
                let index = self.pieces.len() as u32 - 1;
                assert!(index < SMALL, "fewer than two billion small blocks");
                index
            }
        }
    }

    fn vacate(&mut self, index: u32) {
        let piece = &mut self.pieces[index as usize];
        piece.state = State::Vacant;
        piece.generation = piece.generation.wrapping_add(1);
        self.vacant_pieces.push(index);
    }

    fn cut(&mut self, piece: u32, units: u32) -> u32 {
        let front = &mut self.pieces[piece as usize];
        let rest = Piece {
            start: front.start + units,
            units: front.units - units,
            state: State::Free,
            prev: piece,
            ..front.clone()
        };
        front.units = units;
        let next = rest.next;
        let rest = self.new_piece(rest);
        self.pieces[piece as usize].next = rest;
        if next != NONE {
            self.pieces[next as usize].prev = rest;
        }
        rest
    }

    fn absorb_next(&mut self, piece: u32) {
        let gone = self.pieces[piece as usize].next;
        let (units, next) = (self.pieces[gone as usize].units, self.pieces[gone as usize].next);
        self.pieces[piece as usize].units += units;
        self.pieces[piece as usize].next = next;
        if next != NONE {
            self.pieces[next as usize].prev = piece;
        }
        self.vacate(gone);
    }

    // --- free pieces by size ---

    fn bin(&mut self, piece: u32) {
        let (level, sub) = Bins::bin_of(self.pieces[piece as usize].units);
        let stream = self.stream_of(piece);
        let bins = &mut self.bins[stream.index()];
        let head = std::mem::replace(&mut bins.heads[level][sub], piece);
        bins.levels |= 1 << level;
        bins.subs[level] |= 1 << sub;
        self.pieces[piece as usize].bin_prev = NONE;
        self.pieces[piece as usize].bin_next = head;
        if head != NONE {
            self.pieces[head as usize].bin_prev = piece;
        }
    }

    fn unbin(&mut self, piece: u32, stream: StreamId) {
        let Piece { units, bin_prev, bin_next, .. } = self.pieces[piece as usize];
        if bin_next != NONE {
            self.pieces[bin_next as usize].bin_prev = bin_prev;
        }
        if bin_prev != NONE {
            self.pieces[bin_prev as usize].bin_next = bin_next;
            return;
        }
        let (level, sub) = Bins::bin_of(units);
        let bins = &mut self.bins[stream.index()];
        assert_eq!(bins.heads[level][sub], piece, "piece {piece} heads its bin");
        bins.heads[level][sub] = bin_next;
        if bin_next == NONE {
            bins.subs[level] &= !(1 << sub);
            if bins.subs[level] == 0 {
                bins.levels &= !(1 << level);
            }
        }
    }

    // --- for the audit and the census ---

    /// Bytes in blocks, in waiting pieces and in free pieces of all slabs.
    pub(crate) fn bytes(&self) -> SmallBytes {
        let mut sum = SmallBytes::default();
        for piece in &self.pieces {
            let bytes = u64::from(piece.units) * GRAIN;
            match &piece.state {
                State::Vacant => {}
                State::Free => sum.free += bytes,
                State::Waiting { .. } => sum.waiting += bytes,
                State::Used { requested, .. } => {
                    sum.used += bytes;
                    sum.requested += requested;
                }
            }
        }
        sum
    }

    /// Checks every slab from end to end. Returns what is wrong, if anything.
    pub(crate) fn check(&self) -> Result<(), String> {
        for (slab_id, slab) in self.slabs.iter().enumerate() {
            let Some(slab) = slab else { continue };
            let (mut at, mut taken, mut piece, mut prev) = (0, 0, slab.first, NONE);
            let mut last_free = false;
            while piece != NONE {
                let known = &self.pieces[piece as usize];
                let free = known.state == State::Free;
                if known.start != at || known.prev != prev || known.slab != slab_id as u32 {
                    return Err(format!("slab {slab_id}: piece {piece} is out of place"));
                }
                if known.state == State::Vacant || (free && last_free) {
                    return Err(format!("slab {slab_id}: piece {piece} should have been merged"));
                }
                if !free {
                    taken += known.units;
                }
                at += known.units;
                last_free = free;
                prev = piece;
                piece = known.next;
            }
            if at != self.slab_units || taken != slab.taken_units {
                return Err(format!("slab {slab_id}: {at} units, {taken} taken, do not add up"));
            }
        }
        let free: usize = self.pieces.iter().filter(|piece| piece.state == State::Free).count();
        let binned: usize = self.bins.iter().map(|bins| self.binned(bins)).sum();
        if free != binned {
            return Err(format!("{free} free pieces, {binned} in bins"));
        }
        Ok(())
    }

    fn binned(&self, bins: &Bins) -> usize {
        let heads = bins.heads.iter().flatten().copied();
        heads
            .map(|head| {
                std::iter::successors(Some(head).filter(|&head| head != NONE), |&piece| {
                    Some(self.pieces[piece as usize].bin_next).filter(|&next| next != NONE)
                })
                .count()
            })
            .sum()
    }

    /// The regions that hold slabs, each with its slab's number.
    pub(crate) fn slab_regions(&self) -> impl Iterator<Item = (u32, RegionKey)> {
        self.slabs
            .iter()
            .enumerate()
            .filter_map(|(slab, known)| Some((slab as u32, known.as_ref()?.region)))
    }
}

/// Bytes in slabs by state.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SmallBytes {
    pub used: u64,
    pub requested: u64,
    pub waiting: u64,
    pub free: u64,
}
