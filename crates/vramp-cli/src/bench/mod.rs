//! `vramp bench`: costs of allocators on a device.
//!
//! [`args`] holds the arguments; the help of each command says how it measures. `tables` makes
//! tables of the rows. The measurements are those of [`vramp_bench`].

mod adversary;
pub mod args;
mod tables;

use std::io::Write;
use std::time::Duration;

use anyhow::{Result, bail};
use serde::Serialize;
use vramp::peers::Preset;
use vramp_bench::{Bench, copy, disk, graphs, grow, hit, kv, remap, reserve, spill, threads};
use vramp_driver::DeviceInfo;
use vramp_host::IoChoice;

use crate::allocators::presets;
use crate::device::DeviceArgs;
use tables::Column;

/// Measures what the arguments name.
pub(crate) fn run(args: &args::Bench, out: &mut dyn Write) -> Result<()> {
    match &args.measure {
        args::Measure::Hit(args) => hit(args, out),
        args::Measure::Threads(args) => threads(args, out),
        args::Measure::Grow(args) => grow(args, out),
        args::Measure::Remap(args) => remap(args, out),
        args::Measure::Kv(args) => kv(args, out),
        args::Measure::Adversary(args) => adversary::run(args, out),
        args::Measure::Graphs(args) => graphs(args, out),
        args::Measure::Disk(args) => disk(args, out),
        args::Measure::Copy(args) => copy(args, out),
        args::Measure::Spill(args) => spill(args, out),
        args::Measure::Reserve(args) => reserve(args, out),
    }
}

fn hit(args: &args::Hit, out: &mut dyn Write) -> Result<()> {
    let mut output = Output::open(&args.common, out)?;
    let presets = presets(&args.common.allocator);
    let (sizes, outstanding) = (args.sizes.clone(), args.outstanding.clone());
    let rows = hit::run(&output.bench, &hit::Options { presets, sizes, outstanding })?;
    output.write("hit", &rows, &tables::HIT)?;
    output.write_device()
}

fn threads(args: &args::Threads, out: &mut dyn Write) -> Result<()> {
    let mut output = Output::open(&args.common, out)?;
    let options = threads::Options {
        presets: presets(&args.common.allocator),
        threads: args.threads.clone(),
        sizes: match args.sizes {
            args::Sizes::Uniform => threads::SizeDistribution::Uniform,
            args::Sizes::LogUniform => threads::SizeDistribution::LogUniform,
        },
    };
    let rows = threads::run(&output.bench, &options)?;
    output.write("threads", &rows, &tables::THREADS)?;
    output.write_device()?;
    let cores = std::thread::available_parallelism()?.get();
    if !output.json && args.threads.iter().any(|&count| usize::from(count) > cores) {
        writeln!(
            output.out,
            "This machine runs {cores} threads at a time; more of them alternate."
        )?;
    }
    Ok(())
}

fn grow(args: &args::Grow, out: &mut dyn Write) -> Result<()> {
    let mut output = Output::open(&args.common, out)?;
    let presets = presets(&args.common.allocator);
    let options = grow::Options { presets, total: args.total, block: args.block };
    let rows = grow::run(&output.bench, &options)?;
    output.write("grow", &rows, &tables::GROW)?;
    output.write_device()
}

fn remap(args: &args::Remap, out: &mut dyn Write) -> Result<()> {
    let mut output = Output::open(&args.common, out)?;
    let presets = presets(&args.common.allocator);
    let options = remap::Options { presets, total: args.total, block: args.block };
    let rows = remap::run(&output.bench, &options)?;
    output.write("remap", &rows, &tables::REMAP)?;
    output.write_device()
}

