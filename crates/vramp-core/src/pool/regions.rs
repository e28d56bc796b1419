//! The pool's addresses, cut into regions: every byte of every span is in exactly one.
//!
//! Regions of a span form a list in address order, so a neighbour is one step away. Which chunks
//! are mapped in a region is recorded in `chunks.rs`; what it may be used for is its [`Kind`].

use std::collections::VecDeque;

use smallvec::SmallVec;

use crate::Bytes;
use crate::ids::{ArenaId, ChunkId, Epoch, Mark, PoolAddr, StreamId};
use crate::pool::index::RegionKey;
use crate::room::make_room;

/// Absent neighbour.
const NONE: RegionKey = RegionKey::MAX;

/// A piece of a free region and the epoch of the owner's work that may still touch it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    pub len: Bytes,
    pub epoch: Epoch,
}

impl Part {
    /// The part without an epoch if that is reached.
    fn settled(self, reached: Epoch) -> Part {
        if self.epoch <= reached { Part { epoch: Epoch::START, ..self } } else { self }
    }
}

/// The pieces of a free region in address order. Nearly always one, which takes no heap memory.
///
/// Cutting at the front and joining with one part cost the same however many parts there are.
#[derive(Clone, Debug)]
pub(crate) enum Parts {
    Few(SmallVec<[Part; 2]>),
    Many(VecDeque<Part>),
}

/// Most parts that are kept in place.
const FEW: usize = 2;

impl Default for Parts {
    fn default() -> Parts {
        Parts::Few(SmallVec::new())
    }
}

impl PartialEq for Parts {
    fn eq(&self, other: &Parts) -> bool {
        self.iter().eq(other.iter())
    }
}

impl Eq for Parts {}

impl Parts {
    pub(crate) fn one(len: Bytes, epoch: Epoch) -> Parts {
        Parts::Few(smallvec::smallvec![Part { len, epoch }])
    }

    pub(crate) fn iter(&self) -> impl DoubleEndedIterator<Item = &Part> {
        let (few, many) = match self {
            Parts::Few(few) => (Some(few.iter()), None),
            Parts::Many(many) => (None, Some(many.iter())),
        };
        few.into_iter().flatten().chain(many.into_iter().flatten())
    }

    fn len(&self) -> usize {
        match self {
            Parts::Few(few) => few.len(),
            Parts::Many(many) => many.len(),
        }
    }

    fn last_mut(&mut self) -> Option<&mut Part> {
        match self {
            Parts::Few(few) => few.last_mut(),
            Parts::Many(many) => many.back_mut(),
        }
    }

    fn first_mut(&mut self) -> Option<&mut Part> {
        match self {
            Parts::Few(few) => few.first_mut(),
            Parts::Many(many) => many.front_mut(),
        }
    }

    fn push_back(&mut self, part: Part) {
        match self {
            Parts::Few(few) if few.len() < FEW => few.push(part),
            Parts::Few(few) => {
                let few = std::mem::take(few);
                *self = Parts::Many(few.into_iter().chain([part]).collect());
            }
            Parts::Many(many) => many.push_back(part),
        }
    }

    fn push_front(&mut self, part: Part) {
        match self {
            Parts::Few(few) if few.len() < FEW => few.insert(0, part),
            Parts::Few(few) => {
                let few = std::mem::take(few);
                *self = Parts::Many([part].into_iter().chain(few).collect());
            }
            Parts::Many(many) => many.push_front(part),
        }
    }

    fn pop_front(&mut self) -> Option<Part> {
        match self {
            Parts::Few(few) => (!few.is_empty()).then(|| few.remove(0)),
            Parts::Many(many) => many.pop_front(),
        }
    }

    /// Appends a part, joining it with the last one where the epochs of both are the same or
    /// reached.
    pub(crate) fn push(&mut self, part: Part, reached: Epoch) {
        let part = part.settled(reached);
        if let Some(last) = self.last_mut() {
            *last = last.settled(reached);
            if last.epoch == part.epoch {
                last.len += part.len;
                return;
            }
        }
        self.push_back(part);
    }

    /// Appends the parts of the region behind. O(the fewer parts of the two).
    pub(crate) fn append(&mut self, mut behind: Parts, reached: Epoch) {
        if self.len() >= behind.len() {
            for &part in behind.iter() {
                self.push(part, reached);
            }
            return;
        }
        for &part in self.iter().rev() {
            let part = part.settled(reached);
            match behind.first_mut() {
                Some(first) if first.settled(reached).epoch == part.epoch => {
                    *first = Part { len: first.len + part.len, epoch: part.epoch };
                }
                _ => behind.push_front(part),
            }
        }
        *self = behind;
    }

