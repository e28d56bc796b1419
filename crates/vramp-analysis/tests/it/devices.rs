//! Recordings of several devices: the job of each, and the sums over all.
use vramp::device::Device;
use vramp::peers::{Config, Preset};
use vramp::{Bytes, DeviceAddr};
use vramp_analysis::advise::{Advice, Run, Tried, fitting_everywhere};
use vramp_analysis::job::Job;
use vramp_analysis::limit::Limit;
use vramp_analysis::replay::{Options, Outcome, Total, replay};
use vramp_trace::{Annotation, Event, EventKind, Frame, Stage, StreamIndex, Trace};

fn event(kind: EventKind, device: u16, place: u64, size: u64, time_us: u64) -> Event {
    Event {
        kind,
        device,
        stream: StreamIndex(0),
        address: DeviceAddr::new(place << 30),
        size: Bytes::new(size),
        time_us,
        stack: None,
    }
}

/// A job of steps on each of the devices, larger on those with larger numbers.
fn made(devices: &[u16]) -> Trace {
    let mut trace = Trace { name: "made".to_owned(), streams: vec![0], ..Trace::default() };
    trace.device_count = devices.iter().map(|&device| u32::from(device) + 1).max().unwrap_or(0);
    let frame = |name| Frame { name, filename: "train.py", line: 3 };
    let stacks = ["forward", "backward"].map(|name| trace.stacks.add([frame(name)]));
    for &device in devices {
        let size = (u64::from(device) + 1) << 20;
        let mut push = |made: Event, stack: usize| {
            trace.events.push(Event { stack: stacks[stack], ..made });
        };
        push(event(EventKind::SegmentAlloc, device, 1, 4 * size, 1), 0);
        for step in 0..10 {
            let time = step * 10;
            push(event(EventKind::Alloc, device, 1, size, time), 0);
            push(event(EventKind::Alloc, device, 2, size / 2, time + 2), 1);
            for place in [1, 2] {
                push(event(EventKind::FreeRequested, device, place, 0, time + 5), 0);
                push(event(EventKind::FreeCompleted, device, place, 0, time + 5), 0);
            }
            for (stage, time_us) in [(Stage::Start, time), (Stage::End, time + 9)] {
                let name = format!("ProfilerStep#{step}").into();
                let device = (device != 0).then_some(device);
                trace.annotations.push(Annotation { stage, name, device, time_us });
            }
        }
    }
    trace
}

#[test]
fn the_jobs_of_all_devices_are_those_of_each() {
    let trace = made(&[0, 1, 4, 7]);
    let all = Job::all(&trace);
    let numbers: Vec<u32> = all.iter().map(|job| job.workload.device).collect();
    assert_eq!(numbers, [0, 1, 4, 7]);
    for job in &all {
        let alone = Job::of(&trace, job.workload.device);
        assert_eq!(job.workload, alone.workload);
        assert_eq!(job.recorded, alone.recorded);
        assert_eq!(job.blocks, alone.blocks);
        assert_eq!(job.categories, alone.categories);
        assert_eq!(job.annotated, alone.annotated);
        assert_eq!(job.recorded.events, 61, "each has its own events alone");
        // Device 0 has only the steps of no device, which count for every device.
        let steps = if job.workload.device == 0 { 10 } else { 20 };
        assert_eq!(job.annotated.iterations.len(), steps);
    }
}

/// Replays every device. The devices above 2 have a limit that they do not fit into.
fn outcomes(trace: &Trace) -> Vec<Outcome> {
    let device = Device::open("sim").unwrap();
    let run = |job: &Job<'_>, preset| {
        let limit = (job.workload.device > 2).then_some(Bytes::mib(4));
        let config = Config::preset(preset).with_limit(limit);
        let outcome = replay(&job.workload, &device, config, Options::default(), |_| {});
        outcome.unwrap().with_recorded(&job.recorded)
    };
    let jobs = Job::all(trace);
    let each = jobs.iter().flat_map(|job| [Preset::Vramp, Preset::Torch].map(|it| run(job, it)));
    each.collect()
}

