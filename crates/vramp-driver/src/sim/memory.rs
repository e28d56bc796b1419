//! Addresses, physical memory and the mappings between them.
//!
//! 1. A *reservation* takes addresses out of the holes and is freed whole.
//! 2. A *handle* is physical memory. The caller releases it; it is destroyed with its last mapping.
//! 3. A *mapping* maps one whole handle inside one reservation. It is accessible after set-access.
//! 4. A plain *allocation* is all three in one. The calls on the parts refuse it. One of other code is
//!    not the device's: fills and copies take it only once it is *adopted*.
//!
//! All devices of a machine share the addresses. Each reservation and each handle belongs to the
//! device that made it; a mapping names the devices that may access it. Memory is counted on the card
//! that it lies on.
//!
//! Deliberately absent: time, streams and costs.

mod access;
mod physical;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use vramp_core::{AddrRange, Bytes, DeviceAddr};
use vramp_host::MappedMemory;

use super::bytes::Content;
use super::devices::DeviceSet;
use super::exports::Exports;
use super::refusal::{Outcome, Refusal};
use crate::{Handle, HandleType, MemoryLocation, MemoryProperties};
pub(super) use access::{By, Inaccessible};
use physical::Adoptions;
pub(super) use physical::{Allocator, Imported, Physical};

/// First address that can be reserved.
const FIRST_ADDRESS: u64 = 1 << 40;

#[derive(Debug)]
pub(super) struct Memory {
    page: u64,
    cards: Vec<Card>,
    /// Free addresses: start to length. Never adjacent, never empty.
    holes: BTreeMap<u64, u64>,
    /// Reserved addresses by start.
    reservations: BTreeMap<u64, Reservation>,
    /// Plain allocations by start. Each has one mapping.
    allocations: BTreeMap<u64, Allocation>,
    adopted: Adoptions,
    mappings: BTreeMap<u64, Mapping>,
    pub(super) physical: HashMap<u64, Physical>,
    handles_made: u64,
    /// Live handles of host memory.
    host_handles: usize,
    /// Physical memory destroyed since the last [`Memory::take_destroyed`].
    destroyed: Vec<u64>,
    /// Memory of the host that is mapped at the addresses, which are the host's then.
    pub(super) host: Option<Arc<MappedMemory>>,
    pub(super) exports: Exports,
}

#[derive(Clone, Copy, Debug)]
struct Reservation {
    len: u64,
    device: usize,
}

#[derive(Clone, Copy, Debug)]
struct Allocation {
    /// In whole pages.
    len: u64,
    by: Allocator,
}

#[derive(Clone, Copy, Debug)]
struct Mapping {
    len: u64,
    /// Number of the handle that is mapped.
    handle: u64,
    /// Number of the physical memory: another handle's if this one was imported.
    physical: u64,
    /// Devices that may access it.
    access: DeviceSet,
    /// Those of them that may only read it.
    read_only: DeviceSet,
    rdma: bool,
}

/// What one card has, and the counts of its device's live objects.
#[derive(Clone, Debug, Default)]
struct Card {
    capacity: u64,
    /// Device memory of all live handles and of the driver's own pool.
    used: u64,
    /// High-water mark of `used`.
    used_peak: u64,
    reservations: usize,
    mappings: usize,
    allocations: usize,
    handles: usize,
    handles_released_but_mapped: usize,
}

/// The mappings that a range consists of.
#[derive(Debug, Default)]
pub(super) struct WholeMappings {
    /// Length of each.
    pub handles: Vec<Bytes>,
    /// Number of pairs of a mapping and a device, other than the range's, that may access it.
    pub peer_grants: usize,
    /// Number of mappings that network cards can access.
    pub rdma: usize,
}

impl Memory {
    /// Returns the memory of a machine of `devices` cards with `capacity` each.
    pub fn new(
        devices: usize,
        page: Bytes,
        capacity: Bytes,
        address_space: Bytes,
        host: Option<Arc<MappedMemory>>,
    ) -> Memory {
        let card = Card { capacity: capacity.count(), ..Card::default() };
        Memory {
            page: page.count(),
            cards: vec![card; devices],
            holes: BTreeMap::from([(FIRST_ADDRESS, address_space.count())]),
            reservations: BTreeMap::new(),
            allocations: BTreeMap::new(),
            adopted: Adoptions::default(),
            mappings: BTreeMap::new(),
            physical: HashMap::new(),
            handles_made: 0,
            host_handles: 0,
            destroyed: Vec::new(),
            exports: Exports::new(host.clone()),
            host,
        }
    }

