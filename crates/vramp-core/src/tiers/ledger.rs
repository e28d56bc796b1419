//! The books: spaces, what is reserved in them, and what is allocated.
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
use super::{
    Bound, ChargeError, Charged, Crossed, GrowError, Holder, LedgerError, Levels, LimitPolicy,
    MergeError, Over, OverAnswer, OverCharged, Owner, Pressure, Refused, Reservation,
    ReservationId, ReserveError, SpaceConfig, SpaceId, SplitError, StaleReservation, Tag,
    UnchargeError, UnknownSpace, UnknownTag, UnreservedError, Watch,
};
use crate::Bytes;

/// How many holders a refusal names.
const HOLDERS_NAMED: usize = 4;

/// The sums of one space.
#[derive(Clone, Debug)]
pub(super) struct Space {
    pub id: SpaceId,
    pub levels: Levels,
    /// The sizes of its active reservations.
    pub reserved: Bytes,
    /// What active reservations use above their sizes.
    pub over: Bytes,
    /// What is still allocated from released reservations.
    pub orphaned: Bytes,
    /// Allocated without a reservation.
    pub unreserved: Bytes,
    pub active: usize,
    pub peak: Bytes,
    pub hysteresis: Hysteresis,
    pub counters: SpaceCounters,
    /// By the number of the tag.
    pub tags: Vec<TagUse>,
}

impl Space {
    pub(super) fn total(&self) -> Bytes {
        self.reserved + self.over + self.orphaned + self.unreserved
    }

    fn bound(&self, bound: Bound) -> Bytes {
        match bound {
            Bound::Limit => self.levels.limit,
            Bound::Capacity => self.levels.capacity,
        }
    }

    pub(super) fn available(&self, bound: Bound) -> Bytes {
        self.bound(bound).saturating_sub(self.total())
    }

    fn fits(&self, bytes: Bytes, bound: Bound) -> bool {
        bytes <= self.available(bound)
    }

    /// Replaces one reservation's part of the sums. [`Space::settle`] has to follow.
    fn put(&mut self, tag: Tag, before: Share, after: Share) {
        self.reserved = self.reserved + after.reserved - before.reserved;
        self.over = self.over + after.over - before.over;
        self.orphaned = self.orphaned + after.orphaned - before.orphaned;
        let tag = &mut self.tags[tag.index()];
        tag.charged = tag.charged + after.charged() - before.charged();
        tag.used = tag.used + after.used - before.used;
    }

    /// Brings what follows from the sums up to date: peaks, and crossings of levels.
    fn settle(&mut self, tag: Tag) {
        let total = self.total();
        self.peak = self.peak.max(total);
        self.hysteresis.update(total, &self.levels);
        self.tags[tag.index()].settle();
    }
}

