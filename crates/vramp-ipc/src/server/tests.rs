use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::*;
use crate::{Connections, OpenError, OpenOptions, Refusal};

struct Nothing;

impl Source for Nothing {
    fn open(&self) -> Result<Offer, String> {
        Ok(Offer { description: Vec::new(), descriptors: 0 })
    }

    fn descriptor(&self, _index: usize) -> io::Result<OwnedFd> {
        Err(io::ErrorKind::NotFound.into())
    }

    fn released(&self) {}
}

fn address() -> Address {
    Address::Abstract(system::random().unwrap())
}

#[test]
fn a_process_of_another_user_is_refused_with_both_users() {
    let own = Admission::here();
    let server = Server::start(address(), Admission { uid: own.uid + 1, ..own }).unwrap();
    let published = server.publish(Arc::new(Nothing)).unwrap();
    let refused = Connections::new(OpenOptions::default()).open(&published.ticket());
    let Err(OpenError::Refused { reason: Refusal::OtherUser { exporter, importer }, .. }) = refused
    else {
        panic!("{refused:?}")
    };
    assert_eq!((exporter, importer), (own.uid + 1, own.uid));
    assert_eq!((server.connections(), published.ever_opened()), (0, 0));
}

/// A server with another depth is one that a forked child inherited.
#[test]
fn a_forked_child_publishes_nothing_and_does_not_touch_its_parents_server() {
    let own = Admission::here();
    let parent = Admission { depth: own.depth + 1, ..own };
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let address = Address::Path(path.as_os_str().as_bytes().to_vec());
    let server = Server::start(address, parent).unwrap();
    assert!(matches!(server.publish(Arc::new(Nothing)), Err(ServeError::Forked)));
    let export = Arc::new(Export::new(1, [0; 16], Arc::new(Nothing)));
    server.shared.lock().insert(1, Arc::clone(&export));
    let published = Published { shared: Arc::clone(&server.shared), export };
    // The lock is one that a thread of the parent had at the fork.
    let locked = server.shared.lock();
    assert!(matches!(published.grant(), Err(ServeError::Forked)));
    assert!(!published.is_held() && !server.is_own(&published.ticket()));
    assert_eq!((published.grants(), published.opens(), server.published()), (0, 0, 0));
    assert!(published.wait_released(Instant::now()));
    assert!(!published.wait_opened(1, Instant::now() + Duration::from_secs(60)));
    let ticket = published.ticket();
    drop(published);
    assert!(locked.contains_key(&1));
    drop(locked);
    drop(server);
    // The parent's server goes on.
    assert!(path.exists());
    Connections::new(OpenOptions::default()).open(&ticket).unwrap();
}
