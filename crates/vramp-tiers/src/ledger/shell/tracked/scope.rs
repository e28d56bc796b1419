//! What a reservation is attached to.

use std::fmt;
use std::thread::{self, ThreadId};

use vramp_alloc::StreamId;

/// Allocations that are charged to an attached reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scope {
    /// Allocations on a stream, by any thread.
    Stream(StreamId),
    /// Allocations by a thread, on any stream. Precedes the stream's reservation.
    Thread(ThreadId),
}

impl Scope {
    /// Returns the scope of the calling thread.
    pub fn this_thread() -> Scope {
        Scope::Thread(thread::current().id())
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Scope::Stream(stream) => stream.fmt(f),
            Scope::Thread(thread) => write!(f, "{thread:?}"),
        }
    }
}