/// What [`Ledger::reserve_upto`] got.
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
    pub(super) spaces: Vec<Space>,
    pub(super) records: SlotMap<ReservationId, Reservation>,
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
            let levels = config.levels().map_err(|why| LedgerError::Config { space: id, why })?;
            Ok(Space {
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
        let mut spaces: Vec<Space> = spaces.into_iter().map(resolve).collect::<Result<_, _>>()?;
        spaces.sort_by_key(|space| space.id);
        if spaces.is_empty() {
            return Err(LedgerError::NoSpaces);
        }
        if let Some(pair) = spaces.windows(2).find(|pair| pair[0].id == pair[1].id) {
            return Err(LedgerError::Twice { space: pair[0].id });
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
    pub fn explain(&self, space: SpaceId, bytes: Bytes) -> Result<Box<Refused>, UnknownSpace> {
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
    pub fn reservation(&self, id: ReservationId) -> Option<&Reservation> {
        self.records.get(id)
    }

    /// All reservations that anything is charged to, released ones included.
    pub fn reservations(&self) -> impl Iterator<Item = (ReservationId, &Reservation)> {
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
    ) -> Result<ReservationId, ReserveError> {
        let place = self.place(space)?;
        let bytes = self.spaces[place].levels.round_up(bytes);
        Ok(self.reserve_upto(space, bytes..=bytes, owner, tag)?.id)
    }

    /// Reserves as much below the limit as there is of `sizes`, and says how much. From zero on it
    /// always succeeds, possibly with an empty reservation that may grow.
    ///
    /// # Errors
    /// Less than the smallest size is available.
    pub fn reserve_upto(
        &mut self,
        space: SpaceId,
        sizes: RangeInclusive<Bytes>,
        owner: Owner,
        tag: Tag,
    ) -> Result<Reserved, ReserveError> {
        let place = self.place(space)?;
        self.tag_name(tag)?;
        let Space { levels, .. } = &self.spaces[place];
        let least = levels.round_up(*sizes.start());
        let most = levels.round_up(*sizes.end()).max(least);
        if !self.spaces[place].fits(least, Bound::Limit) {
            self.spaces[place].counters.refusals += 1;
            return Err(self.refusal(place, least, Bound::Limit).into());
        }
        let bytes = most.min(self.spaces[place].available(Bound::Limit));
        let record = Reservation {
            space,
            owner,
            tag,
            size: bytes,
            used: Bytes::ZERO,
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
        self.replace(id, Reservation { size: record.size.min(record.used), ..record });
        Ok(record.unused())
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
        Ok(self.records.insert(Reservation { size: bytes, used: Bytes::ZERO, ..record }))
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
        let larger = Reservation {
            size: into.size + from.unused(),
            beyond_limit: into.beyond_limit || from.beyond_limit,
            ..into
        };
        let smaller = Reservation { size: from.size.min(from.used), ..from };
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
            Reservation { size: Bytes::ZERO, released: true, beyond_limit: false, ..record };
        self.replace(id, released);
        if released.used.is_zero() {
            self.records.remove(id);
        }
        Ok(record.unused())
    }

    /// Accounts for an allocation of `bytes`, if it fits in the reservation.
    ///
    /// # Errors
    /// There is no such reservation. An allocation that does not fit is no error yet.
    pub fn charge(&mut self, id: ReservationId, bytes: Bytes) -> Result<Charged, StaleReservation> {
        self.active(id)?;
        let record = &mut self.records[id];
        let space = &mut self.spaces[record.place as usize];
        let bytes = space.levels.round_up(bytes);
        if bytes > record.unused() {
            return Ok(Charged::Over(over(id, record, bytes)));
        }
        // What a reservation holds is charged already: only its use changes.
        record.used += bytes;
        let tag = &mut space.tags[record.tag.index()];
        tag.used += bytes;
        tag.peak_used = tag.peak_used.max(tag.used);
        Ok(Charged::Within)
    }

    /// Charges by a stock policy: [`charge`](Ledger::charge), and what it says about the excess.
    ///
    /// # Errors
    /// As [`charge_over`](Ledger::charge_over).
    pub fn charge_by(
        &mut self,
        id: ReservationId,
        bytes: Bytes,
        policy: LimitPolicy,
    ) -> Result<OverCharged, ChargeError> {
        match self.charge(id, bytes)? {
            Charged::Within => Ok(OverCharged::Within),
            Charged::Over(over) => self.charge_over(id, bytes, policy.answer(&over)),
        }
    }

    /// Accounts for an allocation that exceeds its reservation, as decided. Exact: what a grown
    /// reservation holds is charged once, as part of it.
    ///
    /// # Errors
    /// The answer is to fail or grants too little, or the space has no room. Nothing changes.
    pub fn charge_over(
        &mut self,
        id: ReservationId,
        bytes: Bytes,
        answer: OverAnswer,
    ) -> Result<OverCharged, ChargeError> {
        let record = *self.active(id)?;
        let levels = *self.levels_of(&record);
        let bytes = levels.round_up(bytes);
        if bytes <= record.unused() {
            self.replace(id, Reservation { used: record.used + bytes, ..record });
            return Ok(OverCharged::Within);
        }
        let over = over(id, &record, bytes);
        self.spaces[record.place as usize].counters.overs += 1;
        match answer {
            OverAnswer::Fail => Err(ChargeError::OverReservation { over }),
            OverAnswer::Ignore => {
                let by = bytes - record.unused();
                if !self.spaces[record.place as usize].fits(by, Bound::Capacity) {
                    return Err(self.refuse(&record, by, Bound::Capacity).into());
                }
                self.replace(id, Reservation { used: record.used + bytes, ..record });
                Ok(OverCharged::Ignored { by })
            }
            OverAnswer::Grow { wanted, least, beyond_limit } => {
                let bound = if beyond_limit { Bound::Capacity } else { Bound::Limit };
                let sizes = [wanted, least].map(|by| levels.round_up(by)).into_iter();
                let enough: SmallVec<[Bytes; 2]> = sizes.filter(|&by| by >= over.by).collect();
                if enough.is_empty() {
                    return Err(ChargeError::OverReservation { over });
                }
                let grown = |&by: &Bytes| Some((by, self.grown(record, by, bytes, bound)?));
                let choice = enough.iter().find_map(grown);
                let Some((by, grown)) = choice else {
                    return Err(self.refuse(&record, over.by, bound).into());
                };
                self.replace(id, grown);
                Ok(OverCharged::Grown { by })
            }
        }
    }

    /// Credits a free to the reservation that was charged for it, released or not, and returns
    /// what came back to the space: the rest stays reserved.
    ///
    /// # Errors
    /// Less is charged to it.
    pub fn uncharge(&mut self, id: ReservationId, bytes: Bytes) -> Result<Bytes, UnchargeError> {
        let record = self.records.get_mut(id).ok_or(StaleReservation::Unknown { id })?;
        let space = &mut self.spaces[record.place as usize];
        let freed = space.levels.round_up(bytes);
        if freed > record.used {
            return Err(UnchargeError::TooMuch { id, freed, used: record.used });
        }
        if record.used <= record.size {
            // All of it was inside the reservation, and stays reserved.
            record.used -= freed;
            space.tags[record.tag.index()].used -= freed;
            return Ok(Bytes::ZERO);
        }
        let record = *record;
        let after = Reservation { used: record.used - freed, ..record };
        self.replace(id, after);
        if after.released && after.used.is_zero() {
            self.records.remove(id);
        }
        Ok(record.charged() - after.charged())
    }

    /// Accounts for an allocation without a reservation, up to the capacity.
    ///
    /// # Errors
    /// The space has no room.
    pub fn charge_unreserved(
        &mut self,
        space: SpaceId,
        bytes: Bytes,
        tag: Tag,
    ) -> Result<(), UnreservedError> {
        let place = self.place(space)?;
        self.tag_name(tag)?;
        let space = &mut self.spaces[place];
        let bytes = space.levels.round_up(bytes);
        if !space.fits(bytes, Bound::Capacity) {
            space.counters.refusals += 1;
            return Err(self.refusal(place, bytes, Bound::Capacity).into());
        }
        space.unreserved += bytes;
        let use_ = &mut space.tags[tag.index()];
        use_.unreserved += bytes;
        use_.charged += bytes;
        use_.used += bytes;
        space.settle(tag);
        Ok(())
    }

    /// Takes back [`charge_unreserved`](Ledger::charge_unreserved): all of `bytes` came back to
    /// the space. Returns them in whole granules.
    ///
    /// # Errors
    /// Less is charged under this tag.
    pub fn uncharge_unreserved(
        &mut self,
        space: SpaceId,
        bytes: Bytes,
        tag: Tag,
    ) -> Result<Bytes, UnreservedError> {
        let place = self.place(space)?;
        self.tag_name(tag)?;
        let books = &mut self.spaces[place];
        let freed = books.levels.round_up(bytes);
        let use_ = &mut books.tags[tag.index()];
        if freed > use_.unreserved {
            return Err(UnreservedError::TooMuch { space, freed, used: use_.unreserved });
        }
        use_.unreserved -= freed;
        use_.charged -= freed;
        use_.used -= freed;
        books.unreserved -= freed;
        books.settle(tag);
        Ok(freed)
    }

    /// How full the space is against its levels.
    pub fn pressure(&self, space: SpaceId) -> Result<Pressure, UnknownSpace> {
        let Space { levels, hysteresis, .. } = self.space(space)?;
        Ok(Pressure {
            used: self.total(space)?,
            trigger: levels.trigger,
            stop: levels.stop,
            high: hysteresis.is_high(),
        })
    }

    /// Subscribes to the crossings of a space from now on.
    pub fn watch(&self, space: SpaceId) -> Result<Watch, UnknownSpace> {
        Ok(Watch { space, seen: self.space(space)?.hysteresis.crossings })
    }

    /// The next crossing that this subscriber has not seen. Each comes exactly once, in order; the
    /// first after a subscription under pressure is the stop.
    pub fn next_crossed(&self, watch: &mut Watch) -> Option<Crossed> {
        let crossed = self.space(watch.space).ok()?.hysteresis.after(watch.seen)?;
        watch.seen += 1;
        Some(crossed)
    }

    pub(super) fn space(&self, space: SpaceId) -> Result<&Space, UnknownSpace> {
        Ok(&self.spaces[self.place(space)?])
    }

    fn place(&self, space: SpaceId) -> Result<usize, UnknownSpace> {
        let found = self.spaces.binary_search_by_key(&space, |known| known.id);
        found.map_err(|_| UnknownSpace { space })
    }

    fn levels_of(&self, record: &Reservation) -> &Levels {
        &self.spaces[record.place as usize].levels
    }

    fn active(&self, id: ReservationId) -> Result<&Reservation, StaleReservation> {
        match self.records.get(id) {
            None => Err(StaleReservation::Unknown { id }),
            Some(record) if record.released => {
                Err(StaleReservation::Released { id, used: record.used })
            }
            Some(record) => Ok(record),
        }
    }

    /// The one place where what a reservation takes from its space changes.
    fn replace(&mut self, id: ReservationId, after: Reservation) {
        let before = std::mem::replace(&mut self.records[id], after);
        let space = &mut self.spaces[after.place as usize];
        space.put(after.tag, before.share(), after.share());
        space.settle(after.tag);
    }

    /// `record` with `by` more room and `bytes` more use, if both stay below the bound.
    fn grown(
        &self,
        record: Reservation,
        by: Bytes,
        bytes: Bytes,
        bound: Bound,
    ) -> Option<Reservation> {
        let space = &self.spaces[record.place as usize];
        let size = record.size.checked_add(by)?;
        let reserved = space.reserved.checked_add(by)?;
        let used = record.used.checked_add(bytes)?;
        let mut grown = Reservation { size, used, ..record };
        let more = grown.charged() - record.charged();
        if reserved > space.bound(bound) || !more.is_zero() && !space.fits(more, bound) {
            return None;
        }
        grown.beyond_limit |= reserved > space.levels.limit;
        Some(grown)
    }

    fn refuse(&mut self, record: &Reservation, bytes: Bytes, bound: Bound) -> Box<Refused> {
        self.spaces[record.place as usize].counters.refusals += 1;
        self.refusal(record.place as usize, bytes, bound)
    }

    fn refusal(&self, place: usize, requested: Bytes, bound: Bound) -> Box<Refused> {
        let space = &self.spaces[place];
        let mut largest: SmallVec<[Holder; HOLDERS_NAMED]> = SmallVec::new();
        for (reservation, record) in self.records.iter().filter(|(_, r)| r.space == space.id) {
            let charged = |holder: &Holder| holder.size.max(holder.used);
            let rank = largest.partition_point(|holder| charged(holder) >= record.charged());
            if rank < HOLDERS_NAMED {
                largest.truncate(HOLDERS_NAMED - 1);
                let &Reservation { owner, tag, size, used, .. } = record;
                largest.insert(rank, Holder { reservation, owner, tag, size, used });
            }
        }
        Box::new(Refused {
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

fn over(id: ReservationId, record: &Reservation, bytes: Bytes) -> Over {
    let &Reservation { space, size, used, .. } = record;
    let needed = used.checked_add(bytes).unwrap_or(Bytes::new(u64::MAX));
    Over { reservation: id, space, bytes, by: needed - size, size, used }
}
