//! Memory of a file without a name that other processes map through descriptors.
//!
//! 1. [`SharedFile::export`] returns a descriptor of a range of the file. Its seek position is the
//!    first byte of the range, and it holds a lock on the range.
//! 2. Another process, or this one, receives the descriptor. [`SharedRange::of`] returns which range
//!    it stands for.
//! 3. The kernel drops the lock when the last duplicate of the descriptor and the last mapping made
//!    through it are gone, in any process and however that process ends.
//!    [`SharedFile::is_held`] returns false from then on.
//!
//! An export leaves nothing in this process but the descriptor, which the caller owns. Each function
//! costs a few system calls, whatever the number of exports.
//!
//! Deliberately absent: sending descriptors, and which range is in use.

use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{MemfdFlags, Mode, OFlags, SeekFrom};
use rustix::io::Errno;

use crate::mapped::{MapError, refused};

/// Size of the file, of which pages exist where they were written.
pub(crate) const FILE_LEN: u64 = 1 << 60;

/// Ranges begin at multiples of this; the rest of a seek position is the tag.
const ALIGN: u64 = 4096;

/// What the file of a [`SharedFile`] is for. Part of its name in `/proc`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SharedKind {
    /// It stores the bytes of its ranges.
    Bytes,
    /// Its ranges are numbers only.
    Numbers,
}

impl SharedKind {
    const fn name(self) -> &'static str {
        match self {
            SharedKind::Bytes => "vramp-simulator",
            SharedKind::Numbers => "vramp-simulator-numbers",
        }
    }
}

/// Identity of a file on this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileId {
    device: u64,
    inode: u64,
}

impl FileId {
    /// Returns the identity as bytes.
    pub fn to_bytes(self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.device.to_le_bytes());
        bytes[8..].copy_from_slice(&self.inode.to_le_bytes());
        bytes
    }

    /// Returns the identity that [`to_bytes`](FileId::to_bytes) returned as bytes.
    pub fn from_bytes(bytes: [u8; 16]) -> FileId {
        let both = u128::from_le_bytes(bytes);
        FileId { device: both as u64, inode: (both >> 64) as u64 }
    }

    fn of(file: BorrowedFd<'_>) -> rustix::io::Result<FileId> {
        let found = rustix::fs::fstat(file)?;
        Ok(FileId { device: found.st_dev, inode: found.st_ino })
    }
}

/// A file without a name, of which ranges are exported.
#[derive(Debug)]
pub struct SharedFile {
    file: OwnedFd,
    id: FileId,
}

impl SharedFile {
    /// Creates the file. Takes no memory yet.
    ///
    /// # Errors
    /// The kernel refuses the file.
    pub fn new(kind: SharedKind) -> Result<SharedFile, MapError> {
        let refused = refused("create a file for", FILE_LEN);
        let file = rustix::fs::memfd_create(kind.name(), MemfdFlags::CLOEXEC).map_err(&refused)?;
        rustix::fs::ftruncate(&file, FILE_LEN).map_err(&refused)?;
        let id = FileId::of(file.as_fd()).map_err(&refused)?;
        Ok(SharedFile { file, id })
    }

    /// Returns the file's identity.
    pub fn id(&self) -> FileId {
        self.id
    }

    pub(crate) fn fd(&self) -> &OwnedFd {
        &self.file
    }

    /// Returns a descriptor of `len` bytes from `offset` on, with a tag below 4096. `offset` is a
    /// multiple of 4096.
    ///
    /// # Errors
    /// The process has no descriptor left.
    ///
    /// # Panics
    /// If offset or tag are other numbers.
    pub fn export(&self, offset: u64, len: u64, tag: u16) -> Result<OwnedFd, MapError> {
        let fits = offset.is_multiple_of(ALIGN) && u64::from(tag) < ALIGN;
        assert!(fits, "offset {offset} with tag {tag}");
        let fd = self.hold(&[(offset, len)])?;
        let position = SeekFrom::Start(offset + u64::from(tag));
        rustix::fs::seek(&fd, position).map_err(refused("export", len))?;
        Ok(fd)
    }

    /// Returns a descriptor that holds `ranges`, each with offset and length. [`SharedRange::of`]
    /// refuses it.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub fn hold(&self, ranges: &[(u64, u64)]) -> Result<OwnedFd, MapError> {
        let fd = reopened(self.file.as_fd())?;
        for &(offset, len) in ranges {
            lock(&fd, offset, len).map_err(refused("export", len))?;
        }
        rustix::fs::seek(&fd, SeekFrom::Start(FILE_LEN)).map_err(refused("export", 0))?;
        Ok(fd)
    }

    /// Returns true while a descriptor or a mapping of another process, or of this one, holds a byte
    /// of the range.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn is_held(&self, offset: u64, len: u64) -> Result<bool, MapError> {
        Ok(locked(self.file.as_fd(), offset, len).map_err(refused("check", len))?.is_some())
    }
}

