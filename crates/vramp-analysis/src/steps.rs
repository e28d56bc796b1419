//! The steps of a job: where one iteration ends and the next begins.
//!
//! 1. From annotations: `ProfilerStep#...` spans of `torch.profiler`, or else `Optimizer.step#...`
//!    spans, which PyTorch records for every optimizer.
//! 2. Without them, from the live bytes: an iteration allocates activations and frees them again, so
//!    the lowest points between two high points are the boundaries. See [`lows`].

use std::collections::HashMap;

use vramp::Bytes;
use vramp_trace::{Annotation, Request, Stage, Trace, Workload};

use crate::blocks::{Blocks, RequestIndex};

/// A part of the workload, from the request `begin` to before the request `end`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// First request.
    pub begin: RequestIndex,
    /// First request after it.
    pub end: RequestIndex,
}

impl Span {
    /// Returns true if the request is inside.
    pub fn contains(&self, request: RequestIndex) -> bool {
        (self.begin..self.end).contains(&request)
    }
}

/// The annotated spans of one device that the analysis knows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Annotated {
    /// Calls of an optimizer's `step`, in order.
    pub optimizer_steps: Vec<Span>,
    /// Iterations that `torch.profiler` marked, in order.
    pub iterations: Vec<Span>,
    /// Calls of an optimizer's `zero_grad`, in order.
    pub zero_grads: Vec<Span>,
}

impl Annotated {
    /// Collects the spans of the workload's device. Annotations have times and no place among the
    /// events, so a span begins with the first request whose event is not earlier.
    ///
    /// O(requests + annotations log requests). Empty if the events have no times.
    pub fn of(trace: &Trace, workload: &Workload) -> Annotated {
        let on_device = |annotation: &Annotation| {
            annotation.device.is_none_or(|device| u32::from(device) == workload.device)
        };
        let all = (0..).zip(&trace.annotations);
        let places: Vec<u32> =
            all.filter(|(_, annotation)| on_device(annotation)).map(|(place, _)| place).collect();
        Annotated::of_places(trace, workload, &places)
    }

    /// As [`Annotated::of`], of the annotations at `places` in the trace: those of the device.
    pub(crate) fn of_places(trace: &Trace, workload: &Workload, places: &[u32]) -> Annotated {
        let mut annotated = Annotated::default();
        if places.is_empty() {
            return annotated;
        }
        let times = times(trace, workload);
        let request = |time_us: u64| {
            let before = times.partition_point(|&time| time < time_us);
            RequestIndex::try_from(before).unwrap_or(RequestIndex::MAX)
        };
        // The open spans by name, innermost last.
        let mut open: HashMap<&str, Vec<RequestIndex>> = HashMap::new();
        for annotation in places.iter().map(|&place| &trace.annotations[place as usize]) {
            let (name, at) = (&*annotation.name, request(annotation.time_us));
            match annotation.stage {
                Stage::Start => open.entry(name).or_default().push(at),
                Stage::End => {
                    let Some(begin) = open.get_mut(name).and_then(Vec::pop) else { continue };
                    let span = Span { begin, end: at };
                    if name.starts_with("Optimizer.step#") {
                        annotated.optimizer_steps.push(span);
                    } else if name.starts_with("ProfilerStep#") {
                        annotated.iterations.push(span);
                    } else if name.starts_with("Optimizer.zero_grad#") {
                        annotated.zero_grads.push(span);
                    }
                }
                Stage::Other(_) => {}
            }
        }
        annotated.optimizer_steps.sort_by_key(|span| span.begin);
        annotated.iterations.sort_by_key(|span| span.begin);
        annotated.zero_grads.sort_by_key(|span| span.begin);
        annotated
    }

    /// Returns the span among `spans`, which are in order, that contains the request. O(log n).
    pub fn find(spans: &[Span], request: RequestIndex) -> Option<Span> {
        let after = spans.partition_point(|span| span.begin <= request);
        spans[..after].last().copied().filter(|span| span.contains(request))
    }

    /// Returns the first span among `spans`, which are in order, that begins after the request.
    /// O(log n).
    pub fn next(spans: &[Span], request: RequestIndex) -> Option<Span> {
        spans.get(spans.partition_point(|span| span.begin <= request)).copied()
    }
}

/// Returns the time of each request, never falling: a request that was added before the first event
/// has the time 0.
fn times(trace: &Trace, workload: &Workload) -> Vec<u64> {
    let mut last = 0;
    let time = |request: usize| {
        let event = workload.event_of(request).and_then(|event| trace.events.get(event));
        last = event.map_or(0, |event| event.time_us).max(last);
        last
    };
    (0..workload.requests.len()).map(time).collect()
}

/// A lowest point of the live bytes between two high ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Low {
    /// The request after which the live bytes are lowest.
    pub request: RequestIndex,
    /// The live bytes then.
    pub live: Bytes,
}

/// Fewest boundaries that make a job look iterative.
pub const LOWS_MIN: usize = 4;

