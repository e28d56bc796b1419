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

use crate::Bytes;
use crate::census::{Census, PartKind, StretchPart};
use crate::fit::RegionKey;
use crate::ids::{BlockId, Mark, Spot, StreamId};
use crate::pool::{Block, GRAIN, Pool, UnknownBlock, note_use};

const NONE: u32 = u32::MAX;
/// Slabs do not grow beyond this.
const SLAB_MOST: u64 = 32 << 20;
/// How much a heap keeps in slabs that hold nothing.
const EMPTY_MOST: u64 = 32 << 20;
/// Free pieces of at least this length leave a slab when the pool is short.
const SHED_LEAST: u64 = 512 << 10;

/// A stretch of the pool's memory for a heap to cut up.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a slab that is dropped is lost to the pool"]
pub struct Slab {
    pub(crate) region: RegionKey,
    pub(crate) at: Spot,
    pub(crate) len: u64,
}

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

/// A slab and what of it is not free.
#[derive(Debug)]
struct Home {
    slab: Slab,
    first: u32,
    taken_units: u32,
}

const SUB_BITS: u32 = 3;
const SUBS: usize = 1 << SUB_BITS;
const LEVELS: usize = 32;

/// Free pieces by size.
#[derive(Clone, Debug)]
struct Bins {
    heads: [[u32; SUBS]; LEVELS],
    levels: u32,
    subs: [u8; LEVELS],
}

impl Bins {
    fn new() -> Bins {
        Bins { heads: [[NONE; SUBS]; LEVELS], levels: 0, subs: [0; LEVELS] }
    }

