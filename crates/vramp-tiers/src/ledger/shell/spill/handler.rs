//! Spilling where an allocation runs out of memory.

use vramp_core::Bytes;

use crate::ledger::shell::space::MemorySpace;
use crate::ledger::shell::tracked::{MemoryShortage, OutOfMemoryHandler, RecoveryAction};

/// Out-of-memory handler for [`Policies`](crate::tracked::Policies) that spills the missing bytes
/// and retries.
#[derive(Clone, Debug)]
pub struct SpillAndRetry {
    /// Space to spill from.
    pub space: MemorySpace,
}

impl OutOfMemoryHandler for SpillAndRetry {
    fn handle(&self, _attempt: u32, shortage: &MemoryShortage<'_>) -> RecoveryAction {
        match self.space.spill(shortage.missing()) {
            Bytes::ZERO => RecoveryAction::RetryAfterPause,
            _ => RecoveryAction::Retry,
        }
    }
}
