//! What is said about a job in words, numbers and tables.

use vramp::Bytes;

use super::page::{Cell, Figure, Findings, Table, Tone};
use crate::advise::{Advice, Run};
use crate::conclusion::Conclusion;
use crate::explain::{Explanation, Failure};
use crate::moment::Moment;
use crate::number::{Count, plural, ratio};
use crate::remedy::Remedy;
use crate::replay::Outcome;
use crate::verdict::Cause;

/// What the findings of one device are made from.
#[derive(Clone, Copy, Debug)]
pub struct Facts<'a> {
    /// Why the job used its memory as it did.
    pub explanation: &'a Explanation,
    /// Replays without a limit.
    pub outcomes: &'a [Outcome],
    /// What was tried with limits.
    pub advice: Option<&'a Advice>,
    /// Blocks of the workload.
    pub blocks: u64,
}

impl Findings {
    /// Returns what the recording and its replays show. O(rows).
    pub fn of(facts: &Facts<'_>) -> Findings {
        let explanation = facts.explanation;
        let verdict = &explanation.verdict;
        let texts = verdict.findings.iter().map(|finding| finding.text.clone());
        let (moment, name) = match &explanation.failure {
            Some(failure) => (&failure.moment, "when the request failed"),
            None => (&explanation.peak, "at the peak"),
        };
        let mut tables = Vec::new();
        tables.extend(fits(explanation));
        tables.extend(facts.advice.map(advice));
        if !facts.outcomes.is_empty() {
            tables.push(replays(facts.outcomes));
        }
        Findings {
            headline: verdict.headline.clone(),
            verdict: texts.collect(),
            remedies: remedies(facts),
            failed: verdict.cause != Cause::None || explanation.failure.is_some(),
            figures: figures(facts),
            missing: missing(explanation),
            tables,
            fallback: vec![by_category(moment, name), by_site(moment, name), largest(moment, name)],
        }
    }
}

fn remedies(facts: &Facts<'_>) -> Vec<(String, Vec<Remedy>)> {
    let verdict = &facts.explanation.verdict;
    let advice = facts.advice.map_or(&[][..], |advice| &advice.conclusions);
    let fit = |it: &Conclusion| (format!("To fit into {}", it.limit), it.remedies.clone());
    let own = ("What to do".to_owned(), verdict.remedies.clone());
    std::iter::once(own).chain(advice.iter().map(fit)).collect()
}

fn size(bytes: u64) -> String {
    Bytes::new(bytes).to_string()
}

fn bytes(count: u64) -> Cell {
    Cell::number(count as f64, size(count))
}

fn count(count: u64) -> Cell {
    Cell::number(count as f64, Count(count).to_string())
}

fn columns(names: &[&str]) -> Vec<String> {
    names.iter().map(|&name| name.to_owned()).collect()
}

fn figures(facts: &Facts<'_>) -> Vec<Figure> {
    let explanation = facts.explanation;
    let figure =
        |label: &str, value: String, note: String| Figure { label: label.to_owned(), value, note };
    let (peak, demand) = (explanation.peak_live_bytes, explanation.demand_bytes);
    let over = |bytes: u64, of: u64, what: &str| match ratio(bytes, of) {
        Some(ratio) => format!("{ratio:.3} times what was {what}"),
        None => String::new(),
    };
    let recording = &explanation.recording;
    let mut figures = vec![figure("peak allocated", size(peak), String::new())];
    if demand > peak {
        let note = "with the request that failed".to_owned();
        figures.push(figure("needed at once", size(demand), note));
    }
    figures.push(match (recording.peak_reserved_bytes, recording.reserved_at_least_bytes) {
        (Some(bytes), _) => {
            // The recorded allocator did not serve the request that failed.
            figure("peak reserved, recorded", size(bytes), over(bytes, peak, "allocated"))
        }
        (None, Some(bytes)) => {
            figure("peak reserved, recorded", size(bytes), "at least".to_owned())
        }
        (None, None) => figure("peak reserved", "unknown".to_owned(), "not recorded".to_owned()),
    });
    let vramp = facts.outcomes.iter().find(|outcome| outcome.allocator == "vramp");
    if let Some(vramp) = vramp.filter(|outcome| outcome.oom.is_none()) {
        let bytes = vramp.peak_reserved_bytes;
        let note = over(bytes, demand, "needed");
        figures.push(figure("peak reserved by vramp", size(bytes), note));
    }
    if let Some(Failure { size_bytes, card_free_bytes, event, .. }) = &explanation.failure {
        let free = card_free_bytes.map(|free| format!("{} free on the card", size(free)));
        let note = free.unwrap_or_else(|| format!("at event {}", Count(*event)));
        figures.push(figure("failed request", size(*size_bytes), note));
    }
    let streams = usize::try_from(recording.streams).unwrap_or(usize::MAX);
    figures.push(figure("events", Count(recording.events).to_string(), plural(streams, "stream")));
    figures.push(figure("blocks", Count(facts.blocks).to_string(), String::new()));
    figures
}

fn missing(explanation: &Explanation) -> Vec<String> {
    let recording = &explanation.recording;
    let mut missing = Vec::new();
    if !recording.missing.is_empty() {
        missing.push(recording.missing.clone());
    }
    if !recording.repairs.is_empty() {
        let repairs = recording.repairs.iter();
        let repairs: Vec<String> = repairs
            .map(|(kind, count)| format!("{} {}", Count(u64::from(*count)), kind.replace('_', " ")))
            .collect();
        missing.push(format!("Repaired: {}.", repairs.join(", ")));
    }
    if !recording.has_stacks {
        missing.push(
            "No call stacks are recorded, so lines of the program are not known: record with \
             torch.cuda.memory._record_memory_history(context=\"all\")."
                .to_owned(),
        );
    }
    missing
}

