//! Peaks of quantities that are computed only when statistics are read.

use vramp_core::{Stat, StatByPool};

/// A quantity of both pools.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Split {
    pub small: u64,
    pub large: u64,
}

/// Peak of a quantity that is computed only when statistics are read.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SeenPeak(u64);

impl SeenPeak {
    /// Returns the peak, the current value included.
    pub(crate) fn note(&mut self, now: u64) -> u64 {
        self.0 = self.0.max(now);
        self.0
    }
}

/// The same of both pools together and of each.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SeenPeaksByPool([SeenPeak; 3]);

impl SeenPeaksByPool {
    pub(crate) fn note_all(&mut self, Split { small, large }: Split) -> StatByPool {
        let [all_peak, small_peak, large_peak] = &mut self.0;
        let stat = |current, peak: &mut SeenPeak| Stat {
            current,
            peak: peak.note(current),
            ..Stat::default()
        };
        StatByPool {
            all: stat(small + large, all_peak),
            small_pool: stat(small, small_peak),
            large_pool: stat(large, large_peak),
        }
    }
}

/// Peaks of quantities that are computed only when statistics are read.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SeenPeaks {
    pub active: SeenPeaksByPool,
    pub active_bytes: SeenPeaksByPool,
    pub inactive: SeenPeaksByPool,
    pub inactive_bytes: SeenPeaksByPool,
    pub reserved: SeenPeaksByPool,
    pub segments: SeenPeak,
}
