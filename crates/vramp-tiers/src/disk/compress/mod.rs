//! Writes that take fewer bytes on the disk than in memory, where that pays.
//!
//! 1. A write is charged for all its bytes. A worker compresses a sample of it, and
//!    [`decide`](crate::disk::core::compression::decide) decides about the rest.
//! 2. Workers compress the rest [frame](frames::Frame) by frame into memory of the store. A
//!    frame that saves too little stays uncompressed.
//! 3. The worker that finishes last allocates extents, and the write continues as any other, from that
//!    memory. The charge beyond that is credited when the caller waits.
//! 4. A read reads the compressed bytes, verifies their checksums, and only then has workers decompress
//!    them into the caller's memory.
//!
//! Checksums are of the bytes on the disk, so no damaged byte is ever decompressed. Compressed
//! bytes have checksums with [`Checksum::Off`](super::Checksum::Off) too, because one wrong bit
//! changes many bytes of the result.
//!
//! Deliberately absent: levels, other codecs, dictionaries, and reading a part of a write.

mod codec;
mod frames;
pub(super) mod object_pool;
mod stages;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use vramp_core::Bytes;
use vramp_host::HostMemory;

pub(super) use frames::Frames;

use super::core::compression::{CompressionConfig, Decision};
use super::core::growth::COMPRESSION_THREADS_MOST;
use super::core::rates::{SharedThroughput, Throughput};
use super::stats::CompressionStats;
use codec::Codec;
use object_pool::ObjectPool;

/// Most buffers for compressed bytes that stay allocated. Each serves one write or read.
const MEMORY_KEPT_MOST: usize = 4;

/// State shared by all compressed writes and reads of a store.
pub(super) struct Compressor {
    pub config: CompressionConfig,
    /// Throughput of all writes to the disk.
    pub disk: Arc<DiskMeter>,
    codecs: Arc<ObjectPool<Codec>>,
    /// Memory for compressed bytes.
    memory: Arc<ObjectPool<Arc<HostMemory>>>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    stats: CompressionStats,
    /// Compression by one thread.
    throughput: Throughput,
}

impl Compressor {
    pub fn new(config: CompressionConfig) -> Compressor {
        Compressor {
            config,
            disk: Arc::default(),
            codecs: Arc::new(ObjectPool::with_capacity(COMPRESSION_THREADS_MOST)),
            memory: Arc::new(ObjectPool::with_capacity(MEMORY_KEPT_MOST)),
            state: Mutex::default(),
        }
    }

    /// Frees memory that is not in use.
    pub fn trim(&self) {
        self.codecs.clear();
        self.memory.clear();
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn stats(&self) -> CompressionStats {
        self.state().stats
    }

    /// Returns the bytes per second that `threads` compress. `None` before the first measurement.
    fn rate(&self, threads: usize) -> Option<u64> {
        Some(self.state().throughput.rate()?.saturating_mul(threads as u64))
    }

    fn count_compressing(&self, bytes: Bytes, ns: u64) {
        let state = &mut *self.state();
        state.throughput.add(bytes, ns);
        state.stats.compressing_ns += ns;
    }

    fn count_decompressing(&self, bytes: Bytes, ns: u64) {
        let stats = &mut self.state().stats;
        stats.decompressed += bytes;
        stats.decompressing_ns += ns;
    }

    fn count_decision(&self, decision: Decision) {
        let stats = &mut self.state().stats;
        match decision {
            Decision::Compress => {}
            Decision::SavesTooLittle => stats.saved_too_little += 1,
            Decision::DiskFaster => stats.disk_faster += 1,
        }
    }

    pub fn count_written(&self, bytes: Bytes, on_disk: Bytes) {
        let stats = &mut self.state().stats;
        stats.writes += 1;
        stats.bytes += bytes;
        stats.on_disk += frames::whole_blocks(on_disk);
    }
}

fn elapsed_ns(since: Instant) -> u64 {
    since.elapsed().as_nanos().try_into().unwrap_or(u64::MAX)
}

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
        let now_ns = elapsed_ns(self.epoch);
        act(&mut self.throughput.lock().unwrap_or_else(PoisonError::into_inner), now_ns)
    }

    /// Notes that a call which writes `bytes` begins. It ends when the guard is dropped.
    pub fn begin(self: &Arc<DiskMeter>, bytes: Bytes) -> Busy {
        self.with(SharedThroughput::begin);
        Busy { meter: Arc::clone(self), bytes }
    }

    fn rate(&self) -> Option<u64> {
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
