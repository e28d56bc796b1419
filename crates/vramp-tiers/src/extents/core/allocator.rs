//! Best fit over the free extents of several backings.
//!
//! 1. [`ExtentAllocator::add`] adds a backing, all of it free.
//! 2. [`ExtentAllocator::alloc`] takes space, in one extent if any free extent is long enough.
//! 3. [`ExtentAllocator::free`] returns an extent or a part of one; free neighbours coalesce.
//! 4. [`ExtentAllocator::quarantine`] withdraws for good what the disk cannot write.
//! 5. [`ExtentAllocator::remove`] removes a backing without used space.
//!
//! Space that is neither free nor quarantined is used. Used extents are not recorded one by one.

use std::collections::{BTreeMap, BTreeSet};

use smallvec::SmallVec;

use vramp_core::Bytes;

/// Identifies a backing: one pinned pool of host memory, or one file of a disk store. Never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BackingId(pub u32);

/// A contiguous range of one backing, in whole units.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Extent {
    /// Backing that the range lies in.
    pub backing: BackingId,
    /// First byte, from the start of the backing.
    pub offset: Bytes,
    /// Length in bytes.
    pub len: Bytes,
}

impl Extent {
    /// Returns the first byte after the range.
    pub fn end(&self) -> Bytes {
        self.offset + self.len
    }
}

/// The extents of one allocation: in most cases one.
pub type ExtentList = SmallVec<[Extent; 1]>;

/// The free extents add up to less than the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{asked} requested and {free} free: add a backing")]
pub struct OutOfExtents {
    /// Bytes requested, rounded up to whole units.
    pub asked: Bytes,
    /// Bytes that are free.
    pub free: Bytes,
}

/// An extent or backing that the call does not apply to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExtentError {
    /// No backing has this id.
    #[error("{0:?} is unknown: it was removed, or belongs to another allocator")]
    UnknownBacking(BackingId),
    /// Part of the extent is free, quarantined, outside its backing, or not a whole unit.
    #[error("{0:?} is not wholly in use: it was freed before, or never allocated")]
    NotUsed(Extent),
    /// The backing still has used space.
    #[error("{used} of {backing:?} are still in use: free them first")]
    InUse {
        /// Backing that was to be removed.
        backing: BackingId,
        /// Bytes of it that are in use.
        used: Bytes,
    },
}

/// Sums over all backings. `capacity = used + free + quarantined`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExtentCensus {
    /// Length of all backings.
    pub capacity: Bytes,
    /// Allocated bytes.
    pub used: Bytes,
    /// Free bytes.
    pub free: Bytes,
    /// Bytes that are never used again.
    pub quarantined: Bytes,
    /// Number of backings.
    pub backings: usize,
    /// Number of free extents.
    pub free_extents: usize,
    /// Longest free extent.
    pub largest_free: Bytes,
}

#[derive(Clone, Debug)]
struct Backing {
    len: Bytes,
    /// Offset and length of free extents, no two of them adjacent.
    free: BTreeMap<Bytes, Bytes>,
    /// Offset and length of quarantined extents.
    quarantined: BTreeMap<Bytes, Bytes>,
    used: Bytes,
}

/// Allocates extents from backings. All lengths and offsets are whole units.
#[derive(Clone, Debug)]
pub struct ExtentAllocator {
    unit: Bytes,
    next: u32,
    backings: BTreeMap<BackingId, Backing>,
    /// Every free extent by length, then place: the first that is long enough is the best fit.
    by_len: BTreeSet<(Bytes, BackingId, Bytes)>,
    free: Bytes,
}

impl ExtentAllocator {
    /// Returns an allocator without backings. Requests are rounded up to `unit`.
    ///
    /// # Panics
    /// `unit` is zero.
    pub fn new(unit: Bytes) -> ExtentAllocator {
        assert!(!unit.is_zero(), "extents have a unit");
        ExtentAllocator {
            unit,
            next: 0,
            backings: BTreeMap::new(),
            by_len: BTreeSet::new(),
            free: Bytes::ZERO,
        }
    }

    /// Adds a backing of `len`, rounded down to units, all of it free. O(log n).
    pub fn add(&mut self, len: Bytes) -> BackingId {
        let id = BackingId(self.next);
        self.next += 1;
        let len = len.round_down(self.unit);
        let (free, quarantined) = (BTreeMap::new(), BTreeMap::new());
        self.backings.insert(id, Backing { len, free, quarantined, used: len });
        if !len.is_zero() {
            let whole = Extent { backing: id, offset: Bytes::ZERO, len };
            self.free(whole).expect("nothing of a new backing is free yet");
        }
        id
    }

