//! `vramp explain`: why a recorded job ran out of memory.

use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result};
use vramp::Bytes;
use vramp_analysis::explain::{Explanation, Fit, Options, explain};
use vramp_analysis::job::Job;
use vramp_analysis::moment::Moment;
use vramp_analysis::number::{Count, plural};
use vramp_analysis::replay::Past;
use vramp_analysis::verdict::Cause;

use crate::analysis::{self, Devices, SUM_OF_PEAKS, threads};
use crate::args::Explain;
use crate::exit::InvalidArguments;
use crate::json;
use crate::progress::Busy;
use crate::text::{self, Mark, Text, printable};

pub(crate) fn run(args: &Explain, out: &mut dyn Write) -> Result<()> {
    let device = analysis::device(args.costs.as_deref())?;
    let text = Text::of_stdout();
    for path in &args.traces {
        let trace = args.reading.read(path)?;
        let jobs = analysis::jobs(&trace, path)?;
        check_at(args.at, &jobs, path)?;
        let devices = Devices::of(jobs.len());
        let mut all = Vec::new();
        for job in jobs {
            // Of several devices, some may have fewer events.
            let at = args.at.filter(|&at| has_event(&job, at));
            let (limit, top) = (args.limit, args.top);
            let options = Options { limit, at, top, threads: threads(), ..Options::default() };
            let busy = Busy::with(format_args!("explaining {}", job.workload.name));
            let found = explain(&job, &device, &options);
            drop(busy);
            let found = found.with_context(|| format!("cannot explain '{}'", path.display()))?;
            if args.json {
                json::line(out, &found)?;
            } else {
                let (text, top) = (&text, args.top);
                Page { out, text, job: &job, found: &found, top, devices }.write()?;
                all.push(found);
            }
            out.flush()?;
        }
        if devices == Devices::Several && !args.json {
            overview(out, &text, &all)?;
        }
    }
    Ok(())
}

/// Writes a row for each recorded device, and the sums.
fn overview(out: &mut dyn Write, text: &Text, all: &[Explanation]) -> Result<()> {
    let Some(first) = all.first() else { return Ok(()) };
    let head = format!("{}: {}", text::name(&first.trace), plural(all.len(), "device"));
    writeln!(out, "{}\n", text.strong(head))?;
    let reserved = |found: &Explanation| found.recording.peak_reserved_bytes;
    let bytes = |bytes: Option<u64>| {
        bytes.map_or_else(|| "-".to_owned(), |bytes| Bytes::new(bytes).to_string())
    };
    let mut rows: Vec<Vec<String>> = all
        .iter()
        .map(|found| {
            vec![
                format!("device {}", found.trace_device),
                Count(found.recording.events).to_string(),
                bytes(Some(found.peak_live_bytes)),
                bytes(Some(found.demand_bytes)),
                bytes(reserved(found)),
                found.verdict.cause.name().to_owned(),
            ]
        })
        .collect();
    let with_history: Vec<&Explanation> =
        all.iter().filter(|found| found.recording.coverage != Past::MISSING).collect();
    let sum = |each: &dyn Fn(&Explanation) -> Option<u64>| {
        with_history.iter().try_fold(0u64, |sum, found| Some(sum.saturating_add(each(found)?)))
    };
    let events = all.iter().map(|found| found.recording.events).sum();
    rows.push(vec![
        match with_history.len() == all.len() {
            true => "sum".to_owned(),
            false => format!("sum of the {} with a history", with_history.len()),
        },
        Count(events).to_string(),
        bytes(sum(&|found| Some(found.peak_live_bytes))),
        bytes(sum(&|found| Some(found.demand_bytes))),
        bytes(sum(&reserved)),
        String::new(),
    ]);
    let head =
        ["", "events", "peak allocated", "needed at once", "peak reserved (recorded)", "cause"];
    let mark = |index: usize| match all.get(index) {
        Some(found) if !matches!(found.verdict.cause, Cause::None | Cause::NoHistory) => Mark::Bad,
        _ => Mark::None,
    };
    writeln!(out, "{}\n", text.table(&head, &rows, &[0], mark))?;
    Ok(writeln!(out, "{}\n", text.wrap(SUM_OF_PEAKS, 0))?)
}

fn has_event(job: &Job<'_>, at: usize) -> bool {
    u64::try_from(at).is_ok_and(|at| at < job.recorded.events)
}

