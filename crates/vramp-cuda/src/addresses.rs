//! Table of the device's addresses: reservations with their mappings, plain allocations,
//! allocations from the driver's own pool, and adopted memory of other code.
//!
//! The table keeps calls away from memory of other code in the process, and checks the rules of
//! mapping before the driver call, so that a refused call changes nothing. A call that frees
//! addresses removes its entry before the driver call and restores it if the driver refuses,
//! because the driver may return a freed address to another thread at once.
//!
//! Deliberately absent: handles, streams, and whether work in flight accesses a range.

use std::collections::BTreeMap;

use vramp_core::{AddrRange, Bytes, DeviceAddr};

/// Why a range was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum BadRange {
    #[error("the range is empty or ends beyond the address space")]
    NoRange,
    #[error("the range is not inside one reservation of this device")]
    NotReserved,
    #[error("the range is not a whole reservation")]
    NotAReservation,
    #[error("the range has mappings; unmap them first")]
    StillMapped,
    #[error("the range has a mapping already")]
    AlreadyMapped,
    #[error("the range does not consist of whole mappings without gaps")]
    NotWholeMappings,
    #[error(
        "the range is not inside a reservation, an allocation or adopted memory of this device"
    )]
    NotOwned,
    #[error("the range is this device's own in part: adopt memory of one owner at a time")]
    PartlyOwned,
    #[error("the range overlaps adopted memory: memory is adopted once")]
    AlreadyAdopted,
    #[error("the address is not the start of an allocation")]
    NotAllocated,
}

/// Mappings of one reservation: start to length.
type Mappings = BTreeMap<u64, u64>;

/// Reservations and allocations of one device.
#[derive(Debug, Default)]
pub(crate) struct AddressTable {
    reservations: BTreeMap<u64, (u64, Mappings)>,
    plain: BTreeMap<u64, u64>,
    pooled: BTreeMap<u64, u64>,
    /// Memory of other code, or of this device, that was adopted. No two ranges overlap.
    adopted: BTreeMap<u64, u64>,
}

/// Whose memory a range is that may be adopted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MemoryOf {
    /// Inside a reservation or an allocation of this device.
    Device,
    /// No part of it is of this device.
    Other,
}

impl AddressTable {
    pub(crate) fn insert_reservation(&mut self, range: AddrRange) {
        self.reservations.insert(range.start.number(), (range.len.count(), Mappings::new()));
    }

    /// Removes a reservation without mappings. Undone by [`AddressTable::insert_reservation`].
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

    /// Inserts a mapping. Undone by [`AddressTable::take_mappings`] of the same range.
    pub(crate) fn insert_mapping(&mut self, range: AddrRange) -> Result<(), BadRange> {
        let (start, end) = bounds(range)?;
        let (_, mappings) = self.reservation_around(start, end)?;
        if overlaps(mappings, start, end) {
            return Err(BadRange::AlreadyMapped);
        }
        mappings.insert(start, end - start);
        Ok(())
    }

    /// Refuses a range that does not consist of whole mappings of one reservation.
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

    /// Removes the mappings that `range` consists of. Undone by [`AddressTable::restore_mappings`].
    pub(crate) fn take_mappings(&mut self, range: AddrRange) -> Result<Mappings, BadRange> {
        self.check_mapped(range)?;
        let (start, end) = bounds(range)?;
        let (_, mappings) = self.reservation_around(start, end)?;
        let mut taken = mappings.split_off(&start);
        mappings.append(&mut taken.split_off(&end));
        Ok(taken)
    }

    pub(crate) fn restore_mappings(&mut self, mut taken: Mappings) {
        let Some((&start, _)) = taken.first_key_value() else { return };
        let Some((&last, &len)) = taken.last_key_value() else { return };
        if let Ok((_, mappings)) = self.reservation_around(start, last + len) {
            mappings.append(&mut taken);
        }
    }

    /// Inserts a plain allocation.
    pub(crate) fn insert_plain(&mut self, at: DeviceAddr, len: Bytes) {
        self.plain.insert(at.number(), len.count());
    }

    /// Removes a plain allocation. Undone by [`AddressTable::insert_plain`].
    pub(crate) fn take_plain(&mut self, at: DeviceAddr) -> Result<Bytes, BadRange> {
        self.plain.remove(&at.number()).map(Bytes::new).ok_or(BadRange::NotAllocated)
    }

    /// Removes and returns every plain allocation.
    pub(crate) fn drain_plain(&mut self) -> Vec<DeviceAddr> {
        std::mem::take(&mut self.plain).into_keys().map(DeviceAddr::new).collect()
    }

