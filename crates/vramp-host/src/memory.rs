//! Host memory in whole pages, shared with devices and disks.

use std::fmt;
use std::ptr::NonNull;
use std::sync::{Arc, PoisonError, RwLock};

use rustix::mm::{Advice, MapFlags, ProtFlags};
use vramp_core::Bytes;

/// The page that all lengths are whole multiples of, and the alignment that disks are content with.
const PAGE: u64 = 4 << 10;
/// A large page of the processor.
const HUGE_PAGE: u64 = 2 << 20;
/// Host threads copy in and out of different stripes at the same time.
const STRIPE: u64 = 1 << 20;

/// A NUMA node of this machine, numbered as the kernel numbers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NumaNode(pub u32);

impl fmt::Display for NumaNode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NUMA node {}", self.0)
    }
}

/// Which pages memory is made of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PageKind {
    /// Large ones where the kernel has them at hand, small ones elsewhere. Pinning them takes less
    /// time, for there are fewer.
    #[default]
    Transparent,
    /// Small ones.
    Small,
}

/// Why there is no host memory.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HostMemoryError {
    /// Nothing was asked for, or more than addresses can name.
    #[error("{asked} of host memory cannot be had: ask for more than nothing and less than 2^47")]
    BadLength {
        /// What was asked.
        asked: Bytes,
    },
    /// The kernel gave no memory.
    #[error(
        "the kernel gave no {asked} of host memory ({code}): ask for less, or raise the limit of \
         the process or its control group"
    )]
    Refused {
        /// What was asked.
        asked: Bytes,
        /// The kernel's error code.
        code: i32,
    },
    /// The kernel does not place memory on the node.
    #[error(
        "the kernel places no memory on {node} ({code}): name a node that \
         /sys/devices/system/node/online lists and that the process may use"
    )]
    BadNode {
        /// Where it should lie.
        node: NumaNode,
        /// The kernel's error code.
        code: i32,
    },
}

/// A part that does not lie within its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{len} from {offset} on do not lie in host memory of {whole}")]
pub struct OutOfBounds {
    /// Where the part begins.
    pub offset: Bytes,
    /// How long it is.
    pub len: Bytes,
    /// What there is.
    pub whole: Bytes,
}

/// Memory of this process in whole pages, zero at first. Returned to the kernel with the last
/// handle.
///
/// The host reaches it through copies: no reference points into it, so a device or a disk may
/// change it at any time. Host threads that copy the same part at the same time take turns. What
/// devices and disks do meanwhile is for their streams and completions to order: bytes read
/// too early are old or new ones, and nothing worse.
pub struct HostMemory {
    start: NonNull<u8>,
    len: u64,
    node: Option<NumaNode>,
    stripes: Box<[RwLock<()>]>,
}

