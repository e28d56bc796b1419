//! Peers that break the rules, that are stopped or read nothing, and that are killed at each step.

use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::io::FdFlags;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recv,
    send, socket_with,
};
use rustix::process::Signal;
use vramp_ipc::{Connections, OpenError, OpenOptions, Server, Ticket};

use crate::common::*;
use crate::common::{Child, hear, is_alone, parse, print, role, say};

// --- Peers that break the rules: they lose their connection, and nothing else happens ---

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
    // Descriptors of a connection are closed a moment after it was counted out.
    wait_until("all ended", || server.connections() == 0 && descriptors() == before);
    assert!(published.wait_released(soon()));
    assert!(published.ever_opened() > 1_000);
    // It serves as before.
    receive_all(&mut connections().open(&ticket).unwrap()).unwrap();
}

// --- Peers that are stopped or read nothing ---

const STOPPED: &str = "hostile::a_stopped_exporter_times_out_and_its_late_replies_are_closed";

#[test]
fn a_stopped_exporter_times_out_and_its_late_replies_are_closed() {
    if role().is_some() {
        let server = Server::new().unwrap();
        let published = server.publish(Files::new(&[1; 40_000], 10)).unwrap();
        say(&print(&published.ticket()));
        loop {
            hear();
            say(&published.opens().to_string());
        }
    }
    let mut child = Child::start(STOPPED, "exporter", None);
    let ticket = parse(&child.next());
    let options = OpenOptions { timeout: Duration::from_millis(200), ..OpenOptions::default() };
    let importer = Connections::new(options);
    let kept = importer.open(&ticket).unwrap();
    child.stop();
    for _ in 0..3 {
        let late = importer.open(&ticket);
        assert!(matches!(late, Err(OpenError::TimedOut { .. })), "{late:?}");
    }
    assert!(!kept.is_exporter_gone());
    child.signal(Signal::CONT);
    // The replies to the requests that timed out come first.
    let mut again = None;
    wait_until("it answers again", || {
        again = importer.open(&ticket).ok();
        again.is_some()
    });
    receive_all(again.as_mut().unwrap()).unwrap();
    wait_until("what came late is closed", || {
        child.tell("opens");
        child.next() == "2"
    });
    drop((kept, again));
    wait_until("everything is closed", || {
        child.tell("opens");
        child.next() == "0"
    });
}

#[test]
fn an_importer_that_reads_nothing_stops_no_other_and_holds_no_descriptor() {
    if !is_alone("hostile::an_importer_that_reads_nothing_stops_no_other_and_holds_no_descriptor") {
        return;
    }
    let server = Server::new().unwrap();
    let published = server.publish(Files::new(&[1; 40_000], 253)).unwrap();
    let ticket = published.ticket();
    let before = descriptors();
    let stuck = raw_connection(&ticket);
    let mut sent = 0;
    let batch = request(3, &[0, 0, 0, 0, 253, 0]);
    let mut bytes = open_request(&ticket, 1, 253);
    // Until the server reads no more, because its replies are not read.
    wait_until("both queues are full", || {
        while send(&stuck, &bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL).is_ok() {
            sent += 1;
            bytes.clone_from(&batch);
        }
        // A request of another importer is answered after those that were read.
        drop(connections().open(&ticket).unwrap());
        send(&stuck, &batch, SendFlags::DONTWAIT | SendFlags::NOSIGNAL).is_err()
    });
    assert!(sent > 10, "{sent}");
    let importer = connections();
    for _ in 0..20 {
        receive_all(&mut importer.open(&ticket).unwrap()).unwrap();
    }
    drop(importer);
    // The stuck connection: both ends, and the process.
    let is_left = || server.connections() == 1 && descriptors() == before + 3;
    wait_until("the others ended", is_left);
    drop(stuck);
    assert!(published.wait_released(soon()));
    wait_until("it ended", || server.connections() == 0 && descriptors() == before);
}

#[test]
fn an_importer_that_reads_late_gets_every_reply() {
    let server = Server::new().unwrap();
    let published = server.publish(Files::new(&[1; 30_000], 2)).unwrap();
    let ticket = published.ticket();
    let late = raw_connection(&ticket);
    for sequence in 1..=40 {
        send(&late, &open_request(&ticket, sequence, 2), SendFlags::NOSIGNAL).unwrap();
    }
    let mut buffer = vec![0; 40_000];
    for sequence in 1..=40_u32 {
        let (length, _) =
            rustix::net::recv(&late, &mut buffer, rustix::net::RecvFlags::empty()).unwrap();
        assert!(length > 30_000);
        assert_eq!(buffer[2..6], sequence.to_le_bytes());
    }
    assert_eq!(published.opens(), 40);
}

