//! Errors of files and engines.

use std::fmt;
use std::path::{Path, PathBuf};

use vramp_core::Bytes;

/// An error number of the kernel (`errno`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct OsCode(pub i32);

impl OsCode {
    /// Returns the error number of an error of the standard library, `EIO` if it has none.
    pub fn of(error: &std::io::Error) -> OsCode {
        OsCode(error.raw_os_error().unwrap_or(libc::EIO))
    }

    pub(super) fn last() -> OsCode {
        OsCode::of(&std::io::Error::last_os_error())
    }

    /// Returns true if the call may succeed when it is repeated.
    pub(super) fn is_transient(self) -> bool {
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

/// Kind of a disk error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DiskErrorKind {
    /// The disk is full, the quota is used up, or the file size limit is reached.
    Full,
    /// The disk could not read or write the blocks.
    Media,
    /// The file is shorter than expected.
    Short,
    /// The directory does not exist.
    Missing,
    /// Permission is denied.
    Denied,
    /// A file of this name exists.
    Exists,
    /// Any other error.
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
            DiskErrorKind::Media => {
                "the disk is failing: check the kernel log and use another disk"
            }
            DiskErrorKind::Short => "another process truncated the file: use a private directory",
            DiskErrorKind::Missing => "create the directory first",
            DiskErrorKind::Denied => "use a directory that this process can write",
            DiskErrorKind::Exists => "use a directory that no other program writes",
            DiskErrorKind::Other => "use a directory on a local disk",
        }
    }
}

/// An operation on a file failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}: {what} {len} at offset {offset} failed ({code}): {}", .file.display(), .kind.hint())]
pub struct DiskError {
    /// Kind of the error.
    pub kind: DiskErrorKind,
    /// Operation that failed.
    pub what: &'static str,
    /// Path of the file.
    pub file: PathBuf,
    /// Offset of the operation.
    pub offset: Bytes,
    /// Length of the operation.
    pub len: Bytes,
    /// Error number of the kernel.
    pub code: OsCode,
}

impl DiskError {
    /// Returns the error of an operation on the whole file.
    pub fn of_file(what: &'static str, file: &Path, code: OsCode) -> DiskError {
        DiskError::at(what, file, Bytes::ZERO, Bytes::ZERO, code)
    }

    /// Returns the error of an operation on a range of the file.
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

/// The kernel does not support or allow an engine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{engine} is not available ({code}): use the threads engine, or allow io_uring \
     (kernel.io_uring_disabled, the container's seccomp profile)"
)]
pub struct IoUnavailable {
    /// Name of the engine.
    pub engine: &'static str,
    /// Error number of the kernel.
    pub code: OsCode,
}
