//! `vramp bench spill`: buffers that leave the card and come back.
//!
//! `site` is what they need; `rate`, `overlap`, `workload`, `calls` and `overshoot` are the
//! measurements.

mod calls;
mod overlap;
mod overshoot;
mod rate;
mod site;
mod workload;

use std::io::Write;
use std::ops::RangeInclusive;

use anyhow::{Result, bail, ensure};
use vramp_alloc::{Bytes, Preset};
use vramp_driver::DeviceInfo;

use super::args::{Spill, SpillMeasure};
use super::{Bench, Cell};

/// What `bench` is in every row.
const NAME: &str = "spill";
/// Fewer rounds say nothing.
const ROUNDS_LEAST: usize = 5;
/// What leaves at once.
const PIECES: RangeInclusive<Bytes> = Bytes::mib(4)..=Bytes::mib(32);
/// What a card and its host have room for, and what a simulator's host has.
const LARGEST: [Bytes; 2] = [Bytes::gib(8), Bytes::gib(1)];

pub(super) fn run(args: &Spill, out: &mut dyn Write) -> Result<()> {
    if args.common.allocator.0 != [Preset::Vramp] {
        bail!("only vramp's memory leaves and comes back: leave --allocator away");
    }
    ensure!(
        PIECES.contains(&args.piece),
        "give a --piece from {} to {}",
        PIECES.start(),
        PIECES.end()
    );
    let bench = Bench::open(&args.common, out)?;
    let sizes = sizes(args, &bench.info)?;
    let largest = sizes.iter().copied().max().unwrap_or_default();
    let all = &SpillMeasure::ALL[..];
    let asked = if args.measure.is_empty() { all } else { &args.measure };
    for measure in all.iter().filter(|measure| asked.contains(measure)) {
        match measure {
            SpillMeasure::Rate => {
                let rows = rate::measure(&bench, args.piece, &sizes, asked.len())?;
                bench.write_rows(out, NAME, &rows, &rate::COLUMNS)?;
            }
            SpillMeasure::Overlap => {
                let rows = overlap::measure(&bench, args.piece, largest, asked.len())?;
                bench.write_rows(out, NAME, &rows, &overlap::COLUMNS)?;
            }
            SpillMeasure::Workload => {
                let rows = workload::measure(&bench, args)?;
                bench.write_rows(out, NAME, &rows, &workload::COLUMNS)?;
            }
            SpillMeasure::Calls => {
                let rows = calls::measure(&bench, args.piece, largest)?;
                bench.write_rows(out, NAME, &rows, &calls::COLUMNS)?;
            }
            SpillMeasure::Overshoot => {
                let row = overshoot::measure(&bench, args, asked.len())?;
                bench.write_rows(out, NAME, &[row], &overshoot::COLUMNS)?;
            }
        }
    }
    bench.write_device(out)
}

fn sizes(args: &Spill, info: &DeviceInfo) -> Result<Vec<Bytes>> {
    if args.sizes.is_empty() {
        let usual = [Bytes::mib(64), Bytes::mib(256), Bytes::gib(1)];
        let count = if info.simulated { 2 } else { usual.len() };
        return Ok(usual[..count].to_vec());
    }
    let (least, largest) = (args.piece, LARGEST[usize::from(info.simulated)]);
    let fit = |size: &Bytes| (least..=largest).contains(size);
    ensure!(
        args.sizes.iter().all(fit),
        "give --sizes from a piece of {least} to {largest} on {}",
        info.id
    );
    Ok(args.sizes.clone())
}

/// Whether a device's times are its own.
fn time_is(info: &DeviceInfo) -> &'static str {
    if info.simulated { "modelled" } else { "measured" }
}

fn modelled(time_is: &str) -> &'static str {
    if time_is == "modelled" { " (modelled)" } else { "" }
}

fn gigabytes(bytes_per_s: f64, time_is: &str) -> Cell {
    Cell::Number(format!("{:.2}{}", bytes_per_s / 1e9, modelled(time_is)))
}

fn millis(ns: f64, time_is: &str) -> Cell {
    Cell::Number(format!("{:.3}{}", ns / 1e6, modelled(time_is)))
}

fn size(bytes: u64) -> Cell {
    Cell::Number(Bytes::new(bytes).to_string())
}

fn ratio(value: f64) -> Cell {
    Cell::Number(format!("{value:.3}"))
}
