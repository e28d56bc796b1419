//! Host memory that is mapped at addresses piece by piece, as a card maps its own.
//!
//! 1. [`MappedMemory::reserve`] takes addresses of the process. Nothing can be accessed there.
//! 2. [`MappedMemory::create`] returns the offset of memory in a file without a name. The kernel
//!    allocates each page when it is first written.
//! 3. [`MappedMemory::map`] maps memory at reserved addresses, [`MappedMemory::set_access`] allows to
//!    read and write it, and [`MappedMemory::unmap`] takes it away. The same memory may be mapped at
//!    several addresses.
//! 4. [`MappedMemory::shared`] is the file, to export memory to other processes;
//!    [`MappedMemory::map_shared`] maps what another process exported.
//! 5. [`MappedMemory::discard`] returns the pages to the kernel. Offsets are not given again.
//!
//! Dropping it unmaps everything. Pages are shared with a forked child.
//!
//! Deliberately absent: references into the memory, and which offset is mapped where.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ptr::{null_mut, without_provenance_mut};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fd::OwnedFd;
use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, MprotectFlags, ProtFlags};

use crate::shared::{self, FILE_LEN, SharedFile, SharedKind, SharedRange};

/// An operation that failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MapError {
    /// The range does not lie in one reservation.
    #[error("{len} bytes at {at:#x} do not lie in one reservation")]
    NotReserved {
        /// First address.
        at: u64,
        /// Number of bytes.
        len: u64,
    },
    /// The kernel refused.
    #[error(
        "the kernel refused to {what} {len} bytes (error {code}): free memory or addresses, or \
         raise the limits of the process (ulimit -v, ulimit -n, vm.max_map_count)"
    )]
    Refused {
        /// Operation, such as `map`.
        what: &'static str,
        /// Number of bytes.
        len: u64,
        /// Error number of the kernel.
        code: i32,
    },
}

/// Memory of this process that is mapped at addresses in pieces. See the module's page.
#[derive(Debug)]
pub struct MappedMemory {
    file: SharedFile,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// Reserved addresses: start to length.
    reservations: BTreeMap<u64, u64>,
    /// Offset of the next memory.
    next: u64,
}

pub(crate) fn refused(what: &'static str, len: u64) -> impl Fn(Errno) -> MapError {
    move |code| MapError::Refused { what, len, code: code.raw_os_error() }
}

fn pointer(at: u64) -> *mut c_void {
    without_provenance_mut(at as usize)
}

const NOTHING: MapFlags = MapFlags::PRIVATE.union(MapFlags::NORESERVE);

