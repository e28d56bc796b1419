//! `vramp diff`: what changed between two runs of a job.

use std::io::Write;

use anyhow::{Result, bail};
use vramp::Bytes;
use vramp_analysis::diff::{Change, Diff, Run, diff};
use vramp_analysis::number::{Count, plural};

use crate::analysis;
use crate::args::DiffRuns;
use crate::json;
use crate::text::{self, Mark, Text};

pub(crate) fn run(args: &DiffRuns, out: &mut dyn Write) -> Result<()> {
    let traces = [args.reading.read(&args.before)?, args.reading.read(&args.after)?];
    let before = analysis::jobs(&traces[0], &args.before)?;
    let after = analysis::jobs(&traces[1], &args.after)?;
    let text = Text::of_stdout();
    let mut compared = false;
    for job in &before {
        let same = |other: &&vramp_analysis::job::Job<'_>| {
            other.workload.device == job.workload.device || before.len() == 1 && after.len() == 1
        };
        let Some(other) = after.iter().find(same) else { continue };
        compared = true;
        let found = diff(job, other);
        if args.json {
            json::line(out, &found)?;
        } else {
            write(out, &text, &found, args.top)?;
        }
    }
    if !compared {
        bail!(
            "'{}' and '{}' have no device in common: give two runs of the same job",
            args.before.display(),
            args.after.display()
        );
    }
    Ok(())
}

fn write(out: &mut dyn Write, text: &Text, found: &Diff, top: usize) -> Result<()> {
    let device = match found.after.trace_device {
        0 => String::new(),
        device => format!(", device {device}"),
    };
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
                .map(|(label, both)| row(&format!("{name} {}", text.fit(&label, 60)), both)),
        );
    }
    rows.extend(
        labels(&found.growth)
            .into_iter()
            .take(top)
            .map(|(label, both)| row(&format!("growth a step, {}", text.fit(&label, 70)), both)),
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
