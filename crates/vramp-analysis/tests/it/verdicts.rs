//! The verdict on made recordings of which the cause is known.
use std::num::NonZeroUsize;

use vramp::device::Device;
use vramp::peers::Preset;
use vramp::{Bytes, DeviceAddr};
use vramp_analysis::advise::advise;
use vramp_analysis::candidates::Candidate;
use vramp_analysis::explain::{Explanation, Options, explain};
use vramp_analysis::fit::run;
use vramp_analysis::job::Job;
use vramp_analysis::limit::Limit;
use vramp_analysis::remedy::{Remedy, RemedyKind};
use vramp_analysis::verdict::Cause;
use vramp_trace::{Event, EventKind, Frame, Label, PoolId, StackId, StreamIndex, Trace};

const MIB: u64 = 1 << 20;

/// A recording that is made event by event.
struct Recording {
    trace: Trace,
    lines: u32,
}

impl Recording {
    fn new() -> Recording {
        let trace = Trace {
            device_count: 1,
            streams: vec![0, 7],
            name: "made".to_owned(),
            ..Trace::default()
        };
        Recording { trace, lines: 0 }
    }

    /// Adds an event at an address in MiB.
    fn event(&mut self, kind: EventKind, at_mib: u64, mib: u64) -> &mut Event {
        self.trace.events.push(Event {
            kind,
            device: 0,
            stream: StreamIndex(0),
            address: DeviceAddr::new(at_mib * MIB),
            size: Bytes::mib(mib),
            time_us: 0,
            stack: None,
        });
        self.trace.events.last_mut().unwrap()
    }

    fn line(&mut self) -> Option<StackId> {
        self.lines += 1;
        self.trace.stacks.add([Frame { name: "f", filename: "job.py", line: self.lines }])
    }

    fn alloc(&mut self, stack: Option<StackId>, at_mib: u64, mib: u64) {
        self.event(EventKind::Alloc, at_mib, mib).stack = stack;
    }

    fn free(&mut self, at_mib: u64, mib: u64) {
        self.event(EventKind::FreeRequested, at_mib, mib);
        self.event(EventKind::FreeCompleted, at_mib, mib);
    }

    /// A request that fails while the card has this much free memory.
    fn oom(&mut self, mib: u64, free_mib: u64) {
        self.event(EventKind::Oom, free_mib, mib);
    }

    fn explained(&self, limit: Option<Bytes>) -> Explanation {
        let device = Device::open("sim").unwrap();
        let job = Job::of(&self.trace, 0);
        explain(&job, &device, &Options { limit: limit.map(Limit::from), ..Options::default() })
            .unwrap()
    }
}

#[test]
fn holes_between_small_blocks_are_fragmentation_pinned_by_their_line() {
    let mut made = Recording::new();
    let (large, small) = (made.line(), made.line());
    for index in 0..16 {
        let at = 1000 + 100 * index;
        made.event(EventKind::SegmentAlloc, at, 100);
        made.alloc(large, at, 96);
        made.alloc(small, at + 96, 4);
    }
    for index in 0..16 {
        made.free(1000 + 100 * index, 96);
    }
    made.oom(512, 100);
    let found = made.explained(None);
    assert_eq!(found.verdict.cause, Cause::Fragmentation, "{:?}", found.verdict);
    assert!(
        found.verdict.headline.contains("1.50 GiB lay free in 16 holes"),
        "{:?}",
        found.verdict
    );
    let failure = found.failure.as_ref().unwrap();
    let layout = failure.layout.as_ref().unwrap();
    assert_eq!((layout.free_bytes, layout.largest_hole_bytes), (16 * 96 * MIB, 96 * MIB));
    assert_eq!(layout.pinned_by[0].site, "job.py:2 f");
    assert_eq!((layout.pinned_by[0].blocks, layout.pinned_by[0].block_bytes), (16, 64 * MIB));
    // The request needed 576 MiB in all, so vramp serves it.
    assert_eq!(found.demand_bytes, 1600 * MIB);
    let vramp = found.fits.iter().find(|fit| fit.allocator == "vramp").unwrap();
    assert!(vramp.smallest_limit_bytes.unwrap() <= 1664 * MIB, "{vramp:?}");
    assert!(remedy(&found, RemedyKind::Vramp).unwrap().text.starts_with("vramp fits"), "{found:?}");
}