/// Returns the lowest points between rises and falls of at least a part of the range of the live
/// bytes. The part is the largest of 1/2, 1/4, ... 1/64 that yields at least eight of them, because
/// what a job keeps may be small or large beside what one step needs. O(requests) for each part.
pub fn lows(workload: &Workload, blocks: &Blocks) -> Vec<Low> {
    let curve = live_curve(workload, blocks);
    let highest = curve.iter().max().copied().unwrap_or(0);
    let mut best = Vec::new();
    for shift in 1..=6 {
        let swing = highest >> shift;
        if swing == 0 {
            break;
        }
        let found = turning_points(&curve, swing);
        let enough = found.len() >= 2 * LOWS_MIN;
        if found.len() > best.len() {
            best = found;
        }
        if enough {
            break;
        }
    }
    best
}

/// Returns the live bytes after each request.
pub fn live_curve(workload: &Workload, blocks: &Blocks) -> Vec<u64> {
    let mut live = 0u64;
    let step = |request: &Request| {
        match *request {
            Request::Alloc { size, .. } => live = live.saturating_add(size.count()),
            Request::Free { block } => live = live.saturating_sub(blocks.get(block).size.count()),
            Request::FreeCompleted { .. } | Request::Oom { .. } => {}
        }
        live
    };
    workload.requests.iter().map(step).collect()
}

/// Returns the minima of `curve` between swings of at least `swing` in both directions.
fn turning_points(curve: &[u64], swing: u64) -> Vec<Low> {
    let mut found = Vec::new();
    let (mut low, mut low_at, mut high) = (u64::MAX, 0u32, 0u64);
    let mut falling = false;
    for (at, &live) in (0u32..).zip(curve) {
        if falling {
            if live < low {
                (low, low_at) = (live, at);
            } else if live - low >= swing {
                found.push(Low { request: low_at, live: Bytes::new(low) });
                (falling, high) = (false, live);
            }
        } else if live > high {
            high = live;
        } else if high - live >= swing {
            (falling, low, low_at) = (true, live, at);
        }
    }
    if falling {
        found.push(Low { request: low_at, live: Bytes::new(low) });
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{alloc, trace};

    #[test]
    fn the_lowest_points_between_swings_are_found() {
        let curve = [0, 50, 100, 20, 10, 40, 30, 110, 12, 100, 11, 11, 90, 15];
        let found: Vec<u32> = turning_points(&curve, 50).iter().map(|low| low.request).collect();
        assert_eq!(found, [4, 8, 10, 13]);
        assert_eq!(turning_points(&curve, 200), []);
    }

    #[test]
    fn annotated_spans_are_placed_by_time() {
        let mut trace = trace(&[alloc(1, 8), alloc(2, 8), alloc(3, 8), alloc(4, 8)]);
        for (event, time_us) in trace.events.iter_mut().zip([10, 20, 30, 40]) {
            event.time_us = time_us;
        }
        let mark = |stage, name: &str, time_us| Annotation {
            stage,
            name: name.into(),
            device: Some(0),
            time_us,
        };
        trace.annotations = vec![
            mark(Stage::Start, "ProfilerStep#7", 5),
            mark(Stage::Start, "Optimizer.step#AdamW.step", 15),
            mark(Stage::End, "Optimizer.step#AdamW.step", 35),
            mark(Stage::Start, "Optimizer.zero_grad#AdamW.zero_grad", 36),
            mark(Stage::End, "Optimizer.zero_grad#AdamW.zero_grad", 50),
            mark(Stage::End, "ProfilerStep#7", 55),
            mark(Stage::End, "Optimizer.step#AdamW.step", 60),
        ];
        let workload = Workload::from_trace(&trace, 0);
        let found = Annotated::of(&trace, &workload);
        assert_eq!(found.iterations, [Span { begin: 0, end: 4 }]);
        assert_eq!(found.optimizer_steps, [Span { begin: 1, end: 3 }]);
        assert_eq!(found.zero_grads, [Span { begin: 3, end: 4 }]);
    }

    #[test]
    fn many_open_spans_take_linear_time() {
        let annotated = |count: u64| {
            let mark = |stage, number: u64| Annotation {
                stage,
                name: format!("span {number}").into(),
                device: Some(0),
                time_us: number,
            };
            let mut made = trace(&[alloc(1, 8)]);
            made.annotations.extend((0..count).map(|number| mark(Stage::Start, number)));
            made.annotations.extend((0..count).map(|number| mark(Stage::End, number)));
            made
        };
        let time = |count| {
            let made = annotated(count);
            let workload = Workload::from_trace(&made, 0);
            let begun = std::time::Instant::now();
            Annotated::of(&made, &workload);
            begun.elapsed().as_secs_f64()
        };
        let least = (0..3).map(|_| time(40_000) / time(5_000)).fold(f64::INFINITY, f64::min);
        assert!(least < 24.0, "eight times as many spans take {least:.1} times as long");
    }

    #[test]
    fn spans_are_found_by_request() {
        let spans = [Span { begin: 10, end: 20 }, Span { begin: 30, end: 40 }];
        assert_eq!(Annotated::find(&spans, 15), Some(spans[0]));
        assert_eq!(Annotated::find(&spans, 25), None);
        assert_eq!(Annotated::next(&spans, 15), Some(spans[1]));
        assert_eq!(Annotated::next(&spans, 35), None);
    }
}
