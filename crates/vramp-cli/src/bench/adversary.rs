//! `vramp bench adversary`: a table for each pattern, and what the default allocator misses.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde::Serialize;
use vramp::Bytes;
use vramp_bench::adversary::{self, Bounds, Figure, Miss, Pattern, Row};
use vramp_bench::{Bench, TimeSource};

use super::tables::{self, Cell, Column};
use super::{Output, args};
use crate::allocators::presets;
use vramp_analysis::number::plural;

/// The device and seed that bounds are of.
const BOUNDS_OF: (&str, u64) = ("sim:h200", 1);

/// A row, and what it is best in.
#[derive(Serialize)]
struct Compared {
    #[serde(flatten)]
    row: Row,
    /// Source of `driver_ns`.
    driver_ns_is: TimeSource,
    best_in: Vec<&'static str>,
}

/// The rows of one pattern.
struct Results {
    pattern: Pattern,
    rows: Vec<Row>,
}

/// The default allocator's misses in one pattern.
struct Missed {
    pattern: String,
    miss: Miss,
}

/// How often an allocator is the best.
struct Wins {
    allocator: &'static str,
    patterns: u64,
    memory: u64,
    driver_time: u64,
    host_time: u64,
    failed: u64,
}

const COLUMNS: [Column<Compared>; 14] = [
    ("allocator", |line| tables::text(line.row.allocator)),
    ("peak reserved", |line| tables::size(line.row.peak_reserved_bytes)),
    ("reserved/live", |line| tables::decimals(line.row.reserved_over_live, 3)),
    ("failed", |line| tables::count(line.row.failed)),
    ("driver calls", |line| tables::count(line.row.driver_calls)),
    ("after warm-up", |line| tables::count(line.row.driver_calls_warm)),
    ("driver ms", |line| tables::decimals(line.row.driver_ns as f64 / 1e6, 3)),
    ("waits", |line| tables::count(line.row.waits_warm)),
    ("records", |line| tables::count(line.row.records_warm)),
    ("queries", |line| tables::count(line.row.queries_warm)),
    ("syncs", |line| tables::count(line.row.synchronizations)),
    ("looked at", |line| tables::decimals(line.row.request_looked_at, 1)),
    ("host ns", |line| tables::decimals(line.row.request_host_ns, 0)),
    ("best in", |line| tables::text(&line.best_in.join(", "))),
];

const WINS: [Column<Wins>; 6] = [
    ("best in", |wins| tables::text(wins.allocator)),
    ("patterns", |wins| tables::count(wins.patterns)),
    ("memory", |wins| tables::count(wins.memory)),
    ("driver time", |wins| tables::count(wins.driver_time)),
    ("host time", |wins| tables::count(wins.host_time)),
    ("failed requests", |wins| tables::count(wins.failed)),
];

const MISSED: [Column<Missed>; 2] = [
    ("pattern", |missed| tables::text(&missed.pattern)),
    ("vramp misses", |missed| tables::text(&missed.miss.text)),
];

const LIST: [Column<Pattern>; 3] = [
    ("pattern", |pattern| tables::text(&pattern.name)),
    ("", |pattern| Cell::Text(if pattern.large { "large" } else { "" }.to_owned())),
    ("what it does", |pattern| tables::text(pattern.about)),
];

pub(super) fn run(args: &args::Adversary, out: &mut dyn Write) -> Result<()> {
    if args.list {
        let all = adversary::select(&args.patterns, true)?;
        return tables::write(out, &all, &LIST);
    }
    let patterns = adversary::select(&args.patterns, args.large)?;
    let mut bounds = match &args.bounds {
        Some(path) => Some((path.as_path(), read_bounds(path, args)?)),
        None => None,
    };
    let mut output = Output::on(&args.device, Duration::ZERO, args.json, out)?;
    if bounds.is_some() {
        let device = &output.bench.info().id;
        ensure!(device == BOUNDS_OF.0, "bounds are of {}: give --device {0}", BOUNDS_OF.0);
    }
    let mut results = Vec::new();
    for pattern in patterns {
        let rows = rows(&output.bench, &pattern, args)?;
        let of_pattern = Results { pattern, rows };
        if !args.markdown {
            write_pattern(&mut output, &of_pattern)?;
        }
        results.push(of_pattern);
    }
    if args.markdown {
        write_markdown(&mut output, args, &results)?;
    } else if !args.json {
        write_summary(&mut output, args, &results)?;
        output.write_device()?;
    }
    match &mut bounds {
        Some((path, bounds)) if args.write => write_bounds(path, bounds, &results),
        Some((_, bounds)) => check_bounds(&mut output, bounds, &results),
        None => Ok(()),
    }
}

fn rows(bench: &Bench, pattern: &Pattern, args: &args::Adversary) -> Result<Vec<Row>> {
    let run = |&preset| adversary::run(bench.device(), pattern, preset, args.seed);
    presets(&args.allocator).iter().map(run).collect()
}

// --- bounds ---