    /// Cuts off what lies behind the first `offset` bytes, and returns it. O(the parts before it).
    pub(crate) fn split_off(&mut self, offset: Bytes) -> Parts {
        let mut back = std::mem::take(self);
        let mut kept = Bytes::ZERO;
        while kept < offset {
            let Some(part) = back.pop_front() else { break };
            let here = part.len.min(offset - kept);
            kept += here;
            self.push_back(Part { len: here, ..part });
            if part.len > here {
                back.push_front(Part { len: part.len - here, ..part });
            }
        }
        back
    }
}

/// Mapped memory that its owner may reuse at once, and other streams once its epochs are reached.
///
/// Where several streams share a pool, memory whose epochs are reached has no owner (the owner is
/// [`IDLE`](crate::pool::streams::IDLE)): every stream may use it, and neighbours merge whichever
/// stream freed them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Free {
    /// The stream that freed it, or `IDLE`.
    pub owner: StreamId,
    pub parts: Parts,
    /// Order of becoming free; VPMM harvests the oldest first.
    pub born: u64,
    /// The arena whose addresses these are: its chunks may move away, nothing is placed here.
    pub lent_by: Option<ArenaId>,
}

impl Free {
    /// Cuts off what lies behind the first `offset` bytes, and returns it.
    fn split_off(&mut self, offset: Bytes) -> Free {
        Free { parts: self.parts.split_off(offset), ..*self }
    }

    /// The latest epoch within `len` bytes from `offset` on.
    pub(crate) fn epoch_of(&self, offset: Bytes, len: Bytes) -> Epoch {
        let (mut start, mut latest) = (Bytes::ZERO, Epoch::START);
        for part in self.parts.iter() {
            if start >= offset + len {
                break;
            }
            if start + part.len > offset {
                latest = latest.max(part.epoch);
            }
            start += part.len;
        }
        latest
    }

    /// The owner's work that may still touch each part.
    pub(crate) fn marks(&self) -> impl Iterator<Item = Mark> {
        self.parts.iter().map(|part| Mark { stream: self.owner, epoch: part.epoch })
    }
}

/// Memory that a user or a heap holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Used {
    pub stream: StreamId,
    /// The epoch of `stream` whose work may have touched the memory before. A free on another
    /// stream waits for it too.
    pub inherited: Epoch,
    /// Requested bytes, before rounding.
    pub requested: Bytes,
    /// Uses on other streams, at most one mark for each, in their order.
    pub uses: Vec<Mark>,
    /// True if a stream's heap cuts it up.
    pub slab: bool,
}

/// What a region may be used for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Reserved addresses with nothing mapped.
    Hole,
    /// Mapped and reusable.
    Free(Free),
    /// Mapped and freed, not yet reusable by its owner: the pool's queue has the marks of
    /// other streams that it waits for.
    Waiting { owner: StreamId, epoch: Epoch },
    /// Allocated.
    Used(Used),
    /// An old mapping of a chunk whose home is elsewhere. No block lies there; it is unmapped once
    /// `mark` is reached and the address is wanted. If it is an arena's, only that arena may fill
    /// it.
    Retired { chunk: ChunkId, mark: Mark, arena: Option<ArenaId> },
    /// Mapped, and an arena's: the arena has the table of its blocks.
    Arena { arena: ArenaId, stream: StreamId },
    /// An arena's addresses with nothing mapped.
    Gap { arena: ArenaId },
    /// An arena's addresses with memory mapped that is not the pool's.
    Hosted { arena: ArenaId },
    /// A mapping that a failed driver call left in an unknown state. It is counted and not used until an
    /// unmap of it succeeds.
    Quarantined {
        /// The chunk that is mapped there, as an alias; `None` for memory that is not the pool's.
        chunk: Option<ChunkId>,
        /// The arena whose addresses these are.
        arena: Option<ArenaId>,
        /// True if work may still access it: it stays until the pool's memory is released.
        in_use: bool,
    },
}