fn kv(args: &args::Kv, out: &mut dyn Write) -> Result<()> {
    only_vramp(&args.common, "only vramp has arenas for caches")?;
    let mut output = Output::open(&args.common, out)?;
    let options = kv::Options { tensors: args.tensors, each: args.each, rounds: args.rounds };
    let bench = output.bench.clone();
    output.write("kv", &kv::run(&bench, &options)?, &tables::KV)?;
    output.write("kv", &kv::beside(&bench, &options)?, &tables::KV_BESIDE)?;
    output.write_device()
}

fn graphs(args: &args::Graphs, out: &mut dyn Write) -> Result<()> {
    only_vramp(&args.common, "only vramp captures graphs into arenas")?;
    let mut output = Output::open(&args.common, out)?;
    let options = graphs::Options { graphs: args.graphs, block: args.block, arena: args.arena };
    let bench = output.bench.clone();
    let graphs = graphs::Graphs::new(&bench, options)?;
    output.write("graphs", &[graphs.sharing()?], &tables::SHARING)?;
    let replays = graphs.replays()?;
    let differing = replays.differing_bytes;
    output.write("graphs", &[replays], &tables::REPLAYS)?;
    output.write("graphs", &graphs.lending()?, &tables::LENDING)?;
    output.write("graphs", &graphs.requests()?, &tables::REQUESTS)?;
    output.write_device()?;
    if differing > 0 {
        output.out.flush()?;
        bail!("{differing} bytes of replays differ from those of the same calls without a graph");
    }
    Ok(())
}

fn copy(args: &args::CopyArgs, out: &mut dyn Write) -> Result<()> {
    only_vramp(&args.common, "copies do not use an allocator")?;
    let mut output = Output::open(&args.common, out)?;
    let (sizes, step, scattered) = (args.sizes.clone(), args.step, args.scattered);
    let rows = copy::run(&output.bench, &copy::Options { sizes, step, scattered })?;
    output.write("copy", &rows, &tables::COPY)?;
    output.write_device()
}

fn spill(args: &args::Spill, out: &mut dyn Write) -> Result<()> {
    only_vramp(&args.common, "only vramp spills buffers")?;
    let mut output = Output::open(&args.common, out)?;
    let options = spill::Options {
        sizes: args.sizes.clone(),
        piece: args.piece,
        card: args.card,
        buffer: args.buffer,
        accesses: args.accesses,
        counts: args.counts.clone(),
        writes: args.writes,
        seed: args.seed,
    };
    let bench = output.bench.clone();
    let spill = spill::Spill::new(&bench, options)?;
    let all = &args::SpillMeasure::ALL[..];
    let wanted = if args.measure.is_empty() { all } else { &args.measure };
    let share = bench.duration() / wanted.len() as u32;
    for measure in all.iter().filter(|measure| wanted.contains(measure)) {
        match measure {
            args::SpillMeasure::Rate => {
                output.write("spill", &spill.rates(share)?, &tables::SPILL_RATES)?;
            }
            args::SpillMeasure::Overlap => {
                output.write("spill", &spill.overlap(share)?, &tables::SPILL_OVERLAP)?;
            }
            args::SpillMeasure::Workload => {
                output.write("spill", &spill.workload()?, &tables::SPILL_WORKLOAD)?;
            }
            args::SpillMeasure::Calls => {
                output.write("spill", &spill.calls()?, &tables::SPILL_CALLS)?;
            }
            args::SpillMeasure::Overshoot => {
                output.write("spill", &[spill.overshoot(share)?], &tables::SPILL_OVERSHOOT)?;
            }
            args::SpillMeasure::Buffers => {
                output.write("spill", &spill.buffers()?, &tables::SPILL_BUFFERS)?;
            }
            args::SpillMeasure::Waiting => {
                output.write("spill", &spill.waiting(share)?, &tables::SPILL_WAITING)?;
            }
            args::SpillMeasure::Peer => {
                let rows = spill.peer(share)?;
                if !rows.is_empty() {
                    output.write("spill", &rows, &tables::SPILL_PEER)?;
                }
            }
        }
    }
    output.write_device()
}

