//! What leaves beyond what was asked for.

use std::time::Instant;

use anyhow::{Result, ensure};
use serde::Serialize;
use vramp_alloc::Bytes;

use super::site::{Plan, Site};
use super::{ROUNDS_LEAST, ratio, size};
use crate::bench::args::Spill;
use crate::bench::{Bench, Cell, Column};
use crate::count::Count;

/// How many buffers there are, and how many pieces each has at most.
const BUFFERS: u64 = 12;
const PIECES_MOST: u64 = 5;

/// One row.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    measure: &'static str,
    piece_bytes: u64,
    /// All buffers together.
    total_bytes: u64,
    deficits: u64,
    largest_overshoot_bytes: u64,
    largest_overshoot_pieces: f64,
    mean_overshoot_pieces: f64,
}

pub(super) fn measure(bench: &Bench, args: &Spill, shares: usize) -> Result<Row> {
    let piece = args.piece;
    let mut random = fastrand::Rng::with_seed(args.seed);
    let most = piece * PIECES_MOST;
    let site = Site::new(bench, &Plan { piece, limit: None, host: most * BUFFERS })?;
    // Whole and broken pieces.
    let lengths = (0..BUFFERS).map(|_| Bytes::new(random.u64(piece.count()..=most.count())));
    let buffers = lengths.map(|len| site.manager.buffer(len)).collect::<Result<Vec<_>, _>>()?;
    let total: Bytes = buffers.iter().map(|buffer| buffer.len()).sum();
    buffers.iter().try_for_each(|buffer| site.write(buffer))?;
    let (mut deficits, mut sum, mut largest) = (0, 0.0, Bytes::ZERO);
    let begun = Instant::now();
    let share = bench.duration / shares.max(1) as u32;
    while deficits < ROUNDS_LEAST as u64 * BUFFERS || begun.elapsed() < share {
        for buffer in &buffers {
            site.retrieve(buffer)?;
        }
        let deficit = Bytes::new(random.u64(1..=total.count()));
        let spilled = site.manager.spill(deficit);
        ensure!(
            spilled.freed >= deficit,
            "{} of {deficit} left: {:?}",
            spilled.freed,
            spilled.short
        );
        let over = spilled.freed - deficit;
        sum += over.count() as f64 / piece.count() as f64;
        largest = largest.max(over);
        deficits += 1;
    }
    drop(buffers);
    site.close()?;
    Ok(Row {
        measure: "overshoot",
        piece_bytes: piece.count(),
        total_bytes: total.count(),
        deficits,
        largest_overshoot_bytes: largest.count(),
        largest_overshoot_pieces: largest.count() as f64 / piece.count() as f64,
        mean_overshoot_pieces: sum / deficits as f64,
    })
}

pub(super) const COLUMNS: [Column<Row>; 5] = [
    ("piece", |row| size(row.piece_bytes)),
    ("all buffers", |row| size(row.total_bytes)),
    ("largest overshoot in pieces", |row| ratio(row.largest_overshoot_pieces)),
    ("mean", |row| ratio(row.mean_overshoot_pieces)),
    ("deficits", |row| Cell::Number(Count(row.deficits).to_string())),
];
