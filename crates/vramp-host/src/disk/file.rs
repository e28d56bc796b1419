//! A file of whole blocks that this process owns while it is open.

use std::fs::{File, OpenOptions, TryLockError};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{AtFlags, FallocateFlags, OFlags, StatxFlags};
use vramp_core::Bytes;

use super::progress::{Next, Progress};
use super::{Direction, DiskError, DiskErrorKind, OsCode};
use crate::{HostMemory, HostSpan, PageKind};

/// Alignment of offsets, lengths and memory. No disk in use needs more.
pub const DISK_BLOCK: Bytes = Bytes::kib(4);

/// Maximum bytes of one system call. The kernel moves less than 2 GiB.
pub(super) const MAX_CALL: Bytes = Bytes::gib(1);

/// A file that this process created, keeps locked, and unlinks when it is dropped.
///
/// The lock (`flock`) ends with the process. A file with a name of vramp that can be locked was
/// left behind by a process that ended.
#[derive(Debug)]
pub struct DirectFile {
    file: File,
    path: PathBuf,
    direct: bool,
    named: AtomicBool,
}

impl DirectFile {
    /// Creates an empty file that only this user can read. It bypasses the page cache if the
    /// filesystem supports that in blocks of 4 KiB ([`is_direct`](DirectFile::is_direct)).
    ///
    /// # Errors
    /// The file exists, or cannot be created or locked.
    pub fn create(path: &Path) -> Result<DirectFile, DiskError> {
        let made = options().create_new(true).custom_flags(libc::O_NOFOLLOW).open(path);
        let file = made
            .map_err(|error| DiskError::of_file("creating the file", path, OsCode::of(&error)))?;
        let file = DirectFile::own(file, path, true)?;
        // Another process that removes abandoned files may have unlinked it before it was locked.
        match file.file.metadata() {
            Ok(known) if known.nlink() > 0 => Ok(file),
            _ => Err(DiskError::of_file("locking the file", path, OsCode(libc::EEXIST))),
        }
    }

    /// Creates a file without a name, which never outlives the process. On a filesystem without
    /// `O_TMPFILE` the file has its name for a moment. Errors refer to it by `path`.
    ///
    /// # Errors
    /// As [`create`](DirectFile::create).
    pub fn create_unnamed(path: &Path) -> Result<DirectFile, DiskError> {
        let dir = path.parent().unwrap_or(Path::new("."));
        match options().custom_flags(libc::O_TMPFILE).open(dir) {
            Ok(file) => DirectFile::own(file, path, false),
            Err(_) => {
                let file = DirectFile::create(path)?;
                file.unlink()?;
                Ok(file)
            }
        }
    }

    fn own(file: File, path: &Path, named: bool) -> Result<DirectFile, DiskError> {
        // From here on `file` owns the file and removes it.
        let named = AtomicBool::new(named);
        let mut file = DirectFile { file, path: path.into(), direct: false, named };
        file.file.try_lock().map_err(|why| {
            let code = match why {
                TryLockError::WouldBlock => OsCode(libc::EEXIST),
                TryLockError::Error(why) => OsCode::of(&why),
            };
            DiskError::of_file("locking the file", path, code)
        })?;
        file.direct = file.bypass_cache();
        Ok(file)
    }

    /// Sets `O_DIRECT` if it works in blocks of 4 KiB, and returns whether it is set. Not set by
    /// `open`, because a filesystem that refuses it there may leave a file behind.
    fn bypass_cache(&self) -> bool {
        let asked = StatxFlags::BASIC_STATS | StatxFlags::DIOALIGN;
        if let Ok(known) = rustix::fs::statx(&self.file, "", AtFlags::EMPTY_PATH, asked)
            && known.stx_mask & StatxFlags::DIOALIGN.bits() != 0
        {
            let fits = |align: u32| align != 0 && align <= DISK_BLOCK.count() as u32;
            if !fits(known.stx_dio_offset_align) || !fits(known.stx_dio_mem_align) {
                return false;
            }
        }
        rustix::fs::fcntl_getfl(&self.file)
            .and_then(|flags| rustix::fs::fcntl_setfl(&self.file, flags | OFlags::DIRECT))
            .is_ok()
    }

