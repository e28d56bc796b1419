//! Physical memory: which chunks exist, how large they are and where they are mapped.
//!
//! A chunk has one *home*, the address at which it is counted, and any number of *aliases*: retired
//! mappings at addresses from which it was moved. The home changes when the chunk moves; a move to
//! one of its own aliases needs no driver call. A quarantined alias keeps its chunk from being released
//! until an unmap of it succeeds.
//!
//! A *pinned* chunk keeps its home, because something outside holds its memory physically: another
//! process, a network card, a communication library. Blocks come and go in it; it is neither moved nor
//! released.

use std::collections::{BTreeMap, BTreeSet};

use crate::Bytes;
use crate::ids::{ChunkId, PoolAddr};
use crate::room::make_room;

#[derive(Clone, Debug)]
pub(crate) struct Chunk {
    pub len: Bytes,
    /// `None` for a quarantined chunk: it exists, but its memory is unusable until it is released.
    pub home: Option<PoolAddr>,
    pub aliases: Vec<PoolAddr>,
    /// Number of pins that hold it at its home.
    pub pins: u32,
}

/// A chunk at its home.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mapped {
    pub chunk: ChunkId,
    pub home: PoolAddr,
    pub len: Bytes,
}

impl Mapped {
    pub(crate) fn end(&self) -> PoolAddr {
        self.home + self.len
    }
}

/// All chunks, by id and by home address.
#[derive(Clone, Debug, Default)]
pub(crate) struct Chunks {
    slots: Vec<Option<Chunk>>,
    vacant: Vec<ChunkId>,
    homes: BTreeMap<PoolAddr, ChunkId>,
    /// Number of chunks of each length.
    lens: BTreeMap<Bytes, usize>,
    bytes: Bytes,
    /// Homes of pinned chunks.
    pinned: BTreeSet<PoolAddr>,
    pinned_bytes: Bytes,
    /// Quarantined chunks.
    homeless: BTreeSet<ChunkId>,
    homeless_bytes: Bytes,
}

impl Chunks {
    /// The id of the `n`-th chunk created from now on, counted from 0.
    pub(crate) fn upcoming(&self, n: usize) -> ChunkId {
        match self.vacant.len().checked_sub(n + 1) {
            Some(place) => self.vacant[place],
            None => {
                let number = self.slots.len() + n - self.vacant.len();
                ChunkId::new(u32::try_from(number).expect("fewer than four billion chunks"))
            }
        }
    }

    /// Makes room for `wanted` more chunks. Returns false if the host has no memory for them.
    pub(crate) fn make_room(&mut self, wanted: usize) -> bool {
        make_room(&mut self.slots, &mut self.vacant, wanted)
    }

    pub(crate) fn get(&self, id: ChunkId) -> &Chunk {
        self.slots[id.index()].as_ref().unwrap_or_else(|| panic!("{id} does not exist any more"))
    }

    fn get_mut(&mut self, id: ChunkId) -> &mut Chunk {
        self.slots[id.index()].as_mut().unwrap_or_else(|| panic!("{id} does not exist any more"))
    }

    pub(crate) fn add(&mut self, id: ChunkId, len: Bytes, home: Option<PoolAddr>) {
        // New chunks take the last vacant ids in order; only what could not be undone does not.
        match self.vacant.last() {
            Some(&last) if last == id => {
                self.vacant.pop();
            }
            _ => self.vacant.retain(|&vacant| vacant != id),
        }
        while self.slots.len() <= id.index() {
            self.slots.push(None);
        }
        assert!(self.slots[id.index()].is_none(), "{id} exists already");
        self.slots[id.index()] = Some(Chunk { len, home, aliases: Vec::new(), pins: 0 });
        *self.lens.entry(len).or_default() += 1;
        match home {
            Some(home) => drop(self.homes.insert(home, id)),
            None => {
                self.homeless.insert(id);
                self.homeless_bytes += len;
            }
        }
        self.bytes += len;
    }

    pub(crate) fn remove(&mut self, id: ChunkId) {
        let chunk = self.slots[id.index()].take().unwrap_or_else(|| panic!("{id} is gone already"));
        assert_eq!(chunk.pins, 0, "{id} is pinned and cannot go");
        match chunk.home {
            Some(home) => drop(self.homes.remove(&home)),
            None => {
                self.homeless.remove(&id);
                self.homeless_bytes -= chunk.len;
            }
        }
        self.vacant.push(id);
        self.bytes -= chunk.len;
        let count = self.lens.get_mut(&chunk.len).expect("the chunk was counted");
        *count -= 1;
        if *count == 0 {
            self.lens.remove(&chunk.len);
        }
    }

    /// Makes `to` the chunk's home and its old home an alias.
    pub(crate) fn move_home(&mut self, id: ChunkId, to: PoolAddr) {
        let chunk = self.get_mut(id);
        assert_eq!(chunk.pins, 0, "{id} is pinned and cannot move");
        let from = chunk.home.replace(to).unwrap_or_else(|| panic!("{id} has no home to leave"));
        chunk.aliases.retain(|&alias| alias != to);
        chunk.aliases.push(from);
        self.homes.remove(&from);
        self.homes.insert(to, id);
    }