/// Checks that at least one device has the event of `--at`.
fn check_at(at: Option<usize>, jobs: &[Job<'_>], path: &Path) -> Result<()> {
    let Some(at) = at.filter(|&at| !jobs.iter().any(|job| has_event(job, at))) else {
        return Ok(());
    };
    let most = jobs.iter().map(|job| job.recorded.events).max().unwrap_or(0);
    let range = match most.checked_sub(1) {
        Some(last) => format!("give a number from 0 to {last}"),
        None => "it has no events".to_owned(),
    };
    Err(InvalidArguments(format!(
        "--at {at} is beyond the end of the trace '{}': {range}",
        path.display()
    ))
    .into())
}

/// The explanation of one job as text.
struct Page<'a> {
    out: &'a mut dyn Write,
    text: &'a Text,
    job: &'a Job<'a>,
    found: &'a Explanation,
    top: usize,
    devices: Devices,
}

/// Width of the columns for bytes, per cent and blocks.
const NUMBERS: usize = 38;

impl Page<'_> {
    fn write(&mut self) -> Result<()> {
        self.head()?;
        self.verdict()?;
        match &self.found.failure {
            Some(failure) => {
                let event = Count(failure.event);
                self.moment(&failure.moment, &format!("when the request failed (event {event})"))?;
            }
            None => {
                let moment = &self.found.peak;
                let when = match moment.event {
                    Some(event) => format!("at the peak (before event {})", Count(event)),
                    None => "at the peak, which is the end".to_owned(),
                };
                self.moment(moment, &when)?;
            }
        }
        if let Some(moment) = &self.found.at {
            let when = match moment.event {
                Some(event) => format!("before event {}", Count(event)),
                None => "at the end".to_owned(),
            };
            self.moment(moment, &when)?;
        }
        self.fits()?;
        let remedies = self.text.remedies("What to do", &self.found.verdict.remedies);
        Ok(writeln!(self.out, "{remedies}\n")?)
    }

    fn head(&mut self) -> Result<()> {
        let recording = &self.found.recording;
        let name = text::name(&self.found.trace);
        let device = self.devices.suffix(self.found.trace_device);
        let streams = plural(usize::try_from(recording.streams).unwrap_or(0), "stream");
        let events = plural(usize::try_from(recording.events).unwrap_or(0), "event");
        let head = format!("{name}{device}: {events} on {streams}");
        writeln!(self.out, "{}", self.text.strong(head))?;
        let mut notes = Vec::new();
        if !recording.missing.is_empty() {
            notes.push(recording.missing.clone());
        }
        if !self.job.workload.repairs.is_empty() {
            notes.push(format!("Repaired: {}.", self.job.workload.repairs));
        }
        if !recording.has_stacks {
            // Other formats than PyTorch's have no stacks.
            let is_torch = !self.job.trace.allocator_settings.is_empty();
            let advice = match is_torch {
                true => ": record with torch.cuda.memory._record_memory_history(context=\"all\")",
                false => "",
            };
            notes.push(format!(
                "No call stacks are recorded, so lines of the program are not known{advice}."
            ));
        }
        if let Some(card) = &self.found.card {
            let usable = Bytes::new(card.usable_bytes);
            notes.push(format!("By its memory the card was an {} ({usable} usable).", card.name));
        }
        for note in notes {
            writeln!(self.out, "{}", self.text.wrap(&note, 0))?;
        }
        Ok(writeln!(self.out)?)
    }

    fn verdict(&mut self) -> Result<()> {
        let verdict = &self.found.verdict;
        let headline = self.text.wrap(&verdict.headline, 0);
        let headline = match verdict.cause {
            Cause::None => self.text.strong(headline),
            _ => self.text.bad(headline),
        };
        writeln!(self.out, "{headline}")?;
        for finding in &verdict.findings {
            writeln!(self.out, "{}", self.text.wrap(&format!("- {}", finding.text), 2))?;
        }
        Ok(writeln!(self.out)?)
    }

    fn moment(&mut self, moment: &Moment, when: &str) -> Result<()> {
        let blocks = plural(usize::try_from(moment.blocks).unwrap_or(usize::MAX), "block");
        let head = format!("Allocated {when}: {} in {blocks}", Bytes::new(moment.live_bytes));
        writeln!(self.out, "{}", self.text.strong(head))?;
        let share = |bytes: u64, blocks: u64| {
            let part = bytes as f64 * 100.0 / moment.live_bytes.max(1) as f64;
            let noun = if blocks == 1 { "block " } else { "blocks" };
            let blocks = Count(blocks);
            format!("  {:>11} {part:>4.0} %  {blocks:>9} {noun}", Bytes::new(bytes).to_string())
        };
        for category in &moment.categories {
            let name = category.category.name();
            writeln!(self.out, "{}  {name}", share(category.bytes, category.blocks))?;
        }
        if self.found.recording.has_stacks {
            self.sites(moment, share)?;
        }
        if !moment.largest.is_empty() {
            writeln!(
                self.out,
                "  {}",
                self.text.weak("largest blocks, with the first event of each kind")
            )?;
        }
        for (number, block) in moment.largest_alike() {
            let event = match block.event {
                Some(event) => format!("event {}", Count(event)),
                None => "older".to_owned(),
            };
            let times = if number > 1 { format!("{number} x") } else { String::new() };
            let size = Bytes::new(block.bytes).to_string();
            let category = block.category.name();
            let name = match self.found.recording.has_stacks {
                true => self.text.fit(&block.site, 59),
                false => String::new(),
            };
            let line = format!("  {times:>4} {size:>11}  {event:>16}  {category:<16} {name}");
            writeln!(self.out, "{}", line.trim_end())?;
        }
        Ok(writeln!(self.out)?)
    }

    fn sites(&mut self, moment: &Moment, share: impl Fn(u64, u64) -> String) -> Result<()> {
        if self.top > 0 {
            writeln!(self.out, "  {}", self.text.weak("by line of the program"))?;
        }
        for site in moment.sites.iter().take(self.top) {
            let name = self.text.fit(&site.site, NUMBERS);
            writeln!(self.out, "{}  {name}", share(site.bytes, site.blocks))?;
            for (operation, bytes) in site.operations.iter().take(2) {
                if *operation != site.site {
                    let operation = self.text.fit(operation, 28);
                    let line = format!("{:>26}  {operation}", Bytes::new(*bytes).to_string());
                    writeln!(self.out, "{}", self.text.weak(line))?;
                }
            }
        }
        let more = moment.sites.len().saturating_sub(self.top);
        if more > 0 {
            let more = plural(more, "line");
            writeln!(self.out, "  {}", self.text.weak(format!("{more} more: --top, --json")))?;
        }
        Ok(())
    }

    fn fits(&mut self) -> Result<()> {
        if self.found.fits.is_empty() {
            return Ok(());
        }
        let part = match self.found.recording.coverage {
            "whole" => "",
            _ => " of what was recorded",
        };
        let head = format!("Smallest limit that fits, by replay{part}");
        writeln!(self.out, "{}", self.text.strong(head))?;
        let card = |fit: &Fit| fit.smallest_card.as_ref().map_or("none", |card| card.id).to_owned();
        let cards: Vec<String> = self.found.fits.iter().map(card).collect();
        let one_card = cards.iter().all(|card| *card == cards[0]);
        let mut head = vec!["allocator", "peak reserved without a limit", "smallest limit"];
        head.extend((!one_card).then_some("smallest card"));
        let row = |(fit, card): (&Fit, &String)| {
            let mut row = vec![
                printable(&fit.allocator),
                match fit.smallest_limit_bytes {
                    Some(_) => Bytes::new(fit.peak_reserved_bytes).to_string(),
                    None => "more than 1 TiB".to_owned(),
                },
                fit.smallest_limit_bytes
                    .map_or_else(|| "none".to_owned(), |limit| Bytes::new(limit).to_string()),
            ];
            row.extend((!one_card).then(|| card.clone()));
            row
        };
        let rows: Vec<Vec<String>> = self.found.fits.iter().zip(&cards).map(row).collect();
        let least = self.found.least_limit();
        let mark = |index: usize| match self.found.fits.get(index) {
            Some(fit)
                if !fit.is_ideal()
                    && least.is_some_and(|least| fit.smallest_limit_bytes == Some(least)) =>
            {
                Mark::Good
            }
            _ => Mark::None,
        };
        writeln!(self.out, "{}", self.text.table(&head, &rows, &[0], mark))?;
        let mut legend =
            "An asterisk marks the least; stream-ordered does not count, because its model never \
                          fragments."
                .to_owned();
        if one_card {
            legend.push_str(&format!(" Smallest card for each: {}.", cards[0]));
        }
        writeln!(self.out, "{}\n", self.text.weak(self.text.wrap(&legend, 0)))?;
        Ok(())
    }
}
