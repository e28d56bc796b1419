//! A thread's cache of freed blocks, for its next requests of the same size.
//!
//! Small blocks lie in a table by size. Of all others only one is cached, and only if it was freed
//! right after it was allocated: the pool would place the next block of its size in the same place,
//! so caching it changes no decision. Caching more would hide free memory from the pool, which
//! places by address to keep large blocks together.
//!
//! One more block that the pool placed may be *delayed*: its free takes no lock. No request is served
//! from it. The pool gets it back before the thread's next request with the allocator's lock is
//! looked at, so one thread alone sees no difference; other threads' requests get it by a gather, as
//! they get cached blocks. A ring of large blocks takes the lock once for each pair instead of twice.
//!
//! Only the owning thread fills the slots of the table and takes from them; any thread may empty
//! them. A slot's tag is the whole protocol: zero is vacant, [`BUSY`] is being emptied by another
//! thread, anything else is the stream and length of the block. Taking costs one compare-exchange,
//! filling a release store; no lock, no heap memory.
//!
//! The data beside the tag is written only while the tag is zero, by the owner. It is read only by
//! the thread that changed the tag from a name to zero (the owner) or to `BUSY` (another thread).
//! Of the delayed block it is read only with the allocator's lock, so that no exchange is needed.

use vramp_core::{Bytes, PartCount, StreamHeap};

use crate::sync::{AtomicU64, Ordering};

