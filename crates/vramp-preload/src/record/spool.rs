//! The file that a process appends to while it runs.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use vramp_trace::spool::{HEADER_BYTES, header};

/// Bytes that are mapped and allocated on the disk at a time.
const WINDOW: usize = 4 << 20;

/// A file, mapped where it is written, so that what was written outlives a process that is killed.
#[derive(Debug)]
pub struct Spool {
    file: File,
    window: NonNull<u8>,
    /// Where the window begins in the file.
    start: u64,
    /// Bytes of the window that are mapped.
    length: usize,
    /// Bytes of the window that are written.
    used: usize,
}

// SAFETY: the mapping is the spool's own, and `&mut self` writes it.
unsafe impl Send for Spool {}

impl Spool {
    /// Creates the file of this process in a folder. A file of an earlier process of the same number stays, and the new
    /// one gets another name.
    pub fn create(folder: &Path) -> io::Result<Spool> {
        let pid = std::process::id();
        let mut names = std::iter::once(format!("{pid}.spool"))
            .chain((1..1000).map(|again| format!("{pid}-{again}.spool")));
        let file = loop {
            let name = names.next().ok_or(io::ErrorKind::AlreadyExists)?;
            let mut options = OpenOptions::new();
            match options.read(true).write(true).create_new(true).open(folder.join(name)) {
                Ok(file) => break file,
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
            }
        };
        let window = map(&file, 0, WINDOW)?;
        let mut spool = Spool { file, window, start: 0, length: WINDOW, used: 0 };
        spool.append(&header(u64::from(pid)))?;
        debug_assert_eq!(spool.used, HEADER_BYTES);
        Ok(spool)
    }

    /// Appends a record, or the header. Its first four bytes are written last, so that no reader sees part of it.
    ///
    /// # Errors
    /// The disk is full.
    pub fn append(&mut self, record: &[u8]) -> io::Result<()> {
        if record.len() > self.length - self.used {
            self.advance(record.len())?;
        }
        let (first, rest) = record.split_at(4);
        // SAFETY: `used` is inside the window.
        let place = unsafe { self.window.add(self.used) };
        // SAFETY: the record fits into the window.
        let after = unsafe { place.add(4) };
        // SAFETY: the window is mapped for writing and belongs to this process alone.
        unsafe { std::ptr::copy_nonoverlapping(rest.as_ptr(), after.as_ptr(), rest.len()) };
        // SAFETY: records are multiples of 8 bytes, so the place is aligned.
        let head = unsafe { AtomicU32::from_ptr(place.as_ptr().cast()) };
        let first = u32::from_ne_bytes(first.try_into().expect("four bytes"));
        head.store(first, Ordering::Release);
        self.used += record.len();
        Ok(())
    }

    /// Moves the window so that `room` bytes can follow what is written.
    fn advance(&mut self, room: usize) -> io::Result<()> {
        let end = self.start + self.used as u64;
        let start = end & !(PAGE - 1);
        let used = (end - start) as usize;
        let length = (used + room).max(WINDOW);
        let window = map(&self.file, start, length)?;
        self.unmap();
        (self.window, self.start, self.length, self.used) = (window, start, length, used);
        Ok(())
    }

    fn unmap(&mut self) {
        // SAFETY: the window is mapped with this length, and nothing refers to it.
        let _ = unsafe { libc::munmap(self.window.as_ptr().cast(), self.length) };
    }
}

impl Drop for Spool {
    fn drop(&mut self) {
        self.unmap();
    }
}

/// A multiple of every page size.
const PAGE: u64 = 64 << 10;

/// Maps a part of the file, whose bytes are allocated first: a write to a page that the disk has no room for would kill
/// the program.
fn map(file: &File, start: u64, length: usize) -> io::Result<NonNull<u8>> {
    if start + length as u64 > largest_file() {
        // The kernel would end the program by SIGXFSZ.
        return Err(io::Error::from_raw_os_error(libc::EFBIG));
    }
    // SAFETY: a descriptor and two numbers.
    let code = unsafe {
        libc::posix_fallocate(file.as_raw_fd(), start as libc::off_t, length as libc::off_t)
    };
    if code != 0 {
        return Err(io::Error::from_raw_os_error(code));
    }
    // SAFETY: a new mapping of a file of this process.
    let window = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            length,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            start as libc::off_t,
        )
    };
    if window == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    Ok(NonNull::new(window.cast()).expect("no mapping begins at zero"))
}

/// Returns the largest size of a file that the process may write (`ulimit -f`).
fn largest_file() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is valid for writing.
    let code = unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &mut limit) };
    if code == 0 { limit.rlim_cur } else { u64::MAX }
}

#[cfg(test)]
mod tests {
    use vramp_trace::spool::{Record, encode, read};

    use super::*;

    #[test]
    fn records_are_read_back_over_many_windows() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut spool = Spool::create(folder.path()).expect("room");
        let again = Spool::create(folder.path()).expect("another name");
        let name = vec![b'x'; 60_000];
        for count in 0..200 {
            let mut bytes = Vec::new();
            encode(&Record::Calls { count, name: &name }, &mut bytes);
            spool.append(&bytes).expect("room");
        }
        assert!(spool.start > 0);
        drop((spool, again));
        let path = folder.path().join(format!("{}.spool", std::process::id()));
        let bytes = std::fs::read(path).expect("written");
        let records = read(&bytes).expect("a spool");
        assert_eq!(records.count(), 200);
        assert_eq!(std::fs::read_dir(folder.path()).expect("a folder").count(), 2);
    }
}
