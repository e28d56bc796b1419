//! Transfers of a piece that the caller waits for, and the pinned blocks that those between card and disk
//! share.

use std::sync::Arc;

use crate::planner::{BufferId, StagingRetry};
use vramp_core::AddrRange;
use vramp_tiers::host::HostAllocation;
use vramp_tiers::movers::{CopyDependency, DiskBudget, MoveError};

use super::copies::PieceCopy;
use super::spill_error::SpillError;
use super::state::Shared;

impl Shared {
    /// Copies contents of a buffer to the disk. `source` returns where they are, and what they wait for.
    pub(super) fn copy_to_disk(
        &self,
        buffer: BufferId,
        source: impl Fn() -> Result<(AddrRange, Vec<CopyDependency>), SpillError>,
    ) -> Result<PieceCopy, SpillError> {
        let store = self.disk.as_ref().expect("without a disk there is no room on it");
        let stored = self.with_staging(|| {
            let (range, after) = source()?;
            let mut staged = self.mover.to_disk(range, store, DiskBudget::Space)?;
            for on in after {
                staged = staged.after(on)?;
            }
            self.keep_unsettled(buffer, staged.finish())
        });
        stored.map(|stored| PieceCopy::Disk(Arc::new(stored)))
    }

    /// Copies contents of a buffer to blocks of the host. Copies that are not needed are dropped for them.
    pub(super) fn copy_to_blocks(
        &self,
        buffer: BufferId,
        range: AddrRange,
        after: Option<CopyDependency>,
    ) -> Result<HostAllocation, SpillError> {
        let moving = self.mover.to_host(range, self.blocks(range.len)?);
        let moving = after.into_iter().fold(moving, |moving, on| moving.after(on));
        let moved = moving.start().map_err(MoveError::from).and_then(|mut transfer| {
            transfer.wait()?;
            Ok(transfer.into_host())
        });
        self.keep_unsettled(buffer, moved)
    }

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
