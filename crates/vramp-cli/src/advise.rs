//! `vramp advise`: which settings make a recorded job fit.

use std::io::{self, Write};

use anyhow::{Context, Result, bail};
use vramp::Bytes;
use vramp_analysis::advise::{Advice, Run, Tried, advise, fitting_everywhere};
use vramp_analysis::candidates::Candidate;
use vramp_analysis::job::Job;
use vramp_analysis::number::plural;

use crate::analysis::{self, Devices, SUM_OF_PEAKS, threads};
use crate::args::Advise;
use crate::exit::OutOfMemory;
use crate::json;
use crate::progress::Busy;
use crate::text::{self, Mark, Text, printable};

pub(crate) fn run(args: &Advise, out: &mut dyn Write) -> Result<()> {
    let device = analysis::device(args.costs.as_deref())?;
    let text = Text::of_stdout();
    let mut unfit = false;
    for path in &args.traces {
        let trace = args.reading.read(path)?;
        let (jobs, missing): (Vec<_>, Vec<_>) = analysis::jobs(&trace, path)?
            .into_iter()
            .partition(|job| !job.recorded.past.is_missing());
        if let (true, Some(job)) = (jobs.is_empty(), missing.first()) {
            bail!("'{}': {}", path.display(), job.recorded.past);
        }
        let devices = Devices::of(jobs.len() + missing.len());
        for job in &missing {
            let (device, past) = (job.workload.device, job.recorded.past);
            // If standard error is closed, the other devices are printed without the notice.
            let _ = writeln!(io::stderr(), "'{}', device {device}: {past}", path.display());
        }
        let mut all = Vec::new();
        for job in jobs {
            let candidates = candidates(args, &job);
            let tried = candidates.len();
            let busy = Busy::with(format_args!("trying {tried} settings on {}", job.workload.name));
            let found = advise(&job, &device, &candidates, &args.limit, threads());
            drop(busy);
            let found = found.with_context(|| format!("cannot replay '{}'", path.display()))?;
            unfit |= (0..found.limits.len()).any(|index| found.fitting(index).is_empty());
            if args.json {
                json::line(out, &found)?;
            } else {
                write(out, &text, &job, &found, devices)?;
                all.push(found);
            }
            out.flush()?;
        }
        if all.len() > 1 {
            write_common(out, &text, &all)?;
            out.flush()?;
        }
    }
    if unfit && args.fail_on_oom {
        return Err(OutOfMemory.into());
    }
    Ok(())
}

fn candidates(args: &Advise, job: &Job<'_>) -> Vec<Candidate> {
    let mut candidates = Candidate::all(&job.recorded);
    candidates.extend(args.settings.iter().filter_map(|it| Candidate::torch(it).ok()));
    candidates
}

/// Writes what fits on every device: settings are those of the process, so they are the same on all.
fn write_common(out: &mut dyn Write, text: &Text, all: &[Advice]) -> Result<()> {
    let (name, devices) = (text::name(&all[0].trace), plural(all.len(), "device"));
    writeln!(out, "{}", text.strong(format!("{name}: settings for all {devices}")))?;
    for (index, limit) in all[0].limits.iter().enumerate() {
        let fitting = fitting_everywhere(all, index);
        if fitting.is_empty() {
            let none = format!("{limit} on each device: nothing that was tried fits on all.");
            writeln!(out, "{}", text.bad(none))?;
            continue;
        }
        writeln!(out, "{}", text.good(format!("{limit} on each device: fits with")))?;
        for common in fitting.iter().take(LINES) {
            match common.line {
                Some(line) => writeln!(out, "  {}", printable(line))?,
                None => writeln!(out, "  no change ({})", printable(common.name))?,
            }
            let tight = if common.tight { "; tight: fails with 5 % less" } else { "" };
            let cost = format!(
                "    sum of peaks reserved {}, {:.1} ms in driver calls{tight}",
                Bytes::new(common.sum_of_peaks_bytes),
                common.driver_ms
            );
            writeln!(out, "{}", text.weak(cost))?;
        }
    }
    writeln!(out, "{}", text.wrap(SUM_OF_PEAKS, 0))?;
    Ok(writeln!(out)?)
}

