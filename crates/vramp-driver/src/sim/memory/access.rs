//! What the devices may access: the mappings that a range runs through.
//!
//! Memory that a device adopted: of other code, or its own.
//!
//! 1. [`Memory::adopt`] refuses what is not one allocation, as a card does.
//! 2. While it is adopted, [`Memory::owner`] names the device for it.
//! 3. [`Memory::forget`] ends it. Each step is O(log n).
//!
//! What each card has, and the counts of its device's live objects.

use vramp_core::{AddrRange, Bytes, DeviceAddr};

use super::{Allocator, Memory};
use crate::sim::bytes::Content;
use crate::sim::devices::DeviceSet;
use crate::sim::refusal::{Outcome, Refusal};

/// Which accesses [`Memory::pieces`] allows.
#[derive(Clone, Copy, Debug)]
pub enum By {
    /// Those of a device: reads.
    Device(usize),
    /// Writes of a device.
    Writer(usize),
    /// All to mapped memory.
    Mapped,
}

impl By {
    /// Returns what an access of a device needs.
    pub fn of(device: usize, writes: bool) -> By {
        if writes { By::Writer(device) } else { By::Device(device) }
    }
}

/// A part of one handle that an address range runs through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Number of the physical memory.
    pub physical: u64,
    /// Distance of the part's first byte from the handle's.
    pub offset: u64,
    /// Number of bytes.
    pub len: u64,
    /// First address of the mapping that the range runs through.
    pub mapping: u64,
}

/// First inaccessible address of a range, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inaccessible {
    pub at: DeviceAddr,
    pub why: &'static str,
}

impl Memory {
    /// Returns the first address of each mapping in `range`, and its physical memory.
    pub fn mappings_in(&self, range: AddrRange) -> impl Iterator<Item = (u64, u64)> + '_ {
        let start = range.start.number();
        let mappings = self.mappings.range(start..start + range.len.count());
        mappings.map(|(start, mapping)| (*start, mapping.physical))
    }

    /// Returns the bytes of `range` in host memory. It must consist of whole mappings.
    pub fn host_part(&self, range: AddrRange) -> Bytes {
        let start = range.start.number();
        let mappings = self.mappings.range(start..start + range.len.count());
        mappings
            .filter(|(_, mapping)| self.card_of(mapping.physical).is_none())
            .map(|(_, mapping)| Bytes::new(mapping.len))
            .sum()
    }

    /// Returns true if handles of host memory exist.
    pub fn has_host_memory(&self) -> bool {
        self.host_handles > 0
    }

    /// Returns the bytes of `range` in host memory; zero if the range is not accessible.
    pub fn touched_on_host(&self, range: AddrRange) -> Bytes {
        let mut on_host = 0;
        let touched = self.pieces(range, By::Mapped, |piece| {
            if self.card_of(piece.physical).is_none() {
                on_host += piece.len;
            }
        });
        touched.map_or(Bytes::ZERO, |()| Bytes::new(on_host))
    }

    /// Calls `visit` with each card whose memory `range` runs through, and the number of bytes. Not
    /// called for host memory and for what is not mapped.
    pub fn touched_on_cards(&self, range: AddrRange, mut visit: impl FnMut(usize, Bytes)) {
        let touched = self.pieces(range, By::Mapped, |piece| {
            if let Some(card) = self.card_of(piece.physical) {
                visit(card, Bytes::new(piece.len));
            }
        });
        // Inaccessible memory is found where work starts.
        let _ = touched;
    }

    fn card_of(&self, physical: u64) -> Option<usize> {
        self.physical[&physical].card
    }

    /// `range` must consist of whole mappings: see [`Memory::whole_mappings`].
    pub fn set_access(&mut self, range: AddrRange, devices: DeviceSet) -> Outcome<()> {
        let start = range.start.number();
        self.allow_access(start, range.len.count())?;
        for (_, mapping) in self.mappings.range_mut(start..start + range.len.count()) {
            mapping.access = mapping.access.and(devices);
            mapping.read_only = mapping.read_only.without(devices);
        }
        Ok(())
    }

    /// Makes memory readable for a device, and not writable. `range` must consist of whole mappings.
    pub fn set_read_only(&mut self, range: AddrRange, device: usize) -> Outcome<()> {
        let device = DeviceSet::of(device);
        self.set_access(range, device)?;
        let start = range.start.number();
        for (_, mapping) in self.mappings.range_mut(start..start + range.len.count()) {
            mapping.read_only = mapping.read_only.and(device);
        }
        Ok(())
    }

    /// Takes access from `devices`. `range` must consist of whole mappings.
    pub fn revoke_access(&mut self, range: AddrRange, devices: DeviceSet) {
        let start = range.start.number();
        for (_, mapping) in self.mappings.range_mut(start..start + range.len.count()) {
            mapping.access = mapping.access.without(devices);
        }
    }

    pub(super) fn allow_access(&self, at: u64, len: u64) -> Outcome<()> {
        match &self.host {
            Some(host) => Ok(host.set_access(at, len)?),
            None => Ok(()),
        }
    }

    /// Calls `visit` for every part of physical memory that `range` runs through, in address order.
    pub fn pieces(
        &self,
        range: AddrRange,
        by: By,
        mut visit: impl FnMut(Piece),
    ) -> Result<(), Inaccessible> {
        let mut at = range.start.number();
        let inaccessible = |at, why| Inaccessible { at: DeviceAddr::new(at), why };
        let Some(end) = range.checked_end().map(DeviceAddr::number) else {
            return Err(inaccessible(at, "beyond the address space"));
        };
        let mut next = self.mappings.range(..=at).next_back();
        let mut following = self.mappings.range(at.saturating_add(1)..);
        while at < end {
            let Some((&start, mapping)) =
                next.filter(|(start, mapping)| at < **start + mapping.len)
            else {
                return Err(inaccessible(at, "not mapped"));
            };
            if start > at {
                return Err(inaccessible(at, "not mapped"));
            }
            if let By::Device(device) | By::Writer(device) = by
                && !mapping.access.contains(device)
            {
                return Err(inaccessible(at, "mapped without access"));
            }
            if let By::Writer(device) = by
                && mapping.read_only.contains(device)
            {
                return Err(inaccessible(at, "mapped for reading only"));
            }
            let offset = at - start;
            let len = (mapping.len - offset).min(end - at);
            visit(Piece { physical: mapping.physical, offset, len, mapping: start });
            at += len;
            next = following.next();
        }
        Ok(())
    }

    /// Returns the device that all of `range` belongs to, as a reservation, a plain allocation or
    /// adopted memory.
    pub fn owner(&self, range: AddrRange) -> Option<usize> {
        let (start, end) = (range.start.number(), range.checked_end()?.number());
        let reserved = self.reservations.range(..=start).next_back();
        if let Some((at, reserved)) = reserved
            && end <= at + reserved.len
        {
            return Some(reserved.device);
        }
        let (at, allocation) = self.allocations.range(..=start).next_back()?;
        match allocation.by {
            Allocator::Device if end <= at + allocation.len => self.allocated_by(*at),
            Allocator::Device => None,
            Allocator::Other => self.adopted.owner(start, end),
        }
    }

    /// Returns true if a part of `range` is on another card than `device`'s, or in addresses of
    /// another device.
    pub fn is_of_another(&self, device: usize, range: AddrRange) -> bool {
        let mut others = self.owner(range).is_some_and(|owner| owner != device);
        self.touched_on_cards(range, |card, _| others |= card != device);
        others
    }

    /// Returns the content of live physical memory.
    pub fn content(&self, physical: u64) -> &Content {
        &self.physical.get(&physical).expect("a piece names live memory").content
    }

    /// Returns the content of live physical memory, to write.
    pub fn content_mut(&mut self, physical: u64) -> &mut Content {
        &mut self.physical.get_mut(&physical).expect("a piece names live memory").content
    }
}

