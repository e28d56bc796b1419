//! The process at the other end of a connected Unix socket.

use std::io;
use std::mem;
use std::num::NonZeroU32;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

/// User and process that connected a socket, or that listened for the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Process id; `None` if the process is in a pid namespace that this one cannot see.
    pub pid: Option<NonZeroU32>,
    /// Effective user id at the time of the connect or listen.
    pub uid: u32,
}

/// Returns user and process of the socket's other end, as the kernel recorded them. One system call.
///
/// # Errors
///
/// That of the system call, if it is no connected Unix socket.
pub fn peer(socket: impl AsFd) -> io::Result<Peer> {
    // A plain structure of libc: the wrapper of rustix has no value for a process that is invisible.
    let mut found = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut length = mem::size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes to `found`, which is that long.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut found).cast(),
            &raw mut length,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    let pid = u32::try_from(found.pid).ok().and_then(NonZeroU32::new);
    Ok(Peer { pid, uid: found.uid })
}

/// Returns a descriptor of the process at the socket's other end, readable once that process ended.
/// Forked children that still have the socket do not count. One or two system calls.
///
/// # Errors
///
/// That of the last system call: the process ended or is invisible, the kernel has no such
/// descriptors, or too many descriptors are open.
pub fn peer_process(socket: impl AsFd) -> io::Result<OwnedFd> {
    /// `SO_PEERPIDFD` of Linux 6.5.
    const PEER_PIDFD: libc::c_int = 77;
    let mut found: libc::c_int = -1;
    let mut length = mem::size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes to `found`, which is that long.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            PEER_PIDFD,
            (&raw mut found).cast(),
            &raw mut length,
        )
    };
    if result == 0 && found >= 0 {
        // SAFETY: the kernel just made the descriptor for this call; it sets close-on-exec itself.
        return Ok(unsafe { OwnedFd::from_raw_fd(found) });
    }
    let pid = peer(socket)?.pid.and_then(|pid| rustix::process::Pid::from_raw(pid.get() as i32));
    let pid = pid.ok_or_else(|| io::Error::from_raw_os_error(libc::ESRCH))?;
    Ok(rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty())?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_pair_of_sockets_has_this_process_at_both_ends() {
        let (left, right) = UnixStream::pair().unwrap();
        for end in [&left, &right] {
            let found = peer(end).unwrap();
            assert_eq!(found.pid.map(NonZeroU32::get), Some(std::process::id()));
            assert_eq!(found.uid, rustix::process::geteuid().as_raw());
            peer_process(end).unwrap();
        }
    }

    #[test]
    fn a_file_has_no_peer() {
        let file = std::fs::File::open("/dev/null").unwrap();
        assert_eq!(peer(&file).unwrap_err().raw_os_error(), Some(libc::ENOTSOCK));
        assert_eq!(peer_process(&file).unwrap_err().raw_os_error(), Some(libc::ENOTSOCK));
    }
}