    /// Removes a backing. O(log n) for each free extent of it.
    ///
    /// # Errors
    /// The backing is unknown, or part of it is used.
    pub fn remove(&mut self, id: BackingId) -> Result<(), ExtentError> {
        let backing = self.backings.get(&id).ok_or(ExtentError::UnknownBacking(id))?;
        if !backing.used.is_zero() {
            return Err(ExtentError::InUse { backing: id, used: backing.used });
        }
        let backing = self.backings.remove(&id).expect("it was just there");
        for (offset, len) in backing.free {
            self.by_len.remove(&(len, id, offset));
            self.free -= len;
        }
        Ok(())
    }

    /// Allocates `len`, rounded up to units, in the fewest extents possible: the shortest free
    /// extent that is long enough, else the longest ones and then the shortest that holds the rest.
    /// The list is empty for zero bytes. O(log n) for each extent.
    ///
    /// # Errors
    /// Fewer bytes are free. Nothing is allocated.
    pub fn alloc(&mut self, len: Bytes) -> Result<ExtentList, OutOfExtents> {
        let asked = len.checked_round_up(self.unit).unwrap_or(Bytes::new(u64::MAX));
        if asked > self.free {
            return Err(OutOfExtents { asked, free: self.free });
        }
        let mut list = ExtentList::new();
        let mut left = asked;
        while !left.is_zero() {
            let (found, backing, offset) = self.best_fit(left);
            let len = found.min(left);
            let extent = Extent { backing, offset, len };
            self.take(found, extent);
            list.push(extent);
            left -= len;
        }
        Ok(list)
    }

    /// Allocates `len`, rounded up to units, as one extent: from the shortest free one that is long
    /// enough. `None` if there is no such extent, or for zero bytes. O(log n).
    pub fn alloc_one(&mut self, len: Bytes) -> Option<Extent> {
        let asked = len.checked_round_up(self.unit).filter(|asked| !asked.is_zero())?;
        let fits = self.by_len.range((asked, BackingId(0), Bytes::ZERO)..).next();
        let &(found, backing, offset) = fits?;
        let extent = Extent { backing, offset, len: asked };
        self.take(found, extent);
        Some(extent)
    }

    /// Returns the shortest free extent of at least `len`, else the longest of all.
    fn best_fit(&self, len: Bytes) -> (Bytes, BackingId, Bytes) {
        let fits = self.by_len.range((len, BackingId(0), Bytes::ZERO)..).next();
        let longest = || self.by_len.last().expect("the caller checked the free bytes");
        *fits.unwrap_or_else(longest)
    }

    /// Carves `extent` from the front of a free extent of `found` bytes.
    fn take(&mut self, found: Bytes, extent: Extent) {
        let Extent { backing: id, offset, len } = extent;
        let backing = self.backings.get_mut(&id).expect("free space lies in a backing");
        backing.free.remove(&offset);
        backing.used += len;
        self.by_len.remove(&(found, id, offset));
        self.free -= len;
        let rest = found - len;
        if !rest.is_zero() {
            backing.free.insert(extent.end(), rest);
            self.by_len.insert((rest, id, extent.end()));
        }
    }

    /// Frees an extent or a part of one. O(log n).
    ///
    /// # Errors
    /// Part of it is not in use. Nothing is freed.
    pub fn free(&mut self, extent: Extent) -> Result<(), ExtentError> {
        let Extent { backing: id, offset, len } = extent;
        let backing = self.used_backing(extent)?;
        backing.used -= len;
        let (mut start, mut end) = (offset, extent.end());
        let before = backing.free.range(..offset).next_back().map(|(at, len)| (*at, *len));
        let before = before.filter(|(at, len)| *at + *len == offset);
        let behind = backing.free.get(&end).map(|len| (end, *len));
        for (at, len) in before.into_iter().chain(behind) {
            backing.free.remove(&at);
            start = start.min(at);
            end = end.max(at + len);
        }
        backing.free.insert(start, end - start);
        for (at, len) in before.into_iter().chain(behind) {
            self.by_len.remove(&(len, id, at));
        }
        self.by_len.insert((end - start, id, start));
        self.free += len;
        Ok(())
    }

    /// Withdraws a used extent, or a part of one, for good. O(log n).
    ///
    /// # Errors
    /// Part of it is not in use. Nothing changes.
    pub fn quarantine(&mut self, extent: Extent) -> Result<(), ExtentError> {
        let backing = self.used_backing(extent)?;
        backing.used -= extent.len;
        backing.quarantined.insert(extent.offset, extent.len);
        Ok(())
    }

