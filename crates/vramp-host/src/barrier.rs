//! A memory barrier of which one side is nearly free.
//!
//! Two threads that each write one place and then read the place of the other may both miss the
//! other's write, unless each has a barrier between. Where one side is a fast path and the other is
//! rare, the rare side can make the kernel run the barrier on every core:
//!
//! 1. The fast path calls [`light`] between its write and its read: no instruction, once Linux has
//!    registered the process for `membarrier`; a fence otherwise.
//! 2. The rare path calls [`heavy`]: a system call that interrupts the cores on which threads of the
//!    process run; microseconds.
//!
//! Where the kernel or a sandbox forbids `membarrier` from the start, both are fences. Where it is
//! forbidden later, [`heavy`] takes away the right to write a page: the kernel interrupts the same
//! cores for that, so that they forget the page.
//!
//! Costs the same with any number of threads that do not run. Keeps one flag.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering, compiler_fence, fence};

use rustix::thread::{MembarrierCommand, membarrier};

/// True once `light` needs no instruction.
static REGISTERED: AtomicBool = AtomicBool::new(false);

/// Registers the process with the kernel, once. [`heavy`] does so too; calling this before the first
/// [`light`] makes that one cheap.
pub fn prepare() -> bool {
    static DONE: OnceLock<bool> = OnceLock::new();
    *DONE.get_or_init(|| {
        let registered = membarrier(MembarrierCommand::RegisterPrivateExpedited).is_ok();
        REGISTERED.store(registered, Ordering::Relaxed);
        registered
    })
}

/// Orders what the thread wrote before what it reads next, towards threads that call [`heavy`].
#[inline]
pub fn light() {
    match REGISTERED.load(Ordering::Relaxed) {
        true => compiler_fence(Ordering::SeqCst),
        false => fence(Ordering::SeqCst),
    }
}

/// Orders what the thread wrote before what it reads next, towards threads that call [`light`].
#[cold]
pub fn heavy() {
    fence(Ordering::SeqCst);
    if prepare() && membarrier(MembarrierCommand::PrivateExpedited).is_err() {
        page::interrupt_cores();
    }
    fence(Ordering::SeqCst);
}

mod page {
    use std::ptr::{NonNull, null_mut};
    use std::sync::{Mutex, PoisonError};

    use rustix::mm::{MapFlags, MprotectFlags, ProtFlags};

    struct Page(NonNull<u8>);

    // SAFETY: the page lives as long as the process, and is used by the holder of the lock alone.
    unsafe impl Send for Page {}

    const LEN: usize = 4096;

    /// Makes the kernel interrupt each core on which a thread of the process runs.
    ///
    /// # Panics
    /// If the kernel refuses a page or its protection: without a barrier the caller would use memory
    /// that other threads use.
    pub(super) fn interrupt_cores() {
        static PAGE: Mutex<Option<Page>> = Mutex::new(None);
        let mut page = PAGE.lock().unwrap_or_else(PoisonError::into_inner);
        let Page(start) = page.get_or_insert_with(|| {
            let rights = ProtFlags::READ | ProtFlags::WRITE;
            // SAFETY: it maps new memory.
            let new =
                unsafe { rustix::mm::mmap_anonymous(null_mut(), LEN, rights, MapFlags::PRIVATE) };
            let new = new.expect("the kernel gives one page");
            Page(NonNull::new(new.cast()).expect("memory is not mapped at null"))
        });
        let both = MprotectFlags::READ | MprotectFlags::WRITE;
        // SAFETY: the page is this module's own.
        unsafe { rustix::mm::mprotect(start.as_ptr().cast(), LEN, both) }
            .expect("a page may be written");
        // Only a page that was written is known to a core.
        // SAFETY: the page is mapped, and may be written since the call above.
        unsafe { start.as_ptr().write_volatile(1) };
        // SAFETY: the page is this module's own.
        unsafe { rustix::mm::mprotect(start.as_ptr().cast(), LEN, MprotectFlags::READ) }
            .expect("a page need not be written");
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::atomic::AtomicU32;
    use std::thread;

    use super::*;

    /// Two threads write and then read each other's place, with these barriers between. Returns how
    /// often both missed the other's write.
    fn both_missed(on_one: fn(), on_other: fn()) -> u32 {
        let places = [const { AtomicU32::new(0) }; 2];
        let both = Barrier::new(2);
        let rounds = 1..=3000;
        let side = |own: usize, barrier: fn()| {
            let write = |round: u32| {
                both.wait();
                places[own].store(round, Ordering::Relaxed);
                barrier();
                let seen = places[1 - own].load(Ordering::Relaxed);
                both.wait();
                seen != round
            };
            rounds.clone().map(write).collect::<Vec<bool>>()
        };
        let (one, other) = thread::scope(|scope| {
            let other = scope.spawn(|| side(1, on_other));
            (side(0, on_one), other.join().unwrap())
        });
        one.iter().zip(&other).filter(|(one, other)| **one && **other).count() as u32
    }

    #[test]
    fn of_two_threads_at_least_one_sees_what_the_other_wrote() {
        prepare();
        assert_eq!(both_missed(light, heavy), 0);
        assert_eq!(both_missed(light, page::interrupt_cores), 0);
    }

    #[test]
    fn a_process_that_is_registered_once_stays_so() {
        assert_eq!(prepare(), prepare());
        assert_eq!(REGISTERED.load(Ordering::Relaxed), prepare());
    }
}
