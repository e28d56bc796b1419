//! What an importer receives, and what it is refused.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

use vramp_ipc::{
    Connections, MAX_DESCRIPTION, MAX_DESCRIPTORS, Offer, OpenError, OpenOptions, Refusal, Server,
    Source, Ticket,
};

use crate::common::*;

#[test]
fn descriptions_and_descriptors_of_any_length_arrive() {
    let server = Server::new().unwrap();
    let importer = connections();
    for (bytes, many) in [(0, 0), (5, 1), (1, 64), (32_736, 65), (32_737, 253), (98_304, 4_096)] {
        let description: Vec<u8> = (0..bytes).map(|at| (at % 251) as u8).collect();
        let source = Files::new(&description, many);
        let published = server.publish(source.clone()).unwrap();
        let mut opened = importer.open(&published.ticket()).unwrap();
        assert_eq!(opened.description(), description);
        let sizes = receive_all(&mut opened).unwrap();
        assert_eq!(sizes.len(), many.div_ceil(64));
        assert!(opened.next_batch().unwrap().is_none());
        drop(opened);
        assert!(published.wait_released(soon()));
        assert_eq!((source.released(), published.ever_opened()), (1, 1));
    }
    assert_eq!((importer.connections(), server.connections()), (1, 1));
}

#[test]
fn the_longest_description_arrives_and_a_longer_offer_is_an_error() {
    let server = Server::new().unwrap();
    let importer = connections();
    let longest = server.publish(Files::new(&vec![3; MAX_DESCRIPTION], 0)).unwrap();
    let opened = importer.open(&longest.ticket()).unwrap();
    assert_eq!(opened.description().len(), MAX_DESCRIPTION);
    for source in
        [Files::new(&vec![3; MAX_DESCRIPTION + 1], 0), Files::new(b"", MAX_DESCRIPTORS + 1)]
    {
        let published = server.publish(source.clone()).unwrap();
        let refused = importer.open(&published.ticket());
        assert!(matches!(&refused, Err(OpenError::Source { .. })), "{refused:?}");
        assert_eq!((published.opens(), published.ever_opened()), (0, 0));
        assert!(published.wait_released(soon()));
    }
}

#[test]
fn a_batch_has_as_many_descriptors_as_asked_for() {
    let server = Server::new().unwrap();
    let published = server.publish(Files::new(b"", 600)).unwrap();
    for (batch, expected) in [(0, 600), (1, 600), (100, 6), (253, 3), (u16::MAX, 3)] {
        let importer = Connections::new(OpenOptions { batch, ..OpenOptions::default() });
        let mut opened = importer.open(&published.ticket()).unwrap();
        assert_eq!(receive_all(&mut opened).unwrap().len(), expected, "{batch}");
    }
}

#[test]
fn a_ticket_with_a_wrong_secret_or_export_is_refused() {
    let server = Server::new().unwrap();
    let source = Files::new(b"", 1);
    let published = server.publish(source.clone()).unwrap();
    let importer = connections();
    let good = published.ticket().to_bytes();
    let last = good.len() - 1;
    let changed = |at: usize| {
        let mut bytes = good.clone();
        bytes[at] ^= 1;
        importer.open(&Ticket::from_bytes(&bytes).unwrap())
    };
    for at in [last, last - 15] {
        let refused = changed(at);
        let Err(OpenError::Refused { pid, reason: Refusal::WrongSecret }) = refused else {
            panic!("{refused:?}")
        };
        assert_eq!(pid, std::process::id());
    }
    // In front of secret and grant lies the number of the export.
    let unknown = changed(last - 31);
    assert!(matches!(unknown, Err(OpenError::Withdrawn { .. })), "{unknown:?}");
    assert_eq!((source.asked.load(SeqCst), source.released()), (0, 0));
    assert!(Ticket::from_bytes(b"no ticket").is_err());
    assert!(!format!("{:?}", published.ticket()).contains("secret"));
}

