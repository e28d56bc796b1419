//! A range of a device as one end of a staged transfer.

use std::sync::Arc;

use smallvec::smallvec;
use vramp_alloc::DriverError;
use vramp_core::{AddrRange, Bytes};
use vramp_driver::DeviceCopy;

use super::error::MoveError;
use super::lane::{Lane, LaneError, Piece, Ticket};
use super::mover::{CopyDependency, Shared};
use super::staged::{CopyEndpoint, InFlightCopy, StagedPiece};
use super::transfer::Way;
use crate::host::HostAllocation;

/// A range of a device, read or written piece by piece.
pub struct GpuEndpoint {
    mover: Arc<Shared>,
    does: Does,
}

#[derive(Clone, Copy)]
enum Does {
    /// Copies of a range from or to staging.
    Moves(Way, AddrRange),
    /// Copies within the device.
    Copies { from: AddrRange, to: AddrRange },
    /// Nothing: the other end does it all.
    Nothing,
}

/// Copies in flight.
pub struct InFlightGpuCopy {
    mover: Arc<Shared>,
    does: Does,
    /// `None` for nothing.
    step: Option<Ticket>,
}

impl GpuEndpoint {
    pub(super) fn to_host(mover: &Arc<Shared>, range: AddrRange) -> GpuEndpoint {
        GpuEndpoint { mover: Arc::clone(mover), does: Does::Moves(Way::ToHost, range) }
    }

    pub(super) fn to_device(mover: &Arc<Shared>, range: AddrRange) -> GpuEndpoint {
        GpuEndpoint { mover: Arc::clone(mover), does: Does::Moves(Way::ToDevice, range) }
    }

    pub(super) fn within(mover: &Arc<Shared>, from: AddrRange, to: AddrRange) -> GpuEndpoint {
        GpuEndpoint { mover: Arc::clone(mover), does: Does::Copies { from, to } }
    }

    /// Lets all that begins later come behind other work.
    pub(super) fn order(&self, after: CopyDependency) -> Result<(), MoveError> {
        self.mover.order(self.does.lane(&self.mover), after)
    }

    pub(super) fn nothing(mover: &Arc<Shared>) -> GpuEndpoint {
        GpuEndpoint { mover: Arc::clone(mover), does: Does::Nothing }
    }
}

impl Does {
    /// Copies within a device go with those to it, and so does what they come behind.
    fn lane(self, mover: &Shared) -> &Lane {
        match self {
            Does::Moves(way, _) => way.lane(mover),
            Does::Copies { .. } | Does::Nothing => &mover.to_device,
        }
    }
}

fn failed(error: DriverError) -> MoveError {
    MoveError::Device { moved: Bytes::ZERO, of: Bytes::ZERO, error }
}

impl CopyEndpoint for GpuEndpoint {
    type InFlightCopy = InFlightGpuCopy;

    fn uses_staging(&self) -> bool {
        matches!(self.does, Does::Moves(..))
    }

    fn begin(
        &mut self,
        part: StagedPiece,
        staging: Option<&HostAllocation>,
    ) -> Result<Option<InFlightGpuCopy>, MoveError> {
        let at = |range: AddrRange| AddrRange::new(range.start + part.offset, part.len);
        let pieces = match (self.does, staging) {
            (Does::Moves(way, range), Some(host)) => {
                way.pieces(&self.mover, at(range), host, Bytes::ZERO)?
            }
            (Does::Copies { from, to }, _) => {
                let (from, to) = (at(from).start, at(to).start);
                smallvec![Piece::Within(DeviceCopy { from, to, len: part.len })]
            }
            (Does::Nothing, _) | (Does::Moves(..), None) => {
                let (mover, does) = (Arc::clone(&self.mover), self.does);
                return Ok(Some(InFlightGpuCopy { mover, does, step: None }));
            }
        };
        match self.does.lane(&self.mover).queue(&pieces) {
            Ok(step) => Ok(step.map(|step| {
                let (mover, does) = (Arc::clone(&self.mover), self.does);
                InFlightGpuCopy { mover, does, step: Some(step) }
            })),
            Err(LaneError { error, .. }) => Err(failed(error)),
        }
    }

    fn wait_for_room(&mut self) -> Result<(), MoveError> {
        self.does.lane(&self.mover).wait_for_room().map_err(failed)
    }

    fn keep_until_idle(&self, staging: &mut HostAllocation) {
        for stream in self.does.lane(&self.mover).streams() {
            // A device that cannot even say this does not copy any more.
            let _ = staging.record_stream(&self.mover.driver, stream);
        }
    }
}

impl InFlightCopy for InFlightGpuCopy {
    fn is_done(&mut self) -> Result<bool, MoveError> {
        let lane = self.does.lane(&self.mover);
        self.step.map_or(Ok(true), |step| lane.is_done(step)).map_err(failed)
    }

    fn wait(&mut self) -> Result<(), MoveError> {
        let lane = self.does.lane(&self.mover);
        self.step.map_or(Ok(()), |step| lane.wait(step)).map_err(failed)
    }

    fn settle(&mut self) -> Result<(), MoveError> {
        let lane = self.does.lane(&self.mover);
        self.step.map_or(Ok(()), |step| lane.settle(step)).map_err(failed)
    }
}
