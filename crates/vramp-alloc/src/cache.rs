//! A thread's cache of freed blocks, for its next requests of the same size.
//!
//! Small blocks lie in a table by size. Of all others only one is cached, and only if it was freed
//! right after it was allocated: the pool would place the next block of its size in the same place,
//! so caching it changes no decision. Caching more would hide free memory from the pool, which
//! places by address to keep large blocks together.
//!
//! Only the owning thread fills the slots of the table and takes from them; any thread may empty
//! them. A slot's tag is the whole protocol: zero is vacant, [`BUSY`] is being emptied by another
//! thread, anything else is the stream and length of the block. Taking costs one compare-exchange,
//! filling a release store; no lock, no heap memory.
//!
//! The data beside the tag is written only while the tag is zero, by the owner. It is read only by
//! the thread that changed the tag from a name to zero (the owner) or to `BUSY` (another thread).

use crate::sync::{AtomicU64, Ordering};

/// Tag of a slot that another thread is reading.
const BUSY: u64 = u64::MAX;
const WAYS: usize = 4;
const SETS: usize = 16;
/// Unit of lengths, and alignment of blocks, in bytes.
pub(crate) const BLOCK_ALIGN: u64 = 512;
/// Bits of a tag for the length in units. The next bit says whether the pool placed the block; the
/// rest is the stream.
const LEN_BITS: u32 = 36;
const OF_POOL: u64 = 1 << LEN_BITS;
const STREAM_SHIFT: u32 = LEN_BITS + 1;
/// Largest length of a small block, in units.
const SMALL_MAX: u64 = (64 << 10) / BLOCK_ALIGN;

/// Stream and length, in units of 512 bytes, of a block; and whether the pool placed it. Never
/// zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tag(u64);

impl Tag {
    /// Returns the tag of a block that a heap placed. `None` if the length or the stream's index is
    /// too large for a tag.
    #[inline]
    pub(crate) fn new(stream: usize, units: u64) -> Option<Tag> {
        let stream = stream as u64 + 1;
        let fits = units < 1 << LEN_BITS && stream < (1 << (64 - STREAM_SHIFT)) - 1;
        fits.then_some(Tag(stream << STREAM_SHIFT | units))
    }

    /// Returns the tag of such a block that the pool placed.
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

    pub(crate) fn units(self) -> u64 {
        self.0 & ((1 << LEN_BITS) - 1)
    }

    #[inline]
    fn is_small(self) -> bool {
        self.units() <= SMALL_MAX && !self.is_of_pool()
    }

    #[inline]
    fn set(self) -> usize {
        (self.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 60) as usize
    }
}

/// A block in a slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CachedBlock {
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
    fn take(&self, tag: Tag) -> Option<(Tag, CachedBlock)> {
        let found = self.tag.load(Ordering::Relaxed);
        let taken = found & !OF_POOL == tag.0
            && self.tag.compare_exchange(found, 0, Ordering::Acquire, Ordering::Relaxed).is_ok();
        taken.then(|| (Tag(found), self.read()))
    }

    #[inline]
    fn put(&self, tag: Tag, block: CachedBlock) -> bool {
        // Acquire: the thread that emptied the slot has read it.
        if self.tag.load(Ordering::Acquire) != 0 {
            return false;
        }
        self.addr.store(block.addr, Ordering::Relaxed);
        self.at.store(block.at, Ordering::Relaxed);
        self.id.store(block.id, Ordering::Relaxed);
        self.tag.store(tag.0, Ordering::Release);
        true
    }

    fn empty(&self, mut to: impl FnMut(Tag, CachedBlock)) {
        let tag = self.tag.load(Ordering::Relaxed);
        if tag != 0
            && tag != BUSY
            && self.tag.compare_exchange(tag, BUSY, Ordering::Acquire, Ordering::Relaxed).is_ok()
        {
            let block = self.read();
            self.tag.store(0, Ordering::Release);
            to(Tag(tag), block);
        }
    }

    #[inline]
    fn read(&self) -> CachedBlock {
        CachedBlock {
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
    /// Address of the thread's newest block that is not small; zero once it was freed.
    newest: AtomicU64,
}

impl Cache {
    pub(crate) fn new() -> Cache {
        Cache { sets: Default::default(), last: Slot::default(), newest: AtomicU64::new(0) }
    }

    fn all(&self) -> impl Iterator<Item = &Slot> {
        self.sets.iter().flatten().chain([&self.last])
    }

    /// Takes a block of this stream and length. Only the owning thread may call this.
    #[inline]
    pub(crate) fn take(&self, tag: Tag) -> Option<(Tag, CachedBlock)> {
        if !tag.is_small() {
            let found = self.last.take(tag)?;
            self.newest.store(found.1.addr, Ordering::Relaxed);
            return Some(found);
        }
        self.sets[tag.set()].iter().find_map(|slot| slot.take(tag))
    }

    /// Puts a block in. Returns false if there is no room. Only the owning thread may call this.
    #[inline]
    pub(crate) fn put(&self, tag: Tag, block: CachedBlock) -> bool {
        if !tag.is_small() {
            let newest = self.newest.load(Ordering::Relaxed) == block.addr;
            self.newest.store(0, Ordering::Relaxed);
            return newest && self.last.put(tag, block);
        }
        self.sets[tag.set()].iter().any(|slot| slot.put(tag, block))
    }

    /// Records that the thread allocated a block of `units` at `addr`, not from the cache. Only the
    /// owning thread may call this.
    #[inline]
    pub(crate) fn note_new(&self, units: u64, addr: u64) {
        if units > SMALL_MAX {
            self.newest.store(addr, Ordering::Relaxed);
        }
    }

    /// Empties the cache, from any thread.
    pub(crate) fn drain(&self, mut to: impl FnMut(Tag, CachedBlock)) {
        self.all().for_each(|slot| slot.empty(&mut to));
    }

    /// Empties only the slot for blocks that are not small, from any thread.
    pub(crate) fn drain_last(&self, to: impl FnMut(Tag, CachedBlock)) {
        self.last.empty(to);
    }

    /// Returns the bytes in the cache at this moment.
    pub(crate) fn bytes(&self) -> u64 {
        let tags = self.all().map(|slot| slot.tag.load(Ordering::Relaxed));
        tags.filter(|&tag| tag != 0 && tag != BUSY).map(|tag| Tag(tag).units() * BLOCK_ALIGN).sum()
    }
}
