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
            let found = advise(&job, &device, &candidates, &args.limit, threads())
                .with_context(|| format!("cannot replay '{}'", path.display()))?;
            unfit |= (0..found.limits_bytes.len()).any(|index| found.fitting(index).is_empty());
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
    for (index, &limit) in all[0].limits_bytes.iter().enumerate() {
        let limit = Bytes::new(limit);
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
    let limits: Vec<String> =
        found.limits_bytes.iter().map(|&limit| Bytes::new(limit).to_string()).collect();
    let mut head = vec!["allocator or setting", "peak, no limit", "driver time"];
    head.extend(limits.iter().map(String::as_str));
    let rows: Vec<Vec<String>> = found.tried.iter().map(row).collect();
    let all_fit = |tried: &Tried| tried.limited.iter().all(|run| run.fits);
    let mark = |index: usize| match found.tried.get(index) {
        Some(tried) if all_fit(tried) && !found.limits_bytes.is_empty() => Mark::Good,
        Some(tried) if tried.limited.iter().all(|run| !run.fits) => Mark::Bad,
        _ => Mark::None,
    };
    writeln!(out, "\n{}\n", text.table(&head, &rows, &[0], mark))?;
    for (index, limit) in limits.iter().enumerate() {
        let fitting = found.fitting(index);
        if fitting.is_empty() {
            let reason = match found.limits_bytes[index] < found.demand_bytes {
                true => format!("the job needs {demand} at once"),
                false => "nothing that was tried fits".to_owned(),
            };
            writeln!(out, "{}", text.bad(format!("{limit}: {reason}.")))?;
            continue;
        }
        writeln!(out, "{}", text.good(format!("{limit}: fits with")))?;
        for tried in fitting.iter().take(LINES) {
            let run = tried.limited[index];
            let peak = Bytes::new(run.peak_reserved_bytes);
            match &tried.line {
                Some(line) => writeln!(out, "  {}", printable(line))?,
                None => writeln!(out, "  no change ({})", printable(&tried.name))?,
            }
            let tight = if run.tight { "; tight: fails with 5 % less" } else { "" };
            let cost =
                format!("    {peak} reserved, {:.1} ms in driver calls{tight}", run.driver_ms);
            writeln!(out, "{}", text.weak(cost))?;
        }
    }
    Ok(writeln!(out)?)
}

/// Most lines to paste for each limit.
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