impl MappedMemory {
    /// Creates the file. Takes no memory yet.
    ///
    /// # Errors
    /// The kernel refuses the file.
    pub fn new() -> Result<MappedMemory, MapError> {
        let file = SharedFile::new(SharedKind::Bytes)?;
        let state = Mutex::new(State { reservations: BTreeMap::new(), next: 0 });
        Ok(MappedMemory { file, state })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reserves `len` addresses, a multiple of the processor's page, at a multiple of `alignment`.
    ///
    /// # Errors
    /// The process has no such range left.
    pub fn reserve(&self, len: u64, alignment: u64) -> Result<u64, MapError> {
        let refused = refused("reserve", len);
        let too_long = || refused(Errno::NOMEM);
        let whole = len.checked_add(alignment).filter(|whole| *whole < 1 << 47);
        let whole = whole.ok_or_else(too_long)?;
        // SAFETY: the kernel chooses addresses that nothing uses.
        let start = unsafe {
            rustix::mm::mmap_anonymous(null_mut(), whole as usize, ProtFlags::empty(), NOTHING)
        };
        let start = start.map_err(&refused)? as u64;
        let at = start.next_multiple_of(alignment);
        for (first, end) in [(start, at), (at + len, start + whole)] {
            if first < end {
                // SAFETY: a part of the mapping above that nothing uses.
                let trimmed = unsafe { rustix::mm::munmap(pointer(first), (end - first) as usize) };
                // What stays reserved is unused addresses.
                let _ = trimmed;
            }
        }
        self.state().reservations.insert(at, len);
        Ok(at)
    }

    /// Reserves these addresses, or returns false if the process uses some of them.
    ///
    /// # Errors
    /// They are not the process's to use.
    pub fn reserve_at(&self, at: u64, len: u64) -> Result<bool, MapError> {
        let refused = refused("reserve", len);
        if at.checked_add(len).is_none_or(|end| end > 1 << 47) {
            return Err(refused(Errno::NOMEM));
        }
        let flags = NOTHING | MapFlags::FIXED_NOREPLACE;
        // SAFETY: the kernel replaces nothing with this flag.
        let start = unsafe {
            rustix::mm::mmap_anonymous(pointer(at), len as usize, ProtFlags::empty(), flags)
        };
        match start {
            Ok(_) => {}
            Err(Errno::EXIST) => return Ok(false),
            Err(error) => return Err(refused(error)),
        }
        self.state().reservations.insert(at, len);
        Ok(true)
    }

    /// Frees addresses that were reserved together.
    ///
    /// # Errors
    /// They were not.
    pub fn free(&self, at: u64, len: u64) -> Result<(), MapError> {
        let mut state = self.state();
        if state.reservations.get(&at) != Some(&len) {
            return Err(MapError::NotReserved { at, len });
        }
        // SAFETY: the range is this object's reservation. Users of the memory in it end before it
        // is freed, as on a card.
        unsafe { rustix::mm::munmap(pointer(at), len as usize) }.map_err(refused("free", len))?;
        state.reservations.remove(&at);
        Ok(())
    }

    /// Returns the offset of `len` bytes of zeroes.
    ///
    /// # Errors
    /// All offsets were used.
    pub fn create(&self, len: u64) -> Result<u64, MapError> {
        let mut state = self.state();
        let end = state.next.checked_add(len).filter(|end| *end <= FILE_LEN);
        let end = end.ok_or_else(|| refused("create", len)(Errno::NOMEM))?;
        Ok(std::mem::replace(&mut state.next, end))
    }

    /// Returns the pages of memory to the kernel. Where it is still mapped it reads as zeroes.
    ///
    /// # Errors
    /// The kernel refuses. The pages stay until this object is dropped.
    pub fn discard(&self, offset: u64, len: u64) -> Result<(), MapError> {
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(self.file.fd(), punch, offset, len).map_err(refused("discard", len))
    }

    /// Maps `len` bytes from `offset` on at `at`, without access.
    ///
    /// # Errors
    /// The range is not reserved, or the kernel refuses another mapping.
    pub fn map(&self, at: u64, offset: u64, len: u64) -> Result<(), MapError> {
        self.map_file(at, self.file.fd(), offset, len)
    }

    /// Maps what another process exported at `at`, without access. The mapping holds the range.
    ///
    /// # Errors
    /// As of [`map`](MappedMemory::map).
    pub fn map_shared(&self, at: u64, range: &SharedRange) -> Result<(), MapError> {
        self.map_file(at, range.fd(), range.offset, range.len)
    }

    fn map_file(&self, at: u64, file: &OwnedFd, offset: u64, len: u64) -> Result<(), MapError> {
        let state = self.state();
        state.check(at, len)?;
        let (flags, access) = (MapFlags::SHARED | MapFlags::FIXED, ProtFlags::empty());
        // SAFETY: the range lies in a reservation of this object, so it replaces nothing else.
        let mapped =
            unsafe { rustix::mm::mmap(pointer(at), len as usize, access, flags, file, offset) };
        mapped.map(|_| ()).map_err(refused("map", len))
    }

    /// Makes mapped memory readable and writable.
    ///
    /// # Errors
    /// The range is not reserved, or the kernel refuses.
    pub fn set_access(&self, at: u64, len: u64) -> Result<(), MapError> {
        let state = self.state();
        state.check(at, len)?;
        let access = MprotectFlags::READ | MprotectFlags::WRITE;
        // SAFETY: the range lies in a reservation of this object.
        let set = unsafe { rustix::mm::mprotect(pointer(at), len as usize, access) };
        set.map_err(refused("access", len))
    }

    /// Unmaps a range, which stays reserved.
    ///
    /// # Errors
    /// The range is not reserved, or the kernel refuses to split a mapping.
    pub fn unmap(&self, at: u64, len: u64) -> Result<(), MapError> {
        let state = self.state();
        state.check(at, len)?;
        let (flags, access) = (NOTHING | MapFlags::FIXED, ProtFlags::empty());
        // SAFETY: the range lies in a reservation of this object. Users of the memory end before it
        // is unmapped, as on a card.
        let replaced =
            unsafe { rustix::mm::mmap_anonymous(pointer(at), len as usize, access, flags) };
        replaced.map(|_| ()).map_err(refused("unmap", len))
    }

    /// Takes the pages of a mapping out of the process's resident memory, which counts a page once for each address that
    /// it was accessed at. The mapping and its bytes stay: the next access finds them again.
    ///
    /// # Errors
    /// The range is not reserved, or the kernel refuses.
    pub fn drop_resident(&self, at: u64, len: u64) -> Result<(), MapError> {
        let state = self.state();
        state.check(at, len)?;
        // SAFETY: the range lies in a reservation of this object, whose mappings are shared ones of a file: their pages
        // are the file's, and an access maps them again.
        let dropped =
            unsafe { rustix::mm::madvise(pointer(at), len as usize, Advice::LinuxDontNeed) };
        dropped.map_err(refused("drop", len))
    }

    /// Returns the number of pages of 4 KiB that the kernel has allocated.
    ///
    /// # Panics
    /// The kernel does not know the file that this object opened.
    pub fn pages(&self) -> u64 {
        let found = rustix::fs::fstat(self.file.fd()).expect("the file is open");
        (found.st_blocks as u64).div_ceil(8)
    }

    /// Copies memory from `offset` on into `into`, whether it is mapped or not.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), MapError> {
        shared::read(self.file.fd(), offset, into)
    }