// SAFETY: the mapping belongs to this object alone, and all access from the host goes through the
// locks of its stripes.
unsafe impl Send for HostMemory {}
// SAFETY: as above.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    /// `len` of memory, rounded up to whole pages of 4 KiB. The kernel gives each page when it is
    /// first touched ([`prefault`](HostMemory::prefault)). 5 us.
    ///
    /// With a node, pages come from there or not at all.
    ///
    /// # Errors
    /// There is no such memory.
    pub fn new(
        len: Bytes,
        node: Option<NumaNode>,
        pages: PageKind,
    ) -> Result<Arc<HostMemory>, HostMemoryError> {
        let bad = HostMemoryError::BadLength { asked: len };
        let rounded = len.checked_round_up(Bytes::new(PAGE)).ok_or(bad.clone())?.count();
        if rounded == 0 || rounded >= 1 << 47 {
            return Err(bad);
        }
        let align = if pages == PageKind::Transparent { HUGE_PAGE } else { PAGE };
        let start = map(rounded, align)
            .map_err(|code| HostMemoryError::Refused { asked: len, code: code.raw_os_error() })?;
        let stripes = (0..rounded.div_ceil(STRIPE)).map(|_| RwLock::new(())).collect();
        // From here on the mapping has an owner who ends it.
        let memory = HostMemory { start, len: rounded, node, stripes };
        if let Some(node) = node {
            memory.bind(node)?;
        }
        if pages == PageKind::Transparent {
            // SAFETY: the range is ours, and advice does not change what it contains.
            let advised = unsafe {
                rustix::mm::madvise(start.as_ptr().cast(), rounded as usize, Advice::LinuxHugepage)
            };
            // A kernel without large pages serves small ones.
            let _ = advised;
        }
        Ok(Arc::new(memory))
    }

    /// Where the mapping takes its pages from.
    fn bind(&self, node: NumaNode) -> Result<(), HostMemoryError> {
        let code = |code| HostMemoryError::BadNode { node, code };
        const WORD: u32 = usize::BITS;
        let mut mask = vec![0_usize; node.0 as usize / WORD as usize + 1];
        if mask.len() > 64 {
            return Err(code(libc::EINVAL));
        }
        *mask.last_mut().expect("it has a word at least") = 1 << (node.0 % WORD);
        // The kernel counts one bit more than it reads.
        let bits = mask.len() * WORD as usize + 1;
        // SAFETY: the range is ours, and the mask outlives the call.
        let result = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                self.start.as_ptr(),
                self.len as usize,
                libc::MPOL_BIND,
                mask.as_ptr(),
                bits,
                0,
            )
        };
        match result {
            0 => Ok(()),
            _ => Err(code(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL))),
        }
    }

    /// Makes the kernel give all pages now, by `threads` threads at once. What it contains stays.
    /// With eight threads 22 us for each MiB in large pages, 0.28 ms in small ones.
    pub fn prefault(&self, threads: usize) {
        let threads = threads.clamp(1, 64);
        let share = self.len.div_ceil(threads as u64).next_multiple_of(HUGE_PAGE);
        std::thread::scope(|scope| {
            for first in (0..self.len).step_by(share as usize) {
                scope.spawn(move || self.prefault_range(first, (first + share).min(self.len)));
            }
        });
    }

    fn prefault_range(&self, first: u64, end: u64) {
        for at in (first..end).step_by(PAGE as usize) {
            let _alone = self.write_lock(at);
            // SAFETY: the page lies in the mapping.
            let byte = unsafe { self.start.add(at as usize) };
            // SAFETY: as above; no other host thread touches the stripe now.
            let value = unsafe { byte.read_volatile() };
            // SAFETY: as above.
            unsafe { byte.write_volatile(value) };
        }
    }

    /// How much it is.
    pub fn len(&self) -> Bytes {
        Bytes::new(self.len)
    }

    /// Never: memory has a length.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Where it was asked to lie.
    pub fn node(&self) -> Option<NumaNode> {
        self.node
    }

    /// Its first byte, for drivers and the kernel. Pages of 4 KiB begin here.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Copies the bytes from `offset` on into `into`.
    ///
    /// # Errors
    /// They do not lie inside.
    pub fn read(&self, offset: Bytes, into: &mut [u8]) -> Result<(), OutOfBounds> {
        self.check(offset, Bytes::new(into.len() as u64))?;
        self.for_stripes(offset, into.len(), |at, part| {
            let into = &mut into[part];
            let _shared = self.stripe(at).read().unwrap_or_else(PoisonError::into_inner);
            // SAFETY: the part lies in the mapping, as was checked.
            let from = unsafe { self.start.add(at as usize) };
            // SAFETY: as above; whoever would write it from the host waits for the stripe.
            unsafe { from.as_ptr().copy_to_nonoverlapping(into.as_mut_ptr(), into.len()) };
        });
        Ok(())
    }

    /// Replaces the bytes from `offset` on by `bytes`.
    ///
    /// # Errors
    /// They do not lie inside.
    pub fn write(&self, offset: Bytes, bytes: &[u8]) -> Result<(), OutOfBounds> {
        self.check(offset, Bytes::new(bytes.len() as u64))?;
        self.for_stripes(offset, bytes.len(), |at, part| {
            let from = &bytes[part];
            let _alone = self.write_lock(at);
            // SAFETY: the part lies in the mapping, as was checked.
            let to = unsafe { self.start.add(at as usize) };
            // SAFETY: as above; no other host thread touches the stripe now.
            unsafe { to.as_ptr().copy_from_nonoverlapping(from.as_ptr(), from.len()) };
        });
        Ok(())
    }

    /// Calls `look` with the bytes of a part, piece by piece and in order. What `look` sees may
    /// change under it if a device or a disk writes there: call it once they are done.
    ///
    /// # Errors
    /// The part does not lie inside.
    pub fn scan(
        &self,
        offset: Bytes,
        len: Bytes,
        mut look: impl FnMut(&[u8]),
    ) -> Result<(), OutOfBounds> {
        self.check(offset, len)?;
        // A copy through the cache of the processor, so that no reference points into the memory.
        let mut window = [0; 16 << 10];
        let mut done = 0;
        while done < len.count() {
            let now = (len.count() - done).min(window.len() as u64);
            let window = &mut window[..now as usize];
            self.read(offset + Bytes::new(done), window)?;
            look(window);
            done += now;
        }
        Ok(())
    }

    fn check(&self, offset: Bytes, len: Bytes) -> Result<(), OutOfBounds> {
        match offset.checked_add(len) {
            Some(end) if end.count() <= self.len => Ok(()),
            _ => Err(OutOfBounds { offset, len, whole: self.len() }),
        }
    }

    fn stripe(&self, at: u64) -> &RwLock<()> {
        &self.stripes[(at / STRIPE) as usize]
    }

    fn write_lock(&self, at: u64) -> std::sync::RwLockWriteGuard<'_, ()> {
        self.stripe(at).write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Cuts `len` bytes from `offset` on at the borders of stripes.
    fn for_stripes(
        &self,
        offset: Bytes,
        len: usize,
        mut act: impl FnMut(u64, std::ops::Range<usize>),
    ) {
        let mut done = 0;
        while done < len {
            let at = offset.count() + done as u64;
            let end = len.min(done + (STRIPE - at % STRIPE) as usize);
            act(at, done..end);
            done = end;
        }
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and with the last handle nobody can reach it any more.
        let ended = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.len as usize) };
        debug_assert!(ended.is_ok(), "a mapping of ours cannot be ended: {ended:?}");
    }
}

