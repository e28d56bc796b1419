//! Sockets, packets with descriptors, and facts about processes.
//!
//! Descriptors of other processes, by number.

use std::io;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
    sockopt,
};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, Resource, pidfd_getfd, pidfd_open};

use crate::core::message::MAX_BATCH;
use crate::core::ticket::{Address, ProcessName};
use crate::error::FetchError;
use crate::system;

/// Space for the descriptors of one message.
const CONTROL: usize = rustix::cmsg_space!(ScmRights(MAX_BATCH));

/// Returns random bits from the kernel.
pub fn random() -> io::Result<[u8; 16]> {
    let mut bits = [0; 16];
    let mut filled = 0;
    while filled < bits.len() {
        let flags = rustix::rand::GetRandomFlags::empty();
        match rustix::rand::getrandom(&mut bits[filled..], flags) {
            Ok(count) => filled += count,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(bits)
}

/// Returns an unbound socket that keeps the boundaries of packets.
pub fn socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC;
    Ok(net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)
}

/// Returns the kernel's form of an address.
pub fn kernel_address(address: &Address) -> io::Result<SocketAddrUnix> {
    let name = address.name();
    Ok(match address {
        Address::Abstract(_) => SocketAddrUnix::new_abstract_name(&name)?,
        Address::Path(_) => SocketAddrUnix::new(name)?,
    })
}

/// Connects within `timeout`: a listener whose queue is full makes the caller wait.
pub fn connect(socket: impl AsFd, address: &Address, timeout: Duration) -> io::Result<()> {
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(timeout))?;
    let address = kernel_address(address)?;
    loop {
        match net::connect(&socket, &address) {
            Err(rustix::io::Errno::INTR) => {}
            result => return Ok(result?),
        }
    }
}

/// Sends one packet with descriptors, or nothing, without waiting. An `Err` with the kind
/// `WouldBlock` means that the receiver's queue is full.
pub fn send(
    socket: impl AsFd,
    bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> rustix::io::Result<()> {
    let mut space = [MaybeUninit::uninit(); CONTROL];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        let fits = control.push(SendAncillaryMessage::ScmRights(descriptors));
        assert!(fits, "{} descriptors are more than a batch", descriptors.len());
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    loop {
        match net::sendmsg(&socket, &[IoSlice::new(bytes)], &mut control, flags) {
            Err(rustix::io::Errno::INTR) => {}
            // A packet is sent whole or not at all.
            result => return result.map(|_| ()),
        }
    }
}

/// One received packet.
pub struct Packet {
    /// Bytes of the packet in the caller's buffer; 0 at the end of the connection.
    pub length: usize,
    /// The packet was longer than the buffer.
    pub is_cut: bool,
    /// The kernel dropped descriptors that this process may not have.
    pub lost_descriptors: bool,
    /// The received descriptors, closed on exec.
    pub descriptors: Vec<OwnedFd>,
}

/// Receives one packet with its descriptors without waiting.
pub fn receive(socket: impl AsFd, buffer: &mut [u8]) -> rustix::io::Result<Packet> {
    let mut space = [MaybeUninit::uninit(); CONTROL];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let received = loop {
        match net::recvmsg(&socket, &mut [IoSliceMut::new(buffer)], &mut control, flags) {
            Err(rustix::io::Errno::INTR) => {}
            result => break result?,
        }
    };
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(some) = message {
            descriptors.extend(some);
        }
    }
    Ok(Packet {
        length: received.bytes,
        is_cut: received.flags.contains(ReturnFlags::TRUNC),
        lost_descriptors: received.flags.contains(ReturnFlags::CTRUNC),
        descriptors,
    })
}

/// Receives one packet without waiting. The kernel drops descriptors that it has. `None` if it is
/// longer than the buffer.
pub fn receive_bytes(socket: impl AsFd, buffer: &mut [u8]) -> rustix::io::Result<Option<usize>> {
    let flags = RecvFlags::DONTWAIT | RecvFlags::TRUNC;
    loop {
        match net::recv(&socket, &mut *buffer, flags) {
            Err(rustix::io::Errno::INTR) => {}
            result => return result.map(|(_, length)| Some(length).filter(|l| *l <= buffer.len())),
        }
    }
}

/// Ends a connection for both ends, and for forked children that have the socket as well.
pub fn shut_down(socket: impl AsFd) {
    // It fails only if the connection has ended.
    let _ = net::shutdown(socket, net::Shutdown::Both);
}

/// Returns the soft limit of open files of this process.
pub fn open_file_limit() -> u64 {
    rustix::process::getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// Returns true if this process, or the machine, has no descriptor left.
pub fn is_file_limit(error: &io::Error) -> bool {
    let code = error.raw_os_error().map(rustix::io::Errno::from_raw_os_error);
    matches!(code, Some(rustix::io::Errno::MFILE | rustix::io::Errno::NFILE))
}

/// Returns the name of this process.
pub fn own_process() -> ProcessName {
    let pid = std::process::id();
    ProcessName { pid, start_ticks: start_and_state(pid).map_or(0, |(start, _)| start) }
}

/// Returns false if the process ended, or runs where this one cannot see it.
pub fn is_running(process: ProcessName) -> bool {
    start_and_state(process.pid).is_some_and(|(start, state)| {
        !matches!(state, b'Z' | b'X') && (process.start_ticks == 0 || start == process.start_ticks)
    })
}

/// Returns true if the process is stopped, by a signal or a debugger.
pub fn is_stopped(pid: u32) -> bool {
    start_and_state(pid).is_some_and(|(_, state)| matches!(state, b'T' | b't'))
}

/// Returns the PID namespace of this process; 0 if it is unknown.
pub fn pid_namespace() -> u64 {
    rustix::fs::stat("/proc/self/ns/pid").map_or(0, |stat| stat.st_ino)
}

/// Returns the start time and the state of a process.
fn start_and_state(pid: u32) -> Option<(u64, u8)> {
    let text = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
    parse_stat(&text)
}

/// The second field is the program's name in parentheses, and may have any bytes.
fn parse_stat(text: &[u8]) -> Option<(u64, u8)> {
    let end = text.iter().rposition(|byte| *byte == b')')?;
    let rest = std::str::from_utf8(text.get(end + 1..)?).ok()?;
    let mut fields = rest.split_ascii_whitespace();
    let state = *fields.next()?.as_bytes().first()?;
    // The state is field 3, the start time field 22.
    let start = fields.nth(18)?.parse().ok()?;
    Some((start, state))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_start_time_is_found_behind_any_name() {
        let numbers: String = (4..30).map(|field| format!(" {field}")).collect();
        for name in ["(a)", "(a) R 1 (b)", "(\n)"] {
            assert_eq!(parse_stat(format!("7 {name} S{numbers}").as_bytes()), Some((22, b'S')));
        }
        assert_eq!(parse_stat(b"7 (a"), None);
        assert_eq!(parse_stat(b"7 (a) S 1"), None);
    }

    #[test]
    fn this_process_runs_and_one_of_another_start_does_not() {
        let own = own_process();
        assert_ne!(own.start_ticks, 0);
        assert!(is_running(own));
        assert!(!is_running(ProcessName { start_ticks: own.start_ticks + 1, ..own }));
        assert!(!is_running(ProcessName { pid: u32::MAX, start_ticks: 1 }));
    }
}

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
mod pidfd_tests {
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