impl Kind {
    /// True if the addresses are mapped, usable or not.
    pub(crate) fn is_mapped(&self) -> bool {
        !matches!(self, Kind::Hole | Kind::Gap { .. })
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Region {
    pub at: PoolAddr,
    pub len: Bytes,
    pub kind: Kind,
    pub generation: u32,
    /// The stream and epoch under which the slot is listed to become idle, see `state/idle.rs`.
    pub listed: Option<Mark>,
    prev: RegionKey,
    next: RegionKey,
}

impl Region {
    pub(crate) fn end(&self) -> PoolAddr {
        self.at + self.len
    }

    pub(crate) fn holds(&self, at: PoolAddr) -> bool {
        self.at <= at && at < self.end()
    }
}

/// All regions of all spans.
#[derive(Clone, Debug, Default)]
pub(crate) struct Regions {
    slots: Vec<Region>,
    vacant: Vec<RegionKey>,
    firsts: Vec<RegionKey>,
    /// Length of all spans together.
    addresses: Bytes,
}

impl Regions {
    pub(crate) fn get(&self, key: RegionKey) -> &Region {
        &self.slots[key as usize]
    }

    /// The slot of a region; a vacant one is an empty hole.
    pub(crate) fn get_if_present(&self, key: RegionKey) -> Option<&Region> {
        self.slots.get(key as usize)
    }

    pub(crate) fn get_mut(&mut self, key: RegionKey) -> &mut Region {
        &mut self.slots[key as usize]
    }

    /// Makes room for `wanted` more regions. Returns false if the host has no memory for them.
    pub(crate) fn make_room(&mut self, wanted: usize) -> bool {
        make_room(&mut self.slots, &mut self.vacant, wanted)
    }

    /// The region under a key that came from outside, if there is one.
    pub(crate) fn lookup(&self, key: RegionKey, generation: u32) -> Option<&Region> {
        self.slots.get(key as usize).filter(|region| region.generation == generation)
    }

    pub(crate) fn prev(&self, key: RegionKey) -> Option<RegionKey> {
        Some(self.get(key).prev).filter(|&prev| prev != NONE)
    }

    pub(crate) fn next(&self, key: RegionKey) -> Option<RegionKey> {
        Some(self.get(key).next).filter(|&next| next != NONE)
    }

    /// Adds a span: one hole.
    pub(crate) fn add_span(&mut self, at: PoolAddr, len: Bytes) -> RegionKey {
        assert_eq!(at.span().index(), self.firsts.len(), "spans are numbered in order");
        let key = self.occupy(Region {
            at,
            len,
            kind: Kind::Hole,
            generation: 0,
            listed: None,
            prev: NONE,
            next: NONE,
        });
        self.firsts.push(key);
        self.addresses += len;
        key
    }

    /// Every region in address order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (RegionKey, &Region)> {
        self.firsts.iter().flat_map(|&first| {
            std::iter::successors(Some(first), |&key| self.next(key))
                .map(|key| (key, self.get(key)))
        })
    }

    /// Length of all spans together.
    pub(crate) fn addresses(&self) -> Bytes {
        self.addresses
    }

    pub(crate) fn span_count(&self) -> usize {
        self.firsts.len()
    }

    /// Cuts a region in two at `offset`; the back part gets a key of its own and the same kind.
    pub(crate) fn split(&mut self, key: RegionKey, offset: Bytes) -> RegionKey {
        let front = self.get_mut(key);
        let inside = !offset.is_zero() && offset < front.len;
        assert!(inside, "cut region {key} len={} at {offset}", front.len);
        let (at, len, next) = (front.at + offset, front.len - offset, front.next);
        let kind = match &mut front.kind {
            // Its parts are cut, not copied.
            Kind::Free(free) => Kind::Free(free.split_off(offset)),
            kind => kind.clone(),
        };
        front.len = offset;
        let back =
            self.occupy(Region { at, len, kind, generation: 0, listed: None, prev: key, next });
        self.get_mut(key).next = back;
        if next != NONE {
            self.get_mut(next).prev = back;
        }
        back
    }

    /// Joins the following region into this one.
    pub(crate) fn absorb_next(&mut self, key: RegionKey) {
        let gone = self.next(key).expect("a region that absorbs has a next one");
        let (len, next) = (self.get(gone).len, self.get(gone).next);
        let region = self.get_mut(key);
        region.len += len;
        region.next = next;
        if next != NONE {
            self.get_mut(next).prev = key;
        }
        self.vacate(gone);
    }

    /// Makes every id that names this region stale.
    pub(crate) fn retire_id(&mut self, key: RegionKey) {
        let region = self.get_mut(key);
        region.generation = region.generation.wrapping_add(1);
    }

    fn occupy(&mut self, mut region: Region) -> RegionKey {
        match self.vacant.pop() {
            Some(key) => {
                region.generation = self.slots[key as usize].generation;
                region.listed = self.slots[key as usize].listed;
                self.slots[key as usize] = region;
                key
            }
            None => {
                let key = RegionKey::try_from(self.slots.len()).ok().filter(|&key| key < NONE >> 1);
                let key = key.expect("fewer than two billion regions");
                self.slots.push(region);
                key
            }
        }
    }

    fn vacate(&mut self, key: RegionKey) {
        let region = self.get_mut(key);
        region.generation = region.generation.wrapping_add(1);
        region.kind = Kind::Hole;
        region.len = Bytes::ZERO;
        self.vacant.push(key);
    }
}
