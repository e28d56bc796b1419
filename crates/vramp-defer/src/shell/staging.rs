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
            let (after, ended) = staged.end();
            let Err(error) = done else { return done };
            match error.failure().staging_retry(before, after) {
                StagingRetry::Return => return Err(error),
                StagingRetry::Now => {}
                StagingRetry::AfterOthers => {
                    drop(self.wait_until(|state| state.ended_transfers > ended));
                }
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

    /// Ends it. Returns the number of others in flight, and of all that have ended.
    fn end(self) -> (usize, u64) {
        let shared = self.0;
        drop(self);
        let state = shared.lock();
        (state.staged_transfers, state.ended_transfers)
    }
}

impl Drop for StagedTransfer<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.staged_transfers -= 1;
        state.ended_transfers += 1;
        drop(state);
        self.0.notify();
    }
}
