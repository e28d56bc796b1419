//! Clients that break the rules, speak other versions or read nothing.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, connect, recv, sendmsg, socket_with,
};
use vramp_ipc::keep::{KeepError, Lock};

use super::*;

const HELLO: u8 = 1;
const OPEN: u8 = 2;
const DRAFT: u8 = 3;
const PUT_PARTS: u8 = 4;
const PUT_LAYOUT: u8 = 5;
const COMMIT: u8 = 6;
const LOCK: u8 = 8;
const GET_PARTS: u8 = 9;
const RESTORE: u8 = 16;
const RESTORED: u8 = 17;
const DONE: u8 = 64;
const FAILED: u8 = 65;

/// Builds a message without this crate.
struct Raw(Vec<u8>);

impl Raw {
    fn new(kind: u8, sequence: u32) -> Raw {
        let mut bytes = vec![kind];
        bytes.extend(sequence.to_le_bytes());
        Raw(bytes)
    }

    fn bytes(mut self, tag: u8, bytes: &[u8]) -> Raw {
        self.0.push(tag);
        self.0.extend((bytes.len() as u16).to_le_bytes());
        self.0.extend(bytes);
        self
    }

    fn number(self, tag: u8, value: u64) -> Raw {
        self.bytes(tag, &value.to_le_bytes())
    }
}

fn hello(oldest: u64, newest: u64) -> Raw {
    Raw::new(HELLO, 1).number(1, oldest).number(2, newest)
}

fn draft(name: &[u8]) -> Raw {
    let draft = Raw::new(DRAFT, 2).bytes(3, name).bytes(4, b"sim:h200").number(5, 8);
    draft.number(6, 0).number(8, 0)
}

fn commit(parts: u64) -> Raw {
    let commit = Raw::new(COMMIT, 3).bytes(11, &[5; 16]).bytes(12, &[0; 32]).number(9, 0);
    commit.number(14, parts).number(15, 0)
}

fn restore() -> Raw {
    let restore = Raw::new(RESTORE, 2).bytes(3, b"r").bytes(11, &[6; 16]).bytes(12, &[0; 32]);
    restore.bytes(4, b"sim:h200").number(5, 0).number(6, 0).number(9, 2)
}

fn raw(directory: &Path) -> OwnedFd {
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    connect(&socket, &SocketAddrUnix::new(directory.join("keep.sock")).unwrap()).unwrap();
    socket
}

fn greeted(directory: &Path) -> OwnedFd {
    let socket = raw(directory);
    tell(&socket, &hello(1, 1).0, &[]);
    assert_eq!(hear_kind(&socket), Some(DONE));
    socket
}

fn tell(socket: &OwnedFd, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) {
    let mut space = vec![std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(descriptors)));
    }
    let bytes = std::io::IoSlice::new(bytes);
    // The keeper may have closed the connection already.
    let _ = sendmsg(socket, &[bytes], &mut control, SendFlags::NOSIGNAL);
}

/// Returns the kind of the next reply; `None` at the end of the connection.
fn hear_kind(socket: &OwnedFd) -> Option<u8> {
    let mut buffer = vec![0; 40_000];
    match recv(socket, &mut buffer, RecvFlags::empty()) {
        Ok((0, _)) | Err(rustix::io::Errno::CONNRESET) => None,
        Ok(_) => Some(buffer[0]),
        Err(error) => panic!("{error}"),
    }
}

fn is_ended(socket: &OwnedFd) -> bool {
    while hear_kind(socket).is_some() {}
    true
}

/// A page as clients make it.
fn page(word: u64) -> OwnedFd {
    use rustix::fs::{MemfdFlags, SealFlags};
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let page = rustix::fs::memfd_create("page", flags).unwrap();
    rustix::fs::ftruncate(&page, 4096).unwrap();
    rustix::io::pwrite(&page, &word.to_ne_bytes(), 0).unwrap();
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&page, seals).unwrap();
    page
}

