//! A recorded job on one device, with everything that the analysis reads from it.

use vramp_trace::{Trace, Workload};

use crate::blocks::Blocks;
use crate::category::{Category, categories};
use crate::frames::Labels;
use crate::replay::Recorded;
use crate::steps::Annotated;

/// A recorded job on one device.
///
/// Takes about 36 bytes for each request and 33 for each block beside the trace.
pub struct Job<'a> {
    /// The recording.
    pub trace: &'a Trace,
    /// The requests on the device.
    pub workload: Workload,
    /// The recorded allocator.
    pub recorded: Recorded,
    /// The blocks by number.
    pub blocks: Blocks,
    /// The category of each block.
    pub categories: Vec<Category>,
    /// The labels of all stacks.
    pub labels: Labels,
    /// The annotated spans.
    pub annotated: Annotated,
}

impl<'a> Job<'a> {
    /// Collects the job of `device` in `trace`. O(events), a few passes.
    pub fn of(trace: &'a Trace, device: u32) -> Job<'a> {
        let workload = Workload::from_trace(trace, device);
        let recorded = Recorded::of(trace, &workload);
        let blocks = Blocks::of(&workload);
        let annotated = Annotated::of(trace, &workload);
        let categories = categories(trace, &workload, &blocks, &annotated);
        let labels = Labels::of(&trace.stacks);
        Job { trace, workload, recorded, blocks, categories, labels, annotated }
    }

    /// Returns the jobs of all devices that the recording knows blocks of.
    pub fn all(trace: &'a Trace) -> Vec<Job<'a>> {
        let jobs = trace.devices().into_iter().map(|device| Job::of(trace, device));
        jobs.filter(|job| !job.workload.requests.is_empty()).collect()
    }

    /// Returns the request that an event of the device leads to: the first that does not come from
    /// an earlier event. `event` counts the device's events from 0. O(requests).
    pub fn request_of_event(&self, event: usize) -> u32 {
        let requests = self.workload.requests.len();
        let before = |&request: &usize| {
            self.workload.device_event_of(request).is_none_or(|found| found < event)
        };
        u32::try_from((0..requests).take_while(before).count()).unwrap_or(u32::MAX)
    }
}
