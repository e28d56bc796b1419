//! Crossings of the levels of a space, with hysteresis.

use crate::ledger::core::Levels;
use vramp_core::Bytes;

/// A crossing of a level.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Crossing {
    /// The total rose to the trigger: spilling should begin.
    Trigger,
    /// The total fell to the stop: spilling should end.
    Stop,
}

/// Counter of crossings: an odd number means pressure.
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

    /// The crossing after the first `seen` ones.
    pub(super) fn after(self, seen: u64) -> Option<Crossing> {
        match seen {
            seen if seen >= self.crossings => None,
            seen if seen % 2 == 0 => Some(Crossing::Trigger),
            _ => Some(Crossing::Stop),
        }
    }
}
