//! The ledger: spaces, and the reservations in them.
//!
//! A call succeeds as a whole or changes nothing. It takes O(1), and heap memory only to hold more
//! reservations at a time than ever before. Only a refusal costs O(reservations), for its report.
//! Each call rounds its amount up to the granule of the space: memory that was charged in several
//! calls has to be uncharged in the same amounts.

use std::ops::RangeInclusive;

use slotmap::SlotMap;
use smallvec::SmallVec;

use super::record::Share;
use super::space_account::Hysteresis;
use super::space_account::{SpaceAccount, SpaceCounters, TagUse};
use super::{
    Bound, GrowError, Holder, LedgerError, LedgerReserveError, MergeError, Owner, ReservationId,
    ReservationRecord, SpaceRefusal, SplitError, StaleReservation, Tag, UnknownSpace, UnknownTag,
};
use crate::ledger::core::{Levels, SpaceConfig, SpaceId};
use vramp_core::Bytes;

/// Number of reservations that a refusal lists.
const HOLDERS_NAMED: usize = 4;

/// Result of [`Ledger::reserve_up_to`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reserved {
    /// Id of the reservation.
    pub id: ReservationId,
    /// Size of the reservation: a multiple of the granule.
    pub bytes: Bytes,
}

/// Two reservations to merge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Merge {
    /// Reservation that grows.
    pub into: ReservationId,
    /// Reservation that is released.
    pub from: ReservationId,
}

/// All spaces, and all charges to them.
#[derive(Clone, Debug)]
pub struct Ledger {
    /// Sorted by id.
    pub(super) spaces: Vec<SpaceAccount>,
    pub(super) records: SlotMap<ReservationId, ReservationRecord>,
    pub(super) tags: Vec<String>,
}

impl Ledger {
    /// Returns a ledger of these spaces without reservations.
    ///
    /// # Errors
    /// There is no space, a space occurs twice, or its levels are invalid.
    pub fn new(
        spaces: impl IntoIterator<Item = (SpaceId, SpaceConfig)>,
    ) -> Result<Ledger, LedgerError> {
        let resolve = |(id, config): (SpaceId, SpaceConfig)| {
            let levels =
                config.levels().map_err(|error| LedgerError::InvalidLevels { space: id, error })?;
            Ok(SpaceAccount {
                id,
                levels,
                reserved: Bytes::ZERO,
                overrun: Bytes::ZERO,
                orphaned: Bytes::ZERO,
                unreserved: Bytes::ZERO,
                active: 0,
                peak: Bytes::ZERO,
                hysteresis: Hysteresis::default(),
                counters: SpaceCounters::default(),
                tags: vec![TagUse::default()],
            })
        };
        let mut spaces: Vec<SpaceAccount> =
            spaces.into_iter().map(resolve).collect::<Result<_, _>>()?;
        spaces.sort_by_key(|space| space.id);
        if spaces.is_empty() {
            return Err(LedgerError::NoSpaces);
        }
        if let Some(pair) = spaces.windows(2).find(|pair| pair[0].id == pair[1].id) {
            return Err(LedgerError::Duplicate { space: pair[0].id });
        }
        Ok(Ledger { spaces, records: SlotMap::with_key(), tags: vec![String::new()] })
    }

    /// All spaces, the fastest tier first.
    pub fn spaces(&self) -> impl Iterator<Item = SpaceId> {
        self.spaces.iter().map(|space| space.id)
    }

    /// Returns the levels of a space.
    pub fn levels(&self, space: SpaceId) -> Result<Levels, UnknownSpace> {
        Ok(self.space(space)?.levels)
    }

    /// Returns all charges to the space. Never above its capacity.
    pub fn total(&self, space: SpaceId) -> Result<Bytes, UnknownSpace> {
        Ok(self.space(space)?.total())
    }

    /// Returns the bytes available below `bound`.
    pub fn available(&self, space: SpaceId, bound: Bound) -> Result<Bytes, UnknownSpace> {
        Ok(self.space(space)?.available(bound))
    }

    /// True if `bytes` can be reserved now. O(1).
    pub fn can_reserve(&self, space: SpaceId, bytes: Bytes) -> Result<bool, UnknownSpace> {
        let space = self.space(space)?;
        Ok(space.fits(space.levels.round_up(bytes), Bound::Limit))
    }

    /// Returns the report that a refusal of `bytes` would carry now, whether or not they fit.
    /// O(reservations). Not counted as a refusal.
    pub fn explain(&self, space: SpaceId, bytes: Bytes) -> Result<Box<SpaceRefusal>, UnknownSpace> {
        let place = self.place(space)?;
        let bytes = self.spaces[place].levels.round_up(bytes);
        Ok(self.refusal(place, bytes, Bound::Limit))
    }

    /// Returns the tag of this name, registered if it is new.
    pub fn add_tag(&mut self, name: &str) -> Tag {
        let number = self.tags.iter().position(|known| known == name).unwrap_or_else(|| {
            self.tags.push(name.to_owned());
            self.spaces.iter_mut().for_each(|space| space.tags.push(TagUse::default()));
            self.tags.len() - 1
        });
        Tag(u32::try_from(number).expect("fewer than four billion tags"))
    }

