//! Why a job ran out of memory: the verdict, with the numbers behind it.
//!
//! 1. [`Job::of`] collects the recording.
//! 2. [`explain`] sums up the peak and the failure, looks for growth, lays out the recorded segments,
//!    and finds by replays what fits.
//! 3. [`verdict`](mod@crate::verdict) says it in sentences.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;

use serde::Serialize;
use vramp::Bytes;
use vramp::device::Device;
use vramp::device::sim::CardModel;
use vramp::peers::Preset;

use crate::blocks::RequestIndex;
use crate::candidates::Candidate;
use crate::fit::{in_parallel, limit_with_headroom, run, smallest_limit};
use crate::growth::Growth;
use crate::job::Job;
use crate::layout::Layout;
use crate::limit::Limit;
use crate::moment::Moment;
use crate::replay::{RecordedOom, ReplayError, Reserved};
use crate::verdict::{Verdict, verdict};

/// Version of the format of [`Explanation`]. It changes when a field is removed or changes its
/// meaning.
pub const SCHEMA_VERSION: u32 = 2;

/// Options of [`explain`].
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Memory that the job may reserve; that of the recorded failure by default.
    pub limit: Option<Limit>,
    /// Also sum up what is live at this event, counted from 0 among those of the device.
    pub at: Option<usize>,
    /// Most stacks and blocks in each list.
    pub top: usize,
    /// Threads for replays.
    pub threads: NonZeroUsize,
    /// Find the smallest limit of each allocator, which takes about 50 replays.
    pub fits: bool,
}

impl Default for Options {
    fn default() -> Options {
        Options { limit: None, at: None, top: 10, threads: NonZeroUsize::MIN, fits: true }
    }
}

/// Why a job used its memory as it did.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Explanation {
    /// [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// The trace's name.
    pub trace: String,
    /// Number of the recorded device.
    pub trace_device: u32,
    /// The verdict.
    pub verdict: Verdict,
    /// What the recording shows.
    pub recording: Recording,
    /// Peak of the allocated bytes.
    pub peak_live_bytes: u64,
    /// Most bytes that the job needs at once: the peak, or more with a request that failed.
    pub demand_bytes: u64,
    /// The card that the job ran on, by the memory that was usable when a request failed.
    pub card: Option<Card>,
    /// The first request that failed.
    pub failure: Option<Failure>,
    /// What is allocated at the peak.
    pub peak: Moment,
    /// Where the recorded blocks lie at the peak, if the segments were recorded.
    pub peak_layout: Option<Layout>,
    /// What is allocated at [`Options::at`].
    pub at: Option<Moment>,
    /// What grows from step to step.
    pub growth: Option<Growth>,
    /// What each allocator needs.
    pub fits: Vec<Fit>,
}

/// A card that is known by its memory.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Card {
    /// Short name, as in `sim:h200`.
    pub id: &'static str,
    /// Full name.
    pub name: &'static str,
    /// Memory that a process can use, without the context and libraries.
    pub usable_bytes: u64,
}

impl From<&CardModel> for Card {
    fn from(model: &CardModel) -> Card {
        Card { id: model.id, name: model.name, usable_bytes: model.usable().count() }
    }
}

/// What a recording shows.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Recording {
    /// Events of the device.
    pub events: u64,
    /// Streams with requests.
    pub streams: u64,
    /// How much of the job it shows: `whole`, `from_the_middle` or `missing`.
    pub coverage: &'static str,
    /// What is missing and how to record it; empty if nothing is.
    pub missing: String,
    /// Repairs, by kind.
    pub repairs: BTreeMap<&'static str, u32>,
    /// True if any allocation has a call stack.
    pub has_stacks: bool,
    /// Peak of the recorded allocator's reserved bytes, if known.
    pub peak_reserved_bytes: Option<u64>,
    /// A lower bound of it, where no more is known.
    pub reserved_at_least_bytes: Option<u64>,
    /// True if other allocators' peaks can be compared with the recorded one.
    pub is_comparable: bool,
    /// Settings of the recorded allocator, where they are not the default.
    pub settings: Option<String>,
    /// Number of requests that failed.
    pub failures: u64,
    /// Number of allocations after the last request that failed: more than none if the program caught
    /// the error.
    pub allocations_after_failure: u64,
}