#[test]
fn a_job_that_needs_more_than_there_is_has_real_demand() {
    let mut made = Recording::new();
    let line = made.line();
    made.event(EventKind::SegmentAlloc, 1000, 1000);
    made.alloc(line, 1000, 1000);
    made.oom(600, 500);
    let found = made.explained(None);
    assert_eq!(found.verdict.cause, Cause::Demand);
    assert!(found.verdict.headline.contains("no allocator fits it in 1.46 GiB"), "{found:?}");
    // No stack is needed to say how much less is enough; a card of that size is the other way.
    let kinds: Vec<RemedyKind> = found.verdict.remedies.iter().map(|it| it.kind).collect();
    assert_eq!(kinds, [RemedyKind::Program, RemedyKind::Card]);
    // With a larger limit there is no cause.
    assert_eq!(made.explained(Some(Bytes::gib(2))).verdict.cause, Cause::None);
}

#[test]
fn a_leak_is_named_with_its_line_and_its_rate() {
    let mut made = Recording::new();
    let (work, leak) = (made.line(), made.line());
    for step in 0..40 {
        made.event(EventKind::SegmentAlloc, 100_000 + 100 * step, 30);
        made.alloc(work, 1000, 200);
        made.alloc(leak, 100_000 + 100 * step, 30);
        made.free(1000, 200);
    }
    made.oom(200, 100);
    let found = made.explained(None);
    assert_eq!(found.verdict.cause, Cause::Growth, "{:?}", found.verdict);
    assert!(found.verdict.headline.contains("keeps 30.00 MiB more with every step"), "{found:?}");
    assert!(found.verdict.headline.contains("job.py:2 f"), "{found:?}");
}

#[test]
fn free_memory_of_other_streams_is_a_finding() {
    let mut made = Recording::new();
    let line = made.line();
    made.event(EventKind::SegmentAlloc, 1000, 400);
    made.alloc(line, 1000, 400);
    made.event(EventKind::SegmentAlloc, 5000, 300).stream = StreamIndex(1);
    made.event(EventKind::Alloc, 5000, 10).stream = StreamIndex(1);
    made.oom(200, 50);
    let found = made.explained(None);
    assert_eq!(found.verdict.cause, Cause::Fragmentation);
    let streams = found.verdict.findings.iter().find(|it| it.kind == "streams").unwrap();
    assert_eq!(streams.bytes, 290 * MIB);
}

#[test]
fn a_limit_below_the_cards_free_memory_is_named() {
    let mut made = Recording::new();
    let line = made.line();
    made.event(EventKind::SegmentAlloc, 1000, 1000);
    made.alloc(line, 1000, 1000);
    made.oom(600, 70_000);
    let found = made.explained(None);
    assert_eq!(found.verdict.cause, Cause::Limit);
    assert!(found.failure.as_ref().unwrap().limited);
}

#[test]
fn free_memory_of_private_pools_is_a_finding() {
    let mut made = Recording::new();
    let line = made.line();
    made.event(EventKind::SegmentAlloc, 1000, 400);
    made.alloc(line, 1000, 400);
    made.event(EventKind::SegmentAlloc, 5000, 300);
    let segment = made.trace.events.len() - 1;
    let pool = Label { pool: PoolId(0, 3), ..Label::default() };
    made.trace.labels.label_event(segment, pool);
    made.alloc(line, 5000, 10);
    made.oom(200, 50);
    let found = made.explained(None);
    let pools = found.verdict.findings.iter().find(|it| it.kind == "pools").unwrap();
    assert_eq!(pools.bytes, 290 * MIB);
}

fn remedy(found: &Explanation, kind: RemedyKind) -> Option<&Remedy> {
    found.verdict.remedies.iter().find(|it| it.kind == kind)
}

/// Returns the settings and allocators that are said to fit.
fn fitting(found: &Explanation) -> impl Iterator<Item = &Remedy> {
    let kinds = [RemedyKind::Setting, RemedyKind::Vramp];
    found.verdict.remedies.iter().filter(move |it| kinds.contains(&it.kind))
}

fn finding<'a>(found: &'a Explanation, kind: &str) -> Option<&'a str> {
    let findings = &found.verdict.findings;
    findings.iter().find(|it| it.kind == kind).map(|it| it.text.as_str())
}

#[test]
fn a_card_without_room_for_a_segment_is_no_limit() {
    // PyTorch needs 20 MiB for a request of 5 MiB.
    for (free, cause, words) in [
        (
            12,
            Cause::Fragmentation,
            "needed a segment of 20.00 MiB, with 12.00 MiB free on the card",
        ),
        (19, Cause::Fragmentation, "19.00 MiB free on the card and 0 B free in 0 holes of its own"),
        (20, Cause::Limit, "while 20.00 MiB of the card were free"),
    ] {
        let mut made = Recording::new();
        let line = made.line();
        made.event(EventKind::SegmentAlloc, 1000, 600);
        made.alloc(line, 1000, 600);
        made.oom(5, free);
        let found = made.explained(None);
        assert_eq!(found.verdict.cause, cause, "{free}: {:?}", found.verdict);
        assert!(found.verdict.headline.contains(words), "{:?}", found.verdict);
        assert_eq!(found.failure.as_ref().unwrap().segment_bytes, 20 * MIB);
    }
}

