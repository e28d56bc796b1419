//! Allocations that exceed their reservation, and policies for them.

use super::ReservationId;
use crate::ledger::core::SpaceId;
use vramp_core::Bytes;

/// Result of a charge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "an overrun was not charged"]
pub enum Charged {
    /// The allocation fits in the reservation and is charged.
    Within,
    /// It does not fit, and nothing changed: decide, then call
    /// [`charge_overrun`](super::Ledger::charge_overrun).
    Overrun(Overrun),
}

/// An allocation that exceeds its reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overrun {
    /// Id of the reservation.
    pub reservation: ReservationId,
    /// Space of the reservation.
    pub space: SpaceId,
    /// Size of the allocation, in whole granules.
    pub bytes: Bytes,
    /// Bytes by which the reservation is too small: `used + bytes - size`.
    pub by: Bytes,
    /// Size of the reservation.
    pub size: Bytes,
    /// Bytes charged to the reservation before.
    pub used: Bytes,
}

/// A predefined policy for an [`Overrun`].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum LimitPolicy {
    /// The allocation fails.
    #[default]
    Fail,
    /// The overrun is charged to the space, up to its capacity.
    Ignore,
    /// The reservation grows by the overrun times the factor, or by the overrun alone if there is
    /// no room for more.
    Increase {
        /// Growth per overrun, at least 1.
        factor: GrowthFactor,
        /// True if it may grow past the limit, up to the capacity.
        beyond_limit: bool,
    },
}

impl LimitPolicy {
    /// Returns the action for `overrun`.
    pub fn decide(self, overrun: &Overrun) -> OverrunAction {
        match self {
            LimitPolicy::Fail => OverrunAction::Fail,
            LimitPolicy::Ignore => OverrunAction::Ignore,
            LimitPolicy::Increase { factor, beyond_limit } => OverrunAction::Grow {
                preferred: factor.times(overrun.by),
                min: overrun.by,
                beyond_limit,
            },
        }
    }
}

/// What to do about an [`Overrun`], decided by a [`LimitPolicy`] or by the caller's own rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OverrunAction {
    /// Fail the allocation.
    Fail,
    /// Charge the overrun to the space, up to its capacity.
    Ignore,
    /// Grow the reservation by `preferred` bytes, or by `min` if there is no room for that. An
    /// amount below the overrun is not tried.
    Grow {
        /// First amount to try.
        preferred: Bytes,
        /// Second amount to try.
        min: Bytes,
        /// True if it may grow past the limit, up to the capacity.
        beyond_limit: bool,
    },
}

/// What was done about an [`Overrun`]. The allocation is charged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OverrunOutcome {
    /// It fit after all: the reservation had grown, or memory was freed.
    Within,
    /// The overrun is charged to the space.
    Ignored {
        /// Bytes beyond the reservation.
        by: Bytes,
    },
    /// The reservation grew.
    Grown {
        /// Bytes by which it grew.
        by: Bytes,
    },
}

/// Factor by which a reservation grows beyond its overrun: finite, at least 1.
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

    /// Returns a growth factor.
    ///
    /// # Errors
    /// `factor` is below 1, infinite or NaN.
    pub fn new(factor: f64) -> Result<GrowthFactor, FactorError> {
        if factor.is_finite() && factor >= 1.0 {
            Ok(GrowthFactor(factor))
        } else {
            Err(FactorError { factor })
        }
    }

    /// Returns the product, at least `bytes`; saturates at the largest amount.
    fn times(self, bytes: Bytes) -> Bytes {
        Bytes::new((bytes.count() as f64 * self.0).ceil() as u64).max(bytes)
    }
}

/// A factor that is no growth factor.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[error("a reservation cannot grow by a factor of {factor}: use a finite number of at least 1")]
pub struct FactorError {
    /// The given factor.
    pub factor: f64,
}
