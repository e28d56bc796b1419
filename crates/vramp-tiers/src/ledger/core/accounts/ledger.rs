//! The books: spaces, and what is reserved in them.
//!
//! Every call does all it says or nothing, in O(1) and, once as many reservations have existed at
//! a time as now, without heap memory. Only a refusal costs O(reservations), for its explanation.
//! All amounts are rounded up to the granule of their space, in each call: what is charged in
//! pieces has to be freed in the same pieces.

use std::ops::RangeInclusive;

use slotmap::SlotMap;
use smallvec::SmallVec;

use super::census::{SpaceCounters, TagUse};
use super::pressure::Hysteresis;
use super::record::Share;
use super::space_account::SpaceAccount;
use super::{
    Bound, GrowError, Holder, LedgerError, LedgerReserveError, MergeError, Owner, ReservationId,
    ReservationRecord, SpaceRefusal, SplitError, StaleReservation, Tag, UnknownSpace, UnknownTag,
};
use crate::ledger::core::{Levels, SpaceConfig, SpaceId};
use vramp_core::Bytes;

/// How many holders a refusal names.
const HOLDERS_NAMED: usize = 4;

/// What [`Ledger::reserve_up_to`] got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reserved {
    /// Its name.
    pub id: ReservationId,
    /// Its size: a multiple of the granule.
    pub bytes: Bytes,
}

/// Which reservation ends and which one takes its unused part over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Merge {
    /// Goes on, larger.
    pub into: ReservationId,
    /// Is released.
    pub from: ReservationId,
}

/// All spaces and all that is charged to them.
#[derive(Clone, Debug)]
pub struct Ledger {
    /// Sorted by id.
    pub(super) spaces: Vec<SpaceAccount>,
    pub(super) records: SlotMap<ReservationId, ReservationRecord>,
    pub(super) tags: Vec<String>,
}

