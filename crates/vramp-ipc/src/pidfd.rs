//! Descriptors of other processes, by number.

use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use crate::error::FetchError;
use crate::system;

/// Returns a copy of another process's descriptor, by the number that it has there. Two system calls.
///
/// It needs no socket and no thread of the other process, but the right to trace it, which
/// containers and the Yama module take away. The caller ensures that the process keeps the
/// descriptor until this returns.
///
/// # Errors
///
/// [`FetchError::NotPermitted`] and [`FetchError::Unsupported`] mean that a
/// [`Ticket`](crate::Ticket) has to be opened instead.
pub fn fetch_descriptor(pid: u32, descriptor: i32) -> Result<OwnedFd, FetchError> {
    let process = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let process = process.ok_or(FetchError::ProcessGone { pid })?;
    pidfd_open(process, PidfdFlags::empty())
        .and_then(|process| pidfd_getfd(process, descriptor, PidfdGetfdFlags::empty()))
        .map_err(|error| fetch_error(pid, descriptor, error))
}

fn fetch_error(pid: u32, descriptor: i32, error: Errno) -> FetchError {
    match error {
        Errno::PERM | Errno::ACCESS => FetchError::NotPermitted { pid },
        Errno::SRCH => FetchError::ProcessGone { pid },
        Errno::BADF => FetchError::NoSuchDescriptor { pid, descriptor },
        Errno::NOSYS => FetchError::Unsupported,
        Errno::MFILE | Errno::NFILE => {
            FetchError::TooManyOpenFiles { limit: system::open_file_limit() }
        }
        error => FetchError::System { pid, descriptor, source: error.into() },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_error_of_the_kernel_has_a_meaning() {
        let error = |code| fetch_error(5, 6, code);
        assert!(matches!(error(Errno::PERM), FetchError::NotPermitted { pid: 5 }));
        assert!(matches!(error(Errno::SRCH), FetchError::ProcessGone { pid: 5 }));
        assert!(matches!(error(Errno::NOSYS), FetchError::Unsupported));
        assert!(matches!(error(Errno::MFILE), FetchError::TooManyOpenFiles { .. }));
        assert!(matches!(error(Errno::IO), FetchError::System { .. }));
        let missing = error(Errno::BADF);
        assert!(matches!(missing, FetchError::NoSuchDescriptor { pid: 5, descriptor: 6 }));
    }

    #[test]
    fn a_process_that_cannot_exist_is_gone() {
        for pid in [0, u32::MAX] {
            let found = fetch_descriptor(pid, 0);
            assert!(matches!(found, Err(FetchError::ProcessGone { .. })), "{found:?}");
        }
    }
}
