//! Pressure: the total of a space against its levels, and crossings of the levels.
//!
//! Crossings have hysteresis: a space whose total reached the trigger is under pressure until the
//! total has fallen to the stop. So crossings alternate, and a counter is enough to record them. A
//! [`CrossingCursor`] is a position in that count: each subscriber sees each crossing exactly once,
//! and an idle subscriber costs nothing.

use super::space_account::SpaceAccount;
use super::{Crossing, Ledger, UnknownSpace};
use crate::ledger::core::SpaceId;
use vramp_core::Bytes;

/// Total of a space against its levels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pressure {
    /// Total of the space: all charges.
    pub used: Bytes,
    /// From this total up, data should be spilled.
    pub trigger: Bytes,
    /// From this total down, spilling should stop.
    pub stop: Bytes,
    /// True from a crossing of the trigger until the next crossing of the stop.
    pub high: bool,
}

impl Pressure {
    /// True at the trigger and above.
    pub fn should_downgrade(&self) -> bool {
        self.used >= self.trigger
    }

    /// True at the stop and below.
    pub fn should_stop(&self) -> bool {
        self.used <= self.stop
    }

    /// Bytes to spill to reach the stop; zero below it.
    pub fn amount_to_downgrade(&self) -> Bytes {
        self.used.saturating_sub(self.stop)
    }
}

/// A subscriber's position in the crossings of one space.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CrossingCursor {
    pub(super) space: SpaceId,
    pub(super) seen: u64,
}

impl CrossingCursor {
    /// Id of the space.
    pub fn space(&self) -> SpaceId {
        self.space
    }
}

impl Ledger {
    /// Returns the total of a space against its levels.
    pub fn pressure(&self, space: SpaceId) -> Result<Pressure, UnknownSpace> {
        let SpaceAccount { levels, hysteresis, .. } = self.space(space)?;
        Ok(Pressure {
            used: self.total(space)?,
            trigger: levels.trigger,
            stop: levels.stop,
            high: hysteresis.is_high(),
        })
    }

    /// Returns a cursor for the crossings of a space from now on.
    pub fn watch(&self, space: SpaceId) -> Result<CrossingCursor, UnknownSpace> {
        Ok(CrossingCursor { space, seen: self.space(space)?.hysteresis.crossings })
    }

    /// Returns the next crossing and moves the cursor past it. A cursor made under pressure sees
    /// the stop first.
    pub fn next_crossing(&self, cursor: &mut CrossingCursor) -> Option<Crossing> {
        let crossed = self.space(cursor.space).ok()?.hysteresis.after(cursor.seen)?;
        cursor.seen += 1;
        Some(crossed)
    }
}
