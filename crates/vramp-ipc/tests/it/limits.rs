//! Growth, limits of open files, and descriptors of other processes. A test that counts runs alone in its process.

use std::os::fd::{AsRawFd, IntoRawFd};
use std::sync::atomic::Ordering::SeqCst;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use vramp_ipc::{Connections, FetchError, OpenError, OpenOptions, Server, Side, fetch_descriptor};

use crate::common::*;
use crate::common::{Child, hear, is_alone, parse, print, role, say};

fn limit_files(limit: u64) {
    let maximum = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: Some(limit), maximum }).unwrap();
}

#[test]
fn many_exports_and_cycles_leave_no_descriptor() {
    if !is_alone("limits::many_exports_and_cycles_leave_no_descriptor") {
        return;
    }
    let idle = descriptors();
    let server = Server::new().unwrap();
    let importer = connections();
    let source = Files::new(b"one of many", 1);
    let published: Vec<_> = (0..10_000).map(|_| server.publish(source.clone()).unwrap()).collect();
    // Listener, event, epoll instance.
    assert_eq!((server.published(), descriptors()), (10_000, idle + 3));
    for export in &published {
        receive_all(&mut importer.open(&export.ticket()).unwrap()).unwrap();
    }
    for export in &published {
        assert!(export.wait_released(soon()));
    }
    assert_eq!((source.asked.load(SeqCst), source.released()), (10_000, 10_000));
    // At each end of the connection a socket and a process.
    assert_eq!((descriptors(), server.connections()), (idle + 7, 1));
    // All open at once, and closed at once by the end of the connection.
    let opened: Vec<_> =
        published.iter().map(|export| importer.open(&export.ticket()).unwrap()).collect();
    assert!(published.iter().all(|export| export.opens() == 1));
    drop(opened);
    drop(importer);
    assert!(published.iter().all(|export| export.wait_released(soon())));
    drop(published);
    assert_eq!(server.published(), 0);
    drop(server);
    assert_eq!(descriptors(), idle);
}

#[test]
fn a_thousand_connections_have_one_thread() {
    if !is_alone("limits::a_thousand_connections_have_one_thread") {
        return;
    }
    limit_files(8_192);
    let idle = descriptors();
    let server = Server::new().unwrap();
    let published = server.publish(Files::new(b"", 1)).unwrap();
    let busy = threads();
    let importers: Vec<_> = (0..1_000).map(|_| connections()).collect();
    let opened: Vec<_> = importers
        .iter()
        .map(|importer| {
            let mut opened = importer.open(&published.ticket()).unwrap();
            receive_all(&mut opened).unwrap();
            opened
        })
        .collect();
    assert_eq!((server.connections(), published.opens()), (1_000, 1_000));
    assert_eq!((threads(), descriptors()), (busy, idle + 3 + 4_000));
    drop((opened, importers));
    assert!(published.wait_released(soon()));
    // The server counts a connection no more, and then closes its descriptors.
    wait_until("all ended", || server.connections() == 0 && descriptors() == idle + 3);
}

#[test]
fn one_export_is_opened_ten_thousand_times_by_one_importer() {
    if !is_alone("limits::one_export_is_opened_ten_thousand_times_by_one_importer") {
        return;
    }
    let server = Server::new().unwrap();
    let source = Files::new(b"sent again", 0);
    let published = server.publish(source.clone()).unwrap();
    let importer = connections();
    let grants: Vec<_> = (0..10_000).map(|_| published.grant().unwrap()).collect();
    let opened: Vec<_> = grants.iter().map(|grant| importer.open(grant).unwrap()).collect();
    assert_eq!((published.opens(), published.grants()), (10_000, 0));
    drop(opened);
    assert!(published.wait_released(soon()));
    assert_eq!((source.released(), server.connections()), (1, 1));
}

/// Leaves `free` descriptors to this process, and returns the limit: numbers below it may be open.
fn leave_free(free: usize) -> u64 {
    limit_files(getrlimit(Resource::Nofile).maximum.unwrap());
    let listed: Vec<String> = std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    // The directory's own is closed by now.
    let is_open = |number: &u64| {
        listed.contains(&number.to_string())
            && std::fs::read_link(format!("/proc/self/fd/{number}")).is_ok()
    };
    let limit = (0..).filter(|number| !is_open(number)).nth(free).unwrap();
    limit_files(limit);
    limit
}

