//! The device endpoint of a staged transfer.

use std::sync::Arc;

use smallvec::smallvec;
use vramp_alloc::DriverError;
use vramp_core::{AddrRange, Bytes};
use vramp_driver::DeviceCopy;

use super::copy_queue::{CopyQueue, QueueError, QueuedCopy, StepCopies};
use super::core::gather::Gather;
use super::core::pipeline::StagedPiece;
use super::core::window::StepId;
use super::endpoint::{CopyEndpoint, InFlightCopy};
use super::error::MoveError;
use super::shared::{CopyDependency, CopyDirection, Shared};
use crate::host::HostAllocation;

/// Ranges of a device that are read or written piece by piece, one behind the other.
pub struct GpuEndpoint {
    mover: Arc<Shared>,
    role: Role,
}

enum Role {
    /// Copies between ranges and staging.
    Staged(CopyDirection, Gather),
    /// Copies within the device.
    WithinDevice { from: AddrRange, to: AddrRange },
    /// No copy: the other endpoint does the whole transfer.
    Idle,
}

/// Copies of one piece in flight.
pub struct InFlightGpuCopy {
    mover: Arc<Shared>,
    direction: CopyDirection,
    /// `None` if there is no copy.
    step: Option<StepId>,
}

impl GpuEndpoint {
    pub(super) fn to_host(mover: &Arc<Shared>, range: AddrRange) -> GpuEndpoint {
        GpuEndpoint::staged(mover, CopyDirection::ToHost, Gather::new([range]))
    }

    pub(super) fn to_device(mover: &Arc<Shared>, range: AddrRange) -> GpuEndpoint {
        GpuEndpoint::staged(mover, CopyDirection::ToDevice, Gather::new([range]))
    }

    /// Returns an endpoint of several ranges, which end within the address space.
    pub(super) fn staged(
        mover: &Arc<Shared>,
        direction: CopyDirection,
        memory: Gather,
    ) -> GpuEndpoint {
        GpuEndpoint { mover: Arc::clone(mover), role: Role::Staged(direction, memory) }
    }

    pub(super) fn within(mover: &Arc<Shared>, from: AddrRange, to: AddrRange) -> GpuEndpoint {
        GpuEndpoint { mover: Arc::clone(mover), role: Role::WithinDevice { from, to } }
    }

    /// Orders all later copies behind other work.
    pub(super) fn order(&self, after: CopyDependency) -> Result<(), MoveError> {
        self.mover.order(self.queue(), after)
    }

    pub(super) fn idle(mover: &Arc<Shared>) -> GpuEndpoint {
        GpuEndpoint { mover: Arc::clone(mover), role: Role::Idle }
    }

    fn queue(&self) -> &CopyQueue {
        self.role.direction().queue(&self.mover)
    }
}

impl Role {
    /// Copies within a device share the queue of copies to it.
    fn direction(&self) -> CopyDirection {
        match self {
            Role::Staged(direction, _) => *direction,
            Role::WithinDevice { .. } | Role::Idle => CopyDirection::ToDevice,
        }
    }
}

impl InFlightGpuCopy {
    fn queue(&self) -> &CopyQueue {
        self.direction.queue(&self.mover)
    }
}

fn failed(error: DriverError) -> MoveError {
    MoveError::Device { moved: Bytes::ZERO, of: Bytes::ZERO, error }
}

impl CopyEndpoint for GpuEndpoint {
    type InFlight = InFlightGpuCopy;

    fn uses_staging(&self) -> bool {
        matches!(self.role, Role::Staged(..))
    }

    fn begin(
        &mut self,
        piece: StagedPiece,
        staging: Option<&HostAllocation>,
    ) -> Result<Option<InFlightGpuCopy>, MoveError> {
        let at = |range: AddrRange| AddrRange::new(range.start + piece.offset, piece.len);
        let (mover, direction) = (Arc::clone(&self.mover), self.role.direction());
        let copies = match (&self.role, staging) {
            (Role::Staged(direction, memory), Some(host)) => {
                let mut copies = StepCopies::new();
                let mut offset = piece.skip;
                for part in memory.pieces(piece.offset, piece.offset + piece.len) {
                    copies.extend(direction.copies(&self.mover, part, host, offset)?);
                    offset += part.len;
                }
                copies
            }
            (Role::WithinDevice { from, to }, _) => {
                let (from, to) = (at(*from).start, at(*to).start);
                smallvec![QueuedCopy::Within(DeviceCopy { from, to, len: piece.len })]
            }
            (Role::Idle, _) | (Role::Staged(..), None) => {
                return Ok(Some(InFlightGpuCopy { mover, direction, step: None }));
            }
        };
        match self.queue().queue(&copies) {
            Ok(step) => Ok(step.map(|step| InFlightGpuCopy { mover, direction, step: Some(step) })),
            Err(QueueError { error, settled }) => Err(failed(error).unless_settled(settled)),
        }
    }

    fn wait_for_capacity(&mut self) -> Result<(), MoveError> {
        self.queue().wait_for_capacity().map_err(failed)
    }

    fn record_use(&self, staging: &mut HostAllocation) {
        staging.record_unsettled(&self.mover.driver, self.queue().streams());
    }
}

impl InFlightCopy for InFlightGpuCopy {
    fn is_done(&mut self) -> Result<bool, MoveError> {
        let queue = self.queue();
        self.step.map_or(Ok(true), |step| queue.is_done(step)).map_err(failed)
    }

    fn wait(&mut self) -> Result<(), MoveError> {
        let queue = self.queue();
        self.step.map_or(Ok(()), |step| queue.wait(step)).map_err(failed)
    }

    fn settle(&mut self) -> Result<(), MoveError> {
        let queue = self.queue();
        self.step.map_or(Ok(()), |step| queue.settle(step)).map_err(failed)
    }
}
