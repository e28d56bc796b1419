//! How much of a device's past a recording has.

use vramp_core::Bytes;

use crate::{Trace, Workload};

/// How much of a device's past a recording has.
///
/// PyTorch keeps the last `max_entries` events of `_record_memory_history`, and none from before the
/// call. A recording does not say which of the two cut it: it only shows blocks that no event
/// allocates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coverage {
    /// No event was recorded, though segments may hold blocks: the history was off, or is missing.
    /// If `held` is zero, the device was not used.
    NoEvents {
        /// Blocks in the segments at the end.
        held: OlderBlocks,
    },
    /// The recording begins in the middle.
    FromTheMiddle {
        /// Blocks that were allocated before the first event and not freed before it.
        older: OlderBlocks,
    },
    /// Every block that the recording shows was allocated in it.
    Whole,
}

/// Blocks from before the first event.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OlderBlocks {
    /// Number of blocks.
    pub blocks: u32,
    /// Their requested bytes, or their sizes where these are unknown.
    pub bytes: Bytes,
}

impl Trace {
    /// Returns how much of the past of `device` is recorded. O(events): it makes a [`Workload`], so
    /// use [`Workload::coverage`] if there is one.
    pub fn coverage(&self, device: u32) -> Coverage {
        Workload::from_trace(self, device).coverage()
    }
}
