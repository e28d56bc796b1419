//! The result of one job, as it is printed and stored.

use serde::Serialize;
use vramp::Bytes;

use super::{Job, Layouts};

/// Memory of one capture by each layout, as `--json` prints it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Outcome {
    /// The trace's name.
    pub trace: String,
    /// Number of the recorded device.
    pub trace_device: u32,
    /// The first event of the window.
    pub first_event: u64,
    /// The event after its last one.
    pub end_event: u64,
    /// Streams, which are not ordered among each other.
    pub streams: u64,
    /// Blocks that the capture allocates.
    pub blocks: u64,
    /// Blocks that outlive the capture.
    pub escaped: u64,
    /// Frees of blocks that were allocated before. They are left out.
    pub older_blocks_freed: u64,
    /// Peak of the live bytes: no layout needs less.
    pub lower_bound_bytes: u64,
    /// Peak of the bytes that unordered streams may use at once; at least the lower bound.
    pub conflict_bound_bytes: u64,
    /// `conflict_bound_bytes` over the lower bound; like all ratios `None` for a bound of zero.
    pub conflict_bound_over_bound: Option<f64>,
    /// Memory of the plan.
    pub planned_bytes: u64,
    /// `planned_bytes` over the lower bound.
    pub planned_over_bound: Option<f64>,
    /// Memory of a second capture, which follows the plan.
    pub second_bytes: u64,
    /// `second_bytes` over the lower bound.
    pub second_over_bound: Option<f64>,
    /// True if the second capture followed the plan to its end.
    pub second_followed: bool,
    /// Memory of the first capture, which places block by block.
    pub reusing_bytes: u64,
    /// `reusing_bytes` over the lower bound.
    pub reusing_over_bound: Option<f64>,
    /// Memory of a bump allocator.
    pub monotone_bytes: u64,
    /// `monotone_bytes` over the lower bound.
    pub monotone_over_bound: Option<f64>,
    /// Bytes that the recorded allocator reserved for these blocks, where recorded.
    pub recorded_bytes: Option<u64>,
    /// `recorded_bytes` over the lower bound.
    pub recorded_over_bound: Option<f64>,
    /// Host time of planning, in milliseconds.
    pub pack_ms: f64,
}

impl Outcome {
    /// Returns the outcome of a job.
    pub fn new(job: &Job, found: &Layouts) -> Outcome {
        let bound = found.lower_bound;
        let over = |memory: Bytes| {
            (!bound.is_zero()).then(|| memory.count() as f64 / bound.count() as f64)
        };
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