    pub(crate) fn insert_pooled(&mut self, at: DeviceAddr, len: Bytes) {
        self.pooled.insert(at.number(), len.count());
    }

    /// Removes an allocation from the pool. Undone by [`AddressTable::insert_pooled`].
    pub(crate) fn take_pooled(&mut self, at: DeviceAddr) -> Result<Bytes, BadRange> {
        self.pooled.remove(&at.number()).map(Bytes::new).ok_or(BadRange::NotAllocated)
    }

    /// Refuses a range that is not inside a reservation, an allocation or adopted memory.
    pub(crate) fn check_owned(&self, range: AddrRange) -> Result<(), BadRange> {
        let (start, end) = bounds(range)?;
        match self.is_own(start, end) || is_inside(&self.adopted, start, end) {
            true => Ok(()),
            false => Err(BadRange::NotOwned),
        }
    }

    fn is_own(&self, start: u64, end: u64) -> bool {
        let reserved = last_at_or_below(&self.reservations, start)
            .is_some_and(|(at, (len, _))| end <= at + len);
        reserved || [&self.pooled, &self.plain].iter().any(|table| is_inside(table, start, end))
    }

    // --- adopted memory ---

    /// Refuses a range that may not be adopted by what the table has. O(log n).
    pub(crate) fn check_adoptable(&self, range: AddrRange) -> Result<MemoryOf, BadRange> {
        let (start, end) = bounds(range)?;
        if overlaps(&self.adopted, start, end) {
            return Err(BadRange::AlreadyAdopted);
        }
        if self.is_own(start, end) {
            return Ok(MemoryOf::Device);
        }
        let reserved = self.reservations.range(..end).next_back();
        let partly_reserved = reserved.is_some_and(|(at, (len, _))| at + len > start);
        let tables = [&self.pooled, &self.plain];
        match partly_reserved || tables.iter().any(|table| overlaps(table, start, end)) {
            true => Err(BadRange::PartlyOwned),
            false => Ok(MemoryOf::Other),
        }
    }

    /// Inserts an adopted range. Undone by [`AddressTable::take_adopted`].
    pub(crate) fn insert_adopted(&mut self, range: AddrRange) -> Result<(), BadRange> {
        self.check_adoptable(range)?;
        self.adopted.insert(range.start.number(), range.len.count());
        Ok(())
    }

    /// Removes an adopted range. Returns false if there is none.
    pub(crate) fn take_adopted(&mut self, range: AddrRange) -> bool {
        let start = range.start.number();
        let is_adopted = self.adopted.get(&start) == Some(&range.len.count());
        if is_adopted {
            self.adopted.remove(&start);
        }
        is_adopted
    }

