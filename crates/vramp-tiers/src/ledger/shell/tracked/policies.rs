//! Out-of-memory handlers.

use crate::ledger::core::SpaceRefusal;
use vramp_alloc::{AllocError, StreamId};
use vramp_core::{Bytes, Shortage};

use crate::MemorySpace;

/// The resource that ran out.
#[derive(Clone, Copy, Debug)]
pub enum ExhaustedResource<'a> {
    /// The budget of the space.
    Budget(&'a SpaceRefusal),
    /// The memory of the device, or the allocator's own limit.
    Device(&'a vramp_alloc::AllocError),
}

/// An allocation that failed for lack of memory.
#[derive(Clone, Copy, Debug)]
pub struct MemoryShortage<'a> {
    /// Requested bytes.
    pub requested: Bytes,
    /// The resource that ran out. A failed device is not reported here.
    pub exhausted: ExhaustedResource<'a>,
    /// Stream of the allocation.
    pub stream: StreamId,
    /// Space that is charged.
    pub space: &'a MemorySpace,
    /// Maximum number of retries of this allocation.
    pub max_retries: u32,
}

impl MemoryShortage<'_> {
    /// Returns the bytes to free before a retry can succeed: what the space lacks, or what the
    /// allocator lacks beside its largest free region and the growth that its limit leaves. At least
    /// one byte.
    pub fn missing(&self) -> Bytes {
        match self.exhausted {
            ExhaustedResource::Budget(refusal) => {
                refusal.requested.saturating_sub(refusal.available)
            }
            ExhaustedResource::Device(AllocError::OutOfMemory(report)) => {
                let Shortage { requested, largest, reserved, limit, .. } = report.shortage;
                let growth = limit.map_or(Bytes::ZERO, |limit| limit.saturating_sub(reserved));
                requested.saturating_sub(largest + growth)
            }
            ExhaustedResource::Device(_) => self.requested,
        }
        .max(Bytes::new(1))
    }
}

/// What to do about a shortage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecoveryAction {
    /// Fail the allocation.
    Fail,
    /// Retry at once: memory was freed.
    Retry,
    /// Retry after a pause, twice as long each time: other threads may free memory.
    RetryAfterPause,
}

/// Decides about a shortage: free memory and retry, or fail. Called with no lock held, by the
/// allocating thread. A panic is caught, counted, and taken for [`RecoveryAction::Fail`].
///
/// Any closure of the same form is a handler.
pub trait OutOfMemoryHandler: Send + Sync {
    /// Returns the action for a shortage. `attempt` counts from 1 for each allocation.
    fn handle(&self, attempt: u32, shortage: &MemoryShortage<'_>) -> RecoveryAction;
}

impl<F: Fn(u32, &MemoryShortage<'_>) -> RecoveryAction + Send + Sync> OutOfMemoryHandler for F {
    fn handle(&self, attempt: u32, shortage: &MemoryShortage<'_>) -> RecoveryAction {
        self(attempt, shortage)
    }
}

/// Fails at the first shortage.
#[derive(Clone, Copy, Debug, Default)]
pub struct Fail;

impl OutOfMemoryHandler for Fail {
    fn handle(&self, _attempt: u32, _shortage: &MemoryShortage<'_>) -> RecoveryAction {
        RecoveryAction::Fail
    }
}

/// Retries after pauses, as often as [`RetryPolicy`](crate::reserve::RetryPolicy) allows.
#[derive(Clone, Copy, Debug, Default)]
pub struct BackOff;

impl OutOfMemoryHandler for BackOff {
    fn handle(&self, _attempt: u32, _shortage: &MemoryShortage<'_>) -> RecoveryAction {
        RecoveryAction::RetryAfterPause
    }
}
