//! Address ranges of graph arenas: fixed addresses whose memory may come and go.
//!
//! An arena owns a range of addresses from its creation to its end. Mapped parts of it
//! ([`Kind::Arena`](crate::pool::regions::Kind::Arena)) are the arena's to use. While it is idle it
//! *lends* the chunks that hold none of its live blocks: they stay mapped where they are, nothing
//! is placed there, but a build may move them away. Lending takes no driver call, and only memory
//! that was moved away has to be brought back.
//!
//! Before the arena's graphs run again its range is *backed*: chunks still at home are taken back
//! as they are; where one left, another is mapped at the same address, by the same ladder and from
//! the same sources as any other request ([`Attempt::back`](crate::Attempt::back)).
//!
//! Lent regions are in an index of their own, and so are the arenas by address: a request looks at the
//! memory that it may take, O(log n) for each region, and not at every arena. An arena that has ended
//! leaves nothing here.
//!
//! Deliberately absent: blocks within the arena, and which lease may use it (`crate::arena`).

use std::collections::{BTreeMap, BTreeSet};

use crate::Bytes;
use crate::ids::{ArenaId, Mark, PoolAddr};
use crate::pool::index::RegionKey;
use crate::pool::ops::{Plan, Range};

/// An arena's addresses.
#[derive(Clone, Debug)]
pub(crate) struct ArenaRange {
    pub at: PoolAddr,
    pub len: Bytes,
    /// The region that begins at `at`.
    pub first: RegionKey,
    /// Work that may still touch chunks which were mapped here before it was over.
    pub inherited: Vec<Mark>,
    /// Length of new chunks, where the caller set one.
    pub chunk: Option<Bytes>,
    /// Its memory may not be pinned.
    pub refuses_pins: bool,
}

impl ArenaRange {
    pub(crate) fn range(&self) -> Range {
        Range::new(self.at, self.len)
    }

    pub(crate) fn end(&self) -> PoolAddr {
        self.at + self.len
    }
}

/// Memory of an arena.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ArenaMemory {
    /// Mapped bytes that only the arena may use.
    pub backed: Bytes,
    /// Mapped bytes that builds may move away.
    pub lent: Bytes,
}

/// Result of [`Pool::add_arena`](crate::Pool::add_arena).
#[derive(Debug)]
#[must_use = "without the addresses there is no arena"]
pub enum AddedArena {
    /// The new arena.
    Added(ArenaId),
    /// No addresses are left: perform and settle this plan, then call again.
    ReserveFirst(Plan),
}

/// All arenas of a pool.
#[derive(Clone, Debug, Default)]
pub(crate) struct ArenaRanges {
    live: BTreeMap<ArenaId, ArenaRange>,
    by_address: BTreeMap<PoolAddr, ArenaId>,
    /// The regions that arenas lend, by address.
    lent: BTreeMap<PoolAddr, RegionKey>,
    /// The same by length.
    lent_by_len: BTreeSet<(Bytes, PoolAddr)>,
    /// Bytes of these regions.
    lent_bytes: Bytes,
    /// Number of arenas ever made: an id is never used again.
    made: u32,
}

impl ArenaRanges {
    pub(crate) fn add(&mut self, range: ArenaRange) -> ArenaId {
        let arena = self.upcoming();
        self.made = self.made.checked_add(1).expect("fewer than four billion arenas");
        self.by_address.insert(range.at, arena);
        self.live.insert(arena, range);
        arena
    }

    /// The id of the next arena.
    pub(crate) fn upcoming(&self) -> ArenaId {
        ArenaId::new(self.made)
    }

    pub(crate) fn remove(&mut self, arena: ArenaId) {
        if let Some(range) = self.live.remove(&arena) {
            self.by_address.remove(&range.at);
        }
    }

    pub(crate) fn get(&self, arena: ArenaId) -> &ArenaRange {
        self.live.get(&arena).unwrap_or_else(|| panic!("{arena} does not exist any more"))
    }

    pub(crate) fn get_mut(&mut self, arena: ArenaId) -> &mut ArenaRange {
        self.live.get_mut(&arena).unwrap_or_else(|| panic!("{arena} does not exist any more"))
    }

    pub(crate) fn ids(&self) -> impl Iterator<Item = ArenaId> {
        self.live.keys().copied()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.live.is_empty()
    }

    /// True if an arena that refuses pins has some of these addresses. O(log n) for each arena there.
    pub(crate) fn refuses_pins(&self, range: Range) -> bool {
        let end = range.at + range.len.max(Bytes::new(1));
        let first = self.at(range.at);
        let others = self.by_address.range(range.at..end).map(|(_, &arena)| arena);
        first.into_iter().chain(others).any(|arena| self.get(arena).refuses_pins)
    }

    /// The arena whose addresses hold `at`.
    pub(crate) fn at(&self, at: PoolAddr) -> Option<ArenaId> {
        let (_, &arena) = self.by_address.range(..=at).next_back()?;
        (at < self.get(arena).end()).then_some(arena)
    }

    pub(crate) fn add_lent(&mut self, at: PoolAddr, len: Bytes, key: RegionKey) {
        self.lent.insert(at, key);
        self.lent_by_len.insert((len, at));
        self.lent_bytes += len;
    }

    pub(crate) fn remove_lent(&mut self, at: PoolAddr, len: Bytes) {
        let was_there = self.lent.remove(&at).is_some() && self.lent_by_len.remove(&(len, at));
        assert!(was_there, "no lent region of {len} at {at:?} is indexed");
        self.lent_bytes -= len;
    }

    /// Bytes of the regions that arenas lend.
    pub(crate) fn lent_bytes(&self) -> Bytes {
        self.lent_bytes
    }

    /// Length of the longest region that an arena lends.
    pub(crate) fn longest_lent(&self) -> Option<Bytes> {
        self.lent_by_len.last().map(|&(len, _)| len)
    }

    /// The regions that arenas lend, in address order.
    pub(crate) fn lent(&self) -> impl Iterator<Item = RegionKey> {
        self.lent.values().copied()
    }

    /// The last lent region that begins at `at` or before.
    pub(crate) fn lent_up_to(&self, at: PoolAddr) -> Option<RegionKey> {
        self.lent.range(..=at).next_back().map(|(_, &key)| key)
    }
}
