//! Writes that take fewer bytes on the disk than in memory, where that pays.
//!
//! 1. A write is charged for all its bytes. A worker of the store compresses a few
//!    [samples](sample) of it, and [`decide`](decide::decide) says whether the rest is worth it.
//! 2. If so, workers compress it [frame](frames::Frame) by frame into memory of the store's own. A
//!    frame that saves too little stays as it is.
//! 3. The last of them takes extents for what is left, and the [write](write::Compressing) goes on
//!    as any other, from that memory. What was charged beyond is credited to whoever waits.
//! 4. A [read](read::Decompressing) brings the bytes of the disk, compares their sums, and only then
//!    do workers decompress them to where they belong.
//!
//! Sums are of the bytes on the disk, so that nothing that changed there is ever decompressed. What
//! is compressed is summed up with [`Checksum::Off`](super::Checksum::Off) too: there one bit decides
//! about many bytes.
//!
//! Deliberately absent: levels and other codecs, dictionaries, and reading a part of a write.

mod codec;
mod decide;
mod frames;
mod meter;
mod read;
mod sample;
mod stock;
mod write;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use vramp_core::Bytes;
use vramp_host::HostMemory;

pub use decide::CompressionConfig;
pub(super) use frames::Frames;
pub(super) use read::Decompressing;
pub(super) use write::Compressing;

use codec::Codec;
use decide::Decision;
use meter::{DiskMeter, Tally};
use stock::Stock;

/// Threads of a store that compresses. It takes several times as long as sums do.
pub(super) const THREADS_MOST: usize = 8;
/// Memory that is kept for the compressed bytes of so many writes or reads.
const MEMORY_KEPT_MOST: usize = 4;

/// What a store did to save bytes on the disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CompressionStats {
    /// Writes of which some or all was compressed.
    pub writes: u64,
    /// Their bytes.
    pub bytes: Bytes,
    /// What they took on the disk, in whole blocks.
    pub on_disk: Bytes,
    /// Writes left as they were, for their samples saved too little.
    pub saved_too_little: u64,
    /// Writes left as they were, for the disk takes less time than compressing.
    pub disk_faster: u64,
    /// Nanoseconds of compressing, samples included, over all threads.
    pub compressing_ns: u64,
    /// What was decompressed, as it was before it was compressed.
    pub decompressed: Bytes,
    /// Nanoseconds of that, over all threads.
    pub decompressing_ns: u64,
}

/// What the writes and reads of a store that compresses have in common.
pub(super) struct Compressor {
    pub config: CompressionConfig,
    /// What the disk writes, for whatever reason.
    pub disk: Arc<DiskMeter>,
    codecs: Arc<Stock<Codec>>,
    /// Memory for compressed bytes.
    memory: Arc<Stock<Arc<HostMemory>>>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    stats: CompressionStats,
    /// What one thread compresses in a time.
    tally: Tally,
}

impl Compressor {
    pub fn new(config: CompressionConfig) -> Compressor {
        Compressor {
            config,
            disk: Arc::default(),
            codecs: Arc::new(Stock::of_at_most(THREADS_MOST)),
            memory: Arc::new(Stock::of_at_most(MEMORY_KEPT_MOST)),
            state: Mutex::default(),
        }
    }

    /// Gives memory up that nothing uses now.
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

    /// Bytes that `threads` compress in a second, if any were yet.
    fn rate(&self, threads: usize) -> Option<u64> {
        Some(self.state().tally.rate()?.saturating_mul(threads as u64))
    }

    fn count_compressing(&self, bytes: Bytes, ns: u64) {
        let state = &mut *self.state();
        state.tally.add(bytes, ns);
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

    fn count_written(&self, bytes: Bytes, on_disk: Bytes) {
        let stats = &mut self.state().stats;
        stats.writes += 1;
        stats.bytes += bytes;
        stats.on_disk += on_disk;
    }
}

fn elapsed_ns(since: Instant) -> u64 {
    since.elapsed().as_nanos().try_into().unwrap_or(u64::MAX)
}
