//! What keeps memory on the card.

use std::fmt;

use vramp_core::Bytes;

/// Why too little could be chosen, in bytes of memory on the card.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shortfall {
    /// Bytes that are missing.
    pub missing: Bytes,
    /// Held by leases.
    pub leased: Bytes,
    /// Pinned.
    pub pinned: Bytes,
    /// In flight: chosen before, or being copied out.
    pub moving: Bytes,
    /// Dirty, with no room on host and disk.
    pub no_room: Bytes,
}

impl fmt::Display for Shortfall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} more cannot leave the card:", self.missing)?;
        let Shortfall { leased, pinned, moving, no_room, .. } = self;
        write!(f, " {leased} are leased, {pinned} pinned, {moving} in flight,")?;
        write!(f, " {no_room} have no room on host and disk")
    }
}
