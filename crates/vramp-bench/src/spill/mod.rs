//! Spillable buffers that are evicted to pinned host memory and restored.
//!
//! 1. [`Spill::rates`]: a dirty buffer is spilled and restored, each right after one plain copy of
//!    the same length; then it is spilled again, clean.
//! 2. [`Spill::overlap`]: a series of copies, and of fills, on the card: alone, beside a buffer
//!    that is spilled and restored continually, and beside plain copies.
//! 3. [`Spill::workload`]: buffers of twice the card's limit, of which a fifth gets four fifths of
//!    the accesses.
//! 4. [`Spill::calls`]: driver calls of a spill and of a restore.
//! 5. [`Spill::overshoot`]: bytes evicted beyond the requested ones.
//! 6. [`Spill::peer`]: a dirty buffer is spilled to and restored from each card that this one has a
//!    link to, each right after one plain copy over that link.
//! 7. [`Spill::buffers`]: a lease that spills one buffer of 2 MiB, with few and with many other buffers.
//! 8. [`Spill::waiting`]: a lease of a resident buffer by a thread that holds another one, with none and
//!    with many requests that wait for something else.
//!
//! On a simulator time is modelled; copies share the link and compete for nothing else.

mod buffers;
mod calls;
mod overlap;
mod overshoot;
mod peer;
mod rates;
mod rig;
mod waiting;
mod workload;

use std::ops::RangeInclusive;
use std::time::Duration;

use anyhow::{Result, ensure};
use vramp::Bytes;

use crate::Bench;

pub use buffers::BuffersRow;
pub use calls::CallRow;
pub use overlap::OverlapRow;
pub use overshoot::OvershootRow;
pub use peer::PeerRow;
pub use rates::RateRow;
pub use waiting::WaitingRow;
pub use workload::WorkloadRow;

/// Fewer rounds give no stable median.
const ROUNDS_MIN: usize = 5;
/// Lengths that a piece may have.
const PIECES: RangeInclusive<Bytes> = Bytes::mib(4)..=Bytes::mib(32);
/// Largest buffer on a card and on a simulator, whose pinned memory is real.
const LARGEST: [Bytes; 2] = [Bytes::gib(8), Bytes::gib(1)];

/// What to measure.
#[derive(Clone, Debug)]
pub struct Options {
    /// Lengths of buffers; if empty 64 MiB, 256 MiB and 1 GiB, the first two on a simulator.
    pub sizes: Vec<Bytes>,
    /// Bytes evicted or restored at once, from 4 MiB to 32 MiB.
    pub piece: Bytes,
    /// Memory limit of the workload on the card; by default 4 GiB, and 512 MiB on a simulator.
    pub card: Option<Bytes>,
    /// Length of the workload's buffers; a 64th of its limit by default.
    pub buffer: Option<Bytes>,
    /// Accesses of the workload, each to one to three buffers.
    pub accesses: u32,
    /// Percentage of accesses that write.
    pub writes: u8,
    /// Numbers of buffers beside which a lease spills one.
    pub counts: Vec<u32>,
    /// Seed of the random choices.
    pub seed: u64,
}

/// The eight measurements of spillable buffers, with checked options.
pub struct Spill<'a> {
    bench: &'a Bench,
    options: Options,
}

impl<'a> Spill<'a> {
    /// Checks the options and fills in the default sizes.
    ///
    /// # Errors
    /// The piece or a size is out of range.
    pub fn new(bench: &'a Bench, mut options: Options) -> Result<Spill<'a>> {
        let (piece, info) = (options.piece, bench.info());
        let (least, most) = (PIECES.start(), PIECES.end());
        ensure!(PIECES.contains(&piece), "give a piece from {least} to {most}");
        if options.sizes.is_empty() {
            let usual = [Bytes::mib(64), Bytes::mib(256), Bytes::gib(1)];
            let count = if info.simulated { 2 } else { usual.len() };
            options.sizes = usual[..count].to_vec();
        } else {
            let largest = LARGEST[usize::from(info.simulated)];
            let fit = |size: &Bytes| (piece..=largest).contains(size);
            ensure!(
                options.sizes.iter().all(fit),
                "give sizes from a piece of {piece} to {largest} on {}",
                info.id
            );
        }
        Ok(Spill { bench, options })
    }

    fn largest(&self) -> Bytes {
        self.options.sizes.iter().copied().max().unwrap_or_default()
    }

    /// Measures the rates of spills and restores, for about `duration`.
    ///
    /// # Errors
    /// Memory lacks, or the driver fails.
    pub fn rates(&self, duration: Duration) -> Result<Vec<RateRow>> {
        rates::measure(self.bench, &self.options, duration)
    }

    /// Measures the slowdown of other work on the card, for about `duration`.
    ///
    /// # Errors
    /// Memory lacks, or the driver fails.
    pub fn overlap(&self, duration: Duration) -> Result<Vec<OverlapRow>> {
        overlap::measure(self.bench, self.options.piece, self.largest(), duration)
    }

    /// Measures a workload of more buffers than the card holds: with writes, and reading alone.
    ///
    /// # Errors
    /// The limit or the buffers' length is out of range, memory lacks, or the driver fails.
    pub fn workload(&self) -> Result<Vec<WorkloadRow>> {
        workload::measure(self.bench, &self.options)
    }

    /// Counts the driver calls of a spill and of a restore.
    ///
    /// # Errors
    /// Memory lacks, or the driver fails.
    pub fn calls(&self) -> Result<Vec<CallRow>> {
        calls::measure(self.bench, self.options.piece, self.largest())
    }

    /// Measures spills to other cards, for about `duration`. Empty for a card without peers.
    ///
    /// # Errors
    /// Memory lacks, or the driver fails.
    pub fn peer(&self, duration: Duration) -> Result<Vec<PeerRow>> {
        peer::measure(self.bench, &self.options, duration)
    }

    /// Measures the host's time of a lease that spills one buffer, by the number of buffers.
    ///
    /// # Errors
    /// Memory lacks, or the driver fails.
    pub fn buffers(&self) -> Result<Vec<BuffersRow>> {
        buffers::measure(self.bench, &self.options.counts)
    }

    /// Measures the host's time of a lease of a resident buffer, by the number of waiting requests, for
    /// about `duration`.
    ///
    /// # Errors
    /// Memory lacks, or the driver fails.
    pub fn waiting(&self, duration: Duration) -> Result<Vec<WaitingRow>> {
        waiting::measure(self.bench, duration)
    }

    /// Measures how much is evicted beyond the requested bytes, for about `duration`.
    ///
    /// # Errors
    /// Memory lacks, or the driver fails.
    pub fn overshoot(&self, duration: Duration) -> Result<OvershootRow> {
        overshoot::measure(self.bench, &self.options, duration)
    }
}
