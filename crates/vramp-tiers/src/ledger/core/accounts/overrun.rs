//! What happens to an allocation that exceeds its reservation.

use super::ReservationId;
use crate::ledger::core::SpaceId;
use vramp_core::Bytes;

/// What came of a charge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "what is over was not charged"]
pub enum Charged {
    /// It fits in the reservation and is accounted for.
    Within,
    /// It does not, and nothing changed: decide and call [`charge_overrun`](super::Ledger::charge_overrun).
    Overrun(Overrun),
}

/// An allocation that does not fit in its reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overrun {
    /// Which reservation.
    pub reservation: ReservationId,
    /// Where.
    pub space: SpaceId,
    /// The size of the allocation, in whole granules.
    pub bytes: Bytes,
    /// By how much the reservation is too small: `used + bytes - size`.
    pub by: Bytes,
    /// The reservation's size.
    pub size: Bytes,
    /// What is charged to it already.
    pub used: Bytes,
}

/// A stock answer to [`Overrun`].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum LimitPolicy {
    /// The allocation fails.
    #[default]
    Fail,
    /// The excess is charged to the space, up to its capacity.
    Ignore,
    /// The reservation grows by what it lacks times the factor, or else by exactly what it lacks.
    Increase {
        /// At least 1.
        factor: GrowthFactor,
        /// It may grow past the limit, up to the capacity.
        beyond_limit: bool,
    },
}

impl LimitPolicy {
    /// What to do about `over`.
    pub fn answer(self, over: &Overrun) -> OverrunAction {
        match self {
            LimitPolicy::Fail => OverrunAction::Fail,
            LimitPolicy::Ignore => OverrunAction::Ignore,
            LimitPolicy::Increase { factor, beyond_limit } => {
                OverrunAction::Grow { wanted: factor.times(over.by), least: over.by, beyond_limit }
            }
        }
    }
}

/// A decision about [`Overrun`], by a [`LimitPolicy`] or by the caller's own rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OverrunAction {
    /// Refuse the allocation.
    Fail,
    /// Charge the excess to the space, up to its capacity.
    Ignore,
    /// Grow the reservation by `wanted`, or by `least` if that has no room. Either is refused if
    /// it is less than what the reservation lacks.
    Grow {
        /// First choice.
        wanted: Bytes,
        /// Second choice.
        least: Bytes,
        /// May pass the limit, up to the capacity.
        beyond_limit: bool,
    },
}

/// What was done about [`Overrun`]. The allocation is accounted for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OverrunOutcome {
    /// It fits by now: the reservation has grown, or something was freed.
    Within,
    /// So much of it is charged to the space, outside the reservation.
    Ignored {
        /// How much.
        by: Bytes,
    },
    /// The reservation grew, and holds all of it.
    Grown {
        /// How much.
        by: Bytes,
    },
}

/// How much more than needed a reservation grows: finite, at least 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GrowthFactor(f64);

impl Default for GrowthFactor {
    fn default() -> GrowthFactor {
        GrowthFactor::QUARTER_MORE
    }
}

impl GrowthFactor {
    /// 1.25, the default.
    pub const QUARTER_MORE: GrowthFactor = GrowthFactor(1.25);

    /// A factor of at least 1.
    ///
    /// # Errors
    /// Below 1, infinite or NaN.
    pub fn new(factor: f64) -> Result<GrowthFactor, FactorError> {
        if factor.is_finite() && factor >= 1.0 {
            Ok(GrowthFactor(factor))
        } else {
            Err(FactorError { factor })
        }
    }

    /// At least `bytes`; saturates at the largest amount.
    fn times(self, bytes: Bytes) -> Bytes {
        Bytes::new((bytes.count() as f64 * self.0).ceil() as u64).max(bytes)
    }
}

/// A factor by which nothing can grow.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[error("a reservation cannot grow by a factor of {factor}: use a finite number of at least 1")]
pub struct FactorError {
    /// What was given.
    pub factor: f64,
}
