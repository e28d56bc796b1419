//! Which bytes of which segments are free: of a disk's files, and of the host's pools of blocks.
//!
//! 1. [`Extents::add`] makes a segment of free space known.
//! 2. [`Extents::alloc`] takes space, in one extent if any free stretch is long enough.
//! 3. [`Extents::free`] gives it back, whole or in parts; neighbours join.
//! 4. [`Extents::quarantine`] takes away for good what the disk cannot write.
//! 5. [`Extents::remove`] forgets a segment that holds nothing.
//!
//! Whatever is neither free nor quarantined is used; nothing else is kept about it.

use std::collections::{BTreeMap, BTreeSet};

use smallvec::SmallVec;

use vramp_core::Bytes;

/// A segment's name, never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SegmentId(pub u32);

/// A stretch of one segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Extent {
    /// Which segment.
    pub segment: SegmentId,
    /// Where in it.
    pub offset: Bytes,
    /// How long.
    pub len: Bytes,
}

impl Extent {
    /// The first byte behind it.
    pub fn end(&self) -> Bytes {
        self.offset + self.len
    }
}

/// What one request gets: mostly one.
pub type ExtentList = SmallVec<[Extent; 1]>;

/// The free space does not hold what was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{asked} do not fit into {free} of free extents: add a segment")]
pub struct NoExtents {
    /// What was asked, in whole units.
    pub asked: Bytes,
    /// What is free.
    pub free: Bytes,
}

/// An extent that is not what its holder takes it for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExtentError {
    /// There is no such segment.
    #[error("{0:?} is unknown: it was removed, or is another store's")]
    NoSegment(SegmentId),
    /// Some of it is free or quarantined already, or outside its segment, or no whole units.
    #[error("{0:?} is not in use as a whole: it was freed before, or never allocated")]
    NotUsed(Extent),
    /// The segment still holds something.
    #[error("{segment:?} still holds {used}: free that first")]
    InUse {
        /// Which segment.
        segment: SegmentId,
        /// What it holds.
        used: Bytes,
    },
}

/// All segments, summed. `capacity = used + free + quarantined`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExtentCensus {
    /// What the segments hold.
    pub capacity: Bytes,
    /// What is allocated.
    pub used: Bytes,
    /// What is not.
    pub free: Bytes,
    /// What can never be used again.
    pub quarantined: Bytes,
    /// How many segments.
    pub segments: usize,
    /// How many stretches the free space is in.
    pub free_extents: usize,
    /// The longest of them.
    pub largest_free: Bytes,
}

#[derive(Clone, Debug)]
struct Segment {
    len: Bytes,
    /// Offset and length of free stretches, none beside another.
    free: BTreeMap<Bytes, Bytes>,
    /// The same of what is lost.
    lost: BTreeMap<Bytes, Bytes>,
    used: Bytes,
}

/// The extents of one store. All lengths and offsets are whole units.
#[derive(Clone, Debug)]
pub struct Extents {
    unit: Bytes,
    next: u32,
    segments: BTreeMap<SegmentId, Segment>,
    /// Every free stretch by length, then place: the first that is long enough fits best.
    by_len: BTreeSet<(Bytes, SegmentId, Bytes)>,
    free: Bytes,
}

impl Extents {
    /// No segments yet. All requests are rounded up to `unit`, which is not zero.
    pub fn new(unit: Bytes) -> Extents {
        assert!(!unit.is_zero(), "extents have a unit");
        Extents {
            unit,
            next: 0,
            segments: BTreeMap::new(),
            by_len: BTreeSet::new(),
            free: Bytes::ZERO,
        }
    }

    /// Adds a segment of `len`, rounded down to units, all of it free. O(log n).
    pub fn add(&mut self, len: Bytes) -> SegmentId {
        let id = SegmentId(self.next);
        self.next += 1;
        let len = len.round_down(self.unit);
        let (free, lost) = (BTreeMap::new(), BTreeMap::new());
        self.segments.insert(id, Segment { len, free, lost, used: len });
        if !len.is_zero() {
            let whole = Extent { segment: id, offset: Bytes::ZERO, len };
            self.free(whole).expect("nothing of a new segment is free yet");
        }
        id
    }

