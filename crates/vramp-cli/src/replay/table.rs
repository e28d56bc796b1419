//! The table of a replay.

use std::io::{self, Write};

use vramp::Bytes;

use vramp::peers::Preset;
use vramp_driver::DeviceInfo;
use vramp_trace::{Repairs, Workload};

use crate::analysis::Devices;
use crate::text::{self, Mark, Text};

use vramp_analysis::frames::shown;
use vramp_analysis::number::{Count, plural};
use vramp_analysis::replay::{Outcome, Recorded, Reserved};

/// Writes the job's peak, a row for each allocator, and a summary in words, for the only device of a
/// recording.
pub(crate) fn write(
    out: &mut dyn Write,
    text: &Text,
    workload: &Workload,
    recorded: &Recorded,
    outcomes: &[Outcome],
) -> io::Result<()> {
    let headline = headline(workload, recorded, Devices::One);
    section(out, text, &headline, (workload, recorded), outcomes)
}

/// Writes the same for one of several devices of a recording, with the number of the device.
pub(crate) fn write_one_of_several(
    out: &mut dyn Write,
    text: &Text,
    workload: &Workload,
    recorded: &Recorded,
    outcomes: &[Outcome],
) -> io::Result<()> {
    let headline = headline(workload, recorded, Devices::Several);
    section(out, text, &headline, (workload, recorded), outcomes)
}

fn section(
    out: &mut dyn Write,
    text: &Text,
    headline: &str,
    (workload, recorded): (&Workload, &Recorded),
    outcomes: &[Outcome],
) -> io::Result<()> {
    writeln!(out, "{}", text.strong(headline))?;
    let coverage = recorded.past.to_string();
    for sentence in [coverage, repaired(&workload.repairs)].iter().filter(|it| !it.is_empty()) {
        writeln!(out, "{}", text.wrap(sentence, 0))?;
    }
    if let Some(oom) = &recorded.oom {
        writeln!(out, "{}", text.wrap(&oom.to_string(), 0))?;
    }
    if outcomes.is_empty() {
        return writeln!(out, "There is nothing to replay.\n");
    }
    writeln!(out, "\n{}\n", rows(text, workload, recorded, outcomes))?;
    for sentence in summary(workload, recorded, outcomes) {
        writeln!(out, "{}", text.wrap(&sentence, 2))?;
    }
    writeln!(out)
}

/// Returns the legend of the tables, in one line.
pub(crate) fn assumptions(device: &DeviceInfo, audited: bool) -> String {
    let on = match device.simulated {
        true => format!("times modelled for {}", device.id),
        false => format!("times measured on {} ({})", device.id, device.name),
    };
    let audit = match (audited, device.simulated) {
        (false, _) => "",
        (true, true) => " Every request was followed by an audit; no unordered access was found.",
        (true, false) => " Every request was followed by an audit.",
    };
    format!("* least memory; overhead: reserved over needed; {on}. See docs/explain.md.{audit}")
}

fn headline(workload: &Workload, recorded: &Recorded, devices: Devices) -> String {
    let name = text::name(&workload.name);
    let device = devices.suffix(workload.device);
    let streams = plural(workload.streams.len(), "stream");
    let events = Count(recorded.events);
    let peak = workload.peak_live;
    let demand = workload.peak_demand;
    let needed = match demand > peak {
        true => format!("; {demand} with the request that failed"),
        false => String::new(),
    };
    format!("{name}{device}: {events} events on {streams}, peak allocated {peak}{needed}.")
}

/// Returns what was repaired, in a sentence; an empty text if nothing was.
fn repaired(repairs: &Repairs) -> String {
    match repairs.is_empty() {
        true => String::new(),
        false => format!("Repaired: {repairs}."),
    }
}

/// Columns that are left out on a narrow terminal, the first first.
pub(super) const OPTIONAL: [&str; 3] = ["worst malloc", "remapped", "driver calls"];