    /// Returns true if the machine has a device of this ordinal.
    pub fn has_device(&self, ordinal: u16) -> bool {
        usize::from(ordinal) < self.cards.len()
    }

    // --- addresses ---

    pub fn reserve(&mut self, device: usize, len: Bytes, alignment: Bytes) -> Outcome<DeviceAddr> {
        self.check_pages("the length", len.count())?;
        let alignment = alignment.count();
        if !alignment.is_power_of_two() || !alignment.is_multiple_of(self.page) {
            return Err(Refusal::invalid(format!(
                "the alignment {} is not a power of two and a multiple of the page",
                Bytes::new(alignment)
            )));
        }
        let at = self.take_hole(len.count(), alignment)?;
        self.reservations.insert(at, Reservation { len: len.count(), device });
        self.cards[device].reservations += 1;
        Ok(DeviceAddr::new(at))
    }

    /// Reserves these addresses, or returns false if they are not all free.
    pub fn reserve_at(&mut self, device: usize, range: AddrRange) -> Outcome<bool> {
        let (start, len) = (range.start.number(), range.len.count());
        self.check_pages("the address", start)?;
        self.check_pages("the length", len)?;
        let is_free = match &self.host {
            Some(host) => host.reserve_at(start, len)?,
            None => self.take_hole_at(start, len),
        };
        if is_free {
            self.reservations.insert(start, Reservation { len, device });
            self.cards[device].reservations += 1;
        }
        Ok(is_free)
    }

    /// Takes these addresses from their hole. Returns false if no hole has them all.
    fn take_hole_at(&mut self, start: u64, len: u64) -> bool {
        let around = self.holes.range(..=start).next_back().map(|(at, hole)| (*at, at + hole));
        let Some((at, end)) = around.filter(|(_, end)| start.saturating_add(len) <= *end) else {
            return false;
        };
        self.holes.remove(&at);
        for (from, to) in [(at, start), (start + len, end)] {
            if from < to {
                self.holes.insert(from, to - from);
            }
        }
        true
    }

    /// Takes addresses from the first hole that fits.
    fn take_hole(&mut self, len: u64, alignment: u64) -> Outcome<u64> {
        if let Some(host) = &self.host {
            return Ok(host.reserve(len, alignment)?);
        }
        let fit = self.holes.iter().find_map(|(&start, &hole)| {
            let at = start.checked_next_multiple_of(alignment)?;
            (at - start)
                .checked_add(len)
                .is_some_and(|need| need <= hole)
                .then_some((start, hole, at))
        });
        let Some((start, hole, at)) = fit else {
            return Err(Refusal::out_of_memory(format!(
                "no contiguous {} of address space is left",
                Bytes::new(len)
            )));
        };
        self.holes.remove(&start);
        if at > start {
            self.holes.insert(start, at - start);
        }
        if at + len < start + hole {
            self.holes.insert(at + len, start + hole - at - len);
        }
        Ok(at)
    }

    pub fn free_addresses(&mut self, device: usize, range: AddrRange) -> Outcome<()> {
        let (start, len) = (range.start.number(), range.len.count());
        let known = self.reservations.get(&start);
        if known.is_none_or(|known| (known.len, known.device) != (len, device)) {
            return Err(Refusal::invalid(format!("{range} is not a whole reservation")));
        }
        if let Some((at, _)) = self.mappings.range(start..start + len).next() {
            return Err(Refusal::invalid(format!(
                "{range} has a mapping at {at:#x}; unmap it first"
            )));
        }
        self.make_hole(start, len)?;
        self.reservations.remove(&start);
        self.cards[device].reservations -= 1;
        Ok(())
    }

    /// Returns addresses to the holes and coalesces them.
    fn make_hole(&mut self, mut start: u64, mut len: u64) -> Outcome<()> {
        if let Some(host) = &self.host {
            return Ok(host.free(start, len)?);
        }
        if let Some((&before, &hole)) = self.holes.range(..start).next_back()
            && before + hole == start
        {
            self.holes.remove(&before);
            (start, len) = (before, hole + len);
        }
        if let Some(hole) = self.holes.remove(&(start + len)) {
            len += hole;
        }
        self.holes.insert(start, len);
        Ok(())
    }

