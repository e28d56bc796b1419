//! `vramp report`: recordings in, one page out.

use std::io::{self, Write};
use std::path::Path;

use anyhow::{Context, Result, bail};
use vramp::Bytes;
use vramp::peers::{Config, Preset};
use vramp_analysis::advise::advise;
use vramp_analysis::candidates::Candidate;
use vramp_analysis::explain::{self, explain};
use vramp_analysis::fit::in_parallel;
use vramp_analysis::job::Job;
use vramp_analysis::number::plural;
use vramp_analysis::replay::{Options, Outcome, ReplayError, replay};
use vramp_analysis::report::{self, Curve, Encoded, Facts, Findings, Kept, Part, Source};

use crate::analysis::{self, threads};
use crate::args::Report;
use crate::device::Device;
use crate::output::Output;
use crate::progress::Busy;
use crate::reading::STANDARD;
use crate::text::printable;

/// Bytes of a page beside its columns: script, style, overview, tables.
const FIXED: u64 = 500_000;

/// The smallest limits of jobs with more events are searched only on request: it takes 50 replays.
const SEARCHED: u64 = 200_000;

/// Allocators whose reserved bytes are drawn.
const DRAWN: [Preset; 3] = [Preset::Torch, Preset::TorchExpandable, Preset::Vramp];

pub(crate) fn run(args: &Report, out: &mut dyn Write) -> Result<()> {
    let outputs = outputs(args)?;
    let device = analysis::device(args.costs.as_deref())?;
    let budget = args.budget.count().saturating_sub(FIXED) / args.traces.len().max(1) as u64;
    let mut parts = Vec::new();
    for path in &args.traces {
        // One recording is in memory at a time.
        let busy = Busy::with(format_args!("replaying {}", path.display()));
        parts.extend(of_file(args, &device, budget, path)?);
        drop(busy);
    }
    if outputs.iter().any(|(wanted, ..)| wanted.is_picture()) && parts.len() != 1 {
        bail!(
            "--svg and --png draw one recorded device: the recordings have {}; choose one with \
             --trace-device",
            parts.len()
        );
    }
    let title = match parts.as_slice() {
        [part] => part.name.clone(),
        parts => format!("{} and {} more", parts[0].name, parts.len() - 1),
    };
    let card = &device.info().name;
    let origin = format!("vramp {}, replayed on {card}", env!("CARGO_PKG_VERSION"));
    let report = report::Report { title, origin, parts };
    let mut size = Bytes::ZERO;
    for (wanted, path, output) in &outputs {
        let picture = match report.parts.as_slice() {
            [part] => wanted.picture(&part.data)?,
            _ => None,
        };
        match picture {
            Some(bytes) => drop(save(path, output, out, |file| file.write_all(&bytes))?),
            None => size = Bytes::new(save(path, output, out, |file| report.write(file))?),
        }
    }
    if outputs.iter().any(|(_, _, output)| matches!(output, Output::Standard)) {
        // The file itself is on standard output. If standard error is closed, the file is complete
        // all the same.
        drop(summary(args, &report, size, &mut io::stderr()));
        return Ok(());
    }
    summary(args, &report, size, out)
}

/// What a file has.
#[derive(Clone, Copy, Debug)]
enum Wanted {
    Page,
    Svg,
    Png,
}

impl Wanted {
    fn is_picture(self) -> bool {
        !matches!(self, Wanted::Page)
    }

    /// Draws the timeline. `None` for the page.
    #[cfg(feature = "pictures")]
    fn picture(self, data: &Encoded) -> Result<Option<Vec<u8>>> {
        match self {
            Wanted::Page => Ok(None),
            Wanted::Svg => Ok(Some(data.timeline_svg()?.into_bytes())),
            Wanted::Png => Ok(Some(data.timeline_png()?)),
        }
    }

    #[cfg(not(feature = "pictures"))]
    fn picture(self, _: &Encoded) -> Result<Option<Vec<u8>>> {
        match self {
            Wanted::Page => Ok(None),
            Wanted::Svg | Wanted::Png => bail!(
                "this program draws no pictures: install it with `cargo install --path \
                 crates/vramp-cli --features pictures`"
            ),
        }
    }
}

/// Finds out where the files go. Refuses to replace a recording, and to write two files to one place.
fn outputs(args: &Report) -> Result<Vec<(Wanted, &Path, Output)>> {
    let wanted = [
        (Wanted::Page, Some(&args.output)),
        (Wanted::Svg, args.svg.as_ref()),
        (Wanted::Png, args.png.as_ref()),
    ];
    let mut outputs: Vec<(Wanted, &Path, Output)> = Vec::new();
    for (wanted, path) in wanted {
        let Some(path) = path else { continue };
        let output = Output::new(path).with_context(|| cannot_write(path))?;
        if args.traces.iter().any(|input| output.is_same_file(input)) {
            bail!("'{}' is a recording that is read: give the output another name", path.display());
        }
        if outputs.iter().any(|(_, _, other)| output.is_same_output(other)) {
            bail!(
                "'{}' is given for two files: give --output, --svg and --png names of their own",
                path.display()
            );
        }
        outputs.push((wanted, path, output));
    }
    Ok(outputs)
}

fn cannot_write(path: &Path) -> String {
    match path == Path::new(STANDARD) {
        true => "cannot write standard output".to_owned(),
        false => format!("cannot write '{}'", path.display()),
    }
}

fn summary(args: &Report, report: &report::Report, size: Bytes, out: &mut dyn Write) -> Result<()> {
    for Part { name, findings, data } in &report.parts {
        writeln!(out, "{}: {}", printable(name), printable(&findings.headline))?;
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
    let path = match printable(&args.output.display().to_string()) {
        path if path == STANDARD => "standard output".to_owned(),
        path => path,
    };
    let events: usize = report.parts.iter().map(|part| part.data.events()).sum();
    let events = plural(events, "event");
    let recordings = plural(report.parts.len(), "recorded device");
    Ok(writeln!(out, "{path} ({size}): {events} of {recordings}")?)
}

/// Writes a file; a failure leaves the one that was there.
fn save(
    path: &Path,
    output: &Output,
    standard: &mut dyn Write,
    bytes: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> Result<u64> {
    output.write(standard, bytes).with_context(|| cannot_write(path))
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
            Some(advise(job, device, &candidates, limits, threads())?)
        }
    };
    let curves: Vec<Curve> = outcomes.iter().filter(|it| !it.curve.is_empty()).map(curve).collect();
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
    let outcomes = in_parallel(threads(), &Preset::ALL, |&preset| {
        let releases_of = Some(&job.recorded);
        let curve = DRAWN.contains(&preset);
        let options = Options { curve, releases_of, ..Options::default() };
        let config = match preset {
            Preset::Torch => Candidate::recorded(&job.recorded).config,
            preset => Config::preset(preset),
        };
        replay(&job.workload, device, config, options, |_| {})
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