#[test]
fn a_demand_of_nearly_everything_is_not_blamed_on_holes() {
    let mut made = Recording::new();
    let line = made.line();
    made.event(EventKind::SegmentAlloc, 1000, 1000);
    made.alloc(line, 1000, 998);
    made.oom(500, 498);
    let found = made.explained(None);
    assert_eq!(found.verdict.cause, Cause::Demand, "{:?}", found.verdict);
    assert!(found.verdict.headline.contains("0 B are left for rounding"), "{:?}", found.verdict);
}

#[test]
fn a_leak_is_the_cause_also_where_the_last_request_failed_in_holes() {
    let mut made = Recording::new();
    let (work, leak) = (made.line(), made.line());
    for step in 0..40 {
        made.event(EventKind::SegmentAlloc, 100_000 + 100 * step, 40);
        made.alloc(work, 1000, 200);
        made.alloc(leak, 100_000 + 100 * step, 30);
        made.free(1000, 200);
    }
    made.oom(200, 100);
    let found = made.explained(None);
    // 1400 MiB are needed, and 1700 MiB were usable.
    assert_eq!(found.verdict.cause, Cause::Growth, "{:?}", found.verdict);
    let words = ["keeps 30.00 MiB more with every step", "400.00 MiB lay free in 40 holes"];
    assert!(words.iter().all(|it| found.verdict.headline.contains(it)), "{:?}", found.verdict);
    let remedies = &found.verdict.remedies;
    assert!(fitting(&found).count() > 0, "{remedies:?}");
    assert!(fitting(&found).all(|it| it.text.contains("fits what was recorded")), "{remedies:?}");
    assert!(finding(&found, "growth").unwrap().contains("(lowest points)"));
}

#[test]
fn a_job_that_caught_the_error_and_went_on_is_named() {
    let mut made = Recording::new();
    let line = made.line();
    made.event(EventKind::SegmentAlloc, 1000, 1000);
    made.alloc(line, 1000, 1000);
    made.oom(600, 500);
    assert_eq!(finding(&made.explained(None), "retries"), None);
    // What handles the error may fail as well.
    made.oom(900, 500);
    made.free(1000, 1000);
    made.alloc(line, 1000, 500);
    made.alloc(line, 1500, 100);
    let found = made.explained(None);
    let text = finding(&found, "retries").unwrap();
    assert!(text.contains("2 requests failed. That at event 2 is shown."), "{text}");
    assert!(text.contains("2 allocations followed"), "{text}");
    assert!(
        found.verdict.headline.contains("1.56 GiB at once (1000.00 MiB allocated"),
        "{found:?}"
    );
    // A later failure is the one that ended the job.
    made.oom(700, 900);
    let found = made.explained(None);
    let failure = found.failure.as_ref().unwrap();
    assert_eq!((failure.size_bytes, failure.live_bytes), (700 * MIB, 600 * MIB));
    assert_eq!(found.demand_bytes, 1900 * MIB);
    assert!(found.verdict.headline.contains("needs 1.27 GiB at once"), "{:?}", found.verdict);
}

#[test]
fn free_memory_of_private_pools_is_a_finding_and_promises_less() {
    let mut made = Recording::new();
    let line = made.line();
    let label = Label { pool: PoolId(0, 1), ..Label::default() };
    made.event(EventKind::SegmentAlloc, 1000, 600);
    made.trace.labels.label_event(0, label);
    made.alloc(line, 1000, 600);
    made.trace.labels.label_event(1, label);
    made.event(EventKind::SegmentAlloc, 3000, 300);
    made.alloc(line, 3000, 300);
    made.free(1000, 600);
    made.oom(400, 100);
    let found = made.explained(None);
    let layout = found.failure.as_ref().unwrap().layout.as_ref().unwrap();
    assert_eq!((layout.private_free_bytes, layout.empty_segment_bytes), (600 * MIB, 0));
    assert!(finding(&found, "pools").unwrap().starts_with("600.00 MiB of the free memory"));
    let remedies = &found.verdict.remedies;
    assert!(fitting(&found).count() > 0, "{remedies:?}");
    assert!(
        fitting(&found).all(|it| it.text.contains("without the private pools")),
        "{remedies:?}"
    );
}