    /// Returns the content of new physical memory.
    fn new_content(&self, len: u64) -> Outcome<Content> {
        Ok(match &self.host {
            Some(host) => Content::mapped(Arc::clone(host), host.create(len)?, len),
            None => Content::default(),
        })
    }

    // --- plain allocations ---

    /// Allocates whole pages that are accessible at once.
    pub fn alloc(&mut self, device: usize, len: Bytes, by: Allocator) -> Outcome<DeviceAddr> {
        let whole = len.checked_round_up(Bytes::new(self.page)).filter(|len| !len.is_zero());
        let whole = whole.ok_or_else(|| Refusal::invalid(format!("{len} is not a valid size")))?;
        self.charge(device, whole)?;
        let placed = self.take_hole(whole.count(), self.page).and_then(|at| {
            let content = self.new_content(whole.count())?;
            let mapped = content.map_at(at).and_then(|()| self.allow_access(at, whole.count()));
            mapped.or_else(|refusal| self.make_hole(at, whole.count()).and(Err(refusal)))?;
            Ok((at, content))
        });
        let (at, content) = placed.inspect_err(|_| self.cards[device].used -= whole.count())?;
        let handle = self.add(Physical {
            len: whole.count(),
            device,
            card: Some(device),
            counted: true,
            mapped_at: vec![at],
            released: true,
            imports: 0,
            imported: None,
            handle_type: HandleType::None,
            rdma: false,
            content,
        });
        let mapping = Mapping {
            len: whole.count(),
            handle,
            physical: handle,
            access: DeviceSet::of(device),
            read_only: DeviceSet::default(),
            rdma: false,
        };
        self.mappings.insert(at, mapping);
        self.allocations.insert(at, Allocation { len: whole.count(), by });
        self.cards[device].allocations += 1;
        Ok(DeviceAddr::new(at))
    }

    /// Returns the length of an allocation.
    pub fn allocation(&self, device: usize, at: DeviceAddr, by: Allocator) -> Outcome<Bytes> {
        let known = self.allocations.get(&at.number());
        known
            .filter(|known| known.by == by && self.allocated_by(at.number()) == Some(device))
            .map(|known| Bytes::new(known.len))
            .ok_or_else(|| Refusal::invalid(format!("{at} is not the start of an allocation")))
    }

    fn allocated_by(&self, start: u64) -> Option<usize> {
        self.mappings.get(&start).map(|mapping| self.physical[&mapping.handle].device)
    }

    /// Frees an allocation and returns its length.
    pub fn free_allocation(
        &mut self,
        device: usize,
        at: DeviceAddr,
        by: Allocator,
    ) -> Outcome<Bytes> {
        let len = self.allocation(device, at, by)?;
        self.make_hole(at.number(), len.count())?;
        self.allocations.remove(&at.number());
        self.cards[device].allocations -= 1;
        let mapping = self.mappings.remove(&at.number()).expect("an allocation is mapped");
        let physical = self.physical.get_mut(&mapping.handle).expect("a mapping keeps its handle");
        physical.mapped_at.clear();
        self.destroy_unless_kept(mapping.handle);
        Ok(len)
    }

    // --- physical memory ---

    pub fn create(
        &mut self,
        device: usize,
        len: Bytes,
        properties: MemoryProperties,
    ) -> Outcome<Handle> {
        self.check_pages("the length", len.count())?;
        let content = self.new_content(len.count())?;
        let card = match properties.location {
            MemoryLocation::Device => Some(device),
            MemoryLocation::Peer(ordinal) => Some(ordinal as usize),
            MemoryLocation::HostNuma(_) => None,
        };
        match card {
            Some(card) => self.charge(card, len)?,
            None => self.host_handles += 1,
        }
        self.cards[device].handles += 1;
        let number = self.add(Physical {
            len: len.count(),
            device,
            card,
            counted: true,
            mapped_at: Vec::new(),
            released: false,
            imports: 0,
            imported: None,
            handle_type: properties.handle_type,
            rdma: properties.rdma,
            content,
        });
        Ok(Handle::from_number(number))
    }