    /// Allocates the blocks for `len` bytes. Writes zeros if the filesystem cannot preallocate.
    ///
    /// # Errors
    /// The disk is full. Some blocks may be allocated.
    pub fn preallocate(&self, len: Bytes) -> Result<(), DiskError> {
        let failed = |code| DiskError::at("preallocating", &self.path, Bytes::ZERO, len, code);
        // The kernel kills a process that exceeds its file size limit.
        let limit = rustix::process::getrlimit(rustix::process::Resource::Fsize).current;
        if limit.is_some_and(|limit| len.count() > limit) {
            return Err(failed(OsCode(libc::EFBIG)));
        }
        // Some filesystems allocate all free blocks before they fail.
        let stats = rustix::fs::fstatvfs(&self.file).map_err(|code| failed(code.into()))?;
        if len.count() > stats.f_bavail.saturating_mul(stats.f_frsize) {
            return Err(failed(OsCode(libc::ENOSPC)));
        }
        loop {
            match rustix::fs::fallocate(&self.file, FallocateFlags::empty(), 0, len.count()) {
                Ok(()) => return Ok(()),
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) => break,
                Err(code) => return Err(failed(code.into())),
            }
        }
        self.write_zeros(len)
    }

    fn write_zeros(&self, len: Bytes) -> Result<(), DiskError> {
        let page = HostMemory::new(Bytes::mib(1), None, PageKind::Small);
        let zeros = page.map_err(|_| {
            DiskError::of_file("allocating memory to preallocate", &self.path, OsCode(libc::ENOMEM))
        })?;
        let mut at = Bytes::ZERO;
        while at < len {
            let now = (len - at).min(zeros.len());
            let span = HostSpan::new(&zeros, Bytes::ZERO, now)
                .expect("`now` is at most the size of the memory");
            self.transfer_now(Direction::Write, at, &span)?;
            at += now;
        }
        Ok(())
    }

    /// Transfers all of `span` in the calling thread.
    ///
    /// # Errors
    /// The read or write fails. Some bytes may have been transferred.
    pub fn transfer_now(
        &self,
        direction: Direction,
        offset: Bytes,
        span: &HostSpan,
    ) -> Result<(), DiskError> {
        let mut progress = Progress::new(span.len());
        loop {
            let part = next_part(span, &progress);
            let answer = self.call(direction, offset + progress.moved, &part);
            match progress.record(direction, answer) {
                Next::Continue => {}
                Next::Done => return Ok(()),
                Next::Failed(code) => {
                    return Err(self.failed(direction, offset, span.len(), code));
                }
            }
        }
    }

    /// Makes one system call.
    pub(super) fn call(
        &self,
        direction: Direction,
        offset: Bytes,
        span: &HostSpan,
    ) -> Result<Bytes, OsCode> {
        let (fd, at) = (self.raw(), offset.count() as i64);
        let (start, len) = (span.as_ptr().cast::<libc::c_void>(), span.len().count() as usize);
        let moved = match direction {
            // SAFETY: the span keeps its memory alive, and no reference points there.
            Direction::Read => unsafe { libc::pread(fd, start, len, at) },
            // SAFETY: as above.
            Direction::Write => unsafe { libc::pwrite(fd, start, len, at) },
        };
        u64::try_from(moved).map(Bytes::new).map_err(|_| OsCode::last())
    }

    /// Returns the error of a transfer. `code` is `None` at the end of the file.
    pub(super) fn failed(
        &self,
        direction: Direction,
        offset: Bytes,
        len: Bytes,
        code: Option<OsCode>,
    ) -> DiskError {
        let said = code.unwrap_or(OsCode(0));
        let error = DiskError::at(direction.what(), &self.path, offset, len, said);
        match code {
            Some(_) => error,
            None => DiskError { kind: DiskErrorKind::Short, ..error },
        }
    }

    /// Unlinks the file, if it has a name.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn unlink(&self) -> Result<(), DiskError> {
        if !self.named.swap(false, Ordering::Relaxed) {
            return Ok(());
        }
        std::fs::remove_file(&self.path)
            .map_err(|error| DiskError::of_file("unlinking", &self.path, OsCode::of(&error)))
    }

    /// Returns the length of the file.
    ///
    /// # Errors
    /// The metadata cannot be read.
    pub fn len(&self) -> Result<Bytes, DiskError> {
        let known = self.file.metadata();
        known.map(|known| Bytes::new(known.len())).map_err(|error| {
            DiskError::of_file("reading the length of", &self.path, OsCode::of(&error))
        })
    }

    /// Returns true if the length is zero.
    ///
    /// # Errors
    /// The metadata cannot be read.
    pub fn is_empty(&self) -> Result<bool, DiskError> {
        Ok(self.len()?.is_zero())
    }

    /// Returns the path it was created with.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns true if transfers bypass the page cache.
    pub fn is_direct(&self) -> bool {
        self.direct
    }

    /// Returns a pipe as a file, for tests of requests that stay in flight.
    #[cfg(test)]
    pub(super) fn of_pipe(file: File) -> DirectFile {
        DirectFile { file, path: "pipe".into(), direct: false, named: AtomicBool::new(false) }
    }

    pub(super) fn raw(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}