fn rows(text: &Text, workload: &Workload, recorded: &Recorded, outcomes: &[Outcome]) -> String {
    let time = match outcomes.first() {
        Some(outcome) => format!("driver time ({})", outcome.driver_ms_is),
        None => "driver time".to_owned(),
    };
    let mut head = vec![
        "allocator",
        "peak reserved",
        "overhead",
        "driver calls",
        &time,
        "worst malloc",
        "remapped",
    ];
    let any_failed = outcomes.iter().any(|outcome| outcome.oom_at_event.is_some());
    if any_failed {
        head.push("out of memory at event");
    }
    let demand = workload.peak_demand;
    let mut rows = Vec::new();
    let of_recording = |peak: String, ratio: String| {
        let mut row = vec!["recorded".to_owned(), peak, ratio];
        row.resize(head.len(), String::new());
        row
    };
    match recorded.reserved {
        // The recorded allocator did not serve the request that failed.
        Reserved::Peak(peak) => {
            rows.push(of_recording(peak.to_string(), ratio(peak, workload.peak_live)));
        }
        // Less than was allocated says nothing.
        Reserved::AtLeast(bound) if bound >= workload.peak_live => {
            rows.push(of_recording(format!("at least {bound}"), "-".to_owned()));
        }
        Reserved::AtLeast(_) | Reserved::Unknown => {}
    }
    let before = rows.len();
    for outcome in outcomes {
        let peak = Bytes::new(outcome.peak_reserved_bytes);
        let mut row = vec![
            outcome.allocator.to_owned(),
            peak.to_string(),
            match outcome.oom_at_event {
                None => ratio(peak, demand),
                // The run never reached the job's peak.
                Some(_) => "-".to_owned(),
            },
            Count(outcome.driver_calls).to_string(),
            format!("{:.1} ms", outcome.driver_ms),
            millis(outcome.worst_malloc_us),
            Bytes::new(outcome.moved_bytes).to_string(),
        ];
        if any_failed {
            row.push(match outcome.oom_at_event {
                Some(event) => Count(event).to_string(),
                None => "never".to_owned(),
            });
        }
        rows.push(row);
    }
    let is_ideal = Outcome::is_ideal;
    let finished = outcomes.iter().filter(|it| it.oom_at_event.is_none() && !is_ideal(it));
    let least = finished.map(|outcome| outcome.peak_reserved_bytes).min();
    let mark = |row: usize| match row.checked_sub(before).and_then(|row| outcomes.get(row)) {
        Some(outcome) if outcome.oom_at_event.is_some() => Mark::Bad,
        Some(outcome) if Some(outcome.peak_reserved_bytes) == least && !is_ideal(outcome) => {
            Mark::Good
        }
        _ => Mark::None,
    };
    text.table_without(&OPTIONAL, &head, &rows, mark)
}

/// Returns the summary, a sentence each.
fn summary(workload: &Workload, recorded: &Recorded, outcomes: &[Outcome]) -> Vec<String> {
    let mut sentences = Vec::new();
    sentences.extend(outcomes.iter().filter_map(fidelity));
    for outcome in outcomes {
        let Some(event) = outcome.oom_at_event else { continue };
        let error = outcome.oom.as_deref().unwrap_or("out of memory");
        let (allocator, event) = (outcome.allocator, Count(event));
        sentences.push(format!("{allocator} at event {event}: {error}"));
    }
    sentences.extend(comparison(workload, recorded, outcomes));
    let settings = outcomes.iter().filter_map(|it| Some((it.allocator, it.settings.as_ref()?)));
    for (allocator, settings) in settings {
        sentences.push(format!("{allocator} uses the recorded settings {}.", shown(settings)));
    }
    let releases = recorded.segments.releases();
    if releases > 0 && outcomes.iter().any(|it| it.allocator == Preset::Torch.name()) {
        let releases = plural(releases, "time");
        sentences.push(format!("torch releases cached memory {releases}, where it was recorded."));
    }
    sentences
}

/// Returns how much the best run saves. `None` if the recording does not support a comparison.
fn comparison(workload: &Workload, recorded: &Recorded, outcomes: &[Outcome]) -> Option<String> {
    let theirs = recorded.reserved.peak()?;
    if !recorded.past.supports_comparison(workload.peak_live, theirs) {
        return None;
    }
    let best = best_run(outcomes)?;
    let (allocator, reserved) = (best.allocator, Bytes::new(best.peak_reserved_bytes));
    let compared = format!("{allocator} reserves {reserved}");
    if recorded.oom.is_some() {
        return Some(format!(
            "{compared} and serves the request that failed; the recorded allocator reserved \
             {theirs} and failed."
        ));
    }
    Some(match theirs.count().checked_sub(reserved.count()) {
        Some(saved) => format!(
            "{compared}, the recorded allocator reserved {theirs}: {} less ({:.0} %).",
            Bytes::new(saved),
            saved as f64 * 100.0 / theirs.count().max(1) as f64
        ),
        None => format!("{compared}, the recorded allocator reserved {theirs}."),
    })
}

