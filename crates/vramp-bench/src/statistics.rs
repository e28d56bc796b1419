//! Medians and nanoseconds.

use std::time::Duration;

/// Returns the duration in nanoseconds, capped at `u64::MAX`.
pub(crate) fn nanos(duration: Duration) -> u64 {
    duration.as_nanos().try_into().unwrap_or(u64::MAX)
}

/// Returns the median; the upper of two middle values, NaN for no values.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
