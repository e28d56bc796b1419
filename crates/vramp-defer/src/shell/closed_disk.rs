//! A disk that failed gets no new copies for a while, so that it is not tried without pause.
//!
//! 1. A copy to the disk fails: the disk is closed for 10 ms. Each further failure in a row doubles
//!    the time, up to [`SpillConfig::disk_backoff_max`](super::SpillConfig::disk_backoff_max).
//! 2. A closed disk has no room for the planner. Copies that were chosen before and have not begun are
//!    given up.
//! 3. A request that lacks memory meanwhile is refused with the error of the disk.
//! 4. A copy that succeeds opens the disk. So does a call of the program that moves contents: it is
//!    tried at once.
//!
//! The time is the host's: a device's clock may stand still while threads wait. What is on the disk is
//! read at any time.

use std::time::{Duration, Instant};

use super::report::FailedMove;
use crate::planner::Backoff;
use crate::sync::{Mutex, lock};

const FIRST: Duration = Duration::from_millis(10);

/// Whether the disk gets new copies. Its lock is taken last.
pub(super) struct DiskGate {
    since: Instant,
    state: Mutex<GateState>,
}

struct GateState {
    backoff: Backoff,
    /// The last failure, until a copy succeeds.
    failed: Option<FailedMove>,
}

impl DiskGate {
    pub fn new(most: Duration) -> DiskGate {
        let nanoseconds = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let backoff = Backoff::new(nanoseconds(FIRST), nanoseconds(most));
        let state = Mutex::new(GateState { backoff, failed: None });
        DiskGate { since: Instant::now(), state }
    }

    fn now_ns(&self) -> u64 {
        u64::try_from(self.since.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Returns true while the disk gets no new copies.
    pub fn is_closed(&self) -> bool {
        let state = lock(&self.state);
        // Without a failure the clock is not read.
        state.failed.is_some() && state.backoff.is_closed(self.now_ns())
    }

    /// Returns the last failure, unless a copy has succeeded since.
    pub fn failure(&self) -> Option<FailedMove> {
        lock(&self.state).failed.clone()
    }

    /// Records a copy that failed. Returns true if that closed the disk.
    pub fn failed(&self, failed: FailedMove) -> bool {
        let mut state = lock(&self.state);
        state.failed = Some(failed);
        state.backoff.failed(self.now_ns())
    }

    /// Records a copy that succeeded.
    pub fn succeeded(&self) {
        let mut state = lock(&self.state);
        if state.failed.take().is_some() {
            state.backoff.succeeded();
        }
    }

    /// Opens the disk for a call of the program.
    pub fn open(&self) {
        lock(&self.state).backoff.open();
    }
}
