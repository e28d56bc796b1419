//! What happens when the process has no memory left for the library's own records.
//!
//! A failed allocation aborts a Rust program. The library keeps its records in trees and tables whose
//! changes cannot fail half-way, so it asks before it begins:
//!
//! 1. [`check_host`] is called at the start of a request. It allocates a probe and frees it again.
//!    If that fails, the request is refused and nothing has changed.
//! 2. Tables that double are grown with `try_reserve` before the request changes them.
//! 3. What the request allocates after that may still find no memory, because other threads take it.
//!    A program whose global allocator is [`HostReserve`] then uses a reserve of 16 MiB, and until
//!    the probe succeeds again all new requests are refused. Only requests that are under way, and
//!    frees, use the reserve. It costs a comparison at each free and nothing at each malloc.
//!
//! The shared library and the command line have the reserve. A Rust program opts in:
//!
//! ```
//! #[global_allocator]
//! static MEMORY: vramp_host::HostReserve = vramp_host::HostReserve;
//! # fn main() {}
//! ```
//!
//! Not covered: an allocation of more than 4 MiB that has no error path, more than 16 MiB at once in
//! requests that are under way, a thread whose stack cannot grow, and the kernel's out-of-memory
//! killer, which ends a process without asking it.
//!
//! The reserve has power-of-two blocks. Freed blocks wait in a list of their size. A program that never
//! runs short never touches it, so it costs addresses and no memory.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::UnsafeCell;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// Size of the reserve.
const SIZE: usize = 16 << 20;
/// Largest allocation that the reserve serves.
const LARGEST: usize = 4 << 20;
/// Smallest block of the reserve.
const SMALLEST: usize = 32;
/// Alignment of the reserve.
const PAGE: usize = 4096;
/// Number of block sizes, from `SMALLEST` to `LARGEST`.
const CLASSES: usize = (LARGEST / SMALLEST).ilog2() as usize + 1;
/// Memory that has to be available for a request.
const PROBE: usize = 256 << 10;

/// The process has no memory for the records of a request. Nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the host has no memory for the allocator's own records: free host memory, or raise the limit of \
     the process (ulimit -v) or its control group"
)]
pub struct HostShortage;

/// True since an allocation was served from the reserve, until the host has memory again.
static LOW: AtomicBool = AtomicBool::new(false);
/// Number of allocations that the reserve served.
static SERVED: AtomicU64 = AtomicU64::new(0);
static RESERVE: Reserve = Reserve {
    memory: UnsafeCell::new(Memory([0; SIZE])),
    lists: Mutex::new(Lists { untouched: 0, free: [None; CLASSES] }),
};

/// Returns an error if the host has no memory for the records of a request. Costs an allocation of
/// 256 KiB that is freed again.
///
/// # Errors
/// [`HostShortage`].
pub fn check_host() -> Result<(), HostShortage> {
    check_host_for(PROBE)
}

/// Returns an error if the host has no memory for `bytes`, or for the records of a request. Costs an
/// allocation that is freed again.
///
/// # Errors
/// [`HostShortage`].
pub fn check_host_for(bytes: usize) -> Result<(), HostShortage> {
    // The reserve must not serve the probe.
    let probe = Layout::from_size_align(bytes.max(PROBE), 1).map_err(|_| HostShortage)?;
    // Hidden from the compiler, which removes an allocation that nothing uses.
    // SAFETY: the size is not zero.
    let memory = std::hint::black_box(unsafe { System.alloc(probe) });
    if memory.is_null() {
        return Err(HostShortage);
    }
    // SAFETY: the same allocator returned it for this layout.
    unsafe { System.dealloc(memory, probe) };
    LOW.store(false, Ordering::Relaxed);
    Ok(())
}

/// Returns true if the reserve served an allocation since the last successful check. One atomic load.
#[inline]
pub fn is_host_short() -> bool {
    LOW.load(Ordering::Relaxed)
}

/// Returns how many allocations the reserve has served since the process began.
pub fn reserve_allocations() -> u64 {
    SERVED.load(Ordering::Relaxed)
}