    fn bin_of(units: u32) -> (usize, usize) {
        let level = units.ilog2();
        let sub = (u64::from(units) << SUB_BITS >> level) as usize & (SUBS - 1);
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

    /// How large a slab to ask the pool for when a request finds no room: a quarter of what the
    /// heap has, within bounds.
    pub fn wanted(&self, request: Bytes, page: Bytes) -> Bytes {
        let least = request.max(Bytes::new(1)).checked_round_up(page).unwrap_or(request);
        Bytes::new((self.bytes / 4).min(SLAB_MOST)).round_down(page).max(least)
    }

    /// Takes a slab into the heap.
    pub fn add(&mut self, slab: Slab) {
        self.bytes += slab.len;
        let units = (slab.len / GRAIN) as u32;
        let number = self.new_home(Home { slab, first: NONE, taken_units: 0 });
        let whole = self.new_piece(Piece {
            slab: number,
            start: 0,
            units,
            state: State::Free,
            generation: 0,
            prev: NONE,
            next: NONE,
            bin_prev: NONE,
            bin_next: NONE,
        });
        self.home_mut(number).first = whole;
        self.note_empty(number);
        self.bin(whole);
    }

    /// A block for `request`, if a slab has room. No heap memory, no search.
    pub fn take(&mut self, request: Bytes) -> Option<Block> {
        let requested = request.count();
        let units = u32::try_from(requested.div_ceil(GRAIN)).ok()?.max(1);
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
        let at = home.slab.at.plus(u64::from(start) * GRAIN);
        let taken = &mut self.pieces[piece as usize];
        taken.state = State::Used { requested, uses: Vec::new() };
        let id = BlockId { index: piece, generation: taken.generation };
        Some(Block { id, at, len: Bytes::new(u64::from(units) * GRAIN) })
    }

    /// The block under this id.
    pub fn block(&self, id: BlockId) -> Result<Block, UnknownBlock> {
        let piece = &self.pieces[self.lookup(id)? as usize];
        Ok(Block {
            id,
            at: self.home(piece.slab).slab.at.plus(u64::from(piece.start) * GRAIN),
            len: Bytes::new(u64::from(piece.units) * GRAIN),
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

    /// Gives the pool what the heap does not need: empty slabs, and large free pieces.
    pub fn shed(&mut self, pool: &mut Pool) {
        self.promote(pool);
        for number in 0..self.slabs.len() as u32 {
            if self.slabs[number as usize].is_some() {
                self.shed_slab(number, pool);
            }
        }
    }

    /// Marks that waiting blocks wait for.
    pub fn awaited(&self) -> impl Iterator<Item = Mark> {
        self.waiting.iter().flat_map(|&piece| match &self.pieces[piece as usize].state {
            State::Waiting { marks } => marks.iter().copied(),
            _ => [].iter().copied(),
        })
    }

    /// Every block in users' hands.
    pub fn blocks(&self) -> impl Iterator<Item = Block> {
        self.pieces.iter().enumerate().filter_map(|(index, piece)| {
            self.block(BlockId { index: index as u32, generation: piece.generation }).ok()
        })
    }

    /// Cuts the free pieces of a slab that are worth it out of it, from the back.
    fn shed_slab(&mut self, number: u32, pool: &mut Pool) {
        let mut number = number;
        let mut piece = self.home(number).first;
        while piece != NONE {
            let Piece { start, units, ref state, next, .. } = self.pieces[piece as usize];
            let len = u64::from(units) * GRAIN;
            let whole = u64::from(units) * GRAIN == self.home(number).slab.len;
            if *state != State::Free || !(whole || len >= SHED_LEAST) {
                piece = next;
                continue;
            }
            if whole {
                let slab = self.remove(number);
                pool.take_back(slab, self.stream);
                return;
            }
            self.unbin(piece);
            self.bytes -= len;
            if next != NONE {
                let behind = u64::from(start + units) * GRAIN;
                let back = pool.split_slab(&mut self.home_mut(number).slab, behind);
                self.pieces[next as usize].prev = NONE;
                let back = self.new_home(Home { slab: back, first: next, taken_units: 0 });
                self.adopt_pieces(back, next, start + units);
                let moved = self.home(back).taken_units;
                self.home_mut(number).taken_units -= moved;
                self.drop_front_or_tail(number, piece, start, pool);
                number = back;
            } else {
                self.drop_front_or_tail(number, piece, start, pool);
            }
            piece = next;
        }
    }

    /// Gives the last piece of a slab, which is free and in no bin, to the pool; the slab goes with
    /// it if that was all.
    fn drop_front_or_tail(&mut self, number: u32, piece: u32, start: u32, pool: &mut Pool) {
        let prev = self.pieces[piece as usize].prev;
        self.vacate(piece);
        if prev == NONE {
            let home = self.slabs[number as usize].take().expect("the slab is there");
            assert_eq!(home.taken_units, 0, "slab {number} is its first piece");
            self.vacant_slabs.push(number);
            pool.take_back(home.slab, self.stream);
        } else {
            self.pieces[prev as usize].next = NONE;
            let home = self.home_mut(number);
            let tail = pool.split_slab(&mut home.slab, u64::from(start) * GRAIN);
            pool.take_back(tail, self.stream);
        }
    }

    /// Makes the pieces from `first` on those of slab `number`, which begins at `offset` units.
    fn adopt_pieces(&mut self, number: u32, first: u32, offset: u32) {
        let mut piece = first;
        let mut taken = 0;
        while piece != NONE {
            let known = &mut self.pieces[piece as usize];
            known.slab = number;
            known.start -= offset;
            if known.state != State::Free {
                taken += known.units;
            }
            piece = known.next;
        }
        self.home_mut(number).taken_units = taken;
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

    /// Frees a piece. Returns its slab if that is empty and not worth keeping.
    fn give_back(&mut self, piece: u32) -> Freed {
        let slab = self.give_back_to_slab(piece);
        let home = self.home(slab);
        let first = self.empty.first() == Some(&slab);
        if home.taken_units > 0 || first || self.empty_bytes <= EMPTY_MOST {
            return Freed::Kept;
        }
        Freed::Surplus(self.remove(slab))
    }

    /// Merges a freed piece with its neighbours. Returns its slab.
    fn give_back_to_slab(&mut self, piece: u32) -> u32 {
        let Piece { slab, units, .. } = self.pieces[piece as usize];
        self.pieces[piece as usize].state = State::Free;
        let mut front = piece;
        let next = self.pieces[front as usize].next;
        if next != NONE && self.pieces[next as usize].state == State::Free {
            self.unbin(next);
            self.absorb_next(front);
        }
        let prev = self.pieces[front as usize].prev;
        if prev != NONE && self.pieces[prev as usize].state == State::Free {
            self.unbin(prev);
            self.absorb_next(prev);
            front = prev;
        }
        self.bin(front);
        let home = self.home_mut(slab);
        home.taken_units -= units;
        if home.taken_units == 0 {
            self.note_empty(slab);
        }
        slab
    }

    // --- slabs ---

    fn home(&self, slab: u32) -> &Home {
        self.slabs[slab as usize].as_ref().expect("a piece lies in a slab")
    }

    fn home_mut(&mut self, slab: u32) -> &mut Home {
        self.slabs[slab as usize].as_mut().expect("a piece lies in a slab")
    }

    fn new_home(&mut self, home: Home) -> u32 {
        match self.vacant_slabs.pop() {
            Some(number) => {
                self.slabs[number as usize] = Some(home);
                number
            }
            None => {
                self.slabs.push(Some(home));
                self.slabs.len() as u32 - 1
            }
        }
    }

    /// Forgets an empty slab.
    fn remove(&mut self, number: u32) -> Slab {
        self.forget_empty(number);
        let home = self.slabs[number as usize].take().expect("an empty slab is there");
        assert_eq!(home.taken_units, 0, "slab {number} is not empty");
        self.unbin(home.first);
        self.vacate(home.first);
        self.vacant_slabs.push(number);
        self.bytes -= home.slab.len;
        home.slab
    }

    fn note_empty(&mut self, slab: u32) {
        self.empty_bytes += self.home(slab).slab.len;
        self.empty.push(slab);
    }

    fn forget_empty(&mut self, slab: u32) {
        self.empty_bytes -= self.home(slab).slab.len;
        self.empty.retain(|&empty| empty != slab);
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
                assert!(index < NONE, "fewer than four billion blocks");
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
        let next = front.next;
        let rest = Piece {
            slab: front.slab,
            start: front.start + units,
            units: front.units - units,
            state: State::Free,
            generation: 0,
            prev: piece,
            next,
            bin_prev: NONE,
            bin_next: NONE,
        };
        front.units = units;
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
        let head = std::mem::replace(&mut self.bins.heads[level][sub], piece);
        self.bins.levels |= 1 << level;
        self.bins.subs[level] |= 1 << sub;
        self.pieces[piece as usize].bin_prev = NONE;
        self.pieces[piece as usize].bin_next = head;
        if head != NONE {
            self.pieces[head as usize].bin_prev = piece;
        }
    }

    fn unbin(&mut self, piece: u32) {
        let Piece { units, bin_prev, bin_next, .. } = self.pieces[piece as usize];
        if bin_next != NONE {
            self.pieces[bin_next as usize].bin_prev = bin_prev;
        }
        if bin_prev != NONE {
            self.pieces[bin_prev as usize].bin_next = bin_next;
            return;
        }
        let (level, sub) = Bins::bin_of(units);
        assert_eq!(self.bins.heads[level][sub], piece, "piece {piece} heads its bin");
        self.bins.heads[level][sub] = bin_next;
        if bin_next == NONE {
            self.bins.subs[level] &= !(1 << sub);
            if self.bins.subs[level] == 0 {
                self.bins.levels &= !(1 << level);
            }
        }
    }

    // --- for the audit and the census ---

    /// Tells the census, which knows slabs only as a whole, what is in them.
    pub fn count_into(&self, census: &mut Census) {
        for piece in &self.pieces {
            let bytes = Bytes::new(u64::from(piece.units) * GRAIN);
            match &piece.state {
                State::Vacant | State::Free => continue,
                State::Waiting { .. } => census.waiting += bytes,
                State::Used { requested, .. } => {
                    census.used += bytes;
                    census.requested += Bytes::new(*requested);
                }
            }
            census.slab_free -= bytes;
        }
    }

    /// What is in its slabs, by address within each.
    pub fn parts(&self) -> Vec<StretchPart> {
        let mut parts = Vec::new();
        for home in self.slabs.iter().flatten() {
            let mut piece = home.first;
            while piece != NONE {
                let known = &self.pieces[piece as usize];
                let (kind, requested) = match &known.state {
                    State::Used { requested, .. } => (PartKind::Block, *requested),
                    State::Waiting { .. } => (PartKind::Waiting, 0),
                    State::Free | State::Vacant => (PartKind::Free, 0),
                };
                parts.push(StretchPart {
                    at: home.slab.at.plus(u64::from(known.start) * GRAIN),
                    len: Bytes::new(u64::from(known.units) * GRAIN),
                    requested: Bytes::new(requested),
                    stream: self.stream,
                    kind,
                });
                piece = known.next;
            }
        }
        parts
    }

    /// Checks every slab from end to end, and that the pool knows it.
    pub fn audit(&self, pool: &Pool) -> Result<(), crate::Inconsistency> {
        self.check(pool).map_err(|what| crate::Inconsistency { what })
    }

    /// How many slabs it has.
    pub fn slab_count(&self) -> usize {
        self.slabs.iter().flatten().count()
    }

    fn check(&self, pool: &Pool) -> Result<(), String> {
        let (mut bytes, mut empty_bytes) = (0, 0);
        for (number, home) in self.slabs.iter().enumerate() {
            let Some(home) = home else { continue };
            pool.check_slab(&home.slab)?;
            let (mut at, mut taken, mut piece, mut prev) = (0, 0, home.first, NONE);
            let mut last_free = false;
            while piece != NONE {
                let known = &self.pieces[piece as usize];
                let free = known.state == State::Free;
                if known.start != at || known.prev != prev || known.slab != number as u32 {
                    return Err(format!("slab {number}: piece {piece} is out of place"));
                }
                if known.state == State::Vacant || (free && last_free) {
                    return Err(format!("slab {number}: piece {piece} should have been merged"));
                }
                if !free {
                    taken += known.units;
                }
                at += known.units;
                last_free = free;
                prev = piece;
                piece = known.next;
            }
            if u64::from(at) * GRAIN != home.slab.len || taken != home.taken_units {
                return Err(format!("slab {number}: {at} units, {taken} taken, do not add up"));
            }
            bytes += home.slab.len;
            if taken == 0 {
                empty_bytes += home.slab.len;
            }
        }
        if (bytes, empty_bytes) != (self.bytes, self.empty_bytes) {
            return Err(format!("{} has {bytes} bytes in slabs, {empty_bytes} empty", self.stream));
        }
        let free: usize = self.pieces.iter().filter(|piece| piece.state == State::Free).count();
        let binned = self.binned();
        if free != binned {
            return Err(format!("{free} free pieces, {binned} in bins"));
        }
        Ok(())
    }

    fn binned(&self) -> usize {
        let heads = self.bins.heads.iter().flatten().copied();
        heads
            .map(|head| {
                std::iter::successors(Some(head).filter(|&head| head != NONE), |&piece| {
                    Some(self.pieces[piece as usize].bin_next).filter(|&next| next != NONE)
                })
                .count()
            })
            .sum()
    }
}
