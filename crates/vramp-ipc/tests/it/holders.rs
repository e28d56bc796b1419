//! Who holds an export, and when its source is released.
//!
//! Servers with a socket in a directory.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Instant;

use vramp_ipc::{OpenError, ServeError, Server};

use crate::common::*;

#[test]
fn the_last_of_many_opens_releases_the_source_once() {
    let server = Server::new().unwrap();
    let source = Files::new(b"", 1);
    let published = server.publish(source.clone()).unwrap();
    let (one, other) = (connections(), connections());
    let mut opened = Vec::new();
    for times in 1..=10 {
        let importer = if times % 2 == 0 { &one } else { &other };
        opened.push(importer.open(&published.ticket()).unwrap());
        assert_eq!((published.opens(), published.ever_opened()), (times, times as u64));
    }
    while opened.len() > 1 {
        opened.remove(opened.len() / 2);
    }
    wait_until("all but one are closed", || published.opens() == 1);
    assert_eq!(source.released(), 0);
    assert!(!published.wait_released(Instant::now()));
    opened.clear();
    assert!(published.wait_released(soon()));
    assert_eq!(source.released(), 1);
}

#[test]
fn a_grant_holds_the_export_until_it_was_opened_and_closed() {
    let server = Server::new().unwrap();
    let source = Files::new(b"", 0);
    let published = server.publish(source.clone()).unwrap();
    let importer = connections();
    let grants = [published.grant().unwrap(), published.grant().unwrap()];
    // One of them is opened twice, by an importer and by the process to which it was forwarded.
    let first = importer.open(&grants[0]).unwrap();
    let second = connections().open(first.ticket()).unwrap();
    assert_eq!(published.grants(), 1);
    drop((first, second));
    wait_until("both are closed", || published.opens() == 0);
    assert!(published.is_held());
    assert!(!published.wait_released(Instant::now()));
    assert_eq!(source.released(), 0);
    drop(importer.open(&grants[1]).unwrap());
    assert!(published.wait_released(soon()));
    assert_eq!((source.released(), published.grants(), published.is_held()), (1, 0, false));
}

#[test]
fn a_grant_is_revoked_once_and_only_by_its_export() {
    let server = Server::new().unwrap();
    let published = server.publish(Files::new(b"", 0)).unwrap();
    let other = server.publish(Files::new(b"", 0)).unwrap();
    let grant = published.grant().unwrap();
    let foreign = other.grant().unwrap();
    assert!(!published.revoke(&foreign));
    assert!(!published.revoke(&published.ticket()));
    assert!(published.revoke(&grant));
    assert!(!published.revoke(&grant));
    assert!(!published.is_held() && other.is_held());
    // It is an ordinary ticket from now on.
    drop(connections().open(&grant).unwrap());
    assert!(published.wait_released(soon()));
}

#[test]
fn a_withdrawn_export_stays_open_and_opens_no_more() {
    let server = Server::new().unwrap();
    let source = Files::new(b"", 200);
    let published = server.publish(source.clone()).unwrap();
    let importer = connections();
    let ticket = published.grant().unwrap();
    let mut opened = importer.open(&published.ticket()).unwrap();
    let withdrawn = published.withdraw();
    assert_eq!((withdrawn.opens(), server.published()), (1, 0));
    assert!(withdrawn.is_pending());
    let refused = importer.open(&ticket);
    assert!(matches!(refused, Err(OpenError::Withdrawn { .. })), "{refused:?}");
    receive_all(&mut opened).unwrap();
    assert!(withdrawn.is_held() && !withdrawn.wait_released(Instant::now()));
    assert_eq!(source.released(), 0);
    drop(opened);
    assert!(withdrawn.wait_released(soon()));
    assert_eq!((source.released(), source.ended.load(SeqCst)), (1, 1));
}

#[test]
fn the_end_of_an_export_is_either_at_its_withdrawal_or_at_its_last_close() {
    let server = Server::new().unwrap();
    let importer = connections();
    let (mut at_withdrawal, mut at_close) = (0, 0);
    // The close and the withdrawal race.
    for _ in 0..2_000 {
        let source = Files::new(b"", 0);
        let published = server.publish(source.clone()).unwrap();
        drop(importer.open(&published.ticket()).unwrap());
        let withdrawn = published.withdraw();
        assert!(withdrawn.wait_released(soon()));
        assert_eq!(source.ended.load(SeqCst), usize::from(withdrawn.is_pending()));
        assert_eq!(source.released(), 1);
        *(if withdrawn.is_pending() { &mut at_close } else { &mut at_withdrawal }) += 1;
    }
    assert_eq!(at_withdrawal + at_close, 2_000);
}

#[test]
fn a_waiter_sees_each_open() {
    let server = Server::new().unwrap();
    let published = server.publish(Files::new(b"", 0)).unwrap();
    assert!(!published.wait_opened(1, Instant::now()));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let importer = connections();
            for _ in 0..3 {
                drop(importer.open(&published.ticket()).unwrap());
            }
        });
        assert!(published.wait_opened(3, soon()));
    });
    assert!(published.wait_released(soon()));
}

#[test]
fn an_error_says_what_to_do() {
    let text = ServeError::Withdrawn.to_string();
    assert!(text.contains("publish it again"), "{text}");
}

#[test]
fn a_socket_in_a_directory_is_the_users_own_and_ends_with_the_server() {
    let directory = tempfile::tempdir().unwrap();
    let server = Server::in_directory(directory.path()).unwrap();
    let published = server.publish(Files::new(b"in a file", 2)).unwrap();
    let sockets: Vec<_> =
        std::fs::read_dir(directory.path()).unwrap().map(Result::unwrap).collect();
    let [socket] = &sockets[..] else { panic!("{sockets:?}") };
    assert_eq!(socket.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    let mut opened = connections().open(&published.ticket()).unwrap();
    assert_eq!(opened.description(), b"in a file");
    receive_all(&mut opened).unwrap();
    drop((opened, server));
    assert!(!socket.path().exists());
    let gone = connections().open(&published.ticket());
    assert!(matches!(gone, Err(OpenError::Unreachable { .. })), "{gone:?}");
}

#[test]
fn a_directory_that_cannot_have_the_socket_is_an_error() {
    let relative = Server::in_directory(Path::new("target"));
    assert!(matches!(relative, Err(ServeError::Path { .. })), "{relative:?}");
    let long = Server::in_directory(Path::new(&format!("/{}", "a".repeat(100))));
    assert!(matches!(long, Err(ServeError::Path { length: 140, max: 107, .. })), "{long:?}");
    let missing = Server::in_directory(Path::new("/does/not/exist"));
    assert!(matches!(missing, Err(ServeError::System { .. })), "{missing:?}");
}