#[test]
fn programs_of_other_versions_are_told_and_unknown_fields_are_skipped() {
    let folder = folder();
    let (_server, keeper) = start(folder.path());
    drop(publish(&keeper, "w", &[b"1"], Lock::None));
    // A newer program that still speaks version 1, with fields that this keeper does not know.
    let newer = raw(folder.path());
    tell(&newer, &hello(1, 7).bytes(200, b"later").0, &[]);
    assert_eq!(hear_kind(&newer), Some(DONE));
    let open = Raw::new(OPEN, 2).bytes(201, b"what").bytes(3, b"w").number(8, 0).bytes(202, b"");
    tell(&newer, &open.0, &[]);
    assert_eq!(hear_kind(&newer), Some(DONE));
    // Programs that do not speak it.
    for (oldest, newest) in [(2, 7), (0, 0)] {
        let other = raw(folder.path());
        tell(&other, &hello(oldest, newest).0, &[]);
        assert_eq!(hear_kind(&other), Some(FAILED));
        tell(&other, &open_request().0, &[]);
        assert!(is_ended(&other));
    }
    // Nothing is done before the hello.
    let rude = raw(folder.path());
    tell(&rude, &open_request().0, &[]);
    assert!(is_ended(&rude));
}

fn open_request() -> Raw {
    Raw::new(OPEN, 2).bytes(3, b"w").number(8, 0)
}

#[test]
fn a_keeper_of_another_version_is_an_error_with_both_versions() {
    let folder = folder();
    let flags = SocketFlags::CLOEXEC;
    let listener = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    let address = SocketAddrUnix::new(folder.path().join("keep.sock")).unwrap();
    rustix::net::bind(&listener, &address).unwrap();
    rustix::net::listen(&listener, 4).unwrap();
    let keeper = Keeper::new(folder.path(), TIMEOUT);
    std::thread::scope(|scope| {
        let asks = scope.spawn(|| keeper.entries().unwrap_err());
        let socket = rustix::net::accept(&listener).unwrap();
        assert_eq!(hear_kind(&socket), Some(HELLO));
        let refusal = Raw::new(FAILED, 1).number(24, 101).number(1, 5).number(2, 9);
        tell(&socket, &refusal.0, &[]);
        let error = asks.join().unwrap();
        assert!(matches!(error, KeepError::Version { ours: (1, 1), theirs: (5, 9) }), "{error:?}");
    });
}

#[test]
fn a_client_that_breaks_a_rule_loses_its_connection_and_what_it_has() {
    if !is_alone("keep::hostile::a_client_that_breaks_a_rule_loses_its_connection_and_what_it_has")
    {
        return;
    }
    let folder = folder();
    let (server, keeper) = start(folder.path());
    let idle = descriptors();
    let file = memory(b"12345678");
    let put = |count: usize| {
        let lengths: Vec<u8> = (0..count).flat_map(|_| 8_u64.to_le_bytes()).collect();
        Raw::new(PUT_PARTS, 0).bytes(17, &lengths).0
    };
    let pipe: OwnedFd = std::io::pipe().unwrap().0.into();
    let (good, draft_page, socket_page) = (page(4), page(0), raw(folder.path()));
    type Step<'a> = (Vec<u8>, Vec<BorrowedFd<'a>>);
    let plain = |raw: Raw| -> Step<'_> { (raw.0, Vec::new()) };
    let file = file.as_fd();
    let drafted = || plain(draft(b"x"));
    let programs: Vec<Vec<Step<'_>>> = vec![
        vec![(b"garbage that is no message".to_vec(), vec![])],
        vec![(vec![0xff; 60_000], vec![])],
        vec![plain(Raw::new(99, 1))],
        // A name that is none, and no name.
        vec![plain(draft(b"a b"))],
        vec![plain(Raw::new(DRAFT, 2))],
        // Requests of a hold without one, and of a draft without one.
        vec![plain(Raw::new(LOCK, 2).number(9, 1).number(8, 0))],
        vec![plain(commit(0))],
        vec![(put(1), vec![file])],
        // Two drafts on one connection.
        vec![drafted(), drafted()],
        // Lengths without descriptors, and descriptors without lengths.
        vec![drafted(), (put(2), vec![file])],
        vec![drafted(), (put(0), vec![file, file])],
        // Less or more than announced.
        vec![drafted(), (put(1), vec![file]), (commit(2).0, vec![draft_page.as_fd()])],
        // No page.
        vec![drafted(), plain(commit(0))],
        // A length that is no length, and lengths whose sum is none.
        vec![drafted(), (Raw::new(PUT_PARTS, 0).bytes(17, &[1; 7]).0, vec![file])],
        vec![drafted(), (Raw::new(PUT_PARTS, 0).bytes(17, &[0xff; 16]).0, vec![file, file])],
        // Parts behind the last one, of an open version.
        vec![plain(open_request()), plain(Raw::new(GET_PARTS, 3).number(16, 9).number(14, 1))],
        // A version that was never committed, and other bytes than announced.
        vec![(restore().0, vec![draft_page.as_fd()])],
        vec![
            (restore().0, vec![good.as_fd()]),
            (put(1), vec![file]),
            plain(Raw::new(RESTORED, 3).number(14, 1).number(15, 0)),
        ],
        vec![plain(Raw::new(RESTORED, 3).number(14, 0).number(15, 0))],
        vec![plain(Raw::new(PUT_LAYOUT, 0).bytes(18, b"nothing"))],
    ];
    drop(publish(&keeper, "w", &[b"1"], Lock::None));
    wait_until("no hold is left", || server.connections() == 1);
    for (number, program) in programs.iter().enumerate() {
        let socket = greeted(folder.path());
        for (bytes, descriptors) in program {
            tell(&socket, bytes, descriptors);
        }
        assert!(is_ended(&socket), "program {number}");
    }
    // What is no page is refused, and the client goes on.
    for no_page in [file, pipe.as_fd(), socket_page.as_fd()] {
        let socket = greeted(folder.path());
        tell(&socket, &draft(b"x").0, &[]);
        tell(&socket, &commit(0).0, &[no_page]);
        assert_eq!((hear_kind(&socket), hear_kind(&socket)), (Some(DONE), Some(FAILED)));
    }
    drop((socket_page, good, draft_page, pipe));
    keeper.remove("w").unwrap();
    wait_until("nothing is left", || keeper.entries().unwrap().is_empty());
    wait_until("no connection is left", || server.connections() == 0);
    // The file that was sent is still open here.
    wait_until("all is closed", || descriptors() == idle + 1);
}