impl fmt::Debug for HostMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of host memory", self.len())?;
        self.node.map_or(Ok(()), |node| write!(f, " on {node}"))
    }
}

/// Maps `len` bytes that begin at a multiple of `align`.
fn map(len: u64, align: u64) -> rustix::io::Result<NonNull<u8>> {
    let spare = align - PAGE;
    let whole = (len + spare) as usize;
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: the kernel chooses the addresses, so nothing of ours is there.
    let start = unsafe {
        rustix::mm::mmap_anonymous(
            std::ptr::null_mut(),
            whole,
            protection,
            MapFlags::PRIVATE | MapFlags::NORESERVE,
        )
    }?;
    let address = start as u64;
    let skipped = (address.next_multiple_of(align) - address) as usize;
    let behind = whole - skipped - len as usize;
    // SAFETY: what was just mapped is longer than what is skipped.
    let first = unsafe { start.cast::<u8>().add(skipped) };
    if skipped > 0 {
        // SAFETY: nobody knows the pages before the first yet.
        unsafe { rustix::mm::munmap(start, skipped) }?;
    }
    if behind > 0 {
        // SAFETY: the pages behind the last lie in what was just mapped.
        let after = unsafe { first.add(len as usize) };
        // SAFETY: nobody knows them yet.
        unsafe { rustix::mm::munmap(after.cast(), behind) }?;
    }
    NonNull::new(first).ok_or(rustix::io::Errno::NOMEM)
}

/// A part of host memory that keeps the whole alive.
#[derive(Clone)]
pub struct HostSpan {
    memory: Arc<HostMemory>,
    offset: Bytes,
    len: Bytes,
}

impl HostSpan {
    /// `len` bytes of `memory` from `offset` on.
    ///
    /// # Errors
    /// They do not lie inside.
    pub fn new(
        memory: &Arc<HostMemory>,
        offset: Bytes,
        len: Bytes,
    ) -> Result<HostSpan, OutOfBounds> {
        memory.check(offset, len)?;
        Ok(HostSpan { memory: Arc::clone(memory), offset, len })
    }

    /// The memory it is a part of.
    pub fn memory(&self) -> &Arc<HostMemory> {
        &self.memory
    }

    /// The distance of its first byte from the memory's.
    pub fn offset(&self) -> Bytes {
        self.offset
    }

    /// How long it is.
    pub fn len(&self) -> Bytes {
        self.len
    }

    /// True for a part of no bytes.
    pub fn is_empty(&self) -> bool {
        self.len.is_zero()
    }

    /// Its first byte, for drivers and the kernel.
    pub fn as_ptr(&self) -> *mut u8 {
        self.memory.as_ptr().wrapping_add(self.offset.count() as usize)
    }

    /// `len` bytes of it from `offset` on.
    ///
    /// # Errors
    /// They do not lie inside.
    pub fn part(&self, offset: Bytes, len: Bytes) -> Result<HostSpan, OutOfBounds> {
        self.check(offset, len)?;
        let memory = Arc::clone(&self.memory);
        Ok(HostSpan { memory, offset: self.offset + offset, len })
    }

    /// Copies the bytes from `offset` on into `into`.
    ///
    /// # Errors
    /// They do not lie inside.
    pub fn read(&self, offset: Bytes, into: &mut [u8]) -> Result<(), OutOfBounds> {
        self.check(offset, Bytes::new(into.len() as u64))?;
        self.memory.read(self.offset + offset, into)
    }