#[test]
fn totals_are_sums_over_the_devices_and_name_those_that_failed() {
    let outcomes = outcomes(&made(&[0, 1, 7]));
    let totals = Total::by_allocator(&outcomes);
    let names: Vec<&str> = totals.iter().map(|total| total.allocator).collect();
    assert_eq!(names, ["vramp", "torch"]);
    for total in &totals {
        let own = || outcomes.iter().filter(|outcome| outcome.allocator == total.allocator);
        let sum = |of: fn(&Outcome) -> u64| own().map(of).sum::<u64>();
        assert_eq!(total.trace_devices, [0, 1, 7]);
        assert_eq!(total.oom_on_trace_devices, [7]);
        assert_eq!(total.events, 3 * 61);
        assert_eq!(total.sum_of_peak_live_bytes, ((1 + 2 + 8) * 3) << 19);
        assert_eq!(total.sum_of_recorded_peak_bytes, Some((4 * (1 + 2 + 8)) << 20));
        assert_eq!(total.sum_of_peak_reserved_bytes, sum(|it| it.peak_reserved_bytes));
        assert_eq!(total.driver_calls, sum(|it| it.driver_calls));
        assert_eq!(total.hits + total.misses, sum(|it| it.hits + it.misses));
        let worst = own().map(|it| it.worst_malloc_us).fold(0.0, f64::max);
        assert!((total.worst_malloc_us - worst).abs() < f64::EPSILON);
    }
    assert_eq!(Total::by_allocator(&[]), []);
}

#[test]
fn a_recorded_peak_that_one_device_lacks_has_no_sum() {
    let mut outcomes = outcomes(&made(&[0, 1]));
    outcomes[2].recorded_peak_bytes = None;
    let totals = Total::by_allocator(&outcomes);
    assert_eq!(totals[0].sum_of_recorded_peak_bytes, None);
    assert_eq!(totals[1].sum_of_recorded_peak_bytes, Some(12 << 20));
}

/// Advice for a device: each candidate with its driver time, and whether it fits and is tight.
fn advice(tried: &[(&str, f64, bool, bool)]) -> Advice {
    let run = |driver_ms, fits, tight| Run {
        fits,
        peak_reserved_bytes: 10,
        driver_ms,
        oom_at_event: None,
        tight,
        marginal: false,
    };
    let tried = tried.iter().map(|&(name, ms, fits, tight)| Tried {
        name: name.to_owned(),
        line: Some(format!("export {name}")),
        unlimited: run(ms, true, false),
        limited: vec![run(ms, fits, tight)],
    });
    Advice {
        schema_version: 2,
        trace: "made".to_owned(),
        trace_device: 0,
        demand_bytes: 1,
        recording: "whole",
        duration_ms: Some(100.0),
        limits: vec![Limit { bytes: 100, card: None }],
        conclusions: Vec::new(),
        tried: tried.collect(),
    }
}

#[test]
fn settings_for_a_process_fit_on_every_device() {
    let all = [
        advice(&[
            ("slow", 5.0, true, false),
            ("tight", 1.0, true, false),
            ("fast", 2.0, true, false),
            ("partly", 1.0, true, false),
            // Given twice.
            ("slow", 5.0, true, false),
        ]),
        advice(&[
            ("fast", 2.0, true, false),
            ("tight", 1.0, true, true),
            ("partly", 1.0, false, false),
            ("slow", 5.0, true, false),
            ("elsewhere", 0.0, true, false),
        ]),
    ];
    let found = fitting_everywhere(&all, 0);
    let names: Vec<&str> = found.iter().map(|common| common.name).collect();
    assert_eq!(names, ["fast", "slow", "tight"]);
    assert_eq!((found[1].sum_of_peaks_bytes, found[1].driver_ms), (20, 10.0));
    assert_eq!(found[0].line, Some("export fast"));
    assert!(fitting_everywhere(&all, 1).is_empty(), "there is no second limit");
}
