//! Addresses, physical memory and the mappings between them.
//!
//! 1. A *reservation* takes addresses out of the holes and is freed whole.
//! 2. A *handle* is physical memory. The caller releases it; it is destroyed with its last mapping.
//! 3. A *mapping* maps one whole handle inside one reservation. It is accessible after set-access.
//! 4. A plain *allocation* is all three in one. The calls on the parts refuse it.
//!
//! Deliberately absent: time, streams and costs.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use vramp_core::{AddrRange, Bytes, DeviceAddr};
use vramp_host::MappedMemory;

use super::bytes::Content;
use super::refusal::{Outcome, Refusal};
use crate::{Handle, MemoryLocation};

/// First address that can be reserved.
const FIRST_ADDRESS: u64 = 1 << 40;

#[derive(Debug)]
pub(super) struct Memory {
    page: u64,
    capacity: u64,
    /// Device memory of all live handles and of the driver's own pool.
    used: u64,
    /// High-water mark of `used`.
    used_peak: u64,
    /// Free addresses: start to length. Never adjacent, never empty.
    holes: BTreeMap<u64, u64>,
    /// Reserved addresses: start to length.
    reservations: BTreeMap<u64, u64>,
    /// Plain allocations: start to length in whole pages. Each has one mapping.
    allocations: BTreeMap<u64, u64>,
    mappings: BTreeMap<u64, Mapping>,
    physical: HashMap<u64, Physical>,
    handles_made: u64,
    /// Live handles of host memory.
    host_handles: usize,
    handles_released_but_mapped: usize,
    /// Physical memory destroyed since the last [`Memory::take_destroyed`].
    destroyed: Vec<u64>,
    /// Memory of the host that is mapped at the addresses, which are the host's then.
    host: Option<Arc<MappedMemory>>,
}

#[derive(Clone, Copy, Debug)]
struct Mapping {
    len: u64,
    physical: u64,
    accessible: bool,
}

#[derive(Debug)]
struct Physical {
    len: u64,
    place: MemoryLocation,
    mappings: usize,
    released: bool,
    content: Content,
}

/// A part of one handle that an address range runs through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
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
pub(super) struct Inaccessible {
    pub at: DeviceAddr,
    pub why: &'static str,
}

impl Memory {
    pub fn new(
        page: Bytes,
        capacity: Bytes,
        address_space: Bytes,
        host: Option<Arc<MappedMemory>>,
    ) -> Memory {
        Memory {
            page: page.count(),
            capacity: capacity.count(),
            used: 0,
            used_peak: 0,
            holes: BTreeMap::from([(FIRST_ADDRESS, address_space.count())]),
            reservations: BTreeMap::new(),
            allocations: BTreeMap::new(),
            mappings: BTreeMap::new(),
            physical: HashMap::new(),
            handles_made: 0,
            host_handles: 0,
            handles_released_but_mapped: 0,
            destroyed: Vec::new(),
            host,
        }
    }

    // --- addresses ---

