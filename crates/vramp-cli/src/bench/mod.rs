//! `vramp bench`: what allocators cost on a device.
//!
//! - [`args`] says what can be asked for, and the help of each command how it measures.
//! - `subject` is what is measured, `hit`, `threads`, `grow`, `remap`, `graphs`, `disk`, `copy`,
//!   `spill` and `reserve` are the measurements.
//!
//! Whatever is compared is measured in the same run, in turns.

pub mod args;
mod copy;
mod cost;
mod disk;
mod graphs;
mod grow;
mod hit;
mod remap;
mod reserve;
mod spill;
mod subject;
mod threads;

use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;
use vramp_alloc::{Bytes, Driver};
use vramp_driver::DeviceInfo;

use crate::device::Device;

/// Measures what was asked for.
pub(crate) fn run(args: &args::Bench, out: &mut dyn Write) -> Result<()> {
    match &args.measure {
        args::Measure::Hit(hit) => hit::run(hit, out),
        args::Measure::Threads(threads) => threads::run(threads, out),
        args::Measure::Grow(grow) => grow::run(grow, out),
        args::Measure::Remap(remap) => remap::run(remap, out),
        args::Measure::Graphs(graphs) => graphs::run(graphs, out),
        args::Measure::Disk(disk) => disk::run(disk, out),
        args::Measure::Copy(copy) => copy::run(copy, out),
        args::Measure::Spill(spill) => spill::run(spill, out),
        args::Measure::Reserve(reserve) => reserve::run(reserve, out),
    }
}

/// The device and what all measurements have in common.
struct Bench {
    device: Device,
    info: DeviceInfo,
    duration: Duration,
    json: bool,
}

/// One row with what it is a row of. Serialised, this is the line that `--json` prints.
#[derive(Serialize)]
struct Line<'a, R> {
    bench: &'static str,
    device: &'a str,
    driver: &'a str,
    simulated: bool,
    #[serde(flatten)]
    row: &'a R,
}

/// One column of a table for people: its head, and what stands there in a row.
type Column<R> = (&'static str, fn(&R) -> Cell);

/// What stands in a table.
enum Cell {
    Words(String),
    Number(String),
}

impl Bench {
    /// Opens the device and says so where it is not the one a person might expect.
    fn open(common: &args::Common, out: &mut dyn Write) -> Result<Bench> {
        let device = Device::open(&common.device)?;
        let info = device.fresh(false)?.driver.info().clone();
        if !common.json
            && let Some(reason) = &device.fell_back
        {
            writeln!(out, "Simulating, for there is no card to use: {reason}\n")?;
        }
        let duration = Duration::from_secs_f64(common.seconds);
        Ok(Bench { device, info, duration, json: common.json })
    }

    /// The device as nobody used it before.
    fn driver(&self) -> Result<Arc<dyn Driver>> {
        Ok(self.device.fresh(false)?.driver)
    }

    /// Does `work` at least once, and again until a `shares`th of the time is over.
    fn repeat(&self, shares: usize, mut work: impl FnMut() -> Result<()>) -> Result<()> {
        let share = self.duration / shares.max(1) as u32;
        let begun = Instant::now();
        loop {
            work()?;
            if begun.elapsed() >= share {
                return Ok(());
            }
        }
    }

    /// Writes rows: a JSON object each, or a table and the device.
    fn write<R: Serialize>(
        &self,
        out: &mut dyn Write,
        bench: &'static str,
        rows: &[R],
        columns: &[Column<R>],
    ) -> Result<()> {
        self.write_rows(out, bench, rows, columns)?;
        self.write_device(out)
    }

    /// Writes rows: a JSON object each, or a table and an empty line.
    fn write_rows<R: Serialize>(
        &self,
        out: &mut dyn Write,
        bench: &'static str,
        rows: &[R],
        columns: &[Column<R>],
    ) -> Result<()> {
        let DeviceInfo { id, driver, simulated, .. } = &self.info;
        if self.json {
            for row in rows {
                let line = Line { bench, device: id, driver, simulated: *simulated, row };
                serde_json::to_writer(&mut *out, &line)?;
                writeln!(out)?;
            }
            return Ok(());
        }
        write_table(out, rows, columns)
    }

    /// Names the device, for people.
    fn write_device(&self, out: &mut dyn Write) -> Result<()> {
        let DeviceInfo { id, name, driver, .. } = &self.info;
        if self.json {
            return Ok(());
        }
        Ok(writeln!(out, "{id} ({name}), driver {driver}")?)
    }
}

/// Writes a table for people, and an empty line.
fn write_table<R>(out: &mut dyn Write, rows: &[R], columns: &[Column<R>]) -> Result<()> {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    table.set_header(columns.iter().map(|(head, _)| *head));
    for row in rows {
        table.add_row(columns.iter().map(|(_, cell)| match cell(row) {
            Cell::Words(text) => comfy_table::Cell::new(text),
            Cell::Number(text) => comfy_table::Cell::new(text).set_alignment(CellAlignment::Right),
        }));
    }
    Ok(writeln!(out, "{}\n", table.trim_fmt())?)
}

/// More blocks take longer than anybody waits.
const BLOCKS_MOST: u64 = 1 << 20;

/// How many blocks go into `total`.
fn blocks_in(total: Bytes, block: Bytes) -> Result<u64> {
    match total.count().checked_div(block.count()) {
        Some(count @ 1..=BLOCKS_MOST) => Ok(count),
        Some(count @ 1..) => bail!(
            "{count} blocks are more than {BLOCKS_MOST}: give a smaller --total or a larger --block"
        ),
        _ => bail!("{total} holds no block of {block}: give a larger --total or a smaller --block"),
    }
}

fn nanos(duration: Duration) -> u64 {
    duration.as_nanos().try_into().unwrap_or(u64::MAX)
}

/// The middle one; of two middle ones the upper. Not a number for no values.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