/// A range of a [`SharedFile`] of this process or of another one, held by a descriptor.
#[derive(Debug)]
pub struct SharedRange {
    fd: OwnedFd,
    /// File that the range lies in.
    pub file: FileId,
    /// What the file is for.
    pub kind: SharedKind,
    /// First byte of the range in the file.
    pub offset: u64,
    /// Number of bytes.
    pub len: u64,
    /// Tag of the export.
    pub tag: u16,
}

impl SharedRange {
    /// Returns the range that a descriptor of [`SharedFile::export`] stands for; `None` for any other
    /// descriptor. It holds the range by a duplicate.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub fn of(fd: BorrowedFd<'_>) -> Result<Option<SharedRange>, MapError> {
        let refused = refused("import", 0);
        let Some(kind) = kind_of(fd) else { return Ok(None) };
        let position = rustix::fs::tell(fd).map_err(&refused)?;
        let (offset, tag) = (position / ALIGN * ALIGN, (position % ALIGN) as u16);
        // A lock is seen only from another opening of the file.
        let other = reopened(fd)?;
        match locked(other.as_fd(), offset, 1).map_err(&refused)? {
            Some((start, len)) if start == offset => {
                let file = FileId::of(fd).map_err(&refused)?;
                let fd = rustix::io::fcntl_dupfd_cloexec(fd, 0).map_err(&refused)?;
                Ok(Some(SharedRange { fd, file, kind, offset, len, tag }))
            }
            _ => Ok(None),
        }
    }

    pub(crate) fn fd(&self) -> &OwnedFd {
        &self.fd
    }

    /// Returns another descriptor of the range.
    ///
    /// # Errors
    /// As of [`SharedFile::export`].
    pub fn export(&self) -> Result<OwnedFd, MapError> {
        let fd = reopened(self.fd.as_fd())?;
        lock(&fd, self.offset, self.len).map_err(refused("export", self.len))?;
        let position = SeekFrom::Start(self.offset + u64::from(self.tag));
        rustix::fs::seek(&fd, position).map_err(refused("export", self.len))?;
        Ok(fd)
    }

    /// Copies bytes from `offset` in the range on into `into`.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), MapError> {
        read(&self.fd, self.offset + offset, into)
    }

    /// Writes `from` into the range from `offset` on.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<(), MapError> {
        write(&self.fd, self.offset + offset, from)
    }
}

pub(crate) fn read(file: &OwnedFd, offset: u64, into: &mut [u8]) -> Result<(), MapError> {
    let len = into.len() as u64;
    let mut done = 0;
    while done < into.len() {
        let read = rustix::io::pread(file, &mut into[done..], offset + done as u64);
        match read.map_err(refused("read", len))? {
            // Another process truncated the file.
            0 => return Err(refused("read", len)(Errno::IO)),
            count => done += count,
        }
    }
    Ok(())
}

pub(crate) fn write(file: &OwnedFd, offset: u64, from: &[u8]) -> Result<(), MapError> {
    let len = from.len() as u64;
    let mut done = 0;
    while done < from.len() {
        let written = rustix::io::pwrite(file, &from[done..], offset + done as u64);
        done += written.map_err(refused("write", len))?;
    }
    Ok(())
}

/// Returns what a descriptor's file is for; `None` if it is none of a [`SharedFile`].
fn kind_of(fd: BorrowedFd<'_>) -> Option<SharedKind> {
    let link = rustix::fs::readlink(path_of(fd), Vec::new()).ok()?;
    let link = link.to_str().ok()?;
    let name = link.strip_prefix("/memfd:")?.strip_suffix(" (deleted)")?;
    [SharedKind::Bytes, SharedKind::Numbers].into_iter().find(|kind| kind.name() == name)
}

fn path_of(fd: BorrowedFd<'_>) -> String {
    format!("/proc/self/fd/{}", fd.as_raw_fd())
}

/// Opens the file of `fd` again, with a seek position and locks of its own.
fn reopened(fd: BorrowedFd<'_>) -> Result<OwnedFd, MapError> {
    rustix::fs::open(path_of(fd), OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
        .map_err(refused("open a descriptor of", 0))
}

/// Locks a range for as long as the opening of the file exists.
fn lock(fd: &OwnedFd, offset: u64, len: u64) -> rustix::io::Result<()> {
    let mut wanted = range(libc::F_RDLCK, offset, len);
    control(fd.as_fd(), libc::F_OFD_SETLK, &mut wanted)
}

/// Locks one byte, unless another opening of the file has a lock there.
pub(crate) fn lock_alone(fd: BorrowedFd<'_>, at: u64) -> rustix::io::Result<()> {
    control(fd, libc::F_OFD_SETLK, &mut range(libc::F_WRLCK, at, 1))
}

/// Returns offset and length of a lock in the range that another opening of the file holds.
pub(crate) fn locked(
    fd: BorrowedFd<'_>,
    offset: u64,
    len: u64,
) -> rustix::io::Result<Option<(u64, u64)>> {
    let mut found = range(libc::F_WRLCK, offset, len);
    control(fd, libc::F_OFD_GETLK, &mut found)?;
    let held = found.l_type != libc::F_UNLCK as libc::c_short;
    Ok(held.then_some((found.l_start.cast_unsigned(), found.l_len.cast_unsigned())))
}

fn range(kind: libc::c_int, offset: u64, len: u64) -> libc::flock {
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: offset.cast_signed(),
        l_len: len.cast_signed(),
        l_pid: 0,
    }
}