    /// Returns the name of a tag; empty for [`Tag::NONE`].
    pub fn tag_name(&self, tag: Tag) -> Result<&str, UnknownTag> {
        self.tags.get(tag.index()).map(String::as_str).ok_or(UnknownTag { tag })
    }

    /// Returns the state of a reservation, as long as anything is charged to it.
    pub fn reservation(&self, id: ReservationId) -> Option<&ReservationRecord> {
        self.records.get(id)
    }

    /// All reservations to which anything is charged, released ones included.
    pub fn reservations(&self) -> impl Iterator<Item = (ReservationId, &ReservationRecord)> {
        self.records.iter()
    }

    /// Reserves exactly `bytes` below the limit.
    ///
    /// # Errors
    /// There is no room.
    pub fn reserve(
        &mut self,
        space: SpaceId,
        bytes: Bytes,
        owner: Owner,
        tag: Tag,
    ) -> Result<ReservationId, LedgerReserveError> {
        let place = self.place(space)?;
        let bytes = self.spaces[place].levels.round_up(bytes);
        Ok(self.reserve_up_to(space, bytes..=bytes, owner, tag)?.id)
    }

    /// Reserves as much below the limit as is available within `sizes`. A range from zero always
    /// succeeds, possibly with an empty reservation, which can grow.
    ///
    /// # Errors
    /// Less than the smallest size is available.
    pub fn reserve_up_to(
        &mut self,
        space: SpaceId,
        sizes: RangeInclusive<Bytes>,
        owner: Owner,
        tag: Tag,
    ) -> Result<Reserved, LedgerReserveError> {
        let place = self.place(space)?;
        self.tag_name(tag)?;
        let SpaceAccount { levels, .. } = &self.spaces[place];
        let min = levels.round_up(*sizes.start());
        let max = levels.round_up(*sizes.end()).max(min);
        if !self.spaces[place].fits(min, Bound::Limit) {
            self.spaces[place].counters.refusals += 1;
            return Err(self.refusal(place, min, Bound::Limit).into());
        }
        let bytes = max.min(self.spaces[place].available(Bound::Limit));
        let record = ReservationRecord {
            space,
            owner,
            tag,
            size: bytes,
            used: Bytes::ZERO,
            peak: Bytes::ZERO,
            released: false,
            beyond_limit: false,
            place: u32::try_from(place).expect("fewer than four billion spaces"),
        };
        let space = &mut self.spaces[place];
        space.put(tag, Share::default(), record.share());
        space.settle(tag);
        space.active += 1;
        space.counters.reserves += 1;
        Ok(Reserved { id: self.records.insert(record), bytes })
    }

    /// Makes a reservation larger, below the limit.
    ///
    /// # Errors
    /// There is no room. The reservation does not change.
    pub fn grow(&mut self, id: ReservationId, by: Bytes) -> Result<(), GrowError> {
        let record = *self.active(id)?;
        let by = self.levels_of(&record).round_up(by);
        match self.grown(record, by, Bytes::ZERO, Bound::Limit) {
            Some(grown) => self.replace(id, grown),
            None => return Err(self.refuse(&record, by, Bound::Limit).into()),
        }
        Ok(())
    }

    /// Shrinks a reservation to its use. Returns the bytes that came back to the space.
    ///
    /// # Errors
    /// There is no such reservation.
    pub fn shrink_to_fit(&mut self, id: ReservationId) -> Result<Bytes, StaleReservation> {
        let record = *self.active(id)?;
        self.replace(id, ReservationRecord { size: record.size.min(record.used), ..record });
        Ok(record.unused())
    }

    /// Resets the peak of a reservation to its present use.
    ///
    /// # Errors
    /// There is no such reservation.
    pub fn reset_peak(&mut self, id: ReservationId) -> Result<(), StaleReservation> {
        let peak = self.active(id)?.used;
        self.records[id].peak = peak;
        Ok(())
    }

    /// Splits `bytes` of the unused part off into a new reservation of the same owner and tag.
    ///
    /// # Errors
    /// The unused part is smaller.
    pub fn split(&mut self, id: ReservationId, bytes: Bytes) -> Result<ReservationId, SplitError> {
        let record = *self.active(id)?;
        let bytes = self.levels_of(&record).round_up(bytes);
        if bytes > record.unused() {
            return Err(SplitError::TooLarge { requested: bytes, unused: record.unused() });
        }
        self.records[id].size = record.size - bytes;
        self.spaces[record.place as usize].active += 1;
        Ok(self.records.insert(ReservationRecord {
            size: bytes,
            used: Bytes::ZERO,
            peak: Bytes::ZERO,
            ..record
        }))
    }

