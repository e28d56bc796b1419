//! How fast a buffer leaves and comes back, beside one plain copy of as much.

use std::time::Instant;

use anyhow::Result;
use serde::Serialize;
use vramp_alloc::Bytes;
use vramp_defer::DeferrableBuffer;

use super::site::{Plain, Plan, Site};
use super::{ROUNDS_LEAST, gigabytes, millis, ratio, size, time_is};
use crate::bench::{Bench, Cell, Column, median};
use crate::count::Count;

/// One row.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    measure: &'static str,
    /// `asked` for, and nobody takes the memory; `pressed` out by a malloc of all of it, whose
    /// remapping is part of the time, and back once that is freed; or pressed out `again` by a malloc
    /// whose place is known from the round before.
    spill: &'static str,
    size_bytes: u64,
    piece_bytes: u64,
    rounds: u64,
    plain_to_host_bytes_per_s: f64,
    spill_bytes_per_s: f64,
    spill_of_plain: f64,
    plain_to_device_bytes_per_s: f64,
    retrieve_bytes_per_s: f64,
    retrieve_of_plain: f64,
    /// The same of what has a copy.
    clean_spill_ns: f64,
    clean_copied_bytes: u64,
    time_is: &'static str,
}

/// Why a buffer leaves.
#[derive(Clone, Copy, Debug)]
enum Cause {
    Asked,
    Pressed,
    Again,
}

impl Cause {
    const ALL: [Cause; 3] = [Cause::Asked, Cause::Pressed, Cause::Again];
}

/// One buffer that leaves in one way, and what each round took, in nanoseconds.
struct Case {
    cause: Cause,
    buffer: DeferrableBuffer,
    rounds: Vec<Round>,
    clean_copied_bytes: u64,
}

struct Round {
    plain_down: f64,
    spill: f64,
    plain_up: f64,
    retrieve: f64,
    clean: f64,
}

pub(super) fn measure(
    bench: &Bench,
    piece: Bytes,
    sizes: &[Bytes],
    shares: usize,
) -> Result<Vec<Row>> {
    let largest = sizes.iter().copied().max().unwrap_or_default();
    // Copies of buffers that came back clean stay, and end with the next write.
    let host = sizes.iter().copied().sum::<Bytes>() * Cause::ALL.len() as u64 + largest;
    let site = Site::new(bench, &Plan { piece, limit: None, host })?;
    let plain = Plain::new(&site, largest)?;
    let mut cases = Vec::new();
    for &size in sizes {
        for cause in Cause::ALL {
            let buffer = site.manager.buffer(size)?;
            cases.push(Case { cause, buffer, rounds: Vec::new(), clean_copied_bytes: 0 });
        }
    }
    let share = bench.duration / shares.max(1) as u32 / cases.len() as u32;
    for case in &mut cases {
        let begun = Instant::now();
        // The first round is for warming up.
        case.round(&site, &plain)?;
        while case.rounds.len() < ROUNDS_LEAST || begun.elapsed() < share {
            let took = case.round(&site, &plain)?;
            case.rounds.push(took);
        }
    }
    let time_is = time_is(&bench.info);
    let rows = cases.into_iter().map(|case| case.row(piece, time_is)).collect();
    plain.close()?;
    site.close()?;
    Ok(rows)
}

impl Case {
    /// Away at first and in the end, so that the buffers of other cases are never chosen.
    fn round(&mut self, site: &Site, plain: &Plain) -> Result<Round> {
        let len = self.buffer.len();
        if let Cause::Pressed = self.cause {
            site.forget()?;
        }
        site.write(&self.buffer)?;
        let plain_down = plain.to_host(len)? as f64;
        let spill = self.leave(site)? as f64;
        let plain_up = plain.to_device(len)? as f64;
        let retrieve = site.retrieve(&self.buffer)? as f64;
        let copied = site.stats().to_host_bytes;
        let clean = self.leave(site)? as f64;
        self.clean_copied_bytes += site.stats().to_host_bytes - copied;
        Ok(Round { plain_down, spill, plain_up, retrieve, clean })
    }

    /// How long it takes until the memory is free, or somebody has it.
    fn leave(&self, site: &Site) -> Result<u64> {
        match self.cause {
            Cause::Asked => site.spill(&self.buffer),
            Cause::Pressed | Cause::Again => site.press(&self.buffer),
        }
    }

    fn row(self, piece: Bytes, time_is: &'static str) -> Row {
        let Case { cause, buffer, rounds, clean_copied_bytes } = self;
        let bytes = buffer.len().count() as f64;
        let middle = |of: fn(&Round) -> f64| median(rounds.iter().map(of).collect());
        let rate = |of| bytes * 1e9 / middle(of);
        Row {
            measure: "rate",
            spill: match cause {
                Cause::Asked => "asked",
                Cause::Pressed => "pressed",
                Cause::Again => "again",
            },
            size_bytes: buffer.len().count(),
            piece_bytes: piece.count(),
            rounds: rounds.len() as u64,
            plain_to_host_bytes_per_s: rate(|round| round.plain_down),
            spill_bytes_per_s: rate(|round| round.spill),
            spill_of_plain: middle(|round| round.plain_down / round.spill),
            plain_to_device_bytes_per_s: rate(|round| round.plain_up),
            retrieve_bytes_per_s: rate(|round| round.retrieve),
            retrieve_of_plain: middle(|round| round.plain_up / round.retrieve),
            clean_spill_ns: middle(|round| round.clean),
            clean_copied_bytes,
            time_is,
        }
    }
}

pub(super) const COLUMNS: [Column<Row>; 11] = [
    ("spill", |row| Cell::Words(row.spill.to_owned())),
    ("buffer", |row| size(row.size_bytes)),
    ("plain out GB/s", |row| gigabytes(row.plain_to_host_bytes_per_s, row.time_is)),
    ("spill GB/s", |row| gigabytes(row.spill_bytes_per_s, row.time_is)),
    ("of plain", |row| ratio(row.spill_of_plain)),
    ("plain in GB/s", |row| gigabytes(row.plain_to_device_bytes_per_s, row.time_is)),
    ("retrieve GB/s", |row| gigabytes(row.retrieve_bytes_per_s, row.time_is)),
    ("of plain", |row| ratio(row.retrieve_of_plain)),
    ("clean spill ms", |row| millis(row.clean_spill_ns, row.time_is)),
    ("clean copied", |row| size(row.clean_copied_bytes)),
    ("rounds", |row| Cell::Number(Count(row.rounds).to_string())),
];
