//! Throughput from bytes and times. Recent work counts more than old work.

use vramp_core::Bytes;

/// Once the recorded time exceeds this, bytes and time are halved.
const WINDOW_NS: u64 = 1_000_000_000;

/// Bytes, and the time that they took.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::disk) struct Throughput {
    bytes: u64,
    ns: u64,
}

impl Throughput {
    pub fn add(&mut self, bytes: Bytes, ns: u64) {
        self.bytes = self.bytes.saturating_add(bytes.count());
        self.ns = self.ns.saturating_add(ns);
        if self.ns > WINDOW_NS {
            self.bytes /= 2;
            self.ns /= 2;
        }
    }

    /// Returns bytes per second. `None` before the first byte.
    pub fn rate(&self) -> Option<u64> {
        let rate = u128::from(self.bytes) * 1_000_000_000 / u128::from(self.ns.max(1));
        (self.bytes > 0).then(|| rate.try_into().unwrap_or(u64::MAX))
    }
}

/// Throughput of calls that overlap. Time with at least one call counts once; idle time does not.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::disk) struct SharedThroughput {
    sum: Throughput,
    calls: u32,
    since_ns: u64,
}

impl SharedThroughput {
    fn pass(&mut self, now_ns: u64, bytes: Bytes) {
        let ns = if self.calls == 0 { 0 } else { now_ns.saturating_sub(self.since_ns) };
        self.sum.add(bytes, ns);
        self.since_ns = now_ns;
    }

    /// Notes that a call begins.
    pub fn begin(&mut self, now_ns: u64) {
        self.pass(now_ns, Bytes::ZERO);
        self.calls += 1;
    }

    /// Notes that a call of `bytes` has ended.
    pub fn end(&mut self, now_ns: u64, bytes: Bytes) {
        self.pass(now_ns, bytes);
        self.calls -= 1;
    }

    /// Returns bytes per second. `None` before the first byte.
    pub fn rate(&self) -> Option<u64> {
        self.sum.rate()
    }

    /// Returns the number of calls in flight.
    #[cfg(test)]
    pub fn calls(&self) -> u32 {
        self.calls
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn a_rate_follows_recent_work() {
        let mut sum = Throughput::default();
        assert_eq!(sum.rate(), None);
        sum.add(Bytes::new(100), SECOND / 2);
        assert_eq!(sum.rate(), Some(200));
        for _ in 0..20 {
            sum.add(Bytes::new(1000), SECOND);
        }
        let rate = sum.rate().unwrap();
        assert!((995..=1000).contains(&rate), "{rate}");
    }

    #[test]
    fn time_of_overlapping_writes_counts_once_and_idle_time_never() {
        let mut disk = SharedThroughput::default();
        disk.begin(0);
        disk.begin(SECOND / 10);
        disk.end(SECOND / 5, Bytes::new(30));
        disk.end(SECOND / 4, Bytes::new(20));
        assert_eq!(disk.rate(), Some(200));
        disk.begin(SECOND * 100);
        disk.end(SECOND * 100 + SECOND / 4, Bytes::new(50));
        assert_eq!(disk.rate(), Some(200));
    }
}
