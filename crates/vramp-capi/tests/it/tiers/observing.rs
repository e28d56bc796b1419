//! Observers of buffers, locks by stream, statistics and failures.

use std::ffi::{CStr, c_char, c_void};
use std::ptr::null_mut;
use std::sync::{Condvar, Mutex};
use std::time::Duration;

use crate::common::tiers::*;
use crate::common::*;
use vramp_capi::abi::vramp_allocator_t;
use vramp_capi::abi::vramp_status_t::{self, *};
use vramp_capi::interface::*;
use vramp_capi::tiers::abi::vramp_buffer_change_t::{self, *};
use vramp_capi::tiers::abi::*;
use vramp_capi::tiers::buffers::*;
use vramp_capi::tiers::leases::*;
use vramp_capi::tiers::observing::*;
use vramp_capi::tiers::*;

type Act = Box<dyn Fn(&vramp_buffer_event_t) -> Vec<vramp_status_t> + Send + Sync>;

/// What an observer saw, and what it does with each event.
#[derive(Default)]
struct Seen {
    events: Mutex<Vec<vramp_buffer_event_t>>,
    statuses: Mutex<Vec<vramp_status_t>>,
    arrived: Condvar,
    act: Option<Act>,
}

impl Seen {
    fn user(&self) -> *mut c_void {
        std::ptr::from_ref(self).cast_mut().cast()
    }

    /// Waits until the last event is of this kind, and returns all.
    fn until(&self, last: vramp_buffer_change_t) -> Vec<vramp_buffer_event_t> {
        let mut events = self.events.lock().unwrap();
        while events.last().is_none_or(|event| event.change != last) {
            let waited = self.arrived.wait_timeout(events, Duration::from_secs(60)).unwrap();
            assert!(!waited.1.timed_out(), "no event {last:?}: {:?}", waited.0);
            events = waited.0;
        }
        events.clone()
    }
}

unsafe extern "C" fn see(event: *const vramp_buffer_event_t, user: *mut c_void) {
    // SAFETY: the tests keep it until the observer is removed.
    let seen = unsafe { &*user.cast::<Seen>() };
    // SAFETY: an event is valid during the call.
    let event = unsafe { *event };
    if let Some(act) = &seen.act {
        seen.statuses.lock().unwrap().extend(act(&event));
    }
    seen.events.lock().unwrap().push(event);
    seen.arrived.notify_all();
}

fn observe(allocator: vramp_allocator_t, seen: &Seen) -> u64 {
    let mut registration = 0;
    // SAFETY: the tests keep `seen` until the observer is removed.
    let status =
        unsafe { vramp_buffers_observe(allocator, Some(see), seen.user(), &mut registration) };
    assert_eq!(status, VRAMP_OK, "{}", last_error());
    registration
}

