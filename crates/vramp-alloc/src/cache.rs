//! One thread's blocks at hand: freed a moment ago, asked for again in the same size.
//!
//! Small blocks lie in a table by size. Of all others only one is kept, and only if it was freed
//! right after it was made: then the pool would place the next block of its size just there, so
//! that keeping it changes no decision. Keeping more would hide free memory from the pool, which
//! places by address to keep large blocks together.
//!
//! A table of slots that only its thread fills and takes from, and that any thread may empty. A
//! slot's tag is the whole protocol: zero is vacant, [`BUSY`] is being emptied by somebody, anything
//! else names the stream and length of the block in it. Taking costs one compare-exchange, filling a
//! release store; no lock, no heap memory.
//!
//! The data beside the tag is written only while the tag is zero, by the owner, and read only by
//! whoever changed the tag from a name to zero (the owner) or to `BUSY` (somebody else).

use crate::sync::{AtomicU64, Ordering};

/// Somebody else is reading the slot.
const BUSY: u64 = u64::MAX;
const WAYS: usize = 4;
const SETS: usize = 16;
/// Lengths in grains take this many bits of a tag, the next one who placed it, the rest the stream.
const LEN_BITS: u32 = 36;
const OF_POOL: u64 = 1 << LEN_BITS;
const STREAM_SHIFT: u32 = LEN_BITS + 1;
/// Lengths up to this many grains are small.
const SMALL_MOST: u64 = (64 << 10) / 512;

/// Which blocks are alike: same stream, same length in grains of 512 bytes. Never zero. One bit
/// beside tells who placed the block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tag(u64);

impl Tag {
    /// A block that a heap placed, or any. `None` for what is too large or too far down the list of
    /// streams to be kept at hand.
    #[inline]
    pub(crate) fn new(stream: usize, grains: u64) -> Option<Tag> {
        let stream = stream as u64 + 1;
        let fits = grains < 1 << LEN_BITS && stream < (1 << (64 - STREAM_SHIFT)) - 1;
        fits.then_some(Tag(stream << STREAM_SHIFT | grains))
    }

    /// The same for a block that the pool placed.
    #[inline]
    pub(crate) fn of_pool(self) -> Tag {
        Tag(self.0 | OF_POOL)
    }

    #[inline]
    pub(crate) fn is_of_pool(self) -> bool {
        self.0 & OF_POOL != 0
    }

    pub(crate) fn stream(self) -> usize {
        (self.0 >> STREAM_SHIFT) as usize - 1
    }

    pub(crate) fn grains(self) -> u64 {
        self.0 & ((1 << LEN_BITS) - 1)
    }

    #[inline]
    fn is_small(self) -> bool {
        self.grains() <= SMALL_MOST && !self.is_of_pool()
    }

    #[inline]
    fn set(self) -> usize {
        (self.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 60) as usize
    }
}

/// What a slot keeps of a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Kept {
    pub addr: u64,
    pub at: u64,
    pub id: u64,
}

#[derive(Default)]
struct Slot {
    tag: AtomicU64,
    addr: AtomicU64,
    at: AtomicU64,
    id: AtomicU64,
}

impl Slot {
    #[inline]
    fn take(&self, tag: Tag) -> Option<(Tag, Kept)> {
        let found = self.tag.load(Ordering::Relaxed);
        let taken = found & !OF_POOL == tag.0
            && self.tag.compare_exchange(found, 0, Ordering::Acquire, Ordering::Relaxed).is_ok();
        taken.then(|| (Tag(found), self.read()))
    }

    #[inline]
    fn put(&self, tag: Tag, kept: Kept) -> bool {
        // Acquire: whoever emptied the slot has read it.
        if self.tag.load(Ordering::Acquire) != 0 {
            return false;
        }
        self.addr.store(kept.addr, Ordering::Relaxed);
        self.at.store(kept.at, Ordering::Relaxed);
        self.id.store(kept.id, Ordering::Relaxed);
        self.tag.store(tag.0, Ordering::Release);
        true
    }

    fn empty(&self, mut to: impl FnMut(Tag, Kept)) {
        let tag = self.tag.load(Ordering::Relaxed);
        if tag != 0
            && tag != BUSY
            && self.tag.compare_exchange(tag, BUSY, Ordering::Acquire, Ordering::Relaxed).is_ok()
        {
            let kept = self.read();
            self.tag.store(0, Ordering::Release);
            to(Tag(tag), kept);
        }
    }

    #[inline]
    fn read(&self) -> Kept {
        Kept {
            addr: self.addr.load(Ordering::Relaxed),
            at: self.at.load(Ordering::Relaxed),
            id: self.id.load(Ordering::Relaxed),
        }
    }
}

/// The slots of one thread.
pub(crate) struct Cache {
    sets: [[Slot; WAYS]; SETS],
    /// A block that is not small.
    last: Slot,
    /// Where the thread's newest block that is not small begins, until it makes or frees another.
    newest: AtomicU64,
}

impl Cache {
    pub(crate) fn new() -> Cache {
        Cache { sets: Default::default(), last: Slot::default(), newest: AtomicU64::new(0) }
    }

    fn all(&self) -> impl Iterator<Item = &Slot> {
        self.sets.iter().flatten().chain([&self.last])
    }

    /// A block of this stream and length. Only the thread that owns the cache may ask.
    #[inline]
    pub(crate) fn take(&self, tag: Tag) -> Option<(Tag, Kept)> {
        if !tag.is_small() {
            let found = self.last.take(tag)?;
            self.newest.store(found.1.addr, Ordering::Relaxed);
            return Some(found);
        }
        self.sets[tag.set()].iter().find_map(|slot| slot.take(tag))
    }

    /// Keeps a block. False if there is no room. Only the thread that owns the cache may ask.
    #[inline]
    pub(crate) fn put(&self, tag: Tag, kept: Kept) -> bool {
        if !tag.is_small() {
            let newest = self.newest.load(Ordering::Relaxed) == kept.addr;
            self.newest.store(0, Ordering::Relaxed);
            return newest && self.last.put(tag, kept);
        }
        self.sets[tag.set()].iter().any(|slot| slot.put(tag, kept))
    }

    /// Notes that the thread got a block of so many grains at `addr` from elsewhere. Only the
    /// thread that owns the cache may do so.
    #[inline]
    pub(crate) fn made(&self, grains: u64, addr: u64) {
        if grains > SMALL_MOST {
            self.newest.store(addr, Ordering::Relaxed);
        }
    }

    /// Empties the cache, from any thread.
    pub(crate) fn drain(&self, mut to: impl FnMut(Tag, Kept)) {
        self.all().for_each(|slot| slot.empty(&mut to));
    }

    /// Empties only the slot for blocks that are not small, from any thread.
    pub(crate) fn drain_last(&self, to: impl FnMut(Tag, Kept)) {
        self.last.empty(to);
    }

    /// Bytes at hand, as of now.
    pub(crate) fn grains(&self) -> u64 {
        let tags = self.all().map(|slot| slot.tag.load(Ordering::Relaxed));
        tags.filter(|&tag| tag != 0 && tag != BUSY).map(|tag| Tag(tag).grains()).sum()
    }
}
