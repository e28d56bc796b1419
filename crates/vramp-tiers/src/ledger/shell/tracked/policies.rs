//! Who decides when a reservation is exceeded or memory runs out.

use crate::ledger::core::SpaceRefusal;
use vramp_core::Bytes;

/// What ran out.
#[derive(Clone, Copy, Debug)]
pub enum ExhaustedResource<'a> {
    /// The space has no room for what the reservation does not cover.
    Budget(&'a SpaceRefusal),
    /// The card itself, or the allocator's own limit.
    Device(&'a vramp_alloc::AllocError),
}

/// An allocation that failed for lack of memory.
#[derive(Clone, Copy, Debug)]
pub struct MemoryShortage<'a> {
    /// What was asked.
    pub requested: Bytes,
    /// What ran out. Never another failure of the device.
    pub exhausted: ExhaustedResource<'a>,
}

/// What to do about a shortage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecoveryAction {
    /// The allocation fails.
    Fail,
    /// Try again at once: something was freed.
    Retry,
    /// Try again after a pause, twice as long each time: others may free something.
    RetryAfterPause,
}

/// Decides about a shortage: spill something and retry, or give up. Called with no lock held, by
/// the thread that allocates; a panic is contained, counted, and taken for [`RecoveryAction::Fail`].
///
/// Any closure of the same form is one too.
pub trait OutOfMemoryHandler: Send + Sync {
    /// What to do. `attempt` counts from 1 for each allocation.
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

/// Pauses and tries again, as often as [`RetryPolicy`] allows.
#[derive(Clone, Copy, Debug, Default)]
pub struct BackOff;

impl OutOfMemoryHandler for BackOff {
    fn handle(&self, _attempt: u32, _shortage: &MemoryShortage<'_>) -> RecoveryAction {
        RecoveryAction::RetryAfterPause
    }
}
