//! A recorded job on one device, with everything that the analysis reads from it.
//!
//! A recording of several devices is one job on each. [`Job::all`] takes one pass over it, whatever the
//! number of devices, and labels each call stack once.

use std::collections::BTreeMap;
use std::sync::Arc;

use vramp_trace::{Trace, Workload};

use crate::blocks::Blocks;
use crate::category::{Category, Roles, categories_by_roles};
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
    /// The labels of all stacks, which the jobs of all devices share.
    pub labels: Arc<Labels>,
    /// Indices in [`Trace::annotations`] of the annotations of the device, and of those of no device.
    pub annotations: Vec<u32>,
    /// The annotated spans.
    pub annotated: Annotated,
}

impl<'a> Job<'a> {
    /// Collects the job of `device` in `trace`. O(events), a few passes.
    pub fn of(trace: &'a Trace, device: u32) -> Job<'a> {
        Job::on_device(&Shared::of(trace), Workload::from_trace(trace, device))
    }

    /// Returns the jobs of all devices that the recording knows blocks of, ascending by device.
    ///
    /// O(events), a few passes, whatever the number of devices. Annotations of no device count for each.
    pub fn all(trace: &'a Trace) -> Vec<Job<'a>> {
        let shared = Shared::of(trace);
        let workloads = Workload::all(trace).into_iter();
        let used = workloads.filter(|workload| !workload.requests.is_empty());
        used.map(|workload| Job::on_device(&shared, workload)).collect()
    }

    fn on_device(shared: &Shared<'a>, workload: Workload) -> Job<'a> {
        let trace = shared.trace;
        let recorded = Recorded::of(trace, &workload);
        let blocks = Blocks::of(&workload);
        let annotations = shared.annotations_of(workload.device);
        let annotated = Annotated::of_places(trace, &workload, &annotations);
        let categories = categories_by_roles(trace, &workload, &blocks, &annotated, &shared.roles);
        let labels = Arc::clone(&shared.labels);
        Job { trace, workload, recorded, blocks, categories, labels, annotations, annotated }
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

/// What the jobs of all devices of a recording share.
struct Shared<'a> {
    trace: &'a Trace,
    labels: Arc<Labels>,
    roles: Roles,
    /// Indices of the annotations by device; those of no device come under `None`.
    annotations: BTreeMap<Option<u16>, Vec<u32>>,
}

impl<'a> Shared<'a> {
    fn of(trace: &'a Trace) -> Shared<'a> {
        let mut annotations: BTreeMap<Option<u16>, Vec<u32>> = BTreeMap::new();
        for (index, annotation) in (0..).zip(&trace.annotations) {
            annotations.entry(annotation.device).or_default().push(index);
        }
        let labels = Arc::new(Labels::of(&trace.stacks));
        Shared { trace, labels, roles: Roles::of(&trace.stacks), annotations }
    }

    /// Returns the annotations of the device and of no device, in the order of recording.
    fn annotations_of(&self, device: u32) -> Vec<u32> {
        let own = u16::try_from(device).ok().and_then(|device| self.annotations.get(&Some(device)));
        let of_no_device = self.annotations.get(&None);
        let mut found: Vec<u32> = own.into_iter().chain(of_no_device).flatten().copied().collect();
        found.sort_unstable();
        found
    }
}

#[cfg(test)]
mod tests {
    use vramp_trace::{Annotation, Stage};

    use super::*;
    use crate::testing::{alloc, trace};

    #[test]
    fn each_device_has_its_own_annotations_and_those_of_no_device() {
        let mut made = trace(&[alloc(1, 8), alloc(2, 8), alloc(3, 8)]);
        for (event, device) in made.events.iter_mut().zip([0, 2, 5]) {
            event.device = device;
        }
        made.device_count = 6;
        made.annotations = [Some(5), None, Some(0), Some(5), Some(1)]
            .map(|device| Annotation { stage: Stage::Start, name: "a".into(), device, time_us: 0 })
            .to_vec();
        let jobs = Job::all(&made);
        let found: Vec<_> =
            jobs.iter().map(|job| (job.workload.device, job.annotations.clone())).collect();
        assert_eq!(found, [(0, vec![1, 2]), (2, vec![1]), (5, vec![0, 1, 3])]);
        assert!(Arc::ptr_eq(&jobs[0].labels, &jobs[2].labels), "each stack is labelled once");
    }
}
