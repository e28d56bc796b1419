//! What came out of one job, as it is printed and stored.

use serde::Serialize;
use vramp_alloc::Bytes;

use super::{Job, Layouts};

/// What one capture needs. Serialised, this is the line that `--json` prints.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Outcome {
    /// The trace's name.
    pub trace: String,
    /// Which of the recorded devices.
    pub trace_device: u32,
    /// The first event of the window.
    pub first_event: u64,
    /// The event behind its last one.
    pub end_event: u64,
    /// Streams whose order is known each by itself.
    pub streams: u64,
    /// Blocks that the capture takes.
    pub blocks: u64,
    /// Blocks that outlive it.
    pub escaped: u64,
    /// Blocks from before that it frees. They are left out.
    pub older_blocks_freed: u64,
    /// The most that is live at once, in bytes: no layout needs less.
    pub lower_bound_bytes: u64,
    /// The most that may be in use at once where streams do not wait for each other: that, or more.
    pub conflict_bound_bytes: u64,
    /// That over the bound; as all ratios, none for a bound of zero.
    pub conflict_bound_over_bound: Option<f64>,
    /// What the plan takes.
    pub planned_bytes: u64,
    /// That over the bound.
    pub planned_over_bound: Option<f64>,
    /// What a second capture takes that follows the plan.
    pub second_bytes: u64,
    /// That over the bound.
    pub second_over_bound: Option<f64>,
    /// True if it followed to the end.
    pub second_followed: bool,
    /// What the first capture takes.
    pub reusing_bytes: u64,
    /// That over the bound.
    pub reusing_over_bound: Option<f64>,
    /// What a bump pointer takes.
    pub monotone_bytes: u64,
    /// That over the bound.
    pub monotone_over_bound: Option<f64>,
    /// What the recorded allocator took for these blocks, where the recording tells.
    pub recorded_bytes: Option<u64>,
    /// That over the bound.
    pub recorded_over_bound: Option<f64>,
    /// Host time that the plan took, in milliseconds.
    pub pack_ms: f64,
}

impl Outcome {
    /// The outcome of a job.
    pub fn new(job: &Job, found: &Layouts) -> Outcome {
        let bound = found.lower_bound;
        let over =
            |taken: Bytes| (!bound.is_zero()).then(|| taken.count() as f64 / bound.count() as f64);
        Outcome {
            trace: job.name.clone(),
            trace_device: job.device,
            first_event: job.events.start as u64,
            end_event: job.events.end as u64,
            streams: job.streams as u64,
            blocks: found.blocks as u64,
            escaped: found.escaped as u64,
            older_blocks_freed: job.older_freed as u64,
            lower_bound_bytes: bound.count(),
            conflict_bound_bytes: found.conflict_bound.count(),
            conflict_bound_over_bound: over(found.conflict_bound),
            planned_bytes: found.planned.count(),
            planned_over_bound: over(found.planned),
            second_bytes: found.second.count(),
            second_over_bound: over(found.second),
            second_followed: found.followed,
            reusing_bytes: found.reusing.count(),
            reusing_over_bound: over(found.reusing),
            monotone_bytes: found.monotone.count(),
            monotone_over_bound: over(found.monotone),
            recorded_bytes: job.recorded.map(Bytes::count),
            recorded_over_bound: job.recorded.and_then(over),
            pack_ms: found.pack_ns as f64 / 1e6,
        }
    }
}