    pub fn reserve(&mut self, len: Bytes, alignment: Bytes) -> Outcome<DeviceAddr> {
        self.check_pages("the length", len.count())?;
        let alignment = alignment.count();
        if !alignment.is_power_of_two() || !alignment.is_multiple_of(self.page) {
            return Err(Refusal::invalid(format!(
                "the alignment {} is not a power of two and a multiple of the page",
                Bytes::new(alignment)
            )));
        }
        let at = self.take_hole(len.count(), alignment)?;
        self.reservations.insert(at, len.count());
        Ok(DeviceAddr::new(at))
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

    pub fn free_addresses(&mut self, range: AddrRange) -> Outcome<()> {
        let (start, len) = (range.start.number(), range.len.count());
        if self.reservations.get(&start) != Some(&len) {
            return Err(Refusal::invalid(format!("{range} is not a whole reservation")));
        }
        if let Some((at, _)) = self.mappings.range(start..start + len).next() {
            return Err(Refusal::invalid(format!(
                "{range} has a mapping at {at:#x}; unmap it first"
            )));
        }
        self.make_hole(start, len)?;
        self.reservations.remove(&start);
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
    pub fn alloc(&mut self, len: Bytes) -> Outcome<DeviceAddr> {
        let whole = len.checked_round_up(Bytes::new(self.page)).filter(|len| !len.is_zero());
        let whole = whole.ok_or_else(|| Refusal::invalid(format!("{len} is not a valid size")))?;
        self.charge(whole)?;
        let placed = self.take_hole(whole.count(), self.page).and_then(|at| {
            let content = self.new_content(whole.count())?;
            let mapped = content.map_at(at).and_then(|()| self.allow_access(at, whole.count()));
            mapped.or_else(|refusal| self.make_hole(at, whole.count()).and(Err(refusal)))?;
            Ok((at, content))
        });
        let (at, content) = placed.inspect_err(|_| self.used -= whole.count())?;
        self.handles_made += 1;
        let physical = Physical {
            len: whole.count(),
            place: MemoryLocation::Device,
            mappings: 1,
            released: true,
            content,
        };
        self.physical.insert(self.handles_made, physical);
        let mapping = Mapping { len: whole.count(), physical: self.handles_made, accessible: true };
        self.mappings.insert(at, mapping);
        self.allocations.insert(at, whole.count());
        Ok(DeviceAddr::new(at))
    }

    /// Returns the length of an allocation.
    pub fn allocation(&self, at: DeviceAddr) -> Outcome<Bytes> {
        let len = self.allocations.get(&at.number()).copied().map(Bytes::new);
        len.ok_or_else(|| Refusal::invalid(format!("{at} is not the start of an allocation")))
    }

    /// Frees an allocation and returns its length.
    pub fn free_allocation(&mut self, at: DeviceAddr) -> Outcome<Bytes> {
        let len = self.allocation(at)?;
        self.make_hole(at.number(), len.count())?;
        self.allocations.remove(&at.number());
        let mapping = self.mappings.remove(&at.number()).expect("an allocation is mapped");
        self.destroy_physical(mapping.physical);
        Ok(len)
    }

    // --- physical memory ---

    pub fn create(&mut self, len: Bytes, place: MemoryLocation) -> Outcome<Handle> {
        self.check_pages("the length", len.count())?;
        let content = self.new_content(len.count())?;
        match place {
            MemoryLocation::Device | MemoryLocation::Peer(_) => self.charge(len)?,
            MemoryLocation::HostNuma(_) => self.host_handles += 1,
        }
        self.handles_made += 1;
        let physical = Physical { len: len.count(), place, mappings: 0, released: false, content };
        self.physical.insert(self.handles_made, physical);
        Ok(Handle::from_number(self.handles_made))
    }

    /// Releases a handle and returns its length.
    pub fn release(&mut self, handle: Handle) -> Outcome<Bytes> {
        let owned = self.owned(handle)?;
        let len = Bytes::new(owned.len);
        owned.released = true;
        if owned.mappings == 0 {
            self.destroy_physical(handle.number());
        } else {
            self.handles_released_but_mapped += 1;
        }
        Ok(len)
    }

    /// Maps a handle and returns its length.
    pub fn map(&mut self, at: DeviceAddr, handle: Handle) -> Outcome<Bytes> {
        let start = at.number();
        let len = self.owned(handle)?.len;
        if !start.is_multiple_of(self.page) {
            return Err(Refusal::invalid(format!("{at} is not a multiple of the page")));
        }
        let range = AddrRange::new(at, Bytes::new(len));
        let end = self.end_within_reservation(range)?;
        if let Some((taken, _)) = self.mappings.range(..end).next_back()
            && taken + self.mappings[taken].len > start
        {
            return Err(Refusal::invalid(format!("{range} is already mapped at {taken:#x}")));
        }
        self.owned(handle)?.content.map_at(start)?;
        self.mappings.insert(start, Mapping { len, physical: handle.number(), accessible: false });
        self.owned(handle)?.mappings += 1;
        Ok(range.len)
    }

    /// Returns the lengths of the mappings that `range` consists of, or why it does not consist of
    /// whole mappings.
    pub fn whole_mappings(&self, range: AddrRange) -> Outcome<Vec<Bytes>> {
        let mut lengths = Vec::new();
        let end = self.end_within_reservation(range)?;
        let mut at = range.start.number();
        while at < end {
            let Some(mapping) = self.mappings.get(&at) else {
                return Err(Refusal::invalid(format!("no mapping begins at {at:#x} in {range}")));
            };
            at += mapping.len;
            lengths.push(Bytes::new(mapping.len));
        }
        if at > end {
            return Err(Refusal::invalid(format!("{range} ends inside a mapping")));
        }
        Ok(lengths)
    }

    /// `range` must consist of whole mappings: see [`Memory::whole_mappings`].
    pub fn unmap(&mut self, range: AddrRange) -> Outcome<()> {
        let mut at = range.start.number();
        if let Some(host) = &self.host {
            host.unmap(at, range.len.count())?;
        }
        let end = at + range.len.count();
        while at < end {
            let mapping = self.mappings.remove(&at).expect("the range was checked to be mapped");
            at += mapping.len;
            let physical =
                self.physical.get_mut(&mapping.physical).expect("a mapping keeps its handle");
            physical.mappings -= 1;
            if physical.released && physical.mappings == 0 {
                self.handles_released_but_mapped -= 1;
                self.destroy_physical(mapping.physical);
            }
        }
        Ok(())
    }

    /// Removes and returns the physical memory destroyed since the last call.
    pub fn take_destroyed(&mut self) -> impl Iterator<Item = u64> + '_ {
        self.destroyed.drain(..)
    }

    /// Returns the first address of each mapping in `range`.
    pub fn mappings_in(&self, range: AddrRange) -> impl Iterator<Item = u64> + '_ {
        let start = range.start.number();
        self.mappings.range(start..start + range.len.count()).map(|(start, _)| *start)
    }