/// The system's allocator with a reserve for the library's records: see the module's page.
#[derive(Clone, Copy, Debug, Default)]
pub struct HostReserve;

// SAFETY: blocks of the system are passed to the system, and those of the reserve to the reserve.
// Neither panics. Both return blocks of the layout's size and alignment, or null.
unsafe impl GlobalAlloc for HostReserve {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's contract is the same.
        let memory = unsafe { System.alloc(layout) };
        if memory.is_null() { RESERVE.alloc(layout) } else { memory }
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's contract is the same.
        let memory = unsafe { System.alloc_zeroed(layout) };
        if memory.is_null() { RESERVE.alloc_zeroed(layout) } else { memory }
    }

    #[inline]
    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        if RESERVE.contains(memory) {
            // SAFETY: the block lies in the reserve, which returned it for this layout.
            unsafe { RESERVE.dealloc(memory, layout) };
        } else {
            // SAFETY: the system returned it for this layout.
            unsafe { System.dealloc(memory, layout) };
        }
    }

    #[inline]
    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if !RESERVE.contains(memory) {
            // SAFETY: the caller's contract is the same, and the system returned the block.
            let moved = unsafe { System.realloc(memory, layout, size) };
            if !moved.is_null() {
                return moved;
            }
        }
        // SAFETY: the caller's contract is the same.
        unsafe { self.move_block(memory, layout, size) }
    }
}

impl HostReserve {
    /// Moves a block to one of another size, in the system's memory or the reserve.
    ///
    /// # Safety
    /// That of [`GlobalAlloc::realloc`].
    #[cold]
    unsafe fn move_block(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        let Ok(wanted) = Layout::from_size_align(size, layout.align()) else { return null_mut() };
        // SAFETY: the caller ensures that the size is not zero.
        let moved = unsafe { self.alloc(wanted) };
        if !moved.is_null() {
            let kept = size.min(layout.size());
            // SAFETY: both blocks are live, different, and have at least so many bytes.
            unsafe { moved.copy_from_nonoverlapping(memory, kept) };
            // SAFETY: the caller passed a block of this layout and does not use it any more.
            unsafe { self.dealloc(memory, layout) };
        }
        moved
    }
}

#[repr(C, align(4096))]
struct Memory([u8; SIZE]);

struct Reserve {
    memory: UnsafeCell<Memory>,
    lists: Mutex<Lists>,
}

struct Lists {
    /// Bytes at the end of the memory that no block was cut from start here.
    untouched: usize,
    /// Freed blocks by size. Each begins with the address of the next.
    free: [Option<Freed>; CLASSES],
}

/// A freed block of the reserve.
#[derive(Clone, Copy)]
struct Freed(NonNull<Option<Freed>>);

// SAFETY: a freed block belongs to the reserve, whose lock is held wherever it is accessed.
unsafe impl Send for Freed {}
// SAFETY: blocks are handed out once, and the rest of the memory is accessed while the lock is held.
unsafe impl Sync for Reserve {}

impl Reserve {
    fn start(&self) -> *mut u8 {
        self.memory.get().cast()
    }

    #[inline]
    fn contains(&self, memory: *mut u8) -> bool {
        memory.addr().wrapping_sub(self.start().addr()) < SIZE
    }

    /// Returns the number of the size that fits the layout; `None` if none does.
    fn class(layout: Layout) -> Option<usize> {
        let size = layout.size().max(layout.align()).max(SMALLEST).checked_next_power_of_two()?;
        // Blocks are aligned to their size, up to a page.
        let fits = size <= LARGEST && layout.align() <= PAGE;
        fits.then(|| (size / SMALLEST).ilog2() as usize)
    }

    #[cold]
    fn alloc(&self, layout: Layout) -> *mut u8 {
        LOW.store(true, Ordering::Relaxed);
        let Some(class) = Reserve::class(layout) else { return null_mut() };
        let mut lists = self.lists.lock().unwrap_or_else(PoisonError::into_inner);
        let block = match lists.free[class] {
            Some(Freed(block)) => {
                // SAFETY: a freed block begins with the next of its list, and the lock is held.
                lists.free[class] = unsafe { block.read() };
                block.as_ptr().cast()
            }
            None => {
                let size = SMALLEST << class;
                let at = lists.untouched.next_multiple_of(size.min(PAGE));
                if at + size > SIZE {
                    return null_mut();
                }
                lists.untouched = at + size;
                self.start().wrapping_add(at)
            }
        };
        SERVED.fetch_add(1, Ordering::Relaxed);
        block
    }