    /// Adds an imported handle of `len` bytes, which may differ from what it was imported from.
    pub fn add_imported(
        &mut self,
        device: usize,
        len: Bytes,
        from: Imported,
        card: Option<usize>,
        content: Content,
    ) -> Handle {
        let mut rdma = false;
        if let Some(body) = from.physical.and_then(|number| self.physical.get_mut(&number)) {
            body.imports += 1;
            rdma = body.rdma;
        }
        self.cards[device].handles += 1;
        let number = self.add(Physical {
            len: len.count(),
            device,
            card,
            counted: false,
            mapped_at: Vec::new(),
            released: false,
            imports: 0,
            imported: Some(from),
            handle_type: HandleType::PosixFd,
            rdma,
            content,
        });
        Handle::from_number(number)
    }

    fn add(&mut self, physical: Physical) -> u64 {
        self.handles_made += 1;
        self.physical.insert(self.handles_made, physical);
        self.handles_made
    }

    /// Releases a handle and returns its length.
    pub fn release(&mut self, device: usize, handle: Handle) -> Outcome<Bytes> {
        let owned = self.owned(device, handle)?;
        let (len, mapped) = (Bytes::new(owned.len), !owned.mapped_at.is_empty());
        owned.released = true;
        self.cards[device].handles -= 1;
        if mapped {
            self.cards[device].handles_released_but_mapped += 1;
        } else {
            self.destroy_unless_kept(handle.number());
        }
        Ok(len)
    }

    /// Maps a handle and returns its length, and whether network cards can access it.
    pub fn map(&mut self, device: usize, at: DeviceAddr, handle: Handle) -> Outcome<(Bytes, bool)> {
        let start = at.number();
        let owned = self.owned(device, handle)?;
        let (len, rdma, imported) = (owned.len, owned.rdma, owned.imported);
        if let Some(imported) = imported
            && imported.len != len
        {
            return Err(Refusal::not_supported(format!(
                "the handle was imported as {} and is of {}",
                Bytes::new(len),
                Bytes::new(imported.len)
            )));
        }
        if !start.is_multiple_of(self.page) {
            return Err(Refusal::invalid(format!("{at} is not a multiple of the page")));
        }
        let range = AddrRange::new(at, Bytes::new(len));
        let end = self.end_within_reservation(device, range)?;
        if let Some((taken, _)) = self.mappings.range(..end).next_back()
            && taken + self.mappings[taken].len > start
        {
            return Err(Refusal::invalid(format!("{range} is already mapped at {taken:#x}")));
        }
        let physical = imported.and_then(|from| from.physical).unwrap_or(handle.number());
        self.content(physical).map_at(start)?;
        self.drop_resident_aliases(physical);
        let access = DeviceSet::default();
        let read_only = DeviceSet::default();
        let mapping = Mapping { len, handle: handle.number(), physical, access, read_only, rdma };
        self.mappings.insert(start, mapping);
        self.owned(device, handle)?.mapped_at.push(start);
        self.cards[device].mappings += 1;
        Ok((range.len, rdma))
    }

    /// Takes other mappings of a handle's memory out of the process's resident memory, which would count the
    /// memory once for each. O(mappings of the handle).
    fn drop_resident_aliases(&self, number: u64) {
        let (Some(host), Some(known)) = (&self.host, self.physical.get(&number)) else { return };
        for &at in &known.mapped_at {
            // It only lowers a count.
            let _ = host.drop_resident(at, known.len);
        }
    }

    /// Returns the number of the physical memory of a handle.
    pub fn physical_of(&self, handle: Handle) -> u64 {
        let imported = self.physical.get(&handle.number()).and_then(|known| known.imported);
        imported.and_then(|from| from.physical).unwrap_or(handle.number())
    }

    /// Returns the mappings that `range` consists of, or why it does not consist of whole mappings.
    pub fn whole_mappings(&self, device: usize, range: AddrRange) -> Outcome<WholeMappings> {
        let mut whole = WholeMappings::default();
        let own = DeviceSet::of(device);
        let end = self.end_within_reservation(device, range)?;
        let mut at = range.start.number();
        while at < end {
            let Some(mapping) = self.mappings.get(&at) else {
                return Err(Refusal::invalid(format!("no mapping begins at {at:#x} in {range}")));
            };
            at += mapping.len;
            whole.handles.push(Bytes::new(mapping.len));
            whole.peer_grants += mapping.access.without(own).len();
            whole.rdma += usize::from(mapping.rdma);
        }
        if at > end {
            return Err(Refusal::invalid(format!("{range} ends inside a mapping")));
        }
        Ok(whole)
    }

