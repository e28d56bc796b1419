//! Errors, by operation.

use std::io;
use std::time::Duration;

use thiserror::Error;

use crate::system;

/// A server could not be started or used.
#[derive(Debug, Error)]
pub enum ServeError {
    /// A system call failed.
    #[error("cannot {action}: {source}")]
    System {
        /// The call in words.
        action: &'static str,
        /// Its error.
        source: io::Error,
    },
    /// The path of a socket in this directory cannot be an address.
    #[error(
        "a socket in {directory} has a path of {length} bytes; use an absolute directory, so that \
         the path has {max} bytes at most"
    )]
    Path {
        /// The caller's directory.
        directory: String,
        /// Bytes of the socket's path.
        length: usize,
        /// The kernel's limit.
        max: usize,
    },
    /// The server belongs to the process that forked this one.
    #[error(
        "the server belongs to the process that forked this one; make a server in this process"
    )]
    Forked,
    /// The export was withdrawn.
    #[error("the export was withdrawn; publish it again")]
    Withdrawn,
}

/// The bytes are no ticket.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error(
    "these {length} bytes are no ticket of this version; both processes need the same version of vramp"
)]
pub struct TicketError {
    /// Length of the rejected value.
    pub length: usize,
}

impl OpenError {
    /// Returns the error of a process that opens memory and can open no descriptor more.
    pub fn too_many_open_files() -> OpenError {
        OpenError::TooManyOpenFiles { side: Side::Importer, limit: system::open_file_limit() }
    }
}

/// The process that has too many descriptors open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The process that publishes.
    Exporter,
    /// The process that opens.
    Importer,
}

impl std::fmt::Display for Side {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Side::Exporter => "exporting",
            Side::Importer => "importing",
        })
    }
}

/// An export could not be opened, or not be received completely.
#[derive(Debug, Error)]
pub enum OpenError {
    /// The exporting process ended or closed its server.
    #[error("process {pid}, which exports the memory, ended or closed its server")]
    ExporterGone {
        /// The exporting process.
        pid: u32,
    },
    /// The process exists, or may exist, but its server does not answer at the address.
    #[error(
        "the server of process {pid} cannot be reached: it was closed, or the process is in another \
         network or mount namespace; give the server a directory that both processes see ({source})"
    )]
    Unreachable {
        /// The exporting process.
        pid: u32,
        /// Error of the connect.
        source: io::Error,
    },
    /// The export is no longer published.
    #[error("process {pid} withdrew the export; keep it published until it was opened")]
    Withdrawn {
        /// The exporting process.
        pid: u32,
    },
    /// The exporter's or the importer's checks failed.
    #[error("process {pid} and this one do not share memory: {reason}")]
    Refused {
        /// The exporting process.
        pid: u32,
        /// The check that failed.
        reason: Refusal,
    },
    /// The exporter's source returned an error.
    #[error("process {pid} cannot export the memory: {message}")]
    Source {
        /// The exporting process.
        pid: u32,
        /// The source's own message.
        message: String,
    },
    /// No more descriptors can be opened.
    #[error(
        "the {side} process has its limit of {limit} open files; raise RLIMIT_NOFILE (ulimit -n), \
         or receive smaller batches"
    )]
    TooManyOpenFiles {
        /// The process that reached its limit.
        side: Side,
        /// Its soft limit.
        limit: u64,
    },
    /// Descriptors that sockets hold for slow receivers reached the limit of the user.
    #[error(
        "more than {limit} descriptors of this user are on their way in sockets; a receiver does not \
         read, or RLIMIT_NOFILE (ulimit -n) of process {pid} is too low"
    )]
    TooManyInFlight {
        /// The exporting process.
        pid: u32,
        /// Its soft limit of open files.
        limit: u64,
    },
    /// This process opened that many exports of the exporter and did not close them.
    #[error("{limit} exports of process {pid} are open in this process; close some")]
    TooManyOpens {
        /// The exporting process.
        pid: u32,
        /// The limit for one connection.
        limit: u64,
    },
    /// The exporter did not answer in time.
    #[error("process {pid} did not answer within {timeout:?}; it is stopped or busy")]
    TimedOut {
        /// The exporting process.
        pid: u32,
        /// The limit of these [`Connections`](crate::Connections).
        timeout: Duration,
    },
    /// The exporter's messages have no meaning here.
    #[error("process {pid} sent an unexpected message: {what}")]
    Protocol {
        /// The exporting process.
        pid: u32,
        /// What was wrong.
        what: &'static str,
    },
    /// The export was opened by the process that forked this one.
    #[error("the export was opened by the process that forked this one; open its ticket here")]
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

/// The check that failed between two processes.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum Refusal {
    /// The ticket was not made by this exporter.
    #[error("the ticket's secret is wrong")]
    WrongSecret,
    /// The processes belong to different users.
    #[error("this process runs as user {importer}, the exporter as user {exporter}")]
    OtherUser {
        /// Effective user id of the exporter.
        exporter: u32,
        /// Effective user id of the importer.
        importer: u32,
    },
}

/// A descriptor of another process could not be fetched by its number.
#[derive(Debug, Error)]
pub enum FetchError {
    /// The kernel or the container forbids it.
    #[error(
        "no permission to take descriptors of process {pid} (ptrace access); open a ticket through \
         a socket"
    )]
    NotPermitted {
        /// The other process.
        pid: u32,
    },
    /// There is no such process.
    #[error("process {pid} has ended")]
    ProcessGone {
        /// The other process.
        pid: u32,
    },
    /// The process has no such descriptor.
    #[error("process {pid} has no open descriptor {descriptor}")]
    NoSuchDescriptor {
        /// The other process.
        pid: u32,
        /// The requested number.
        descriptor: i32,
    },
    /// The kernel is older than 5.6.
    #[error("this kernel has no pidfd_getfd; open a ticket through a socket")]
    Unsupported,
    /// No more descriptors can be opened here.
    #[error("this process has its limit of {limit} open files; raise RLIMIT_NOFILE (ulimit -n)")]
    TooManyOpenFiles {
        /// The soft limit.
        limit: u64,
    },
    /// Another error of the system calls.
    #[error("cannot take descriptor {descriptor} of process {pid}: {source}")]
    System {
        /// The other process.
        pid: u32,
        /// The requested number.
        descriptor: i32,
        /// The error.
        source: io::Error,
    },
}
