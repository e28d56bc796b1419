//! The pool's addresses, cut into regions: every byte of every span is in exactly one.
//!
//! Regions of a span form a list in address order, so a neighbour is one step away. Which chunks
//! are mapped in a region is recorded in `chunks.rs`; what it may be used for is its [`Kind`].

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

/// The pieces of a free region in address order. Nearly always one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Parts(SmallVec<[Part; 2]>);

impl Parts {
    pub(crate) fn one(len: Bytes, epoch: Epoch) -> Parts {
        Parts(smallvec::smallvec![Part { len, epoch }])
    }

    pub(crate) fn iter(&self) -> std::slice::Iter<'_, Part> {
        self.0.iter()
    }

    /// Appends a part, joining it with the last one where the epochs of both are the same or
    /// reached.
    pub(crate) fn push(&mut self, part: Part, reached: Epoch) {
        let part = if part.epoch <= reached { Part { epoch: Epoch::START, ..part } } else { part };
        if let Some(last) = self.0.last_mut() {
            if last.epoch <= reached {
                last.epoch = Epoch::START;
            }
            if last.epoch == part.epoch {
                last.len += part.len;
                return;
            }
        }
        self.0.push(part);
    }

    /// Cuts off what lies behind the first `offset` bytes, and returns it.
    pub(crate) fn split_off(&mut self, offset: Bytes) -> Parts {
        let mut kept = Bytes::ZERO;
        let (mut front, mut back) = (SmallVec::new(), SmallVec::new());
        for part in std::mem::take(&mut self.0) {
            let here = part.len.min(offset - kept);
            kept += here;
            if !here.is_zero() {
                front.push(Part { len: here, ..part });
            }
            if part.len > here {
                back.push(Part { len: part.len - here, ..part });
            }
        }
        self.0 = front;
        Parts(back)
    }
}

/// Mapped memory that its owner may reuse at once, and other streams once its epochs are reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Free {
    /// The stream that last used it. A preference, not a claim: any stream may take idle parts.
    pub owner: StreamId,
    pub parts: Parts,
    /// Order of becoming free; VPMM harvests the oldest first.
    pub born: u64,
    /// The arena whose addresses these are: its chunks may move away, nothing is placed here.
    pub lent_by: Option<ArenaId>,
}

impl Free {
    /// The latest epoch within `len` bytes from `offset` on.
    pub(crate) fn epoch_of(&self, offset: Bytes, len: Bytes) -> Epoch {
        let (mut start, mut latest) = (Bytes::ZERO, Epoch::START);
        for part in self.parts.iter() {
            if start < offset + len && start + part.len > offset {
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
    /// Uses on other streams, at most one mark for each.
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
    /// Mapped and freed, not yet reusable by its owner: the pool's wait list has the marks of
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
    /// Mapped by a driver call that could not be undone. Counted, never used again.
    Quarantined,
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
}

impl Regions {
    pub(crate) fn get(&self, key: RegionKey) -> &Region {
        &self.slots[key as usize]
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
            prev: NONE,
            next: NONE,
        });
        self.firsts.push(key);
        key
    }

    /// Every region in address order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (RegionKey, &Region)> {
        self.firsts.iter().flat_map(|&first| {
            std::iter::successors(Some(first), |&key| self.next(key))
                .map(|key| (key, self.get(key)))
        })
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
        let kind = front.kind.clone();
        front.len = offset;
        let back = self.occupy(Region { at, len, kind, generation: 0, prev: key, next });
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
