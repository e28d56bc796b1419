//! Directories that only one user may use, in which processes find each other.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use thiserror::Error;

use crate::system;

/// A directory in which processes find each other cannot be used.
#[derive(Debug, Error)]
pub enum SharedDirectoryError {
    /// The directory belongs to another user.
    #[error("{} belongs to user {owner} and this process runs as user {user}; use a directory of your own", path.display())]
    OtherUser {
        /// The directory.
        path: PathBuf,
        /// Its owner.
        owner: u32,
        /// Effective user of this process.
        user: u32,
    },
    /// Other users may use the directory.
    #[error(
        "{} can be used by other users (mode {mode:o}); use a directory of your own, or run `chmod 700 {}` if it is yours \
         alone", path.display(), path.display()
    )]
    Mode {
        /// The directory.
        path: PathBuf,
        /// Its permissions.
        mode: u32,
    },
    /// The directory is on a file system that several machines or virtual machines may share.
    #[error(
        "{} is on a file system of type {kind:#x}, which other machines may share; use a directory on a \
         local one, such as /dev/shm", path.display()
    )]
    Remote {
        /// The directory.
        path: PathBuf,
        /// The kernel's number of the file system.
        kind: u64,
    },
    /// The file system is full, or the user's quota.
    #[error("{} has no space for another file; free some, or use another directory", path.display())]
    Full {
        /// The directory.
        path: PathBuf,
    },
    /// No more descriptors can be opened.
    #[error(
        "this process has its limit of {limit} open files, and a wait takes up to 4; raise \
         RLIMIT_NOFILE (ulimit -n)"
    )]
    TooManyOpenFiles {
        /// The soft limit.
        limit: u64,
    },
    /// A system call failed.
    #[error("cannot {action} {}: {source}", path.display())]
    System {
        /// The call in words.
        action: &'static str,
        /// The directory or file.
        path: PathBuf,
        /// Its error.
        source: io::Error,
    },
}

/// File systems on which two kernels may see one pipe: NFS, SMB, FUSE, 9P, Ceph, Lustre, GPFS, AFS.
const REMOTE: [u64; 11] = [
    0x6969,
    0x517b,
    0xff53_4d42,
    0xfe53_4d42,
    0x6573_5546,
    0x0102_1997,
    0x00c3_6400,
    0x0bd0_0bd0,
    0x4750_4653,
    0x5346_414f,
    0x6b41_4653,
];

/// Returns true if `name` can be a part of a file's name.
pub fn is_name(name: &str) -> bool {
    let is_good = |byte: u8| byte.is_ascii_alphanumeric() || b"-_:.".contains(&byte);
    (1..=64).contains(&name.len()) && name.bytes().all(is_good)
}

/// Opens the directory `path` in `base`. Makes both, if they are missing.
pub fn open(base: &Path, path: &Path) -> Result<OwnedFd, SharedDirectoryError> {
    drop(open_private(base)?);
    let descriptor = open_private(path)?;
    // Programs that remove old files leave a locked directory alone. Not every file system has locks.
    let _ = rustix::fs::flock(&descriptor, FlockOperation::NonBlockingLockShared);
    Ok(descriptor)
}

/// Returns the directory, which is made if it is missing, after checks of its owner and mode.
fn open_private(path: &Path) -> Result<OwnedFd, SharedDirectoryError> {
    match rustix::fs::mkdir(path, Mode::RWXU) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(error) => return Err(system_error("make the directory", path, error)),
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let opened = rustix::fs::open(path, flags, Mode::empty());
    let directory = opened.map_err(|error| system_error("open the directory", path, error))?;
    let check = |error| system_error("check the directory", path, error);
    let stat = rustix::fs::fstat(&directory).map_err(check)?;
    let user = rustix::process::geteuid().as_raw();
    if stat.st_uid != user {
        return Err(SharedDirectoryError::OtherUser {
            path: path.into(),
            owner: stat.st_uid,
            user,
        });
    }
    let mode = stat.st_mode & 0o7777;
    if mode & 0o077 != 0 {
        return Err(SharedDirectoryError::Mode { path: path.into(), mode });
    }
    let kind = rustix::fs::fstatfs(&directory).map_err(check)?.f_type as u64;
    match REMOTE.contains(&kind) {
        true => Err(SharedDirectoryError::Remote { path: path.into(), kind }),
        false => Ok(directory),
    }
}

/// Returns random bits.
pub fn random() -> Result<u64, Errno> {
    let bits = system::random().map_err(errno_of)?;
    Ok(bits.iter().take(8).fold(0, |bits, byte| bits << 8 | u64::from(*byte)))
}

pub fn errno_of(error: io::Error) -> Errno {
    Errno::from_io_error(&error).unwrap_or(Errno::IO)
}

pub fn system_error(action: &'static str, path: &Path, error: Errno) -> SharedDirectoryError {
    let path = path.to_owned();
    match error {
        Errno::NOSPC | Errno::DQUOT => SharedDirectoryError::Full { path },
        Errno::MFILE | Errno::NFILE => {
            SharedDirectoryError::TooManyOpenFiles { limit: system::open_file_limit() }
        }
        error => SharedDirectoryError::System { action, path, source: error.into() },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_the_kernel_have_a_meaning() {
        let error = |code| system_error("list", Path::new("/a"), code);
        assert!(matches!(error(Errno::NOSPC), SharedDirectoryError::Full { .. }));
        assert!(matches!(error(Errno::DQUOT), SharedDirectoryError::Full { .. }));
        assert!(matches!(error(Errno::MFILE), SharedDirectoryError::TooManyOpenFiles { .. }));
        assert_eq!(
            error(Errno::ROFS).to_string(),
            "cannot list /a: Read-only file system (os error 30)"
        );
    }

    #[test]
    fn names_are_parts_of_file_names() {
        assert!(is_name("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6") && is_name("sim:h200"));
        for bad in ["", "a/b", "a b", &"a".repeat(65), "\u{e4}"] {
            assert!(!is_name(bad), "{bad}");
        }
    }
}