/// Fails as the number says.
struct Failing(u8);

impl Source for Failing {
    fn open(&self) -> Result<Offer, String> {
        match self.0 {
            0 => Err("the block was freed".to_owned()),
            1 => panic!("planned"),
            _ => Ok(Offer { description: Vec::new(), descriptors: 3 }),
        }
    }

    fn descriptor(&self, index: usize) -> io::Result<OwnedFd> {
        match (self.0, index) {
            (2, 1) => Err(io::Error::other("no handle")),
            (3, 1) => panic!("planned"),
            _ => numbered_file(index),
        }
    }

    fn released(&self) {
        if self.0 == 4 {
            panic!("planned");
        }
    }
}

#[test]
fn a_source_that_fails_or_panics_is_an_error_of_the_importer_alone() {
    let server = Server::new().unwrap();
    let importer = connections();
    for (kind, text) in [(0, "the block was freed"), (1, "panicked")] {
        let published = server.publish(Arc::new(Failing(kind))).unwrap();
        let refused = importer.open(&published.ticket()).unwrap_err();
        assert!(refused.to_string().contains(text), "{refused}");
        assert!(published.wait_released(soon()));
        assert_eq!(published.ever_opened(), 0);
    }
    for (kind, text) in [(2, "no handle"), (3, "panicked")] {
        let published = server.publish(Arc::new(Failing(kind))).unwrap();
        let mut opened = importer.open(&published.ticket()).unwrap();
        assert_eq!(opened.next_batch().unwrap().unwrap().descriptors.len(), 1);
        for _ in 0..2 {
            let failed = opened.next_batch().unwrap_err();
            assert!(failed.to_string().contains(text), "{failed}");
        }
        drop(opened);
        assert!(published.wait_released(soon()));
    }
    let published = server.publish(Arc::new(Failing(4))).unwrap();
    for times in 1..3 {
        let mut opened = importer.open(&published.ticket()).unwrap();
        receive_all(&mut opened).unwrap();
        drop(opened);
        assert!(published.wait_released(soon()));
        assert_eq!(published.ever_opened(), times);
    }
}

#[test]
fn a_server_that_was_closed_cannot_be_reached_and_ends_its_connections() {
    let server = Server::new().unwrap();
    let source = Files::new(b"", 100);
    let published = server.publish(source.clone()).unwrap();
    let importer = connections();
    let mut opened = importer.open(&published.ticket()).unwrap();
    assert!(!opened.is_exporter_gone());
    drop(server);
    assert_eq!((source.released(), published.opens()), (1, 0));
    assert!(opened.is_exporter_gone());
    opened.next_batch().unwrap();
    assert!(matches!(opened.next_batch(), Err(OpenError::ExporterGone { .. })));
    let known = importer.open(&published.ticket());
    assert!(matches!(known, Err(OpenError::ExporterGone { .. })), "{known:?}");
    let new = connections().open(&published.ticket());
    assert!(matches!(new, Err(OpenError::Unreachable { .. })), "{new:?}");
}

#[test]
fn a_server_knows_its_own_tickets() {
    let (one, other) = (Server::new().unwrap(), Server::new().unwrap());
    let published = one.publish(Files::new(b"", 0)).unwrap();
    assert!(one.is_own(&published.ticket()));
    assert!(!other.is_own(&published.ticket()));
}

#[test]
fn threads_share_one_connection() {
    let server = Server::new().unwrap();
    let source = Files::new(&[1; 40_000], 70);
    let published = server.publish(source.clone()).unwrap();
    let importer = connections();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..50 {
                    let mut opened = importer.open(&published.ticket()).unwrap();
                    assert_eq!(opened.description(), [1; 40_000]);
                    receive_all(&mut opened).unwrap();
                }
            });
        }
    });
    assert!(published.wait_released(soon()));
    assert_eq!((published.ever_opened(), server.connections()), (400, 1));
    assert!((1..=400).contains(&source.released()));
}