#[test]
fn an_importer_with_few_free_descriptors_receives_smaller_batches() {
    if let Some((_, ticket)) = role() {
        let importer = Connections::new(OpenOptions { batch: 253, ..OpenOptions::default() });
        let mut opened = importer.open(&ticket.unwrap()).unwrap();
        drop(opened.next_batch().unwrap());
        leave_free(10);
        let mut received = 253;
        while received < 1_000 {
            let batch = opened.next_batch().unwrap().unwrap();
            assert!((1..=10).contains(&batch.descriptors.len()), "{}", batch.descriptors.len());
            for (at, descriptor) in batch.descriptors.into_iter().enumerate() {
                assert_eq!(number_of(descriptor), (batch.first + at) as u64);
                received += 1;
            }
        }
        let limit = leave_free(0);
        let full = opened.next_batch().unwrap_err();
        let OpenError::TooManyOpenFiles { side: Side::Importer, limit: found } = full else {
            panic!("{full:?}")
        };
        assert_eq!(found, limit);
        assert!(full.to_string().contains("RLIMIT_NOFILE"));
        let unconnected = connections().open(opened.ticket()).unwrap_err();
        assert!(matches!(unconnected, OpenError::TooManyOpenFiles { side: Side::Importer, .. }));
        leave_free(100);
        let left = opened.next_batch().unwrap().unwrap();
        assert!(left.first == received && !left.descriptors.is_empty());
        return;
    }
    let server = Server::new().unwrap();
    let published = server.publish(Files::new(b"", 2_000)).unwrap();
    let name = "limits::an_importer_with_few_free_descriptors_receives_smaller_batches";
    Child::start(name, "importer", Some(&published.ticket())).finish();
    assert!(published.wait_released(soon()));
    assert_eq!(published.ever_opened(), 1);
}

#[test]
fn an_exporter_with_few_free_descriptors_sends_smaller_batches() {
    if role().is_some() {
        let server = Server::new().unwrap();
        let published = server.publish(Files::new(b"", 100)).unwrap();
        let empty = server.publish(Files::new(b"", 0)).unwrap();
        say(&print(&published.ticket()));
        say(&print(&empty.ticket()));
        loop {
            leave_free(hear().parse().unwrap());
            say("limited");
        }
    }
    let name = "limits::an_exporter_with_few_free_descriptors_sends_smaller_batches";
    let mut child = Child::start(name, "exporter", None);
    let ticket = parse(&child.next());
    let empty = parse(&child.next());
    let importer = connections();
    let mut limit = |free: &str| {
        // The reply to this comes after the exporter closed the descriptors that it sent.
        drop(importer.open(&empty).unwrap());
        child.tell(free);
        child.expect("limited");
    };
    limit("10");
    let mut opened = importer.open(&ticket).unwrap();
    assert_eq!(receive_all(&mut opened).unwrap(), [10; 10]);
    limit("0");
    let mut opened = importer.open(&ticket).unwrap();
    for _ in 0..2 {
        let full = opened.next_batch().unwrap_err();
        assert!(matches!(full, OpenError::TooManyOpenFiles { side: Side::Exporter, .. }), "{full}");
    }
    // A new connection waits until it can be accepted.
    std::thread::scope(|scope| {
        let waiting =
            scope.spawn(|| receive_all(&mut connections().open(&ticket).unwrap()).unwrap());
        limit("100");
        assert_eq!(waiting.join().unwrap().iter().sum::<usize>(), 100);
    });
    assert_eq!(receive_all(&mut opened).unwrap().iter().sum::<usize>(), 100);
}

#[test]
fn a_descriptor_of_a_child_is_fetched_by_its_number() {
    if role().is_some() {
        say(&numbered_file(77).unwrap().into_raw_fd().to_string());
        hear();
        return;
    }
    let mut child =
        Child::start("limits::a_descriptor_of_a_child_is_fetched_by_its_number", "exporter", None);
    let number: i32 = child.next().parse().unwrap();
    let pid = child.pid();
    assert_eq!(number_of(fetch_descriptor(pid, number).unwrap()), 77);
    let missing = fetch_descriptor(pid, 1_000_000);
    let Err(FetchError::NoSuchDescriptor { descriptor: 1_000_000, .. }) = missing else {
        panic!("{missing:?}")
    };
    child.kill();
    let gone = fetch_descriptor(pid, number);
    assert!(matches!(gone, Err(FetchError::ProcessGone { .. })), "{gone:?}");
}

#[test]
fn a_descriptor_of_this_process_is_fetched_too() {
    let file = numbered_file(78).unwrap();
    let copy = fetch_descriptor(std::process::id(), file.as_raw_fd()).unwrap();
    assert_eq!(number_of(copy), 78);
}
