//! `vramp diff`: what changed between two runs of a job.

use std::collections::BTreeSet;
use std::io::{self, Write};

use anyhow::{Result, bail};
use vramp::Bytes;
use vramp_analysis::diff::{Change, Diff, Run, diff};
use vramp_analysis::job::Job;
use vramp_analysis::number::{Count, plural};
use vramp_analysis::replay::Past;

use crate::analysis::{self, Devices, SUM_OF_PEAKS};
use crate::args::DiffRuns;
use crate::json;
use crate::text::{self, Mark, Text};

pub(crate) fn run(args: &DiffRuns, out: &mut dyn Write) -> Result<()> {
    let traces = [args.reading.read(&args.before)?, args.reading.read(&args.after)?];
    let before = analysis::jobs(&traces[0], &args.before)?;
    let after = analysis::jobs(&traces[1], &args.after)?;
    let text = Text::of_stdout();
    let devices = Devices::of(before.len().max(after.len()));
    let mut all = Vec::new();
    for job in &before {
        let other = match (before.as_slice(), after.as_slice()) {
            ([_], [other]) => other,
            _ => {
                let device = |other: &Job<'_>| other.workload.device;
                let Ok(place) = after.binary_search_by_key(&job.workload.device, device) else {
                    continue;
                };
                &after[place]
            }
        };
        let found = diff(job, other);
        if args.json {
            json::line(out, &found)?;
        } else {
            write(out, &text, &found, args.top, devices)?;
        }
        all.push(found);
    }
    if all.is_empty() {
        bail!(
            "'{}' and '{}' have no device in common: give two runs of the same job",
            args.before.display(),
            args.after.display()
        );
    }
    announce_single(args, &all, [&before, &after]);
    // A run without history shows only what it had at its end.
    let is_known = |diff: &Diff| {
        diff.before.recording != Past::MISSING && diff.after.recording != Past::MISSING
    };
    all.retain(is_known);
    if all.len() > 1 && !args.json {
        write_sums(out, &text, &all)?;
    }
    Ok(())
}

/// Says on standard error which devices are in one of the runs alone.
fn announce_single(args: &DiffRuns, all: &[Diff], runs: [&[Job<'_>]; 2]) {
    let compared = |run: fn(&Diff) -> u32| all.iter().map(run).collect::<BTreeSet<u32>>();
    let compared =
        [compared(|diff| diff.before.trace_device), compared(|diff| diff.after.trace_device)];
    for ((jobs, compared), path) in runs.into_iter().zip(compared).zip([&args.before, &args.after])
    {
        let devices = jobs.iter().map(|job| job.workload.device);
        for device in devices.filter(|device| !compared.contains(device)) {
            let path = path.display();
            // If standard error is closed, the others are printed without the notice.
            let _ = writeln!(io::stderr(), "Not compared: device {device} is in '{path}' alone");
        }
    }
}

/// Writes the sums over the devices that are in both runs.
fn write_sums(out: &mut dyn Write, text: &Text, all: &[Diff]) -> Result<()> {
    let names = format!(
        "{} -> {}, sum of {}",
        text::name(&all[0].before.trace),
        text::name(&all[0].after.trace),
        plural(all.len(), "device")
    );
    writeln!(out, "{}", text.strong(names))?;
    let sum = |of: fn(&Run) -> Option<u64>| {
        let add = |run: fn(&Diff) -> &Run| {
            all.iter().try_fold(0u64, |sum, diff| Some(sum.saturating_add(of(run(diff))?)))
        };
        add(|diff| &diff.before).zip(add(|diff| &diff.after))
    };
    let rows: Vec<Vec<String>> = [
        ("sum of peaks allocated", sum(|run| Some(run.peak_live_bytes))),
        ("sum of needed at once", sum(|run| Some(run.demand_bytes))),
        ("sum of peaks reserved (recorded)", sum(|run| run.peak_reserved_bytes)),
    ]
    .into_iter()
    .filter_map(|(label, both)| Some(row(label, both?)))
    .collect();
    let head = ["", "before", "after", "change"];
    writeln!(out, "{}", text.table(&head, &rows, &[0], |_| Mark::None))?;
    let allocations = |run: fn(&Diff) -> &Run| all.iter().map(|it| run(it).allocations).sum();
    let before = Count(allocations(|diff| &diff.before));
    let after = Count(allocations(|diff| &diff.after));
    writeln!(out, "{before} and {after} allocations.")?;
    Ok(writeln!(out, "{}\n", text.wrap(SUM_OF_PEAKS, 0))?)
}

fn write(
    out: &mut dyn Write,
    text: &Text,
    found: &Diff,
    top: usize,
    devices: Devices,
) -> Result<()> {
    let device = devices.suffix(found.after.trace_device);
    let names = format!(
        "{} -> {}{device}",
        text::name(&found.before.trace),
        text::name(&found.after.trace)
    );
    writeln!(out, "{}", text.strong(names))?;
    let bytes = |run: fn(&Run) -> u64| (run(&found.before), run(&found.after));
    let mut rows = vec![
        row("peak allocated", bytes(|run| run.peak_live_bytes)),
        row("needed at once", bytes(|run| run.demand_bytes)),
    ];
    if let (Some(before), Some(after)) =
        (found.before.peak_reserved_bytes, found.after.peak_reserved_bytes)
    {
        rows.push(row("reserved (recorded)", (before, after)));
    }
    for (name, changes) in [("category", labels(&found.categories)), ("line", labels(&found.sites))]
    {
        rows.extend(
            changes
                .into_iter()
                .take(top)
                .map(|(label, both)| row(&format!("{name} {}", text.fit(&label, 48)), both)),
        );
    }
    rows.extend(
        labels(&found.growth)
            .into_iter()
            .take(top)
            .map(|(label, both)| row(&format!("growth a step, {}", text.fit(&label, 58)), both)),
    );
    let head = ["", "before", "after", "change"];
    writeln!(out, "{}", text.table(&head, &rows, &[0], |_| Mark::None))?;
    let (before, after) = (found.before.allocations, found.after.allocations);
    let more = found.sites.len().saturating_sub(top);
    if more > 0 {
        writeln!(out, "{} more: --top, --json", plural(more, "line"))?;
    }
    writeln!(out, "{} and {} allocations.\n", Count(before), Count(after))?;
    Ok(())
}

fn labels<K: ToString>(changes: &[Change<K>]) -> Vec<(String, (u64, u64))> {
    let changed = changes.iter().filter(|change| change.bytes() != 0);
    changed
        .map(|change| (change.of.to_string(), (change.before_bytes, change.after_bytes)))
        .collect()
}

fn row(label: &str, (before, after): (u64, u64)) -> Vec<String> {
    let change = match after.checked_sub(before) {
        Some(0) => "0 B".to_owned(),
        Some(more) => format!("+{}", Bytes::new(more)),
        None => format!("-{}", Bytes::new(before - after)),
    };
    vec![label.to_owned(), Bytes::new(before).to_string(), Bytes::new(after).to_string(), change]
}
