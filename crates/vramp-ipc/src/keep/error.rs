//! Errors of the keeper and of its clients.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use thiserror::Error;

use crate::directory::SharedDirectoryError;

/// A keeper could not be started.
#[derive(Debug, Error)]
pub enum KeepServeError {
    /// Another keeper has the directory.
    #[error("process {pid} is the keeper of this directory; use it, or stop it first")]
    AlreadyRunning {
        /// Its process; 0 if it is just starting.
        pid: u32,
    },
    /// The directory cannot be used.
    #[error(transparent)]
    Directory(#[from] SharedDirectoryError),
    /// The socket's path cannot be an address.
    #[error(
        "{} has {length} bytes; use an absolute directory, so that the path has {max} bytes at most",
        path.display()
    )]
    Path {
        /// The path.
        path: PathBuf,
        /// Its bytes.
        length: usize,
        /// The kernel's limit.
        max: usize,
    },
    /// The keeper belongs to the process that forked this one.
    #[error("the keeper belongs to the process that forked this one; start one here")]
    Forked,
    /// A system call failed.
    #[error("cannot {action}: {source}")]
    System {
        /// The call in words.
        action: &'static str,
        /// Its error.
        source: io::Error,
    },
}

/// A call of a keeper's client failed.
#[derive(Debug, Error)]
pub enum KeepError {
    /// No keeper runs in the directory.
    #[error("no keeper answers at {}; start `vramp keep`", socket.display())]
    NotRunning {
        /// The socket.
        socket: PathBuf,
    },
    /// The keeper has no entry of this name.
    #[error("the keeper has no entry '{name}'; `vramp keep list` names those that it has")]
    NoSuchEntry {
        /// The requested name.
        name: String,
    },
    /// Other clients have the lock, or the right to build.
    #[error(
        "'{name}' is in use by {}, and this call waited {waited:?}; wait longer, or end a process that is stopped",
        processes(holders)
    )]
    Busy {
        /// The entry.
        name: String,
        /// Processes that have the lock or the right; 16 at most. Empty while a new keeper waits for clients of
        /// the one before it.
        holders: Vec<u32>,
        /// How long the call waited.
        waited: Duration,
    },
    /// A client changed bytes in place and ended without a commit.
    #[error(
        "'{name}' is torn: process {pid} ended while it changed the bytes of epoch {epoch}; take the write \
         lock, write all of it and commit, or publish a new version"
    )]
    Torn {
        /// The entry.
        name: String,
        /// Epoch of the last commit.
        epoch: u64,
        /// The process; 0 if the keeper was restarted meanwhile.
        pid: u32,
    },
    /// The keeper's limit for the device leaves no room.
    #[error(
        "the keeper has {held} bytes of its limit of {limit} on this device, of which {evictable} are idle; \
         {asked} more do not fit: remove entries, end holds, or raise the limit"
    )]
    Full {
        /// Most bytes for the device.
        limit: u64,
        /// Bytes of versions and drafts.
        held: u64,
        /// Bytes of entries that may be evicted.
        evictable: u64,
        /// Bytes of this draft.
        asked: u64,
    },
    /// The entry's epoch is not newer at the deadline.
    #[error("'{name}' is still at epoch {epoch} after {waited:?}")]
    NotNewer {
        /// The entry.
        name: String,
        /// Its epoch; 0 if it has no current version.
        epoch: u64,
        /// How long the call waited.
        waited: Duration,
    },
    /// The hold has no write lock.
    #[error(
        "this hold of '{name}' has no write lock; take it before you change bytes, and then commit"
    )]
    NotLocked {
        /// The entry.
        name: String,
    },
    /// The hold has the write lock.
    #[error("this hold of '{name}' has the write lock; commit, or release it unchanged, first")]
    Uncommitted {
        /// The entry.
        name: String,
    },
    /// The text cannot name an entry or a device.
    #[error("'{name}' is no name: use 1 to 200 letters, digits and `._/:-`")]
    Name {
        /// The text.
        name: String,
    },
    /// The layout or the list of parts is too long.
    #[error("{found} {what} are more than the {most} of a version")]
    TooLong {
        /// What is too long.
        what: &'static str,
        /// Its length.
        found: usize,
        /// The most.
        most: usize,
    },
    /// The keeper ended, and no new one runs yet. What is mapped stays valid.
    #[error(
        "the keeper of '{name}' ended; start `vramp keep` again, and this hold restores itself"
    )]
    Adrift {
        /// The entry.
        name: String,
    },
    /// Client and keeper speak different versions.
    #[error(
        "the keeper speaks versions {} to {} and this program {} to {}; use the same version of vramp for both",
        theirs.0, theirs.1, ours.0, ours.1
    )]
    Version {
        /// Oldest and newest of this program.
        ours: (u64, u64),
        /// Oldest and newest of the keeper.
        theirs: (u64, u64),
    },
    /// The keeper belongs to another user.
    #[error(
        "the keeper runs as user {keeper} and this process as user {user}; use a directory of your own"
    )]
    OtherUser {
        /// Effective user of the keeper.
        keeper: u32,
        /// Effective user of this process.
        user: u32,
    },
    /// The path of the socket cannot be an address.
    #[error("{} is too long or relative; use a shorter absolute directory", socket.display())]
    Path {
        /// The path.
        socket: PathBuf,
    },
    /// The keeper did not answer.
    #[error("the keeper (process {pid}) did not answer for {waited:?}; it is stopped or busy")]
    TimedOut {
        /// The keeper.
        pid: u32,
        /// How long the call waited.
        waited: Duration,
    },
    /// A signal came while an [interruptible](super::Keeper::interruptible) call waited. What it waited for, it does
    /// not have.
    #[error("a signal interrupted the wait; call again")]
    Interrupted,
    /// A message has no meaning here.
    #[error("the keeper sent an unexpected message: {what}")]
    Protocol {
        /// What was wrong.
        what: &'static str,
    },
    /// No more descriptors can be opened.
    #[error("the {} has its limit of {limit} open files; raise RLIMIT_NOFILE (ulimit -n)", side(*is_keeper))]
    TooManyFiles {
        /// The keeper has reached its limit, and not this process.
        is_keeper: bool,
        /// The soft limit.
        limit: u64,
    },
    /// Descriptors that sockets hold for slow receivers reached the limit of the user.
    #[error(
        "more than {limit} descriptors of this user are on their way in sockets; end processes that do not \
         read, or raise RLIMIT_NOFILE (ulimit -n)"
    )]
    TooManyInFlight {
        /// The soft limit of open files.
        limit: u64,
    },
    /// The hold or draft belongs to the process that forked this one.
    #[error("the process that forked this one has it open; open it here")]
    Forked,
    /// A system call failed.
    #[error("cannot {action}: {source}")]
    System {
        /// The call in words.
        action: &'static str,
        /// Its error.
        source: io::Error,
    },
}

fn processes(pids: &[u32]) -> String {
    match pids {
        [] => "unknown processes".to_owned(),
        [pid] => format!("process {pid}"),
        pids => {
            let pids: Vec<String> = pids.iter().map(u32::to_string).collect();
            format!("processes {}", pids.join(", "))
        }
    }
}

fn side(is_keeper: bool) -> &'static str {
    if is_keeper { "keeper" } else { "process" }
}