/// Returns how the model compares with the recorded segments, where that was checked.
fn fidelity(outcome: &Outcome) -> Option<String> {
    let found = outcome.fidelity.as_ref()?;
    let (recorded, matched) = (Count(found.recorded), Count(found.matched));
    let (missing, extra) = (Count(found.missing), Count(found.extra));
    let difference = match &found.first_difference {
        Some(difference) => format!(" The first difference is at {difference}."),
        None => String::new(),
    };
    let matches = match found.percent {
        Some(percent) => format!(
            "matches {matched} of {recorded} recorded segment events ({percent:.2} %) in event and \
             size; {missing} missing, {extra} extra"
        ),
        None => format!("has no recorded segment events to match; {extra} extra"),
    };
    Some(format!(
        "{} {matches}. Peak reserved: {} recorded, {} replayed ({:+.2} %).{difference}",
        outcome.allocator,
        Bytes::new(found.recorded_peak_bytes),
        Bytes::new(found.replayed_peak_bytes),
        found.peak_off_percent
    ))
}

/// Returns the run to compare with the recording: vramp's, or if that failed the one with the
/// lowest peak.
fn best_run(outcomes: &[Outcome]) -> Option<&Outcome> {
    let finished = || outcomes.iter().filter(|outcome| outcome.oom_at_event.is_none());
    let default = finished().find(|outcome| outcome.allocator == Preset::Vramp.name());
    default.or_else(|| finished().min_by_key(|outcome| outcome.peak_reserved_bytes))
}

pub(super) fn ratio(reserved: Bytes, live: Bytes) -> String {
    if live.is_zero() {
        return "-".to_owned();
    }
    format!("{:.3}", reserved.count() as f64 / live.count() as f64)
}

/// Returns a time in one unit for all rows, so that the longest number is the longest time.
pub(super) fn millis(us: f64) -> String {
    format!("{:.2} ms", us / 1000.0)
}

#[cfg(test)]
mod tests {
    use vramp_trace::{Event, EventKind, StreamIndex, Trace};

    use super::*;
    use crate::device::Device;
    use vramp_analysis::replay::{Options, replay};

    /// Returns the table of a job that allocates 8 MiB and whose recorded allocator reserved
    /// `reserved`.
    fn printed(reserved: Option<Bytes>, limit: Option<Bytes>) -> String {
        let event = |kind, size| Event {
            kind,
            device: 0,
            stream: StreamIndex(0),
            address: vramp::DeviceAddr::new(1 << 30),
            size,
            time_us: 0,
            stack: None,
        };
        let mut events = vec![event(EventKind::Alloc, Bytes::mib(8))];
        events.extend(reserved.map(|size| event(EventKind::SegmentAlloc, size)));
        let trace = Trace {
            name: "synthetic".to_owned(),
            device_count: 1,
            streams: vec![0],
            events,
            ..Trace::default()
        };
        let workload = Workload::from_trace(&trace, 0);
        let recorded = Recorded::of(&trace, &workload);
        let device = Device::open("sim").unwrap();
        let outcomes = [Preset::Vramp, Preset::StreamOrdered].map(|preset| {
            let mut config = vramp::peers::Config::preset(preset);
            config.base.limit = limit;
            replay(&workload, &device, config, Options::default(), |_| {}).unwrap()
        });
        let mut out = Vec::new();
        write(&mut out, &Text::plain(), &workload, &recorded, &outcomes).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn numbers_are_aligned_right_below_their_heading() {
        let text = printed(Some(Bytes::gib(80)), None);
        let column = |row: &str, words: &str| {
            let line = text
                .lines()
                .find(|line| line.trim_start_matches(['*', ' ']).starts_with(row))
                .unwrap();
            line.find(words).unwrap() + words.len()
        };
        let end = column("allocator", "peak reserved");
        assert_eq!(column("recorded", "80.00 GiB"), end, "{text}");
        assert_eq!(column("vramp", "8.00 MiB"), end, "{text}");
        assert_eq!(column("stream-ordered", "MiB"), end, "{text}");
        assert!(text.lines().all(|line| line == line.trim_end()), "{text}");
    }

    #[test]
    fn the_summary_compares_with_the_recorded_allocator() {
        let text = printed(Some(Bytes::mib(32)), None);
        assert!(
            text.contains(
                "vramp reserves 8.00 MiB, the recorded allocator reserved 32.00 MiB: \
                 24.00 MiB less (75 %)."
            ),
            "{text}"
        );
        // Less than was allocated: the recording misses segments.
        assert!(!printed(Some(Bytes::mib(2)), None).contains("recorded"));
        assert!(!printed(None, None).contains("recorded"));
    }

    #[test]
    fn a_run_out_of_memory_shows_its_event_and_no_ratio() {
        let text = printed(None, Some(Bytes::mib(4)));
        assert!(text.contains("out of memory at event"), "{text}");
        assert!(text.contains("vramp at event 0: out of memory"), "{text}");
        let row = text
            .lines()
            .find(|line| line.trim_start_matches(['*', ' ']).starts_with("vramp "))
            .unwrap();
        assert!(row.contains(" - "), "{text}");
    }
}
