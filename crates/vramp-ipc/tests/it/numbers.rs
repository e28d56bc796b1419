//! Descriptors of other processes, by number.

use std::os::fd::{AsRawFd, IntoRawFd};

use vramp_ipc::{FetchError, fetch_descriptor};

use crate::child::{Child, hear, role, say};
use crate::common::*;

#[test]
fn a_descriptor_of_a_child_is_fetched_by_its_number() {
    if role().is_some() {
        say(&numbered_file(77).unwrap().into_raw_fd().to_string());
        hear();
        return;
    }
    let mut child =
        Child::start("numbers::a_descriptor_of_a_child_is_fetched_by_its_number", "exporter", None);
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
