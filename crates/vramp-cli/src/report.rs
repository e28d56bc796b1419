//! `vramp report`: recordings in, one page out.

use std::io::{self, Write};
use std::path::Path;

use anyhow::{Context, Result, bail};
use vramp::{Bytes, Config, Preset};
use vramp_analysis::advise::advise;
use vramp_analysis::candidates::Candidate;
use vramp_analysis::explain::{self, explain};
use vramp_analysis::fit::in_parallel;
use vramp_analysis::job::Job;
use vramp_analysis::number::{Count, plural};
use vramp_analysis::replay::{Options, Outcome, ReplayError, replay};
use vramp_analysis::report::{self, Curve, Encoded, Facts, Findings, Kept, Part, Source};

use crate::analysis::{self, threads};
use crate::args::Report;
use crate::device::Device;
use crate::output::Output;

/// Bytes of a page beside its columns: script, style, overview, tables.
const FIXED: u64 = 500_000;

/// The smallest limits of jobs with more events are searched only on request: it takes 50 replays.
const SEARCHED: u64 = 200_000;

/// Allocators whose reserved bytes are drawn.
const DRAWN: [Preset; 3] = [Preset::Torch, Preset::TorchExpandable, Preset::Vramp];

pub(crate) fn run(args: &Report, out: &mut dyn Write) -> Result<()> {
    let device = analysis::device(args.costs.as_deref())?;
    let budget = args.budget.count().saturating_sub(FIXED) / args.traces.len().max(1) as u64;
    let mut parts = Vec::new();
    for path in &args.traces {
        // One recording is in memory at a time.
        parts.extend(of_file(args, &device, budget, path)?);
    }
    if (args.svg.is_some() || args.png.is_some()) && parts.len() != 1 {
        bail!("--svg and --png draw one recorded device: the recordings have {}", parts.len());
    }
    let title = match parts.as_slice() {
        [part] => part.name.clone(),
        parts => format!("{} and {} more", parts[0].name, parts.len() - 1),
    };
    let card = &device.info().name;
    let origin = format!("vramp {}, replayed on {card}", env!("CARGO_PKG_VERSION"));
    let report = report::Report { title, origin, parts };
    let size = save(&args.output, |file| report.write(file))?;
    if let [part] = report.parts.as_slice() {
        pictures(args, &part.data)?;
    }
    summary(args, &report, Bytes::new(size), out)
}

fn summary(args: &Report, report: &report::Report, size: Bytes, out: &mut dyn Write) -> Result<()> {
    for Part { name, findings, data } in &report.parts {
        writeln!(out, "{name}: {}", findings.headline)?;
        match data.kept() {
            Kept::All => {}
            Kept::FewAddresses => writeln!(
                out,
                "The page has addresses only of blocks that were live at the peak, a failure or the \
                 end: a larger --budget keeps all."
            )?,
            Kept::Bins => writeln!(
                out,
                "The page has only an overview of the events: a larger --budget keeps them."
            )?,
        }
    }
    let path = &args.output;
    let events: usize = report.parts.iter().map(|part| part.data.events()).sum();
    let events = Count(events as u64);
    let recordings = plural(report.parts.len(), "recorded device");
    Ok(writeln!(out, "{} ({size}): {events} events of {recordings}", path.display())?)
}

/// Writes the timelines that are wanted as files of their own.
fn pictures(args: &Report, data: &Encoded) -> Result<()> {
    if let Some(path) = &args.svg {
        let svg = data.timeline_svg()?;
        save(path, |file| file.write_all(svg.as_bytes()))?;
    }
    if let Some(path) = &args.png {
        let png = data.timeline_png()?;
        save(path, |file| file.write_all(&png))?;
    }
    Ok(())
}

/// Writes a file; a failure leaves the one that was there.
fn save(path: &Path, bytes: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<u64> {
    let written = Output::new(path).and_then(|output| match output {
        // Standard output has the summary.
        Output::Standard => Err(io::Error::other("a page needs a file of its own")),
        output => output.write(&mut io::sink(), bytes),
    });
    written.with_context(|| format!("cannot write '{}'", path.display()))
}

/// Returns a part for each recorded device of a file.
fn of_file(args: &Report, device: &Device, budget: u64, path: &Path) -> Result<Vec<Part>> {
    let trace = args.reading.read(path)?;
    let jobs = analysis::jobs(&trace, path)?;
    let several = jobs.len() > 1;
    let budget = budget / jobs.len() as u64;
    let parts = jobs.iter().map(|job| {
        let (name, device_number) = (&job.workload.name, job.workload.device);
        let name = match several {
            true => format!("{name}, device {device_number}"),
            false => name.clone(),
        };
        part(args, device, budget, job, name)
            .with_context(|| format!("cannot explain '{}'", path.display()))
    });
    parts.collect()
}

fn part(args: &Report, device: &Device, budget: u64, job: &Job<'_>, name: String) -> Result<Part> {
    let outcomes = replays(device, job)?;
    let fits = args.limits || job.recorded.events <= SEARCHED;
    let options = explain::Options { threads: threads(), fits, ..explain::Options::default() };
    let explanation = explain(job, device, &options)?;
    let advice = match args.limit.as_slice() {
        [] => None,
        limits => {
            let candidates = Candidate::all(&job.recorded);
            Some(advise(job, device, &candidates, limits, threads(), || {})?)
        }
    };
    let curves: Vec<Curve> = outcomes.iter().map(curve).collect();
    let data = Encoded::of(&Source { job, curves: &curves, budget })?;
    let findings = Findings::of(&Facts {
        explanation: &explanation,
        outcomes: &outcomes,
        advice: advice.as_ref(),
        blocks: u64::from(job.workload.blocks),
    });
    Ok(Part { name, findings, data })
}

fn replays(device: &Device, job: &Job<'_>) -> Result<Vec<Outcome>, ReplayError> {
    if job.recorded.events == 0 {
        return Ok(Vec::new());
    }
    let outcomes = in_parallel(threads(), &DRAWN, |&preset| {
        let releases_of = Some(&job.recorded);
        let options = Options { curve: true, releases_of, ..Options::default() };
        replay(&job.workload, device, Config::preset(preset), options, |_| {})
    });
    outcomes.into_iter().collect()
}

fn curve(outcome: &Outcome) -> Curve {
    let kind = match outcome.allocator {
        "vramp" => "vramp",
        "torch" => "torch",
        _ => "expandable",
    };
    let label = format!("reserved, {} (replay)", outcome.allocator);
    Curve { label, kind, points: outcome.curve.clone() }
}
