//! Regions and the end of their allocator, their threads and their callbacks.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;

use crate::common::sleep::*;
use crate::common::*;
use vramp_alloc::Config;
use vramp_capi::abi::vramp_allocator_t;
use vramp_capi::abi::vramp_status_t::*;
use vramp_capi::interface::*;
use vramp_capi::queries::vramp_on_shortage;
use vramp_capi::sleep::abi::vramp_region_scope_t;
use vramp_capi::sleep::*;
use vramp_capi::testing;
use vramp_core::AddrRange;
use vramp_driver::wrapper::{Wrapped, Wrapper};
use vramp_driver::{Driver, DriverResult};

/// Where a device that waits is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Door {
    Open,
    Armed,
    /// A call waits.
    Reached,
}

/// A device that waits before it unmaps memory.
struct Waiting {
    device: Arc<dyn Driver>,
    door: Arc<(Mutex<Door>, Condvar)>,
}

fn set(door: &(Mutex<Door>, Condvar), to: Door) {
    *door.0.lock().unwrap() = to;
    door.1.notify_all();
}

fn await_door(door: &(Mutex<Door>, Condvar), is: Door) {
    drop(door.1.wait_while(door.0.lock().unwrap(), |door| *door != is).unwrap());
}

impl Wrapper for Waiting {
    type Device = Arc<dyn Driver>;

    fn device(&self) -> &Arc<dyn Driver> {
        &self.device
    }

    fn unmap(&self, range: AddrRange) -> DriverResult<()> {
        let is_armed = *self.door.0.lock().unwrap() == Door::Armed;
        if is_armed {
            set(&self.door, Door::Reached);
            await_door(&self.door, Door::Open);
        }
        self.device.unmap(range)
    }
}

#[test]
fn a_close_waits_for_a_pause_on_another_thread() {
    let door = Arc::new((Mutex::new(Door::Open), Condvar::new()));
    let device = vramp_alloc::open("sim:h200").unwrap().driver;
    let device = Waiting { device, door: Arc::clone(&door) };
    let allocator = testing::open_on(Arc::new(Wrapped(device)), Config::default()).unwrap();
    let stream = stream(allocator);
    let scope = begin(allocator, "weights").unwrap();
    malloc(allocator, 64 << 20, stream).unwrap();
    set(&door, Door::Armed);
    thread::scope(|threads| {
        let pauses = threads.spawn(|| pause(allocator, &["weights"]));
        await_door(&door, Door::Reached);
        let closes = threads.spawn(|| vramp_close(allocator));
        // Once the close has begun, it waits and calls are refused.
        while states(allocator).is_ok() {
            thread::yield_now();
        }
        assert_eq!(resume(allocator, &["weights"]), VRAMP_ERROR_UNKNOWN_ALLOCATOR);
        assert!(!pauses.is_finished() && !closes.is_finished());
        set(&door, Door::Open);
        assert_eq!(pauses.join().unwrap(), VRAMP_OK);
        assert_eq!(closes.join().unwrap(), VRAMP_OK);
    });
    // The scope outlived its allocator.
    assert_eq!(vramp_region_end(scope), VRAMP_OK);
    assert_eq!(vramp_region_end(scope), VRAMP_ERROR_REGION);
}

#[test]
fn a_scope_ends_once_and_on_its_own_thread() {
    let allocator = open("");
    let scope = begin(allocator, "weights").unwrap();
    let elsewhere = thread::spawn(move || vramp_region_end(scope)).join().unwrap();
    assert_eq!(elsewhere, VRAMP_ERROR_REGION);
    let stream = stream(allocator);
    malloc(allocator, 4 << 20, stream).unwrap();
    assert_eq!(state(allocator, "weights").on_card, 4 << 20, "it has not ended");
    // A scope that its thread leaves open ends with the thread.
    let left = thread::spawn(move || begin(allocator, "left").unwrap()).join().unwrap();
    assert_eq!(vramp_region_end(left), VRAMP_ERROR_REGION);
    assert_eq!(vramp_region_end(scope), VRAMP_OK);
    assert_eq!(vramp_region_end(scope), VRAMP_ERROR_REGION);
    assert!(last_error().contains("thread that began it"), "{}", last_error());
    assert_eq!(vramp_region_end(vramp_region_scope_t::default()), VRAMP_ERROR_REGION);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

/// Calls when its thread ends, after the storage of threads that vramp has.
struct CallsLast(Cell<Option<(vramp_allocator_t, vramp_region_scope_t)>>);

thread_local! {
    static LAST: CallsLast = const { CallsLast(Cell::new(None)) };
}

static AT_END: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];

impl Drop for CallsLast {
    fn drop(&mut self) {
        let Some((allocator, scope)) = self.0.get() else { return };
        let begun = begin(allocator, "weights").err().unwrap_or(VRAMP_OK);
        AT_END[0].store(begun as u64, Ordering::Relaxed);
        AT_END[1].store(vramp_region_end(scope) as u64, Ordering::Relaxed);
    }
}

#[test]
fn a_thread_that_ends_is_in_no_region_any_more() {
    let allocator = open("");
    thread::spawn(move || {
        // What is used first ends last.
        LAST.with(|last| {
            let scope = begin(allocator, "weights").unwrap();
            last.0.set(Some((allocator, scope)));
        });
    })
    .join()
    .unwrap();
    for status in &AT_END {
        assert_eq!(status.load(Ordering::Relaxed), VRAMP_ERROR_REGION as u64);
    }
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

/// Statuses of a pause and a resume in a handler, each plus one; zero before it was called.
static IN_HANDLER: [AtomicU64; 3] = [const { AtomicU64::new(0) }; 3];

unsafe extern "C" fn tries_to_pause(
    _: *const vramp_capi::abi::vramp_shortage_t,
    user: *mut std::ffi::c_void,
) -> std::ffi::c_int {
    let allocator = vramp_allocator_t { id: user as u64 };
    let statuses = [
        pause(allocator, &["weights"]),
        resume(allocator, &["weights"]),
        clean(allocator, &["weights"]),
    ];
    for (seen, status) in IN_HANDLER.iter().zip(statuses) {
        seen.store(status as u64 + 1, Ordering::Relaxed);
    }
    0
}

#[test]
fn regions_are_not_moved_inside_a_callback() {
    let allocator = open("limit=128MiB");
    let stream = stream(allocator);
    let scope = begin(allocator, "weights").unwrap();
    malloc(allocator, 100 << 20, stream).unwrap();
    assert_eq!(vramp_region_end(scope), VRAMP_OK);
    let mut registration = 0;
    let user = allocator.id as *mut std::ffi::c_void;
    // SAFETY: the handler does not dereference the number, and may be called at any time.
    let status =
        unsafe { vramp_on_shortage(allocator, Some(tries_to_pause), user, &mut registration) };
    assert_eq!(status, VRAMP_OK);
    assert_eq!(malloc(allocator, 100 << 20, stream), Err(VRAMP_ERROR_OUT_OF_MEMORY));
    let busy = VRAMP_ERROR_BUSY as u64 + 1;
    for seen in &IN_HANDLER {
        assert_eq!(seen.load(Ordering::Relaxed), busy);
    }
    assert_eq!(state(allocator, "weights").on_card, 100 << 20);
    assert_eq!(pause(allocator, &["weights"]), VRAMP_OK, "{}", last_error());
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}
