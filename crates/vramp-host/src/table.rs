//! Numbers in a file that several processes map and change by atomic instructions, and locks on bytes that
//! end with their process.
//!
//! 1. [`SharedTable::map`] maps the file, which grows to the table's length. New numbers are zero.
//! 2. [`SharedTable::number`] is read and changed by atomic instructions. No lock: a process that is
//!    stopped or killed between two instructions keeps no other from its next one.
//! 3. A thread waits on a *bell* until another process rings it, without polling
//!    ([`SharedTable::wait`], [`SharedTable::ring`]).
//! 4. [`lock_byte`] locks a byte of a file for as long as the descriptor's opening of the file exists, and
//!    [`is_byte_locked`] asks from another opening. The kernel ends the lock with the process, by SIGKILL
//!    too. With a [`PrivateFd`](crate::PrivateFd) a forked child does not keep it.
//!
//! A wait, a ring, a lock and a question are one system call each. A file that another program shortens
//! ends the processes that access it (SIGBUS).
//!
//! Deliberately absent: what the numbers mean, and where the file is.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use rustix::thread::futex;

use crate::shared;

/// Size of a [`SharedTable`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableShape {
    /// Numbers of 64 bits.
    pub numbers: usize,
    /// Bells, behind the numbers.
    pub bells: usize,
}

impl TableShape {
    fn bytes(self) -> usize {
        self.numbers * size_of::<u64>() + self.bells * size_of::<u32>()
    }
}

/// A mapped table. See the module's page.
#[derive(Debug)]
pub struct SharedTable {
    start: NonNull<AtomicU64>,
    shape: TableShape,
}

// SAFETY: it owns its mapping, whose contents are accessed by atomic instructions only.
unsafe impl Send for SharedTable {}

// SAFETY: as above.
unsafe impl Sync for SharedTable {}

impl SharedTable {
    /// Maps a file that is open for reading and writing. The mapping keeps that opening of the file, and
    /// locks made through it, in forked children too. 3 system calls.
    ///
    /// # Errors
    /// The kernel refuses: no space, or no addresses.
    ///
    /// # Panics
    /// If the table is empty.
    pub fn map(file: impl AsFd, shape: TableShape) -> io::Result<SharedTable> {
        let bytes = shape.bytes();
        assert!(bytes > 0, "an empty table");
        if (rustix::fs::fstat(&file)?.st_size.cast_unsigned() as usize) < bytes {
            // Two processes that do so at once set the same length.
            rustix::fs::ftruncate(&file, bytes as u64)?;
        }
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses addresses that nothing uses.
        let start =
            unsafe { rustix::mm::mmap(null_mut(), bytes, access, MapFlags::SHARED, &file, 0) };
        let start = NonNull::new(start?.cast::<AtomicU64>()).ok_or(Errno::NOMEM)?;
        Ok(SharedTable { start, shape })
    }

    /// Returns a number.
    ///
    /// # Panics
    /// If the table has no such number.
    #[inline]
    pub fn number(&self, at: usize) -> &AtomicU64 {
        assert!(at < self.shape.numbers, "number {at} of {:?}", self.shape);
        // SAFETY: it is in the mapping.
        let number = unsafe { self.start.add(at) };
        // SAFETY: the mapping lives as long as this object and starts at a page, so that the number is
        // aligned. All processes access it by atomic instructions of this size.
        unsafe { number.as_ref() }
    }

    /// Returns the number of rings of a bell so far, which wraps around. A caller takes it before it looks
    /// at the numbers, and waits with it.
    ///
    /// # Panics
    /// If the table has no such bell.
    pub fn rings(&self, bell: usize) -> u32 {
        self.bell(bell).load(Ordering::SeqCst)
    }

    fn bell(&self, at: usize) -> &AtomicU32 {
        assert!(at < self.shape.bells, "bell {at} of {:?}", self.shape);
        // SAFETY: the bells lie behind the numbers, in the mapping.
        let bells = unsafe { self.start.add(self.shape.numbers) }.cast::<AtomicU32>();
        // SAFETY: it is in the mapping.
        let bell = unsafe { bells.add(at) };
        // SAFETY: as in `number`; no number overlaps it.
        unsafe { bell.as_ref() }
    }