impl Memory {
    /// Adopts a range for a device. `is_own` says that it is the device's already.
    pub fn adopt(&mut self, device: usize, range: AddrRange, is_own: bool) -> Outcome<()> {
        let no_range =
            || Refusal::invalid(format!("{range} is empty or ends beyond the addresses"));
        let end = range.checked_end().filter(|_| !range.len.is_zero()).ok_or_else(no_range)?;
        let (start, end) = (range.start.number(), end.number());
        if self.adopted.overlaps(start, end) {
            return Err(Refusal::invalid(format!("{range} overlaps adopted memory")));
        }
        let other = self.allocations.range(..=start).next_back().filter(|(at, known)| {
            known.by == Allocator::Other
                && end <= **at + known.len
                && self.allocated_by(**at) == Some(device)
        });
        if !is_own && other.is_none() {
            let detail = format!("{range} is not inside one allocation of this device's memory");
            return Err(Refusal::invalid(detail));
        }
        self.adopted.0.insert(start, (range.len.count(), device));
        Ok(())
    }

    /// Forgets an adopted range. Returns false if the device did not adopt it.
    pub fn forget(&mut self, device: usize, range: AddrRange) -> bool {
        let start = range.start.number();
        let is_adopted = self.adopted.0.get(&start) == Some(&(range.len.count(), device));
        if is_adopted {
            self.adopted.0.remove(&start);
        }
        is_adopted
    }

    /// Returns the number of ranges that a device adopted. O(n).
    pub fn adoptions(&self, device: usize) -> usize {
        self.adopted.0.values().filter(|(_, owner)| *owner == device).count()
    }
}

impl Memory {
    /// Allocates `len` bytes of a card, for a handle or for the driver's own pool.
    pub fn charge(&mut self, card: usize, len: Bytes) -> Outcome<()> {
        self.drop_closed_exports();
        let card = &mut self.cards[card];
        let free = card.capacity - card.used;
        if len.count() > free {
            return Err(Refusal::out_of_memory(format!(
                "{len} requested, {} free",
                Bytes::new(free)
            )));
        }
        card.used += len.count();
        card.used_peak = card.used_peak.max(card.used);
        Ok(())
    }

    /// Frees `len` bytes of a card.
    pub fn refund(&mut self, card: usize, len: Bytes) {
        self.cards[card].used -= len.count();
    }

    pub fn free(&mut self, card: usize) -> Bytes {
        self.drop_closed_exports();
        Bytes::new(self.cards[card].capacity - self.cards[card].used)
    }

    pub fn used(&mut self, card: usize) -> Bytes {
        self.drop_closed_exports();
        Bytes::new(self.cards[card].used)
    }

    pub fn used_peak(&self, card: usize) -> Bytes {
        Bytes::new(self.cards[card].used_peak)
    }

    pub fn reservations(&self, device: usize) -> usize {
        self.cards[device].reservations
    }

    pub fn reserved_addresses(&self, device: usize) -> Bytes {
        let own = self.reservations.values().filter(|reserved| reserved.device == device);
        own.map(|reserved| Bytes::new(reserved.len)).sum()
    }

    pub fn mappings(&self, device: usize) -> usize {
        self.cards[device].mappings
    }

    pub fn allocations(&self, device: usize) -> usize {
        self.cards[device].allocations
    }

    /// Returns the number of handles that are not released.
    pub fn handles(&self, device: usize) -> usize {
        self.cards[device].handles
    }

    pub fn handles_released_but_mapped(&self, device: usize) -> usize {
        self.cards[device].handles_released_but_mapped
    }
}
