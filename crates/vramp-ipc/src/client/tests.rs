use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::time::Instant;

use super::*;
use crate::{Offer, Server, Source};

struct Nulls(usize);

impl Source for Nulls {
    fn open(&self) -> Result<Offer, String> {
        Ok(Offer { description: Vec::new(), descriptors: self.0 })
    }

    fn descriptor(&self, _index: usize) -> io::Result<OwnedFd> {
        Ok(File::open("/dev/null")?.into())
    }

    fn released(&self) {}
}

/// Connections with another depth are those that a forked child inherited.
#[test]
fn a_forked_child_connects_itself_and_leaves_its_parents_opens() {
    let server = Server::new().unwrap();
    let published = server.publish(Arc::new(Nulls(100))).unwrap();
    let mut inherited = Connections::new(OpenOptions::default());
    inherited.depth += 1;
    let parents_lock = inherited.lock();
    let opened = inherited.open(&published.ticket()).unwrap();
    assert_eq!((inherited.connections(), parents_lock.by_address.len()), (1, 0));
    drop((opened, parents_lock));
    assert!(published.wait_released(Instant::now() + Duration::from_secs(60)));

    let mut connection = Connection::new(&published.ticket().0, Duration::from_secs(60)).unwrap();
    connection.depth += 1;
    let connection = Arc::new(connection);
    let mut opened = Opened::new(&connection, &published.ticket(), 64, 64).unwrap();
    assert_eq!(opened.next_batch().unwrap().map(|batch| batch.descriptors.len()), Some(64));
    assert!(matches!(opened.next_batch(), Err(OpenError::Forked)));
    assert!(!opened.is_exporter_gone());
    drop(opened);
    // A close would be served before this open.
    connection.turn();
    let second = Opened::new(&connection, &published.ticket(), 1, 1).unwrap();
    assert_eq!(published.opens(), 2);
    drop(second);
}