    /// Waits until the bell is rung, unless it was since [`rings`](SharedTable::rings) returned `seen`.
    /// Returns early for a signal, and after `timeout` (`None` for ever).
    ///
    /// # Panics
    /// If the table has no such bell.
    pub fn wait(&self, bell: usize, seen: u32, timeout: Option<Duration>) {
        // A time that the kernel cannot hold is for ever.
        let limit = timeout.and_then(|timeout| timeout.try_into().ok());
        // Every error is a reason to look again.
        let _ = futex::wait(self.bell(bell), futex::Flags::empty(), seen, limit.as_ref());
    }

    /// Rings a bell: wakes the threads of all processes that wait on it.
    ///
    /// # Panics
    /// If the table has no such bell.
    pub fn ring(&self, bell: usize) {
        let bell = self.bell(bell);
        bell.fetch_add(1, Ordering::SeqCst);
        // It fails for no valid address.
        let _ = futex::wake(bell, futex::Flags::empty(), i32::MAX.cast_unsigned());
    }
}

impl Drop for SharedTable {
    fn drop(&mut self) {
        // SAFETY: the mapping is this object's, and no reference into it is left.
        let unmapped =
            unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.shape.bytes()) };
        // A refusal leaves addresses in use.
        let _ = unmapped;
    }
}

/// Locks one byte of a file that is open for writing, whether the file has that byte or not. Returns false
/// if another opening of the file has locked it.
///
/// # Errors
/// The kernel or the file system has no such locks.
pub fn lock_byte(file: BorrowedFd<'_>, at: u64) -> io::Result<bool> {
    match shared::lock_alone(file, at) {
        Ok(()) => Ok(true),
        Err(Errno::AGAIN | Errno::ACCESS) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Returns true if an opening of the file other than this one has locked the byte.
///
/// # Errors
/// As of [`lock_byte`].
pub fn is_byte_locked(file: BorrowedFd<'_>, at: u64) -> io::Result<bool> {
    Ok(shared::locked(file, at, 1)?.is_some())
}

#[cfg(test)]
mod tests {
    use std::fs::{File, OpenOptions};
    use std::path::Path;

    use super::*;

    const SHAPE: TableShape = TableShape { numbers: 5, bells: 3 };

    fn open(path: &Path) -> File {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).open(path).unwrap()
    }

    #[test]
    fn two_mappings_of_a_file_have_the_same_numbers() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("table");
        let map = || SharedTable::map(open(&path), SHAPE).unwrap();
        let (one, two) = (map(), map());
        for at in 0..SHAPE.numbers {
            assert_eq!(one.number(at).swap(at as u64 + 1, Ordering::SeqCst), 0);
        }
        drop(one);
        let three = map();
        for at in 0..SHAPE.numbers {
            assert_eq!(two.number(at).load(Ordering::SeqCst), at as u64 + 1);
            assert_eq!(three.number(at).load(Ordering::SeqCst), at as u64 + 1);
        }
    }

    #[test]
    fn a_wait_ends_with_a_ring_of_its_bell_or_with_its_time() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("table");
        let map = || SharedTable::map(open(&path), SHAPE).unwrap();
        let (one, two) = (map(), map());
        let seen = one.rings(2);
        one.wait(2, seen, Some(Duration::from_millis(1)));
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| {
                while one.rings(2) == seen {
                    one.wait(2, seen, None);
                }
            });
            two.ring(1);
            assert!(!waits.is_finished());
            two.ring(2);
        });
        // It was rung before.
        one.wait(2, seen, None);
        assert_eq!((one.rings(0), one.rings(1), one.rings(2)), (0, 1, seen + 1));
    }

    #[test]
    fn a_byte_is_locked_by_one_opening_until_that_is_closed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("table");
        let (one, two) = (open(&path), open(&path));
        // Beyond the file's end.
        let at = (1 << 48) + 7;
        assert!(lock_byte(one.as_fd(), at).unwrap());
        assert!(lock_byte(one.as_fd(), at).unwrap());
        assert!(!lock_byte(two.as_fd(), at).unwrap());
        assert!(lock_byte(two.as_fd(), at + 1).unwrap());
        assert!(is_byte_locked(two.as_fd(), at).unwrap());
        assert!(!is_byte_locked(one.as_fd(), at).unwrap());
        drop(one);
        // A child that another test forks has copies of the descriptor until it ends.
        let deadline = std::time::Instant::now() + Duration::from_secs(60);
        while is_byte_locked(two.as_fd(), at).unwrap() {
            assert!(std::time::Instant::now() < deadline, "the byte is still locked");
            std::thread::yield_now();
        }
    }
}