fn fits(explanation: &Explanation) -> Option<Table> {
    if explanation.fits.is_empty() {
        return None;
    }
    let smallest = explanation.least_limit();
    let rows = explanation.fits.iter().map(|fit| {
        let limit = match fit.smallest_limit_bytes {
            None => Cell::text("none").toned(Tone::Bad),
            Some(limit) if Some(limit) == smallest && !fit.is_ideal() => {
                bytes(limit).toned(Tone::Good)
            }
            Some(limit) => bytes(limit),
        };
        vec![Cell::text(&fit.allocator), limit, bytes(fit.peak_reserved_bytes)]
    });
    Some(Table {
        title: "Smallest limit that fits, by replay".to_owned(),
        note: "With this much memory for the allocator the recorded requests succeed, in their \
               recorded order. The least is green, but for the modelled driver pool \
               (stream-ordered), which never fragments."
            .to_owned(),
        columns: columns(&["allocator", "smallest limit", "peak reserved without a limit"]),
        rows: rows.collect(),
    })
}

fn advice(advice: &Advice) -> Table {
    let mut names = columns(&["allocator or setting", "peak, no limit", "driver time"]);
    names.extend(advice.limits.iter().map(|limit| limit.to_string()));
    let cell = |run: &Run| match run.fits {
        true => {
            let reserved = run.peak_reserved_bytes;
            let word = if run.tight { "tight" } else { "fits" };
            Cell::number(reserved as f64, format!("{word}, {}", size(reserved))).toned(Tone::Good)
        }
        // Sorted behind everything that fits.
        false => Cell::number(f64::MAX, "no").toned(Tone::Bad),
    };
    let rows = advice.tried.iter().map(|tried| {
        let mut row = vec![
            Cell::text(&tried.name),
            bytes(tried.unlimited.peak_reserved_bytes),
            Cell::number(tried.unlimited.driver_ms, format!("{:.1} ms", tried.unlimited.driver_ms)),
        ];
        row.extend(tried.limited.iter().map(cell));
        row
    });
    Table {
        title: "Settings and limits".to_owned(),
        note: format!(
            "The job needs {} at once. Each setting was tried with each limit; the driver time is \
             modelled. Tight: it fits, and fails with 5 % less.",
            size(advice.demand_bytes)
        ),
        columns: names,
        rows: rows.collect(),
    }
}

fn replays(outcomes: &[Outcome]) -> Table {
    let fitting = outcomes.iter().filter(|it| it.oom.is_none() && !it.is_ideal());
    let least = fitting.map(|outcome| outcome.peak_reserved_bytes).min();
    let rows = outcomes.iter().map(|outcome| {
        let reserved = outcome.peak_reserved_bytes;
        let is_least = Some(reserved) == least && !outcome.is_ideal();
        let tone = if is_least { Tone::Good } else { Tone::Plain };
        let result = match &outcome.oom {
            None => Cell::text("all requests succeed").toned(Tone::Good),
            Some(_) => Cell::text("out of memory").toned(Tone::Bad),
        };
        let ratio = outcome.overhead;
        vec![
            Cell::text(outcome.allocator),
            result,
            bytes(reserved).toned(tone),
            ratio.map_or(Cell::text(""), |ratio| Cell::number(ratio, format!("{ratio:.3}"))),
            count(outcome.driver_calls),
            Cell::number(outcome.driver_ms, format!("{:.1} ms", outcome.driver_ms)),
        ]
    });
    Table {
        title: "Replays without a limit".to_owned(),
        note:
            "The recorded requests on each allocator; torch has the recorded settings. Driver time \
               is modelled on a simulated device, and measured on a card."
                .to_owned(),
        columns: columns(&[
            "allocator",
            "result",
            "peak reserved",
            "overhead (reserved/needed)",
            "driver calls",
            "driver time",
        ]),
        rows: rows.collect(),
    }
}

fn by_category(moment: &Moment, name: &str) -> Table {
    let rows = moment.categories.iter();
    let rows =
        rows.map(|it| vec![Cell::text(it.category.name()), bytes(it.bytes), count(it.blocks)]);
    Table {
        title: format!("Allocated {name}, by category"),
        columns: columns(&["category", "bytes", "blocks"]),
        rows: rows.collect(),
        ..Table::default()
    }
}

fn by_site(moment: &Moment, name: &str) -> Table {
    let rows = moment.sites.iter();
    let rows = rows.map(|it| vec![Cell::text(&it.site), bytes(it.bytes), count(it.blocks)]);
    Table {
        title: format!("Allocated {name}, by line of the program"),
        columns: columns(&["allocated by", "bytes", "blocks"]),
        rows: rows.take(20).collect(),
        ..Table::default()
    }
}

fn largest(moment: &Moment, name: &str) -> Table {
    let rows = moment.largest_alike().into_iter().map(|(blocks, block)| {
        vec![
            count(blocks),
            bytes(block.bytes),
            Cell::text(block.category.name()),
            block.event.map_or(Cell::text("older"), count),
            Cell::text(&block.site),
            Cell::text(&block.operation),
        ]
    });
    Table {
        title: format!("Largest blocks {name}"),
        columns: columns(&[
            "blocks",
            "size of each",
            "category",
            "first event",
            "allocated by",
            "operation",
        ]),
        rows: rows.collect(),
        ..Table::default()
    }
}