fn control(
    fd: BorrowedFd<'_>,
    command: libc::c_int,
    lock: &mut libc::flock,
) -> rustix::io::Result<()> {
    // SAFETY: the descriptor is open, and for these commands the kernel reads and writes one `flock`,
    // which outlives the call.
    let result = unsafe { libc::fcntl(fd.as_raw_fd(), command, &raw mut *lock) };
    if result == 0 {
        return Ok(());
    }
    let code = std::io::Error::last_os_error().raw_os_error();
    Err(Errno::from_raw_os_error(code.unwrap_or(libc::EIO)))
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::time::{Duration, Instant};

    use super::*;

    const PAGE: u64 = 2 << 20;

    fn file() -> SharedFile {
        SharedFile::new(SharedKind::Bytes).unwrap()
    }

    /// Waits until the page at `offset` is held by no descriptor. A child that another test forks has
    /// copies of this program's descriptors until it ends.
    fn assert_not_held(file: &SharedFile, offset: u64) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while file.is_held(offset, PAGE).unwrap() {
            assert!(Instant::now() < deadline, "the page at {offset} is still held");
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_range_is_held_until_the_last_duplicate_is_closed() {
        let file = file();
        let first = file.export(PAGE, PAGE, 3).unwrap();
        let second = file.export(PAGE, PAGE, 3).unwrap();
        let third = second.try_clone().unwrap();
        let received = SharedRange::of(third.as_fd()).unwrap().unwrap();
        assert_eq!((received.offset, received.len, received.tag), (PAGE, PAGE, 3));
        assert_eq!((received.file, received.kind), (file.id(), SharedKind::Bytes));
        let again = received.export().unwrap();
        for descriptor in [first, second, third, again] {
            assert!(file.is_held(PAGE, PAGE).unwrap());
            drop(descriptor);
        }
        assert!(file.is_held(2 * PAGE - 1, 1).unwrap());
        assert!(!file.is_held(0, PAGE).unwrap() && !file.is_held(2 * PAGE, PAGE).unwrap());
        drop(received);
        assert_not_held(&file, PAGE);
    }

    #[test]
    fn other_descriptors_are_no_ranges() {
        let file = file();
        let held = file.hold(&[(0, PAGE), (3 * PAGE, PAGE)]).unwrap();
        assert!(file.is_held(3 * PAGE, 1).unwrap() && !file.is_held(PAGE, 2 * PAGE).unwrap());
        let plain = File::open("/proc/self/exe").unwrap();
        let foreign = rustix::fs::memfd_create("other", MemfdFlags::CLOEXEC).unwrap();
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let unlocked = reopened(file.fd().as_fd()).unwrap();
        rustix::fs::seek(&unlocked, SeekFrom::Start(PAGE)).unwrap();
        for fd in [held.as_fd(), plain.as_fd(), foreign.as_fd(), socket.as_fd(), unlocked.as_fd()] {
            assert!(SharedRange::of(fd).unwrap().is_none(), "{fd:?}");
        }
    }

    #[test]
    fn bytes_are_those_of_the_range() {
        let file = file();
        let fd = file.export(PAGE, PAGE, 0).unwrap();
        let range = SharedRange::of(fd.as_fd()).unwrap().unwrap();
        range.write(7, b"bytes").unwrap();
        let mut seen = [0; 5];
        read(file.fd(), PAGE + 7, &mut seen).unwrap();
        assert_eq!(&seen, b"bytes");
        write(file.fd(), PAGE + 8, b"Y").unwrap();
        range.read(7, &mut seen).unwrap();
        assert_eq!(&seen, b"bYtes");
    }

    #[test]
    fn ten_thousand_exports_that_were_closed_leave_no_descriptor() {
        let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
        let file = file();
        let before = open();
        for i in 0..10_000 {
            let fd = file.export(i * PAGE, PAGE, 0).unwrap();
            assert!(file.is_held(i * PAGE, PAGE).unwrap());
            drop(fd);
            assert_not_held(&file, i * PAGE);
        }
        // Other tests of this program open descriptors at the same time.
        assert!(open() < before + 100);
    }
}