    /// `range` must consist of whole mappings: see [`Memory::whole_mappings`].
    pub fn unmap(&mut self, range: AddrRange) -> Outcome<()> {
        let mut at = range.start.number();
        if let Some(host) = &self.host {
            host.unmap(at, range.len.count())?;
        }
        let end = at + range.len.count();
        while at < end {
            let start = at;
            let mapping = self.mappings.remove(&start).expect("the range was checked to be mapped");
            at += mapping.len;
            let physical =
                self.physical.get_mut(&mapping.handle).expect("a mapping keeps its handle");
            physical.mapped_at.retain(|&other| other != start);
            let card = &mut self.cards[physical.device];
            card.mappings -= 1;
            if physical.released && physical.mapped_at.is_empty() {
                card.handles_released_but_mapped -= 1;
                self.destroy_unless_kept(mapping.handle);
            }
        }
        Ok(())
    }

    /// Removes and returns the physical memory destroyed since the last call.
    pub fn take_destroyed(&mut self) -> impl Iterator<Item = u64> + '_ {
        self.destroyed.drain(..)
    }

    // --- helpers ---

    pub(super) fn owned(&mut self, device: usize, handle: Handle) -> Outcome<&mut Physical> {
        self.physical
            .get_mut(&handle.number())
            .filter(|physical| !physical.released && physical.device == device)
            .ok_or_else(|| Refusal::unknown("handle", handle.number()))
    }

    /// Destroys physical memory without handle and mapping, unless an imported handle or an exported
    /// descriptor keeps it.
    fn destroy_unless_kept(&mut self, number: u64) {
        if self.exports.is_empty() {
            // Only exported memory has imported handles.
            return self.destroy_physical(number);
        }
        let physical = self.physical.get(&number).expect("the caller holds a live number");
        if physical.imports == 0 && !self.exports.keeps(number, physical) {
            self.destroy_physical(number);
        }
    }

    /// Destroys memory whose last exported descriptor was closed since the last call. O(memory that
    /// only descriptors keep), with one system call each.
    pub(super) fn drop_closed_exports(&mut self) {
        if self.exports.is_empty() {
            return;
        }
        for number in self.exports.kept_only_by_descriptors() {
            self.destroy_unless_kept(number);
        }
    }

    fn destroy_physical(&mut self, number: u64) {
        let destroyed = self.physical.remove(&number).expect("the caller holds a live number");
        self.exports.forget(number);
        match destroyed.card {
            Some(card) if destroyed.counted => self.cards[card].used -= destroyed.len,
            None if destroyed.counted => self.host_handles -= 1,
            _ => {}
        }
        if let Some(origin) = destroyed.imported.and_then(|from| from.physical) {
            let body = self.physical.get_mut(&origin).expect("an imported handle keeps its memory");
            body.imports -= 1;
            if body.imports == 0 && body.released && body.mapped_at.is_empty() {
                self.destroy_unless_kept(origin);
            }
        }
        self.destroyed.push(number);
    }

    pub(super) fn check_pages(&self, what: &str, len: u64) -> Outcome<()> {
        if len == 0 || !len.is_multiple_of(self.page) {
            return Err(Refusal::invalid(format!(
                "{what}, {len} bytes, is not a positive multiple of the page of {}",
                Bytes::new(self.page)
            )));
        }
        Ok(())
    }

    /// Returns the end of a range that is not empty and lies in one reservation of the device.
    fn end_within_reservation(&self, device: usize, range: AddrRange) -> Outcome<u64> {
        let start = range.start.number();
        let outside = || Refusal::invalid(format!("{range} does not lie in one reservation"));
        let end = range.checked_end().ok_or_else(outside)?.number();
        let (at, reserved) = self.reservations.range(..=start).next_back().ok_or_else(outside)?;
        if range.len.is_zero() || end > at + reserved.len || reserved.device != device {
            return Err(outside());
        }
        Ok(end)
    }
}