    /// Forgets a segment. O(log n) for each quarantined stretch.
    ///
    /// # Errors
    /// It is unknown, or something in it is used.
    pub fn remove(&mut self, id: SegmentId) -> Result<(), ExtentError> {
        let segment = self.segments.get(&id).ok_or(ExtentError::NoSegment(id))?;
        if !segment.used.is_zero() {
            return Err(ExtentError::InUse { segment: id, used: segment.used });
        }
        let segment = self.segments.remove(&id).expect("it was just there");
        for (offset, len) in segment.free {
            self.by_len.remove(&(len, id, offset));
            self.free -= len;
        }
        Ok(())
    }

    /// `len` rounded up to units, in as few extents as there can be: the shortest free stretch
    /// that is long enough, or the longest ones and then the shortest that holds the rest.
    /// Nothing for no bytes. O(log n) for each extent.
    ///
    /// # Errors
    /// There is not so much free; nothing is taken.
    pub fn alloc(&mut self, len: Bytes) -> Result<ExtentList, NoExtents> {
        let asked = len.checked_round_up(self.unit).unwrap_or(Bytes::new(u64::MAX));
        if asked > self.free {
            return Err(NoExtents { asked, free: self.free });
        }
        let mut list = ExtentList::new();
        let mut left = asked;
        while !left.is_zero() {
            let (found, segment, offset) = self.best_fit(left);
            let len = found.min(left);
            let extent = Extent { segment, offset, len };
            self.take(found, extent);
            list.push(extent);
            left -= len;
        }
        Ok(list)
    }

    /// The shortest free stretch of `len` at least, else the longest of all.
    fn best_fit(&self, len: Bytes) -> (Bytes, SegmentId, Bytes) {
        let fits = self.by_len.range((len, SegmentId(0), Bytes::ZERO)..).next();
        let longest = || self.by_len.last().expect("so much is free");
        *fits.unwrap_or_else(longest)
    }

    /// Takes `extent` from the front of a free stretch of `found` bytes.
    fn take(&mut self, found: Bytes, extent: Extent) {
        let Extent { segment: id, offset, len } = extent;
        let segment = self.segments.get_mut(&id).expect("free space lies in a segment");
        segment.free.remove(&offset);
        segment.used += len;
        self.by_len.remove(&(found, id, offset));
        self.free -= len;
        let rest = found - len;
        if !rest.is_zero() {
            segment.free.insert(extent.end(), rest);
            self.by_len.insert((rest, id, extent.end()));
        }
    }

    /// Gives back an extent or a part of one. O(log n).
    ///
    /// # Errors
    /// Not all of it is in use; nothing is given back.
    pub fn free(&mut self, extent: Extent) -> Result<(), ExtentError> {
        let Extent { segment: id, offset, len } = extent;
        let segment = self.used_segment(extent)?;
        segment.used -= len;
        let (mut start, mut end) = (offset, extent.end());
        let before = segment.free.range(..offset).next_back().map(|(at, len)| (*at, *len));
        let before = before.filter(|(at, len)| *at + *len == offset);
        let behind = segment.free.get(&end).map(|len| (end, *len));
        for (at, len) in before.into_iter().chain(behind) {
            segment.free.remove(&at);
            start = start.min(at);
            end = end.max(at + len);
        }
        segment.free.insert(start, end - start);
        for (at, len) in before.into_iter().chain(behind) {
            self.by_len.remove(&(len, id, at));
        }
        self.by_len.insert((end - start, id, start));
        self.free += len;
        Ok(())
    }

    /// Takes a used extent, or a part of one, out of use for good. O(log n).
    ///
    /// # Errors
    /// Not all of it is in use; nothing changes.
    pub fn quarantine(&mut self, extent: Extent) -> Result<(), ExtentError> {
        let segment = self.used_segment(extent)?;
        segment.used -= extent.len;
        segment.lost.insert(extent.offset, extent.len);
        Ok(())
    }