#[test]
fn an_observer_sees_the_life_of_a_buffer_in_order() {
    let allocator = open_with_tiers(64, 64 * MIB);
    let stream = stream(allocator);
    let seen = Seen::default();
    let registration = observe(allocator, &seen);
    let one = buffer(allocator, 8 * MIB).unwrap();
    write(allocator, one, &vec![1; 8 * MIB as usize]).unwrap();
    assert_eq!(evict(allocator, 8 * MIB), 8 * MIB);
    let (held, _) = lease(allocator, &[(one, VRAMP_ACCESS_READ)], stream, 0).unwrap();
    assert_eq!(info(allocator, one).unwrap().leases, 1);
    assert_eq!(vramp_buffer_lease_end(allocator, held), VRAMP_OK);
    assert_eq!(vramp_buffer_destroy(allocator, one), VRAMP_OK);
    // The work that the lease was for is complete.
    assert_eq!(vramp_sync_and_unlock(allocator, stream), VRAMP_OK);
    let events = seen.until(VRAMP_BUFFER_FREED);
    assert!(events.iter().all(|event| event.buffer == one && event.size == 8 * MIB));
    let kinds: Vec<_> = events.iter().map(|event| event.change).collect();
    let expected = [
        VRAMP_BUFFER_CREATED,
        VRAMP_BUFFER_LOCKED,
        VRAMP_BUFFER_UNLOCKED,
        VRAMP_BUFFER_WAS_DEFERRED,
        VRAMP_BUFFER_LOCKED,
        VRAMP_BUFFER_RETRIEVED,
        VRAMP_BUFFER_UNLOCKED,
        VRAMP_BUFFER_FREED,
    ];
    assert_eq!(kinds, expected);
    let deferred = events[3];
    assert_eq!((deferred.from, deferred.to), (VRAMP_TIER_DEVICE, VRAMP_TIER_HOST));
    assert_eq!((deferred.bytes, deferred.deferred_bytes), (8 * MIB, 8 * MIB));
    assert_eq!((events[4].leases, events[6].leases), (1, 0));
    assert_eq!(vramp_buffers_unobserve(allocator, registration), VRAMP_OK);
    assert_eq!(vramp_buffers_unobserve(allocator, registration), VRAMP_ERROR_RANGE);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn a_removed_observer_gets_no_event_and_others_go_on() {
    let allocator = open_with_tiers(64, 64 * MIB);
    let (first, second) = (Seen::default(), Seen::default());
    let registrations = [observe(allocator, &first), observe(allocator, &second)];
    buffer(allocator, 4096).unwrap();
    second.until(VRAMP_BUFFER_CREATED);
    assert_eq!(vramp_buffers_unobserve(allocator, registrations[0]), VRAMP_OK);
    let before = first.events.lock().unwrap().len();
    assert_eq!(before, 1, "observers are called in the order of registration");
    let other = buffer(allocator, 4096).unwrap();
    assert_eq!(vramp_buffer_destroy(allocator, other), VRAMP_OK);
    second.until(VRAMP_BUFFER_FREED);
    assert_eq!(first.events.lock().unwrap().len(), before);
    // The end of the tiers ends observers: none of its buffers' ends is seen.
    let seen = second.events.lock().unwrap().len();
    assert_eq!(vramp_close(allocator), VRAMP_OK);
    assert_eq!(second.events.lock().unwrap().len(), seen);
}

#[test]
fn an_observer_may_call_the_interface_but_close_nothing() {
    let allocator = open_with_tiers(64, 64 * MIB);
    let other = open("");
    let act: Act = Box::new(move |event| {
        let mut statuses =
            vec![vramp_tiers_close(allocator), vramp_close(allocator), vramp_close(other)];
        if event.change == VRAMP_BUFFER_CREATED {
            assert_eq!(info(allocator, event.buffer).map(|info| info.size), Ok(4096));
            statuses.push(vramp_buffer_destroy(allocator, event.buffer));
        }
        statuses
    });
    let seen = Seen { act: Some(act), ..Seen::default() };
    let registration = observe(allocator, &seen);
    buffer(allocator, 4096).unwrap();
    assert_eq!(seen.until(VRAMP_BUFFER_FREED).len(), 2);
    assert_eq!(vramp_buffers_unobserve(allocator, registration), VRAMP_OK);
    let busy = VRAMP_ERROR_BUSY;
    let expected = [busy, busy, busy, VRAMP_OK, busy, busy, busy];
    assert_eq!(*seen.statuses.lock().unwrap(), expected);
    assert_eq!((vramp_close(allocator), vramp_close(other)), (VRAMP_OK, VRAMP_OK));
}

#[test]
fn an_observer_removes_itself() {
    let allocator = open_with_tiers(64, 64 * MIB);
    let own = std::sync::Arc::new(Mutex::new(0));
    let number = std::sync::Arc::clone(&own);
    let act: Act =
        Box::new(move |_| vec![vramp_buffers_unobserve(allocator, *number.lock().unwrap())]);
    let seen = Seen { act: Some(act), ..Seen::default() };
    *own.lock().unwrap() = observe(allocator, &seen);
    buffer(allocator, 4096).unwrap();
    seen.until(VRAMP_BUFFER_CREATED);
    buffer(allocator, 4096).unwrap();
    assert_eq!(vramp_close(allocator), VRAMP_OK);
    assert_eq!(*seen.statuses.lock().unwrap(), [VRAMP_OK]);
    assert_eq!(seen.events.lock().unwrap().len(), 1);
}

#[test]
fn locks_of_a_stream_end_together() {
    let allocator = open_with_tiers(64, 64 * MIB);
    let (one, other) = (stream(allocator), stream(allocator));
    let buffers: Vec<_> = (0..3).map(|_| buffer(allocator, 8 * MIB).unwrap()).collect();
    let lock = |wanted: &[usize], stream| {
        let uses: Vec<_> = wanted
            .iter()
            .map(|&nth| vramp_buffer_use_t { buffer: buffers[nth], access: VRAMP_ACCESS_WRITE })
            .collect();
        let mut addresses = [null_mut(); 3];
        let (from, to) = (uses.as_ptr(), addresses.as_mut_ptr());
        // SAFETY: the arrays have as many elements, and outlive the call.
        let status = unsafe { vramp_lock(allocator, from, uses.len(), stream, 0, to) };
        outcome(status, addresses)
    };
    let leases = |nth: usize| info(allocator, buffers[nth]).unwrap().leases;
    let addresses = lock(&[0, 1], one).unwrap();
    assert_eq!(addresses[1], info(allocator, buffers[1]).unwrap().address);
    lock(&[2], one).unwrap();
    assert_eq!(lock(&[1], other), Err(VRAMP_ERROR_TIMEOUT));
    assert_eq!([leases(0), leases(1), leases(2)], [1, 1, 1]);
    assert_eq!(vramp_unlock(allocator, other), VRAMP_ERROR_UNKNOWN_LEASE);
    assert_eq!(vramp_unlock(allocator, one), VRAMP_OK);
    assert_eq!([leases(0), leases(1), leases(2)], [0, 0, 0]);
    lock(&[0, 2], other).unwrap();
    assert_eq!(evict(allocator, 1 << 30), 8 * MIB, "the one that is not locked");
    assert_eq!(vramp_stream_forget(allocator, other), VRAMP_OK);
    assert_eq!(leases(0), 1, "a lock outlives the handle of its stream");
    assert_eq!(vramp_sync_and_unlock(allocator, other), VRAMP_OK);
    assert_eq!(leases(0), 0);
    assert_eq!(vramp_sync_and_unlock(allocator, one), VRAMP_OK, "it only waits");
    assert!(evict(allocator, 1 << 30) >= 16 * MIB);
    assert_eq!(info(allocator, buffers[0]).unwrap().device_bytes, 0);
    assert_eq!(vramp_buffer_retrieve(allocator, buffers[0], 0), VRAMP_OK);
    assert_eq!(info(allocator, buffers[0]).unwrap().device_bytes, 8 * MIB);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

unsafe extern "C" fn count(text: *const c_char, user: *mut c_void) {
    // SAFETY: a text is valid during the call.
    assert!(!unsafe { CStr::from_ptr(text) }.is_empty());
    // SAFETY: the caller passes a number.
    unsafe { *user.cast::<u32>() += 1 };
}

#[test]
fn statistics_sum_buffers_and_moves() {
    let allocator = open_with_tiers(64, 64 * MIB);
    let one = buffer(allocator, 8 * MIB).unwrap();
    write(allocator, one, &vec![1; 8 * MIB as usize]).unwrap();
    evict(allocator, 8 * MIB);
    let mut stats = vramp_tiers_stats_t {
        struct_size: size_of::<vramp_tiers_stats_t>() as u64,
        ..vramp_tiers_stats_t::default()
    };
    // SAFETY: the result outlives the call.
    assert_eq!(unsafe { vramp_tiers_stats(allocator, &mut stats) }, VRAMP_OK);
    assert_eq!((stats.buffers, stats.leases, stats.total), (1, 0, 8 * MIB));
    assert_eq!((stats.deferred, stats.host_copies, stats.to_host), (8 * MIB, 8 * MIB, 8 * MIB));
    assert_eq!((stats.evicted, stats.failures, stats.resident), (8 * MIB, 0, 0));
    let mut failures = 0_u32;
    let user = (&raw mut failures).cast::<c_void>();
    // SAFETY: the number outlives the call.
    assert_eq!(unsafe { vramp_tiers_failures(allocator, Some(count), user) }, VRAMP_OK);
    assert_eq!(failures, 0);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}
