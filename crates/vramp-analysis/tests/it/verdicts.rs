//! The verdict on made recordings of which the cause is known.
use vramp::device::Device;
use vramp::{Bytes, DeviceAddr};
use vramp_analysis::explain::{Explanation, Options, explain};
use vramp_analysis::job::Job;
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
        explain(&job, &device, &Options { limit, ..Options::default() }).unwrap()
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
    assert!(found.verdict.remedies.iter().any(|it| it.starts_with("vramp fits")), "{found:?}");
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
    assert_eq!(found.verdict.remedies, Vec::<String>::new());
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