    pub(crate) fn add_alias(&mut self, id: ChunkId, at: PoolAddr) {
        self.get_mut(id).aliases.push(at);
    }

    pub(crate) fn drop_alias(&mut self, id: ChunkId, at: PoolAddr) {
        self.get_mut(id).aliases.retain(|&alias| alias != at);
    }

    /// Chunks whose home lies wholly within `len` bytes from `at` on, in address order.
    pub(crate) fn within(&self, at: PoolAddr, len: Bytes) -> impl Iterator<Item = Mapped> {
        let end = at + len;
        self.homes
            .range(at..end)
            .map(|(&home, &chunk)| Mapped { chunk, home, len: self.get(chunk).len })
            .filter(move |mapped| mapped.end() <= end)
    }

    /// The same without pinned chunks.
    pub(crate) fn movable_within(&self, at: PoolAddr, len: Bytes) -> impl Iterator<Item = Mapped> {
        self.within(at, len).filter(|mapped| !self.is_pinned(mapped.chunk))
    }

    /// The chunks that `len` bytes from `at` on lie in, in address order: the first and the last may
    /// reach beyond. `None` where some of the bytes are not at the home of a chunk.
    pub(crate) fn covering(&self, at: PoolAddr, len: Bytes) -> Option<Vec<Mapped>> {
        let (mut reached, end) = (at, at + len);
        let mut found = Vec::new();
        let (&first, _) = self.homes.range(..=at).next_back()?;
        for (&home, &chunk) in self.homes.range(first..end) {
            let mapped = Mapped { chunk, home, len: self.get(chunk).len };
            if home > reached || mapped.end() <= reached {
                return None;
            }
            reached = mapped.end();
            found.push(mapped);
        }
        (reached >= end).then_some(found)
    }

    // --- pins ---

    /// Adds a pin. Returns true if it is the first.
    pub(crate) fn pin(&mut self, id: ChunkId) -> bool {
        let chunk = self.get_mut(id);
        chunk.pins += 1;
        let (home, len, first) = (chunk.home, chunk.len, chunk.pins == 1);
        if first {
            self.pinned.insert(home.unwrap_or_else(|| panic!("{id} has no home to stay at")));
            self.pinned_bytes += len;
        }
        first
    }

    /// Removes a pin. Returns true if it was the last.
    pub(crate) fn unpin(&mut self, id: ChunkId) -> bool {
        let chunk = self.get_mut(id);
        chunk.pins = chunk.pins.checked_sub(1).unwrap_or_else(|| panic!("{id} is not pinned"));
        let (home, len, last) = (chunk.home, chunk.len, chunk.pins == 0);
        if last {
            self.pinned.remove(&home.unwrap_or_else(|| panic!("{id} has no home")));
            self.pinned_bytes -= len;
        }
        last
    }

    pub(crate) fn is_pinned(&self, id: ChunkId) -> bool {
        self.get(id).pins > 0
    }

    /// True if a pinned chunk's home begins within `len` bytes from `at` on. O(log n).
    pub(crate) fn has_pinned_within(&self, at: PoolAddr, len: Bytes) -> bool {
        self.pinned.range(at..at + len).next().is_some()
    }

    /// Length of the chunk whose home begins at `home`.
    pub(crate) fn len_at(&self, home: PoolAddr) -> Bytes {
        let id = self.homes.get(&home).unwrap_or_else(|| panic!("no chunk is at home at {home:?}"));
        self.get(*id).len
    }

    /// Number and bytes of pinned chunks.
    pub(crate) fn pinned(&self) -> (u64, Bytes) {
        (self.pinned.len() as u64, self.pinned_bytes)
    }

    /// Homes of pinned chunks, in address order.
    pub(crate) fn pinned_homes(&self) -> impl Iterator<Item = PoolAddr> {
        self.pinned.iter().copied()
    }

    /// Length of the smallest chunk: no shorter region holds a whole one.
    pub(crate) fn smallest(&self) -> Option<Bytes> {
        self.lens.first_key_value().map(|(&len, _)| len)
    }

    /// Length of the longest chunk.
    pub(crate) fn longest(&self) -> Option<Bytes> {
        self.lens.last_key_value().map(|(&len, _)| len)
    }

    pub(crate) fn bytes(&self) -> Bytes {
        self.bytes
    }

    /// Quarantined chunks, in the order of their ids.
    pub(crate) fn homeless(&self) -> impl Iterator<Item = ChunkId> {
        self.homeless.iter().copied()
    }

    /// Bytes of quarantined chunks.
    pub(crate) fn homeless_bytes(&self) -> Bytes {
        self.homeless_bytes
    }

    /// Chunks with a home, in the order of their addresses.
    pub(crate) fn homes(&self) -> impl Iterator<Item = Mapped> {
        self.homes.iter().map(|(&home, &chunk)| Mapped { chunk, home, len: self.get(chunk).len })
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (ChunkId, &Chunk)> {
        self.slots
            .iter()
            .enumerate()
            .filter_map(|(index, slot)| Some((ChunkId::new(index as u32), slot.as_ref()?)))
    }
}