impl Ledger {
    /// An empty ledger of these spaces.
    ///
    /// # Errors
    /// No space, one twice, or levels that make no sense.
    pub fn new(
        spaces: impl IntoIterator<Item = (SpaceId, SpaceConfig)>,
    ) -> Result<Ledger, LedgerError> {
        let resolve = |(id, config): (SpaceId, SpaceConfig)| {
            let levels =
                config.levels().map_err(|why| LedgerError::InvalidLevels { space: id, why })?;
            Ok(SpaceAccount {
                id,
                levels,
                reserved: Bytes::ZERO,
                over: Bytes::ZERO,
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

    /// All spaces, sorted: the fastest tier first.
    pub fn spaces(&self) -> impl Iterator<Item = SpaceId> {
        self.spaces.iter().map(|space| space.id)
    }

    /// The levels of a space.
    pub fn levels(&self, space: SpaceId) -> Result<Levels, UnknownSpace> {
        Ok(self.space(space)?.levels)
    }

    /// Everything charged to the space. Never above its capacity.
    pub fn total(&self, space: SpaceId) -> Result<Bytes, UnknownSpace> {
        Ok(self.space(space)?.total())
    }

    /// What can be had at once below `bound`.
    pub fn available(&self, space: SpaceId, bound: Bound) -> Result<Bytes, UnknownSpace> {
        Ok(self.space(space)?.available(bound))
    }

    /// True if a reservation of `bytes` would be given now. O(1), and without an explanation.
    pub fn can_reserve(&self, space: SpaceId, bytes: Bytes) -> Result<bool, UnknownSpace> {
        let space = self.space(space)?;
        Ok(space.fits(space.levels.round_up(bytes), Bound::Limit))
    }

    /// What a refusal of `bytes` in this space would say now, whether or not they would fit.
    /// O(reservations), and counted nowhere.
    pub fn explain(&self, space: SpaceId, bytes: Bytes) -> Result<Box<SpaceRefusal>, UnknownSpace> {
        let place = self.place(space)?;
        let bytes = self.spaces[place].levels.round_up(bytes);
        Ok(self.refusal(place, bytes, Bound::Limit))
    }

    /// The tag of this name, registered if it is new.
    pub fn add_tag(&mut self, name: &str) -> Tag {
        let number = self.tags.iter().position(|known| known == name).unwrap_or_else(|| {
            self.tags.push(name.to_owned());
            self.spaces.iter_mut().for_each(|space| space.tags.push(TagUse::default()));
            self.tags.len() - 1
        });
        Tag(u32::try_from(number).expect("fewer than four billion tags"))
    }

    /// The name of a tag; empty for [`Tag::NONE`].
    pub fn tag_name(&self, tag: Tag) -> Result<&str, UnknownTag> {
        self.tags.get(tag.index()).map(String::as_str).ok_or(UnknownTag { tag })
    }

    /// A reservation as it stands, until nothing is charged to it any more.
    pub fn reservation(&self, id: ReservationId) -> Option<&ReservationRecord> {
        self.records.get(id)
    }

    /// All reservations that anything is charged to, released ones included.
    pub fn reservations(&self) -> impl Iterator<Item = (ReservationId, &ReservationRecord)> {
        self.records.iter()
    }

    /// Reserves exactly `bytes`, below the limit.
    ///
    /// # Errors
    /// No room: never fewer bytes than asked.
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

    /// Reserves as much below the limit as there is of `sizes`, and says how much. From zero on it
    /// always succeeds, possibly with an empty reservation that may grow.
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
        let least = levels.round_up(*sizes.start());
        let most = levels.round_up(*sizes.end()).max(least);
        if !self.spaces[place].fits(least, Bound::Limit) {
            self.spaces[place].counters.refusals += 1;
            return Err(self.refusal(place, least, Bound::Limit).into());
        }
        let bytes = most.min(self.spaces[place].available(Bound::Limit));
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
    /// No room; the reservation stays as it is.
    pub fn grow(&mut self, id: ReservationId, by: Bytes) -> Result<(), GrowError> {
        let record = *self.active(id)?;
        let by = self.levels_of(&record).round_up(by);
        match self.grown(record, by, Bytes::ZERO, Bound::Limit) {
            Some(grown) => self.replace(id, grown),
            None => return Err(self.refuse(&record, by, Bound::Limit).into()),
        }
        Ok(())
    }

    /// Cuts a reservation to what is used of it. Returns what came back to the space.
    ///
    /// # Errors
    /// There is no such reservation.
    pub fn shrink_to_fit(&mut self, id: ReservationId) -> Result<Bytes, StaleReservation> {
        let record = *self.active(id)?;
        self.replace(id, ReservationRecord { size: record.size.min(record.used), ..record });
        Ok(record.unused())
    }

    /// Makes the present use of a reservation its peak.
    ///
    /// # Errors
    /// There is no such reservation.
    pub fn reset_peak(&mut self, id: ReservationId) -> Result<(), StaleReservation> {
        let peak = self.active(id)?.used;
        self.records[id].peak = peak;
        Ok(())
    }

    /// Makes `bytes` of the unused part a reservation of their own, of the same owner and tag.
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

    /// Gives the unused part of one reservation to another one and releases the first. What is
    /// still allocated from it is orphaned, as with [`release`](Ledger::release).
    ///
    /// # Errors
    /// They lie in different spaces, or are one.
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

    /// Ends a reservation and returns what came back to the space. What is still allocated stays
    /// charged to the space, under this id, until it is freed.
    ///
    /// # Errors
    /// It does not exist, or was released already.
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

    /// The one place where what a reservation takes from its space changes.
    pub(super) fn replace(&mut self, id: ReservationId, mut after: ReservationRecord) {
        after.peak = after.peak.max(after.used);
        let before = std::mem::replace(&mut self.records[id], after);
        let space = &mut self.spaces[after.place as usize];
        space.put(after.tag, before.share(), after.share());
        space.settle(after.tag);
    }

    /// `record` with `by` more room and `bytes` more use, if both stay below the bound.
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
            unreserved: space.unreserved + space.orphaned + space.over,
            reservations: space.active,
            largest,
        })
    }
}
