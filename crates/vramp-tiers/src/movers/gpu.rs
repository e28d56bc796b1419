//! The device endpoint of a staged transfer.

use std::sync::Arc;

use smallvec::smallvec;
use vramp_alloc::DriverError;
use vramp_core::{AddrRange, Bytes};
use vramp_driver::DeviceCopy;

use super::copy_queue::{CopyQueue, QueueError, QueuedCopy};
use super::core::pipeline::StagedPiece;
use super::core::window::StepId;
use super::error::MoveError;
use super::mover::{CopyDependency, Shared};
use super::staged::{CopyEndpoint, InFlightCopy};
use super::transfer::CopyDirection;
use crate::host::HostAllocation;

/// A range of a device that is read or written piece by piece.
pub struct GpuEndpoint {
    mover: Arc<Shared>,
    role: Role,
}

#[derive(Clone, Copy)]
enum Role {
    /// Copies between a range and staging.
    Staged(CopyDirection, AddrRange),
    /// Copies within the device.
    WithinDevice { from: AddrRange, to: AddrRange },
    /// No copy: the other endpoint does the whole transfer.
    Idle,
}

/// Copies of one piece in flight.
pub struct InFlightGpuCopy {
    mover: Arc<Shared>,
    role: Role,
    /// `None` if there is no copy.
    step: Option<StepId>,
}

impl GpuEndpoint {
    pub(super) fn to_host(mover: &Arc<Shared>, range: AddrRange) -> GpuEndpoint {
        GpuEndpoint { mover: Arc::clone(mover), role: Role::Staged(CopyDirection::ToHost, range) }
    }

    pub(super) fn to_device(mover: &Arc<Shared>, range: AddrRange) -> GpuEndpoint {
        GpuEndpoint { mover: Arc::clone(mover), role: Role::Staged(CopyDirection::ToDevice, range) }
    }

    pub(super) fn within(mover: &Arc<Shared>, from: AddrRange, to: AddrRange) -> GpuEndpoint {
        GpuEndpoint { mover: Arc::clone(mover), role: Role::WithinDevice { from, to } }
    }

    /// Orders all later copies behind other work.
    pub(super) fn order(&self, after: CopyDependency) -> Result<(), MoveError> {
        self.mover.order(self.role.queue(&self.mover), after)
    }

    pub(super) fn idle(mover: &Arc<Shared>) -> GpuEndpoint {
        GpuEndpoint { mover: Arc::clone(mover), role: Role::Idle }
    }
}

impl Role {
    /// Copies within a device share the queue of copies to it.
    fn queue(self, mover: &Shared) -> &CopyQueue {
        match self {
            Role::Staged(direction, _) => direction.queue(mover),
            Role::WithinDevice { .. } | Role::Idle => &mover.to_device,
        }
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
        let copies = match (self.role, staging) {
            (Role::Staged(direction, range), Some(host)) => {
                direction.copies(&self.mover, at(range), host, Bytes::ZERO)?
            }
            (Role::WithinDevice { from, to }, _) => {
                let (from, to) = (at(from).start, at(to).start);
                smallvec![QueuedCopy::Within(DeviceCopy { from, to, len: piece.len })]
            }
            (Role::Idle, _) | (Role::Staged(..), None) => {
                let (mover, role) = (Arc::clone(&self.mover), self.role);
                return Ok(Some(InFlightGpuCopy { mover, role, step: None }));
            }
        };
        match self.role.queue(&self.mover).queue(&copies) {
            Ok(step) => Ok(step.map(|step| {
                let (mover, role) = (Arc::clone(&self.mover), self.role);
                InFlightGpuCopy { mover, role, step: Some(step) }
            })),
            Err(QueueError { error, settled }) => Err(failed(error).unless_settled(settled)),
        }
    }

    fn wait_for_capacity(&mut self) -> Result<(), MoveError> {
        self.role.queue(&self.mover).wait_for_capacity().map_err(failed)
    }

    fn record_use(&self, staging: &mut HostAllocation) {
        staging.record_unsettled(&self.mover.driver, self.role.queue(&self.mover).streams());
    }
}

impl InFlightCopy for InFlightGpuCopy {
    fn is_done(&mut self) -> Result<bool, MoveError> {
        let queue = self.role.queue(&self.mover);
        self.step.map_or(Ok(true), |step| queue.is_done(step)).map_err(failed)
    }

    fn wait(&mut self) -> Result<(), MoveError> {
        let queue = self.role.queue(&self.mover);
        self.step.map_or(Ok(()), |step| queue.wait(step)).map_err(failed)
    }

    fn settle(&mut self) -> Result<(), MoveError> {
        let queue = self.role.queue(&self.mover);
        self.step.map_or(Ok(()), |step| queue.settle(step)).map_err(failed)
    }
}