fn write(
    out: &mut dyn Write,
    text: &Text,
    job: &Job<'_>,
    found: &Advice,
    devices: Devices,
) -> Result<()> {
    let mut name = text::name(&found.trace);
    if devices == Devices::Several {
        name.push_str(&devices.suffix(found.trace_device));
    }
    let demand = Bytes::new(found.demand_bytes);
    writeln!(out, "{}", text.strong(format!("{name}: needs {demand} at once")))?;
    let coverage = job.recorded.past.to_string();
    if !coverage.is_empty() {
        writeln!(out, "{}", text.wrap(&coverage, 0))?;
    }
    table(out, text, found)?;
    for conclusion in &found.conclusions {
        let title = format!("To fit into {}", conclusion.limit);
        writeln!(out, "{}\n", text.remedies(&title, &conclusion.remedies))?;
    }
    Ok(())
}

/// Writes what was tried, rows that are alike as one.
fn table(out: &mut dyn Write, text: &Text, found: &Advice) -> Result<()> {
    let limits: Vec<String> = found.limits.iter().map(|limit| limit.to_string()).collect();
    let mut head = vec!["allocator or setting", "peak, no limit", "driver time"];
    head.extend(limits.iter().map(String::as_str));
    let mut groups: Vec<(&Tried, Vec<&str>, Vec<String>)> = Vec::new();
    for tried in &found.tried {
        let row = row(tried);
        let is_alike = |(_, _, other): &&mut (&Tried, Vec<&str>, Vec<String>)| {
            // All but the name and the time, which is the same to less than 1 % of any job.
            (&other[1], &other[3..]) == (&row[1], &row[3..])
        };
        match groups.iter_mut().find(is_alike) {
            Some((_, others, _)) => others.push(&tried.name),
            None => groups.push((tried, Vec::new(), row)),
        }
    }
    let rows: Vec<Vec<String>> = groups
        .iter()
        .map(|(_, others, row)| {
            let mut row = row.clone();
            if !others.is_empty() {
                row[0] = format!("{} (+{} alike)", row[0], others.len());
            }
            row
        })
        .collect();
    let all_fit = |tried: &Tried| tried.limited.iter().all(|run| run.fits);
    let mark = |index: usize| match groups.get(index) {
        Some((tried, ..)) if all_fit(tried) && !found.limits.is_empty() => Mark::Good,
        Some((tried, ..)) if tried.limited.iter().all(|run| !run.fits) => Mark::Bad,
        _ => Mark::None,
    };
    writeln!(
        out,
        "\n{}",
        text.table_without(&["driver time", "peak, no limit"], &head, &rows, mark)
    )?;
    let legend = "An asterisk marks what fits into every limit, tight what fails with 5 % less. Driver time \
                  is modelled. cudaMallocAsync takes at least what is said: its model never fragments.";
    writeln!(out, "{}", text.weak(text.wrap(legend, 0)))?;
    for (tried, others, _) in groups.iter().filter(|(_, others, _)| !others.is_empty()) {
        let alike = format!("Alike: {}, {}.", tried.name, others.join(", "));
        writeln!(out, "{}", text.weak(text.wrap(&printable(&alike), 2)))?;
    }
    Ok(writeln!(out)?)
}

/// Most lines to paste for all devices.
const LINES: usize = 4;

fn row(tried: &Tried) -> Vec<String> {
    let peak = |run: &Run| Bytes::new(run.peak_reserved_bytes).to_string();
    let mut row = vec![
        printable(&tried.name),
        match tried.unlimited.fits {
            true => peak(&tried.unlimited),
            false => "-".to_owned(),
        },
        format!("{:.1} ms", tried.unlimited.driver_ms),
    ];
    row.extend(tried.limited.iter().map(|run| match run.fits {
        true if run.tight => format!("tight, {}", peak(run)),
        true => format!("fits, {}", peak(run)),
        false => "no".to_owned(),
    }));
    row
}