const HUNG: &str = "hostile::a_stopped_importer_keeps_its_opens_until_it_is_killed";

#[test]
fn a_stopped_importer_keeps_its_opens_until_it_is_killed() {
    if let Some((_, ticket)) = role() {
        let _opened = connections().open(&ticket.unwrap()).unwrap();
        say("there");
        hear();
        return;
    }
    let server = Server::new().unwrap();
    let published = server.publish(Files::new(b"", 1)).unwrap();
    let mut child = Child::start(HUNG, "importer", Some(&published.ticket()));
    child.expect("there");
    child.stop();
    drop(connections().open(&published.ticket()).unwrap());
    wait_until("the other one closed", || published.opens() == 1);
    child.kill();
    assert!(published.wait_released(soon()));
}

const FULL: &str = "hostile::closes_wait_once_for_a_stopped_exporter_and_none_is_lost";

#[test]
fn closes_wait_once_for_a_stopped_exporter_and_none_is_lost() {
    if role().is_some() {
        let server = Server::new().unwrap();
        let published = server.publish(Files::new(b"", 0)).unwrap();
        say(&print(&published.ticket()));
        loop {
            hear();
            say(&published.opens().to_string());
        }
    }
    let mut child = Child::start(FULL, "exporter", None);
    let ticket = parse(&child.next());
    let options = OpenOptions { timeout: Duration::from_secs(1), ..OpenOptions::default() };
    let importer = Connections::new(options);
    let opened: Vec<_> = (0..3_000).map(|_| importer.open(&ticket).unwrap()).collect();
    child.stop();
    let before = std::time::Instant::now();
    drop(opened);
    // A second for each close that did not fit would be most of an hour.
    assert!(before.elapsed() < Duration::from_secs(60));
    child.signal(Signal::CONT);
    wait_until("all are closed", || {
        // Any later call sends what did not fit.
        drop(importer.open(&ticket));
        child.tell("opens");
        child.next() == "0"
    });
}

// --- Processes that are killed at each step ---

const IMPORTER: &str = "hostile::an_importer_that_is_killed_at_any_step_has_nothing_open";
const EXPORTER: &str = "hostile::an_exporter_that_is_killed_at_any_step_is_gone";
const THIRD: &str = "hostile::a_third_process_opens_a_forwarded_ticket";

/// Lets a program that does nothing inherit all descriptors, as a forked child has them.
fn leave_copies_in_a_child() -> std::process::Child {
    for entry in std::fs::read_dir("/proc/self/fd").unwrap() {
        let number: i32 = entry.unwrap().file_name().to_str().unwrap().parse().unwrap();
        // The directory's own descriptor may be closed by now, and standard streams stay.
        if number > 2
            && let Ok(copy) = vramp_ipc::fetch_descriptor(std::process::id(), number)
        {
            rustix::io::fcntl_setfd(&copy, FdFlags::empty()).unwrap();
            std::mem::forget(copy);
        }
    }
    let mut sleeper = Command::new("sleep");
    sleeper.arg("300").stdin(Stdio::null()).stdout(Stdio::null());
    sleeper.spawn().unwrap()
}

fn end(process: u32) {
    let process = rustix::process::Pid::from_raw(process.cast_signed()).unwrap();
    rustix::process::kill_process(process, rustix::process::Signal::KILL).unwrap();
}

fn importer(step: &str, ticket: &Ticket) {
    if let "connected" | "requested" = step {
        let socket = raw_connection(ticket);
        if step == "requested" {
            rustix::io::write(&socket, &open_request(ticket, 1, OPEN_MOST)).unwrap();
        }
        say("there");
        hear();
        return;
    }
    let connections = connections();
    let mut opened = Some(connections.open(ticket).unwrap());
    match step {
        "opened" => {}
        "some" => drop(opened.as_mut().unwrap().next_batch().unwrap()),
        "all" => drop(receive_all(opened.as_mut().unwrap()).unwrap()),
        "closed" => drop(opened.take()),
        "copied" => return say_and_wait(&leave_copies_in_a_child().id().to_string()),
        other => panic!("{other}"),
    }
    say("there");
    hear();
}

fn say_and_wait(line: &str) {
    say(line);
    hear();
}

