//! Counts with the meaning of `torch.cuda.memory_stats`.

/// One quantity over time: a number of blocks, or bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stat {
    /// Current value.
    pub current: u64,
    /// High-water mark.
    pub peak: u64,
    /// Sum of all increases.
    pub allocated: u64,
    /// Sum of all decreases.
    pub freed: u64,
}

impl Stat {
    /// Adds to the current value.
    pub fn increase(&mut self, by: u64) {
        self.current += by;
        self.allocated += by;
        self.peak = self.peak.max(self.current);
    }

    /// Takes from the current value.
    pub fn decrease(&mut self, by: u64) {
        self.current -= by;
        self.freed += by;
    }

    /// Sets the peak to the current value.
    pub fn reset_peak(&mut self) {
        self.peak = self.current;
    }
}

/// One quantity for both pools together and for each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StatByPool {
    /// Both pools.
    pub all: Stat,
    /// Pool of requests up to 1 MiB.
    pub small_pool: Stat,
    /// Pool of larger requests.
    pub large_pool: Stat,
}

impl StatByPool {
    /// Sets all peaks to the current values.
    pub fn reset_peaks(&mut self) {
        for stat in [&mut self.all, &mut self.small_pool, &mut self.large_pool] {
            stat.reset_peak();
        }
    }
}