    #[cold]
    fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        let memory = self.alloc(layout);
        if !memory.is_null() {
            // SAFETY: the block is new and has the layout's size.
            unsafe { memory.write_bytes(0, layout.size()) };
        }
        memory
    }

    /// # Safety
    /// The reserve returned the block for this layout, and the caller does not use it any more.
    #[cold]
    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        let class = Reserve::class(layout).zip(NonNull::new(memory.cast::<Option<Freed>>()));
        let Some((class, block)) = class else { return };
        let mut lists = self.lists.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the block is free, at least 32 bytes long and aligned to at least that.
        unsafe { block.write(lists.free[class]) };
        lists.free[class] = Some(Freed(block));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(size: usize, align: usize) -> Layout {
        Layout::from_size_align(size, align).unwrap()
    }

    /// One test, because the reserve is one for the process.
    #[test]
    fn the_reserve_serves_every_size_and_alignment_and_reuses_what_is_freed() {
        let sizes = [(1, 1), (33, 8), (4096, 16), (100, 4096), (70_000, 8), (LARGEST, 1)];
        let mut first = Vec::new();
        for round in 0..50 {
            let blocks: Vec<_> = sizes
                .iter()
                .map(|&(size, align)| {
                    let memory = RESERVE.alloc(layout(size, align));
                    assert!(RESERVE.contains(memory) && memory.addr().is_multiple_of(align));
                    // SAFETY: the block is new and has this size.
                    unsafe { memory.write_bytes(round, size) };
                    (memory, layout(size, align))
                })
                .collect();
            let mut spans: Vec<_> =
                blocks.iter().map(|(at, of)| (at.addr(), at.addr() + of.size())).collect();
            spans.sort_unstable();
            assert!(spans.windows(2).all(|pair| pair[0].1 <= pair[1].0), "blocks overlap");
            let at: Vec<_> = spans.iter().map(|span| span.0).collect();
            if round == 0 {
                first = at;
            } else {
                assert_eq!(at, first, "freed blocks are used again");
            }
            for (memory, of) in blocks {
                // SAFETY: the reserve returned it for this layout.
                unsafe { HostReserve.dealloc(memory, of) };
            }
        }
        assert!(RESERVE.alloc(layout(LARGEST + 1, 1)).is_null());
        assert!(RESERVE.alloc(layout(1, PAGE * 2)).is_null());
        assert!(is_host_short());

        // A block moves between the reserve and the system.
        let small = RESERVE.alloc_zeroed(layout(64, 8));
        // SAFETY: the block has 64 bytes.
        unsafe { small.write_bytes(9, 64) };
        // SAFETY: the reserve returned it for this layout.
        let moved = unsafe { HostReserve.realloc(small, layout(64, 8), 100_000) };
        assert!(!RESERVE.contains(moved));
        // SAFETY: the block has 100,000 bytes, of which 64 were written.
        let bytes = unsafe { std::slice::from_raw_parts(moved, 64) };
        assert_eq!(bytes, [9; 64]);
        // SAFETY: it was returned for this layout.
        unsafe { HostReserve.dealloc(moved, layout(100_000, 8)) };

        // More than the reserve has is refused.
        let mut many = 0;
        while !RESERVE.alloc(layout(1 << 20, 1)).is_null() {
            many += 1;
        }
        assert!(many <= SIZE >> 20);
        assert_eq!(check_host(), Ok(()));
        assert!(!is_host_short(), "the host has memory");
    }

    /// Optimized code fails this if the compiler can remove the probe, so the profile of tests
    /// optimizes this crate.
    #[test]
    fn more_memory_than_any_host_has_is_refused() {
        assert_eq!(check_host_for(1 << 60), Err(HostShortage));
    }
}
