//! Processes that are killed at each step.

use std::process::{Command, Stdio};

use rustix::io::FdFlags;
use vramp_ipc::{Connections, OpenError, OpenOptions, Server, Ticket};

use crate::child::{Child, hear, print, role, say};
use crate::common::*;
use crate::hostile::{OPEN_MOST, open_request, raw_connection};

const IMPORTER: &str = "deaths::an_importer_that_is_killed_at_any_step_has_nothing_open";
const EXPORTER: &str = "deaths::an_exporter_that_is_killed_at_any_step_is_gone";
const THIRD: &str = "deaths::a_third_process_opens_a_forwarded_ticket";

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
        let ticket = crate::child::parse(&child.next());
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