    /// Returns the backing of an extent, if all of the extent is used.
    fn used_backing(&mut self, extent: Extent) -> Result<&mut Backing, ExtentError> {
        let unit = self.unit;
        let backing = self.backings.get_mut(&extent.backing);
        let backing = backing.ok_or(ExtentError::UnknownBacking(extent.backing))?;
        let whole = extent.offset.is_multiple_of(unit) && extent.len.is_multiple_of(unit);
        let end = extent.offset.checked_add(extent.len).filter(|end| *end <= backing.len);
        let used = end.is_some_and(|end| {
            !overlaps(&backing.free, extent.offset, end)
                && !overlaps(&backing.quarantined, extent.offset, end)
        });
        match whole && used && !extent.len.is_zero() {
            true => Ok(backing),
            false => Err(ExtentError::NotUsed(extent)),
        }
    }

    /// Returns the backings and their lengths, oldest first.
    pub fn backings(&self) -> impl Iterator<Item = (BackingId, Bytes)> {
        self.backings.iter().map(|(id, backing)| (*id, backing.len))
    }

    /// Returns the backings that can be removed: without used space, and without quarantined
    /// space, which a later owner of the same disk blocks would meet again.
    pub fn idle(&self) -> impl Iterator<Item = BackingId> {
        let idle = |backing: &Backing| backing.used.is_zero() && backing.quarantined.is_empty();
        self.backings.iter().filter(move |(_, backing)| idle(backing)).map(|(id, _)| *id)
    }

    /// Returns true if nothing of a backing is used. False for an unknown one. O(log n).
    pub fn is_unused(&self, id: BackingId) -> bool {
        self.backings.get(&id).is_some_and(|backing| backing.used.is_zero())
    }

    /// Returns the allocated bytes. O(backings).
    pub fn used(&self) -> Bytes {
        self.backings.values().map(|backing| backing.used).sum()
    }

    /// Returns the free bytes. O(1).
    pub fn free_bytes(&self) -> Bytes {
        self.free
    }

    /// Adds up all bytes by state. O(n).
    pub fn census(&self) -> ExtentCensus {
        let mut census = ExtentCensus { backings: self.backings.len(), ..Default::default() };
        for backing in self.backings.values() {
            census.capacity += backing.len;
            census.used += backing.used;
            census.free += backing.free.values().copied().sum();
            census.quarantined += backing.quarantined.values().copied().sum();
            census.free_extents += backing.free.len();
            let longest = backing.free.values().copied().max().unwrap_or_default();
            census.largest_free = census.largest_free.max(longest);
        }
        census
    }

    /// Checks every invariant. O(n log n).
    ///
    /// # Errors
    /// Describes the first invariant that does not hold.
    pub fn audit(&self) -> Result<(), String> {
        let mut found = BTreeSet::new();
        for (id, backing) in &self.backings {
            let quarantined = backing.quarantined.iter().map(|(at, len)| (*at, *len, false));
            let mut extents: Vec<_> =
                backing.free.iter().map(|(at, len)| (*at, *len, true)).chain(quarantined).collect();
            extents.sort_unstable();
            let (mut end, mut free_before, mut outside) = (Bytes::ZERO, false, Bytes::ZERO);
            for (at, len, free) in extents {
                let whole = at.is_multiple_of(self.unit) && len.is_multiple_of(self.unit);
                if !whole || len.is_zero() || at < end {
                    return Err(format!("{id:?}: {len} at {at} overlap, or are not whole units"));
                }
                if free && free_before && at == end {
                    return Err(format!("{id:?}: free neighbours at {at} did not coalesce"));
                }
                if free {
                    found.insert((len, *id, at));
                }
                (end, free_before) = (at + len, free);
                outside += len;
            }
            if end > backing.len || backing.len - outside != backing.used {
                return Err(format!("{id:?}: {} used of {backing:?}", backing.used));
            }
        }
        let sum: Bytes = found.iter().map(|(len, ..)| *len).sum();
        match found == self.by_len && sum == self.free {
            true => Ok(()),
            false => Err(format!("{sum} free by place differ from {} free by length", self.free)),
        }
    }
}

fn overlaps(extents: &BTreeMap<Bytes, Bytes>, from: Bytes, to: Bytes) -> bool {
    extents.range(..to).next_back().is_some_and(|(at, len)| *at + *len > from)
}
