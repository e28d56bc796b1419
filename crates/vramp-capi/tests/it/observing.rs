//! Observers, limits, histories and snapshots through the C interface.

use std::ffi::{CString, c_void};
use std::ptr::{null, null_mut};
use std::sync::Mutex;

use crate::common::*;
use vramp_capi::abi::vramp_event_kind_t::*;
use vramp_capi::abi::vramp_event_t;
use vramp_capi::abi::vramp_status_t::*;
use vramp_capi::interface::*;

type Log = Mutex<Vec<vramp_event_t>>;

unsafe extern "C" fn note(event: *const vramp_event_t, user: *mut c_void) {
    // SAFETY: vramp gives an event, and the test a log that outlives the allocator.
    let (event, log) = unsafe { (*event, &*user.cast::<Log>()) };
    log.lock().expect("no thread panicked").push(event);
}

#[test]
fn observers_see_allocations_growth_and_failures_until_they_are_removed() {
    let log = Log::default();
    let allocator = open("limit=64MiB");
    let stream = stream(allocator);
    let mut registration = 0;
    let user = (&raw const log).cast_mut().cast();
    // SAFETY: the log outlives the allocator, and `note` may be called from anywhere.
    let status = unsafe { vramp_observe(allocator, Some(note), user, &mut registration) };
    assert_eq!(status, VRAMP_OK);
    let block = malloc(allocator, 5_000_000, stream).expect("there is memory");
    assert_eq!(malloc(allocator, 1 << 30, stream), Err(VRAMP_ERROR_OUT_OF_MEMORY));
    assert_eq!(vramp_free(allocator, block, stream), VRAMP_OK);
    let events = std::mem::take(&mut *log.lock().expect("no thread panicked"));
    let find = |kind| events.iter().find(|event| event.kind == kind).copied();
    let allocated = find(VRAMP_EVENT_ALLOCATED).expect("it was observed");
    assert_eq!((allocated.address, allocated.requested), (block as u64, 5_000_000));
    assert!(find(VRAMP_EVENT_GROWN).expect("it was observed").size >= 5_000_000);
    assert_eq!(find(VRAMP_EVENT_OUT_OF_MEMORY).expect("it was observed").requested, 1 << 30);
    assert_eq!(find(VRAMP_EVENT_FREED).expect("it was observed").address, block as u64);
    assert_eq!(vramp_unobserve(allocator, registration), VRAMP_OK);
    assert_eq!(vramp_unobserve(allocator, registration), VRAMP_ERROR_RANGE);
    assert_eq!(vramp_unobserve(allocator, 0), VRAMP_ERROR_RANGE);
    let block = malloc(allocator, 100, stream).expect("there is memory");
    assert_eq!(vramp_free(allocator, block, stream), VRAMP_OK);
    assert!(log.lock().expect("no thread panicked").is_empty());
    // SAFETY: null is what the functions must withstand.
    unsafe {
        assert_eq!(vramp_observe(allocator, None, null_mut(), &mut registration), VRAMP_ERROR_NULL);
        assert_eq!(vramp_observe(allocator, Some(note), user, null_mut()), VRAMP_ERROR_NULL);
        assert_eq!(vramp_snapshot(allocator, null()), VRAMP_ERROR_NULL);
    }
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn a_snapshot_of_all_devices_refuses_wrong_arguments() {
    // SAFETY: null is what the function must withstand.
    assert_eq!(unsafe { vramp_snapshot_of_devices(null()) }, VRAMP_ERROR_NULL);
    // SAFETY: the path ends with a zero.
    let status = unsafe { vramp_snapshot_of_devices(c"/nowhere/at/all".as_ptr()) };
    assert_eq!(status, VRAMP_ERROR_FILE);
    assert!(last_error().contains("cannot write /nowhere/at/all"), "{}", last_error());
    assert_eq!(vramp_record_history_of_devices(10_000_001), VRAMP_ERROR_RANGE);
    assert!(last_error().contains("use at most 10000000"), "{}", last_error());
    assert_eq!(vramp_record_history_of_devices(0), VRAMP_OK);
}

#[test]
fn a_limit_that_is_set_later_holds_and_a_snapshot_is_written() {
    let allocator = open("");
    let stream = stream(allocator);
    assert_eq!(vramp_record_history(allocator, 100), VRAMP_OK);
    let block = malloc(allocator, 3 << 20, stream).expect("there is memory");
    assert_eq!(vramp_set_limit(allocator, 64 << 20), VRAMP_OK);
    assert_eq!(malloc(allocator, 80 << 20, stream), Err(VRAMP_ERROR_OUT_OF_MEMORY));
    assert!(last_error().contains("limit"), "{}", last_error());
    assert_eq!(vramp_set_limit(allocator, 0), VRAMP_OK);
    let large = malloc(allocator, 80 << 20, stream).expect("there is no limit any more");
    for (name, start) in [("snapshot.pickle", &b"\x80\x04"[..]), ("timeline.json", b"{")] {
        let path = std::env::temp_dir().join(format!("vramp-{}-{name}", std::process::id()));
        let text = CString::new(path.to_str().expect("a plain path")).expect("no zeros in it");
        // SAFETY: the path ends with a zero.
        assert_eq!(unsafe { vramp_snapshot(allocator, text.as_ptr()) }, VRAMP_OK);
        let written = std::fs::read(&path).expect("it was written");
        assert!(written.starts_with(start), "{name}");
        std::fs::remove_file(&path).expect("it is ours");
    }
    // SAFETY: the path ends with a zero.
    let status = unsafe { vramp_snapshot(allocator, c"/nowhere/at/all".as_ptr()) };
    assert_eq!(status, VRAMP_ERROR_FILE);
    assert_eq!(vramp_record_history(allocator, 0), VRAMP_OK);
    for block in [block, large] {
        assert_eq!(vramp_free(allocator, block, stream), VRAMP_OK);
    }
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}