fn reserve(args: &args::Reserve, out: &mut dyn Write) -> Result<()> {
    let mut output = Output::open(&args.common, out)?;
    let presets = presets(&args.common.allocator);
    let options = reserve::Options { presets, waiters: args.waiters.clone() };
    let rows = reserve::run(&output.bench, &options)?;
    output.write("reserve", &rows, &tables::RESERVE)?;
    output.write_device()
}

/// Needs no device.
fn disk(args: &args::Disk, out: &mut dyn Write) -> Result<()> {
    let report = disk::run(&disk::Options {
        directory: args.dir.clone(),
        total: args.total,
        block: args.block,
        depth: args.depth,
        engine: match args.engine {
            args::Engine::Auto => IoChoice::Auto,
            args::Engine::Uring => IoChoice::Uring,
            args::Engine::Threads => IoChoice::Threads,
        },
        compression: args.compress.map(|compress| match compress {
            args::Compress::Paying => disk::Compression::WhenFaster,
            args::Compress::Always => disk::Compression::WhenSmaller,
        }),
        duration: Duration::from_secs_f64(args.seconds),
    })?;
    if args.json {
        return report
            .rows
            .iter()
            .try_for_each(|row| write_line(out, &Line { bench: "disk", row }));
    }
    if let Some(reason) = report.fell_back {
        writeln!(out, "The store uses threads instead of io_uring: {reason}\n")?;
    }
    tables::write(out, &report.rows, &tables::DISK)
}

/// Refuses another allocator than vramp, for measurements that do not compare allocators.
fn only_vramp(common: &args::Common, reason: &str) -> Result<()> {
    if presets(&common.allocator) != [Preset::Vramp] {
        bail!("{reason}: omit --allocator");
    }
    Ok(())
}

/// Where rows go, and the device that they are of.
struct Output<'a> {
    bench: Bench,
    json: bool,
    out: &'a mut dyn Write,
}

/// A row of `vramp bench --json`.
#[derive(Serialize)]
struct Line<'a, R> {
    bench: &'static str,
    #[serde(flatten)]
    row: &'a R,
}

/// A row with its device.
#[derive(Serialize)]
struct DeviceRow<'a, R> {
    device: &'a str,
    driver: &'a str,
    simulated: bool,
    #[serde(flatten)]
    row: &'a R,
}

impl<'a> Output<'a> {
    /// Opens the device of the common options.
    fn open(common: &args::Common, out: &'a mut dyn Write) -> Result<Output<'a>> {
        let duration = Duration::from_secs_f64(common.seconds);
        Output::on(&common.device, duration, common.json, out)
    }

    /// Opens the device.
    fn on(
        device: &DeviceArgs,
        duration: Duration,
        json: bool,
        out: &'a mut dyn Write,
    ) -> Result<Output<'a>> {
        let bench = Bench::on(device.open()?, duration);
        Ok(Output { bench, json, out })
    }

    /// Writes rows: a JSON object each, or a table.
    fn write<R: Serialize>(
        &mut self,
        bench: &'static str,
        rows: &[R],
        columns: &[Column<R>],
    ) -> Result<()> {
        if !self.json {
            return tables::write(self.out, rows, columns);
        }
        let DeviceInfo { id, driver, simulated, .. } = self.bench.info();
        rows.iter().try_for_each(|row| {
            let row = DeviceRow { device: id, driver, simulated: *simulated, row };
            write_line(self.out, &Line { bench, row: &row })
        })
    }

    /// Names the device below the tables.
    fn write_device(&mut self) -> Result<()> {
        let DeviceInfo { id, name, driver, .. } = self.bench.info();
        if self.json {
            return Ok(());
        }
        writeln!(self.out, "{id} ({name}), driver {driver}")?;
        Ok(writeln!(self.out, "{}", self.bench.info().time_note())?)
    }
}

fn write_line(out: &mut dyn Write, line: &impl Serialize) -> Result<()> {
    crate::json::versioned_line(out, line)
}