    /// Returns the bytes of `range` in host memory. It must consist of whole mappings.
    pub fn host_part(&self, range: AddrRange) -> Bytes {
        let start = range.start.number();
        let mappings = self.mappings.range(start..start + range.len.count());
        mappings
            .filter(|(_, mapping)| self.physical[&mapping.physical].place != MemoryLocation::Device)
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
        let touched = self.pieces(range, |piece| {
            if self.physical[&piece.physical].place != MemoryLocation::Device {
                on_host += piece.len;
            }
        });
        touched.map_or(Bytes::ZERO, |()| Bytes::new(on_host))
    }

    /// `range` must consist of whole mappings: see [`Memory::whole_mappings`].
    pub fn set_access(&mut self, range: AddrRange) -> Outcome<()> {
        let start = range.start.number();
        self.allow_access(start, range.len.count())?;
        for (_, mapping) in self.mappings.range_mut(start..start + range.len.count()) {
            mapping.accessible = true;
        }
        Ok(())
    }

    fn allow_access(&self, at: u64, len: u64) -> Outcome<()> {
        match &self.host {
            Some(host) => Ok(host.set_access(at, len)?),
            None => Ok(()),
        }
    }

    // --- access ---

    /// Calls `visit` for every part of physical memory that `range` runs through, in address order.
    pub fn pieces(
        &self,
        range: AddrRange,
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
            if !mapping.accessible {
                return Err(inaccessible(at, "mapped without access"));
            }
            let offset = at - start;
            let len = (mapping.len - offset).min(end - at);
            visit(Piece { physical: mapping.physical, offset, len, mapping: start });
            at += len;
            next = following.next();
        }
        Ok(())
    }

    /// Returns the content of live physical memory.
    pub fn content(&self, physical: u64) -> &Content {
        &self.physical.get(&physical).expect("a piece names live memory").content
    }

    /// Returns the content of live physical memory, to write.
    pub fn content_mut(&mut self, physical: u64) -> &mut Content {
        &mut self.physical.get_mut(&physical).expect("a piece names live memory").content
    }

    // --- statistics ---

    /// Allocates `len` bytes of the card, for a handle or for the driver's own pool.
    pub fn charge(&mut self, len: Bytes) -> Outcome<()> {
        let free = self.capacity - self.used;
        if len.count() > free {
            return Err(Refusal::out_of_memory(format!(
                "{len} requested, {} free",
                Bytes::new(free)
            )));
        }
        self.used += len.count();
        self.used_peak = self.used_peak.max(self.used);
        Ok(())
    }

    /// Frees `len` bytes of the card.
    pub fn refund(&mut self, len: Bytes) {
        self.used -= len.count();
    }

    pub fn free(&self) -> Bytes {
        Bytes::new(self.capacity - self.used)
    }

    pub fn used(&self) -> Bytes {
        Bytes::new(self.used)
    }

    pub fn used_peak(&self) -> Bytes {
        Bytes::new(self.used_peak)
    }

    pub fn reservations(&self) -> usize {
        self.reservations.len()
    }

    pub fn reserved_addresses(&self) -> Bytes {
        self.reservations.values().copied().map(Bytes::new).sum()
    }

    pub fn mappings(&self) -> usize {
        self.mappings.len() - self.allocations.len()
    }

    pub fn allocations(&self) -> usize {
        self.allocations.len()
    }

    /// Returns the number of handles that are not released.
    pub fn handles(&self) -> usize {
        self.physical.len() - self.handles_released_but_mapped - self.allocations.len()
    }

    pub fn handles_released_but_mapped(&self) -> usize {
        self.handles_released_but_mapped
    }

    // --- helpers ---

    fn owned(&mut self, handle: Handle) -> Outcome<&mut Physical> {
        self.physical
            .get_mut(&handle.number())
            .filter(|physical| !physical.released)
            .ok_or_else(|| Refusal::unknown("handle", handle.number()))
    }

    fn destroy_physical(&mut self, number: u64) {
        let destroyed = self.physical.remove(&number).expect("the caller holds a live number");
        match destroyed.place {
            MemoryLocation::Device | MemoryLocation::Peer(_) => self.used -= destroyed.len,
            MemoryLocation::HostNuma(_) => self.host_handles -= 1,
        }
        self.destroyed.push(number);
    }

    fn check_pages(&self, what: &str, len: u64) -> Outcome<()> {
        if len == 0 || !len.is_multiple_of(self.page) {
            return Err(Refusal::invalid(format!(
                "{what}, {len} bytes, is not a positive multiple of the page of {}",
                Bytes::new(self.page)
            )));
        }
        Ok(())
    }

    /// Returns the end of a range that is not empty and lies in one reservation.
    fn end_within_reservation(&self, range: AddrRange) -> Outcome<u64> {
        let start = range.start.number();
        let outside = || Refusal::invalid(format!("{range} does not lie in one reservation"));
        let end = range.checked_end().ok_or_else(outside)?.number();
        let (reserved, len) = self.reservations.range(..=start).next_back().ok_or_else(outside)?;
        if range.len.is_zero() || end > reserved + len {
            return Err(outside());
        }
        Ok(end)
    }
}
