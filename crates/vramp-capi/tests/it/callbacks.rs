//! What an observer in C may do, and how closing and removing it meet calls in progress.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Barrier, Mutex};
use std::thread;
use std::time::Duration;

use crate::common::*;
use vramp_capi::abi::vramp_event_kind_t::*;
use vramp_capi::abi::vramp_status_t::{self, *};
use vramp_capi::abi::{vramp_allocator_t, vramp_event_t, vramp_stream_t};
use vramp_capi::interface::*;

const ENOUGH: Duration = Duration::from_secs(60);

/// An observer as a closure. It lives as long as the process, because the tests are about the end of
/// the observer and not of the closure.
type Code = Box<dyn Fn(vramp_event_t) + Send + Sync>;

unsafe extern "C" fn run(event: *const vramp_event_t, user: *mut c_void) {
    // SAFETY: vramp gives an event, and `observe` a closure that lives on.
    let (event, code) = unsafe { (*event, &*user.cast::<Code>()) };
    code(event);
}

fn observe(
    allocator: vramp_allocator_t,
    code: impl Fn(vramp_event_t) + Send + Sync + 'static,
) -> u64 {
    let code: Code = Box::new(code);
    let user = Box::leak(Box::new(code));
    let mut registration = 0;
    // SAFETY: the closure may be called from any thread for as long as the process runs.
    let status =
        unsafe { vramp_observe(allocator, Some(run), (&raw mut *user).cast(), &mut registration) };
    assert_eq!(status, VRAMP_OK, "{}", last_error());
    registration
}

/// Runs `work` on another thread and fails the test if it does not end.
fn finishes(work: impl FnOnce() + Send + 'static) {
    let (done, over) = channel();
    let thread = thread::spawn(move || {
        work();
        done.send(()).unwrap();
    });
    let ended = over.recv_timeout(ENOUGH);
    // A panic of the thread ends it too, and is reported here.
    assert!(ended.is_ok() || thread.is_finished(), "it hangs");
    thread.join().unwrap();
}

fn pair(allocator: vramp_allocator_t, stream: vramp_stream_t) -> Result<(), vramp_status_t> {
    let block = malloc(allocator, 1000, stream)?;
    match vramp_free(allocator, block, stream) {
        VRAMP_OK => Ok(()),
        status => Err(status),
    }
}

fn usable(allocator: vramp_allocator_t, address: u64) -> Result<usize, vramp_status_t> {
    let mut size = 0;
    // SAFETY: the result outlives the call.
    match unsafe { vramp_usable_size(allocator, address as *mut c_void, &mut size) } {
        VRAMP_OK => Ok(size),
        status => Err(status),
    }
}

#[test]
fn an_observer_finds_the_block_that_it_hears_of_and_so_does_a_thread_that_it_tells() {
    finishes(|| {
        let allocator = open("");
        let stream = stream(allocator);
        observe(allocator, move |event| match event.kind {
            VRAMP_EVENT_ALLOCATED => {
                let found = thread::spawn(move || usable(allocator, event.address));
                assert_eq!(found.join().unwrap(), Ok(event.size as usize));
                assert_eq!(usable(allocator, event.address), Ok(event.size as usize));
            }
            VRAMP_EVENT_FREED => {
                assert_eq!(usable(allocator, event.address), Err(VRAMP_ERROR_UNKNOWN_POINTER));
            }
            _ => {}
        });
        for size in [100, 100, 8 << 20] {
            let block = malloc(allocator, size, stream).unwrap();
            assert_eq!(vramp_free(allocator, block, stream), VRAMP_OK);
        }
        assert_eq!(vramp_close(allocator), VRAMP_OK);
    });
}