/// A request that failed in the recorded job.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Failure {
    /// Number of its event among those of the device.
    pub event: u64,
    /// Requested bytes.
    pub size_bytes: u64,
    /// Raw handle of its stream.
    pub stream: u64,
    /// Allocated bytes.
    pub live_bytes: u64,
    /// Reserved bytes, if recorded.
    pub reserved_bytes: Option<u64>,
    /// Free bytes of the card, if recorded.
    pub card_free_bytes: Option<u64>,
    /// Memory of the card that was lacking: PyTorch allocates a segment, which may be larger.
    pub segment_bytes: u64,
    /// True if the card had enough free memory: the job ran under a limit.
    pub limited: bool,
    /// The line of the program that requested it.
    pub site: String,
    /// The innermost frame.
    pub operation: String,
    /// What was allocated.
    pub moment: Moment,
    /// Where the blocks lay, if the segments were recorded.
    pub layout: Option<Layout>,
}

impl Failure {
    /// Returns the memory that the allocator could have had without a limit: what it had reserved and what
    /// the card had free. `None` if either was not recorded.
    pub fn usable(&self) -> Option<u64> {
        self.reserved_bytes?.checked_add(self.card_free_bytes?)
    }
}

impl Explanation {
    /// Returns the smallest limit that an allocator fits into. The modelled driver pool, which never
    /// fragments, is left out.
    pub fn least_limit(&self) -> Option<u64> {
        let real = self.fits.iter().filter(|fit| !fit.is_ideal());
        real.filter_map(|fit| fit.smallest_limit_bytes).min()
    }
}

impl Fit {
    /// Returns true for the driver's own pool, which is modelled without fragmentation.
    pub fn is_ideal(&self) -> bool {
        self.allocator == Preset::StreamOrdered.name()
    }
}

/// What one allocator needs for a job.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Fit {
    /// The allocator's name.
    pub allocator: String,
    /// The line that puts it into a program; `None` if it needs none.
    pub line: Option<String>,
    /// Peak of its reserved bytes without a limit.
    pub peak_reserved_bytes: u64,
    /// The smallest limit that was found to fit; `None` if the simulated device is too small.
    pub smallest_limit_bytes: Option<u64>,
    /// A limit that leaves 5 % for runs that differ slightly, and was found to fit.
    pub roomy_limit_bytes: Option<u64>,
    /// The smallest card with as much usable memory; `None` if no known card has it.
    pub smallest_card: Option<Card>,
}

/// Explains a job. The replays run on `device`, which should be simulated.
///
/// O(events) for the sums, and about ten replays for each of five allocators.
///
/// # Errors
/// Those of [`crate::replay::replay()`].
pub fn explain(
    job: &Job<'_>,
    device: &Device,
    options: &Options,
) -> Result<Explanation, ReplayError> {
    let top = options.top;
    let end = RequestIndex::try_from(job.workload.requests.len()).unwrap_or(RequestIndex::MAX);
    let after_peak = RequestIndex::try_from(job.workload.peak_live_request + 1).unwrap_or(end);
    let after_peak = after_peak.min(end);
    let failure = job.recorded.oom.map(|oom| failure(job, oom, top));
    let growth = Growth::until(job, failure.as_ref().map_or(end, |it| it.moment.request));
    let fits = match job.recorded.events > 0 && options.fits {
        true => fits(job, device, options.threads)?,
        false => Vec::new(),
    };
    let mut explanation = Explanation {
        schema_version: SCHEMA_VERSION,
        trace: job.workload.name.clone(),
        trace_device: job.workload.device,
        verdict: Verdict::default(),
        recording: recording(job),
        peak_live_bytes: job.workload.peak_live.count(),
        demand_bytes: job.workload.peak_demand.count(),
        card: job
            .recorded
            .oom
            .and_then(|oom| oom.usable())
            .and_then(CardModel::infer)
            .map(Card::from),
        failure,
        peak: Moment::before(job, after_peak, top),
        peak_layout: Layout::before(job, after_peak),
        at: options
            .at
            .map(|event| Moment::before(job, job.request_of_event(event.saturating_add(1)), top)),
        growth,
        fits,
    };
    explanation.verdict = verdict(&explanation, options.limit);
    Ok(explanation)
}

