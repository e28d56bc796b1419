//! Bytes evicted beyond the requested ones.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde::Serialize;
use vramp::Bytes;

use super::rig::{Rig, RigConfig};
use super::{Options, ROUNDS_MIN};
use crate::Bench;

/// Number of buffers.
const BUFFERS: u64 = 12;
/// Most pieces of a buffer.
const PIECES_MAX: u64 = 5;

/// How much is evicted beyond the requested bytes.
#[derive(Clone, Debug, Serialize)]
pub struct OvershootRow {
    /// `overshoot`.
    pub measure: &'static str,
    /// Bytes evicted at once.
    pub piece_bytes: u64,
    /// Length of all buffers.
    pub total_bytes: u64,
    /// Number of evictions.
    pub deficits: u64,
    /// Largest surplus.
    pub largest_overshoot_bytes: u64,
    /// Largest surplus, in pieces.
    pub largest_overshoot_pieces: f64,
    /// Mean surplus, in pieces.
    pub mean_overshoot_pieces: f64,
}

pub(super) fn measure(
    bench: &Bench,
    options: &Options,
    duration: Duration,
) -> Result<OvershootRow> {
    let piece = options.piece;
    let mut random = fastrand::Rng::with_seed(options.seed);
    let most = piece * PIECES_MAX;
    let rig = Rig::new(bench, &RigConfig { piece, limit: None, pinned: most * BUFFERS })?;
    // Buffers end within a piece.
    let lengths = (0..BUFFERS).map(|_| Bytes::new(random.u64(piece.count()..=most.count())));
    let buffers = lengths.map(|len| rig.manager.buffer(len)).collect::<Result<Vec<_>, _>>()?;
    let total: Bytes = buffers.iter().map(|buffer| buffer.len()).sum();
    buffers.iter().try_for_each(|buffer| rig.write(buffer))?;
    let (mut deficits, mut sum, mut largest) = (0, 0.0, Bytes::ZERO);
    let begun = Instant::now();
    while deficits < ROUNDS_MIN as u64 * BUFFERS || begun.elapsed() < duration {
        for buffer in &buffers {
            rig.restore(buffer)?;
        }
        let deficit = Bytes::new(random.u64(1..=total.count()));
        let spilled = rig.manager.spill(deficit);
        ensure!(
            spilled.freed >= deficit,
            "evicted {} of {deficit}: {:?}",
            spilled.freed,
            spilled.short
        );
        let over = spilled.freed - deficit;
        sum += over.count() as f64 / piece.count() as f64;
        largest = largest.max(over);
        deficits += 1;
    }
    drop(buffers);
    rig.close()?;
    Ok(OvershootRow {
        measure: "overshoot",
        piece_bytes: piece.count(),
        total_bytes: total.count(),
        deficits,
        largest_overshoot_bytes: largest.count(),
        largest_overshoot_pieces: largest.count() as f64 / piece.count() as f64,
        mean_overshoot_pieces: sum / deficits as f64,
    })
}
