//! Blocks: parts of a segment, linked to their neighbours, and listed while free; and the ids of segments.

use std::collections::BTreeSet;
use std::fmt;

use smallvec::SmallVec;
use vramp_core::{BlockId, PoolAddr, StreamId};

/// Which of the two pools a block belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Class {
    /// Requests up to 1 MiB.
    Small,
    /// Larger ones.
    Large,
}

impl Class {
    pub(crate) const ALL: [Class; 2] = [Class::Large, Class::Small];
}

/// The place of a block in its table.
pub(crate) type Slot = u32;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// Allocated.
    Used,
    /// Freed; so many marks are not reached yet.
    Waiting(u32),
    /// Free, and listed in its class.
    Free,
    /// Addresses of an expandable segment with no memory behind them.
    Unmapped,
}

#[derive(Clone, Debug)]
pub(crate) struct Block {
    pub at: PoolAddr,
    pub len: u64,
    pub requested: u64,
    pub stream: StreamId,
    pub class: Class,
    pub segment: SegmentId,
    pub state: State,
    /// Other streams that use it.
    pub uses: SmallVec<[StreamId; 2]>,
    /// How many searches its class had seen when it became free: younger blocks have more.
    pub free_since: u64,
    pub prev: Option<Slot>,
    pub next: Option<Slot>,
}

impl Block {
    /// Returns true if it shares its segment.
    pub(crate) fn is_split(&self) -> bool {
        self.prev.is_some() || self.next.is_some()
    }
}

/// All blocks of all segments.
#[derive(Clone, Debug, Default)]
pub(crate) struct Blocks {
    entries: Vec<Option<Block>>,
    generations: Vec<u32>,
    vacant: Vec<Slot>,
}

impl Blocks {
    pub(crate) fn add(&mut self, block: Block) -> Slot {
        match self.vacant.pop() {
            Some(slot) => {
                self.entries[slot as usize] = Some(block);
                slot
            }
            None => {
                self.entries.push(Some(block));
                self.generations.push(0);
                Slot::try_from(self.entries.len() - 1).expect("fewer than four billion blocks")
            }
        }
    }

    pub(crate) fn remove(&mut self, slot: Slot) -> Block {
        self.retire_id(slot);
        self.vacant.push(slot);
        self.entries[slot as usize].take().unwrap_or_else(|| panic!("there is no block {slot}"))
    }

    pub(crate) fn get(&self, slot: Slot) -> &Block {
        self.entries[slot as usize].as_ref().unwrap_or_else(|| panic!("there is no block {slot}"))
    }

    pub(crate) fn get_mut(&mut self, slot: Slot) -> &mut Block {
        self.entries[slot as usize].as_mut().unwrap_or_else(|| panic!("there is no block {slot}"))
    }

    pub(crate) fn id(&self, slot: Slot) -> BlockId {
        BlockId::new(slot, self.generations[slot as usize])
    }

    /// Returns the allocated block with this id.
    pub(crate) fn used(&self, id: BlockId) -> Option<&Block> {
        let current = self.generations.get(id.slot() as usize) == Some(&id.generation());
        let entry = self.entries.get(id.slot() as usize)?.as_ref();
        entry.filter(|block| current && block.state == State::Used)
    }

    /// Makes all ids of this slot stale.
    pub(crate) fn retire_id(&mut self, slot: Slot) {
        let generation = &mut self.generations[slot as usize];
        *generation = generation.wrapping_add(1);
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (Slot, &Block)> {
        let entries = (0..).zip(&self.entries);
        entries.filter_map(|(slot, block)| Some((slot, block.as_ref()?)))
    }

    /// Splits a block: the front of `len` bytes becomes a block of its own, before the rest in
    /// `slot`. Returns the front.
    pub(crate) fn split_front(&mut self, slot: Slot, len: u64) -> Slot {
        let rest = self.get_mut(slot);
        let front = Block { len, next: Some(slot), ..rest.clone() };
        rest.at = rest.at.plus(len);
        rest.len -= len;
        let before = rest.prev;
        let front = self.add(front);
        self.get_mut(slot).prev = Some(front);
        if let Some(before) = before {
            self.get_mut(before).next = Some(front);
        }
        front
    }

    /// Merges the neighbour `from` into `into`.
    pub(crate) fn absorb(&mut self, into: Slot, from: Slot) {
        let gone = self.remove(from);
        let grown = self.get_mut(into);
        grown.len += gone.len;
        if grown.prev == Some(from) {
            grown.at = gone.at;
            grown.prev = gone.prev;
            if let Some(before) = gone.prev {
                self.get_mut(before).next = Some(into);
            }
        } else {
            debug_assert_eq!(grown.next, Some(from), "only neighbours are joined");
            grown.next = gone.next;
            if let Some(behind) = gone.next {
                self.get_mut(behind).prev = Some(into);
            }
        }
    }
}

/// The free blocks of one class, and the unmapped stretches of its expandable segments.
#[derive(Clone, Debug, Default)]
pub(crate) struct Lists {
    /// Best fit first, by stream: smallest, then lowest.
    pub free: BTreeSet<(StreamId, u64, PoolAddr, Slot)>,
    /// Lowest first, by stream.
    pub unmapped: BTreeSet<(StreamId, PoolAddr, Slot)>,
    /// Searches since garbage collection was enabled.
    pub searches: u64,
}

/// Id of a segment of PyTorch's allocator: an allocation of the driver, or a range of addresses.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SegmentId(u32);

impl SegmentId {
    /// Returns the id with this number.
    pub const fn new(number: u32) -> SegmentId {
        SegmentId(number)
    }

    /// Returns the number as an index: ids are dense.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Debug for SegmentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "segment{}", self.0)
    }
}

impl fmt::Display for SegmentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}
