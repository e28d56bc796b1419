//! The addresses that are ours: reservations with what is mapped in them, plain allocations, and
//! what the driver's own pool handed out.
//!
//! With this book no call of ours can reach memory that belongs to anyone else in the process, and
//! the rules of mapping are kept before the driver is asked, so that a refused call changes
//! nothing. Whatever a call changes is entered before the driver is asked and put back if it
//! refuses: an address freed by one thread may be handed to another at once.
//!
//! Not here: handles, streams, and whether work in flight still touches a range.

use std::collections::BTreeMap;

use vramp_core::{AddrRange, Bytes, DeviceAddr};

/// Why a range was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum BadRange {
    #[error("the range is empty or runs past the end of the addresses")]
    NoRange,
    #[error("the range is not inside one reservation")]
    NotReserved,
    #[error("this is not a range as it was reserved")]
    NotAReservation,
    #[error("something is still mapped in the range")]
    StillMapped,
    #[error("something is already mapped in the range")]
    AlreadyMapped,
    #[error("the range is not made of whole mappings without gaps")]
    NotWholeMappings,
    #[error("the range is neither in a reservation nor in one allocation")]
    NotOurs,
    #[error("no memory was allocated at this address")]
    NotAllocated,
}

/// What is mapped in one reservation: start to length.
type Mappings = BTreeMap<u64, u64>;

/// Everything that is ours.
#[derive(Debug, Default)]
pub(crate) struct Addresses {
    reservations: BTreeMap<u64, (u64, Mappings)>,
    plain: BTreeMap<u64, u64>,
    allocations: BTreeMap<u64, u64>,
}

impl Addresses {
    pub(crate) fn reserved(&mut self, range: AddrRange) {
        self.reservations.insert(range.start.number(), (range.len.count(), Mappings::new()));
    }

    /// Takes out a reservation that holds no mapping. Undone by [`Addresses::reserved`].
    pub(crate) fn take_reservation(&mut self, range: AddrRange) -> Result<(), BadRange> {
        let start = range.start.number();
        match self.reservations.get(&start) {
            Some((len, _)) if *len != range.len.count() => Err(BadRange::NotAReservation),
            Some((_, mappings)) if !mappings.is_empty() => Err(BadRange::StillMapped),
            Some(_) => {
                self.reservations.remove(&start);
                Ok(())
            }
            None => Err(BadRange::NotAReservation),
        }
    }

    /// Enters a mapping. Undone by [`Addresses::take_mappings`] of the same range.
    pub(crate) fn map(&mut self, range: AddrRange) -> Result<(), BadRange> {
        let (start, end) = bounds(range)?;
        let (_, mappings) = self.reservation_around(start, end)?;
        if overlaps(mappings, start, end) {
            return Err(BadRange::AlreadyMapped);
        }
        mappings.insert(start, end - start);
        Ok(())
    }

    /// Refuses a range that is not made of whole mappings of one reservation.
    pub(crate) fn check_mapped(&mut self, range: AddrRange) -> Result<(), BadRange> {
        let (start, end) = bounds(range)?;
        let (_, mappings) = self.reservation_around(start, end)?;
        let mut reached = start;
        for (&at, &len) in mappings.range(start..end) {
            if at != reached {
                return Err(BadRange::NotWholeMappings);
            }
            reached = at + len;
        }
        if reached == end { Ok(()) } else { Err(BadRange::NotWholeMappings) }
    }

    /// Takes out the mappings that make up `range`. Undone by [`Addresses::put_mappings`].
    pub(crate) fn take_mappings(&mut self, range: AddrRange) -> Result<Mappings, BadRange> {
        self.check_mapped(range)?;
        let (start, end) = bounds(range)?;
        let (_, mappings) = self.reservation_around(start, end)?;
        let mut taken = mappings.split_off(&start);
        mappings.append(&mut taken.split_off(&end));
        Ok(taken)
    }

