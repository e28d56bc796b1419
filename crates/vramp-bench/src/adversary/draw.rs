//! Sizes drawn at random.

use fastrand::Rng;

pub(super) const KIB: u64 = 1 << 10;
pub(super) const MIB: u64 = 1 << 20;
pub(super) const GIB: u64 = 1 << 30;

/// Returns a size from `least` to `most`; every size class is equally likely.
pub(super) fn log_uniform(rng: &mut Rng, least: u64, most: u64) -> u64 {
    let doublings = rng.f64() * (most as f64 / least as f64).log2();
    ((least as f64 * doublings.exp2()) as u64).clamp(least, most)
}

/// Removes and returns one of the elements at random; `None` if there is none.
pub(super) fn take<T>(rng: &mut Rng, from: &mut Vec<T>) -> Option<T> {
    if from.is_empty() {
        return None;
    }
    let index = rng.usize(..from.len());
    Some(from.swap_remove(index))
}