#[test]
fn an_importer_that_is_killed_at_any_step_has_nothing_open() {
    if let Some((step, ticket)) = role() {
        return importer(&step, &ticket.unwrap());
    }
    let server = Server::new().unwrap();
    for (step, opens) in
        [("connected", 0), ("requested", 1), ("opened", 1), ("some", 1), ("all", 1), ("closed", 1)]
    {
        let source = Files::new(b"killed", 200);
        let published = server.publish(source.clone()).unwrap();
        let mut child = Child::start(IMPORTER, step, Some(&published.ticket()));
        child.expect("there");
        wait_until(step, || server.connections() == 1);
        assert!(published.wait_opened(opens, soon()), "{step}");
        child.kill();
        wait_until(step, || server.connections() == 0);
        assert!(published.wait_released(soon()), "{step}");
        assert_eq!((source.released() as u64, published.ever_opened()), (opens, opens), "{step}");
    }
}

#[test]
fn an_importer_that_is_killed_counts_although_a_child_has_its_socket() {
    let server = Server::new().unwrap();
    let published = server.publish(Files::new(b"copied", 200)).unwrap();
    let mut child = Child::start(IMPORTER, "copied", Some(&published.ticket()));
    let sleeper = child.next().parse().unwrap();
    assert!(published.opens() == 1 && server.connections() == 1);
    child.kill();
    let is_released = published.wait_released(soon());
    wait_until("the connection ended", || server.connections() == 0);
    end(sleeper);
    assert!(is_released);
}

fn exporter(step: &str) {
    let server = Server::new().unwrap();
    let published = server.publish(Files::new(&[5; 100_000], 300)).unwrap();
    let sleeper = (step == "copied").then(leave_copies_in_a_child);
    say(&print(&published.ticket()));
    say(&sleeper.map_or(0, |sleeper| sleeper.id()).to_string());
    hear();
}

#[test]
fn an_exporter_that_is_killed_at_any_step_is_gone() {
    if let Some((step, _)) = role() {
        return exporter(&step);
    }
    for step in ["before", "unreaped", "copied", "opened", "some", "all"] {
        let mut child = Child::start(EXPORTER, step, None);
        let pid = child.pid();
        let ticket = crate::common::parse(&child.next());
        let sleeper: u32 = child.next().parse().unwrap();
        let importer = connections();
        let is_gone = |error: &OpenError| {
            let OpenError::ExporterGone { pid: found } = error else { panic!("{step}: {error:?}") };
            *found == pid
        };
        if let "before" | "copied" | "unreaped" = step {
            // A zombie has ended as well.
            let _zombie = match step {
                "unreaped" => Some(child.kill_unreaped()),
                _ => {
                    child.kill();
                    None
                }
            };
            let result = importer.open(&ticket);
            if sleeper != 0 {
                end(sleeper);
            }
            assert!(is_gone(&result.unwrap_err()));
            assert_eq!(importer.connections(), 0);
            continue;
        }
        let mut opened = importer.open(&ticket).unwrap();
        match step {
            "some" => drop(opened.next_batch().unwrap()),
            "all" => drop(receive_all(&mut opened).unwrap()),
            _ => {}
        }
        assert!(!opened.is_exporter_gone());
        child.kill();
        assert!(opened.is_exporter_gone(), "{step}");
        if step != "all" {
            assert!(is_gone(&receive_all(&mut { opened }).unwrap_err()));
        }
        assert!(is_gone(&importer.open(&ticket).unwrap_err()));
    }
}

#[test]
fn a_third_process_opens_a_forwarded_ticket() {
    if let Some((role, ticket)) = role() {
        let opened = connections().open(&ticket.unwrap()).unwrap();
        if role == "second" {
            let mut third = Child::start(THIRD, "third", Some(opened.ticket()));
            third.expect("there");
            drop(opened);
            say("there");
            hear();
            third.tell("end");
            third.finish();
        } else {
            say("there");
            hear();
        }
        return;
    }
    let server = Server::new().unwrap();
    let source = Files::new(b"", 3);
    let published = server.publish(source.clone()).unwrap();
    let mut second = Child::start(THIRD, "second", Some(&published.grant().unwrap()));
    second.expect("there");
    wait_until("the second closed it", || published.opens() == 1);
    assert_eq!((published.ever_opened(), source.released()), (2, 0));
    second.tell("end");
    second.finish();
    assert!(published.wait_released(soon()));
    assert_eq!(source.released(), 1);
}

#[test]
fn connections_to_exporters_that_ended_are_removed() {
    let importer = Connections::new(OpenOptions::default());
    for _ in 0..200 {
        let server = Server::new().unwrap();
        let published = server.publish(Files::new(b"", 0)).unwrap();
        drop(importer.open(&published.ticket()).unwrap());
    }
    assert!(importer.connections() <= 34, "{}", importer.connections());
}