    pub(crate) fn put_mappings(&mut self, mut taken: Mappings) {
        let Some((&start, _)) = taken.first_key_value() else { return };
        let Some((&last, &len)) = taken.last_key_value() else { return };
        if let Ok((_, mappings)) = self.reservation_around(start, last + len) {
            mappings.append(&mut taken);
        }
    }

    /// Enters a plain allocation.
    pub(crate) fn plain(&mut self, at: DeviceAddr, len: Bytes) {
        self.plain.insert(at.number(), len.count());
    }

    /// Takes out a plain allocation. Undone by [`Addresses::plain`].
    pub(crate) fn take_plain(&mut self, at: DeviceAddr) -> Result<Bytes, BadRange> {
        self.plain.remove(&at.number()).map(Bytes::new).ok_or(BadRange::NotAllocated)
    }

    /// Every plain allocation, taken out for good.
    pub(crate) fn drain_plain(&mut self) -> Vec<DeviceAddr> {
        std::mem::take(&mut self.plain).into_keys().map(DeviceAddr::new).collect()
    }

    pub(crate) fn allocated(&mut self, at: DeviceAddr, len: Bytes) {
        self.allocations.insert(at.number(), len.count());
    }

    /// Takes out an allocation of the pool. Undone by [`Addresses::allocated`].
    pub(crate) fn take_allocation(&mut self, at: DeviceAddr) -> Result<Bytes, BadRange> {
        self.allocations.remove(&at.number()).map(Bytes::new).ok_or(BadRange::NotAllocated)
    }

    /// Refuses a range that is not inside something of ours.
    pub(crate) fn check_ours(&self, range: AddrRange) -> Result<(), BadRange> {
        let (start, end) = bounds(range)?;
        let reserved = last_at_or_below(&self.reservations, start)
            .is_some_and(|(at, (len, _))| end <= at + len);
        let allocated = [&self.allocations, &self.plain]
            .into_iter()
            .any(|book| last_at_or_below(book, start).is_some_and(|(at, len)| end <= at + len));
        if reserved || allocated { Ok(()) } else { Err(BadRange::NotOurs) }
    }

    /// Every reservation with its mappings, and every allocation, taken out for good.
    pub(crate) fn drain(&mut self) -> (Vec<(AddrRange, Vec<AddrRange>)>, Vec<DeviceAddr>) {
        let range = |at, len| AddrRange::new(DeviceAddr::new(at), Bytes::new(len));
        let reservations = std::mem::take(&mut self.reservations)
            .into_iter()
            .map(|(at, (len, mappings))| {
                let mapped = mappings.into_iter().map(|(at, len)| range(at, len)).collect();
                (range(at, len), mapped)
            })
            .collect();
        let allocations =
            std::mem::take(&mut self.allocations).into_keys().map(DeviceAddr::new).collect();
        (reservations, allocations)
    }

    fn reservation_around(
        &mut self,
        start: u64,
        end: u64,
    ) -> Result<&mut (u64, Mappings), BadRange> {
        match self.reservations.range_mut(..=start).next_back() {
            Some((at, reservation)) if end <= at + reservation.0 => Ok(reservation),
            _ => Err(BadRange::NotReserved),
        }
    }
}

fn bounds(range: AddrRange) -> Result<(u64, u64), BadRange> {
    let end = range.checked_end().ok_or(BadRange::NoRange)?;
    if range.len.is_zero() {
        return Err(BadRange::NoRange);
    }
    Ok((range.start.number(), end.number()))
}

fn last_at_or_below<V>(map: &BTreeMap<u64, V>, at: u64) -> Option<(&u64, &V)> {
    map.range(..=at).next_back()
}

