//! Free space below the card.

use super::SpillTier;
use vramp_core::Bytes;

/// Free bytes of each spill tier. The planner subtracts what moves in flight will take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpillRoom {
    /// Free pinned memory.
    pub host: Bytes,
    /// Free disk space.
    pub disk: Bytes,
}

impl SpillRoom {
    pub(super) fn of(&mut self, tier: SpillTier) -> &mut Bytes {
        match tier {
            SpillTier::Host => &mut self.host,
            SpillTier::Disk => &mut self.disk,
        }
    }

    /// Returns the room less what was promised.
    pub(super) fn beside(self, promised: SpillRoom) -> SpillRoom {
        SpillRoom {
            host: self.host.saturating_sub(promised.host),
            disk: self.disk.saturating_sub(promised.disk),
        }
    }

    /// Takes room for contents that leave the card: on the host if it has enough, else on disk.
    pub(super) fn take(&mut self, bytes: Bytes) -> Option<SpillTier> {
        if bytes <= self.host {
            self.host -= bytes;
            Some(SpillTier::Host)
        } else if bytes <= self.disk {
            self.disk -= bytes;
            Some(SpillTier::Disk)
        } else {
            None
        }
    }
}
