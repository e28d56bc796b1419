//! Measures the throughput of the disk by the clock on the wall.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use vramp_core::Bytes;

use crate::disk::core::rates::SharedThroughput;

/// Measures the bytes per second that the disk writes.
pub(in crate::disk) struct DiskMeter {
    epoch: Instant,
    throughput: Mutex<SharedThroughput>,
}

impl Default for DiskMeter {
    fn default() -> DiskMeter {
        DiskMeter { epoch: Instant::now(), throughput: Mutex::default() }
    }
}

impl DiskMeter {
    fn with<T>(&self, act: impl FnOnce(&mut SharedThroughput, u64) -> T) -> T {
        let now_ns = self.epoch.elapsed().as_nanos().try_into().unwrap_or(u64::MAX);
        act(&mut self.throughput.lock().unwrap_or_else(PoisonError::into_inner), now_ns)
    }

    /// Notes that a call which writes `bytes` begins. It ends when the guard is dropped.
    pub fn begin(self: &Arc<DiskMeter>, bytes: Bytes) -> Busy {
        self.with(SharedThroughput::begin);
        Busy { meter: Arc::clone(self), bytes }
    }

    pub(super) fn rate(&self) -> Option<u64> {
        self.with(|throughput, _| throughput.rate())
    }
}

/// Guard of one call of the disk.
pub(in crate::disk) struct Busy {
    meter: Arc<DiskMeter>,
    bytes: Bytes,
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.meter.with(|throughput, now_ns| throughput.end(now_ns, self.bytes));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_ends_when_its_guard_is_dropped() {
        let meter = Arc::new(DiskMeter::default());
        let (one, other) = (meter.begin(Bytes::mib(1)), meter.begin(Bytes::ZERO));
        assert_eq!(meter.rate(), None);
        drop((one, other));
        assert!(meter.rate().is_some());
        assert_eq!(meter.with(|throughput, _| throughput.calls()), 0);
    }
}
