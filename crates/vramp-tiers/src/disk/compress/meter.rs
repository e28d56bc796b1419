//! How fast things are, by what was done lately.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use vramp_core::Bytes;

/// After so much time, what is older counts half.
const LATELY_NS: u64 = 1_000_000_000;

/// Bytes and the time that they took.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Tally {
    bytes: u64,
    ns: u64,
}

impl Tally {
    pub fn add(&mut self, bytes: Bytes, ns: u64) {
        self.bytes = self.bytes.saturating_add(bytes.count());
        self.ns = self.ns.saturating_add(ns);
        if self.ns > LATELY_NS {
            self.bytes /= 2;
            self.ns /= 2;
        }
    }

    /// Bytes a second. `None` as long as there were none.
    pub fn rate(&self) -> Option<u64> {
        let rate = u128::from(self.bytes) * 1_000_000_000 / u128::from(self.ns.max(1));
        (self.bytes > 0).then(|| rate.try_into().unwrap_or(u64::MAX))
    }
}

/// What several do side by side. Time counts once, however many there are, and not while there are
/// none.
#[derive(Clone, Copy, Debug, Default)]
struct Together {
    tally: Tally,
    busy: u32,
    since_ns: u64,
}

impl Together {
    fn pass(&mut self, now_ns: u64, bytes: Bytes) {
        let ns = if self.busy == 0 { 0 } else { now_ns.saturating_sub(self.since_ns) };
        self.tally.add(bytes, ns);
        self.since_ns = now_ns;
    }

    fn begin(&mut self, now_ns: u64) {
        self.pass(now_ns, Bytes::ZERO);
        self.busy += 1;
    }

    fn end(&mut self, now_ns: u64, bytes: Bytes) {
        self.pass(now_ns, bytes);
        self.busy -= 1;
    }
}

/// What a disk writes in a second.
pub(in crate::disk) struct DiskMeter {
    epoch: Instant,
    together: Mutex<Together>,
}

impl Default for DiskMeter {
    fn default() -> DiskMeter {
        DiskMeter { epoch: Instant::now(), together: Mutex::default() }
    }
}

impl DiskMeter {
    fn with<T>(&self, act: impl FnOnce(&mut Together, u64) -> T) -> T {
        let now_ns = self.epoch.elapsed().as_nanos().try_into().unwrap_or(u64::MAX);
        act(&mut self.together.lock().unwrap_or_else(PoisonError::into_inner), now_ns)
    }

    /// A call that writes so much begins.
    pub fn begin(self: &Arc<DiskMeter>, bytes: Bytes) -> Busy {
        self.with(Together::begin);
        Busy { meter: Arc::clone(self), bytes }
    }

    pub(super) fn rate(&self) -> Option<u64> {
        self.with(|together, _| together.tally.rate())
    }
}

/// A call of the disk, until this is dropped.
pub(in crate::disk) struct Busy {
    meter: Arc<DiskMeter>,
    bytes: Bytes,
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.meter.with(|together, now_ns| together.end(now_ns, self.bytes));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn a_rate_is_of_what_was_done_lately() {
        let mut tally = Tally::default();
        assert_eq!(tally.rate(), None);
        tally.add(Bytes::new(100), SECOND / 2);
        assert_eq!(tally.rate(), Some(200));
        for _ in 0..20 {
            tally.add(Bytes::new(1000), SECOND);
        }
        let rate = tally.rate().unwrap();
        assert!((995..=1000).contains(&rate), "{rate}");
    }

    #[test]
    fn time_of_writes_side_by_side_counts_once_and_idle_time_never() {
        let mut disk = Together::default();
        disk.begin(0);
        disk.begin(SECOND / 10);
        disk.end(SECOND / 5, Bytes::new(30));
        disk.end(SECOND / 4, Bytes::new(20));
        assert_eq!(disk.tally.rate(), Some(200));
        disk.begin(SECOND * 100);
        disk.end(SECOND * 100 + SECOND / 4, Bytes::new(50));
        assert_eq!(disk.tally.rate(), Some(200));
    }

    #[test]
    fn a_call_ends_when_its_guard_is_dropped() {
        let meter = Arc::new(DiskMeter::default());
        let (one, other) = (meter.begin(Bytes::mib(1)), meter.begin(Bytes::ZERO));
        assert_eq!(meter.rate(), None);
        drop((one, other));
        assert!(meter.rate().is_some());
        assert_eq!(meter.with(|together, _| together.busy), 0);
    }
}
