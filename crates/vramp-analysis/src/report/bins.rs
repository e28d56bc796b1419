//! The overview: the whole recording in a fixed number of bins.

use serde::Serialize;

/// Bins of the overview, at most.
const BINS: usize = 1000;

/// Allocated bytes in equal parts of the recording.
///
/// A state is what holds after an event. State 0 holds before the first event.
#[derive(Debug, Default, Serialize)]
pub(super) struct Bins {
    /// States in each bin. The last bin may have fewer.
    pub step: usize,
    /// Least allocated bytes in each bin.
    pub min: Vec<u64>,
    /// Most allocated bytes in each bin.
    pub max: Vec<u64>,
    /// Allocated bytes of each category at the first maximum of each bin.
    pub categories: Vec<Vec<u64>>,
    /// Most reserved bytes in each bin, for each curve.
    pub curves: Vec<Vec<u64>>,
    /// States in the current bin.
    #[serde(skip)]
    filled: usize,
}

impl Bins {
    /// Returns no bins, for a recording of `states` states and `categories` categories.
    pub(super) fn new(states: usize, categories: usize) -> Bins {
        let step = states.div_ceil(BINS).max(1);
        Bins { step, categories: vec![Vec::new(); categories], ..Bins::default() }
    }

    /// Appends a state: allocated bytes, and how they are split.
    pub(super) fn push(&mut self, live: u64, split: &[u64]) {
        if self.filled == 0 {
            self.min.push(live);
            self.max.push(live);
            for (bins, &bytes) in self.categories.iter_mut().zip(split) {
                bins.push(bytes);
            }
        } else if let (Some(min), Some(max)) = (self.min.last_mut(), self.max.last_mut()) {
            *min = live.min(*min);
            if live > *max {
                *max = live;
                for (bins, &bytes) in self.categories.iter_mut().zip(split) {
                    if let Some(last) = bins.last_mut() {
                        *last = bytes;
                    }
                }
            }
        }
        self.filled = (self.filled + 1) % self.step;
    }

    /// Appends a curve of `(state, bytes)`, in the order of states. Before its first point it is
    /// zero.
    pub(super) fn push_curve(&mut self, points: &[(u32, u64)]) {
        let mut points = points.iter().peekable();
        let (mut now, mut bins) = (0, Vec::with_capacity(self.max.len()));
        for bin in 0..self.max.len() {
            let end = (bin + 1) * self.step;
            // A change at the first state of the bin replaces the value from before.
            let mut most = match points.peek() {
                Some(&&(state, _)) if state as usize <= bin * self.step => 0,
                _ => now,
            };
            while let Some(&(_, bytes)) = points.next_if(|(state, _)| (*state as usize) < end) {
                now = bytes;
                most = most.max(now);
            }
            bins.push(most);
        }
        self.curves.push(bins);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bins_have_the_extremes_of_their_states() {
        let mut random = fastrand::Rng::with_seed(3);
        for states in [1, 2, BINS - 1, BINS, BINS + 1, 5 * BINS + 7] {
            let all: Vec<[u64; 2]> =
                (0..states).map(|_| [random.u64(0..50), random.u64(0..50)]).collect();
            let mut bins = Bins::new(states, 2);
            all.iter().for_each(|split| bins.push(split.iter().sum(), split));
            assert!(bins.max.len() <= BINS && bins.max.len() == all.chunks(bins.step).len());
            for (bin, part) in all.chunks(bins.step).enumerate() {
                let sums = || part.iter().map(|split| split.iter().sum::<u64>());
                assert_eq!(Some(bins.min[bin]), sums().min());
                assert_eq!(Some(bins.max[bin]), sums().max());
                let at_most = [bins.categories[0][bin], bins.categories[1][bin]];
                assert_eq!(at_most.iter().sum::<u64>(), bins.max[bin]);
                assert!(part.contains(&at_most));
            }
        }
    }

    #[test]
    fn a_curve_has_its_most_in_each_bin() {
        let mut bins = Bins::new(6, 0);
        bins.step = 2;
        (0..6).for_each(|_| bins.push(0, &[]));
        bins.push_curve(&[(0, 5), (2, 1), (3, 9), (3, 2)]);
        assert_eq!(bins.curves, [[5, 9, 2]]);
    }
}
