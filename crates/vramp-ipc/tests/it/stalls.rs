//! Peers that are stopped or read nothing.

use std::time::Duration;

use rustix::net::{SendFlags, send};
use rustix::process::Signal;
use vramp_ipc::{Connections, OpenError, OpenOptions, Server};

use crate::child::{Child, hear, is_alone, parse, print, role, say};
use crate::common::*;
use crate::hostile::{open_request, raw_connection, request};

const STOPPED: &str = "stalls::a_stopped_exporter_times_out_and_its_late_replies_are_closed";

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
    if !is_alone("stalls::an_importer_that_reads_nothing_stops_no_other_and_holds_no_descriptor") {
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

const HUNG: &str = "stalls::a_stopped_importer_keeps_its_opens_until_it_is_killed";

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

const FULL: &str = "stalls::closes_wait_once_for_a_stopped_exporter_and_none_is_lost";

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