    /// The segment of an extent, all of which must be used.
    fn used_segment(&mut self, extent: Extent) -> Result<&mut Segment, ExtentError> {
        let unit = self.unit;
        let segment = self.segments.get_mut(&extent.segment);
        let segment = segment.ok_or(ExtentError::NoSegment(extent.segment))?;
        let whole = extent.offset.is_multiple_of(unit) && extent.len.is_multiple_of(unit);
        let end = extent.offset.checked_add(extent.len).filter(|end| *end <= segment.len);
        let used = end.is_some_and(|end| {
            !overlaps(&segment.free, extent.offset, end)
                && !overlaps(&segment.lost, extent.offset, end)
        });
        match whole && used && !extent.len.is_zero() {
            true => Ok(segment),
            false => Err(ExtentError::NotUsed(extent)),
        }
    }

    /// The segments and their lengths, in the order in which they came.
    pub fn segments(&self) -> impl Iterator<Item = (SegmentId, Bytes)> {
        self.segments.iter().map(|(id, segment)| (*id, segment.len))
    }

    /// The segments that can go: nothing in them is used, and nothing lost that whoever gets the
    /// space next would meet again.
    pub fn idle(&self) -> impl Iterator<Item = SegmentId> {
        let idle = |segment: &Segment| segment.used.is_zero() && segment.lost.is_empty();
        self.segments.iter().filter(move |(_, segment)| idle(segment)).map(|(id, _)| *id)
    }

    /// What is allocated. O(segments).
    pub fn used(&self) -> Bytes {
        self.segments.values().map(|segment| segment.used).sum()
    }

    /// What is not. O(1).
    pub fn free_bytes(&self) -> Bytes {
        self.free
    }

    /// Everything, added up from scratch. O(n).
    pub fn census(&self) -> ExtentCensus {
        let mut census = ExtentCensus { segments: self.segments.len(), ..Default::default() };
        for segment in self.segments.values() {
            census.capacity += segment.len;
            census.used += segment.used;
            census.free += segment.free.values().copied().sum();
            census.quarantined += segment.lost.values().copied().sum();
            census.free_extents += segment.free.len();
            let longest = segment.free.values().copied().max().unwrap_or_default();
            census.largest_free = census.largest_free.max(longest);
        }
        census
    }

    /// Checks every invariant. O(n log n).
    ///
    /// # Errors
    /// The first that does not hold, in words.
    pub fn audit(&self) -> Result<(), String> {
        let mut found = BTreeSet::new();
        for (id, segment) in &self.segments {
            let lost = segment.lost.iter().map(|(at, len)| (*at, *len, false));
            let mut stretches: Vec<_> =
                segment.free.iter().map(|(at, len)| (*at, *len, true)).chain(lost).collect();
            stretches.sort_unstable();
            let (mut end, mut free_before, mut outside) = (Bytes::ZERO, false, Bytes::ZERO);
            for (at, len, free) in stretches {
                let whole = at.is_multiple_of(self.unit) && len.is_multiple_of(self.unit);
                if !whole || len.is_zero() || at < end {
                    return Err(format!("{id:?}: {len} at {at} overlap, or are no whole units"));
                }
                if free && free_before && at == end {
                    return Err(format!("{id:?}: free neighbours at {at} did not join"));
                }
                if free {
                    found.insert((len, *id, at));
                }
                (end, free_before) = (at + len, free);
                outside += len;
            }
            if end > segment.len || segment.len - outside != segment.used {
                return Err(format!("{id:?}: {} used of {segment:?}", segment.used));
            }
        }
        let sum: Bytes = found.iter().map(|(len, ..)| *len).sum();
        match found == self.by_len && sum == self.free {
            true => Ok(()),
            false => Err(format!("{sum} free by place are not {} free by length", self.free)),
        }
    }
}

fn overlaps(stretches: &BTreeMap<Bytes, Bytes>, from: Bytes, to: Bytes) -> bool {
    stretches.range(..to).next_back().is_some_and(|(at, len)| *at + *len > from)
}