#[test]
fn random_messages_leave_nothing() {
    if !is_alone("keep::hostile::random_messages_leave_nothing") {
        return;
    }
    let folder = folder();
    let (server, keeper) = start(folder.path());
    let hold = publish(&keeper, "w", &[b"1"], Lock::Read);
    let idle = descriptors();
    let mut random = fastrand::Rng::with_seed(3);
    let (file, page) = (memory(b"1"), page(4));
    for _ in 0..800 {
        let socket = greeted(folder.path());
        for sequence in 0..random.u32(0..6) {
            let mut message = match random.u8(0..5) {
                0 => open_request(),
                1 => draft(b"x"),
                2 => commit(random.u64(0..2)),
                3 => restore(),
                _ => Raw::new(random.u8(0..20), sequence),
            };
            for _ in 0..random.usize(0..3) {
                message = message.number(random.u8(1..38), random.u64(0..4));
            }
            if random.u8(0..3) == 0 {
                let at = random.usize(..message.0.len());
                message.0[at] = random.u8(..);
            }
            // It would end the keeper.
            if message.0[0] == 15 {
                continue;
            }
            let descriptors = match random.u8(0..3) {
                0 => vec![],
                1 => vec![page.as_fd()],
                _ => vec![file.as_fd(), page.as_fd()],
            };
            tell(&socket, &message.0, &descriptors);
        }
    }
    wait_until("no connection is left", || server.connections() == 1);
    for entry in keeper.entries().unwrap() {
        if entry.name != "w" {
            keeper.remove(&entry.name).unwrap();
        }
    }
    wait_until("all is closed", || descriptors() == idle + 2);
    // What others have is as it was, but a random message may have removed the name.
    assert_eq!((hold.held_lock(), hold.is_adrift(), hold.epoch()), (Lock::Read, false, 1));
}

#[test]
fn a_client_that_reads_nothing_stops_no_other_one() {
    let folder = folder();
    let (_server, keeper) = start(folder.path());
    let mut draft = keeper.draft("w", &options(0), soon()).unwrap();
    for _ in 0..100 {
        draft.add(0, memory(b""));
    }
    drop(draft.commit(&vec![1; 1 << 20], [0; 32], Lock::None).unwrap());
    let slow = greeted(folder.path());
    tell(&slow, &open_request().0, &[]);
    rustix::io::ioctl_fionbio(&slow, true).unwrap();
    // Until its queue is full.
    for sequence in 3..20_000 {
        let ask = Raw::new(GET_PARTS, sequence).number(16, 0).number(14, 100).0;
        if rustix::net::send(&slow, &ask, SendFlags::NOSIGNAL).is_err() {
            break;
        }
    }
    let hold = keeper.open("w", Lock::Read, soon()).unwrap();
    assert_eq!((hold.parts().len(), hold.layout().len()), (100, 1 << 20));
    drop(slow);
    drop(hold);
    wait_until("it is closed", || only(&keeper).current.unwrap().holder_count == 0);
}
