//! The table of all devices of a recording: sums over the replays of each.

use std::io::{self, Write};

use vramp::Bytes;

use vramp::peers::Preset;
use vramp_analysis::number::{Count, plural};
use vramp_analysis::replay::{Outcome, Total};

use super::table::{OPTIONAL, millis, ratio};
use crate::analysis::SUM_OF_PEAKS;
use crate::text::{self, Mark, Text};

/// Writes a row for each allocator with the sums over the recorded devices. `left_out` is the number of
/// devices without history, which are not replayed.
pub(super) fn write(
    out: &mut dyn Write,
    text: &Text,
    outcomes: &[Outcome],
    left_out: usize,
) -> io::Result<()> {
    let totals = Total::by_allocator(outcomes);
    let Some(first) = totals.first() else { return Ok(()) };
    writeln!(out, "{}", text.strong(headline(&outcomes[0].trace, first)))?;
    if left_out > 0 {
        let devices = plural(left_out, "device");
        writeln!(out, "Not in the sums: {devices} without a recorded history.")?;
    }
    writeln!(out, "\n{}\n", rows(text, &totals, &outcomes[0]))?;
    writeln!(out, "{}\n", text.wrap(SUM_OF_PEAKS, 2))
}

fn headline(trace: &str, total: &Total) -> String {
    let numbers: Vec<String> = total.trace_devices.iter().map(u32::to_string).collect();
    let name = text::name(trace);
    let events = Count(total.events);
    let live = Bytes::new(total.sum_of_peak_live_bytes);
    let needed = match total.sum_of_peak_demand_bytes > total.sum_of_peak_live_bytes {
        true => {
            let demand = Bytes::new(total.sum_of_peak_demand_bytes);
            format!("; {demand} with the requests that failed")
        }
        false => String::new(),
    };
    format!(
        "{name}, sum of {} ({}): {events} events, sum of peaks allocated {live}{needed}.",
        plural(numbers.len(), "device"),
        numbers.join(", ")
    )
}

fn rows(text: &Text, totals: &[Total], outcome: &Outcome) -> String {
    let time = format!("driver time ({})", outcome.driver_ms_is);
    let mut head = vec![
        "allocator",
        "sum of peaks reserved",
        "overhead (reserved/needed)",
        "driver calls",
        &time,
        "worst malloc",
        "remapped",
    ];
    let any_failed = totals.iter().any(|total| !total.oom_on_trace_devices.is_empty());
    if any_failed {
        head.push("out of memory on device");
    }
    let mut rows = Vec::new();
    let first = &totals[0];
    if let Some(recorded) = first.sum_of_recorded_peak_bytes.map(Bytes::new) {
        let live = Bytes::new(first.sum_of_peak_live_bytes);
        let mut row = vec!["recorded".to_owned(), recorded.to_string(), ratio(recorded, live)];
        row.resize(head.len(), String::new());
        rows.push(row);
    }
    for total in totals {
        let reserved = Bytes::new(total.sum_of_peak_reserved_bytes);
        let failed: Vec<String> = total.oom_on_trace_devices.iter().map(u32::to_string).collect();
        let mut row = vec![
            total.allocator.to_owned(),
            reserved.to_string(),
            match failed.is_empty() {
                true => ratio(reserved, Bytes::new(total.sum_of_peak_demand_bytes)),
                // A run never reached its job's peak.
                false => "-".to_owned(),
            },
            Count(total.driver_calls).to_string(),
            format!("{:.1} ms", total.driver_ms),
            millis(total.worst_malloc_us),
            Bytes::new(total.moved_bytes).to_string(),
        ];
        if any_failed {
            row.push(if failed.is_empty() { "none".to_owned() } else { failed.join(", ") });
        }
        rows.push(row);
    }
    let before = rows.len() - totals.len();
    // The modelled driver pool never fragments, so it is no rival.
    let is_ideal = |total: &Total| {
        total.allocator == Preset::StreamOrdered.name() && outcome.driver_ms_is == "modelled"
    };
    let finished = totals.iter().filter(|it| it.oom_on_trace_devices.is_empty() && !is_ideal(it));
    let least = finished.map(|total| total.sum_of_peak_reserved_bytes).min();
    let mark = |row: usize| match row.checked_sub(before).and_then(|row| totals.get(row)) {
        Some(total) if !total.oom_on_trace_devices.is_empty() => Mark::Bad,
        Some(total) if Some(total.sum_of_peak_reserved_bytes) == least && !is_ideal(total) => {
            Mark::Good
        }
        _ => Mark::None,
    };
    text.table_without(&OPTIONAL, &head, &rows, mark)
}
