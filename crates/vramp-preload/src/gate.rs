//! Calls that use the card wait here while the program's memory is away.
//!
//! A call is counted from before it looks at the gate until it returns, so that a pause knows when no call is under way
//! any more: then the work that is queued is all there is. A call costs two locked instructions on a counter that few
//! threads share. There is no gate without `--sleepable`: the functions are the driver's own.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Counters, so that threads seldom share one.
const COUNTERS: usize = 64;

#[repr(align(128))]
struct Counter(AtomicU64);

static UNDER_WAY: [Counter; COUNTERS] = [const { Counter(AtomicU64::new(0)) }; COUNTERS];
static IS_CLOSED: AtomicBool = AtomicBool::new(false);
static IS_ANNOUNCED: AtomicBool = AtomicBool::new(false);
static CHANGED: (Mutex<()>, Condvar) = (Mutex::new(()), Condvar::new());

/// Returns the counter of the calling thread.
fn counter() -> &'static AtomicU64 {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static PLACE: std::cell::Cell<usize> = const { std::cell::Cell::new(usize::MAX) };
    }
    let place = match PLACE.get() {
        usize::MAX => {
            let place = NEXT.fetch_add(1, Ordering::Relaxed) % COUNTERS;
            PLACE.set(place);
            place
        }
        place => place,
    };
    &UNDER_WAY[place].0
}

/// Begins a call, once the gate is open.
#[inline]
pub fn enter() {
    loop {
        counter().fetch_add(1, Ordering::SeqCst);
        if !IS_CLOSED.load(Ordering::SeqCst) {
            return;
        }
        leave();
        wait();
    }
}

/// Ends a call.
#[inline]
pub fn leave() {
    counter().fetch_sub(1, Ordering::SeqCst);
}

#[cold]
fn wait() {
    let (lock, changed) = &CHANGED;
    let mut held = lock.lock().unwrap_or_else(PoisonError::into_inner);
    while IS_CLOSED.load(Ordering::SeqCst) {
        held = changed.wait(held).unwrap_or_else(PoisonError::into_inner);
    }
}

/// Closes the gate and waits until no call is under way. Returns false, and opens it again, if one is still after
/// `patience`: it may wait for what a call behind the gate would do.
pub fn close(patience: Duration) -> bool {
    IS_CLOSED.store(true, Ordering::SeqCst);
    let start = Instant::now();
    while UNDER_WAY.iter().any(|counter| counter.0.load(Ordering::SeqCst) != 0) {
        if start.elapsed() > patience {
            open();
            return false;
        }
        std::thread::sleep(Duration::from_micros(20));
    }
    true
}

/// Says whether the gate is about to close, for [`give_way`].
pub fn announce(is_about_to_close: bool) {
    IS_ANNOUNCED.store(is_about_to_close, Ordering::SeqCst);
}

/// In a call, before it begins what the gate does not close in: lets the gate close first, while `may_wait`.
pub fn give_way(may_wait: impl Fn() -> bool) {
    while IS_ANNOUNCED.load(Ordering::SeqCst) && may_wait() {
        leave();
        std::thread::sleep(Duration::from_millis(1));
        enter();
    }
}

/// Opens the gate.
pub fn open() {
    let (lock, changed) = &CHANGED;
    let _held = lock.lock().unwrap_or_else(PoisonError::into_inner);
    IS_CLOSED.store(false, Ordering::SeqCst);
    changed.notify_all();
}

/// In a forked child, where no other thread is left.
pub fn reset() {
    UNDER_WAY.iter().for_each(|counter| counter.0.store(0, Ordering::SeqCst));
    IS_CLOSED.store(false, Ordering::SeqCst);
    announce(false);
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;

    /// One test, because the gate is the process's.
    #[test]
    fn no_call_is_under_way_while_the_gate_is_closed() {
        let (inside, done) = (AtomicU32::new(0), AtomicBool::new(false));
        std::thread::scope(|threads| {
            for _ in 0..4 {
                threads.spawn(|| {
                    while !done.load(Ordering::Relaxed) {
                        enter();
                        inside.fetch_add(1, Ordering::SeqCst);
                        std::hint::spin_loop();
                        inside.fetch_sub(1, Ordering::SeqCst);
                        leave();
                    }
                });
            }
            for _ in 0..300 {
                assert!(close(Duration::from_secs(60)));
                for _ in 0..50 {
                    assert_eq!(inside.load(Ordering::SeqCst), 0);
                }
                open();
            }
            done.store(true, Ordering::Relaxed);
        });
        enter();
        assert!(!close(Duration::from_millis(5)), "a call is under way");
        leave();
        enter();
        leave();
    }
}