impl Drop for DirectFile {
    fn drop(&mut self) {
        // `drop` cannot return an error. A later search for abandoned files removes the file.
        let _ = self.unlink();
    }
}

fn options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o600);
    options
}

/// Returns the part of `span` that the next call transfers.
pub(super) fn next_part(span: &HostSpan, progress: &Progress) -> HostSpan {
    let now = progress.left().min(MAX_CALL);
    span.part(progress.moved, now).expect("no more is moved than the span holds")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(byte: u8) -> HostSpan {
        let memory = HostMemory::new(DISK_BLOCK, None, PageKind::Small).unwrap();
        memory.write(Bytes::ZERO, &[byte; 4096]).unwrap();
        HostSpan::new(&memory, Bytes::ZERO, DISK_BLOCK).unwrap()
    }

    #[test]
    fn a_file_keeps_what_is_written_and_loses_its_name_when_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        let file = DirectFile::create(&path).unwrap();
        assert!(file.is_empty().unwrap());
        file.preallocate(Bytes::mib(1)).unwrap();
        assert_eq!(file.len().unwrap(), Bytes::mib(1));
        file.transfer_now(Direction::Write, DISK_BLOCK, &page(7)).unwrap();
        let back = page(0);
        file.transfer_now(Direction::Read, DISK_BLOCK, &back).unwrap();
        let mut bytes = [0; 4096];
        back.read(Bytes::ZERO, &mut bytes).unwrap();
        assert_eq!(bytes, [7; 4096]);
        drop(file);
        assert!(!path.exists());
    }

    #[test]
    fn a_name_is_taken_once_and_a_living_owner_is_known_by_its_lock() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        let file = DirectFile::create(&path).unwrap();
        assert_eq!(DirectFile::create(&path).unwrap_err().kind, DiskErrorKind::Exists);
        assert!(File::open(&path).unwrap().try_lock().is_err());
        file.unlink().unwrap();
        assert!(!path.exists());
        // Another process may use the name by now.
        std::fs::write(&path, "other").unwrap();
        drop(file);
        assert!(path.exists());
    }

    #[test]
    fn an_unnamed_file_never_has_a_name_and_keeps_what_is_written() {
        let dir = tempfile::tempdir().unwrap();
        let file = DirectFile::create_unnamed(&dir.path().join("a")).unwrap();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        file.preallocate(Bytes::mib(1)).unwrap();
        file.transfer_now(Direction::Write, Bytes::ZERO, &page(7)).unwrap();
        let back = page(0);
        file.transfer_now(Direction::Read, Bytes::ZERO, &back).unwrap();
        let mut byte = [0];
        back.read(Bytes::ZERO, &mut byte).unwrap();
        assert_eq!(byte, [7]);
    }

    #[test]
    fn more_than_the_disk_has_is_full_before_a_block_is_taken() {
        let dir = tempfile::tempdir().unwrap();
        let file = DirectFile::create(&dir.path().join("a")).unwrap();
        let error = file.preallocate(Bytes::tib(1 << 20)).unwrap_err();
        assert_eq!(error.kind, DiskErrorKind::Full);
        assert!(file.is_empty().unwrap());
    }

    #[test]
    fn zeros_are_written_where_blocks_cannot_be_promised() {
        let dir = tempfile::tempdir().unwrap();
        let file = DirectFile::create(&dir.path().join("a")).unwrap();
        file.write_zeros(Bytes::kib(1028)).unwrap();
        assert_eq!(file.len().unwrap(), Bytes::kib(1028));
    }

    #[test]
    fn reading_past_the_end_says_that_the_file_is_short() {
        let dir = tempfile::tempdir().unwrap();
        let file = DirectFile::create(&dir.path().join("a")).unwrap();
        let error = file.transfer_now(Direction::Read, Bytes::ZERO, &page(0)).unwrap_err();
        assert_eq!(error.kind, DiskErrorKind::Short);
    }

    #[test]
    fn errors_name_the_file_and_its_missing_directory() {
        let dir = tempfile::tempdir().unwrap();
        let missing = DirectFile::create(&dir.path().join("no/a")).unwrap_err();
        assert_eq!(missing.kind, DiskErrorKind::Missing);
        std::fs::write(dir.path().join("file"), "").unwrap();
        let file = DirectFile::create(&dir.path().join("file/a")).unwrap_err();
        assert_eq!(file.kind, DiskErrorKind::Missing);
        assert!(file.to_string().contains("file/a"), "{file}");
    }
}