    /// Removes and returns every reservation with its mappings, and every allocation from the pool.
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
            std::mem::take(&mut self.pooled).into_keys().map(DeviceAddr::new).collect();
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

/// Returns true if one of the ranges, start to length, has all of `start..end`.
fn is_inside(ranges: &BTreeMap<u64, u64>, start: u64, end: u64) -> bool {
    last_at_or_below(ranges, start).is_some_and(|(at, len)| end <= at + len)
}

fn overlaps(ranges: &BTreeMap<u64, u64>, start: u64, end: u64) -> bool {
    ranges.range(..end).next_back().is_some_and(|(at, len)| at + len > start)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(start: u64, len: u64) -> AddrRange {
        AddrRange::new(DeviceAddr::new(start), Bytes::new(len))
    }

    /// 100 addresses from 1000 on, with 10 mapped at 1000, 20 at 1010 and 10 at 1040.
    fn table() -> AddressTable {
        let mut table = AddressTable::default();
        table.insert_reservation(range(1000, 100));
        for mapping in [range(1000, 10), range(1010, 20), range(1040, 10)] {
            table.insert_mapping(mapping).unwrap();
        }
        table
    }

    #[test]
    fn a_mapping_stays_inside_one_reservation_and_beside_the_others() {
        let mut table = table();
        assert_eq!(table.insert_mapping(range(990, 20)), Err(BadRange::NotReserved));
        assert_eq!(table.insert_mapping(range(1095, 10)), Err(BadRange::NotReserved));
        assert_eq!(table.insert_mapping(range(1030, 11)), Err(BadRange::AlreadyMapped));
        assert_eq!(table.insert_mapping(range(1005, 1)), Err(BadRange::AlreadyMapped));
        assert_eq!(table.insert_mapping(range(1030, 10)), Ok(()));
    }

    #[test]
    fn only_whole_mappings_without_gaps_are_unmapped() {
        let mut table = table();
        for bad in [range(1000, 5), range(1005, 5), range(1000, 50), range(1030, 10)] {
            assert_eq!(table.take_mappings(bad), Err(BadRange::NotWholeMappings), "{bad}");
        }
        assert_eq!(table.take_mappings(range(1000, 30)).unwrap().len(), 2);
        assert_eq!(table.check_mapped(range(1040, 10)), Ok(()));
        assert_eq!(table.check_mapped(range(1000, 10)), Err(BadRange::NotWholeMappings));
    }

    #[test]
    fn mappings_that_were_put_back_are_as_before() {
        let mut table = table();
        let taken = table.take_mappings(range(1000, 30)).unwrap();
        table.restore_mappings(taken);
        assert_eq!(table.check_mapped(range(1000, 30)), Ok(()));
        assert_eq!(table.take_reservation(range(1000, 100)), Err(BadRange::StillMapped));
    }

    #[test]
    fn a_reservation_is_given_back_only_whole_and_empty() {
        let mut table = AddressTable::default();
        table.insert_reservation(range(1000, 100));
        for bad in [range(1000, 50), range(1010, 90), range(5, 1)] {
            assert_eq!(table.take_reservation(bad), Err(BadRange::NotAReservation), "{bad}");
        }
        assert_eq!(table.take_reservation(range(1000, 100)), Ok(()));
        assert_eq!(table.take_reservation(range(1000, 100)), Err(BadRange::NotAReservation));
    }

    #[test]
    fn memory_is_adopted_once_and_not_beside_own_memory() {
        let mut table = table();
        table.insert_plain(DeviceAddr::new(7000), Bytes::new(64));
        assert_eq!(table.check_adoptable(range(1000, 100)), Ok(MemoryOf::Device));
        assert_eq!(table.check_adoptable(range(7000, 64)), Ok(MemoryOf::Device));
        for partly in [range(999, 2), range(1099, 2), range(900, 300), range(6990, 20)] {
            assert_eq!(table.check_adoptable(partly), Err(BadRange::PartlyOwned), "{partly}");
        }
        assert_eq!(table.check_adoptable(range(9000, 0)), Err(BadRange::NoRange));
        let whole = range(9000, 100);
        assert_eq!(table.check_adoptable(whole), Ok(MemoryOf::Other));
        table.insert_adopted(whole).unwrap();
        for over in [whole, range(8999, 2), range(9050, 1), range(9099, 9), range(8000, 9000)] {
            assert_eq!(table.insert_adopted(over), Err(BadRange::AlreadyAdopted), "{over}");
        }
        for beside in [range(8990, 10), range(9100, 10)] {
            table.insert_adopted(beside).unwrap();
        }
        assert_eq!(table.check_owned(range(9050, 50)), Ok(()));
        assert_eq!(table.check_owned(range(9050, 51)), Err(BadRange::NotOwned));
        assert!(!table.take_adopted(range(9000, 50)) && !table.take_adopted(range(9050, 50)));
        assert!(table.take_adopted(whole) && !table.take_adopted(whole));
        assert_eq!(table.check_owned(range(9000, 1)), Err(BadRange::NotOwned));
    }

    #[test]
    fn work_accesses_only_addresses_of_this_device() {
        let mut table = table();
        table.insert_pooled(DeviceAddr::new(5000), Bytes::new(64));
        table.insert_plain(DeviceAddr::new(7000), Bytes::new(64));
        assert_eq!(table.check_owned(range(7000, 64)), Ok(()));
        assert_eq!(table.take_pooled(DeviceAddr::new(7000)), Err(BadRange::NotAllocated));
        assert_eq!(table.take_plain(DeviceAddr::new(7000)), Ok(Bytes::new(64)));
        assert_eq!(table.check_owned(range(7000, 64)), Err(BadRange::NotOwned));
        assert_eq!(table.check_owned(range(1000, 100)), Ok(()));
        assert_eq!(table.check_owned(range(5000, 64)), Ok(()));
        for bad in [range(999, 2), range(1000, 101), range(5063, 2), range(0, 1)] {
            assert_eq!(table.check_owned(bad), Err(BadRange::NotOwned), "{bad}");
        }
        assert_eq!(table.check_owned(range(u64::MAX, 2)), Err(BadRange::NoRange));
        assert_eq!(table.take_pooled(DeviceAddr::new(5001)), Err(BadRange::NotAllocated));
        assert_eq!(table.take_pooled(DeviceAddr::new(5000)), Ok(Bytes::new(64)));
        assert_eq!(table.check_owned(range(5000, 64)), Err(BadRange::NotOwned));
    }
}
