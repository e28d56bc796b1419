//! The command: reads recordings, prints a table for each or lines of JSON.

use std::io::{self, Write};

use anyhow::{Context, Result, bail};
use comfy_table::{CellAlignment, Table, presets};
use vramp::Bytes;
use vramp_trace::Workload;

use super::{Job, Outcome, Window, layouts};
use crate::analysis::Devices;
use crate::args::Graph;
use crate::text;
use vramp_analysis::number::{Count, plural};

pub(crate) fn run(args: &Graph, out: &mut dyn Write) -> Result<()> {
    for path in &args.traces {
        let trace = args.reading.read(path)?;
        let workloads = Workload::all(&trace);
        let used = workloads.iter().filter(|workload| !workload.requests.is_empty());
        let devices = Devices::of(used.count());
        let events = workloads.iter().map(|workload| workload.event_range().len()).max();
        let mut any = false;
        for workload in &workloads {
            let job = Job::new(&trace, workload, args.window.unwrap_or(Window::ALL))?;
            if job.blocks() == 0 {
                continue;
            }
            any = true;
            let found = layouts(&job).with_context(|| format!("'{}'", job.name))?;
            let outcome = Outcome::new(&job, &found);
            if args.json {
                crate::json::versioned_line(out, &outcome)?;
            } else {
                write_table(out, &outcome, args.window.is_some(), devices)?;
            }
            out.flush()?;
        }
        if !any {
            let (path, events) = (path.display(), Count(events.unwrap_or(0) as u64));
            match args.window {
                Some(Window { from, to }) => bail!(
                    "'{path}' allocates nothing in the window {from}..{to}: its {events} events \
                     are numbered from 0"
                ),
                None => bail!(
                    "the trace '{path}' allocates nothing: record with \
                     torch.cuda.memory._record_memory_history() before the capture begins"
                ),
            }
        }
    }
    if !args.json {
        writeln!(out, "{ASSUMPTIONS}")?;
    }
    Ok(())
}

const ASSUMPTIONS: &str = "Each recording counts as one capture, without the blocks allocated \
    before it. Waits between streams are not recorded, so no stream reuses memory of another one.";

fn write_table(
    out: &mut dyn Write,
    outcome: &Outcome,
    windowed: bool,
    devices: Devices,
) -> io::Result<()> {
    writeln!(out, "{}", headline(outcome, windowed, devices))?;
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    table.set_header(["layout", "memory", "memory/bound"]);
    let recorded =
        outcome.recorded_bytes.map(|bytes| ("recorded", bytes, outcome.recorded_over_bound));
    let rows = [
        ("monotone", outcome.monotone_bytes, outcome.monotone_over_bound),
        ("reusing", outcome.reusing_bytes, outcome.reusing_over_bound),
        ("planned", outcome.planned_bytes, outcome.planned_over_bound),
        ("second capture", outcome.second_bytes, outcome.second_over_bound),
    ];
    for (layout, bytes, ratio) in recorded.into_iter().chain(rows) {
        let ratio = ratio.map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.3}"));
        table.add_row([layout.to_owned(), Bytes::new(bytes).to_string(), ratio]);
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    writeln!(out, "\n{}\n", table.trim_fmt())?;
    if !outcome.second_followed {
        writeln!(out, "The second capture could not follow the plan to the end.\n")?;
    }
    Ok(())
}

fn headline(outcome: &Outcome, windowed: bool, devices: Devices) -> String {
    let name = text::name(&outcome.trace);
    let device = devices.suffix(outcome.trace_device);
    let window = match windowed {
        true => format!(", events {}..{}", outcome.first_event, outcome.end_event),
        false => String::new(),
    };
    let blocks = plural(outcome.blocks as usize, "block");
    let streams = plural(outcome.streams as usize, "stream");
    let (escaped, bound) = (Count(outcome.escaped), Bytes::new(outcome.lower_bound_bytes));
    let unordered = match outcome.conflict_bound_bytes > outcome.lower_bound_bytes {
        true => {
            format!(" Without waits between streams {}.", Bytes::new(outcome.conflict_bound_bytes))
        }
        false => String::new(),
    };
    format!(
        "{name}{device}{window}: {blocks} on {streams}, {escaped} of them outlive the capture. \
         Lower bound (peak allocated) {bound}.{unordered}"
    )
}
