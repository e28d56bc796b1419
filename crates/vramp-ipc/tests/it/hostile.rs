//! Peers that break the rules: they lose their connection, and nothing else happens.

use std::os::fd::OwnedFd;

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recv,
    send, socket_with,
};
use vramp_ipc::{Server, Ticket};

use crate::child::is_alone;
use crate::common::*;

pub const OPEN_MOST: u16 = 64;

/// Connects without this crate.
pub fn raw_connection(ticket: &Ticket) -> OwnedFd {
    let bytes = ticket.to_bytes();
    assert_eq!(bytes[..3], [1, 0, 16], "an abstract address");
    let digits: String = bytes[3..19].iter().map(|byte| format!("{byte:02x}")).collect();
    let name = SocketAddrUnix::new_abstract_name(format!("vramp-{digits}").as_bytes()).unwrap();
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    connect(&socket, &name).unwrap();
    socket
}

/// The bytes of a request that opens the ticket.
pub fn open_request(ticket: &Ticket, sequence: u32, most: u16) -> Vec<u8> {
    let bytes = ticket.to_bytes();
    let (grant, secret) = (0_u64, &bytes[bytes.len() - 16..]);
    let mut out = vec![1, 1];
    out.extend(sequence.to_le_bytes());
    out.extend(ticket.export().to_le_bytes());
    out.extend(grant.to_le_bytes());
    out.extend(secret);
    out.extend(most.to_le_bytes());
    out
}

/// A request about the first open of a connection.
pub fn request(kind: u8, rest: &[u8]) -> Vec<u8> {
    let mut out = vec![1, kind, 9, 0, 0, 0];
    out.extend(1_u64.to_le_bytes());
    out.extend(rest);
    out
}

/// Waits for the end of the connection, and skips replies.
fn wait_for_end(socket: &OwnedFd) {
    let mut buffer = vec![0; 40_000];
    loop {
        match recv(socket, &mut buffer, RecvFlags::empty()) {
            Ok((0, _)) | Err(rustix::io::Errno::CONNRESET) => return,
            Ok(_) => {}
            Err(error) => panic!("{error}"),
        }
    }
}

fn says(socket: &OwnedFd, bytes: &[u8]) {
    send(socket, bytes, SendFlags::NOSIGNAL).unwrap();
}

#[test]
fn a_peer_that_breaks_a_rule_loses_its_connection_and_its_opens() {
    let server = Server::new().unwrap();
    let source = Files::new(&[1; 40_000], 5);
    let published = server.publish(source.clone()).unwrap();
    let ticket = published.ticket();
    let other = connections();
    let kept = other.open(&ticket).unwrap();
    let past_the_end = 40_000_u32.to_le_bytes();
    let batch = |first: u32, most: u16| {
        request(3, &[&first.to_le_bytes()[..], &most.to_le_bytes()].concat())
    };
    let broken = [
        b"garbage".to_vec(),
        vec![0; 65],
        vec![0xff; 60_000],
        request(9, b""),
        request(4, b"longer than a close"),
        request(2, &past_the_end),
        batch(5, 1),
        batch(0, 0),
        batch(u32::MAX, 1),
        [&request(4, b"")[..6], &7_u64.to_le_bytes()].concat(),
    ];
    for (times, bytes) in broken.iter().enumerate() {
        let socket = raw_connection(&ticket);
        says(&socket, &open_request(&ticket, 1, OPEN_MOST));
        assert!(published.wait_opened(times as u64 + 2, soon()));
        says(&socket, bytes);
        wait_for_end(&socket);
        wait_until("its open is closed", || published.opens() == 1);
    }
    // A close without an open, and a second close.
    for closes in [1, 2] {
        let socket = raw_connection(&ticket);
        if closes == 2 {
            says(&socket, &open_request(&ticket, 1, 0));
        }
        for _ in 0..closes {
            says(&socket, &request(4, b""));
        }
        wait_for_end(&socket);
    }
    assert_eq!((published.opens(), source.released()), (1, 0));
    drop(kept);
    assert!(published.wait_released(soon()));
}

#[test]
fn random_messages_leave_nothing_open() {
    if !is_alone("hostile::random_messages_leave_nothing_open") {
        return;
    }
    let server = Server::new().unwrap();
    let published = server.publish(Files::new(&[1; 40_000], 300)).unwrap();
    let ticket = published.ticket();
    let before = descriptors();
    let mut random = fastrand::Rng::with_seed(3);
    for _ in 0..3_000 {
        let socket = raw_connection(&ticket);
        let opens = random.u32(0..3);
        for sequence in 0..opens {
            says(&socket, &open_request(&ticket, sequence, random.u16(..)));
        }
        for _ in 0..random.usize(0..6) {
            let first = random.u32(0..310).to_le_bytes();
            let mut bytes = match random.u8(0..4) {
                0 => request(3, &[&first[..], &random.u16(..).to_le_bytes()].concat()),
                1 => request(2, &random.u32(0..50_000).to_le_bytes()),
                2 => request(4, b""),
                _ => open_request(&ticket, 5, random.u16(..)),
            };
            if random.bool() {
                let at = random.usize(..bytes.len());
                bytes[at] = random.u8(..);
            }
            // The server may have ended the connection already.
            let _ = send(&socket, &bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
        }
    }
    wait_until("all connections ended", || server.connections() == 0);
    assert!(published.wait_released(soon()));
    assert!(published.ever_opened() > 1_000);
    assert_eq!(descriptors(), before);
    // It serves as before.
    receive_all(&mut connections().open(&ticket).unwrap()).unwrap();
}
