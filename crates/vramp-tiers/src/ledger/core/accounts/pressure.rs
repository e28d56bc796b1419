//! How full a space is, and when that crossed a level.
//!
//! Between the stop and the trigger nothing changes: a space that filled up to the trigger is
//! under pressure until it has emptied to the stop. Crossings therefore alternate, and counting
//! them is enough: a [`CrossingCursor`] remembers how many it has seen, so any number of subscribers see
//! each crossing exactly once, and one that never looks costs nothing.

use super::space_account::SpaceAccount;
use super::{Ledger, UnknownSpace};
use crate::ledger::core::{Levels, SpaceId};
use vramp_core::Bytes;

/// How full a space is against its levels. All three have one base: zero bytes, of the capacity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pressure {
    /// The space's total: reservations, what exceeds them, orphaned and unreserved use.
    pub used: Bytes,
    /// From here up, data should leave.
    pub trigger: Bytes,
    /// From here down, enough has left.
    pub stop: Bytes,
    /// The trigger was crossed and the stop not since.
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

    /// What has to leave to reach the stop; zero below it.
    pub fn amount_to_downgrade(&self) -> Bytes {
        self.used.saturating_sub(self.stop)
    }
}

/// Which level was crossed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Crossing {
    /// The space filled to the trigger: begin to downgrade.
    Trigger,
    /// The space emptied to the stop: end.
    Stop,
}

/// A subscriber's place in the crossings of one space.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CrossingCursor {
    pub(super) space: SpaceId,
    pub(super) seen: u64,
}

impl CrossingCursor {
    /// Which space.
    pub fn space(&self) -> SpaceId {
        self.space
    }
}

/// Counts crossings: an odd number means pressure.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Hysteresis {
    pub crossings: u64,
}

impl Hysteresis {
    pub(super) fn is_high(self) -> bool {
        self.crossings % 2 == 1
    }

    pub(super) fn update(&mut self, total: Bytes, levels: &Levels) {
        let crossed = if self.is_high() { total <= levels.stop } else { total >= levels.trigger };
        self.crossings += u64::from(crossed);
    }

    /// The crossing after the `seen` first ones.
    pub(super) fn after(self, seen: u64) -> Option<Crossing> {
        match seen {
            seen if seen >= self.crossings => None,
            seen if seen % 2 == 0 => Some(Crossing::Trigger),
            _ => Some(Crossing::Stop),
        }
    }
}

impl Ledger {
    /// How full the space is against its levels.
    pub fn pressure(&self, space: SpaceId) -> Result<Pressure, UnknownSpace> {
        let SpaceAccount { levels, hysteresis, .. } = self.space(space)?;
        Ok(Pressure {
            used: self.total(space)?,
            trigger: levels.trigger,
            stop: levels.stop,
            high: hysteresis.is_high(),
        })
    }

    /// Subscribes to the crossings of a space from now on.
    pub fn watch(&self, space: SpaceId) -> Result<CrossingCursor, UnknownSpace> {
        Ok(CrossingCursor { space, seen: self.space(space)?.hysteresis.crossings })
    }

    /// The next crossing that this subscriber has not seen. Each comes exactly once, in order; the
    /// first after a subscription under pressure is the stop.
    pub fn next_crossing(&self, watch: &mut CrossingCursor) -> Option<Crossing> {
        let crossed = self.space(watch.space).ok()?.hysteresis.after(watch.seen)?;
        watch.seen += 1;
        Some(crossed)
    }
}
