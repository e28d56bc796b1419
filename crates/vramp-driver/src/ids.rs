//! Ids of the objects that a device creates.
//!
//! Modes and state of stream captures.
//!
//! Numbers of threads, to tell whose per-thread default stream a stream is.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! opaque_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(u64);

        impl $name {
            /// Returns the id with this number. Only the device that issued the number accepts it.
            pub const fn from_number(number: u64) -> $name {
                $name(number)
            }

            /// Returns the number, for output and for C.
            pub const fn number(self) -> u64 {
                self.0
            }
        }
    };
}

opaque_id! {
    /// Physical memory that [`Driver::create`](crate::Driver::create) allocated.
    Handle
}
opaque_id! {
    /// A stream. Its work runs in the order in which it was queued.
    Stream
}
opaque_id! {
    /// A point in a stream's work that can be queried, waited for or synchronised. Never carries
    /// timing.
    Event
}
opaque_id! {
    /// Pinned host memory, allocated by the driver or registered with it. Copies from and to it run
    /// at full speed.
    HostBuffer
}
opaque_id! {
    /// A captured graph, not yet instantiated.
    Graph
}
opaque_id! {
    /// An instantiated graph, which can be launched.
    GraphExec
}
opaque_id! {
    /// A node of a graph: one piece of captured work. Valid while its capture or its graph lives.
    GraphNode
}

/// Threads that a capture forbids the calls that are unsafe during a capture, such as
/// [`Driver::query`](crate::Driver::query) and
/// [`Driver::alloc_memory`](crate::Driver::alloc_memory).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CaptureMode {
    /// Every thread.
    Global,
    /// The thread that began the capture.
    ThreadLocal,
    /// No thread.
    Relaxed,
}

impl CaptureMode {
    /// Every mode, the strictest first.
    pub const ALL: [CaptureMode; 3] =
        [CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed];
}

/// State of a capture on one of its streams.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CaptureInfo {
    /// Number of the capture, unique for the device and never reused.
    pub capture: u64,
    /// Nodes that the next work of the stream will depend on, in no order.
    pub dependencies: Vec<GraphNode>,
}

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
mod thread_tests {
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
