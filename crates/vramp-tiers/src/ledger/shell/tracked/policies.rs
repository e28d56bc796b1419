//! Who decides when a reservation is exceeded or memory runs out.

use std::time::Duration;

use crate::ledger::core::{LimitPolicy, Over, OverAnswer, Refused};
use vramp_core::Bytes;

/// Decides about an allocation that exceeds its reservation. Called with no lock held; a panic is
/// contained, counted, and taken for [`OverAnswer::Fail`].
///
/// The stock rules are [`LimitPolicy`]'s: fail, ignore, increase. Any closure is one too.
pub trait LimitRule: Send + Sync {
    /// What to do about it.
    fn answer(&self, over: &Over) -> OverAnswer;
}

impl LimitRule for LimitPolicy {
    fn answer(&self, over: &Over) -> OverAnswer {
        LimitPolicy::answer(*self, over)
    }
}

impl<F: Fn(&Over) -> OverAnswer + Send + Sync> LimitRule for F {
    fn answer(&self, over: &Over) -> OverAnswer {
        self(over)
    }
}

/// What ran out.
#[derive(Clone, Copy, Debug)]
pub enum OutOf<'a> {
    /// The space has no room for what the reservation does not cover.
    Budget(&'a Refused),
    /// The card itself, or the allocator's own limit.
    Device(&'a vramp_alloc::AllocError),
}

/// An allocation that failed for lack of memory.
#[derive(Clone, Copy, Debug)]
pub struct MemoryShortage<'a> {
    /// What was asked.
    pub requested: Bytes,
    /// What ran out. Never another failure of the device.
    pub out_of: OutOf<'a>,
}

/// What to do about a shortage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Remedy {
    /// The allocation fails.
    GiveUp,
    /// Try again at once: something was freed.
    Retry,
    /// Try again after a pause, twice as long each time: others may free something.
    RetryLater,
}

/// Decides about a shortage: spill something and retry, or give up. Called with no lock held, by
/// the thread that allocates; a panic is contained, counted, and taken for [`Remedy::GiveUp`].
///
/// Any closure of the same form is one too.
pub trait OutOfMemory: Send + Sync {
    /// What to do. `attempt` counts from 1 for each allocation.
    fn handle(&self, attempt: u32, shortage: &MemoryShortage<'_>) -> Remedy;
}

impl<F: Fn(u32, &MemoryShortage<'_>) -> Remedy + Send + Sync> OutOfMemory for F {
    fn handle(&self, attempt: u32, shortage: &MemoryShortage<'_>) -> Remedy {
        self(attempt, shortage)
    }
}

/// Fails at the first shortage.
#[derive(Clone, Copy, Debug, Default)]
pub struct Fail;

impl OutOfMemory for Fail {
    fn handle(&self, _attempt: u32, _shortage: &MemoryShortage<'_>) -> Remedy {
        Remedy::GiveUp
    }
}

/// Pauses and tries again, as often as [`Retries`] allows.
#[derive(Clone, Copy, Debug, Default)]
pub struct BackOff;

impl OutOfMemory for BackOff {
    fn handle(&self, _attempt: u32, _shortage: &MemoryShortage<'_>) -> Remedy {
        Remedy::RetryLater
    }
}

/// How often and how fast something is tried again: an allocation, whatever its handler says, and
/// spilling for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retries {
    /// So often at most, after the first try.
    pub most: u32,
    /// The first pause of [`Remedy::RetryLater`]; each one is twice the last.
    pub first_pause: Duration,
    /// But not longer than this.
    pub longest_pause: Duration,
}

impl Default for Retries {
    /// 16 retries, with pauses from 1 ms to 250 ms.
    fn default() -> Retries {
        Retries {
            most: 16,
            first_pause: Duration::from_millis(1),
            longest_pause: Duration::from_millis(250),
        }
    }
}

impl Retries {
    /// The pause before the retry with this number, from 1.
    pub(crate) fn pause(&self, attempt: u32) -> Duration {
        let doublings = attempt.saturating_sub(1).min(31);
        self.first_pause.saturating_mul(1 << doublings).min(self.longest_pause)
    }
}
