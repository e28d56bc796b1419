//! Which calls on streams run at the same time.
//!
//! NVIDIA's manual leaves two things to the caller: calls on one graph must not run at the same time,
//! and a capture is a graph; and the array of dependencies that `cuStreamGetCaptureInfo` returns is
//! valid only until the next call on the stream, or the end of the capture. So each call on a stream
//! takes a turn:
//!
//! 1. While no capture that this device began is under way, calls on streams run at the same time.
//! 2. While one is, they run one at a time, because any stream may join it.
//! 3. Beginning, reading and ending a capture always run alone.
//!
//! No turn is held while the host waits for work of the device, except after a failed record: then the
//! stream itself is waited for, and no capture may begin on it meanwhile. Captures that other code begins are
//! unknown here: the contract of [`CudaDriver::adopt_stream`](crate::CudaDriver::adopt_stream) demands one thread at a time.
//!
//! Grows by one entry for each capture under way. The end of the capture removes it; if other code
//! ended it, the destruction of its stream.

use std::collections::BTreeMap;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Captures that this device began: the stream of each, with the number of the capture. `None` if
/// the driver did not report the number.
pub(crate) type Begun = BTreeMap<u64, Option<u64>>;

/// Lock of the calls on streams.
#[derive(Default)]
pub(crate) struct Turns(RwLock<Begun>);

/// Guard of one call on a stream.
pub(crate) enum Turn<'a> {
    /// Other calls on streams may run.
    Shared(#[expect(dead_code, reason = "held, not read")] RwLockReadGuard<'a, Begun>),
    /// No other call on a stream runs.
    Alone(Alone<'a>),
}

/// Guard of a call that runs alone.
pub(crate) struct Alone<'a>(RwLockWriteGuard<'a, Begun>);

impl Turns {
    /// Takes a turn for a call on a stream. Alone while a capture of this device is under way.
    pub(crate) fn take(&self) -> Turn<'_> {
        let shared = self.0.read().unwrap_or_else(PoisonError::into_inner);
        if shared.is_empty() {
            return Turn::Shared(shared);
        }
        drop(shared);
        // If the capture ended just now, the call runs alone without need.
        Turn::Alone(self.take_alone())
    }

    /// Takes a turn for a call that no other call on a stream may run beside.
    pub(crate) fn take_alone(&self) -> Alone<'_> {
        // A panic leaves at worst a capture listed that has ended: calls then take turns.
        Alone(self.0.write().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Turn<'_> {
    /// Returns true if this device began the capture.
    pub(crate) fn is_own(&self, capture: u64) -> bool {
        match self {
            Turn::Shared(_) => false,
            Turn::Alone(alone) => alone.0.values().any(|begun| *begun == Some(capture)),
        }
    }
}

impl Alone<'_> {
    /// Records that a capture began on `stream`.
    pub(crate) fn begun(&mut self, stream: u64, capture: Option<u64>) {
        self.0.insert(stream, capture);
    }

    /// Records that the capture that began on `stream` is over. Returns its number, if it is known.
    pub(crate) fn ended(&mut self, stream: u64) -> Option<u64> {
        self.0.remove(&stream).flatten()
    }
}

/// How the lock is held now, for tests.
#[cfg(test)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Held {
    Free,
    Shared,
    Alone,
}

#[cfg(test)]
impl Turns {
    pub(crate) fn held(&self) -> Held {
        if self.0.try_write().is_ok() {
            Held::Free
        } else if self.0.try_read().is_ok() {
            Held::Shared
        } else {
            Held::Alone
        }
    }

    pub(crate) fn under_way(&self) -> usize {
        self.0.read().unwrap().len()
    }
}