fn overlaps(mappings: &Mappings, start: u64, end: u64) -> bool {
    mappings.range(..end).next_back().is_some_and(|(at, len)| at + len > start)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(start: u64, len: u64) -> AddrRange {
        AddrRange::new(DeviceAddr::new(start), Bytes::new(len))
    }

    /// 100 addresses from 1000 on, with 10 mapped at 1000, 20 at 1010 and 10 at 1040.
    fn book() -> Addresses {
        let mut book = Addresses::default();
        book.reserved(range(1000, 100));
        for mapping in [range(1000, 10), range(1010, 20), range(1040, 10)] {
            book.map(mapping).unwrap();
        }
        book
    }

    #[test]
    fn a_mapping_stays_inside_one_reservation_and_beside_the_others() {
        let mut book = book();
        assert_eq!(book.map(range(990, 20)), Err(BadRange::NotReserved));
        assert_eq!(book.map(range(1095, 10)), Err(BadRange::NotReserved));
        assert_eq!(book.map(range(1030, 11)), Err(BadRange::AlreadyMapped));
        assert_eq!(book.map(range(1005, 1)), Err(BadRange::AlreadyMapped));
        assert_eq!(book.map(range(1030, 10)), Ok(()));
    }

    #[test]
    fn only_whole_mappings_without_gaps_are_unmapped() {
        let mut book = book();
        for bad in [range(1000, 5), range(1005, 5), range(1000, 50), range(1030, 10)] {
            assert_eq!(book.take_mappings(bad), Err(BadRange::NotWholeMappings), "{bad}");
        }
        assert_eq!(book.take_mappings(range(1000, 30)).unwrap().len(), 2);
        assert_eq!(book.check_mapped(range(1040, 10)), Ok(()));
        assert_eq!(book.check_mapped(range(1000, 10)), Err(BadRange::NotWholeMappings));
    }

    #[test]
    fn mappings_that_were_put_back_are_as_before() {
        let mut book = book();
        let taken = book.take_mappings(range(1000, 30)).unwrap();
        book.put_mappings(taken);
        assert_eq!(book.check_mapped(range(1000, 30)), Ok(()));
        assert_eq!(book.take_reservation(range(1000, 100)), Err(BadRange::StillMapped));
    }

    #[test]
    fn a_reservation_is_given_back_only_whole_and_empty() {
        let mut book = Addresses::default();
        book.reserved(range(1000, 100));
        for bad in [range(1000, 50), range(1010, 90), range(5, 1)] {
            assert_eq!(book.take_reservation(bad), Err(BadRange::NotAReservation), "{bad}");
        }
        assert_eq!(book.take_reservation(range(1000, 100)), Ok(()));
        assert_eq!(book.take_reservation(range(1000, 100)), Err(BadRange::NotAReservation));
    }

    #[test]
    fn work_reaches_only_what_is_ours() {
        let mut book = book();
        book.allocated(DeviceAddr::new(5000), Bytes::new(64));
        book.plain(DeviceAddr::new(7000), Bytes::new(64));
        assert_eq!(book.check_ours(range(7000, 64)), Ok(()));
        assert_eq!(book.take_allocation(DeviceAddr::new(7000)), Err(BadRange::NotAllocated));
        assert_eq!(book.take_plain(DeviceAddr::new(7000)), Ok(Bytes::new(64)));
        assert_eq!(book.check_ours(range(7000, 64)), Err(BadRange::NotOurs));
        assert_eq!(book.check_ours(range(1000, 100)), Ok(()));
        assert_eq!(book.check_ours(range(5000, 64)), Ok(()));
        for bad in [range(999, 2), range(1000, 101), range(5063, 2), range(0, 1)] {
            assert_eq!(book.check_ours(bad), Err(BadRange::NotOurs), "{bad}");
        }
        assert_eq!(book.check_ours(range(u64::MAX, 2)), Err(BadRange::NoRange));
        assert_eq!(book.take_allocation(DeviceAddr::new(5001)), Err(BadRange::NotAllocated));
        assert_eq!(book.take_allocation(DeviceAddr::new(5000)), Ok(Bytes::new(64)));
        assert_eq!(book.check_ours(range(5000, 64)), Err(BadRange::NotOurs));
    }
}
