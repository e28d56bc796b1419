//! Transfers between card and disk, which share the pinned blocks kept for staging.

use crate::planner::StagingRetry;

use super::spill_error::SpillError;
use super::state::Shared;

impl Shared {
    /// Runs a transfer to or from the disk. If concurrent transfers hold all staging blocks, it is
    /// retried as [`StagingRetry`] says.
    pub(super) fn with_staging<T>(
        &self,
        mut transfer: impl FnMut() -> Result<T, SpillError>,
    ) -> Result<T, SpillError> {
        loop {
            let (staged, before) = StagedTransfer::begin(self);
            let done = transfer();
            let after = staged.end();
            let Err(error) = done else { return done };
            match error.failure().staging_retry(before, after) {
                StagingRetry::Return => return Err(error),
                StagingRetry::Now => {}
                StagingRetry::AfterOthers => drop(self.wait_briefly(self.lock())),
            }
        }
    }
}

/// A transfer to or from the disk, until it has returned its staging blocks.
struct StagedTransfer<'a>(&'a Shared);

impl<'a> StagedTransfer<'a> {
    /// Begins one. Also returns the number of others in flight.
    fn begin(shared: &'a Shared) -> (StagedTransfer<'a>, usize) {
        let mut state = shared.lock();
        state.staged_transfers += 1;
        (StagedTransfer(shared), state.staged_transfers - 1)
    }

    /// Ends it. Returns the number of others in flight.
    fn end(self) -> usize {
        let shared = self.0;
        drop(self);
        shared.lock().staged_transfers
    }
}

impl Drop for StagedTransfer<'_> {
    fn drop(&mut self) {
        self.0.lock().staged_transfers -= 1;
        self.0.notify();
    }
}