#[test]
fn the_stream_of_the_request_cannot_use_what_is_free_on_the_largest() {
    let mut made = Recording::new();
    let line = made.line();
    made.event(EventKind::SegmentAlloc, 1000, 900);
    made.alloc(line, 1000, 500);
    made.event(EventKind::SegmentAlloc, 5000, 100).stream = StreamIndex(1);
    made.event(EventKind::Alloc, 5000, 100).stream = StreamIndex(1);
    made.event(EventKind::Oom, 50, 300).stream = StreamIndex(1);
    let found = made.explained(None);
    assert_eq!(found.verdict.cause, Cause::Fragmentation);
    let text = finding(&found, "streams").unwrap();
    assert!(text.starts_with("400.00 MiB") && text.contains("that of the request"), "{text}");
}

#[test]
fn what_pytorch_only_caches_is_no_fragmentation_under_a_limit() {
    let mut made = Recording::new();
    let line = made.line();
    for index in 0..8 {
        let (at, mib) = (1000 + 1000 * index, 200 + 20 * index);
        made.event(EventKind::SegmentAlloc, at, mib);
        made.alloc(line, at, mib);
        made.free(at, mib);
    }
    made.alloc(line, 8000, 340);
    let found = made.explained(Some(Bytes::mib(400)));
    assert_eq!(found.verdict.cause, Cause::None, "{:?}", found.verdict);
    assert!(found.verdict.headline.contains("needs 340.00 MiB"), "{:?}", found.verdict);
    let layout = found.peak_layout.as_ref().unwrap();
    assert_eq!(layout.empty_segment_bytes, layout.free_bytes);
}

#[test]
fn a_limit_is_said_to_fit_only_if_something_shows_it() {
    // Without segments, nothing is known of the recorded allocator.
    let mut made = Recording::new();
    let line = made.line();
    for index in 0..16 {
        made.alloc(line, 1000 + 100 * index, 96);
        made.alloc(line, 1096 + 100 * index, 4);
    }
    for index in 0..16 {
        made.free(1000 + 100 * index, 96);
    }
    made.alloc(line, 9000, 1500);
    let found = made.explained(Some(Bytes::mib(1610)));
    assert_eq!(found.verdict.cause, Cause::Fragmentation, "{:?}", found.verdict);
    assert!(found.verdict.headline.contains("a replay with PyTorch's defaults"), "{found:?}");
}

#[test]
fn what_is_said_to_fit_was_replayed_and_lines_with_headroom_come_first() {
    // The last segments of an expandable range do not fit under its own peak: PyTorch checks the limit
    // for all of a request.
    let mut made = Recording::new();
    let line = made.line();
    for index in 0..10 {
        made.alloc(line, 1000 + 1000 * index, 200);
    }
    for index in 0..40 {
        made.alloc(line, 20_000 + 1000 * index, 150);
    }
    let device = Device::open("sim").unwrap();
    let job = Job::of(&made.trace, 0);
    for fit in &made.explained(None).fits {
        let candidate = match fit.allocator.as_str() {
            "torch-expandable" => Candidate::preset(Preset::TorchExpandable),
            "vramp" => Candidate::preset(Preset::Vramp),
            _ => continue,
        };
        let limit = fit.smallest_limit_bytes.map(Bytes::new);
        let replayed = run(&job, &device, &candidate.config, limit).unwrap();
        assert_eq!(replayed.oom_at_event, None, "{fit:?}");
    }
    let candidates = Candidate::all(&job.recorded);
    let limits = [8000, 8020, 8100, 8200, 9000].map(Bytes::mib);
    let found =
        advise(&job, &device, &candidates, &limits.map(Limit::from), NonZeroUsize::MIN).unwrap();
    for (tried, candidate) in found.tried.iter().zip(&candidates) {
        for (said, &limit) in tried.limited.iter().zip(&limits) {
            let replayed = run(&job, &device, &candidate.config, Some(limit)).unwrap();
            let name = &tried.name;
            assert_eq!(said.fits, replayed.oom_at_event.is_none(), "{name} under {limit}");
        }
    }
    for index in 0..limits.len() {
        let tight = found.fitting(index).into_iter().map(|tried| tried.limited[index].tight);
        assert!(tight.is_sorted());
    }
}

#[test]
fn the_demand_of_a_recording_from_the_middle_is_a_lower_bound() {
    let mut made = Recording::new();
    let line = made.line();
    made.free(500, 100);
    made.event(EventKind::SegmentAlloc, 1000, 1000);
    made.alloc(line, 1000, 1000);
    made.oom(600, 500);
    let found = made.explained(None);
    assert!(found.verdict.headline.contains("needs at least 1.56 GiB at once"), "{found:?}");
}