/// Tag of a slot that another thread is reading.
const BUSY: u64 = u64::MAX;
const WAYS: usize = 4;
/// With the ways, one bit of [`Cache::filled`] for each slot.
const SETS: usize = 16;
/// Unit of lengths, and alignment of blocks, in bytes.
pub(crate) const BLOCK_ALIGN: u64 = 512;
/// Bits of a tag for the length in units. The next bit says whether the pool placed the block; the
/// rest is the stream.
const LEN_BITS: u32 = 36;
const OF_POOL: u64 = 1 << LEN_BITS;
const STREAM_SHIFT: u32 = LEN_BITS + 1;
/// Largest length of a small block, in units: those of heaps.
const SMALL_MAX: u64 = StreamHeap::SMALL.count() / BLOCK_ALIGN;

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
    fn is_vacant(&self) -> bool {
        self.tag.load(Ordering::Relaxed) == 0
    }

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

    #[inline]
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

    /// Empties a slot from which the owner takes nothing. Only with the allocator's lock.
    #[inline]
    fn empty_locked(&self, to: impl FnOnce(Tag, CachedBlock)) {
        // Acquire: the data was written before the tag. Release: it was read before the owner
        // writes it again.
        let tag = self.tag.load(Ordering::Acquire);
        if tag != 0 {
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
    /// A block that the pool placed, and gets back with the next lock.
    delayed: Slot,
    /// Address of the thread's newest block that is not small; zero once it was freed.
    newest: AtomicU64,
    /// Slots of the table that the owner filled since it emptied the table, one bit each. Only the
    /// owner accesses it.
    filled: AtomicU64,
}

impl Cache {
    pub(crate) fn new() -> Cache {
        Cache {
            sets: Default::default(),
            last: Slot::default(),
            delayed: Slot::default(),
            newest: AtomicU64::new(0),
            filled: AtomicU64::new(0),
        }
    }

    fn all(&self) -> impl Iterator<Item = &Slot> {
        self.sets.iter().flatten().chain([&self.last, &self.delayed])
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
        let set = tag.set();
        let Some(way) = self.sets[set].iter().position(|slot| slot.put(tag, block)) else {
            return false;
        };
        let filled = self.filled.load(Ordering::Relaxed) | 1 << (set * WAYS + way);
        self.filled.store(filled, Ordering::Relaxed);
        true
    }

    /// Delays the free of a block that the pool placed. Returns false if one is delayed already, or
    /// if one is cached that was freed before it: the pool has to get that one first. Only the owning
    /// thread may call this.
    #[inline]
    pub(crate) fn delay(&self, tag: Tag, block: CachedBlock) -> bool {
        self.last.is_vacant() && self.delayed.put(tag, block)
    }

    /// Records that the thread allocated a block of `units` at `addr`, not from the cache. Only the
    /// owning thread may call this.
    #[inline]
    pub(crate) fn note_new(&self, units: u64, addr: u64) {
        if units > SMALL_MAX {
            self.newest.store(addr, Ordering::Relaxed);
        }
    }

    /// Empties the cache. Only the owning thread may call this, with the allocator's lock. It looks
    /// only at slots that it filled since the last call.
    #[inline]
    pub(crate) fn drain_own(&self, mut to: impl FnMut(Tag, CachedBlock)) {
        let mut filled = self.filled.load(Ordering::Relaxed);
        if filled != 0 {
            self.filled.store(0, Ordering::Relaxed);
        }
        while filled != 0 {
            let slot = filled.trailing_zeros() as usize;
            self.sets[slot / WAYS][slot % WAYS].empty(&mut to);
            filled &= filled - 1;
        }
        self.drain_large(to);
    }

    /// Empties the cache, from any thread with the allocator's lock. Looks at every slot.
    pub(crate) fn drain(&self, mut to: impl FnMut(Tag, CachedBlock)) {
        self.sets.iter().flatten().for_each(|slot| slot.empty(&mut to));
        self.drain_large(to);
    }

    /// Empties the slots with blocks of one stream, from any thread with the allocator's lock. Looks at
    /// every slot.
    pub(crate) fn drain_stream(&self, stream: usize, mut to: impl FnMut(Tag, CachedBlock)) {
        let is_of = |slot: &Slot| {
            let tag = slot.tag.load(Ordering::Relaxed);
            tag != 0 && tag != BUSY && Tag(tag).stream() == stream
        };
        // A slot that the owner uses again meanwhile may hold a block of another stream: that one is
        // free, too.
        let table = self.sets.iter().flatten().chain([&self.last]);
        table.filter(|slot| is_of(slot)).for_each(|slot| slot.empty(&mut to));
        if is_of(&self.delayed) {
            self.delayed.empty_locked(to);
        }
    }

    /// Empties only the slots for blocks that are not small, from any thread with the allocator's
    /// lock.
    #[inline]
    pub(crate) fn drain_large(&self, mut to: impl FnMut(Tag, CachedBlock)) {
        self.last.empty(&mut to);
        self.delayed.empty_locked(to);
    }

    /// Empties the slot of the delayed block, from any thread with the allocator's lock.
    #[inline]
    pub(crate) fn drain_delayed(&self, to: impl FnMut(Tag, CachedBlock)) {
        self.delayed.empty_locked(to);
    }

    /// Returns the blocks in the cache at this moment: the small ones, and the one that is not.
    pub(crate) fn held(&self) -> [PartCount; 2] {
        let mut held = [PartCount::default(); 2];
        for slot in self.all() {
            let tag = slot.tag.load(Ordering::Relaxed);
            if tag != 0 && tag != BUSY {
                let count = &mut held[usize::from(!Tag(tag).is_small())];
                count.parts += 1;
                count.bytes += Bytes::new(Tag(tag).units() * BLOCK_ALIGN);
            }
        }
        held
    }

    /// Returns the bytes in the cache at this moment.
    pub(crate) fn bytes(&self) -> u64 {
        let tags = self.all().map(|slot| slot.tag.load(Ordering::Relaxed));
        tags.filter(|&tag| tag != 0 && tag != BUSY).map(|tag| Tag(tag).units() * BLOCK_ALIGN).sum()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn tag(stream: usize, units: u64) -> Tag {
        Tag::new(stream, units).expect("it fits a tag")
    }

    fn block(addr: u64) -> CachedBlock {
        CachedBlock { addr, at: addr, id: addr }
    }

    #[test]
    fn the_owner_empties_all_that_it_filled_whatever_was_taken_or_drained_meanwhile() {
        let cache = Cache::new();
        let mut next = 0;
        for round in 0..200 {
            let mut held = Vec::new();
            for n in 0..round {
                let tag = tag(n % 3, (n * n % 130) as u64 + 1);
                next += 1;
                cache.note_new(tag.units(), next);
                if cache.put(tag, block(next)) {
                    held.push(next);
                }
                if n % 5 == 0
                    && let Some((_, taken)) = cache.take(tag)
                {
                    held.retain(|&addr| addr != taken.addr);
                }
                if n == 50 {
                    // Another thread gathers.
                    cache.drain(|_, drained| held.retain(|&addr| addr != drained.addr));
                }
            }
            let mut drained = Vec::new();
            cache.drain_own(|_, block| drained.push(block.addr));
            drained.sort_unstable();
            held.sort_unstable();
            assert_eq!(drained, held, "round {round}");
            assert_eq!(cache.bytes(), 0);
            cache.drain_own(|_, block| panic!("{block:?} was drained before"));
        }
    }

    #[test]
    fn one_block_is_delayed_and_none_after_a_cached_one_and_no_request_takes_it() {
        let cache = Cache::new();
        let large = tag(0, 1 << 20);
        let drained = |cache: &Cache| {
            let mut drained = Vec::new();
            cache.drain_large(|tag, block| drained.push((tag, block.addr)));
            drained
        };
        assert!(cache.delay(large.of_pool(), block(1)));
        assert!(!cache.delay(large.of_pool(), block(2)), "one at a time");
        assert_eq!(cache.take(large), None);
        assert_eq!(cache.bytes(), large.units() * BLOCK_ALIGN);
        assert_eq!(drained(&cache), [(large.of_pool(), 1)]);
        cache.note_new(large.units(), 3);
        assert!(cache.put(large.of_pool(), block(3)));
        assert!(!cache.delay(large.of_pool(), block(4)), "block 3 was freed before");
        assert_eq!(drained(&cache), [(large.of_pool(), 3)]);
        assert!(cache.delay(large.of_pool(), block(5)));
        cache.drain_delayed(|_, found| assert_eq!(found, block(5)));
        assert_eq!(drained(&cache), []);
    }
}