fn recording(job: &Job<'_>) -> Recording {
    let recorded = &job.recorded;
    let repairs = job.workload.repairs.counts().into_iter().filter(|&(_, count)| count > 0);
    Recording {
        events: recorded.events,
        streams: job.workload.streams.len() as u64,
        coverage: recorded.past.name(),
        missing: recorded.past.to_string(),
        repairs: repairs.collect(),
        has_stacks: job.blocks.iter().any(|(_, block)| block.stack.is_some()),
        peak_reserved_bytes: recorded.reserved.peak().map(Bytes::count),
        reserved_at_least_bytes: match recorded.reserved {
            Reserved::AtLeast(bound) => Some(bound.count()),
            Reserved::Peak(_) | Reserved::Unknown => None,
        },
        is_comparable: recorded
            .reserved
            .peak()
            .is_some_and(|peak| recorded.past.supports_comparison(job.workload.peak_live, peak)),
        settings: recorded.settings.clone(),
        failures: recorded.ooms,
        allocations_after_failure: recorded.allocations_after_oom,
    }
}

fn failure(job: &Job<'_>, oom: RecordedOom, top: usize) -> Failure {
    let request = RequestIndex::try_from(oom.request).unwrap_or(RequestIndex::MAX);
    let event = job.workload.event_of(oom.request).and_then(|event| job.trace.events.get(event));
    let stack = event.and_then(|event| event.stack);
    Failure {
        event: oom.event as u64,
        size_bytes: oom.size.count(),
        stream: event.and_then(|event| job.trace.raw_stream(event.stream)).unwrap_or_default(),
        live_bytes: oom.live.count(),
        reserved_bytes: oom.reserved.map(Bytes::count),
        card_free_bytes: oom.free.map(Bytes::count),
        segment_bytes: oom.segment.count(),
        limited: oom.is_limited(),
        site: job.labels.site(job.labels.site_of(stack)).to_owned(),
        operation: job.labels.operation_of(stack).to_owned(),
        moment: Moment::before(job, request, top),
        layout: Layout::before(job, request),
    }
}

/// Returns what each preset needs: PyTorch as it was recorded, with expandable segments, and vramp.
fn fits(job: &Job<'_>, device: &Device, threads: NonZeroUsize) -> Result<Vec<Fit>, ReplayError> {
    let mut candidates = vec![Candidate::recorded(&job.recorded)];
    let presets: &[Preset] = match job.recorded.is_driver {
        true => &[Preset::Vpmm, Preset::Vramp],
        false => &[Preset::TorchExpandable, Preset::StreamOrdered, Preset::Vpmm, Preset::Vramp],
    };
    candidates.extend(presets.iter().map(|&preset| Candidate::preset_for(preset, &job.recorded)));
    let found = in_parallel(threads, &candidates, |candidate| fit(job, device, candidate));
    found.into_iter().collect()
}

fn fit(job: &Job<'_>, device: &Device, candidate: &Candidate) -> Result<Fit, ReplayError> {
    let unlimited = run(job, device, &candidate.config, None)?;
    let peak = Bytes::new(unlimited.peak_reserved_bytes);
    let config = &candidate.config;
    let limits = match unlimited.oom_at_event {
        None => {
            let smallest = smallest_limit(job, device, config, peak)?;
            Some((smallest, limit_with_headroom(job, device, config, peak, smallest)?))
        }
        Some(_) => None,
    };
    Ok(Fit {
        allocator: candidate.name.clone(),
        line: candidate.line.clone(),
        peak_reserved_bytes: peak.count(),
        smallest_limit_bytes: limits.map(|(smallest, _)| smallest.count()),
        roomy_limit_bytes: limits.map(|(_, roomy)| roomy.count()),
        smallest_card: limits
            .and_then(|(smallest, _)| CardModel::smallest_with(smallest))
            .map(Card::from),
    })
}
