//! Numbers of threads, to tell whose per-thread default stream a stream is.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

/// Number of a thread. No later thread of the process gets it.
///
/// It can be asked for while the thread ends, also after its other thread-local values were dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ThreadNumber(u64);

static NEXT: AtomicU64 = AtomicU64::new(1);

thread_local! {
    /// Zero before the first use. It has no destructor.
    static OWN: Cell<u64> = const { Cell::new(0) };
}

impl ThreadNumber {
    /// Returns the number of the calling thread.
    #[inline]
    pub fn current() -> ThreadNumber {
        OWN.with(|own| {
            if own.get() == 0 {
                own.set(NEXT.fetch_add(1, Ordering::Relaxed));
            }
            ThreadNumber(own.get())
        })
    }
}

/// Which thread's stream an id means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamThread {
    /// The id means one stream in every thread.
    Any,
    /// The calling thread's per-thread default stream.
    This,
    /// The per-thread default stream of another thread.
    Other,
}

impl StreamThread {
    /// Returns which it is for a stream of `owner`; `None` for one that is no thread's.
    pub fn of(owner: Option<ThreadNumber>) -> StreamThread {
        match owner {
            None => StreamThread::Any,
            Some(owner) if owner == ThreadNumber::current() => StreamThread::This,
            Some(_) => StreamThread::Other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_of_one_thread_only() {
        let own = ThreadNumber::current();
        let other = std::thread::spawn(ThreadNumber::current).join().unwrap();
        assert_eq!(own, ThreadNumber::current());
        assert_ne!(own, other);
        assert_eq!(StreamThread::of(Some(own)), StreamThread::This);
        assert_eq!(StreamThread::of(Some(other)), StreamThread::Other);
        assert_eq!(StreamThread::of(None), StreamThread::Any);
    }
}