fn read_bounds(path: &Path, args: &args::Adversary) -> Result<Bounds> {
    ensure!(args.seed == BOUNDS_OF.1, "bounds are of seed {}: omit --seed", BOUNDS_OF.1);
    match fs::read_to_string(path) {
        Ok(text) => Bounds::parse(&text).with_context(|| path.display().to_string()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound && args.write => {
            Ok(Bounds::default())
        }
        Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
    }
}

fn write_bounds(path: &Path, bounds: &mut Bounds, results: &[Results]) -> Result<()> {
    for Results { pattern, rows } in results {
        if let Some(row) = rows.iter().find(|row| bounds.are_of(row)) {
            bounds.set(pattern, row);
        }
    }
    let text = bounds.text(&adversary::patterns());
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

fn check_bounds(output: &mut Output<'_>, bounds: &Bounds, results: &[Results]) -> Result<()> {
    let rows = results.iter().flat_map(|results| &results.rows);
    let exceeded: Vec<String> = rows.flat_map(|row| bounds.exceeded(row)).collect();
    if exceeded.is_empty() {
        return Ok(());
    }
    output.out.flush()?;
    bail!("{} above their bounds:\n{}", plural(exceeded.len(), "figure"), exceeded.join("\n"))
}

// --- tables ---

fn write_pattern(output: &mut Output<'_>, results: &Results) -> Result<()> {
    let Results { pattern, rows } = results;
    let driver_ns_is = output.bench.time_source();
    let compared: Vec<Compared> = rows
        .iter()
        .map(|row| {
            let best_in = adversary::best_in(row, rows).into_iter().map(Figure::name).collect();
            Compared { row: row.clone(), driver_ns_is, best_in }
        })
        .collect();
    if !output.json {
        writeln!(output.out, "{}: {}", pattern.name, pattern.about)?;
    }
    output.write("adversary", &compared, &COLUMNS)?;
    Ok(output.out.flush()?)
}

/// Returns how often each allocator is the best.
fn wins(args: &args::Adversary, results: &[Results]) -> Vec<Wins> {
    let of = |allocator: &'static str| {
        let own = || {
            results.iter().filter_map(move |Results { rows, .. }| {
                Some((rows.iter().find(|row| row.allocator == allocator)?, rows))
            })
        };
        let best = |figure| {
            own().filter(|(row, rows)| adversary::best_in(row, rows).contains(&figure)).count()
        };
        Wins {
            allocator,
            patterns: own().count() as u64,
            memory: best(Figure::Memory) as u64,
            driver_time: best(Figure::DriverTime) as u64,
            host_time: best(Figure::HostTime) as u64,
            failed: own().map(|(row, _)| row.failed).sum(),
        }
    };
    presets(&args.allocator).iter().map(|preset| of(preset.name())).collect()
}

fn missed(results: &[Results]) -> Vec<Missed> {
    let mut missed = Vec::new();
    for Results { pattern, rows } in results {
        let misses = adversary::misses(pattern, rows).into_iter();
        missed.extend(misses.map(|miss| Missed { pattern: pattern.name.clone(), miss }));
    }
    missed
}

fn write_summary(
    output: &mut Output<'_>,
    args: &args::Adversary,
    results: &[Results],
) -> Result<()> {
    tables::write(output.out, &wins(args, results), &WINS)?;
    let missed = missed(results);
    if !missed.is_empty() {
        tables::write(output.out, &missed, &MISSED)?;
    }
    let patterns = plural(results.len(), "pattern");
    let time_is = output.bench.time_source();
    Ok(writeln!(
        output.out,
        "{patterns}, seed {}. Driver time is {time_is}. Waits, records and queries are those after \
         the warm-up; table entries looked at and host time, without driver calls, are for each \
         malloc or free after it.",
        args.seed
    )?)
}

/// Writes one table of all patterns: the ratio of reserved to live memory and the driver time of
/// each allocator. Patterns of real threads are left out, because their figures do not repeat.
fn write_markdown(
    output: &mut Output<'_>,
    args: &args::Adversary,
    results: &[Results],
) -> Result<()> {
    let out = &mut *output.out;
    let repeating = || results.iter().filter(|results| !results.pattern.threads);
    let names: Vec<&str> = presets(&args.allocator).iter().map(|preset| preset.name()).collect();
    writeln!(out, "| pattern | peak allocated | {} |", names.join(" | "))?;
    writeln!(out, "|---|---|{}", "---|".repeat(names.len()))?;
    for Results { pattern, rows } in repeating() {
        let misses = adversary::misses(pattern, rows);
        let cells: Vec<String> = rows.iter().map(|row| markdown_cell(row, &misses)).collect();
        let live = rows.iter().map(|row| row.peak_live_bytes).max().unwrap_or_default();
        let live = Bytes::new(live);
        writeln!(out, "| {} | {live} | {} |", pattern.name, cells.join(" | "))?;
    }
    writeln!(out)?;
    for wins in wins(args, results) {
        writeln!(
            out,
            "- {}: best in memory in {}, in driver time in {} of {} patterns; {} failed requests.",
            wins.allocator, wins.memory, wins.driver_time, wins.patterns, wins.failed
        )?;
    }
    writeln!(out)?;
    writeln!(out, "What vramp misses:\n")?;
    for Results { pattern, rows } in repeating() {
        let misses = adversary::misses(pattern, rows);
        if misses.is_empty() {
            continue;
        }
        let texts: Vec<String> = misses.into_iter().map(|miss| miss.text).collect();
        let reason = pattern.reason.map_or_else(String::new, |reason| format!(" {reason}"));
        writeln!(out, "- {}: {}.{reason}", pattern.name, texts.join("; "))?;
    }
    Ok(())
}

fn markdown_cell(row: &Row, misses: &[Miss]) -> String {
    let is_missed = |figure| {
        row.allocator == vramp::peers::Preset::Vramp.name()
            && misses.iter().any(|miss| miss.figure == Some(figure))
    };
    let bold = |text: String, figure| match is_missed(figure) {
        true => format!("**{text}**"),
        false => text,
    };
    let memory = bold(format!("{:.3}", row.reserved_over_live), Figure::Memory);
    let driver_ms = row.driver_ns as f64 / 1e6;
    let driver_time = bold(format!("{driver_ms:.1} ms"), Figure::DriverTime);
    match row.failed {
        0 => format!("{memory}, {driver_time}"),
        failed => format!("{memory}, {driver_time}, {failed} failed"),
    }
}