    /// Replaces the bytes from `offset` on by `bytes`.
    ///
    /// # Errors
    /// They do not lie inside.
    pub fn write(&self, offset: Bytes, bytes: &[u8]) -> Result<(), OutOfBounds> {
        self.check(offset, Bytes::new(bytes.len() as u64))?;
        self.memory.write(self.offset + offset, bytes)
    }

    /// Calls `look` with its bytes, piece by piece and in order. See [`HostMemory::scan`].
    pub fn scan(&self, look: impl FnMut(&[u8])) {
        let inside = self.memory.scan(self.offset, self.len, look);
        inside.expect("a span lies in its memory from the start");
    }

    fn check(&self, offset: Bytes, len: Bytes) -> Result<(), OutOfBounds> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len => Ok(()),
            _ => Err(OutOfBounds { offset, len, whole: self.len }),
        }
    }
}

impl fmt::Debug for HostSpan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} from {} on of {:?}", self.len, self.offset, self.memory)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_zero_at_first_and_keeps_what_is_written_across_stripes() {
        let memory = HostMemory::new(Bytes::mib(3), None, PageKind::Transparent).unwrap();
        assert_eq!(memory.as_ptr() as u64 % HUGE_PAGE, 0);
        memory.prefault(2);
        let pattern: Vec<u8> = (0..STRIPE + 2).map(|i| (i % 251) as u8).collect();
        memory.write(Bytes::new(STRIPE - 1), &pattern).unwrap();
        let mut back = vec![7; pattern.len() + 2];
        memory.read(Bytes::new(STRIPE - 2), &mut back).unwrap();
        assert_eq!((back[0], back[pattern.len() + 1]), (0, 0));
        assert_eq!(back[1..=pattern.len()], pattern);
        let mut seen = Vec::new();
        let span = HostSpan::new(&memory, Bytes::new(STRIPE - 1), Bytes::new(STRIPE + 2)).unwrap();
        span.scan(|piece| seen.extend_from_slice(piece));
        assert_eq!(seen, pattern);
    }

    #[test]
    fn parts_outside_are_refused_and_nothing_is_written() {
        let memory = HostMemory::new(Bytes::new(1), None, PageKind::Small).unwrap();
        assert_eq!(memory.len(), Bytes::kib(4));
        let outside = memory.write(Bytes::new(4095), &[1, 2]).unwrap_err();
        assert_eq!(outside.whole, Bytes::kib(4));
        assert!(memory.read(Bytes::new(u64::MAX), &mut [0]).is_err());
        let span = HostSpan::new(&memory, Bytes::new(8), Bytes::new(8)).unwrap();
        assert!(span.part(Bytes::new(4), Bytes::new(5)).is_err());
        assert!(span.write(Bytes::new(8), &[1]).is_err());
        let mut byte = [9];
        memory.read(Bytes::new(4095), &mut byte).unwrap();
        assert_eq!(byte, [0]);
    }

    #[test]
    fn what_cannot_be_had_is_an_error_that_says_what_to_do() {
        let nothing = HostMemory::new(Bytes::ZERO, None, PageKind::Small).unwrap_err();
        assert!(matches!(nothing, HostMemoryError::BadLength { .. }));
        let much = HostMemory::new(Bytes::new(u64::MAX), None, PageKind::Small).unwrap_err();
        assert!(matches!(much, HostMemoryError::BadLength { .. }));
        let refused = HostMemory::new(Bytes::tib(127), None, PageKind::Small);
        assert!(matches!(refused, Err(HostMemoryError::Refused { .. })));
        let node = HostMemory::new(Bytes::mib(1), Some(NumaNode(1021)), PageKind::Small);
        assert!(matches!(node, Err(HostMemoryError::BadNode { node: NumaNode(1021), .. })));
    }

    #[test]
    fn threads_that_copy_the_same_part_take_turns() {
        let memory = HostMemory::new(Bytes::mib(1), None, PageKind::Small).unwrap();
        std::thread::scope(|scope| {
            for byte in 1..=2 {
                let memory = &memory;
                scope.spawn(move || {
                    for _ in 0..200 {
                        memory.write(Bytes::ZERO, &[byte; 4096]).unwrap();
                        let mut back = [0; 4096];
                        memory.read(Bytes::ZERO, &mut back).unwrap();
                        assert!(back.iter().all(|other| *other == back[0]), "a torn copy");
                    }
                });
            }
        });
    }
}
