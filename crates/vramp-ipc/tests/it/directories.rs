//! Servers with a socket in a directory.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use vramp_ipc::{OpenError, ServeError, Server};

use crate::common::*;

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