    /// Writes `from` into memory from `offset` on, whether it is mapped or not.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<(), MapError> {
        shared::write(self.file.fd(), offset, from)
    }

    /// Returns the file, whose offsets are those of [`create`](MappedMemory::create).
    pub fn shared(&self) -> &SharedFile {
        &self.file
    }
}

impl State {
    fn check(&self, at: u64, len: u64) -> Result<(), MapError> {
        let around = self.reservations.range(..=at).next_back();
        let end = at.checked_add(len).filter(|end| *end > at);
        match (around, end) {
            (Some((start, reserved)), Some(end)) if end <= start + reserved => Ok(()),
            _ => Err(MapError::NotReserved { at, len }),
        }
    }
}

impl Drop for MappedMemory {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        for (at, len) in std::mem::take(&mut state.reservations) {
            // SAFETY: the range is this object's reservation, and the device that used it is gone.
            let unmapped = unsafe { rustix::mm::munmap(pointer(at), len as usize) };
            // A refusal leaves addresses reserved, which nothing uses.
            let _ = unmapped;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = 2 << 20;

    fn byte(at: u64) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(at as usize)
    }

    #[test]
    fn memory_that_is_mapped_elsewhere_has_the_same_bytes() {
        let memory = MappedMemory::new().unwrap();
        let at = memory.reserve(4 * PAGE, PAGE).unwrap();
        assert!(at.is_multiple_of(PAGE));
        let offset = memory.create(PAGE).unwrap();
        for place in [at, at + 2 * PAGE] {
            memory.map(place, offset, PAGE).unwrap();
            memory.set_access(place, PAGE).unwrap();
        }
        // SAFETY: the page was mapped for writing.
        unsafe { byte(at + 77).write_volatile(9) };
        // SAFETY: the same page, mapped at a second address.
        assert_eq!(unsafe { byte(at + 2 * PAGE + 77).read_volatile() }, 9);
        memory.unmap(at, PAGE).unwrap();
        let mut read = [1; 2];
        memory.read(offset + 76, &mut read).unwrap();
        assert_eq!(read, [0, 9]);
        memory.write(offset + 78, &[5]).unwrap();
        // SAFETY: as above.
        assert_eq!(unsafe { byte(at + 2 * PAGE + 78).read_volatile() }, 5);
        memory.discard(offset, PAGE).unwrap();
        memory.read(offset + 76, &mut read).unwrap();
        assert_eq!(read, [0, 0]);
        memory.free(at, 4 * PAGE).unwrap();
    }

    /// Returns the kilobytes of resident memory at an address.
    fn resident_kb(at: u64) -> u64 {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut lines = maps.lines().skip_while(|line| !line.starts_with(&format!("{at:x}-")));
        let line = lines.find(|line| line.starts_with("Rss:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }

    #[test]
    fn a_mapping_that_is_not_resident_keeps_its_bytes() {
        let memory = MappedMemory::new().unwrap();
        let at = memory.reserve(PAGE, PAGE).unwrap();
        let offset = memory.create(PAGE).unwrap();
        memory.map(at, offset, PAGE).unwrap();
        memory.set_access(at, PAGE).unwrap();
        for place in (at..at + PAGE).step_by(4096) {
            // SAFETY: the page was mapped for writing.
            unsafe { byte(place).write_volatile(7) };
        }
        assert_eq!(resident_kb(at), PAGE >> 10);
        memory.drop_resident(at, PAGE).unwrap();
        assert_eq!((resident_kb(at), memory.pages()), (0, PAGE >> 12));
        // SAFETY: as above.
        assert_eq!(unsafe { byte(at + 4096).read_volatile() }, 7);
        assert!(memory.drop_resident(at, 2 * PAGE).is_err());
    }

    #[test]
    fn ranges_beyond_a_reservation_are_refused() {
        let memory = MappedMemory::new().unwrap();
        let at = memory.reserve(PAGE, PAGE).unwrap();
        let outside = |at, len| MapError::NotReserved { at, len };
        assert_eq!(memory.map(at, 0, 2 * PAGE), Err(outside(at, 2 * PAGE)));
        assert_eq!(memory.unmap(at - PAGE, PAGE), Err(outside(at - PAGE, PAGE)));
        assert_eq!(memory.set_access(at + PAGE, PAGE), Err(outside(at + PAGE, PAGE)));
        assert_eq!(memory.free(at, PAGE / 2), Err(outside(at, PAGE / 2)));
        assert!(matches!(memory.reserve(u64::MAX, PAGE), Err(MapError::Refused { .. })));
    }

    #[test]
    fn a_hundred_thousand_reservations_that_were_freed_leave_nothing() {
        let memory = MappedMemory::new().unwrap();
        for _ in 0..100_000 {
            let at = memory.reserve(PAGE, PAGE).unwrap();
            memory.free(at, PAGE).unwrap();
        }
        assert!(memory.state().reservations.is_empty());
    }
}
