//! What a disk can answer instead of doing what it was asked.

use std::fmt;
use std::path::{Path, PathBuf};

use vramp_core::Bytes;

/// An error number of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct OsCode(pub i32);

impl OsCode {
    /// What a call of the standard library ran into.
    pub fn of(error: &std::io::Error) -> OsCode {
        OsCode(error.raw_os_error().unwrap_or(libc::EIO))
    }

    pub(super) fn last() -> OsCode {
        OsCode::of(&std::io::Error::last_os_error())
    }

    /// True for a call that may succeed if it is simply made again.
    pub(super) fn is_passing(self) -> bool {
        self.0 == libc::EINTR || self.0 == libc::EAGAIN
    }
}

impl From<rustix::io::Errno> for OsCode {
    fn from(code: rustix::io::Errno) -> OsCode {
        OsCode(code.raw_os_error())
    }
}

impl fmt::Display for OsCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        std::io::Error::from_raw_os_error(self.0).fmt(f)
    }
}

/// What kind of failure it was, and so what can be done about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DiskErrorKind {
    /// No blocks are left, or no quota, or the file may not be so large.
    Full,
    /// The disk could not read or write these blocks.
    Media,
    /// The file ends before the bytes that were asked for, or takes no more.
    Short,
    /// The directory does not exist.
    Missing,
    /// The process may not do this here.
    Denied,
    /// Something else has this name.
    Exists,
    /// Anything else.
    Other,
}

impl DiskErrorKind {
    fn of(code: OsCode) -> DiskErrorKind {
        match code.0 {
            libc::ENOSPC | libc::EDQUOT | libc::EFBIG => DiskErrorKind::Full,
            libc::EIO | libc::EREMOTEIO | libc::ENODATA | libc::EILSEQ | libc::EBADMSG => {
                DiskErrorKind::Media
            }
            libc::ENOENT | libc::ENOTDIR => DiskErrorKind::Missing,
            libc::EACCES | libc::EPERM | libc::EROFS => DiskErrorKind::Denied,
            libc::EEXIST => DiskErrorKind::Exists,
            _ => DiskErrorKind::Other,
        }
    }

    fn hint(self) -> &'static str {
        match self {
            DiskErrorKind::Full => {
                "free space there, raise the quota or `ulimit -f`, or use another disk"
            }
            DiskErrorKind::Media => "the disk is failing: look at the kernel's log, use another",
            DiskErrorKind::Short => "somebody cut the file: keep others out of the directory",
            DiskErrorKind::Missing => "make the directory first",
            DiskErrorKind::Denied => "use a directory that this process may write",
            DiskErrorKind::Exists => "keep others out of the directory",
            DiskErrorKind::Other => "use a directory on a local disk",
        }
    }
}

/// A file could not do what it was asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}: {len} from {offset} on: {what} ({code}): {}", .file.display(), .kind.hint())]
pub struct DiskError {
    /// What kind of failure.
    pub kind: DiskErrorKind,
    /// What was being done.
    pub what: &'static str,
    /// Which file.
    pub file: PathBuf,
    /// Where in it.
    pub offset: Bytes,
    /// How many bytes were asked for.
    pub len: Bytes,
    /// What the kernel said.
    pub code: OsCode,
}

impl DiskError {
    /// A failure of the whole file.
    pub fn of_file(what: &'static str, file: &Path, code: OsCode) -> DiskError {
        DiskError::at(what, file, Bytes::ZERO, Bytes::ZERO, code)
    }

    /// A failure in one place of a file.
    pub fn at(
        what: &'static str,
        file: &Path,
        offset: Bytes,
        len: Bytes,
        code: OsCode,
    ) -> DiskError {
        DiskError { kind: DiskErrorKind::of(code), what, file: file.into(), offset, len, code }
    }
}

/// The kernel does not offer an engine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{engine} cannot be used ({code}): choose the threads, or allow it (kernel.io_uring_disabled, \
     the container's seccomp profile)"
)]
pub struct IoUnavailable {
    /// Which engine.
    pub engine: &'static str,
    /// What the kernel said.
    pub code: OsCode,
}
