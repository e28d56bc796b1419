//! Rates of spills and restores, beside one plain copy of the same length.

use std::time::{Duration, Instant};

use anyhow::Result;
use serde::Serialize;
use vramp::Bytes;
use vramp::defer::DeferrableBuffer;

use super::rig::{PlainCopies, Rig, RigConfig};
use super::{Options, ROUNDS_MIN};
use crate::statistics::median;
use crate::{Bench, TimeSource};

/// The rates of one buffer length and cause of eviction.
#[derive(Clone, Debug, Serialize)]
pub struct RateRow {
    /// `rate`.
    pub measure: &'static str,
    /// `asked`: spilled on request, the memory stays free. `pressed`: evicted by a malloc of all of
    /// it, whose remapping is part of the time; restored once that block is freed. `again`: evicted
    /// by a malloc whose address is mapped from the round before.
    pub spill: &'static str,
    /// Length of the buffer.
    pub size_bytes: u64,
    /// Bytes evicted or restored at once.
    pub piece_bytes: u64,
    /// Number of rounds.
    pub rounds: u64,
    /// Rate of a plain copy to the host.
    pub plain_to_host_bytes_per_s: f64,
    /// Rate of the eviction of a dirty buffer.
    pub spill_bytes_per_s: f64,
    /// Ratio of that rate to the plain copy's.
    pub spill_of_plain: f64,
    /// Rate of a plain copy to the card.
    pub plain_to_device_bytes_per_s: f64,
    /// Rate of the restore.
    pub retrieve_bytes_per_s: f64,
    /// Ratio of that rate to the plain copy's.
    pub retrieve_of_plain: f64,
    /// Time of the eviction of a clean buffer.
    pub clean_spill_ns: f64,
    /// Bytes copied by evictions of a clean buffer.
    pub clean_copied_bytes: u64,
    /// Source of the times.
    pub time_is: TimeSource,
}

/// Why a buffer is evicted.
#[derive(Clone, Copy, Debug)]
enum Cause {
    /// A call of `spill`.
    Request,
    /// A malloc at a new address.
    Malloc,
    /// A malloc at the address of the round before.
    MallocAgain,
}

impl Cause {
    const ALL: [Cause; 3] = [Cause::Request, Cause::Malloc, Cause::MallocAgain];
}

/// One buffer and cause of eviction, with the times of each round.
struct Case {
    cause: Cause,
    buffer: DeferrableBuffer,
    rounds: Vec<Round>,
    clean_copied_bytes: u64,
}

/// Times of one round, in nanoseconds.
struct Round {
    plain_down: f64,
    spill: f64,
    plain_up: f64,
    restore: f64,
    clean: f64,
}

pub(super) fn measure(
    bench: &Bench,
    options: &Options,
    duration: Duration,
) -> Result<Vec<RateRow>> {
    let Options { piece, sizes, .. } = options;
    let largest = sizes.iter().copied().max().unwrap_or_default();
    // The host copy of a restored buffer stays until the next write.
    let pinned = sizes.iter().copied().sum::<Bytes>() * Cause::ALL.len() as u64 + largest;
    let rig = Rig::new(bench, &RigConfig { piece: *piece, limit: None, pinned })?;
    let plain = PlainCopies::new(&rig, largest)?;
    let mut cases = Vec::new();
    for &size in sizes {
        for cause in Cause::ALL {
            let buffer = rig.manager.buffer(size)?;
            cases.push(Case { cause, buffer, rounds: Vec::new(), clean_copied_bytes: 0 });
        }
    }
    let share = duration / cases.len() as u32;
    for case in &mut cases {
        let begun = Instant::now();
        // The first round is for warming up.
        case.round(&rig, &plain)?;
        while case.rounds.len() < ROUNDS_MIN || begun.elapsed() < share {
            let took = case.round(&rig, &plain)?;
            case.rounds.push(took);
        }
    }
    let time_is = bench.time_source();
    let rows = cases.into_iter().map(|case| case.row(*piece, time_is)).collect();
    plain.close()?;
    rig.close()?;
    Ok(rows)
}

impl Case {
    /// The buffer is evicted before and after, so that no other case's buffer is a victim.
    fn round(&mut self, rig: &Rig, plain: &PlainCopies) -> Result<Round> {
        let len = self.buffer.len();
        if let Cause::Malloc = self.cause {
            rig.empty_cache()?;
        }
        rig.write(&self.buffer)?;
        let plain_down = plain.to_host(len)? as f64;
        let spill = self.evict(rig)? as f64;
        let plain_up = plain.to_device(len)? as f64;
        let restore = rig.restore(&self.buffer)? as f64;
        let copied = rig.stats().to_host_bytes;
        let clean = self.evict(rig)? as f64;
        self.clean_copied_bytes += rig.stats().to_host_bytes - copied;
        Ok(Round { plain_down, spill, plain_up, restore, clean })
    }

    /// Evicts the buffer. Returns the time until its memory is free or allocated by the malloc.
    fn evict(&self, rig: &Rig) -> Result<u64> {
        match self.cause {
            Cause::Request => rig.spill(&self.buffer),
            Cause::Malloc | Cause::MallocAgain => rig.evict_by_malloc(&self.buffer),
        }
    }

    fn row(self, piece: Bytes, time_is: TimeSource) -> RateRow {
        let Case { cause, buffer, rounds, clean_copied_bytes } = self;
        let bytes = buffer.len().count() as f64;
        let middle = |of: fn(&Round) -> f64| median(rounds.iter().map(of).collect());
        let rate = |of| bytes * 1e9 / middle(of);
        RateRow {
            measure: "rate",
            spill: match cause {
                Cause::Request => "asked",
                Cause::Malloc => "pressed",
                Cause::MallocAgain => "again",
            },
            size_bytes: buffer.len().count(),
            piece_bytes: piece.count(),
            rounds: rounds.len() as u64,
            plain_to_host_bytes_per_s: rate(|round| round.plain_down),
            spill_bytes_per_s: rate(|round| round.spill),
            spill_of_plain: middle(|round| round.plain_down / round.spill),
            plain_to_device_bytes_per_s: rate(|round| round.plain_up),
            retrieve_bytes_per_s: rate(|round| round.restore),
            retrieve_of_plain: middle(|round| round.plain_up / round.restore),
            clean_spill_ns: middle(|round| round.clean),
            clean_copied_bytes,
            time_is,
        }
    }
}