#[test]
fn an_observer_may_free_the_block_that_it_hears_of() {
    let allocator = open("");
    let stream = stream(allocator);
    let registration = observe(allocator, move |event| {
        if event.kind == VRAMP_EVENT_ALLOCATED {
            let block = event.address as *mut c_void;
            assert_eq!(vramp_free(allocator, block, stream), VRAMP_OK);
        }
    });
    let block = malloc(allocator, 100, stream).unwrap();
    assert_eq!(vramp_free(allocator, block, stream), VRAMP_ERROR_UNKNOWN_POINTER);
    assert_eq!((stats(allocator).live, stats(allocator).freed), (0, 1));
    assert_eq!(vramp_unobserve(allocator, registration), VRAMP_OK);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn closing_inside_an_observer_is_refused_and_says_what_to_do() {
    finishes(|| {
        let allocator = open("");
        let stream = stream(allocator);
        let refused = &*Box::leak(Box::new(AtomicU64::new(0)));
        observe(allocator, move |_| {
            assert_eq!(vramp_close(allocator), VRAMP_ERROR_BUSY);
            assert!(last_error().contains("return from it, and then close"), "{}", last_error());
            refused.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(pair(allocator, stream), Ok(()));
        assert!(refused.load(Ordering::Relaxed) >= 2);
        assert_eq!(vramp_close(allocator), VRAMP_OK);
        assert_eq!(vramp_close(allocator), VRAMP_ERROR_UNKNOWN_ALLOCATOR);
    });
}

#[test]
fn calls_inside_an_observer_are_served_while_another_thread_closes() {
    finishes(|| {
        let allocator = open("");
        let stream = stream(allocator);
        let (begun, began) = channel();
        let begun = Mutex::new(begun);
        let refused = &*Box::leak(Box::new(AtomicBool::new(false)));
        observe(allocator, move |event| {
            if event.requested != 1000 || event.kind != VRAMP_EVENT_ALLOCATED {
                return;
            }
            begun.lock().unwrap().send(()).unwrap();
            // Until the close waits: from then on calls from outside are refused.
            while !refused.load(Ordering::SeqCst) {
                thread::yield_now();
            }
            assert_eq!(usable(allocator, event.address), Ok(event.size as usize));
            assert_eq!(stats(allocator).live, 1000);
            let block = malloc(allocator, 500, stream).unwrap();
            assert_eq!(vramp_free(allocator, block, stream), VRAMP_OK);
            assert_eq!(vramp_close(allocator), VRAMP_ERROR_BUSY);
        });
        thread::scope(|scope| {
            let caller = scope.spawn(|| malloc(allocator, 1000, stream).map(drop));
            began.recv_timeout(ENOUGH).unwrap();
            let closer = scope.spawn(|| vramp_close(allocator));
            // Threads of other stripes: each is refused once the closer has come to its own.
            while usable_anywhere(allocator) != Err(VRAMP_ERROR_UNKNOWN_ALLOCATOR) {
                thread::yield_now();
            }
            refused.store(true, Ordering::SeqCst);
            assert!(caller.join().unwrap().is_ok());
            assert_eq!(closer.join().unwrap(), VRAMP_OK);
        });
    });
}

/// Asks on a new thread.
fn usable_anywhere(allocator: vramp_allocator_t) -> Result<usize, vramp_status_t> {
    thread::spawn(move || match usable(allocator, 1) {
        Err(VRAMP_ERROR_UNKNOWN_POINTER) => Ok(0),
        other => other,
    })
    .join()
    .unwrap()
}

#[test]
fn observers_of_two_allocators_call_each_other_while_both_are_closed() {
    finishes(|| {
        for _ in 0..30 {
            let both = [open(""), open("")];
            let streams = both.map(stream);
            for index in 0..2 {
                let (other, on) = (both[1 - index], streams[1 - index]);
                observe(both[index], move |_| {
                    // Served, or refused because it is being closed.
                    let done = pair(other, on);
                    assert!(matches!(done, Ok(()) | Err(VRAMP_ERROR_UNKNOWN_ALLOCATOR)));
                });
            }
            let begin = Barrier::new(8);
            thread::scope(|scope| {
                for caller in 0..6 {
                    let (allocator, stream) = (both[caller % 2], streams[caller % 2]);
                    let begin = &begin;
                    scope.spawn(move || {
                        begin.wait();
                        while pair(allocator, stream).is_ok() {}
                    });
                }
                for allocator in both {
                    let begin = &begin;
                    scope.spawn(move || {
                        begin.wait();
                        assert_eq!(vramp_close(allocator), VRAMP_OK);
                    });
                }
            });
        }
    });
}

#[test]
fn observers_that_close_each_others_allocators_do_not_wait() {
    finishes(|| {
        for _ in 0..30 {
            let both = [open(""), open("")];
            let streams = both.map(stream);
            let inside = &*Box::leak(Box::new(Barrier::new(2)));
            let statuses = &*Box::leak(Box::new(Mutex::new(Vec::new())));
            for index in 0..2 {
                let other = both[1 - index];
                observe(both[index], move |event| {
                    if event.kind == VRAMP_EVENT_ALLOCATED {
                        inside.wait();
                        let status = vramp_close(other);
                        statuses.lock().unwrap().push((status, last_error()));
                        inside.wait();
                    }
                });
            }
            thread::scope(|scope| {
                for index in 0..2 {
                    scope
                        .spawn(move || malloc(both[index], 100, streams[index]).map(drop).unwrap());
                }
            });
            for (status, text) in &*statuses.lock().unwrap() {
                assert_eq!(*status, VRAMP_ERROR_BUSY);
                assert!(text.contains("a callback does not wait"), "{text}");
            }
            for allocator in both {
                assert_eq!(vramp_close(allocator), VRAMP_OK);
            }
        }
    });
}

#[test]
fn an_observer_opens_and_closes_another_allocator() {
    finishes(|| {
        let allocator = open("");
        let stream = stream(allocator);
        let done = &*Box::leak(Box::new(AtomicU64::new(0)));
        observe(allocator, move |_| {
            let other = open("");
            assert_eq!(pair(other, crate::common::stream(other)), Ok(()));
            assert_eq!(vramp_close(other), VRAMP_OK);
            done.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(pair(allocator, stream), Ok(()));
        assert!(done.load(Ordering::Relaxed) >= 2);
        assert_eq!(vramp_close(allocator), VRAMP_OK);
    });
}

#[test]
fn a_removed_observer_does_not_run_so_its_user_pointer_may_be_freed() {
    unsafe extern "C" fn alive(_: *const vramp_event_t, user: *mut c_void) {
        // SAFETY: the test frees it only after the observer was removed.
        let alive = unsafe { &*user.cast::<AtomicBool>() };
        assert!(alive.load(Ordering::SeqCst));
    }
    let allocator = open("");
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                let stream = stream(allocator);
                while !stop.load(Ordering::Relaxed) {
                    assert_eq!(pair(allocator, stream), Ok(()));
                }
            });
        }
        let mut last = 0;
        for _ in 0..500 {
            let user = Box::new(AtomicBool::new(true));
            let mut registration = 0;
            let raw = (&raw const *user).cast_mut().cast();
            // SAFETY: `user` lives until the observer is removed.
            let status = unsafe { vramp_observe(allocator, Some(alive), raw, &mut registration) };
            assert_eq!(status, VRAMP_OK);
            assert!(registration > last, "numbers are not used again");
            last = registration;
            assert_eq!(vramp_unobserve(allocator, registration), VRAMP_OK);
            user.store(false, Ordering::SeqCst);
            drop(user);
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn observers_that_remove_each_other_and_themselves_do_not_wait() {
    finishes(|| {
        let allocator = open("");
        let stream = stream(allocator);
        let registrations = &*Box::leak(Box::new(Mutex::new(Vec::new())));
        for _ in 0..2 {
            let registration = observe(allocator, move |_| {
                for registration in std::mem::take(&mut *registrations.lock().unwrap()) {
                    assert_eq!(vramp_unobserve(allocator, registration), VRAMP_OK);
                }
            });
            registrations.lock().unwrap().push(registration);
        }
        assert_eq!(pair(allocator, stream), Ok(()));
        assert_eq!(vramp_unobserve(allocator, 1), VRAMP_ERROR_RANGE);
        assert_eq!(vramp_close(allocator), VRAMP_OK);
    });
}

#[test]
fn closes_meet_opens_that_reuse_their_slots() {
    finishes(|| {
        let stale = &*Box::leak(Box::new(Mutex::new(Vec::new())));
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(move || {
                    for _ in 0..60 {
                        let allocator = open("");
                        let stream = stream(allocator);
                        stale.lock().unwrap().push((allocator, stream));
                        observe(allocator, move |_| assert!(stats(allocator).placed > 0));
                        assert_eq!(pair(allocator, stream), Ok(()));
                        // Of two closes one succeeds.
                        let other = thread::spawn(move || vramp_close(allocator));
                        let mut both = [vramp_close(allocator), other.join().unwrap()];
                        both.sort_by_key(|status| *status as u32);
                        assert_eq!(both, [VRAMP_OK, VRAMP_ERROR_UNKNOWN_ALLOCATOR]);
                    }
                });
            }
            scope.spawn(move || {
                for _ in 0..20_000 {
                    let handles = stale.lock().unwrap().last().copied();
                    let Some((allocator, stream)) = handles else { continue };
                    let done = malloc(allocator, 64, stream);
                    assert!(matches!(done, Ok(_) | Err(VRAMP_ERROR_UNKNOWN_ALLOCATOR)), "{done:?}");
                }
            });
        });
    });
}

#[test]
fn a_history_is_bounded_and_says_by_what() {
    let allocator = open("");
    assert_eq!(vramp_record_history(allocator, u32::MAX), VRAMP_ERROR_RANGE);
    assert!(last_error().contains("use at most 10000000"), "{}", last_error());
    assert_eq!(vramp_record_history(allocator, 10_000_000), VRAMP_OK);
    let mut registration = 0;
    // SAFETY: null is what the function must withstand.
    let status = unsafe { vramp_observe(allocator, None, null_mut(), &mut registration) };
    assert_eq!((status, registration), (VRAMP_ERROR_NULL, 0));
    // A history is no observer of the caller's.
    assert!((0..10).all(|number| vramp_unobserve(allocator, number) == VRAMP_ERROR_RANGE));
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn a_thread_that_ends_has_a_message_that_says_so() {
    struct AtTheEnd;
    static TEXT: Mutex<String> = Mutex::new(String::new());
    impl Drop for AtTheEnd {
        fn drop(&mut self) {
            assert_eq!(vramp_close(vramp_allocator_t::default()), VRAMP_ERROR_UNKNOWN_ALLOCATOR);
            *TEXT.lock().unwrap() = last_error();
        }
    }
    thread_local! {
        static END: AtTheEnd = const { AtTheEnd };
    }
    thread::spawn(|| {
        // Destroyed after the library's own storage, which is used later.
        END.with(|_| ());
        assert_eq!(vramp_close(vramp_allocator_t::default()), VRAMP_ERROR_UNKNOWN_ALLOCATOR);
        assert!(last_error().contains("the allocator is zero"));
    })
    .join()
    .unwrap();
    let text = TEXT.lock().unwrap();
    assert!(text.contains("the thread is ending"), "{text}");
}