    /// Moves the unused part of one reservation to another one and releases the first. Bytes still
    /// allocated from it are orphaned, as by [`release`](Ledger::release).
    ///
    /// # Errors
    /// They are in different spaces, or are the same reservation.
    pub fn merge(&mut self, pair: Merge) -> Result<(), MergeError> {
        let (into, from) = (*self.active(pair.into)?, *self.active(pair.from)?);
        if pair.into == pair.from {
            return Err(MergeError::Itself { id: pair.into });
        }
        if into.place != from.place {
            return Err(MergeError::OtherSpace { from: from.space, into: into.space });
        }
        let larger = ReservationRecord {
            size: into.size + from.unused(),
            beyond_limit: into.beyond_limit || from.beyond_limit,
            ..into
        };
        let smaller = ReservationRecord { size: from.size.min(from.used), ..from };
        let space = &mut self.spaces[into.place as usize];
        space.put(from.tag, from.share(), smaller.share());
        space.put(into.tag, into.share(), larger.share());
        space.settle(into.tag);
        self.records[pair.into] = larger;
        self.records[pair.from] = smaller;
        self.release(pair.from)?;
        Ok(())
    }

    /// Ends a reservation and returns the bytes that came back to the space. Bytes still allocated
    /// stay charged under this id until they are freed.
    ///
    /// # Errors
    /// It does not exist, or was released before.
    pub fn release(&mut self, id: ReservationId) -> Result<Bytes, StaleReservation> {
        let record = *self.active(id)?;
        let space = &mut self.spaces[record.place as usize];
        space.active -= 1;
        space.counters.releases += 1;
        let released =
            ReservationRecord { size: Bytes::ZERO, released: true, beyond_limit: false, ..record };
        self.replace(id, released);
        if released.used.is_zero() {
            self.records.remove(id);
        }
        Ok(record.unused())
    }

    pub(super) fn space(&self, space: SpaceId) -> Result<&SpaceAccount, UnknownSpace> {
        Ok(&self.spaces[self.place(space)?])
    }

    pub(super) fn place(&self, space: SpaceId) -> Result<usize, UnknownSpace> {
        let found = self.spaces.binary_search_by_key(&space, |known| known.id);
        found.map_err(|_| UnknownSpace { space })
    }

    pub(in crate::ledger::core) fn levels_of(&self, record: &ReservationRecord) -> &Levels {
        &self.spaces[record.place as usize].levels
    }

    pub(in crate::ledger::core) fn active(
        &self,
        id: ReservationId,
    ) -> Result<&ReservationRecord, StaleReservation> {
        match self.records.get(id) {
            None => Err(StaleReservation::Unknown { id }),
            Some(record) if record.released => {
                Err(StaleReservation::Released { id, used: record.used })
            }
            Some(record) => Ok(record),
        }
    }

    /// Replaces a reservation and updates the sums of its space.
    pub(super) fn replace(&mut self, id: ReservationId, mut after: ReservationRecord) {
        after.peak = after.peak.max(after.used);
        let before = std::mem::replace(&mut self.records[id], after);
        let space = &mut self.spaces[after.place as usize];
        space.put(after.tag, before.share(), after.share());
        space.settle(after.tag);
    }

    /// Returns `record` with `by` more size and `bytes` more use, if both stay below the bound.
    pub(super) fn grown(
        &self,
        record: ReservationRecord,
        by: Bytes,
        bytes: Bytes,
        bound: Bound,
    ) -> Option<ReservationRecord> {
        let space = &self.spaces[record.place as usize];
        let size = record.size.checked_add(by)?;
        let reserved = space.reserved.checked_add(by)?;
        let used = record.used.checked_add(bytes)?;
        let mut grown = ReservationRecord { size, used, ..record };
        let more = grown.charged() - record.charged();
        if reserved > space.bound(bound) || !more.is_zero() && !space.fits(more, bound) {
            return None;
        }
        grown.beyond_limit |= reserved > space.levels.limit;
        Some(grown)
    }

    pub(super) fn refuse(
        &mut self,
        record: &ReservationRecord,
        bytes: Bytes,
        bound: Bound,
    ) -> Box<SpaceRefusal> {
        self.spaces[record.place as usize].counters.refusals += 1;
        self.refusal(record.place as usize, bytes, bound)
    }

    pub(super) fn refusal(
        &self,
        place: usize,
        requested: Bytes,
        bound: Bound,
    ) -> Box<SpaceRefusal> {
        let space = &self.spaces[place];
        let mut largest: SmallVec<[Holder; HOLDERS_NAMED]> = SmallVec::new();
        for (reservation, record) in self.records.iter().filter(|(_, r)| r.space == space.id) {
            let charged = |holder: &Holder| holder.size.max(holder.used);
            let rank = largest.partition_point(|holder| charged(holder) >= record.charged());
            if rank < HOLDERS_NAMED {
                largest.truncate(HOLDERS_NAMED - 1);
                let &ReservationRecord { owner, tag, size, used, .. } = record;
                largest.insert(rank, Holder { reservation, owner, tag, size, used });
            }
        }
        Box::new(SpaceRefusal {
            space: space.id,
            requested,
            available: space.available(bound),
            bound,
            limit: space.levels.limit,
            capacity: space.levels.capacity,
            reserved: space.reserved,
            unreserved: space.unreserved + space.orphaned + space.overrun,
            reservations: space.active,
            largest,
        })
    }
}
